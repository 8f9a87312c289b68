"""A conversation's next turn is computed from where the last ended: same bits, fewer prompt tokens, no page lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.decoders import BF16, FP32, random_ids, tiny_decoder
from support.learning import Rig, request, same
from tithe.models import PAGE, KVPages, ModelOptions
from tithe.types import Completion, FinishReason, GenerateRequest

MIXTURES = ("qwen3_moe", "deepseek_v3")


def spell(ids: Sequence[int]) -> str:
    """A letter a token, so that a stop string ends an answer at a length."""
    return "x" * len(ids)


def opening(n: int, drawn: int, *, group: int = 0, sample: int = 0, adapter: str | None = None) -> GenerateRequest:
    """A conversation's first request: a prompt of n tokens, an answer that stops after so many."""
    one = request(
        random_ids(n, n), group=group, sample=sample, adapter=adapter, max_new_tokens=40, stop_strings=("x" * drawn,)
    )
    return replace(one, may_continue=True)


def following(before: GenerateRequest, answer: Completion, said: int = 5) -> GenerateRequest:
    """The next turn, after somebody has said so many tokens."""
    assert answer.finish is FinishReason.STOP
    ids = (*before.prompt_ids, *answer.token_ids.tolist(), *random_ids(said, said).tolist())
    return replace(before, prompt_ids=ids, params=replace(before.params, sample=before.params.sample + 100))


def alone(one: GenerateRequest) -> GenerateRequest:
    return replace(one, may_continue=False)


def computed(one: GenerateRequest, answer: Completion) -> int:
    return len(one.prompt_ids) + len(answer.token_ids) - 1


def counted(rig: Rig) -> tuple[float, float]:
    stats = rig.engine.stats()
    return stats["prefill_tok"], stats["reused_tok"]


def assert_balanced(rig: Rig) -> None:
    """Every page has as many references as idle prompts and what was left behind have, and all others are free."""
    cache = rig.engine._cache
    left = [one for group in cache._kept.values() for one in group]
    assert all(prompt.users == 0 for prompt in cache._prompts.values())
    held = Counter(page for one in (*cache._prompts.values(), *left) for page in one.pages)
    assert cache.allocator._references == held
    assert sorted([*cache.allocator.free_pages(), *held]) == list(range(rig.engine.pages.pages))


@pytest.fixture
def talking(rigs) -> Any:
    """Rigs whose answers stop at a length."""
    return lambda **options: rigs(decode=spell, **options)


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", ModelOptions(quantize="int4")),
        ("llama", ModelOptions(quantize="int4", compute="dequantized")),
        ("llama", FP32),
        ("qwen3_moe", ModelOptions(quantize="int4")),
        ("deepseek_v3", BF16),
    ],
    ids=["packed", "dequantized", "fp32", "mixture", "latent"],
)
def test_later_turns_are_those_of_a_fresh_engine_to_the_bit(
    tmp_path: Path, architecture: str, options: ModelOptions
) -> None:
    """Ends of turns before, on and behind a page's end; a group's samples; a prompt of two prefills."""
    decoder = tiny_decoder(tmp_path / "m", architecture, options, tie_word_embeddings=False)
    settings = {"decode": spell}
    with (
        Rig(decoder, tmp_path / "one", options=settings) as rig,
        Rig(decoder, tmp_path / "two", options=settings) as new,
    ):
        for each in (rig, new):
            each.publish_random(1)
        lengths = [(15, 1), (16, 1), (15, 2), (15, 3), (40, 9), (40, 10)]
        asked = [opening(n, drawn, group=g, sample=g % 2) for g, (n, drawn) in enumerate(lengths)]
        asked += [opening(40, drawn, group=4, sample=s) for s, drawn in ((7, 8), (8, 12))]
        answers = rig.answers(asked)
        read, known = counted(rig)
        assert known == 0
        for said in (1, 20):
            known += sum(computed(*turn) for turn in zip(asked, answers, strict=True))
            asked = [following(one, answer, said) for one, answer in zip(asked, answers, strict=True)]
            read += sum(len(one.prompt_ids) for one in asked)
            answers = rig.answers(asked)
            assert counted(rig) == (read - known, known)
            for one, wanted in zip(answers, new.answers([alone(one) for one in asked]), strict=True):
                assert same(one, wanted)
                assert (one.experts is None) == (wanted.experts is None) == (architecture not in MIXTURES)
                np.testing.assert_array_equal(one.experts, wanted.experts)
        assert counted(new)[1] == 0
        assert_balanced(rig)


def test_two_that_continue_one_answer_do_not_touch_each_others_pages(talking) -> None:
    """The first takes over what was computed, the second computes all of it."""
    rig, new = talking(), talking()
    asked = opening(21, 6)
    answer = rig.answer(asked)
    turns = [following(asked, answer, said) for said in (3, 4)]
    read, _ = counted(rig)
    found, wanted = rig.answers(turns), new.answers([alone(one) for one in turns])
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    known = computed(asked, answer)
    assert counted(rig) == (read + sum(len(one.prompt_ids) for one in turns) - known, known)
    assert_balanced(rig)


def test_equal_answers_of_a_group_leave_one_copy_behind(talking) -> None:
    rig = talking()
    asked = [
        replace(opening(21, 6), params=replace(opening(21, 6).params, temperature=0.0, sample=s)) for s in range(3)
    ]
    answers = rig.answers(asked)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert [len(group) for group in rig.engine._cache._kept.values()] == [1]
    assert_balanced(rig)


# ------------------------------------------------------------------ versions


def test_another_version_computes_the_whole_prompt(talking) -> None:
    rig, new = talking(), talking()
    first = rig.publish_random(1)
    asked = opening(21, 6, adapter=first)
    answer, _ = rig.answers([asked, opening(21, 6, group=1, adapter=first)])
    rig.publish_random(2)
    turn = following(asked, answer)
    new.publish_random(2)
    read, _ = counted(rig)
    found = rig.answer(replace(turn, adapter=None))
    assert same(found, new.answer(alone(replace(turn, adapter=None))))
    assert counted(rig) == (read + len(turn.prompt_ids), 0)
    bound = rig.answer(turn)
    assert set(bound.serials.tolist()) == {0}
    assert counted(rig)[1] == computed(asked, answer), "its own version goes on from there"
    rig.engine.drop_adapter(first)
    left = [one for group in rig.engine._cache._kept.values() for one in group]
    assert [one.version.serial for one in left] == [1], "nothing of the dropped version"
    assert_balanced(rig)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_an_answer_of_two_versions_is_continued_only_over_keys_of_one(talking, policy: str) -> None:
    rig, new = talking(on_publish=policy), talking()
    rig.publish_random(1)
    asked = opening(21, 12)
    future = rig.engine.submit(asked)
    rig.tick(5)
    rig.publish_random(2)
    rig.lane.settle()
    answer = future.result(0)
    assert len(set(answer.serials.tolist())) == 2
    new.publish_random(2)
    turn = following(asked, answer)
    assert same(rig.answer(turn), new.answer(alone(turn)))
    assert counted(rig)[1] == (computed(asked, answer) if policy == "recompute" else 0)
    assert_balanced(rig)


# ------------------------------------------------------------------ memory


def test_what_was_left_behind_gives_way_to_live_requests(talking, decoder) -> None:
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig, new = talking(kv_bytes=8 * page), talking()
    asked = [opening(21, 14, group=g) for g in range(4)]
    answers = rig.answers(asked)
    assert len(rig.engine._cache._kept) < 4
    rig.answers([request(random_ids(3 * PAGE, g), group=50 + g, max_new_tokens=20) for g in range(6)])
    assert not rig.engine._cache._kept
    turns = [following(*turn) for turn in zip(asked, answers, strict=True)]
    wanted = new.answers([alone(turn) for turn in turns])
    assert all(same(a, b) for a, b in zip(rig.answers(turns), wanted, strict=True))
    assert_balanced(rig)


def test_a_turn_that_needs_every_page_takes_over_the_last_ones(talking, decoder) -> None:
    """What is kept for it is never in its way, and is not thrown away for it."""
    page = KVPages.page_bytes(decoder.spec, decoder.options.operand_dtype)
    rig = talking(kv_bytes=7 * page)
    asked = opening(21, 12)
    answer = rig.answer(asked)
    turn = following(asked, answer)  # 38 tokens: 6 pages to their end, and the partly filled one twice
    turn = replace(turn, params=replace(turn.params, max_new_tokens=6 * PAGE - 38))
    assert same(rig.answer(turn), talking().answer(alone(turn)))
    assert counted(rig)[1] == computed(asked, answer)
    assert_balanced(rig)


def test_requests_that_may_not_continue_leave_nothing_behind(talking) -> None:
    rig = talking()
    stopped = rig.answer(alone(opening(21, 6)))
    cut = rig.answer(replace(opening(21, 6, group=1), params=request([1], max_new_tokens=4).params))
    assert (stopped.finish, cut.finish) == (FinishReason.STOP, FinishReason.LENGTH)
    assert not rig.engine._cache._kept
    assert_balanced(rig)


def test_a_cancelled_conversation_leaves_no_pages_behind(talking) -> None:
    rig = talking(prefill_tokens=8)
    asked = [opening(21, 6, group=g) for g in range(2)]
    answers = rig.answers(asked)
    assert set(rig.engine._cache._kept) == {0, 1}
    rig.engine.cancel(0)
    assert set(rig.engine._cache._kept) == {1}
    assert_balanced(rig)
    half_read = rig.engine.submit(following(asked[1], answers[1], said=30))
    rig.tick(1)
    rig.engine.cancel(1)
    rig.lane.settle()
    assert half_read.result(0).finish is FinishReason.CANCELLED
    assert not rig.engine._cache._kept
    assert_balanced(rig)
    used = rig.engine.pages.pages - rig.engine._cache.allocator.free
    assert used == 2, "only the idle prompt of both is held"
