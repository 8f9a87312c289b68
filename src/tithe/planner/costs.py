"""What the pieces of a step cost in seconds: the planner's answer that the simulator runs on.

A decode tick is one forward of one new token for every live sequence. It reads the weights once whatever their number,
which is why long tails are expensive, and of a mixture only the experts that some token chose:

    tick(n, c) = fixed + n · exposed + max(dense + experts · (1 − (1 − k/E)^n),  n · compute) + n · c · cached

with n sequences of c cached tokens, k of E experts a token, chosen independently and evenly (what load balancing
aims at; skewed routing covers fewer).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """Seconds of each piece of work on one replica of a layout, all its GPUs together.

    Example: ``StepCosts(prefill_s_per_token=2e-5, decode_fixed_s=5e-3, decode_dense_s=2e-3, decode_experts_s=1e-2,
    n_experts=384, experts_per_token=8, decode_s_per_sequence=4e-6,
    decode_exposed_s_per_sequence=1e-5, decode_s_per_cached_token=1e-9, train_s_per_token=1e-4, publish_s=0.5,
    reward_s_per_rollout=0.0)`` is a mixture whose tick takes 7.2 ms for one sequence and 15 ms for 64 with empty
    caches.
    """

    prefill_s_per_token: float
    """One prompt token through the model, prompts batched."""
    decode_fixed_s: float
    """Of every tick: kernel launches and collectives of all layers."""
    decode_dense_s: float
    """Of every tick: reading all weights that every token passes."""
    decode_experts_s: float
    """Reading all routed experts once; 0 for a dense model."""
    n_experts: int
    """E of one mixture layer; 0 for a dense model."""
    experts_per_token: int
    """k of them that a token passes."""
    decode_s_per_sequence: float
    """Arithmetic of one new token; it hides behind the reading of weights until it exceeds it."""
    decode_exposed_s_per_sequence: float
    """Scheduling, sampling and collectives of one new token; it hides behind nothing."""
    decode_s_per_cached_token: float
    """Reading the keys and values of one cached token."""
    train_s_per_token: float
    """Forward, recomputation and backward of one token, optimizer step included."""
    publish_s: float
    """From the last optimizer step to the sampler's first token under the new version."""
    reward_s_per_rollout: float
    """Of a worker; many run at once."""

    def expert_coverage(self, n_sequences: int) -> float:
        """Expected share of a layer's experts that a tick of so many sequences reads; 0 without experts."""
        if not self.n_experts:
            return 0.0
        return 1.0 - (1.0 - self.experts_per_token / self.n_experts) ** n_sequences

    def decode_tick_s(self, n_sequences: int, mean_cached_tokens: float = 0.0) -> float:
        """Seconds until every live sequence has one more token; 0 when there is none."""
        if n_sequences <= 0:
            return 0.0
        read_s = self.decode_dense_s + self.decode_experts_s * self.expert_coverage(n_sequences)
        compute_s = n_sequences * self.decode_s_per_sequence
        exposed_s = n_sequences * self.decode_exposed_s_per_sequence
        cache_s = n_sequences * mean_cached_tokens * self.decode_s_per_cached_token
        return self.decode_fixed_s + exposed_s + max(read_s, compute_s) + cache_s

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds to read prompts of so many tokens together."""
        return n_tokens * self.prefill_s_per_token

    def train_s(self, n_tokens: int) -> float:
        """Seconds of an update on so many tokens."""
        return n_tokens * self.train_s_per_token
