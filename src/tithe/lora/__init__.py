"""LoRA adapters: what one is (`LoraSpec`), which linears it sits on, fresh tensors, and PEFT's format on disk. The
versions that live on one base at once are its engine's (`tithe.engines.sequences.LiveVersion`)."""

from tithe.lora.files import disk_errors, save_tensors
from tithe.lora.init import init_tensors
from tithe.lora.peft_io import TENSOR_FILE, check_adapter, load_adapter, save_adapter, write_adapter_files
from tithe.lora.spec import ALL_LINEAR, LoraSpec, matches, module_of, resolve_targets, tensor_names

__all__ = [
    "ALL_LINEAR",
    "TENSOR_FILE",
    "LoraSpec",
    "check_adapter",
    "disk_errors",
    "init_tensors",
    "load_adapter",
    "matches",
    "module_of",
    "resolve_targets",
    "save_adapter",
    "save_tensors",
    "tensor_names",
    "write_adapter_files",
]
