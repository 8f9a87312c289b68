"""Pages of cached keys and values: who holds them, how a prompt is shared, where a micro-batch's rows live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.decoders import BF16, FP32, tiny_decoder
from tithe.errors import EngineError
from tithe.models.kv import PAGE, KVPages, PageAllocator
from tithe.models.layout import page_layout
from tithe.models.options import ModelOptions
from tithe.packing import MicroBatch, pad_rows, plan_micro_batches
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

# ------------------------------------------------------------------ the allocator


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60))
def test_a_page_is_free_exactly_when_nobody_holds_it(actions: list[tuple[int, int]]) -> None:
    pool = PageAllocator(9)
    holders: list[list[int]] = []
    held: set[int] = set()
    for action, number in actions:
        if action == 0 and number <= pool.free:
            holders.append(pool.take(number))
        elif action == 1 and holders:
            shared = holders[number % len(holders)]
            pool.share(shared)
            holders.append(list(shared))
        elif action == 2 and holders:
            pool.release(holders.pop(number % len(holders)))
        held = {page for pages in holders for page in pages}
        assert pool.free == pool.total - len(held)
    fresh = pool.take(pool.free)
    assert held.isdisjoint(fresh)
    assert all(0 <= page < 9 for page in fresh)
    assert len(set(fresh)) == len(fresh)


def test_taking_more_than_is_free_takes_nothing_and_says_the_numbers() -> None:
    pool = PageAllocator(4)
    pool.take(3)
    with pytest.raises(EngineError, match="2 KV pages wanted, 1 of 4 are free"):
        pool.take(2)
    assert pool.free == 1


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("options", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("slots", [1, 7, 15, 16])
def test_a_fork_copies_the_first_slots_of_a_page_in_every_layer(
    tmp_path: Path, options: ModelOptions, slots: int
) -> None:
    spec = tiny_decoder(tmp_path / "m", "llama", options).spec
    pages = KVPages(spec, 5, options.operand_dtype)
    generator = torch.Generator().manual_seed(0)
    for t in (pages.keys, pages.values):
        t.copy_(torch.randn(t.shape, generator=generator))
    keys, values = pages.keys.clone(), pages.values.clone()
    pages.fork([1, 4], [3, 0], [slots, slots])
    for source, target in ((1, 3), (4, 0)):
        keys[target, :, :, :, :slots] = keys[source, :, :, :, :slots]
        values[target, :, :, :slots] = values[source, :, :, :slots]
    assert torch.equal(pages.keys, keys)
    assert torch.equal(pages.values, values)


@pytest.mark.parametrize("options", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("slots", [1, 7, 15, 16])
def test_a_fork_copies_latents(tmp_path: Path, options: ModelOptions, slots: int) -> None:
    pages = KVPages(tiny_decoder(tmp_path / "m", "deepseek_v3", options).spec, 5, options.operand_dtype)
    pages.keys.copy_(torch.randn(pages.keys.shape, generator=torch.Generator().manual_seed(0)))
    expected = pages.keys.clone()
    one_layer = expected.clone()
    pages.fork_step(1, *(torch.tensor([n], dtype=torch.int32) for n in (1, 3, slots))).run()
    one_layer[3, 1, :slots] = one_layer[1, 1, :slots]
    assert torch.equal(pages.keys, one_layer)
    pages.fork([1, 4], [3, 0], [slots, slots])
    for source, target in ((1, 3), (4, 0)):
        expected[target, :, :slots] = expected[source, :, :slots]
    assert torch.equal(pages.keys, expected)
    assert torch.equal(pages.values, expected[..., :32])


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_page_bytes_are_what_pages_take(tmp_path: Path, architecture: str) -> None:
    spec = tiny_decoder(tmp_path / "m", architecture).spec
    for dtype in (torch.bfloat16, torch.float32):
        pages = KVPages(spec, 7, dtype)
        assert pages.n_bytes == 7 * KVPages.page_bytes(spec, dtype)
        assert not pages.keys.any()
        assert not pages.values.any()


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_memory_given_back_is_zeros_and_the_rest_stays(tmp_path: Path, architecture: str) -> None:
    pages = KVPages(tiny_decoder(tmp_path / "m", architecture, FP32).spec, 64, torch.float32)
    for t in (pages.keys, pages.values):
        t.fill_(1.0)
    kept = [0, 7, 31, 32, 63]
    pages.give_back([page for page in range(64) if page not in kept])
    for t in (pages.keys, pages.values):
        assert all(bool((t[page] == 1.0).all()) for page in kept)
        assert bool(((t == 0.0) | (t == 1.0)).all())
        assert float((t == 0.0).float().mean()) > 0.5, "whole system pages inside went back"


# ------------------------------------------------------------------ the layout of a micro-batch


def micro_batch(prompts: list[int], completions: list[list[int]]) -> MicroBatch:
    """One group for each prompt length, with rollouts of these lengths."""

    def rollout(sample: int, n: int) -> Rollout:
        zeros = np.zeros(n, np.float32)
        ids = np.full(n, 5, np.int32)
        return Rollout(sample, ids, np.ones(n, bool), zeros, zeros, ids, 1.0, FinishReason.STOP)

    groups = [
        RolloutGroup(g, str(g), np.full(p, 4, np.int32), tuple(rollout(i, n) for i, n in enumerate(lengths)), 0, 0)
        for g, (p, lengths) in enumerate(zip(prompts, completions, strict=True))
    ]
    advantages = [[np.ones(len(r.token_ids), np.float32) for r in g.rollouts] for g in groups]
    (micro,) = plan_micro_batches(TrainingBatch(groups, advantages, 0), 100_000)
    return micro


lengths = st.integers(1, 40)


@given(st.lists(st.tuples(lengths, st.lists(lengths, min_size=1, max_size=4)), min_size=1, max_size=3))
def test_every_position_of_every_sequence_has_one_slot(groups: list[tuple[int, list[int]]]) -> None:
    """Replay the writes and forks on a model of the pages: each row finds its whole past, and nobody else's."""
    micro = micro_batch([p for p, _ in groups], [n for _, n in groups])
    layout = page_layout(micro)
    slots: dict[tuple[int, int], tuple[int, int]] = {}  # (page, slot) → (segment, position)
    table = layout.table.numpy()

    def write(segment: int) -> None:
        for p in range(int(layout.first[segment]), int(layout.first[segment] + layout.length[segment])):
            place = (int(table[segment, p // PAGE]), p % PAGE)
            assert place[0] < layout.pages
            assert slots.setdefault(place, (segment, p)) == (segment, p), "nobody writes to another's slot"

    prompts = [s for s in range(layout.sequences) if layout.prefix[s] < 0]
    for s in prompts:
        write(s)
    forks = zip(layout.fork_source.tolist(), layout.fork_target.tolist(), layout.fork_slots.tolist(), strict=True)
    for source, target, count in forks:
        for slot in range(count):
            slots[target, slot] = slots[source, slot]
    for s in range(layout.sequences):
        if s in prompts:
            continue
        write(s)
        prompt, first = int(layout.prefix[s]), int(layout.first[s])
        for p in range(first + int(layout.length[s])) if layout.length[s] else ():
            assert slots[int(table[s, p // PAGE]), p % PAGE] == ((prompt, p) if p < first else (s, p))
    assert layout.positions == int((layout.first + layout.length).max())


def test_segments_and_positions_are_the_micro_batchs_rows() -> None:
    micro = pad_rows(micro_batch([18, 3], [[4, 1], [2]]), 8)
    layout = page_layout(micro)
    assert layout.segment.tolist() == [0] * 18 + [1] * 3 + [3] * 3 + [4] * 1 + [-1] * (len(micro.input_ids) - 25)
    assert layout.first.tolist() == [0, 18, 18, 0, 3]
    assert layout.length.tolist() == [18, 3, 0, 3, 1]
    assert layout.fork_slots.tolist() == [2, 3], "a rollout of one token has no row, hence no fork"
    np.testing.assert_array_equal(layout.position.numpy(), micro.positions)
