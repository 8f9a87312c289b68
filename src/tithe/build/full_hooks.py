"""Publishing whole models: a directory per version, a copy of it in the engine, the gap between them reported."""

from __future__ import annotations

import math
from pathlib import Path

from tithe.build.session import Session, say
from tithe.engines import CopiedEngine
from tithe.errors import NonFiniteError
from tithe.trainer import FullTrainer
from tithe.types import MetricSink, PolicyVersion
from tithe.utils.durable import complete_directory
from tithe.utils.memory import release_unused
from tithe.weight_sync import DirectoryChannel, Probe, manifest_fields

FINAL_MODEL = "model"
"""Folder of the trained model in a run directory."""


class FullPublisher:
    """Publishes the trainer's model and has the engine prove its copy.

    `sink` gets a row per version: `sampler_gap` and `sampler_gap_mean`, the largest and mean |Δlog-prob| over the probe
    between transformers' forward and the engine's copy.
    """

    def __init__(
        self,
        session: Session,
        channel: DirectoryChannel,
        question: tuple[tuple[int, ...], tuple[int, ...]],
        sink: MetricSink | None = None,
    ) -> None:
        trainer, engine = session.trainer, session.engine
        assert isinstance(trainer, FullTrainer)
        assert isinstance(engine, CopiedEngine)
        self._session, self._channel, self._sink = session, channel, sink
        self._trainer, self._engine = trainer, engine
        self._prompt, self._target = question
        self._parent: tuple[str, list[float]] | None = None

    def publish(self, version: PolicyVersion) -> str:
        """Returns the name. Raises `PublishRefused`, `AdapterError` or, for a policy whose log-probs are no numbers,
        `NonFiniteError`; the served version is then unchanged.
        """
        release_unused()  # what training gave back, before the next copy asks for memory
        trainer, base = self._trainer, self._session.base
        logp = base.lane.call(trainer.probe, self._prompt, self._target)
        if not all(math.isfinite(x) for x in logp):
            raise NonFiniteError(
                f"after optimizer step {trainer.optimizer_step} the policy's log-probs are no finite numbers;"
                " lower optimizer.lr or optimizer.max_grad_norm"
            )
        probe = Probe(
            token_ids=(*self._prompt, *self._target),
            prompt_len=len(self._prompt),
            logp=tuple(logp),
            noise_floor=0.0,
            parent_logp=None if self._parent is None else tuple(self._parent[1]),
        )
        fields = manifest_fields(
            parent=None if self._parent is None else self._parent[0],
            optimizer_step=trainer.optimizer_step,
            base_checksum=base.checksum,
            numeric_mode=base.numeric_mode,
            probe=probe,
        )
        directory = self._channel.publish_model(version, lambda folder: base.lane.call(trainer.write, folder), fields)
        name = self._engine.load_adapter(directory)
        release_unused()
        self._parent = (name, logp)
        self._report(version)
        return name

    def _report(self, version: PolicyVersion) -> None:
        gap = self._engine.gap
        assert gap is not None
        if self._sink is not None:
            self._sink.write(version.serial, {"sampler_gap": gap.largest, "sampler_gap_mean": gap.mean})
        if self._session.base.options.quantize != "none":
            bound = "no bound: the copy is quantized"
        else:
            bound = f"{gap.tolerance:g} allowed"
        say(f"version {version.serial}: sampler against trainer {gap.largest:.2g} nats at most ({bound})")


def save_final_model(trainer: FullTrainer, run_dir: Path) -> Path:
    """The trained model as a Hugging Face directory of the run, in place of an earlier one."""
    target = run_dir / FINAL_MODEL
    with complete_directory(target, replace=True) as hidden:
        trainer.write(hidden)
    return target
