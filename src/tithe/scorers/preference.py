"""Bradley–Terry: the probability that one reply is preferred is σ of the difference of their scores.

Bradley and Terry, Biometrika 39 (1952); as a reward model's loss in arXiv:1706.03741 and 2203.02155; the centring term
in arXiv:2312.09244.

Shape legend: _N pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import softplus

from tithe.scorers.decoder_scorer import Scorer
from tithe.scorers.replies import Reply


@dataclass(frozen=True)
class ReplyPair:
    """Two replies to one prompt, as token ids: the first is preferred.

    >>> ReplyPair((1, 5), (7, 2), (8, 8, 2)).n_tokens
    7
    """

    prompt_ids: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Rows of a micro-batch that it takes."""
        return len(self.prompt_ids) + len(self.chosen) + len(self.rejected)


def preference_loss(chosen_N: Tensor, rejected_N: Tensor, centre: float = 0.0) -> Tensor:
    """Σ −log σ(chosen − rejected) + centre·(chosen + rejected)², summed over pairs: divide by their number.

    The first term fixes differences alone; the second keeps the scores of a pair about 0.

    >>> import torch
    >>> round(float(preference_loss(torch.tensor([1.0]), torch.tensor([1.0]))), 4)
    0.6931
    """
    loss = softplus(rejected_N - chosen_N).sum()
    return loss + centre * (chosen_N + rejected_N).square().sum() if centre else loss


@dataclass(frozen=True)
class Ranked:
    """How a reward model ranks pairs. `right` [N] is 1 where the chosen reply scores more, ½ for equal scores, else 0;
    `loss` is the mean of −log σ(chosen − rejected)."""

    right: np.ndarray
    loss: float

    @property
    def accuracy(self) -> float:
        """The mean of `right`."""
        return float(self.right.mean())


def rank_pairs(scorer: Scorer, pairs: Sequence[ReplyPair]) -> Ranked:
    """Score both replies of every pair. On the lane."""
    replies = [Reply(pair.prompt_ids, ids) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    scores = np.array(scorer.score(replies), np.float64).reshape(-1, 2)
    gap = scores[:, 0] - scores[:, 1]
    return Ranked(np.where(gap == 0, 0.5, gap > 0), float(np.logaddexp(0.0, -gap).mean()))
