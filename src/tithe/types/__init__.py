"""The data carriers and the six protocols every other room speaks."""

from tithe.types.carriers import (
    Completion,
    ExpertArray,
    FinishReason,
    GenerateRequest,
    PolicyVersion,
    PromptItem,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TrainingBatch,
)
from tithe.types.protocols import Env, GenerateFn, MetricSink, RewardFn, RolloutEngine, WeightChannel

__all__ = [
    "Completion",
    "Env",
    "ExpertArray",
    "FinishReason",
    "GenerateFn",
    "GenerateRequest",
    "MetricSink",
    "PolicyVersion",
    "PromptItem",
    "RewardFn",
    "Rollout",
    "RolloutEngine",
    "RolloutGroup",
    "SamplingParams",
    "TrainingBatch",
    "WeightChannel",
]
