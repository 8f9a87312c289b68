"""Estimators of KL(π‖π_ref) from one token drawn from π (Schulman 2020, "Approximating KL divergence").

Orientation: the policy's log-probability comes first, and every estimate is to be made *small*. With
log p = -2.0 and log p_ref = -1.2, k1 is -0.8 and k3 is 0.4255.

| name | value, d = log p - log p_ref | E over π | as a loss, its on-policy gradient is that of |
|---|---|---|---|
| k1 | d | KL, may be negative | nothing: 0 in expectation. Use it in the reward |
| k2 | d²/2 | KL to second order | KL(π‖π_ref), exactly |
| k3 | exp(-d) - 1 + d | KL, never negative | KL(π_ref‖π), which agrees to first order near π_ref |

Trained tokens come from the policy that sampled, which is π up to the lag. `kl_unbiased` weighs each estimate by the
importance ratio r = π/π_old, gradient included (DeepSeek-V3.2, miles): r·k1 and r·k3 then have the value *and* the
gradient of KL(π‖π_ref) on samples of π_old.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Exponents stop here: e^20 is 4.9e8, finite in every dtype that training uses, while e^89 is infinite in FP32."""


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The log-ratio log p - log p_ref, elementwise, nats."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Half the squared log-ratio, elementwise."""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The low-variance estimate, elementwise, ≥ 0.

    The exponent is bounded above, before the exponential: beyond it (a token e^20 times likelier under the reference)
    value and gradient stay finite and the gradient is 0. Below there is nothing to bound and the gradient stays 1.
    verl also bounds the value at 10, which takes the gradient away from every token 14 times likelier under the
    reference; TRL bounds nothing.
    """
    excess = torch.clamp(ref_logp - logp, max=LOG_RATIO_BOUND)
    return torch.expm1(excess) - excess


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name → estimator(logp, ref_logp)."""
