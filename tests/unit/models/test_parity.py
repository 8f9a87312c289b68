"""Sampler and trainer agree on every log-prob, bit for bit.

The sampler's side walks as the engine does: a prompt's pages are computed once, in chunks, shared by its samples and
forked where they are partly filled; then all samples of all prompts advance together, one token a tick, each leaving
when it has its length. The trainer's side is one packed forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import build_gguf
from support.decoders import BF16, FP32, WIDE, Walk, random_adapter, random_ids, tiny_decoder
from support.training import Trainee
from tithe.arch import read_checkpoint
from tithe.lora import LoraSpec
from tithe.models.decoder import Decoder, ModelAdapter
from tithe.models.head import Draws
from tithe.models.loader import load_model
from tithe.packing import plan_micro_batches
from tithe.quant import set_threads
from tithe.types import FinishReason, Rollout, RolloutGroup, TrainingBatch

MODES = {"bf16": BF16, "fp32": FP32, "wide": WIDE}
SPEC = LoraSpec(r=4, alpha=8)
PROMPTS = {0: (21, (5, 1, 30)), 4: (16, (17, 9)), 7: (1, (34,)), 9: (32, (2, 16))}
"""By sequence of the prompt: its tokens, and how many each of its samples gets. Sample i runs in the next sequences."""
TEMPERATURES = (0.8, 1.0, 1.3)
UNTIED = {"tie_word_embeddings": False}
"""A random tied head makes every token certain."""


@dataclass
class Sample:
    sequence: int
    group: int
    number: int
    prompt: np.ndarray
    length: int
    last: Tensor
    tokens: list[int]
    logp: list[float]

    @property
    def temperature(self) -> float:
        return TEMPERATURES[self.number % 3]


def start(walk: Walk, adapter: ModelAdapter | None) -> list[Sample]:
    """Prefill every prompt in chunks of 13 and share its pages with its samples."""
    samples: list[Sample] = []
    for group, (own, (n, lengths)) in enumerate(PROMPTS.items()):
        prompt = random_ids(n, 50 + group)
        x = torch.cat([walk.prefill(own, prompt[a : a + 13], a, adapter) for a in range(0, n, 13)])
        full, slots = divmod(n, 16)
        for number, length in enumerate(lengths):
            sequence = own + 1 + number
            walk.table[sequence, :full] = walk.table[own, :full]
            if slots:
                walk.pages.fork([int(walk.table[own, full])], [int(walk.table[sequence, full])], [slots])
            samples.append(Sample(sequence, group, number, prompt, length, x[-1], [], []))
    return samples


def tick(walk: Walk, running: list[Sample], adapter: ModelAdapter | None) -> None:
    """Draw a token for every sample, then compute the rows of those that go on."""
    n = len(running)
    counters = np.array([(7, s.group, s.number, len(s.tokens)) for s in running], np.int64)
    draws = Draws(np.array([s.temperature for s in running]), np.zeros(n), np.ones(n), np.zeros(n), counters)
    drawn = walk.head.sample(torch.stack([s.last for s in running]), draws)
    for s, token, logp in zip(running, drawn.token, drawn.logp, strict=True):
        s.tokens.append(int(token))
        s.logp.append(float(logp))
    going = [s for s in running if len(s.tokens) < s.length]
    if going:
        rows = [(s.sequence, len(s.prompt) + len(s.tokens) - 1, s.tokens[-1]) for s in going]
        for s, x in zip(going, walk.run(rows, [(0, len(rows), adapter)]), strict=True):
            s.last = x


def sampled(decoder: Decoder, adapter: ModelAdapter | None) -> TrainingBatch:
    walk = Walk(decoder, sequences=13, positions=64)
    samples = start(walk, adapter)
    while running := [s for s in samples if len(s.tokens) < s.length]:
        tick(walk, running, adapter)
    groups: list[RolloutGroup] = []
    for g in range(len(PROMPTS)):
        members = [s for s in samples if s.group == g]
        rollouts = tuple(rollout(s) for s in members)
        groups.append(RolloutGroup(g, str(g), members[0].prompt, rollouts, 0, 0))
    ones = [[np.ones(len(r.token_ids), np.float32) for r in g.rollouts] for g in groups]
    return TrainingBatch(groups, ones, 0)


def rollout(s: Sample) -> Rollout:
    ids, logp = np.array(s.tokens, np.int32), np.array(s.logp, np.float32)
    return Rollout(
        s.number, ids, np.ones(len(ids), bool), logp, logp, np.zeros_like(ids), s.temperature, FinishReason.LENGTH
    )


def assert_trainer_agrees(decoder: Decoder, *, checkpointing: bool = False, sampler_threads: int = 1) -> None:
    trainee = Trainee(decoder, SPEC, random_adapter(decoder, SPEC, seed=5), checkpointing=checkpointing)
    try:
        set_threads(sampler_threads)
        batch = sampled(decoder, trainee.adapter.model)
    finally:
        set_threads(1)
    everything = np.concatenate([r.logp for g in batch.groups for r in g.rollouts])
    assert (len(everything), bool(everything.std() > 0.5)) == (114, True)
    for budget in (10_000, 80):
        micros = plan_micro_batches(batch, budget)
        old = np.concatenate([m.old_logp for m in micros])
        np.testing.assert_array_equal(trainee.train(micros).logp, old)
        np.testing.assert_array_equal(np.concatenate([trainee.score(m, trainee.adapter) for m in micros]), old)
    assert np.abs(np.concatenate([trainee.score(m, None) for m in micros]) - old).max() > 0.1, "the adapter matters"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_trainers_log_probs_are_the_samplers(tmp_path: Path, architecture: str, mode: str) -> None:
    assert_trainer_agrees(tiny_decoder(tmp_path / "m", architecture, MODES[mode], **UNTIED))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["mistral", "mixtral", "glm4_moe", "gpt_oss", "minimax_m2", "deepseek_v3"])
def test_they_are_in_large_open_models(tmp_path: Path, architecture: str, mode: str) -> None:
    """Windows, sinks, partial rotary, norms over whole projections, latent attention, experts."""
    assert_trainer_agrees(tiny_decoder(tmp_path / "m", architecture, MODES[mode]))


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@pytest.mark.parametrize("linear", ["Q4_1", "Q8_0"])
def test_they_are_on_a_quantized_base(tmp_path: Path, linear: str, mode: str) -> None:
    path = build_gguf(tmp_path / "m.gguf", "llama", linear=linear, **UNTIED)
    assert_trainer_agrees(load_model(read_checkpoint(path), MODES[mode]))


def test_they_are_with_recomputed_activations_and_another_number_of_threads(tmp_path: Path) -> None:
    assert_trainer_agrees(tiny_decoder(tmp_path / "m", "qwen3", BF16), checkpointing=True, sampler_threads=2)


def test_the_reference_policy_is_the_bare_base(tmp_path: Path) -> None:
    """No adapter on either side."""
    decoder = tiny_decoder(tmp_path / "m", "llama", BF16, **UNTIED)
    batch = sampled(decoder, None)
    trainee = Trainee(decoder, SPEC, random_adapter(decoder, SPEC))
    for micro in plan_micro_batches(batch, 80):
        np.testing.assert_array_equal(trainee.score(micro, None), micro.old_logp)
