"""GSPO (arXiv 2507.18071): the ratio of whole answers, clipped as one."""

from __future__ import annotations

import torch
from torch import Tensor

from tithe.losses.packed import kept, seq_mean
from tithe.losses.policy import policy_loss
from tithe.losses.record import LossOutput, LossSettings, PolicyLossInput
from tithe.losses.surrogate import TokenLoss, clipped

SEQ_LOG_RATIO_BOUND = 10.0
"""Of the *mean* log-ratio of an answer, as in verl: e^10 in the mean over tokens is no ratio to learn from, and beyond
it no gradient passes."""


def gspo(inp: PolicyLossInput, settings: LossSettings) -> LossOutput:
    """`policy_loss` with s = exp(mean over the answer's trained tokens of log π/π_old) in the ratio's place.

    Each token carries s in value and its own log-prob's derivative (the paper's GSPO-token form with one advantage an
    answer), so that the gradient is that of s. The paper's denominator is SEQ_MEAN_TOKEN_MEAN, its clips 3e-4 and 4e-4:
    a mean log-ratio moves far less than a token's.
    """
    return policy_loss(inp, settings, _sequence_ratio)


def _sequence_ratio(inp: PolicyLossInput, log_ratio_N: Tensor, settings: LossSettings) -> TokenLoss:
    mean_Q = seq_mean(log_ratio_N.detach(), inp.mask, inp.seq_index, inp.n_seqs)
    logp_N = kept(inp.logp, inp.mask)
    log_s_N = (mean_Q[inp.seq_index] + (logp_N - logp_N.detach())).clamp(-SEQ_LOG_RATIO_BOUND, SEQ_LOG_RATIO_BOUND)
    return clipped(torch.exp(log_s_N), kept(inp.advantage, inp.mask), settings)
