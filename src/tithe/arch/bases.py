"""In which format a base keeps every tensor: as published, as files have it, or as a named format would.

    name           experts of a mixture   other linears     the rest
    ────────────   ────────────────────   ───────────────   ──────────────────────────────────────────────────────────
    bf16           BF16                   BF16              BF16
    fp8            FP8_BLOCK              FP8_BLOCK         BF16                                   (DeepSeek-V3)
    int4           INT4_PACKED            BF16              BF16                                   (Kimi-K2-Thinking)
    int4-linears   INT4_PACKED            INT4_PACKED       BF16                                   (llm-compressor)
    mxfp4          MXFP4                  BF16              BF16                                   (gpt-oss)
    nvfp4          NVFP4                  BF16              BF16

In a dense model, which has no experts, all linears take the format. The head is never packed, routers' correction
biases are float32, as published.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tithe.arch.checkpoint import Checkpoint
from tithe.arch.formats import StoredFormat, TensorFormat
from tithe.arch.quantization import read_quantization
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import Tensor, TensorFamily, TensorGroup
from tithe.errors import ConfigError

PUBLISHED: Final = "published"

_NAMED: Final[dict[str, tuple[TensorFormat, bool]]] = {
    "bf16": (TensorFormat.BF16, True),
    "fp8": (TensorFormat.FP8_BLOCK, True),
    "int4": (TensorFormat.INT4_PACKED, False),
    "int4-linears": (TensorFormat.INT4_PACKED, True),
    "mxfp4": (TensorFormat.MXFP4, False),
    "nvfp4": (TensorFormat.NVFP4, False),
}
"""Format, and whether linears outside the experts of a mixture take it too."""

BASES: Final = (PUBLISHED, *_NAMED)
"""What `--base` takes."""

_DTYPES: Final = {"float32": TensorFormat.F32, "float16": TensorFormat.F16, "bfloat16": TensorFormat.BF16}


class Grain(enum.Enum):
    """Which tensors surely share a format, so that one of them need be asked."""

    FAMILY = "family"
    """All of a family."""
    DIGITS = "digits"
    """Those of a family whose layers, and whose experts, have equally many digits."""
    TENSOR = "tensor"
    """None: each has to be asked."""


@dataclass(frozen=True)
class Base:
    """Formats of a base. `format_of` says that of one tensor."""

    name: str
    format_of: Callable[[Tensor], StoredFormat]
    grain: Grain = Grain.FAMILY


def make_base(name: str, config: Mapping[str, Any]) -> Base:
    """The base called `name` (one of `BASES`) of a config's model. `ConfigError` names the nearest one."""
    if name == PUBLISHED:
        return published_base(config)
    if name not in _NAMED:
        near = difflib.get_close_matches(name.lower(), BASES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--base {name}: there is no such format.{hint} Known: {', '.join(BASES)}", key="base")
    kind, takes_all = _NAMED[name]
    is_moe = ArchSpec.from_config(config).is_moe

    def format_of(tensor: Tensor) -> StoredFormat:
        family = tensor.family
        is_expert = family.group is TensorGroup.ROUTED_EXPERTS
        is_taken = family.is_linear and family.group is not TensorGroup.HEAD and (is_expert or takes_all or not is_moe)
        return StoredFormat(kind if is_taken else family.format)

    return Base(name, format_of)


def published_base(config: Mapping[str, Any]) -> Base:
    """As the config says: its `quantization_config`, and its dtype for what that leaves alone."""
    quantization = read_quantization(config)
    dtype = config.get("dtype", config.get("torch_dtype"))
    plain = _DTYPES.get(dtype, TensorFormat.BF16) if isinstance(dtype, str) else TensorFormat.BF16

    def plain_format(family: TensorFamily) -> StoredFormat:
        return StoredFormat(plain if family.format is TensorFormat.BF16 else family.format)

    if quantization is None:
        return Base(PUBLISHED, lambda tensor: plain_format(tensor.family))

    def format_of(tensor: Tensor) -> StoredFormat:
        stored = quantization.format_of(tensor)
        return stored if stored.kind.is_compound else plain_format(tensor.family)

    return Base(PUBLISHED, format_of, Grain.DIGITS if quantization.is_number_blind else Grain.TENSOR)


def checkpoint_base(checkpoint: Checkpoint) -> Base:
    """As a checkpoint's files have it, tensor by tensor."""
    return Base(PUBLISHED, lambda tensor: checkpoint.tensors[tensor.name].stored, Grain.TENSOR)
