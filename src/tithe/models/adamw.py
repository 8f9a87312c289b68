"""AdamW (arXiv 1711.05101) on named float32 masters, in place and one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

EPS = 1e-8
"""Added to the root of the second moment, as in Adam's paper (arXiv 1412.6980)."""


def clip(grads: Mapping[str, Tensor], norm: float, limit: float) -> Mapping[str, Tensor]:
    """Scale gradients of a global norm in place to at most `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    scale = min(1.0, limit / (norm + 1e-6))
    return {name: grad.mul_(scale) for name, grad in grads.items()}


class AdamW:
    """The same numbers, bit for bit, as `torch.optim.AdamW` without `foreach`, whose first instance imports torch's
    compiler: 168 MB and seconds of every process that trains.

    Tensors may be shares of sharded ones: every operation works element by element.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, betas: tuple[float, float], weight_decay: float) -> None:
        """`masters` float32; `step` changes them."""
        self._masters, self._betas, self._weight_decay = dict(masters), betas, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        """Running means of gradient and squared gradient by master, in its shape; empty before the first step."""
        self.steps = 0
        """Steps that were made: what the moments' bias is corrected by."""

    def step(self, grads: Mapping[str, Tensor], rate: float) -> None:
        """One step on the masters that `grads` names."""
        self.steps += 1
        first, second = self._betas
        size = rate / (1 - first**self.steps)
        root = math.sqrt(1 - second**self.steps)
        with torch.no_grad():
            for name, grad in grads.items():
                master = self._masters[name]
                if name not in self.moments:
                    self.moments[name] = (torch.zeros_like(master), torch.zeros_like(master))
                mean, square = self.moments[name]
                master.mul_(1 - rate * self._weight_decay)
                mean.lerp_(grad, 1 - first)
                square.mul_(second).addcmul_(grad, grad, value=1 - second)
                master.addcdiv_(mean, (square.sqrt() / root).add_(EPS), value=-size)
