"""Losses, corrections and KL terms against numbers that public implementations gave for the ragged batch.

Made with verl at 1dda039 (`compute_policy_loss_vanilla`, `…_gspo`, `…_cispo`, `agg_loss`, `kl_penalty`,
`compute_rollout_correction_weights`, `compute_value_loss`, `AdaptiveKLController`), miles at 31f1ca9
(`compute_mis_weights`, `compute_approx_kl`, `compute_opsm_mask`) and AReaL at cbff54d (`ppo_actor_loss_fn`), in
float64. Of each loss: its value, Σ cos(i)·gradient_i over the padded batch, and Σ |gradient_i|.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tithe.losses import (
    LOSSES,
    Aggregation,
    CorrectionSettings,
    KLControl,
    LossSettings,
    ValueLossInput,
    value_loss,
)
from unit.losses.ragged import drawn, packed, padded, unpacked

TOKEN_MEAN = LossSettings(Aggregation.TOKEN_MEAN, 0.2, 0.28)
SEQ_MEAN = Aggregation.SEQ_MEAN_TOKEN_MEAN
CISPO = LossSettings(Aggregation.TOKEN_MEAN, 1.0, 4.0)


def corrected(settings: LossSettings, name: str, **fields: object) -> LossSettings:
    return replace(settings, correction=CorrectionSettings(name, **fields))  # pyright: ignore[reportArgumentType]


DUAL = replace(TOKEN_MEAN, dual_clip=3.0)
GSPO = LossSettings(SEQ_MEAN, 3e-4, 4e-4)
CASES: dict[str, tuple[str, LossSettings]] = {
    "ppo|none": ("ppo", DUAL),
    "ppo|tis token 2": ("ppo", corrected(DUAL, "tis", high=2.0)),
    "ppo|tis sequence 2": ("ppo", corrected(DUAL, "tis", level="sequence", high=2.0)),
    "ppo|icepop": ("ppo", corrected(DUAL, "icepop", low=0.5, high=5.0)),
    "ppo|mis sequence": ("ppo", corrected(DUAL, "mis", level="sequence", low=0.5, high=2.0)),
    "ppo|mis geometric": ("ppo", corrected(DUAL, "mis", level="geometric", low=0.8, high=1.3)),
    "ppo|mis token veto": ("ppo", corrected(DUAL, "mis", low=0.1, high=10.0, veto=1e-4)),
    "dapo|token-mean": ("dapo", TOKEN_MEAN),
    "dapo|seq-mean-token-sum": ("rloo", replace(TOKEN_MEAN, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM)),
    "dapo|seq-mean-token-mean": ("grpo", replace(TOKEN_MEAN, aggregation=SEQ_MEAN)),
    "dapo|seq-mean-token-sum-norm": ("dr_grpo", replace(TOKEN_MEAN, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)),
    "dapo|token-sum": ("reinforce_pp", replace(TOKEN_MEAN, aggregation=Aggregation.TOKEN_SUM)),
    "cispo|none": ("cispo", CISPO),
    "cispo|tis token 2": ("cispo", corrected(CISPO, "tis", high=2.0)),
    "gspo|none": ("gspo", GSPO),
    "gspo|tis token 2": ("gspo", corrected(GSPO, "tis", high=2.0)),
    "gspo wide|none": ("gspo", replace(GSPO, clip_range=0.2, clip_range_high=0.27)),
    "decoupled": ("ppo", corrected(TOKEN_MEAN, "decoupled", high=5.0)),
    "opsm": ("dapo", corrected(TOKEN_MEAN, "opsm", high=0.05)),
}
"""Case → (algorithm, settings)."""

# fmt: off
FROZEN: dict[str, dict[str, tuple[float, float, float]]] = {
    "tame": {
        "ppo|none": (0.29584861673, 0.18130286015, 0.63053191432),
        "ppo|tis token 2": (0.15527284885, 0.20464507895, 0.95657415988),
        "ppo|tis sequence 2": (0.88198062249, 0.18823458842, 0.99256319543),
        "ppo|icepop": (0.088632039608, 0.20391336357, 0.69568927409),
        "ppo|mis sequence": (0.13306448115, -0.039102460797, 0.16835870024),
        "ppo|mis geometric": (0.50799302974, 0.14388511655, 0.50799302974),
        "ppo|mis token veto": (0.627828525, 0.40107988072, 1.429129836),
        "dapo|token-mean": (0.7186063435, 0.43729403576, 1.2578350956),
        "dapo|seq-mean-token-sum": (2.6348899262, 1.6034114645, 4.6120620173),
        "dapo|seq-mean-token-mean": (0.71310887482, 0.25640288261, 0.89287510591),
        "dapo|seq-mean-token-sum-norm": (0.16468062038, 0.10021321653, 0.28825387608),
        "dapo|token-sum": (15.809339557, 9.6204687868, 27.672372104),
        "cispo|none": (-0.86514342814, 0.26711949675, 1.2510989831),
        "gspo|none": (0.48418684357, 0.070145592698, 0.71515493011),
        "cispo|tis token 2": (-0.26703138961, 0.18755698588, 1.0649373973),
        "gspo|tis token 2": (0.36734573684, -0.089978735429, 0.34700879557),
        "gspo wide|none": (0.41762017756, 0.070145592698, 0.71515493011),
        "decoupled": (0.42500660758, 0.31831189696, 1.226307945),
        "opsm": (0.64587907077, 0.43729403576, 1.2578350956),
        "kl k1": (0.13112230644, -0.052390579696, 1),
        "kl unbiased k1": (0.11492382048, 0.085219660158, 1.3965601219),
        "kl k2": (0.14592720477, -0.04597316349, 0.4830816818),
        "kl unbiased k2": (0.11876625573, -0.04545582676, 0.46658572037),
        "kl k3": (0.14911102784, -0.043013035414, 0.48746370628),
        "kl unbiased k3": (0.12318143483, -0.043232494948, 0.44970153243),
    },
    "extreme": {
        "ppo|none": (0.22429692225, 0.17478092775, 0.58571997244),
        "ppo|tis token 2": (0.018597958554, 0.23304360546, 1.0932490502),
        "ppo|tis sequence 2": (-0.25892829565, 0.19706494453, 1.8290706505),
        "ppo|icepop": (0.1098915976, 0.20719268121, 0.6744297161),
        "ppo|mis sequence": (0.13306448115, -0.039102460797, 0.16835870024),
        "ppo|mis geometric": (0.50799302974, 0.14388511655, 0.50799302974),
        "ppo|mis token veto": (0.67264046688, 0.39455794832, 1.3843178941),
        "dapo|token-mean": (0.64705464902, 0.43077210336, 1.2130231537),
        "dapo|seq-mean-token-sum": (2.3725337131, 1.5794977123, 4.4477515637),
        "dapo|seq-mean-token-mean": (0.66683852796, 0.25427493566, 0.86105021483),
        "dapo|seq-mean-token-sum-norm": (0.14828335707, 0.098718607019, 0.27798447273),
        "dapo|token-sum": (14.235202278, 9.4769862739, 26.686509382),
        "cispo|none": (0.58896571677, 0.35252823667, 1.6608324957),
        "gspo|none": (0.38911787754, 0.045948192568, 0.47675723007),
        "cispo|tis token 2": (0.21781803464, 0.21595551239, 1.2016122876),
        "gspo|tis token 2": (0.27666111848, -0.089978735429, 0.34700879557),
        "gspo wide|none": (0.23268454504, 0.045948192568, 0.47675723007),
        "decoupled": (0.016101470266, 0.3990911103, 1.6352130823),
        "opsm": (0.57432737629, 0.43077210336, 1.2130231537),
        "kl k1": (0.13112230644, -0.052390579696, 1),
        "kl unbiased k1": (22432053.51, -5775569.4424, 44105929.326),
        "kl k2": (0.14592720477, -0.04597316349, 0.4830816818),
        "kl unbiased k2": (5838471.4935, -3918169.7242, 22432054.437),
        "kl k3": (0.14911102784, -0.043013035414, 0.48746370628),
        "kl unbiased k3": (4929433.1887, -2882285.8362, 17502621.426),
    },
}
# fmt: on


def probed(loss: torch.Tensor, logp: torch.Tensor) -> tuple[float, float, float]:
    """What is frozen of a loss."""
    loss.backward()
    assert logp.grad is not None
    grad = unpacked(logp.grad)
    probe = torch.cos(torch.arange(grad.numel(), dtype=grad.dtype)).reshape(grad.shape)
    return loss.item(), float((grad * probe).sum()), float(grad.abs().sum())


@pytest.mark.parametrize("batch", ["tame", "extreme"])
@pytest.mark.parametrize("case", CASES)
def test_policy_losses(batch: str, case: str) -> None:
    algorithm, settings = CASES[case]
    inp = packed(extreme=batch == "extreme")
    loss = LOSSES[algorithm](inp, settings).loss
    assert probed(loss, inp.logp) == pytest.approx(FROZEN[batch][case], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("batch", ["tame", "extreme"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_terms(batch: str, estimator: str, unbiased: bool) -> None:
    inp = packed(extreme=batch == "extreme")
    inp = replace(inp, advantage=torch.zeros_like(inp.advantage))
    settings = LossSettings(Aggregation.TOKEN_MEAN, kl_coef=1.0, kl_estimator=estimator, kl_unbiased=unbiased)
    wanted = FROZEN[batch][f"kl {'unbiased ' if unbiased else ''}{estimator}"]
    assert probed(LOSSES["grpo"](inp, settings).loss, inp.logp) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_value_loss() -> None:
    inp, rows = packed(extreme=False), drawn(extreme=False)
    old = torch.cat([torch.tensor(row) for row in rows["value"]])
    returns = old + 5 * torch.cat([torch.tensor(row) for row in rows["penalty"]])
    assert inp.ref_logp is not None
    value = (old + inp.ref_logp - inp.logp.detach()).requires_grad_()
    given = ValueLossInput(value, old, returns, inp.mask, inp.denominators)
    loss, clipped = value_loss(given, clip=0.2)
    assert probed(loss, value) == pytest.approx((0.14875129355, 0.082928742747, 0.45022638766), rel=1e-6)
    assert float(clipped) / inp.denominators.n_tokens == pytest.approx(0.0909090909)


def test_adaptive_kl_weight() -> None:
    """F05; the last two go on from the one before."""
    control, coef, seen = KLControl(target=6.0, horizon=10_000), 0.1, []
    for kl in (12.0, 3.0, 6.0, 7.0):
        coef = control.next(coef, kl, rollouts=64)
        seen.append(coef)
    assert seen == pytest.approx([0.100128, 0.09999983616, 0.09999983616, 0.100106502651904], rel=1e-9)


def test_the_padded_form_is_the_packed_one() -> None:
    rows, inp = drawn(extreme=True), packed(extreme=True)
    assert torch.equal(padded(rows["logp"]), unpacked(inp.logp.detach()))
