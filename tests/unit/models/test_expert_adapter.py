"""Names and shapes of adapters on experts: stacked inside, one by one outside, shared where the layout says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.experts import EXPERTS, HIDDEN, PREFIX, WIDTH, make_case
from tithe.errors import AdapterError
from tithe.lora import LoraSpec, module_of
from tithe.models.expert_adapter import (
    ExpertAdapter,
    expert_sites,
    init_tensors,
    site_rank,
    split_experts,
    stack_experts,
    tensor_shapes,
)

SPEC = LoraSpec(r=4, alpha=8)
SITES = expert_sites(f"{PREFIX}.experts.{{expert}}", WIDTH, HIDDEN)
LONG = f"base_model.model.{PREFIX}.experts"


def shapes(layout: Any) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for site in SITES:
        out |= tensor_shapes(site, EXPERTS, HIDDEN if site.place == "gate_up" else WIDTH, 4, layout)
    return out


def test_every_expert_has_its_own_pair() -> None:
    assert shapes("per_expert") == {
        f"{LONG}.{{expert}}.gate_proj.lora_A.weight": (EXPERTS, 4, HIDDEN),
        f"{LONG}.{{expert}}.gate_proj.lora_B.weight": (EXPERTS, WIDTH, 4),
        f"{LONG}.{{expert}}.up_proj.lora_A.weight": (EXPERTS, 4, HIDDEN),
        f"{LONG}.{{expert}}.up_proj.lora_B.weight": (EXPERTS, WIDTH, 4),
        f"{LONG}.{{expert}}.down_proj.lora_A.weight": (EXPERTS, 4, WIDTH),
        f"{LONG}.{{expert}}.down_proj.lora_B.weight": (EXPERTS, HIDDEN, 4),
    }


def test_the_outer_matrices_are_shared() -> None:
    assert shapes("shared_outer") == {
        f"{LONG}.gate_proj.lora_A.weight": (4, HIDDEN),
        f"{LONG}.{{expert}}.gate_proj.lora_B.weight": (EXPERTS, WIDTH, 4),
        f"{LONG}.up_proj.lora_A.weight": (4, HIDDEN),
        f"{LONG}.{{expert}}.up_proj.lora_B.weight": (EXPERTS, WIDTH, 4),
        f"{LONG}.{{expert}}.down_proj.lora_A.weight": (EXPERTS, 4, WIDTH),
        f"{LONG}.down_proj.lora_B.weight": (HIDDEN, 4),
    }


def test_a_fused_site_takes_all_outputs() -> None:
    sites = expert_sites("m.experts.{expert}", WIDTH, HIDDEN, ("gate_up_proj", "down_proj"))
    assert [(s.module, s.start, s.stop) for s in sites] == [
        ("m.experts.{expert}.gate_up_proj", 0, 2 * WIDTH),
        ("m.experts.{expert}.down_proj", 0, HIDDEN),
    ]


def test_fresh_tensors_change_nothing_and_fill_their_range() -> None:
    drawn = init_tensors(shapes("shared_outer"), torch.Generator().manual_seed(0))
    again = init_tensors(shapes("shared_outer"), torch.Generator().manual_seed(0))
    for name, tensor in drawn.items():
        assert torch.equal(tensor, again[name])
        assert tuple(tensor.shape) == shapes("shared_outer")[name]
        bound = 0.0 if "lora_B" in name else tensor.shape[-1] ** -0.5
        assert float(tensor.abs().max()) == pytest.approx(bound, rel=0.05)


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_experts_come_back_from_single_tensors(layout: Any) -> None:
    tensors = make_case(shared=True).tensors(SPEC, layout)
    single = split_experts(tensors)
    modules = {module_of(name) for name in single}
    assert f"{PREFIX}.experts.5.up_proj" in modules
    assert all("{" not in str(module) for module in modules)
    assert all(tensor.ndim == 2 for tensor in single.values())
    back = stack_experts(single)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_shared_tensors_can_be_repeated_and_found_again() -> None:
    """A program that knows no sharing gets a pair for every expert, which computes the same."""
    case = make_case()
    shared = case.tensors(SPEC, "shared_outer")
    repeated = split_experts(shared, repeat=EXPERTS)
    assert len(repeated) == 6 * EXPERTS
    assert stack_experts(repeated, share=True).keys() == shared.keys()
    x = case.rows(20)
    a, b = (case.adapter(t, SPEC) for t in (shared, stack_experts(repeated)))
    assert torch.equal(case.forward(x, [(0, 20, a)])[0], case.forward(x, [(0, 20, b)])[0])


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_fresh_adapters_keep_their_layout(layout: Any) -> None:
    """A fresh B is zero for every expert, which does not make it shared; its block's A tells."""
    fresh = init_tensors(shapes(layout), torch.Generator().manual_seed(0))
    assert stack_experts(split_experts(fresh, repeat=EXPERTS), share=True).keys() == fresh.keys()


def test_only_whole_blocks_are_taken_for_shared() -> None:
    own = make_case().tensors(SPEC)
    name = f"{LONG}.{{expert}}.gate_proj.lora_A.weight"
    mixed = own | {name: own[name][:1].expand(EXPERTS, -1, -1)}
    assert stack_experts(split_experts(mixed), share=True).keys() == own.keys()


def test_sharing_keeps_fewer_bytes() -> None:
    case = make_case()
    own, shared = (case.adapter(case.tensors(SPEC, layout), SPEC).routed for layout in ("per_expert", "shared_outer"))
    assert own is not None
    assert shared is not None
    # one float32 panel of 48 rows per started 48; the A of both parts of gate_up lie one below the other
    assert own.n_bytes == 4 * 48 * (HIDDEN + 4 * (4 + 4) + WIDTH + 8 * 4)
    assert shared.n_bytes == 4 * 48 * (HIDDEN + 4 * (4 + 4) + WIDTH + 2 * 4)


def test_experts_with_gaps_or_other_shapes_are_refused() -> None:
    single = split_experts(make_case().tensors(SPEC))
    name = f"{LONG}.2.up_proj.lora_A.weight"
    with pytest.raises(AdapterError, match="numbered from 0"):
        stack_experts({n: t for n, t in single.items() if n != name})
    with pytest.raises(AdapterError, match="one shape"):
        stack_experts(single | {name: torch.zeros(5, HIDDEN)})


def test_one_rank_for_all_experts_of_a_linear() -> None:
    assert site_rank(SITES[0], EXPERTS, LoraSpec(r=4, alpha=8, rank_pattern={"gate_proj": 6})) == 6
    with pytest.raises(AdapterError, match="rank_pattern"):
        site_rank(SITES[0], EXPERTS, LoraSpec(r=4, alpha=8, rank_pattern={"experts.3.gate_proj": 6}))
    tensors = make_case().tensors(SPEC)
    with pytest.raises(AdapterError, match="alpha_pattern"):
        ExpertAdapter.build(
            SITES, EXPERTS, tensors, LoraSpec(r=4, alpha=8, alpha_pattern={"experts.3.gate_proj": 1}), torch.float32
        )


def test_half_shared_neighbours_are_refused() -> None:
    case = make_case()
    tensors = case.tensors(SPEC, parts=("gate",)) | case.tensors(SPEC, "shared_outer", parts=("up",))
    with pytest.raises(AdapterError, match="both be shared"):
        case.adapter(tensors, SPEC)


def test_no_tensors_no_adapter() -> None:
    assert ExpertAdapter.build(SITES, EXPERTS, {}, SPEC, torch.float32) is None
