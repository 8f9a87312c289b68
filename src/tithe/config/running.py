"""The sections that say how long, how often and where: `monitor`, `run`."""

from __future__ import annotations

from pydantic import Field

from tithe.config.base import LocalPath, Section, absolute_path, derived

KEPT_BATCHES = 200
"""Fewest trained batches whose token arrays stay in the pool."""


class MonitorSettings(Section):
    """What is shown, written and watched."""

    progress: bool = True
    """Live progress on standard error; plain lines when that is no terminal."""

    tensorboard: bool = True
    """Write event files to `RUN_DIR/tb`, besides `metrics.jsonl`."""

    report: bool = True
    """Write `RUN_DIR/report.html` at the end."""

    alarm_after: int = Field(default=3, ge=1)
    """Batches in a row before an alarm, with one cause of failed rollouts, with more than half of the groups dropped as
    too old, or with all rewards exactly 0 (mostly an extractor that never matches). As many batches' worth of rollouts
    in a row, in groups of which nothing can be used, end the run."""


class RunSettings(Section):
    """Identity, length, rhythm and machine of one run."""

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        json_schema_extra={"default_text": "the run file's name"},
    )
    """Name of the run, at most 64 letters, digits, dots, dashes and underscores; part of the names of published
    adapters."""

    dir: LocalPath = derived(lambda values: absolute_path(f"runs/{values['name']}"), "`runs/NAME`")
    """Run directory: resolved configuration, pool, metrics, adapters, checkpoints, report. When it is not given and
    taken, the next free `runs/NAME-2` is used; a given one that holds files is refused."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of sampling, initialisation and prompt order. The same seed gives the same tokens whatever else is in a
    batch."""

    max_steps: int = Field(default=100, ge=1)
    """Batches to train; also the length of the learning-rate schedule and of phases with shares, so changing it on a
    resume stretches them."""

    max_minutes: float | None = Field(default=None, gt=0)
    """Stop cleanly, with checkpoint and final evaluation, after this many minutes of this process. `null` is no
    limit."""

    eval_every: int | None = Field(default=10, ge=1)
    """Batches between two evaluations; one is always made before and one after. `null` makes only those two."""

    eval_samples_per_question: int = Field(default=4, ge=1, le=65536)
    """Completions at temperature 1 per held-out question, besides one greedy."""

    patience: int | None = Field(default=None, ge=1)
    """Stop when the held-out score at temperature 1 has declined at this many evaluations in a row. `null` never
    stops early."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Batches between two checkpoints; a crash loses at most this many."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Complete checkpoints kept; older ones are deleted only after a newer one is durable. Tokens and log-probs of as
    many batches as lie between them stay in the pool, at least of 200; of older ones only text and rewards do."""

    device: str = Field(
        default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$", json_schema_extra={"allowed": "cpu, cuda, or cuda:N"}
    )
    """Where the base lives and computes. The kernels of this version run on processors: any other device is refused
    when the base is loaded."""

    ranks: int = Field(default=1, ge=1, le=4096)
    """Processes that sample and train together: each holds a share of the experts, everything else whole (with
    `model.train: full` a share of everything that is trained), and works on requests and rows of its own. The command
    starts the others on this machine; under a launcher that sets `RANK` and `WORLD_SIZE` it meets them.
    `engine.max_running` and `engine.kv_memory_mib` are those of each rank."""

    threads: int | None = Field(default=None, ge=1, le=4096)
    """Threads for arithmetic of each rank. `null` shares out the cores that this process may use."""

    @property
    def keep_pool_batches(self) -> int:
        """Trained batches whose token arrays the pool keeps: a resume trains the rows after its checkpoint again."""
        return max(KEPT_BATCHES, self.checkpoint_every * self.keep_checkpoints)
