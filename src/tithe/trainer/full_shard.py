"""FSDP2 around a policy: each rank holds a share of every parameter, its gradient and its optimizer state.

Sharded tensors come with sympy and a compiler's symbolic shapes, 100 MB and seconds: what needs them imports them, and
who never shards never does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from tithe.models import Ranks
from tithe.trainer.full_model import FullPolicy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(policy: FullPolicy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard layer by layer over the ranks, in place. Trained parameters stay float32 (they are the masters), the
    forward gathers them in `dtype`, gradients are averaged in float32: who wants their sum scales the loss."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    kind = next(policy.parameters()).device.type
    mesh = DeviceMesh.from_group(ranks.default_group(), kind)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = cast("Any", policy.model).model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    is_trained = any(parameter.requires_grad for parameter in policy.parameters())
    # a backward begins with the head, so that embeddings and head stay together until then; a reference has none
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=not is_trained)


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


def copy_whole(target: Tensor, value: Tensor) -> None:
    """target ← value, a whole tensor, of which a rank may hold only a share."""
    if _is_sharded(target):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        value = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements)
    target.copy_(value)
