"""What the policy is paid for: finding the answer in a text, comparing it exactly, users' own functions, format rules.
Judged in worker processes that are killed from outside when they take too long; a judge that fails abstains and never
pays. Free of torch."""

from tithe.rewards.exact import same_answer
from tithe.rewards.extraction import Answer, AnswerForm, extract_answer, find_answer
from tithe.rewards.functions import load_function
from tithe.rewards.math_reward import Verdict, gold_answer, judge
from tithe.rewards.pool import RewardPool
from tithe.rewards.spec import FACT, FormatRule, RewardResult, RewardSpec, build_reward, is_readable, score_of

__all__ = [
    "FACT",
    "Answer",
    "AnswerForm",
    "FormatRule",
    "RewardPool",
    "RewardResult",
    "RewardSpec",
    "Verdict",
    "build_reward",
    "extract_answer",
    "find_answer",
    "gold_answer",
    "is_readable",
    "judge",
    "load_function",
    "same_answer",
    "score_of",
]
