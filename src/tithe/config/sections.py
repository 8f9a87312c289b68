"""The sections together, before the rules between them."""

from __future__ import annotations

from pydantic import Field

from tithe.config.base import Section
from tithe.config.learning import LoraSettings, ModelSettings, OptimizerSettings, RlSettings
from tithe.config.running import MonitorSettings, RunSettings
from tithe.config.sampling import EngineSettings, RewardSettings, RolloutSettings, TaskSettings
from tithe.config.schedules import ScheduleSettings


class RunSections(Section):
    """The fields of `RunConfig`; the rules between them are in `relations`."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    """The frozen base."""

    lora: LoraSettings = Field(default_factory=LoraSettings)
    """The adapter."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """Optimizer and schedule."""

    rl: RlSettings = Field(default_factory=RlSettings)
    """Objective and staleness bounds."""

    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Sampling."""

    schedule: ScheduleSettings = Field(default_factory=ScheduleSettings)
    """What changes over the run."""

    reward: RewardSettings = Field(default_factory=RewardSettings)
    """Judging."""

    task: TaskSettings = Field(default_factory=TaskSettings)
    """Questions."""

    engine: EngineSettings = Field(default_factory=EngineSettings)
    """Rollout engine."""

    monitor: MonitorSettings = Field(default_factory=MonitorSettings)
    """Watching."""

    run: RunSettings = Field(default_factory=RunSettings)
    """Identity, length, rhythm, machine."""
