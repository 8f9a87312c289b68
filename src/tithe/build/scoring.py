"""The reward models of a run: opened once base and trainer are there, asked through the lane."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from tithe.arch.files import read_json
from tithe.build.base import Base
from tithe.config import RunConfig
from tithe.config.sampling import REWARD_MODEL
from tithe.errors import ConfigError, ModelError, ResumeError, UserError
from tithe.models import Passes
from tithe.pool import PoolReader
from tithe.renderers import ChatRenderer, load_renderer
from tithe.rewards import RewardModel
from tithe.scorers import (
    MANIFEST_FILE,
    Reply,
    RewardModelManifest,
    Scorer,
    ScoringDesk,
    load_classifier,
    load_reward_model,
    probe_gap,
    read_manifest,
)
from tithe.trainer import FullTrainer, Trainer
from tithe.types import PromptItem

KEY = "reward.function"

_GRADER = "model@"
"""Begins a reward model's name among a rollout's graders; its version follows."""

OTHER_TOKENS = 2
"""A classifier's own tokenizer may need this many tokens for one of the base's."""


@dataclass(frozen=True)
class RewardModels:
    """By function, as the rewards ask them; and the bytes that they hold beside the base."""

    by_function: dict[str, RewardModel]
    n_bytes: int


@dataclass(frozen=True)
class _Conversation:
    """Writes a question with a reply as ids: the text of the reply encoded anew, and ended as the template ends it
    even where the sampler was cut off. `pad` is never the last token: classifiers score the one before."""

    renderer: ChatRenderer
    system_prompt: str | None
    pad: int | None = None

    def __call__(self, item: PromptItem, text: str) -> Reply:
        prompt = self.renderer.render(item.messages if item.text is None else item.text, self.system_prompt)
        reply = self.renderer.finished_reply(text)
        while reply and reply[-1] == self.pad:
            reply = reply[:-1]
        return Reply(prompt, reply)


def uses_own_base(cfg: RunConfig) -> bool:
    """Whether a reward model of the configuration judges with the run's own base, so that it means nothing on
    another."""
    return any((Path(path) / MANIFEST_FILE).is_file() for path in cfg.reward.model_directories)


def open_reward_models(
    cfg: RunConfig, base: Base, trainer: Trainer | FullTrainer, system_prompt: str | None, say: Callable[[str], None]
) -> RewardModels:
    """Open every reward model that the reward names. Raises `ConfigError` naming the key for what cannot judge here."""
    models: dict[str, RewardModel] = {}
    n_bytes = 0
    for path in map(Path, cfg.reward.model_directories):
        try:
            if (path / MANIFEST_FILE).is_file():
                scorer, version = _on_base(path, cfg, base, trainer, say)
                write = _Conversation(base.renderer, system_prompt)
            else:
                scorer, version = _classifier(path, cfg, base)
                write = _Conversation(load_renderer(path), system_prompt, _pad_of(path))
        except UserError as error:
            raise ConfigError(f"{KEY}: {error}", key=KEY) from error
        desk = ScoringDesk(scorer, base.lane, batch_tokens=cfg.rl.micro_batch_tokens)
        models[f"{REWARD_MODEL}{path}"] = RewardModel(_asks(desk, write), f"{_GRADER}{version}")
        n_bytes += scorer.memory_bytes()
        say(f"reward model: {path.name}, version {version}, {scorer.memory_bytes() / 1e6:.1f} MB beside the base")
    return RewardModels(models, n_bytes)


def check_same_models(models: RewardModels, pool_path: Path) -> None:
    """Refuse reward models that are not, byte for byte, those that paid a pool's rollouts: rewards of two judges do not
    compare. Raises `ResumeError`. A run without one never had any: a resume cannot change `reward.function`."""
    if not models.by_function:
        return  # the query below reads the whole table
    with PoolReader(pool_path) as reader:
        graders = [row["grader"] for row in reader.query("SELECT DISTINCT grader FROM rollout WHERE grader NOT NULL")]
    paid = {name for grader in graders for name in grader.split(", ") if name.startswith(_GRADER)}
    now = {model.grader for model in models.by_function.values()}
    if not paid <= now:
        raise ResumeError(
            f"{KEY}: this run's rollouts were paid by {', '.join(sorted(paid))}, and the reward model's directory now "
            f"holds {', '.join(sorted(now)) or 'none'}: put the old files back, or begin a new run"
        )


def _asks(desk: ScoringDesk, write: _Conversation) -> Callable[[PromptItem, str], Future[float]]:
    return lambda item, text: desk.submit(write(item, text))


def _on_base(
    path: Path, cfg: RunConfig, base: Base, trainer: Trainer | FullTrainer, say: Callable[[str], None]
) -> tuple[Scorer, str]:
    """A reward model on the run's base. Its buffers are the trainer's, with which it takes turns on the lane."""
    if isinstance(trainer, FullTrainer):
        raise ModelError(f"{path} judges with a frozen base, and model.train = full holds none; give a classifier's")
    manifest = read_manifest(path)
    scorer = base.lane.call(_load, path, manifest, trainer.passes, cfg.rl.micro_batch_tokens)
    gap = base.lane.call(probe_gap, scorer, manifest.probe, manifest.probe_scores)
    if manifest.numeric_mode != base.numeric_mode:
        say(
            f"warning: {path.name} was trained under {manifest.numeric_mode}; under {base.numeric_mode} the scores of "
            f"its probe differ by up to {gap:.2g}"
        )
    elif not gap <= 0:  # NaN is no score either
        raise ModelError(f"{path} scores its own probe {gap:g} away from what it says it did: train it again")
    return scorer, manifest.version


def _load(path: Path, manifest: RewardModelManifest, passes: Passes, batch_tokens: int) -> Scorer:
    return load_reward_model(path, manifest, passes, batch_tokens=batch_tokens)


def _classifier(path: Path, cfg: RunConfig, base: Base) -> tuple[Scorer, str]:
    """A classifier of its own base, on buffers of its own."""
    longest = OTHER_TOKENS * cfg.model.max_context
    options = replace(base.options, compute="packed", quantize=cfg.reward.model_quantize, max_context=longest)

    def load() -> tuple[Scorer, str]:
        return load_classifier(path, options, batch_tokens=cfg.rl.micro_batch_tokens)

    return base.lane.call(load)


def _pad_of(path: Path) -> int | None:
    """The token that fills up rows of a classifier's batches, behind which it never looks."""
    pad = read_json(path / "config.json").get("pad_token_id")
    return pad if isinstance(pad, int) else None
