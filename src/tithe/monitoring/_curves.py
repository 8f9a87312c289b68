"""The charts of the report."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tithe.metrics import METRICS
from tithe.monitoring._chart import Scale, Series, line_chart, stacked_chart
from tithe.monitoring._page import section
from tithe.monitoring._run_data import RunData

_NO_UNIT = Scale()
_FROM_ZERO = Scale(from_zero=True)
_PERCENT = Scale(percent=True)
_NATS = Scale("nats/token", from_zero=True)

_STEP_PARTS = ("wait_s", "train_s", "publish_s", "checkpoint_s")  # the train loop's own time, without overlap


def curves_section(run: RunData) -> Markup:
    """Everything over batches."""
    optimizer = [
        line_chart(METRICS[name].label, [run.series(name)], scale)
        for name, scale in (
            ("loss", _NO_UNIT),
            ("grad_norm", _FROM_ZERO),
            ("lr", _FROM_ZERO),
            ("clip_frac", _FROM_ZERO),
        )
    ]
    folded = Markup(
        "<details><summary>Optimizer: loss, gradient norm, learning rate, clipping</summary>{}</details>"
    ).format(_grid(optimizer))
    parts = [
        Markup("<h3>Learning</h3>"),
        _grid(_learning(run)),
        Markup("<h3>Speed and staleness</h3>"),
        _grid(_machinery(run)),
        folded,
    ]
    return section("curves", "Curves", *parts)


def _learning(run: RunData) -> list[Markup]:
    scores = [run.eval_series("eval_sampled", "sampled"), run.eval_series("eval_greedy", "greedy")]
    shape = [run.series("readable_rate", "readable"), run.series("truncated_frac", "cut at the length limit")]
    return [
        line_chart("Mean reward", [run.series("reward_mean")], _NO_UNIT),
        line_chart(
            "Mean reward, held out" if run.pays_scores else "Right answers, held out",
            scores,
            _NO_UNIT if run.pays_scores else _PERCENT,
            note="Sampled at T = 1. Bars: 95 % intervals over questions.",
        ),
        line_chart("KL to the reference", [run.series("kl_mean")], _NATS),
        line_chart("Entropy", [run.series("entropy")], _NATS),
        line_chart("Shape of answers", shape, _PERCENT),
        line_chart("Completion length", [run.series("completion_tokens_mean")], Scale("tokens", from_zero=True)),
    ]


def _machinery(run: RunData) -> list[Markup]:
    ages = [run.series("age_mean", "mean"), run.series("age_max", "oldest")]
    batches = Scale("batches", from_zero=True, whole=True)
    lost = [run.series("dropped_groups", "groups dropped"), run.series("failures", "rollouts failed")]
    work = [run.series("sample_s", "sampling"), run.series("reward_s", "judging")]
    return [
        line_chart("Rollout speed", [run.series("tok_per_s")], Scale("tok/s", from_zero=True)),
        stacked_chart("Step time", step_parts(run), Scale("s")),
        line_chart("Rollout work", work, Scale("s/batch", from_zero=True), note="Goes on beside training."),
        line_chart("Dropped and failed", lost, Scale("per batch", from_zero=True, whole=True)),
        line_chart("Version gap", [run.series("version_gap")], batches, note="How far the trainer is ahead."),
        line_chart("Sample age when trained", ages, batches),
    ]


def _grid(charts: Sequence[Markup]) -> Markup:
    return Markup('<div class="charts">{}</div>').format(Markup("").join(charts))


def step_parts(run: RunData) -> list[Series]:
    """Layers of a batch's time in seconds: the train loop's own parts, and what is left of `step_s` as "other". A run
    that recorded no parts shows its sampling time, which may overlap training, up to the whole step.
    """
    whole = run.series("step_s")
    steps = whole.xs
    parts = [part for part in (_aligned(run, name, steps) for name in _STEP_PARTS) if part.has_data]
    if not parts:
        sampling = _aligned(run, "sample_s", steps)
        capped = [min(y or 0.0, limit or 0.0) for y, limit in zip(sampling.ys, whole.ys, strict=True)]
        parts = [Series(sampling.name, steps, capped)] if sampling.has_data else []
    rest = [
        None if y is None else max(0.0, y - sum(part.ys[i] or 0.0 for part in parts)) for i, y in enumerate(whole.ys)
    ]
    return [*parts, Series("other" if parts else "whole step", steps, rest, neutral=bool(parts))]


def _aligned(run: RunData, name: str, steps: Sequence[float]) -> Series:
    series = run.series(name)
    known = dict(zip(series.xs, series.ys, strict=True))
    return Series(METRICS[name].label.lower(), steps, [known.get(step) for step in steps])
