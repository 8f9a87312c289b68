"""Routers: from logits to experts and weights, and back. Frozen, but gradients flow through the weights to the input.

| family | scoring | chosen by | weights |
|---|---|---|---|
| Qwen3-MoE, Mixtral, gpt-oss | softmax | logit | softmax over the chosen (Qwen3 may leave it over all) |
| DeepSeek-V3, Kimi-K2, GLM-4.5 | sigmoid | score + correction, within the best groups | scores / Σ · scale |
| MiniMax-M2 | sigmoid | score + correction | scores / Σ |

Of equal keys the lowest id wins. A softmax over the chosen equals a softmax over all, normalised. A router's own bias
(gpt-oss) belongs to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tithe.arch import ArchSpec
from tithe.models.routing_kernels import ROWS_PER_TASK, SIGMOID, SOFTMAX, route_rows, route_rows_backward
from tithe.quant import Launch, kernel_threads


@dataclass(frozen=True)
class Router:
    """How experts are chosen and weighed. `ValueError` for numbers that fit no choice.

    Example: Kimi-K2 is ``Router(384, 8, "sigmoid", normalise=True, scale=2.827)``.
    """

    n_experts: int
    per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """The weights of a row are made to sum to 1 (before `scale`)."""
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1

    @staticmethod
    def of(spec: ArchSpec) -> Router:
        """The router of a model's mixture layers."""
        mixture, how = spec.mixture, spec.routing
        scoring = "sigmoid" if how.scoring == "sigmoid" else "softmax"
        normalise = how.norm_topk_prob or how.scoring == "softmax_of_chosen"
        sizes = (mixture.n_experts, mixture.n_experts_per_token)
        return Router(*sizes, scoring, normalise, how.scale, how.n_groups, how.n_groups_chosen)

    def __post_init__(self) -> None:
        size = self.n_experts // max(self.groups, 1)
        if not 1 <= self.per_token <= self.n_experts:
            raise ValueError(f"a token cannot take {self.per_token} of {self.n_experts} experts")
        if self.groups < 1 or size * self.groups != self.n_experts:
            raise ValueError(f"{self.n_experts} experts do not form {self.groups} equal groups")
        if not self.per_token <= size * self.groups_chosen <= self.n_experts:
            raise ValueError(f"{self.groups_chosen} groups of {size} experts do not hold {self.per_token}")


@dataclass(frozen=True, eq=False)
class Routed:
    """Chosen experts of R rows: ids int32 [R, k] ascending, weights float32 [R, k]; `agreement` int32 [R]: 1 where a
    replayed choice is the row's own, 0 where it is another, -1 where nothing was replayed."""

    ids: Tensor
    weights: Tensor
    agreement: Tensor

    @staticmethod
    def allocate(router: Router, rows: int) -> Routed:
        """Buffers for up to `rows` rows."""
        ids = torch.zeros(rows, router.per_token, dtype=torch.int32)
        weights = torch.zeros(rows, router.per_token)
        return Routed(ids, weights, torch.full((rows,), -1, dtype=torch.int32))

    def first(self, n: int) -> Routed:
        """Views of the first n rows."""
        return Routed(self.ids[:n], self.weights[:n], self.agreement[:n])

    def agreed(self) -> float | None:
        """Share of the replayed rows whose own choice is the replayed one; None when no row was replayed."""
        replayed = int((self.agreement >= 0).sum())
        return int((self.agreement == 1).sum()) / replayed if replayed else None


class RouteStep:
    """`route` on fixed buffers, with a launch's face: `rows` of logits [≥ R, E] are routed into `out`.

    `replay` is the address of int32 [R, k] ids to take, or 0; see `check_replay`.
    """

    __slots__ = ("_launch",)

    def __init__(self, router: Router, logits: Tensor, out: Routed, correction: Tensor | None = None) -> None:
        scratch = torch.empty(kernel_threads(), 2 * router.n_experts + router.groups)
        args: list[int | float] = [logits.data_ptr(), *_kind(router), router.groups, router.groups_chosen]
        args += [correction.data_ptr() if correction is not None else 0, 0, out.ids.data_ptr(), out.weights.data_ptr()]
        args += [out.agreement.data_ptr(), scratch.data_ptr(), 0]
        self._launch: Launch = route_rows.bind(0, args, (logits, correction, out, scratch))

    def run(self, rows: int, replay: int = 0) -> None:
        """Route the first `rows` rows."""
        args = self._launch.args
        args[1], args[12], args[17] = -(-rows // ROWS_PER_TASK), replay, rows
        self._launch.run()


def route(router: Router, logits: Tensor, correction: Tensor | None = None, replay_ids: Tensor | None = None) -> Routed:
    """Experts and weights of logits [R, E] float32.

    `correction` [E] is added to the sigmoid scores for the choice alone. `replay_ids` int32 [R, k] (any order) are
    taken instead of the router's own choice, weighed by the row's own logits; a row that begins with a negative id
    chooses for itself. `ValueError` for ids that are no k different experts.
    """
    logits = logits.contiguous()
    if logits.dtype != torch.float32 or logits.shape[1:] != (router.n_experts,):
        raise ValueError(f"logits are {tuple(logits.shape)} of {logits.dtype}, not float32 [R, {router.n_experts}]")
    out = Routed.allocate(router, len(logits))
    replay = None if replay_ids is None else check_replay(router, replay_ids, len(logits))
    RouteStep(router, logits, out, correction).run(len(logits), 0 if replay is None else replay.data_ptr())
    return out


def check_replay(router: Router, ids: Tensor, rows: int) -> Tensor:
    """Replayed ids as kernels read them, int32 [R, k]; `ValueError` unless each row names k different experts or begins
    with a negative id."""
    if ids.shape != (rows, router.per_token):
        raise ValueError(f"replayed experts are {tuple(ids.shape)}, not {(rows, router.per_token)}")
    found = np.sort(ids.numpy()[(ids[:, 0] >= 0).numpy()], axis=1)
    if found.size and (found[:, 0].min() < 0 or found[:, -1].max() >= router.n_experts):
        raise ValueError(f"replayed experts lie outside 0..{router.n_experts - 1}")
    if (found[:, 1:] == found[:, :-1]).any():
        raise ValueError("a row of replayed experts names one twice")
    return ids.to(torch.int32).contiguous()


def route_backward(router: Router, logits: Tensor, ids: Tensor, d_weights: Tensor) -> Tensor:
    """d_logits float32 [R, E] for d_weights float32 [R, k] of the experts ids int32 [R, k]."""
    d_logits, scratch = torch.empty_like(logits), torch.empty(kernel_threads(), 2 * router.n_experts)
    logits, ids, d_weights = logits.contiguous(), ids.contiguous(), d_weights.contiguous()
    args: list[int | float] = [logits.data_ptr(), *_kind(router), ids.data_ptr(), d_weights.data_ptr()]
    args += [d_logits.data_ptr(), scratch.data_ptr(), len(logits)]
    route_rows_backward.bind(-(-len(logits) // ROWS_PER_TASK), args).run()
    return d_logits


def _kind(router: Router) -> list[int | float]:
    scoring = SOFTMAX if router.scoring == "softmax" else SIGMOID
    return [router.n_experts, router.per_token, scoring, int(router.normalise), float(router.scale)]
