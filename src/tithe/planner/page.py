"""Pages of `tithe plan` and `tithe compare`, which need nothing else: charts of memory, time and what frees bytes.

Everything that comes from a config or the command line is escaped; there is no script in the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from tithe.planner.words import is_processor, words_of

_COLOURS: Final = (
    "#1f5f8b", "#2e8b6f", "#7fb069", "#d9a441", "#c8553d", "#8a5a83", "#5c7aa3", "#3d8ea0", "#a0752d", "#6b8e23",
    "#b5545c", "#4b6b5b", "#92a8d1", "#777777", "#bbbbbb", "#444444",
)  # fmt: skip
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1b1b;--soft:#666;--line:#ddd;--bg:#fff;--yes:#1c6b3c;--no:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a5a5a5;--line:#3a3a3a;--bg:#161616}}
@media(prefers-color-scheme:dark){:root{--yes:#6fcf97;--no:#ff8a80}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem}
body{color:var(--ink);background:var(--bg)}
h1{font-size:1.5rem;margin-bottom:.3rem}h2{font-size:1.1rem;margin-top:2.2rem}
.verdict{font-weight:600}.no{color:var(--no)}.yes{color:var(--yes)}.soft{color:var(--soft);font-size:13px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.9rem 1.5rem}
dt{color:var(--soft);font-size:13px}
dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%}th{color:var(--soft);font-size:13px;font-weight:500}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;vertical-align:top}
th,td{border-bottom:1px solid var(--line);overflow-wrap:break-word}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td:first-child{white-space:nowrap}
svg.bar{display:block;width:100%;height:36px;border-bottom:1px solid var(--line)}line{stroke:var(--ink);stroke-width:3}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;margin:.5rem 0 1rem;padding:0;list-style:none;font-size:13px}
.legend svg{width:10px;height:10px;margin-right:.4rem}
@media(max-width:40rem){thead{display:none}tr{display:block;border-bottom:1px solid var(--line);padding:.4rem 0}
td,td.n,td:first-child{display:block;border:0;padding:0;text-align:left;white-space:normal}td:empty{display:none}
td:first-child{font-weight:600}td[data-of]::before{content:attr(data-of) " ";color:var(--soft);font-size:13px}}
"""
_WIDTH: Final = 900


def render(answer: Mapping[str, Any]) -> str:
    """The page of a plan's JSON."""
    verdict = ("yes", "It fits.") if answer["fits"] else ("no", f"It does not fit: {_plain(answer['binding_layer'])}.")
    title = f"{answer['model']} on {answer['hardware']}"
    budget, needed = answer["gpu_budget_bytes"], answer["per_gpu_total_bytes"]
    words = words_of(answer)
    idle = [_plain(name) for name, n_bytes in answer["per_gpu_bytes"].items() if not n_bytes]
    parts = [
        f"<h1>{escape(title)}</h1><p class='verdict {verdict[0]}'>{escape(verdict[1])}</p>",
        _facts(answer),
        f"<h2>{words.memory.replace('memory', 'Memory', 1)}</h2>",
        _bar(answer["per_gpu_bytes"], max(budget, needed), 1e9, "GB", mark=budget),
        f"<p class=soft>{needed / 1e9:,.1f} GB of {budget / 1e9:,.1f} GB; the line is where {words.ends}.</p>",
        _table(("layer", "GB", "formula", "source"), _layer_rows(answer)),
        f"<p class=soft>Not needed: {escape(', '.join(idle) or 'nothing')}.</p>",
        "<h2>One step</h2>",
        _bar(answer["step_seconds"], answer["step_total_seconds"], 1, "s"),
        f"<p>{escape(_money(answer))}</p>",
        "<h2>What frees bytes</h2>",
        _table(("change", "option", words.column, "fits", "costs"), _suggestion_rows(answer)),
        "<h2>Advice</h2>",
        _table(("", "what", "why"), [(one["level"], one["text"], one["reason"]) for one in answer["advice"]]),
        "<h2>Assumed</h2><ul>",
        *(f"<li>{escape(one)}</li>" for one in answer["assumptions"]),
        "</ul><h2>Efficiency factors</h2>",
        _table(
            ("factor", "value", "source"), [(n, f"{f['value']:.3g}", f["source"]) for n, f in answer["factors"].items()]
        ),
    ]
    return document(title, "".join(parts))


def render_comparison(answer: Mapping[str, Any], rows: Iterable[tuple[str, str, str]]) -> str:
    """The page of a comparison's JSON; `rows` are (what, A's, B's) as its table has them."""
    holds = answer["claim_holds"]
    title = f"{answer['model']}: an adapter on one low-bit base, or every parameter"
    parts = [
        f"<h1>{escape(title)}</h1><p class='verdict {'yes' if holds else 'no'}'>{escape(answer['recommendation'])}</p>",
        f"<p>{escape(ratios(answer))}</p>",
        _table(("", "A: adapter", "B: every parameter"), rows, align=False),
    ]
    for name in ("a", "b"):
        side = answer[name]
        parts += [
            f"<h2>Memory of {name.upper()}'s fullest GPU, {escape(side['hardware'])}</h2>",
            _bar(
                side["per_gpu_bytes"],
                max(side["gpu_budget_bytes"], side["per_gpu_total_bytes"]),
                1e9,
                "GB",
                mark=side["gpu_budget_bytes"],
            ),
            f"<h2>One step of {name.upper()}</h2>",
            _bar(side["step_seconds"], side["step_total_seconds"], 1, "s"),
        ]
    for heading, texts in (("On condition", answer["conditions"]), ("Assumed", answer["assumptions"])):
        parts += [f"<h2>{heading}</h2><ul>", *(f"<li>{escape(one)}</li>" for one in texts), "</ul>"]
    return document(title, "".join(parts))


def ratios(answer: Mapping[str, Any]) -> str:
    """What B takes more than A, in a sentence."""
    return (
        f"B takes {answer['gpus_ratio']:.1f} times the GPUs ({answer['fewest_gpus_ratio']:.1f} at the fewest that hold "
        f"it) and {answer['total_hbm_ratio']:.1f} times the HBM: "
        f"the tenth {'holds' if answer['claim_holds'] else 'does not hold'} here."
    )


def document(title: str, body: str) -> str:
    """A whole page; `body` is HTML, `title` text."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{body}</body></html>\n"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _facts(answer: Mapping[str, Any]) -> str:
    machine = {
        "GPUs": f"{answer['gpus']}, {answer['total_hbm_bytes'] / 1e12:.2f} TB",
        "fewest GPUs": f"{answer['fewest_gpus'] or 'none'}",
    }
    if is_processor(answer):
        machine = {"memory": f"{answer['gpu_budget_bytes'] / 1e9:,.1f} GB"}
    facts = {
        "parameters": f"{answer['total_params'] / 1e9:,.1f}B",
        "active": f"{answer['active_params'] / 1e9:,.1f}B",
        f"base, {answer['base']}": f"{answer['checkpoint_bytes'] / 1e9:,.1f} GB",
        "adapter": f"{answer['adapter_params'] / 1e6:,.1f}M",
        **machine,
        "longest context": f"{answer['longest_context_tokens']:,}",
        "most live sequences": f"{answer['most_live_sequences']:,}",
        "best layout": answer["best_layout"],
    }
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()) + "</dl>"


def _money(answer: Mapping[str, Any]) -> str:
    time = f"{answer['step_total_seconds']:,.1f} s a step, {answer['tok_per_s']:,.0f} tokens/s"
    if answer["usd_per_hour"] is None:
        return f"{time}; {words_of(answer).no_price}"
    return (
        f"{time}; {answer['usd_per_hour']:,.2f} $/h ({answer['date'].rstrip('.')}), "
        f"{answer['usd_per_step']:,.2f} $ a step, {answer['usd_per_run']:,.0f} $ for {answer['run_steps']} steps"
    )


def _layer_rows(answer: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    for name, n_bytes in answer["per_gpu_bytes"].items():
        if not n_bytes:
            continue
        how = answer["formulas"][name]
        yield _plain(name), f"{n_bytes / 1e9:,.2f}", how["formula"], how["source"]


def _suggestion_rows(answer: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str, str]]:
    for one in answer["suggestions"]:
        freed = f"{one['freed_bytes_per_gpu'] / 1e9:,.2f}"
        yield one["change"], one["option"], freed, "yes" if one["fits"] else "", one["costs"]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, align: bool = True) -> str:
    """A table, numbers to the right if they `align`; on a narrow page every row is a block whose cells say what they
    are."""
    titles = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = "".join(
        "<tr>" + "".join(_cell(*cell, align=align) for cell in zip(head, range(len(row)), row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead>{lines}</table>"


def _cell(title: str, column: int, text: str, *, align: bool) -> str:
    number = " class=n" if align and _is_number(text) else ""
    label = f' data-of="{escape(title)}"' if column and text else ""
    return f"<td{number}{label}>{escape(text)}</td>"


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").isdigit()


def _bar(parts: Mapping[str, float], whole: float, scale: float, unit: str, mark: float = 0.0) -> str:
    """One bar of parts side by side, a line where the budget ends, and a legend."""
    x, boxes, legend = 0.0, [], []
    for colour, (name, value) in zip(_COLOURS, parts.items(), strict=False):
        if not value:
            continue
        width = _WIDTH * value / whole
        label = escape(f"{_plain(name)} {value / scale:,.2f} {unit}")
        box = f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="36" fill="{colour}"><title>{label}</title></rect>'
        boxes.append(box)
        legend.append(f'<li><svg viewBox="0 0 10 10"><rect width="10" height="10" fill="{colour}"/></svg>{label}</li>')
        x += width
    line = ""
    if mark:
        at = _WIDTH * mark / whole - 1.5
        line = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="36"/>'
    bar = f'<svg class=bar viewBox="0 0 {_WIDTH} 36" preserveAspectRatio="none" role="img">{"".join(boxes)}{line}</svg>'
    return f"{bar}<ul class=legend>{''.join(legend)}</ul>"
