"""Kill -9 at random points, and random sequences of calls: no group is lost, none is trained twice."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tithe.errors import PoolError
from tithe.pool import DropReason, Pool, PoolReader, PromptSource
from unit.pool.pool_worker import BATCH, PROMPTS, make_group

WORKER = Path(__file__).with_name("pool_worker.py")


def run_and_kill(path: Path, seed: int, lines: int) -> list[list[str]]:
    with subprocess.Popen(
        [sys.executable, str(WORKER), str(path), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        heard = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        heard += child.stdout.readlines()
        errors = child.stderr.read()
    assert child.returncode == -signal.SIGKILL, errors.decode()
    return [line.decode().split() for line in heard if line.endswith(b"\n")]


@pytest.mark.parametrize("lives", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_kill_nine_at_random_points_loses_nothing_and_trains_nothing_twice(tmp_path, lives):
    path = tmp_path / "pool.sqlite"
    Pool.create(path, "run").close()
    rng = random.Random(11)
    committed, dropped = set(), set()
    trained: dict[int, tuple[int, ...]] = {}
    checkpoint = 0
    for life in range(lives):
        for event, *numbers in run_and_kill(path, life, rng.randrange(1, 60)):
            ids = [int(n) for n in numbers]
            if event == "rewound":
                # the kill may hit between a transaction and the line that tells of it
                assert ids[0] in (checkpoint, checkpoint + 3)
                checkpoint = ids[0]
                trained = {serial: batch for serial, batch in trained.items() if serial <= checkpoint}
            elif event == "committed":
                assert ids[0] not in committed
                committed.add(ids[0])
            elif event == "dropped":
                dropped.update(ids)
            elif event == "checkpoint":
                checkpoint = ids[0]
            else:
                serial, *batch = ids
                assert serial == max(trained, default=checkpoint) + 1
                assert not set(batch) & {g for other in trained.values() for g in other}
                trained[serial] = tuple(batch)
        with PoolReader(path) as reader:
            rows = {row["group_id"]: row for row in reader.query("SELECT * FROM groups")}
            assert committed <= set(rows)
            assert all(rows[g]["n_rollouts"] == 2 for g in committed)
            assert all(rows[g]["state"] == "dropped" for g in dropped)
            for serial, batch in trained.items():
                assert [rows[g]["batch_serial"] for g in batch] == [serial] * BATCH
                assert all(rows[g]["state"] == "trained" for g in batch)
    assert len(trained) >= 3
    check_conservation(path)


def check_conservation(path: Path) -> None:
    """Each prompt drawn from the order is in exactly one place: a group that was not dropped, or the put-back queue."""
    db = sqlite3.connect(path)
    drawn = Counter(
        PromptSource(PROMPTS, 0).at(i) for i in range(db.execute("SELECT prompt_cursor FROM pool_state").fetchone()[0])
    )
    held = Counter(row[0] for row in db.execute("SELECT prompt_id FROM rollout_group WHERE state != 'dropped'"))
    waiting = Counter(row[0] for row in db.execute("SELECT prompt_id FROM put_back"))
    sizes = Counter(row[0] for row in db.execute("SELECT batch_serial FROM rollout_group WHERE state = 'trained'"))
    serial = db.execute("SELECT serial FROM pool_state").fetchone()[0]
    db.close()
    assert held + waiting == drawn
    assert sizes == Counter(dict.fromkeys(range(1, serial + 1), BATCH))


class PoolMachine(RuleBasedStateMachine):
    """Random calls, legal and illegal, against a model that keeps a dictionary of states."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.path = Path(self.temporary.name) / "pool.sqlite"
        self.pool = Pool.create(self.path, "run")
        self.pool.bind_prompts(PromptSource(PROMPTS, 0))
        self.model: dict[int, str] = {}
        self.admissions = {}
        self.serial = 0
        self.trained: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
            self.temporary.cleanup()

    @rule()
    def admit(self) -> None:
        admission = self.pool.admit_next(0, self.serial)
        assert self.model.get(admission.group_id) is None
        self.model[admission.group_id] = "running"
        self.admissions[admission.group_id] = (admission, self.serial, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def commit(self, data) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.model)))
        self._expect(
            self.model[group_id] == "running", lambda: self.pool.commit(make_group(*self.admissions[group_id]))
        )
        if self.model[group_id] == "running":
            self.model[group_id] = "ready"

    @rule(n=st.integers(1, 3), max_age=st.integers(0, 3))
    def lease(self, n, max_age) -> None:
        lease = self.pool.lease_batch(2 * n, self.serial, lambda min_serial: self.serial - min_serial > max_age)
        assert len(lease.groups) in (0, n)
        for group_id in lease.dropped:
            assert self.model[group_id] == "ready"
            self.model[group_id] = "dropped"
        for group in lease.groups:
            assert self.model[group.group_id] == "ready"
            assert self.serial - group.min_serial <= max_age
            self.model[group.group_id] = "leased"

    def _pick(self, data) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3, unique=True))

    def _expect(self, legal: bool, act) -> None:
        try:
            act()
        except PoolError:
            assert not legal
        else:
            assert legal

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def mark_trained(self, data) -> None:
        ids = self._pick(data)
        legal = all(self.model[g] == "leased" for g in ids)
        self._expect(legal, lambda: self.pool.mark_trained(ids, self.serial + 1))
        if legal:
            self.serial += 1
            for group_id in ids:
                self.model[group_id] = "trained"
                self.trained[group_id] = self.serial

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def requeue(self, data) -> None:
        ids = self._pick(data)
        legal = all(self.model[g] == "leased" for g in ids)
        self._expect(legal, lambda: self.pool.requeue(ids))
        if legal:
            self.model.update(dict.fromkeys(ids, "ready"))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), reason=st.sampled_from(list(DropReason)))
    def drop(self, data, reason) -> None:
        ids = self._pick(data)
        legal = all(self.model[g] in ("running", "ready", "leased") for g in ids)
        self._expect(legal, lambda: self.pool.drop(ids, reason))
        if legal:
            self.model.update(dict.fromkeys(ids, "dropped"))

    @rule()
    def checkpoint(self) -> None:
        self.pool.record_checkpoint(self.serial, self.path.parent, {"serial": self.serial})

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = Pool.open(self.path)
        self.pool.bind_prompts(PromptSource(PROMPTS, 0))
        rewind = self.pool.rewind_to_checkpoint()
        later = {g for g, serial in self.trained.items() if serial > rewind.serial}
        assert rewind.replayed == len(later)
        self.serial = rewind.serial
        for group_id, state in list(self.model.items()):
            if state == "running":
                del self.model[group_id]
            elif state == "leased" or group_id in later:
                self.model[group_id] = "ready"
        for group_id in later:
            del self.trained[group_id]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts, model = self.pool.counts(), Counter(self.model.values())
        assert (counts.serial, counts.running, counts.ready, counts.leased) == (
            self.serial,
            model["running"],
            model["ready"],
            model["leased"],
        )
        with PoolReader(self.path) as reader:
            states = {
                row["group_id"]: row["state"] for row in reader.query("SELECT group_id, state FROM rollout_group")
            }
        assert states == self.model


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
