"""Fresh adapter tensors: the same seed gives the same tensors on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tithe.lora.spec import LoraSpec, resolve_targets, tensor_names


def init_tensors(spec: LoraSpec, shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    """A drawn as PEFT draws it (Kaiming uniform, a = √5: uniform in ±1/√in), B zero, so that the delta begins at 0.

    `shapes` gives (out, in) per module path; the modules that `spec.target_modules` names are initialised. The result
    is keyed by PEFT name, float32 on the CPU: A [r, in], B [out, r].

    One CPU generator seeded with `seed` draws the A matrices one after another in ascending order of module path (as
    text), whatever the order of `shapes`. Raises `AdapterError` as `resolve_targets` does.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module in sorted(resolve_targets(spec.target_modules, shapes)):
        out_features, in_features = shapes[module]
        name_a, name_b = tensor_names(module)
        rank = spec.rank(module)
        a = torch.empty(rank, in_features, dtype=torch.float32)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        tensors[name_a] = a
        tensors[name_b] = torch.zeros(out_features, rank, dtype=torch.float32)
    return tensors
