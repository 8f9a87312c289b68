"""The sections below the curves: health, parity, samples, resources, configuration, numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tithe.metrics import METRICS, RowKind, finite_number
from tithe.monitoring._format import MISSING, format_bytes, format_number, format_percent
from tithe.monitoring._page import paragraph, safe_text, section, table, two_columns
from tithe.monitoring._pool_view import PoolSample, PoolView
from tithe.monitoring._run_data import RunData, rank_peaks
from tithe.monitoring.alarms import Alarm, AlarmRules, Alarms

_SHOWN_CHARACTERS = 3000
_TABLE_ROWS = 500


def alarm_rules(run: RunData) -> AlarmRules:
    """The run's own thresholds where its configuration is readable."""
    given = run.setting("monitor.alarm_after")
    return AlarmRules(batches=given) if isinstance(given, int) and given > 0 else AlarmRules()


def health_section(run: RunData, pool: PoolView) -> Markup:
    """Alarms, drops and failures. Alarms are judged anew from the metric rows."""
    alarms = Alarms(alarm_rules(run))
    alarms.replay(run.rows)
    told = Markup("").join(_alarm(alarm) for alarm in alarms.raised)
    if not told:
        told = paragraph("No alarm was raised." if run.rows else "No batch has been judged yet.")
    lost = [
        *((f"groups dropped, {reason}", format_number(count)) for reason, count in pool.drops_by_reason.items()),
        *((f"rollouts failed, {cause}", format_number(count)) for cause, count in pool.failures_by_cause.items()),
        ("optimizer steps skipped", format_number(run.total("skipped"))),
        ("metric values that were not finite", format_number(run.total("non_finite"))),
    ]
    states = [(state, format_number(count)) for state, count in pool.groups_by_state.items()]
    groups = table(("Groups in the pool", "Count"), states) if states else paragraph(pool.problem or "Empty pool.")
    counts = two_columns(table(("Dropped and failed", "Count"), lost), groups)
    return section("health", "Alarms, drops and failures", told, counts)


def _alarm(alarm: Alarm) -> Markup:
    keys = Markup(", ").join(Markup("<code>{}</code>").format(key) for key in alarm.remedy_keys)
    return Markup('<div class="alarm"><b>Batch {}: {}</b><p>{}</p><p>Look at {}.</p></div>').format(
        alarm.step, str(alarm.kind), alarm.message, keys
    )


_PARITY_LABELS = {
    "max_abs_dlogp": "largest |Δ log-prob|",
    "mean_abs_dlogp": "mean |Δ log-prob|",
    "noise_floor": "noise floor: |Δ log-prob| after changing the adapter by 1e-7",
    "tokens": "tokens compared",
    "base_max_abs_error": "base weights: largest error against the file",
}


def parity_section(run: RunData) -> Markup:
    """Trainer log-probs against sampler log-probs."""
    parity = run.parity
    about = "Log-probs of the same tokens, as the trainer computes them and as the sampler recorded them."
    if not parity:
        return section("parity", "Parity certificate", paragraph("Not certified yet."), about=about)
    known = [(label, _plain(parity[name])) for name, label in _PARITY_LABELS.items() if name in parity]
    others = [(name, _plain(value)) for name, value in parity.items() if name not in _PARITY_LABELS]
    tables = two_columns(
        table(("Measure", "Value"), known), table(("Circumstance", "Value"), others) if others else Markup("")
    )
    verdict = Markup("<p><b>{}</b></p>").format(_parity_verdict(parity))
    return section("parity", "Parity certificate", verdict, tables, about=about)


def _parity_verdict(parity: Mapping[str, Any]) -> str:
    worst, floor = (finite_number(parity.get(name)) for name in ("max_abs_dlogp", "noise_floor"))
    if worst == 0:
        return "Sampler and trainer agree bit for bit."
    if worst is None or floor is None:
        return "The certificate is incomplete."
    return f"The largest difference is {'within' if worst <= floor else 'above'} the noise floor."


def samples_section(pool: PoolView, prompts: Mapping[str, str]) -> Markup:
    """Rollouts of the first and the last batch: best, worst, random."""
    if not pool.first:
        return section("samples", "Sample rollouts", paragraph(pool.problem or "No batch has been trained yet."))
    columns = [
        Markup("<div><h3>{}: batch {}</h3>{}</div>").format(
            name, batch[0].batch_serial, Markup("").join(_card(sample, prompts) for sample in batch)
        )
        for name, batch in (("Before", pool.first), ("After", pool.last))
        if batch
    ]
    about = "What the model wrote in the first and the last trained batch: by reward, and one at random."
    grid = Markup('<div class="samples">{}</div>').format(Markup("").join(columns))
    return section("samples", "Sample rollouts", grid, about=about)


_FINISH = {"stop": "ended by itself", "length": "cut at the length limit"}


def _card(sample: PoolSample, prompts: Mapping[str, str]) -> Markup:
    shown, cut = safe_text(sample.text, _SHOWN_CHARACTERS)
    asked, _ = safe_text(prompts.get(sample.prompt_id, f"Prompt {sample.prompt_id}"), _SHOWN_CHARACTERS)
    facts = [f"{sample.n_tokens} tokens", _FINISH.get(sample.finish, sample.finish)]
    if sample.min_serial is not None:
        facts.append(f"policy {sample.min_serial}")
    rest = Markup('<span class="cut"> … {:,} more characters</span>').format(cut) if cut else ""
    return Markup(
        '<article class="sample"><header><b>{}</b><span>{}</span><span class="reward">reward <b>{}</b>{}</span>'
        '</header><p class="asked">{}</p><pre tabindex="0">{}{}</pre></article>'
    ).format(
        sample.pick.capitalize(),
        ", ".join(facts),
        format_number(sample.reward),
        _reward_parts(sample.reward_parts),
        asked,
        shown or Markup('<span class="cut">(empty)</span>'),
        rest,
    )


def _reward_parts(text: str) -> str:
    try:
        parts = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(parts, dict) or len(parts) < 2:
        return ""
    return " (" + ", ".join(f"{name} {_plain(value)}" for name, value in parts.items()) + ")"


def resources_section(run: RunData, pool: PoolView) -> Markup:
    """Memory, disk, and what the run says of model and machine."""
    facts = _flatten({name: value for name, value in run.info.items() if name not in {"memory", "memory_planned"}})
    disk = [(name, format_bytes(size)) for name, size in run.disk_bytes.items()]
    pool_bytes = run.disk_bytes.get("pool.sqlite")
    if pool_bytes and pool.trained_rollouts:
        disk.append(("pool, for each trained rollout", format_bytes(pool_bytes / pool.trained_rollouts)))
    folded = Markup("<details><summary>Model, machine and versions</summary>{}</details>").format(
        table(("Fact", "Value"), facts) if facts else paragraph("run.json is missing.")
    )
    disk_table = table(("Disk", "Size"), disk) if disk else paragraph("Nothing on disk yet.")
    return section("resources", "Memory and disk", two_columns(_memory(run), disk_table), folded)


def _memory(run: RunData) -> Markup:
    measured, planned = (
        value if isinstance(value, Mapping) else {}
        for value in (run.info.get("memory"), run.info.get("memory_planned"))
    )
    peaks = rank_peaks(measured)
    of_ranks = {f"rank_{rank}_peak_rss_bytes" for rank in peaks}
    names = [name for name in dict.fromkeys([*measured, *planned]) if name not in of_ranks]
    if not names:
        return paragraph("Memory was not recorded.")
    columns = [planned, measured] if planned else [measured]
    rows = [
        (
            name.removesuffix("_bytes").replace("_", " "),
            *(format_bytes(finite_number(column.get(name))) for column in columns),
        )
        for name in names
    ]
    resident, on_file = (finite_number(measured.get(name)) for name in ("base_resident_bytes", "base_file_bytes"))
    blank = [""] * (len(columns) - 1)
    if resident is not None and on_file:
        rows.append(("base in memory, relative to its file", *blank, format_percent(resident / on_file, 1)))
    if peaks:
        rows.append((f"largest peak of {len(peaks)} ranks", *blank, format_bytes(max(peaks.values()))))
    known = table(("Memory", *(["Planned"] if planned else []), "Measured"), rows)
    return known + _rank_table(peaks) if peaks else known


def _rank_table(peaks: Mapping[int, float]) -> Markup:
    rows = [(f"rank {rank}", format_bytes(peak)) for rank, peak in peaks.items()]
    return Markup("<details><summary>Peak of every rank</summary>{}</details>").format(
        table(("Process", "Largest resident memory"), rows)
    )


def configuration_section(run: RunData) -> Markup:
    """The resolved configuration by section, or as text when it cannot be parsed."""
    if not run.config:
        text = Markup("<pre>{}</pre>").format(run.config_text) if run.config_text else paragraph("Not recorded.")
        return section("configuration", "Configuration", text)
    blocks: list[Markup] = []
    for name, values in run.config.items():
        entries = values if isinstance(values, Mapping) else {name: values}
        rows = Markup("").join(
            Markup('<tr><th scope="row">{}</th><td>{}</td></tr>').format(key, _plain(value))
            for key, value in entries.items()
        )
        blocks.append(Markup("<section><h3>{}</h3><table><tbody>{}</tbody></table></section>").format(name, rows))
    grid = Markup('<div class="settings">{}</div>').format(Markup("").join(blocks))
    return section("configuration", "Configuration", grid)


def numbers_section(run: RunData) -> Markup:
    """Every training number as a table, also for those who do not see the charts."""
    rows = [row for row in run.rows if row.get("kind") == RowKind.TRAIN]
    names = [name for name in METRICS if any(name in row for row in rows)]
    if not names:
        return section("numbers", "Numbers", paragraph("No batch has been trained yet."))
    stride = -(-len(rows) // _TABLE_ROWS)
    body = [(row["step"], *(_plain(row.get(name)) for name in names)) for row in rows[::stride]]
    said = "every batch" if stride == 1 else f"every {stride}th batch; metrics.jsonl has them all"
    folded = Markup("<details><summary>Table of {}</summary>{}</details>").format(
        said, table(("batch", *names), body, css="dense")
    )
    return section("numbers", "Numbers", folded)


def _plain(value: Any) -> str:
    """A value of a JSON or YAML file as text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return format_number(value, 4)
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ", ".join(_plain(item) for item in value) or "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in values.items():
        inner = _flatten(value, f"{prefix}{name} ") if isinstance(value, Mapping) else [(prefix + name, _plain(value))]
        flat.extend(inner)
    return flat
