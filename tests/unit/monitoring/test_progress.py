"""Progress degrades to plain lines, redraws on a terminal, and never writes to standard output."""

import io
import re
import sys

import pytest

from tithe.monitoring import Alarm, AlarmKind, ProgressView, summary_table
from tithe.monitoring.progress import sparkline


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {
    "tok_per_s": 812.4,
    "version_gap": 1,
    "kl_mean": 0.03141,
    "reward_mean": 0.25,
    "readable_rate": 0.958,
    "step_s": 3.14,
}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def plain(clock):
    stream = io.StringIO()
    return ProgressView(10, stream=stream, interval_s=10.0, clock=clock), stream


def test_a_plain_line_begins_with_the_three_figures_of_health(plain, clock):
    view, stream = plain
    clock.now_s = 5.0
    view.write(1, ROW)
    assert stream.getvalue() == (
        "812 tok/s | gap 1 | KL 0.0314 | reward 0.25 | readable 96 % | step 1/10 | step time 3.1 s | ETA —\n"
    )


def test_plain_lines_are_periodic_but_evaluations_and_the_last_batch_always_show(plain, clock):
    view, stream = plain
    shown = []
    for step in range(1, 11):
        clock.now_s += 4.0
        view.write(step, ROW)
        if step == 5:
            view.write(step, {"eval_sampled": 0.55, "eval_greedy": 0.7})
        shown.append(stream.getvalue().count("\n"))
    assert shown == [1, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    last = stream.getvalue().splitlines()[-1]
    assert "step 10/10" in last
    assert last.endswith("ETA 0.00 s | eval 55 % sampled, 70 % greedy (step 5)")


def test_a_run_that_ends_early_still_prints_its_last_state_once(plain, clock):
    view, stream = plain
    view.write(1, ROW)
    view.write(2, ROW)
    view.close()
    view.close()
    assert [re.search(r"step \d+", line).group() for line in stream.getvalue().splitlines()] == ["step 1", "step 2"]


def test_eta_follows_the_last_ten_batches_and_leaves_the_start_up_out(clock):
    view = ProgressView(100, stream=io.StringIO(), clock=clock)
    clock.now_s = 60.0  # start-up
    view.write(1, ROW)
    assert view.eta_s() is None
    for step in range(2, 6):
        clock.now_s += 10.0
        view.write(step, ROW)
    assert view.eta_s() == pytest.approx(950.0)
    for step in range(6, 40):
        clock.now_s += 2.0
        view.write(step, ROW)
    assert view.eta_s() == pytest.approx(122.0)
    clock.now_s += 1.0
    assert view.eta_s() == pytest.approx(121.0)


def test_eta_at_the_tenth_batch_leaves_the_start_up_out_as_well(clock):
    view = ProgressView(100, stream=io.StringIO(), clock=clock)
    clock.now_s = 600.0  # start-up
    seen = []
    for step in range(1, 14):
        clock.now_s += 2.0
        view.write(step, ROW)
        seen.append(view.eta_s())
    assert seen[0] is None
    assert seen[1:] == [pytest.approx(2.0 * (100 - step)) for step in range(2, 14)]


def test_the_figures_of_a_line_are_of_one_batch(plain, clock):
    """The rollout side's row comes first; no line is printed between the two."""
    view, stream = plain
    for step in (1, 2):
        clock.now_s += 60.0
        view.write(step, {"tok_per_s": 100.0 * step, "version_gap": 1})
        view.write(step, {"kl_mean": 0.1 * step, "reward_mean": 0.5, "step_s": 60.0})
    shown = [re.search(r"(\d+) tok.*KL ([\d.]+).*step (\d+)/", line) for line in stream.getvalue().splitlines()]
    assert [match.groups() for match in shown if match] == [("100", "0.1", "1"), ("200", "0.2", "2")]


def test_a_skipped_step_is_not_shown_as_done(plain, clock):
    view, stream = plain
    view.write(1, ROW)
    clock.now_s = 60.0
    view.write(2, {"loss": float("nan"), "skipped": 1.0})
    assert "step 1/10" in stream.getvalue().splitlines()[-1]


def test_eta_of_a_resumed_run_counts_only_what_is_left(clock):
    view = ProgressView(60, first_step=50, stream=io.StringIO(), clock=clock)
    for step in (51, 52, 53):
        clock.now_s += 3.0
        view.write(step, ROW)
    assert view.eta_s() == pytest.approx(21.0)


def test_the_time_limit_bounds_the_eta(clock):
    view = ProgressView(1000, deadline_s=100.0, stream=io.StringIO(), clock=clock)
    view.write(1, ROW)
    assert view.eta_s() is None, "one batch tells no pace, and the limit is no estimate"
    for step in (2, 3, 4):
        clock.now_s += 10.0
        view.write(step, ROW)
    assert view.eta_s() == 70.0


def test_missing_figures_are_dashes_and_text_is_no_markup(plain):
    view, stream = plain
    view.write(1, {"loss": 1.0})
    view.note("[bold]loading[/bold] [red]" + "x" * 200)
    view.alarm(Alarm(AlarmKind.SKIPPED_STEP, 3, "The loss was not finite.", ("optimizer.lr",)))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("— tok/s | gap — | KL — | reward —")
    assert lines[1] == "[bold]loading[/bold] [red]" + "x" * 200
    assert lines[2] == "ALARM step 3, skipped step: The loss was not finite. Look at: optimizer.lr"


def test_a_terminal_is_redrawn_and_left_in_order(monkeypatch, clock, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    stream, stderr = Terminal(), sys.stderr
    view = ProgressView(10, stream=stream, clock=clock)
    for step in (1, 2):
        clock.now_s += 1.0
        view.write(step, ROW)
    view.note("a lasting line")
    view.close()
    out = stream.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    assert "\x1b[1A" in out  # went back up
    assert out.rstrip().endswith("\x1b[?25h")  # the cursor is shown again
    assert "rollout 812 tok/s   version gap 1   KL 0.0314 nats/token" in text
    assert "a lasting line" in text
    assert "step 2/10" in text
    assert sys.stderr is stderr
    assert capsys.readouterr().out == ""


def test_a_view_that_is_given_no_row_draws_nothing(monkeypatch, clock):
    """As with `monitor.progress: false`, where it only tells notes and alarms."""
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    view = ProgressView(10, stream=stream, clock=clock)
    view.note("a lasting line")
    view.close()
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()) == "a lasting line\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch, clock):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    view = ProgressView(10, stream=stream, clock=clock)
    view.write(1, ROW)
    view.close()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_progress_goes_to_standard_error(capsys, clock):
    view = ProgressView(10, clock=clock)
    view.write(1, ROW)
    view.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "812 tok/s" in captured.err


def test_sparkline_of_one_level_is_flat():
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([]) == ""


def test_the_summary_table_shows_falls_gaps_and_what_was_asked():
    before = {"eval_sampled": 0.5, "eval_greedy": 0.9, "eval_readable": 1.0}
    after = {
        "eval_sampled": 0.4,
        "eval_sampled_lo": 0.3,
        "eval_sampled_hi": 0.5,
        "questions": 60,
        "samples_per_question": 4,
    }
    lines = summary_table(before, after).splitlines()
    assert lines[0].split() == ["before", "after", "change"]
    assert [" ".join(line.split()) for line in lines[1:4]] == [
        "right, sampled at T = 1 50.0 % 40.0 % [30.0, 50.0] - 10.0",
        "readable, sampled 100.0 % — —",
        "right, greedy 90.0 % — —",
    ]
    assert lines[4].startswith("60 held-out questions, 4 samples each")
    assert len(lines) == 5


def test_rewards_are_no_percentages(plain, clock):
    view, stream = plain
    clock.now_s = 5.0
    paid = {"eval_sampled": 2.71, "eval_sampled_lo": 1.82, "eval_sampled_hi": 3.71, "eval_greedy": -0.5}
    view.write(0, {**paid, "eval_is_reward": 1.0})
    assert "eval 2.71 sampled, -0.5 greedy (step 0)" in stream.getvalue()
    after = {"eval_sampled": 0.9, "eval_sampled_lo": 0.5, "eval_sampled_hi": 1.0, "eval_greedy": 1.0, "questions": 8}
    lines = summary_table({**paid, "eval_is_reward": 1.0, "eval_readable": 0.5}, after).splitlines()
    assert [" ".join(line.split()) for line in lines[1:4]] == [
        "reward, sampled at T = 1 2.71 [1.82, 3.71] 0.9 [0.50, 1.00] -1.81",
        "readable, sampled 50.0 % — —",
        "reward, greedy -0.5 1 +1.50",
    ]
    assert lines[4] == "8 held-out questions; rewards as they are, with 95 % intervals over questions"


def test_the_summary_table_tells_failed_answers_from_wrong_ones():
    lines = summary_table({"eval_sampled": 0.0, "eval_failed": 1.0}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["right,", "sampled", "at", "T", "=", "1", "0.0", "%"],
        ["failed,", "taken", "as", "wrong", "100.0", "%"],
    ]


def test_the_summary_table_of_one_evaluation_compares_nothing():
    lines = summary_table({"eval_greedy": 0.46, "questions": 8}).splitlines()
    assert [line.split() for line in lines[:2]] == [["evaluated"], ["right,", "greedy", "46.0", "%"]]
    assert lines[2:] == ["8 held-out questions; percent, with 95 % intervals over questions"]
