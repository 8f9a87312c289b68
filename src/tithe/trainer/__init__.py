"""The trainer: micro-batches forward and backward, AdamW on float32 masters, and proofs of what it computes."""

from tithe.trainer.proof import ScoredBatch, perturbed, probe_logp, score_groups
from tithe.trainer.schedule import learning_rate
from tithe.trainer.settings import TrainerSettings
from tithe.trainer.trainer import StepResult, Trainer

__all__ = [
    "ScoredBatch",
    "StepResult",
    "Trainer",
    "TrainerSettings",
    "learning_rate",
    "perturbed",
    "probe_logp",
    "score_groups",
]
