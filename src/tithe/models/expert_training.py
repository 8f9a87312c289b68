"""The backward of an expert block, by hand: input gradient through experts and router, and its adapters' gradients.

Saved from the forward are only the operand rows x and what the router chose (ids and weights, 8 bytes a pair). A
layer's hidden rows gate_up (8·I bytes a pair: 128 KiB a token of Kimi-K2, each layer) are computed again here by the
forward's own launches, bit for bit: 8 products of I × H a pair in forward and backward together instead of 6. The
output of down is not needed again: ⟨dy, W̃·act⟩ = ⟨dy·W̃, act⟩.

The gradient also flows through the routing weights into the logits and x, though the router itself is frozen; the
choice has no gradient. Sums over pairs run in sorted order, in fixed steps, window by window: the same on any number of
threads, and equal at rounding level for any window.

On several ranks operand rows and d_out travel to the experts once more, d_x and the weights' gradients come back. d_x
is then the same bits as on one rank; an expert's adapter gradients arise where the expert lies, and sum pairs by the
rank they come from, then by row: equal to one rank's at rounding level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tithe.models.exchange import Traffic
from tithe.models.expert_adapter import ExpertAdapter, PlaceTables, SiteTables
from tithe.models.expert_bank import BlockAdapter, ExpertBank, ExpertBlock
from tithe.models.expert_kernels import activate_backward
from tithe.models.expert_plan import pairs_of
from tithe.models.expert_workspace import BankSteps, Combine, Gather, Workspace, low_rank, tasks
from tithe.models.routing import Routed, route_backward
from tithe.quant.grouped import GroupedLaunch, Groups, outer, transposed_product, turn


@dataclass(frozen=True, eq=False)
class SiteSums:
    """Sums of one site in float32: `a` [E, r, in], `b_transposed` [E, r, out]; E is 1 where all experts share one, r
    is made even."""

    tables: SiteTables
    a: Tensor
    b_transposed: Tensor

    @staticmethod
    def zeros(tables: SiteTables) -> SiteSums:
        """Nothing summed yet."""
        experts, rank = len(tables.a), tables.rank
        a, b = (1 if shared else experts for shared in (tables.shares_a, tables.shares_b))
        return SiteSums(tables, torch.zeros(a, rank, tables.a.columns), torch.zeros(b, rank, tables.b.rows))


class ExpertGradients:
    """Gradients of an adapter on one bank, added to by every micro-batch of a batch."""

    def __init__(self, adapter: ExpertAdapter) -> None:
        self.places: Mapping[str, list[SiteSums]] = {
            place: [SiteSums.zeros(s) for s in tables.sites] for place, tables in adapter.places.items()
        }

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views by name in the shapes of the adapter's `tensors`: A [E, r, in], B [E, out, r]; without E if shared."""
        out: dict[str, Tensor] = {}
        for sums in (s for place in self.places.values() for s in place):
            name_a, name_b = sums.tables.names
            rank = tensors[name_a].shape[-2]
            a, b = sums.a[:, :rank], sums.b_transposed[:, :rank].transpose(1, 2)
            out[name_a] = a[0] if sums.tables.shares_a else a
            out[name_b] = b[0] if sums.tables.shares_b else b
        return out


@dataclass(frozen=True, eq=False)
class BlockGradients:
    """Gradients of an adapter version on one block."""

    routed: ExpertGradients | None
    shared: ExpertGradients | None

    @staticmethod
    def zeros(adapter: BlockAdapter) -> BlockGradients:
        """For the parts that the adapter has."""
        routed, shared = (ExpertGradients(a) if a is not None else None for a in (adapter.routed, adapter.shared))
        return BlockGradients(routed, shared)

    def parts(self) -> list[ExpertGradients]:
        """Those that exist."""
        return [part for part in (self.routed, self.shared) if part is not None]


def expert_backward(
    block: ExpertBlock,
    workspace: Workspace,
    x: Tensor,
    routed: Routed,
    d_out: Tensor,
    d_x: Tensor,
    adapter: BlockAdapter | None = None,
    gradients: BlockGradients | None = None,
) -> None:
    """d_x [n, H] float32 += the input gradient of the block for d_out [n, H] float32; gradients += the adapter's.

    `x` [n, H] are the operand rows of the forward, `routed` what it chose for them (the first n rows are used). On
    several ranks all of them call it together, those without rows too.
    """
    rows = len(x)
    if rows == 0 and block.ranks.size == 1:
        return
    routed = routed.first(rows)
    d_weights: Tensor | None = None
    for bank in block.banks():
        if rows == 0 and bank is not block.routed:
            continue
        one = adapter.of(bank, block) if adapter is not None else None
        sums = None
        if one is not None and gradients is not None:
            sums = gradients.routed if bank is block.routed else gradients.shared
        if bank is block.routed and block.ranks.size > 1:
            d_weights = _exchanged_backward(block, workspace, x, routed, d_out, d_x, one, sums)
            continue
        ids, weights = pairs_of(bank, block, routed)
        _BankBackward(bank, workspace, x, d_out, ids, weights, one, sums).run(d_x)
        if bank is block.routed:
            d_weights = workspace.pairs.d_weight[workspace.pairs.position[: ids.numel()].long()].view(ids.shape)
    assert d_weights is not None
    if rows > 0:
        _router_backward(block, x, routed, d_weights, d_x)


def _exchanged_backward(
    block: ExpertBlock,
    workspace: Workspace,
    x: Tensor,
    routed: Routed,
    d_out: Tensor,
    d_x: Tensor,
    adapter: ExpertAdapter | None,
    sums: ExpertGradients | None,
) -> Tensor:
    """d_x += the routed experts' share, wherever they lie; the gradients [n, k] of the weights. `sums` gets those of
    this rank's experts for the rows of all ranks, which are all under one adapter."""
    bank, pairs, ids = block.routed, workspace.pairs, routed.ids
    d_weights = torch.empty_like(routed.weights)
    for part, traffic in Traffic.rounds(block.ranks, block.router.n_experts, ids, int(adapter is not None)):
        taken = ids[part]
        row = traffic.order // ids.shape[1]
        sent = [taken.reshape(-1)[traffic.order, None], routed.weights[part].reshape(-1)[traffic.order, None]]
        received = traffic.go([*sent, x[part][row], d_out[part][row].to(x.dtype)])
        answers = traffic.back(_answers_back(bank, workspace, received, adapter, sums))
        inverse = traffic.inverse()
        pairs.position[: taken.numel()] = inverse
        combine = Combine(answers[:, : bank.hidden].contiguous(), d_x[part], taken, workspace)
        combine.run(len(taken), 0, taken.numel())
        d_weights[part] = answers[inverse.long(), bank.hidden].view(taken.shape)
    return d_weights


def _answers_back(
    bank: ExpertBank,
    workspace: Workspace,
    received: Sequence[Tensor],
    adapter: ExpertAdapter | None,
    sums: ExpertGradients | None,
) -> Tensor:
    """float32 [P, H + 1] of the pairs that came: their share of d_x, and the gradients of their weights."""
    ids, weights, rows, d_rows = received
    ids, weights, pairs = (ids - bank.first).contiguous(), weights.contiguous(), workspace.pairs
    answers = torch.full((len(ids), bank.hidden + 1), -0.0)
    capacity = len(pairs.row)
    for lo in range(0, len(ids), capacity):
        part = slice(lo, min(lo + capacity, len(ids)))
        backward = _BankBackward(bank, workspace, rows[part], d_rows[part], ids[part], weights[part], adapter, sums)
        backward.run(answers[part, : bank.hidden])
        answers[part, bank.hidden] = pairs.d_weight[pairs.position[: len(ids[part])].long()]
    return answers


def _router_backward(block: ExpertBlock, x: Tensor, routed: Routed, d_weights: Tensor, d_x: Tensor) -> None:
    """d_x += d_logits·W̃ of the router; the logits are computed again."""
    logits = block.gate.matmul(x)
    if block.gate_bias is not None:
        logits += block.gate_bias
    d_logits = route_backward(block.router, logits, routed.ids, d_weights).to(x.dtype)
    if d_logits.shape[1] % 2:
        d_logits = torch.nn.functional.pad(d_logits, (0, 1))
    room = torch.empty(block.gate.transposed_numel, dtype=x.dtype)
    block.gate.transposed(room).matmul(d_logits, d_x, add=True)


class _BankBackward:
    """The backward of one bank, window by window. d_act is the gradient of an output before its weight until the
    activation's backward multiplies by it; the low-rank sums of down take the weight in their small operand."""

    def __init__(
        self,
        bank: ExpertBank,
        workspace: Workspace,
        x: Tensor,
        d_out: Tensor,
        ids: Tensor,
        weights: Tensor,
        adapter: ExpertAdapter | None,
        sums: ExpertGradients | None,
    ) -> None:
        self._bank, self._workspace, self._sums = bank, workspace, sums
        self._places = adapter.places if adapter is not None else {}
        self._rows, self._ids = len(x), ids
        self._steps = steps = BankSteps(bank, workspace, x, ids, weights)
        self._dy = workspace.view("dy", bank.hidden)
        self._d_act = workspace.view("d_act", bank.width, torch.float32)
        self._d_hidden = workspace.view("d_gate_up", 2 * bank.width)
        self._d_rows = workspace.view("y", bank.hidden, torch.float32)
        self._gather_dy = Gather(d_out, self._dy, workspace)
        scratch, groups = workspace.scratch, steps.groups
        self._down = transposed_product(bank.down, self._dy, self._d_act, groups, scratch)
        self._gate_up = transposed_product(bank.gate_up, self._d_hidden, self._d_rows, groups, scratch)
        self._u = {place: workspace.view(f"u {place}", t.width) for place, t in self._places.items()}
        self._du = {place: workspace.view(f"du {place}", t.width) for place, t in self._places.items()}
        self._adapted = self._low_rank("gate_up", steps.x, steps.hidden)
        self._back_down = self._low_rank_back("down", self._dy, self._d_act)
        self._back_gate_up = self._low_rank_back("gate_up", self._d_hidden, self._d_rows)
        self._u_down = self._low_rank("down", steps.act, self._d_rows)[:1]

    def _low_rank(self, place: str, x: Tensor, out: Tensor) -> list[GroupedLaunch]:
        """The forward's launches of a place's adapter; the first of them makes u."""
        tables = self._places.get(place)
        if tables is None:
            return []
        return low_rank(tables, x, out, self._steps.groups, self._workspace, self._u[place])

    def _low_rank_back(self, place: str, dy: Tensor, dx: Tensor) -> list[GroupedLaunch]:
        """Launches of du = dy·B and dx += scale·du·A, site by site."""
        launches: list[GroupedLaunch] = []
        workspace, groups = self._workspace, self._steps.groups
        tables: PlaceTables | None = self._places.get(place)
        for s in tables.sites if tables is not None else ():
            du, d_site = self._du[place][:, s.start : s.start + s.rank], dy[:, s.site.start : s.site.stop]
            rounded = workspace.mode == 2
            launches.append(transposed_product(s.b, d_site, du, groups, workspace.scratch, rounded_out=rounded))
            launches.append(transposed_product(s.a, du, dx, groups, workspace.scratch, add=True, factor=s.scale))
        return launches

    def run(self, d_x: Tensor) -> None:
        """Add this bank's share to d_x."""
        combine = Combine(self._d_rows, d_x, self._ids, self._workspace)
        for lo, hi in self._steps.windows(self._rows):
            self._steps.gate_up(self._rows, lo, hi)
            self._gather_dy.run(lo, hi)
            for launch in (*self._adapted, self._down, *self._back_down):
                launch.run()
            self._activation(lo, hi)
            for launch in (*self._u_down, self._gate_up, *self._back_gate_up):
                launch.run()
            combine.run(self._rows, lo, hi)
            self._sum("down", self._steps.act, self._dy, hi - lo, self._workspace.pairs.weight[lo:hi])
            self._sum("gate_up", self._steps.x, self._d_hidden, hi - lo, None)

    def _activation(self, lo: int, hi: int) -> None:
        """act and d_gate_up of a window, and the gradients of its weights."""
        bank, workspace, pairs = self._bank, self._workspace, self._workspace.pairs
        gate_up_bias, down_bias = (b.data_ptr() if b is not None else 0 for b in (bank.gate_up_bias, bank.down_bias))
        args: list[int | float] = [self._steps.hidden.data_ptr(), gate_up_bias, pairs.expert[lo:].data_ptr()]
        args += [pairs.weight[lo:].data_ptr(), hi - lo, bank.width, self._d_act.data_ptr()]
        args += [self._steps.act.data_ptr(), self._d_hidden.data_ptr(), workspace.mode, *bank.activation.arguments()]
        args += [workspace.row_scratch.data_ptr(), pairs.d_weight[lo:].data_ptr(), down_bias, self._dy.data_ptr()]
        activate_backward.bind(tasks(hi - lo), [*args, bank.hidden]).run()

    def _sum(self, place: str, x: Tensor, dy: Tensor, pairs: int, weights: Tensor | None) -> None:
        """dA += scale·duᵀ·x and dBᵀ += scale·uᵀ·dy for the sites of a place."""
        if self._sums is None or place not in self._places:
            return
        for sums in self._sums.places[place]:
            s = sums.tables
            columns = slice(s.start, s.start + s.rank)
            du, u, d_site = self._du[place][:, columns], self._u[place][:, columns], dy[:, s.site.start : s.site.stop]
            self._outer(du, x, sums.a, self._groups(s.shares_a, pairs), weights, s.scale)
            self._outer(u, d_site, sums.b_transposed, self._groups(s.shares_b, pairs), weights, s.scale)

    def _groups(self, shared: bool, pairs: int) -> Groups:
        return Groups.whole(pairs) if shared else self._steps.groups

    def _outer(
        self, small: Tensor, wide: Tensor, out: Tensor, groups: Groups, weights: Tensor | None, scale: float
    ) -> None:
        """out += scale·Σ weight·small·wide over each group's pairs."""
        workspace = self._workspace
        turned = workspace.turned(small.shape[1])
        turn(small, turned, groups, weights=weights, rounded=workspace.mode == 2).run()
        outer(turned, wide, out, groups, workspace.scratch, factor=scale).run()
