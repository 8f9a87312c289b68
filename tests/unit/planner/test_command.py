"""The commands: the documented keys, exit codes, the nearest names, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tithe.cli.main import main
from tithe.errors import ConfigError
from tithe.planner.command import compare, plan
from tithe.planner.hardware import accelerators

EXAMPLE = (
    "plan kimi-k2 --hardware 8xB200 --base int4 --lora-r 32 --lora-targets attention --context 16384 --sequences 64 "
    "--json"
)
KEYS = [
    "model",
    "total_params",
    "active_params",
    "checkpoint_bytes",
    "adapter_params",
    "kv_bytes_per_token",
    "per_gpu_bytes",
    "per_gpu_total_bytes",
    "host_bytes",
    "fits",
    "binding_layer",
    "suggestions",
    "gpus",
    "total_hbm_bytes",
    "step_seconds",
    "tok_per_s",
    "usd_per_hour",
    "usd_per_step",
    "assumptions",
]


@pytest.fixture(scope="module")
def answer():
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tithe.cli", *EXAMPLE.split()],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )  # fmt: skip
    assert not any(name in run.stderr for name in (" torch\n", " numba\n", " numpy\n", " transformers\n"))
    return json.loads(run.stdout)


def test_the_example_has_every_documented_key(answer: dict[str, Any]):
    assert set(KEYS) <= answer.keys()
    assert set(answer["step_seconds"]) == {"sample", "reward", "update", "sync", "idle"}
    assert answer["total_params"] == 1_026_408_232_448
    assert answer["adapter_params"] == 122_054_656
    assert answer["gpus"] == 8
    assert answer["total_hbm_bytes"] == 8 * 193_273_528_320
    assert answer["fits"] is True
    assert answer["assumptions"]


def test_bytes_and_seconds_add_up(answer: dict[str, Any]):
    assert sum(answer["per_gpu_bytes"].values()) == answer["per_gpu_total_bytes"]
    assert sum(answer["host_bytes_by_part"].values()) == answer["host_bytes"]
    assert sum(answer["step_seconds"].values()) == pytest.approx(answer["step_total_seconds"])
    assert answer["usd_per_step"] == pytest.approx(answer["usd_per_hour"] * answer["step_total_seconds"] / 3600)
    assert sum(answer["usd_per_step_by_part"].values()) == pytest.approx(answer["usd_per_step"])


def test_every_layer_and_factor_has_its_source(answer: dict[str, Any]):
    assert all(one["formula"] for one in answer["formulas"].values())
    used = [name for name, n_bytes in answer["per_gpu_bytes"].items() if n_bytes]
    assert all(answer["formulas"][name]["source"] for name in used)
    assert all(one["source"] for one in answer["factors"].values())


def test_every_key_of_the_answer_is_documented(answer: dict[str, Any]):
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    assert [key for key in answer if f"`{key}`" not in page] == []


def test_a_wrong_name_exits_with_2_and_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "kimi-k2x"]) == 2
    assert "Did you mean kimi-k2" in capsys.readouterr().err
    assert main(["plan", "kimi-k2", "--hardware", "8xB20"]) == 2
    assert "Did you mean B200-SXM" in capsys.readouterr().err


def test_serving_and_training_alone():
    served = plan("kimi-k2", "8xB200", base="int4", phase="rollout", tp=8, sequences=64, prompt=1024, new=1024)
    assert set(KEYS) <= served.keys()
    assert served["context_tokens"] == 2048
    assert served["per_gpu_bytes"]["optimizer"] == served["per_gpu_bytes"]["activations"] == 0
    assert served["step_seconds"]["update"] == 0
    trained = plan("kimi-k2", "8xB200", base="int4", phase="train", context=2048, lora_targets=("attention",))
    assert set(KEYS) <= trained.keys()
    assert trained["per_gpu_bytes"]["kv_cache"] == 0
    assert trained["step_seconds"]["sample"] == 0
    assert trained["step_seconds"]["update"] > 0


def test_the_price_is_the_cards_typical_rent():
    answer = plan("qwen2.5-7b", "4xH100")
    assert answer["usd_per_hour"] == pytest.approx(4 * 2.95)
    assert answer["usd_per_hour_range"] == pytest.approx((4 * 1.99, 4 * 5.0))
    assert plan("qwen2.5-7b", "4xGB300")["usd_per_step"] is None


def test_where_nothing_is_sampled_no_token_has_a_price():
    trained = plan("qwen2.5-7b", "4xH100", phase="train", context=512)
    assert trained["usd_per_million_sampled_tokens"] is None
    assert trained["usd_per_step"] > 0
    assert "per million" not in trained["text"]


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_number_is_refused(rate: float):
    with pytest.raises(ConfigError, match="--tok-per-s"):
        plan("qwen2.5-7b", "4xH100", tok_per_s=rate)


def test_compare_prints_both_sides():
    answer = compare(["kimi-k2"], "8xB200", base="int4", lora_targets=("attention",), context=16_384)
    a, b = answer["a"], answer["b"]
    assert a["trained_params"] == 122_054_656
    assert b["trained_params"] == 1_026_408_232_448
    assert answer["gpus_ratio"] == b["gpus"] / a["gpus"] >= 10
    assert answer["claim_holds"] is True
    assert b["fits"]
    assert b["mean_hours_between_failures"] < a["mean_hours_between_failures"]
    assert {"recommendation", "conditions", "assumptions"} <= answer.keys()


def test_a_comparisons_page_has_both_sides(tmp_path: Path):
    page = tmp_path / "compare.html"
    answer = compare(["kimi-k2"], "8xB200", html=str(page), base="int4", lora_targets=("attention",))
    text = page.read_text()
    assert answer["recommendation"] in text
    assert answer["b"]["hardware"] in text
    assert text.count("<svg class=bar") == 4
    assert "<script" not in text
    with pytest.raises(ConfigError, match="--markdown"):
        compare(["kimi-k2", "glm-5"], "8xB200", html=str(page), as_markdown=True)


def test_the_tenth_does_not_hold_where_one_card_is_enough():
    answer = compare(["qwen2.5-7b"], "1xB200", base="int4")
    assert answer["claim_holds"] is (answer["gpus_ratio"] >= 10)
    assert answer["gpus_ratio"] < 10


def test_more_cards_for_the_other_side_than_it_needs_prove_nothing():
    answer = compare(["qwen2.5-7b"], "1xB200", "1024xB200", base="int4")
    assert answer["gpus_ratio"] == 1024
    assert answer["fewest_gpus_ratio"] < 10
    assert answer["claim_holds"] is False
    assert "does not hold" in answer["text"]


def test_what_is_recommended_is_true_of_the_cards_and_their_prices():
    unknown = compare(["qwen2.5-7b"], "2xGB300", "4xGB300", base="int4")
    assert unknown["usd_per_step_ratio"] is None
    assert unknown["recommendation"] == "A: it takes fewer cards; what they cost is not known"
    fewer = compare(["qwen2.5-7b"], "64xH100", "8xH100", base="int4", batch=8, sequences=8)
    assert fewer["usd_per_step_ratio"] < 1
    assert fewer["recommendation"].startswith("B: it takes no more cards")


def test_both_sides_on_the_fewest_cards_as_a_table():
    answer = compare(["kimi-k2", "qwen2.5-7b"], "B200", base="int4", context=4096, as_markdown=True, with_fewest=True)
    first, dense = answer["rows"]
    assert first["a"]["gpus"] == first["a"]["fewest_gpus"] > 1
    assert (first["claim_holds"], dense["claim_holds"]) == (True, False)
    rows = answer["text"].splitlines()
    assert rows[2].startswith("| kimi-k2 |")
    assert rows[3].endswith("| no |")


def test_every_card_has_a_source_and_sane_figures():
    for card in accelerators():
        assert card.source
        assert card.mem_bytes >= 16e9
        assert card.hbm_bytes_per_s >= 1e12 or card.name == "CPU"
        assert card.price is None or card.price.low_usd_per_hour <= card.price.typical_usd_per_hour
