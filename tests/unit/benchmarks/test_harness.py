"""The benchmarks' own machinery, with sides that are a few lines of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import output, sides
from benchmarks.memory import process_tree, tree_pss_bytes

PEERS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
SIDE = f"""
import sys
sys.path.insert(0, {str(PEERS)!r})
from protocol import Channel
channel = Channel()
print("a library talks on standard output")
channel.send(compute="packed")
for request in channel.requests():
    if request["n"] < 0:
        raise SystemExit("broken on purpose")
    channel.send(seconds=2.0, tokens=request["n"])
"""
MIB = 1024 * 1024


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(sides, "CACHE", tmp_path / "cache")
    return lambda code: sides.Side("fake", [sys.executable, "-c", code])


def test_a_side_answers_each_request_and_library_output_stays_out_of_the_protocol(start):
    with start(SIDE) as side:
        assert side.facts == {"compute": "packed"}
        assert [side.measure(n=n) for n in (6, 10)] == [
            {"seconds": 2.0, "tokens": 6},
            {"seconds": 2.0, "tokens": 10},
        ]


def test_a_side_that_dies_shows_the_end_of_its_log(start):
    with start(SIDE) as side, pytest.raises(sides.SideFailedError, match="broken on purpose"):
        side.measure(n=-1)


def test_the_memory_of_a_side_is_watched_from_its_start(start):
    hold = SIDE.replace("channel.send(compute", f"block = bytearray(b'x') * {64 * MIB}\nchannel.send(compute")
    with start(hold) as side:
        side.measure(n=1, timed=False)
    assert 64 * MIB < side.peak_pss_bytes < 256 * MIB


def test_a_tree_counts_its_children_and_a_dead_process_counts_nothing():
    code = "import sys; block = bytearray(b'x') * (32 * 1024 * 1024); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        assert tree_pss_bytes(os.getpid()) > 32 * MIB
        child.communicate()
    assert tree_pss_bytes(child.pid) == 0


def test_rates_are_medians_of_tokens_over_seconds():
    answers = [{"tokens": 100, "seconds": s} for s in (1.0, 2.0, 50.0)]
    assert output.rates(answers) == 50.0


def test_the_json_form_is_exactly_one_line(capsys):
    output.emit({"ratio": 2.5, "commit": "abc"}, as_json=True)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == {"ratio": 2.5, "commit": "abc"}
