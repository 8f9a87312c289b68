"""Expert blocks: transformers' answers, autograd's gradients, and rows that are their own whatever the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from support.experts import (
    EXPERTS,
    HIDDEN,
    PER_TOKEN,
    ROUTERS,
    WIDTH,
    Case,
    exact_gradients,
    generator,
    make_case,
    relative,
)
from tithe.lora import LoraSpec
from tithe.models.expert_bank import GPT_OSS
from tithe.models.routing import Router

SPEC = LoraSpec(r=4, alpha=8)
R = 40
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = ("per_expert", "shared_outer")
each_router = pytest.mark.parametrize("router", ROUTERS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def direction(rows: int, seed: int = 9) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=generator(seed))


def assert_exact(
    case: Case, layout: Any = "per_expert", spec: LoraSpec = SPEC, limits: tuple[float, float] = (1e-5,) * 2
):
    """Forward and d_x within limits[0], adapter gradients within limits[1], relative to the largest."""
    x, d_out, tensors = case.rows(R), direction(R), case.tensors(spec, layout)
    adapter = case.adapter(tensors, spec)
    out, routed = case.forward(x, [(0, R, adapter)])
    exact, exact_d_x, exact_grads = exact_gradients(case, x, routed.ids, d_out, tensors, spec)
    d_x, grads = case.backward(x, routed, d_out, adapter, tensors)
    assert grads.keys() == tensors.keys()
    assert relative(out, exact) < limits[0]
    assert relative(d_x, exact_d_x) < limits[0]
    for name, expected in exact_grads.items():
        assert grads[name].shape == tensors[name].shape
        assert relative(grads[name], expected) < limits[1], name


# ------------------------------------------------------------------ against the definition


@each_layout
@each_router
@pytest.mark.parametrize("kind", ["fp32", "int4-exact", "int8"])
def test_float32_blocks_and_gradients_are_exact(kind: str, router: str, layout: str) -> None:
    assert_exact(make_case(kind, ROUTERS[router], shared=True), layout)


@each_layout
@each_router
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
def test_bf16_blocks_and_gradients_are_near(kind: str, router: str, layout: str) -> None:
    """Measured: 0.2 to 0.4 % forward and d_x, 0.4 to 1.0 % adapter gradients: operands have 8 bits."""
    assert_exact(make_case(kind, ROUTERS[router], operand=BF16, shared=True), layout, limits=(8e-3, 2e-2))


@each_layout
@pytest.mark.parametrize(("operand", "limits"), [(FP32, (1e-5, 1e-5)), (BF16, (8e-3, 2e-2))])
def test_gpt_oss_blocks_with_biases(operand: torch.dtype, limits: tuple[float, float], layout: str) -> None:
    kind = "bf16" if operand == BF16 else "fp32"
    assert_exact(make_case(kind, operand=operand, biases=True, activation=GPT_OSS), layout, limits=limits)


def test_clamps_pass_no_gradient() -> None:
    case = make_case(biases=True, activation=GPT_OSS)
    x, d_out = case.rows(R) * 8, direction(R)
    out, routed = case.forward(x)
    exact, exact_d_x, _ = exact_gradients(case, x, routed.ids, d_out, {}, SPEC)
    d_x, _ = case.backward(x, routed, d_out)
    hidden = x @ case.routed["gate_up"].flatten(0, 1).T
    assert (hidden > GPT_OSS.limit).any()
    assert (hidden < -GPT_OSS.limit).any()
    assert relative(out, exact) < 1e-5
    assert relative(d_x, exact_d_x) < 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        LoraSpec(r=3, alpha=8),
        LoraSpec(r=50, alpha=8, use_rslora=True),
        LoraSpec(
            r=4, alpha=8, rank_pattern={"up_proj": 7, "shared_experts.down_proj": 2}, alpha_pattern={"gate_proj": 3}
        ),
    ],
    ids=["odd-rank", "rank-over-a-panel", "patterns"],
)
@each_layout
def test_any_rank_has_exact_gradients(spec: LoraSpec, layout: str) -> None:
    assert_exact(make_case(shared=True), layout, spec)


def test_an_odd_number_of_experts() -> None:
    assert_exact(make_case(router=Router(5, 3)))


@pytest.mark.parametrize("parts", [("gate",), ("up",), ("down",), ("gate", "down")])
def test_any_selection_of_linears_has_exact_gradients(parts: tuple[str, ...]) -> None:
    case = make_case(shared=True)
    x, d_out, tensors = case.rows(R), direction(R), case.tensors(SPEC, parts=parts)
    adapter = case.adapter(tensors, SPEC)
    out, routed = case.forward(x, [(0, R, adapter)])
    exact, exact_d_x, exact_grads = exact_gradients(case, x, routed.ids, d_out, tensors, SPEC)
    d_x, grads = case.backward(x, routed, d_out, adapter, tensors)
    assert relative(out, exact) < 1e-5
    assert relative(d_x, exact_d_x) < 1e-5
    assert all(relative(grads[name], expected) < 1e-5 for name, expected in exact_grads.items())


def test_without_an_adapter_the_input_gradient_is_exact() -> None:
    case = make_case(shared=True)
    x, d_out = case.rows(R), direction(R)
    out, routed = case.forward(x)
    exact, exact_d_x, _ = exact_gradients(case, x, routed.ids, d_out, {}, SPEC)
    assert relative(out, exact) < 1e-5
    assert relative(case.backward(x, routed, d_out)[0], exact_d_x) < 1e-5


def test_the_gradient_through_the_router_is_there() -> None:
    """Without it the input gradient would be wrong by far more than rounding."""
    case = make_case()
    x, d_out = case.rows(R), direction(R)
    _, routed = case.forward(x)
    leaf = x.double().requires_grad_()
    detached = make_case()
    out = torch.zeros(R, HIDDEN, dtype=torch.float64)
    for e in range(EXPERTS):
        rows, slot = (routed.ids == e).nonzero(as_tuple=True)
        y = detached._expert(leaf[rows], e, case.routed, case.block.routed, {}, None)
        out = out.index_add(0, rows, y * routed.weights.double()[rows, slot, None])
    out.backward(d_out.double())
    assert leaf.grad is not None
    assert relative(case.backward(x, routed, d_out)[0], leaf.grad) > 1e-2


@each_layout
def test_finite_differences_of_the_blocks_own_forward(layout: Any) -> None:
    case, step = make_case(router=ROUTERS["sigmoid-groups"], shared=True), 1e-2
    x, d_out, tensors = case.rows(R), direction(R), case.tensors(SPEC, layout)
    _, routed = case.forward(x, [(0, R, case.adapter(tensors, SPEC))])
    d_x, grads = case.backward(x, routed, d_out, case.adapter(tensors, SPEC), tensors)

    def loss(rows: Tensor, changed: Mapping[str, Tensor]) -> float:
        out, _ = case.forward(rows, [(0, R, case.adapter(changed, SPEC))], replay=routed.ids)
        return float((out.double() * d_out).sum())

    def moved(t: Tensor, at: int, by: float) -> Tensor:
        other = t.clone()
        other.view(-1)[at] += by
        return other

    for name, gradient in grads.items():
        at = int(gradient.abs().flatten().argmax())
        ends = [loss(x, tensors | {name: moved(tensors[name], at, by)}) for by in (step, -step)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(gradient.flatten()[at]), rel=5e-3), name
    for at in (3, 700, R * HIDDEN - 1):
        ends = [loss(moved(x, at, by), tensors) for by in (step, -step)]
        expected = float(d_x.flatten()[at])
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=5e-3, abs=2e-3)


# ------------------------------------------------------------------ transformers


def test_a_qwen3_block_answers_as_transformers() -> None:
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
    )  # fmt: skip
    case, theirs = make_case(), Qwen3MoeSparseMoeBlock(config)
    assert_same(case, theirs, {"gate.weight": case.gate, **stacked(case)})


def test_a_deepseek_block_answers_as_transformers() -> None:
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    router = ROUTERS["sigmoid-groups"]
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=PER_TOKEN,
        n_group=router.groups, topk_group=router.groups_chosen, routed_scaling_factor=router.scale, n_shared_experts=2,
    )  # fmt: skip
    case = make_case(router=router, shared=True)
    assert case.shared is not None
    assert case.block.correction is not None
    gate, up = case.shared["gate_up"][0].chunk(2)
    shared = {"gate_proj": gate, "up_proj": up, "down_proj": case.shared["down"][0]}
    state = {"gate.weight": case.gate, "gate.e_score_correction_bias": case.block.correction, **stacked(case)}
    state |= {f"shared_experts.{name}.weight": w for name, w in shared.items()}
    assert_same(case, DeepseekV3MoE(config), state)


def test_a_gpt_oss_block_answers_as_transformers() -> None:
    from transformers.models.gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN
    )
    case = make_case(biases=True, activation=GPT_OSS)
    assert case.block.gate_bias is not None
    state = {name.replace("_bias", "_proj_bias"): w for name, w in case.routed.items() if name.endswith("bias")}
    state |= {f"{name}_proj": case.routed[name].transpose(1, 2) for name in ("gate_up", "down")}
    router = {"router.weight": case.gate, "router.bias": case.block.gate_bias}
    assert_same(case, GptOssMLP(config), router | {f"experts.{name}": w for name, w in state.items()})


def stacked(case: Case) -> dict[str, Tensor]:
    return {f"experts.{name}_proj": case.routed[name] for name in ("gate_up", "down")}


def assert_same(case: Case, module: Any, state: Mapping[str, Tensor]) -> None:
    module.load_state_dict(state)
    x = case.rows(R)
    with torch.no_grad():
        theirs = module(x[None])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert relative(case.forward(x)[0], theirs.reshape(R, HIDDEN)) < 2e-6
