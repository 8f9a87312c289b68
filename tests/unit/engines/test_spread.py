"""The engine over ranks: one rank's tokens and log-probs to the bit, whichever rank a request is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import build_hf
from support.decoders import BF16, random_adapter, random_ids
from support.learning import SPEC, Rig, request, same
from support.ranks import on_ranks_of
from tithe.arch import read_checkpoint
from tithe.build.crew import WIRE
from tithe.engines import EngineShare, Here, SharedEngine, SpreadEngine
from tithe.errors import EngineError, PublishRefused
from tithe.models import ALONE, Decoder, Lane, Orders, Ranks, Stop, load_model, on_ranks
from tithe.types import Completion, FinishReason, GenerateRequest
from tithe.weight_sync import read_manifest

OPTIONS: dict[str, Any] = {"max_running": 4, "kv_bytes": 1 << 20, "prefill_tokens": 32}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    return build_hf(tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", **sizes)


def loaded(base: Path, ranks: Ranks) -> Decoder:
    decoder = on_ranks(load_model(read_checkpoint(base), BF16, ranks.shard), ranks)
    return replace(decoder, checksum="one")


def published(base: Path, folder: Path, seeds: Sequence[int]) -> list[Path]:
    with Rig(loaded(base, ALONE), folder) as rig:
        return [rig.write(random_adapter(rig.decoder, SPEC, seed, 0.3)) for seed in seeds]


def leading(base: Path, ranks: Ranks, work: Callable[[SpreadEngine], Any], **options: Any) -> Any:
    """`work` on rank 0's engine, while the others follow."""
    orders = Orders(ranks, WIRE)
    share = EngineShare(SharedEngine(loaded(base, ranks), Here(), ranks=ranks, **{**OPTIONS, **options}), orders)
    if ranks.rank > 0:
        orders.follow()
        return share.engine.stats()
    lane = Lane(threads=1).start()
    try:
        return work(SpreadEngine(share, orders, lane))
    finally:
        lane.call(orders.give, Stop())
        lane.close()


def answers(futures: Sequence[Future[Completion]]) -> list[Completion]:
    return [future.result(WAIT_S) for future in futures]


PROMPTS = [random_ids(n, n) for n in (7, 40, 1, 23)]
"""The second one takes two prefills."""


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_and_logps_are_those_of_one_rank(tmp_path: Path, base: Path, size: int) -> None:
    """Two versions at once; more requests than one rank runs; experts are recorded alike."""
    first, second = published(base, tmp_path / "published", (1, 2))
    names = [read_manifest(path).name for path in (first, second)]
    asked = [
        request(prompt, group=g, sample=s, adapter=names[(g + s) % 2], max_new_tokens=3 + 2 * s)
        for g, prompt in enumerate(PROMPTS)
        for s in range(5)
    ]
    with Rig(loaded(base, ALONE), tmp_path / "alone", options=OPTIONS) as rig:
        for path in (first, second):
            rig.engine.load_adapter(path)
        wanted = rig.answers(asked)

    def work(engine: SpreadEngine) -> Any:
        assert [engine.load_adapter(path) for path in (first, second)] == names
        return answers([engine.submit(one) for one in asked]), engine.stats()

    (found, stats), *others = on_ranks_of(size, tmp_path / "ranks", lambda ranks: leading(base, ranks, work))
    for mine, alone in zip(found, wanted, strict=True):
        assert same(mine, alone)
        np.testing.assert_array_equal(mine.experts, alone.experts)
        assert set(mine.serials.tolist()) == set(alone.serials.tolist())
    drawn = sum(len(one.token_ids) for one in wanted)
    assert stats["generated_tok"] == drawn
    assert stats["completions"] == len(asked)
    assert all(0 < other["generated_tok"] < drawn for other in others), "every rank has its share"
    assert stats["running"] == stats["waiting"] == 0


def test_a_version_is_forgotten_on_all_ranks_when_its_last_request_has_ended(tmp_path: Path, base: Path) -> None:
    """Rows of the dropped version are on one rank, and need the other's experts until they end."""
    first, second = published(base, tmp_path / "published", (1, 2))
    asked = request(PROMPTS[0], max_new_tokens=40, adapter=read_manifest(first).name)
    with Rig(loaded(base, ALONE), tmp_path / "alone", options=OPTIONS) as rig:
        rig.engine.load_adapter(first)
        wanted = rig.answer(asked)

    def work(engine: SpreadEngine) -> Any:
        name = engine.load_adapter(first)
        future = engine.submit(asked)
        engine.load_adapter(second)
        engine.drop_adapter(name)
        with pytest.raises(EngineError, match="is not live"):
            answers([engine.submit(replace(asked, adapter="nobody"))])
        return answers([future])[0], engine.drain(WAIT_S), engine.stats()

    (found, drained, stats), other = on_ranks_of(2, tmp_path / "ranks", lambda ranks: leading(base, ranks, work))
    assert same(found, wanted)
    assert drained
    assert stats["live_versions"] == other["live_versions"] == 1


def test_what_one_rank_refuses_nobody_serves_and_the_ranks_go_on(tmp_path: Path, base: Path, monkeypatch) -> None:
    first, second = published(base, tmp_path / "published", (1, 2))
    asked = request(PROMPTS[0])

    def work(engine: SpreadEngine) -> Any:
        name = engine.load_adapter(first)
        before = answers([engine.submit(asked)])[0]
        with pytest.raises(PublishRefused, match=r"^rank 1: .* is refused \(mismatch\)"):
            engine.load_adapter(second)
        after = answers([engine.submit(replace(asked, adapter=name)), engine.submit(asked)])
        return before, after

    def run(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            score = SharedEngine._score

            def wrong(self: SharedEngine, version: Any, *sequence: Any) -> list[float]:
                return [x + float(version.serial == 1) for x in score(self, version, *sequence)]

            monkeypatch.setattr(SharedEngine, "_score", wrong)
        return leading(base, ranks, work)

    (before, after), _ = on_ranks_of(2, tmp_path / "ranks", run)
    assert all(same(one, before) for one in after)


def test_cancelled_requests_end_on_whatever_rank_they_are(tmp_path: Path, base: Path) -> None:
    def work(engine: SpreadEngine) -> Any:
        kept = engine.submit(request(PROMPTS[0], group=1, max_new_tokens=100))
        gone = [engine.submit(request(PROMPTS[1], group=2, sample=s, max_new_tokens=100)) for s in range(9)]
        left = engine.submit(request(PROMPTS[2], group=3, max_new_tokens=100))
        left.cancel()
        engine.cancel(2)
        return answers([kept])[0].finish, {one.finish for one in answers(gone)}, engine.drain(WAIT_S), engine.stats()

    (kept, gone, drained, stats), other = on_ranks_of(2, tmp_path, lambda ranks: leading(base, ranks, work))
    assert kept is not FinishReason.CANCELLED
    assert gone == {FinishReason.CANCELLED}
    assert drained
    assert stats["running"] == other["running"] == 0


def test_requests_of_a_group_stay_together_while_ranks_are_even(tmp_path: Path, base: Path) -> None:
    """Pure: which rank takes what, without any other rank."""
    orders = Orders(ALONE, WIRE)
    engine = SpreadEngine(EngineShare(SharedEngine(loaded(base, ALONE), Here(), **OPTIONS), orders), orders, Lane())
    orders.ranks = Ranks(0, 4)
    groups = [g for g in range(32) for _ in range(8)]
    ranks = [engine._choose(n, request(PROMPTS[0], group=g)) for n, g in enumerate(groups)]
    counts = [ranks.count(rank) for rank in range(4)]
    assert max(counts) - min(counts) <= 8
    assert sum(len({r for r, own in zip(ranks, groups, strict=True) if own == g}) for g in range(32)) <= 80


def test_a_conversation_goes_on_where_its_keys_and_values_are(tmp_path: Path, base: Path) -> None:
    spread = {"decode": lambda ids: "x" * len(ids)}
    asked = [
        replace(request(prompt, group=g, sample=s, max_new_tokens=30, stop_strings=("x" * (4 + s),)), may_continue=True)
        for g, prompt in enumerate(PROMPTS)
        for s in range(3)
    ]

    def following(before: list[Completion]) -> list[GenerateRequest]:
        spoken = [(*one.prompt_ids, *a.token_ids.tolist(), 9, 8, 7) for one, a in zip(asked, before, strict=True)]
        return [replace(one, prompt_ids=ids, may_continue=False) for one, ids in zip(asked, spoken, strict=True)]

    def work(engine: SpreadEngine) -> Any:
        before = answers([engine.submit(one) for one in asked])
        remembered = sum(len(group) for group in engine._left.values())
        after = answers([engine.submit(one) for one in following(before)])
        for group in range(len(PROMPTS)):
            engine.cancel(group)
        return before, after, remembered, dict(engine._left), engine.stats()

    (before, after, remembered, left, stats), other = on_ranks_of(
        2, tmp_path / "ranks", lambda ranks: leading(base, ranks, work, **spread)
    )
    with Rig(loaded(base, ALONE), tmp_path / "alone", options={**OPTIONS, **spread}) as rig:
        wanted = rig.answers(following(before))
    for mine, alone in zip(after, wanted, strict=True):
        assert same(mine, alone)
        np.testing.assert_array_equal(mine.experts, alone.experts)
    known = [len(one.prompt_ids) + len(a.token_ids) - 1 for one, a in zip(asked, before, strict=True)]
    assert stats["reused_tok"] == sum(known)
    assert 0 < other["reused_tok"] < sum(known), "each rank goes on with its own"
    assert remembered == len(asked)
    assert not left


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
def test_requests_without_a_name_follow_what_is_served_on_every_rank(
    tmp_path: Path, base: Path, on_publish: str
) -> None:
    """Nobody is left under the version before, which all ranks then forget."""
    first, second = published(base, tmp_path / "published", (1, 2))

    def work(engine: SpreadEngine) -> Any:
        name = engine.load_adapter(first)
        futures = [engine.submit(request(PROMPTS[g], group=g, max_new_tokens=60)) for g in range(4)]
        while engine.stats()["generated_tok"] < 12:
            assert not any(future.done() for future in futures)
            time.sleep(0.001)  # a loop that only asks takes the lane's processor
        engine.load_adapter(second)
        engine.drop_adapter(name)
        return [set(one.serials.tolist()) for one in answers(futures)], engine.stats()["live_versions"]

    (serials, live), other = on_ranks_of(
        2, tmp_path / "ranks", lambda ranks: leading(base, ranks, work, on_publish=on_publish)
    )
    assert serials == [{0, 1}] * 4
    assert live == other["live_versions"] == 1
