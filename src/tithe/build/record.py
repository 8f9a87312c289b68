"""run.json: identity, machine, memory and ending of a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tithe
from tithe.build.session import Session
from tithe.engines import CopiedEngine
from tithe.quant import HAS_AMX, HAS_BF16_DOT, kernel_threads
from tithe.trainer import FullTrainer
from tithe.utils.durable import write_text
from tithe.utils.memory import pss_bytes


def source_commit() -> str | None:
    """The commit of the checkout this package runs from, or None when it is installed or git is absent."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(  # noqa: S603  fixed arguments
            ["git", "-C", str(here), "rev-parse", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


class RunRecord:
    """Kept in the run directory and rewritten whole at each change."""

    def __init__(self, run_dir: Path, session: Session) -> None:
        self.path = run_dir / "run.json"
        self._begun = datetime.now(UTC)
        base, cfg = session.base, session.cfg
        self._session = session
        self._values: dict[str, Any] = {
            "name": cfg.run.name,
            "status": "running",
            "started_at": self._begun.isoformat(timespec="seconds"),
            "tithe_version": tithe.__version__,
            "commit": source_commit(),
            "model": {
                "name": session.base.path.stem if session.base.path.is_file() else session.base.path.name,
                "architecture": base.spec.architecture,
                "train": cfg.model.train,
                "checksum": base.checksum,
                "numeric_mode": base.numeric_mode,
                "compute": base.options.compute,
                "compute_dtype": base.options.compute_dtype,
            },
            "machine": {
                "processor": platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "ranks": cfg.run.ranks,
                "threads": kernel_threads(),
                "bf16_dot": HAS_BF16_DOT,
                "amx": HAS_AMX,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }
        self._memory()
        self.write()

    def finish(self, status: str, reason: str, **more: Any) -> None:
        """Add the ending and write."""
        ended = datetime.now(UTC)
        self._memory()
        self._values |= {
            "status": status,
            "reason": reason,
            "finished_at": ended.isoformat(timespec="seconds"),
            "minutes": round((ended - self._begun).total_seconds() / 60, 3),
            **more,
        }
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_text(self.path, json.dumps(self._values, indent=1, default=str))

    def _memory(self) -> None:
        session = self._session
        held, engine = session.base.held, session.own_engine
        pss = pss_bytes()
        before = self._values.get("memory", {}).get("peak_pss_bytes") or 0
        self._values["memory"] = {
            "base_resident_bytes": 0 if held is None else held.resident_bytes(),
            "base_file_bytes": session.base.file_bytes,
            "engine_copies_bytes": engine.copy_bytes() if isinstance(engine, CopiedEngine) else 0,
            "adapter_state_bytes": session.trainer.memory_bytes(),
            "critic_state_bytes": 0 if isinstance(session.trainer, FullTrainer) else session.trainer.critic_bytes(),
            "reward_model_bytes": session.reward_models.n_bytes,
            "kv_pages_bytes": int(engine.stats()["kv_bytes"]),
            "peak_pss_bytes": max(before, pss or 0) or None,
            **{f"rank_{rank}_peak_rss_bytes": peak for rank, peak in enumerate(session.learner.peaks)},
        }

    def observe(self) -> None:
        """Take the present memory into the peak."""
        self._memory()
