"""Evaluation: every question, greedy and sampled, with random numbers of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from tithe.errors import ConfigError, Failure, FailureCause
from tithe.orchestration import Player, RunControl, StopReason, evaluate, generate_with
from tithe.orchestration.evaluate import GROUP_BASE
from tithe.types import PromptItem
from unit.orchestration.fakes import PARAMS, FakeEngine, FakeEnv, World

QUESTIONS = [PromptItem(f"q{i}", text=f"question {i}") for i in range(10)]


@pytest.fixture
def engine():
    engine = FakeEngine(0.005)
    engine.load("v1", 1, "weights")
    engine.load("v2", 2, "other weights")
    yield engine
    engine.close()


def make_player(engine, env=None):
    return Player(env or FakeEnv(), generate_with(engine), lambda item: [ord(c) for c in item.id])


def run(engine, env=None, **kwargs):
    settings = {"params": PARAMS, "adapter": "v1", "samples": 3, "max_questions": 4, **kwargs}
    return evaluate(QUESTIONS, player=make_player(engine, env), **settings)


def test_every_question_is_answered_greedily_once_and_sampled_k_times(engine):
    result = run(engine)
    assert [q.question_id for q in result.questions] == [q.id for q in QUESTIONS]
    assert {len(q.sampled) for q in result.questions} == {3}
    temperatures = sorted(request.params.temperature for request in engine.requests)
    assert temperatures == [0.0] * 10 + [1.0] * 30
    assert all(request.adapter == "v1" for request in engine.requests)
    row = result.row(seed=0)
    scores = [answer.score for q in result.questions for answer in q.sampled]
    assert row["eval_sampled"] == pytest.approx(sum(scores) / len(scores))
    assert row["eval_sampled_lo"] <= row["eval_sampled"] <= row["eval_sampled_hi"]
    assert row["eval_greedy"] == pytest.approx(sum(q.greedy.score for q in result.questions) / 10)
    assert row["eval_readable"] == row["eval_greedy_readable"] == 1.0
    assert "eval_failed" not in row
    assert "eval_is_reward" not in row
    paid = replace(result.questions[0].greedy, score=1.5)
    more = replace(result, questions=(replace(result.questions[0], greedy=paid), *result.questions[1:]))
    assert more.row(seed=0)["eval_is_reward"] == 1.0


def test_the_same_policy_gives_the_same_answers_and_another_gives_others(engine):
    first, again, other = run(engine), run(engine, max_questions=10), run(engine, adapter="v2")
    assert first == again
    assert first.questions != other.questions
    texts = [answer.text for q in first.questions for answer in q.sampled]
    assert len(set(texts)) == len(texts), "samples of a question differ"


def test_filters_do_not_reach_the_evaluation(engine):
    run(engine, params=replace(PARAMS, top_p=0.5, top_k=3, min_p=0.1, temperature=0.3))
    assert {(r.params.top_p, r.params.top_k, r.params.min_p) for r in engine.requests} == {(1.0, 0, 0.0)}


def test_evaluating_leaves_training_as_it_was(tmp_path):
    """Group numbers far from training's, so neither random numbers nor cancellations meet."""
    weights = []
    for name, rhythm in (("without", None), ("with", 1)):
        folder = tmp_path / name
        folder.mkdir()
        world = World(folder, steps=4, eval_every=rhythm)

        def score(version, world=world):
            done = evaluate(QUESTIONS, player=world.player, params=PARAMS, adapter=version.name, samples=2)
            return done.row(seed=0)["eval_sampled"]

        world.score = score
        world.run()
        weights.append(world.trainer.weights)
        groups = {request.params.group for request in world.engine.requests}
        assert {g >= GROUP_BASE for g in groups if g > 1000} == {True}
    assert weights[0] == weights[1]


def test_what_an_evaluation_samples_is_no_rollout_speed(tmp_path):
    world = World(tmp_path, steps=3, eval_every=1)
    held = []
    world.score = lambda _version: float(held.append(world.counters._held) or 0.5)
    world.run()
    assert held == [True] * 4
    assert not world.counters._held


def test_failures_count_as_unreadable_and_wrong(engine):
    env = FakeEnv()

    def fault(item, _request):
        if item.id == "q0":
            raise TimeoutError
        return "play"

    env.fault = fault
    result = run(engine, env)
    assert [q.greedy.readable for q in result.questions] == [False] + [True] * 9
    row = result.row(seed=0)
    assert row["eval_readable"] == pytest.approx(0.9)
    assert row["eval_failed"] == pytest.approx(0.1), "and are told apart from wrong answers"
    assert result.failures() == [Failure(FailureCause.TIMEOUT, "timed out")] * 4


def test_a_signal_breaks_an_evaluation_off(engine):
    control = RunControl()
    release = threading.Event()
    engine.fault = lambda _request: release.wait(30)

    def stop_later():
        while not engine.requests:
            time.sleep(0.001)
        control.request_stop(StopReason.SIGNAL)

    thread = threading.Thread(target=stop_later)
    thread.start()
    try:
        assert run(engine, control=control) is None
    finally:
        release.set()
        thread.join()
    assert run(engine, control=control) is None, "a signal that came before"


def test_a_clean_stop_does_not_break_the_last_evaluation_off(engine):
    control = RunControl()
    control.request_stop(StopReason.MAX_STEPS)
    assert run(engine, control=control) is not None


def test_what_the_user_has_to_mend_is_raised(engine):
    env = FakeEnv()

    def fault(_item, _request):
        raise ConfigError("no number", "reward.function")

    env.fault = fault
    with pytest.raises(ConfigError, match="no number"):
        run(engine, env)


def test_a_prompt_that_cannot_be_rendered_is_a_failure(engine):
    def render(_item):
        raise KeyError("content")

    player = Player(FakeEnv(), generate_with(engine), render)
    prompt_ids, rollouts = asyncio.run(player.play(QUESTIONS[0], [PARAMS, PARAMS], None))
    assert prompt_ids == ()
    assert [r.failure for r in rollouts] == [Failure(FailureCause.ENVIRONMENT, "KeyError: 'content'")] * 2
    result = evaluate(QUESTIONS[:1], player=player, params=PARAMS, adapter="v1", samples=1)
    assert not result.questions[0].greedy.readable


def test_a_request_that_the_engine_cancels_is_a_failure_and_not_a_cancelled_task(engine):
    def submit(request):
        future = Future()
        future.cancel()
        return future

    engine.submit = submit
    places = []
    _, (rollout,) = asyncio.run(make_player(engine).play(QUESTIONS[0], [PARAMS], "v1", places.append))
    assert rollout.failure == Failure(FailureCause.CANCELLED, "the engine cancelled the request")
    assert places == [-1]


@pytest.mark.parametrize(("turns", "seen"), [(0, [-1]), (1, [-1]), (3, [-1, 1, -1, 1, -1])])
def test_a_conversation_has_a_place_in_the_engine_while_a_turn_is_sampled(engine, turns, seen):
    env, places = FakeEnv(), []
    play = env.rollout

    async def conversation(item, request, generate):
        for turn in range(turns):
            assert sum(places) == -1 * (turn > 0), "between two turns there is no place"
            rollout = await play(item, request, generate)
        return rollout

    env.rollout = conversation
    player = Player(env, generate_with(engine), lambda item: [len(item.id), 1])
    asyncio.run(player.play(QUESTIONS[0], [PARAMS], "v1", places.append))
    assert places == seen
