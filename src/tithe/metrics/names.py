"""The one table of metric names: label, unit and the kind of row each belongs to.

`step_s` is a batch's whole time; `wait_s`, `train_s`, `publish_s` and `checkpoint_s` are parts of it without overlap.
`sample_s` and `reward_s` are spent by the rollout loop beside it; `decode_s` and `prefill_s` are the engine's part of
`sample_s`.

A name that is not listed here is recorded all the same; it only has no label of its own in the report.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class RowKind(enum.StrEnum):
    """What a row of ``metrics.jsonl`` tells of: one trained batch, the rollout side alone, or one evaluation."""

    TRAIN = "train"
    ROLLOUT = "rollout"
    EVAL = "eval"


@dataclass(frozen=True)
class MetricInfo:
    """How one metric is shown.

    >>> METRICS["kl_mean"].unit
    'nats/token'
    """

    label: str
    unit: str = ""
    kind: RowKind = RowKind.TRAIN


def _rollout(label: str, unit: str = "") -> MetricInfo:
    return MetricInfo(label, unit, RowKind.ROLLOUT)


def _eval(label: str) -> MetricInfo:
    return MetricInfo(label, "fraction", RowKind.EVAL)


METRICS: dict[str, MetricInfo] = {
    "reward_mean": MetricInfo("Mean reward"),
    "reward_std": MetricInfo("Reward, standard deviation"),
    "readable_rate": MetricInfo("Readable answers", "fraction"),
    "abstained": MetricInfo("Rollouts without a verdict"),
    "truncated_frac": MetricInfo("Cut at the length limit", "fraction"),
    "completion_tokens_mean": MetricInfo("Completion length", "tokens"),
    "kl_mean": MetricInfo("KL to the reference", "nats/token"),
    "entropy": MetricInfo("Entropy", "nats/token"),
    "clip_frac": MetricInfo("Clipped tokens", "fraction"),
    "kl_coef": MetricInfo("Weight of the KL"),
    "sampler_kl": MetricInfo("KL from sampler to trainer", "nats/token"),
    "update_kl": MetricInfo("KL of a batch's steps", "nats/token"),
    "ess": MetricInfo("Effective samples", "fraction"),
    "weight_mean": MetricInfo("Correction's weight, mean"),
    "rejected_frac": MetricInfo("Tokens left out by the correction", "fraction"),
    "rejected_rollouts": MetricInfo("Rollouts left out by the correction"),
    "train_cut_rollouts": MetricInfo("Rollouts trained in part"),
    "train_cut_bytes": MetricInfo("Kept activations saved", "bytes"),
    "value_loss": MetricInfo("Critic's loss"),
    "value_explained": MetricInfo("Returns explained by the critic", "fraction"),
    "no_spread_groups": MetricInfo("Groups dropped for equal rewards"),
    "loss": MetricInfo("Loss"),
    "router_agreement": MetricInfo("Experts chosen as while sampling", "fraction"),
    "rank_peak_bytes": MetricInfo("Largest memory of a rank", "bytes"),
    "grad_norm": MetricInfo("Gradient norm"),
    "lr": MetricInfo("Learning rate"),
    "skipped": MetricInfo("Skipped steps"),
    "groups": MetricInfo("Groups trained"),
    "prompts": MetricInfo("Distinct prompts trained"),
    "samples_per_prompt": MetricInfo("Samples for each prompt"),
    "overlap": MetricInfo("Likeness of a prompt's completions", "fraction"),
    "temperature": MetricInfo("Sampling temperature"),
    "dropped_groups": MetricInfo("Groups dropped as too old"),
    "failures": MetricInfo("Failed rollouts"),
    "age_mean": MetricInfo("Sample age, mean", "batches"),
    "age_max": MetricInfo("Sample age, oldest", "batches"),
    "step_s": MetricInfo("Step time", "s"),
    "wait_s": MetricInfo("Waiting for rollouts", "s"),
    "train_s": MetricInfo("Training", "s"),
    "publish_s": MetricInfo("Publishing", "s"),
    "checkpoint_s": MetricInfo("Checkpoint", "s"),
    "tok_per_s": _rollout("Rollout speed", "tok/s"),
    "sampler_gap": _rollout("Trainer against sampler, largest difference", "nats/token"),
    "sampler_gap_mean": _rollout("Trainer against sampler, mean difference", "nats/token"),
    "version_gap": _rollout("Version gap", "batches"),
    "sample_s": _rollout("Sampling", "s"),
    "decode_s": _rollout("Drawing tokens", "s"),
    "prefill_s": _rollout("Reading prompts", "s"),
    "generated_tok": _rollout("Tokens drawn", "tokens"),
    "prefill_tok": _rollout("Prompt tokens read", "tokens"),
    "reused_tok": _rollout("Prompt tokens known from the turn before", "tokens"),
    "reward_s": _rollout("Judging, of all texts together", "s"),
    "eval_sampled": _eval("Right answers, sampled"),
    "eval_sampled_lo": _eval("Right answers, sampled, lower bound"),
    "eval_sampled_hi": _eval("Right answers, sampled, upper bound"),
    "eval_greedy": _eval("Right answers, greedy"),
    "eval_greedy_lo": _eval("Right answers, greedy, lower bound"),
    "eval_greedy_hi": _eval("Right answers, greedy, upper bound"),
    "eval_readable": _eval("Readable answers, sampled"),
    "eval_greedy_readable": _eval("Readable answers, greedy"),
    "eval_failed": _eval("Failed answers, counted as wrong"),
    "eval_is_reward": _eval("Scores are rewards and no shares of right answers"),
}

FAILURE_PREFIX = "failures_"
"""``failures_<cause>`` counts the failed rollouts of one cause, e.g. ``failures_timeout``."""


def row_kind(names: Iterable[str]) -> RowKind:
    """The kind of a row, from its names: any evaluation name makes it EVAL; otherwise any training name makes it
    TRAIN; a row of rollout names alone is ROLLOUT. Unknown names count as training names.

    >>> row_kind(["tok_per_s", "loss"]), row_kind(["tok_per_s", "version_gap"]), row_kind(["eval_greedy"])
    (<RowKind.TRAIN: 'train'>, <RowKind.ROLLOUT: 'rollout'>, <RowKind.EVAL: 'eval'>)
    """
    kinds: set[RowKind] = set()
    for name in names:
        info = METRICS.get(name)
        kinds.add(info.kind if info else RowKind.EVAL if name.startswith("eval_") else RowKind.TRAIN)
    if RowKind.EVAL in kinds:
        return RowKind.EVAL
    return RowKind.ROLLOUT if kinds == {RowKind.ROLLOUT} else RowKind.TRAIN
