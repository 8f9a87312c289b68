"""The trainer: micro-batches forward and backward, AdamW on float32 masters, and proofs of what it computes.

`Trainer` learns an adapter on the frozen base, `FullTrainer` every parameter of a model of its own.
"""

from tithe.trainer.adam import StepResult
from tithe.trainer.full import FullTrainer
from tithe.trainer.full_leading import MODEL_ORDERS, FullShare, LeadingModel
from tithe.trainer.leading import TRAINER_CARRIERS, TRAINER_ORDERS, LeadingScorer, LeadingTrainer, TrainerShare
from tithe.trainer.proof import Perturbed, ScoredBatch, probe_logp, probe_masters, score_groups
from tithe.trainer.reference import Reference
from tithe.trainer.schedule import learning_rate
from tithe.trainer.scoring import BatchScorer, ScoringPlan, rejects_whole_rollouts
from tithe.trainer.settings import CriticSettings, TrainerSettings
from tithe.trainer.trainer import Trainer

__all__ = [
    "MODEL_ORDERS",
    "TRAINER_CARRIERS",
    "TRAINER_ORDERS",
    "BatchScorer",
    "CriticSettings",
    "FullShare",
    "FullTrainer",
    "LeadingModel",
    "LeadingScorer",
    "LeadingTrainer",
    "Perturbed",
    "Reference",
    "ScoredBatch",
    "ScoringPlan",
    "StepResult",
    "Trainer",
    "TrainerSettings",
    "TrainerShare",
    "learning_rate",
    "probe_logp",
    "probe_masters",
    "rejects_whole_rollouts",
    "score_groups",
]
