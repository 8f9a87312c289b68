"""Expert blocks of every family from their published names: what transformers' blocks compute, and ranks' shares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import build_gguf
from support.checkpoints_packed import build_packed, values_of
from support.decoders import BF16, FP32, Walk, random_ids, transformers_twin
from tithe.arch import Shard, account, checkpoint_base, describe_checkpoint, read_checkpoint
from tithe.arch.files import MappedFile
from tithe.errors import ModelError
from tithe.models.expert_bank import ExpertBlock
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_workspace import Workspace
from tithe.models.loader import load_model
from tithe.models.loader_experts import load_experts
from tithe.models.loader_pack import Packer
from tithe.quant.grouped import GroupTable

PUBLISHED = [
    ("qwen3_moe", "fp8"),
    ("qwen3_moe", None),
    ("mixtral", "awq"),
    ("mixtral", "gptq"),
    ("deepseek_v3", "fp8"),
    ("deepseek_v3", "int4-experts"),
    ("deepseek_v3", "nvfp4"),
    ("glm4_moe", "int4"),
    ("glm4_moe", None),
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", None),
    ("minimax_m2", "fp8"),
]
each = pytest.mark.parametrize(
    ("architecture", "method"), PUBLISHED, ids=[f"{architecture}-{method}" for architecture, method in PUBLISHED]
)


def answer(block: ExpertBlock, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1])
    ExpertPlan(block, Workspace([block], x.dtype, len(x)), x, out).run()
    return out


def block_of(model: Any, layer: int) -> Any:
    """transformers' expert block as a function of rows."""
    block = model.model.layers[layer].mlp

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            found = block(x[None])
        return (found[0] if isinstance(found, tuple) else found).reshape(x.shape)

    return call


@each
def test_a_block_computes_what_transformers_computes(tmp_path: Path, architecture: str, method: str | None) -> None:
    """Largest difference over the largest value. Measured: at most 1e-6."""
    path = build_packed(tmp_path / "m", architecture, method)
    x = torch.randn(23, 128, generator=torch.Generator().manual_seed(3))
    mine = answer(load_experts(describe_checkpoint(path), 1, Packer(FP32)), x)
    theirs = block_of(transformers_twin(values_of(path)), 1)(x)
    assert theirs.std() > 1e-2
    assert (mine - theirs).abs().max() / theirs.abs().max() < 3e-6


@pytest.mark.parametrize(("architecture", "method"), PUBLISHED)
def test_a_whole_model_computes_what_transformers_computes(
    tmp_path: Path, architecture: str, method: str | None
) -> None:
    """Largest difference over the range of the logits. Measured: at most 1e-6."""
    path, ids = build_packed(tmp_path / "m", architecture, method), random_ids(29)
    walk = Walk(load_model(read_checkpoint(path), FP32))
    mine = walk.logits(walk.prefill(0, ids))
    with torch.no_grad():
        theirs = transformers_twin(values_of(path))(torch.from_numpy(ids).long()[None]).logits[0]
    assert (mine - theirs).abs().max() / (theirs.max() - theirs.min()) < 3e-6


@each
def test_the_sites_are_the_published_linears(tmp_path: Path, architecture: str, method: str | None) -> None:
    checkpoint = describe_checkpoint(build_packed(tmp_path / "m", architecture, method))
    block = load_experts(checkpoint, 1, Packer(BF16))
    for bank in block.banks():
        rows = {"gate_up": 0, "down": 0}
        for site in bank.sites:
            assert site.start == rows[site.place]
            rows[site.place] = site.stop
            for module in site.modules(len(bank)):
                stacked = checkpoint.tensors.get(re.sub(r"\.\d+\.(\w+)$", r".\1", module))  # gpt-oss
                entry = stacked or checkpoint.tensors[f"{module}.weight"]
                outputs = entry.shape[-1 if stacked and not entry.parts else -2]
                assert outputs == site.stop - site.start
        assert rows == {"gate_up": 2 * bank.width, "down": bank.hidden}


# ------------------------------------------------------------------ quantized on load


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_bf16_experts_are_packed_on_load(tmp_path: Path, architecture: str) -> None:
    checkpoint = describe_checkpoint(build_packed(tmp_path / "m", architecture))
    exact, packer = load_experts(checkpoint, 1, Packer(FP32)), Packer(replace(FP32, quantize="int4"))
    packed = load_experts(checkpoint, 1, packer)
    for mine, theirs in zip(packed.banks(), exact.banks(), strict=True):
        assert {m.kind.name for m in (*mine.gate_up.matrices, *mine.down.matrices)} == {"int4"}
        for table, other in ((mine.gate_up, theirs.gate_up), (mine.down, theirs.down)):
            difference = max(float((a - b).abs().max()) for a, b in zip(expanded(table), expanded(other), strict=True))
            assert 0 < difference <= packer.max_abs_error < 0.2


def expanded(table: GroupTable) -> Iterator[Tensor]:
    """float32 [N, K] of every expert."""
    (bank,) = table.matrices
    for e in range(len(table)):
        one = replace(bank, **{name: part[e] for name, part in bank.parts().items()})
        yield one.expand(torch.float32)


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize(
    ("architecture", "method"), [("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4"), ("gpt_oss", None), ("mixtral", "gptq")]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_experts(tmp_path: Path, architecture: str, method: str | None, ranks: int) -> None:
    checkpoint = describe_checkpoint(build_packed(tmp_path / "m", architecture, method))
    whole = load_experts(checkpoint, 1, Packer(BF16))
    experts = checkpoint.spec.n_experts
    shares = [load_experts(checkpoint, 1, Packer(BF16), Shard(rank, ranks)).routed for rank in range(ranks)]
    assert [(s.first, s.first + len(s)) for s in shares] == [
        (mine.start, mine.stop) for mine in (Shard(rank, ranks).experts(experts) for rank in range(ranks))
    ]
    for place in ("gate_up", "down"):
        mine = [w for s in shares for w in expanded(getattr(s, place))]
        for w, expected in zip(mine, expanded(getattr(whole.routed, place)), strict=True):
            assert torch.equal(w, expected)
    if whole.routed.gate_up_bias is not None:
        assert torch.equal(torch.cat([s.gate_up_bias for s in shares]), whole.routed.gate_up_bias)
        assert torch.equal(torch.cat([s.down_bias for s in shares]), whole.routed.down_bias)


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Offsets of all bytes that are looked at."""
    seen: set[int] = set()
    view, bytes_view = MappedFile.view, MappedFile.bytes_view

    def watched_view(self: MappedFile, offset: int, n_bytes: int) -> np.ndarray:
        seen.update(range(offset, offset + n_bytes))
        return view(self, offset, n_bytes)

    def watched_bytes(self: MappedFile, offset: int, n_bytes: int) -> memoryview:
        seen.update(range(offset, offset + n_bytes))
        return bytes_view(self, offset, n_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "view", watched_view)
        patch.setattr(MappedFile, "bytes_view", watched_bytes)
        yield seen


@pytest.mark.parametrize(
    ("architecture", "method"), [("qwen3_moe", "int4"), ("qwen3_moe", "nvfp4"), ("gpt_oss", "mxfp4"), ("gpt_oss", None)]
)
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_reads_the_bytes_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, method: str | None, rank: int
) -> None:
    """All of them, and no other: what the planner's account says of the rank."""
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", architecture, method))
    planned = account(checkpoint.spec, checkpoint_base(checkpoint), 3).ranks[rank].total.n_bytes
    with watching(monkeypatch) as seen:
        decoder = load_model(checkpoint, BF16, Shard(rank, 3))
    assert len(seen) == planned == decoder.file_bytes
    assert decoder.checksum == ""
    with watching(monkeypatch) as seen:
        digests = checkpoint.digests(Shard(rank, 3))
    assert len(seen) == planned
    assert digests
    one = load_model(checkpoint, BF16, Shard(0, 1))
    assert one.checksum == checkpoint.checksum()
    assert decoder.resident_bytes() < one.resident_bytes()


def test_a_rank_of_a_gguf_file_reads_its_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = read_checkpoint(build_gguf(tmp_path / "m.gguf", "qwen3_moe"))
    with watching(monkeypatch) as seen:
        decoder = load_model(checkpoint, BF16, Shard(1, 2))
    assert len(seen) == decoder.file_bytes < load_model(checkpoint, BF16).file_bytes
    assert [(block.routed.first, len(block.routed)) for block in decoder.blocks()] == [(2, 2), (2, 2)]


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(build_packed(tmp_path / "m", "qwen3_moe"))
    with pytest.raises(ModelError, match="8 experts; use at most that many ranks"):
        load_model(checkpoint, BF16, Shard(8, 9))
