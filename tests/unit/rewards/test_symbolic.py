r"""The math verifier on labelled cases: the field cases and many more of their kinds (cases/math.jsonl, one
JSON object a line with kind, gold, text and the right verdict: 1, 0, or null where nothing can be judged)."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tithe.errors import ConfigError
from tithe.rewards import Verdict
from tithe.rewards.math_reward import gold_answer
from tithe.rewards.symbolic import packages, require, verify, verify_plain
from tithe.rewards.symbolic.algebra import same_by_algebra
from tithe.rewards.symbolic.compare import same, same_node
from tithe.rewards.symbolic.expressions import read_expression
from tithe.rewards.symbolic.forms import read
from tithe.rewards.symbolic.numeric import same_value
from tithe.rewards.symbolic.tokens import tokenize
from tithe.rewards.symbolic.tree import Expression, Words, rational

ROWS = [json.loads(line) for line in (Path(__file__).parent / "cases" / "math.jsonl").read_text().splitlines()]
ABSTAINS = {Verdict.NO_GOLD, Verdict.UNDECIDED}
KINDS = sorted({row["kind"] for row in ROWS})


def graded(gold, text):
    verdict = verify(gold, text).verdict
    return None if verdict in ABSTAINS else int(verdict is Verdict.RIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_labelled_cases(kind):
    rows = [row for row in ROWS if row["kind"] == kind]
    mistakes = [row for row in rows if graded(row["gold"], row["text"]) != row["verdict"]]
    assert mistakes == []


@pytest.mark.parametrize("box", ["{@ 12 34 " * 3000, "\u597d" * 5000, "(" * 50_000, "x^" * 5000])
def test_m31_long_garbage_is_wrong(box):
    """Field case M31; in a box that is never closed, no answer is found."""
    for text in (rf"\boxed{{{box}}}", rf"\boxed{{{box}", f"The answer is {box}"):
        assert graded("7", text) == 0


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("12", r"\boxed{3*4}", 1),
        ("34", r"\boxed{3*4}", 0),
        ("8", "The answer is 2**3.", 1),
        ("23", "The answer is 2**3.", 0),
        ("x+1", r"\boxed{\(x+1\)}", 1),
        ("x+1", r"\boxed{\[ x+1 \]}", 1),
        ("56", r"\boxed{5$6$}", 0),
        ("5600", r"\boxed{5$600$}", 0),
        ("5", r"\boxed{5 \text{ squared}}", 0),
        ("5", r"\boxed{5 \text{ alternatively 7}}", 0),
        ("5", r"\boxed{5 \text{ apples}}", 1),
        ("5", "The answer is not 5", 0),
        ("5", "The answer is either 5 or 6", 0),
        ("6", "The answer is either 5 or 6", 0),
        ("5", "The answer is $5$ or $6$", 0),
        ("1", "The answer is $x=1$ or $x=2$", 0),
        ("1 or 2", "The answer is $x=1$ or $x=2$", 1),
        ("1000", "The answer is 1000 (= 10^3)", 1),
        ("x", r"\boxed{\max(x,-1000)}", 0),
        ("x+1", r"\boxed{x+1+\lfloor x^2/10^9 \rfloor}", 0),
        (r"\max(x,2)", r"\boxed{\max(2,x)}", 1),
        ("|x|", r"\boxed{\sqrt{x^2}}", 1),
        ("5", r"\boxed{5 \text{ m}^2}", 1),
    ],
)
def test_dressing_joins_no_numbers_and_words_that_are_no_units_change_them(gold, text, verdict):
    assert graded(gold, text) == verdict


def test_there_are_enough_cases():
    own = [row for row in ROWS if not (row["kind"][0] in "MB" and row["kind"][1:].isdigit())]
    assert len(own) >= 150
    assert {row["kind"] for row in ROWS} >= {f"M{n:02}" for n in range(1, 44, 2) if n not in (31, 33)}
    assert sum(row["verdict"] == 0 for row in ROWS) > 80


def test_every_gold_grades_itself_as_right():
    golds = {row["gold"] for row in ROWS if row["verdict"] is not None}
    assert [gold for gold in golds if graded(gold, rf"\boxed{{{gold_answer(gold)}}}") != 1] == []


def test_the_order_of_gold_and_answer_does_not_matter_to_the_comparison():
    """M25. What one side leaves out (a base, brackets of a set) is a rule about both sides."""
    pairs = [(row["gold"], row["text"]) for row in ROWS if row["text"].startswith(r"\boxed{") and row["gold"]]
    values = [(read(gold), read(text[len(r"\boxed{") : -1])) for gold, text in pairs if len(text) < 300]
    asymmetric = [(one, other) for one, other in values if same(one, other) != same(other, one)]
    assert asymmetric == []


# ---------------------------------------------------------------------------------------------- the two graders


def node(text):
    value = read(text)
    assert isinstance(value, Expression), text
    return value.node


EQUAL = [
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}"),
    (r"(x+y)^2", "x^2+2xy+y^2"),
    (r"\frac{1}{x}+\frac{1}{y}", r"\frac{x+y}{xy}"),
    (r"\sqrt{8}", r"2\sqrt2"),
]
UNEQUAL = [
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt2}"),
    (r"(x+y)^2", "x^2+2xy-y^2"),
    (r"\frac{1}{x}+\frac{1}{y}", r"\frac{2}{x+y}"),
    ("x+1", "x+2"),
]


@pytest.mark.parametrize("grade", [same_value, same_by_algebra, same_node])
def test_each_grader_alone_tells_equal_from_unequal(grade):
    assert [grade(node(one), node(other)) for one, other in EQUAL] == [True] * len(EQUAL)
    assert True not in [grade(node(one), node(other)) for one, other in UNEQUAL]


def test_graders_that_contradict_each_other_abstain(monkeypatch):
    monkeypatch.setattr("tithe.rewards.symbolic.compare.same_by_algebra", lambda one, other: False)
    judgement = verify(r"(x+1)^2", r"\boxed{x^2+2x+1}")
    assert judgement.verdict is Verdict.UNDECIDED
    assert "do not agree" in judgement.reason
    monkeypatch.setattr("tithe.rewards.symbolic.compare.same_by_algebra", lambda one, other: True)
    assert verify(r"(x+1)^2", r"\boxed{x^2+2x-1}").verdict is Verdict.UNDECIDED


def test_one_silent_grader_leaves_the_verdict_to_the_other(monkeypatch):
    monkeypatch.setattr("tithe.rewards.symbolic.compare.same_by_algebra", lambda one, other: None)
    assert graded(r"(x+1)^2", r"\boxed{x^2+2x+1}") == 1
    monkeypatch.undo()
    monkeypatch.setattr("tithe.rewards.symbolic.compare.same_value", lambda one, other: None)
    assert graded(r"(x+1)^2", r"\boxed{x^2+2x+1}") == 1
    assert graded(r"(x+1)^2", r"\boxed{x^2+2x-1}") == 0
    monkeypatch.setattr("tithe.rewards.symbolic.compare.same_by_algebra", lambda one, other: None)
    assert graded(r"(x+1)^2", r"\boxed{x^2+2x+1}") is None


@given(a=st.integers(-(10**9), 10**9), b=st.integers(1, 10**9), c=st.integers(-(10**9), 10**9), d=st.integers(1, 10**9))
def test_rational_arithmetic_is_exact(a, b, c, d):
    text = rf"\frac{{{a}}}{{{b}}}+\left({c}\right)\div {d}"
    assert rational(node(text)) == Fraction(a, b) + Fraction(c, d)


@pytest.mark.parametrize("size", [60, 80, 400])
def test_tiny_and_huge_magnitudes_are_told_apart(size):
    """M07: no absolute tolerance, no rounding to decimals."""
    for sign in ("-", ""):
        left, right = rf"\sqrt{{2}}\cdot 10^{{{sign}{size}}}", rf"\sqrt{{2.0000001}}\cdot 10^{{{sign}{size}}}"
        assert same_node(node(left), node(right)) is False
        assert same_node(node(left), node(rf"\frac{{2}}{{\sqrt2}}\cdot 10^{{{sign}{size}}}")) is True


def test_a_difference_that_vanishes_is_zero_and_one_that_does_not_is_not():
    assert graded("0", r"\boxed{\sqrt{2}-\frac{2}{\sqrt{2}}}") == 1
    assert graded("0", r"\boxed{\sin \pi}") == 1
    assert graded("0", r"\boxed{10^{-50}}") == 0
    assert graded("1", r"\boxed{1+\sqrt{2}\cdot 10^{-60}}") == 0


# ---------------------------------------------------------------------------------------------- text is never code

CODE = [
    "__import__('os').system('touch {path}')",
    "(lambda: open('{path}', 'w'))()",
    r"\text{{__import__('os').system('touch {path}')}}",
    "exec(\"open('{path}','w')\")",
    r"\int_0^1 __import__('os').system('touch {path}') dx",
    "Symbol('x').__class__.__mro__[-1].__subclasses__()",
]


@pytest.mark.parametrize("code", CODE)
def test_an_answer_is_never_evaluated(code, tmp_path):
    path = tmp_path / "touched"
    text = code.format(path=path)
    assert graded("7", rf"\boxed{{{text}}}") == 0
    assert graded(text, r"\boxed{7}") in (0, None)
    assert not path.exists()


def test_the_grammar_is_asked_only_for_text_of_its_alphabet(monkeypatch):
    from tithe.rewards.symbolic import second

    monkeypatch.setattr("latex2sympy2_extended.latex2sympy", lambda text: pytest.fail(f"was given {text}"))
    for text in (r"\int_0^1 __import__('os') dx", r"\sum eval(x)", r"\int \unknown{x} dx", r"\int x dx ''"):
        assert second.same_by_grammar("1", text) is None


# ---------------------------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "text", [r"\frac{1}{", "((1)", "1 +", "x^", r"\sqrt", r"a \forall b", "1 2 3", "x = ", r"\unknown{3}", "3..4"]
)
def test_what_is_no_formula_is_words_and_equals_itself_only(text):
    assert isinstance(read(text), Words)
    assert same(read(text), read("3")) is False


def test_nesting_and_length_are_bounded():
    assert isinstance(read("(" * 200 + "1" + ")" * 200), Words)
    assert isinstance(read("+".join(["x"] * 900)), Words)
    assert tokenize("+".join(["x"] * 900)) is None
    assert rational(read_expression(tokenize("2^{100000}") or [])) is None


@pytest.mark.parametrize("gold", ["\x0crac58", "a\times b", "\x08inom{5}{2}", "3 \right)"])
def test_a_gold_that_lost_a_backslash_is_no_gold(gold):
    """M05: named, and never graded as what is left of it."""
    judgement = verify(gold, r"\boxed{58}")
    assert judgement.verdict is Verdict.NO_GOLD
    assert "backslash" in judgement.reason


def test_without_the_packages_numbers_are_still_judged_and_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setattr(packages, "_PACKAGES", ("mpmath", "no_such_package"))
    require.cache_clear()
    with pytest.raises(ConfigError, match=r"no_such_package.*pip install -e .*math"):
        require()
    require.cache_clear()
    assert verify_plain("7", r"\boxed{7.0}").verdict is Verdict.RIGHT
    assert verify_plain("x+1", r"\boxed{1+x}") is None


FRAGMENTS = [
    *"0123456789+-*/^_=(){}[]|!,.;<>% \n", "x", "y", "n", "e", "i", "\\frac{", "\\frac12",
    "\\sqrt{", "\\sqrt[3]{", "}{",
    "\\pi", "\\pm", "\\infty", "\\cup", "\\in", "\\le", "\\ne", "\\sin", "\\log_2", "\\text{ cm}", "\\{", "\\}",
    "\\left(",
    "\\right)", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\ldots", "\\binom{5}{2}", "\\overline{3}",
    "^{\\circ}",
    "\\int_0^1", "\\sum_{k=1}^{n}", "\\lfloor", "\\rfloor", "9^{9^{9}}", "1000!", "\x00", "½", "\\boxed{", "and", "or",
]  # fmt: skip
MESS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(gold=MESS, answer=MESS)
def test_nothing_raises(gold, answer):
    assert verify(gold, rf"\boxed{{{answer}}}").verdict in set(Verdict)


@settings(max_examples=150, deadline=None)
@given(answer=MESS)
def test_what_is_read_equals_itself(answer):
    value = read(answer)
    assert same(value, value) in ((False, True) if value == Words("") else (True, None))
