"""`compute: auto`: what is asked for is kept, what is left open is measured."""

from __future__ import annotations

import pytest

from support.checkpoints import build_hf
from tithe.arch import read_checkpoint
from tithe.models import ModelOptions, choose


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return read_checkpoint(build_hf(tmp_path_factory.mktemp("auto") / "model", "llama", seed=1))


def test_nothing_is_measured_when_nothing_is_left_open(checkpoint) -> None:
    tuning = choose(checkpoint, "dequantized", "fp32", ModelOptions())
    assert (tuning.options.compute, tuning.options.compute_dtype, tuning.seconds) == ("dequantized", "fp32", {})


def test_an_open_storage_is_measured_and_the_operands_asked_for_are_kept(checkpoint) -> None:
    tuning = choose(checkpoint, "auto", "fp32", ModelOptions(), budget_s=0.0)
    assert set(tuning.seconds) == {"packed/fp32", "dequantized/fp32"}
    assert all(seconds > 0 for seconds in tuning.seconds.values())
    assert tuning.options.compute_dtype == "fp32"


def test_an_exact_base_never_gets_bf16_operands(checkpoint) -> None:
    tuning = choose(checkpoint, "auto", "auto", ModelOptions(base_dtype="fp32"), budget_s=0.0)
    assert tuning.options.compute_dtype == "fp32"
    assert not [name for name in tuning.seconds if name.endswith("bf16")]
