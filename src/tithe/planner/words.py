"""What a plan's texts call the memory that is planned: a GPU's, or a processor's one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tithe.planner.hardware import CPU_NAME


@dataclass(frozen=True)
class Words:
    """Of one kind of machine. Example: ``ON_GPUS.memory == "memory of the fullest GPU"``."""

    memory: str
    ends: str
    """Completes "the line is where …"."""
    frees: str
    column: str
    """Head of a column of freed gigabytes."""
    no_price: str


ON_GPUS: Final = Words(
    "memory of the fullest GPU",
    "a GPU ends",
    "what frees bytes on the fullest GPU",
    "GB a GPU",
    "no price of this card is known",
)
ON_PROCESSOR: Final = Words(
    "memory of the process",
    "the machine's memory ends",
    "what frees bytes of the process",
    "GB",
    "no price of this machine is known",
)


def is_processor(answer: Mapping[str, Any]) -> bool:
    """Whether a plan's JSON is of a processor."""
    return answer["hardware"].rpartition("x")[2] == CPU_NAME


def words_of(answer: Mapping[str, Any]) -> Words:
    """Those for a plan's JSON."""
    return ON_PROCESSOR if is_processor(answer) else ON_GPUS
