"""The whole configuration: ten sections of frozen, documented fields."""

from __future__ import annotations

from pydantic import Field, model_validator

from tithe.config.base import Section
from tithe.config.learning import LoraSettings, ModelSettings, OptimizerSettings, RlSettings
from tithe.config.relations import check_relations
from tithe.config.running import MonitorSettings, RunSettings
from tithe.config.sampling import EngineSettings, RewardSettings, RolloutSettings, TaskSettings


class RunConfig(Section):
    """Everything a run is made from. Equal configurations compare equal; no instance ever changes.

    Built directly it raises pydantic's `ValidationError` for a wrong field and `ConfigError` for a wrong relation;
    `load_config` raises `ConfigError` for both.

    >>> RunConfig().rl.max_sample_age
    1
    """

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

    @model_validator(mode="after")
    def _relations_hold(self) -> RunConfig:
        check_relations(self)
        return self
