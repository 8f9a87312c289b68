"""Rules between keys: combinations that cannot work are refused, doubtful ones become warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tithe.errors import ConfigError

if TYPE_CHECKING:
    from tithe.config.schema import RunConfig

LAG_WITHOUT_CLIP = 1
"""Oldest sample, in batches, that an unclipped importance weight may be applied to."""

LAG_WITH_WIDE_CLIP = 8
"""Oldest sample, in batches, before a loss that hardly clips deserves a warning."""


def check_relations(cfg: RunConfig) -> None:
    """Raise one `ConfigError` that lists every broken relation; `.key` is the first one's key to change."""
    problems = [*_sizes(cfg), *_staleness(cfg), *_numbers(cfg), *_rewards(cfg)]
    if problems:
        raise ConfigError("\n".join(f"{key}: {message}" for key, message in problems), key=problems[0][0])


def _sizes(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    rl, rollout, run = cfg.rl, cfg.rollout, cfg.run
    group = rl.samples_per_prompt
    for key, size in (("batch_size_per_update", rl.batch_size_per_update), ("rollout_buffer_size", rl.rollout_buffer_size)):
        if size % group:
            near = max(group, round(size / group) * group)
            yield f"rl.{key}", f"{size} rollouts are no multiple of rl.samples_per_prompt = {group}; {near} would be"
    if rl.rollout_buffer_size < rl.batch_size_per_update:
        yield (
            "rl.rollout_buffer_size",
            f"{rl.rollout_buffer_size} rollouts never hold one batch of rl.batch_size_per_update ="
            f" {rl.batch_size_per_update}; raise it to at least that",
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if longest > cfg.model.max_context:
        yield (
            "model.max_context",
            f"{cfg.model.max_context} tokens are fewer than rollout.max_prompt_tokens + rollout.max_new_tokens = {longest};"
            " raise it or lower one of those",
        )
    needed = run.checkpoint_every * run.keep_checkpoints
    if run.keep_pool_batches < needed:
        yield (
            "run.keep_pool_batches",
            f"{run.keep_pool_batches} batches are fewer than run.checkpoint_every x run.keep_checkpoints = {needed}, so a"
            " resume from the oldest checkpoint would lack rows; raise it to at least that",
        )


def _staleness(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    rl = cfg.rl
    lag, age = rl.max_policy_update_lag, rl.max_sample_age
    if rl.sync_every > max(1, lag):
        yield (
            "rl.sync_every",
            f"{rl.sync_every} is more than max(1, rl.max_policy_update_lag) = {max(1, lag)}; lower it, or raise"
            " rl.max_policy_update_lag",
        )
    elif rl.sync_every > age + 1:
        yield (
            "rl.sync_every",
            f"{rl.sync_every} is more than rl.max_sample_age + 1 = {age + 1}: the sampler would wait for a version that the"
            " trainer cannot reach; lower it, or raise rl.max_sample_age",
        )
    if rl.clip_range is None:
        if rl.clip_range_high is not None:
            yield "rl.clip_range_high", "is given while rl.clip_range is null (unclipped); give both, or neither"
        oldest = max(lag, age)
        if oldest > LAG_WITHOUT_CLIP:
            key = "max_policy_update_lag" if lag >= age else "max_sample_age"
            yield (
                "rl.clip_range",
                f"null leaves the importance weight unclipped, which is known to diverge with rl.{key} = {oldest}; give a"
                f" clip such as 0.2, or lower rl.{key} to {LAG_WITHOUT_CLIP}",
            )
    elif rl.clip_range_high is None:
        yield "rl.clip_range_high", f"is null while rl.clip_range is {rl.clip_range}; give a number, or leave it out"


def _numbers(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    if cfg.model.load_in_8bit and cfg.model.quantize != "none":
        yield (
            "model.load_in_8bit",
            f"true packs to 8 bits and model.quantize = {cfg.model.quantize} to 4; change one of the two",
        )


def _rewards(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    reward = cfg.reward
    if reward.right <= reward.wrong:
        yield "reward.right", f"{reward.right} must be more than reward.wrong = {reward.wrong}"
    if reward.right <= reward.unreadable:
        yield "reward.unreadable", f"{reward.unreadable} must be less than reward.right = {reward.right}"
    if cfg.rl.reward_shaping == "none" and reward.format_rules:
        yield (
            "reward.format_rules",
            "have no effect under rl.reward_shaping = none; remove them, or choose function_validation",
        )


def config_warnings(cfg: RunConfig) -> list[str]:
    """Doubtful but legal settings, one sentence each, naming the keys. Empty when nothing is doubtful."""
    return [*_warn_about_policy(cfg), *_warn_about_schedule(cfg)]


def _warn_about_policy(cfg: RunConfig) -> Iterator[str]:
    rl, rollout = cfg.rl, cfg.rollout
    if cfg.lora.dropout > 0:
        yield (
            f"lora.dropout = {cfg.lora.dropout}: the trained policy is no longer the sampled one, importance ratios are noisy"
            " even on fresh samples, and parity is certified with dropout off; 0 costs nothing"
        )
    oldest = max(rl.max_policy_update_lag, rl.max_sample_age)
    low, high = rl.clip_range, rl.clip_range_high
    clips = low is not None and high is not None and low < 1 and high <= 1
    if oldest > LAG_WITH_WIDE_CLIP and not clips:
        yield (
            f"rl.clip_range = {low}, rl.clip_range_high = {high} hardly clip, and samples may be {oldest} batches old"
            f" (rl.max_policy_update_lag, rl.max_sample_age): narrow the clip or stay at {LAG_WITH_WIDE_CLIP}"
        )
    if rl.max_sample_age < rl.max_policy_update_lag:
        yield (
            f"rl.max_sample_age = {rl.max_sample_age} is less than rl.max_policy_update_lag = {rl.max_policy_update_lag}:"
            " the allowed lag cannot be used, and groups may be dropped"
        )
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    active = [f"rollout.{name}" for name, on in cuts.items() if on]
    if active:
        yield (
            f"{', '.join(active)}: tokens outside the kept set are never sampled, while the trained policy gives them"
            " probability; gradients are biased"
        )
    if rollout.on_publish == "keep":
        yield "rollout.on_publish = keep: the KV cache mixes versions, so the run has no bitwise parity certificate"


def _warn_about_schedule(cfg: RunConfig) -> Iterator[str]:
    if cfg.optimizer.warmup_steps >= cfg.run.max_steps:
        yield (
            f"optimizer.warmup_steps = {cfg.optimizer.warmup_steps} covers the whole run (run.max_steps ="
            f" {cfg.run.max_steps}): the learning rate never reaches optimizer.lr"
        )
    if cfg.rl.batch_size_per_update == cfg.rl.samples_per_prompt:
        yield (
            "rl.batch_size_per_update equals rl.samples_per_prompt: every batch is one question, so most batches may teach"
            " nothing"
        )
