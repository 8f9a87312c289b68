"""The linear head of a reward model.

Shape legend: _N rows, _H the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tithe.models import Head


@dataclass(frozen=True, eq=False)
class ScoreHead:
    """`weight` [H] and `bias` [1], float32.

    A score is weight·norm(x) + bias: the final norm is the base's own. The dot product is summed in float64 and row by
    row, so that a score does not depend on how many are computed at once.
    """

    weight: Tensor
    bias: Tensor

    def score(self, head: Head, rows_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(scores [N], normed rows [N, H]), float32, of residual rows; the second is the scores' derivative by the
        weight. On the lane."""
        normed_NH = head.normed(rows_NH).float()
        score_N = (normed_NH.double() * self.weight.double()).sum(-1) + self.bias.double()
        return score_N.float(), normed_NH

    def memory_bytes(self) -> int:
        """Of both tensors."""
        return 4 * (self.weight.numel() + self.bias.numel())
