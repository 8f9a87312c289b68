"""Pythonic calls: the whole reply is `[name(key=value, …), …]` with literals as values, as Llama 3.2 and 4 write them.

Read by a small parser of its own and never by Python's: text of a model is not compiled, and Python's parser can be
made to overflow. Positional arguments are malformed (there is no name to check them by).
"""

from __future__ import annotations

import re
from typing import Any, Final

from tithe.rewards.tool_calls.calls import MAX_ARGUMENT_CHARS, MAX_DEPTH, Findings, JsonFault, ParsedReply

_TAGS: Final = ("<|python_start|>", "<|python_tag|>")
_ENDS: Final = ("<|python_end|>", "<|eom_id|>", "<|eot_id|>", "<|eot|>")
_NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_LIKE_CALLS: Final = re.compile(r"\[\s*+[A-Za-z_][\w.]*+\s*+\(", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d_]{0,400}+(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{1,3})?(?![\w.])", re.ASCII)
_PLAIN: Final = re.compile(r"[^'\"\\\n]++")
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "0": "\0", "b": "\b", "f": "\f"}


def parse(text: str) -> ParsedReply:
    """Calls of a reply in this format; a reply that does not begin with `[name(` calls nothing (P). Never raises."""
    found = Findings(text)
    inner = text.strip()
    for tag in _TAGS:
        inner = inner.removeprefix(tag).strip()
    for tag in _ENDS:
        inner = inner.removesuffix(tag).strip()
    if _LIKE_CALLS.match(inner) is None:
        return found.finish()
    offset = text.index(inner)
    reader = _Reader(inner[: MAX_ARGUMENT_CHARS + 1])
    try:
        calls = reader.calls()
    except JsonFault as fault:
        found.bad(offset, len(text), str(fault), offset + fault.position)
        return found.finish()
    for name, arguments, start, end in calls:
        found.call(name, arguments, offset + start, offset + end)
    found.cover(0, len(text))
    return found.finish()


class _Reader:
    """One pass over a text. Raises `JsonFault` at the first fault."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> list[tuple[str, dict[str, Any], int, int]]:
        if len(self._text) > MAX_ARGUMENT_CHARS:
            raise JsonFault("too long", 0)
        self._expect("[")
        found = []
        while not self._take("]"):
            found.append(self._call())
            if not self._take(","):
                self._expect("]")
                break
        self._space()
        if self._at < len(self._text):
            raise self._fault("text after the list of calls")
        return found

    def _call(self) -> tuple[str, dict[str, Any], int, int]:
        self._space()
        start = self._at
        name = self._name()
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            self._space()
            key_at = self._at
            key = self._name()
            self._expect("=")
            if key in arguments:
                raise JsonFault(f"argument {key:.60} is repeated", key_at)
            arguments[key] = self._value(1)
            if not self._take(","):
                self._expect(")")
                break
        return name, arguments, start, self._at

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._fault("nested too deeply")
        self._space()
        mark = self._text[self._at : self._at + 1]
        if mark in ("'", '"') and mark:
            return self._string(mark)
        if mark == "{":
            return self._object(depth)
        if mark in ("[", "(") and mark:
            self._at += 1
            return self._list("]" if mark == "[" else ")", depth)
        if (number := _NUMBER.match(self._text, self._at)) is not None:
            self._at = number.end()
            return self._number(number[0])
        word = _NAME.match(self._text, self._at)
        if word is not None and word[0] in _WORDS:
            self._at = word.end()
            return _WORDS[word[0]]
        raise self._fault("a value is no literal")

    def _number(self, digits: str) -> int | float:
        digits = digits.replace("_", "")
        if re.fullmatch(r"[-+]?\d+", digits):
            return int(digits)
        number = float(digits)
        if abs(number) == float("inf"):
            raise self._fault("a number is out of range")
        return number

    def _list(self, close: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take(close):
            items.append(self._value(depth + 1))
            if not self._take(","):
                self._expect(close)
                break
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        self._at += 1
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str) or key in found:
                raise self._fault("a key is no text, or is repeated")
            self._expect(":")
            found[key] = self._value(depth + 1)
            if not self._take(","):
                self._expect("}")
                break
        return found

    def _string(self, quote: str) -> str:
        self._at += 1
        pieces: list[str] = []
        while self._at < len(self._text):
            if (plain := _PLAIN.match(self._text, self._at)) is not None:
                pieces.append(plain[0])
                self._at = plain.end()
                continue
            mark = self._text[self._at]
            if mark == quote:
                self._at += 1
                return "".join(pieces)
            if mark == "\n":
                raise self._fault("a line break in a string")
            if mark == "\\":
                pieces.append(self._escape())
                continue
            pieces.append(mark)
            self._at += 1
        raise self._fault("a string is not closed")

    def _escape(self) -> str:
        mark = self._text[self._at + 1 : self._at + 2]
        if mark == "u" and (code := re.compile(r"[0-9a-fA-F]{4}").match(self._text, self._at + 2)) is not None:
            self._at = code.end()
            return chr(int(code[0], 16))
        if mark not in _ESCAPES or not mark:
            raise self._fault("an unknown escape in a string")
        self._at += 2
        return _ESCAPES[mark]

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._fault("a name is missing")
        self._at = match.end()
        return match[0]

    def _take(self, mark: str) -> bool:
        self._space()
        if self._text.startswith(mark, self._at):
            self._at += len(mark)
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._fault(f"{mark} is missing")

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
            self._at += 1

    def _fault(self, reason: str) -> JsonFault:
        return JsonFault(reason, self._at)
