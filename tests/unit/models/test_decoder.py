"""The decoder means what transformers' models mean, and a row's answer is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import build_gguf, build_hf
from support.decoders import BF16, FP32, WIDE, Walk, random_adapter, random_ids, tiny_decoder, transformers_twin
from tithe.arch import read_checkpoint
from tithe.errors import AdapterError, ModelError
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder
from tithe.models.loader import load_model
from tithe.models.options import ModelOptions
from tithe.quant import set_threads

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3",
)  # fmt: skip
MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
IDS = random_ids(37)


def logits(decoder: Decoder, ids: np.ndarray = IDS) -> Tensor:
    walk = Walk(decoder)
    return walk.logits(walk.prefill(0, ids))


def assert_means_the_same(mine: Tensor, model: Any, ids: np.ndarray = IDS) -> None:
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids).long()[None]).logits[0]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert mine.std() > 0.1, "logits that differ"


# ------------------------------------------------------------------ against transformers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_transformers_own(tmp_path: Path, architecture: str, dtype: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, FP32, dtype=dtype)
    assert decoder.base_max_abs_error == 0.0
    assert_means_the_same(logits(decoder), transformers_twin(tmp_path / "m"))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": False, "head_dim": 32, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "rope_theta": 500_000.0, "rms_norm_eps": 1e-3}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "num_attention_heads": 6}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"mlp_only_layers": [0], "num_experts_per_tok": 3, "attention_bias": True}),
    ],
)
def test_every_switch_of_the_config_is_obeyed(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, FP32, **config)
    assert_means_the_same(logits(decoder), transformers_twin(tmp_path / "m"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rotary_tables_are_transformers_own(tmp_path: Path, architecture: str, rope: str) -> None:
    parameters = ROPES[rope] | {"rope_theta": 10_000.0}
    decoder = tiny_decoder(tmp_path / "m", architecture, FP32, rope_parameters=parameters)
    model = transformers_twin(tmp_path / "m")
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(decoder.max_context)[None])
    half = decoder.spec.head_dim // 2
    torch.testing.assert_close(decoder.cos, cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(decoder.sin, sin[0, :, :half], rtol=0, atol=1e-6)
    assert_means_the_same(logits(decoder), model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_its_hugging_face_twin(tmp_path: Path, architecture: str) -> None:
    """Unquantized, so both hold the same numbers: what remains is names, permuted heads and metadata."""
    path = build_gguf(tmp_path / "m.gguf", architecture, linear="F32", embedding="F32")
    twin = tiny_decoder(tmp_path / "m", architecture, FP32, dtype="float32")
    assert torch.equal(logits(load_model(read_checkpoint(path), FP32)), logits(twin))


@pytest.mark.parametrize("linear", ["Q4_1", "Q4_0", "Q8_0"])
def test_a_quantized_gguf_file_is_what_transformers_reads(tmp_path: Path, linear: str) -> None:
    path = build_gguf(tmp_path / "m.gguf", "llama", linear=linear)
    decoder = load_model(read_checkpoint(path), FP32)
    assert decoder.layers[0].qkv.parts[0].name == ("int8" if linear == "Q8_0" else "int4")
    assert_means_the_same(logits(decoder), transformers_twin(tmp_path, gguf_file="m.gguf"))


# ------------------------------------------------------------------ one W̃, several layouts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("linear", ["Q4_1", "Q8_0"])
def test_dequantized_compute_has_the_bits_of_packed_compute(tmp_path: Path, linear: str, mode: str) -> None:
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", "qwen2", linear=linear))
    packed = load_model(checkpoint, MODES[mode])
    dense = load_model(checkpoint, replace(MODES[mode], compute="dequantized"))
    assert dense.layers[0].o.parts[0].name == ("fp32" if mode == "fp32" else "bf16")
    assert dense.resident_bytes() > packed.resident_bytes()
    assert torch.equal(logits(packed), logits(dense))
    assert packed.options.numeric_mode == dense.options.numeric_mode


def test_linears_of_different_formats_are_kept_side_by_side(tmp_path: Path) -> None:
    """q and k in one format, v in another, as mixed GGUF files have them."""
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", "qwen2", linear="Q8_0"))
    other = read_checkpoint(build_gguf(tmp_path / "n.gguf", "qwen2", linear="F32"))
    uniform = load_model(other, FP32)
    name = "model.layers.0.self_attn.v_proj.weight"
    other.tensors[name] = checkpoint.tensors[name]
    mixed = load_model(other, FP32)
    assert [p.name for p in mixed.layers[0].qkv.parts] == ["fp32", "fp32", "int8"]
    assert torch.equal(mixed.layers[0].qkv.expand(torch.float32)[:64], uniform.layers[0].qkv.expand(torch.float32)[:64])
    difference = (logits(mixed) - logits(uniform)).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.02), ("int4", 0.2)])
def test_quantizing_on_load_packs_linears_and_reports_its_error(tmp_path: Path, quantize: str, bound: float) -> None:
    checkpoint = read_checkpoint(build_hf(tmp_path / "m", "llama"))
    exact = load_model(checkpoint, FP32)
    packed = load_model(checkpoint, replace(FP32, quantize=quantize))  # pyright: ignore[reportArgumentType]
    assert {p.name for linear in packed.linears() for p in linear.parts} == {quantize}
    assert packed.embedding.name == "fp32", "the embedding is no linear"
    errors = [
        (a.expand(torch.float32) - b.expand(torch.float32)).abs().max().item()
        for a, b in zip(packed.linears(), exact.linears(), strict=True)
    ]
    assert packed.base_max_abs_error == max(errors)
    assert 0 < packed.base_max_abs_error < bound


def test_a_bf16_base_reports_the_rounding_of_float32_weights(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_hf(tmp_path / "m", "llama", dtype="float32"))
    rounded, exact = load_model(checkpoint, BF16), load_model(checkpoint, FP32)
    matrices = [(rounded.embedding, exact.embedding)]
    matrices += [(a.parts[0], b.parts[0]) for a, b in zip(rounded.linears(), exact.linears(), strict=True)]
    errors = [(a.expand(torch.float32) - b.expand(torch.float32)).abs().max().item() for a, b in matrices]
    assert rounded.base_max_abs_error == max(errors) > 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "glm4_moe", "minimax_m2", "deepseek_v3"])
def test_bf16_compute_errs_less_than_transformers_in_bf16(tmp_path: Path, architecture: str) -> None:
    """Residual stream, norms, softmax and logits are float32 here; there everything is bf16."""
    mine = logits(tiny_decoder(tmp_path / "m", architecture, BF16)).log_softmax(-1)
    model = transformers_twin(tmp_path / "m")
    ids = torch.from_numpy(IDS).long()[None]
    with torch.no_grad():
        exact = model(ids).logits[0].log_softmax(-1)
        theirs = model.bfloat16()(ids).logits[0].float().log_softmax(-1)
    error, their_error = (mine - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 0 < error < 0.8 * their_error


# ------------------------------------------------------------------ rows are their own


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_has_the_bits_of_prefill(tmp_path: Path, architecture: str, mode: str) -> None:
    """Row by row, beside other sequences at other positions, and in chunks: always the same bits."""
    decoder = tiny_decoder(tmp_path / "m", architecture, MODES[mode])
    whole = Walk(decoder).prefill(0, IDS)
    others = {1: random_ids(37, 1), 5: random_ids(37, 2)}
    walk = Walk(decoder)
    walk.prefill(5, others[5][:9])
    steps: list[Tensor] = []
    for i, token in enumerate(IDS):
        rows = [(1, i, int(others[1][i])), (0, i, int(token))]
        if 9 + i < 37:
            rows.insert(0, (5, 9 + i, int(others[5][9 + i])))
        steps.append(walk.run(rows)[-1])
    assert torch.equal(torch.stack(steps), whole)
    chunked = Walk(decoder)
    parts = [chunked.prefill(3, IDS[a : a + 8], first=a) for a in range(0, 37, 8)]
    assert torch.equal(torch.cat(parts), whole)
    logits_alone = torch.cat([walk.logits(whole[i : i + 1]) for i in range(37)])
    assert torch.equal(logits_alone, walk.logits(whole))


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "minimax_m2", "deepseek_v3"])
def test_one_and_two_threads_give_the_same_bits(tmp_path: Path, architecture: str, mode: str) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, MODES[mode])
    one = logits(decoder)
    try:
        set_threads(2)
        two = logits(decoder)
    finally:
        set_threads(1)
    assert torch.equal(one, two)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32, 35])
def test_a_shared_and_forked_prompt_has_the_bits_of_an_own_one(
    tmp_path: Path, prompt: int, architecture: str, mode: str
) -> None:
    decoder = tiny_decoder(tmp_path / "m", architecture, MODES[mode])
    own, shared = Walk(decoder), Walk(decoder)
    tails = {2: random_ids(20, 3), 4: random_ids(20, 4)}
    shared.prefill(0, IDS[:prompt])
    full, slots = divmod(prompt, 16)
    for sequence in tails:
        shared.table[sequence, :full] = shared.table[0, :full]
        if slots:
            shared.pages.fork([int(shared.table[0, full])], [int(shared.table[sequence, full])], [slots])
    rows = [(s, prompt + i, int(t)) for s, tail in tails.items() for i, t in enumerate(tail)]
    together = shared.run(rows)
    alone = [own.prefill(s, np.concatenate([IDS[:prompt], tail]))[prompt:] for s, tail in tails.items()]
    assert torch.equal(together, torch.cat(alone))


# ------------------------------------------------------------------ adapters


SPEC = LoraSpec(r=4, alpha=8)


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_computed_under_its_own_adapter(tmp_path: Path, mode: str) -> None:
    """Two adapters of different rank and the bare base in one batch, bit for bit as each alone."""
    decoder = tiny_decoder(tmp_path / "m", "llama", MODES[mode])
    wide = LoraSpec(r=7, alpha=7, target_modules=("q_proj", "v_proj", "down_proj"))
    adapters = [
        None,
        decoder.build_adapter(random_adapter(decoder, SPEC, 1), SPEC),
        decoder.build_adapter(random_adapter(decoder, wide, 2), wide),
    ]
    alone = [Walk(decoder).prefill(0, IDS, adapter=a) for a in adapters]
    rows = [(s, i, int(t)) for s in range(3) for i, t in enumerate(IDS)]
    walk = Walk(decoder)
    for _ in range(2):  # once more on warm launches
        together = walk.run(rows, [(37 * s, 37 * s + 37, a) for s, a in enumerate(adapters)])
        assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[1], alone[2])


def test_an_adapter_of_zeros_changes_nothing(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3", BF16)
    zeros = decoder.build_adapter(random_adapter(decoder, SPEC, size=0.0), SPEC)
    assert torch.equal(Walk(decoder).prefill(0, IDS, adapter=zeros), Walk(decoder).prefill(0, IDS))


def test_an_adapter_on_every_linear_is_merged_weights(tmp_path: Path) -> None:
    """x·W̃ᵀ + scale·(x·Aᵀ)·Bᵀ is the model with W̃ + scale·B·A, in transformers' own words."""
    decoder = tiny_decoder(tmp_path / "m", "qwen2", FP32)
    tensors = random_adapter(decoder, SPEC)
    model = transformers_twin(tmp_path / "m")
    modules = dict(model.named_modules())
    assert len(decoder.linear_shapes()) == 14
    for module in decoder.linear_shapes():
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        modules[module].weight += SPEC.scale(module) * b @ a
    walk = Walk(decoder)
    mine = walk.logits(walk.prefill(0, IDS, adapter=decoder.build_adapter(tensors, SPEC)))
    assert_means_the_same(mine, model)


def test_a_mixture_serves_adapters_on_its_attention(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "qwen3_moe", FP32)
    spec = LoraSpec(r=4, alpha=8, target_modules=("q_proj", "o_proj"))
    adapter = decoder.build_adapter(random_adapter(decoder, spec), spec)
    assert not torch.equal(Walk(decoder).prefill(0, IDS, adapter=adapter), Walk(decoder).prefill(0, IDS))


def test_adapters_that_fit_nothing_are_refused_by_name(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "llama", BF16)
    tensors = random_adapter(decoder, SPEC)
    name = next(iter(tensors))
    with pytest.raises(AdapterError, match=r"model\.layers\.7\."):
        decoder.build_adapter({name.replace("layers.0", "layers.7"): tensors[name]}, SPEC)
    with pytest.raises(AdapterError, match="nothing would be learned"):
        decoder.build_adapter({}, SPEC)


# ------------------------------------------------------------------ loading


def test_what_cannot_be_computed_is_refused_on_loading(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_hf(tmp_path / "m", "llama", head_dim=24))
    with pytest.raises(ModelError, match="head_dim 24 is not a multiple of 16"):
        load_model(checkpoint, BF16)
    with pytest.raises(ModelError, match=r"set model\.base_dtype to bf16"):
        load_model(checkpoint, ModelOptions(base_dtype="fp32", compute_dtype="bf16"))
    narrow = read_checkpoint(build_hf(tmp_path / "n", "llama", intermediate_size=80))
    with pytest.raises(ModelError, match=r"80 columns are no whole groups of 32; set model\.quantize: none"):
        load_model(narrow, ModelOptions(quantize="int4"))


def test_sizes_and_bounds_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", "llama", intermediate_size=192, hidden_size=96))
    decoder = load_model(checkpoint, ModelOptions(max_context=100))
    assert decoder.max_context == 100
    assert decoder.n_tokens == checkpoint.padded_vocab.start
    assert decoder.checksum == checkpoint.checksum()
    assert decoder.file_bytes == sum(t.n_bytes for t in checkpoint.tensors.values())
    padded_panels = 1.35
    """Tiny matrices fill their last panel badly."""
    assert decoder.file_bytes <= decoder.resident_bytes() < padded_panels * decoder.file_bytes
    longer = load_model(checkpoint, ModelOptions(max_context=10_000))
    assert longer.max_context == 512, "the model's own limit"
