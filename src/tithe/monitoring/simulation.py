"""The page of `tithe simulate --html`: where the time goes, how old samples are, which setting is best."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tithe.monitoring._chart import Scale, Series, line_chart, stacked_chart
from tithe.monitoring._page import page, paragraph, section, table
from tithe.simulator import Answer, Outcome, throughput

_WIDTH, _HEIGHT = 1000, 24
"""Of a lane; the width is stretched to the page's."""
_SHOWN_BATCHES = 6
_MAX_SPANS = 4000
_SHADES = {"sample": "s1", "train": "s2", "publish": "s3"}


def simulation_page(answer: Answer) -> str:
    """One self-contained page; no script, no external file."""
    outcome, record = answer.outcome, answer.record()
    tiles = Markup("").join(
        Markup("<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>").format(*tile)
        for tile in (
            ("Step", f"{outcome.step_s:.3g} s", "between two batches"),
            ("Against synchronous", f"{answer.speed_over_sync:.2f} ×", "rollouts per second"),
            ("Lanes idle", f"{outcome.idle_frac():.0%}", f"synchronous: {answer.sync.idle_frac():.0%}"),
            ("Sample age", f"{outcome.age_mean:.2f}", "batches, mean"),
        )
    )
    head = Markup(
        '<header class="top"><p class="kicker">Simulation</p><h1>{}</h1><p class="lead">{}; {}</p>'
        '<dl class="tiles">{}</dl></header>'
    ).format(outcome.scenario.mode, outcome.scenario.layout.name, answer.source, tiles)
    parts = [_time_section(answer), _staleness_section(answer)]
    if answer.sweep is not None:
        parts.append(_sweep_section(answer))
    listed = Markup("").join(Markup("<li>{}</li>").format(text) for text in record["assumptions"])
    parts.append(section("assumed", "Assumed", Markup("<ul>{}</ul>").format(listed)))
    return page("Tithe simulation", head, Markup("").join(parts), "Made by tithe simulate.")


def _time_section(answer: Answer) -> Markup:
    charts = [_step_chart("Step time", answer.outcome)]
    if answer.outcome is not answer.sync:
        charts.append(_step_chart("Step time, synchronous", answer.sync))
    lines = [_timeline("Lanes at work", answer.outcome)]
    if answer.outcome is not answer.sync:
        lines.append(_timeline("Lanes at work, synchronous", answer.sync))
    wide = Markup('<div class="charts" style="grid-template-columns:1fr">{}</div>').format(_join(lines))
    return section("time", "Where the time goes", wide, Markup('<div class="charts">{}</div>').format(_join(charts)))


def _step_chart(title: str, outcome: Outcome) -> Markup:
    rows = outcome.ledger.batches
    xs = [float(row.serial) for row in rows]
    layers = [
        Series("waiting", xs, [row.wait_s for row in rows], neutral=True),
        Series("training", xs, [row.train_s for row in rows]),
        Series("publishing", xs, [row.publish_s for row in rows]),
    ]
    return stacked_chart(title, layers, Scale("s"))


def _staleness_section(answer: Answer) -> Markup:
    outcome = answer.outcome
    rows = outcome.ledger.batches
    xs = [float(row.serial) for row in rows]
    ages = [
        Series("mean", xs, [sum(row.ages) / len(row.ages) for row in rows]),
        Series("oldest", xs, [float(max(row.ages)) for row in rows]),
    ]
    dropped = Series("groups dropped as too old", xs, [float(row.dropped) for row in rows])
    charts = [
        line_chart("Sample age when trained", ages, Scale("batches", from_zero=True, whole=True)),
        line_chart("Dropped", [dropped], Scale("groups per batch", from_zero=True, whole=True)),
    ]
    shares = _histograms(
        ("sample age", outcome.age_histogram()),
        ("trainer ahead of the served version", outcome.lag_histogram()),
        ("version gap", outcome.gap_histogram()),
    )
    return section("age", "How old samples are", Markup('<div class="charts">{}</div>').format(_join(charts)), shares)


def _histograms(*named: tuple[str, dict[int, float]]) -> Markup:
    values = sorted({value for _, shares in named for value in shares})
    head = ["batches", *(str(value) for value in values)]
    rows = [[name, *(f"{shares.get(value, 0.0):.0%}" for value in values)] for name, shares in named]
    return table(
        head, rows, css="dense", caption="Shares of groups (age) and of batches, after the pipeline has filled."
    )


def _sweep_section(answer: Answer) -> Markup:
    sweep = answer.sweep
    assert sweep is not None
    base = throughput(answer.sync)
    most = max(throughput(outcome) for outcome in sweep.outcomes)
    rows = [_sweep_row(outcome, base, most, is_best=outcome is sweep.best) for outcome in sweep.outcomes]
    head = ["setting", "layout", "step s", "rollouts/s", "× sync", "", "idle", "age", "dropped"]
    return section(
        "sweep",
        "Settings compared",
        paragraph(f"Best, marked ▸: {sweep.reason}."),
        table(head, rows, css="dense"),
    )


def _sweep_row(outcome: Outcome, base: float, most: float, *, is_best: bool) -> Sequence[object]:
    scenario, rules = outcome.scenario, outcome.scenario.bounds
    speed = throughput(outcome)
    bar = Markup(
        '<svg width="120" height="10" aria-hidden="true"><rect class="area {}" width="{:.0f}" height="10"/></svg>'
    )
    mark = "▸ " if is_best else ""
    return (
        f"{mark}lag {rules.max_lag}, sync_every {rules.sync_every}, {scenario.max_running} in flight",
        scenario.layout.name,
        f"{outcome.step_s:.3g}",
        f"{outcome.rollouts_per_s:.3g}",
        f"{speed / base:.2f}",
        bar.format("s2" if is_best else "s1", 120 * speed / most),
        f"{outcome.idle_frac():.0%}",
        f"{outcome.age_mean:.2f}",
        outcome.pool.left["stale"],
    )


def _timeline(title: str, outcome: Outcome) -> Markup:
    """What each lane does while a few batches are trained in the middle of the run."""
    rows = outcome.ledger.batches
    first = min(outcome.warm_batches, len(rows) - 1)
    last = min(first + _SHOWN_BATCHES, len(rows) - 1)
    begin_s, end_s = rows[first].end_s, rows[last].end_s
    if end_s <= begin_s:
        begin_s, end_s = 0.0, outcome.span_s
    spans = [s for s in outcome.ledger.spans if s.end_s > begin_s and s.begin_s < end_s][:_MAX_SPANS]
    scale = _WIDTH / (end_s - begin_s)
    lanes: list[Markup] = []
    for lane in outcome.lanes:
        shapes: list[Markup] = []
        for span in (span for span in spans if span.lane == lane):
            left, right = max(span.begin_s, begin_s), min(span.end_s, end_s)
            shapes.append(
                Markup('<rect class="area {}" x="{:.2f}" width="{:.2f}" height="{}"/>').format(
                    _SHADES[span.kind], scale * (left - begin_s), scale * (right - left), _HEIGHT
                )
            )
        lanes.append(
            Markup(
                '<p class="note">{}</p><svg viewBox="0 0 {} {}" width="100%" height="{}" preserveAspectRatio="none" '
                'role="img" aria-label="{}">{}</svg>'
            ).format(lane, _WIDTH, _HEIGHT, _HEIGHT, f"{title}, {lane}, batches {first + 1} to {last}", _join(shapes))
        )
    keys = _join(
        [
            Markup(
                '<li><svg class="key" viewBox="0 0 12 10" aria-hidden="true">'
                '<rect class="area {}" width="12" height="10" rx="2"/></svg>{}</li>'
            ).format(shade, kind)
            for kind, shade in _SHADES.items()
        ]
    )
    return Markup(
        '<figure><figcaption><span class="name">{}</span><span class="now">{:.4g} to {:.4g} s</span></figcaption>'
        '<ul class="legend">{}</ul><div class="chart">{}</div></figure>'
    ).format(title, begin_s, end_s, keys, _join(lanes))


def _join(parts: Sequence[Markup]) -> Markup:
    return Markup("").join(parts)
