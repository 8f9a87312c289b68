"""A task: what to train on, what to hold out, and what was found wrong with the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tithe.config.sampling import TaskSettings
from tithe.envs.rows import Columns, ReadRows, require_whole
from tithe.envs.sources import read_source
from tithe.envs.splitting import Split, contradictions, hold_out, keep_apart
from tithe.errors import DataError
from tithe.types import PromptItem


@dataclass(frozen=True)
class TaskReport:
    """What became of the data. `broken` rows are named by place and reason; `contradictory` questions come with more
    than one answer and are kept; `repeated` counts training rows that repeat another one and are kept.

    >>> TaskReport("rows.jsonl", 90, 40, broken=("rows.jsonl:3: is not JSON",), leaked=2).lines()[1]
    '1 broken row left out: rows.jsonl:3: is not JSON'
    """

    source: str
    train: int
    eval: int
    broken: tuple[str, ...] = ()
    contradictory: tuple[str, ...] = ()
    duplicates: int = 0
    leaked: int = 0
    twins: int = 0
    repeated: int = 0

    def lines(self) -> list[str]:
        """For people: one fact a line, only those that are not zero."""
        lines = [f"{self.source}: {self.train} training rows, {self.eval} held-out questions"]
        counted: tuple[tuple[int, str, Sequence[str]], ...] = (
            (len(self.broken), "broken row{s} left out", self.broken),
            (self.duplicates, "repeated held-out question{s} left out", ()),
            (self.leaked, "training row{s} left out, the question is held out", ()),
            (self.twins, "training row{s} left out, a reordering of a held-out question", ()),
            (self.repeated, "training row{s} that repeat another one", ()),
            (len(self.contradictory), "question{s} with contradictory answers", self.contradictory),
        )
        for count, text, examples in counted:
            if count:
                shown = f": {examples[0]:.200}" if examples else ""
                lines.append(f"{count} {text.format(s='' if count == 1 else 's')}{shown}")
        return lines


@dataclass(frozen=True)
class Task:
    """Prompts to train on, in the order of the task's seed, and distinct held-out ones; none is on both sides."""

    train: tuple[PromptItem, ...]
    eval: tuple[PromptItem, ...]
    report: TaskReport


def load_task(settings: TaskSettings, *, needs_answer: bool = True) -> Task:
    """Read the task of a configuration's `task` section. The same settings and data give the same task, ids included.

    `needs_answer` says that the reward compares with the answer column; without it, rows may lack that column. Raises
    `ConfigError` that names the key, or `DataError` that names the rows.
    """
    columns = Columns(settings.prompt_column, settings.answer_column, needs_answer, settings.instruction)
    read = _read(settings, settings.source, "task.source", columns)
    separate = settings.eval_source is not None and settings.eval_source != settings.source
    if separate:
        assert settings.eval_source is not None
        held = _read(settings, settings.eval_source, "task.eval_source", columns)
        split = keep_apart(read.items, held.items, settings.eval_size, settings.seed)
        read = ReadRows(read.items + held.items, read.broken + held.broken)
    else:
        split = hold_out(read.items, settings.eval_size, settings.seed)
    return Task(split.train, split.eval, _report(settings, read, split))


def _read(settings: TaskSettings, source: str, key: str, columns: Columns) -> ReadRows:
    read = read_source(source, columns, key=key, seed=settings.seed, eval_size=settings.eval_size)
    require_whole(read, strict=settings.strict)
    return read


def _report(settings: TaskSettings, read: ReadRows, split: Split) -> TaskReport:
    contradictory = contradictions(read.items)
    if settings.strict and contradictory:
        raise DataError(
            f"{len(contradictory)} questions come with more than one answer, first {contradictory[0]!r:.120}; correct "
            "the data, or keep them with task.strict: false",
            where=settings.source,
        )
    repeated = sum(not item.id.endswith("-0") for item in split.train)
    return TaskReport(
        source=settings.source,
        train=len(split.train),
        eval=len(split.eval),
        broken=read.broken,
        contradictory=tuple(contradictory),
        duplicates=split.duplicates,
        leaked=split.leaked,
        twins=split.twins,
        repeated=repeated,
    )
