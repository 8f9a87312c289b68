"""FSDP2 around a policy: each rank holds a share of every parameter, its gradient and its optimizer state.

A rank's share are the entries of the first dimension that `torch.chunk` would give it: rows of a matrix, experts of a
stack. It loads these and no others (`load_share`).

Sharded tensors come with sympy and a compiler's symbolic shapes, 100 MB and seconds: what needs them imports them, and
who never shards never does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from tithe.arch import read_checkpoint
from tithe.models import Ranks
from tithe.trainer.full_model import FullPolicy, empty_full
from tithe.trainer.full_weights import Weights
from tithe.utils.memory import release_unused

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def load_share(
    directory: Path, n_tokens: int, ranks: Ranks, dtype: torch.dtype, *, checkpointing: bool, is_trained: bool
) -> FullPolicy:
    """A directory's model, sharded over the ranks, of which each has read its own share. Weights have the bits of
    `load_full`; those of a policy that is not trained are in the forward's `dtype`, without gradients.

    Raises `ModelError` for what transformers refuses, and for tensors that are missing or cannot be trained.
    """
    policy = empty_full(directory, n_tokens, checkpointing=checkpointing and is_trained)
    if not is_trained:
        policy = in_dtype(policy, dtype)
    shard(policy, ranks, dtype)
    _fill(policy, Weights(read_checkpoint(directory)))
    release_unused()
    ranks.wait_for_all()  # reading may take one of them much longer
    return policy


def in_dtype(policy: FullPolicy, dtype: torch.dtype) -> FullPolicy:
    """The policy itself with parameters of another dtype and without gradients."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy.requires_grad_(requires_grad=False).eval()


def shard(policy: FullPolicy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard layer by layer over the ranks, in place. Trained parameters stay float32 (they are the masters), the
    forward gathers them in `dtype`, gradients are averaged in float32: who wants their sum scales the loss."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    mesh = DeviceMesh.from_group(ranks.default_group(), "cpu")
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = cast("Any", policy.model).model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    is_trained = any(parameter.requires_grad for parameter in policy.parameters())
    # a backward begins with the head, so that embeddings and head stay together until then; a reference has none
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=not is_trained)


def _fill(policy: FullPolicy, weights: Weights) -> None:
    """Give memory to this rank's share of a policy on the meta device, and read it. A tied tensor stays one."""
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = _share_of(parameter, name.removeprefix("model."), weights)
        state[name] = made[id(parameter)]
    for name in policy.kept_buffers:
        like = policy.model.get_buffer(name)
        state[f"model.{name}"] = torch.empty(like.shape, dtype=like.dtype)
        weights.fill(name, range(len(like)), state[f"model.{name}"])
    policy.load_state_dict(state, assign=True)


def _share_of(parameter: nn.Parameter, name: str, weights: Weights) -> nn.Parameter:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    assert isinstance(parameter, DTensor)
    own = torch.empty(parameter.to_local().shape, dtype=parameter.dtype)
    weights.fill(name, own_rows(parameter), own)
    mesh, places = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    together = DTensor.from_local(own, mesh, places, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(together, requires_grad=parameter.requires_grad)


def let_go(policy: FullPolicy) -> None:
    """After a forward that no backward follows: embeddings and head go back to their shares, on all ranks alike."""
    reshard = getattr(policy, "reshard", None)  # a method that sharding adds
    if reshard is not None:
        reshard()


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """There are none while nobody has imported their class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together (a collective); any other as it is."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def own_numbers(tensor: Tensor) -> int:
    """How many numbers of a tensor this rank holds."""
    return tensor.to_local().numel() if _is_sharded(tensor) else tensor.numel()


def own_rows(tensor: DTensor) -> range:
    """Which entries of a sharded tensor's first dimension this rank holds."""
    mesh, n = tensor.device_mesh, tensor.shape[0]
    each = -(-n // mesh.size())
    start = min(mesh.get_local_rank() * each, n)
    rows = range(start, min(start + each, n))
    assert len(rows) == len(tensor.to_local()), f"{tensor.placements} is another way of sharding"
    return rows


def copy_whole(target: Tensor, value: Tensor) -> None:
    """target ← value, a whole tensor, of which a rank may hold only a share: it reads no more of it."""
    if _is_sharded(target):
        rows = own_rows(target)
        target.to_local().copy_(value[rows.start : rows.stop])
    else:
        target.copy_(value)
