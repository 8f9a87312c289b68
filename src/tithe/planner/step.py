"""One optimizer step in seconds, with long-tailed lengths, and who waits for whom.

Completions are lognormal: a 99th percentile of ten times the median, as Laminar saw (arXiv 2510.12633, σ = ln 10 /
2.326 = 0.99), cut at what the context leaves and scaled to the wanted mean. Slots are filled again as long as rollouts
are left; then the tail drains with ever fewer sequences a tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from tithe.planner.costs import StepCosts
from tithe.planner.factors import Factors
from tithe.planner.hardware import Hardware
from tithe.planner.memory import train_gpus
from tithe.planner.request import PlanRequest
from tithe.planner.roofline import sampling_parallel, step_costs

_QUANTILES: Final = 64


@dataclass(frozen=True)
class StepTime:
    """Wall seconds of one step, divided by what the GPUs do, so that the parts add up to `total_s`."""

    sample_s: float
    reward_s: float
    update_s: float
    sync_s: float
    idle_s: float
    sampled_tokens: int
    costs: StepCosts
    decode_tok_per_s: float
    """Sampled tokens per second while sampling, all replicas together."""

    @property
    def total_s(self) -> float:
        """Of one step."""
        return self.sample_s + self.reward_s + self.update_s + self.sync_s + self.idle_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the names of the JSON's `step_seconds`."""
        return {
            "sample": self.sample_s,
            "reward": self.reward_s,
            "update": self.update_s,
            "sync": self.sync_s,
            "idle": self.idle_s,
        }


def length_quantiles(mean: float, longest: float, sigma: float, n: int = _QUANTILES) -> list[float]:
    """`n` equally likely lengths, ascending, at most `longest`, with the wanted mean (or nearest that is possible)."""
    normal = NormalDist()
    shape = [pow(2.718281828459045, sigma * normal.inv_cdf((i + 0.5) / n)) for i in range(n)]
    low, high = 0.0, longest
    for _ in range(60):
        scale = (low + high) / 2
        found = sum(min(longest, scale * one) for one in shape) / n
        low, high = (scale, high) if found < mean else (low, scale)
    return [max(1.0, min(longest, high * one)) for one in shape]


def sampling_s(costs: StepCosts, *, rollouts: int, live: int, prompt: int, lengths: list[float]) -> float:
    """Seconds of one replica for so many rollouts with at most `live` at once: prompts, full slots, then the tail."""
    live = max(1, min(live, rollouts))
    mean = sum(lengths) / len(lengths)
    seconds = costs.prefill_s(rollouts * prompt)
    bulk_ticks = (rollouts - live) * mean / live
    seconds += bulk_ticks * costs.decode_tick_s(live, prompt + mean / 2)
    done = 0.0
    for i, length in enumerate(lengths):
        left = max(1, round(live * (len(lengths) - i) / len(lengths)))
        seconds += (length - done) * costs.decode_tick_s(left, prompt + (length + done) / 2)
        done = length
    return seconds


def plan_step(request: PlanRequest, factors: Factors, *, tok_per_s: float = 0.0) -> StepTime:
    """A step of a request. `tok_per_s`: a measured rate of sampling, in place of the roofline's."""
    hardware = request.hardware
    is_split = request.layout == "separate" and request.phase == "rl"
    n_train = train_gpus(hardware.gpus) if is_split else hardware.gpus
    sampling = hardware.with_gpus(hardware.gpus - n_train) if is_split else hardware
    costs = step_costs(request, factors, sampling, n_train)
    sampled = request.batch * request.new_tokens
    sample = sampled / tok_per_s if tok_per_s else _sample_s(request, costs, sampling)
    update = request.batch * (request.prompt_tokens + request.new_tokens) * costs.train_s_per_token
    reward = -(-request.batch // request.reward_workers) * request.reward_s
    rate = sampled / sample
    if request.phase == "rollout":
        return StepTime(sample, 0.0, 0.0, 0.0, 0.0, sampled, costs, rate)
    if request.phase == "train":
        return StepTime(0.0, 0.0, update, 0.0, 0.0, sampled, costs, rate)
    if not is_split:
        beside = factors.full_step * (sample + update + costs.publish_s) if request.layout == "full" else 0.0
        return StepTime(sample, reward, update, costs.publish_s, beside, sampled, costs, rate)
    return _overlapped(hardware, n_train, sample, update, reward, sampled, costs)


def _sample_s(request: PlanRequest, costs: StepCosts, hardware: Hardware) -> float:
    replicas = sampling_parallel(request, hardware).replicas
    rollouts, live = -(-request.batch // replicas), -(-request.sequences // replicas)
    longest = request.context - request.prompt_tokens
    lengths = length_quantiles(request.new_tokens, longest, request.length_sigma)
    return sampling_s(costs, rollouts=rollouts, live=live, prompt=request.prompt_tokens, lengths=lengths)


def _overlapped(
    hardware: Hardware, n_train: int, sample: float, update: float, reward: float, sampled: int, costs: StepCosts
) -> StepTime:
    """Both sides at once: the slower decides; parts are weighted by their GPUs, so that they add up to the step."""
    train_share = n_train / hardware.gpus
    wall = max(sample, reward, update + costs.publish_s)
    parts = sample * (1 - train_share), update * train_share, costs.publish_s * train_share
    idle = wall - sum(parts)
    return StepTime(parts[0], 0.0, parts[1], parts[2], idle, sampled, costs, sampled / sample)
