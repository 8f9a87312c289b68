"""From a configuration to live objects: the only place that names concrete classes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from tithe.build.base import Base, open_base, other_storage
from tithe.build.launch import start_crew
from tithe.build.learning import make_learning
from tithe.build.objective import batch_scorer
from tithe.build.scoring import RewardModels, open_reward_models
from tithe.config import RunConfig
from tithe.engines import CopiedEngine, EngineShare, SharedEngine, SpreadEngine
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
from tithe.models import split_experts
from tithe.orchestration import Player, generate_with
from tithe.rewards import BUILT_IN, RewardPool, build_reward
from tithe.trainer import FullShare, FullTrainer, LeadingModel, LeadingTrainer, Trainer, TrainerShare
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
    engine: SharedEngine | SpreadEngine | CopiedEngine
    own_engine: SharedEngine | CopiedEngine
    trainer: Trainer | FullTrainer
    """This process's own, as `own_engine`."""
    learner: LeadingTrainer
    """What the train loop drives: the trainers of all ranks."""
    player: Player
    params: SamplingParams
    reward_models: RewardModels
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

    @property
    def model(self) -> LeadingModel:
        """The trained model of all ranks, of a run that trains every parameter."""
        assert isinstance(self.trainer, FullTrainer), "a run that learns an adapter has a frozen base"
        return LeadingModel(self.base.crew.orders)

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
    crew = start_crew(cfg.run.ranks)  # before anything here has threads
    closers: list[Callable[[], None]] = [crew.end]
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a task's `module:function` may lie where a reward's may
    try:
        rewards = RewardPool(
            build_reward(cfg.reward, cfg.rl.reward_shaping),
            workers=cfg.reward.workers,
            timeout_s=cfg.reward.timeout_s,
            memory_mib=cfg.reward.memory_mib,
            log_path=log_dir / "reward.log" if log_dir is not None else None,
        )
        closers.append(rewards.close)
        rewards.check()
        task = load_task(cfg.task, needs_answer=cfg.reward.function in BUILT_IN)
        base = open_base(cfg, say, crew, adapter)
        closers += [base.lane.close, lambda: base.lane.call(crew.stop)]
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
        trainer, own = base.lane.call(make_learning, cfg, base, adapter, say)
        learner, engine = _leading(base, trainer, own)
        models = open_reward_models(cfg, base, trainer, system_prompt, say)
        rewards.models = models.by_function
        player = Player(
            _environment(cfg, base, rewards, tools), generate_with(engine), lambda i: prompts.prompt_ids(i.id)
        )
        params = sampling_params(cfg, base)
    except BaseException:
        while closers:
            closers.pop()()
        raise
    return Session(cfg, base, task, prompts, rewards, engine, own, trainer, learner, player, params, models, closers)


def _environment(cfg: RunConfig, base: Base, rewards: RewardPool, tools: Sequence[Tool]) -> SingleTurnEnv | ToolEnv:
    """Single turns, or conversations where there are tools."""
    if not tools:
        return SingleTurnEnv(base.renderer, rewards)
    task = cfg.task
    return ToolEnv(base.renderer, rewards, tools, TurnRules(task.max_turns, task.call_format, task.turn_reward))


def _leading(
    base: Base, trainer: Trainer | FullTrainer, engine: SharedEngine | CopiedEngine
) -> tuple[LeadingTrainer, SharedEngine | SpreadEngine | CopiedEngine]:
    """What the loops of rank 0 talk to."""
    orders = base.crew.orders
    scorer = batch_scorer(base.cfg, trainer)
    share = TrainerShare(trainer, orders, scorer, partial(other_storage, base))
    if isinstance(trainer, FullTrainer):
        FullShare(trainer, orders)
    lead = LeadingTrainer(share, orders, scores=scorer is not None)
    if orders.ranks.size == 1:
        return lead, engine
    return lead, SpreadEngine(EngineShare(engine, orders), orders, base.lane)


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
