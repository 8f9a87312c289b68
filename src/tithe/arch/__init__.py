"""Checkpoints and architectures: configuration → tensor names, shapes, formats and bytes. Free of torch.

`read_checkpoint` opens a GGUF file or a Hugging Face directory as a `Checkpoint` whose `TensorEntry`s are memory-mapped
and read lazily; `ArchSpec` and the functions on it need no file and no numpy, for the planner. `account` is the one
byte account of a base by tensor group and rank, `Shard` the one rule of what a rank holds.
"""

from tithe.arch.accounting import Account, HeldTensor, RankAccount, Tally, account, iter_held
from tithe.arch.architectures import ARCHITECTURES, Architecture
from tithe.arch.bases import BASES, Base, checkpoint_base, make_base, published_base
from tithe.arch.buildable import build_obstacles, check_buildable
from tithe.arch.checkpoint import Checkpoint, GenerationInfo, TensorEntry, base_bytes, combine_digests
from tithe.arch.formats import StoredFormat, TensorFormat, grouped_bytes
from tithe.arch.known import known_config, known_names
from tithe.arch.locate import describe_checkpoint, find_demo_model, read_checkpoint
from tithe.arch.quantization import Quantization, read_quantization
from tithe.arch.sharding import Shard, owner_of
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import (
    TensorFamily,
    TensorGroup,
    iter_tensors,
    kv_bytes_per_token,
    linear_shapes,
    tensor_families,
    tensor_shapes,
)

__all__ = [
    "ARCHITECTURES",
    "BASES",
    "Account",
    "ArchSpec",
    "Architecture",
    "Base",
    "Checkpoint",
    "GenerationInfo",
    "HeldTensor",
    "Quantization",
    "RankAccount",
    "Shard",
    "StoredFormat",
    "Tally",
    "TensorEntry",
    "TensorFamily",
    "TensorFormat",
    "TensorGroup",
    "account",
    "base_bytes",
    "build_obstacles",
    "check_buildable",
    "checkpoint_base",
    "combine_digests",
    "describe_checkpoint",
    "find_demo_model",
    "grouped_bytes",
    "iter_held",
    "iter_tensors",
    "known_config",
    "known_names",
    "kv_bytes_per_token",
    "linear_shapes",
    "make_base",
    "owner_of",
    "published_base",
    "read_checkpoint",
    "read_quantization",
    "tensor_families",
    "tensor_shapes",
]
