"""Files of a tiny run: base, rows, reward function, run file; and plain readers of what a run leaves."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.checkpoints import build_hf

REWARD = '''
def pay(item, text, token_ids, **info):
    """Pays for even token ids."""
    return sum(t % 2 == 0 for t in token_ids) / len(token_ids)
'''


@dataclass(frozen=True)
class RunFiles:
    """Everything in `folder`; `yaml` is the run file."""

    folder: Path
    model: Path
    rows: Path
    reward: Path
    yaml: Path

    def write(self, name: str, **sections: dict[str, Any]) -> Path:
        """Another run file: the tiny one with some keys changed."""
        values = yaml.safe_load(self.yaml.read_text())
        for section, changes in sections.items():
            values.setdefault(section, {}).update(changes)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path


def write_run_files(folder: Path) -> RunFiles:
    """A synchronous run of 6 batches of 2 prompts x 4 samples x at most 8 tokens."""
    files = RunFiles(folder, folder / "model", folder / "rows.jsonl", folder / "reward.py", folder / "tiny.yaml")
    build_hf(files.model, "llama", tie_word_embeddings=False)  # a tied random head mostly repeats its input
    rows = [{"prompt": f"the answer {i} + {i} =", "answer": 2 * i} for i in range(24)]
    files.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files.reward.write_text(REWARD)
    values = {
        "model": {
            "path": str(files.model),
            "compute": "packed",
            "compute_dtype": "fp32",
            "quantize": "int4",
            "max_context": 64,
        },
        "lora": {"r": 4, "alpha": 8},
        "optimizer": {"lr": 0.01, "lr_scheduler": "cosine", "warmup_steps": 1},
        "rl": {
            "samples_per_prompt": 4,
            "batch_size_per_update": 8,
            "max_policy_update_lag": 0,
            "micro_batch_tokens": 64,
        },
        "rollout": {"max_new_tokens": 8, "max_prompt_tokens": 48},
        "reward": {"function": f"{files.reward}:pay"},
        "task": {"source": str(files.rows), "eval_size": 4},
        "engine": {"max_running": 16, "kv_memory_mib": 4},
        "monitor": {"progress": False, "tensorboard": False, "report": False},
        "run": {
            "max_steps": 6,
            "eval_every": 3,
            "eval_samples_per_question": 2,
            "checkpoint_every": 2,
            "threads": 1,
        },
    }
    files.yaml.write_text(yaml.safe_dump(values))
    return files


def query(run_dir: Path, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Plain SQL over a run's pool, read-only."""
    with closing(sqlite3.connect(f"file:{run_dir / 'pool.sqlite'}?mode=ro", uri=True)) as db:
        return db.execute(sql, parameters).fetchall()


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Complete rows of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def trained_serial(run_dir: Path) -> int:
    """Newest batch in the metrics; 0 before the first."""
    return max((row["step"] for row in metric_rows(run_dir) if "loss" in row), default=0)


def trained_tokens(run_dir: Path) -> list[tuple[Any, ...]]:
    """Everything a batch was made of, in training order: two runs with equal lists trained the same numbers."""
    return query(
        run_dir,
        "SELECT batch_serial, batch_position, g.group_id, prompt_id, prompt_tokens, sample, reward, text, finish,"
        " token_ids, logp, r.serials FROM rollout_group g JOIN rollout r USING (group_id) WHERE state = 'trained'"
        " ORDER BY 1, 2, sample",
    )
