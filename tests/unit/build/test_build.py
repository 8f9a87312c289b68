"""What holds between the parts: probes that fit, versions kept while they are needed, ends without a batch."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from support.runs import RunFiles, query
from tithe.build import resume, running, train
from tithe.build.hooks import Publisher
from tithe.build.probing import PROBE_TOKENS
from tithe.build.session import open_session
from tithe.config import RunConfig, load_config
from tithe.errors import ConfigError, NonFiniteError, UserError
from tithe.orchestration.early_stop import EarlyStop
from tithe.types import PolicyVersion
from tithe.weight_sync import DirectoryChannel, read_manifest


def config(files: RunFiles, *overrides: str) -> RunConfig:
    return load_config(files.yaml, [*overrides, "run.eval_every=null"])


@pytest.mark.parametrize(("prompt", "new"), [(40, 1), (40, 8), (39, 25)])
def test_a_probe_fits_whatever_a_request_may_take(files, tmp_path, prompt, new) -> None:
    """Prompts at their limit and a context without any room to spare."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "x" * n, "answer": 1}) + "\n" for n in range(9, 21))
    )
    sizes = (
        f"rollout.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={new}",
        f"model.max_context={prompt + new}",
    )
    cfg = config(files, *sizes, f"task.source={tmp_path / 'rows.jsonl'}")
    with open_session(cfg) as session:
        lengths = [len(session.prompts.prompt_ids(item.id)) for item in session.prompts.items]
        assert max(lengths) > prompt - 8, "the prompts are about as long as may be"
        channel = DirectoryChannel(tmp_path / "adapters", "probe")
        name = Publisher(session, channel).publish(PolicyVersion(0, 0))
        probe = read_manifest(channel.list_versions()[-1]).probe
    assert name.startswith("probe-0-v0-")
    assert len(probe.token_ids) <= prompt + new
    assert len(probe.completion_ids) == PROBE_TOKENS


def test_the_adapter_of_before_stays_until_the_new_one_is_whole(
    files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a kill leaves what a run had, its origin file included."""
    target = tmp_path / "adapter"
    with open_session(config(files)) as session:
        running.save_final_adapter(session, target)
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tithe.json"} <= before.keys()

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(running, "write_origin", refuse)
        with pytest.raises(UserError, match=r"cannot write the adapter .*no space left"):
            running.save_final_adapter(session, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_policy_that_is_no_numbers_any_more_is_not_published(files, tmp_path) -> None:
    with open_session(config(files)) as session:
        channel = DirectoryChannel(tmp_path / "adapters", "probe")
        publisher = Publisher(session, channel)
        publisher.publish(PolicyVersion(0, 0))
        enormous = {n: t * 0 + 1e25 for n, t in session.trainer.state_tensors().items()}
        session.trainer.load_state(enormous, {"optimizer_step": 3, "adam_step": 0})
        with pytest.raises(NonFiniteError, match=r"after optimizer step 3 .* lower optimizer\.lr"):
            publisher.publish(PolicyVersion(0, 1))
        assert len(channel.list_versions()) == 1
        assert session.engine.stats()["live_versions"] == 1


def test_versions_stay_while_untrained_rollouts_or_the_certificate_need_them(files, tmp_path) -> None:
    """Sampling runs far ahead here, so the last batches come from versions long past."""
    changes = ("rl.max_policy_update_lag=30", "run.max_steps=8", "run.checkpoint_every=1", "run.keep_checkpoints=1")
    result = train(config(files, *changes, "engine.max_live_versions=2"), tmp_path / "run")
    assert result["max_abs_dlogp"] == 0.0
    needed = query(
        tmp_path / "run", "SELECT DISTINCT admitted_serial FROM rollout_group WHERE state IN ('ready', 'trained')"
    )
    kept = {read_manifest(path).version.serial for path in (tmp_path / "run" / "adapters").iterdir()}
    assert {serial for (serial,) in needed} <= kept


def test_old_versions_go_once_nobody_needs_them(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tithe.build.hooks.CERTIFIED_TOKENS", 1)
    changes = ("run.max_steps=7", "run.checkpoint_every=1", "engine.max_live_versions=2", "run.keep_checkpoints=1")
    train(config(files, *changes), tmp_path / "run")
    kept = sorted(read_manifest(path).version.serial for path in (tmp_path / "run" / "adapters").iterdir())
    assert kept == [6, 7]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000007"]


def test_a_run_without_time_for_a_batch_ends_well_and_goes_on(files, tmp_path, capsys) -> None:
    result = train(config(files, "run.max_minutes=0.00001"), tmp_path / "run")
    assert (result["steps"], result["reason"]) == (0, "max_minutes")
    assert "max_abs_dlogp" not in result
    assert "no parity certificate" in capsys.readouterr().err
    more = resume(tmp_path / "run", ["run.max_minutes=null", "run.max_steps=1"])
    assert (more["steps"], more["max_abs_dlogp"]) == (1, 0.0)


def test_a_finished_run_says_so_and_how_to_extend_it(files, tmp_path, capsys) -> None:
    run_dir: Path = tmp_path / "run"
    whole = train(config(files, "run.max_steps=2"), run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    again = resume(run_dir, [])
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    kept = ("run_dir", "steps", "reason", "max_abs_dlogp")
    assert {key: again[key] for key in kept} == {key: whole[key] for key in kept}
    assert again["extend"] == f"tithe resume {run_dir} run.max_steps=4"
    assert str(again["extend"]) in str(again["text"])
    assert str(again["text"]).splitlines()[0] == str(whole["text"]).splitlines()[0], "the table before and after"
    assert "the run is finished" in capsys.readouterr().err
    assert resume(run_dir, ["run.max_steps=3"])["steps"] == 3
    adapter = run_dir / "adapter" / "adapter_model.safetensors"
    assert adapter.read_bytes() != before[adapter]


def test_a_run_ended_by_patience_goes_on_only_with_another_one(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(EarlyStop, "observe", lambda self, score: self._patience is not None)
    run_dir: Path = tmp_path / "run"
    assert train(config(files, "run.max_steps=3", "run.patience=1"), run_dir)["reason"] == "patience"
    again = resume(run_dir, ["run.max_steps=9"])
    assert (again["steps"], again["reason"]) == (0, "patience")
    assert str(again["extend"]).endswith("run.patience=null")
    assert resume(run_dir, ["run.patience=null"])["steps"] == 3


def test_a_damaged_old_version_costs_only_its_own_rollouts_the_certificate(files, tmp_path, capsys) -> None:
    run_dir: Path = tmp_path / "run"
    train(config(files, "run.max_steps=2"), run_dir)
    (next(run_dir.glob("adapters/*-v0-*")) / "adapter_config.json").write_text("{}")
    (run_dir / "adapters" / ".tmp-killed-writer").mkdir()
    result = resume(run_dir, ["run.max_steps=3"])
    assert result["max_abs_dlogp"] == 0.0
    assert "not certified" in capsys.readouterr().err


def test_a_run_that_cannot_begin_leaves_an_other_run_in_its_place_alone(files, tmp_path) -> None:
    """Two runs that chose the same free directory: the second is refused and touches nothing."""
    run_dir = tmp_path / "run"
    train(config(files, "run.max_steps=1"), run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(Exception, match="already holds the pool of a run"):
        train(config(files), run_dir)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_sizes_that_do_not_fit_together_name_their_key(files) -> None:
    with (
        pytest.raises(ConfigError, match="max_context") as caught,
        open_session(
            config(files).model_copy(
                update={"rollout": config(files).rollout.model_copy(update={"max_new_tokens": 500})}
            )
        ),
    ):
        pass
    assert caught.value.key == "model.max_context"
