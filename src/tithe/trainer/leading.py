"""The trainer over ranks: rank 0 is asked, all ranks do it.

    TrainerShare      every rank's own trainer and what an order asks of it
    LeadingTrainer    rank 0's face to the train loop, with a trainer's methods
    LeadingScorer     the same of what scores a batch before it is trained

One order a lane job: a batch to plan, a micro-batch each, the step, a checkpoint to take back; of an adapter also
log-probs to prove (of whole models: `tithe.trainer.full_leading`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tithe.checkpoint import load_checkpoint
from tithe.losses import Denominators
from tithe.models import Decoder, Orders, Passes, Ranks, TrainAdapter
from tithe.packing import MicroBatch
from tithe.trainer.full import FullTrainer
from tithe.trainer.proof import Perturbed, probe_logp, probe_masters, score_groups
from tithe.trainer.scoring import BatchScorer
from tithe.trainer.settings import TrainerSettings
from tithe.trainer.trainer import StepResult, Trainer
from tithe.types import BatchScores, RolloutGroup, TrainingBatch
from tithe.utils.memory import peak_rss_bytes
from tithe.utils.wire import kinds_in
from tithe.weight_sync import load_published

CERTIFICATE_TOKENS = 512
"""Rows of a micro-batch that a certificate is scored in."""


@dataclass(frozen=True)
class Plan:
    """Begin a batch under settings that may change from batch to batch; what is left of another is abandoned. Every
    rank's own micro-batches follow, `sizes` bytes each (rank 0 has its own)."""

    settings: TrainerSettings
    denominators: Denominators | None
    knows_reference: bool
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Accumulate:
    """Each rank's next micro-batch."""


@dataclass(frozen=True)
class Step:
    """The optimizer step."""


@dataclass(frozen=True)
class TakeBack:
    """Load the state of a checkpoint."""

    directory: str


@dataclass(frozen=True)
class AskProbe:
    """The trainer's log-probs of a probe, and those under shaken masters."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class AskVersion:
    """log-probs of rollouts under a published version, maybe shaken."""

    directory: str
    groups: Sequence[RolloutGroup]
    shaken: bool


@dataclass(frozen=True)
class AskOther:
    """log-probs of rollouts under a published version, on the base held the other way."""

    directory: str
    groups: Sequence[RolloutGroup]


@dataclass(frozen=True)
class PlanScores:
    """Begin to score what must be known of a batch beforehand, under the settings that it will be trained with. Every
    rank's own micro-batches follow as of `Plan`."""

    settings: TrainerSettings
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ScoreNext:
    """Each rank's next micro-batch."""


@dataclass(frozen=True)
class TellScores:
    """All ranks' scores together, on rank 0."""


TRAINER_ORDERS = (Plan, Accumulate, Step, TakeBack, AskProbe, AskVersion, AskOther, PlanScores, ScoreNext, TellScores)
"""Orders of a trainer over ranks."""
TRAINER_CARRIERS = (
    *kinds_in(RolloutGroup),
    *kinds_in(TrainerSettings),
    MicroBatch,
    Denominators,
)
"""What they carry."""


class TrainerShare:
    """One rank's part of every order. On the lane."""

    def __init__(
        self,
        trainer: Trainer | FullTrainer,
        orders: Orders,
        scorer: BatchScorer | None = None,
        other: Callable[[], Decoder] | None = None,
    ) -> None:
        """`scorer` is what scores batches beforehand, where an algorithm needs that. `other` loads this rank's share of
        the base held the other way (packed, or dequantized), which then stays."""
        self.trainer, self._scorer, self._other = trainer, scorer, other
        self._other_passes: Passes | None = None
        self._orders = orders
        self.peaks: list[int] = []
        """Largest resident size of every rank's process so far, in bytes, as of the last step; with one rank none."""
        self._left: list[MicroBatch] = []
        self._parts: list[bytes] = []
        orders.handle(Plan, self._plan)
        orders.handle(Accumulate, self._accumulate)
        orders.handle(Step, lambda _: self._step())
        orders.handle(TakeBack, self._take_back)
        if isinstance(trainer, Trainer):
            orders.handle(AskProbe, lambda order: prove(trainer, order.prompt, order.target))
            orders.handle(AskVersion, lambda o: score_version(trainer, Path(o.directory), o.groups, shaken=o.shaken))
            orders.handle(AskOther, lambda o: self._score_other(trainer, Path(o.directory), o.groups))
        if scorer is not None:
            orders.handle(PlanScores, lambda order: self._plan_scores(scorer, order))
            orders.handle(ScoreNext, lambda _: scorer.score(self._left.pop(0)))
            orders.handle(TellScores, lambda _: scorer.scores() if orders.ranks.rank == 0 else scorer.contribute())

    def share_out(self, batch: TrainingBatch, settings: TrainerSettings) -> Plan:
        """On rank 0: the order by which every rank gets its own part of a batch, and no other."""
        self.trainer.settings = settings
        shares = self.trainer.share_out(batch)
        return Plan(settings, shares.denominators, shares.knows_reference, self._ready_to_send(shares.parts))

    def share_scores(self, groups: Sequence[RolloutGroup], settings: TrainerSettings) -> PlanScores:
        """On rank 0: the order by which every rank gets its own part of what is scored beforehand, and no other."""
        assert self._scorer is not None
        self.trainer.settings = settings
        return PlanScores(settings, self._ready_to_send(self._scorer.share_out(groups)))

    def _ready_to_send(self, parts: Sequence[list[MicroBatch]]) -> tuple[int, ...]:
        """Keep rank 0's part, pack the others'; their sizes in bytes."""
        self._left, *others = (list(part) for part in parts)
        self._parts = [self._orders.wire.encode([_narrow(micro) for micro in part]) for part in others]
        return 0, *map(len, self._parts)

    def _receive(self, sizes: Sequence[int]) -> list[MicroBatch]:
        """This rank's part of what rank 0 has packed."""
        ranks = self._orders.ranks
        data = ranks.scatter([b"", *self._parts] if ranks.rank == 0 else [], sizes)
        self._parts = []
        if ranks.rank > 0:
            self._left = [_widen(micro) for micro in self._orders.wire.decode(data)]
        return list(self._left)

    def _plan(self, order: Plan) -> list[MicroBatch]:
        self.trainer.settings = order.settings
        self.trainer.begin(order.denominators, knows_reference=order.knows_reference)
        return self._receive(order.sizes)

    def _plan_scores(self, scorer: BatchScorer, order: PlanScores) -> list[MicroBatch]:
        self.trainer.settings = order.settings
        scorer.begin()
        return self._receive(order.sizes)

    def _accumulate(self, _: Accumulate) -> None:
        self.trainer.accumulate(self._left.pop(0))

    def _step(self) -> StepResult:
        result, ranks = self.trainer.step(), self._orders.ranks
        if ranks.size > 1:
            self.peaks = [int(one) for one in ranks.all_gather(torch.tensor([peak_rss_bytes() or 0]))]
            result.metrics["rank_peak_bytes"] = float(max(self.peaks))
        return result

    def _take_back(self, order: TakeBack) -> None:
        take_back(self.trainer, Path(order.directory))

    def _score_other(
        self, trainer: Trainer, directory: Path, groups: Sequence[RolloutGroup]
    ) -> list[list[np.ndarray | None]]:
        assert self._other is not None
        if self._other_passes is None:
            checkpointing = trainer.settings.activation_checkpointing
            widths = trainer.adapter.widths()
            self._other_passes = Passes(self._other(), widths, checkpointing=checkpointing, dropout=0.0)
        return _score_published(self._other_passes, directory, groups, trainer.ranks, shaken=False)


def _narrow(micro: MicroBatch) -> MicroBatch:
    """As it travels: recorded experts are most of a mixture's batch, and their numbers are small."""
    experts = micro.experts
    return micro if experts is None else replace(micro, experts=experts.astype(np.int16))


def _widen(micro: MicroBatch) -> MicroBatch:
    experts = micro.experts
    return micro if experts is None else replace(micro, experts=experts.astype(np.int32))


def take_back(trainer: Trainer | FullTrainer, directory: Path) -> None:
    """Load a checkpoint's tensors and numbers. Raises `ResumeError`."""
    loaded = load_checkpoint(directory)
    trainer.load_state(loaded.tensors, loaded.state["trainer"])


def prove(trainer: Trainer, prompt: Sequence[int], target: Sequence[int]) -> tuple[list[float], list[float]]:
    """A probe's log-probs under the trainer's adapter, and under its masters shaken by the noise of rounding. On the
    lane."""
    logp = probe_logp(trainer.passes, prompt, target, trainer.adapter, trainer.ranks)
    masters = Perturbed(trainer.adapter_tensors())
    return logp, probe_masters(trainer.passes, prompt, target, masters, trainer.spec, trainer.ranks)


def score_version(
    trainer: Trainer, directory: Path, groups: Sequence[RolloutGroup], *, shaken: bool
) -> list[list[np.ndarray | None]]:
    """log-probs of rollouts under a published version, by the training path; `shaken`: its tensors moved by the noise
    of rounding. On the lane."""
    return _score_published(trainer.passes, directory, groups, trainer.ranks, shaken=shaken)


def _score_published(
    passes: Passes, directory: Path, groups: Sequence[RolloutGroup], ranks: Ranks, *, shaken: bool
) -> list[list[np.ndarray | None]]:
    _, tensors, spec = load_published(directory, passes.decoder.linear_shapes())
    adapter = TrainAdapter.for_scoring(passes.decoder, Perturbed(tensors) if shaken else tensors, spec)
    scored = score_groups(passes, groups, adapter, CERTIFICATE_TOKENS, ranks)
    passes.forget(adapter)
    return scored.logp


class LeadingTrainer:
    """On rank 0: what a train loop asks of a trainer, done by all ranks. On the lane."""

    def __init__(self, share: TrainerShare, orders: Orders, *, scores: bool = False) -> None:
        """`scores`: whether the ranks' shares score batches before they are trained."""
        self._share, self._orders = share, orders
        self.settings = share.trainer.settings
        """Those of the next batch."""
        self.scorer = LeadingScorer(self, share, orders) if scores else None

    def plan(self, batch: TrainingBatch) -> list[MicroBatch]:
        """As `Trainer.plan`; as many micro-batches as every rank has."""
        return self._orders.give(self._share.share_out(batch, self.settings))

    def accumulate(self, _: MicroBatch) -> None:
        """As `Trainer.accumulate`: the next micro-batch of every rank."""
        self._orders.give(Accumulate())

    def step(self) -> StepResult:
        """As `Trainer.step`."""
        return self._orders.give(Step())

    @property
    def peaks(self) -> list[int]:
        """As `TrainerShare.peaks`."""
        return self._share.peaks

    def take_back(self, directory: Path) -> None:
        """Load the state of a checkpoint, which all ranks can read."""
        self._orders.give(TakeBack(str(directory)))

    def prove(self, prompt: Sequence[int], target: Sequence[int]) -> tuple[list[float], list[float]]:
        """As the function `prove`, of an adapter."""
        return self._orders.give(AskProbe(tuple(prompt), tuple(target)))

    def score_version(
        self, directory: Path, groups: Sequence[RolloutGroup], shaken: bool
    ) -> list[list[np.ndarray | None]]:
        """As the function `score_version`, of an adapter."""
        return self._orders.give(AskVersion(str(directory), groups, shaken))

    def score_other(self, directory: Path, groups: Sequence[RolloutGroup]) -> list[list[np.ndarray | None]]:
        """The same on the base held the other way, a second copy (over ranks a share each) that is loaded at the first
        call."""
        return self._orders.give(AskOther(str(directory), groups))


class LeadingScorer:
    """On rank 0: a batch scored by all ranks before it is trained, under the settings that `lead` will train it with.
    On the lane."""

    def __init__(self, lead: LeadingTrainer, share: TrainerShare, orders: Orders) -> None:
        self._lead, self._share, self._orders = lead, share, orders

    def plan(self, groups: Sequence[RolloutGroup]) -> list[MicroBatch]:
        """As `BatchScorer.plan`; as many micro-batches as every rank has."""
        return self._orders.give(self._share.share_scores(groups, self._lead.settings))

    def score(self, _: MicroBatch) -> None:
        """As `BatchScorer.score`: the next micro-batch of every rank."""
        self._orders.give(ScoreNext())

    def scores(self) -> BatchScores:
        """As `BatchScorer.scores`, those of all ranks."""
        return self._orders.give(TellScores())
