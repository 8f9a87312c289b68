"""The comparison's own parts: its run file is one that `tithe capacity` takes, its table shows what was measured."""

from __future__ import annotations

from benchmarks.full_or_adapter import RUN_FILE, table
from tithe.config import config_warnings, load_config


def test_the_job_resolves_and_warns_only_of_its_rate(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(RUN_FILE.format(model="m", steps=8, every=4))
    cfg = load_config(path)
    assert (cfg.run.max_steps, cfg.run.eval_every, cfg.rl.max_policy_update_lag) == (8, 4, 0)
    assert cfg.model.quantize == "none", "a copy is packed beside it"
    of = [warning.split(" ")[0] for warning in config_warnings(cfg)]
    assert of == ["optimizer.lr"], "no KL holds the policy, in a few steps"


def test_the_table_has_a_row_a_run_and_a_cell_a_figure():
    run = {
        "name": "full-int4",
        "lr": 5e-5,
        "held_out": [(0, 0.25), (8, 0.5)],
        "peak_bytes": 3 * 2**30,
        "trained_state_bytes": 2**31,
        "step_s": 12.34,
        "max_abs_dlogp": 0.0,
        "mean_abs_dlogp": None,
    }
    head, rule, row = table([run]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row == "| full-int4 | 5e-05 | 0.25 > 0.50 | 3072 | 2048 | 12.3 | 0 |  |"
