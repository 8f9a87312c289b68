"""Metrics of a policy loss, kept as sums so that micro-batches of any size aggregate exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """Sums over the trained tokens of one micro-batch: 0-d FP64 tensors without gradient, left on the loss's device so
    that no micro-batch waits for a transfer. `kl` and `entropy` are None when the loss was not given them.
    """

    n_tokens: Tensor
    clipped: Tensor
    """Tokens whose clipped branch decides, so that they pass no policy gradient."""
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    approx_kl: Tensor
    """k3 estimate of KL(π_old‖π) on tokens of π_old, nats."""
    kl: Tensor | None
    """k3 estimate of KL(π‖π_ref), nats, whatever estimator the loss uses."""
    entropy: Tensor | None


def summarize(parts: Sequence[LossMetrics]) -> dict[str, float]:
    """The batch: `clip_frac`, `ratio_mean`, `ratio_max`, `approx_kl`, `ess`, and where known `kl_mean` and `entropy`.

    `ess` is the effective share of samples under the importance ratios, (Σr)²/(n·Σr²): 1 on-policy, 1/n when a single
    token carries all the weight. Raises `ValueError` without any trained token.
    """

    def total(name: str) -> float:
        return sum(float(getattr(part, name)) for part in parts)

    n_tokens = total("n_tokens")
    if n_tokens == 0:
        raise ValueError("no trained token: there are no loss metrics")
    out = {
        "clip_frac": total("clipped") / n_tokens,
        "ratio_mean": total("ratio") / n_tokens,
        "ratio_max": max(float(part.ratio_max) for part in parts),
        "approx_kl": total("approx_kl") / n_tokens,
        "ess": total("ratio") ** 2 / (n_tokens * total("ratio_squared")),
    }
    if all(part.kl is not None for part in parts):
        out["kl_mean"] = total("kl") / n_tokens
    if all(part.entropy is not None for part in parts):
        out["entropy"] = total("entropy") / n_tokens
    return out
