"""Memory of this project's own run on a processor: what each buffer takes, as `tithe.models` and `trainer` make them.

A run's peak is one of three moments on top of what always stays (base, engine, adapter and its optimizer):

    sampling    cached keys and values of the live sequences, rows of the engine's forward, sampled logits
    training    everything a micro-batch keeps for its backward, one layer's gradients, scored targets
    publishing  the adapter once more as a file and once more in the engine

Dense models with grouped attention; a mixture's and a latent cache's workspaces are not modelled.

Shape legend: R rows of the largest micro-batch, N targets in it, S segments, H hidden, I width of the MLP, Q and KV
outputs of the query and of the key projection, V vocabulary, o bytes of an operand (2 in bf16, 4 in fp32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tithe.arch import ArchSpec, Base, StoredFormat, TensorFamily, TensorFormat, tensor_families
from tithe.errors import ConfigError
from tithe.planner.adapter import targeted
from tithe.planner.layers import Layer, Side, finish
from tithe.planner.request import PlanRequest

PANEL: Final = 48
"""Rows of a panel, to which stored matrices are padded (`tithe.quant.kinds`)."""
PAGE: Final = 16
"""Positions of a page (`tithe.models.kv`)."""
CHUNK_ROWS: Final = 192
"""Rows of logits that the trainer holds at once (`tithe.models.head`)."""
BACKWARD_ROWS: Final = 32
"""Rows of a task of attention's backward (`tithe.models.attention_gradients`)."""
_PACKED: Final = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})
"""GGUF formats that stay packed in memory; compound ones do too."""

PROCESS_BYTES: Final = 61_000_000
"""Beyond imports: compiled kernels, tokenizer, threads' arenas, SQLite. Fitted on the first setting of
`benchmarks/plan_vs_measured`, which is not scored."""
IMPORT_BYTES: Final = 461_000_000
"""Resident size after importing torch, numba and transformers. Seen with the pinned versions."""


@dataclass(frozen=True)
class CpuRun:
    """A run as the memory of one process sees it.

    Example: the demo's model at its defaults is ``CpuRun(spec, base, prompt=40, new=48, rollouts=64)``.
    """

    spec: ArchSpec
    base: Base
    prompt: int
    """Tokens of a prompt."""
    new: int
    """Tokens of a completion."""
    rollouts: int = 64
    """Of one batch."""
    samples: int = 8
    """Rollouts that share a prompt."""
    lora_r: int = 32
    lora_targets: tuple[str, ...] = ("all-linear",)
    micro_batch_tokens: int = 640
    recompute: bool = False
    is_packed: bool = True
    base_bytes: int = 2
    """Of one number of a base that is held unpacked: 2 in bf16, 4 in fp32."""
    operand_bytes: int = 2
    max_context: int = 2048
    max_running: int = 64
    prefill_tokens: int = 512
    live_versions: int = 1
    """Held by the engine while the trainer works."""
    threads: int = 2

    def __post_init__(self) -> None:
        if self.spec.is_moe or self.spec.latent is not None or self.spec.others:
            raise ConfigError(
                "memory on a processor is modelled for dense models with grouped attention only; "
                "run it and read run.json, or plan for a GPU",
                key="hardware",
            )


@dataclass(frozen=True)
class Micro:
    """The largest micro-batch: whole groups where they fit, else parts with their prompt repeated."""

    rows: int
    targets: int
    segments: int
    pages: int

    @staticmethod
    def of(run: CpuRun) -> Micro:
        """As `tithe.packing` divides a batch of equal lengths."""
        own = run.new - 1
        groups = -(-run.rollouts // run.samples)
        whole = run.prompt + run.samples * own
        if whole <= run.micro_batch_tokens:
            parts = _fullest(groups, whole, run.micro_batch_tokens)
            members = [run.samples] * parts
        else:
            room = max(1, run.micro_batch_tokens - run.prompt)
            each = _fullest(run.samples, own, room)
            members = [each] * max(1, min(groups, run.micro_batch_tokens // (run.prompt + each * own)))
        full, end = run.prompt // PAGE, -(-(run.prompt + own) // PAGE)
        pages = sum(-(-run.prompt // PAGE) + n * (end - full) for n in members) + 1
        rows = sum(run.prompt + n * own for n in members)
        return Micro(rows, sum(members) * run.new, sum(n + 1 for n in members), pages)


def _fullest(count: int, cost: int, room: int) -> int:
    """Equal items in the fullest of as few balanced bins as hold them all."""
    fit = max(1, room // max(1, cost))
    bins = -(-count // fit)
    return -(-count // bins)


def cpu_run(request: PlanRequest) -> CpuRun:
    """A request as one process: micro-batches of 640 tokens unless another number is asked for, 8 samples a prompt."""
    return CpuRun(
        spec=request.spec,
        base=request.base,
        prompt=request.prompt_tokens,
        new=request.new_tokens,
        rollouts=request.batch,
        lora_r=request.lora_r,
        lora_targets=request.lora_targets,
        micro_batch_tokens=request.micro_batch_tokens or 640,
        recompute=request.recompute,
        max_context=request.context,
        max_running=request.sequences,
        live_versions=request.live_versions,
    )


def cpu_side(run: CpuRun) -> Side:
    """Every layer of the process at its peak, `runtime` with what imports take."""
    persistent = persistent_bytes(run)
    moments = {"sampling": sampling_bytes(run), "training": training_bytes(run), "publishing": publishing_bytes(run)}
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    merged = dict(persistent)
    for name, n_bytes in moments[peak].items():
        merged[name] = merged.get(name, 0) + n_bytes
    source = f"tithe.models and tithe.trainer, buffer by buffer; the peak is {peak}"
    layers = [Layer(name, n_bytes, f"at the peak, {peak}", source) for name, n_bytes in merged.items()]
    known = "pinned versions on Linux; docs/planner.md"
    layers.append(Layer("runtime", IMPORT_BYTES + PROCESS_BYTES, f"{IMPORT_BYTES:,} + {PROCESS_BYTES:,}", known))
    return finish("all", 1, layers)


def peak_after_imports(run: CpuRun) -> int:
    """Bytes of the peak beyond the resident size after imports: what `benchmarks/plan_vs_measured` measures."""
    return cpu_side(run).total_bytes - IMPORT_BYTES


def live_tensor_bytes(run: CpuRun) -> int:
    """Bytes of all storages that are alive when a backward ends, the engine's own pages left out.

    Storage is what was asked for: rows that are never written count, and one layer's gradients have gone.
    """
    micro, untouched = Micro.of(run), 0 if not _is_gated(run) else 8 * run.spec.intermediate_size
    rows = run.max_running + run.prefill_tokens
    engine = rows * (_row_bytes(run) + untouched) - _engine_rows(run) * _row_bytes(run)
    logits = 4 * run.spec.vocab_size * (64 - min(64, run.max_running, run.rollouts))
    scored = micro.targets * run.spec.hidden_size * (4 + run.operand_bytes + 4)
    moment = training_bytes(run)["gradients"] + _kept_bytes(run, micro) + micro.rows * untouched + scored
    pages = micro.pages * _page_bytes(run)
    return sum(persistent_bytes(run).values()) + engine + logits + moment + pages


def persistent_bytes(run: CpuRun) -> dict[str, int]:
    """What stays through a run."""
    spec = run.spec
    tables = 4 * run.max_context * spec.rotary_dim  # cosines and sines of half the rotated dimensions
    parameters = _adapter_parameters(run)
    return {
        "base": base_bytes(run) + tables,
        "masters": 4 * parameters,
        "optimizer": 8 * parameters,
        "adapters": run.live_versions * forward_adapter_bytes(run) + backward_adapter_bytes(run),
        "buffers": _engine_bytes(run),
        "logits": _sampled_logits_bytes(run) + _head_chunk_bytes(run),
    }


def base_bytes(run: CpuRun) -> int:
    """The base as it lies in memory: panels of 48 rows, the file's own bytes where kernels read them."""
    total = 0
    for family in tensor_families(run.spec):
        layers = len(family.layers) or 1
        total += layers * _tensor_bytes(run, family)
    return total


def _tensor_bytes(run: CpuRun, family: TensorFamily) -> int:
    if len(family.matrix) == 1:
        return 4 * family.matrix[0]  # norms and biases are float32
    rows, columns = family.matrix
    padded = -(-rows // PANEL) * PANEL
    stored: StoredFormat = run.base.format_of(family.member(family.layers[0] if family.layers else None))
    is_kept = run.is_packed and (stored.kind.is_compound or stored.kind.value in _PACKED)
    if not is_kept:
        return padded * columns * run.base_bytes
    return stored.n_bytes((padded, columns)) if stored.kind is not TensorFormat.FP8_BLOCK else padded * columns


def _sites(run: CpuRun) -> list[tuple[str, tuple[int, int], int]]:
    """(place in the block, (out, in), layers) of every adapted linear."""
    places = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
    found = []
    for family in targeted(run.spec, run.lora_targets):
        part = family.name.removesuffix("_proj.weight").rpartition(".")[2]
        out, width = family.matrix
        found.append((places[part], (out, width), len(family.layers)))
    return found


def _adapter_parameters(run: CpuRun) -> int:
    return sum(layers * run.lora_r * (out + width) for _, (out, width), layers in _sites(run))


def forward_adapter_bytes(run: CpuRun) -> int:
    """One version as the forward reads it: A of a place stacked [Σr, in], B of each linear [out, r], in panels."""
    total, ranks = 0, dict[str, tuple[int, int, int]]()
    for place, (out, width), layers in _sites(run):
        rows = ranks.get(place, (0, width, layers))[0] + _even(run.lora_r)
        ranks[place] = rows, width, layers
        total += layers * _panels(out) * _even(run.lora_r)
    total += sum(layers * _panels(rows) * width for rows, width, layers in ranks.values())
    return total * run.operand_bytes


def backward_adapter_bytes(run: CpuRun) -> int:
    """The trainer's own cast: the forward's, and both matrices transposed."""
    r = _even(run.lora_r)
    turned = sum(layers * (_panels(width) * r + _panels(r) * out) for _, (out, width), layers in _sites(run))
    return forward_adapter_bytes(run) + turned * run.operand_bytes


def _engine_bytes(run: CpuRun) -> int:
    """Rows of the engine's forward that are ever touched, its block table, and scratch of every thread."""
    spec = run.spec
    group = spec.n_heads // spec.n_kv_heads
    scratch = 4 * run.threads * max(group * (run.max_context + spec.head_dim), spec.hidden_size, spec.intermediate_size)
    table = 4 * (3 * run.max_running + 2) * -(-run.max_context // PAGE)
    return _engine_rows(run) * _row_bytes(run) + scratch + table


def _engine_rows(run: CpuRun) -> int:
    """Rows of the fullest tick: prompts of a batch, and one of every live sequence."""
    return min(run.max_running + run.prefill_tokens, _prompts(run) * run.prompt + min(run.max_running, run.rollouts))


def _row_bytes(run: CpuRun) -> int:
    """Of the engine's forward."""
    spec, o = run.spec, run.operand_bytes
    per_row = 4 * spec.hidden_size + o * (spec.hidden_size + spec.q_size + spec.intermediate_size)
    per_row += 4 * (spec.q_size + 2 * spec.kv_size) + (0 if _is_gated(run) else 8 * spec.intermediate_size)
    return per_row + o * _widest_rank(run)


def _sampled_logits_bytes(run: CpuRun) -> int:
    return 4 * min(run.max_running, run.rollouts) * run.spec.vocab_size


def _head_chunk_bytes(run: CpuRun) -> int:
    """The trainer's own chunk of logits."""
    return 4 * min(CHUNK_ROWS, max(Micro.of(run).targets, 64)) * run.spec.vocab_size


def _prompts(run: CpuRun) -> int:
    return -(-run.rollouts // run.samples)


def sampling_bytes(run: CpuRun) -> dict[str, int]:
    """Pages of the prompts and of the sequences that run at once."""
    running = min(run.max_running, run.rollouts)
    prompts = -(-running // run.samples)
    own = -(-(run.prompt + run.new) // PAGE) - run.prompt // PAGE
    pages = prompts * -(-run.prompt // PAGE) + running * own
    return {"kv_cache": pages * _page_bytes(run)}


def _page_bytes(run: CpuRun) -> int:
    return PAGE * run.spec.n_layers * 2 * run.spec.kv_size * run.operand_bytes


def training_bytes(run: CpuRun) -> dict[str, int]:
    """One micro-batch from its forward to the end of its backward, gradients of the batch so far included."""
    micro = Micro.of(run)
    kept, moving = _kept_bytes(run, micro), max(_scoring_bytes(run, micro), _backward_bytes(run, micro))
    pages = micro.pages * _page_bytes(run)
    return {
        "gradients": 4 * sum(n * _even(run.lora_r) * (o + w) for _, (o, w), n in _sites(run)),
        "activations": kept + moving,
        "kv_cache": pages + _prompts(run) * -(-run.prompt // PAGE) * _page_bytes(run),  # idle prompts stay cached
    }


def _kept_bytes(run: CpuRun, micro: Micro) -> int:
    """Buffers of `TrainPass` and of its forward plan."""
    spec, o, rows = run.spec, run.operand_bytes, micro.rows
    h, q, kv, i = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
    slots = 1 if run.recompute else spec.n_layers
    ranks = _ranks(run)
    saved = spec.n_layers * 4 * h + slots * (4 * h + 2 * o * i + 4 * q + 4 * spec.n_heads + o * q)
    saved += slots * (4 * (q + kv) if spec.qk_norm else 0) + slots * o * sum(ranks.values())
    plan = 4 * h + o * h + 4 * (q + 2 * kv) + o * q + o * i + 4 * spec.n_heads + o * _widest_rank(run)
    plan += 0 if _is_gated(run) else 8 * i
    own = 2 * o * i + o * i + 4 * q + o * (q + 2 * kv)
    return rows * (saved + plan + own) + _backward_scratch(run, micro)


def _backward_scratch(run: CpuRun, micro: Micro) -> int:
    """One expanded weight, panels of a transposed input, gradients of keys and values, scratch of every thread."""
    spec, o, rows = run.spec, run.operand_bytes, micro.rows
    h, q, kv, i = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
    weight = max(_panels(h) * 2 * i, _panels(i) * h, _panels(h) * (q + 2 * kv), _panels(q) * h)
    panels = _panels(max(h, i, q)) * _even(rows)
    longest = -(-(run.prompt + run.new) // PAGE) * PAGE
    group = spec.n_heads // spec.n_kv_heads
    dkv = 4 * micro.segments * 2 * kv * longest
    scratch = max(2 * BACKWARD_ROWS * group * (spec.head_dim + longest), 2 * (q + 2 * kv)) + 3 * i
    return o * (weight + panels) + dkv + 4 * run.threads * scratch


def _scoring_bytes(run: CpuRun, micro: Micro) -> int:
    """Targets scored with their derivatives: residual and normed rows, ∂logp/∂h, a chunk of probabilities."""
    spec, o = run.spec, run.operand_bytes
    chunk = min(micro.targets, CHUNK_ROWS) * spec.vocab_size * o
    return micro.targets * spec.hidden_size * (4 + o + 4 + o) + chunk


def _backward_bytes(run: CpuRun, micro: Micro) -> int:
    """What scoring left and one layer's gradients: of the stream, of the MLP's hidden rows, of its input."""
    spec, o, rows = run.spec, run.operand_bytes, micro.rows
    left = micro.targets * spec.hidden_size * (4 + 4 + 4 + 4)
    stream = rows * spec.hidden_size * (4 + o + 4)
    keys = o * micro.pages * PAGE * 2 * spec.kv_size
    return left + stream + max(4 * rows * spec.intermediate_size, 4 * rows * spec.q_size + keys)


def publishing_bytes(run: CpuRun) -> dict[str, int]:
    """The published file's tensors in memory, read again by the engine, and one version more."""
    return {"buffers": 8 * _adapter_parameters(run), "adapters": forward_adapter_bytes(run)}


def _ranks(run: CpuRun) -> dict[str, int]:
    """Σr by place."""
    ranks: dict[str, int] = {}
    for place, _, _ in _sites(run):
        ranks[place] = ranks.get(place, 0) + _even(run.lora_r)
    return ranks


def _widest_rank(run: CpuRun) -> int:
    return max(_ranks(run).values(), default=2)


def _is_gated(run: CpuRun) -> bool:
    """Whether one launch makes gate, up and their product, so that the float32 pair is never written."""
    return run.operand_bytes == 2 and run.spec.intermediate_size % PANEL == 0


def _panels(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def _even(count: int) -> int:
    return count + count % 2
