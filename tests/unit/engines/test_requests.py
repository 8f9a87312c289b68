"""One request in any company: same bits, prompts computed once, pages within their bound, every end accounted for."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from support.decoders import random_ids
from support.learning import WAIT_S, Rig, request, same
from tithe.errors import EngineError
from tithe.models import PAGE, KVPages
from tithe.types import Completion, FinishReason, GenerateRequest

PROMPT = tuple(range(20, 41))  # 21 tokens: one full page and a part


def company(n: int, first_group: int = 100) -> list[GenerateRequest]:
    """Requests of all sorts: lengths, temperatures, filters, a greedy one."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7, "max_new_tokens": 3},
        {"min_p": 0.2, "max_new_tokens": 1},
    ]
    return [request(random_ids(3 + 7 * i % 40, i), group=first_group + i, **kinds[i % len(kinds)]) for i in range(n)]


def watched(alone: Rig, **params: Any) -> tuple[GenerateRequest, Completion]:
    wanted = request(PROMPT, group=3, sample=2, max_new_tokens=20, **params)
    return wanted, alone.answer(wanted)


# ------------------------------------------------------------------ the same request in another batch


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0}])
def test_a_request_has_the_same_bits_alone_and_in_any_batch(rigs, params) -> None:
    alone = rigs()
    alone.publish_random(1)
    wanted, expected = watched(alone, **params)
    for n, options in ((3, {"prefill_tokens": 5}), (12, {"max_running": 3}), (7, {})):
        busy = rigs(**options)
        busy.publish_random(1)
        answers = busy.answers([*company(n // 2), wanted, *company(n, 200)])
        assert same(answers[n // 2], expected)


def test_a_request_that_joins_a_running_batch_has_the_same_bits(rigs) -> None:
    wanted, expected = watched(rigs())
    busy = rigs()
    others = [busy.engine.submit(r) for r in company(4)]
    busy.tick(3)
    late = busy.engine.submit(wanted)
    busy.tick(2)
    others += [busy.engine.submit(r) for r in company(4, 200)]
    busy.lane.settle()
    assert same(late.result(0), expected)
    assert all(f.done() for f in others)


def test_samples_of_a_group_differ_and_the_seed_gives_them_again(rigs) -> None:
    """C25: one seed, several samples and groups, all different; the same seed, the same set."""
    asked = [request(PROMPT, group=g, sample=s, max_new_tokens=12) for g in range(2) for s in range(4)]
    once, again = rigs().answers(asked), rigs(max_running=2).answers(list(reversed(asked)))[::-1]
    assert len({tuple(c.token_ids) for c in once}) == 8
    assert all(same(a, b) for a, b in zip(once, again, strict=True))
    other = rigs().answers([request(PROMPT, group=r.params.group, sample=r.params.sample, seed=8) for r in asked])
    assert {tuple(c.token_ids[:8]) for c in once}.isdisjoint(tuple(c.token_ids) for c in other)


def test_logp_is_the_full_softmax_at_the_temperature_and_behaviour_that_of_the_kept_set(rig) -> None:
    free, cut = rig.answers([request(PROMPT, group=1), request(PROMPT, group=1, top_k=3)])
    assert np.array_equal(free.logp, free.logp_behaviour)
    assert (cut.logp_behaviour > cut.logp).all()
    greedy = rig.answer(request(PROMPT, temperature=0.0))
    scored = rig.engine.score(None, PROMPT, greedy.token_ids.tolist())
    assert np.array_equal(np.array(scored, np.float32), greedy.logp), "greedy answers are scored at T = 1"
    assert not greedy.logp_behaviour.any(), "a greedy choice is certain"


# ------------------------------------------------------------------ prompts


def test_a_groups_prompt_is_computed_once(rig) -> None:
    rig.answers([request(PROMPT, group=1, sample=s) for s in range(8)])
    stats = rig.engine.stats()
    assert stats["prefill_tok"] == len(PROMPT)
    assert (stats["prompt_misses"], stats["prompt_hits"]) == (1, 7)
    rig.answers([request(PROMPT, group=2, sample=s) for s in range(3)])
    assert rig.engine.stats()["prefill_tok"] == len(PROMPT), "it stays while nobody wants its pages"


def test_prompts_that_push_each_other_out_are_counted_as_misses(rigs, decoder) -> None:
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = rigs(kv_bytes=3 * page)
    for turn in range(3):
        for seed in range(3):
            rig.answer(request(random_ids(PAGE, seed), group=turn, max_new_tokens=2))
    stats = rig.engine.stats()
    assert (stats["prompt_misses"], stats["prompt_hits"]) == (9, 0)
    assert stats["prefill_tok"] == 9 * PAGE


def test_a_long_prompt_is_computed_in_parts_beside_running_requests(rigs) -> None:
    long = request(random_ids(150), group=9)
    expected = rigs(prefill_tokens=512).answer(long)
    rig = rigs(prefill_tokens=16, max_running=4)
    running = rig.engine.submit(request(PROMPT[:4], group=1, max_new_tokens=12))
    rig.tick(2)
    late = rig.engine.submit(long)
    rig.tick(6)
    assert rig.engine.stats()["generated_tok"] >= 6, "decoding goes on"
    assert rig.engine.stats()["prefill_tok"] <= 4 + 6 * 16, "no more than the bound per tick"
    rig.lane.settle()
    assert len(running.result(0).token_ids) == 12
    assert same(late.result(0), expected)


# ------------------------------------------------------------------ memory


def test_pages_stay_within_their_bound_and_come_back(rigs, decoder) -> None:
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = rigs(kv_bytes=7 * page + page // 2)
    stats = rig.engine.stats()
    assert stats["kv_pages"] == 7
    assert stats["kv_bytes"] <= 7 * page + page // 2
    answers = rig.answers([request(random_ids(20, i), group=i, max_new_tokens=20) for i in range(6)])
    assert [len(c.token_ids) for c in answers] == [20] * 6
    roomy = rigs().answers([request(random_ids(20, i), group=i, max_new_tokens=20) for i in range(6)])
    assert all(same(a, b) for a, b in zip(answers, roomy, strict=True)), "waiting for pages changes nothing"


def test_a_request_that_can_never_fit_is_refused_with_the_key(rigs, decoder) -> None:
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = rigs(kv_bytes=4 * page)  # the prompt's partly filled page is held twice
    most = 3 * PAGE - len(PROMPT)
    assert len(rig.answer(request(PROMPT, max_new_tokens=most)).token_ids) == most
    with pytest.raises(EngineError, match=r"engine\.kv_memory_mib"):
        rig.engine.submit(request(PROMPT, max_new_tokens=most + 1)).result(0)
    with pytest.raises(EngineError, match=r"model\.max_context"):
        rigs().engine.submit(request(PROMPT, max_new_tokens=600)).result(0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (request([]), "at least one prompt token"),
        (request(PROMPT, max_new_tokens=0), "room for one new token"),
        (request([5, 128]), "vocabulary of 128"),
        (request([-1]), "vocabulary"),
        (request(PROMPT, adapter="nobody"), "'nobody' is not live"),
        (request(PROMPT, stop_strings=("x",)), "decoder of tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(rig, wrong, said) -> None:
    with pytest.raises(EngineError, match=said):
        rig.engine.submit(wrong).result(0)
    assert rig.engine.stats()["waiting"] == 0


@pytest.mark.parametrize(
    ("prompt", "target"), [((), (5,)), ((5,), ()), ((5, 999), (5,)), ((5,), (5, 127)), ((5,), (-1,))]
)
def test_scoring_refuses_ids_that_no_table_holds(rig, prompt, target) -> None:
    with pytest.raises(EngineError, match="cannot score"):
        rig.engine.score(None, prompt, target)
    with pytest.raises(EngineError, match=r"model\.max_context"):
        rig.engine.score(None, [5] * 500, [5] * 20)


def test_scoring_waits_for_pages_that_running_requests_hold(rigs, decoder) -> None:
    """A publication must not fail because the cache is full of requests."""
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = rigs(kv_bytes=4 * page)
    asked = [request(PROMPT, group=i, max_new_tokens=20) for i in range(5)]
    futures = [rig.engine.submit(r) for r in asked]
    rig.tick(3)
    assert rig.engine.stats()["kv_pages_free"] < 2
    rig.publish_random(1)
    rig.lane.settle()
    alone = rigs().answers(asked)
    assert all(same(f.result(0), one) for f, one in zip(futures, alone, strict=True))


def test_many_more_requests_than_places_all_finish(rigs, decoder) -> None:
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = rigs(threaded=True, max_running=4, kv_bytes=9 * page)
    futures = [rig.engine.submit(r) for r in company(150)]
    answers = [f.result(WAIT_S) for f in futures]
    assert [len(a.token_ids) for a in answers[:5]] == [8, 8, 8, 3, 1]
    assert rig.engine.drain(WAIT_S)
    stats = rig.engine.stats()
    assert (stats["completions"], stats["running"], stats["waiting"]) == (150, 0, 0)


# ------------------------------------------------------------------ ends


def test_any_of_several_stop_ids_ends_a_completion_and_belongs_to_it(rig) -> None:
    """C11: an end id at the very limit is an end and no truncation."""
    free = rig.answer(request(PROMPT, max_new_tokens=10))
    ids = free.token_ids.tolist()
    place = next(i for i in range(4, 10) if ids[i] not in ids[:i])
    elsewhere = next(t for t in range(4, 100) if t not in ids)
    for limit in (10, place + 1):
        stopped = rig.answer(request(PROMPT, max_new_tokens=limit, stop_token_ids=(elsewhere, ids[place])))
        assert stopped.token_ids.tolist() == ids[: place + 1]
        assert stopped.finish is FinishReason.STOP
        assert np.array_equal(stopped.logp, free.logp[: place + 1])
    cut = rig.answer(request(PROMPT, max_new_tokens=place, stop_token_ids=(elsewhere, ids[place])))
    assert (cut.token_ids.tolist(), cut.finish) == (ids[:place], FinishReason.LENGTH)


def test_a_single_token_completion(rig) -> None:
    """Drawn from the prompt's own last row: no position is computed after it."""
    one = rig.answer(request(PROMPT, max_new_tokens=1))
    longer = rig.answer(request(PROMPT, max_new_tokens=2))
    assert one.token_ids.tolist() == longer.token_ids[:1].tolist()
    assert one.finish is FinishReason.LENGTH
    assert rig.answer(request([9], max_new_tokens=1)).logp.shape == (1,), "a prompt of one token too"


def test_stop_strings_end_a_completion_even_across_tokens(rigs) -> None:
    rig = rigs(decode=lambda ids: "".join(chr(97 + i % 26) for i in ids))
    text = "".join(chr(97 + i % 26) for i in rig.answer(request(PROMPT, max_new_tokens=12)).token_ids.tolist())
    stop = text[4:6]
    stopped = rig.answer(request(PROMPT, max_new_tokens=12, stop_strings=("??", stop)))
    assert len(stopped.token_ids) == text.index(stop) + 2
    assert stopped.finish is FinishReason.STOP


def test_cancelling_a_group_ends_its_running_and_waiting_requests_only(rigs) -> None:
    rig = rigs(max_running=2)
    kept = [rig.engine.submit(request(PROMPT, group=1, max_new_tokens=9))]
    gone = [rig.engine.submit(request(PROMPT, group=2, sample=s, max_new_tokens=9)) for s in range(3)]
    rig.tick(4)
    rig.engine.cancel(2)
    assert [f.done() for f in gone] == [False, True, True], "what waited is answered at once"
    rig.lane.settle()
    ends = [f.result(0) for f in gone]
    assert all(c.finish is FinishReason.CANCELLED for c in ends)
    assert [len(c.token_ids) for c in ends] == [4, 0, 0], "the tokens so far are handed over"
    assert kept[0].result(0).finish is FinishReason.LENGTH
    rig.engine.cancel(77)  # nobody's


def test_a_future_that_its_caller_cancelled_frees_its_place(rigs) -> None:
    rig = rigs(max_running=1)
    first = rig.engine.submit(request(PROMPT, group=1, max_new_tokens=300))
    second = rig.engine.submit(request(PROMPT, group=2))
    rig.tick(2)
    assert first.cancel()
    rig.lane.settle()
    assert len(second.result(0).token_ids) == 8
    assert rig.engine.stats()["generated_tok"] < 20
    with pytest.raises(CancelledError):
        first.result(0)


@pytest.mark.liveness
def test_drain_waits_for_what_runs_and_wakes_when_the_last_waiting_request_is_cancelled(rigs) -> None:
    rig = rigs(threaded=True)
    release = threading.Event()
    rig.lane.submit(release.wait)  # no tick meanwhile
    rig.engine.submit(request(PROMPT, group=1))
    assert rig.engine.drain(0.0) is False
    waiter = threading.Thread(target=lambda: drained.append(rig.engine.drain(WAIT_S)))
    drained: list[bool] = []
    waiter.start()
    rig.engine.cancel(1)
    waiter.join(10.0)
    release.set()
    assert drained == [True]
    rig.engine.submit(request(PROMPT, group=2))
    assert rig.engine.drain(WAIT_S)


# ------------------------------------------------------------------ failures


def test_a_failing_tick_fails_its_requests_and_not_the_engine(rigs) -> None:
    broken = True

    def decode(ids: Any) -> str:
        if broken and len(ids) == 3:
            raise RuntimeError("no such text")
        return ""

    rig = rigs(threaded=True, decode=decode)
    asked = [request(PROMPT, group=i, stop_strings=("x",)) for i in range(12)]
    with pytest.raises(EngineError, match="no such text"):
        rig.answers(asked)
    assert rig.engine.drain(WAIT_S)
    broken = False
    again = rig.answers(asked)
    assert all(same(a, b) for a, b in zip(again, rigs(decode=decode).answers(asked), strict=True))
    free, all_pages = (rig.engine.stats()[k] for k in ("kv_pages_free", "kv_pages"))
    assert all_pages - free == 2, "only the idle prompt is held"


def test_a_request_that_comes_after_the_end_is_refused(rigs) -> None:
    """Nobody would tick for it, and whoever waits for it would never end."""
    rig = rigs()
    rig.lane.close()
    answer = rig.engine.submit(request(PROMPT))
    with pytest.raises(EngineError, match="the compute lane is closed"):
        answer.result(WAIT_S)
    assert not rig.engine.has_work()
