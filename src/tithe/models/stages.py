"""The launches of one decoder layer on fixed buffers, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tithe.models.attention_kernels import attention, finish_qkv
from tithe.models.buffers import ROWS_PER_TASK, RowBuffers, Scratch, is_bf16, norm_step
from tithe.models.decoder import Decoder, Layer
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_workspace import Workspace
from tithe.models.gated import can_gate, gated_dot, gated_launch, set_gated_rows
from tithe.models.kernels import rms_norm, swiglu
from tithe.models.kv import PAGE, KVPages
from tithe.models.linear import CopyStep, Linear, Step
from tithe.quant import Launch
from tithe.quant.matrix import set_product_rows
from tithe.quant.runtime import TASKS

PLACES = ("qkv", "o", "gate_up", "down")
STAGES = ("qkv", "finish", "attend", "o", "gate_up", "activate", "down")


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


def set_rows(step: PlanStep, n: int) -> None:
    """Let a step compute the first n rows of its buffers."""
    blocks = -(-n // ROWS_PER_TASK)
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
