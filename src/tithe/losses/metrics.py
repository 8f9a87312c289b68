"""Metrics of a policy loss, kept as sums so that micro-batches of any size aggregate exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """Sums over the trained tokens of one micro-batch: 0-d FP64 tensors without gradient, left on the loss's device so
    that no micro-batch waits for a transfer. Those that may be None are so when the loss was not given what they need.
    """

    n_tokens: Tensor
    clipped: Tensor
    """Tokens whose clipped branch decides, so that they pass no policy gradient (CISPO: whose weight is clipped)."""
    clipped_high: Tensor
    dual_clipped: Tensor
    ratio: Tensor
    ratio_max: Tensor
    weight: Tensor
    """Weights of the correction, 1 where none is chosen."""
    capped: Tensor
    """Tokens whose weight was cut to its bound."""
    rejected: Tensor
    """Tokens that the correction left out."""
    importance: Tensor
    """Weight times ratio: the policy over the one that sampled."""
    importance_squared: Tensor
    approx_kl: Tensor
    """k3 estimate of KL(π_anchor‖π) on sampled tokens, nats; the anchor is what the ratio is taken against."""
    sampler_kl: Tensor | None
    """k3 estimate of KL(sampler‖trainer as the batch began), nats."""
    update_kl: Tensor | None
    """k3 estimate of KL(trainer as the batch began‖π), nats: what the steps of one batch change."""
    kl: Tensor | None
    """k3 estimate of KL(π‖π_ref), nats, whatever estimator the loss uses."""
    entropy: Tensor | None


def summarize(parts: Sequence[LossMetrics]) -> dict[str, float]:
    """The batch: `clip_frac` (`clip_high_frac` of it by the upper clip), `dual_clip_frac`, `ratio_mean`, `ratio_max`,
    `weight_mean`, `weight_capped_frac`, `rejected_frac`, `approx_kl`, `ess`, and where known the three KLs
    `sampler_kl`, `update_kl`, `kl_mean`, and `entropy`.

    `ess` is the effective share of samples under the importance weights v = weight × ratio, (Σv)²/(n·Σv²): 1
    on-policy, 1/n when a single token carries all the weight, 0 when everything is rejected. Raises `ValueError`
    without any trained token.
    """

    def total(name: str) -> float:
        return sum(float(getattr(part, name)) for part in parts)

    n_tokens = total("n_tokens")
    if n_tokens == 0:
        raise ValueError("no trained token: there are no loss metrics")
    squared = total("importance_squared")
    out = {
        "clip_frac": total("clipped") / n_tokens,
        "clip_high_frac": total("clipped_high") / n_tokens,
        "dual_clip_frac": total("dual_clipped") / n_tokens,
        "ratio_mean": total("ratio") / n_tokens,
        "ratio_max": max(float(part.ratio_max) for part in parts),
        "weight_mean": total("weight") / n_tokens,
        "weight_capped_frac": total("capped") / n_tokens,
        "rejected_frac": total("rejected") / n_tokens,
        "approx_kl": total("approx_kl") / n_tokens,
        "ess": total("importance") ** 2 / (n_tokens * squared) if squared > 0 else 0.0,
    }
    for name, field in (
        ("sampler_kl", "sampler_kl"),
        ("update_kl", "update_kl"),
        ("kl_mean", "kl"),
        ("entropy", "entropy"),
    ):
        if all(getattr(part, field) is not None for part in parts):
            out[name] = total(field) / n_tokens
    return out
