"""A rank's own trainer and engine, as a configuration asks: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tithe.build.base import Base
from tithe.build.full import copied_engine, full_trainer
from tithe.build.objective import critic_settings, kl_control, loss_settings, reference_of
from tithe.build.origin import origin_problem
from tithe.config import PhaseValues, RunConfig, schedule_of
from tithe.engines import CopiedEngine, Here, SharedEngine
from tithe.errors import AdapterError, ConfigError
from tithe.lora import LoraSpec, init_tensors, load_adapter, resolve_targets
from tithe.models import PAGE, KVPages, share_outer, stack_experts
from tithe.trainer import FullTrainer, Trainer, TrainerSettings


def make_learning(
    cfg: RunConfig, base: Base, given: Path | None, say: Callable[[str], None]
) -> tuple[Trainer, SharedEngine] | tuple[FullTrainer, CopiedEngine]:
    """A rank's own trainer and engine. On the lane."""
    settings = _engine_settings(cfg, base)
    if base.held is None:
        return full_trainer(cfg, base, trainer_settings(cfg), given), copied_engine(cfg, base, settings)
    ranks = base.crew.ranks
    spec, tensors = _adapter(cfg, base, given, say)
    critic = _fresh(cfg, base, spec, cfg.run.seed + 1) if cfg.rl.algorithm == "ppo" else None
    trainer = Trainer(base.decoder, spec, tensors, trainer_settings(cfg), ranks, critic=critic)
    trainer.reference = reference_of(cfg, base, trainer)
    live, follow = cfg.engine.max_live_versions, cfg.rollout.on_publish
    lane = base.lane if ranks.size == 1 else Here()
    engine = SharedEngine(base.decoder, lane, max_live_versions=live, on_publish=follow, ranks=ranks, **settings)
    return trainer, engine


def trainer_settings(cfg: RunConfig, phase: PhaseValues | None = None) -> TrainerSettings:
    """The trainer's part of a configuration in a phase of its schedule; without one, with the KL coefficient of the
    phase that has most, which decides whether the trainer needs a reference at all."""
    rl, o = cfg.rl, cfg.optimizer
    phase = phase or max(schedule_of(cfg).values, key=lambda values: values.kl_coef)
    steps_per_batch = rl.ppo_epochs * rl.mini_batches
    return TrainerSettings(
        algorithm=rl.algorithm,
        loss=loss_settings(cfg, phase.kl_coef),
        norm_tokens=cfg.rollout.max_new_tokens,
        kl_coef=phase.kl_coef,
        kl_placement=rl.kl_placement,
        kl_control=kl_control(cfg),
        reference_every=rl.reference_every and rl.reference_every * steps_per_batch,
        ppo_epochs=rl.ppo_epochs,
        mini_batches=rl.mini_batches,
        critic=critic_settings(cfg),
        lr=phase.lr,
        betas=o.betas,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
        lr_scheduler=o.lr_scheduler,
        warmup_steps=o.warmup_steps,
        total_steps=cfg.run.max_steps * steps_per_batch,
        micro_batch_tokens=rl.micro_batch_tokens,
        activation_checkpointing=cfg.model.activation_checkpointing,
        dropout=cfg.lora.dropout,
        seed=cfg.run.seed,
    )


def _adapter(
    cfg: RunConfig, base: Base, given: Path | None, say: Callable[[str], None]
) -> tuple[LoraSpec, Mapping[str, Tensor]]:
    """Fresh tensors, or those of a PEFT directory whose rank, alpha and targets then count."""
    shapes = base.decoder.linear_shapes()
    directory = given if given is not None else (Path(cfg.lora.init_from) if cfg.lora.init_from else None)
    if directory is not None:
        tensors, spec = load_adapter(directory, shapes)
        tensors = stack_experts(tensors, share=cfg.lora.expert_layout == "shared_outer")
        problem = origin_problem(directory, base.decoder)
        if problem is not None and given is not None:
            raise AdapterError(f"{directory} cannot be served here: {problem}")
        if problem is not None:
            say(f"warning: lora.init_from = {directory}: {problem}; training goes on from its numbers all the same")
        if spec.is_uniform and given is None and (spec.r, spec.alpha) != (cfg.lora.r, cfg.lora.alpha):
            say(f"lora: r {spec.r} and alpha {spec.alpha:g} are those of {directory.name}")
        return spec, tensors
    requested = cfg.lora.target_modules
    targets = resolve_targets(requested if isinstance(requested, str) else list(requested), shapes)
    modules = tuple(dict.fromkeys(t.rpartition(".")[2] for t in targets))
    spec = LoraSpec(cfg.lora.r, cfg.lora.alpha, cfg.lora.dropout, modules)
    return spec, _fresh(cfg, base, spec, cfg.run.seed)


def _fresh(cfg: RunConfig, base: Base, spec: LoraSpec, seed: int) -> Mapping[str, Tensor]:
    """First values of an adapter that changes nothing yet."""
    fresh = stack_experts(init_tensors(spec, base.decoder.linear_shapes(), seed))
    return share_outer(fresh) if cfg.lora.expert_layout == "shared_outer" else fresh


def _engine_settings(cfg: RunConfig, base: Base) -> dict[str, Any]:
    """What an engine on one base is made with, once it is known that the sizes fit."""
    e = cfg.engine
    need = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    if need > base.max_context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {need}, more than model.max_context = "
            f"{base.max_context}",
            key="model.max_context",
        )
    pages = -(-need // PAGE) + 1  # a prompt's partly filled page is copied for every sample
    needed_bytes = pages * KVPages.page_bytes(base.spec, base.options.operand_dtype)
    if needed_bytes > e.kv_memory_mib << 20:
        raise ConfigError(
            f"engine.kv_memory_mib = {e.kv_memory_mib}: one sequence of rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens = {need} tokens takes {needed_bytes / 2**20:.1f} MiB; raise it",
            key="engine.kv_memory_mib",
        )
    return {
        "max_running": e.max_running,
        "kv_bytes": e.kv_memory_mib << 20,
        "prefill_tokens": e.prefill_tokens_per_tick,
        "record_experts": cfg.rl.router_replay,
        "decode": base.renderer.decode,
    }
