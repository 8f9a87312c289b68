"""Bytes of the buffers of a forward and of a backward, named as `tithe.models` makes them.

Shape legend: R rows, N targets, S segments, H hidden, I width of dense MLPs, W of experts, P pairs of a row and an
expert in a window, V vocabulary, o bytes of an operand. What is never written takes no memory: functions say which of
their buffers are left out for `untouched_bytes`, which counts them as storage.
"""

from __future__ import annotations

from typing import Final

from tithe.planner.cpu_run import PAGE, PANEL, WINDOW, CpuRun, Micro, even, panels, turned

CHUNK_ROWS: Final = 192
"""Rows of logits that the trainer holds at once (`tithe.models.head`)."""
VOCABULARY: Final = 85 * PANEL
"""Tokens of the head that are expanded at once (`tithe.models.head`)."""
BACKWARD_ROWS: Final = 32
"""Rows of a task of attention's backward (`tithe.models.attention_gradients`)."""
BLOCK: Final = 128
"""Pairs of a row and a head that latent attention's backward computes at once (`tithe.models.latent_gradients`)."""
HEAD_CHUNK: Final = 32
"""Heads of a task of latent attention (`tithe.models.latent_kernels`)."""
_BLOCK_COLUMNS: Final = 96
"""Columns that a thread turns around at once (`tithe.quant.grouped`)."""


# ------------------------------------------------------------------ the forward


def forward_bytes(run: CpuRun, rows: int, *, longest: int, sequences: int) -> int:
    """A `ForwardPlan` for so many rows: its row buffers, workspaces and scratch. Without the log-sum-exps."""
    table = 4 * sequences * -(-longest // PAGE)
    return rows * row_bytes(run) + expert_forward_bytes(run, rows) + table + _scratch_bytes(run, longest)


def row_bytes(run: CpuRun) -> int:
    """Of one row of a forward; a gated pair in float32 is left out where it is never written."""
    s, o = run.sizes, run.operand_bytes
    stream = 4 * s.hidden + o * s.hidden + 4 * s.qkv + o * s.att + o * s.dense + o * s.q_a + 4 * s.q_b
    pair = 0 if run.is_gated else 8 * s.dense
    return stream + pair + o * run.widest_rank + by_head_bytes(run) + routed_bytes(run) + 8


def by_head_bytes(run: CpuRun) -> int:
    """Latent attention's arrays by head: plain and absorbed query, what was mixed, the answer; u of an adapter."""
    latent, o = run.spec.latent, run.operand_bytes
    if latent is None:
        return 0
    query = o * latent.qk_nope_head_dim + 4 * latent.cached_per_token
    answer = o * latent.kv_lora_rank + 4 * latent.v_head_dim
    return run.spec.n_heads * (query + answer + o * run.ranks().get("kv_b", 0))


def routed_bytes(run: CpuRun) -> int:
    """What routers choose of a row: ids and weights of every layer (a shared expert's too), and one layer's logits."""
    mixture = run.spec.mixture
    chosen = 8 * mixture.n_experts_per_token + 4 + (8 if mixture.n_shared else 0)
    return len(mixture.layers) * chosen + 4 * mixture.n_experts


def pairs_of(run: CpuRun, rows: int) -> int:
    """Pairs that a window has room for."""
    return min(WINDOW, rows * run.spec.n_experts_per_token)


def expert_forward_bytes(run: CpuRun, rows: int) -> int:
    """A window's gathered rows, gate and up, their product and the answers; the adapters' u; the sorted pairs."""
    s, o = run.sizes, run.operand_bytes
    if not run.spec.is_moe:
        return 0
    u = sum(run.ranks(experts=True).values())
    window = pairs_of(run, rows) * (o * s.hidden + 8 * s.expert + o * s.expert + 4 * s.hidden + o * u)
    return window + 20 * rows * run.spec.n_experts_per_token


def _scratch_bytes(run: CpuRun, longest: int) -> int:
    """Of all threads: attention's scores or a row; panels that experts and heads expand into."""
    s, o, latent = run.sizes, run.operand_bytes, run.spec.latent
    if latent is None:
        attention = run.spec.n_heads // run.spec.n_kv_heads * (longest + run.spec.head_dim)
    else:
        heads = min(HEAD_CHUNK, run.spec.n_heads)
        attention = max(heads * (longest + latent.kv_lora_rank) + 16 * s.cached, run.spec.q_size + s.cached)
    floats = 4 * max(attention, s.hidden, run.spec.intermediate_size)
    if run.spec.is_moe:
        floats += o * PANEL * max(s.hidden, s.expert) + 12 * s.expert
        floats += o * _BLOCK_COLUMNS * (max(s.hidden, 2 * s.expert) + PANEL)
    if latent is not None:
        widest = max(latent.kv_lora_rank, latent.qk_nope_head_dim, latent.v_head_dim)
        floats += o * _BLOCK_COLUMNS * (widest + PANEL)
    return run.threads * floats


# ------------------------------------------------------------------ what training keeps


def kept_bytes(run: CpuRun, micro: Micro) -> int:
    """Buffers of `TrainPass`: copies of every layer (of one where layers are recomputed), and its own forward's."""
    s, o, rows = run.sizes, run.operand_bytes, micro.rows
    layers = run.spec.n_layers
    slots = 1 if run.recompute else layers
    dense_slots = min(slots, s.dense_layers)
    stream = layers * 4 * s.hidden + slots * 4 * s.hidden + dense_slots * 2 * o * s.dense
    ranks = sum(r for place, r in run.ranks().items() if place != "kv_b")
    copies = slots * (_attention_copies(run) + o * ranks)
    own = 2 * o * s.dense + o * s.dense + _attention_gradients(run) + 4 * run.spec.n_heads
    longest = run.prompt + run.new
    forward = forward_bytes(run, rows, longest=longest, sequences=micro.segments + 1)
    return rows * (stream + copies + own) + forward + _expert_backward(run, rows) + _backward_scratch(run, micro)


def _attention_copies(run: CpuRun) -> int:
    """Of a row and layer."""
    spec, s, o = run.spec, run.sizes, run.operand_bytes
    if spec.latent is not None:
        by_head = spec.n_heads * (o * spec.latent.qk_nope_head_dim + 4 * s.cached + o * spec.latent.kv_lora_rank)
        return by_head + 4 * spec.n_heads + 4 * s.qkv + o * s.att
    raw = 4 * (spec.q_size + spec.kv_size) if spec.qk_norm else 0
    return 4 * spec.q_size + 4 * spec.n_heads + o * spec.q_size + raw


def _attention_gradients(run: CpuRun) -> int:
    """Of a row: grouped queries in float32 and all projections as operands; latents' projections alone."""
    s, o = run.sizes, run.operand_bytes
    return o * s.qkv + (4 * run.spec.q_size if run.spec.latent is None else 0)


def _expert_backward(run: CpuRun, rows: int) -> int:
    """Besides the forward's window: gradients of answers, of the product, of gate and up; du, and one site turned."""
    s, o = run.sizes, run.operand_bytes
    if not run.spec.is_moe:
        return 0
    ranks = run.ranks(experts=True)
    du = sum(ranks.values())
    window = pairs_of(run, rows)
    turned_rows = run.rank * even(window + run.spec.n_experts + 2) if ranks else 0
    return window * (o * s.hidden + 4 * s.expert + 2 * o * s.expert + o * du) + o * turned_rows


def _backward_scratch(run: CpuRun, micro: Micro) -> int:
    """One expanded weight, panels of a transposed input, gradients of the cache by segment, scratch of every thread."""
    spec, s, o, rows = run.spec, run.sizes, run.operand_bytes, micro.rows
    linears = [
        (s.qkv, s.hidden),
        (s.hidden, s.att),
        (s.q_b, s.q_a),
        (s.kv_b, spec.latent.kv_lora_rank if spec.latent else 0),
    ]
    linears += [(2 * s.dense, s.hidden), (s.hidden, s.dense)]
    weight = max(turned(out, width) for out, width in linears)
    widest = max(s.hidden, s.dense, s.att, s.q_b, s.kv_b, spec.q_size if spec.latent is None else 0)
    longest = -(-(run.prompt + run.new) // PAGE) * PAGE
    d_cached = 4 * micro.segments * s.cached * longest
    if spec.latent is not None:
        block = max(1, BLOCK // spec.n_heads) * spec.n_heads
        attention = block * (2 * s.cached + spec.latent.kv_lora_rank + 2 * longest) + 16 * s.cached
        attention = max(attention, spec.n_heads * spec.latent.qk_head_dim)
    else:
        group = spec.n_heads // spec.n_kv_heads
        attention = max(2 * BACKWARD_ROWS * group * (spec.head_dim + longest), 2 * s.qkv)
    scratch = attention + max(3 * s.dense, s.hidden)
    return o * (weight + turned(rows, widest)) + d_cached + 4 * run.threads * scratch


# ------------------------------------------------------------------ what comes and goes


def scoring_bytes(run: CpuRun, micro: Micro) -> int:
    """Targets scored with their derivatives: residual and normed rows, ∂logp/∂h, a chunk of probabilities, a part of
    the head turned around."""
    s, o, vocab = run.sizes, run.operand_bytes, run.spec.vocab_size
    chunk = min(micro.targets, CHUNK_ROWS) * vocab * o
    head = turned(min(VOCABULARY, panels(vocab)), s.hidden) * o
    return micro.targets * s.hidden * (4 + o + 4) + chunk + head


def backward_bytes(run: CpuRun, micro: Micro) -> int:
    """What scoring left, the stream's gradient and its operands, and one layer's own."""
    s, o = run.sizes, run.operand_bytes
    left = micro.targets * s.hidden * (4 + 4 + 4 + 4)
    stream = micro.rows * s.hidden * (4 + (o if o == 2 else 0))
    return (
        left + stream + max(_mlp_backward(run, micro), _experts_backward(run, micro), _attention_backward(run, micro))
    )


def _mlp_backward(run: CpuRun, micro: Micro) -> int:
    """Gradients of the hidden rows, of the normed ones, and of u on both sides."""
    s, o, ranks = run.sizes, run.operand_bytes, run.ranks()
    if not s.dense:
        return 0
    u = o * (ranks.get("down", 0) + 3 * ranks.get("gate_up", 0))
    return micro.rows * (4 * s.dense + 4 * s.hidden + u)


def _experts_backward(run: CpuRun, micro: Micro) -> int:
    """Gradients of the normed rows, the router's logits twice, its matrix turned."""
    s, o, spec = run.sizes, run.operand_bytes, run.spec
    if not spec.is_moe:
        return 0
    router = micro.rows * (4 + o) * spec.n_experts + o * turned(spec.n_experts, s.hidden)
    return micro.rows * (4 * s.hidden + 4 * spec.n_experts_per_token) + router


def _attention_backward(run: CpuRun, micro: Micro) -> int:
    """Gradients of what o_proj read, then of pages turned around, or by head and of the normed rows."""
    s, o, spec, ranks = run.sizes, run.operand_bytes, run.spec, run.ranks()
    d_att = micro.rows * (4 * s.att + o * ranks.get("o", 0))
    through = micro.rows * (4 * s.hidden + o * 3 * ranks.get("qkv", 0))
    if spec.latent is None:
        return d_att + max(o * micro.pages * PAGE * s.cached, through)
    return d_att + max(micro.rows * _latent_gradients(run), micro.rows * o * s.q_b + through)


def _latent_gradients(run: CpuRun) -> int:
    """Of a row: answers, mixes, queries absorbed and as they came, and what a projection or an adapter takes."""
    o, r, heads, latent = run.operand_bytes, run.ranks().get("kv_b", 0), run.spec.n_heads, run.spec.latent
    assert latent is not None
    mixed = o * latent.v_head_dim + 4 * latent.kv_lora_rank
    queries = 4 * latent.cached_per_token + o * latent.kv_lora_rank + 4 * latent.qk_nope_head_dim
    return heads * (mixed + queries + max(o * latent.qk_head_dim, 3 * o * r))


def untouched_bytes(run: CpuRun, rows: int, *, slots: int = 0) -> int:
    """Storage of so many rows that a pass asks for and never writes: a gated pair in float32, and with `slots` copies
    of hidden rows for layers that have experts."""
    s = run.sizes
    pair = 8 * s.dense if run.is_gated else 0
    return rows * (pair + 2 * run.operand_bytes * s.dense * max(0, slots - s.dense_layers))
