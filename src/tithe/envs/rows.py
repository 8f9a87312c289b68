"""From rows of data to prompts: strict JSON, every broken row named by its place, nothing repaired in silence."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tithe.errors import DataError
from tithe.types import PromptItem

CONVERSATION: Final = "messages"
"""Column of a whole conversation, as OpenAI's chat files have it."""

MAX_ROWS: Final = 5_000_000
"""More rows than this are taken for an endless source."""

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_EATEN_BACKSLASH: Final = re.compile(
    "\x08(?=oxed|egin|eta|ar|inom|mod|ig)|\x0c(?=rac|rown|box|lat)|\t(?=ext|imes|frac|heta|an\\b|o\\b)|\x0b|\x07"
)


@dataclass(frozen=True)
class Columns:
    """Which columns of a row hold the prompt and the gold answer. With `needs_answer` a row without one is broken;
    `instruction` is added to every question."""

    prompt: str = "prompt"
    answer: str = "answer"
    needs_answer: bool = True
    instruction: str = ""


@dataclass(frozen=True)
class ReadRows:
    """Prompts in the order of the source, and the broken rows as ``place: reason``."""

    items: tuple[PromptItem, ...]
    broken: tuple[str, ...]


class _BrokenRow(Exception):
    """Why one row cannot be used."""


class _Literal(float):
    """A JSON number with decimals, which remembers how it was written."""

    def __new__(cls, text: str) -> _Literal:
        literal = super().__new__(cls, text)
        literal.text = text
        return literal

    text: str


def read_jsonl(path: Path, columns: Columns) -> ReadRows:
    """Read one JSON object per line. Raises `DataError` when the file cannot be read or holds no usable row."""
    try:
        with path.open("rb") as file:
            lines = [(f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip()]
    except OSError as error:
        raise DataError(f"cannot read the data file: {error.strerror}", where=str(path)) from error
    if not lines:
        raise DataError("the file holds no rows; one JSON object per line is needed", where=str(path))
    return _collect(((where, _parse(line)) for where, line in lines), columns, str(path))


def read_objects(rows: Iterable[Any], columns: Columns, source: str) -> ReadRows:
    """Read rows that a function made: mappings with the same columns, or finished `PromptItem`s."""
    return _collect(((f"{source} row {number}", row) for number, row in enumerate(rows, start=1)), columns, source)


def read_question(row: Mapping[str, Any], columns: Columns) -> PromptItem | str:
    """One row as a prompt whose id is still open, or why it is none."""
    try:
        return _item(row, columns)
    except _BrokenRow as error:
        return str(error)


def require_whole(read: ReadRows, *, strict: bool) -> None:
    """In strict mode, a broken row is a `DataError` that shows the first five."""
    if strict and read.broken:
        shown = "\n  ".join(read.broken[:5])
        more = f"\n  … and {len(read.broken) - 5} more" if len(read.broken) > 5 else ""
        count = len(read.broken)
        raise DataError(
            f"{count} broken row{'s' if count > 1 else ''}:\n  {shown}{more}\ncorrect the data, or leave such rows out "
            "with task.strict: false"
        )


def _parse(line: bytes) -> Any:
    """One line as JSON, or the `_BrokenRow` that says why not."""
    try:
        return json.loads(
            line.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_float=_Literal,
            object_pairs_hook=_unique_keys,
        )
    except _BrokenRow as error:
        return error
    except (ValueError, RecursionError) as error:
        return _BrokenRow(f"is not JSON: {error}")


def _refuse_constant(text: str) -> Any:
    raise _BrokenRow(f"holds {text}, which is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise _BrokenRow(f"has the key {twice[0]!r} twice")
    return dict(pairs)


def _collect(rows: Iterator[tuple[str, Any]], columns: Columns, source: str) -> ReadRows:
    items: list[PromptItem] = []
    broken: list[str] = []
    seen: Counter[str] = Counter()
    for number, (where, row) in enumerate(rows):
        if number >= MAX_ROWS:
            raise DataError(f"more than {MAX_ROWS} rows; a task is a finite list", where=source)
        try:
            item = _item(row, columns)
        except _BrokenRow as error:
            broken.append(f"{where}: {error}")
            continue
        digest = _content_hash(item)
        items.append(replace(item, id=f"{digest}-{seen[digest]}"))
        seen[digest] += 1
    if not items:
        shown = f"; the first: {broken[0]}" if broken else ""
        raise DataError(f"no usable row{shown}", where=source)
    return ReadRows(tuple(items), tuple(broken))


def _content_hash(item: PromptItem) -> str:
    """The same question with the same answer has the same hash in every run, wherever its row stands."""
    content = json.dumps([item.text, [dict(m) for m in item.messages], item.answer], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _item(row: Any, columns: Columns) -> PromptItem:
    """One row as a prompt, its id still open."""
    if isinstance(row, _BrokenRow):
        raise row
    if isinstance(row, PromptItem):
        item = row
        if not item.messages and not item.text:
            raise _BrokenRow("has neither messages nor text")
    else:
        item = _from_mapping(row, columns)
    for name, text in (*((m["role"], m.get("content", "")) for m in item.messages), ("text", item.text or "")):
        _check_text(text, f"the {name} prompt")
    _check_text(item.answer or "", "the answer", strict=True)
    if item.answer is None and columns.needs_answer:
        raise _BrokenRow("has no answer")
    return _instructed(item, columns.instruction)


def _from_mapping(row: Any, columns: Columns) -> PromptItem:
    if not isinstance(row, Mapping):
        raise _BrokenRow(f"is a {type(row).__name__}, not an object with columns")
    row, column = _as_question(row, columns)
    if column not in row:
        raise _BrokenRow(_missing("task.prompt_column", columns.prompt, row))
    prompt = row[column]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _BrokenRow(f"{columns.prompt!r} is empty")
        messages: tuple[Mapping[str, str], ...] = ({"role": "user", "content": prompt},)
    elif isinstance(prompt, list | tuple):
        messages = tuple(_message(message) for message in prompt)
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise _BrokenRow(f"{columns.prompt!r} must end with a message of the user or a tool")
    else:
        raise _BrokenRow(f"{columns.prompt!r} is {_shown(prompt)}; text or a list of chat messages is needed")
    extra = {str(key): value for key, value in row.items() if key not in (column, columns.answer)}
    return PromptItem("", messages=messages, answer=_answer(row, columns), extra=extra)


def _as_question(row: Mapping[str, Any], columns: Columns) -> tuple[Mapping[str, Any], str]:
    """The row and its prompt's column. A conversation in OpenAI's form (`messages`, the last one the assistant's) is a
    question with its answer."""
    column = columns.prompt if columns.prompt in row or CONVERSATION not in row else CONVERSATION
    messages = row.get(column)
    if not isinstance(messages, list | tuple) or len(messages) < 2 or not isinstance(messages[-1], Mapping):
        return row, column
    *asked, last = messages
    if last.get("role") != "assistant" or columns.answer in row:
        return row, column
    return {**row, column: asked, columns.answer: _text_of(last.get("content"))}, column


def _answer(row: Mapping[str, Any], columns: Columns) -> str | None:
    if columns.answer not in row:
        if columns.needs_answer:
            raise _BrokenRow(_missing("task.answer_column", columns.answer, row))
        return None
    value = row[columns.answer]
    if value is None and not columns.needs_answer:
        return None
    if isinstance(value, str) and value.strip():
        return value
    if _is_tests(value):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, _Literal) and math.isfinite(value):
        return value.text
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise _BrokenRow(f"{columns.answer!r} is {_shown(value)}; text or a number is needed")


def _is_tests(value: Any) -> bool:
    """Whether an answer is what tests a program, and not one answer of several."""
    if isinstance(value, list) and value:
        return all(isinstance(one, Mapping) or (isinstance(one, str) and one.startswith("assert")) for one in value)
    return isinstance(value, Mapping) and bool(value)


def _message(message: Any) -> Mapping[str, str]:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise _BrokenRow(f"holds the chat message {_shown(message)}; each needs a role of {', '.join(sorted(_ROLES))}")
    values: dict[str, str] = {}
    for key, value in message.items():
        if value is None and key != "content":
            continue  # tables fill up columns that other rows have
        text = _text_of(value) if key == "content" else value
        if not isinstance(text, str):
            raise _BrokenRow(f"holds a chat message whose {key} is {_shown(value)}; only text is read")
        values[str(key)] = text
    if "content" not in values:
        raise _BrokenRow("holds a chat message without content")
    return values


def _text_of(content: Any) -> Any:
    """Content given as a list of text parts is one text."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    return content


def _check_text(text: str, what: str, *, strict: bool = False) -> None:
    """Refuse what a writer that forgot to escape a backslash left behind, and halves of characters."""
    eaten = _EATEN_BACKSLASH.search(text) or (re.search("[\x08\x0c]", text) if strict else None)
    if eaten is not None:
        around = text[max(0, eaten.start() - 10) : eaten.start() + 12]
        raise _BrokenRow(
            f"{what} is damaged: a backslash was lost at {around!r} (write \\\\ in JSON for one backslash)"
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _BrokenRow(f"{what} holds half of a surrogate pair, which is no character")


def instructed(question: str, instruction: str) -> str:
    """A question as it is asked: `task.instruction`, if there is any, after a line break."""
    return f"{question}\n{instruction}" if instruction else question


def _instructed(item: PromptItem, instruction: str) -> PromptItem:
    if not instruction:
        return item
    if not item.messages:
        return replace(item, text=instructed(str(item.text), instruction))
    last = item.messages[-1]
    return replace(item, messages=(*item.messages[:-1], {**last, "content": instructed(last["content"], instruction)}))


def _missing(key: str, column: str, row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    near = difflib.get_close_matches(column, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"has no column {column!r} ({key}); its columns: {', '.join(names[:10]) or 'none'}{hint}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"
