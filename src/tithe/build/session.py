"""From a configuration to live objects: the only place that names concrete classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from tithe.build.base import Base, open_base
from tithe.build.full import copied_engine, full_trainer
from tithe.build.origin import origin_problem
from tithe.config import PhaseValues, RunConfig, schedule_of
from tithe.engines import CopiedEngine, SharedEngine
from tithe.envs import (
    EncodedPrompts,
    SingleTurnEnv,
    Task,
    Tool,
    ToolEnv,
    TurnRules,
    build_tools,
    encode_prompts,
    load_task,
    with_tools,
)
from tithe.errors import AdapterError, ConfigError
from tithe.lora import LoraSpec, init_tensors, load_adapter, resolve_targets
from tithe.losses import Aggregation, LossSettings
from tithe.models import PAGE, KVPages, share_outer, split_experts, stack_experts
from tithe.orchestration import Player, generate_with
from tithe.rewards import BUILT_IN, RewardPool, build_reward
from tithe.trainer import FullTrainer, Trainer, TrainerSettings
from tithe.types import PromptItem, SamplingParams


def say(line: str) -> None:
    """One line of progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


@dataclass(eq=False)
class Session:
    """Everything one run computes with. Close it, or use it in a ``with`` block: workers and lane end then."""

    cfg: RunConfig
    base: Base
    task: Task
    prompts: EncodedPrompts
    rewards: RewardPool
    engine: SharedEngine | CopiedEngine
    trainer: Trainer | FullTrainer
    player: Player
    params: SamplingParams
    closers: list[Callable[[], None]] = field(default_factory=list)

    def items(self) -> Mapping[str, PromptItem]:
        """Training prompts that fit, by id."""
        held_out = {item.id for item in self.task.eval}
        return {item.id: item for item in self.prompts.items if item.id not in held_out}

    def questions(self) -> tuple[PromptItem, ...]:
        """Held-out questions that fit."""
        held_out = {item.id for item in self.task.eval}
        return tuple(item for item in self.prompts.items if item.id in held_out)

    @property
    def adapter_trainer(self) -> Trainer:
        """The trainer of a run that learns an adapter."""
        assert isinstance(self.trainer, Trainer), "a run that trains every parameter has no adapter"
        return self.trainer

    def published_tensors(self) -> Mapping[str, Tensor]:
        """The trainer's adapter as it is published: experts one by one, what they share under every number. No copies
        of what is not shared."""
        return split_experts(self.adapter_trainer.adapter_tensors(), repeat=self.base.decoder.n_experts)

    def close(self) -> None:
        """End workers and lane; a second call does nothing."""
        while self.closers:
            self.closers.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_session(cfg: RunConfig, *, log_dir: Path | None = None, adapter: Path | None = None) -> Session:
    """Load the base, read the task, start graders, make trainer and engine.

    `adapter` (or else `lora.init_from`) is a PEFT directory the policy starts from; a model's directory where every
    parameter is trained. Cheap inputs are checked before the base is loaded. Raises `UserError`.
    """
    rewards = RewardPool(
        build_reward(cfg.reward, cfg.rl.reward_shaping),
        workers=cfg.reward.workers,
        timeout_s=cfg.reward.timeout_s,
        memory_mib=cfg.reward.memory_mib,
        log_path=log_dir / "reward.log" if log_dir is not None else None,
    )
    closers: list[Callable[[], None]] = [rewards.close]
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a task's `module:function` may lie where a reward's may
    try:
        rewards.check()
        task = load_task(cfg.task, needs_answer=cfg.reward.function in BUILT_IN)
        base = open_base(cfg, say)
        closers.append(base.lane.close)
        cfg = base.cfg
        for line in task.report.lines():
            say(line)
        tools = build_tools(cfg.task.tools, closers)
        items, system_prompt = (*task.train, *task.eval), cfg.rollout.system_prompt
        if tools:
            items, system_prompt = with_tools(items, tools, cfg.task.call_format, system_prompt), None
        prompts = encode_prompts(
            items,
            base.renderer,
            max_prompt_tokens=cfg.rollout.max_prompt_tokens,
            on_long_prompt=cfg.rollout.on_long_prompt,
            system_prompt=system_prompt,
        )
        trainer, engine = base.lane.call(_learning, cfg, base, adapter)
        player = Player(
            _environment(cfg, base, rewards, tools), generate_with(engine), lambda i: prompts.prompt_ids(i.id)
        )
        params = sampling_params(cfg, base)
    except BaseException:
        while closers:
            closers.pop()()
        raise
    return Session(cfg, base, task, prompts, rewards, engine, trainer, player, params, closers)


def _environment(cfg: RunConfig, base: Base, rewards: RewardPool, tools: Sequence[Tool]) -> SingleTurnEnv | ToolEnv:
    """Single turns, or conversations where there are tools."""
    if not tools:
        return SingleTurnEnv(base.renderer, rewards)
    task = cfg.task
    return ToolEnv(base.renderer, rewards, tools, TurnRules(task.max_turns, task.call_format, task.turn_reward))


def _learning(
    cfg: RunConfig, base: Base, given: Path | None
) -> tuple[Trainer | FullTrainer, SharedEngine | CopiedEngine]:
    """Trainer and engine. On the lane."""
    settings = _engine_settings(cfg, base)
    if base.held is None:
        return full_trainer(cfg, base, trainer_settings(cfg), given), copied_engine(cfg, base, settings)
    spec, tensors = _adapter(cfg, base, given)
    trainer = Trainer(base.decoder, spec, tensors, trainer_settings(cfg))
    live, follow = cfg.engine.max_live_versions, cfg.rollout.on_publish
    return trainer, SharedEngine(base.decoder, base.lane, max_live_versions=live, on_publish=follow, **settings)


def sampling_params(cfg: RunConfig, base: Base) -> SamplingParams:
    """The template of every request."""
    r = cfg.rollout
    return SamplingParams(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        max_new_tokens=r.max_new_tokens,
        stop_token_ids=tuple(sorted(base.renderer.stop_token_ids)),
        stop_strings=tuple(r.stop_strings),
        seed=cfg.run.seed,
    )


def trainer_settings(cfg: RunConfig, phase: PhaseValues | None = None) -> TrainerSettings:
    """The trainer's part of a configuration in a phase of its schedule; without one, with the KL coefficient of the
    phase that has most, which decides whether the trainer needs a reference at all."""
    rl, o = cfg.rl, cfg.optimizer
    phase = phase or max(schedule_of(cfg).values, key=lambda values: values.kl_coef)
    in_loss = rl.kl_placement == "loss"
    loss = LossSettings(
        aggregation=Aggregation(rl.aggregation),
        clip_range=rl.clip_range,
        clip_range_high=rl.clip_range_high,
        kl_coef=phase.kl_coef if in_loss else 0.0,
        entropy_coef=rl.entropy_coef,
    )
    return TrainerSettings(
        algorithm=rl.algorithm,
        loss=loss,
        norm_tokens=cfg.rollout.max_new_tokens,
        kl_coef=phase.kl_coef,
        kl_placement=rl.kl_placement,
        lr=phase.lr,
        beta1=o.beta1,
        beta2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
        lr_scheduler=o.lr_scheduler,
        warmup_steps=o.warmup_steps,
        min_lr_ratio=o.min_lr_ratio,
        total_steps=cfg.run.max_steps,
        micro_batch_tokens=rl.micro_batch_tokens,
        activation_checkpointing=cfg.model.activation_checkpointing,
        dropout=cfg.lora.dropout,
        seed=cfg.run.seed,
    )


def _adapter(cfg: RunConfig, base: Base, given: Path | None) -> tuple[LoraSpec, Mapping[str, Tensor]]:
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
    fresh = stack_experts(init_tensors(spec, shapes, cfg.run.seed))
    return spec, share_outer(fresh) if cfg.lora.expert_layout == "shared_outer" else fresh


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
