"""Tiny checkpoints with packed tensors, as each publisher writes them, and their dequantized twins.

    directory = build_packed(tmp_path / "m", "qwen3", "int4")    # config with quantization_config, packed safetensors
    transformers_twin(values_of(directory))                      # the same numbers in float32, without quantization

Weights are quantized here, plainly and in numpy; the twin's numbers are what `tithe.quant.reference_parts` reads back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoints import random_weights, tiny_config, write_tokenizer
from tithe.arch import (
    ArchSpec,
    StoredFormat,
    TensorFormat,
    iter_tensors,
    known_config,
    read_quantization,
)
from tithe.arch.tensors import Tensor
from tithe.quant.reference import round_to_bf16, to_bf16_bits
from tithe.quant.reference_parts import E2M1, dequantize_parts

Parts = dict[str, np.ndarray]

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
METHODS: dict[str, dict[str, Any]] = {
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        "ignore": ["lm_head"],
    },
    "int4-experts": known_config("kimi-k2-thinking")["quantization_config"],
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}
"""`quantization_config` by a short name."""

_SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128},
    "glm4_moe": {"moe_intermediate_size": 128},
    "deepseek_v3": {"moe_intermediate_size": 128, "q_lora_rank": 64},
}
"""Widths that hold whole groups of every format."""


def packed_config(architecture: str, method: str | None = None, **overrides: Any) -> dict[str, Any]:
    """config.json of a 2-layer model of hidden size 128, made by the real config class; unquantized without method."""
    config = tiny_config(architecture, **(_SIZES | _OWN_SIZES.get(architecture, {}) | overrides))
    config["dtype"] = "bfloat16"
    return config | ({"quantization_config": METHODS[method]} if method else {})


def build_packed(
    directory: Path,
    architecture: str = "llama",
    method: str | None = None,
    *,
    seed: int = 0,
    shared_scale: bool = True,
    bf16_scales: bool = False,
    **overrides: Any,
) -> Path:
    """Write a packed directory, and its twin in float32 beside it (`values_of`). Without method: BF16.

    `shared_scale`: fused linears have one global scale (NVFP4), as ModelOpt exports them. `bf16_scales`: those of FP8
    blocks, as Qwen3's releases have them.
    """
    config = packed_config(architecture, method, **overrides)
    spec, quantization = ArchSpec.from_config(config), read_quantization(config)
    weights = random_weights(spec, seed)
    published: Parts = {}
    values: Parts = {}
    for tensor in iter_tensors(spec):
        stored = quantization.format_of(tensor) if quantization else StoredFormat(tensor.family.format)
        if not stored.kind.is_compound:
            exact = tensor.family.format is TensorFormat.F32
            published[tensor.name] = weights[tensor.name] if exact else to_bf16_bits(weights[tensor.name])
            values[tensor.name] = weights[tensor.name] if exact else round_to_bf16(weights[tensor.name])
            continue
        largest = _largest(tensor, weights) if shared_scale else None
        parts, numbers = _publish(tensor, stored, weights[tensor.name], largest)
        if bf16_scales:
            parts[".weight_scale_inv"] = to_bf16_bits(parts[".weight_scale_inv"])
            numbers = dequantize_parts(parts, stored)
        published |= {tensor.module + suffix: part for suffix, part in parts.items()}
        values[tensor.name] = numbers
    _save(directory, config, published)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    _save(values_of(directory), plain | {"dtype": "float32"}, values)
    return directory


def build_large(directory: Path, architecture: str, method: str | None = None, **overrides: Any) -> Path:
    """Write a packed directory of any size fast: the same weights again and again, for what counts bytes alone."""
    config = packed_config(architecture, method, **overrides)
    spec, quantization = ArchSpec.from_config(config), read_quantization(config)
    published: Parts = {}
    made: dict[tuple[StoredFormat, tuple[int, ...]], Parts] = {}
    for tensor in iter_tensors(spec):
        stored = quantization.format_of(tensor) if quantization else StoredFormat(tensor.family.format)
        key = (stored, tensor.family.matrix)
        if key not in made:
            w = np.random.default_rng(0).standard_normal(tensor.family.shape, dtype=np.float32) * np.float32(0.02)
            made[key] = _publish(tensor, stored, w, None)[0] if stored.kind.is_compound else {"": to_bf16_bits(w)}
        ends = made[key].items()
        published |= {tensor.name if not suffix else tensor.module + suffix: part for suffix, part in ends}
    _save(directory, config, published)
    return directory


def values_of(directory: Path) -> Path:
    """Where `build_packed` puts the twin."""
    return directory.with_name(f"{directory.name}-values")


def _save(directory: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    import torch
    from safetensors.torch import save_file

    def tensor(name: str, array: np.ndarray) -> torch.Tensor:
        array = np.array(array, order="C")
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        is_fp8 = (name.endswith(".weight") and f"{name}_scale_inv" in arrays) or (
            name.endswith(".weight_scale") and array.dtype == np.uint8
        )
        return torch.from_numpy(array).view(torch.float8_e4m3fn) if is_fp8 else torch.from_numpy(array)

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor(name, array) for name, array in arrays.items()}, directory / "model.safetensors")
    write_tokenizer(directory)


def _publish(tensor: Tensor, stored: StoredFormat, w: np.ndarray, largest: float | None) -> tuple[Parts, np.ndarray]:
    """The parts of one tensor, and the numbers they mean in the tensor's unquantized shape."""
    quantize = _QUANTIZE[stored.kind]
    if not tensor.family.is_stacked:
        parts = quantize(w, stored, largest)
        return parts, dequantize_parts(parts, stored, gptq_v2=stored.gptq_v2)
    each = [quantize(np.ascontiguousarray(one.T), stored, largest) for one in w]
    values = np.stack([dequantize_parts(parts, stored).T for parts in each])
    return {suffix: np.stack([parts[suffix] for parts in each]) for suffix in each[0]}, values


def _largest(tensor: Tensor, weights: Mapping[str, np.ndarray]) -> float:
    """max |w| over the linears that a runtime fuses with this one."""
    block, _, part = tensor.module.rpartition(".")
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")):
        names = [f"{block}.{one}.weight" for one in fused]
        if part in fused and all(name in weights for name in names):
            return max(float(np.abs(weights[name]).max()) for name in names)
    return float(np.abs(weights[tensor.name]).max())


# ------------------------------------------------------------------ one matrix [out, in] in every format


def _int4(w: np.ndarray, stored: StoredFormat, _largest: float | None) -> Parts:
    grouped = w.reshape(len(w), -1, stored.group or 32)
    bits = to_bf16_bits(np.abs(grouped).max(axis=2) / 7)
    scale = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    q = np.clip(np.rint(grouped / scale[..., None]), -8, 7).astype(np.int64) + 8
    shape = np.array(w.shape, np.int64)
    return {".weight_packed": _words(q.reshape(len(w), -1, 8)), ".weight_scale": bits, ".weight_shape": shape}


def _fp8(w: np.ndarray, _stored: StoredFormat, _largest: float | None) -> Parts:
    rows, columns = (-(-size // 128) for size in w.shape)
    scale = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            scale[i, j] = np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max() / 448
    wide = scale.repeat(128, axis=0)[: w.shape[0]].repeat(128, axis=1)[:, : w.shape[1]]
    return {".weight": _e4m3(w / wide), ".weight_scale_inv": scale}


def _mxfp4(w: np.ndarray, _stored: StoredFormat, _largest: float | None) -> Parts:
    grouped = w.reshape(len(w), -1, 32)
    exponent = np.floor(np.log2(np.abs(grouped).max(axis=2))) - 2
    codes = _e2m1(grouped / np.exp2(exponent)[..., None])
    return {"_blocks": _two_a_byte(codes), "_scales": (exponent + 127).astype(np.uint8)}


def _nvfp4(w: np.ndarray, _stored: StoredFormat, largest: float | None) -> Parts:
    whole = np.float32((largest or float(np.abs(w).max())) / (448 * 6))
    grouped = w.reshape(len(w), -1, 16)
    codes = _e4m3(np.abs(grouped).max(axis=2) / 6 / whole)
    scale = _from_e4m3(codes)[..., None] * whole
    packed = _two_a_byte(_e2m1(grouped / scale)).reshape(len(w), -1)
    ones = np.ones((), np.float32)
    return {".weight": packed, ".weight_scale": codes, ".weight_scale_2": ones * whole, ".input_scale": ones}


def _gptq(w: np.ndarray, stored: StoredFormat, _largest: float | None) -> Parts:
    q, scale, zero = _asymmetric(w, stored.group or 128)
    kept = zero if stored.gptq_v2 else zero - 1
    return {
        ".qweight": _words(q.T.reshape(-1, 8, len(w)).swapaxes(1, 2)),
        ".qzeros": _words(kept.T.reshape(zero.shape[1], -1, 8)),
        ".scales": np.ascontiguousarray(scale.T),
        ".g_idx": (np.arange(w.shape[1]) // (stored.group or 128)).astype(np.int32),
    }


def _awq(w: np.ndarray, stored: StoredFormat, _largest: float | None) -> Parts:
    q, scale, zero = _asymmetric(w, stored.group or 128)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        ".qweight": _words(q.T.reshape(w.shape[1], -1, 8)[..., order]),
        ".qzeros": _words(zero.T.reshape(zero.shape[1], -1, 8)[..., order]),
        ".scales": np.ascontiguousarray(scale.T),
    }


def _asymmetric(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [N, K] in 0..15, scale float16 and zero [N, K/group] in 1..15."""
    grouped = w.reshape(len(w), -1, group)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, 15).astype(np.int64)
    q = np.clip(np.rint(grouped / scale.astype(np.float32)[..., None]) + zero[..., None], 0, 15)
    return q.reshape(w.shape).astype(np.int64), scale, zero


_QUANTIZE: dict[TensorFormat, Callable[[np.ndarray, StoredFormat, float | None], Parts]] = {
    TensorFormat.INT4_PACKED: _int4,
    TensorFormat.FP8_BLOCK: _fp8,
    TensorFormat.MXFP4: _mxfp4,
    TensorFormat.NVFP4: _nvfp4,
    TensorFormat.GPTQ: _gptq,
    TensorFormat.AWQ: _awq,
}


def _words(nibbles: np.ndarray) -> np.ndarray:
    """[…, 8] in 0..15, the first lowest → int32 […]."""
    shifted = nibbles.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def _e2m1(x: np.ndarray) -> np.ndarray:
    """The nearest codes."""
    return np.abs(x[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)


def _two_a_byte(codes: np.ndarray) -> np.ndarray:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _e4m3(x: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_e4m3(codes: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
