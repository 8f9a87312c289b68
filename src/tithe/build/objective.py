"""From a configuration to the objective: losses, advantages, what is scored beforehand, the KL's reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tithe.advantages import ESTIMATOR_OF, AdvantagePlan, AdvantageRule, Overlong
from tithe.arch import read_checkpoint
from tithe.build.base import Base
from tithe.config import RunConfig
from tithe.errors import ConfigError
from tithe.lora import load_adapter
from tithe.losses import Aggregation, CorrectionSettings, KLControl, LossSettings
from tithe.models import load_model, stack_experts
from tithe.orchestration import UpdatePlan
from tithe.trainer import (
    BatchScorer,
    CriticSettings,
    FullTrainer,
    Reference,
    ScoringPlan,
    Trainer,
    rejects_whole_rollouts,
)

KL_RANGE = 100.0
"""A steered KL weight stays within this factor of where it began."""

OVERLONG_SHARE = 5
"""DAPO's buffer is a fifth of the length limit."""


def loss_settings(cfg: RunConfig, kl_coef: float) -> LossSettings:
    """The loss's part."""
    rl = cfg.rl
    estimator, is_unbiased = rl.kl_estimate
    return LossSettings(
        aggregation=Aggregation(rl.aggregation),
        clip_range=rl.clip_range,
        clip_range_high=rl.clip_range_high,
        kl_coef=kl_coef if rl.kl_placement == "loss" else 0.0,
        kl_estimator=estimator,
        entropy_coef=rl.entropy_coef,
        dual_clip=rl.dual_clip,
        kl_level=rl.kl_level,
        kl_unbiased=is_unbiased,
        correction=CorrectionSettings(*rl.correction_of, *rl.correction_bounds, rl.correction_veto),
    )


def kl_control(cfg: RunConfig) -> KLControl:
    """Fixed, or steered to `rl.kl_target`."""
    rl = cfg.rl
    return KLControl(*rl.kl_steering, floor=rl.kl_coef / KL_RANGE, ceiling=rl.kl_coef * KL_RANGE)


def critic_settings(cfg: RunConfig) -> CriticSettings | None:
    """Of `ppo`; None for algorithms without a critic."""
    rl = cfg.rl
    if rl.algorithm != "ppo":
        return None
    steps = rl.critic_warmup_steps * rl.ppo_epochs * rl.mini_batches
    return CriticSettings(rl.clip_range, steps)


def advantage_plan(cfg: RunConfig) -> AdvantagePlan:
    """How rewards become advantages."""
    rl, limit = cfg.rl, cfg.rollout.max_new_tokens
    return AdvantagePlan(
        rule=AdvantageRule(ESTIMATOR_OF[rl.algorithm], rl.advantage_scale, rl.gamma, rl.gae_lambda),
        overlong=Overlong(rl.overlong, limit, max(1, limit // OVERLONG_SHARE)),
        kl_estimator=rl.kl_estimate[0],
        kl_level=rl.kl_level,
        kl_in_reward=rl.kl_placement == "reward",
    )


def scoring_plan(cfg: RunConfig, settings: LossSettings, *, uses_kl: bool) -> ScoringPlan:
    """What must be known of a batch before it is trained.

    The reference, where its KL is part of rewards that are compared or summed, or would be scored again at every step;
    the policy, where a batch has several steps or a correction leaves out whole rollouts; a critic's values.
    """
    rl = cfg.rl
    several = rl.ppo_epochs * rl.mini_batches > 1
    in_rewards = rl.kl_placement == "reward" and (rl.advantage_scale == "batch" or rl.kl_level == "sequence")
    in_rewards = in_rewards or (rl.kl_placement == "reward" and rl.algorithm in ("ppo", "reinforce_pp"))
    rejects = rejects_whole_rollouts(settings.correction)
    return ScoringPlan(
        prox=several or rejects,
        reference=uses_kl and (several or in_rewards),
        value=rl.algorithm == "ppo",
        rejection=settings.correction if rejects else None,
    )


def batch_scorer(cfg: RunConfig, trainer: Trainer | FullTrainer) -> BatchScorer | None:
    """What scores a batch beforehand; None where nothing is asked."""
    plan = scoring_plan(cfg, trainer.settings.loss, uses_kl=trainer.settings.kl_coef > 0)
    return BatchScorer(trainer, plan) if plan.asks else None


def update_plan(cfg: RunConfig, trainer: Trainer | FullTrainer) -> UpdatePlan:
    """How often a batch is used, and how much of its rollouts."""
    row_bytes = trainer.passes.row_bytes if isinstance(trainer, Trainer) else 0
    return UpdatePlan(cfg.rl.ppo_epochs, cfg.rl.mini_batches, cfg.rl.max_train_tokens, row_bytes)


def reference_of(cfg: RunConfig, base: Base, trainer: Trainer) -> Reference:
    """Whom the KL is measured against: the base, an adapter on it, or another model. On the lane.

    Raises `ConfigError` for another vocabulary, `AdapterError` or `ModelError` for what cannot be loaded.
    """
    named = cfg.rl.kl_reference
    if named == "base" or cfg.rl.reference_every is not None:
        return trainer.reference
    directory = Path(named)
    if (directory / "adapter_config.json").is_file():
        tensors, spec = load_adapter(directory, base.decoder.linear_shapes())
        return Reference(trainer.passes, stack_experts(tensors), spec)
    checkpoint = read_checkpoint(directory)
    if checkpoint.padded_vocab.start != base.n_tokens:
        raise ConfigError(
            f"rl.kl_reference = {named}: a model of {checkpoint.padded_vocab.start} tokens says nothing of the "
            f"{base.n_tokens} that are sampled; name one with the base's vocabulary, or an adapter",
            key="rl.kl_reference",
        )
    limit = min(base.options.max_context, checkpoint.spec.max_position_embeddings)
    return Reference.other(load_model(checkpoint, replace(base.options, quantize="none", max_context=limit)))
