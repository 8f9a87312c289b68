"""The planner's costs as a simulation's: a model on hardware that nobody has rented yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tithe.config import RunConfig
from tithe.errors import UserError
from tithe.planner.costs import StepCosts
from tithe.planner.factors import DEFAULTS
from tithe.planner.hardware import Hardware
from tithe.planner.request import PlanRequest, make_request
from tithe.planner.roofline import sampling_parallel, step_costs
from tithe.simulator.costs import PublishCosts
from tithe.simulator.scenario import Layout, Scenario


@dataclass(frozen=True)
class PlannedCosts:
    """`WorkCosts` of a plan. On a shared base, `replicas` copies of the model do each piece of work together: they
    divide a tick's prompts and sequences, and a publication takes the lane.

    Example: two replicas of 8 sequences each tick as one of 8: ``PlannedCosts(step, replicas=2)`` asks ``step`` for
    ``decode_tick_s(8, …)`` when 16 are live.
    """

    step: StepCosts
    replicas: int = 1
    on_lane: bool = True

    def tick_s(self, *, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """Prompts and one token of every sequence, one after the other."""
        mean = context_tokens / sequences if sequences else 0.0
        decode_s = self.step.decode_tick_s(-(-sequences // self.replicas), mean)
        return self.step.prefill_s(prefill_tokens) / self.replicas + decode_s

    def train_s(self, tokens: int) -> float:
        """Of one micro-batch, the optimizer's share included."""
        return self.step.train_s(tokens)

    @property
    def optimizer_s(self) -> float:
        """It is in `train_s`."""
        return 0.0

    @property
    def publish(self) -> PublishCosts:
        """On separate GPUs it travels while both sides work."""
        seconds = self.step.publish_s
        return PublishCosts(engine_s=seconds) if self.on_lane else PublishCosts(transfer_s=seconds)


@dataclass(frozen=True)
class Plan:
    """A model on hardware. `place` gives a scenario its layout and the costs that go with it."""

    request: PlanRequest

    @property
    def name(self) -> str:
        """For people."""
        request = self.request
        return f"planned for {request.model} ({request.base.name}) on {request.hardware.name}"

    def place(self, scenario: Scenario, split: tuple[int, int] | None) -> Scenario:
        """On all GPUs together, or on `split` = rollout : train GPUs. Raises `UserError` when they do not add up."""
        gpus = self.request.hardware.gpus
        if split is None:
            costs, replicas = self._costs("shared", self.request.hardware, gpus)
            layout = Layout(gpus=gpus, label=f"{gpus} GPUs shared")
            return replace(scenario, layout=layout, costs=PlannedCosts(costs, replicas))
        rollout, train = split
        if rollout + train != gpus:
            raise UserError(f"--split {rollout}:{train} needs {rollout + train} GPUs, --hardware has {gpus}")
        costs, replicas = self._costs("separate", self.request.hardware.with_gpus(rollout), train)
        layout = Layout("separate", replicas, 1, gpus=gpus, label=f"{rollout} rollout + {train} train GPUs")
        return replace(scenario, layout=layout, costs=PlannedCosts(costs, on_lane=False))

    def _costs(self, layout: str, sampling: Hardware, n_train: int) -> tuple[StepCosts, int]:
        asked = replace(self.request, layout=layout)
        return step_costs(asked, DEFAULTS, sampling, n_train), sampling_parallel(asked, sampling).replicas


def plan_of(cfg: RunConfig, model: str | None, hardware: str, base: str, *, prompt: int, new: int) -> Plan:
    """A plan under a run's settings; `prompt` and `new` are mean tokens. Raises `UserError`."""
    name = model or cfg.model.path
    if name is None:
        raise UserError("--hardware needs a model: add --model, such as --model kimi-k2, or set model.path")
    targets = cfg.lora.target_modules
    request = make_request(
        name,
        hardware,
        base=base,
        lora_r=cfg.lora.r,
        lora_targets=(targets,) if isinstance(targets, str) else tuple(targets),
        lora_experts=cfg.lora.expert_layout,
        context=cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens,
        prompt=min(prompt, cfg.rollout.max_prompt_tokens),
        new=min(new, cfg.rollout.max_new_tokens),
        sequences=cfg.engine.max_running,
        batch=cfg.rl.batch_size_per_update,
    )
    return Plan(request)
