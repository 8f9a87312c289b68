"""The configuration: a frozen schema of documented fields; YAML and ``section.key=value`` in, resolved YAML out.

Nothing here imports torch. `load_config` is the way in; every problem is a `ConfigError` that names the key, what was
given and what is allowed. `config_warnings` returns doubtful settings as text and prints nothing.
"""

from tithe.config.base import Section
from tithe.config.demo import DEMO_OVERRIDES, demo_config
from tithe.config.learning import LoraSettings, ModelSettings, OptimizerSettings, RlSettings
from tithe.config.loading import build_config, dump_resolved, load_config
from tithe.config.phases import PhaseValues, Schedule, schedule_of
from tithe.config.relations import config_warnings
from tithe.config.resuming import CONFIG_FILE, RESUME_MUTABLE, check_resume, load_resumed, load_run
from tithe.config.run_dirs import choose_run_dir
from tithe.config.running import MonitorSettings, RunSettings
from tithe.config.sampling import EngineSettings, FormatRule, RewardSettings, RolloutSettings, TaskSettings
from tithe.config.schedules import Phase, ScheduleSettings
from tithe.config.schema import RunConfig

__all__ = [
    "CONFIG_FILE",
    "DEMO_OVERRIDES",
    "RESUME_MUTABLE",
    "EngineSettings",
    "FormatRule",
    "LoraSettings",
    "ModelSettings",
    "MonitorSettings",
    "OptimizerSettings",
    "Phase",
    "PhaseValues",
    "RewardSettings",
    "RlSettings",
    "RolloutSettings",
    "RunConfig",
    "RunSettings",
    "Schedule",
    "ScheduleSettings",
    "Section",
    "TaskSettings",
    "build_config",
    "check_resume",
    "choose_run_dir",
    "config_warnings",
    "demo_config",
    "dump_resolved",
    "load_config",
    "load_resumed",
    "load_run",
    "schedule_of",
]
