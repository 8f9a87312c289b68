"""The data carriers and the six protocols every other room speaks."""

from tithe.types.carriers import (
    BatchScores,
    Completion,
    ExpertArray,
    FinishReason,
    GenerateRequest,
    PerRollout,
    PolicyVersion,
    PromptItem,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TrainingBatch,
)
from tithe.types.protocols import Env, GenerateFn, MetricSink, RewardFn, RolloutEngine, WeightChannel

__all__ = [
    "BatchScores",
    "Completion",
    "Env",
    "ExpertArray",
    "FinishReason",
    "GenerateFn",
    "GenerateRequest",
    "MetricSink",
    "PerRollout",
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
