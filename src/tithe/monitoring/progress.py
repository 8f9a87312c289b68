"""Live progress of a run on standard error.

Consumes metric rows, alarms and notes; produces a few lines that redraw themselves on a terminal, or one plain line
now and then where the stream is a file, a pipe or a dumb terminal. Waits for nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tithe.metrics import RowKind, row_kind
from tithe.monitoring._format import MISSING, format_duration, format_number, format_percent
from tithe.monitoring.alarms import Alarm

_SPARKS = "▁▂▃▄▅▆▇█"
_PACE_STEPS = 10  # the ETA follows the last ten batches: a run speeds up as its completions get shorter
_REDRAW_S = 0.2


class ProgressView:
    """A metric sink that shows where a run stands: first the three figures of health (rollout tok/s, version gap, mean
    KL), then reward, readable rate, step time, ETA and the last evaluation.

    `deadline_s` is the run's remaining time limit in seconds from now: the ETA never goes beyond it. On a plain stream
    a line is printed for the first and the last batch, for every evaluation, and otherwise at most every `interval_s`
    seconds. A row of the rollout side is shown with the batch's row that follows it: all figures are of one batch.
    Nothing is drawn before the first row.

    >>> import io
    >>> out = io.StringIO()
    >>> view = ProgressView(10, stream=out)
    >>> view.write(1, {"tok_per_s": 812.0, "version_gap": 1, "kl_mean": 0.031, "reward_mean": 0.4, "step_s": 3.14})
    >>> view.close()
    >>> print(out.getvalue().strip())
    812 tok/s | gap 1 | KL 0.031 | reward 0.4 | readable — | step 1/10 | step time 3.1 s | ETA —
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        deadline_s: float | None = None,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._step = first_step
        self._clock = clock
        self._deadline_s = None if deadline_s is None else clock() + deadline_s
        self._interval_s = interval_s
        self._latest: dict[str, float] = {}
        self._eval_step = 0
        self._rewards: deque[float] = deque(maxlen=24)
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)  # when each batch ended
        self._printed_s = float("-inf")
        self._unprinted = False
        self._lock = threading.Lock()
        self._alarms = 0
        self._console = Console(file=stream, highlight=False)
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False) if live else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take a row in and redraw."""
        with self._lock:
            kind = row_kind(values)
            self._latest.update(values)
            self._unprinted = True
            if kind is RowKind.EVAL:
                self._eval_step = step
            if kind is RowKind.TRAIN and step > self._step and not values.get("skipped"):
                self._step = step
                self._pace.append((step, self._clock()))
                if "reward_mean" in values:
                    self._rewards.append(values["reward_mean"])
            if kind is not RowKind.ROLLOUT:
                self._draw(must_print=kind is RowKind.EVAL or self._step == self._total)

    def note(self, text: str) -> None:
        """Print one lasting line, e.g. what the run waits for before its first batch."""
        with self._lock:
            self._print_line(Text(text))

    def alarm(self, alarm: Alarm) -> None:
        """Print an alarm as a lasting line."""
        with self._lock:
            self._alarms += 1
            self._print_line(Text(f"ALARM {alarm}", style="bold red"))

    def close(self) -> None:
        """Draw the last state and leave the terminal in order. A second call does nothing."""
        with self._lock:
            if self._live is not None:
                if self._live.is_started:
                    self._live.update(self._panel(), refresh=True)
                    self._live.stop()
                self._live = None
                self._unprinted = False
            elif self._unprinted:
                self._print_state()

    def _draw(self, *, must_print: bool) -> None:
        now_s = self._clock()
        if self._live is not None:
            if must_print or now_s - self._printed_s >= _REDRAW_S:
                self._printed_s = now_s
                self._live.start()  # nothing, once it has
                self._live.update(self._panel(), refresh=True)
        elif must_print or now_s - self._printed_s >= self._interval_s:
            self._printed_s = now_s
            self._print_state()

    def _print_state(self) -> None:
        self._unprinted = False
        self._print_line(Text(self.line()))

    def _print_line(self, text: Text) -> None:
        # rich prints above the live lines; soft_wrap leaves long plain lines whole for grep
        self._console.print(text, soft_wrap=True)

    def line(self) -> str:
        """The state in one line of plain text."""
        parts = [
            f"{self._number('tok_per_s')} tok/s",
            f"gap {self._number('version_gap')}",
            f"KL {self._number('kl_mean')}",
            f"reward {self._number('reward_mean')}",
            f"readable {format_percent(self._latest.get('readable_rate'))}",
            f"step {self._step}/{self._total}",
            f"step time {format_duration(self._latest.get('step_s'))}",
            f"ETA {format_duration(self.eta_s())}",
        ]
        if evaluation := self._evaluation():
            parts.append(f"eval {evaluation}")
        return " | ".join(parts)

    def eta_s(self) -> float | None:
        """Seconds to the last batch at the pace of the last ten, at most to the time limit; None before the second
        batch, because the time before the first one ends holds the start-up, and a limit alone is no estimate."""
        if len(self._pace) < 2:
            return None
        (first, first_s), (last, last_s) = self._pace[0], self._pace[-1]
        left_s = (self._total - last) * (last_s - first_s) / (last - first)
        left_s = max(0.0, left_s - (self._clock() - last_s))
        if self._deadline_s is None:
            return left_s
        return min(left_s, max(0.0, self._deadline_s - self._clock()))

    def _number(self, name: str) -> str:
        return format_number(self._latest.get(name))

    def _evaluation(self) -> str:
        if not any(name in self._latest for name in ("eval_sampled", "eval_greedy")):
            return ""
        shown = format_number if self._latest.get("eval_is_reward") else format_percent
        sampled, greedy = (shown(self._latest.get(name)) for name in ("eval_sampled", "eval_greedy"))
        return f"{sampled} sampled, {greedy} greedy (step {self._eval_step})"

    def _panel(self) -> Group:
        health = _figures(
            ("rollout", f"{self._number('tok_per_s')} tok/s"),
            ("version gap", self._number("version_gap")),
            ("KL", f"{self._number('kl_mean')} nats/token"),
        )
        learning = _figures(("reward", self._number("reward_mean")))
        learning.append(sparkline(list(self._rewards)) + "   ", style="cyan")
        learning.append_text(_figures(("readable", format_percent(self._latest.get("readable_rate")))))
        advance = Table.grid(padding=(0, 3, 0, 0))
        advance.add_row(
            _figures(("step", f"{self._step}/{self._total}")),
            ProgressBar(
                total=max(1, self._total),
                completed=self._step,
                width=24,
                complete_style="cyan",
                finished_style="cyan",
            ),
            _figures(
                ("step time", format_duration(self._latest.get("step_s"))), ("ETA", format_duration(self.eta_s()))
            ),
        )
        evaluation = _figures(("eval", self._evaluation() or MISSING))
        if self._alarms:
            evaluation.append(f"alarms {self._alarms}", style="bold red")
        return Group(health, learning, advance, evaluation)


def _figures(*pairs: tuple[str, str]) -> Text:
    """Labels dim, values bold, each followed by a gap."""
    text = Text()
    for label, value in pairs:
        text.append(f"{label} ", style="dim")
        text.append(value, style="bold")
        text.append("   ")
    return text


def sparkline(values: list[float]) -> str:
    """A row of bars, lowest value to highest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in values)
