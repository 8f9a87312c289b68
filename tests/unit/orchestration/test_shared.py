"""What the loops share: control, served policy, counters."""

from __future__ import annotations

import threading
import time

import pytest

from tithe.errors import Failure, FailureCause, RunError
from tithe.metrics import RowKind, row_kind
from tithe.orchestration import RolloutCounters, RunControl, ServedPolicy, ServedVersion, StopReason
from tithe.orchestration.playing import failed_rollout
from tithe.types import PolicyVersion, SamplingParams


def version(serial, lineage=0):
    return ServedVersion(PolicyVersion(lineage, serial), f"v{serial}")


@pytest.fixture
def control():
    return RunControl()


@pytest.fixture
def retired():
    return []


@pytest.fixture
def served(control, retired):
    return ServedPolicy(control, max_live=2, retire=retired.append)


def test_a_notification_between_looking_and_waiting_is_not_lost(control):
    seen = control.changes
    control.notify()
    assert control.wait(seen, timeout_s=0) is True
    assert control.wait(control.changes, timeout_s=0) is False


def test_the_first_reason_and_the_first_error_count(control):
    control.request_stop(StopReason.MAX_STEPS)
    control.request_stop(StopReason.PATIENCE)
    assert control.stop_reason is StopReason.MAX_STEPS
    assert not control.hurrying
    control.fail(ValueError("first"))
    control.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        control.raise_if_failed()
    assert control.hurrying


def test_a_signal_in_the_middle_of_another_request_overrules_it():
    """A handler runs between any two steps of the main thread."""

    class Interrupted(RunControl):
        armed = False

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == "_stop" and super().__getattribute__("armed"):
                self.armed = False
                self.request_stop(StopReason.SIGNAL)
            return value

    control = Interrupted()
    control.armed = True
    control.request_stop(StopReason.MAX_STEPS)
    assert (control.stop_reason, control.hurrying) == (StopReason.SIGNAL, True)


def test_listeners_hear_only_while_they_listen(control):
    heard = []
    with control.listening(lambda: heard.append(1)):
        control.notify()
    control.notify()
    assert heard == [1]


def test_versions_only_ascend_also_across_lineages(served):
    served.confirm(version(3))
    with pytest.raises(RunError, match="only ascend"):
        served.confirm(version(3))
    served.confirm(version(3, lineage=1))
    with pytest.raises(RunError, match="only ascend"):
        served.confirm(version(9, lineage=0))


def test_nothing_is_used_before_something_is_served(served):
    assert served.current() is None
    with pytest.raises(RunError, match="no version"):
        served.acquire()
    with pytest.raises(RunError, match="no version"):
        served.oldest_serial()


def test_a_version_is_retired_after_its_last_user(served, retired):
    served.confirm(version(0))
    first, second = served.acquire(), served.acquire()
    served.confirm(version(1))
    served.release(first)
    assert (retired, served.oldest_serial()) == ([], 0)
    served.release(second)
    assert (retired, served.oldest_serial()) == (["v0"], 1)
    served.confirm(version(2))
    assert retired == ["v0", "v1"]


def test_a_publisher_waits_for_room(served):
    served.confirm(version(0))
    old = served.acquire()
    assert served.wait_for_room(0.0)
    served.confirm(version(1))
    assert not served.wait_for_room(0.0)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(served.wait_for_room(10.0)))
    thread.start()
    time.sleep(0.01)
    served.release(old)
    thread.join()
    assert waited == [True]


def test_sampling_time_is_the_time_in_which_something_ran():
    now = [0.0]
    counters = RolloutCounters(clock=lambda: now[0])
    for at, act in ((1, "begin"), (2, "begin"), (3, "end"), (5, "end"), (9, "begin"), (10, "end")):
        now[0] = at
        counters.begin() if act == "begin" else counters.end([])
    now[0] = 20
    assert counters.take_speed()["sample_s"] == 5.0
    assert counters.take_speed() == {"sample_s": 0.0}


def test_the_speed_is_that_of_the_tokens_as_they_are_drawn_and_an_evaluation_counts_nowhere():
    """A batch within which no group ends is not one of speed 0."""
    now, drawn = [0.0], [100.0]
    counters = RolloutCounters(drawn=lambda: drawn[0], clock=lambda: now[0])

    def at(time_s, tokens):
        now[0], drawn[0] = time_s, tokens

    at(1.0, 100.0)
    counters.begin()
    at(3.0, 150.0)
    assert counters.take_speed() == {"tok_per_s": 25.0, "sample_s": 2.0}
    at(4.0, 160.0)
    counters.hold()
    at(10.0, 900.0)
    counters.end([])
    counters.begin()
    at(11.0, 1000.0)
    counters.go_on()
    at(13.0, 1050.0)
    counters.end([])
    at(20.0, 1050.0)
    assert counters.take_speed() == {"tok_per_s": 20.0, "sample_s": 3.0}
    counters.begin()
    at(20.1, 1050.0)
    counters.end([])
    row = counters.take_speed()
    assert row == {"sample_s": pytest.approx(0.1)}, "a group that was only judged has no speed"
    assert row_kind({"version_gap": 0.0, **row}) is RowKind.ROLLOUT


def test_failures_are_counted_by_cause_and_a_cause_stays_with_zero():
    counters = RolloutCounters()
    failed = [
        failed_rollout(SamplingParams(), Failure(cause, "x")) for cause in (FailureCause.TIMEOUT, FailureCause.REWARD)
    ]
    counters.begin()
    counters.end([*failed, failed[0]])
    assert counters.take_failures() == {"failures": 3.0, "failures_reward": 1.0, "failures_timeout": 2.0}
    assert counters.take_failures() == {"failures": 0.0, "failures_reward": 0.0, "failures_timeout": 0.0}
