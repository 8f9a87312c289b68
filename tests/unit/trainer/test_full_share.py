"""What a rank loads of a model whose every parameter is trained: its share, with the bits of the whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.checkpoints import build_hf
from support.ranks import on_ranks_of
from tithe.arch import ARCHITECTURES, read_checkpoint
from tithe.errors import ModelError
from tithe.models import Ranks
from tithe.trainer.full_model import empty_full, load_full
from tithe.trainer.full_shard import load_share, own_numbers
from tithe.trainer.full_weights import BLOCK_BYTES, Weights
from unit.trainer.test_full import N_TOKENS

CLEAR = Path("/proc/self/clear_refs")
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 4}
SLACK_BYTES = 12 << 20


def held(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_any_architecture_are_those_of_the_whole_load(tmp_path: Path, architecture: str) -> None:
    """Thirds of every parameter, and every buffer, bit for bit; nothing of transformers' model is left out."""
    path = build_hf(tmp_path / "m", architecture)
    whole, empty = load_full(path, N_TOKENS, checkpointing=False), empty_full(path, N_TOKENS, checkpointing=False)
    assert all(parameter.is_meta for parameter in empty.parameters())
    weights, wanted = Weights(read_checkpoint(path)), dict(whole.model.named_parameters())
    assert {n: p.shape for n, p in empty.model.named_parameters()} == {n: p.shape for n, p in wanted.items()}
    for name, parameter in wanted.items():
        cuts = [len(parameter) * part // 3 for part in range(4)]
        found = torch.full_like(parameter, torch.nan)
        for start, stop in pairwise(cuts):
            weights.fill(name, range(start, stop), found.detach()[start:stop])
        assert torch.equal(found, parameter), name
    buffers = dict(empty.model.named_buffers())
    for name, buffer in whole.model.named_buffers():
        if name in whole.kept_buffers:
            buffers[name] = torch.full_like(buffer, torch.nan)
            weights.fill(name, range(len(buffer)), buffers[name])
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_rank_holds_its_share_and_no_more_while_it_loads(tmp_path: Path, is_tied: bool) -> None:
    """Peak of the process over what it held before; the reference is in the forward's dtype."""
    small = build_hf(tmp_path / "small", "llama")
    large = build_hf(tmp_path / "large", "llama", tie_word_embeddings=is_tied, **WIDE)

    def work(ranks: Ranks) -> Any:
        load_share(small, N_TOKENS, ranks, torch.bfloat16, checkpointing=False, is_trained=True)
        ranks.barrier()
        before = held("VmRSS")
        if CLEAR.exists():
            CLEAR.write_text("5")  # the peak begins anew
        policy = load_share(large, N_TOKENS, ranks, torch.bfloat16, checkpointing=False, is_trained=True)
        peak = held("VmHWM") - before
        reference = load_share(large, N_TOKENS, ranks, torch.bfloat16, checkpointing=False, is_trained=False)
        own = [sum(own_numbers(p) * p.element_size() for p in one.parameters()) for one in (policy, reference)]
        parts = [{n: p.full_tensor().detach() for n, p in one.named_parameters()} for one in (policy, reference)]
        return peak, own, parts if ranks.rank == 0 else []

    found = on_ranks_of(2, tmp_path / "ranks", work)
    whole = load_full(large, N_TOKENS, checkpointing=False)
    wanted = dict(whole.named_parameters())
    n_bytes = sum(4 * p.numel() for p in wanted.values())
    assert found[0][1][0] + found[1][1][0] == n_bytes
    assert found[0][1][1] + found[1][1][1] == n_bytes // 2
    trained, frozen = found[0][2]
    assert trained.keys() == frozen.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(trained[name], parameter), name
        assert torch.equal(frozen[name], parameter.bfloat16()), name
    if CLEAR.exists():
        for peak, (own, _), _ in found:
            assert own < peak < own + BLOCK_BYTES + SLACK_BYTES < n_bytes


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    path = build_hf(tmp_path / "m", "qwen2")
    weights = Weights(read_checkpoint(path))
    with pytest.raises(ModelError, match=r"no tensor for model\.layers\.9\.mlp\.up_proj\.weight"):
        weights.fill("model.layers.9.mlp.up_proj.weight", range(1), torch.empty(1, 64))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(64,\)"):
        weights.fill("model.norm.weight", range(60, 70), torch.empty(10))
    tensors: dict[str, Tensor] = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"F8|float8|fp8"):
        Weights(read_checkpoint(path)).fill("model.norm.weight", range(1), torch.empty(1))
