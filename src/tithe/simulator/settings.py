"""From a configuration to a scenario."""

from __future__ import annotations

from dataclasses import replace

from tithe.config import RunConfig, schedule_of
from tithe.pool import Curriculum
from tithe.simulator.costs import WorkCosts
from tithe.simulator.draws import Clipped
from tithe.simulator.measured import Measurement
from tithe.simulator.scenario import Failures, Scenario, Workload
from tithe.staleness import Bounds


def scenario_of(cfg: RunConfig, costs: WorkCosts, workload: Workload, *, steps: int, seed: int = 0) -> Scenario:
    """A run's settings on one shared base. Lengths are cut at `rollout.max_new_tokens` and `max_prompt_tokens`.

    The plain math reward is judged without a worker; every other function is judged by `reward.workers`, under
    `reward.timeout_s`. What follows prompts' records in the schedule is simulated where the workload says how many
    prompts there are and how often they are answered right.
    """
    phases = schedule_of(cfg)
    in_process = cfg.reward.function == "math" and not cfg.reward.format_rules
    workload = replace(
        workload,
        new_tokens=Clipped(workload.new_tokens, cfg.rollout.max_new_tokens),
        prompt_tokens=Clipped(workload.prompt_tokens, cfg.rollout.max_prompt_tokens),
    )
    has_records = workload.prompts > 0 and workload.pass_rate is not None
    return Scenario(
        Bounds.of(cfg.rl),
        costs,
        workload,
        on_publish=cfg.rollout.on_publish,
        buffer=cfg.rl.rollout_buffer_size,
        max_running=cfg.engine.max_running,
        prefill_tokens=cfg.engine.prefill_tokens_per_tick,
        micro_batch_tokens=cfg.rl.micro_batch_tokens,
        max_live_versions=cfg.engine.max_live_versions,
        reward_workers=None if in_process else cfg.reward.workers,
        reward_timeout_s=None if in_process else cfg.reward.timeout_s,
        failed_batches=cfg.monitor.alarm_after,
        checkpoint_every=cfg.run.checkpoint_every,
        steps=steps,
        seed=seed,
        group_sizes=tuple(zip(phases.starts, (one.samples for one in phases.values), strict=True))
        if cfg.schedule.phases
        else (),
        samples_span=cfg.schedule.adaptive_samples if has_records else None,
        curriculum=Curriculum.of(cfg.schedule) if has_records else Curriculum(),
    )


def scenario_of_run(
    cfg: RunConfig, measured: Measurement, *, steps: int, seed: int = 0, records: Workload | None = None
) -> Scenario:
    """A scenario under `cfg` with the lengths, waiting and costs of a run; `records` gives prompts and pass rates."""
    workload = replace(records or Workload(), measured=measured.groups)
    scenario = scenario_of(cfg, measured.costs, workload, steps=steps, seed=seed)
    return replace(
        scenario,
        lease_s=measured.lease_s,
        between_s=measured.between_s,
        checkpoint_s=measured.checkpoint_s,
        failures=Failures(rollout_rate=measured.failure_rate),
    )
