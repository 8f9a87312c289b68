"""Tool calls in four formats, whole and broken (G cases), and what they are paid (G13, B25)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.errors import ConfigError, DataError
from tithe.rewards.tool_calls import FORMATS, ParsedReply, detect_format, parse_tool_calls
from tithe.rewards.tool_calls.json_schema import problems, same_json
from tithe.rewards.tool_use import WEIGHTS, read_calls, read_tools, score, score_tool_use
from tithe.types import PromptItem

ONE = {"name": "add", "arguments": {"a": 1, "b": [True, None, "x\u2028y"]}}


def hermes(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def kimi(call, index=0):
    arguments = json.dumps(call["arguments"])
    return (
        f"<|tool_call_begin|>functions.{call['name']}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    )


def section(*calls):
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def llama(call):
    return json.dumps({"name": call["name"], "parameters": call["arguments"]})


WRITTEN = {
    "hermes": f"I add.\n{hermes(ONE)}",
    "llama3": f"<|python_tag|>{llama(ONE)}<|eom_id|>",
    "kimi_k2": f"I add.{section(kimi(ONE))}",
    "pythonic": "[add(a=1, b=[True, None, 'x\\u2028y'])]",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_in_its_format_and_the_format_is_recognised(name):
    reply = parse_tool_calls(WRITTEN[name], name)
    assert [(call.name, call.arguments) for call in reply.calls] == [(ONE["name"], ONE["arguments"])]
    assert reply.is_well_formed
    assert detect_format(WRITTEN[name]) == name
    assert parse_tool_calls(WRITTEN[name], "auto") == reply


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_a_call_is_prose(name):
    for text in ("", "The answer is 7.", "[1, 2]", "{x | x > 0}" if name != "llama3" else "x", "a < b"):
        assert parse_tool_calls(text, name) == ParsedReply((), (), text.strip())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", hermes(ONE) + " then " + hermes(ONE)),
        ("llama3", llama(ONE) + "; " + llama(ONE)),
        ("kimi_k2", section(kimi(ONE), kimi(ONE, 1))),
        ("pythonic", "[add(a=1), math.add(a=2,)]"),
    ],
)
def test_several_calls_keep_their_order_and_places(name, text):
    reply = parse_tool_calls(text, name)
    assert len(reply.calls) == 2
    assert reply.calls[0].end <= reply.calls[1].start
    assert reply.is_well_formed


def test_g01_a_closing_tag_inside_a_string_is_text():
    text = '<tool_call>{"name":"save","arguments":{"text":"see </tool_call> here"}}</tool_call>'
    (call,) = parse_tool_calls(text).calls
    assert call.arguments == {"text": "see </tool_call> here"}
    (call,) = parse_tool_calls(section(kimi({"name": "f", "arguments": {"t": "<|tool_call_end|>"}})), "kimi_k2").calls
    assert call.arguments == {"t": "<|tool_call_end|>"}


@pytest.mark.parametrize("inner", ['"text":"see\nhere"', '"q":"say "hi" now"'])
def test_g03_invalid_json_is_malformed_with_its_position(inner):
    begin = '<tool_call>{"name":"f","arguments":{'
    reply = parse_tool_calls(f"{begin}{inner}}}}}</tool_call> and on")
    (fault,) = reply.malformed
    assert reply.calls == ()
    assert len(begin) < fault.position < len(begin) + len(inner)
    assert reply.prose == "and on"


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_g05_a_call_quoted_in_a_code_block_is_no_call(fence):
    text = f"One writes:\n{fence}json\n{hermes(ONE)}\n{fence}\nas shown."
    assert parse_tool_calls(text) == ParsedReply((), (), text)
    assert len(parse_tool_calls(f"{text}\n{hermes(ONE)}").calls) == 1
    assert parse_tool_calls(f"So:\n{fence}\n{section(kimi(ONE))}\n{fence}", "kimi_k2").calls == ()


def test_g07_pieces_joined_twice():
    doubled = '<tool_call>{"name":"find","arguments":"{\\"a\\":1}{\\"a\\":1}"}</tool_call>'
    assert [fault.reason for fault in parse_tool_calls(doubled).malformed] == ["more than one object in the arguments"]
    twice = '<tool_call>{"name":"find","arguments":{"a":1}}{"a":1}</tool_call>'
    assert [fault.reason for fault in parse_tool_calls(twice).malformed] == ["more than one JSON value in a call"]
    reply = parse_tool_calls('<tool_call>{"name":"findfind","arguments":{"a":1}}</tool_call>')
    outcome = score_tool_use(reply, {"find": {}}, read_calls({"name": "find", "arguments": {"a": 1}}))
    assert (outcome.choice, outcome.arguments, outcome.result) == (0, 0, 0)
    assert outcome.reason == "findfind is not the tool that is wanted"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}} trailing'),
        ("hermes", "</tool_call>"),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", '<tool_call>{"arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":[1]}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1,"a":2}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":' + "9" * 6000 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"),
        ("llama3", '{"parameters":{"a":1}}'),
        ("llama3", '{"name":"f","parameters":{"a":1'),
        ("llama3", "<|python_tag|>print(1)"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("kimi_k2", section()),
        ("kimi_k2", section("prose")),
        ("kimi_k2", section("<|tool_call_begin|>functions.f:0")),
        ("kimi_k2", section("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{'a'<|tool_call_end|>")),
        ("kimi_k2", kimi(ONE)),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=1)"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a=1)] more"),
        ("pythonic", "[f(a='x\ny')]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a=" + "[" * 5000 + ")]"),
        ("pythonic", "[f(a=1e999)]"),
    ],
)
def test_what_cannot_be_read_is_malformed(name, text):
    reply = parse_tool_calls(text, name)
    assert reply.calls == ()
    assert len(reply.malformed) == 1
    assert 0 <= reply.malformed[0].position <= len(text)


def test_a_broken_call_does_not_hide_the_next_one():
    broken = "<tool_call>{'name': 'f'}</tool_call>"
    reply = parse_tool_calls(broken + hermes(ONE))
    assert (len(reply.calls), len(reply.malformed)) == (1, 1)
    reply = parse_tool_calls(section(kimi(ONE).replace('"', "'"), kimi(ONE)), "kimi_k2")
    assert (len(reply.calls), len(reply.malformed)) == (1, 1)


def test_text_after_a_call_is_a_fault_and_the_call_stays():
    reply = parse_tool_calls(llama(ONE) + " and more", "llama3")
    assert (len(reply.calls), [fault.reason for fault in reply.malformed]) == (1, ["text after a call"])


def test_an_unknown_format_is_an_error():
    with pytest.raises(ConfigError, match="hermes, llama3"):
        parse_tool_calls("", "xml")


PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "{", "}", "[", "]", "(", ")", '"', "'", ",", "=", ":", ";", "\\", "\n", "```\n", "f", "a", "1",
    "é", "\x00", "\ud800", "<|python_tag|>", "-", ".", "NaN",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_nothing_raises_and_offsets_lie_in_the_text(text):
    for name in FORMATS:
        reply = parse_tool_calls(text, name)
        assert all(0 <= call.start < call.end <= len(text) for call in reply.calls)
        assert all(0 <= fault.position <= len(text) for fault in reply.malformed)


HOSTILE = [
    "<tool_call>" * 50_000,
    "</tool_call>" * 50_000,
    "```\n" * 50_000 + "<tool_call>",
    "<|tool_calls_section_begin|>" * 20_000,
    "<|tool_calls_section_begin|>" + "<|tool_call_begin|>" * 20_000,
    "[f(a=" + "[" * 100_000,
    "[f(" + "a=1," * 50_000,
    '{"a":' * 100_000,
    "[f(a=" + "9" * 100_000 + ")]",
]


@pytest.mark.liveness
@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_replies_do_not_hang(text):
    assert all(not parse_tool_calls(text, name).calls for name in FORMATS)


# ---------------------------------------------------------------------------------------------- what calls are paid

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                    "unit": {"type": "string", "default": "m"},
                },
                "required": ["a", "b"],
            },
        },
    },
    {"name": "pad", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    {"name": "ping"},
]
WANTED = {"name": "add", "arguments": {"a": 1, "b": 2}}


def paid(*calls, wanted=WANTED, answer=None, prose=""):
    text = prose + "".join(call if isinstance(call, str) else hermes(call) for call in calls)
    item = PromptItem("p", answer=answer, extra={"tools": TOOLS, **({} if wanted is None else {"calls": wanted})})
    parts = score(item, text)
    return round(sum(WEIGHTS[name] * parts[name] for name in WEIGHTS), 6)


def call(name="add", **arguments):
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "reward"),
    [
        ([call(a=1, b=2)], 1.0),
        ([call(b=2, a=1)], 1.0),  # keys have no order
        ([call(a=1, b=2, unit="m")], 1.0),  # [P] equal to the default
        ([call(a=1.0, b=2)], 1.0),  # [P] 1.0 is the integer 1
        ([call(a=2, b=1)], 0.6),  # valid, but other values
        ([call(a=1, b=2, unit="cm")], 0.6),
        ([call(a="1", b=2)], 0.3),  # [P] 3 is not "3"
        ([call(a=True, b=2)], 0.3),  # 1 is not true
        ([call(a=1)], 0.3),  # missing
        ([call(a=1, b=2, c=3)], 0.3),  # unknown argument
        ([call("pad", a=1, b=2)], 0.0),  # another tool
        ([call("math.add", a=1, b=2)], 0.0),  # [P] names are exact
        ([], 0.0),
        (["<tool_call>{broken</tool_call>"], 0.0),
        ([call(a=1, b=2), call(a=1, b=2)], 0.3),  # once was wanted
        ([call(a=1, b=2), "<tool_call>{broken</tool_call>"], 0.3),
    ],
)
def test_g13_choice_arguments_result(calls, reward):
    assert paid(*calls) == pytest.approx(reward)


def test_several_wanted_calls_have_no_order():
    wanted = [call(a=1, b=2), call("ping")]
    assert paid(call("ping"), call(a=1, b=2), wanted=wanted) == 1.0
    assert paid(call("ping"), wanted=wanted) == pytest.approx(0.3)


def test_no_call_wanted():
    assert paid(wanted=[]) == 1.0
    assert paid(call(a=1, b=2), wanted=[]) == 0.0


def test_the_result_is_the_final_answer_where_a_row_has_one():
    right, wrong = r"So \boxed{3}.", r"So \boxed{4}."
    assert paid(call(a=1, b=2), answer="3", prose=right) == 1.0
    assert paid(call(a=1, b=2), answer="3", prose=wrong) == pytest.approx(0.6)
    assert paid(call("ping"), answer="3", prose=right) == 0.0
    assert paid(call("ping"), answer="3", prose=right, wanted=None) == 1.0
    assert paid(answer="3", prose=right, wanted=None) == pytest.approx(0.4)


@pytest.mark.parametrize("answer", ["null", "NaN", "", "None"])
def test_b25_an_empty_answer_is_not_zero(answer):
    assert paid(call(a=1, b=2), answer="0", prose=rf"\boxed{{{answer}}}") == pytest.approx(0.6)
    assert paid(call(a=1, b=2), answer="0", prose=answer) == pytest.approx(0.6)


def test_a_row_that_says_nothing_is_an_error():
    with pytest.raises(DataError, match="neither `calls` nor an answer"):
        score_tool_use(ParsedReply(), {})


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("add", "list of definitions"),
        ([3], "name and parameters"),
        ([{"name": "f", "parameters": {"type": "int"}}], "'int'"),
        ([{"name": "f", "parameters": {"not": {}}}], "'not'"),
        ([{"name": "f"}, {"name": "f"}], "twice"),
    ],
)
def test_definitions_that_cannot_be_used_are_told(tools, message):
    with pytest.raises(DataError, match=message):
        read_tools(tools)


# ---------------------------------------------------------------------------------------------- the JSON schema


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer"}, [1, 1.0, -3], [1.5, "1", True, None]),
        ({"type": "number"}, [1, 1.5], ["1", False]),
        ({"type": ["string", "null"]}, ["", None], [0]),
        ({"enum": ["a", 1]}, ["a", 1, 1.0], [True, "b"]),
        ({"const": 0}, [0], [False, None]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9], [0, 3]),
        ({"multipleOf": 0.1}, [0.3, 2], [0.35]),
        ({"minLength": 1, "maxLength": 2}, ["a", "ab"], ["", "abc"]),
        ({"pattern": "^a+$"}, ["aa"], ["ab"]),
        ({"items": {"type": "integer"}, "minItems": 1, "uniqueItems": True}, [[1, 2]], [[], ["a"], [1, 1.0]]),
        ({"required": ["a"], "properties": {"a": {"type": "null"}}}, [{"a": None}, []], [{}, {"a": 1}]),
        ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"additionalProperties": {"type": "string"}}, [{"b": "1"}], [{"b": 1}]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        ({"oneOf": [{"minimum": 0}, {"maximum": 5}]}, [-1, 6], [3]),
        ({"allOf": [{"minimum": 0}, {"maximum": 5}]}, [3], [-1, 6]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, [1], ["1"]),
    ],
)
def test_json_schema(schema, valid, invalid):
    assert [value for value in valid if problems(value, schema)] == []
    assert [value for value in invalid if not problems(value, schema)] == []


def test_a_schema_without_end_is_an_error():
    with pytest.raises(DataError, match="without end"):
        problems(1, {"$ref": "#"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aé1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_json_equality_survives_a_round_trip(value):
    assert same_json(value, json.loads(json.dumps(value)))
    assert not same_json(value, [value])


@pytest.mark.parametrize(
    "extra",
    [{"calls": 7}, {"calls": {"name": "f", "arguments": "{"}}, {"tools": 7}, {"format": "morse"}, {}],
)
def test_a_row_that_cannot_be_judged_by_is_an_abstention_with_its_reason(extra):
    judged = score(PromptItem("row", extra={"calls": {"name": "f"}, **extra} if extra else {}), "hello")
    assert set(judged) == {"reason"}
    assert judged["reason"]


@pytest.mark.parametrize(
    "schema",
    [
        {"required": True},
        {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"minimum": "x"}}},
        {"properties": {"a": {"multipleOf": 0}}},
        {"properties": 3},
    ],
)
def test_a_keyword_of_the_wrong_type_is_told(schema):
    with pytest.raises(DataError, match="JSON schema"):
        problems({"a": 1}, schema)


@pytest.mark.parametrize("step", [0, 0.0, 10**400])
def test_a_step_that_no_number_can_be_divided_by_is_told(step):
    with pytest.raises(DataError, match="JSON schema has multipleOf"):
        problems({"a": 5.5}, {"properties": {"a": {"multipleOf": step}}})


def test_a_number_of_any_size_is_checked_and_told_once():
    schema = {"properties": {"a": {"multipleOf": 3, "maximum": 10, "minimum": 0}}}
    assert problems({"a": 3 * 10**400}, schema) == ["a: breaks maximum = 10"]
    assert problems({"a": 10**400 + 1}, schema) == ["a: breaks maximum = 10", "a: breaks multipleOf = 3"]
    assert problems({"a": 9.0}, schema) == []
