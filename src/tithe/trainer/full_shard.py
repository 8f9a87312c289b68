"""FSDP2 around a policy: each rank holds a share of every parameter, its gradient and its optimizer state."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tithe.trainer.full_model import FullPolicy


def shard(policy: FullPolicy, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Shard layer by layer over the ranks of `group`, in place. Parameters stay float32 (they are the masters), the
    forward gathers them in `dtype`, gradients are averaged in float32: who wants their sum scales the loss."""
    kind = next(policy.parameters()).device.type
    mesh = DeviceMesh.from_group(group, kind)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = cast("Any", policy.model).model.layers
    for module in (*layers, policy):
        fully_shard(module, mesh=mesh, mp_policy=mixed)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together (a collective); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, value: Tensor) -> None:
    """target ← value, a whole tensor, of which a rank may hold only a share."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements)
    target.copy_(value)
