"""The report: one safe, self-contained page from a run directory in any state."""

import hashlib
import json
import re
import shutil
import sqlite3
from html.parser import HTMLParser

import pytest

from tithe.monitoring import build_report
from tithe.monitoring._curves import step_parts
from tithe.monitoring._pool_view import read_pool
from tithe.monitoring._run_data import load_run
from unit.monitoring.synthetic_run import write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what the tests ask for."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.attributes, self.text, self.ids = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, name, value) for name, value in attrs)
        self.ids.extend(value for name, value in attrs if name == "id")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] != ["style"]:
            self.text.append(data)

    def says(self, text):
        return text in re.sub(r"\s+", " ", " ".join(self.text))

    def is_safe(self):
        names = {name for _, name, _ in self.attributes}
        return not (
            {"script", "iframe", "object", "img", "link", "base", "form", "foreignobject"} & set(self.tags)
        ) and not any(
            name.startswith("on") or name in {"src", "srcset", "action", "data", "xlink:href", "style"}
            for name in names
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "sums-demo")


@pytest.fixture
def run_dir(tmp_path, finished):
    return shutil.copytree(finished, tmp_path / "sums-demo")


def test_a_finished_run_has_everything_and_refers_to_nothing_outside(run_dir):
    path = build_report(run_dir)
    assert path == run_dir / "report.html"
    page, html = Page(path), path.read_text()
    assert page.is_safe()
    assert not re.search(r"https?://|url\(|@import|//cdn", html)
    assert "default-src &#39;none&#39;" in html
    assert "prefers-color-scheme: dark" in html
    links = [value for tag, name, value in page.attributes if name == "href"]
    assert links
    assert all(link.startswith("#") and link[1:] in page.ids for link in links)
    assert len(set(page.ids)) == len(page.ids)
    for title in ("Mean reward", "Right answers, held out", "KL to the reference", "Entropy", "Rollout speed",
                  "Version gap", "Step time", "Sample age when trained", "Completion length", "Parity certificate",
                  "Sampler and trainer agree bit for bit.", "No alarm was raised.", "Memory and disk"):  # fmt: skip
        assert page.says(title), title
    assert not page.says("Not recorded.")
    assert not page.says("Not all parts of this run are here.")
    charts = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(charts) == 17
    assert not page.says("nan")
    assert path.stat().st_size < 1_000_000


def test_the_three_figures_of_health_come_first(run_dir):
    page = build_report(run_dir).read_text()
    labels = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>", page)
    assert [label for label, _ in labels][:3] == ["Rollout speed", "Version gap", "Mean KL"]
    assert all(re.match(r"[0-9]", value) for _, value in labels[:3])


def test_the_table_says_what_the_evaluations_say(run_dir):
    first, last = (json.loads(sorted((run_dir / "eval").iterdir())[i].read_text()) for i in (0, -1))
    page = Page(build_report(run_dir))
    for values in (first, last):
        for name in ("eval_sampled", "eval_greedy"):
            assert page.says(f"{100 * values[name]:.1f} %")
            assert page.says(f"[{100 * values[name + '_lo']:.1f}, {100 * values[name + '_hi']:.1f}]")
        assert page.says(f"{100 * values['eval_readable']:.1f} %")
    assert page.says("60 held-out questions; 4 samples each at T = 1")


def test_rewards_are_no_percentages(run_dir):
    for at, path in enumerate(sorted((run_dir / "eval").iterdir())):
        paid = {"eval_sampled": at - 1.25, "eval_sampled_lo": at - 2.0, "eval_sampled_hi": at - 1.0}
        path.write_text(json.dumps({**json.loads(path.read_text()), **paid, "eval_is_reward": 1.0}))
    last = len(list((run_dir / "eval").iterdir())) - 1
    page = Page(build_report(run_dir))
    assert page.says(f"The mean reward at temperature 1 rose from -1.25 to {last - 1.25:.2f}")
    assert page.says(f"Mean reward, sampled at T = 1 -1.25 [-2.00, -1.00] {last - 1.25:.2f}")
    assert page.says("Mean reward, held out")
    assert page.says("Readable answers, sampled")
    assert not page.says("Right answers")


def test_overlapping_intervals_are_called_chance(run_dir):
    for path in (run_dir / "eval").iterdir():
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "eval_sampled_lo": 0.0, "eval_sampled_hi": 1.0}))
    assert Page(build_report(run_dir)).says("The intervals overlap: this may be chance.")


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)> {0} {} %s &lt; "
    "\u202egnp.exe\x1b[31m\x00"
)


def test_model_output_is_text_and_nothing_else(tmp_path):
    texts = {(batch, position, sample): HOSTILE for batch in (1, 6) for position in range(4) for sample in range(4)}
    run_dir = write_run(tmp_path / "run", steps=20, texts=texts)
    prompts = {f"sum-{a}-{b}": HOSTILE for a in range(13) for b in range(13)}
    page = Page(build_report(run_dir, prompts))
    assert page.is_safe()
    assert "script" not in page.tags
    assert page.says("<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)> {0} {} %s &lt; ")
    assert page.says("⟨U+202E⟩gnp.exe⟨U+001B⟩[31m⟨U+0000⟩")
    assert "\u202e" not in "".join(page.text)


def test_names_and_values_from_files_are_text_as_well(run_dir):
    info = json.loads((run_dir / "run.json").read_text())
    hostile_info = {**info, "name": HOSTILE, "status": HOSTILE, "model": {"name": HOSTILE, HOSTILE: [HOSTILE]},
                    "memory": {HOSTILE: 5}, "finished_at": HOSTILE}  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(hostile_info))
    (run_dir / "parity.json").write_text(json.dumps({HOSTILE: HOSTILE, "max_abs_dlogp": HOSTILE}))
    (run_dir / "config.yaml").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}, "task": [HOSTILE]}))
    with sqlite3.connect(run_dir / "pool.sqlite") as connection:
        connection.execute("UPDATE rollout_group SET reason = ?, prompt_id = ?", (HOSTILE, HOSTILE))
        connection.execute(
            "UPDATE rollout SET reward_parts = ?, finish = ?", (json.dumps({"a": HOSTILE, "b": 1}), HOSTILE)
        )
    connection.close()
    page = Page(build_report(run_dir))
    assert page.is_safe()
    assert page.says("<script>alert(1)</script>")


def test_a_long_completion_is_cut_and_says_so(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=6, texts={(1, position, 0): "x" * 10_000 for position in range(4)})
    assert Page(build_report(run_dir)).says("7,000 more characters")


HUGE_NUMBERS = b'{"step": 1%s, "t_s": 1%s, "minutes": 1%s, "memory": {"kv_bytes": 1%s}}' % ((b"0" * 400,) * 4)

MISSING = {
    "metrics.jsonl": "metrics.jsonl is missing: no batch has been trained yet.",
    "run.json": "run.json is missing",
    "config.yaml": "config.yaml is missing",
    "parity.json": "parity.json is missing",
    "pool.sqlite": "pool.sqlite is missing: no rollout has been stored yet.",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_said_and_the_rest_is_shown(run_dir, name):
    (run_dir / name).unlink()
    page = Page(build_report(run_dir))
    assert page.says(MISSING[name])
    assert page.says("Parity certificate")


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("content", [b"", b"\xff\x00{[", b"[1, 2]", b'{"step": NaN, "model": []}', HUGE_NUMBERS])
def test_a_broken_file_is_no_error(run_dir, name, content):
    (run_dir / name).write_bytes(content)
    assert Page(build_report(run_dir)).is_safe()


def test_without_evaluation_files_the_metric_rows_are_used(run_dir):
    with_files = load_run(run_dir).evals
    shutil.rmtree(run_dir / "eval")
    assert [dict(values) for values in load_run(run_dir).evals] == [dict(values) for values in with_files]


def test_an_evaluation_of_batches_that_a_resume_took_back_is_left_out(run_dir):
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    kept = [row for row in rows if json.loads(row)["step"] <= 25]
    (run_dir / "metrics.jsonl").write_text("".join(row + "\n" for row in kept))
    assert [values["step"] for values in load_run(run_dir).evals] == [0, 20]


def test_a_skipped_batch_is_no_trained_one(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "kind": "train", "t_s": 500.0, "loss": None, "skipped": 1.0}) + "\n")
    assert load_run(run_dir).steps == 60


def test_the_memory_of_every_rank_is_shown_and_the_first_screen_says_whose_it_is(run_dir):
    info = json.loads((run_dir / "run.json").read_text())
    info["memory"] |= {f"rank_{rank}_peak_rss_bytes": (700 + rank) << 20 for rank in range(12)}
    (run_dir / "run.json").write_text(json.dumps(info))
    page = Page(build_report(run_dir))
    assert page.says("of rank 0; largest of 12 ranks: 711 MiB")
    assert page.says("largest peak of 12 ranks 711 MiB")
    for rank in range(12):
        assert page.says(f"rank {rank} {700 + rank} MiB")
    assert page.is_safe()


def test_failed_answers_are_told_apart_from_wrong_ones(run_dir):
    assert not Page(build_report(run_dir)).says("Failed answers, taken as wrong")
    for path in (run_dir / "eval").iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "eval_failed": 0.125}))
    page = Page(build_report(run_dir))
    assert page.says("Failed answers, taken as wrong 12.5 % 12.5 %")


def test_a_run_that_trains_every_parameter_says_so(run_dir):
    (run_dir / "config.yaml").write_text("model: {train: full}\nrl: {algorithm: grpo}\n")
    assert Page(build_report(run_dir)).says("GRPO, every parameter.")


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes(run_dir):
    info = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**info, "minutes": 0.5}))
    row = {"step": 60, "kind": "train", "t_s": 5400.0, "loss": 0.1}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert Page(build_report(run_dir)).says("1 h 30 min")


def test_half_a_character_is_written_as_a_mark(run_dir):
    """A model may write a lone surrogate; UTF-8 has no such thing."""
    page = Page(build_report(run_dir, {f"sum-{a}-{b}": "half \ud83d" for a in range(13) for b in range(13)}))
    assert page.says("half ⟨U+D83D⟩")
    assert list(run_dir.glob(".tmp-*")) == []


def test_an_empty_directory_is_a_run_that_has_not_begun(tmp_path):
    page = Page(build_report(tmp_path))
    for text in MISSING.values():
        assert page.says(text)
    assert page.says("No evaluation has been made yet.")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_no_directory_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        build_report(tmp_path / "nowhere")


def test_the_report_reads_only_and_is_the_same_twice(run_dir):
    def digests():
        return {p.relative_to(run_dir): hashlib.sha256(p.read_bytes()).digest()
                for p in run_dir.rglob("*") if p.is_file() and p.suffix != ".safetensors"}  # fmt: skip

    before = digests()
    first = build_report(run_dir).read_bytes()
    after = digests()
    assert after.pop((run_dir / "report.html").relative_to(run_dir))
    assert after == before
    assert build_report(run_dir).read_bytes() == first


def test_a_pool_that_is_being_written_is_read_as_of_its_last_commit(run_dir):
    writer = sqlite3.connect(run_dir / "pool.sqlite", isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("UPDATE rollout SET text = 'committed'")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE rollout SET text = 'half-written'")
    page = Page(build_report(run_dir))
    writer.execute("ROLLBACK")
    writer.close()
    assert page.says("committed")
    assert not page.says("half-written")


def test_samples_are_the_best_the_worst_and_another_of_the_first_and_last_batch(finished):
    pool = read_pool(finished / "pool.sqlite", seed="a")
    assert [(s.pick, s.batch_serial, s.reward) for s in pool.first] == [
        ("best", 1, 1.0), ("worst", 1, -0.5), ("random", 1, pool.first[2].reward)
    ]  # fmt: skip
    assert {s.batch_serial for s in pool.last} == {6}
    assert len({(s.group_id, s.sample) for s in pool.first}) == 3
    assert read_pool(finished / "pool.sqlite", seed="a") == pool
    assert pool.groups_by_state == {"dropped": 1, "running": 1, "trained": 24}
    assert pool.drops_by_reason == {"stale": 1}
    assert pool.failures_by_cause == {"timeout": 1}
    assert pool.trained_rollouts == 96


def test_the_parts_of_a_step_add_up_to_the_step(finished):
    run = load_run(finished)
    parts = step_parts(run)
    assert [part.name for part in parts] == ["waiting for rollouts", "training", "publishing", "other"]
    for i, whole in enumerate(run.series("step_s").ys):
        assert sum(part.ys[i] for part in parts) == pytest.approx(whole)


def test_a_diverged_run_is_drawn(run_dir):
    values = [1e308, -1e308, 5e-324, 0.0]
    rows = [{"step": i % 40, "kind": "train", "loss": values[i % 4], "kl_mean": values[i % 3]} for i in range(40)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = build_report(run_dir).read_text()
    assert not re.search(r"\b(inf|nan)\b", html)


def test_without_parts_sampling_is_shown_but_never_above_the_step(run_dir):
    rows = [{"step": 1, "kind": "train", "step_s": 4.0, "sample_s": 3.0}, {"step": 2, "kind": "train", "step_s": 4.0}]
    rows.append({"step": 3, "kind": "train", "step_s": 4.0, "sample_s": 9.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [list(part.ys) for part in step_parts(load_run(run_dir))] == [[3.0, 0.0, 4.0], [1.0, 4.0, 0.0]]


def test_alarms_follow_the_runs_own_thresholds(run_dir):
    rows = [{"step": step, "kind": "train", "reward_mean": 0.0, "reward_std": 0.0} for step in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not Page(build_report(run_dir)).says("all rewards zero")
    (run_dir / "config.yaml").write_text("monitor: {alarm_after: 2}\n")
    page = Page(build_report(run_dir))
    assert page.says("Batch 2: all rewards zero")
    assert page.says("reward.function")
