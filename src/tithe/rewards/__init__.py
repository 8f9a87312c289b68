"""What the policy is paid for: finding the answer in a text, comparing it exactly or by algebra, tool calls, users' own
functions, format rules, and how these become one reward (docs/rewards.md).
Judged in worker processes that are killed from outside when they take too long; a judge that fails abstains and never
pays. Free of torch."""

from tithe.rewards.diversity import mean_overlap, penalise_likeness, unpenalised
from tithe.rewards.exact import same_answer
from tithe.rewards.extraction import Answer, AnswerForm, extract_answer, find_answer
from tithe.rewards.functions import load_function
from tithe.rewards.math_reward import Verdict, gold_answer, judge
from tithe.rewards.pool import RewardPool
from tithe.rewards.running import RunningScale
from tithe.rewards.spec import (
    BUILT_IN,
    FACT,
    FormatRule,
    ModelScore,
    PartSpec,
    RewardModel,
    RewardResult,
    RewardSpec,
    build_reward,
    is_readable,
    prepared,
    score_of,
    weighted,
)

__all__ = [
    "BUILT_IN",
    "FACT",
    "Answer",
    "AnswerForm",
    "FormatRule",
    "ModelScore",
    "PartSpec",
    "RewardModel",
    "RewardPool",
    "RewardResult",
    "RewardSpec",
    "RunningScale",
    "Verdict",
    "build_reward",
    "extract_answer",
    "find_answer",
    "gold_answer",
    "is_readable",
    "judge",
    "load_function",
    "mean_overlap",
    "penalise_likeness",
    "prepared",
    "same_answer",
    "score_of",
    "unpenalised",
    "weighted",
]
