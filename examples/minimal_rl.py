"""Tithe in one file: reinforcement learning on one frozen low-bit base.

    questions ─▶ engine draws G answers each ─▶ rewards ─▶ group advantages ─▶ packed batch ─▶ gradients ─▶ AdamW step
                     ▲                                                                                         │
                     └───── prove (probe) ◀───── adapter v+1, immutable, under a new name ◀────── publish ◀────┘

The base is read once, at the bits it is stored in, and never changes. Sampling, training and the reference policy use
the same packed bytes on one compute lane: a policy is those bytes plus a small LoRA adapter, the reference is those
bytes alone. So the adapter is all that goes from trainer to sampler; and since both compute a token in the same way,
their log-probabilities can be compared to the last bit. Every step prints the largest difference: 0.

The full loops (`tithe.orchestration`) put a durable pool between the two halves of the circle, so that neither waits
for the other except at proved bounds, and add reward workers that can be killed, held-out evaluation and resume.

    python examples/minimal_rl.py                            # the demo's 4-bit SmolLM2-135M learns to add
    python examples/minimal_rl.py --model DIR_OR_GGUF        # any model that Tithe reads

Shapes: _P questions of a step, _G answers per question, _T tokens of an answer, _N answer tokens of a micro-batch.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tithe.advantages import batch_advantages
from tithe.arch import find_demo_model, read_checkpoint
from tithe.engines import SharedEngine
from tithe.lora import LoraSpec, init_tensors
from tithe.losses import Aggregation, LossSettings
from tithe.models import Decoder, Lane, ModelOptions, TrainAdapter, load_model
from tithe.packing import MicroBatch
from tithe.quant import set_threads
from tithe.renderers import ChatRenderer, load_renderer
from tithe.rewards import Verdict, judge
from tithe.trainer import Perturbed, Trainer, TrainerSettings, probe_masters
from tithe.types import Completion, GenerateRequest, PolicyVersion, Rollout, RolloutGroup, SamplingParams, TrainingBatch
from tithe.weight_sync import DirectoryChannel, Probe, manifest_fields, read_manifest

MAX_NEW_TOKENS = 32
KL_COEF = 0.01
WORTH = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNREADABLE: -0.5}
SETTINGS = TrainerSettings(
    algorithm="grpo",
    loss=LossSettings(Aggregation.TOKEN_MEAN, clip_range=0.2, kl_coef=KL_COEF),
    kl_coef=KL_COEF,
    norm_tokens=MAX_NEW_TOKENS,
    lr=2e-4,
    micro_batch_tokens=2048,
)


@dataclass(frozen=True, eq=False)
class System:
    """One base in memory and the two that compute on it, in turns, on its lane."""

    decoder: Decoder
    renderer: ChatRenderer
    lane: Lane
    engine: SharedEngine
    trainer: Trainer


def build(path: Path, max_running: int) -> System:
    """Load the base once; sampler and trainer get the same object."""
    set_threads(len(os.sched_getaffinity(0)))
    decoder = load_model(read_checkpoint(path), ModelOptions(compute="packed", max_context=512))
    renderer, lane = load_renderer(path), Lane().start()
    engine = SharedEngine(decoder, lane, max_running=max_running)
    spec = LoraSpec(r=32, alpha=64)  # on every linear of every block; B = 0, so the policy begins as the base
    trainer = Trainer(decoder, spec, init_tensors(spec, decoder.linear_shapes(), seed=0), SETTINGS)
    resident_mb, file_mb = decoder.resident_bytes() / 1e6, decoder.file_bytes / 1e6
    print(f"base: {path.name}, {resident_mb:.0f} MB in memory ({file_mb:.0f} MB in the file), one copy for everything")
    return System(decoder, renderer, lane, engine, trainer)


def sample(system: System, policy: str, serial: int, n_prompts: int, n_samples: int) -> list[RolloutGroup]:
    """Draw G answers to each of P sums under a published policy, and reward each answer."""
    rng = random.Random(serial)
    sums_P = [(rng.randint(0, 12), rng.randint(0, 12)) for _ in range(n_prompts)]
    prompts_P = [system.renderer.render([{"role": "user", "content": f"What is {a} + {b}?"}]) for a, b in sums_P]
    first, stops = serial * n_prompts, system.renderer.stop_token_ids

    def draw(p: int, g: int) -> Future[Completion]:
        # group, sample and position address the random number of every token, whatever else is in the batch
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stops, group=first + p, sample=g)
        return system.engine.submit(GenerateRequest(prompts_P[p], params, policy))

    # everything decodes together; the answers to one question share its prompt's keys and values
    drawn_PG = [[draw(p, g) for g in range(n_samples)] for p in range(n_prompts)]
    groups = []
    for p, (a, b) in enumerate(sums_P):
        rollouts_G = tuple(judged(system, g, str(a + b), drawn.result()) for g, drawn in enumerate(drawn_PG[p]))
        prompt_ids = np.array(prompts_P[p], np.int32)
        groups.append(RolloutGroup(first + p, f"{a}+{b}", prompt_ids, rollouts_G, 0, serial))
    return groups


def judged(system: System, g: int, gold: str, drawn: Completion) -> Rollout:
    """A completion with its reward. Its tokens and log-probs are the engine's own, never encoded or scored again."""
    text = system.renderer.decode_reply(drawn.token_ids.tolist())
    return Rollout(
        sample=g,
        token_ids=drawn.token_ids,
        loss_mask=np.ones(len(drawn.token_ids), np.bool_),
        logp=drawn.logp,
        logp_behaviour=drawn.logp_behaviour,
        serials=drawn.serials,
        temperature=1.0,
        finish=drawn.finish,
        text=text,
        reward=WORTH[judge(gold, text)],
    )


def largest_gap(system: System, micros: list[MicroBatch]) -> float:
    """Parity: max |Δlog-prob| of a batch, the trainer's packed forward against the sampler's token by token."""
    trainer = system.trainer
    adapter = TrainAdapter.build(system.decoder, trainer.adapter_tensors(), trainer.spec)
    gaps = [np.abs(trainer.passes.score(micro, adapter) - micro.old_logp).max() for micro in micros]  # over [N] each
    trainer.passes.forget(adapter)
    return float(max(gaps))


def publish(system: System, channel: DirectoryChannel, serial: int) -> str:
    """Make the adapter a new immutable version; the engine loads it and proves that it computes what the trainer does.

    Returns its name. Raises `PublishRefused` for wrong names, a zero delta, a torn file or a stale cache.
    """
    decoder, trainer, lane = system.decoder, system.trainer, system.lane
    question = system.renderer.render([{"role": "user", "content": "What is 3 + 4?"}])
    answer = system.renderer.render("3 + 4 is 7.")

    def score(masters: Mapping[str, torch.Tensor]) -> tuple[float, ...]:  # log-probs [T] by the training path
        return tuple(lane.call(probe_masters, trainer.passes, question, answer, masters, trainer.spec))

    tensors = trainer.adapter_tensors()
    logp_T, shaken_T = score(tensors), score(Perturbed(tensors))  # the second: every weight off by 1e-7 of itself
    noise_floor = max(abs(a - b) for a, b in zip(logp_T, shaken_T, strict=True))
    parent = read_manifest(channel.list_versions()[-1]) if serial > 0 else None
    manifest = manifest_fields(
        lora=trainer.spec,
        parent=parent.name if parent else None,
        optimizer_step=trainer.optimizer_step,
        base_checksum=decoder.checksum,
        numeric_mode=decoder.options.numeric_mode,
        probe=Probe((*question, *answer), len(question), logp_T, noise_floor, parent.probe.logp if parent else None),
    )
    name = system.engine.load_adapter(channel.publish(PolicyVersion(0, serial), tensors, manifest))
    if parent is not None:
        system.engine.drop_adapter(parent.name)  # on-policy: nobody samples from it any more
    return name


def main() -> None:
    """Sample, compare, learn, publish, prove; again."""
    parser = argparse.ArgumentParser(description="Reinforcement learning on one frozen low-bit base, in one file.")
    parser.add_argument("--model", type=Path, help="Hugging Face directory or .gguf (default: the demo's model)")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=8, help="questions per step")
    parser.add_argument("--samples", type=int, default=8, help="answers per question, at least 2")
    args = parser.parse_args()
    system = build(args.model or find_demo_model(), max_running=args.prompts * args.samples)
    lane, trainer = system.lane, system.trainer
    with tempfile.TemporaryDirectory() as scratch:
        channel = DirectoryChannel(Path(scratch), "minimal")
        policy = publish(system, channel, serial=0)
        for serial in range(args.steps):
            groups = sample(system, policy, serial, args.prompts, args.samples)
            advantages_PGT = batch_advantages(groups, scale="std")  # against the other answers to the same question
            micros = trainer.plan(TrainingBatch(groups, advantages_PGT, serial))  # a prompt once, its answers behind it
            gap = lane.call(largest_gap, system, micros)
            for micro in micros:
                lane.call(trainer.accumulate, micro)  # the frozen weights pass gradients on, LoRA's A and B keep them
            metrics = lane.call(trainer.step).metrics
            policy = publish(system, channel, serial + 1)
            reward = np.mean([rollout.reward for group in groups for rollout in group.rollouts])
            line = f"step {serial + 1:3d}  reward {reward:+.3f}  KL to base {metrics['kl_mean']:.4f}"
            print(f"{line}  max |Δlog-prob| {gap:g}  now serving {policy}", flush=True)
    lane.close()


if __name__ == "__main__":
    main()
