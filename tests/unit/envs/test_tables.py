"""Chat files in OpenAI's form, Parquet files, folders of the library `datasets`."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tithe.config import load_config
from tithe.envs.rows import Columns, read_objects
from tithe.envs.sources import read_source
from tithe.envs.tables import _files
from tithe.errors import ConfigError, DataError

ASKED = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 * 7?"}]}
CHAT = [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "42"}]
ROWS = [
    {"messages": CHAT, "level": 3},
    {"messages": [ASKED, {"role": "assistant", "content": "It is 42."}], "level": 4},
]


def read(source, **columns):
    return read_source(str(source), Columns(**columns), key="task.source", seed=0, eval_size=1)


def check(items):
    assert [item.answer for item in items] == ["42", "It is 42."]
    assert [[m["role"] for m in item.messages] for item in items] == [["system", "user"], ["user"]]
    assert items[0].messages[-1]["content"] == "What is 6 * 7?"
    assert items[0].extra == {"level": 3}


def test_a_conversation_is_a_question_and_its_answer(tmp_path):
    check(read_objects(ROWS, Columns(), "rows").items)
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    check(read(path).items)


def test_an_answer_column_of_its_own_wins_and_the_conversation_stays_whole():
    read = read_objects([{"messages": CHAT[:2], "answer": 7}, {"messages": CHAT, "answer": 7}], Columns(), "rows")
    assert [item.answer for item in read.items] == ["7"]
    assert "must end with a message of the user" in read.broken[0]


def test_tests_of_a_program_are_kept_as_json():
    tests = [{"name": "add", "args": [2, 3], "expected": 5}]
    (item,) = read_objects([{"prompt": "Write add.", "answer": tests}], Columns(), "rows").items
    assert json.loads(item.answer) == tests
    assert read_objects([{"prompt": "?", "answer": 1}, {"prompt": "?", "answer": []}], Columns(), "rows").broken


def test_parquet_files_and_folders_of_datasets_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional package (the extra `data`)")
    ipc, parquet = map(importlib.import_module, ("pyarrow.ipc", "pyarrow.parquet"))
    asked = {**ASKED, "content": "What is 6 * 7?"}
    plain = [{**row, "messages": [asked if m is ASKED else m for m in row["messages"]]} for row in ROWS]
    table = pyarrow.Table.from_pylist(plain)
    parquet.write_table(table, tmp_path / "chat.parquet")
    check(read(tmp_path / "chat.parquet").items)

    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    parquet.write_table(table.slice(0, 1), hub / "test-00000-of-00001.parquet")
    check(read(tmp_path / "hub").items)

    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with pyarrow.OSFile(str(saved / "data-0.arrow"), "wb") as file, ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    check(read(tmp_path / "saved").items)
    check(read(saved).items)

    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"broken\.parquet: cannot be read as a table"):
        read(tmp_path / "broken.parquet")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(DataError, match="none called train"):
        read(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no Parquet"):
        read(tmp_path / "empty")


def test_without_pyarrow_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install -e .*data"):
        read(tmp_path)


def test_the_configuration_takes_files_and_folders_and_refuses_other_frameworks_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds").mkdir()
    assert load_config(None, ["task.source=x.parquet"]).task.source == str(tmp_path / "x.parquet")
    assert load_config(None, ["task.source=ds"]).task.source == f"{tmp_path}/ds/"
    with pytest.raises(ConfigError, match="over HTTP"):
        load_config(None, ["task.source=verifiers:wordle"])
    with pytest.raises(ConfigError, match="names no task"):
        load_config(None, ["task.source=nothing"])
    with pytest.raises(DataError, match="no such folder"):
        read(f"{tmp_path}/gone/")


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"splits": 3, "_data_files": 3}',
        '{"splits": [1, 2], "_data_files": ["a.arrow"]}',
        '{"splits": ["train", null], "_data_files": [{"filename": "a.arrow"}, {}]}',
        '{"splits": [""], "_data_files": [{"filename": 7}]}',
    ],
)
def test_an_index_that_cannot_be_read_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"{name}: .*save the dataset again"):
        _files(tmp_path)


def test_the_files_of_an_index_are_taken_in_its_order(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "b"}, {"filename": "a"}]}')
    assert _files(tmp_path) == [tmp_path / "train" / "b", tmp_path / "train" / "a"]
