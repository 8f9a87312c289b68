"""KL to the reference as part of the reward (`rl.kl_placement: reward`).

Shape legend: _T completion tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

LOG_RATIO_BOUND = 20.0
"""Exponents stop here, as in the loss."""

TOKEN_KL: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "k1": lambda d_T: d_T,
    "k2": lambda d_T: 0.5 * np.square(d_T),
    "k3": lambda d_T: np.expm1(np.minimum(-d_T, LOG_RATIO_BOUND)) - np.minimum(-d_T, LOG_RATIO_BOUND),
}
"""`rl.kl_estimator` → estimate of the KL from log p - log p_ref, elementwise (see `losses.kl`)."""


def token_kl(
    logp_T: NDArray[np.float32], ref_logp_T: NDArray[np.float32], loss_mask_T: NDArray[np.bool_], estimator: str
) -> NDArray[np.float64]:
    """Estimates [T] in nats on tokens under the mask, 0 off it, whatever the log-probs hold there."""
    difference_T = np.zeros(len(logp_T), np.float64)
    np.subtract(logp_T, ref_logp_T, out=difference_T, where=loss_mask_T, dtype=np.float64)
    return TOKEN_KL[estimator](difference_T)


def with_kl_penalty(
    advantage_T: NDArray[np.float32],
    logp_T: NDArray[np.float32],
    ref_logp_T: NDArray[np.float32],
    loss_mask_T: NDArray[np.bool_],
    coef: float,
    estimator: str = "k1",
) -> NDArray[np.float32]:
    """Advantages of one rollout less `coef` times the KL still to come: A_t - coef·Σ_{u ≥ t} k_u, FP32 [T].

    k_u is `estimator`'s, for k1 log π(u) - log π_ref(u), on tokens under the loss mask, both log-softmax(logits / T) in
    nats, π the policy that sampled. Each token earns the reward -coef·k_u, and a token answers for what follows it and
    not for what came before; on-policy the gradient of k1 is exactly that of the reward minus coef·KL(π‖π_ref) over
    whole rollouts. (k1 in the loss would have gradient 0 in expectation.)

    The penalty is added *after* the group's rewards are centred and scaled. Summed into the reward before (as verl does
    for GRPO), a group of equal rewards would be scaled up to full-size advantages made of KL noise alone. It has no
    baseline of its own: it is small where coef is, and any mean over the rollout's own tokens would bias it. Tokens
    off the mask cost nothing; their values here are not used. Raises `ValueError` for unequal lengths or coef < 0.

    >>> one = np.ones(3, np.float32)
    >>> with_kl_penalty(one, np.array([-1, -2, -1], np.float32), np.array([-2, -2, -3], np.float32), one > 0, 0.1)
    array([0.7, 0.8, 0.8], dtype=float32)
    """
    lengths = {len(advantage_T), len(logp_T), len(ref_logp_T), len(loss_mask_T)}
    if len(lengths) != 1:
        raise ValueError(f"one rollout's arrays have lengths {sorted(lengths)}")
    if not coef >= 0:
        raise ValueError(f"the KL coefficient is at least 0, not {coef}")
    to_come_T = np.cumsum(token_kl(logp_T, ref_logp_T, loss_mask_T, estimator)[::-1])[::-1]
    return (advantage_T - coef * to_come_T).astype(np.float32)
