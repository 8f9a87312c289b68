"""One ragged batch of three groups, drawn once: what frozen numbers and live public implementations are asked about.

Group 0 has three answers, group 1 two with equal rewards, group 2 one alone. Some tokens are masked, and some
log-ratios are extreme.
"""

from __future__ import annotations

import numpy as np
import torch

from tithe.losses import Denominators, PolicyLossInput

GROUPS = (0, 0, 0, 1, 1, 2)
REWARDS = (1.0, 0.0, 0.25, 0.7, 0.7, 2.0)
LENGTHS = (7, 3, 9, 4, 1, 5)
LONGEST = max(LENGTHS)
NORM_TOKENS = 16
EXTREME = {(0, 2): 30.0, (2, 1): -92.0, (3, 3): 92.0}
"""(rollout, token) → what the trainer's log-prob lies above the sampler's."""
TELLING = {(2, 2): 2.0}
"""The same, always: a ratio of 7 with a negative advantage, which only a dual clip bounds."""


def uniform(seed: int, low: float, high: float) -> list[np.ndarray]:
    """Per rollout [T], from a stream whose values are guaranteed."""
    draw = np.random.RandomState(seed)
    return [draw.uniform(low, high, n) for n in LENGTHS]


def drawn(*, extreme: bool) -> dict[str, list[np.ndarray]]:
    """Per name and rollout [T]. `extreme` False leaves out ratios beyond e^10, which publics bound differently."""
    logp = uniform(1, -4.0, -0.05)
    prox = [x + d for x, d in zip(logp, uniform(2, -0.3, 0.3), strict=True)]
    old = [x + d for x, d in zip(prox, uniform(4, -0.9, 0.9), strict=True)]
    for (q, t), gap in (TELLING | EXTREME if extreme else TELLING).items():
        old[q][t] = prox[q][t] - gap
    mask = [x > 0.2 for x in uniform(4, 0.0, 1.0)]
    for own in mask:
        own[-1] = True
    return {
        "logp": logp,
        "prox_logp": prox,
        "old_logp": old,
        "ref_logp": [x + d for x, d in zip(logp, uniform(5, -1.0, 1.0), strict=True)],
        "advantage": [np.full(n, a) for n, a in zip(LENGTHS, (1.25, -0.5, -1.5, 0.75, -2.0, 0.3), strict=True)],
        "mask": mask,
        "value": uniform(6, -1.0, 1.0),
        "penalty": uniform(7, -0.1, 0.1),
    }


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    """[Q, longest] with 0 behind each row, as publics take it."""
    return torch.tensor(np.array([np.pad(row, (0, LONGEST - len(row))) for row in rows]))


def packed(*, extreme: bool, dtype: torch.dtype = torch.float64) -> PolicyLossInput:
    """The same as Tithe takes it."""
    rows = drawn(extreme=extreme)

    def flat(name: str) -> torch.Tensor:
        return torch.tensor(np.concatenate(rows[name]), dtype=dtype)

    mask = torch.tensor(np.concatenate(rows["mask"]))
    return PolicyLossInput(
        logp=flat("logp").requires_grad_(),
        old_logp=flat("old_logp"),
        prox_logp=flat("prox_logp"),
        ref_logp=flat("ref_logp"),
        advantage=flat("advantage"),
        mask=mask,
        seq_index=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        n_seqs=len(LENGTHS),
        denominators=Denominators(int(mask.sum()), len(LENGTHS), NORM_TOKENS),
    )


def unpacked(grad: torch.Tensor) -> torch.Tensor:
    """A packed gradient in the padded shape."""
    return padded([part.numpy() for part in grad.split(list(LENGTHS))])
