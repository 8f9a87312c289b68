"""`tithe verify`: files of answers, calls and programs, the lab, and the screening of a task."""

import json
import math
from pathlib import Path

import pytest

from tithe.cli.main import main
from tithe.errors import DataError
from tithe.rewards import Verdict
from tithe.rewards.screening import screen
from tithe.rewards.verifying import Judged, measure, read_rows, summary
from tithe.types import PromptItem

CASES = Path(__file__).parent / "cases"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(capfd, *arguments):
    """Exit code and the one line of standard output."""
    code = main(["verify", *arguments, "--json"])
    (line,) = capfd.readouterr().out.splitlines()
    return code, json.loads(line)


@pytest.mark.parametrize("option", [(), ("--tools",), ("--code",)])
def test_a_file_without_a_usable_row_says_first_that_nothing_was_judged(tmp_path, capfd, option):
    path = write(tmp_path / "bad.jsonl", [{"question": "?"}, {"gold": True}])
    assert main(["verify", path, *option]) == 0
    first, counted, *reasons = capfd.readouterr().out.splitlines()
    assert first.startswith("nothing was judged")
    assert counted.startswith("2 rows: 0 right, 0 wrong, 2 without a verdict")
    assert len(reasons) == 2
    assert not summary([Judged(0, "unequal")])["text"].startswith("nothing")


def test_answers_are_graded_row_by_row(tmp_path, capfd):
    rows = [
        {"gold": r"\frac{\sqrt3}{3}", "text": r"\boxed{\frac{1}{\sqrt3}}"},
        {"gold": "9", "text": "#### -9"},
        {"gold": "", "text": r"\boxed{0}"},
        {"gold": 42, "text": "6*7 is 42.0"},
        {"gold": 42.0, "text": r"\boxed{42}"},
        {"gold": True, "text": r"\boxed{1}"},
        {"gold": None, "text": r"\boxed{1}"},
        {"gold": [4, 7], "text": r"\boxed{4, 7}"},
        {"gold": "0", "text": None},
        {"gold": "1"},
    ]
    code, result = run(capfd, write(tmp_path / "rows.jsonl", rows))
    verdicts = [row["verdict"] for row in result["rows"]]
    assert (code, verdicts) == (0, [1, 0, None, 1, 1, None, None, 1, 0, None])
    assert (result["right"], result["wrong"], result["abstained"]) == (4, 2, 4)
    assert all(row["reason"] and row["seconds"] >= 0 for row in result["rows"])
    assert "row 6: gold is true" in result["rows"][5]["reason"]
    assert "row 10: it needs gold and text" in result["rows"][9]["reason"]


def test_tool_calls_are_graded_with_their_parts(tmp_path, capfd):
    tools = [{"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
    wanted = {"name": "add", "arguments": {"a": 1}}
    hermes = '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'
    rows = [
        {"text": hermes % "1", "calls": wanted, "tools": tools},
        {"text": hermes % "2", "gold": [wanted], "tools": tools},
        {"text": hermes % '"1"', "calls": wanted, "tools": tools},
        {"text": "[add(a=1)]", "calls": wanted, "tools": tools, "format": "pythonic"},
        {"text": hermes % "1", "calls": wanted, "tools": [{"name": "add", "parameters": {"if": 1}}]},
        {"text": "null", "answer": "0"},
        {"text": hermes % "1"},
    ]
    code, result = run(capfd, "--tools", write(tmp_path / "rows.jsonl", rows))
    assert (code, [row["verdict"] for row in result["rows"]]) == (0, [1, 0, 0, 1, None, 0, None])
    assert result["rows"][1]["parts"] == {"choice": 0.3, "arguments": 0.3, "result": 0.0}
    assert "'if'" in result["rows"][4]["reason"]


def test_programs_are_graded_in_the_sandbox(tmp_path, capfd):
    tests = [{"name": "add", "args": [2, 3], "expected": 5}, {"name": "add", "args": [-1, 1], "expected": 0}]
    rows = [
        {"code": "def add(a, b):\n    return a + b\n", "tests": tests},
        {"code": "def add(a, b):\n    return a - b\n", "tests": tests},
        {"code": "import os\nos._exit(0)\n", "tests": tests},
        {"code": "print(int(input()) + 1)", "tests": [{"stdin": "4\n", "stdout": "5\n"}]},
        {"code": "x = 1", "tests": 3},
    ]
    code, result = run(capfd, "--code", write(tmp_path / "rows.jsonl", rows))
    if code == 2 and "sandbox" in result["error"].lower():
        pytest.skip(f"no sandbox on this machine: {result['error']}")
    assert (code, [row["verdict"] for row in result["rows"]]) == (0, [1, 0, 0, 1, None])


def test_the_lab_finds_no_false_positive_on_the_labelled_cases(capfd):
    code, result = run(capfd, "--lab", str(CASES / "math.jsonl"), "--timeout", "30")
    assert code == 0
    assert (result["false_positives"], result["golds_that_fail_themselves"]) == (0, [])
    assert result["false_negative_rate"] < 0.02
    assert result["abstention_rate"] < 0.02
    assert result["cases"] > 220


def test_the_lab_counts_what_a_bad_grader_does():
    rows = [(n, {"gold": str(n), "text": "x", "verdict": label}) for n, label in enumerate([1, 1, 0, 0, None, 1])]
    verdicts = [1, 0, 0, 1, 1, None]
    result = measure(rows, lambda asked: [Judged(v, "") for v in verdicts[: len(asked)]], check_golds=False)
    assert (result["false_positives"], result["false_negatives"], result["abstentions"]) == (2, 1, 1)
    assert math.isclose(result["false_positive_rate"], 2 / 3)
    assert math.isclose(result["false_negative_rate"], 1 / 3)
    assert [mistake["row"] for mistake in result["mistakes"]] == [3, 4, 1, 5]
    golds = measure(rows, lambda asked: [Judged(0, "")] * len(asked), check_golds=True)
    assert golds["golds_that_fail_themselves"] == ["0", "1", "2", "3", "5"]


def test_the_lab_needs_labels():
    with pytest.raises(DataError, match="row 3 carries the verdict 'yes'"):
        measure([(3, {"gold": "1", "text": "1", "verdict": "yes"})], lambda rows: [], check_golds=False)


@pytest.mark.parametrize("content", ["", "[1]\n", "{\n", '{"gold": "1"}\nnot json\n', "\xff"])
def test_a_file_that_is_no_list_of_objects_is_bad_input(tmp_path, content, capfd):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode("latin-1"))
    code, result = run(capfd, str(path))
    assert (code, result["kind"]) == (2, "DataError")
    assert str(path) in result["error"]


def test_a_missing_file_and_a_bad_option_are_bad_input(tmp_path, capfd):
    assert run(capfd, str(tmp_path / "none.jsonl"))[0] == 2
    path = write(tmp_path / "rows.jsonl", [{"gold": "1", "text": "1"}])
    assert run(capfd, path, "--timeout", "0")[0] == 2
    assert run(capfd, path, "reward.right=2")[0] == 2


def test_people_get_one_line_a_row():
    text = summary([Judged(1, "equal"), Judged(None, "row 2: nothing")])["text"]
    assert text.splitlines()[0].startswith("2 rows: 1 right, 0 wrong, 1 without a verdict")
    assert "right  equal" in text.splitlines()[1]


def test_rows_keep_their_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [number for number, _ in read_rows(path)] == [1, 3]


# ---------------------------------------------------------------------------------------------- screening

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def ask(number, question, answer):
    return PromptItem(f"q-{number}", messages=({"role": "user", "content": question},), answer=answer)


def found(train, held=()):
    return {finding.kind: len(finding.examples) for finding in screen(train, held)}


def test_a_clean_task_has_no_findings():
    train = [ask(1, "What is 3 + 4?", "7"), ask(2, "What is 3 - 4?", "-1"), ask(3, "Solve x^2=2", r"\pm\sqrt2")]
    assert set(found(train, [ask(4, "What is 5 + 6?", "11")]).values()) == {0}


@pytest.mark.parametrize("gold", ["", None, r"so \boxed{", "\x0crac12"])
def test_unreadable_golds_are_found(gold):
    assert found([ask(1, "What?", gold)])["unreadable"] == 1


def test_a_gold_that_the_grader_cannot_grade_is_found():
    findings = screen([ask(1, "What?", "7")], (), lambda gold, text: Verdict.WRONG)
    assert {finding.kind: finding.examples for finding in findings}["not itself"] == ("q-1: What? → '7'",)


def test_repetitions_and_contradictions_are_found_up_to_notation():
    train = [ask(1, "Half of one?", "1/2"), ask(2, "half of  one", "0.5"), ask(3, "A?", "1"), ask(4, "A?", "2")]
    counts = found(train)
    assert (counts["repeated"], counts["contradictory"]) == (2, 1)


def test_leakage_is_found_in_both_degrees():
    held = [ask(1, "What is 3 + 4?", "7"), ask(2, f"{LONG} what?", "1")]
    train = [ask(3, "what is 3 + 4", "7"), ask(4, f"So {LONG} then?", "2"), ask(5, "What is 3 - 4?", "-1")]
    counts = found(train, held)
    assert (counts["leaked"], counts["near"]) == (1, 1)


def test_a_run_file_is_screened(tmp_path, capfd):
    data = [{"prompt": "A?", "answer": "1"}, {"prompt": "A?", "answer": "2"}, {"prompt": "B?", "answer": r"\boxed{"}]
    data += [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(8)]
    source = write(tmp_path / "train.jsonl", data)
    held = write(tmp_path / "eval.jsonl", [{"prompt": "a ?", "answer": "1"}])
    path = tmp_path / "run.yaml"
    path.write_text(f"task: {{source: {source}, eval_source: {held}}}\n")
    code, result = run(capfd, str(path))
    assert code == 0
    kinds = {kind: result[kind] for kind in ("broken", "unreadable", "repeated", "contradictory", "leaked", "near")}
    assert kinds == {"broken": 0, "unreadable": 1, "repeated": 1, "contradictory": 1, "leaked": 2, "near": 0}
    assert run(capfd, str(path), "--tools")[0] == 2
