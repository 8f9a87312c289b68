"""Phases, adaptive numbers of samples and a curriculum, with both loops around a real pool."""

from __future__ import annotations

import itertools
import random

import pytest

from tithe.config import PhaseValues, Schedule
from tithe.orchestration import GroupSizes
from tithe.orchestration.admission import AdmissionRules
from tithe.pool import Curriculum, PoolCounts, PoolReader, PromptRecord
from tithe.staleness import Bounds
from unit.orchestration.fakes import PARAMS, World
from unit.orchestration.test_resume import kill_once, run_to_the_end

SYNC = Bounds(batch_rollouts=8, group_size=4, max_lag=0, max_age=0)
EXPLORE = PhaseValues("explore", 0, temperature=1.0, top_p=0.95, samples=4, kl_coef=0.0, lr=1e-3)
REFINE = PhaseValues("refine", 1, temperature=0.6, top_p=0.85, samples=2, kl_coef=0.0, lr=1e-4)
PHASES = Schedule((0, 3), (EXPLORE, REFINE))


def query(folder, sql):
    with PoolReader(folder / "pool.sqlite") as reader:
        return reader.query(sql)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_group_keeps_the_phase_of_its_admission_and_a_batch_its_rollouts(tmp_path, lag):
    bounds = Bounds(batch_rollouts=8, group_size=4, max_lag=lag, max_age=lag)
    world = World(tmp_path, bounds=bounds, steps=6, delay_s=0.005 * lag, schedule=PHASES)
    world.run()
    groups = query(tmp_path, "SELECT admitted_batch, phase, n_rollouts, group_id FROM groups WHERE state != 'running'")
    for group in groups:
        phase = EXPLORE if group["admitted_batch"] < 3 else REFINE
        assert (group["phase"], group["n_rollouts"]) == (phase.name, phase.samples)
        own = [r.params for r in world.engine.requests if r.params.group == group["group_id"]]
        assert {(p.temperature, p.top_p) for p in own} == {(phase.temperature, phase.top_p)}
    batches = query(tmp_path, "SELECT SUM(n_rollouts) AS n FROM groups WHERE state = 'trained' GROUP BY batch_serial")
    assert [row["n"] for row in batches] == [8] * 6
    stored = query(tmp_path, "SELECT DISTINCT g.phase, r.temperature FROM rollouts r JOIN groups g USING (group_id)")
    assert sorted((row["phase"], row["temperature"]) for row in stored) == [("explore", 1.0), ("refine", 0.6)]
    if lag == 0:
        assert [len(batch) for batch in world.trainer.batches] == [2, 2, 2, 4, 4, 4]
        assert [value for _, value in world.sink.named("temperature")] == [1.0] * 3 + [0.6] * 3
        assert [value for _, value in world.sink.named("samples_per_prompt")] == [4.0] * 3 + [2.0] * 3


def test_the_batch_that_is_trained_decides_what_the_trainer_is_set_to(tmp_path):
    world = World(tmp_path, bounds=SYNC, steps=5, schedule=PHASES)
    used = []
    world.learner._settings_at = lambda serial: PHASES.at(serial).lr
    world.trainer.on_micro = lambda: used.append((world.pool.serial, world.trainer.settings))
    world.run()
    assert dict(used) == {0: 1e-3, 1: 1e-3, 2: 1e-3, 3: 1e-4, 4: 1e-4}


def test_prompts_with_mixed_results_get_more_samples_and_settled_ones_fewer(tmp_path):
    sizes = GroupSizes((2, 6))
    bounds = Bounds(batch_rollouts=12, group_size=4, max_lag=0, max_age=0)
    World(tmp_path, bounds=bounds, prompts=5, steps=8, sizes=sizes).run()
    groups = query(
        tmp_path, "SELECT prompt_id, n_rollouts, pass_rate, batch_serial FROM groups WHERE state = 'trained'"
    )
    batches = query(tmp_path, "SELECT SUM(n_rollouts) AS n FROM groups WHERE state = 'trained' GROUP BY batch_serial")
    assert [row["n"] for row in batches] == [12] * 8
    settled, mixed = [], []
    for group in groups:
        earlier = [
            g for g in groups if g["prompt_id"] == group["prompt_id"] and g["batch_serial"] < group["batch_serial"]
        ]
        if earlier:
            last = max(earlier, key=lambda g: g["batch_serial"])["pass_rate"]
            (settled if last in (0.0, 1.0) else mixed).append(group["n_rollouts"])
    assert settled
    assert mixed
    assert sum(settled) / len(settled) < sum(mixed) / len(mixed)
    assert {group["n_rollouts"] for group in groups} <= set(range(2, 8))


def test_a_group_is_as_large_as_its_record_asks_and_its_batch_has_room_for():
    bounds = Bounds(batch_rollouts=24, group_size=8, max_lag=0, max_age=0)
    rules = AdmissionRules(bounds, PARAMS, sizes=GroupSizes((4, 16)))
    empty = rules.room(PoolCounts(3, 0, 0, 0), served_serial=3)
    assert (empty.batch, empty.most, empty.in_batch) == (3, 24, 24)
    wants = rules.draw(empty).samples
    assert [wants(r) for r in (None, PromptRecord(0.5, 1), PromptRecord(1.0, 1))] == [8, 16, 4]
    nearly_full = rules.room(PoolCounts(3, 1, 0, 0, running_rollouts=18), served_serial=3)
    assert rules.draw(nearly_full).samples(PromptRecord(0.5, 1)) == 6
    assert rules.room(PoolCounts(3, 1, 0, 0, running_rollouts=24), served_serial=3) is None


def test_solved_and_hopeless_prompts_rest_and_come_back(tmp_path):
    bounds = Bounds(batch_rollouts=4, group_size=2, max_lag=0, max_age=0)
    world = World(tmp_path, bounds=bounds, prompts=16, steps=40, curriculum=Curriculum(rest_batches=4))
    world.run()
    groups = query(tmp_path, "SELECT prompt_id, admitted_batch, pass_rate FROM groups WHERE state = 'trained'")
    gaps = {True: [], False: []}
    for prompt in {group["prompt_id"] for group in groups}:
        own = sorted((g for g in groups if g["prompt_id"] == prompt), key=lambda g: g["admitted_batch"])
        for before, after in itertools.pairwise(own):
            gaps[before["pass_rate"] in (0.0, 1.0)].append(after["admitted_batch"] - before["admitted_batch"])
    assert len(gaps[True]) >= 5, "they came back"
    assert min(gaps[True]) > 4
    assert min(gaps[False]) < min(gaps[True])


def test_when_every_prompt_rests_they_are_drawn_all_the_same(tmp_path):
    world = World(tmp_path, prompts=3, steps=4, curriculum=Curriculum(rest_batches=1000))
    outcome = world.run()
    assert outcome.serial == 4


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_to_the_end(tmp_path_factory.mktemp("scheduled"), "scheduled")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))])
def test_a_killed_run_with_phases_adaptive_samples_and_curriculum_ends_with_the_very_same_weights(
    tmp_path, unbroken, seed
):
    rng = random.Random(seed)
    for _ in range(2):
        kill_once(tmp_path, "scheduled", rng.randrange(1, 30))
    assert run_to_the_end(tmp_path, "scheduled") == unbroken
