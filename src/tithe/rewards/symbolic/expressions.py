r"""Reads an expression from tokens: a parser of its own, by precedence, that calls nothing and evaluates nothing.

Sympy's `parse_expr` and `sympify` evaluate text as Python and are never given any. The ANTLR grammar of
latex2sympy2-extended does not, but it accepts what it does not understand (it read `3\,141\,592` as a product and
dropped `\forall t>1`), so it is asked only where this parser gives up (see `second`).

Choices where notation is ambiguous: `/` binds like a product, from left to right, so `1/2x` is x/2. `\sin 2x + 1` is
sin(2x) + 1. A whole number before a proper fraction of whole numbers is a mixed number. `\frac58` is 5/8. `^` takes a
whole run of digits. A number never multiplies what stands before it without a sign, but for `3!3!`: `2 3` is no 6. `e`
is Euler's number, `i` the imaginary unit. A logarithm without base has a base that is not told: `\log 8 = 3 \log 2`
holds and `\log 100 = 2` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from tithe.rewards.symbolic.tokens import Token
from tithe.rewards.symbolic.tree import INFINITY, Node, Unreadable, number

_MAX_DEPTH: Final = 40
_FUNCTIONS: Final = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "lg", "exp",
     "abs", "floor", "ceil", "gcd", "lcm", "max", "min")
)  # fmt: skip
_SEVERAL: Final = frozenset(("gcd", "lcm", "max", "min"))
_INVERSE: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_BRACKETS: Final = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_DECORATIONS: Final = frozenset((r"\vec", r"\hat", r"\bar", r"\overline", r"\widehat", r"\overrightarrow", r"\mathcal"))
_STOPS: Final = frozenset(")]}+-*/|=<>,;&") | {r"\}", r"\rfloor", r"\rceil", r"\pm", r"\mp"}


def read_expression(tokens: Sequence[Token]) -> Node:
    """The expression that all tokens form. Raises `Unreadable`."""
    parser = _Parser(tokens)
    node = parser.sum(0)
    if not parser.is_done:
        raise Unreadable(f"{parser.here.text} is not expected")
    return node


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = list(tokens)
        self._at = 0
        self._bars = 0

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._tokens)

    @property
    def here(self) -> Token:
        return self._tokens[self._at] if not self.is_done else Token("end", "")

    def _next(self) -> Token:
        token = self.here
        self._at += 1
        return token

    def _stands(self, texts: Sequence[str]) -> bool:
        return self.here.text in texts

    def _take(self, *texts: str) -> str:
        """The text of this token when it is one of these, which is then passed; else ""."""
        if self.here.text in texts and self.here.kind in ("symbol", "command"):
            return self._next().text
        return ""

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise Unreadable(f"{text} is missing")

    def sum(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        sign = self._take("+", "-", r"\pm", r"\mp")
        node = _signed(sign, self._product(depth + 1))
        terms = [node]
        while sign := self._take("+", "-", r"\pm", r"\mp"):
            terms.append(_signed(sign, self._product(depth + 1)))
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _product(self, depth: int) -> Node:
        node = self._factor(depth)
        while True:
            if self._take("*"):
                node = Node("mul", (node, self._signed_factor(depth)))
            elif self._take("/"):
                node = Node("div", (node, self._signed_factor(depth)))
            elif self._starts_factor() or (self.here.kind == "number" and self._tokens[self._at - 1].text == "!"):
                node = Node("mul", (node, self._factor(depth)))
            else:
                return node

    def _signed_factor(self, depth: int) -> Node:
        sign = self._take("+", "-")
        return _signed(sign, self._factor(depth))

    def _starts_factor(self) -> bool:
        token = self.here
        if token.kind == "letter":
            return True
        if token.kind == "symbol":
            return token.text in ("(", "[", "{") or (token.text == "|" and self._bars == 0)
        return token.kind == "command" and token.text not in _STOPS and token.text != r"\infty"

    def _factor(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._postfix(self._atom(depth + 1))
        if self._take("^"):
            node = Node("pow", (node, self._exponent(depth + 1)))
            node = self._postfix(node)
        return node

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._take("!"):
                node = Node("factorial", (node,))
            elif self._take("%"):
                node = Node("div", (node, number(100)))
            else:
                return node

    def _exponent(self, depth: int) -> Node:
        if self.here.text == "{" and self.here.kind == "symbol":
            return self._group("{", depth)
        sign = self._take("+", "-")
        node = self._atom(depth)
        if self._take("^"):  # a^b^c without braces
            node = Node("pow", (node, self._exponent(depth + 1)))
        return _signed(sign, node)

    def _group(self, opening: str, depth: int) -> Node:
        self._expect(opening)
        outer, self._bars = self._bars, 0
        node = self.sum(depth + 1)
        self._bars = outer
        self._expect(_BRACKETS[opening])
        return node

    def _atom(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        token = self.here
        if token.kind == "number":
            return self._number(depth)
        if token.kind == "letter":
            return self._letter()
        if token.kind == "symbol" and token.text in ("(", "[", "{"):
            return self._group(token.text, depth)
        if token.kind == "symbol" and token.text == "|":
            return self._absolute(depth)
        if token.kind == "command":
            return self._command(depth)
        raise Unreadable(f"{token.text or 'the end'} is not expected")

    def _number(self, depth: int) -> Node:
        token = self._next()
        value = Fraction(token.text.rstrip("."))
        if self.here.kind == "repeat" and not self.here.spaced and "." in token.text:
            digits = self._next().text
            decimals = len(token.text.partition(".")[2])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
        node = number(value)
        if value.denominator == 1 and self.here.text == r"\frac":
            start = self._at
            part = self._atom(depth + 1)
            is_proper = part.op == "div" and all(arg.op == "num" for arg in part.args)
            if is_proper and not self._stands(("^", "!")):
                above, below = (arg.value for arg in part.args)
                assert isinstance(above, Fraction)
                assert isinstance(below, Fraction)
                if 0 < above < below and above.denominator == below.denominator == 1:
                    return Node("add", (node, part))
            self._at = start
        return node

    def _letter(self) -> Node:
        name = self._next().text
        if self._take("_"):
            name += "_" + self._subscript()
        while self.here.text == "'" and self.here.kind == "symbol":
            name += self._next().text
        return {r"\pi": Node("pi"), "e": Node("e"), "i": Node("i")}.get(name, Node("sym", value=name))

    def _subscript(self) -> str:
        if not self._take("{"):
            token = self._next()
            if token.kind not in ("letter", "number"):
                raise Unreadable("a subscript is missing")
            return token.text
        return self._until_closed("a subscript is not closed")

    def _until_closed(self, problem: str) -> str:
        """The text up to the brace that closes the one just read."""
        pieces, level = [], 1
        while not self.is_done:
            token = self._next()
            level += (token.text == "{") - (token.text == "}")
            if level == 0:
                return "".join(pieces)
            pieces.append(token.text)
        raise Unreadable(problem)

    def _absolute(self, depth: int) -> Node:
        self._expect("|")
        outer, self._bars = self._bars, 1
        node = self.sum(depth + 1)
        self._bars = outer
        self._expect("|")
        return Node("abs", (node,))

    def _command(self, depth: int) -> Node:
        name = self._next().text
        if name == r"\frac":
            above = self._argument(depth)
            return Node("div", (above, self._argument(depth)))
        if name == r"\binom":
            above = self._argument(depth)
            return Node("binom", (above, self._argument(depth)))
        if name == r"\sqrt":
            return self._root(depth)
        if name == r"\infty":
            return INFINITY
        if name in (r"\lfloor", r"\lceil"):
            self._at -= 1
            return Node("floor" if name == r"\lfloor" else "ceil", (self._group(name, depth),))
        if name in _DECORATIONS:
            return Node("sym", value=name + "{" + self._decorated() + "}")
        if name == r"\log":
            return self._logarithm(depth)
        if name[1:] in _FUNCTIONS:
            return self._function(name[1:], depth)
        raise Unreadable(f"{name} is not known")

    def _decorated(self) -> str:
        if self.here.text == "{":
            self._next()
            return self._until_closed("a letter is missing")
        if self.here.kind == "letter":
            return self._next().text
        raise Unreadable("a letter is missing")

    def _argument(self, depth: int) -> Node:
        """One argument of a command: a group, a single digit, or a single symbol."""
        token = self.here
        if token.text == "{" and token.kind == "symbol":
            return self._group("{", depth)
        if token.kind == "number" and "." not in token.text:
            self._tokens[self._at] = Token("number", token.text[1:])
            if len(token.text) == 1:
                self._at += 1
            return number(int(token.text[0]))
        if token.kind == "letter":
            return self._letter()
        if token.kind == "command":
            return self._atom(depth + 1)
        raise Unreadable("an argument is missing")

    def _root(self, depth: int) -> Node:
        degree = self._group("[", depth) if self.here.text == "[" else None
        if self.here.kind == "number":
            node = self._number(depth)
        elif self.here.text == "(":
            node = self._group("(", depth)
        else:
            node = self._argument(depth)
        if degree is None:
            return Node("sqrt", (node,))
        return Node("root", (node, degree))

    def _logarithm(self, depth: int) -> Node:
        base: Node | None = None
        if self._take("_"):
            base = self._argument(depth) if self.here.kind != "number" else self._number(depth)
        power = self._exponent(depth + 1) if self._take("^") else None
        inner = self._function_argument(depth)
        below = Node("sym", value=r"\log") if base is None else Node("ln", (base,))
        node = Node("div", (Node("ln", (inner,)), below))
        return node if power is None else Node("pow", (node, power))

    def _function(self, name: str, depth: int) -> Node:
        power = self._exponent(depth + 1) if self._take("^") else None
        if name in _SEVERAL:
            self._expect("(")
            args = [self.sum(depth + 1)]
            while self._take(","):
                args.append(self.sum(depth + 1))
            self._expect(")")
            node = Node(name, tuple(args))
        else:
            if power == Node("neg", (number(1),)) and name in _INVERSE:
                name, power = _INVERSE[name], None
            node = Node(name, (self._function_argument(depth),))
        if name == "lg":
            node = Node("div", (Node("ln", node.args), Node("ln", (number(10),))))
        return node if power is None else Node("pow", (node, power))

    def _function_argument(self, depth: int) -> Node:
        """What stands behind a function: a group, or factors up to a sign, a product sign or the next function."""
        if self.here.text in ("(", "{", "[") and self.here.kind == "symbol":
            return self._group(self.here.text, depth)
        node = self._signed_factor(depth)
        while self._starts_factor() and self.here.text not in ("(", "[", "|") and not self._is_function():
            node = Node("mul", (node, self._factor(depth)))
        if self.here.text == "/" and self._at + 1 < len(self._tokens) and self._tokens[self._at + 1].kind == "number":
            self._next()
            node = Node("div", (node, self._factor(depth)))
        return node

    def _is_function(self) -> bool:
        return self.here.kind == "command" and (self.here.text[1:] in _FUNCTIONS or self.here.text == r"\log")


def _signed(sign: str, node: Node) -> Node:
    if sign == "-":
        return Node("neg", (node,))
    if sign == r"\pm":
        return Node("pm", (node,))
    if sign == r"\mp":
        return Node("mp", (node,))
    return node
