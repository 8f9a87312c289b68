"""The trainer: micro-batches forward and backward, AdamW on float32 masters, and proofs of what it computes."""

from tithe.trainer.proof import Perturbed, ScoredBatch, probe_logp, probe_masters, score_groups
from tithe.trainer.schedule import learning_rate
from tithe.trainer.settings import TrainerSettings
from tithe.trainer.trainer import StepResult, Trainer

__all__ = [
    "Perturbed",
    "ScoredBatch",
    "StepResult",
    "Trainer",
    "TrainerSettings",
    "learning_rate",
    "probe_logp",
    "probe_masters",
    "score_groups",
]
