"""An expert block over ranks: the same bits forward and in d_x, the adapters' gradients at rounding level."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.experts import EXPERTS, HIDDEN, ROUTERS, Case, make_case, relative
from support.ranks import on_ranks_of, outcomes
from tithe.arch import exchange, exchange_bytes, exchange_rows
from tithe.errors import RanksLost, RunError, UserError
from tithe.lora import LoraSpec
from tithe.models.exchange import by_adapter
from tithe.models.expert_bank import GPT_OSS, BlockAdapter, ExpertBank
from tithe.models.expert_plan import ExpertPlan
from tithe.models.ranks import ALONE, Ranks
from tithe.quant.grouped import GroupTable

ROWS = 29
BOUND = 20
"""Pairs of a round."""
SPEC = LoraSpec(r=4, alpha=8)
CASES = {
    "int4": lambda: make_case("int4", operand=torch.bfloat16, shared=True),
    "biases": lambda: make_case("int8", biases=True, activation=GPT_OSS),
    "groups": lambda: make_case("bf16", ROUTERS["sigmoid-groups"], operand=torch.bfloat16, shared=True),
    "all": lambda: make_case("fp32", ROUTERS["all"]),
}


def part(table: GroupTable, mine: range) -> GroupTable:
    return GroupTable(table.matrices, table.addresses[mine.start : mine.stop], table.rows, table.panels)


def on_rank(case: Case, ranks: Ranks) -> Case:
    """The case with only the rank's experts in reach."""
    whole = case.block.routed
    mine = ranks.shard.experts(len(whole))
    gate_up, down = (
        b[mine.start : mine.stop] if b is not None else None for b in (whole.gate_up_bias, whole.down_bias)
    )
    own = ExpertBank(
        part(whole.gate_up, mine), part(whole.down, mine), whole.sites, whole.activation, gate_up, down, mine.start
    )
    return replace(case, block=replace(case.block, routed=own, ranks=ranks))


def share(ranks: Ranks) -> slice:
    """Rows of a rank, of very different numbers; rank 1 of 4 has none."""
    bounds = {1: [0, ROWS], 2: [0, 5, ROWS], 4: [0, 3, 3, 20, ROWS]}[ranks.size]
    return slice(bounds[ranks.rank], bounds[ranks.rank + 1])


def forward(case: Case, x: Tensor, which: Tensor, adapters: list[BlockAdapter], window: int = 8192) -> Tensor:
    """Rows under adapter 0 or 1 or none (-1), side by side, called twice as a plan is."""
    out = torch.zeros(len(x), HIDDEN)
    plan = ExpertPlan(case.block, case.workspace(max(len(x), 1), window), x if len(x) else case.rows(1), out)
    plan.rows, plan.served = len(x), adapters
    found, counts = torch.unique_consecutive(which, return_counts=True)
    start = 0
    for adapter, n in zip(found.tolist(), counts.tolist(), strict=True):
        plan.segments = [*plan.segments, (start, start + n, adapters[adapter] if adapter >= 0 else None)]
        start += n
    plan.run()
    first = out.clone()
    out.zero_()
    plan.run()
    assert torch.equal(out, first)
    return out


@pytest.fixture
def rounds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks exchange in many rounds, of which rank 2 needs most."""
    if size == 4:
        monkeypatch.setattr(exchange, "EXCHANGE_PAIRS", BOUND)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("rounds")
def test_forward_is_bitwise_that_of_one_rank(tmp_path: Path, name: str, size: int):
    case = CASES[name]()
    x = case.rows(ROWS)
    which = torch.tensor([0] * 9 + [-1] * 4 + [1] * 16, dtype=torch.int32)
    tensors = [case.tensors(SPEC, seed=5), case.tensors(SPEC, "shared_outer", seed=6)]
    alone = [
        forward(case, x[r : r + 1], which[r : r + 1], [case.adapter(t, SPEC) for t in tensors]) for r in range(ROWS)
    ]

    def work(ranks: Ranks) -> Tensor:
        own, rows = on_rank(case, ranks), share(ranks)
        return forward(own, x[rows], which[rows], [own.adapter(t, SPEC) for t in tensors], window=16)

    assert torch.equal(torch.cat(on_ranks_of(size, tmp_path, work)), torch.cat(alone))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("rounds")
def test_backward_is_that_of_one_rank(tmp_path: Path, name: str, layout: Any, size: int):
    """d_x bitwise; gradients of adapters summed in another order: below 1e-6 of the largest entry."""
    case = CASES[name]()
    x, tensors = case.rows(ROWS), case.tensors(SPEC, layout)
    d_out = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(9))
    adapter = case.adapter(tensors, SPEC)
    _, routed = case.forward(x, [(0, ROWS, adapter)])
    d_x, grads = case.backward(x, routed, d_out, adapter, tensors)

    def work(ranks: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
        own, rows = on_rank(case, ranks), share(ranks)
        chosen = replace(routed, ids=routed.ids[rows], weights=routed.weights[rows])
        mine, named = own.backward(x[rows], chosen, d_out[rows], own.adapter(tensors, SPEC), tensors, 16)
        sizes = [len(Ranks(r, size).shard.experts(EXPERTS)) for r in range(size)]
        for key in sorted(named):
            named[key] = ranks.gather_blocks(named[key], sizes) if "{expert}" in key else named[key].contiguous()
        ranks.sum([named[key] for key in sorted(named) if "{expert}" not in key])
        return mine, named

    found = on_ranks_of(size, tmp_path, work)
    assert torch.equal(torch.cat([mine for mine, _ in found]), d_x)
    for _, named in found:
        assert named.keys() == grads.keys()
        assert all(torch.equal(named[key], found[0][1][key]) for key in named)
    assert max(relative(found[0][1][key], grads[key]) for key in grads) < 1e-6


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("size", [4])
def test_a_round_brings_no_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int):
    """Wherever rows want to go: here all of them to the expert of one rank. Bytes are those that are accounted."""
    case = make_case("int4", operand=torch.bfloat16)
    k = case.block.router.per_token
    ids = torch.arange(k, dtype=torch.int32).expand(ROWS, k).contiguous()
    seen: list[tuple[int, int]] = []
    plain = Ranks.all_to_all

    def watched(self: Ranks, rows: Tensor, send: Any, receive: Any) -> Tensor:
        out = plain(self, rows, send, receive)
        if sum(receive) != self.size:  # counts are one message of each
            seen.append((len(out), out.numel() * out.element_size() + rows.numel() * rows.element_size()))
        return out

    monkeypatch.setattr(Ranks, "all_to_all", watched)

    def work(ranks: Ranks) -> list[tuple[int, int]]:
        own, rows = on_rank(case, ranks), share(ranks)
        x = case.rows(ROWS)[rows]
        plan = ExpertPlan(
            own.block, own.workspace(max(len(x), 1)), x if len(x) else case.rows(1), torch.zeros(ROWS, HIDDEN)
        )
        plan.rows, plan.replay = len(x), ids[rows]
        plan.run()
        return seen

    found = on_ranks_of(size, tmp_path, work)
    assert max(pairs for told in found for pairs, _ in told) == 3 * exchange_rows(k, size) * k <= BOUND, (
        "one has no rows"
    )
    assert max(n for told in found for _, n in told) <= exchange_bytes(HIDDEN, k, size, 2, training=False)


def test_pairs_are_put_side_by_side_by_adapter():
    order, ranges = by_adapter(torch.tensor([0, 1, -1, 0], dtype=torch.int32))
    assert order is not None
    assert order.tolist() == [2, 0, 3, 1]
    assert ranges == [(1, 3, 0), (3, 4, 1)]
    assert by_adapter(torch.tensor([0, 0], dtype=torch.int32)) == (None, [(0, 2, 0)])
    assert by_adapter(torch.zeros(0, dtype=torch.int32)) == (None, [])


def test_ranks_that_serve_different_adapters_are_told(tmp_path: Path):
    case = CASES["all"]()
    tensors = case.tensors(SPEC)

    def work(ranks: Ranks) -> None:
        own = on_rank(case, ranks)
        served = [own.adapter(tensors, SPEC)] if ranks.rank else []
        forward(own, case.rows(2), torch.tensor([-1, -1]), served)

    assert all("must serve the same ones" in text for _, text in outcomes(2, tmp_path, work))


def test_the_first_rank_collects_what_each_has(tmp_path: Path):
    """It alone, in order; one has nothing, or all."""

    def work(ranks: Ranks) -> list[list[bytes]]:
        found = []
        for sizes in ((0, 3, 1), (0, 0, 0)):
            own = bytes([65 + ranks.rank]) * sizes[ranks.rank]
            found.append(ranks.collect(own, sizes) if ranks.rank == 0 else ranks.collect(own))
        return found

    assert on_ranks_of(3, tmp_path, work) == [[[b"", b"BBB", b"C"], [b""] * 3], [[], []], [[], []]]
    assert ALONE.collect(b"xy") == [b"xy"]


def test_a_store_that_others_have_left_is_ranks_lost(tmp_path: Path):
    """torch's own group meets through a store, whose errors do not name gloo; others are not about ranks."""

    def work(ranks: Ranks) -> str:
        with pytest.raises(RanksLost, match=f"rank {ranks.rank} of 2 lost the others"), ranks.watched():
            raise dist.DistStoreError("wait timeout after 600000ms")
        with pytest.raises(RuntimeError, match="expanded size"), ranks.watched():
            torch.zeros(2).expand(3)
        return "both"

    assert on_ranks_of(2, tmp_path, work) == ["both"] * 2


def test_sums_broadcasts_and_blocks(tmp_path: Path):
    """Sums are alike on all ranks, bit for bit, and run in ascending rank; bytes may be none."""
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, bytes, bytes, Tensor]:
        first, second = parts[ranks.rank].clone(), torch.full((3,), float(ranks.rank), dtype=torch.float64)
        ranks.sum([first, second])
        told = ranks.broadcast(b"abc" if ranks.rank == 2 else b"", 2), ranks.broadcast()
        return first, second, *told, ranks.gather_blocks(torch.full((ranks.rank, 2), ranks.rank), range(4))

    wanted = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    for first, second, told, nothing, blocks in on_ranks_of(4, tmp_path, work):
        assert torch.equal(first, wanted)
        assert second.tolist() == [6.0] * 3
        assert (told, nothing) == (b"abc", b"")
        assert blocks.tolist() == [[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]


@pytest.mark.liveness
def test_the_others_end_when_a_rank_dies(tmp_path: Path):
    """At once, although they would wait for a silent one for a minute."""
    case = CASES["all"]()

    def work(ranks: Ranks) -> None:
        own = on_rank(case, ranks)
        for i in range(1000):
            if ranks.rank == 2 and i == 3:
                os._exit(9)
            forward(own, case.rows(2), torch.tensor([-1, -1]), [])

    began = time.monotonic()
    found = outcomes(4, tmp_path, work, 60.0)
    assert time.monotonic() - began < 30
    assert found[2] == (False, 9)
    assert all("RanksLost: rank" in found[rank][1] and "lost the others" in found[rank][1] for rank in (0, 1, 3))


def test_a_port_that_is_taken_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1 is used.*MASTER_PORT"):
            Ranks.join(0, 2, ("127.0.0.1", port, True), 60.0)


@pytest.mark.liveness
def test_a_silent_rank_is_given_up(tmp_path: Path):
    """After `timeout_s`, here two seconds."""

    given_up = tmp_path / "given up"

    def work(ranks: Ranks) -> float:
        began = time.monotonic()
        if ranks.rank == 1:
            while not given_up.exists() and time.monotonic() - began < 8:
                time.sleep(0.01)
            return 0.0
        with pytest.raises(RunError, match="silent for 2 s"):
            ranks.barrier()
        given_up.touch()
        raise TimeoutError(time.monotonic() - began)

    (_, told), _ = outcomes(2, tmp_path, work, 2.0)
    waited = float(re.findall(r"TimeoutError: ([\d.]+)", told)[0])
    assert 1 < waited < 7
