"""The whole configuration: sections of frozen, documented fields, and the rules between them."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from tithe.config.relations import check_relations
from tithe.config.sections import RunSections


class RunConfig(RunSections):
    """Everything a run is made from. Equal configurations compare equal; no instance ever changes.

    Built directly it raises pydantic's `ValidationError` for a wrong field and `ConfigError` for a wrong relation;
    `load_config` raises `ConfigError` for both.

    >>> RunConfig().rl.max_sample_age
    1
    """

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        check_relations(self)
        return self
