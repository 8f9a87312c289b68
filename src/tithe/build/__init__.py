"""Composition root: configuration → objects, and the commands' work. The only room that names concrete classes."""

from tithe.build.capacity import capacity
from tithe.build.commands import check, demo, evaluate, parity, report, sample
from tithe.build.rank import follow_launched
from tithe.build.reward_model import PairOptions, train_reward_model
from tithe.build.running import resume, train

__all__ = [
    "PairOptions",
    "capacity",
    "check",
    "demo",
    "evaluate",
    "follow_launched",
    "parity",
    "report",
    "resume",
    "sample",
    "train",
    "train_reward_model",
]
