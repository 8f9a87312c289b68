"""The forward pass of decode and prefill: every launch is built once on fixed buffers and replayed.

A `ForwardPlan` owns the buffers for up to `max_rows` rows; `run` computes the hidden states of the first n rows, which
may belong to any sequences, at any positions, under any adapters (rows of one adapter side by side).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tithe.models.buffers import RowBuffers
from tithe.models.decoder import Decoder, ModelAdapter, padded
from tithe.models.expert_plan import ExpertPlan
from tithe.models.kv import KVPages
from tithe.models.latent_plan import LatentPlan
from tithe.models.linear import AdapterSteps, adapter_steps
from tithe.models.stages import PLACES, Room, Stage, layer_stages, set_rows
from tithe.quant import Launch
from tithe.quant.matrix import set_product_rows, set_riders

Segment = tuple[int, int, ModelAdapter | None]
Tap = Callable[[int, str], None]


def _expert_plan(stages: Mapping[str, Stage]) -> ExpertPlan | None:
    """The plan of a layer's experts; None in a dense layer."""
    return next((step for step in stages["gate_up"].main if isinstance(step, ExpertPlan)), None)


def _latent_plan(stages: Mapping[str, Stage]) -> LatentPlan | None:
    """The plan of a layer's latent attention; None in other layers."""
    return next((step for step in stages["attend"].main if isinstance(step, LatentPlan)), None)


class AdapterPlan:
    """An adapter's launches on a plan's buffers, movable to any range of rows."""

    def __init__(
        self,
        adapter: ModelAdapter,
        b: RowBuffers,
        u: Tensor,
        inputs: Mapping[str, Tensor],
        layers: Sequence[Mapping[str, Stage]],
    ) -> None:
        outputs = b.outputs()
        self.steps: list[dict[str, AdapterSteps]] = [
            {
                place: adapter_steps(a, inputs[place], u, outputs[place], stages[place].base)
                for place, a in layer.items()
                if place in stages  # what sits on kv_b_proj is a part of latent attention
            }
            for layer, stages in zip(adapter.layers, layers, strict=True)
        ]
        everything = [steps for layer in self.steps for steps in layer.values()]
        launches = [s for e in everything for s in (*e.before, *e.after) if isinstance(s, Launch)]
        self._args = [(s.args, int(s.args[3]), int(s.args[7])) for s in launches]
        self._riders = [e.riders for e in everything]
        self.range = (0, -1)

    def set_range(self, start: int, stop: int) -> None:
        """Compute rows [start, stop) from now on."""
        if (start, stop) == self.range:
            return
        self.range = (start, stop)
        for args, x, out in self._args:
            args[3] = x + start * args[4] * 4
            set_product_rows(args, stop - start)
            args[7] = out + start * args[8] * (2 if args[18] else 4)
        for riders in self._riders:
            riders[:, 5], riders[:, 6] = start, stop


class ForwardPlan:
    """All launches of a decoder for up to `max_rows` rows over one set of KV pages.

    Write `buffers.position`, `.sequence`, `.table` and call `run`. Not thread-safe: it belongs to the lane.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: KVPages,
        *,
        max_rows: int,
        sequences: int,
        max_positions: int,
        with_lse: bool = False,
        adapter_inputs: Mapping[str, Tensor] | None = None,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        """`kept`: per layer what `layer_stages` keeps."""
        self.decoder = decoder
        self.max_rows = max_rows
        longest = padded(max_positions)
        self.buffers = RowBuffers.allocate(decoder, max_rows, sequences, longest // 16, with_lse=with_lse)
        self._adapter_inputs = adapter_inputs or self.buffers.inputs()
        self.u = torch.empty(max_rows, 0)
        self.room = Room.allocate(decoder, self.buffers, pages, longest)
        self._layers = [
            layer_stages(decoder, i, self.room, kept[i] if kept is not None else None)
            for i in range(len(decoder.layers))
        ]
        self.experts = [_expert_plan(layer) for layer in self._layers]
        self.latent = [_latent_plan(layer) for layer in self._layers]
        self._riding: tuple[object, ...] = ()
        self._riders: list[np.ndarray] = []
        self._adapters: dict[int, tuple[ModelAdapter, AdapterPlan]] = {}
        self._rows = -1

    def forget(self, adapter: ModelAdapter) -> None:
        """Drop the launches of an adapter that is no longer served."""
        self._adapters.pop(id(adapter), None)
        for plan, part in zip(self.experts, adapter.experts, strict=True):
            if plan is not None and part is not None:
                plan.forget(part)
        for latent, places in zip(self.latent, adapter.layers, strict=True):
            if latent is not None:
                latent.forget(places.get("kv_b"))

    def _plan_of(self, adapter: ModelAdapter) -> AdapterPlan:
        if adapter.widest > self.u.shape[1]:
            self._adapters.clear()  # their launches write to the u that is replaced, and `u` is read from outside
            self.u = torch.empty(self.max_rows, adapter.widest, dtype=self.decoder.options.operand_dtype)
        if id(adapter) not in self._adapters:
            self._adapters[id(adapter)] = (
                adapter,
                AdapterPlan(adapter, self.buffers, self.u, self._adapter_inputs, self._layers),
            )
        return self._adapters[id(adapter)][1]

    def _set_rows(self, n: int) -> None:
        if n == self._rows:
            return
        self._rows = n
        for layer in self._layers:
            for step in (s for stage in layer.values() for s in (*stage.prepare, *stage.main)):
                set_rows(step, n)

    @property
    def is_mixture(self) -> bool:
        """Whether any layer has experts."""
        return self.room.experts is not None

    def chosen(self, n: int) -> Tensor:
        """Expert ids int32 [mixture layers, n, k] that the first n rows took: what a later pass can replay."""
        return torch.stack([plan.routed.ids[:n] for plan in self.experts if plan is not None])

    def agreed(self, n: int) -> tuple[int, int]:
        """(agreeing, replayed): (row, layer)s whose own choice is the replayed one, and all that were replayed."""
        told = torch.stack([plan.routed.agreement[:n] for plan in self.experts if plan is not None])
        return int((told == 1).sum()), int((told >= 0).sum())

    def begin(
        self, ids: Tensor, segments: Sequence[Segment], replay: Sequence[Tensor] | None = None
    ) -> list[AdapterPlan]:
        """Embed int32 ids [n] into x and place the adapters on their rows.

        `replay` is per mixture layer int32 [n, k]: experts to take, as `check_replay` gives them.
        """
        n = len(ids)
        self._set_rows(n)
        self.decoder.embed(ids, self.buffers.x[:n])
        plans: list[AdapterPlan] = []
        for start, stop, adapter in segments:
            if adapter is not None and stop > start:
                plan = self._plan_of(adapter)
                plan.set_range(start, stop)
                plans.append(plan)
        self._attach(plans)
        taken = iter(replay) if replay is not None else None
        for i, experts in enumerate(self.experts):
            if experts is not None:
                experts.segments = [(a, b, one.experts[i]) for a, b, one in segments if one is not None]
                experts.replay = next(taken) if taken is not None else None
        for i, latent in enumerate(self.latent):
            if latent is not None:
                found = [(a, b, one.layers[i].get("kv_b")) for a, b, one in segments if one is not None]
                latent.segments = [(a, b, part) for a, b, part in found if part is not None]
        return plans

    def _attach(self, plans: Sequence[AdapterPlan]) -> None:
        """Let the adapters of this run ride on the base products."""
        riding = tuple((plan, plan.range) for plan in plans)
        if riding == self._riding:
            return
        self._riding, self._riders = riding, []
        for i, layer in enumerate(self._layers):
            for place, stage in layer.items():
                if len(stage.base) != 1 or not isinstance(stage.base[0], Launch):
                    continue
                found = [plan.steps[i][place].riders for plan in plans if place in plan.steps[i]]
                together = np.concatenate(found) if found else None
                set_riders(stage.base[0], together)
                if together is not None:
                    self._riders.append(together)

    def run(self, ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Residual stream x [n, H] float32 after all layers (a view) for int32 ids [n].

        `segments` are (start, stop, adapter): consecutive row ranges that cover the n rows.
        """
        plans = self.begin(ids, segments)
        for i in range(len(self._layers)):
            self.run_layer(i, plans)
        return self.buffers.x[: len(ids)]

    def run_idle(self) -> None:
        """Take part in a forward in which only other ranks have rows."""
        self._rows = -1
        for plan in self.experts:
            if plan is not None:
                plan.rows, plan.segments, plan.replay = 0, (), None
                plan.run()

    def run_layer(self, i: int, plans: Sequence[AdapterPlan], tap: Tap | None = None) -> None:
        """One layer in place. `tap(i, name)` is called after each stage of `STAGES` when given; around a linear
        also with ``+input`` (adapters are about to read it) and ``+adapter`` (their share is added).
        """
        for name, stage in self._layers[i].items():
            for step in stage.prepare:
                step.run()
            if tap is not None and name in PLACES:
                tap(i, f"{name}+input")
            adapters = [plan.steps[i][name] for plan in plans if name in plan.steps[i]]
            for adapter in adapters:
                for step in adapter.before:
                    step.run()
            for step in stage.main:
                step.run()
            if tap is not None:
                tap(i, name)
            for adapter in adapters:
                for step in adapter.after:
                    step.run()
            if tap is not None and name in PLACES:
                tap(i, f"{name}+adapter")
