"""Reward models: a sequence classifier from a directory, or the run's own frozen base with an adapter and a scalar
head; and how one is trained from pairs of replies (docs/rewards.md).

    ids of prompt and reply ──▶ decoder (+ adapter) ──▶ hidden state of the last token ──▶ linear head ──▶ one number

Everything that computes belongs to the lane; `ScoringDesk` takes requests from any thread and batches them there.
"""

from tithe.scorers.classifier import TransformersScorer, load_classifier
from tithe.scorers.decoder_scorer import DecoderScorer, Scorer
from tithe.scorers.desk import ScoringDesk
from tithe.scorers.directory import (
    MANIFEST_FILE,
    RewardModelManifest,
    load_reward_model,
    probe_gap,
    read_manifest,
    save_reward_model,
)
from tithe.scorers.preference import Ranked, ReplyPair, preference_loss, rank_pairs
from tithe.scorers.replies import Reply
from tithe.scorers.score_head import ScoreHead
from tithe.scorers.training import PreferenceSettings, PreferenceTrainer

__all__ = [
    "MANIFEST_FILE",
    "DecoderScorer",
    "PreferenceSettings",
    "PreferenceTrainer",
    "Ranked",
    "Reply",
    "ReplyPair",
    "RewardModelManifest",
    "ScoreHead",
    "Scorer",
    "ScoringDesk",
    "TransformersScorer",
    "load_classifier",
    "load_reward_model",
    "preference_loss",
    "probe_gap",
    "rank_pairs",
    "read_manifest",
    "save_reward_model",
]
