"""YAML scalars mean what they look like, and a hostile file is refused with its place."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config.yaml_text import MAX_BYTES, dump_yaml, parse_value, parse_yaml, read_yaml
from tithe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("2E-5", 2e-5),
        ("2.0e-5", 2e-5),
        ("+1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0x1F", 31),
        ("-3", -3),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_with_a_type(text, value):
    for parsed in (parse_yaml(f"k: {text}", "f")["k"], parse_value(text, "f")):
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "no", "Yes", "y", "12:30", "1_000", "2024-01-01", "=", "e5", "2e", "<<"]
)
def test_words_stay_text(text):
    assert parse_yaml(f"k: {text}", "f") == {"k": text}
    assert parse_value(text, "f") == text


def test_quotes_make_text_and_nan_is_a_number():
    assert parse_yaml("a: '2e-5'\nb: \"False\"\nc: 'null'", "f") == {"a": "2e-5", "b": "False", "c": "null"}
    assert math.isnan(parse_yaml("k: .nan", "f")["k"])


def test_override_text_is_taken_whole_and_brackets_are_yaml():
    assert parse_value("Answer: a number # not a comment", "f") == "Answer: a number # not a comment"
    assert parse_value("[a, 2e-5, {b: true}]", "f") == ["a", 2e-5, {"b": True}]
    assert parse_value("'off'", "f") == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rl: {a: 1}\nrl: {b: 2}", "line 2, column 1: key 'rl' is given twice"),
        ("rl:\n  a: 1\n  a: 1", "line 3, column 3: key 'a' is given twice"),
        ("a: &x [1]\nb: *x", "line 2, column 4: an alias"),
        ("a: &x [*x]", "alias"),
        ("[" * 4000, "nested deeper"),
        ("1: a", "key 1 is not text"),
        ("? [a]\n: 1", "is not text"),
        ("a: 1\n---\nb: 2", "document"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!bool off", "neither true nor false"),
        ("a: !!int 2x", "no whole number"),
        ("a: !!float on", "no number"),
        (f"a: {'9' * 5000}", "no whole number"),
        ("a: [1, 2", "line 1"),
        ("a: \x07", "special characters"),
    ],
)
def test_hostile_or_broken_text_names_its_place(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml")


def test_long_number_in_an_override_is_a_config_error():
    with pytest.raises(ConfigError, match="no whole number"):
        parse_value("9" * 5000, "override run.seed")


def test_files_that_are_no_run_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_yaml(tmp_path)
    (tmp_path / "big.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_yaml(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    (tmp_path / "bom.yaml").write_bytes("\ufeffa: 1".encode())
    assert read_yaml(tmp_path / "bom.yaml") == {"a": 1}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        [
            "on",
            "2e-5",
            "null",
            "",
            "007",
            "yes",
            "a: b",
            "# c",
            "- x",
            "'",
            '"',
            "1_0",
            "a\nb",
            "~",
            "é",
            "=",
            "\x85",
            "\u2028x",
        ]
    )
    | st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
)


@given(st.dictionaries(st.sampled_from("abc"), SCALARS | st.lists(SCALARS, max_size=3), max_size=3))
def test_what_is_dumped_reads_back_equal_and_of_the_same_type(value):
    again = parse_yaml(dump_yaml(value), "dump")
    assert repr(again) == repr(value)
