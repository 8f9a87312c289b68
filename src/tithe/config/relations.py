"""Rules between keys: combinations that cannot work are refused, doubtful ones become warnings."""

from __future__ import annotations

from collections.abc import Iterator

from tithe.config.doubtful import learning_warnings
from tithe.config.objective_rules import objective_problems
from tithe.config.phases import phase_problems
from tithe.config.sampling import REWARD_MODEL
from tithe.config.sections import RunSections
from tithe.errors import ConfigError

LAG_WITH_WIDE_CLIP = 8
"""Oldest sample, in batches, before a loss that hardly clips deserves a warning."""

ADAPTER_KEYS = frozenset({"r", "alpha", "target_modules", "expert_layout"})
"""Keys of `lora` that have a meaning only for an adapter, whatever their value."""

_Problem = tuple[str, str]
"""(key to change, what is wrong with it)."""


def check_relations(cfg: RunSections) -> None:
    """Raise one `ConfigError` that lists every broken relation; `.key` is the first one's key to change."""
    rewards = (_rewards, _tools, _reward_models)
    checks = (_sizes, _staleness, objective_problems, _formats, _full, *rewards, phase_problems)
    problems = [problem for check in checks for problem in check(cfg)]
    if problems:
        raise ConfigError("\n".join(f"{key} = {message}" for key, message in problems), key=problems[0][0])


def _sizes(cfg: RunSections) -> Iterator[_Problem]:
    rl, rollout = cfg.rl, cfg.rollout
    group = rl.samples_per_prompt
    for name in ("batch_size_per_update", "rollout_buffer_size"):
        size = getattr(rl, name)
        only_follows = name == "rollout_buffer_size" and name not in rl.model_fields_set
        if size % group and not only_follows:
            near = max(group, round(size / group) * group)
            yield f"rl.{name}", f"{size} is no multiple of rl.samples_per_prompt = {group}; {near} would be"
    if rl.rollout_buffer_size < rl.batch_size_per_update:
        batch = f"rl.batch_size_per_update = {rl.batch_size_per_update}"
        yield "rl.rollout_buffer_size", f"{rl.rollout_buffer_size} never holds one batch of {batch}; raise it to that"
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if longest > cfg.model.max_context:
        parts = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
        yield "model.max_context", f"{cfg.model.max_context} is less than {parts}; raise it or lower one of those"


def _staleness(cfg: RunSections) -> Iterator[_Problem]:
    """Bounds of `sync_every`.

    The second one: while version s is served, at most (s + M + 1) batches may ever have been admitted, so the trainer
    stops at serial s + M + 1 and a publication due later than that would never come.
    """
    rl = cfg.rl
    by_lag, by_age = max(1, rl.max_policy_update_lag), rl.max_sample_age + 1
    if rl.sync_every > by_lag:
        remedy = "lower it, or raise rl.max_policy_update_lag"
        yield "rl.sync_every", f"{rl.sync_every} is more than max(1, rl.max_policy_update_lag) = {by_lag}; {remedy}"
    elif rl.sync_every > by_age:
        reason = "the sampler would wait for a version that never comes; lower it, or raise rl.max_sample_age"
        yield "rl.sync_every", f"{rl.sync_every} is more than rl.max_sample_age + 1 = {by_age}: {reason}"


def _formats(cfg: RunSections) -> Iterator[_Problem]:
    if cfg.model.load_in_8bit and cfg.model.quantize != "none":
        other = f"model.quantize = {cfg.model.quantize}"
        yield "model.load_in_8bit", f"true packs to 8 bits while {other} packs to 4; change one of the two"


def _full(cfg: RunSections) -> Iterator[_Problem]:
    """What needs an adapter, or a base that versions share."""
    if cfg.model.train != "full":
        return
    for name in sorted(cfg.lora.model_fields_set & ADAPTER_KEYS):
        remedy = "leave it out, or train an adapter (model.train = lora)"
        yield f"lora.{name}", f"{getattr(cfg.lora, name)} while model.train = full has no adapter; {remedy}"
    if cfg.lora.init_from is not None:
        yield "lora.init_from", f"{cfg.lora.init_from} while model.train = full has no adapter; set model.path instead"
    if cfg.lora.dropout > 0:
        yield "lora.dropout", f"{cfg.lora.dropout} while model.train = full has no adapter; set it to 0"
    if cfg.rollout.on_publish != "finish":
        reason = "with model.train = full each version is a model of its own, so a request finishes where it began"
        yield "rollout.on_publish", f"{cfg.rollout.on_publish}: {reason}; set it to finish"


def _rewards(cfg: RunSections) -> Iterator[_Problem]:
    reward = cfg.reward
    if reward.right <= reward.wrong:
        yield "reward.right", f"{reward.right} must be more than reward.wrong = {reward.wrong}"
    if reward.right <= reward.unreadable:
        yield "reward.unreadable", f"{reward.unreadable} must be less than reward.right = {reward.right}"
    for name in ("normalise", "clip"):
        span = getattr(reward, name)
        if isinstance(span, tuple) and not span[0] < span[1]:
            yield f"reward.{name}", f"[{span[0]:g}, {span[1]:g}]: give the lower end first"
    if reward.normalise == "running" and cfg.rl.advantage_scale != "none":
        remedy = "divides by each group's own deviation, which undoes it; set it to none, or leave reward.normalise out"
        yield "rl.advantage_scale", f"{cfg.rl.advantage_scale} while reward.normalise = running: it {remedy}"
    if reward.weights and reward.function in ("math", "symbolic_math"):
        yield "reward.weights", f"{dict(reward.weights)} while {reward.function} has no named parts; remove it"
    names = [part.name for part in reward.parts]
    if len(set(names)) < len(names) or "answer" in names:
        yield "reward.parts", f"the names {', '.join(names)} must differ from each other and from answer"
    if any(part.function in ("math", "symbolic_math") for part in reward.parts):
        yield "reward.parts", "math and symbolic_math belong in reward.function"
    if cfg.rl.reward_shaping == "none" and reward.format_rules:
        remedy = "remove them, or choose function_validation"
        yield (
            "reward.format_rules",
            f"{len(reward.format_rules)} rules without effect under rl.reward_shaping = none; {remedy}",
        )


def _tools(cfg: RunSections) -> Iterator[_Problem]:
    if cfg.task.turn_reward and not cfg.task.tools:
        yield "task.turn_reward", f"{cfg.task.turn_reward:g} while task.tools names none to call; leave it out"


def _reward_models(cfg: RunSections) -> Iterator[_Problem]:
    reward = cfg.reward
    if reward.weights and reward.function.startswith(REWARD_MODEL):
        yield "reward.weights", f"{dict(reward.weights)} while a reward model has no named parts; remove it"
    if reward.model_quantize != "none" and not reward.model_directories:
        yield "reward.model_quantize", f"{reward.model_quantize} while no part of the reward is a model's; leave it out"
    if reward.model_directories and cfg.run.ranks > 1:
        yield "run.ranks", f"{cfg.run.ranks} while a reward model is asked on one rank; set it to 1"


def config_warnings(cfg: RunSections) -> list[str]:
    """Doubtful but legal settings, one sentence each, naming the keys. Empty when nothing is doubtful."""
    return [*_warn_about_policy(cfg), *learning_warnings(cfg), *_warn_about_schedule(cfg)]


def _warn_about_policy(cfg: RunSections) -> Iterator[str]:
    rl, rollout = cfg.rl, cfg.rollout
    if cfg.lora.dropout > 0:
        yield (
            f"lora.dropout = {cfg.lora.dropout}: the trained policy is no longer the sampled one, importance ratios "
            "are noisy even on fresh samples, and parity is certified with dropout off; 0 costs nothing"
        )
    oldest = max(rl.max_policy_update_lag, rl.max_sample_age)
    low, high = rl.clip_range, rl.clip_range_high
    clips = low is not None and high is not None and low < 1 and high <= 1
    clips = clips or rl.correction != "none"
    if oldest > LAG_WITH_WIDE_CLIP and not clips:
        yield (
            f"rl.clip_range = {low} and rl.clip_range_high = {high} hardly clip while samples may be {oldest} batches "
            f"old (rl.max_policy_update_lag, rl.max_sample_age): narrow the clip, or stay at {LAG_WITH_WIDE_CLIP}"
        )
    if rl.max_sample_age < rl.max_policy_update_lag:
        yield (
            f"rl.max_sample_age = {rl.max_sample_age} is less than rl.max_policy_update_lag = "
            f"{rl.max_policy_update_lag}: the allowed lag cannot be used, and groups may be dropped"
        )
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    active = [f"rollout.{name}" for name, on in cuts.items() if on]
    active += [f"top_p of phase {p.name} (schedule.phases)" for p in cfg.schedule.phases if (p.top_p or 1.0) < 1]
    if active:
        yield (
            f"{', '.join(active)}: tokens outside the kept set are never sampled, while the trained policy gives them "
            "probability; gradients are biased. 1, 0 and 0 keep every token"
        )
    if rollout.on_publish == "keep":
        yield "rollout.on_publish = keep: the KV cache mixes versions, so the run has no bitwise parity certificate"


def _warn_about_schedule(cfg: RunSections) -> Iterator[str]:
    if cfg.optimizer.warmup_steps >= cfg.run.max_steps:
        yield (
            f"optimizer.warmup_steps = {cfg.optimizer.warmup_steps} covers the whole run (run.max_steps = "
            f"{cfg.run.max_steps}): the learning rate never reaches optimizer.lr"
        )
