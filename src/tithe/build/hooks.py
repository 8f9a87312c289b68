"""What the train loop lets others do: publish a version, evaluate it, save and prune."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tithe.build.session import Session
from tithe.checkpoint import prune as prune_checkpoints
from tithe.checkpoint import save_checkpoint
from tithe.orchestration import RunControl, ServedVersion, TrainHooks, evaluate
from tithe.trainer import perturbed, probe_logp
from tithe.types import PolicyVersion
from tithe.utils.durable import write_text
from tithe.weight_sync import DirectoryChannel, Probe, manifest_fields

PROBE_TOKENS = 24


class Publisher:
    """Publishes the trainer's adapter and has the engine prove it."""

    def __init__(self, session: Session, channel: DirectoryChannel) -> None:
        self._session, self._channel = session, channel
        self._parent: tuple[str, list[float]] | None = None
        ids = [session.prompts.prompt_ids(item.id) for item in session.prompts.items[:2]]
        self._prompt, self._target = ids[0], ids[-1][-PROBE_TOKENS:]
        self.noise_floor = 0.0

    def publish(self, version: PolicyVersion) -> str:
        """Returns the name. Raises `PublishRefused` or `AdapterError`; the served version is then unchanged."""
        trainer, base = self._session.trainer, self._session.base
        tensors = trainer.adapter_tensors()

        def score(masters: Mapping[str, Any]) -> list[float]:
            return probe_logp(base.decoder, trainer.passes, self._prompt, self._target, masters, trainer.spec)

        logp = base.lane.call(score, tensors)
        shaken = base.lane.call(score, perturbed(tensors))
        self.noise_floor = max(abs(a - b) for a, b in zip(logp, shaken, strict=True))
        probe = Probe(
            token_ids=(*self._prompt, *self._target),
            prompt_len=len(self._prompt),
            logp=tuple(logp),
            noise_floor=self.noise_floor,
            parent_logp=None if self._parent is None else tuple(self._parent[1]),
        )
        fields = manifest_fields(
            lora=trainer.spec,
            parent=None if self._parent is None else self._parent[0],
            optimizer_step=trainer.optimizer_step,
            base_checksum=base.decoder.checksum,
            numeric_mode=base.decoder.options.numeric_mode,
            probe=probe,
        )
        name = self._session.engine.load_adapter(self._channel.publish(version, tensors, fields))
        self._parent = (name, logp)
        return name


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
            max_questions=max(1, cfg.engine.max_running // (samples + 1)),
        )
        if result is None:
            return None
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
        self.root = run_dir / "checkpoints"

    def save(self, serial: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a serial, durably."""
        return save_checkpoint(self.root, serial, self._session.trainer.state_tensors(), dict(state))

    def extra_state(self) -> Mapping[str, Any]:
        """JSON values."""
        trainer = self._session.trainer
        return {"trainer": trainer.state(), "kl_coef": self._session.cfg.rl.kl_coef}

    def prune(self) -> None:
        """Keep the newest checkpoints, and the versions that the engine or a certificate may still need."""
        cfg = self._session.cfg
        prune_checkpoints(self.root, cfg.run.keep_checkpoints)
        self._channel.prune(cfg.engine.max_live_versions + 2)


def train_hooks(publisher: Publisher, evaluator: Evaluator | None, saver: Saver) -> TrainHooks:
    """All of it as the loop takes it; without an evaluator nothing is scored."""
    return TrainHooks(
        publish=publisher.publish,
        evaluate=evaluator if evaluator is not None else (lambda _: None),
        save=saver.save,
        extra_state=saver.extra_state,
        prune=saver.prune,
    )
