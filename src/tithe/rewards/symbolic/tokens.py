"""Cuts a cleaned answer into tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_TOKENS: Final = 600

_TOKEN: Final = re.compile(
    r"(?P<text>\\text ?\{(?P<content>[^{}]*+)\})"
    r"|(?P<begin>\\(?:begin|end)\{[a-z]+\}(?:\{[^{}]*+\})?)"
    r"|(?P<bar>\\overline ?\{(?P<repeated>\d++)\})"
    r"|(?P<set>\\mathbb ?\{?(?P<letter>[A-Z])\}?)"
    r"|(?P<row>\\\\)"
    r"|(?P<command>\\(?:[a-zA-Z]++|[{}|%#&_]))"
    r"|(?P<number>\d++(?:\.\d++|\.(?=\\overline))?|\.\d++)"
    r"|(?P<word>[A-Za-z]++)"
    r"|(?P<space> ++)"
    r"|(?P<symbol>\*\*|<=|>=|!=|.)",
    re.DOTALL,
)

_NAMES: Final = frozenset(
    ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sinh",
     "cosh", "tanh", "ln", "log", "exp", "abs", "pi", "inf", "infinity", "infty", "oo", "gcd", "lcm", "max", "min",
     "or", "and", "floor", "ceil", "binom")
)  # fmt: skip
"""Words that plain answers use for what LaTeX writes as commands."""

_SPELLED: Final = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "inf": "infty", "infinity": "infty", "oo": "infty",
}  # fmt: skip
_SYMBOLS: Final = {"**": "^", "<=": r"\le", ">=": r"\ge", "!=": r"\ne", "\u2223": "|"}
_COMMANDS: Final = {
    r"\vert": "|", r"\|": "|", r"\times": "*", r"\cdot": "*", r"\div": "/", r"\vee": "or", r"\wedge": "and", r"\%": "%",
    r"\approx": "=", r"\equiv": "=", r"\arcsin": r"\arcsin", r"\lg": r"\lg", r"\to": r"\to",
}  # fmt: skip


@dataclass(frozen=True)
class Token:
    r"""`kind` is number, letter (one variable, or a Greek command), command, words (the content of `\text{…}`), join
    ("or", "and"), repeat (digits under a bar), set, begin or symbol. `spaced`: a space stands before it."""

    kind: str
    text: str
    spaced: bool = False


def tokenize(text: str) -> list[Token] | None:
    """Tokens of a cleaned text, or None when there are too many."""
    tokens: list[Token] = []
    spaced = False
    for match in _TOKEN.finditer(text):
        if len(tokens) > MAX_TOKENS:
            return None
        kind = match.lastgroup or ""
        if kind in ("content", "repeated", "letter"):
            kind = next(name for name in ("text", "bar", "set") if match[name] is not None)
        if kind == "space":
            spaced = True
            continue
        tokens += _make(kind, match, spaced)
        spaced = False
    return tokens


def _make(kind: str, match: re.Match[str], spaced: bool) -> list[Token]:
    text = match[0]
    if kind == "text":
        return _from_text(match["content"].strip(), spaced)
    if kind == "word":
        return _from_word(text, spaced)
    if kind == "bar":
        return [Token("repeat", match["repeated"], spaced)]
    if kind == "set":
        return [Token("set", match["letter"], spaced)]
    if kind == "command":
        return [_from_command(text, spaced)]
    if kind == "symbol":
        return [Token("symbol", _SYMBOLS.get(text, text), spaced)]
    return [Token("begin" if kind == "begin" else "symbol" if kind == "row" else kind, text, spaced)]


def _from_text(content: str, spaced: bool) -> list[Token]:
    lowered = content.lower().strip(" ,")
    if lowered in ("or", "and"):
        return [Token("join", lowered, spaced)]
    if re.fullmatch(r"[a-zA-Z]", content):
        return [Token("letter", content, spaced)]
    if content in _NAMES:
        return _from_word(content, spaced)
    if re.fullmatch(r"[-+]?[\d.,/ ]+|[A-Z](?:, ?[A-Z])+", content):
        return tokenize(content) or []
    return [Token("words", content, spaced)] if content else []


def _from_word(word: str, spaced: bool) -> list[Token]:
    if word in ("or", "and"):
        return [Token("join", word, spaced)]
    if word in _NAMES:
        name = "\\" + _SPELLED.get(word, word)
        return [Token("letter" if name == r"\pi" else "command", name, spaced)]
    if word.endswith("sqrt") and len(word) <= 6:
        return [*_from_word(word[:-4], spaced), Token("command", r"\sqrt")]
    if word.endswith("pi") and len(word) <= 4:
        return [*_from_word(word[:-2], spaced), Token("letter", r"\pi")]
    if len(word) > 3:
        return [Token("words", word, spaced)]
    return [Token("letter", letter, spaced and at == 0) for at, letter in enumerate(word)]


def _from_command(command: str, spaced: bool) -> Token:
    if command in _COMMANDS:
        spelled = _COMMANDS[command]
        kind = "join" if spelled in ("or", "and") else "command" if spelled.startswith("\\") else "symbol"
        return Token(kind, spelled, spaced)
    if command in GREEK:
        return Token("letter", command, spaced)
    return Token("command", command, spaced)


GREEK: Final = frozenset(
    "\\" + name
    for name in [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "pi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
    ]
)
