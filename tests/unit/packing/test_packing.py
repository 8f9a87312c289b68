"""Packing against a slow unpacker that walks rows one by one."""

from __future__ import annotations

import dataclasses
import doctest
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tithe.packing.layout
from tithe.errors import DataError
from tithe.packing import MicroBatch, pad_rows, plan_micro_batches
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch


def make_rollout(sample: int, ids: list[int], mask: list[bool] | None = None, temperature: float = 1.0) -> Rollout:
    n = len(ids)
    return Rollout(
        sample=sample,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array([True] * n if mask is None else mask, np.bool_),
        logp=(-np.array(ids) / 7).astype(np.float32),
        logp_behaviour=np.zeros(n, np.float32),
        serials=np.zeros(n, np.int32),
        temperature=temperature,
        finish=FinishReason.STOP,
    )


def make_batch(groups: list[tuple[list[int], list[Rollout]]], untrained: frozenset[tuple[int, int]]) -> TrainingBatch:
    packed = [
        RolloutGroup(g, f"p{g}", np.array(prompt, np.int32), tuple(rollouts), 0, 0)
        for g, (prompt, rollouts) in enumerate(groups)
    ]
    advantages = [
        [
            None if (g, r) in untrained else (np.arange(len(one.token_ids)) + 100 * g + 10 * r).astype(np.float32)
            for r, one in enumerate(group.rollouts)
        ]
        for g, group in enumerate(packed)
    ]
    return TrainingBatch(packed, advantages, serial=3)


@st.composite
def batches(draw: st.DrawFn) -> TrainingBatch:
    token = st.integers(0, 50)
    groups = []
    for _ in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        rollouts = []
        for sample in range(draw(st.integers(0, 4))):
            ids = draw(st.lists(token, max_size=7))
            mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            rollouts.append(make_rollout(sample, ids, mask, draw(st.sampled_from([0.5, 1.0]))))
        groups.append((prompt, rollouts))
    pairs = [(g, r) for g, (_, rollouts) in enumerate(groups) for r in range(len(rollouts))]
    untrained = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    return make_batch(groups, untrained)


def context_of_row(micro: MicroBatch, row: int) -> list[tuple[int, int]]:
    """(position, token) that `row` attends to, itself included, found by walking the segments."""
    for start, length, prefix in zip(micro.seg_start, micro.seg_len, micro.seg_prefix, strict=True):
        if start <= row < start + length:
            rows = list(range(start, row + 1))
            if prefix >= 0:
                first = micro.seg_start[prefix]
                rows = list(range(first, first + micro.seg_len[prefix])) + rows
            return [(int(micro.positions[r]), int(micro.input_ids[r])) for r in rows]
    raise AssertionError(f"row {row} lies in no segment")


def unpack(micro: MicroBatch) -> list[tuple[int, int, int, list[int], int, float, float, bool, float]]:
    """Each target as (group, rollout, index, context tokens, id, old_logp, advantage, mask, temperature)."""
    seen: Counter[int] = Counter()
    out = []
    for n, row in enumerate(micro.target_rows):
        seq = int(micro.seq_index[n])
        context = context_of_row(micro, int(row))
        assert [position for position, _ in context] == list(range(len(context)))
        out.append(
            (
                int(micro.seq_group[seq]),
                int(micro.seq_rollout[seq]),
                seen[seq],
                [token for _, token in context],
                int(micro.target_ids[n]),
                float(micro.old_logp[n]),
                float(micro.advantage[n]),
                bool(micro.loss_mask[n]),
                float(micro.temperature[n]),
            )
        )
        seen[seq] += 1
    return out


def expected_targets(batch: TrainingBatch) -> list[tuple[int, int, int, list[int], int, float, float, bool, float]]:
    out = []
    for g, group in enumerate(batch.groups):
        for r, one in enumerate(group.rollouts):
            advantage = batch.advantages[g][r]
            if advantage is None or not one.loss_mask.any():
                continue
            for t, token in enumerate(one.token_ids):
                context = [*group.prompt_ids.tolist(), *one.token_ids[:t].tolist()]
                numbers = (float(one.logp[t]), float(advantage[t]), bool(one.loss_mask[t]), one.temperature)
                out.append((g, r, t, context, int(token), *numbers))
    return out


@settings(max_examples=120, deadline=None)
@given(batch=batches(), budget=st.integers(1, 40))
def test_every_trained_token_once_with_its_own_context(batch: TrainingBatch, budget: int) -> None:
    micros = plan_micro_batches(batch, budget)
    found = sorted(target for micro in micros for target in unpack(micro))
    assert found == sorted(expected_targets(batch))


@settings(max_examples=120, deadline=None)
@given(batch=batches(), budget=st.integers(1, 40))
def test_segments_cover_the_rows_and_the_budget_holds(batch: TrainingBatch, budget: int) -> None:
    for micro in plan_micro_batches(batch, budget):
        covered = [r for a, n in zip(micro.seg_start, micro.seg_len, strict=True) for r in range(a, a + n)]
        assert covered == list(range(len(micro.input_ids)))
        assert micro.n_rows == len(micro.input_ids)
        assert micro.n_rows <= budget or micro.n_seqs == 1
        prompts = micro.seg_prefix == -1
        assert prompts.sum() == len(set(micro.seq_group.tolist()))
        assert (~prompts).sum() == micro.n_seqs
        assert micro.seq_index.max() == micro.n_seqs - 1


@settings(max_examples=40, deadline=None)
@given(batch=batches(), budget=st.integers(1, 40))
def test_equal_batches_give_equal_plans(batch: TrainingBatch, budget: int) -> None:
    for one, other in zip(plan_micro_batches(batch, budget), plan_micro_batches(batch, budget), strict=True):
        for field in fields(MicroBatch):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name))


def test_dtypes_are_the_documented_ones() -> None:
    sampled = dataclasses.replace(make_rollout(0, [3, 4]), experts=np.zeros((3, 2, 1), np.uint16))
    (micro,) = plan_micro_batches(make_batch([([1, 2], [sampled])], frozenset()), 100)
    found = {field.name: getattr(micro, field.name) for field in fields(MicroBatch)}
    assert {name: str(values.dtype) for name, values in found.items() if values is not None} == {
        "input_ids": "int64",
        "positions": "int32",
        "seg_start": "int32",
        "seg_len": "int32",
        "seg_prefix": "int32",
        "target_rows": "int64",
        "target_ids": "int64",
        "old_logp": "float32",
        "advantage": "float32",
        "loss_mask": "bool",
        "temperature": "float32",
        "seq_index": "int64",
        "seq_group": "int32",
        "seq_rollout": "int32",
        "experts": "int32",
        "behaviour_logp": "float32",
    }


def test_whole_group_shares_one_prompt_and_a_split_one_repeats_it() -> None:
    rollouts = [make_rollout(r, [10 + r] * 5) for r in range(4)]
    batch = make_batch([([1, 2, 3], rollouts)], frozenset())
    (whole,) = plan_micro_batches(batch, 3 + 4 * 4)
    assert whole.n_rows == 19
    halves = plan_micro_batches(batch, 18)
    assert [micro.n_rows for micro in halves] == [11, 11]
    assert all(micro.input_ids[:3].tolist() == [1, 2, 3] for micro in halves)


def test_rollout_above_the_budget_rides_alone() -> None:
    batch = make_batch([([1, 2], [make_rollout(0, [5] * 30), make_rollout(1, [6] * 3)])], frozenset())
    big, small = plan_micro_batches(batch, 10)
    assert (big.n_rows, big.n_seqs) == (31, 1)
    assert (small.n_rows, small.n_seqs) == (4, 1)


def test_sizes_are_balanced() -> None:
    groups = [([1], [make_rollout(0, [2] * n)]) for n in (20, 19, 11, 10, 9, 8, 2, 1)]
    sizes = [micro.n_rows for micro in plan_micro_batches(make_batch(groups, frozenset()), 42)]
    assert sizes == [40, 40]


def test_tool_tokens_ride_along_untrained() -> None:
    """C13: ids model, tool, tool, model."""
    batch = make_batch([([1], [make_rollout(0, [3, 4, 5, 6], [True, False, False, True])])], frozenset())
    (micro,) = plan_micro_batches(batch, 64)
    assert micro.loss_mask.tolist() == [True, False, False, True]
    assert micro.n_trained_tokens == 2
    assert micro.input_ids.tolist() == [1, 3, 4, 5]


def test_end_token_inside_the_prompt_is_computed_and_the_last_one_trained() -> None:
    """C09: identity of tokens never decides about masks."""
    batch = make_batch([([7, 2, 8], [make_rollout(0, [5, 9, 2])])], frozenset())
    (micro,) = plan_micro_batches(batch, 64)
    assert micro.input_ids.tolist() == [7, 2, 8, 5, 9]
    assert micro.target_ids.tolist() == [5, 9, 2]
    assert micro.loss_mask.all()


def test_nothing_to_train_gives_no_micro_batch() -> None:
    masked = make_rollout(0, [3, 4], [False, False])
    batch = make_batch([([1], [masked, make_rollout(1, [5])])], frozenset({(0, 1)}))
    assert plan_micro_batches(batch, 64) == []
    assert plan_micro_batches(TrainingBatch([], [], 0), 64) == []


def test_padding_rows_touch_nothing() -> None:
    batch = make_batch([([1, 2], [make_rollout(0, [3, 4, 5, 6])])], frozenset())
    (micro,) = plan_micro_batches(batch, 64)
    padded = pad_rows(micro, 8, token_id=9)
    assert padded.input_ids.tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert padded.n_rows == micro.n_rows == 5
    assert padded.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert unpack(padded) == unpack(micro)
    assert pad_rows(padded, 4) is padded
    with pytest.raises(ValueError, match="at least 1"):
        pad_rows(micro, 0)


def test_experts_follow_their_rows_and_a_prompt_takes_those_of_its_first_rollout() -> None:
    def taken(rows: int, of: int) -> np.ndarray:
        return (100 * of + np.arange(rows * 2).reshape(rows, 2, 1)).astype(np.uint16)  # [rows, 2 layers, 1 of them]

    known = [
        dataclasses.replace(make_rollout(s, ids), experts=taken(2 + len(ids) - 1, s + 1))
        for s, ids in enumerate([[5, 6, 7], [8]])
    ]
    unknown = make_rollout(0, [9, 10])
    micros = plan_micro_batches(make_batch([([1, 2], known), ([3], [unknown])], frozenset()), 100)
    micro = pad_rows(micros[0], 8)
    assert micro.experts is not None
    assert micro.input_ids.tolist() == [1, 2, 5, 6, 3, 9, 0, 0]
    assert micro.experts[:, :, 0].tolist() == [[100, 101], [102, 103], [104, 105], [106, 107], *[[-1, -1]] * 4]
    (plain,) = plan_micro_batches(make_batch([([3], [unknown])], frozenset()), 100)
    assert plain.experts is None


def test_bad_input_is_named() -> None:
    good = make_rollout(0, [3, 4])
    with pytest.raises(ValueError, match="at least one row"):
        plan_micro_batches(make_batch([([1], [good])], frozenset()), 0)
    with pytest.raises(DataError, match="'p0' has no tokens"):
        plan_micro_batches(make_batch([([], [good])], frozenset()), 8)
    with pytest.raises(ValueError, match=r"rollout 0 of group 0 has 2 tokens but \{'loss_mask': 1\}"):
        plan_micro_batches(make_batch([([1], [make_rollout(0, [3, 4], [True])])], frozenset()), 8)
    group = RolloutGroup(0, "p", np.array([1], np.int32), (good,), 0, 0)
    with pytest.raises(ValueError, match=r"\[1\] rollouts but \[0\]"):
        plan_micro_batches(TrainingBatch([group], [[]], 0), 8)


def test_worked_example() -> None:
    assert doctest.testmod(tithe.packing.layout).failed == 0
