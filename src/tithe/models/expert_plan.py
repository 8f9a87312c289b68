"""The forward of an expert block: every launch is built once on fixed buffers and replayed.

A row's bits do not depend on the batch: products are row by row (`tithe.quant.grouped`), its router sees only it, and
its results are added in ascending expert id, whatever window they fall in. On several ranks (`ExpertBlock.ranks`)
pairs travel to their experts and float32 answers come back, to be added here in the same order: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tithe.models.exchange import Traffic, by_adapter
from tithe.models.expert_adapter import ExpertAdapter
from tithe.models.expert_bank import BlockAdapter, ExpertBank, ExpertBlock
from tithe.models.expert_kernels import activate
from tithe.models.expert_workspace import BankSteps, Combine, Finder, Workspace, low_rank, tasks
from tithe.models.linear import operand_steps
from tithe.models.routing import Routed, RouteStep
from tithe.quant.grouped import product
from tithe.quant.matrix import set_product_rows
from tithe.quant.runtime import TASKS, Launch

BlockSegment = tuple[int, int, BlockAdapter | None]


class ExpertPlan:
    """One block on fixed buffers: `run` adds the block's answer for the first `rows` rows of x [R, H] (operands) to
    out [R, H] float32.

    `segments` are (start, stop, adapter) ranges of rows, `replay` int32 [≥ rows, k] expert ids to take (None: the
    router chooses; see `tithe.models.routing.check_replay`). `routed` holds what was chosen until the next run: ids to
    record while sampling, ids and weights for the backward. Not thread-safe: it belongs to the lane.

    On several ranks all of them run the layer together, those without rows too. `served` are the adapters that any
    rank's segments may name, the same in the same order everywhere; None: each rank's segments name them all.
    """

    __slots__ = (
        "_banks",
        "_gate",
        "_logits",
        "_route",
        "args",
        "block",
        "replay",
        "routed",
        "rows",
        "segments",
        "served",
    )

    def __init__(self, block: ExpertBlock, workspace: Workspace, x: Tensor, out: Tensor) -> None:
        self.block, self.rows, self.args = block, x.shape[0], None
        self.segments: Sequence[BlockSegment] = ()
        self.served: Sequence[BlockAdapter] | None = None
        self.replay: Tensor | None = None
        self.routed = Routed.allocate(block.router, x.shape[0])
        wide, self._gate = operand_steps(x)
        experts = block.router.n_experts
        self._logits = workspace.logits.view(-1)[: x.shape[0] * experts].view(-1, experts)
        self._gate.append(block.gate.product(wide, self._logits))
        self._route = RouteStep(block.router, self._logits, self.routed, block.correction)
        self._banks = [
            _ExchangedPlan(block, workspace, x, out, self.routed)
            if bank is block.routed and block.ranks.size > 1
            else _BankPlan(bank, workspace, x, out, *pairs_of(bank, block, self.routed))
            for bank in block.banks()
        ]

    def forget(self, adapter: BlockAdapter) -> None:
        """Drop the launches of an adapter that is no longer served."""
        for bank in self._banks:
            bank.forget(adapter.of(bank.bank, self.block))

    def route(self) -> None:
        """Fill `routed` for the rows."""
        n = self.rows
        for step in self._gate:
            if isinstance(step, Launch):
                set_product_rows(step.args, n)
            step.run()
        if self.block.gate_bias is not None:
            self._logits[:n] += self.block.gate_bias
        self._route.run(n, self.replay.data_ptr() if self.replay is not None else 0)

    def run(self) -> None:
        """out[:rows] += block(x[:rows])."""
        if self.rows > 0:
            self.route()
        for bank in self._banks:
            if isinstance(bank, _ExchangedPlan):
                bank.run(self.rows, self.segments, self.served)
                continue
            if self.rows == 0:
                continue
            parts = [(a, b, one.of(bank.bank, self.block)) for a, b, one in self.segments if one is not None]
            bank.run(self.rows, [(a, b, adapter) for a, b, adapter in parts if adapter is not None and b > a])


def pairs_of(bank: ExpertBank, block: ExpertBlock, routed: Routed) -> tuple[Tensor, Tensor]:
    """Ids and weights [R, k] of a bank: what the router chose, or for the shared expert 0 and 1 [R, 1]."""
    if bank is block.routed:
        return routed.ids, routed.weights
    rows = len(routed.ids)
    return torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)


class _BankPlan:
    """Forward launches of one bank."""

    def __init__(
        self, bank: ExpertBank, workspace: Workspace, x: Tensor, out: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        self.bank, self._workspace = bank, workspace
        self._steps = BankSteps(bank, workspace, x, ids, weights)
        self._y = workspace.view("y", bank.hidden, torch.float32)
        self._activate = activation_launch(self._steps)
        self._down = product(bank.down, self._steps.act, self._y, self._steps.groups, workspace.scratch)
        self._combine = Combine(self._y, out, ids, workspace, weights, bank.down_bias)
        self._adapters: dict[int, _AdapterPlan] = {}

    def forget(self, adapter: ExpertAdapter | None) -> None:
        self._adapters.pop(id(adapter), None)

    def _plan(self, adapter: ExpertAdapter) -> _AdapterPlan:
        found = self._adapters.get(id(adapter))
        if found is None:
            found = self._adapters[id(adapter)] = _AdapterPlan(adapter, self._steps, self._y)
        return found

    def run(self, rows: int, segments: Sequence[tuple[int, int, ExpertAdapter]]) -> None:
        """Add the bank's answer for the first `rows` rows."""
        steps = self._steps
        plans = [(start, stop, self._plan(adapter)) for start, stop, adapter in segments]
        for lo, hi in steps.windows(rows):
            steps.gate_up(rows, lo, hi)
            for start, stop, plan in plans:
                plan.finder.run(start, stop, lo, hi)
                plan.run("gate_up")
            args = self._activate.args
            args[TASKS], args[5], args[6] = tasks(hi - lo), self._workspace.pairs.expert.data_ptr() + lo * 4, hi - lo
            self._activate.run()
            self._down.run()
            for _, _, plan in plans:
                plan.run("down")
            self._combine.run(rows, lo, hi)

    def answer(
        self, x: Tensor, ids: Tensor, segments: Sequence[tuple[int, int, ExpertAdapter]], out: Tensor, capacity: int
    ) -> None:
        """out [P, H] = the answers for rows x [P, H] of one pair each, ids int32 [P, 1], `capacity` at a time.

        Launches that were built for k = 1. A sum that begins at -0 keeps every bit of its only term.
        """
        out.fill_(-0.0)
        weights = torch.ones(len(x), 1)
        for lo in range(0, len(x), capacity):
            hi = min(lo + capacity, len(x))
            self._steps.read(x[lo:hi], ids[lo:hi], weights)
            self._combine.write(out[lo:hi], ids[lo:hi])
            parts = [(max(a, lo) - lo, min(b, hi) - lo, one) for a, b, one in segments]
            self.run(hi - lo, [(a, b, one) for a, b, one in parts if b > a])


class _ExchangedPlan:
    """The routed experts of all ranks for this rank's rows, and this rank's experts for all rows that come."""

    def __init__(self, block: ExpertBlock, workspace: Workspace, x: Tensor, out: Tensor, routed: Routed) -> None:
        self.bank, self._block, self._workspace = block.routed, block, workspace
        self._x, self._out, self._routed = x, out, routed
        nothing = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
        self._own = _BankPlan(block.routed, workspace, x, out, *nothing)

    def forget(self, adapter: ExpertAdapter | None) -> None:
        self._own.forget(adapter)

    def run(self, rows: int, segments: Sequence[BlockSegment], served: Sequence[BlockAdapter] | None) -> None:
        """Exchange the pairs of the first `rows` rows and add the answers."""
        if served is None:
            served = list(dict.fromkeys(one for _, _, one in segments if one is not None))
        ids, block = self._routed.ids[:rows], self._block
        which = torch.full((rows,), -1, dtype=torch.int32)
        for start, stop, one in segments:
            if one is not None:
                which[start:stop] = served.index(one)
        for part, traffic in Traffic.rounds(block.ranks, block.router.n_experts, ids, len(served)):
            taken = ids[part]
            row = traffic.order // ids.shape[1]
            sent = [taken.reshape(-1)[traffic.order, None], which[part][row, None], self._x[:rows][part][row]]
            answers = traffic.back(self._answer(traffic.go(sent), served))
            self._workspace.pairs.position[: taken.numel()] = traffic.inverse()
            combine = Combine(
                answers, self._out[:rows][part], taken, self._workspace, self._routed.weights[:rows][part]
            )
            combine.run(len(taken), 0, taken.numel())

    def _answer(self, received: Sequence[Tensor], served: Sequence[BlockAdapter]) -> Tensor:
        """float32 [P, H] of the pairs that came, in their order."""
        ids, which, x = received
        ids = (ids - self.bank.first).contiguous()
        order, ranges = by_adapter(which.reshape(-1))
        adapters = [one.of(self.bank, self._block) for one in served]
        parts = [(a, b, one) for a, b, i in ranges if (one := adapters[i]) is not None]
        out = torch.empty(len(ids), self.bank.hidden)
        capacity = len(self._workspace.pairs.row)
        if order is None:
            self._own.answer(x, ids, parts, out, capacity)
            return out
        self._own.answer(x[order], ids[order], parts, out, capacity)
        back = torch.empty_like(out)
        back[order] = out
        return back


class _AdapterPlan:
    """An adapter's launches on a bank, on its own groups."""

    def __init__(self, adapter: ExpertAdapter, steps: BankSteps, y: Tensor) -> None:
        self._adapter, workspace = adapter, steps.workspace  # the adapter is kept, so that its id stays its own
        self.finder = Finder(workspace.pairs, len(steps.bank))
        buffers = {"gate_up": (steps.x, steps.hidden), "down": (steps.act, y)}
        self._launches = {
            place: low_rank(tables, *buffers[place], self.finder.groups, workspace, workspace.view("u", tables.width))
            for place, tables in adapter.places.items()
        }

    def run(self, place: str) -> None:
        """Add its share to a place's outputs."""
        for launch in self._launches.get(place, ()):
            launch.run()


def activation_launch(steps: BankSteps) -> Launch:
    """act = activation(gate_up + bias); arguments 5 and 6 are the experts of the window's pairs, and how many."""
    bank, workspace = steps.bank, steps.workspace
    bias = bank.gate_up_bias.data_ptr() if bank.gate_up_bias is not None else 0
    args: list[int | float] = [steps.hidden.data_ptr(), bias, 0, 0, bank.width, steps.act.data_ptr(), workspace.mode]
    args += [*bank.activation.arguments(), workspace.row_scratch.data_ptr()]
    return activate.bind(0, args, (bank, steps, workspace.row_scratch))
