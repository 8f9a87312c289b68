"""A checkpoint's chat template, run as what it is: a program by a stranger.

Covered: attribute access is sandboxed and nothing passed in can be changed (Jinja's `ImmutableSandboxedEnvironment`);
the text a template writes, the strings and lists its operators build, and the number of its loop turns are bounded.
Not covered: a method or filter that multiplies sizes in one call (`join`, `replace`, `center`) can still ask for much
memory. No template can reach files, the network or Python's internals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from tithe.errors import ModelError

MAX_TEXT_CHARS = 4_000_000
"""Longest text one rendering may write, and longest string or list one operator may build."""

MAX_LOOP_TURNS = 1_000_000
"""Loop turns of one rendering, nested loops counted together."""

_MAX_POWER_BITS = 4096

_WRONG_USE = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What a template raises when a conversation does not suit it."""


class _Budget:
    """Loop turns that are left in one rendering."""

    def __init__(self) -> None:
        self.left = MAX_LOOP_TURNS

    def take(self, turns: int) -> None:
        self.left -= turns
        if self.left < 0:
            raise SecurityError(f"more than {MAX_LOOP_TURNS} loop turns")


class _Bounding(NodeTransformer):
    """Routes `a ~ b` and every loop through filters that count."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_bounded_concat", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model writes: the content is kept, the mark dropped."""

    tags = {"generation"}  # noqa: RUF012  jinja reads the class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the tag by its body."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(lineno)

    def _keep(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded operators."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounding().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be too large; otherwise as Jinja."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * max(right, 0) <= _MAX_POWER_BITS)
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int):
                    _require(len(sized) * count <= MAX_TEXT_CHARS)
            if isinstance(left, int) and isinstance(right, int):
                _require(left.bit_length() + right.bit_length() <= _MAX_POWER_BITS)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _require(len(left) + len(right) <= MAX_TEXT_CHARS)
        return super().call_binop(context, operator, left, right)


def _require(within_bounds: bool) -> None:
    if not within_bounds:
        raise SecurityError(f"a value larger than {MAX_TEXT_CHARS} characters or {_MAX_POWER_BITS} bits")


def _bounded_concat(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _require(sum(map(len, texts)) <= MAX_TEXT_CHARS)
    return "".join(texts)


@pass_context
def _counted(context: Context, iterable: Any) -> Any:
    budget: _Budget = context["_budget"]
    if isinstance(iterable, Undefined):
        return iterable
    if hasattr(iterable, "__len__"):
        budget.take(len(iterable))
        return iterable
    return _count_lazily(iterable, budget)


def _count_lazily(iterable: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for element in iterable:
        budget.take(1)
        yield element


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `names` are the special tokens it may write (`bos_token`, `eos_token` …); `today` is what
    its `strftime_now` answers for the whole life of the object, so that a prompt does not change at midnight.

    Thread-safe after construction. Raises `ModelError` when the source does not compile.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", {}, datetime.now())
    >>> template.render([{"role": "user", "content": "hi"}], generation_prompt=True)
    '[user] hi'
    """

    def __init__(self, source: str, names: Mapping[str, str], today: datetime) -> None:
        self.source = source
        self._names = dict(names)
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], autoescape=False
        )
        filters: dict[str, Any] = {"tojson": _to_json, "_bounded_concat": _bounded_concat, "_counted": _counted}
        functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": today.strftime}
        environment.filters.update(filters)
        environment.globals.update(functions)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, OverflowError) as error:
            raise ModelError(f"the checkpoint's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool) -> str:
        """The conversation as the checkpoint writes it; with `generation_prompt`, up to where the model continues.

        Raises `ModelError` with the template's own words when it refuses the conversation or leaves its bounds.
        """
        pieces: list[str] = []
        written = 0
        variables = {
            **self._names,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            "_budget": _Budget(),
        }
        try:
            for piece in self._template.generate(variables):
                written += len(piece)
                _require(written <= MAX_TEXT_CHARS)
                pieces.append(piece)
        except SecurityError as error:
            raise ModelError(f"the checkpoint's chat template was stopped: {error}") from error
        except _WRONG_USE as error:
            raise ModelError(f"the checkpoint's chat template refuses this conversation: {error}") from error
        return "".join(pieces)
