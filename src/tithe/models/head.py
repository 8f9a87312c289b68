"""From hidden states to logits, tokens and log-probs: final norm, head in float32, sampling, scoring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tithe.models.buffers import Scratch, is_bf16, norm_step
from tithe.models.decoder import Decoder
from tithe.models.linear import operand_steps
from tithe.models.sampling import logp_rows, sample_rows
from tithe.quant.matrix import transposed_numel
from tithe.quant.tile import PANEL

CHUNK_ROWS = 192
"""Rows of logits held at once: 192 × 49,152 float32 are 38 MB."""

VOCABULARY_PANELS = 85
"""Panels of the head that are expanded at once in training: a block of 4,080 tokens stays in the cache."""


@dataclass(frozen=True, eq=False)
class Draws:
    """What a row is drawn with; all arrays have one entry a row. Temperature 0 is greedy.

    `counters` int64 [n, 4]: seed, group, sample, position of the random number.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    counters: np.ndarray


@dataclass(frozen=True, eq=False)
class Drawn:
    """Token, log-softmax(logits / T) and the log-prob renormalised over the kept set, one entry a row."""

    token: np.ndarray
    logp: np.ndarray
    logp_behaviour: np.ndarray


class Head:
    """The head of a decoder on buffers of its own. Not thread-safe: it belongs to the lane."""

    def __init__(self, decoder: Decoder, chunk_rows: int = CHUNK_ROWS) -> None:
        self.decoder = decoder
        self.chunk_rows = chunk_rows
        self._scratch = Scratch(decoder.spec.hidden_size)
        self._logits = torch.empty(0, decoder.head.rows)

    def normed(self, x: Tensor) -> Tensor:
        """Final norm of residual rows [n, H] → operand rows [n, H]."""
        out = torch.empty(x.shape, dtype=self.decoder.options.operand_dtype)
        x = x.contiguous()
        norm_step(x, self.decoder.final_norm, out, self.decoder.spec.rms_norm_eps, self._scratch).run()
        return out

    def logits(self, normed: Tensor) -> Tensor:
        """float32 [n, V] for at most `chunk_rows` operand rows; a view that the next call overwrites."""
        n = normed.shape[0]
        if self._logits.shape[0] < n:
            self._logits = torch.empty(min(self.chunk_rows, max(n, 64)), self.decoder.head.rows)
        out = self._logits[:n]
        operand, steps = operand_steps(normed)
        for step in steps:
            step.run()
        self.decoder.head.product(operand, out).run()
        return out

    def sample(self, x: Tensor, draws: Draws) -> Drawn:
        """Draw one token for each residual row x [n, H]."""
        n = x.shape[0]
        token, logp, behaviour = np.empty(n, np.int32), np.empty(n, np.float32), np.empty(n, np.float32)
        temperature = draws.temperature.astype(np.float32)
        inverse = np.divide(1.0, temperature, out=np.zeros(n, np.float32), where=temperature > 0, dtype=np.float32)
        top_k, top_p = draws.top_k.astype(np.int32), draws.top_p.astype(np.float32)
        min_p, counters = draws.min_p.astype(np.float32), np.ascontiguousarray(draws.counters, np.int64)
        normed = self.normed(x)
        for a in range(0, n, self.chunk_rows):
            b = min(a + self.chunk_rows, n)
            logits = self.logits(normed[a:b])
            rows = (inverse, top_k, top_p, min_p, counters, token, logp, behaviour)
            addresses = [r[a:b].ctypes.data for r in rows]
            args = [logits.data_ptr(), logits.stride(0), self.decoder.n_tokens, *addresses]
            sample_rows.bind(b - a, args).run()
        return Drawn(token, logp, behaviour)

    def score(self, x: Tensor, targets: np.ndarray, temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log-prob, entropy) float32 [n] of target ids [n] at residual rows x [n, H]; the sampler's own numbers."""
        n = x.shape[0]
        logp, entropy = np.empty(n, np.float32), np.empty(n, np.float32)
        normed = self.normed(x)
        for a in range(0, n, self.chunk_rows):
            b = min(a + self.chunk_rows, n)
            logits = self.logits(normed[a:b])
            logp_chunk(self.decoder, logits, targets[a:b], temperature[a:b], logp[a:b], entropy[a:b])
        return logp, entropy


def logp_chunk(
    decoder: Decoder,
    logits: Tensor,
    targets: np.ndarray,
    temperature: np.ndarray,
    logp: np.ndarray,
    entropy: np.ndarray,
    probabilities: Tensor | None = None,
    log_weights: Tensor | None = None,
) -> None:
    """Fill logp and entropy (float32 [n]) from logits [n, V]; optionally p and p·(log p + H), operand dtype [n, V].

    T = 0 scores at T = 1, as the greedy sampler does.
    """
    temperature = np.where(temperature > 0, temperature, 1.0).astype(np.float32)
    inverse = np.float32(1.0) / temperature
    ids = np.ascontiguousarray(targets, np.int32)
    args = [logits.data_ptr(), logits.stride(0), decoder.n_tokens, inverse.ctypes.data, ids.ctypes.data]
    args += [logp.ctypes.data, entropy.ctypes.data]
    args += [probabilities.data_ptr(), probabilities.stride(0)] if probabilities is not None else [0, 0]
    args += [is_bf16(probabilities) if probabilities is not None else 0]
    args += [log_weights.data_ptr() if log_weights is not None else 0]
    logp_rows.bind(len(ids), args, (inverse, ids)).run()


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """log-prob and entropy of N targets, and their derivatives with respect to the normed rows.

    `d_logp` [N, H] is ∂logp/∂h = (W̃[y] − p·W̃)/T: a log-prob is scored once and any loss of it is differentiated by
    scaling rows, so logits are never kept. `d_entropy` [N, H] likewise, or None when entropy earns no gradient.
    """

    logp: np.ndarray
    entropy: np.ndarray
    d_logp: Tensor
    d_entropy: Tensor | None


def score_with_gradient(
    head: Head, x: Tensor, targets: np.ndarray, temperature: np.ndarray, *, entropy_gradient: bool
) -> ScoredRows:
    """Score residual rows x [N, H] as `Head.score` does, with derivatives. Two products per chunk of rows."""
    decoder, n = head.decoder, x.shape[0]
    operand = decoder.options.operand_dtype
    logp, entropy = np.empty(n, np.float32), np.empty(n, np.float32)
    inverse = torch.from_numpy((1.0 / np.where(temperature > 0, temperature, 1.0)).astype(np.float32))[:, None]
    normed = head.normed(x)
    d_logp = decoder.head.gather(torch.from_numpy(np.ascontiguousarray(targets, np.int32)))
    d_entropy = torch.zeros_like(d_logp) if entropy_gradient else None
    rows, width = min(n, head.chunk_rows), decoder.head.rows + decoder.head.rows % 2
    p = torch.zeros(rows, width, dtype=operand)  # zero behind the tokens, where nothing is written
    w = torch.zeros_like(p) if entropy_gradient else None
    for a in range(0, n, head.chunk_rows):
        b = min(a + head.chunk_rows, n)
        logits = head.logits(normed[a:b])
        logp_chunk(decoder, logits, targets[a:b], temperature[a:b], logp[a:b], entropy[a:b], p, w)
        _subtract_expectation(decoder, p[: b - a], d_logp[a:b])
        if d_entropy is not None and w is not None:
            _subtract_expectation(decoder, w[: b - a], d_entropy[a:b])
    d_logp *= inverse
    if d_entropy is not None:
        d_entropy *= inverse
    return ScoredRows(logp, entropy, d_logp, d_entropy)


def _subtract_expectation(decoder: Decoder, weights: Tensor, out: Tensor) -> None:
    """out [n, H] −= weights [n, V]·W̃, a block of the vocabulary at a time."""
    buffer = torch.empty(transposed_numel(VOCABULARY_PANELS * PANEL, decoder.head.columns), dtype=weights.dtype)
    for first, block in decoder.head.blocks(VOCABULARY_PANELS):
        part = block.transposed(buffer)
        part.matmul(weights[:, first : first + part.columns], out, add=True, factor=-1.0)
