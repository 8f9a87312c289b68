"""The metrics file: nothing written is lost, nothing invalid is written, a resume rewrites what it repeats."""

import json
import math

import numpy as np
import pytest

from tithe.metrics import JsonlSink, iter_numbers, read_rows


class FakeClock:
    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_row_is_on_disk_when_write_returns(tmp_path):
    clock = FakeClock()
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl", clock=clock)
    clock.now_s += 2.5
    sink.write(1, {"loss": 0.5, "tok_per_s": np.float32(0.25), "groups": np.int64(8), "skipped": True})
    assert strict_lines(sink.path) == [
        {"step": 1, "kind": "train", "t_s": 2.5, "loss": 0.5, "tok_per_s": 0.25, "groups": 8.0, "skipped": 1}
    ]
    sink.close()
    sink.close()


def test_values_without_a_json_form_become_null_and_are_counted(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": math.nan, "kl_mean": math.inf, "entropy": -math.inf, "lr": 1e-5})
    sink.write(2, {"loss": np.float32("nan")})
    sink.close()
    first, second = strict_lines(sink.path)
    assert (first["loss"], first["kl_mean"], first["entropy"], first["lr"]) == (None, None, None, 1e-5)
    assert (first["non_finite"], second["non_finite"], sink.non_finite) == (3, 1, 4)
    assert dict(iter_numbers(second)) == {"non_finite": 1}


def test_resume_appends_and_run_time_goes_on_without_the_pause(tmp_path):
    path = tmp_path / "metrics.jsonl"
    clock = FakeClock()
    sink = JsonlSink(path, clock=clock)
    clock.now_s = 110.0
    sink.write(1, {"loss": 1.0})
    sink.close()
    clock.now_s = 5000.0
    resumed = JsonlSink(path, clock=clock)
    clock.now_s = 5003.0
    resumed.write(2, {"loss": 0.9})
    resumed.close()
    assert [(row["step"], row["t_s"]) for row in read_rows(path).rows] == [(1, 10.0), (2, 13.0)]


def test_truncate_after_drops_only_later_steps_and_their_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    clock = FakeClock(0.0)
    sink = JsonlSink(path, clock=clock)
    for step in (1, 2, 3, 4):
        clock.now_s += 10.0
        sink.write(step, {"loss": 1.0 / step})
        sink.write(step, {"eval_sampled": 0.1 * step})
    assert sink.truncate_after(2) == 4
    assert sink.truncate_after(2) == 0
    sink.write(3, {"loss": 0.0})
    sink.close()
    rows = read_rows(path).rows
    assert [(row["step"], row["kind"]) for row in rows] == [
        (1, "train"), (1, "eval"), (2, "train"), (2, "eval"), (3, "train")
    ]  # fmt: skip
    assert rows[-1]["t_s"] == 20.0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("torn", [b'{"step": 2, "ki', b'{"step": 2, "kind": "train", "t_s": 1.0}'])
def test_a_torn_last_line_is_cut_when_the_run_resumes(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"loss": 1.0})
    sink.close()
    with path.open("ab") as file:
        file.write(torn)
    resumed = JsonlSink(path)
    resumed.write(2, {"loss": 0.5})
    resumed.close()
    assert [row["loss"] for row in strict_lines(path)] == [1.0, 0.5]


def test_a_row_torn_by_a_full_disk_does_not_damage_the_next(tmp_path):
    class FullDisk:
        def __init__(self, file):
            self._file, self.writes, self.closed = file, 0, False

        def write(self, data):
            self.writes += 1
            if self.writes == 1:
                return self._file.write(bytes(data[:7]))
            if self.writes == 2:
                raise OSError(28, "No space left on device")
            return self._file.write(data)

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    real, sink._file = sink._file, FullDisk(sink._file)
    with pytest.raises(OSError, match="No space"):
        sink.write(1, {"loss": 1.0})
    sink.write(2, {"loss": 0.5})
    real.close()
    log = read_rows(sink.path)
    assert [row["step"] for row in log.rows] == [2]
    assert log.broken_lines == 1


def test_reading_counts_lines_that_are_not_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n{"step": "2"}\n{"step": true}\n\xff\n\n{"step": 3}\n')
    log = read_rows(path)
    assert [row["step"] for row in log.rows] == [1, 3]
    assert log.broken_lines == 4
