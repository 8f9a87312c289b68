"""A row of an expert block is its own whatever the batch; who goes where; what is added, and in which buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.experts import EXPERTS, HIDDEN, PER_TOKEN, ROUTERS, WIDTH, exact_gradients, generator, make_case, relative
from tithe.lora import LoraSpec
from tithe.models.expert_bank import BlockAdapter
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_training import BlockGradients, expert_backward
from tithe.models.expert_workspace import backward_buffers, forward_buffers
from tithe.quant import HAS_BF16_DOT, set_threads

SPEC = LoraSpec(r=4, alpha=8)
R = 40
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = ("per_expert", "shared_outer")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_mode = pytest.mark.parametrize(
    ("kind", "operand"),
    [("fp32", FP32), ("int4-exact", FP32), ("int8", FP32), ("int4", BF16), ("bf16", BF16)],
    ids=["fp32", "int4-exact", "int8-wide", "int4-bf16", "bf16"],
)


def direction(rows: int, seed: int = 9) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=generator(seed))


# ------------------------------------------------------------------ a row is its own


@each_mode
@each_layout
def test_a_row_has_the_same_bits_alone_as_in_a_batch(kind: str, operand: torch.dtype, layout: Any) -> None:
    case = make_case(kind, ROUTERS["sigmoid-groups"], operand=operand, shared=True)
    adapter = case.adapter(case.tensors(SPEC, layout), SPEC)
    x = case.rows(R)
    together, routed = case.forward(x, [(0, R, adapter)])
    for r in range(R):
        alone, one = case.forward(x[r : r + 1], [(0, 1, adapter)])
        assert torch.equal(alone[0], together[r])
        assert torch.equal(one.ids[0], routed.ids[r])


@each_mode
def test_input_gradients_have_the_same_bits_alone(kind: str, operand: torch.dtype) -> None:
    case = make_case(kind, operand=operand, shared=True)
    tensors = case.tensors(SPEC)
    adapter, x, d_out = case.adapter(tensors, SPEC), case.rows(R), direction(R)
    _, routed = case.forward(x, [(0, R, adapter)])
    together, _ = case.backward(x, routed, d_out, adapter, tensors)
    for r in range(0, R, 3):
        row = slice(r, r + 1)
        _, one = case.forward(x[row], [(0, 1, adapter)])
        assert torch.equal(case.backward(x[row], one, d_out[row], adapter, tensors)[0][0], together[r])


@pytest.mark.parametrize("window", [1, 7, 64])
def test_windows_change_no_row_and_sums_only_by_rounding(window: int) -> None:
    case = make_case("int4", operand=BF16, shared=True)
    tensors = case.tensors(SPEC)
    adapter, x, d_out = case.adapter(tensors, SPEC), case.rows(R), direction(R)
    whole, routed = case.forward(x, [(0, R, adapter)])
    cut, _ = case.forward(x, [(0, R, adapter)], window=window)
    assert torch.equal(cut, whole)
    d_x, grads = case.backward(x, routed, d_out, adapter, tensors)
    cut_d_x, cut_grads = case.backward(x, routed, d_out, adapter, tensors, window=window)
    assert torch.equal(cut_d_x, d_x)
    assert all(relative(cut_grads[name], grads[name]) < 1e-6 for name in grads)


@each_mode
@each_layout
def test_threads_change_nothing(kind: str, operand: torch.dtype, layout: Any, two_threads: None) -> None:
    results = []
    for threads in (2, 1):
        set_threads(threads)
        case = make_case(kind, operand=operand, shared=True)
        tensors = case.tensors(SPEC, layout)
        adapter, x = case.adapter(tensors, SPEC), case.rows(600)
        out, routed = case.forward(x, [(0, 600, adapter)])
        d_x, grads = case.backward(x, routed, direction(600), adapter, tensors)
        results.append([out, d_x, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_of_several_adapters_share_a_batch() -> None:
    """Each row has the bits that its own adapter alone gives it; rows without one those of the base."""
    case = make_case("int4", operand=BF16, shared=True)
    layouts: tuple[Any, ...] = LAYOUTS
    adapters = [case.adapter(case.tensors(SPEC, layout, seed), SPEC) for seed, layout in enumerate(layouts)]
    x = case.rows(R)
    segments = [(0, 13, adapters[0]), (13, 20, None), (20, R, adapters[1])]
    mixed, _ = case.forward(x, segments, window=16)
    for start, stop, adapter in segments:
        alone, _ = case.forward(x[start:stop], [(0, stop - start, adapter)])
        assert torch.equal(mixed[start:stop], alone)
    assert not torch.equal(mixed, case.forward(x)[0])


# ------------------------------------------------------------------ who goes where


def chosen(ids: list[int], rows: int = R) -> Tensor:
    return torch.tensor([ids] * rows, dtype=torch.int32)


@pytest.mark.parametrize("ids", [[0, 1], [0, EXPERTS - 1], [3, 4]])
@pytest.mark.parametrize("operand", [FP32, BF16])
def test_all_rows_can_go_to_the_same_experts(ids: list[int], operand: torch.dtype) -> None:
    """The others are empty: nothing is computed for them, and their adapters have no gradient."""
    case = make_case("fp32" if operand == FP32 else "int4", operand=operand)
    x, d_out, tensors = case.rows(R), direction(R), case.tensors(SPEC)
    adapter = case.adapter(tensors, SPEC)
    out, routed = case.forward(x, [(0, R, adapter)], replay=chosen(ids))
    exact, exact_d_x, exact_grads = exact_gradients(case, x, routed.ids, d_out, tensors, SPEC)
    d_x, grads = case.backward(x, routed, d_out, adapter, tensors)
    limit = 1e-5 if operand == FP32 else 2e-2
    assert relative(out, exact) < limit
    assert relative(d_x, exact_d_x) < limit
    for name, expected in exact_grads.items():
        assert relative(grads[name], expected) < limit
        assert all(bool(grads[name][e].any()) == (e in ids) for e in range(EXPERTS))


def test_one_row_and_no_row() -> None:
    case = make_case(shared=True)
    out, routed = case.forward(case.rows(1))
    assert relative(out, case.reference(case.rows(1).double(), routed.ids)) < 1e-5
    nothing, _ = case.forward(case.rows(0))
    assert nothing.shape == (0, HIDDEN)


def test_replayed_experts_are_used_and_agreement_is_told() -> None:
    case = make_case()
    x = case.rows(R)
    own, routed = case.forward(x)
    again, replayed = case.forward(x, replay=routed.ids.clone())
    assert torch.equal(again, own)
    assert replayed.agreed() == 1.0
    other, told = case.forward(x, replay=chosen([0, 1]))
    same = (routed.ids == chosen([0, 1])).all(1)
    assert told.agreed() == int(same.sum()) / R < 1.0
    assert torch.equal(other[same], own[same])
    assert relative(other, case.reference(x.double(), chosen([0, 1]))) < 1e-5


# ------------------------------------------------------------------ sums, buffers


def test_gradients_are_added() -> None:
    case = make_case(shared=True)
    x, d_out, tensors = case.rows(R), direction(R), case.tensors(SPEC)
    adapter = case.adapter(tensors, SPEC)
    _, routed = case.forward(x, [(0, R, adapter)])
    gradients, workspace, d_x = BlockGradients.zeros(adapter), case.workspace(R), torch.zeros(R, HIDDEN)

    def named() -> dict[str, Tensor]:
        return {n: t.clone() for part in gradients.parts() for n, t in part.named(tensors).items()}

    expert_backward(case.block, workspace, x, routed, d_out, d_x, adapter, gradients)
    once, first_d_x = named(), d_x.clone()
    expert_backward(case.block, workspace, x, routed, d_out, d_x, adapter, gradients)
    assert all(relative(t, 2 * once[name]) < 1e-6 for name, t in named().items())
    assert relative(d_x, 2 * first_d_x) < 1e-6


def test_a_plan_computes_any_number_of_rows_and_forgets_adapters() -> None:
    case = make_case(operand=BF16, kind="int4", shared=True)
    adapter = case.adapter(case.tensors(SPEC), SPEC)
    x, out = case.rows(R), torch.zeros(R, HIDDEN)
    plan = ExpertPlan(case.block, case.workspace(R), x, out)
    for rows in (R, 1, 17, 0):
        for segments in ([(0, rows, adapter)], []):
            out.zero_()
            plan.rows, plan.segments = rows, segments
            plan.run()
            assert torch.equal(out[:rows], case.forward(x[:rows], segments)[0])
            assert not out[rows:].any()
    assert [len(bank._adapters) for bank in plan._banks] == [1, 1]
    plan.forget(adapter)
    assert [len(bank._adapters) for bank in plan._banks] == [0, 0]


def test_buffers_follow_the_window_not_the_batch() -> None:
    case = make_case("int4", operand=BF16)
    small, large = case.workspace(1000, window=256), case.workspace(100_000, window=256)
    assert large.n_bytes - small.n_bytes == 99_000 * (4 * EXPERTS + PER_TOKEN * 5 * 4)


def test_buffers_are_those_that_are_written_down() -> None:
    case, window = make_case("int4", operand=BF16), 32
    x, d_out, workspace = case.rows(R), direction(R), case.workspace(R, window)

    def buffers() -> int:
        return sum(b.numel() * b.element_size() for b in workspace._buffers.values())

    def written(*sizes: dict[str, tuple[int, torch.dtype]]) -> int:
        return window * sum(columns * dtype.itemsize for each in sizes for columns, dtype in each.values())

    forward = forward_buffers(HIDDEN, WIDTH, workspace.stored)
    assert buffers() == written(forward)
    _, routed = case.forward(x)
    expert_backward(case.block, workspace, x, routed, d_out, torch.zeros(R, HIDDEN))
    assert buffers() == written(forward, backward_buffers(HIDDEN, WIDTH, workspace.stored))


@pytest.mark.skipif(not HAS_BF16_DOT, reason="operands are stored as bf16 only for the dot product")
def test_bf16_operands_are_stored_as_such() -> None:
    assert make_case("int4", operand=BF16).workspace(8).stored == BF16
    assert make_case("fp32").workspace(8).stored == FP32


def test_an_empty_adapter_changes_nothing() -> None:
    case = make_case()
    x = case.rows(R)
    assert case.adapter({}, SPEC).is_empty
    assert torch.equal(case.forward(x, [(0, R, BlockAdapter())])[0], case.forward(x)[0])
    routed = case.forward(x)[1]
    assert torch.equal(
        case.backward(x, routed, direction(R), BlockAdapter(), {})[0], case.backward(x, routed, direction(R))[0]
    )
