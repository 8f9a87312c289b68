"""Rules between the keys of the objective: what is known to diverge, and what could have no effect, is refused."""

from __future__ import annotations

from collections.abc import Iterator

from tithe.config.algorithms import CORRECTIONS, LAMBDA, WEIGHING
from tithe.config.phases import schedule_of
from tithe.config.sections import RunSections

LAG_WITHOUT_CLIP = 1
"""Oldest sample, in batches, that an unclipped importance weight may be applied to."""

NO_GROUP = frozenset({"ppo", "reinforce_pp"})
"""Algorithms that compare no group. Only these discount rewards from token to token (`rl.gamma`)."""

Problem = tuple[str, str]
"""(key to change, what is wrong with it)."""


def objective_problems(cfg: RunSections) -> Iterator[Problem]:
    """Everything wrong with the objective."""
    yield from _clipping(cfg)
    yield from _correction(cfg)
    yield from _kl(cfg)
    yield from _algorithm(cfg)
    yield from _lengths(cfg)
    yield from _full(cfg)


def _late(cfg: RunSections) -> str:
    """The keys that let samples be older than an unbounded weight may be applied to."""
    names = [n for n in ("max_policy_update_lag", "max_sample_age") if getattr(cfg.rl, n) > LAG_WITHOUT_CLIP]
    return " and ".join(f"rl.{name} = {getattr(cfg.rl, name)}" for name in names)


def _clipping(cfg: RunSections) -> Iterator[Problem]:
    rl = cfg.rl
    if rl.clip_range is not None:
        if rl.clip_range_high is None:
            yield "rl.clip_range_high", f"null while rl.clip_range = {rl.clip_range}; give a number, or leave it out"
        return
    if rl.clip_range_high is not None:
        yield "rl.clip_range_high", f"{rl.clip_range_high} while rl.clip_range is null; give both, or leave this out"
    late = _late(cfg)
    if late and rl.correction_of[0] not in WEIGHING:
        both = " and " in late
        remedy = (
            f"give a clip such as 0.2, choose an rl.correction such as tis, or lower {'both' if both else 'that'} to"
            f" {LAG_WITHOUT_CLIP}"
        )
        yield "rl.clip_range", f"null (unclipped importance weight) is known to diverge with {late}; {remedy}"


def _correction(cfg: RunSections) -> Iterator[Problem]:
    rl = cfg.rl
    name, (low, high) = rl.correction_of[0], rl.correction_bounds
    bounds = f"[{low:g}, {'null' if high is None else f'{high:g}'}]"
    if name == "none":
        nothing = "while rl.correction = none weighs nothing; choose one, or leave it out"
        if low > 0 or high is not None:
            yield "rl.correction_bounds", f"{bounds} {nothing}"
        if rl.correction_veto is not None:
            yield "rl.correction_veto", f"{rl.correction_veto} {nothing}"
        return
    late = _late(cfg)
    if high is None and (late or name == "opsm"):
        what = "an unbounded weight is known to diverge with " + late if late else "opsm has no bound then"
        yield "rl.correction_bounds", f"{bounds}: {what}; end it with one such as {0.1 if name == 'opsm' else 2.0:g}"
    if high is not None and high <= low:
        yield "rl.correction_bounds", f"{bounds}: the second is not above the first; raise it, or lower that"
    if low > 0 and CORRECTIONS[name].low == 0:
        yield "rl.correction_bounds", f"{bounds}: {name} leaves out no small weight; begin with 0"
    if rl.correction_veto is not None and name != "mis":
        yield "rl.correction_veto", f"{rl.correction_veto}: only rl.correction = mis has a veto; leave it out"


def _kl(cfg: RunSections) -> Iterator[Problem]:
    rl = cfg.rl
    in_loss = rl.kl_placement == "loss"
    if rl.kl_coef > 0 and in_loss and rl.kl_estimator == "k1":
        reason = "in the loss it has no gradient on average"
        yield "rl.kl_estimator", f"k1: {reason}; take k2, k3 or k1_unbiased, or set rl.kl_placement to reward"
    if rl.kl_estimator.endswith("unbiased") and not in_loss:
        reason = "weighs a KL in the loss, and rl.kl_placement is reward; change one of the two"
        yield "rl.kl_estimator", f"{rl.kl_estimator} {reason}"
    most = max(values.kl_coef for values in schedule_of(cfg).values)
    if rl.kl_target is not None and any(phase.kl_coef is not None for phase in cfg.schedule.phases):
        yield "rl.kl_target", f"{rl.kl_target} steers a weight that schedule.phases sets; leave one of the two out"
    if most == 0:
        if rl.kl_target is not None:
            yield "rl.kl_target", f"{rl.kl_target} cannot steer rl.kl_coef = 0, which stays 0; give rl.kl_coef a start"
        if rl.kl_reference != "base":
            yield "rl.kl_reference", f"{rl.kl_reference} while rl.kl_coef = 0 measures nothing; give rl.kl_coef"


def _algorithm(cfg: RunSections) -> Iterator[Problem]:
    rl = cfg.rl
    if rl.advantage_scale == "std" and rl.algorithm in NO_GROUP:
        yield "rl.advantage_scale", f"std divides by a group's deviation, and {rl.algorithm} compares none; take batch"
    if rl.dual_clip is not None and rl.algorithm == "cispo":
        yield "rl.dual_clip", f"{rl.dual_clip}: cispo clips weights and no losses; leave it out"
    if rl.gamma != 1 and rl.algorithm not in NO_GROUP:
        yield "rl.gamma", f"{rl.gamma:g}: {rl.algorithm} gives every token of an answer the same credit; leave it out"
    if rl.algorithm != "ppo":
        no_critic = f"{rl.algorithm} has no critic; leave it out, or take rl.algorithm = ppo"
        if rl.gae_lambda != LAMBDA:
            yield "rl.gae_lambda", f"{rl.gae_lambda:g}: {no_critic}"
        if rl.critic_warmup_steps > 0:
            yield "rl.critic_warmup_steps", f"{rl.critic_warmup_steps}: {no_critic}"
    groups = rl.batch_size_per_update // rl.samples_per_prompt
    if groups % rl.mini_batches:
        yield "rl.mini_batches", f"{rl.mini_batches} does not divide the batch's {groups} groups; change one of the two"


def _lengths(cfg: RunSections) -> Iterator[Problem]:
    limit = cfg.rollout.max_new_tokens
    if cfg.rl.overlong == "punish" and limit < 2:
        yield "rl.overlong", f"punish needs room before rollout.max_new_tokens = {limit}; raise that, or take keep"


def _full(cfg: RunSections) -> Iterator[Problem]:
    """What needs an adapter."""
    if cfg.model.train != "full":
        return
    if cfg.rl.algorithm == "ppo":
        yield "rl.algorithm", "ppo: the critic is an adapter, and model.train = full has none; take another"
    if cfg.rl.kl_reference != "base":
        yield "rl.kl_reference", f"{cfg.rl.kl_reference} is on a base that model.train = full does not hold; take base"
