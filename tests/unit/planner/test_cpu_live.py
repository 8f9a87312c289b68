"""The processor's memory model beside the tensors that a tiny pass really holds, storage by storage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from support.checkpoints import tiny_config
from support.decoders import random_adapter, tiny_decoder
from support.training import random_batch
from tithe.arch import ArchSpec, published_base
from tithe.lora import LoraSpec
from tithe.models import AdapterGradients, Passes, TrainAdapter
from tithe.models.expert_adapter import stack_experts
from tithe.packing import plan_micro_batches
from tithe.planner.cpu_pass import CHUNK_ROWS, kept_bytes, untouched_bytes
from tithe.planner.cpu_run import PAGE, CpuRun, Micro
from tithe.planner.cpu_weights import adapter_numbers, backward_adapter_bytes, base_bytes, gradient_bytes
from tithe.quant import kernel_threads

PROMPT, NEW, SAMPLES, R = 20, 12, 4, 5  # a rank is made even


@pytest.fixture(autouse=True)
def nothing_older() -> Iterator[None]:
    """What was there before is not looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def storages() -> dict[int, int]:
    """Address → bytes of every live tensor's storage."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@dataclass
class Counter:
    """Bytes that came since it was asked before."""

    before: dict[int, int]

    def new(self) -> int:
        now = storages()
        found = sum(n_bytes for address, n_bytes in now.items() if address not in self.before)
        self.before = now
        return found


@pytest.mark.parametrize(
    ("architecture", "recompute"),
    [
        ("qwen3", False),
        ("llama", True),
        ("qwen3_moe", False),
        ("gpt_oss", True),
        ("deepseek_v3", False),
    ],
)
def test_every_buffer_of_a_pass_is_counted(tmp_path: Path, architecture: str, recompute: bool):
    spec = LoraSpec(r=R, alpha=8, target_modules=("all-linear",))
    counter = Counter(storages())
    decoder = tiny_decoder(tmp_path / "model", architecture)
    measured = {"base": counter.new()}
    tensors = stack_experts(random_adapter(decoder, spec))
    counter.new()
    adapter = TrainAdapter.build(decoder, tensors, spec)
    measured["adapter"] = counter.new()
    sums = AdapterGradients(decoder, adapter)
    measured["gradients"] = counter.new()
    (micro,) = plan_micro_batches(random_batch(((PROMPT, (NEW,) * SAMPLES),)), 640)

    def train() -> Passes:
        passes = Passes(decoder, adapter.widths(), checkpointing=recompute, dropout=0.0)
        _, rows = passes.forward(micro, adapter, dropout_seed=None, entropy_gradient=False)
        passes.backward(micro, rows, torch.ones(len(micro.target_rows), decoder.spec.hidden_size), sums)
        return passes

    train()  # kernels keep scratch for the whole process, which the first to come makes
    counter.new()
    passes = train()
    held = counter.new()
    assert passes.head.chunk_rows == CHUNK_ROWS

    config = tiny_config(architecture)
    run = CpuRun(
        ArchSpec.from_config(config),
        published_base(config),
        prompt=PROMPT,
        new=NEW,
        rollouts=SAMPLES,
        samples=SAMPLES,
        lora_r=R,
        recompute=recompute,
        max_context=decoder.max_context,
        threads=kernel_threads(),
    )
    assert adapter_numbers(run) == sum(t.numel() for t in tensors.values())
    assert {
        "base": base_bytes(run) + 4 * run.max_context * run.spec.rotary_dim,
        "adapter": backward_adapter_bytes(run),
        "gradients": gradient_bytes(run),
    } == measured
    size = Micro.of(run)
    assert size.rows == len(micro.input_ids)
    slots = 1 if recompute else run.spec.n_layers
    own = kept_bytes(run, size) + untouched_bytes(run, size.rows, slots=slots)
    pages = size.pages * PAGE * run.spec.n_layers * run.sizes.cached * run.operand_bytes
    logits = 4 * run.spec.vocab_size * max(size.targets, 64)
    predicted = own + pages + logits
    assert predicted == pytest.approx(held, rel=0.02)
