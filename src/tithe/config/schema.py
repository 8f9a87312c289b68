"""The whole configuration: sections of frozen, documented fields, and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError, model_validator

from tithe.config.algorithms import ALGORITHMS, KL_LEARNED
from tithe.config.relations import check_relations
from tithe.config.sampling import RewardSettings
from tithe.config.sections import RunSections


class RunConfig(RunSections):
    """Everything a run is made from. Equal configurations compare equal; no instance ever changes.

    Built directly it raises pydantic's `ValidationError` for a wrong field and `ConfigError` for a wrong relation;
    `load_config` raises `ConfigError` for both.

    >>> RunConfig().rl.max_sample_age
    1
    """

    @model_validator(mode="before")
    @classmethod
    def _weaker_kl_under_a_learned_reward(cls, values: Any) -> Any:
        return _with_learned_kl(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        check_relations(self)
        return self


def _with_learned_kl(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rl.kl_coef` where a learned model judges, the algorithm has a KL and no value is given: the one default that
    follows from another section."""
    rl, reward = values.get("rl", {}), values.get("reward", {})
    if not isinstance(rl, Mapping) or "kl_coef" in rl:
        return values
    defaults = ALGORITHMS.get(str(rl.get("algorithm", "grpo")))
    if defaults is None or defaults.kl_coef == 0:
        return values
    try:
        learned = RewardSettings.model_validate(reward).uses_learned_model
    except ValidationError:  # told by the validation of the whole
        return values
    return {**values, "rl": {**rl, "kl_coef": KL_LEARNED}} if learned else values
