"""`tithe plan --html`: one page that needs nothing else, with charts of memory, time and what frees bytes.

Everything that comes from a config or the command line is escaped; there is no script in the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

_COLOURS: Final = (
    "#1f5f8b", "#2e8b6f", "#7fb069", "#d9a441", "#c8553d", "#8a5a83", "#5c7aa3", "#3d8ea0", "#a0752d", "#6b8e23",
    "#b5545c", "#4b6b5b", "#92a8d1", "#777777", "#bbbbbb", "#444444",
)  # fmt: skip
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1b1b}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #ddd;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.no{color:#b3261e}.yes{color:#1c6b3c}
svg{width:100%;height:auto}small{color:#666}
"""
_WIDTH: Final = 900


def render(answer: Mapping[str, Any]) -> str:
    """The page of a plan's JSON."""
    verdict = ("yes", "fits") if answer["fits"] else ("no", f"does not fit: {answer['binding_layer']}")
    title = f"{answer['model']} on {answer['hardware']}"
    budget = answer["gpu_budget_bytes"]
    parts = [
        f"<h1>{escape(title)}</h1><p class={verdict[0]}><b>{escape(verdict[1])}</b>. {escape(_facts(answer))}</p>",
        "<h2>Memory of the fullest GPU</h2>",
        _bar(answer["per_gpu_bytes"], max(budget, answer["per_gpu_total_bytes"]), 1e9, "GB", mark=budget),
        _table(("layer", "GB", "formula", "source"), _layer_rows(answer)),
        "<h2>One step</h2>",
        _bar(answer["step_seconds"], answer["step_total_seconds"], 1, "s"),
        f"<p>{escape(_money(answer))}</p>",
        "<h2>What frees bytes</h2>",
        _table(("change", "option", "GB a GPU", "fits", "costs"), _suggestion_rows(answer)),
        "<h2>Advice</h2>",
        _table(("", "what", "why"), [(one["level"], one["text"], one["reason"]) for one in answer["advice"]]),
        "<h2>Assumed</h2><ul>",
        *(f"<li>{escape(one)}</li>" for one in answer["assumptions"]),
        "</ul><h2>Efficiency factors</h2>",
        _table(
            ("factor", "value", "source"), [(n, f"{f['value']:.3g}", f["source"]) for n, f in answer["factors"].items()]
        ),
    ]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _facts(answer: Mapping[str, Any]) -> str:
    return (
        f"{answer['total_params'] / 1e9:,.1f}B parameters ({answer['active_params'] / 1e9:,.1f}B active), base "
        f"{answer['base']} {answer['checkpoint_bytes'] / 1e9:,.1f} GB, adapter {answer['adapter_params'] / 1e6:,.1f}M; "
        f"{answer['gpus']} GPUs with {answer['total_hbm_bytes'] / 1e12:.2f} TB; {answer['per_gpu_total_bytes']:,} of "
        f"{answer['gpu_budget_bytes']:,} bytes a GPU; fewest GPUs {answer['fewest_gpus'] or 'none'}, longest context "
        f"{answer['longest_context_tokens']:,}, most live sequences {answer['most_live_sequences']:,}"
    )


def _money(answer: Mapping[str, Any]) -> str:
    time = f"{answer['step_total_seconds']:,.1f} s a step, {answer['tok_per_s']:,.0f} tokens/s"
    if answer["usd_per_hour"] is None:
        return f"{time}; no price of this card is known"
    return (
        f"{time}; {answer['usd_per_hour']:,.2f} $/h ({answer['date']}), {answer['usd_per_step']:,.2f} $ a step, "
        f"{answer['usd_per_run']:,.0f} $ for {answer['run_steps']} steps"
    )


def _layer_rows(answer: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    for name, n_bytes in answer["per_gpu_bytes"].items():
        how = answer["formulas"][name]
        yield name, f"{n_bytes / 1e9:,.2f}", how["formula"], how["source"]


def _suggestion_rows(answer: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str, str]]:
    for one in answer["suggestions"]:
        freed = f"{one['freed_bytes_per_gpu'] / 1e9:,.2f}"
        yield one["change"], one["option"], freed, "yes" if one["fits"] else "", one["costs"]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = "".join(
        "<tr>" + "".join(f"<td{' class=n' if _is_number(cell) else ''}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").isdigit()


def _bar(parts: Mapping[str, float], whole: float, scale: float, unit: str, mark: float = 0.0) -> str:
    """One bar of parts side by side, a line where the budget ends, and a legend."""
    x, boxes, legend = 0.0, [], []
    for colour, (name, value) in zip(_COLOURS, parts.items(), strict=False):
        if not value:
            continue
        width = _WIDTH * value / whole
        label = escape(f"{name} {value / scale:,.2f} {unit}")
        box = f'<rect x="{x:.1f}" y="4" width="{width:.1f}" height="34" fill="{colour}"><title>{label}</title></rect>'
        boxes.append(box)
        column, row = len(legend) % 4, len(legend) // 4
        at = f'x="{column * 225}" y="{58 + row * 18}"'
        legend.append(
            f'<rect {at} width="10" height="10" fill="{colour}"/>'
            f'<text x="{column * 225 + 15}" y="{67 + row * 18}" font-size="12">{label}</text>'
        )
        x += width
    height = 62 + 18 * -(-len(legend) // 4)
    line = ""
    if mark:
        at = _WIDTH * mark / whole
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="42" stroke="#000" stroke-width="2"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join([*boxes, line, *legend])}</svg>'
