"""The byte account against published totals, against its own parts, and the shard rule."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.arch import (
    Account,
    ArchSpec,
    Shard,
    StoredFormat,
    Tally,
    TensorFormat,
    TensorGroup,
    account,
    iter_held,
    iter_tensors,
    known_config,
    make_base,
    owner_of,
)
from tithe.arch.bases import BASES, Grain
from tithe.errors import ConfigError, ModelError

WITHIN = 1e-3
"""The bound on every comparison with a figure that its publisher rounded."""


def account_of(config: dict[str, Any] | str, base: str = "published", n_ranks: int = 1) -> Account:
    config = known_config(config) if isinstance(config, str) else config
    return account(ArchSpec.from_config(config), make_base(base, config), n_ranks)


# ------------------------------------------------------------------ published totals

PARAMETERS = {
    # The hub's own count over the safetensors headers (`safetensors.total`) of unquantized releases, and of gpt-oss,
    # whose packed blocks it counts as what they stand for: the same tensors, so the same number to the last digit.
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "minimax-m2": 228_689_764_864,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_number(name: str) -> None:
    assert account_of(name).total.parameters == PARAMETERS[name]


ROUNDED = {
    # Model cards and reports, in billions as printed.
    "deepseek-v3": (671e9, 37e9),  # README: 671B, 37B activated
    "qwen3-235b-a22b": (235e9, 22e9),  # card: 235B, 22B activated
    "gpt-oss-120b": (116.83e9, 5.13e9),  # model card, table 1 (which leaves the embedding out of the active ones)
    "gpt-oss-20b": (20.91e9, 3.61e9),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_the_models_cards_within_a_thousandth(name: str) -> None:
    sums = account_of(name)
    total, active = ROUNDED[name]
    assert abs(sums.total.parameters / total - 1) < WITHIN
    without_embedding = sums.groups[TensorGroup.EMBEDDING].parameters if name.startswith("gpt-oss") else 0
    assert abs((sums.active_parameters - without_embedding) / active - 1) < 0.02  # two or three digits are printed


def test_kimi_k2_has_1026_billion() -> None:
    """The hub counts 1026408235864, 3416 (3e-9) more than there are weights. The report's 1.04T is 1.3 % more."""
    total = account_of("kimi-k2").total.parameters
    assert total == 1_026_408_235_864 - 3416
    assert round(1.04e12 / total - 1, 3) == 0.013
    assert account_of("kimi-k2-thinking").total.parameters == total


def extra_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The config with one more layer, which is what a layer for predicting further tokens is inside."""
    return config | {"num_hidden_layers": config["num_hidden_layers"] + 1}


def test_glm_4_5_has_358_billion_with_its_extra_layer() -> None:
    """The hub counts 358337791296: the 92 layers, and a 93rd with embedding, head, three norms and a joint [H, 2H].

    352.80 billion of them are loaded; the card's 355B is that number rounded up (0.6 %).
    """
    config = known_config("glm-4.5")
    sums, longer = account_of(config), account_of(extra_layer(config))
    hidden, vocab = 5120, 151_552
    assert sums.total.parameters == 352_797_829_024
    assert longer.total.parameters + 2 * vocab * hidden + 3 * hidden + 2 * hidden**2 == 358_337_791_296


def test_deepseek_v3_has_the_published_numbers_of_every_dtype() -> None:
    """The hub's headers: F8_E4M3 680571043840, F32 41555600, BF16 3918786560, of 61 layers and one extra.

    Beside a layer's own tensors the extra one has an embedding, a head, a joint [H, 2H] and three norms in bf16.
    """
    config = known_config("deepseek-v3")
    spec, base = ArchSpec.from_config(extra_layer(config)), make_base("published", config)
    elements = {"F8_E4M3": 0, "F32": 0, "BF16": 0}
    for held in iter_held(spec, base, Shard(0, 1)):
        if held.stored.kind is TensorFormat.FP8_BLOCK:
            elements["F8_E4M3"] += math.prod(held.shape)
            elements["F32"] += held.stored.scale_bytes(held.shape) // 4
        else:
            elements[held.stored.kind] += math.prod(held.shape)
    hidden, vocab = 7168, 129_280
    extra = 2 * vocab * hidden + 2 * hidden**2 + 3 * hidden
    assert elements["BF16"] + extra == 3_918_786_560
    assert (elements["F8_E4M3"], elements["F32"]) == (680_571_043_840, 41_555_600)
    assert account_of(config).total.parameters == 671_026_419_200
    assert account_of(config).total.tensors == 45_395


def test_bytes_are_those_of_published_indexes() -> None:
    """`metadata.total_size` of the releases' model.safetensors.index.json."""
    assert account_of("gpt-oss-120b").total.n_bytes == 65_248_815_744
    assert account_of("qwen3-235b-a22b").total.n_bytes == 470_187_269_120
    assert account_of("qwen3-8b").total.n_bytes == 16_381_470_720


def test_kimi_k2_thinking_takes_594_gigabytes() -> None:
    """Deployment recipes print ~595 GB on disk for INT4 experts and ~557 GB for MXFP4 ones."""
    assert abs(account_of("kimi-k2-thinking").total.n_bytes / 595e9 - 1) < 2e-3
    assert abs(account_of("kimi-k2-thinking", "mxfp4").total.n_bytes / 557e9 - 1) < 1e-2
    int4, published = account_of("kimi-k2-thinking", "int4"), account_of("kimi-k2-thinking")
    assert int4.groups == published.groups


# ------------------------------------------------------------------ the account and its parts

SMALL = known_config("deepseek-v3") | {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 24,
    "vocab_size": 512,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "quantization_config": known_config("kimi-k2-thinking")["quantization_config"],
}
STACKED = known_config("gpt-oss-20b") | {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
DENSE = known_config("llama-3.1-8b") | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("config", [SMALL, STACKED, DENSE], ids=["latent", "stacked", "dense"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("n_ranks", [1, 2, 5, 40])
def test_sums_are_those_of_the_tensors_one_by_one(config: dict[str, Any], base: str, n_ranks: int) -> None:
    sums = account_of(config, base, n_ranks)
    spec, formats = sums.spec, make_base(base, config)
    for rank in sums.ranks:
        groups = dict.fromkeys(rank.groups, Tally())
        for held in iter_held(spec, formats, Shard(rank.rank, n_ranks)):
            scales = held.stored.scale_bytes(held.shape)
            assert held.n_bytes == held.stored.n_bytes(held.shape)
            groups[held.group] += Tally(1, math.prod(held.shape), held.n_bytes - scales, scales)
        assert groups == rank.groups


@pytest.mark.parametrize("config", [SMALL, STACKED, DENSE], ids=["latent", "stacked", "dense"])
@given(base=st.sampled_from(BASES), n_ranks=st.integers(1, 40))
def test_ranks_hold_every_expert_once_and_all_else_whole(config: dict[str, Any], base: str, n_ranks: int) -> None:
    sums = account_of(config, base, n_ranks)
    held = list(itertools.chain.from_iterable(rank.experts for rank in sums.ranks))
    assert held == list(range(sums.spec.n_experts))
    for group, tally in sums.groups.items():
        shares = [rank.groups.get(group, Tally()) for rank in sums.ranks]
        if group is TensorGroup.ROUTED_EXPERTS:
            assert sum(share.n_bytes for share in shares) == tally.n_bytes
            assert sum(share.parameters for share in shares) == tally.parameters
        else:
            assert all(share == tally for share in shares)


@pytest.mark.parametrize("config", [SMALL, STACKED], ids=["latent", "stacked"])
def test_a_coarser_grain_gives_the_same_sums(config: dict[str, Any]) -> None:
    spec = ArchSpec.from_config(config)
    published = make_base("published", config)
    assert published.grain is Grain.DIGITS
    each = replace(published, grain=Grain.TENSOR)
    assert account(spec, published, 5) == account(spec, each, 5)
    named = make_base("int4", SMALL)
    assert named.grain is Grain.FAMILY
    assert account(spec, named, 5) == account(spec, replace(named, grain=Grain.TENSOR), 5)


def test_lists_that_name_layers_and_experts_are_obeyed() -> None:
    """Asked tensor by tensor: what the list names keeps its bf16 bytes, on the rank that has it."""
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.5.mlp.experts.23"],
    }
    config = SMALL | {"quantization_config": quantization}
    plain = config | {"quantization_config": quantization | {"modules_to_not_convert": ["lm_head"]}}
    with_list, without = account_of(config, n_ranks=4), account_of(plain, n_ranks=4)
    matrices = 3 * 128 * 256
    more = matrices - 3 * 4 * 2  # one byte more an element, less the scales of two blocks in each
    assert with_list.total.n_bytes - without.total.n_bytes == more
    assert with_list.ranks[3].total.n_bytes - without.ranks[3].total.n_bytes == more
    assert with_list.ranks[:3] == without.ranks[:3]


def test_absurd_sizes_end_at_once() -> None:
    config = SMALL | {"num_hidden_layers": 4096, "n_routed_experts": 65_536, "n_group": 1, "topk_group": 1}
    assert account_of(config, "int4", 8).total.parameters > 10**13
    numbered = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.1"]}
    with pytest.raises(ModelError, match=r"claims \d+ tensors.*num_hidden_layers"):
        account_of(config | {"quantization_config": numbered})


def test_a_format_that_cannot_hold_a_shape_names_the_tensor() -> None:
    with pytest.raises(ModelError, match=r"gate_proj\.weight of shape \(100, 256\)|down_proj.*100.*INT4_PACKED"):
        account_of(SMALL | {"moe_intermediate_size": 100}, "int4")


def test_plain_tensors_keep_the_configs_dtype() -> None:
    for dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        sums = account_of(DENSE | {"dtype": dtype})
        assert sums.total.n_bytes == size * sums.total.parameters
    bare = {key: value for key, value in DENSE.items() if key != "dtype"}
    assert account_of(bare | {"torch_dtype": "float32"}).total.n_bytes == 4 * sums.total.parameters


def test_correction_biases_are_float32_in_every_base() -> None:
    for base in BASES:
        formats = make_base(base, SMALL)
        biases = [t for t in iter_tensors(ArchSpec.from_config(SMALL)) if t.name.endswith("e_score_correction_bias")]
        assert {formats.format_of(tensor) for tensor in biases} == {StoredFormat(TensorFormat.F32)}


def test_an_unknown_base_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"nvpf4: there is no such format\. Did you mean nvfp4\? Known: published"
    ) as caught:
        make_base("nvpf4", SMALL)
    assert caught.value.key == "base"


# ------------------------------------------------------------------ the shard rule


@given(st.integers(0, 200), st.integers(1, 64))
def test_experts_lie_in_blocks_as_equal_as_can_be(n_experts: int, n_ranks: int) -> None:
    blocks = [Shard(rank, n_ranks).experts(n_experts) for rank in range(n_ranks)]
    assert [expert for block in blocks for expert in block] == list(range(n_experts))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for rank, block in enumerate(blocks):
        assert all(owner_of(expert, n_experts, n_ranks) == rank for expert in block)


@pytest.mark.parametrize(("rank", "n_ranks"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_beyond_the_last_is_refused(rank: int, n_ranks: int) -> None:
    with pytest.raises(ConfigError, match="ranks count from 0"):
        Shard(rank, n_ranks)
