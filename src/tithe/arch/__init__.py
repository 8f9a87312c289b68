"""Checkpoints and architectures: configuration → tensor names, shapes, formats and bytes. Free of torch.

`read_checkpoint` opens a GGUF file or a Hugging Face directory as a `Checkpoint` whose `TensorEntry`s are memory-mapped
and read lazily; `ArchSpec` and the functions on it need no file and no numpy, for the planner. `account` is the one
byte account of a base by tensor group and rank, `Shard` the one rule of what a rank holds.
"""

from tithe.arch.accounting import Account, HeldTensor, RankAccount, Tally, account, family_bytes, iter_held
from tithe.arch.architectures import ARCHITECTURES, Architecture
from tithe.arch.bases import BASES, Base, checkpoint_base, make_base, published_base
from tithe.arch.buildable import build_obstacles, check_buildable
from tithe.arch.checkpoint import Checkpoint, GenerationInfo, TensorEntry, base_bytes, combine_digests
from tithe.arch.described import OtherAttention
from tithe.arch.exchange import EXCHANGE_PAIRS, exchange_bytes, exchange_rows
from tithe.arch.formats import StoredFormat, TensorFormat, grouped_bytes
from tithe.arch.inspection import Target, find_target
from tithe.arch.known import known_config, known_names
from tithe.arch.locate import describe_checkpoint, find_demo_model, read_checkpoint, read_classifier
from tithe.arch.quantization import Quantization, read_quantization
from tithe.arch.sharding import Shard, owner_of, tensor_parallel_share
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import (
    TensorFamily,
    TensorGroup,
    attended_bytes,
    iter_tensors,
    kv_bytes_per_token,
    linear_shapes,
    sequence_bytes,
    tensor_families,
    tensor_shapes,
)

__all__ = [
    "ARCHITECTURES",
    "BASES",
    "EXCHANGE_PAIRS",
    "Account",
    "ArchSpec",
    "Architecture",
    "Base",
    "Checkpoint",
    "GenerationInfo",
    "HeldTensor",
    "OtherAttention",
    "Quantization",
    "RankAccount",
    "Shard",
    "StoredFormat",
    "Tally",
    "Target",
    "TensorEntry",
    "TensorFamily",
    "TensorFormat",
    "TensorGroup",
    "account",
    "attended_bytes",
    "base_bytes",
    "build_obstacles",
    "check_buildable",
    "checkpoint_base",
    "combine_digests",
    "describe_checkpoint",
    "exchange_bytes",
    "exchange_rows",
    "family_bytes",
    "find_demo_model",
    "find_target",
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
    "read_classifier",
    "read_quantization",
    "sequence_bytes",
    "tensor_families",
    "tensor_parallel_share",
    "tensor_shapes",
]
