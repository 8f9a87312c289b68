"""The tool-use reward: was the right tool chosen, are its arguments valid, is the result right?

    part        1 when                                                                        weight
    ─────────   ───────────────────────────────────────────────────────────────────────────   ──────
    choice      the tools that are called are those that are wanted                            0.3
    arguments   every argument fits the tool's JSON schema                                     0.3
    result      the final answer is right; without one, the calls are those wanted             0.4

``reward.function: tool_use``. A row carries `tools` (definitions as OpenAI's interface or a chat
template takes them), and `calls` (wanted, in any order), or the answer column, or both.

Policies (P): names compare exactly, so `add` is neither `pad` nor `math.add`. 1 equals 1.0, 3 is not "3", 1 is not
true. A missing optional argument equals its default. An argument that the schema does not name is invalid. Calls have
no order. A malformed call is a call of nothing. Where the tool is wrong, its arguments are not paid either, and neither
is the result when `calls` says which tools were wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tithe.errors import DataError, UserError
from tithe.rewards.math_reward import Verdict, judge
from tithe.rewards.spec import weighted
from tithe.rewards.tool_calls import ParsedReply, ToolCall, parse_tool_calls
from tithe.rewards.tool_calls.calls import JsonFault, as_arguments
from tithe.rewards.tool_calls.json_schema import problems, same_json, with_defaults

if TYPE_CHECKING:
    from tithe.types import PromptItem

WEIGHTS: Final = {"choice": 0.3, "arguments": 0.3, "result": 0.4}
"""Weights of the parts unless `reward.weights` gives others."""


@dataclass(frozen=True)
class ToolScore:
    """Shares between 0 and 1. `reason` says what was wrong first ("" when nothing was).

    >>> ToolScore(1.0, 1.0, 0.0, "the result is wrong").is_right
    False
    """

    choice: float
    arguments: float
    result: float
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """Whether everything is."""
        return min(self.choice, self.arguments, self.result) >= 1.0

    def parts(self) -> dict[str, float]:
        """By name, as a reward function returns them."""
        return {"choice": self.choice, "arguments": self.arguments, "result": self.result}


def score_tool_use(
    reply: ParsedReply,
    tools: Mapping[str, Mapping[str, Any]],
    wanted: Sequence[ToolCall] | None = None,
    result: bool | None = None,
) -> ToolScore:
    """Judge the calls of a reply, or of a whole conversation.

    `tools` maps names to JSON schemas of arguments. `wanted` are the right calls (None: any declared tool will do).
    `result` says whether the final answer is right (None: the calls are the result). Raises `DataError` when neither is
    known, or for a schema that cannot be used.
    """
    if wanted is None and result is None:
        raise DataError("a tool-use row has neither `calls` nor an answer, so nothing says what is right")
    faults = [m.reason for m in reply.malformed]
    n_asked = len(reply.calls) + len(reply.malformed)
    if wanted is None:
        chosen = [call for call in reply.calls if call.name in tools]
        n_needed = max(n_asked, 1)
    else:
        chosen = _chosen(reply.calls, wanted)
        n_needed = max(n_asked, len(wanted))
    kept = {id(call) for call in chosen}
    faults += [f"{call.name:.60} is not the tool that is wanted" for call in reply.calls if id(call) not in kept]
    invalid = {index: found for index, call in enumerate(chosen) if (found := _invalid(call, tools))}
    faults += [found for _, found in sorted(invalid.items())]
    choice = len(chosen) / n_needed if n_needed else 1.0
    arguments = (len(chosen) - len(invalid)) / n_needed if n_needed else 1.0
    is_right = result
    if wanted is not None and (choice < 1 or is_right is None):
        is_right = choice == 1 and not invalid and _same_calls(reply.calls, wanted, tools)
    if not n_asked and n_needed:
        faults.append("no tool is called")
    if not is_right:
        faults.append("the result is wrong")
    return ToolScore(choice, arguments, float(bool(is_right)), faults[0] if faults else "")


@weighted(**WEIGHTS)
def score(item: PromptItem, text: str) -> dict[str, float | str]:
    """A reward function on one reply. Columns of the row: `tools`, `calls`, `format` (default auto). A row that cannot
    be judged by is an abstention, with the reason."""
    calls = item.extra.get("calls")
    try:
        reply = parse_tool_calls(text, item.extra.get("format") or "auto")
        wanted = None if calls is None else read_calls(calls)
        result = None if item.answer is None else judge(item.answer, reply.prose) is Verdict.RIGHT
        judged = score_tool_use(reply, read_tools(item.extra.get("tools") or ()), wanted, result)
    except UserError as error:
        return {"reason": str(error)}
    return {**judged.parts(), "reason": judged.reason or "the calls are right"}


def read_tools(definitions: object) -> dict[str, Mapping[str, Any]]:
    """Name → JSON schema of the arguments, from `[{"name", "parameters"}]` or `[{"function": {…}}]`. Raises `DataError`
    for anything else."""
    if not isinstance(definitions, Sequence) or isinstance(definitions, str):
        raise DataError(f"tools = {definitions!r:.60}: give a list of definitions with name and parameters")
    found: dict[str, Mapping[str, Any]] = {}
    for definition in definitions:
        inner = definition.get("function", definition) if isinstance(definition, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        schema = inner.get("parameters") or {} if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise DataError(f"a tool is defined by {definition!r:.80}: give name and parameters (a JSON schema)")
        if name in found:
            raise DataError(f"the tool {name!r} is defined twice")
        problems({}, schema)  # a schema that cannot be used is told before anything is judged by it
        found[name] = schema
    return found


def read_calls(calls: object) -> tuple[ToolCall, ...]:
    """The wanted calls of a row: one `{"name", "arguments"}` or a list of them. Raises `DataError`."""
    rows = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise DataError(f"calls = {calls!r:.60}: give name and arguments, or a list of such calls")
    found = []
    for row in rows:
        inner = row.get("function", row) if isinstance(row, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise DataError(f"a wanted call is {row!r:.80}: give name and arguments")
        try:
            arguments = as_arguments(inner.get("arguments", inner.get("parameters")), 0)
        except JsonFault as fault:
            raise DataError(f"the arguments of a wanted call are no JSON: {fault}") from fault
        if not isinstance(arguments, Mapping):
            raise DataError(f"the arguments of the wanted call {inner['name']!r} are no object")
        found.append(ToolCall(inner["name"], arguments))
    return tuple(found)


def _chosen(calls: Sequence[ToolCall], wanted: Sequence[ToolCall]) -> list[ToolCall]:
    """Calls whose tools are wanted, each as often as it is."""
    left = Counter(call.name for call in wanted)
    chosen = []
    for call in calls:
        if left[call.name] > 0:
            left[call.name] -= 1
            chosen.append(call)
    return chosen


def _invalid(call: ToolCall, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """What is wrong with a call's arguments; "" when nothing is, or when its tool has no definition."""
    schema = tools.get(call.name)
    if schema is None:
        return f"{call.name:.60} is not a declared tool" if tools else ""
    found = problems(dict(call.arguments), {"additionalProperties": False, **schema})
    return f"{call.name}: {found[0]}" if found else ""


def _same_calls(calls: Sequence[ToolCall], wanted: Sequence[ToolCall], tools: Mapping[str, Mapping[str, Any]]) -> bool:
    if len(calls) != len(wanted):
        return False
    left = list(wanted)
    for call in calls:
        match = next((i for i, other in enumerate(left) if _same_call(call, other, tools.get(call.name, {}))), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_call(call: ToolCall, other: ToolCall, schema: Mapping[str, Any]) -> bool:
    return call.name == other.name and same_json(
        with_defaults(call.arguments, schema), with_defaults(other.arguments, schema)
    )
