"""The configuration: a frozen schema of documented fields; YAML and ``section.key=value`` in, resolved YAML out.

Nothing here imports torch. `load_config` is the way in; every problem is a `ConfigError` that names the key, what was
given and what is allowed. `config_warnings` returns doubtful settings as text and prints nothing.
"""

from tithe.config.base import Section
from tithe.config.learning import LoraSettings, ModelSettings, OptimizerSettings, RlSettings
from tithe.config.loading import build_config, dump_resolved, load_config
from tithe.config.relations import config_warnings
from tithe.config.resuming import CONFIG_FILE, RESUME_MUTABLE, check_resume, load_resumed, load_run
from tithe.config.running import MonitorSettings, RunSettings
from tithe.config.sampling import EngineSettings, FormatRule, RewardSettings, RolloutSettings, TaskSettings
from tithe.config.schema import RunConfig

__all__ = [
    "CONFIG_FILE",
    "RESUME_MUTABLE",
    "EngineSettings",
    "FormatRule",
    "LoraSettings",
    "ModelSettings",
    "MonitorSettings",
    "OptimizerSettings",
    "RewardSettings",
    "RlSettings",
    "RolloutSettings",
    "RunConfig",
    "RunSettings",
    "Section",
    "TaskSettings",
    "build_config",
    "check_resume",
    "config_warnings",
    "dump_resolved",
    "load_config",
    "load_resumed",
    "load_run",
]
