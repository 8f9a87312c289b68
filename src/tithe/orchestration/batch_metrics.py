"""Numbers of a batch that can be read off its groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tithe.rewards import is_readable, mean_overlap, score_of
from tithe.types import FinishReason, RolloutGroup


def batch_metrics(groups: Sequence[RolloutGroup], serial: int) -> dict[str, float]:
    """Rewards, lengths and ages of a batch that begins at `serial`. Failed rollouts count in no mean; those on which
    the grader abstained are counted and enter none of the rewards' numbers; a batch without scored rollouts has none.

    A group that was sampled by a version from before a resume may be ahead of the trainer: its age is 0.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.failure is None]
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    rewards = [rollout.reward for rollout in scored if rollout.reward is not None]
    ages = [max(0, serial - group.min_serial) for group in groups]
    row = {"groups": float(len(groups)), "prompts": float(len({group.prompt_id for group in groups}))}
    row |= {"samples_per_prompt": float(np.mean([len(group.rollouts) for group in groups]))}
    row |= {"age_mean": float(np.mean(ages)), "age_max": float(max(ages))}
    alike = [mean_overlap([r.token_ids for r in group.rollouts if r.failure is None]) for group in groups]
    if any(len(overlap) for overlap in alike):
        row |= {"overlap": float(np.concatenate(alike).mean())}
    if rewards:
        row |= {
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "readable_rate": float(np.mean([is_readable(rollout) for rollout in scored])),
        }
    if rollouts:
        row |= {
            "abstained": float(len(rollouts) - len(scored)),
            "temperature": float(np.mean([rollout.temperature for rollout in rollouts])),
            "truncated_frac": float(np.mean([rollout.finish is FinishReason.LENGTH for rollout in rollouts])),
            "completion_tokens_mean": float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
        }
    return row


def pass_rate(group: RolloutGroup) -> float | None:
    """Share of right answers among a group's scored rollouts (where right and wrong are not known: the mean reward,
    held within 0 and 1); None when nothing was scored. Computed as `score_of` does.
    """
    scored = [rollout for rollout in group.rollouts if rollout.failure is None and rollout.reward is not None]
    if not scored:
        return None
    return float(np.mean([min(1.0, max(0.0, score_of(rollout))) for rollout in scored]))
