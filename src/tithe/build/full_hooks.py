"""Publishing whole models: a directory per version, a copy of it in the engine, the gap between them reported."""

from __future__ import annotations

from pathlib import Path

from tithe.build.probing import ProbeRecord
from tithe.build.session import Session, say
from tithe.engines import CopiedEngine
from tithe.errors import UserError
from tithe.trainer import LeadingModel
from tithe.types import MetricSink, PolicyVersion
from tithe.utils.durable import complete_directory, explain
from tithe.utils.memory import release_unused
from tithe.weight_sync import DirectoryChannel

FINAL_MODEL = "model"
"""Folder of the trained model in a run directory."""


class FullPublisher:
    """Publishes the trainer's model and has the engine prove its copy.

    `sink` gets a row per version: `sampler_gap` and `sampler_gap_mean`, the largest and mean |Δlog-prob| over the probe
    between transformers' forward and the engine's copy.
    """

    def __init__(self, session: Session, channel: DirectoryChannel, sink: MetricSink | None = None) -> None:
        assert isinstance(session.own_engine, CopiedEngine)
        self._session, self._channel, self._sink = session, channel, sink
        self._own = session.own_engine
        self._probe = ProbeRecord(session)

    def publish(self, version: PolicyVersion) -> str:
        """Returns the name. Raises `PublishRefused`, `AdapterError` or, for a policy whose log-probs are no numbers,
        `NonFiniteError`; the served version is then unchanged.
        """
        release_unused()  # what training gave back, before the next copy asks for memory
        model, lane = self._session.model, self._session.base.lane
        logp = lane.call(model.probe, self._probe.prompt, self._probe.target)
        fields = self._probe.manifest(logp)
        directory = self._channel.publish_model(version, lambda folder: lane.call(model.write, folder), fields)
        name = self._session.engine.load_adapter(directory)
        release_unused()
        self._probe.confirm(name, logp)
        self._report(version)
        return name

    def _report(self, version: PolicyVersion) -> None:
        gap = self._own.gap
        assert gap is not None
        if self._sink is not None:
            self._sink.write(version.serial, {"sampler_gap": gap.largest, "sampler_gap_mean": gap.mean})
        if self._session.base.options.quantize != "none":
            bound = "no bound: the copy is quantized"
        else:
            bound = f"{gap.tolerance:g} allowed"
        say(f"version {version.serial}: sampler against trainer {gap.largest:.2g} nats at most ({bound})")


def save_final_model(model: LeadingModel, run_dir: Path) -> Path:
    """The trained model as a Hugging Face directory of the run, in place of an earlier one. `UserError` when the disk
    refuses; the earlier one is still there then."""
    target = run_dir / FINAL_MODEL
    try:
        with complete_directory(target, replace=True) as hidden:
            model.write(hidden)
    except OSError as error:
        raise UserError(f"cannot write the model {target}: {explain(error)}") from error
    return target
