"""Tasks: strict rows (F11, F13, M05, M39), held-out questions kept apart from their twins, stable ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config.sampling import TaskSettings
from tithe.envs import load_task
from tithe.envs.splitting import hold_out, keep_apart, question_key, twin_key
from tithe.errors import ConfigError, DataError
from tithe.types import PromptItem


def operands(item):
    return tuple(item.extra["operands"])


def asked(item):
    return item.messages[-1]["content"]


@pytest.mark.parametrize(("source", "sign"), [("sums", "+"), ("products", "*")])
def test_built_in_questions_never_split_a_pair_from_its_twin(source, sign):
    task = load_task(TaskSettings(source=source))
    train, held = {operands(item) for item in task.train}, {operands(item) for item in task.eval}
    assert len(held) == len(task.eval) >= 40
    assert len(train) + len(held) == 13 * 13
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in held}
    for item in (*task.train, *task.eval):
        a, b = operands(item)
        assert asked(item) == f"What is {a} {sign} {b}?"
        assert int(item.answer) == (a + b if sign == "+" else a * b)


def test_the_seed_alone_decides_the_split_and_the_order():
    first, again, other = (load_task(TaskSettings(seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert [item.id for item in first.train] != [item.id for item in other.train]
    assert {item.id for item in first.eval} != {item.id for item in other.eval}
    assert {i.id for i in first.train} | {i.id for i in first.eval} == {i.id for i in other.train + other.eval}


def test_large_operands_are_a_random_choice_in_both_orders():
    task = load_task(TaskSettings(source="products:1000000"))
    pairs = {operands(item) for item in (*task.train, *task.eval)}
    assert 19_000 < len(pairs) <= 20_000
    assert all((b, a) in pairs for a, b in pairs)


def test_too_few_questions_name_the_keys_to_change():
    with pytest.raises(
        ConfigError, match=r"task\.eval_size: 16 distinct questions cannot give 40 .*task\.source: sums:99"
    ):
        load_task(TaskSettings(source="sums:3"))


def test_the_instruction_is_added_to_every_question(tmp_path):
    path = write(
        tmp_path, [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": 1}]
    )
    task = load_task(TaskSettings(source="sums", eval_source=str(path), instruction="Only the number."))
    assert all(asked(item).endswith("?\nOnly the number.") for item in task.train)
    assert [dict(m) for m in task.eval[0].messages] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q\nOnly the number."},
    ]


# ------------------------------------------------------------------------------------------------ JSONL


def write(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def settings(path, **fields):
    return TaskSettings(source=str(path), **{"eval_size": 1, **fields})


def all_items(task):
    return {asked(item): item for item in (*task.train, *task.eval)}


GOOD = [{"prompt": f"q{number}", "answer": number, "level": number % 2} for number in range(4)]


def test_rows_become_prompts_with_answers_as_written(tmp_path):
    rows = [
        {"prompt": "6*7?", "answer": 42},
        '{"prompt": "6*7=", "answer": 42.0}',
        '{"prompt": "tenth", "answer": 0.10}',
        {"prompt": "word", "answer": " Yes "},
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "pa"}, {"type": "text", "text": "rt"}]}],
            "answer": 1,
        },
    ]
    items = all_items(load_task(settings(write(tmp_path, ["", *rows, "  "]))))
    assert {question: item.answer for question, item in items.items()} == {
        "6*7?": "42", "6*7=": "42.0", "tenth": "0.10", "word": " Yes ", "part": "1",
    }  # fmt: skip


def test_other_columns_reach_the_reward_and_names_can_be_changed(tmp_path):
    rows = [{"question": f"q{n}", "gold": n, "level": n} for n in range(3)]
    task = load_task(settings(write(tmp_path, rows), prompt_column="question", answer_column="gold"))
    assert {item.answer: item.extra for item in (*task.train, *task.eval)} == {str(n): {"level": n} for n in range(3)}


BROKEN = [
    ('{"prompt": "cut", "ans', "is not JSON"),
    ("[1, 2]", "is a list, not an object"),
    ('{"prompt": "a", "prompt": "b", "answer": 1}', "has the key 'prompt' twice"),
    ('{"prompt": "a", "answer": NaN}', "holds NaN"),
    ('{"prompt": "a", "answer": 1e999}', "'answer' is Infinity"),
    ('{"prompt": "a", "answer": true}', "'answer' is true"),
    ('{"prompt": "a", "answer": null}', "'answer' is null"),
    ('{"prompt": "a", "answer": ["4", "7"]}', "'answer' is [\"4\", \"7\"]"),
    ('{"prompt": "a", "answer": " "}', "'answer' is \" \""),
    ('{"prompt": "a", "anwser": 1}', "(task.answer_column); its columns: prompt, anwser; did you mean 'anwser'?"),
    ('{"promt": "a", "answer": 1}', "has no column 'prompt' (task.prompt_column)"),
    ('{"prompt": "", "answer": 1}', "'prompt' is empty"),
    ('{"prompt": 3, "answer": 1}', "'prompt' is 3"),
    ('{"prompt": [], "answer": 1}', "must end with a message"),
    ('{"prompt": [{"role": "assistant", "content": "b"}], "answer": 1}', "must end with a message"),
    ('{"prompt": [{"role": "robot", "content": "a"}], "answer": 1}', "each needs a role of"),
    ('{"prompt": [{"role": "user", "content": null}], "answer": 1}', "whose content is null"),
    ('{"prompt": [{"role": "user"}], "answer": 1}', "without content"),
    ('{"prompt": "a", "answer": "\\frac58"}', "a backslash was lost"),
    ('{"prompt": "Give \\boxed{x}", "answer": 1}', "a backslash was lost"),
    ('{"prompt": "half \\ud800", "answer": 1}', "half of a surrogate pair"),
    ('{"prompt": "\\u00ff"', "is not JSON"),
    ("[" * 100_000, "is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_row_is_named_with_its_line(tmp_path, line, reason):
    path = write(tmp_path, [*GOOD[:2], line, *GOOD[2:]])
    with pytest.raises(DataError) as caught:
        load_task(settings(path, strict=True))
    assert f"{path}:3: " in str(caught.value)
    assert reason in str(caught.value)
    task = load_task(settings(path, strict=False))
    assert len(task.report.broken) == 1
    assert task.report.broken[0].startswith(f"{path}:3: ")
    assert len(task.train) + len(task.eval) == 4
    assert any("1 broken row left out" in line for line in task.report.lines())


def test_bytes_that_are_no_text_are_one_broken_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\r\n" for row in GOOD) + b'{"prompt": "\xff"}\n'
    )
    assert load_task(settings(path, strict=False)).report.broken[0].startswith(f"{path}:5: is not JSON")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no rows"), ("\n \n", "holds no rows"), ("[]\n", "no usable row; the first: .*:1: is a list")],
)
def test_empty_data_is_an_error(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_task(settings(path))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read the data file: No such file"):
        load_task(settings(tmp_path / "none.jsonl"))


def test_answers_may_be_missing_where_the_reward_needs_none(tmp_path):
    path = write(tmp_path, [{"prompt": "a"}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": 1}])
    task = load_task(settings(path), needs_answer=False)
    assert sorted(str(item.answer) for item in (*task.train, *task.eval)) == ["1", "None", "None"]


# ------------------------------------------------------------------------------------------------ held out


def test_fewer_rows_than_are_held_out_is_an_error_and_three_rows_are_a_task(tmp_path):
    path = write(tmp_path, GOOD[:3])
    with pytest.raises(ConfigError, match="3 distinct questions cannot give 3"):
        load_task(settings(path, eval_size=3))
    task = load_task(settings(path, eval_size=2))
    assert (len(task.train), len(task.eval)) == (1, 2)


def test_all_rows_of_one_question_are_on_one_side(tmp_path):
    rows = [{"prompt": f"q{n}  x", "answer": n} for n in range(6) for _ in range(3)]
    task = load_task(settings(write(tmp_path, rows), eval_size=2))
    assert (len(task.train), len(task.eval)) == (12, 2)
    assert (task.report.duplicates, task.report.repeated) == (4, 8)
    assert not {asked(item) for item in task.train} & {asked(item) for item in task.eval}


def test_a_separate_source_is_kept_apart_from_training(tmp_path):
    train = write(
        tmp_path, [{"prompt": text, "answer": 7} for text in ("3 + 4", "4 + 3", "3  +  4 ", "5 + 2", "6 + 1")]
    )
    held = write(
        tmp_path, [{"prompt": text, "answer": 7} for text in ("3 + 4", "3 + 4", "1 + 6", "0 + 7")], "held.jsonl"
    )
    task = load_task(settings(train, eval_source=str(held), eval_size=40))
    assert [asked(item) for item in task.train] == ["5 + 2"]
    assert {asked(item) for item in task.eval} == {"3 + 4", "1 + 6", "0 + 7"}
    assert (task.report.leaked, task.report.twins, task.report.duplicates) == (2, 2, 1)
    assert len(load_task(settings(train, eval_source=str(held), eval_size=2)).eval) == 2
    every = write(tmp_path, [{"prompt": text, "answer": 7} for text in ("3 + 4", "5 + 2", "1 + 6")], "every.jsonl")
    with pytest.raises(ConfigError, match="all 5 training rows ask held-out questions"):
        load_task(settings(train, eval_source=str(every), eval_size=40))


def test_contradictory_answers_stop_strict_loading_and_are_counted_otherwise(tmp_path):
    path = write(tmp_path, [*GOOD, {"prompt": "q1", "answer": 99}])
    with pytest.raises(DataError, match="more than one answer"):
        load_task(settings(path))
    assert len(load_task(settings(path, strict=False)).report.contradictory) == 1


def test_ids_are_stable_and_tell_repeated_rows_apart(tmp_path):
    rows = [*GOOD, GOOD[0]]
    ids = {item.id for item in load_task(settings(write(tmp_path, rows))).train} | {
        item.id for item in load_task(settings(write(tmp_path, rows))).eval
    }
    moved = load_task(settings(write(tmp_path, [{"prompt": "new", "answer": 1}, *rows[::-1]])))
    assert ids <= {item.id for item in (*moved.train, *moved.eval)} | {i for i in ids if i.endswith("-1")}
    assert sum(i.endswith("-1") for i in ids) <= 1


QUESTIONS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from("+-"), st.integers(0, 6)), min_size=2, max_size=40)


@given(questions=QUESTIONS, size=st.integers(1, 5), seed=st.integers(0, 9))
def test_no_question_and_no_reordering_is_ever_on_both_sides(questions, size, seed):
    items = [
        PromptItem(f"h{i}-0", messages=({"role": "user", "content": f"{a} {sign} {b}"},), answer="0")
        for i, (a, sign, b) in enumerate(questions)
    ]
    try:
        split = hold_out(items, size, seed)
    except ConfigError:
        return
    assert len(split.eval) >= size
    assert len(split.train) + len(split.eval) + split.duplicates == len(items)
    assert not {twin_key(item) for item in split.train} & {twin_key(item) for item in split.eval}
    assert len({question_key(item) for item in split.eval}) == len(split.eval)
    separate = keep_apart(items, split.eval, size, seed)
    assert not {twin_key(item) for item in separate.train} & {twin_key(item) for item in separate.eval}


# ------------------------------------------------------------------------------------------------ functions


def test_a_function_returns_rows_or_items(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(
        "from tithe.types import PromptItem\n"
        "def rows():\n"
        "    yield {'prompt': 'a', 'answer': 1}\n"
        "    yield PromptItem('mine', text='raw b', answer='2')\n"
        "    yield {'prompt': 'c', 'answer': 3}\n"
        "def wrong(): return 'text'\n"
        "def fails(): raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task(TaskSettings(source="my_task:rows", eval_size=1))
    items = [*task.train, *task.eval]
    assert sorted((item.text, item.answer) for item in items if item.text) == [("raw b", "2")]
    assert len(items) == 3
    with pytest.raises(DataError, match="returned str"):
        load_task(TaskSettings(source="my_task:wrong"))
    with pytest.raises(ConfigError, match=r"task\.source: my_task:fails failed: KeyError"):
        load_task(TaskSettings(source="my_task:fails"))
    with pytest.raises(ConfigError, match=r"task\.source: no_such_task:rows cannot be imported"):
        load_task(TaskSettings(source="no_such_task:rows"))


def test_reasoning_gym_questions_and_graders():
    pytest.importorskip("reasoning_gym")
    from tithe.rewards.gym import score

    task = load_task(TaskSettings(source="reasoning_gym:gcd", eval_size=5))
    assert len(task.train) > 100
    item = task.eval[0]
    assert item.extra["metadata"]["source_dataset"] == "gcd"
    assert score(item, f"The answer is {item.answer}.") == 1.0
    assert score(item, "No idea.") < 0.1
    with pytest.raises(ConfigError, match="no dataset 'gdc'; did you mean gcd"):
        load_task(TaskSettings(source="reasoning_gym:gdc"))


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[tasks\]'"):
        load_task(TaskSettings(source="reasoning_gym:gcd"))
