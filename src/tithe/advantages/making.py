"""From finished groups, and what was scored of them, to a batch's advantages.

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tithe.advantages.batch import BatchAdvantages, estimate
from tithe.advantages.kl_penalty import token_kl
from tithe.advantages.overlong import soft_punishment
from tithe.advantages.samples import AdvantageRule, Sample
from tithe.types import BatchScores, FinishReason, Rollout, RolloutGroup


@dataclass(frozen=True)
class Overlong:
    """What happens to answers at the length limit `max_tokens`: nothing, `filter` (not trained, and no part of the
    group's baseline) or `punish` (`soft_punishment` within the last `buffer` tokens)."""

    how: Literal["keep", "filter", "punish"] = "keep"
    max_tokens: int = 0
    buffer: int = 0

    def leaves_out(self, rollout: Rollout) -> bool:
        """Whether it is not trained."""
        return self.how == "filter" and rollout.finish is FinishReason.LENGTH

    def reward(self, length: int) -> float:
        """What a length adds to the reward, at most 0."""
        return soft_punishment(length, self.max_tokens, self.buffer) if self.how == "punish" else 0.0


@dataclass(frozen=True)
class AdvantagePlan:
    """`rule` says how rewards become advantages. `kl_estimator` and `kl_level` are those of a KL in the reward: of each
    token, or `sequence`: of the whole rollout, taken from its reward before anything is compared (as in TRL's RLOO)."""

    rule: AdvantageRule = field(default_factory=AdvantageRule)
    overlong: Overlong = field(default_factory=Overlong)
    kl_estimator: str = "k1"
    kl_level: Literal["token", "sequence"] = "token"
    kl_in_reward: bool = False


def make_advantages(
    groups: Sequence[RolloutGroup],
    plan: AdvantagePlan,
    scores: BatchScores | None = None,
    whole: Sequence[RolloutGroup] | None = None,
) -> BatchAdvantages:
    """Advantages of a batch. Rollouts that failed, have no reward, were rejected whole by a correction or are left out
    for their length get None and are part of no baseline. A KL in the reward is paid where the reference was scored.
    `whole` are the same groups before the ends of long rollouts were cut off: an answer is punished for the length that
    it had and not for the part of it that is trained.

    >>> from tithe.types import RolloutGroup
    >>> make_advantages([], AdvantagePlan()).advantages
    []
    """
    scores = scores or BatchScores()
    lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in (whole or groups)]
    samples = [
        [_sample(rollout, lengths[g][r], (g, r), plan, scores) for r, rollout in enumerate(group.rollouts)]
        for g, group in enumerate(groups)
    ]
    return estimate(samples, plan.rule)


def _sample(
    rollout: Rollout, length: int, place: tuple[int, int], plan: AdvantagePlan, scores: BatchScores
) -> Sample | None:
    if rollout.failure is not None or rollout.reward is None:
        return None
    if place in scores.rejected or plan.overlong.leaves_out(rollout):
        return None
    g, r = place
    value = None if scores.value is None else scores.value[g][r]
    sample = Sample(
        reward=rollout.reward + plan.overlong.reward(length),
        mask=rollout.loss_mask,
        value=None if value is None else value.astype(np.float64),
    )
    kl_T = _kl(rollout, place, plan, scores)
    if kl_T is None:
        return sample
    if plan.kl_level == "sequence":
        return replace(sample, reward=sample.reward - scores.kl_coef * float(kl_T.sum()))
    return replace(sample, penalty=scores.kl_coef * kl_T)


def _kl(
    rollout: Rollout, place: tuple[int, int], plan: AdvantagePlan, scores: BatchScores
) -> NDArray[np.float64] | None:
    ref_logp = None if scores.ref_logp is None else scores.ref_logp[place[0]][place[1]]
    if ref_logp is None or not plan.kl_in_reward:
        return None
    return token_kl(rollout.logp, ref_logp, rollout.loss_mask, plan.kl_estimator)
