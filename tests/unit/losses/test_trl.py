"""Losses beside TRL's own code, run where its environment is made (`benchmarks.peer_env`; CI makes it)."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.peer_env import CACHE, PEERS
from tithe.losses import LOSSES, Aggregation, CorrectionSettings, LossSettings
from unit.losses.ragged import NORM_TOKENS, drawn, packed, padded, unpacked

PYTHON = CACHE / "venv" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="TRL's environment is not there: python -m benchmarks.grpo_step makes it"
    ),
]

HIGH = LossSettings(Aggregation.TOKEN_MEAN, 0.2, 0.28)
CASES: dict[str, tuple[str, LossSettings]] = {
    "grpo": ("grpo", LossSettings(Aggregation.SEQ_MEAN_TOKEN_MEAN, 0.2)),
    "dapo": ("dapo", HIGH),
    "dr_grpo": ("dr_grpo", replace(HIGH, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM)),
    "cispo": ("cispo", LossSettings(Aggregation.TOKEN_MEAN, 1.0, 4.0)),
    "gspo": ("gspo", LossSettings(Aggregation.SEQ_MEAN_TOKEN_MEAN, 3e-4, 4e-4)),
    "kl": ("dapo", replace(HIGH, kl_coef=0.1)),
    "kl unbiased": ("dapo", replace(HIGH, kl_coef=0.1, kl_unbiased=True)),
    "opsm": ("dapo", replace(HIGH, correction=CorrectionSettings("opsm", high=0.05))),
    "tis": ("dapo", replace(HIGH, correction=CorrectionSettings("tis", high=3.0))),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What TRL says of the ragged batch, with ratios up to e^2."""
    rows = {name: padded(values).double().tolist() for name, values in drawn(extreme=False).items()}
    run = subprocess.run(
        [PYTHON, PEERS / "trl_losses.py"],
        input=json.dumps({"rows": rows, "norm_tokens": NORM_TOKENS}),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_trls(answers: dict[str, Any], case: str) -> None:
    algorithm, settings = CASES[case]
    inp = packed(extreme=False)
    loss = LOSSES[algorithm](inp, settings).loss
    loss.backward()
    assert inp.logp.grad is not None
    wanted_loss, wanted_gradient = answers[case]
    assert loss.item() == pytest.approx(wanted_loss, abs=1e-6)
    found = unpacked(inp.logp.grad)
    assert torch.allclose(found, torch.tensor(wanted_gradient, dtype=found.dtype), atol=1e-6)
