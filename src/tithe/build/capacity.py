"""`tithe capacity`: adapters of several LoRA ranks and every parameter, trained from one start, and the curves of each.

Each run is a command of its own, so that its peak of memory is its own, and uses as many processes as `run.ranks` says;
all see the same rows, seed and settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tithe.arch import find_demo_model, read_checkpoint
from tithe.build.base import check_full
from tithe.build.session import say
from tithe.config import LoraSettings, RunConfig, dump_resolved
from tithe.errors import ConfigError, RunError, UserError
from tithe.metrics import read_rows
from tithe.monitoring import rank_peaks
from tithe.utils.durable import write_text

FULL_LR_SHARE = 0.1
"""Learning rate of full-parameter training as a share of the adapters', where none is given."""

_POLL_S = 0.05
_FULL = "full"


@dataclass(frozen=True)
class Measured:
    """One run's outcome. `held_out` and `reward` are (step, value) curves; `peak_bytes` is the largest resident size of
    its process, with several the largest of any (None where the kernel does not say), `trained_state_bytes` what the
    first of them holds of masters, gradients and moments, `step_s` the mean time of a batch after the first,
    `max_abs_dlogp` and `mean_abs_dlogp` the sampler's difference from the trainer over the rollouts of its certificate,
    in nats a token (None without one)."""

    name: str
    lr: float
    held_out: list[tuple[int, float]]
    reward: list[tuple[int, float]]
    peak_bytes: int | None
    trained_state_bytes: int
    step_s: float
    max_abs_dlogp: float | None
    mean_abs_dlogp: float | None


def capacity(
    cfg: RunConfig,
    run_dir: Path,
    ranks: Sequence[int],
    steps: int | None,
    full_lr: float | None,
    copy: str | None = None,
) -> dict[str, object]:
    """Train, collect, compare; `ranks` are the adapters'. `copy` (a `model.quantize`) adds the largest rank on a base
    packed so, and full training whose rollouts come from a copy packed so. Raises `UserError` before the first run for
    a start that not all can share, `RunError` for a run that failed."""
    _check(cfg, copy)
    variants = _variants(cfg, ranks, steps or cfg.run.max_steps, full_lr, copy)
    measured = [_run(name, variant, run_dir / name) for name, variant in variants.items()]
    full = next(run for run in measured if run.name == _FULL)
    gaps = {run.name: _end(full.held_out) - _end(run.held_out) for run in measured if run is not full}
    result: dict[str, object] = {
        "run_dir": str(run_dir),
        "steps": steps or cfg.run.max_steps,
        "processes": cfg.run.ranks,
        "runs": [run.__dict__ for run in measured],
        "gap_to_full": gaps,
    }
    write_text(run_dir / "capacity.json", json.dumps(result, indent=1))
    return {**result, "text": _table(measured, gaps)}


def _check(cfg: RunConfig, copy: str | None) -> None:
    check_full(cfg, read_checkpoint(Path(cfg.model.path) if cfg.model.path is not None else find_demo_model()))
    if cfg.lora.init_from is not None:
        raise ConfigError(
            "lora.init_from: capacity compares runs from one start, the bare base; leave it out", key="lora.init_from"
        )
    if copy is not None and (cfg.model.quantize != "none" or cfg.model.load_in_8bit):
        raise ConfigError(
            f"model.quantize: --copy {copy} adds runs that are packed so to runs that are not; set it to none, and "
            "model.load_in_8bit to false",
            key="model.quantize",
        )


def _variants(
    cfg: RunConfig, ranks: Sequence[int], steps: int, full_lr: float | None, copy: str | None
) -> dict[str, RunConfig]:
    """Configurations by name, for adapters of the LoRA ranks `ranks`. alpha / r stays that of the run file."""
    length = {"max_steps": steps, "eval_every": cfg.run.eval_every or max(1, steps // 4)}
    run = cfg.run.model_copy(update=length)
    monitor = cfg.monitor.model_copy(update={"progress": False, "tensorboard": False, "report": False})
    common = cfg.model_copy(update={"run": run, "monitor": monitor})
    variants: dict[str, RunConfig] = {}
    for r in ranks:
        lora = cfg.lora.model_copy(update={"r": r, "alpha": cfg.lora.alpha * r / cfg.lora.r})
        model = cfg.model.model_copy(update={"train": "lora"})
        variants[f"lora-r{r}"] = common.model_copy(update={"lora": lora, "model": model})
    updates: dict[str, Mapping[str, Any]] = {
        "model": {"train": "full"},
        "rl": {"router_replay": False},
        "rollout": {"on_publish": "finish"},
        "optimizer": {"lr": full_lr or cfg.optimizer.lr * FULL_LR_SHARE},
    }
    sections = {name: getattr(common, name).model_copy(update=changes) for name, changes in updates.items()}
    variants[_FULL] = common.model_copy(update={**sections, "lora": LoraSettings()})
    for name in (f"lora-r{max(ranks)}", _FULL) if copy is not None else ():
        model = variants[name].model.model_copy(update={"quantize": copy})
        variants[f"{name}-{copy}"] = variants[name].model_copy(update={"model": model})
    return variants


def _run(name: str, cfg: RunConfig, folder: Path) -> Measured:
    run_dir = folder / "run"
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(run_dir.absolute()), "name": name})})
    write_text(folder / "run.yaml", dump_resolved(cfg))
    say(f"capacity: {name}, {cfg.run.max_steps} batches, optimizer.lr {cfg.optimizer.lr:g}")
    command = [sys.executable, "-m", "tithe.cli", "train", str(folder / "run.yaml"), "--json"]
    with (folder / "answer.json").open("w") as answer, (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=answer, stderr=log)  # noqa: S603  ourselves
        try:
            peak = _watch(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        _fail(name, folder, process.returncode)
    rows = [dict(row) for row in read_rows(run_dir / "metrics.jsonl").rows]
    times = [row["step_s"] for row in rows if "step_s" in row]
    timed = times[1:] or times
    memory = json.loads((run_dir / "run.json").read_text())["memory"]
    certificate = run_dir / "parity.json"
    parity = json.loads(certificate.read_text()) if certificate.is_file() else {}
    return Measured(
        name=name,
        lr=cfg.optimizer.lr,
        held_out=_curve(rows, "eval_sampled"),
        reward=_curve(rows, "reward_mean"),
        peak_bytes=_largest(peak, memory),
        trained_state_bytes=memory["adapter_state_bytes"],
        step_s=sum(timed) / len(timed) if timed else 0.0,
        max_abs_dlogp=parity.get("max_abs_dlogp"),
        mean_abs_dlogp=parity.get("mean_abs_dlogp"),
    )


def _largest(seen: int | None, memory: Mapping[str, Any]) -> int | None:
    """The largest peak of the command's own process and of those that run.json names by rank."""
    told = [int(peak) for peak in rank_peaks(memory).values()]
    return max([*told, *([] if seen is None else [seen])], default=None)


def _watch(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for a process; its high-water mark of resident memory, in bytes, as the kernel counted it last."""
    peak: int | None = None
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) * 1024
        except OSError:
            pass  # no such file system, or the process has just ended
        time.sleep(_POLL_S)
    return peak


def _fail(name: str, folder: Path, code: int) -> None:
    try:
        said = json.loads((folder / "answer.json").read_text())["error"]
    except (ValueError, KeyError):
        said = f"exit code {code}"
    message = f"capacity: the run {name} failed: {said} (see {folder / 'log.txt'})"
    raise UserError(message) if code == 2 else RunError(message)


def _curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[key])) for row in rows if key in row]


def _end(curve: Sequence[tuple[int, float]]) -> float:
    return curve[-1][1] if curve else float("nan")


def _table(measured: Sequence[Measured], gaps: Mapping[str, float]) -> str:
    head = ["run", "lr", "held out", "gap to full", "reward", "peak MiB", "state MiB", "s/batch"]
    head += ["max |dlogp|", "mean |dlogp|"]
    lines = [head, *(_cells(run, gaps) for run in measured)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cells(run: Measured, gaps: Mapping[str, float]) -> list[str]:
    return [
        run.name,
        f"{run.lr:g}",
        " ".join(f"{value:.3f}" for _, value in run.held_out),
        f"{gaps[run.name]:+.3f}" if run.name in gaps else "",
        f"{run.reward[0][1]:.3f} > {_end(run.reward):.3f}" if run.reward else "",
        "" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f}",
        f"{run.trained_state_bytes / 2**20:.1f}",
        f"{run.step_s:.3f}",
        *("" if value is None else f"{value:.2g}" for value in (run.max_abs_dlogp, run.mean_abs_dlogp)),
    ]
