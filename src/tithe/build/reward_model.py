"""`tithe reward-model`: trains a reward model on a run's base from pairs of replies, and says how well it ranks
others."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tithe.build.base import Base, open_base
from tithe.build.crew import Crew
from tithe.build.session import say
from tithe.config import RunConfig
from tithe.envs.pairs import Pair
from tithe.errors import ConfigError, RunError, UserError
from tithe.lora import LoraSpec, init_tensors, resolve_targets
from tithe.metrics import Interval, bootstrap_ci
from tithe.models import Passes, share_outer, stack_experts
from tithe.scorers import (
    PreferenceSettings,
    PreferenceTrainer,
    Ranked,
    Reply,
    ReplyPair,
    RewardModelManifest,
    load_reward_model,
    probe_gap,
    rank_pairs,
    save_reward_model,
)
from tithe.trainer import learning_rate
from tithe.utils.durable import sha256_file

PROBE_PAIRS = 2
SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class PairOptions:
    """`batch` pairs a step, `epochs` times over all; `held_out` is the share of prompts that are only judged; `centre`
    weighs the pull of each pair's scores towards 0."""

    epochs: int = 2
    batch: int = 32
    held_out: float = 0.1
    centre: float = 0.01


@dataclass(frozen=True)
class _Data:
    """Pairs as ids, split by prompt; `left_out` were longer than model.max_context."""

    train: list[ReplyPair]
    held_out: list[ReplyPair]
    left_out: int


def train_reward_model(
    pairs: Sequence[Pair], source: Path, cfg: RunConfig, out: Path, options: PairOptions
) -> dict[str, object]:
    """Train, judge what was held out, write `out`, and prove that it scores as it was trained. Raises `UserError`
    before anything is computed for settings that cannot be met."""
    _check(cfg, out)
    started = time.monotonic()
    base = open_base(cfg, say, Crew())
    try:
        data = _encode(pairs, base, options, cfg)
        trainer = base.lane.call(_trainer, base, data, options)
        last = _train(base, trainer, data.train, options)
        ranked = base.lane.call(rank_pairs, trainer.scorer(), data.held_out)
        interval = _interval(data.held_out, ranked, base.cfg.run.seed)
        manifest = base.lane.call(_write, out, base, trainer, data, ranked, interval, sha256_file(source))
    finally:
        base.lane.close()
    text = (
        f"held-out pairs ranked right: {interval} of {len(data.held_out)}; loss {ranked.loss:.3f}, by chance 0.693\n"
        f"reward model: {out}, version {manifest.version}"
    )
    return {
        "out": str(out),
        "accuracy": interval.mean,
        "ci95": [interval.lo, interval.hi],
        "loss": ranked.loss,
        "train_accuracy": last.accuracy,
        "train_loss": last.loss,
        "pairs": len(data.train),
        "held_out_pairs": len(data.held_out),
        "left_out": data.left_out,
        "steps": trainer.steps,
        "seconds": time.monotonic() - started,
        "bytes": sum(path.stat().st_size for path in out.iterdir()),
        "trained_state_bytes": trainer.memory_bytes(),
        "version": manifest.version,
        "text": text,
    }


def _check(cfg: RunConfig, out: Path) -> None:
    wrong = {
        "model.train": (cfg.model.train != "lora", "a reward model is an adapter; set it to lora"),
        "run.ranks": (cfg.run.ranks > 1, "it is trained by one process; set it to 1"),
        "lora.dropout": (cfg.lora.dropout > 0, "it is trained without; set it to 0"),
        "lora.init_from": (cfg.lora.init_from is not None, "it begins with a fresh adapter; leave it out"),
    }
    for key, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            section, _, leaf = key.partition(".")
            raise ConfigError(f"{key} = {getattr(getattr(cfg, section), leaf)}: {remedy}", key=key)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not empty; name another directory")


def _encode(pairs: Sequence[Pair], base: Base, options: PairOptions, cfg: RunConfig) -> _Data:
    renderer, system = base.renderer, cfg.rollout.system_prompt
    encoded = [
        ReplyPair(
            renderer.render(pair.item.messages, system),
            renderer.finished_reply(pair.chosen),
            renderer.finished_reply(pair.rejected),
        )
        for pair in pairs
    ]
    fitting = [pair for pair in encoded if _longest(pair) <= base.max_context]
    prompts = sorted({pair.prompt_ids for pair in fitting}, key=lambda ids: _place(ids, cfg.run.seed))
    wanted = max(1, round(options.held_out * len(prompts)))
    if wanted >= len(prompts):
        raise UserError(
            f"{len(prompts)} different prompts with replies of at most model.max_context = {base.max_context} tokens: "
            f"{wanted} of them held out leaves none to learn from; give more pairs, or raise model.max_context"
        )
    held = set(prompts[:wanted])
    train = [pair for pair in fitting if pair.prompt_ids not in held]
    judged = [pair for pair in fitting if pair.prompt_ids in held]
    say(f"pairs: {len(train)} to learn from, {len(judged)} held out by prompt, {len(pairs) - len(fitting)} too long")
    return _Data(train, judged, len(pairs) - len(fitting))


def _longest(pair: ReplyPair) -> int:
    return len(pair.prompt_ids) + max(len(pair.chosen), len(pair.rejected))


def _place(ids: tuple[int, ...], seed: int) -> str:
    """Where a prompt stands in the order in which prompts are held out: the same whatever rows surround it."""
    return hashlib.sha256(f"{seed} {ids}".encode()).hexdigest()


def _trainer(base: Base, data: _Data, options: PairOptions) -> PreferenceTrainer:
    """On the lane."""
    cfg, decoder = base.cfg, base.decoder
    o, total = cfg.optimizer, options.epochs * -(-len(data.train) // options.batch)
    shapes, named = decoder.linear_shapes(), cfg.lora.target_modules
    targets = resolve_targets(named if isinstance(named, str) else list(named), shapes)
    modules = tuple(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    spec = LoraSpec(cfg.lora.r, cfg.lora.alpha, target_modules=modules)
    tensors: dict[str, Tensor] = stack_experts(init_tensors(spec, shapes, cfg.run.seed))
    if cfg.lora.expert_layout == "shared_outer":
        tensors = share_outer(tensors)

    def rate(step: int) -> float:
        return learning_rate(step, peak=o.lr, kind=o.lr_scheduler, warmup_steps=o.warmup_steps, total_steps=total)

    settings = PreferenceSettings(
        rate=rate,
        betas=o.betas,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
        centre=options.centre,
        micro_batch_tokens=cfg.rl.micro_batch_tokens,
        activation_checkpointing=cfg.model.activation_checkpointing,
    )
    return PreferenceTrainer(decoder, spec, tensors, settings)


@dataclass
class _Mean:
    """Over the pairs of one epoch, each before the step that learns from it."""

    loss: float = 0.0
    accuracy: float = 0.0
    pairs: int = 0

    def add(self, loss: float, accuracy: float, pairs: int) -> None:
        total = self.pairs + pairs
        self.loss += (loss - self.loss) * pairs / total
        self.accuracy += (accuracy - self.accuracy) * pairs / total
        self.pairs = total


def _train(base: Base, trainer: PreferenceTrainer, pairs: list[ReplyPair], options: PairOptions) -> _Mean:
    """All epochs; the means of the last one. Each step is a job of its own on the lane."""
    draw = np.random.default_rng(base.cfg.run.seed)
    mean, said = _Mean(), time.monotonic()
    steps = options.epochs * -(-len(pairs) // options.batch)
    for epoch in range(options.epochs):
        mean = _Mean()
        order = draw.permutation(len(pairs))
        for at in range(0, len(pairs), options.batch):
            batch = [pairs[i] for i in order[at : at + options.batch]]
            step = base.lane.call(trainer.step, batch)
            mean.add(step.loss, step.accuracy, len(batch))
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                say(f"step {trainer.steps} of {steps}: loss {mean.loss:.3f}, ranked right {mean.accuracy:.3f}")
        say(f"epoch {epoch + 1}: loss {mean.loss:.3f}, ranked right {mean.accuracy:.3f}, before each step")
    return mean


def _interval(pairs: Sequence[ReplyPair], ranked: Ranked, seed: int) -> Interval:
    """The mean over prompts of the share of their pairs that is ranked right, with its 95 % interval."""
    by_prompt: dict[tuple[int, ...], list[float]] = {}
    for pair, right in zip(pairs, ranked.right.tolist(), strict=True):
        by_prompt.setdefault(pair.prompt_ids, []).append(right)
    return bootstrap_ci(by_prompt.values(), seed=seed)


def _write(
    out: Path,
    base: Base,
    trainer: PreferenceTrainer,
    data: _Data,
    ranked: Ranked,
    interval: Interval,
    pairs_sha256: str,
) -> RewardModelManifest:
    """Write the directory, read it back, and have it score its probe. On the lane."""
    shortest = sorted(data.held_out, key=lambda pair: pair.n_tokens)[:PROBE_PAIRS]
    probe = tuple(Reply(pair.prompt_ids, ids) for pair in shortest for ids in (pair.chosen, pair.rejected))
    facts = {
        "base_checksum": base.checksum,
        "numeric_mode": base.numeric_mode,
        "accuracy": interval.mean,
        "accuracy_lo": interval.lo,
        "accuracy_hi": interval.hi,
        "loss": ranked.loss,
        "pairs": len(data.train),
        "held_out_pairs": len(data.held_out),
        "pairs_sha256": pairs_sha256,
        "probe": probe,
        "probe_scores": tuple(trainer.scorer().score(probe)),
    }
    manifest = save_reward_model(out, trainer.published(), trainer.spec, trainer.head, facts)
    passes = Passes(base.decoder, {}, checkpointing=True, dropout=0.0)
    loaded = load_reward_model(out, manifest, passes, batch_tokens=base.cfg.rl.micro_batch_tokens)
    gap = probe_gap(loaded, manifest.probe, manifest.probe_scores)
    if gap > 0:
        raise RunError(f"{out} scores its own probe {gap:g} away from what it was trained to: do not use it")
    return manifest
