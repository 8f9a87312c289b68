"""Efficiency factors: how far real work stays below the roofline, each with its default and where that comes from.

A factor is replaced by a run's own figure with `tithe plan --calibrate RUN_DIR` (`tithe.planner.calibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final


@dataclass(frozen=True)
class Factors:
    """Numbers between 0 and 1 unless a name ends in a unit."""

    hbm_dense: float = 0.8
    hbm_experts: float = 0.9
    hbm_cache: float = 0.9
    decode_layer_s: float = 20e-6
    decode_collective_s: float = 92e-6
    decode_collective_node_s: float = 160e-6
    decode_indexer_s: float = 75.3e-6
    decode_layer_sequence_s: float = 0.125e-6
    decode_flops: float = 0.7
    prefill_flops_dense: float = 0.25
    prefill_flops_moe: float = 0.153
    train_flops_dense: float = 0.438
    train_flops_moe: float = 0.145
    train_flops_attention: float = 0.408
    train_micro_s: float = 0.51
    full_step: float = 0.2
    publish_bandwidth: float = 0.784
    publish_fixed_s: float = 0.979

    def updated(self, values: dict[str, float]) -> Factors:
        """Some of them replaced."""
        return replace(self, **values)


DEFAULTS: Final = Factors()

SOURCES: Final[dict[str, str]] = {
    "hbm_dense": "share of HBM bandwidth that reading dense weights reaches; aiconfigurator's empirical 0.8",
    "hbm_experts": "the same for experts: grouped products of few rows; fitted on 40 runs (docs/planner-accuracy.md)",
    "hbm_cache": "the same for cached keys and values; fitted",
    "decode_layer_s": "one layer's launches in a tick, whatever its rows; fitted",
    "decode_collective_s": "one layer's exchanges between the GPUs of a replica, where there are several; fitted",
    "decode_collective_node_s": "the same for each further machine of a replica; fitted on NeMo-RL's published steps",
    "decode_indexer_s": "launches of one layer's indexer in a tick (DeepSeek-V3.2, arXiv 2512.02556; GLM-5); fitted",
    "decode_layer_sequence_s": "that of one layer for one more sequence: scheduling, sampling, dispatch; fitted",
    "decode_flops": "share of peak arithmetic of a tick's products; only binds for very many sequences; fitted",
    "prefill_flops_dense": "share of peak arithmetic of a dense model's prompts; fitted",
    "prefill_flops_moe": "the same for a mixture, whose products have fewer rows; fitted",
    "train_flops_dense": "share of peak arithmetic of a dense model's linears in training; fitted",
    "train_flops_moe": "the same for a mixture, whose experts see few rows each; fitted",
    "train_flops_attention": "the same for scores and weighted values, which dominate long sequences; fitted",
    "train_micro_s": "of every micro-batch of a trainer: data, launches, loss; fitted on prime-rl's baselines",
    "full_step": "what a step of full-parameter training takes beside its phases, as a share of them: moving engine "
    "and optimizer, data, waiting; fitted on NeMo-RL's published steps",
    "publish_bandwidth": "share of the network's bandwidth that one publish reaches; fitted",
    "publish_fixed_s": "of every publish: pausing, loading, the probe; fitted",
}


def factor_names() -> tuple[str, ...]:
    """All factors, in order."""
    return tuple(one.name for one in fields(Factors))
