"""Routers are transformers' routers, their gradients autograd's, and a row routes alone as in company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tithe.arch import ArchSpec, known_config
from tithe.models.routing import Router, route, route_backward
from tithe.quant import set_threads

E, K, H, R = 16, 4, 24, 200

ROUTERS = {
    "qwen3_moe": Router(E, K, normalise=False),
    "qwen3_moe-normalised": Router(E, K),
    "mixtral": Router(E, K),
    "gpt_oss": Router(E, K),
    "minimax_m2": Router(E, K, "sigmoid"),
    "glm4_moe": Router(E, K, "sigmoid", scale=1.5),
    "deepseek_v3": Router(E, K, "sigmoid", scale=2.5, groups=4, groups_chosen=2),
    "deepseek_v3-raw": Router(E, K, "sigmoid", scale=2.5, normalise=False, groups=8, groups_chosen=3),
}
each_router = pytest.mark.parametrize("name", ROUTERS)


def logits_of(rows: int = R, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, E, generator=torch.Generator().manual_seed(seed)) * spread


def correction_of(router: Router) -> Tensor | None:
    if router.scoring == "softmax":
        return None
    return torch.randn(E, generator=torch.Generator().manual_seed(7)) * 0.3


def transformers_router(name: str) -> Any:
    """The installed modeling code's router on a tiny configuration."""
    from transformers import models

    router, family = ROUTERS[name], name.partition("-")[0]
    sizes: dict[str, Any] = {"hidden_size": H, "num_experts_per_tok": K}
    if family == "qwen3_moe":
        config = models.qwen3_moe.Qwen3MoeConfig(num_experts=E, norm_topk_prob=router.normalise, **sizes)
        return models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter(config)
    if family == "mixtral":
        config = models.mixtral.MixtralConfig(num_local_experts=E, **sizes)
        return models.mixtral.modeling_mixtral.MixtralTopKRouter(config)
    if family == "gpt_oss":
        config = models.gpt_oss.GptOssConfig(num_local_experts=E, **sizes)
        return models.gpt_oss.modeling_gpt_oss.GptOssTopKRouter(config)
    if family == "minimax_m2":
        config = models.minimax_m2.MiniMaxM2Config(num_local_experts=E, **sizes)
        return models.minimax_m2.modeling_minimax_m2.MiniMaxM2TopKRouter(config)
    limits = {"n_group": router.groups, "topk_group": router.groups_chosen, "norm_topk_prob": router.normalise}
    sizes |= limits | {"n_routed_experts": E, "routed_scaling_factor": router.scale}
    if family == "glm4_moe":
        return models.glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter(models.glm4_moe.Glm4MoeConfig(**sizes))
    config = models.deepseek_v3.DeepseekV3Config(**sizes)
    return models.deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)


@each_router
def test_ids_and_weights_are_transformers(name: str) -> None:
    module, correction = transformers_router(name), correction_of(ROUTERS[name])
    generator = torch.Generator().manual_seed(3)
    torch.nn.init.normal_(module.weight, std=0.4, generator=generator)
    if name == "gpt_oss":
        torch.nn.init.normal_(module.bias, generator=generator)
    hidden = torch.randn(R, H, generator=generator)
    with torch.no_grad():
        if name == "minimax_m2":
            logits, weights, ids = module(hidden, correction)
        else:
            if correction is not None:
                module.e_score_correction_bias.copy_(correction)
            logits, weights, ids = module(hidden)
    theirs, order = ids.sort(dim=-1)
    mine = route(ROUTERS[name], logits, correction)
    assert torch.equal(mine.ids.long(), theirs)
    torch.testing.assert_close(mine.weights, weights.gather(1, order), rtol=1e-6, atol=1e-6)
    assert mine.agreed() is None


@pytest.mark.parametrize(
    ("model", "router"),
    [
        ("kimi-k2", Router(384, 8, "sigmoid", scale=2.827)),
        ("deepseek-v3", Router(256, 8, "sigmoid", scale=2.5, groups=8, groups_chosen=4)),
        ("qwen3-235b-a22b", Router(128, 8)),
        ("glm-4.5", Router(160, 8, "sigmoid", scale=2.5)),
        ("gpt-oss-120b", Router(128, 4)),
    ],
)
def test_routers_of_real_models(model: str, router: Router) -> None:
    assert Router.of(ArchSpec.from_config(known_config(model))) == router


def reference(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    """Weights of given ids by the definitions, differentiable."""
    if router.scoring == "sigmoid":
        weights = logits.sigmoid().gather(1, ids.long())
    else:
        weights = logits.softmax(-1).gather(1, ids.long())
    if router.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scale


@each_router
def test_gradients_are_autograds(name: str) -> None:
    router, logits = ROUTERS[name], logits_of()
    routed = route(router, logits, correction_of(router))
    d_weights = torch.randn(R, K, generator=torch.Generator().manual_seed(5))
    exact = logits.double().requires_grad_()
    weights = reference(router, exact, routed.ids)
    weights.backward(d_weights.double())
    torch.testing.assert_close(routed.weights.double(), weights.detach(), rtol=2e-6, atol=1e-7)
    mine = route_backward(router, logits, routed.ids, d_weights)
    torch.testing.assert_close(mine.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_gradients_by_finite_differences() -> None:
    router, logits = ROUTERS["deepseek_v3"], logits_of(3).double()
    ids = route(router, logits.float(), correction_of(router)).ids
    d_weights = torch.randn(3, K, generator=torch.Generator().manual_seed(5))
    mine, step = route_backward(router, logits.float(), ids, d_weights), 1e-4
    for i in range(E):
        ahead, behind = logits.clone(), logits.clone()
        ahead[:, i] += step
        behind[:, i] -= step
        change = (reference(router, ahead, ids) - reference(router, behind, ids)) / (2 * step)
        torch.testing.assert_close(mine[:, i].double(), (change * d_weights).sum(1), rtol=1e-4, atol=1e-6)


@each_router
def test_a_row_routes_alone_as_in_company(name: str) -> None:
    router, logits = ROUTERS[name], logits_of()
    correction = correction_of(router)
    together = route(router, logits, correction)
    d_weights = torch.randn(R, K, generator=torch.Generator().manual_seed(5))
    gradients = route_backward(router, logits, together.ids, d_weights)
    for r in range(0, R, 7):
        row = slice(r, r + 1)
        alone = route(router, logits[row], correction)
        assert torch.equal(alone.ids, together.ids[row])
        assert torch.equal(alone.weights, together.weights[row])
        assert torch.equal(route_backward(router, logits[row], alone.ids, d_weights[row]), gradients[row])


@each_router
def test_threads_change_nothing(name: str, two_threads: None) -> None:
    router, logits = ROUTERS[name], logits_of()
    two = route(router, logits, correction_of(router))
    set_threads(1)
    one = route(router, logits, correction_of(router))
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.weights, two.weights)


@each_router
def test_of_equal_experts_the_lowest_are_taken(name: str) -> None:
    routed = route(ROUTERS[name], torch.zeros(5, E))
    assert routed.ids.tolist() == [list(range(K))] * 5


def test_all_experts_can_be_taken() -> None:
    routed = route(Router(E, E), logits_of())
    assert (routed.ids == torch.arange(E, dtype=torch.int32)).all()
    torch.testing.assert_close(routed.weights, logits_of().softmax(-1), rtol=1e-6, atol=1e-7)


def test_extreme_logits_give_valid_experts() -> None:
    logits = torch.zeros(5, E)
    logits[0], logits[1, 3], logits[2, 5], logits[3, 2] = -1e30, 1e30, torch.nan, -torch.inf
    for router in ROUTERS.values():
        ids = route(router, logits).ids
        assert ids.min() >= 0
        assert ids.max() < E
        assert (ids[:, 1:] > ids[:, :-1]).all()


# ------------------------------------------------------------------ replay


@each_router
def test_replayed_ids_are_taken_and_weighed_by_the_rows_own_logits(name: str) -> None:
    router = ROUTERS[name]
    sampled, own = logits_of(seed=0), logits_of(seed=0) + 0.3 * logits_of(seed=1)
    correction = correction_of(router)
    before, choice = route(router, sampled, correction), route(router, own, correction)
    replayed = route(router, own, correction, before.ids)
    assert torch.equal(replayed.ids, before.ids)
    torch.testing.assert_close(replayed.weights, reference(router, own, before.ids), rtol=2e-6, atol=1e-7)
    same = (before.ids == choice.ids).all(1)
    assert 0 < same.sum() < R
    assert torch.equal(replayed.agreement == 1, same)
    assert replayed.agreed() == int(same.sum()) / R
    assert torch.equal(replayed.weights[same], choice.weights[same])


def test_replaying_ones_own_choice_changes_no_bit() -> None:
    for router in ROUTERS.values():
        own = route(router, logits_of(), correction_of(router))
        again = route(router, logits_of(), correction_of(router), own.ids.flip(1))
        assert torch.equal(again.ids, own.ids)
        assert torch.equal(again.weights, own.weights)
        assert again.agreed() == 1.0


def test_rows_without_recorded_ids_choose_for_themselves() -> None:
    router, logits = Router(E, K), logits_of()
    own = route(router, logits)
    recorded = torch.arange(E - K, E, dtype=torch.int32).repeat(R, 1)
    recorded[::2] = -1
    mixed = route(router, logits, None, recorded)
    assert torch.equal(mixed.ids[::2], own.ids[::2])
    assert torch.equal(mixed.ids[1::2], recorded[1::2])
    assert (mixed.agreement[::2] == -1).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, 2]], "not"),
        ([[0, 1, 2, E]], "outside"),
        ([[0, 1, -2, 3]], "outside"),
        ([[3, 1, 2, 3]], "twice"),
    ],
)
def test_replayed_ids_that_are_no_choice_are_refused(ids: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(Router(E, K), logits_of(1), None, torch.tensor(ids, dtype=torch.int32))


@pytest.mark.parametrize(
    "numbers",
    [
        {"per_token": 0},
        {"per_token": E + 1},
        {"per_token": 2, "groups": 3},
        {"per_token": 5, "groups": 4, "groups_chosen": 1},
        {"per_token": 5, "groups": 4, "groups_chosen": 5},
    ],
)
def test_numbers_that_fit_no_choice_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="experts"):
        Router(E, **numbers)
