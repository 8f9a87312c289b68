"""Around the Triton kernels: which rows a program owns, what is refused, what is imported, what GPUs would run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import ModelError
from tithe.quant.triton import ROWS, PublishedBank, RowBlocks, grouped_input_gradient, grouped_product
from unit.quant.published import publish

CPU = torch.device("cpu")


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints, TRITON_INTERPRET unset unless given."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **environment}, check=True
    )
    return done.stdout


# ------------------------------------------------------------------ blocks


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=8))
def test_every_row_of_an_expert_is_in_exactly_one_block(ranges: list[tuple[int, int]]) -> None:
    """Ranges with gaps of 0 to 3 rows in front."""
    begin, end, at = [], [], 0
    for gap, count in ranges:
        begin.append(at + gap)
        at += gap + count
        end.append(at)
    blocks = RowBlocks.of_ranges(torch.tensor(begin), torch.tensor(end), at)
    owner: dict[int, int] = {}
    for expert, start, stop in zip(*(t.tolist() for t in (blocks.expert, blocks.start, blocks.stop)), strict=True):
        assert stop - start <= ROWS
        for row in range(start, stop):
            assert row not in owner
            owner[row] = expert
    assert owner == {row: e for e, (b, s) in enumerate(zip(begin, end, strict=True)) for row in range(b, s)}


def test_an_experts_blocks_start_at_its_first_row() -> None:
    """So that blocks of one expert lie side by side, and the number of blocks is known without the counts."""
    blocks = RowBlocks.of_ranges(torch.tensor([0, 3, 3]), torch.tensor([3, 3, 133]), 133)
    assert blocks.expert.tolist() == [0, 2, 2, 2, 0]
    assert blocks.start.tolist() == [0, 3, 67, 131, 0]
    assert blocks.stop.tolist() == [3, 67, 131, 133, 0]


# ------------------------------------------------------------------ refusals


def mxfp4() -> PublishedBank:
    return PublishedBank.allocate(StoredFormat(TensorFormat.MXFP4), 2, 10, 64, CPU)


def test_a_format_or_group_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no Triton kernel reads FP8_BLOCK, only INT4_PACKED, MXFP4, Q4_1"):
        PublishedBank.allocate(StoredFormat(TensorFormat.FP8_BLOCK), 2, 10, 64, CPU)
    for stored in (StoredFormat(TensorFormat.INT4_PACKED, group=48), StoredFormat(TensorFormat.MXFP4, group=64)):
        with pytest.raises(ValueError, match=r"groups of 32 · n"):
            PublishedBank.allocate(stored, 2, 10, 192, CPU)
    with pytest.raises(ValueError, match=r"groups of 32 · n"):
        PublishedBank.allocate(StoredFormat(TensorFormat.MXFP4), 2, 10, 48, CPU)
    with pytest.raises(ValueError, match="at least one"):
        PublishedBank.allocate(StoredFormat(TensorFormat.MXFP4), 0, 10, 64, CPU)


def test_an_expert_of_another_shape_or_a_damaged_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert 1: \(10, 12\) is no MXFP4 10×64"):
        mxfp4().put(1, publish("MXFP4", 10, 96).parts)
    for kind, part, value in (("MXFP4", "_scales", 255), ("Q4_1", "", 0x7C)):
        weight = publish(kind, 10, 64)
        bank = PublishedBank.allocate(weight.stored, 1, 10, 64, CPU)
        weight.parts[part][0, 1] = value
        with pytest.raises(ModelError, match="damaged"):
            bank.put(0, weight.parts)


def test_what_would_be_read_wrongly_is_refused() -> None:
    bank, blocks = mxfp4(), RowBlocks.of_ranges(torch.tensor([0, 2]), torch.tensor([2, 4]), 4)
    x, out = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 10)
    with pytest.raises(ValueError, match="do not fit a product 64 → 10"):
        grouped_product(bank, x[:, :-2], blocks, out)
    with pytest.raises(ValueError, match="do not fit a product 10 → 64"):
        grouped_input_gradient(bank, x, blocks, out)
    with pytest.raises(ValueError, match="bf16 rows"):
        grouped_product(bank, x.float(), blocks, out)
    with pytest.raises(ValueError, match=r"not torch\.bfloat16 and torch\.float16"):
        grouped_product(bank, x, blocks, out.half())
    with pytest.raises(ValueError, match="adjacent"):
        grouped_product(bank, x.T.contiguous().T, blocks, out)
    with pytest.raises(ValueError, match="several devices"):
        grouped_product(bank, x, blocks, out.to("meta"))


def test_a_cpu_is_sent_to_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    blocks = RowBlocks.of_ranges(torch.tensor([0, 2]), torch.tensor([2, 4]), 4)
    with pytest.raises(ValueError, match=r"on a CUDA device, not cpu: use tithe.quant.grouped"):
        grouped_product(mxfp4(), torch.zeros(4, 64, dtype=torch.bfloat16), blocks, torch.zeros(4, 10))


# ------------------------------------------------------------------ imports


def test_quant_does_not_import_triton() -> None:
    code = "import sys, tithe.quant, tithe.quant.triton; print([m for m in sys.modules if m.split('.')[0] == 'triton'])"
    assert run(code).strip() == "[]"


def test_without_triton_the_message_names_the_extra() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None
from tithe.arch import StoredFormat, TensorFormat
from tithe.errors import UserError
from tithe.quant.triton import *
bank = PublishedBank.allocate(StoredFormat(TensorFormat.MXFP4), 1, 8, 32, torch.device("cpu"))
blocks = RowBlocks.of_ranges(torch.tensor([0]), torch.tensor([2]), 2)
try:
    grouped_product(bank, torch.zeros(2, 32, dtype=torch.bfloat16), blocks, torch.zeros(2, 8))
except UserError as error:
    print(error)
"""
    assert "pip install -e '.[gpu]'" in run(code, TRITON_INTERPRET="1")


# ------------------------------------------------------------------ what GPUs would run

COMPILE = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tithe.arch import TensorFormat
from tithe.quant.triton import ROWS, kernels
from tithe.quant.triton.launch import SUM

POINTERS = {"x": "*bf16", "dy": "*bf16", "words": "*i32", "block_expert": "*i32", "block_start": "*i32",
            "block_stop": "*i32", "out": "*fp32", "x_stride": "i32", "dy_stride": "i32", "out_stride": "i32"}
SCALES = {TensorFormat.INT4_PACKED: "*i16", TensorFormat.MXFP4: "*u8", TensorFormat.Q4_1: "*i32"}

def build(kernel, kind, config, target):
    types = {**POINTERS, "scale": SCALES[kind]}
    told = dict(N=5760, K=2880, EXPERT_WORDS=5760 * 360, EXPERT_SCALES=5760 * 90, GROUP=32, KIND=kernels.KINDS[kind],
                WIDE=False, ROWS=ROWS, SUM=SUM, **config.kwargs)
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in told.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)

ASKED = [(target, TensorFormat.INT4_PACKED, config) for target in (80, 90, 100) for config in kernels.CONFIGS]
ASKED += [(90, kind, kernels.CONFIGS[0]) for kind in kernels.KINDS if kind is not TensorFormat.INT4_PACKED]
for target, kind, config in ASKED:
    for kernel in (kernels.product, kernels.input_gradient):
        made = build(kernel, kind, config, target)
        found = re.findall(r"(?:wgmma\\.mma_async|mma\\.sync|tcgen05\\.mma)[\\w.:]*", made.asm["ptx"])
        print(json.dumps({
            "target": target, "kernel": kernel.__name__, "kind": kind, "config": str(config),
            "multiplies": sorted({re.sub(r"(m64)n\\d+", r"\\1", name) for name in found}),
            "shared": made.metadata.shared, "global": made.metadata.global_scratch_size,
            "cubin": len(made.asm["cubin"])}))
"""
"""Compiles for GPUs that need not be here, down to their machine code. Names without wgmma's n, which counts rows."""
INSTRUCTIONS = {
    80: ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"],
    90: ["wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16"],
    100: ["tcgen05.mma.cta_group::1.kind::f16"],
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is made for Linux only: pip install -e '.[gpu]'")
    cache = tmp_path_factory.mktemp("triton")
    return [json.loads(line) for line in run(COMPILE, TRITON_CACHE_DIR=str(cache)).splitlines()]


@pytest.mark.slow
def test_every_configuration_multiplies_by_the_same_instructions(compiled: list[dict[str, Any]]) -> None:
    """bf16 by tensor cores, float32 sums; a configuration that chose others could sum in another order."""
    assert len(compiled) == 28
    for made in compiled:
        assert made["multiplies"] == INSTRUCTIONS[made["target"]], made
        assert made["cubin"] > 0


@pytest.mark.slow
def test_nothing_is_expanded_outside_of_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    """No scratch in global memory, and shared memory that the smallest of these GPUs has."""
    assert {made["global"] for made in compiled} == {0}
    assert max(made["shared"] for made in compiled) <= 99 * 1024
