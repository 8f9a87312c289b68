"""The planner against published runs: a scored table over all usable rows, none of which it was fitted on.

    python -m benchmarks.planner_accuracy            prints the table
    python -m benchmarks.planner_accuracy --write    writes docs/planner-accuracy.md
    python -m benchmarks.planner_accuracy --fit      fits the efficiency factors again and prints them

A usable row is for fitting where the SHA-256 of its id is a multiple of three; the others are scored. Rows that repeat
a fitted measurement under another name were left out of the file. What is not usable, and why, is listed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planner_accuracy_runs import (
    MODELS,
    foreign,
    foreign_rate,
    generation,
    memory,
    peak_bytes,
    request,
    sampled_rate,
    short_name,
    sync,
    sync_seconds,
    trained,
    trained_rate,
    training,
)
from tithe.planner.answers import fewest_gpus
from tithe.planner.factors import DEFAULTS, Factors
from tithe.planner.hardware import MAX_GPUS
from tithe.planner.step import plan_step

ROOT = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_name("published_runs.json")
PAGE = ROOT / "docs" / "planner-accuracy.md"
OWN_RUNS = "## Memory of this project's own runs"
"""Where the part begins that `benchmarks.plan_vs_measured --write` writes."""
EVERY = 3


@dataclass(frozen=True)
class Scored:
    """One prediction beside its measurement."""

    id: str
    kind: str
    unit: str
    measured: float
    predicted: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """|predicted ÷ measured − 1|."""
        return abs(self.predicted / self.measured - 1)


Predict = Callable[[dict[str, Any], Factors], float]


@dataclass(frozen=True)
class Kind:
    """How rows of one kind are predicted; `measured` is None for a row that is not usable."""

    name: str
    unit: str
    measured: Callable[[dict[str, Any]], float | None]
    predict: Predict
    fitted: tuple[str, ...] = ()
    """Factors that its rows fit."""
    is_inspected: bool = False
    """Whether the rows for fitting fit nothing, but were looked at one by one; they are not scored then either."""
    of: str = ""
    """The rows' own kind, where it is not the name."""
    most: float = 1.5
    """What one row counts at most in a fit: |log(predicted ÷ measured)|."""


# ------------------------------------------------------------------ whole steps, and the fewest GPUs


def _step_seconds(row: dict[str, Any]) -> float | None:
    return row["step_s"] if short_name(row) in MODELS else None


def _step(row: dict[str, Any], factors: Factors) -> float:
    """NeMo-RL trains every parameter: on policy both phases in turn, one step off at once, half the GPUs each."""
    card = "GB200" if "GB200" in row["hw"] else "H100"
    new = max(1, row["avg_seq"] - 128)
    made = request(
        MODELS[short_name(row)], f"{row['gpus']}x{card}", base="fp8" if "FP8" in row["hw"] else "bf16", layout="full",
        context=row["max_seq"], prompt=128, new=min(new, row["max_seq"] - 128), batch=row["gbs"], sequences=row["gbs"],
    )  # fmt: skip
    if row["mode"] == "on":
        return plan_step(made, factors).total_s
    half = plan_step(replace(made, hardware=made.hardware.with_gpus(row["gpus"] // 2)), factors)
    return (1 + factors.full_step) * max(half.sample_s, half.update_s + half.sync_s)


def min_gpu_rows(rows: Iterable[dict[str, Any]]) -> list[Scored]:
    """The fewest GPUs that verl's guide names, against the planner's; factors play no part, none is fitted."""
    sizes = {"7B": "qwen2.5-7b", "32B": "qwen3-32b", "70B": "llama-3.1-70b", "72B": "llama-3.1-70b"}
    found = []
    for row in rows:
        for method, table in row.get("values", {}).items():
            for size, text in table.items():
                count, card = text.split("x")
                if size not in sizes:
                    continue
                layout = "full" if method == "full" else "shared"
                made = request(
                    sizes[size], f"8x{card}", base="bf16", layout=layout, optimizer_device="host", context=4096,
                    sequences=64, attention="tp",
                )  # fmt: skip
                fewest = fewest_gpus(made) or MAX_GPUS
                rounded = 1 << (fewest - 1).bit_length()  # such guides name powers of two
                found.append(Scored(f"{row['id']} {method} {size}", "fewest GPUs", "GPUs", float(count), rounded))
    return found


KINDS = (
    Kind(
        "generation", "tok/s", sampled_rate, generation,
        ("hbm_experts", "hbm_cache", "decode_layer_s", "decode_collective_s", "decode_indexer_s",
         "decode_layer_sequence_s", "prefill_flops_moe", "prefill_flops_dense", "decode_flops"), most=0.7,
    ),
    Kind(
        "training", "tok/s", trained_rate, training,
        ("train_flops_moe", "train_flops_dense", "train_flops_attention", "train_micro_s"),
    ),
    Kind("training, FlashAttention 2 on B200", "tok/s", foreign_rate, foreign, is_inspected=True, of="training"),
    Kind("memory", "bytes", peak_bytes, memory, is_inspected=True, of="training"),
    Kind("weight_sync", "s", sync_seconds, sync, ("publish_bandwidth", "publish_fixed_s")),
    Kind("step", "s", _step_seconds, _step, ("decode_collective_node_s", "full_step")),
)  # fmt: skip

BOUNDS = {
    "hbm_experts": (0.2, 0.9), "hbm_cache": (0.1, 0.9), "decode_layer_s": (2e-5, 5e-4),
    "decode_collective_s": (1e-6, 5e-4), "decode_collective_node_s": (1e-6, 2e-3), "decode_indexer_s": (1e-6, 5e-4),
    "train_micro_s": (0.0, 5.0), "full_step": (0.0, 1.0), "decode_layer_sequence_s": (1e-8, 1e-5),
    "prefill_flops_moe": (0.03, 0.8), "prefill_flops_dense": (0.25, 0.8), "decode_flops": (0.1, 0.8),
    "train_flops_moe": (0.01, 0.8),
    "train_flops_dense": (0.01, 0.8), "train_flops_attention": (0.05, 0.6),
    "publish_bandwidth": (0.05, 1.0), "publish_fixed_s": (0.0, 10.0),
}  # fmt: skip
"""What a factor can be: a share of a peak that is never fully reached, or a plausible time."""


def usable(rows: Iterable[dict[str, Any]], kind: Kind) -> list[tuple[dict[str, Any], float, bool]]:
    """(row, measured, whether it is for fitting) of one kind."""
    found = [(row, kind.measured(row)) for row in rows if row["kind"] == (kind.of or kind.name)]
    good = [(row, measured) for row, measured in found if measured is not None]
    return [
        (row, measured, (bool(kind.fitted) or kind.is_inspected) and is_for_fitting(row["id"]))
        for row, measured in good
    ]


def is_for_fitting(name: str) -> bool:
    """One in `EVERY`, by a hash of the name: nobody's choice."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % EVERY == 0


def fit(rows: list[dict[str, Any]]) -> Factors:
    """Coordinate descent on the mean |log(predicted ÷ measured)| of the rows for fitting."""
    factors = DEFAULTS
    for kind in KINDS:
        chosen = [(row, measured) for row, measured, is_fitted in usable(rows, kind) if is_fitted]
        if kind.fitted:
            factors = _descend(factors, kind, chosen)
    return factors


def _descend(factors: Factors, kind: Kind, rows: list[tuple[dict[str, Any], float]]) -> Factors:
    def loss(candidate: Factors) -> float:
        return sum(min(abs(math.log(kind.predict(row, candidate) / one)), kind.most) for row, one in rows) / len(rows)

    best, before = loss(factors), math.inf
    while best < before - 1e-4:
        before = best
        for name in kind.fitted:
            low, high = BOUNDS[name]
            for scale in (0.5, 0.8, 0.93, 0.98, 1.02, 1.07, 1.25, 2.0):
                value = min(high, max(low, getattr(factors, name) * scale))
                candidate = factors.updated({name: value})
                if (found := loss(candidate)) < best - 1e-6:
                    factors, best = candidate, found
    return factors


def fit_expert_loop_s(rows: Iterable[dict[str, Any]]) -> float:
    """`EXPERT_LOOP_S` as the rows for fitting say: the mean over mixtures of what nothing else explains."""
    kind = next(one for one in KINDS if one.predict is foreign)
    found = []
    for row, measured, is_fitted in usable(rows, kind):
        spec = trained(row).spec
        if is_fitted and spec.is_moe:
            unexplained = 1.0 / measured - 1.0 / foreign(row, DEFAULTS, 0.0)
            found.append(unexplained * row["seq_len"] * row["gpus"] / (len(spec.moe_layers) * spec.n_experts))
    return sum(found) / len(found)


def score(rows: list[dict[str, Any]], factors: Factors) -> list[Scored]:
    """Every usable row; those for fitting are marked and never counted."""
    found = [
        Scored(row["id"], kind.name, kind.unit, measured, kind.predict(row, factors), is_fitted)
        for kind in KINDS
        for row, measured, is_fitted in usable(rows, kind)
    ]
    return found + min_gpu_rows(row for row in rows if row["kind"] == "min_gpus")


def summary(scored: list[Scored]) -> dict[str, Any]:
    """Number of rows, median and 90th-percentile error, by kind and over all."""
    kinds = [*dict.fromkeys(one.kind for one in scored)]
    out: dict[str, Any] = {}
    for kind in (*kinds, "all"):
        of_kind = [one for one in scored if kind in (one.kind, "all")]
        errors = sorted(one.error for one in of_kind if not one.is_fitted)
        out[kind] = {
            "scored": len(errors),
            "fitted": sum(one.is_fitted for one in of_kind),
            "median_error": median(errors),
            "p90_error": errors[math.ceil(0.9 * len(errors)) - 1],
        }
    return out


BEFORE = {
    "generation": (0.147, 0.424), "training": (0.147, 0.340), "training, FlashAttention 2 on B200": (1.768, 3.770),
    "memory": (0.190, 0.463), "weight_sync": (0.539, 0.981), "step": (0.202, 0.580), "fewest GPUs": (0.5, 0.5),
    "all": (0.164, 0.585),
}  # fmt: skip
"""(median, 90th percentile) of commit 6eb93af, which scored all rows of FlashAttention 2 on B200."""
NOTES = (
    "What was seen when: an earlier split (every third row) was scored and its errors were looked at, to find what",
    "the model left out. Added for it were the launches of an indexer, exchanges between machines, a micro-batch's",
    "fixed time, the policy's own log-prob pass, what torch's loss keeps in supervised training, and a share of the",
    "step beside its phases in full-parameter training. The rows were then split anew by the hash, and 32 rows of",
    "prime-rl and 10 of NeMo-RL 0.4 that nobody had looked at were added; so some of the scored rows had been seen",
    "before. Only rows for fitting set a factor, within bounds of what is plausible (two bounds were narrowed after a",
    "first fit had ended at values that no hardware shows).",
    "",
    "Since the figures of before, no factor was fitted anew; with all errors in sight, what a run's software does was",
    "looked up and counted. Memory is now that of FSDP2 as prime-rl sets it up: float32 parameters, whole layers,",
    "embedding and head gathered in BF16, a stream in BF16, float32 rows of chosen experts (its model.py and moe.py).",
    "FlashAttention 2 on B200 has the speed that was measured on that card by others (tritonbench#171,",
    "flash-attention#1589), and prime-rl looped over experts there (its issue 1535): the time of one expert is the one",
    "number that was fitted, on the two mixtures among the rows for fitting. A publication on one machine goes over",
    "its links. A tick reads no more of the cache than windows and indexers let it: right for long contexts, while",
    "GLM-5's prompts of 8,192 tokens, whose prefill is slower than the planner's, come out faster still (generation's",
    "90th percentile rose by it). The guide's fewest GPUs leave room that the planner does not.",
)


def page(scored: list[Scored], rows: list[dict[str, Any]]) -> str:
    """The Markdown page."""
    lines = [
        "# The planner against published runs",
        "",
        "Generated by `python -m benchmarks.planner_accuracy --write`. Error is |predicted ÷ measured − 1|. Rows whose",
        "id has a SHA-256 that is a multiple of three fitted their kind's factors (of memory: were looked at) and are",
        "not scored. Sources are in [published_runs.json](../benchmarks/published_runs.json).",
        "",
        *NOTES,
        "",
        "| kind | rows scored | rows fitted | median error, before | 90th percentile, before | factors fitted |",
        "|---|---:|---:|---:|---:|---|",
    ]
    fitted = {kind.name: ", ".join(kind.fitted) for kind in KINDS}
    for kind, one in summary(scored).items():
        lines.append(
            f"| {kind} | {one['scored']} | {one['fitted']} | {one['median_error']:.0%}, {BEFORE[kind][0]:.0%} "
            f"| {one['p90_error']:.0%}, {BEFORE[kind][1]:.0%} | {fitted.get(kind, '')} |"
        )
    lines += ["", "Not usable:", ""]
    used = {one.id for one in scored} | {one.id.split(" ")[0] for one in scored}
    lines += [f"- {row['id']}: {_why(row)}" for row in rows if row["id"] not in used]
    lines += ["", "| row | unit | measured | predicted | error |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {one.id} | {one.unit} | {one.measured:,.4g} | {one.predicted:,.4g} "
        f"| {one.predicted / one.measured - 1:+.0%} |"
        for one in scored
        if not one.is_fitted
    ]
    lines += ["", "Fitted: " + ", ".join(one.id for one in scored if one.is_fitted), ""]
    return "\n".join(lines)


def _why(row: dict[str, Any]) -> str:
    if row["kind"] == "weight_sync":
        return "hardware or payload not stated" if "4-layer" not in row["model"] else "four layers of a model"
    if row["kind"] == "min_gpus":
        return "states host memory beside it, which the fewest GPUs leave out"
    return "card without an entry in accelerators.json"


def main() -> None:
    """Score, and fit or write when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = json.loads(ROWS.read_text())
    factors = fit(rows) if arguments.fit else DEFAULTS
    scored = score(rows, factors)
    if arguments.fit:
        print({name: float(f"{value:.3g}") for name, value in asdict(factors).items()})
    if arguments.write:
        before = PAGE.read_text()
        PAGE.write_text(page(scored, rows) + before[before.index(OWN_RUNS) :])
    print(json.dumps(summary(scored)) if arguments.json else page(scored, rows).split("Not usable")[0])


if __name__ == "__main__":
    main()
