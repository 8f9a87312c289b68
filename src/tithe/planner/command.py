"""The commands `tithe plan` and `tithe compare`: from texts to answers. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tithe.errors import ConfigError
from tithe.planner import compare as comparing
from tithe.planner.answer import as_json, as_text, make_plan
from tithe.planner.calibrate import calibrated, read_run
from tithe.planner.factors import DEFAULTS
from tithe.planner.page import render, render_comparison
from tithe.planner.request import make_request


def plan(
    model: str, hardware: str, *, calibrate: str = "", html: str = "", tok_per_s: float = 0.0, **options: Any
) -> dict[str, Any]:
    """The answer of `tithe plan`: JSON's own types, and "text" for people.

    `options` are `PlanRequest`'s, and `base`. `UserError`s name the option that is wrong. `html`: where to write the
    page; `calibrate`: a run's directory; `tok_per_s`: a measured rate of sampling, 0 for the roofline's.
    """
    if not 0 <= tok_per_s < math.inf:
        raise ConfigError(f"--tok-per-s {tok_per_s}: a number from 0 is needed", key="tok_per_s")
    request = make_request(model, hardware, **_with_context(options))
    factors, sources = DEFAULTS, dict[str, str]()
    if calibrate:
        request, factors, sources = calibrated(request, factors, read_run(calibrate))
    answer = as_json(make_plan(request, factors=factors, calibrated=sources, tok_per_s=tok_per_s))
    if html:
        _write(Path(html), render(answer))
    return answer | {"text": as_text(answer)}


def compare(
    models: Sequence[str],
    hardware: str,
    against: str = "",
    *,
    html: str = "",
    as_markdown: bool = False,
    with_fewest: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The answer of `tithe compare`, for one model, or a table of several."""
    if len(models) > 1 and not as_markdown:
        raise ConfigError("give one model, or --markdown for a table of several", key="markdown")
    options = _with_context(options)
    answers = [comparing.compare(model, hardware, against, with_fewest=with_fewest, **options) for model in models]
    if html and as_markdown:
        raise ConfigError("--html is a page about one model; leave --markdown out", key="html")
    if html:
        _write(Path(html), render_comparison(answers[0], comparing.rows(answers[0])))
    if as_markdown:
        return {"rows": answers, "text": comparing.markdown(answers)}
    return answers[0] | {"text": comparing.as_text(answers[0])}


def _with_context(options: dict[str, Any]) -> dict[str, Any]:
    """Prompt and completion alone say the context."""
    if options.get("context") is not None:
        return options
    prompt, new = options.get("prompt") or 0, options.get("new") or 0
    return options | {"context": prompt + new if prompt and new else 4096}


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {path}: {error.strerror}", key="html") from error
