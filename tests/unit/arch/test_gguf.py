"""GGUF files against the `gguf` package and transformers' loader; damage and unsupported features are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoints import build_gguf, random_weights, tokens
from support.refusals import answer_or_refusal
from tithe.arch import Checkpoint, TensorFormat, base_bytes, read_checkpoint
from tithe.arch.gguf_file import read_gguf
from tithe.errors import ModelError
from tithe.quant.reference import dequantize

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gguf")
    return {name: build_gguf(root / f"{name}.gguf", name) for name in ARCHITECTURES}


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    entry = checkpoint.tensors[name]
    return dequantize(entry.read(), entry.format).reshape(entry.shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_table_is_the_gguf_packages(files: dict[str, Path], architecture: str) -> None:
    import gguf

    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(files[architecture]).tensors}
    parsed = read_gguf(files[architecture])
    assert {tensor.name for tensor in parsed.tensors} == set(theirs)
    for tensor in parsed.tensors:
        other = theirs[tensor.name]
        assert tensor.shape == tuple(reversed(other.shape.tolist()))
        assert (tensor.format, tensor.n_bytes, tensor.offset) == (
            other.tensor_type.name,
            other.n_bytes,
            other.data_offset,
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata_is_the_gguf_packages(files: dict[str, Path], architecture: str) -> None:
    import gguf

    reader = gguf.GGUFReader(files[architecture])
    parsed = read_gguf(files[architecture]).metadata
    assert list(parsed) == [key for key in reader.fields if not key.startswith("GGUF.")]
    for key, value in parsed.items():
        mine = value.values() if hasattr(value, "values") else value
        assert mine == reader.fields[key].contents(), key


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_transformers_loads(tmp_path: Path, architecture: str) -> None:
    """Names, row order (llama's rotary permutation) and values, bit for bit, through an independent loader."""
    import torch
    import transformers

    # of a qwen3 file's head size transformers reads nothing and takes its default
    sizes = {"head_dim": 128} if architecture == "qwen3" else {}
    path = build_gguf(tmp_path / "model.gguf", architecture, **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    checkpoint = read_checkpoint(path)
    theirs = dict(model.named_parameters())
    assert set(theirs) == set(checkpoint.tensors)
    for name, parameter in theirs.items():
        np.testing.assert_array_equal(values(checkpoint, name), parameter.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_is_the_one_transformers_makes(files: dict[str, Path], architecture: str) -> None:
    import transformers

    path = files[architecture]
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    mine = transformers.AutoConfig.for_model(**read_checkpoint(path).config).to_dict()
    keys = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    keys |= {"num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act"}
    keys |= {"tie_word_embeddings", "model_type", "bos_token_id", "eos_token_id"}
    if architecture in ("llama", "qwen3_moe"):
        keys |= {"head_dim"}
    if architecture == "qwen3_moe":
        keys |= {"num_local_experts", "num_experts_per_tok", "norm_topk_prob"}
    assert {key: mine.get(key) for key in keys} == {key: theirs.get(key) for key in keys}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_the_quantized_weights_that_were_written(files: dict[str, Path], architecture: str) -> None:
    """Every expert is cut out of its stack at the right place, every row is where it was before the permutation."""
    import gguf

    checkpoint = read_checkpoint(files[architecture])
    for name, written in random_weights(checkpoint.spec).items():
        kind = gguf.GGMLQuantizationType[checkpoint.tensors[name].format]
        expected = gguf.quants.dequantize(gguf.quants.quantize(written, kind), kind)
        np.testing.assert_array_equal(values(checkpoint, name), expected, err_msg=name)


@pytest.mark.parametrize("linear", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_every_format_reads_back(tmp_path: Path, linear: str) -> None:
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", linear=linear, embedding="F16"))
    linear = TensorFormat(linear)
    entry = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert entry.format is linear
    assert entry.read().shape == (64, linear.row_bytes(96))
    written = random_weights(checkpoint.spec)[entry.name]
    error = np.abs(dequantize(entry.read(), linear) - written).max()
    assert error <= {"F32": 0, "F16": 2e-4, "BF16": 2e-3, "Q8_0": 3e-3}.get(linear, 0.06)


def test_bytes_are_counted_once(files: dict[str, Path]) -> None:
    for path in files.values():
        checkpoint = read_checkpoint(path)
        assert base_bytes(checkpoint) == sum(entry.read().nbytes for entry in checkpoint.tensors.values())


def test_rows_can_be_sliced_without_a_copy(files: dict[str, Path]) -> None:
    entry = read_checkpoint(files["qwen2"]).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert np.shares_memory(entry.read(), entry.read_file_order()[3:5])
    permuted = read_checkpoint(files["llama"]).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert permuted.permute_heads == 4
    np.testing.assert_array_equal(permuted.read(), permuted.read_file_order()[permuted.row_order()])
    assert permuted.row_order().tolist()[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]  # one head


def test_a_write_into_a_view_never_reaches_the_file(files: dict[str, Path]) -> None:
    before = files["qwen2"].read_bytes()
    read_checkpoint(files["qwen2"]).tensors["model.norm.weight"].read()[:] = 0
    assert files["qwen2"].read_bytes() == before


def test_checksum_is_of_the_tensors(tmp_path: Path, files: dict[str, Path]) -> None:
    first = read_checkpoint(files["llama"]).checksum()
    again = build_gguf(tmp_path / "again.gguf", metadata={"general.file_type": 3})
    assert read_checkpoint(again).checksum() == first
    assert read_checkpoint(build_gguf(tmp_path / "other.gguf", seed=1)).checksum() != first


def test_generation_info(files: dict[str, Path]) -> None:
    checkpoint = read_checkpoint(files["qwen3"])
    info = checkpoint.generation
    assert info.eos_token_ids == {2}
    assert info.bos_token_id == 1
    assert info.chat_template is not None
    assert "<|im_start|>" in info.chat_template
    assert info.tokenizer_path == files["qwen3"]
    assert info.tokenizer_size == len(tokens())
    assert checkpoint.padded_vocab == range(len(tokens()), 128)
    assert checkpoint.metadata["tokenizer.ggml.tokens"].values()[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_llama3_rotary_factors_are_recognised(tmp_path: Path) -> None:
    """The divisors are computed here by transformers' own initialisation."""
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for factor in (8.0, 32.0):
        rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2) / 64)
        path = _with_rope_factors(tmp_path / f"{factor}.gguf", (plain / scaled).numpy())
        assert read_checkpoint(path).config["rope_parameters"] == rope
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read_checkpoint(_with_rope_factors(tmp_path / "odd.gguf", np.full(32, 3.0, np.float32)))


def _with_rope_factors(path: Path, factors: np.ndarray) -> Path:
    from support import checkpoints

    original = checkpoints.gguf_tensors

    def with_factors(*args: Any) -> dict[str, Any]:
        return {"rope_freqs.weight": (factors.astype(np.float32), "F32"), **original(*args)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "gguf_tensors", with_factors)
        sizes = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
        return build_gguf(path, **sizes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.sliding_window": 4096}, "sliding-window"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.key_length": 32}, "widths"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.logit_scale": 0.5}, "scaled logits"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"general.alignment": 7}, "general.alignment"),
    ],
)
def test_unsupported_features_are_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_checkpoint(build_gguf(tmp_path / "m.gguf", metadata=metadata))


def test_yarn_and_linear_scaling_reach_the_config(tmp_path: Path) -> None:
    keys = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    path = build_gguf(tmp_path / "y.gguf", "qwen2", metadata=keys | {"qwen2.rope.scaling.original_context_length": 128})
    assert read_checkpoint(path).config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_padded_vocabulary_d25(tmp_path: Path) -> None:
    """36 tokens and 40 rows load, 32 rows do not. The table says 36 by its unused tail."""
    size = len(tokens())
    path = build_gguf(tmp_path / "padded.gguf", vocab_size=size + 4)
    assert read_checkpoint(path).padded_vocab == range(size, size + 4)
    with pytest.raises(ModelError, match="rows but the tokenizer has"):
        read_checkpoint(build_gguf(tmp_path / "short.gguf", vocab_size=size - 4))


def test_unread_tensor_types_are_refused_by_name(files: dict[str, Path], tmp_path: Path) -> None:
    data = bytearray(files["llama"].read_bytes())
    at = data.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (3,)
    for number, name in ((23, "IQ4_XS"), (39, "MXFP4"), (999, "number 999")):
        struct.pack_into("<I", data, at, number)
        path = tmp_path / "k.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError, match=f"attn_v.weight.*{name}.*supported: Q4_0, Q4_1, Q8_0, .*F32"):
            read_checkpoint(path)


def test_a_missing_tensor_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(files["llama"].read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"missing: 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        read_checkpoint(path)
    path.write_bytes(files["llama"].read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_xx\.weight.*no place"):
        read_checkpoint(path)


def test_other_files_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    path = tmp_path / "m.gguf"
    for data, message in (
        (b"", "empty"),
        (b"PK\x03\x04 something", "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "more than the limit"),
        (files["llama"].read_bytes()[:-1], "truncated"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=message):
            read_checkpoint(path)
    with pytest.raises(ModelError, match="does not exist"):
        read_checkpoint(tmp_path / "absent.gguf")


@given(data=st.data())
def test_no_damage_escapes_as_another_error(files: dict[str, Path], tmp_path_factory: Any, data: st.DataObject) -> None:
    """Bytes changed anywhere in the header, or the file cut anywhere: a checkpoint whose tensors lie in the file, or a
    `ModelError`."""
    content = bytearray(files[data.draw(st.sampled_from(ARCHITECTURES))].read_bytes())
    header = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.sampled_from([0, 1, 4, 8, 9, 127, 255]))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:cut])
    found, said = answer_or_refusal(read_checkpoint, path)
    assert said.isprintable(), "what the file says is escaped"
    for entry in found.tensors.values() if found else ():
        assert all(0 <= begin <= begin + n_bytes <= cut for _, _, begin, n_bytes in entry.ranges())
    assert found or said
