"""The report's first screen: what the run was, what it reached, and the table before → after."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import median

from markupsafe import Markup

from tithe.metrics import finite_number
from tithe.monitoring._format import format_bytes, format_duration, format_number, format_percent, format_score
from tithe.monitoring._page import section
from tithe.monitoring._pool_view import PoolView
from tithe.monitoring._run_data import RunData, rank_peaks

_SCORES = (
    ("Right answers, sampled at T = 1", "eval_sampled", ""),
    ("Right answers, greedy", "eval_greedy", ""),
    ("Readable answers, sampled", "eval_readable", "minor"),
    ("Readable answers, greedy", "eval_greedy_readable", "minor"),
    ("Failed answers, taken as wrong", "eval_failed", "minor"),
)
_PAID = {"eval_sampled": "Mean reward, sampled at T = 1", "eval_greedy": "Mean reward, greedy"}
"""What these scores are called where they are rewards and no shares of right answers."""
_PLOT_WIDTH, _PLOT_HEIGHT, _PLOT_EDGE = 320, 30, 20


def head(run: RunData, pool: PoolView, anchors: list[tuple[str, str]]) -> Markup:
    """Title, one sentence, links, remarks, key figures."""
    links = Markup("").join(Markup('<a href="#{}">{}</a>').format(anchor, title) for anchor, title in anchors)
    return Markup(
        '<header class="top"><p class="kicker">Tithe run report</p><h1>{}</h1><p class="lead">{}</p>'
        '<nav aria-label="Sections">{}</nav>{}{}</header>'
    ).format(run.name, _identity(run), links, _remarks(run, pool), _tiles(run, pool))


def _identity(run: RunData) -> str:
    model = run.info.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    name = name or run.setting("model.path") or ("the demo model" if run.config else None)
    parts = [f"Base: {name}." if name else ""]
    algorithm, rank = run.setting("rl.algorithm"), run.setting("lora.r")
    learns = "every parameter" if run.setting("model.train") == "full" else f"LoRA rank {rank}" if rank else ""
    if algorithm and learns:
        parts.append(f"{str(algorithm).upper()}, {learns}.")
    status, reason = run.info.get("status"), run.info.get("reason")
    if status:
        parts.append(f"Status: {status}{f' ({reason})' if reason else ''}.")
    finished, started = run.info.get("finished_at"), run.info.get("started_at")
    if finished or started:
        parts.append(f"Finished {_moment(finished)}." if finished else f"Started {_moment(started)}.")
    return " ".join(part for part in parts if part)


def _moment(text: object) -> str:
    """An ISO 8601 time to the minute in UTC; anything else as it is."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if moment.tzinfo else str(text)


def _remarks(run: RunData, pool: PoolView) -> Markup:
    remarks = [*run.remarks, *([pool.problem] if pool.problem else [])]
    if not remarks:
        return Markup("")
    items = Markup("").join(Markup("<li>{}</li>").format(remark) for remark in remarks)
    return Markup('<div class="notice"><p>Not all parts of this run are here.</p><ul>{}</ul></div>').format(items)


def _tiles(run: RunData, pool: PoolView) -> Markup:
    planned = run.setting("run.max_steps")
    speeds = [y for y in run.series("tok_per_s").ys if y is not None]
    memory = run.info.get("memory")
    memory = memory if isinstance(memory, Mapping) else {}
    peak = finite_number(memory.get("peak_pss_bytes")) or finite_number(memory.get("peak_rss_bytes"))
    ranks = list(rank_peaks(memory).values())
    of_ranks = f"of rank 0; largest of {len(ranks)} ranks: {format_bytes(max(ranks))}" if len(ranks) > 1 else ""
    gap = finite_number((run.parity or {}).get("max_abs_dlogp"))
    gaps, kls = ([y for y in run.series(name).ys if y is not None] for name in ("version_gap", "kl_mean"))
    tiles = [
        ("Rollout speed", f"{format_number(median(speeds))} tok/s" if speeds else "—", "median over batches"),
        ("Version gap", format_number(max(gaps, default=None)), "largest, in batches"),
        ("Mean KL", format_number(kls[-1] if kls else None), "nats/token, last batch"),
        ("Time", format_duration(_seconds(run)), ""),
        ("Batches trained", format_number(run.steps), f"of {planned}" if planned else ""),
        (
            "Rollouts trained",
            format_number(pool.trained_rollouts or None),
            f"{pool.trained_tokens:,} tokens" if pool.trained_rollouts else "",
        ),
        ("Peak memory", format_bytes(peak), of_ranks),
        ("Sampler against trainer", format_number(gap), "largest |Δ log-prob|"),
    ]
    cells = Markup("").join(
        Markup("<div><dt>{}</dt><dd>{}{}</dd></div>").format(
            label, value, Markup("<small>{}</small>").format(note) if note else ""
        )
        for label, value, note in tiles
    )
    return Markup('<dl class="tiles">{}</dl>').format(cells)


def _seconds(run: RunData) -> float | None:
    """The run's own time: that of the rows goes on through resumes, run.json tells that of the last process alone, but
    from its beginning to its end."""
    minutes = finite_number(run.info.get("minutes"))
    times = [finite_number(row.get("t_s")) for row in run.rows] + [None if minutes is None else 60 * minutes]
    return max((time_s for time_s in times if time_s is not None), default=None)


def result_section(run: RunData) -> Markup:
    """Held-out score before and after training."""
    before, after = run.before, run.after
    if before is None:
        return section("result", "Result", Markup("<p>No evaluation has been made yet.</p>"))
    paid = run.pays_scores
    rows = Markup("").join(
        _score_row(label, name, css, before, after, is_reward=paid and name in _PAID)
        for label, name, css in _SCORES
        if name in before or name in (after or {})
    )
    table = Markup(
        '<div class="scroll"><table class="result"><thead><tr><th scope="col">Held-out questions</th>'
        '<th scope="col">Before</th><th scope="col">After</th><th scope="col">Change</th>'
        '<th scope="col" class="plot">{}</th></tr></thead><tbody>{}</tbody><caption>{}</caption></table></div>'
    ).format(_plot_axis(), rows, _caption(before, after))
    return section("result", "Result", table, about=_verdict(before, after, paid=paid))


def _verdict(before: Mapping[str, float], after: Mapping[str, float] | None, *, paid: bool) -> str:
    if after is None:
        return "Only the base has been evaluated so far; there is nothing to compare with yet."
    was, now = before.get("eval_sampled"), after.get("eval_sampled")
    if was is None or now is None:
        return ""
    moved = "rose" if now > was else "fell" if now < was else "stayed the same"
    what = "The mean reward" if paid else "Right answers"
    span = " to ".join(format_score(score, is_reward=paid) for score in (was, now))
    sentence = f"{what} at temperature 1 {moved} from {span}"
    low, high = (before, after) if now >= was else (after, before)
    ceiling, floor = low.get("eval_sampled_hi"), high.get("eval_sampled_lo")
    if ceiling is not None and floor is not None and ceiling >= floor:
        return f"{sentence}. The intervals overlap: this may be chance."
    return f"{sentence}."


def _caption(before: Mapping[str, float], after: Mapping[str, float] | None) -> str:
    last = after or before
    parts: list[str] = []
    if "questions" in last:
        parts.append(f"{last['questions']:.0f} held-out questions")
    if "samples_per_question" in last:
        parts.append(f"{last['samples_per_question']:.0f} samples each at T = 1")
    parts.append("brackets and bars: 95 % intervals bootstrapped over questions")
    steps = f"before is batch {before['step']:.0f}"
    parts.append(f"{steps}, after is batch {after['step']:.0f}" if after else steps)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _score_row(
    label: str,
    name: str,
    css: str,
    before: Mapping[str, float],
    after: Mapping[str, float] | None,
    *,
    is_reward: bool,
) -> Markup:
    return Markup(
        '<tr class="{}"><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td class="plot">{}</td></tr>'
    ).format(
        css,
        _PAID[name] if is_reward else label,
        _score(before, name, is_reward=is_reward),
        _score(after or {}, name, is_reward=is_reward),
        _change(before, after, name, is_reward=is_reward),
        Markup("") if is_reward else _plot(before, after, name),
    )


def _score(values: Mapping[str, float], name: str, *, is_reward: bool) -> Markup:
    lo, hi = values.get(f"{name}_lo"), values.get(f"{name}_hi")
    interval = Markup("")
    if lo is not None and hi is not None:
        ends = f"[{lo:.2f}, {hi:.2f}]" if is_reward else f"[{100 * lo:.1f}, {100 * hi:.1f}]"
        interval = Markup('<span class="ci">{}</span>').format(ends)
    return Markup("<b>{}</b>{}").format(format_score(values.get(name), is_reward=is_reward), interval)


def _change(before: Mapping[str, float], after: Mapping[str, float] | None, name: str, *, is_reward: bool) -> Markup:
    was, now = before.get(name), (after or {}).get(name)
    if was is None or now is None:
        return Markup("—")
    if is_reward:
        return Markup('<span class="{}">{:+.2f}</span>').format("up" if now > was else "down", now - was)
    points = round(100 * (now - was), 1)
    sign, css = ("+", "up") if points > 0 else ("-", "down") if points < 0 else ("±", "")
    if name == "eval_failed":
        css = {"up": "down", "down": "up"}.get(css, "")  # the classes are of good and bad news
    return Markup('<span class="{}">{}{:.1f} points</span>').format(css, sign, abs(points))


def _plot_x(fraction: float) -> float:
    return _PLOT_EDGE + min(1.0, max(0.0, fraction)) * (_PLOT_WIDTH - 2 * _PLOT_EDGE)


def _plot_axis() -> Markup:
    labels = Markup("").join(
        Markup('<text class="mid" x="{:.0f}" y="14">{}</text>').format(_plot_x(at), format_percent(at))
        for at in (0.0, 0.5, 1.0)
    )
    return Markup('<svg viewBox="0 0 {} 18" role="img" aria-label="Axis from 0 to 100 percent">{}</svg>').format(
        _PLOT_WIDTH, labels
    )


def _plot(before: Mapping[str, float], after: Mapping[str, float] | None, name: str) -> Markup:
    """Both scores on one line from 0 to 100 %: before hollow, after filled, intervals as bars."""
    middle = _PLOT_HEIGHT // 2
    parts = [_plot_line("base", 0.0, 1.0)]
    parts.extend(
        Markup('<line class="base" x1="{x}" x2="{x}" y1="{}" y2="{}"/>').format(middle - 3, middle + 3, x=_plot_x(at))
        for at in (0.0, 0.5, 1.0)
    )
    for values, css in ((before, "was"), (after or {}, "is")):
        value, lo, hi = values.get(name), values.get(f"{name}_lo"), values.get(f"{name}_hi")
        if lo is not None and hi is not None:
            parts.append(_plot_line(css, lo, hi))
        if value is not None:
            parts.append(Markup('<circle class="{}" cx="{:.1f}" cy="{}" r="6"/>').format(css, _plot_x(value), middle))
    return Markup('<svg viewBox="0 0 {} {}" aria-hidden="true">{}</svg>').format(
        _PLOT_WIDTH, _PLOT_HEIGHT, Markup("").join(parts)
    )


def _plot_line(css: str, start: float, end: float) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{y}" y2="{y}"/>').format(
        css, _plot_x(start), _plot_x(end), y=_PLOT_HEIGHT // 2
    )
