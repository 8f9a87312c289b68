"""The forward pass of decode and prefill: every launch is built once on fixed buffers and replayed.

A `ForwardPlan` owns the buffers for up to `max_rows` rows; `run` computes the hidden states of the first n rows, which
may belong to any sequences, at any positions, under any adapters (rows of one adapter side by side).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.models.attention_kernels import attention, finish_qkv
from tithe.models.decoder import Decoder, Layer, ModelAdapter, padded, scratch_floats
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_workspace import Workspace
from tithe.models.gated import can_gate, gated_dot, gated_launch, set_gated_rows
from tithe.models.kernels import rms_norm, swiglu
from tithe.models.kv import PAGE, KVPages
from tithe.models.linear import AdapterSteps, CopyStep, Linear, Step, adapter_steps
from tithe.quant import Launch, kernel_threads
from tithe.quant.matrix import set_product_rows, set_riders
from tithe.quant.runtime import TASKS

ROWS_PER_TASK = 8
PLACES = ("qkv", "o", "gate_up", "down")
STAGES = ("qkv", "finish", "attend", "o", "gate_up", "activate", "down")
Segment = tuple[int, int, ModelAdapter | None]
Tap = Callable[[int, str], None]


class Scratch:
    """float32 scratch of every kernel thread."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.buffer = torch.empty(kernel_threads() * floats)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.buffer.data_ptr()


@dataclass(frozen=True, eq=False)
class RowBuffers:
    """Buffers of R rows. Operand buffers (xn, att, act, u) have the operand dtype, the others are float32."""

    x: Tensor
    xn: Tensor
    qkv: Tensor
    att: Tensor
    gate_up: Tensor
    act: Tensor
    position: Tensor
    sequence: Tensor
    table: Tensor
    lse: Tensor | None = None

    @staticmethod
    def allocate(decoder: Decoder, rows: int, sequences: int, pages_per_sequence: int, *, with_lse: bool) -> RowBuffers:
        """Fresh buffers; the block table is [sequences, pages_per_sequence]."""
        spec, operand = decoder.spec, decoder.options.operand_dtype
        return RowBuffers(
            x=torch.empty(rows, spec.hidden_size),
            xn=torch.empty(rows, spec.hidden_size, dtype=operand),
            qkv=torch.empty(rows, spec.q_size + 2 * spec.kv_size),
            att=torch.empty(rows, spec.q_size, dtype=operand),
            gate_up=torch.empty(rows, 2 * decoder.dense_width),
            act=torch.empty(rows, decoder.dense_width, dtype=operand),
            position=torch.zeros(rows, dtype=torch.int32),
            sequence=torch.zeros(rows, dtype=torch.int32),
            table=torch.zeros(sequences, pages_per_sequence, dtype=torch.int32),
            lse=torch.empty(rows, spec.n_heads) if with_lse else None,
        )

    def inputs(self) -> dict[str, Tensor]:
        """The operand buffer each place reads."""
        return {"qkv": self.xn, "o": self.att, "gate_up": self.xn, "down": self.act}

    def outputs(self) -> dict[str, Tensor]:
        """The float32 buffer each place writes or adds to."""
        return {"qkv": self.qkv, "o": self.x, "gate_up": self.gate_up, "down": self.x}


def is_bf16(t: Tensor) -> int:
    """1 for a bf16 tensor, else 0: how kernels are told."""
    return int(t.dtype == torch.bfloat16)


def norm_step(x: Tensor, weight: Tensor, out: Tensor, eps: float, scratch: Scratch) -> Launch:
    """out = RMS norm of the rows of x."""
    rows, width = x.shape
    args = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, float(eps), is_bf16(out), scratch.address]
    return rms_norm.bind(-(-rows // ROWS_PER_TASK), [*args, ROWS_PER_TASK, rows], (x, weight, out, scratch.buffer))


def finish_step(decoder: Decoder, layer: Layer, index: int, b: RowBuffers, pages: KVPages) -> Launch:
    """Bias, head norms, rotary; keys and values into their pages."""
    spec = decoder.spec
    args = [b.qkv.data_ptr(), b.qkv.shape[1], spec.n_heads, spec.n_kv_heads, spec.head_dim]
    args += [t.data_ptr() if t is not None else 0 for t in (layer.qkv_bias, layer.q_norm, layer.k_norm)]
    values = [*args, float(spec.rms_norm_eps), decoder.cos.data_ptr(), decoder.sin.data_ptr(), b.position.data_ptr()]
    values += [b.sequence.data_ptr(), b.table.data_ptr(), b.table.shape[1]]
    values += [*pages.addresses(index), is_bf16(pages.keys)]
    rows = b.x.shape[0]
    values += [rows, pages.blocks, spec.rotary_dim // 2, int(spec.norms_qk == "full")]
    return finish_qkv.bind(-(-rows // PAGE), values, (layer, b, pages))


def attention_step(decoder: Decoder, index: int, b: RowBuffers, pages: KVPages, scratch: Scratch) -> Launch:
    """Causal attention of every row over its own sequence."""
    spec, layer = decoder.spec, decoder.layers[index]
    args = [b.qkv.data_ptr(), b.qkv.shape[1], spec.n_heads, spec.n_kv_heads, spec.head_dim]
    args += [*pages.addresses(index), is_bf16(pages.keys)]
    args += [b.table.data_ptr(), b.table.shape[1], b.sequence.data_ptr(), b.position.data_ptr()]
    args += [b.att.data_ptr(), is_bf16(b.att), b.lse.data_ptr() if b.lse is not None else 0]
    values = [
        *args,
        1.0 / math.sqrt(spec.head_dim),
        scratch.address,
        scratch.floats,
        b.table.shape[1] * 16,
        pages.blocks,
        decoder.window(index),
        layer.sinks.data_ptr() if layer.sinks is not None else 0,
    ]
    return attention.bind(b.x.shape[0], values, (b, pages, scratch.buffer))


def is_gated(decoder: Decoder, layer: Layer) -> bool:
    """Whether one launch computes gate, up and activation of a layer's MLP."""
    return (
        layer.gate_up is not None
        and layer.gate_up_bias is None
        and len(layer.gate_up.parts) == 1
        and can_gate(layer.gate_up.parts[0], decoder.options.operand_dtype)
    )


def swiglu_step(layer: Layer, b: RowBuffers, scratch: Scratch) -> Launch:
    """act = silu(gate)·up."""
    rows, width = b.act.shape
    bias = layer.gate_up_bias.data_ptr() if layer.gate_up_bias is not None else 0
    args = [b.gate_up.data_ptr(), bias, width, b.act.data_ptr(), is_bf16(b.act), scratch.address]
    return swiglu.bind(-(-rows // ROWS_PER_TASK), [*args, ROWS_PER_TASK, rows], (layer, b, scratch.buffer))


class BiasStep:
    """x[:rows] += bias, with a launch's face."""

    __slots__ = ("args", "bias", "rows", "x")

    def __init__(self, x: Tensor, bias: Tensor) -> None:
        self.x, self.bias, self.rows, self.args = x, bias, x.shape[0], None

    def run(self) -> None:
        """Add."""
        self.x[: self.rows] += self.bias


PlanStep = Step | ExpertPlan | BiasStep


@dataclass(frozen=True, eq=False)
class Stage:
    """Launches of one part of a layer: `prepare` makes the input that adapters read, then `main`; `base` of it are the
    launches of the linear's own product."""

    prepare: list[PlanStep]
    main: list[PlanStep]
    base: list[Step]


def layer_stages(
    decoder: Decoder,
    index: int,
    b: RowBuffers,
    pages: KVPages,
    scratch: Scratch,
    workspace: Workspace | None,
    kept: Tensor | None,
) -> dict[str, Stage]:
    """The launches of one layer on one set of buffers, by `STAGES`; x is updated in place.

    `workspace` is for layers of experts; `kept` [R, 2I] receives gate and up where one launch computes gate, up and
    activation.
    """
    layer, eps = decoder.layers[index], decoder.spec.rms_norm_eps

    def linear(place: Linear | None, x: Tensor, out: Tensor, bias: Tensor | None, *, norm: Tensor | None) -> Stage:
        assert place is not None
        prepare: list[PlanStep] = [] if norm is None else [norm_step(b.x, norm, b.xn, eps, scratch)]
        base = place.steps(x, out, add=out is b.x)
        return Stage(prepare, [*base, *([] if bias is None else [BiasStep(out, bias)])], base)

    stages = {
        "qkv": linear(layer.qkv, b.xn, b.qkv, None, norm=layer.input_norm),
        "finish": Stage([], [finish_step(decoder, layer, index, b, pages)], []),
        "attend": Stage([], [attention_step(decoder, index, b, pages, scratch)], []),
        "o": linear(layer.o, b.att, b.x, layer.o_bias, norm=None),
    }
    if layer.experts is not None:
        assert workspace is not None
        normed = norm_step(b.x, layer.post_norm, b.xn, eps, scratch)
        return stages | {"gate_up": Stage([normed], [ExpertPlan(layer.experts, workspace, b.xn, b.x)], [])}
    down = linear(layer.down, b.act, b.x, layer.down_bias, norm=None)
    assert layer.gate_up is not None
    if is_gated(decoder, layer):
        gated = gated_launch(layer.gate_up.parts[0], b.xn, b.act, kept)
        norm = norm_step(b.x, layer.post_norm, b.xn, eps, scratch)
        return stages | {"gate_up": Stage([norm], [gated], [gated]), "activate": Stage([], [], []), "down": down}
    return stages | {
        "gate_up": linear(layer.gate_up, b.xn, b.gate_up, None, norm=layer.post_norm),
        "activate": Stage([], [swiglu_step(layer, b, scratch)], []),
        "down": down,
    }


def _expert_plan(stages: Mapping[str, Stage]) -> ExpertPlan | None:
    """The plan of a layer's experts; None in a dense layer."""
    return next((step for step in stages["gate_up"].main if isinstance(step, ExpertPlan)), None)


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
        self.scratch = Scratch(scratch_floats(decoder.spec, longest))
        self.u = torch.empty(max_rows, 0)
        blocks = decoder.blocks()
        self.workspace = Workspace(blocks, decoder.options.operand_dtype, max_rows) if blocks else None
        self._layers = [
            layer_stages(
                decoder, i, self.buffers, pages, self.scratch, self.workspace, kept[i] if kept is not None else None
            )
            for i in range(len(decoder.layers))
        ]
        self.experts = [_expert_plan(layer) for layer in self._layers]
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
        blocks = -(-n // ROWS_PER_TASK)
        for layer in self._layers:
            for step in (s for stage in layer.values() for s in (*stage.prepare, *stage.main)):
                if isinstance(step, (ExpertPlan, BiasStep)):
                    step.rows = n
                elif isinstance(step, Launch) and step.of is rms_norm:
                    step.args[TASKS], step.args[11] = blocks, n
                elif isinstance(step, Launch) and step.of is swiglu:
                    step.args[TASKS], step.args[10] = blocks, n
                elif isinstance(step, Launch) and step.of is gated_dot:
                    set_gated_rows(step.args, n)
                elif isinstance(step, Launch) and step.of is finish_qkv:
                    step.args[TASKS], step.args[21] = -(-n // PAGE), n
                elif isinstance(step, Launch) and step.of is attention:
                    step.args[TASKS] = n
                elif not isinstance(step, CopyStep):
                    set_product_rows(step.args, n)

    @property
    def is_mixture(self) -> bool:
        """Whether any layer has experts."""
        return self.workspace is not None

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
