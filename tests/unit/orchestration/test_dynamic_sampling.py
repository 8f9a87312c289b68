"""Groups of equal rewards are replaced, counted, kept for reading, and do not go on for ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tithe.errors import RunError
from tithe.pool import PoolReader
from tithe.staleness import Bounds
from unit.orchestration.fakes import World


def sampling(world: World) -> World:
    world.rollouts._plan = replace(world.rollouts._plan, needs_spread=True)
    return world


def groups_of(folder, where: str) -> list[dict]:
    with PoolReader(folder / "pool.sqlite") as reader:
        return reader.query(f"SELECT group_id, prompt_id, detail FROM rollout_group WHERE {where} ORDER BY group_id")


def rewards_of(folder, group_id: int) -> set[float]:
    with PoolReader(folder / "pool.sqlite") as reader:
        rows = reader.query("SELECT reward FROM rollout WHERE group_id = ?", [group_id])
    return {row["reward"] for row in rows}


def test_every_trained_group_has_a_spread_and_batches_stay_whole(tmp_path):
    world = sampling(World(tmp_path, steps=4))
    world.run()
    trained = groups_of(tmp_path, "state = 'trained'")
    dropped = groups_of(tmp_path, "reason = 'no_spread'")
    assert [len(batch) for batch in world.trainer.batches] == [3] * 4
    assert all(rewards_of(tmp_path, row["group_id"]) == {0.0, 1.0} for row in trained)
    assert dropped
    assert all(len(rewards_of(tmp_path, row["group_id"])) == 1 for row in dropped)
    assert all(row["detail"] in ("equal rewards: 0", "equal rewards: 1") for row in dropped)
    told = sum(value for _, value in world.sink.named("no_spread_groups"))
    assert 0 < told <= len(dropped), "those of the last batches may come after their row"


def test_another_prompt_takes_the_place(tmp_path):
    """A hopeless prompt would otherwise be drawn again and again."""
    world = sampling(World(tmp_path, steps=3, prompts=40))
    world.run()
    prompts = [row["prompt_id"] for row in groups_of(tmp_path, "state IN ('trained', 'dropped')")]
    assert len(set(prompts)) == len(prompts) > 9


def test_what_is_trained_does_not_depend_on_timing(tmp_path):
    weights = set()
    for i, delay_s in enumerate((0.0, 0.01)):
        folder = tmp_path / str(i)
        folder.mkdir()
        world = sampling(World(folder, delay_s=delay_s, steps=4))
        world.run()
        weights.add(world.trainer.weights)
    assert len(weights) == 1


def test_a_run_whose_groups_never_differ_ends_with_the_remedy(tmp_path):
    world = sampling(World(tmp_path, steps=4))
    play = world.env.rollout

    async def always_right(item, request, generate):
        return replace(await play(item, request, generate), reward=1.0)

    world.env.rollout = always_right
    with pytest.raises(RunError, match=r"equal rewards, the last one of 1, and rl\.dynamic_sampling waits"):
        world.run()


def test_a_charge_for_likeness_makes_no_group_look_mixed(tmp_path):
    """Two of three completions are alike, so the charge alone differs within every group."""
    world = sampling(World(tmp_path, bounds=Bounds(batch_rollouts=9, group_size=3, max_lag=0, max_age=0), steps=3))
    world.rollouts._plan = replace(world.rollouts._plan, diversity_penalty=0.5)
    play = world.env.rollout

    async def two_alike(item, request, generate):
        rollout = await play(item, request, generate)
        if request.params.sample == 2:
            return rollout
        return replace(rollout, token_ids=np.arange(len(rollout.token_ids), dtype=np.int32))

    world.env.rollout = two_alike
    world.run()
    with PoolReader(tmp_path / "pool.sqlite") as reader:
        rows = reader.query(
            "SELECT state, MAX(reward) > MIN(reward) AS differs, pass_rate,"
            " COUNT(DISTINCT json_extract(reward_parts, '$.\"fact.right\"')) AS kinds"
            " FROM rollout_group JOIN rollout USING (group_id) WHERE state IN ('trained', 'dropped')"
            " GROUP BY group_id"
        )
    assert all(row["differs"] for row in rows)
    assert {row["kinds"] for row in rows if row["state"] == "trained"} == {2}
    assert {row["kinds"] for row in rows if row["state"] == "dropped"} == {1}
    assert {row["pass_rate"] for row in rows if row["state"] == "dropped"} <= {0.0, 1.0}
