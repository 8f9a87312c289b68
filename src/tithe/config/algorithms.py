"""What `rl.algorithm` and `rl.correction` stand for: the defaults of the other keys of `rl`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DAPO_CLIP_HIGH = 0.28
"""Upper clip of DAPO (arXiv 2503.14476)."""


KL_VERIFIED = 0.01
"""Weight of the KL where a program judges."""

KL_LEARNED = 0.001
"""Weight of the KL where a learned model judges, alone or among others."""


@dataclass(frozen=True)
class AlgorithmDefaults:
    """Defaults under one algorithm. `clip_range_high` None is the lower clip; where it is a number, the larger of the
    two."""

    kl_coef: float = 0.0
    kl_placement: str = "loss"
    kl_estimator: str = "k3"
    clip_range: float = 0.2
    clip_range_high: float | None = None
    advantage_scale: str = "std"
    aggregation: str = "token_mean"
    dynamic_sampling: bool = False
    overlong: str = "keep"


ALGORITHMS: dict[str, AlgorithmDefaults] = {
    "cispo": AlgorithmDefaults(clip_range=1.0, clip_range_high=4.0),
    "dapo": AlgorithmDefaults(clip_range_high=DAPO_CLIP_HIGH, dynamic_sampling=True, overlong="punish"),
    "dr_grpo": AlgorithmDefaults(advantage_scale="none", aggregation="seq_mean_token_sum_norm"),
    "grpo": AlgorithmDefaults(kl_coef=KL_VERIFIED),
    "gspo": AlgorithmDefaults(clip_range=3e-4, clip_range_high=4e-4, aggregation="seq_mean_token_mean"),
    "ppo": AlgorithmDefaults(kl_coef=KL_VERIFIED, kl_placement="reward", kl_estimator="k1", advantage_scale="batch"),
    "reinforce_pp": AlgorithmDefaults(
        kl_coef=KL_VERIFIED, kl_placement="reward", kl_estimator="k1", advantage_scale="batch"
    ),
    "reinforce_pp_baseline": AlgorithmDefaults(kl_coef=KL_VERIFIED, kl_estimator="k2", advantage_scale="batch"),
    "rloo": AlgorithmDefaults(
        kl_coef=KL_VERIFIED,
        kl_placement="reward",
        kl_estimator="k1",
        advantage_scale="none",
        aggregation="seq_mean_token_sum",
    ),
}
"""Name → defaults."""


@dataclass(frozen=True)
class CorrectionDefaults:
    """Bounds of a weight under one correction; for `opsm`, `high` is a mean drift in nats a token."""

    low: float = 0.0
    high: float | None = None


CORRECTIONS: dict[str, CorrectionDefaults] = {
    "none": CorrectionDefaults(),
    "tis": CorrectionDefaults(high=2.0),
    "mis": CorrectionDefaults(low=0.5, high=2.0),
    "icepop": CorrectionDefaults(low=0.5, high=5.0),
    "decoupled": CorrectionDefaults(high=5.0),
    "opsm": CorrectionDefaults(high=0.1),
}
"""Name → defaults: TIS as FlashRL and verl, IcePop as Ring-1T, decoupled as AReaL's runs."""

Level = Literal["token", "sequence", "geometric"]

LEVELS: dict[str, Level] = {"": "token", "sequence": "sequence", "geometric": "geometric"}
"""Ending of a correction's name → what its weight belongs to."""

LAMBDA = 0.95
"""`rl.gae_lambda` where none is given."""

WEIGHING = frozenset({"tis", "mis", "icepop", "decoupled"})
"""Corrections that weigh a sample by the trainer's policy over what it was drawn from."""


def of_algorithm(field: str) -> Callable[[dict[str, Any]], Any]:
    """The default of a key from the algorithm above it."""
    return lambda values: getattr(ALGORITHMS[values["algorithm"]], field)


def correction_parts(correction: str) -> tuple[str, Level]:
    """The name of a correction, and what its weight belongs to.

    >>> correction_parts("mis_geometric"), correction_parts("tis")
    (('mis', 'geometric'), ('tis', 'token'))
    """
    name, _, level = correction.partition("_")
    return name, LEVELS[level]


def of_correction(values: dict[str, Any]) -> tuple[float, float | None]:
    """The bounds of a weight under the correction above them."""
    defaults = CORRECTIONS[correction_parts(values["correction"])[0]]
    return defaults.low, defaults.high


def clip_high(values: dict[str, Any]) -> float | None:
    """The upper clip: the lower one, or the algorithm's if that is more. A lower clip that is given moves both."""
    low, high = values["clip_range"], ALGORITHMS[values["algorithm"]].clip_range_high
    return low if low is None or high is None else max(low, high)
