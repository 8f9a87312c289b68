"""A mixture's completions carry the experts that every position took; training that replays them agrees to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.decoders import BF16, random_ids, tiny_decoder
from support.learning import Rig, request
from tithe.models import Decoder, TrainAdapter
from tithe.models.passes import Passes
from tithe.trainer import score_groups
from tithe.types import Completion, Rollout, RolloutGroup
from tithe.weight_sync import load_published


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("moe") / "m"
    return tiny_decoder(path, "qwen3_moe", BF16, num_hidden_layers=3, mlp_only_layers=[1])


@pytest.fixture
def make(mixture: Decoder, tmp_path: Path) -> Iterator[Any]:
    rigs: list[Rig] = []

    def one(**options: Any) -> Rig:
        rigs.append(Rig(mixture, tmp_path / f"rig{len(rigs)}", options=options).__enter__())
        return rigs[-1]

    yield one
    for rig in rigs:
        rig.__exit__()


def group_of(prompt: np.ndarray, answers: list[Completion]) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            i, a.token_ids, np.ones(len(a.token_ids), bool), a.logp, a.logp_behaviour, a.serials, 1.0, a.finish,
            experts=a.experts,
        )
        for i, a in enumerate(answers)
    )  # fmt: skip
    return RolloutGroup(0, "p", prompt, rollouts, 0, 0)


def test_every_computed_position_of_every_mixture_layer_is_recorded(make: Any) -> None:
    rig = make()
    prompt = random_ids(21)
    answers = rig.answers([request(prompt.tolist(), sample=s, max_new_tokens=n) for s, n in enumerate((1, 5, 9))])
    for answer in answers:
        assert answer.experts is not None
        assert answer.experts.dtype == np.uint16
        assert answer.experts.shape == (21 + len(answer.token_ids) - 1, 2, 2)
        assert (np.diff(answer.experts.astype(int), axis=2) > 0).all(), "two different experts, ascending"
        np.testing.assert_array_equal(answer.experts[:21], answers[0].experts[:21])
    assert len(np.unique(answers[2].experts)) == 4
    assert make(record_experts=False).answers([request(prompt.tolist())])[0].experts is None


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
def test_a_request_that_changes_its_version_says_what_computed_its_keys(make: Any, on_publish: str) -> None:
    rig = make(on_publish=on_publish)
    rig.publish_random(1)
    future = rig.engine.submit(request(random_ids(18).tolist(), max_new_tokens=12))
    rig.lane.tick(5)
    rig.publish_random(2, size=1.0)
    rig.lane.settle()
    answer = future.result(timeout=1)
    assert len(set(answer.serials.tolist())) == 2
    assert answer.experts is not None
    assert len(answer.experts) == 18 + len(answer.token_ids) - 1


def test_training_replays_them_and_agrees_to_the_bit(make: Any) -> None:
    rig = make()
    rig.publish_random(3, size=0.5)
    prompt = random_ids(19, 4)
    answers = rig.answers([request(prompt.tolist(), sample=s, max_new_tokens=4 + 3 * s) for s in range(4)])
    group = group_of(prompt, answers)
    _, tensors, spec = load_published(rig.channel.list_versions()[-1])
    passes = Passes(rig.decoder, {}, checkpointing=False, dropout=0.0)
    adapter = TrainAdapter.for_scoring(rig.decoder, tensors, spec)
    (scored,) = score_groups(passes, [group], adapter, 1000).logp
    for answer, logp in zip(answers, scored, strict=True):
        np.testing.assert_array_equal(logp, answer.logp)
    assert passes.take_agreement() == 1.0
    assert passes.take_agreement() is None
    other = TrainAdapter.for_scoring(rig.decoder, {n: 3 * t for n, t in tensors.items()}, spec)
    score_groups(passes, [group], other, 1000)
    share = passes.take_agreement()
    assert share is not None
    assert 0 < share < 1, "another policy would choose other experts and is made to take these"
