"""The launches of one decoder layer on fixed buffers, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tithe.models.attention_kernels import attention, finish_qkv
from tithe.models.buffers import ROWS_PER_TASK, RowBuffers, Scratch, is_bf16, norm_step
from tithe.models.decoder import Decoder, Layer, scratch_floats
from tithe.models.expert_plan import ExpertPlan
from tithe.models.expert_workspace import Workspace
from tithe.models.gated import can_gate, gated_dot, gated_launch, set_gated_rows
from tithe.models.kernels import rms_norm, swiglu
from tithe.models.kv import PAGE, KVPages
from tithe.models.latent_kernels import finish_latent
from tithe.models.latent_plan import LatentPlan, LatentWorkspace, finish_latent_step
from tithe.models.linear import CopyStep, Linear, Step
from tithe.quant import Launch
from tithe.quant.matrix import set_product_rows
from tithe.quant.runtime import TASKS

PLACES = ("qkv", "q_b", "o", "gate_up", "down")
STAGES = ("qkv", "finish", "q_b", "attend", "o", "gate_up", "activate", "down")


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
        decoder.score_scale,
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


PlanStep = Step | ExpertPlan | LatentPlan | BiasStep


@dataclass(frozen=True, eq=False)
class Stage:
    """Launches of one part of a layer: `prepare` makes the input that adapters read, then `main`; `base` of it are the
    launches of the linear's own product."""

    prepare: list[PlanStep]
    main: list[PlanStep]
    base: list[Step]


@dataclass(frozen=True, eq=False)
class Room:
    """What the launches of a plan run on, for all layers: `experts` and `latent` where the model has such layers."""

    buffers: RowBuffers
    pages: KVPages
    scratch: Scratch
    experts: Workspace | None
    latent: LatentWorkspace | None

    @staticmethod
    def allocate(decoder: Decoder, buffers: RowBuffers, pages: KVPages, longest: int) -> Room:
        """For the rows of the buffers and sequences of at most `longest` positions."""
        operand, rows = decoder.options.operand_dtype, len(buffers.x)
        blocks, latent = decoder.blocks(), decoder.layers[0].latent
        return Room(
            buffers,
            pages,
            Scratch(scratch_floats(decoder.spec, longest)),
            Workspace(blocks, operand, rows) if blocks else None,
            LatentWorkspace(latent, operand, rows) if latent is not None else None,
        )


def layer_stages(decoder: Decoder, index: int, room: Room, kept: Tensor | None) -> dict[str, Stage]:
    """The launches of one layer, by `STAGES`; x is updated in place.

    `kept` [R, 2I] receives gate and up where one launch computes gate, up and activation.
    """
    layer, b = decoder.layers[index], room.buffers
    normed = norm_step(b.x, layer.post_norm, b.xn, decoder.spec.rms_norm_eps, room.scratch)
    attention = _latent_stages if layer.latent is not None else _attention_stages
    stages = attention(decoder, index, room)
    if layer.experts is not None:
        assert room.experts is not None
        return stages | {"gate_up": Stage([normed], [ExpertPlan(layer.experts, room.experts, b.xn, b.x)], [])}
    assert layer.gate_up is not None
    assert layer.down is not None
    down = _linear(layer.down, b.act, b.x, layer.down_bias, add=True)
    if is_gated(decoder, layer):
        gated = gated_launch(layer.gate_up.parts[0], b.xn, b.act, kept)
        return stages | {"gate_up": Stage([normed], [gated], [gated]), "activate": Stage([], [], []), "down": down}
    return stages | {
        "gate_up": _linear(layer.gate_up, b.xn, b.gate_up, None, [normed]),
        "activate": Stage([], [swiglu_step(layer, b, room.scratch)], []),
        "down": down,
    }


def _linear(
    place: Linear,
    x: Tensor,
    out: Tensor,
    bias: Tensor | None,
    prepare: Sequence[PlanStep] = (),
    *,
    add: bool = False,
) -> Stage:
    """out = x·W̃ᵀ + bias, or out += that."""
    base = place.steps(x, out, add=add)
    return Stage([*prepare], [*base, *([] if bias is None else [BiasStep(out, bias)])], base)


def _attention_stages(decoder: Decoder, index: int, room: Room) -> dict[str, Stage]:
    """Grouped-query attention."""
    layer, b, scratch = decoder.layers[index], room.buffers, room.scratch
    normed = norm_step(b.x, layer.input_norm, b.xn, decoder.spec.rms_norm_eps, scratch)
    return {
        "qkv": _linear(layer.qkv, b.xn, b.qkv, None, [normed]),
        "finish": Stage([], [finish_step(decoder, layer, index, b, room.pages)], []),
        "attend": Stage([], [attention_step(decoder, index, b, room.pages, scratch)], []),
        "o": _linear(layer.o, b.att, b.x, layer.o_bias, add=True),
    }


def _latent_stages(decoder: Decoder, index: int, room: Room) -> dict[str, Stage]:
    """Latent attention: queries pass a bottleneck of their own (`q_b`) unless there is none."""
    layer, b, scratch = decoder.layers[index], room.buffers, room.scratch
    latent = layer.latent
    assert latent is not None
    assert room.latent is not None
    normed = norm_step(b.x, layer.input_norm, b.xn, decoder.spec.rms_norm_eps, scratch)
    stages = {
        "qkv": _linear(layer.qkv, b.xn, b.qkv, None, [normed]),
        "finish": Stage([], [finish_latent_step(decoder, latent, index, b, room.pages, scratch)], []),
    }
    if latent.q_b is not None:
        assert b.q_a is not None
        assert b.q is not None
        stages["q_b"] = _linear(latent.q_b, b.q_a, b.q, None)
    plan = LatentPlan(decoder, latent, index, b, room.pages, scratch, room.latent)
    return stages | {"attend": Stage([], [plan], []), "o": _linear(layer.o, b.att, b.x, layer.o_bias, add=True)}


def set_rows(step: PlanStep, n: int) -> None:
    """Let a step compute the first n rows of its buffers."""
    blocks = -(-n // ROWS_PER_TASK)
    if isinstance(step, (ExpertPlan, LatentPlan, BiasStep)):
        step.rows = n
    elif isinstance(step, Launch) and step.of is rms_norm:
        step.args[TASKS], step.args[11] = blocks, n
    elif isinstance(step, Launch) and step.of is swiglu:
        step.args[TASKS], step.args[10] = blocks, n
    elif isinstance(step, Launch) and step.of is gated_dot:
        set_gated_rows(step.args, n)
    elif isinstance(step, Launch) and step.of is finish_qkv:
        step.args[TASKS], step.args[21] = -(-n // PAGE), n
    elif isinstance(step, Launch) and step.of is finish_latent:
        step.args[TASKS], step.args[22] = -(-n // PAGE), n
    elif isinstance(step, Launch) and step.of is attention:
        step.args[TASKS] = n
    elif not isinstance(step, CopyStep):
        set_product_rows(step.args, n)
