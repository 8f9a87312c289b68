"""Latent attention in its absorbed form, against the expanded one in torch: kernels, kv_b_proj by head, adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.attention import causal, int32, rows
from support.decoders import BF16, FP32, WIDE, Walk, random_adapter, random_ids, tiny_decoder, transformers_twin
from support.training import Trainee, random_batch, relative_error
from tithe.arch.attention import LatentAttention
from tithe.errors import ModelError
from tithe.lora import LoraSpec
from tithe.models.attention_kernels import PAGE
from tithe.models.latent import HeadRows, HeadTables, LatentLayer, Stored, rows_table
from tithe.models.latent_gradients import BLOCK, latent_attention_backward
from tithe.models.latent_kernels import HEAD_CHUNK, latent_attention
from tithe.models.linear import Linear, Site
from tithe.models.options import ModelOptions
from tithe.models.training import Capacity
from tithe.packing import pad_rows, plan_micro_batches
from tithe.quant import PackedMatrix, pack_dense, set_threads
from tithe.quant.grouped import PanelScratch, product, product_scratch, transposed_product, transposed_scratch
from tithe.quant.pack import pack_int4, pack_int8
from tithe.quant.reference import quantize_int4, quantize_int8

MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
IDS = random_ids(37)
PAGES, TABLE = 12, 4
LONGEST = TABLE * PAGE


@dataclass
class Bench:
    """Latents of two sequences in pages; pages begin full of NaN, so that a stale slot would show."""

    heads: int
    latent: int
    rope: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.layers = 3  # this one is the second
        self.pages = torch.full((PAGES, self.layers, PAGE, self.width), float("nan"), dtype=self.dtype)[:, 1]
        self.table = torch.tensor([[7, 2, 11, 5], [0, 9, 1, 4]], dtype=torch.int32)
        self.chunk = min(HEAD_CHUNK, self.heads)

    @property
    def width(self) -> int:
        return self.latent + self.rope

    def put(self, kept: Tensor, position: Tensor, sequence: Tensor) -> None:
        """Rows [R, C + E] of positions to their pages."""
        for row, p, s in zip(kept, position.tolist(), sequence.tolist(), strict=True):
            self.pages[int(self.table[s, p // PAGE]), p % PAGE] = row.to(self.dtype)

    def attend(self, q: Tensor, position: Tensor, sequence: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """(mix [R, heads, C], log-sum-exp [R, heads]) for queries [R, heads, C + E]."""
        n = len(q)
        by_head = torch.full((self.heads, capacity, self.width), float("nan"))
        by_head[:, :n] = q.transpose(0, 1)
        out, lse = torch.empty(self.heads, capacity, self.latent), torch.empty(n, self.heads)
        floats = self.chunk * (LONGEST + self.latent) + 16 * self.width
        scratch = torch.empty(2, floats)
        args = [by_head.data_ptr(), capacity, self.heads, self.latent, self.rope, self.pages.data_ptr()]
        args += [int(self.dtype == torch.bfloat16), self.table.data_ptr(), TABLE, sequence.data_ptr()]
        args += [position.data_ptr(), out.data_ptr(), 0, lse.data_ptr(), self.width**-0.5, scratch.data_ptr(), floats]
        tasks = n * -(-self.heads // self.chunk)
        latent_attention.bind(tasks, [*args, LONGEST, self.layers, self.chunk]).run()
        return out[:, :n].transpose(0, 1).contiguous(), lse

    def backward(self, q: Tensor, d_mix: Tensor, lse: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(dq [R, heads, C + E], d_page [longest, C + E]) of rows from position `first` on of sequence 0."""
        n, block = len(q), max(1, BLOCK // self.heads) * self.heads
        by_head, d_by_head = (t.transpose(0, 1).contiguous() for t in (q, d_mix))
        dq, d_page = torch.empty_like(by_head), torch.zeros(1, LONGEST, self.width)
        floats = block * (2 * self.width + self.latent + 2 * LONGEST) + 16 * self.width
        scratch, pages = torch.empty(2, floats), torch.nan_to_num(self.pages.float(), 0.0)
        whole = torch.zeros(PAGES, self.layers, PAGE, self.width, dtype=self.dtype)
        whole[:, 1] = pages.to(self.dtype)
        segment = [int32(0), int32(n), int32(first)]
        args = [by_head.data_ptr(), d_by_head.data_ptr(), n, self.heads, self.latent, self.rope]
        args += [whole[:, 1].data_ptr(), int(self.dtype == torch.bfloat16), self.table.data_ptr(), TABLE]
        args += [*(t.data_ptr() for t in segment), lse.data_ptr(), self.width**-0.5, dq.data_ptr(), d_page.data_ptr()]
        latent_attention_backward.bind(1, [*args, LONGEST, scratch.data_ptr(), floats, self.layers]).run()
        return dq.transpose(0, 1), d_page[0]

    def reference(self, q: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The same by torch, for the last positions of `kept` [T, C + E]."""
        scores = torch.einsum("rhw,tw->hrt", q, kept) * self.width**-0.5
        scores = scores.masked_fill(~causal(len(q), len(kept)), -torch.inf)
        mix = torch.einsum("hrt,tc->rhc", scores.softmax(-1), kept[:, : self.latent])
        return mix, scores.logsumexp(-1).T


def case(bench: Bench, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, kept rows as the pages hold them, positions) of n rows of sequence 0."""
    position = torch.arange(n, dtype=torch.int32)
    q, kept = rows(n, bench.heads * bench.width, 1).view(n, bench.heads, -1), rows(n, bench.width, 2)
    bench.put(kept, position, torch.zeros_like(position))
    return q, kept.to(bench.dtype).float(), position


# ------------------------------------------------------------------ kernels


SHAPES = [(1, 16, 16), (4, 32, 16), (3, 80, 48), (40, 64, 32), (128, 512, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "latent", "rope"), SHAPES)
def test_attention_over_latents_is_torchs(heads: int, latent: int, rope: int, dtype: torch.dtype) -> None:
    bench = Bench(heads, latent, rope, dtype)
    q, kept, position = case(bench, 37)
    mix, lse = bench.attend(q, position, torch.zeros_like(position), capacity=40)
    theirs, their_lse = bench.reference(q, kept)
    torch.testing.assert_close(mix, theirs, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse, their_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "latent", "rope"), SHAPES[1:4])
def test_a_decoded_row_has_the_bits_of_the_prefilled_row(
    heads: int, latent: int, rope: int, dtype: torch.dtype
) -> None:
    """One row at a time, while later slots still hold NaN, and beside rows of another sequence."""
    whole, stepwise = Bench(heads, latent, rope, dtype), Bench(heads, latent, rope, dtype)
    n = 37
    q, kept, position = case(whole, n)
    other_q, other = rows(n, heads * whole.width, 5).view(n, heads, -1), rows(n, whole.width, 6)
    mix, lse = whole.attend(q, position, torch.zeros_like(position), capacity=n)
    for i in range(n):
        at, of = int32(i, i), int32(1, 0)
        stepwise.put(torch.stack([other[i], kept[i]]), at, of)
        one_mix, one_lse = stepwise.attend(torch.stack([other_q[i], q[i]]), at, of, capacity=3)
        assert torch.equal(one_mix[1], mix[i]), i
        assert torch.equal(one_lse[1], lse[i]), i


@pytest.mark.parametrize("first", [0, 13, 30])
@pytest.mark.parametrize(("heads", "latent", "rope"), [*SHAPES[:4], (130, 32, 16)])
def test_gradients_over_latents_are_autograds(heads: int, latent: int, rope: int, first: int) -> None:
    bench = Bench(heads, latent, rope, torch.float32)
    q, kept, position = case(bench, 50)
    lse = bench.attend(q, position, torch.zeros_like(position), capacity=50)[1]
    d_mix = rows(50 - first, heads * latent, 4).view(-1, heads, latent)
    dq, d_page = bench.backward(q[first:].contiguous(), d_mix, lse[first:].contiguous(), first)
    q, kept = q[first:].clone().requires_grad_(), kept.clone().requires_grad_()
    theirs = torch.autograd.grad(bench.reference(q, kept)[0], (q, kept), d_mix)
    for mine, their in zip((dq, d_page[:50]), theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=6e-6 * float(their.abs().max()))
    assert not d_page[50:].any()


# ------------------------------------------------------------------ kv_b_proj, head by head


def packed(kind: str, w: Tensor, *, rounded: bool) -> PackedMatrix:
    if kind == "dense":
        return pack_dense(w, rounded=rounded)
    if kind == "int8":
        g = quantize_int8(w.numpy())
        return pack_int8(g.q, g.scale, rounded=rounded)
    g = quantize_int4(w.numpy())
    assert g.zero is not None
    return pack_int4(g.q, g.scale, g.zero, rounded=rounded)


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
@pytest.mark.parametrize(("plain", "value"), [(16, 32), (40, 24), (128, 128)])
def test_products_by_head_are_those_of_a_matrix_of_its_own(kind: str, mode: str, plain: int, value: int) -> None:
    """Bit for bit, although heads begin anywhere in a panel of 48 rows."""
    heads, latent, n, capacity = 5, 64, 7, 9
    stored = Stored(torch.bfloat16 if mode == "bf16" else torch.float32)
    matrix = packed(kind, rows(heads * (plain + value), latent), rounded=mode == "bf16")
    dense = matrix.expand(torch.float32).view(heads, plain + value, latent)
    sizes = LatentAttention(None, latent, plain, 16, value)
    layer = LatentLayer(sizes, heads, None, None, torch.ones(latent), Linear((Site("kv_b", 0, 1),), (matrix,)))
    tables, groups = layer.tables(), HeadRows(heads, capacity)
    groups.select(1, n)
    room = max(product_scratch(128, torch.float32), transposed_scratch(128, torch.float32))
    scratch = PanelScratch(room)
    x = stored.take(rows(heads * capacity, latent, 1))
    y = stored.take(rows(heads * capacity, plain, 2))
    values, absorbed = torch.zeros(heads * capacity, value), torch.zeros(heads * capacity, latent)
    product(tables.values, x, values, groups, scratch).run()
    transposed_product(tables.keys, y, absorbed, groups, scratch).run()
    for h in range(heads):
        own = slice(h * capacity + 1, h * capacity + n)
        for out, source, w in ((values, x, dense[h, plain:]), (absorbed, y, dense[h, :plain].T)):
            exact = pack_dense(w.contiguous(), rounded=mode == "bf16").matmul(source[own])
            assert torch.equal(out[own], exact)
        assert not values[h * capacity].any(), "rows that were not asked for"


def test_tables_copy_nothing() -> None:
    matrix = pack_dense(rows(96, 32))
    assert rows_table(matrix, [0, 50], 46).storages()[0] is matrix.data
    with pytest.raises(AssertionError):
        HeadTables.of((matrix, matrix), None)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------ whole models


KV_B = LoraSpec(r=4, alpha=8, target_modules=("kv_b_proj",))
ALL = LoraSpec(r=4, alpha=8)
WIDE_RANK = LoraSpec(r=51, alpha=8, target_modules=("kv_b_proj", "q_b_proj"))
BATCH = random_batch()
(WHOLE,) = plan_micro_batches(BATCH, 10_000)


def test_an_adapter_on_kv_b_proj_is_merged_weights(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "deepseek_v3", FP32)
    model = transformers_twin(tmp_path / "m")
    modules = dict(model.named_modules())
    for spec in (KV_B, WIDE_RANK):
        tensors = random_adapter(decoder, spec)
        changes = {n.split(".lora_")[0].removeprefix("base_model.model."): n for n in tensors if "lora_A" in n}
        for module, name in changes.items():
            delta = spec.scale(module) * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            modules[module].weight += delta
        walk = Walk(decoder)
        mine = walk.logits(walk.prefill(0, IDS, adapter=decoder.build_adapter(tensors, spec)))
        with torch.no_grad():
            theirs = model(torch.from_numpy(IDS).long()[None]).logits[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
        for module, name in changes.items():
            modules[module].weight -= spec.scale(module) * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_computed_under_its_own_adapter(tmp_path: Path, mode: str) -> None:
    """Adapters of several ranks and the bare base in one batch, bit for bit as each alone; then one is dropped."""
    decoder = tiny_decoder(tmp_path / "m", "deepseek_v3", MODES[mode])
    adapters = [None, *(decoder.build_adapter(random_adapter(decoder, s, 1), s) for s in (KV_B, ALL, WIDE_RANK))]
    alone = [Walk(decoder).prefill(0, IDS, adapter=a) for a in adapters]
    walk = Walk(decoder)
    together = [(s, i, int(t)) for s in range(4) for i, t in enumerate(IDS)]
    for _ in range(2):
        x = walk.run(together, [(37 * s, 37 * s + 37, a) for s, a in enumerate(adapters)])
        assert torch.equal(x, torch.cat(alone))
    assert adapters[1] is not None
    walk.plan.forget(adapters[1])
    assert torch.equal(walk.prefill(6, IDS, adapter=adapters[2]), alone[2])
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_packed_base_means_its_dequantized_weights(tmp_path: Path, quantize: str) -> None:
    """Bit for bit, kv_b_proj included."""
    options = ModelOptions(quantize=quantize)  # pyright: ignore[reportArgumentType]
    packed_base = tiny_decoder(tmp_path / "m", "deepseek_v3", options)
    dense = tiny_decoder(tmp_path / "m", "deepseek_v3", replace(options, compute="dequantized"))
    latent = packed_base.layers[0].latent
    assert latent is not None
    assert latent.kv_b.parts[0].name == quantize
    assert torch.equal(*(Walk(decoder).prefill(0, IDS) for decoder in (packed_base, dense)))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_depend_on_nothing_but_the_rows(tmp_path: Path, mode: str) -> None:
    """Recomputed layers, padding rows, a larger pass and two threads: the same bits; cut batches: rounding."""
    decoder = tiny_decoder(tmp_path / "m", "deepseek_v3", MODES[mode])
    tensors = random_adapter(decoder, ALL, seed=5)
    plain = Trainee(decoder, ALL, tensors).train([WHOLE])
    others = [Trainee(decoder, ALL, tensors, checkpointing=True).train([WHOLE])]
    others.append(Trainee(decoder, ALL, tensors).train([pad_rows(WHOLE, 64, token_id=3)]))
    used = Trainee(decoder, ALL, tensors, capacity=Capacity(rows=400, sequences=20, pages=40, positions=200))
    used.train(plan_micro_batches(BATCH, 70))
    others.append(used.train([WHOLE]))
    try:
        set_threads(2)
        others.append(Trainee(decoder, ALL, tensors).train([WHOLE]))
    finally:
        set_threads(1)
    for other in others:
        assert all(torch.equal(plain.grads[name], other.grads[name]) for name in plain.grads)
    cut = Trainee(decoder, ALL, tensors).train(plan_micro_batches(BATCH, 70))
    assert sorted(cut.logp.tolist()) == sorted(plain.logp.tolist()), "the forward keeps its bits"
    assert relative_error(cut.grads, plain.grads) < (0.02 if mode == "bf16" else 1e-5)


def test_dropout_on_kv_b_proj_is_refused(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "deepseek_v3", FP32)
    attention = LoraSpec(r=4, alpha=8, target_modules=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    trained = Trainee(decoder, attention, random_adapter(decoder, attention), dropout=0.2)
    assert trained.train([WHOLE], dropout_seed=3).logp.std() > 0
    with pytest.raises(ModelError, match=r"adapters on kv_b_proj; set lora\.dropout to 0"):
        Trainee(decoder, KV_B, random_adapter(decoder, KV_B), dropout=0.2).train([WHOLE])


def test_a_token_keeps_latent_and_rotated_key_only(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "m", "deepseek_v3", BF16)
    walk = Walk(decoder)
    assert walk.pages.n_bytes == walk.pages.pages * PAGE * 2 * (32 + 16) * 2
    assert walk.pages.values.untyped_storage().data_ptr() == walk.pages.keys.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank 24 is not a multiple of 16"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim 8 is not a multiple of 16"),
        ({"v_head_dim": 17}, "v_head_dim 17 is odd"),
    ],
)
def test_widths_that_no_kernel_computes_are_refused(tmp_path: Path, config: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tiny_decoder(tmp_path / "m", "deepseek_v3", BF16, **config)
