"""``report.html``: one self-contained page about a run, finished or not.

Consumes a run directory (read-only); produces the page; waits for nothing. Model output is untrusted text: everything
passes through `markupsafe`, the page has no script, and its content security policy allows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from tithe.monitoring._curves import curves_section
from tithe.monitoring._page import page
from tithe.monitoring._pool_view import read_pool
from tithe.monitoring._result import head, result_section
from tithe.monitoring._run_data import load_run
from tithe.monitoring._sections import (
    configuration_section,
    health_section,
    numbers_section,
    parity_section,
    resources_section,
    samples_section,
)
from tithe.utils.durable import write_text

_ANCHORS = [
    ("result", "Result"),
    ("curves", "Curves"),
    ("health", "Alarms, drops and failures"),
    ("parity", "Parity certificate"),
    ("samples", "Sample rollouts"),
    ("resources", "Memory and disk"),
    ("configuration", "Configuration"),
    ("numbers", "Numbers"),
]


def build_report(run_dir: Path, prompts: Mapping[str, str] | None = None) -> Path:
    """Write ``run_dir/report.html`` and return its path; an older report is replaced atomically.

    Reads metrics.jsonl, run.json, config.yaml, parity.json, eval/*.json and pool.sqlite; whatever is missing or broken
    is said on the page. `prompts` maps prompt ids to the text to show; without it the ids are shown.
    Raises `FileNotFoundError` when `run_dir` is no directory, and `OSError` when the page cannot be written.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a run directory")
    run = load_run(run_dir)
    pool = read_pool(run_dir / "pool.sqlite", seed=run.name)
    sections = Markup("").join(
        [
            result_section(run),
            curves_section(run),
            health_section(run, pool),
            parity_section(run),
            samples_section(pool, prompts or {}),
            resources_section(run, pool),
            configuration_section(run),
            numbers_section(run),
        ]
    )
    foot = f"Made by Tithe from {run_dir.name}/. Every number comes from the files of the run directory."
    text = page(f"{run.name}: Tithe run report", head(run, pool, _ANCHORS), sections, foot)
    target = run_dir / "report.html"
    write_text(target, text.encode("utf-8", "replace").decode())  # a model may have written half a character
    return target
