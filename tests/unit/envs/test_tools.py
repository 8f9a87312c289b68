"""Tools: schemas from hints, arguments checked before they are used, failures that the model can read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import threading
import time
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.envs import build_tools, tool_from_function
from tithe.envs.calculator import calculate
from tithe.envs.search import TextFolder
from tithe.envs.tools import MAX_OUTPUT_CHARS, Tool, ToolAnswer
from tithe.errors import ConfigError
from tithe.sandbox import SandboxUnavailableError


class Unit(enum.StrEnum):
    KM = "km"
    MILE = "mile"


def travel(
    start: str,
    distance: Annotated[float, "how far"],
    unit: Unit = Unit.KM,
    stops: Optional[list[int]] = None,  # noqa: UP045  both spellings of it are in use
    mode: Literal["car", "train"] = "car",
    names: dict[str, int] | None = None,
) -> str:
    """Plan a journey.

    More than the model is told.
    """
    return f"{start} {distance} {unit} {stops} {mode} {names}"


def call(tool, **arguments):
    return asyncio.run(tool.call(arguments))


def test_a_schema_says_what_the_hints_say():
    tool = tool_from_function(travel)
    assert (tool.name, tool.description) == ("travel", "Plan a journey.")
    assert tool.parameters["required"] == ["start", "distance"]
    assert tool.parameters["properties"] == {
        "start": {"type": "string"},
        "distance": {"type": "number", "description": "how far"},
        "unit": {"enum": ["km", "mile"], "default": "km"},
        "stops": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "mode": {"enum": ["car", "train"], "default": "car"},
        "names": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
    }
    assert tool.definition()["function"]["name"] == "travel"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"start": "A"}, "distance"),
        ({"start": 1, "distance": 2.0}, "start"),
        ({"start": "A", "distance": True}, "distance"),
        ({"start": "A", "distance": 1, "unit": "mm"}, "unit"),
        ({"start": "A", "distance": 1, "stops": ["x"]}, "stops"),
        ({"start": "A", "distance": 1, "other": 1}, "other"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_function(arguments, said):
    answer = call(tool_from_function(travel), **arguments)
    assert answer.is_error
    assert said in answer.text


def test_good_arguments_reach_it():
    answer = call(tool_from_function(travel), start="A", distance=2, stops=[1, 2], names={"x": 1})
    assert (answer.text, answer.is_error) == ("A 2 km [1, 2] car {'x': 1}", False)


@pytest.mark.parametrize("hint", [object, set, dict[int, str], "nowhere.Thing", tuple[int, int]])
def test_a_hint_that_json_cannot_carry_is_the_users_to_mend(hint):
    def tool(x):
        return x

    tool.__annotations__ = {"x": hint}
    with pytest.raises(ConfigError, match="tool"):
        tool_from_function(tool)


def test_a_parameter_without_a_hint_or_a_name_is_refused():
    with pytest.raises(ConfigError, match="type hint"):
        tool_from_function(lambda x: x)

    def many(*values: int) -> int:
        return sum(values)

    with pytest.raises(ConfigError, match="values"):
        tool_from_function(many)


def test_a_tool_that_fails_hangs_or_talks_too_much_gives_a_text():
    def fail() -> str:
        raise ZeroDivisionError("no")

    async def hang() -> str:
        await asyncio.sleep(100)

    def talk() -> Any:
        return "a" * 100_000 + "b"

    async def number() -> Any:
        return [1, 2]

    assert call(tool_from_function(fail)).text == "error: ZeroDivisionError: no"
    hanging = tool_from_function(hang)
    slow = Tool(hanging.name, "", hanging.parameters, hang, timeout_s=0.05)
    assert call(slow).text == "error: no answer within 0.05 s"
    said = call(tool_from_function(talk)).text
    assert len(said) < MAX_OUTPUT_CHARS + 100
    assert said.endswith("b")
    assert call(tool_from_function(number)).text == "[1, 2]"


def test_many_blocking_tools_run_at_once():
    def wait() -> str:
        time.sleep(0.05)
        return "ok"

    async def all_of_them():
        tool = tool_from_function(wait)
        return await asyncio.gather(*(tool.call({}) for _ in range(8)))

    assert [answer.text for answer in asyncio.run(all_of_them())] == ["ok"] * 8


def test_a_call_that_never_ends_takes_nothing_from_others_and_lets_the_process_end():
    """Threads of the loop's own pool ran out after as many hung calls as there were, and its end waited for them."""
    forever = threading.Event()

    def hang() -> str:
        forever.wait()
        return "late"

    def leave() -> str:
        raise SystemExit(3)

    async def talk():
        stuck = dataclasses.replace(tool_from_function(hang), timeout_s=0.05)
        hung = await asyncio.gather(*(stuck.call({}) for _ in range(40)))
        answer = await tool_from_function(calculate).call({"expression": "6*7"})
        return hung, answer, await tool_from_function(leave).call({})

    try:
        hung, answer, left = asyncio.run(asyncio.wait_for(talk(), 60))
        assert {one.text for one in hung} == {"error: no answer within 0.05 s"}
        assert answer.text == "42"
        assert left.text == "error: the tool called exit(3)"
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")
    finally:
        forever.set()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1,234,567 - 1", "1234566"),
        ("3 * (4 + 5)", "27"),
        ("12×7", "84"),
        ("100 ÷ 8 =", "12.5"),
        ("1,250 + 1", "1251"),
        ("-7 // 2", "-4"),
        ("-1/8", "-0.125"),
        ("7 % 3", "1"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("10/4*2", "5"),
        ("sqrt(16) + abs(-2) + round(2.6)", "9"),
        ("99999999999 * 99999999999", "9999999999800000000001"),
    ],
)
def test_arithmetic_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "1/0", "2**99999", "9**9**9", "__import__('os')", "a.b", "[1]", "1 if 1 else 2", "'a' * 9", "1" * 400,
     "(" * 250, "True", "sqrt(-1)", "0 ** -1", "1j", "2 ** 0.3", "1e999999", "lambda: 1", "round(2.5,1)",
     "max(3,4)", "3,4", "sqrt(2**4000 + 1)"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_a_value_error(expression):
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@given(st.text(st.sampled_from("0123456789+-*/%(). e×÷^,absqrtround_"), max_size=40))
def test_no_expression_does_anything_else(expression):
    with contextlib.suppress(ValueError):
        assert calculate(expression)


def test_search_finds_the_paragraph_that_says_most_about_the_words(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("The river Rhine is long.\n\nCologne lies on the Rhine.\n\nBread is baked.")
    (tmp_path / "deep" / "b.md").write_text("# Cities\n\nBerlin lies on the Spree.")
    (tmp_path / "c.bin").write_bytes(b"Rhine Rhine Rhine")
    texts = TextFolder(tmp_path)
    assert texts.search("Cologne Rhine")[0] == ("a.txt", "Cologne lies on the Rhine.")
    assert texts.search("berlin") == [("deep/b.md", "Berlin lies on the Spree.")]
    assert texts.search("zebra") == []
    with pytest.raises(ConfigError, match=r"no \.md"):
        TextFolder(tmp_path / "nothing")


def test_tools_are_built_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("The Rhine is long.")
    (tmp_path / "mine.py").write_text("def double(x: int) -> int:\n    'Twice.'\n    return 2 * x\n")
    names = ["calculator", f"search:{tmp_path}", f"{tmp_path}/mine.py:double"]
    tools = build_tools(names, [])
    assert [tool.name for tool in tools] == ["calculator", "search", "double"]
    assert call(tools[0], expression="6*7").text == "42"
    assert call(tools[0], expression="six").is_error
    assert call(tools[1], query="rhine").text == "[a.txt] The Rhine is long."
    assert call(tools[2], x=4).text == "8"
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        build_tools(["calculator", "calculator"], [])


def test_the_code_interpreter_runs_programs_in_the_sandbox():
    closers = []
    try:
        (tool,) = build_tools(["python"], closers)
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox of full strength here, and there is no weaker one: {error}")
    try:
        assert call(tool, code="print(6 * 7)").text == "42"
        assert call(tool, code="1 / 0") == ToolAnswer("ZeroDivisionError: division by zero", is_error=True)
        assert call(tool, code="x = 1").text == "(nothing was printed)"
    finally:
        for close in closers:
            close()
