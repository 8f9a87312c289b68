"""What a policy loss takes and gives.

Shape legend: _N completion tokens of one micro-batch, packed end to end, _Q rollouts of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tithe.errors import ConfigError
from tithe.losses.aggregation import Aggregation, Denominators
from tithe.losses.kl import KL_ESTIMATORS
from tithe.losses.metrics import LossMetrics

Level = Literal["token", "sequence", "geometric"]
"""How log-ratios of a rollout become one: not at all, their sum (the ratio of whole rollouts), or their mean."""


@dataclass(frozen=True, eq=False)
class PolicyLossInput:
    """One micro-batch, 1-D tensors of length N >= 1 on one device.

    Four policies: `logp` (with gradient) is log-softmax(logits / T) of the tokens under the policy in training,
    `old_logp` the same under the one that sampled, `prox_logp` the same under the weights with which the batch began
    (None where no correction needs it: a batch of one step has `logp` without gradient there), `ref_logp` the same
    under the reference, or None. `behaviour_logp` is `old_logp` renormalised over what top-p, top-k and min-p kept;
    None where they cut nothing. `mask` is True on trained tokens; what the other tensors hold where it is False (even
    NaN) changes neither loss, gradient nor metrics. `seq_index` names each token's rollout, 0..n_seqs-1; rollouts lie
    whole in one micro-batch. `entropy` is the policy's entropy at each token in nats, with gradient when it earns a
    bonus, or None.

    Two rollouts of three tokens and one, at ratio 1:

    >>> import torch
    >>> logp = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    >>> inp = PolicyLossInput(logp=logp, old_logp=logp.detach(), advantage=torch.tensor([1.0, 1.0, 1.0, -1.0]),
    ...                       mask=torch.ones(4, dtype=torch.bool), seq_index=torch.tensor([0, 0, 0, 1]), n_seqs=2,
    ...                       denominators=Denominators(n_tokens=4, n_seqs=2, norm_tokens=64))
    >>> from tithe.losses import LOSSES
    >>> LOSSES["grpo"](inp, LossSettings(aggregation=Aggregation.TOKEN_MEAN)).loss.item()
    -0.5
    """

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    mask: Tensor
    seq_index: Tensor
    n_seqs: int
    denominators: Denominators
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None
    prox_logp: Tensor | None = None
    behaviour_logp: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logp.shape
        given = {
            "logp": self.logp,
            "old_logp": self.old_logp,
            "advantage": self.advantage,
            "mask": self.mask,
            "seq_index": self.seq_index,
            "ref_logp": self.ref_logp,
            "entropy": self.entropy,
            "prox_logp": self.prox_logp,
            "behaviour_logp": self.behaviour_logp,
        }
        wrong = {name: tuple(x.shape) for name, x in given.items() if x is not None and x.shape != shape}
        if len(shape) != 1 or shape[0] == 0 or wrong:
            raise ValueError(f"a loss takes 1-D tensors of one length above 0; logp is {tuple(shape)}, others {wrong}")


@dataclass(frozen=True)
class CorrectionSettings:
    """Off-policy correction (`rl.correction…`): which, of what, within which bounds.

    `name` is one of `CORRECTIONS`. `level` says what a weight belongs to. `high` caps a weight or, where weights are
    rejected, is the largest one kept; None is no bound. `low` is the smallest one kept. `veto` rejects a rollout with
    any token whose ratio is below it. For `opsm`, `high` is the mean drift in nats a token.
    """

    name: str = "none"
    level: Level = "token"
    low: float = 0.0
    high: float | None = None
    veto: float | None = None

    def __post_init__(self) -> None:
        if not self.low >= 0:
            raise ConfigError(f"correction_bounds begin at 0 or more, not {self.low}", "rl.correction_bounds")
        if self.high is not None and not self.high > self.low:
            raise ConfigError(
                f"correction_bounds = [{self.low}, {self.high}]: the second is not above the first",
                "rl.correction_bounds",
            )
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(f"correction_veto is in (0, 1), not {self.veto}", "rl.correction_veto")


@dataclass(frozen=True)
class LossSettings:
    """The numbers of the objective; the fields of `rl` with the same names. Raises `ConfigError` naming the key.

    `clip_range` ε_low and `clip_range_high` ε_high bound the importance ratio to [1 - ε_low, 1 + ε_high]; a high clip
    of None equals the low one, and a low clip of None leaves the ratio unclipped on both sides. `dual_clip` c bounds
    the loss of a token with A < 0 by -c·A. `kl_coef` weighs `kl_estimator` against the reference in the loss (0 when
    the KL is in the reward), per token or for whole rollouts (`kl_level`); `kl_unbiased` (`kl_estimator: k3_unbiased`)
    weighs the estimate by the importance ratio, gradient included. `entropy_coef` weighs an entropy bonus. KL and
    entropy are aggregated like the policy loss, and no correction touches them.
    """

    aggregation: Aggregation
    clip_range: float | None = 0.2
    clip_range_high: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    dual_clip: float | None = None
    kl_level: Literal["token", "sequence"] = "token"
    kl_unbiased: bool = False
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)

    def __post_init__(self) -> None:
        if self.clip_range is None and self.clip_range_high is not None:
            raise ConfigError("clip_range null is unclipped on both sides, clip_range_high is set", "rl.clip_range")
        if self.clip_range is not None and not 0 < self.clip_range <= 1:
            raise ConfigError(f"clip_range is in (0, 1], not {self.clip_range}", "rl.clip_range")
        if self.clip_range_high is not None and not self.clip_range_high > 0:
            raise ConfigError(f"clip_range_high is above 0, not {self.clip_range_high}", "rl.clip_range_high")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip is above 1, not {self.dual_clip}", "rl.dual_clip")
        if not self.kl_coef >= 0:
            raise ConfigError(f"kl_coef is at least 0, not {self.kl_coef}", "rl.kl_coef")
        if not self.entropy_coef >= 0:
            raise ConfigError(f"entropy_coef is at least 0, not {self.entropy_coef}", "rl.entropy_coef")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ConfigError(f"the KL estimators are {sorted(KL_ESTIMATORS)}, not {self.kl_estimator!r}")

    @property
    def ratio_bounds(self) -> tuple[float, float] | None:
        """(1 - ε_low, 1 + ε_high), or None when unclipped."""
        if self.clip_range is None:
            return None
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1.0 - self.clip_range, 1.0 + high


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss` is this micro-batch's share (0-d, with gradient): shares add up to the loss of the batch. `metrics` are
    sums without gradient; `summarize` turns those of all micro-batches into the batch's numbers.
    """

    loss: Tensor
    metrics: LossMetrics


PolicyLoss = Callable[[PolicyLossInput, LossSettings], LossOutput]
"""A named algorithm. Raises `ValueError` when a KL, an entropy weight or a correction is set and its tensor is
missing."""
