"""A checkpoint's `quantization_config` as a typed record that says for every tensor which format it has.

    quant_method         format        covers
    ──────────────────   ───────────   ──────────────────────────────────────────────────────────────────────────────
    compressed-tensors   INT4_PACKED   the targets of its groups without `ignore` (Kimi-K2-Thinking: routed experts)
    fp8                  FP8_BLOCK     linears but `modules_to_not_convert` and the head (DeepSeek-V3, MiniMax-M2)
    mxfp4                MXFP4         routed experts (gpt-oss)
    modelopt             NVFP4         linears without `ignore` (NVIDIA's releases)
    gptq, awq            GPTQ, AWQ     linears but `modules_to_not_convert` and the head

Norms, routers, biases and the embedding are packed by none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tithe.arch.config_reader import ConfigReader
from tithe.arch.files import quote
from tithe.arch.formats import StoredFormat, TensorFormat
from tithe.arch.patterns import Dialect, ModuleList
from tithe.arch.tensors import Tensor, TensorGroup
from tithe.errors import ModelError

_HEAD: Final = "lm_head"


@dataclass(frozen=True)
class Rule:
    """Linears that a group of a quantization config targets, and their format."""

    stored: StoredFormat
    targets: ModuleList | None = None
    """`None`: all linears."""


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's config says about formats.

    Example: DeepSeek-V3's has the method "fp8", one rule for all linears and ignores "lm_head", so `format_of` gives
    FP8_BLOCK for ``model.layers.0.self_attn.o_proj.weight`` and BF16 for the embedding.
    """

    method: str
    rules: tuple[Rule, ...]
    """The first that fits decides."""
    ignored: ModuleList
    experts_only: bool = False

    def format_of(self, tensor: Tensor) -> StoredFormat:
        """The format of one tensor; that of an unquantized checkpoint when no rule covers it."""
        family = tensor.family
        if family.is_linear and not (self.experts_only and family.group is not TensorGroup.ROUTED_EXPERTS):
            module = tensor.module
            if not self.ignored.has(module):
                for rule in self.rules:
                    if rule.targets is None or rule.targets.has(module):
                        return rule.stored
        return StoredFormat(family.format)

    @property
    def is_number_blind(self) -> bool:
        """As `ModuleList.is_number_blind`, for all lists together."""
        lists = (self.ignored, *(rule.targets for rule in self.rules if rule.targets is not None))
        return all(modules.is_number_blind for modules in lists)

    @property
    def formats(self) -> tuple[StoredFormat, ...]:
        """The packed formats that its rules name."""
        return tuple(rule.stored for rule in self.rules)


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The record of a config, or `None` when it has none. `ModelError` names what is not read and why."""
    if not config.get("quantization_config"):
        return None
    read = ConfigReader(config).sub("quantization_config")
    method = read.text("quant_method")
    if method not in _READERS:
        raise ModelError(
            f"config: quantization_config quant_method is {quote(method)}, which Tithe does not read; "
            f"known: {', '.join(_READERS)}. Use the model's BF16 safetensors or one of these releases"
        )
    return _READERS[method](read)


def _compressed_tensors(read: ConfigReader) -> Quantization:
    groups = read.sub("config_groups").config
    if not groups:
        raise ModelError("config: quantization_config config_groups is empty; nothing says what is quantized")
    ignored = ModuleList(read.texts("ignore") or (), Dialect.COMPRESSED_TENSORS)
    rules = tuple(_compressed_group(read, ConfigReader(groups).sub(name)) for name in groups)
    return Quantization("compressed-tensors", rules, ignored)


def _compressed_group(read: ConfigReader, group: ConfigReader) -> Rule:
    layout = group.text("format", read.text("format"))
    weights = group.sub("weights")
    found = tuple(str(weights.config.get(key)) for key in ("type", "num_bits", "strategy"))
    if layout != "pack-quantized" or found != ("int", "4", "group") or not weights.flag("symmetric", default=True):
        kind = "symmetric" if weights.config.get("symmetric", True) is True else "asymmetric"
        raise ModelError(
            f"config: quantization_config: compressed-tensors {quote(layout)} with {kind} {' '.join(found)} weights is "
            f"not read; only pack-quantized with symmetric int 4 group weights is"
        )
    stored = StoredFormat(TensorFormat.INT4_PACKED, _group_size(weights.size("group_size"), 32))
    targets = group.texts("targets") or ("Linear",)
    return Rule(stored, None if "Linear" in targets else ModuleList(targets, Dialect.COMPRESSED_TENSORS))


def _fp8(read: ConfigReader) -> Quantization:
    block = read.config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or block[0] != block[1]:
        raise ModelError(
            f"config: quantization_config weight_block_size is {quote(str(block))}; fp8 with one scale per square "
            f"block such as [128, 128] is read, other fp8 is not"
        )
    side = ConfigReader({"weight_block_size": block[0]}).size("weight_block_size", limit=65_536)
    stored = StoredFormat(TensorFormat.FP8_BLOCK, _group_size(side, 128))
    return Quantization("fp8", (Rule(stored),), _not_converted(read, Dialect.TRANSFORMERS))


def _mxfp4(read: ConfigReader) -> Quantization:
    rule = Rule(StoredFormat(TensorFormat.MXFP4))
    return Quantization("mxfp4", (rule,), _not_converted(read, Dialect.TRANSFORMERS), experts_only=True)


def _modelopt(read: ConfigReader) -> Quantization:
    algorithm = read.text("quant_algo")
    if algorithm != "NVFP4":
        raise ModelError(
            f"config: quantization_config quant_algo is {quote(algorithm)}; of modelopt only NVFP4 is read"
        )
    ignored = read.texts("ignore") or read.texts("exclude_modules") or ()
    return Quantization("modelopt", (Rule(StoredFormat(TensorFormat.NVFP4)),), ModuleList(ignored, Dialect.GLOB))


def _gptq(read: ConfigReader) -> Quantization:
    if read.config.get("dynamic"):
        raise ModelError("config: quantization_config dynamic: GPTQ with formats that differ by module is not read")
    layout = read.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"config: quantization_config checkpoint_format is {quote(layout)}; known: gptq, gptq_v2")
    rule = Rule(
        StoredFormat(
            TensorFormat.GPTQ,
            _four_bit_group(read),
            act_order=read.flag("desc_act"),
            gptq_v2=layout == "gptq_v2",
        )
    )
    return Quantization("gptq", (rule,), _not_converted(read, Dialect.TRANSFORMERS, _HEAD))


def _awq(read: ConfigReader) -> Quantization:
    version = read.text("version", "gemm").lower()
    if version != "gemm" or not read.flag("zero_point", default=True):
        raise ModelError(f"config: quantization_config: of awq, gemm with zero points is read, not {quote(version)}")
    rule = Rule(StoredFormat(TensorFormat.AWQ, _four_bit_group(read)))
    return Quantization("awq", (rule,), _not_converted(read, Dialect.PART, _HEAD))


_READERS: Final[dict[str, Callable[[ConfigReader], Quantization]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}


def _four_bit_group(read: ConfigReader) -> int | None:
    bits = read.size("bits", 4)
    if bits != 4:
        raise ModelError(f"config: quantization_config bits is {bits}; only 4 is read")
    return _group_size(read.size("group_size", 128), 128)


def _group_size(size: int, usual: int) -> int | None:
    """`None` for the usual size, so that equal formats compare equal."""
    return None if size == usual else size


def _not_converted(read: ConfigReader, dialect: Dialect, *always: str) -> ModuleList:
    """The modules left alone: those listed and `always`; the head when nothing is listed.

    MiniMax calls the list `ignored_layers`.
    """
    listed = read.texts("modules_to_not_convert")
    listed = read.texts("ignored_layers") if listed is None else listed
    return ModuleList((*((_HEAD,) if listed is None else listed), *always), dialect)
