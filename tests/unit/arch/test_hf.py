"""Hugging Face directories: values against safetensors, completeness, padding, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoints import build_gguf, build_hf, tokens
from support.refusals import answer_or_refusal
from tithe.arch import base_bytes, read_checkpoint
from tithe.arch.safetensors_file import read_safetensors
from tithe.errors import ModelError
from tithe.quant.reference import dequantize

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hf(tmp_path_factory.mktemp("hf") / "llama")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_transformers_loads_the_same_weights(tmp_path: Path, architecture: str, dtype: str) -> None:
    """The reader agrees with an independent one, and `build_hf` writes complete checkpoints."""
    import torch
    from safetensors.torch import load_file

    directory = build_hf(tmp_path, architecture, dtype=dtype)
    checkpoint = read_checkpoint(directory)
    theirs = load_file(directory / "model.safetensors")
    assert set(theirs) == set(checkpoint.tensors)
    for name, tensor in theirs.items():
        entry = checkpoint.tensors[name]
        np.testing.assert_array_equal(
            dequantize(entry.read(), entry.format).reshape(entry.shape), tensor.to(torch.float32).numpy()
        )
    assert base_bytes(checkpoint) == sum(tensor.nbytes for tensor in theirs.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_built_directories_load_in_transformers(tmp_path: Path, architecture: str) -> None:
    import transformers

    directory = build_hf(tmp_path, architecture, dtype="float32")
    _, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = "12 + 7 = 19\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 2


def test_one_file_and_shards_are_the_same_base(tmp_path: Path) -> None:
    one = read_checkpoint(build_hf(tmp_path / "one", "qwen3_moe"))
    many = read_checkpoint(build_hf(tmp_path / "many", "qwen3_moe", shards=3))
    assert list(one.tensors) == list(many.tensors)
    assert one.checksum() == many.checksum()


def test_directory_and_gguf_twin_describe_one_model(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        directory = read_checkpoint(build_hf(tmp_path / architecture, architecture, rms_norm_eps=2.0**-20))
        file = read_checkpoint(build_gguf(tmp_path / f"{architecture}.gguf", architecture, rms_norm_eps=2.0**-20))
        assert directory.spec == file.spec
        assert directory.generation.eos_token_ids == file.generation.eos_token_ids
        assert directory.generation.chat_template == file.generation.chat_template
        assert directory.padded_vocab == file.padded_vocab


def test_padded_vocabulary_d25(tmp_path: Path) -> None:
    """The rows decide, whatever config.json says; fewer rows than tokens are refused."""
    size = len(tokens())
    directory = build_hf(tmp_path / "padded", vocab_size=size + 4)
    edit_config(directory, vocab_size=size)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.config["vocab_size"] == checkpoint.spec.vocab_size == size + 4
    assert checkpoint.padded_vocab == range(size, size + 4)
    with pytest.raises(ModelError, match=f"{size - 4} rows but the tokenizer has {size}"):
        read_checkpoint(build_hf(tmp_path / "short", vocab_size=size - 4))
    bare = read_checkpoint(build_hf(tmp_path / "bare", tokenizer=False))
    assert len(bare.padded_vocab) == 0


def test_a_redundant_tied_head_is_left_out(tmp_path: Path) -> None:
    directory = build_hf(tmp_path, tie_word_embeddings=False)
    assert "lm_head.weight" in read_checkpoint(directory).tensors
    edit_config(directory, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_checkpoint(directory).tensors


def test_older_rotary_keys(tmp_path: Path) -> None:
    directory = build_hf(tmp_path)
    edit_config(directory, rope_parameters="absent", rope_theta=5000, rope_scaling={"type": "linear", "factor": 2.0})
    config = read_checkpoint(directory).config
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    assert "rope_scaling" not in config
    assert "rope_theta" not in config


def test_generation_info(tmp_path: Path) -> None:
    directory = build_hf(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 2], "bos_token_id": 1}')
    info = read_checkpoint(directory).generation
    assert info.eos_token_ids == {0, 2}
    assert info.bos_token_id == 1
    (directory / "generation_config.json").unlink()
    edit_config(directory, eos_token_id=0)
    assert read_checkpoint(directory).generation.eos_token_ids == {0, 2}  # config.json's and the tokenizer's own
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert read_checkpoint(directory).generation.chat_template == "{{ messages }}"


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*pickle.*safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="pickle"):
        read_checkpoint(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    with pytest.raises(ModelError, match="pickle"):
        read_checkpoint(tmp_path)


def test_shards_stay_inside_the_directory(tmp_path: Path) -> None:
    directory = build_hf(tmp_path / "model", shards=2)
    index = directory / "model.safetensors.index.json"
    for name in ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="names the file"):
            read_checkpoint(directory)
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(ModelError, match=r"absent\.safetensors"):
        read_checkpoint(directory)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="'a' is not in"):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rms_norm_eps": NaN}', "holds NaN"),
        ('{"a": 1, "a": 2}', "key 'a' twice"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "should be a JSON object"),
        ("{}", "model_type"),
    ],
)
def test_broken_configs_are_named(llama: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=message):
        read_checkpoint(tmp_path)


def test_incomplete_directories_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="give its directory"):
        read_checkpoint(llama / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        read_checkpoint(tmp_path)


def test_config_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = build_hf(tmp_path)
    for changes, message in (
        ({"num_hidden_layers": 3}, "missing: 'model.layers.2"),
        ({"num_hidden_layers": 1}, "does not have: 'model.layers.1"),
        ({"intermediate_size": 128}, r"mlp\.gate_proj\.weight has shape \(96, 64\)"),
        ({"num_hidden_layers": 4000}, "more; fetch"),
    ):
        edit_config(directory, **({"num_hidden_layers": 2, "intermediate_size": 96} | changes))
        with pytest.raises(ModelError, match=message):
            read_checkpoint(directory)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}, "needs 16 bytes"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}, "truncated"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 16]}, "impossible shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "impossible shape"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "impossible data_offsets"),
        ({"dtype": "F32", "shape": [4]}, "header entry"),
        ([], "header entry"),
    ],
)
def test_damaged_safetensors_headers(tmp_path: Path, entry: Any, message: str) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": entry}, bytes(16))
    with pytest.raises(ModelError, match=message):
        read_safetensors(tmp_path / "x.safetensors")


def test_overlaps_long_headers_and_other_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    write_safetensors(path, {"a": entry, "b": entry}, bytes(16))
    with pytest.raises(ModelError, match="overlap"):
        read_safetensors(path)
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(ModelError, match="header of"):
        read_safetensors(path)
    write_safetensors(path, {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(ModelError, match=r"F8_E4M3.*supported in safetensors: F16, BF16, F32"):
        read_safetensors(path)["a"].format()


@given(data=st.data())
def test_no_damage_escapes_as_another_error(llama: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    content = bytearray((llama / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, 2200))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    directory = tmp_path_factory.getbasetemp() / "damaged"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((llama / "config.json").read_bytes())
    (directory / "model.safetensors").write_bytes(content[:cut])
    found, said = answer_or_refusal(read_checkpoint, directory)
    assert said.isprintable(), "what the file says is escaped"
    for entry in found.tensors.values() if found else ():
        assert all(0 <= begin <= begin + n_bytes <= cut for _, _, begin, n_bytes in entry.ranges())
    assert found or said
