"""A sink may fail; the loop may not notice. TensorBoard is optional."""

import sys
import threading

import pytest

from tithe.metrics import FanOut, RowKind, TensorBoardSink, row_kind


class ListSink:
    def __init__(self) -> None:
        self.rows = []
        self.closed = False

    def write(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


class BrokenSink:
    def write(self, step, values):
        raise OSError("disk on fire")

    def close(self):
        raise RuntimeError("still burning")


def test_a_failing_sink_is_counted_and_reported_once_and_the_others_go_on():
    told: list[str] = []
    good = ListSink()
    fan = FanOut([BrokenSink(), good], report=told.append)
    for step in range(5):
        fan.write(step, {"loss": 1.0})
    fan.close()
    assert fan.failures == {"BrokenSink": 6}
    assert len(told) == 1
    assert "disk on fire" in told[0]
    assert [step for step, _ in good.rows] == [0, 1, 2, 3, 4]
    assert good.closed


def test_interrupts_pass_through():
    class Interrupted(ListSink):
        def write(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOut([Interrupted()]).write(1, {})


def test_rows_reach_all_sinks_in_one_order_from_many_threads():
    a, b = ListSink(), ListSink()
    fan = FanOut([a, b])
    threads = [threading.Thread(target=lambda t=t: [fan.write(t, {"loss": i}) for i in range(50)]) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert a.rows == b.rows
    assert len(a.rows) == 200


def test_without_tensorboardx_one_note_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # what Python does for a package that is not there
    told: list[str] = []
    sink = TensorBoardSink(tmp_path / "tb", note=told.append)
    for step in range(3):
        sink.write(step, {"loss": 1.0})
    sink.close()
    assert not sink.active
    assert len(told) == 1
    assert "pip install tensorboardX" in told[0]
    assert not (tmp_path / "tb").exists()


def test_tensorboard_gets_names_by_kind_and_hides_what_comes_after_the_last_step_that_stays(tmp_path, monkeypatch):
    points = []

    class SummaryWriter:
        def __init__(self, **options):
            points.append(options["purge_step"])

        def add_scalar(self, tag, value, step):
            points.append((tag, value, step))

        def close(self):
            points.append("closed")

    module = type(sys)("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    sink = TensorBoardSink(tmp_path, first_step=7)
    sink.write(7, {"loss": 1, "tok_per_s": 2.0})
    sink.write(7, {"eval_greedy": 0.5})
    sink.close()
    sink.close()
    assert points == [8, ("train/loss", 1.0, 7), ("train/tok_per_s", 2.0, 7), ("eval/eval_greedy", 0.5, 7), "closed"]


def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"loss": 0.5})
    sink.close()
    assert any(b"train/loss" in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["tok_per_s", "version_gap"], RowKind.ROLLOUT),
        (["tok_per_s", "loss"], RowKind.TRAIN),
        (["my_own_number"], RowKind.TRAIN),
        (["eval_sampled", "tok_per_s"], RowKind.EVAL),
        (["eval_something_new"], RowKind.EVAL),
        ([], RowKind.TRAIN),
    ],
)
def test_the_kind_of_a_row_follows_from_its_names(names, kind):
    assert row_kind(names) is kind
