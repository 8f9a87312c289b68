"""Checkpoints and architectures: configuration → tensor names, shapes, formats and bytes. Free of torch.

`read_checkpoint` opens a GGUF file or a Hugging Face directory as a `Checkpoint` whose `TensorEntry`s are memory-mapped
and read lazily; `ArchSpec` and the functions on it need no file and no numpy, for the planner.
"""

from tithe.arch.architectures import Architecture
from tithe.arch.buildable import check_buildable
from tithe.arch.checkpoint import Checkpoint, GenerationInfo, TensorEntry, base_bytes
from tithe.arch.formats import StoredFormat, TensorFormat, grouped_bytes
from tithe.arch.locate import find_demo_model, read_checkpoint
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import kv_bytes_per_token, linear_shapes, tensor_shapes

__all__ = [
    "ArchSpec",
    "Architecture",
    "Checkpoint",
    "GenerationInfo",
    "StoredFormat",
    "TensorEntry",
    "TensorFormat",
    "base_bytes",
    "check_buildable",
    "find_demo_model",
    "grouped_bytes",
    "kv_bytes_per_token",
    "linear_shapes",
    "read_checkpoint",
    "tensor_shapes",
]
