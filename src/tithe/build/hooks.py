"""What the train loop lets others do: publish a version, evaluate it, save and prune."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tithe.build.full_hooks import FullPublisher
from tithe.build.probing import ProbeRecord
from tithe.build.session import Session, say
from tithe.checkpoint import prune as prune_checkpoints
from tithe.checkpoint import save_checkpoint
from tithe.orchestration import RunControl, ServedVersion, TrainHooks, evaluate
from tithe.pool import PoolReader
from tithe.trainer import FullTrainer
from tithe.types import MetricSink, PolicyVersion
from tithe.utils.durable import write_text
from tithe.utils.memory import release_unused
from tithe.weight_sync import DirectoryChannel
from tithe.weight_sync.manifest import parse_name

POOL_FILE = "pool.sqlite"
CERTIFIED_TOKENS = 2_000
"""Tokens of the newest trained rollouts whose versions stay on disk for the parity certificate."""


class Publisher:
    """Publishes the trainer's adapter and has the engine prove it."""

    def __init__(self, session: Session, channel: DirectoryChannel) -> None:
        self._session, self._channel = session, channel
        self._probe = ProbeRecord(session)

    def publish(self, version: PolicyVersion) -> str:
        """Returns the name. Raises `PublishRefused`, `AdapterError` or, for a policy whose log-probs are no numbers,
        `NonFiniteError`; the served version is then unchanged.
        """
        release_unused()  # what training gave back, before the next version asks for memory
        directory, logp = self._write(version)
        name = self._session.engine.load_adapter(directory)
        release_unused()
        self._probe.confirm(name, logp)
        return name

    def _write(self, version: PolicyVersion) -> tuple[Path, list[float]]:
        """The published directory and the trainer's answer to the probe. The engine reads its own copy from disk."""
        trainer, lane = self._session.adapter_trainer, self._session.base.lane
        logp, shaken = lane.call(self._session.learner.prove, self._probe.prompt, self._probe.target)
        fields = self._probe.manifest(logp, shaken, trainer.spec)
        return self._channel.publish(version, self._session.published_tensors(), fields), logp


class Evaluator:
    """Scores a version on the held-out questions and keeps what was answered."""

    def __init__(self, session: Session, run_dir: Path, control: RunControl | None) -> None:
        self._session, self._dir, self._control = session, run_dir / "eval", control

    def __call__(self, version: ServedVersion) -> Mapping[str, float] | None:
        """One metric row, also written to eval/; None when it was broken off."""
        cfg, questions = self._session.cfg, self._session.questions()
        samples = cfg.run.eval_samples_per_question
        result = evaluate(
            questions,
            player=self._session.player,
            params=self._session.params,
            adapter=version.name,
            samples=samples,
            control=self._control,
            max_questions=max(1, cfg.engine.max_running * cfg.run.ranks // (samples + 1)),
        )
        if result is None:
            return None
        failures = result.failures()
        if failures:
            asked = len(questions) * (samples + 1)
            first = f"{failures[0].cause}: {failures[0].message!r:.200}"  # may repeat what a model wrote
            say(f"warning: {len(failures)} of {asked} held-out answers failed and count as wrong; the first: {first}")
        row = {
            **result.row(seed=cfg.run.seed),
            "questions": float(len(questions)),
            "samples_per_question": float(samples),
        }
        step = version.version.serial
        answers = [
            {
                "question": q.question_id,
                "greedy": q.greedy.text,
                "greedy_score": q.greedy.score,
                "sampled": [a.text for a in q.sampled],
                "sampled_scores": [a.score for a in q.sampled],
            }
            for q in result.questions
        ]
        self._dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"step": step, "version": version.name, **row, "answers": answers}, indent=1)
        write_text(self._dir / f"step_{step:06d}.json", text)
        return row


class Saver:
    """Checkpoint files and what a resume needs beside the tensors."""

    def __init__(self, session: Session, run_dir: Path, channel: DirectoryChannel) -> None:
        self._session, self._channel = session, channel
        self._pool_path = run_dir / POOL_FILE
        self.root = run_dir / "checkpoints"

    def save(self, serial: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a serial, durably."""
        session = self._session
        if isinstance(session.trainer, FullTrainer):
            tensors = session.base.lane.call(session.model.state_tensors)
        else:
            tensors = session.trainer.state_tensors()  # every rank has all of it
        return save_checkpoint(self.root, serial, tensors, dict(state))

    def extra_state(self) -> Mapping[str, Any]:
        """JSON values."""
        trainer = self._session.trainer
        return {"trainer": trainer.state(), "kl_coef": trainer.kl_coef}

    def prune(self) -> None:
        """Keep the newest checkpoints, and the versions that the engine or a certificate may still need."""
        cfg = self._session.cfg
        prune_checkpoints(self.root, cfg.run.keep_checkpoints)
        names = {path.name: parse_name(path.name) for path in self._channel.list_versions()}
        used = self._used_versions()
        protect = [name for name, parsed in names.items() if parsed is not None and parsed[1] in used]
        self._channel.prune(cfg.engine.max_live_versions, protect)

    def _used_versions(self) -> set[PolicyVersion]:
        """Versions of groups that are not trained yet, and of the newest trained ones."""
        live = (
            "SELECT DISTINCT lineage, admitted_serial FROM rollout_group WHERE state IN ('running', 'ready', 'leased')"
        )
        newest = (
            "SELECT lineage, admitted_serial, n_tokens FROM groups WHERE state = 'trained'"
            " ORDER BY batch_serial DESC, batch_position LIMIT ?"
        )
        with PoolReader(self._pool_path) as reader:
            used = {PolicyVersion(row["lineage"], row["admitted_serial"]) for row in reader.query(live)}
            left = CERTIFIED_TOKENS
            for row in reader.query(newest, [CERTIFIED_TOKENS]):
                used.add(PolicyVersion(row["lineage"], row["admitted_serial"]))
                left -= row["n_tokens"]
                if left <= 0:
                    break
        return used


def make_publisher(
    session: Session, channel: DirectoryChannel, sink: MetricSink | None = None
) -> Publisher | FullPublisher:
    """What publishes a session's policy; `sink` gets what the publishing of whole models measures."""
    if session.base.held is None:
        return FullPublisher(session, channel, sink)
    return Publisher(session, channel)


def train_hooks(publisher: Publisher | FullPublisher, evaluator: Evaluator | None, saver: Saver) -> TrainHooks:
    """All of it as the loop takes it; without an evaluator nothing is scored."""
    return TrainHooks(
        publish=publisher.publish,
        evaluate=evaluator if evaluator is not None else (lambda _: None),
        save=saver.save,
        extra_state=saver.extra_state,
        prune=saver.prune,
    )
