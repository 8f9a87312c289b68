"""Tithe's side of both benchmarks: the same engine, trainer, publication and probe as a run, on one base.

usage: python -m benchmarks.tithe_side {rollout|step} WORKLOAD THREADS {fixed|packed|dequantized}
request: {"new_tokens": n}; answer: {"seconds": s, "tokens": n, ...}, see `Bench.rollout` and `Bench.step`
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.protocol import Channel
from tithe.advantages import AdvantagePlan, AdvantageRule, make_advantages
from tithe.build.hooks import Publisher
from tithe.build.session import open_session
from tithe.config import RunConfig, load_config
from tithe.orchestration import Learner, RunControl
from tithe.types import Completion, GenerateRequest, PolicyVersion, Rollout, RolloutGroup, SamplingParams
from tithe.weight_sync import DirectoryChannel

FIXED_COMPUTE = "packed"
FIXED_COMPUTE_DTYPE = "bf16"
"""The configuration that all of Tithe's figures are quoted for; the other storage is reported beside it."""

SAMPLES_PER_PROMPT = 8
MAX_NEW_TOKENS = 64


def configuration(compute: str, threads: int) -> RunConfig:
    """The defaults of a run, with the conditions that both sides share."""
    compute = FIXED_COMPUTE if compute == "fixed" else compute
    return load_config(
        None,
        [
            f"model.compute={compute}",
            f"model.compute_dtype={FIXED_COMPUTE_DTYPE}",
            f"run.threads={threads}",
            "lora.r=32",
            "lora.alpha=64",
            "lora.target_modules=[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",
            "rl.algorithm=grpo",
            "rl.kl_coef=0",
            f"rl.samples_per_prompt={SAMPLES_PER_PROMPT}",
            f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
            "optimizer.lr=1e-4",
        ],
    )


class Bench:
    """One base with its lane, engine and trainer, as a run opens them, and a channel in a temporary folder."""

    def __init__(self, cfg: RunConfig, workload: dict[str, Any], folder: Path) -> None:
        self.session = open_session(cfg)
        self.workload = workload
        self.learner = Learner(
            trainer=self.session.learner,
            lane=self.session.base.lane,
            advantages=lambda groups, _scores, _whole: make_advantages(
                groups, AdvantagePlan(AdvantageRule(scale=cfg.rl.advantage_scale))
            ),
            control=RunControl(),
        )
        self.publisher = Publisher(self.session, DirectoryChannel(folder, "bench"))
        self.serial = 0
        self.name: str | None = None
        self._fill_adapter()
        self.publish()

    def _fill_adapter(self) -> None:
        """B is not zero from the start, so that the adapter's products are real work."""
        trainer = self.session.trainer
        generator = torch.Generator().manual_seed(1)
        state = {
            name: 1e-3 * torch.randn(t.shape, generator=generator) if "lora_B" in name else t
            for name, t in trainer.state_tensors().items()
        }
        self.session.base.lane.call(trainer.load_state, state, trainer.state())  # kernels run on the lane

    def facts(self) -> dict[str, Any]:
        """What the benchmark reports of the numeric mode."""
        options = self.session.base.decoder.options
        mode = dict(part.split("=") for part in options.numeric_mode.split(";"))
        return {
            "compute": options.compute,
            "compute_dtype": options.compute_dtype,
            "attention": mode["attention"],
            "prompts": len(self.workload["rollout_prompt_ids"]),
        }

    def publish(self) -> None:
        """Publish the trainer's adapter, have the engine prove it, and drop the version before."""
        before, self.name = self.name, self.publisher.publish(PolicyVersion(0, self.serial))
        if before is not None:
            self.session.engine.drop_adapter(before)

    def generate(self, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int) -> list[list[Completion]]:
        """All completions of all prompts, sampled at T = 1 with log-probs; no token ends one early."""
        futures = [
            [
                self.session.engine.submit(
                    GenerateRequest(
                        tuple(prompt),
                        SamplingParams(max_new_tokens=new_tokens, seed=self.serial, group=group, sample=sample),
                        self.name,
                    )
                )
                for sample in range(samples)
            ]
            for group, prompt in enumerate(prompts)
        ]
        return [[future.result() for future in row] for row in futures]

    def rollout(self, new_tokens: int) -> dict[str, float]:
        """64 prompts, one completion each, prefill included; `decode_seconds` leaves the prefill's time out.

        A version of its own makes every round prefill: the engine keeps prompts by (adapter, tokens).
        """
        self.serial += 1
        self.publish()
        before = self.session.engine.stats()
        started = time.perf_counter()
        groups = self.generate(self.workload["rollout_prompt_ids"], 1, new_tokens)
        seconds = time.perf_counter() - started
        after = self.session.engine.stats()
        tokens = sum(len(completion.token_ids) for row in groups for completion in row)
        prefill_s = after["prefill_s"] - before["prefill_s"]
        if after["prefill_tok"] - before["prefill_tok"] < sum(map(len, self.workload["rollout_prompt_ids"])):
            raise RuntimeError("a prompt was not prefilled in this round")
        return {"seconds": seconds, "tokens": tokens, "decode_seconds": seconds - prefill_s, "decode_tokens": tokens}

    def step(self, new_tokens: int) -> dict[str, float]:
        """One GRPO step as a run does it: sample, score, train, publish, prove."""
        started = time.perf_counter()
        n = self.workload["step_prompts"]
        all_prompts = self.workload["step_prompt_ids"]
        first = self.serial * n % len(all_prompts)
        prompts = all_prompts[first : first + n]
        sampled = self.generate(prompts, SAMPLES_PER_PROMPT, new_tokens)
        middle = time.perf_counter()
        groups = [self.group(i, prompts[i], row) for i, row in enumerate(sampled)]
        self.learner.learn(groups, self.serial)
        self.serial += 1
        trained = time.perf_counter()
        self.publish()
        ended = time.perf_counter()
        return {
            "seconds": ended - started,
            "tokens": sum(len(completion.token_ids) for row in sampled for completion in row),
            "generate_seconds": middle - started,
            "train_seconds": trained - middle,
            "publish_seconds": ended - trained,
        }

    def group(self, index: int, prompt: Sequence[int], row: Sequence[Completion]) -> RolloutGroup:
        """The completions of one prompt as a group of the version that is served."""
        rollouts = tuple(self._rollout(sample, completion) for sample, completion in enumerate(row))
        return RolloutGroup(index, f"prompt-{index}", np.array(prompt, np.int32), rollouts, 0, self.serial)

    def _rollout(self, sample: int, completion: Completion) -> Rollout:
        """A reward that varies inside every group, as on the peer's side: no side may skip a group."""
        text = self.session.base.renderer.decode(completion.token_ids.tolist())
        return Rollout(
            sample=sample,
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), bool),
            logp=completion.logp,
            logp_behaviour=completion.logp_behaviour,
            serials=completion.serials,
            temperature=1.0,
            finish=completion.finish,
            text=text,
            reward=float(len(text) % 2),
            experts=completion.experts,
        )


def main() -> None:
    """Load, then answer requests."""
    channel = Channel()
    kind, workload, threads, compute = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(configuration(compute, int(threads)), json.loads(Path(workload).read_text()), Path(folder))
        answer = bench.rollout if kind == "rollout" else bench.step
        channel.send(**bench.facts())
        with bench.session:
            for request in channel.requests():
                channel.send(**answer(int(request["new_tokens"])))


if __name__ == "__main__":
    main()
