"""Small expert blocks with their weights beside them, and the same block by its definition, for autograd.

case = make_case("int4", ROUTERS["deepseek_v3"], shared=True)
out = case.forward(x)                                   # the block's own launches
exact = case.reference(x.double(), routed.ids, tensors) # plain torch, differentiable
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tithe.lora import LoraSpec
from tithe.models.expert_adapter import ExpertAdapter, ExpertLora, expert_sites, init_tensors, site_rank, tensor_shapes
from tithe.models.expert_bank import SILU, Activation, BlockAdapter, ExpertBank, ExpertBlock
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_training import BlockGradients, expert_backward
from tithe.models.expert_workspace import Workspace
from tithe.models.routing import Routed, Router
from tithe.quant import PackedMatrix, pack_dense, pack_int4, pack_int8, stack
from tithe.quant.grouped import GroupTable
from tithe.quant.reference import quantize_int4, quantize_int8

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 6, 2, 64, 32
PREFIX = "model.layers.3.mlp"
ROUTERS = {
    "softmax": Router(EXPERTS, PER_TOKEN),
    "softmax-raw": Router(EXPERTS, PER_TOKEN, normalise=False),
    "sigmoid-groups": Router(EXPERTS, PER_TOKEN, "sigmoid", scale=2.5, groups=3, groups_chosen=2),
    "all": Router(EXPERTS, EXPERTS),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pack(kind: str, w: Tensor) -> PackedMatrix:
    """float32 [N, K] in a storage kind; `-exact` is not rounded to bf16."""
    rounded = not kind.endswith("-exact") and kind != "fp32"
    if kind.startswith("int4"):
        g = quantize_int4(w.numpy())
        assert g.zero is not None
        return pack_int4(g.q, g.scale, g.zero, rounded=rounded)
    if kind.startswith("int8"):
        g = quantize_int8(w.numpy())
        return pack_int8(g.q, g.scale, rounded=rounded)
    return pack_dense(w, rounded=rounded)


def _bank(kind: str, experts: int, width: int, activation: Activation, prefix: str, biases: bool, seed: int) -> Any:
    """A bank and its float32 weights {gate_up [E, 2I, H], down [E, H, I], …}."""
    draw = generator(seed)
    gate_up = torch.randn(experts, 2 * width, HIDDEN, generator=draw) * 0.2
    down = torch.randn(experts, HIDDEN, width, generator=draw) * 0.2
    packed = {name: stack([pack(kind, w) for w in each]) for name, each in (("gate_up", gate_up), ("down", down))}
    weights = {name: torch.stack([m.expand(torch.float32) for m in bank]) for name, bank in packed.items()}
    if biases:
        weights["gate_up_bias"] = torch.randn(experts, 2 * width, generator=draw) * 0.3
        weights["down_bias"] = torch.randn(experts, HIDDEN, generator=draw) * 0.3
    tables = {name: GroupTable.of_bank(bank) for name, bank in packed.items()}
    fused = ("gate_up_proj", "down_proj") if activation.interleaved else ("gate_proj", "up_proj", "down_proj")
    bank = ExpertBank(
        **tables,
        sites=expert_sites(prefix, width, HIDDEN, fused),
        activation=activation,
        gate_up_bias=weights.get("gate_up_bias"),
        down_bias=weights.get("down_bias"),
    )
    return bank, weights


@dataclass(frozen=True, eq=False)
class Case:
    block: ExpertBlock
    gate: Tensor
    routed: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] | None
    operand: torch.dtype

    # ---- the block itself

    def rows(self, n: int, seed: int = 101) -> Tensor:
        """Operand rows [n, H]."""
        return torch.randn(n, HIDDEN, generator=generator(seed)).to(self.operand)

    def workspace(self, rows: int, window: int = 8192) -> Workspace:
        return Workspace([self.block], self.operand, rows, window)

    def forward(
        self,
        x: Tensor,
        segments: Sequence[tuple[int, int, BlockAdapter | None]] = (),
        replay: Tensor | None = None,
        window: int = 8192,
    ) -> tuple[Tensor, Routed]:
        """The block's answer [n, H] and what it chose."""
        out = torch.zeros(len(x), HIDDEN)
        plan = ExpertPlan(self.block, self.workspace(len(x), window), x, out)
        plan.segments, plan.replay = segments, replay
        plan.run()
        return out, plan.routed

    def backward(
        self,
        x: Tensor,
        routed: Routed,
        d_out: Tensor,
        adapter: BlockAdapter | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        window: int = 8192,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """d_x, and the adapter's gradients by name."""
        d_x = torch.zeros(len(x), HIDDEN)
        gradients = BlockGradients.zeros(adapter) if adapter is not None else None
        expert_backward(self.block, self.workspace(max(len(x), 1), window), x, routed, d_out, d_x, adapter, gradients)
        named: dict[str, Tensor] = {}
        for part in gradients.parts() if gradients is not None else ():
            named |= part.named(tensors or {})
        return d_x, named

    # ---- adapters

    def tensors(
        self,
        spec: LoraSpec,
        layout: ExpertLora = "per_expert",
        seed: int = 5,
        parts: Sequence[str] = ("gate", "up", "down", "gate_up"),
    ) -> dict[str, Tensor]:
        """Adapter tensors of both banks whose B is not zero."""
        draw, out = generator(seed), {}
        for bank in self.block.banks():
            for site in bank.sites:
                if site.module.rpartition(".")[2].removesuffix("_proj") not in parts:
                    continue
                columns = HIDDEN if site.place == "gate_up" else bank.width
                rank = site_rank(site, len(bank), spec)
                out |= tensor_shapes(site, len(bank), columns, rank, layout)
        drawn = init_tensors(out, draw)
        return {n: t if t.any() else torch.randn(t.shape, generator=draw) * 0.1 for n, t in drawn.items()}

    def adapter(self, tensors: Mapping[str, Tensor], spec: LoraSpec) -> BlockAdapter:
        routed, shared = (
            None if b is None else ExpertAdapter.build(b.sites, len(b), tensors, spec, self.operand, b.first)
            for b in (self.block.routed, self.block.shared)
        )
        return BlockAdapter(routed, shared)

    # ---- by definition

    def reference(
        self, x: Tensor, ids: Tensor, tensors: Mapping[str, Tensor] | None = None, spec: LoraSpec | None = None
    ) -> Tensor:
        """The block in the dtype of x for given ids, differentiable in x and the adapter's tensors."""
        logits = x @ self.gate.to(x.dtype).T
        if self.block.gate_bias is not None:
            logits = logits + self.block.gate_bias.to(x.dtype)
        weights = reference_weights(self.block.router, logits, ids)
        out = torch.zeros_like(x)
        if self.shared is not None:
            assert self.block.shared is not None
            out = out + self._expert(x, 0, self.shared, self.block.shared, tensors or {}, spec)
        for e in range(len(self.block.routed)):
            rows, slot = (ids == e).nonzero(as_tuple=True)
            y = self._expert(x[rows], e, self.routed, self.block.routed, tensors or {}, spec)
            out = out.index_add(0, rows, y * weights[rows, slot, None])
        return out

    def _expert(
        self,
        x: Tensor,
        e: int,
        weights: Mapping[str, Tensor],
        bank: ExpertBank,
        tensors: Mapping[str, Tensor],
        spec: LoraSpec | None,
    ) -> Tensor:
        w = {name: t[e].to(x.dtype) for name, t in weights.items()}

        def linear(place: str, rows: Tensor) -> Tensor:
            out = rows @ w[place].T
            shares = [torch.zeros_like(out)]
            for site in (s for s in bank.sites if s.place == place):
                for layout in ("per_expert", "shared_outer"):
                    found = [tensors[n] for n in site.names(layout) if n in tensors]
                    if len(found) == 2:
                        assert spec is not None
                        a, b = (t[e] if t.ndim == 3 else t for t in found)
                        share = spec.scale(site.module) * (rows @ a.to(x.dtype).T) @ b.to(x.dtype).T
                        width = out.shape[1]
                        shares.append(torch.nn.functional.pad(share, (site.start, width - site.stop)))
                        break
            return out + torch.stack(shares).sum(0) + w.get(f"{place}_bias", 0.0)

        hidden, how = linear("gate_up", x), bank.activation
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if how.interleaved else hidden.chunk(2, dim=-1)
        if math.isfinite(how.limit):
            gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
        return linear("down", (up + how.offset) * gate * (how.alpha * gate).sigmoid())


def reference_weights(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    """Weights of given ids by the definitions, differentiable."""
    scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(1, ids.long())
    if router.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scale


def make_case(
    kind: str = "fp32",
    router: Router = ROUTERS["softmax"],
    *,
    operand: torch.dtype = torch.float32,
    shared: bool = False,
    biases: bool = False,
    activation: Activation = SILU,
    seed: int = 0,
) -> Case:
    """A random block; with a shared expert of twice the width, with biases on experts and router."""
    routed, weights = _bank(kind, router.n_experts, WIDTH, activation, f"{PREFIX}.experts.{{expert}}", biases, seed + 1)
    more = _bank(kind, 1, 2 * WIDTH, activation, f"{PREFIX}.shared_experts", biases, seed + 2) if shared else None
    gate = pack_dense(torch.randn(router.n_experts, HIDDEN, generator=generator(seed)) * 0.1, rounded=kind != "fp32")
    correction = torch.linspace(-0.2, 0.2, router.n_experts) if router.scoring == "sigmoid" else None
    block = ExpertBlock(
        router,
        gate,
        routed,
        more[0] if more is not None else None,
        gate_bias=torch.linspace(-0.5, 0.5, router.n_experts) if biases else None,
        correction=correction,
    )
    return Case(block, gate.expand(torch.float32), weights, more[1] if more is not None else None, operand)


def relative(mine: Tensor, exact: Tensor) -> float:
    """max |difference| over max |exact|."""
    return float((mine.double() - exact.double()).abs().max() / exact.double().abs().max())


def exact_gradients(
    case: Case, x: Tensor, ids: Tensor, d_out: Tensor, tensors: Mapping[str, Tensor], spec: LoraSpec
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The block in float64: its answer, d_x and the adapter's gradients."""
    leaf = x.double().requires_grad_()
    parameters = {name: t.double().requires_grad_() for name, t in tensors.items()}
    out = case.reference(leaf, ids, parameters, spec)
    out.backward(d_out.double())
    assert leaf.grad is not None
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
    return out.detach(), leaf.grad, grads
