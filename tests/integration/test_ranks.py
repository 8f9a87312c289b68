"""A mixture on 1, 2 and 4 ranks: one forward, one adapter, one checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import build_hf
from support.decoders import BF16, FP32, Walk, random_adapter, random_ids
from support.learning import SETTINGS
from support.ranks import on_ranks_of, outcomes
from support.training import random_batch
from tithe.advantages import AdvantagePlan, AdvantageRule, make_advantages
from tithe.arch import Shard, TensorGroup, account, checkpoint_base, read_checkpoint
from tithe.build.crew import WIRE
from tithe.engines import Here
from tithe.lora import LoraSpec
from tithe.losses import CorrectionSettings
from tithe.models import (
    ALONE,
    Decoder,
    IdlePass,
    ModelOptions,
    Orders,
    Ranks,
    Stop,
    load_model,
    on_ranks,
    serve,
    share_outer,
    stack_experts,
)
from tithe.orchestration import Learner, RunControl, UpdatePlan
from tithe.packing import MicroBatch
from tithe.trainer import (
    BatchScorer,
    CriticSettings,
    LeadingTrainer,
    ScoringPlan,
    StepResult,
    Trainer,
    TrainerSettings,
    TrainerShare,
)
from tithe.trainer.leading import Accumulate
from tithe.trainer.ranks import share_out
from tithe.types import RolloutGroup, TrainingBatch
from tithe.utils.wire import Wire, kinds_in

pytestmark = pytest.mark.integration

SPEC = LoraSpec(r=4, alpha=8)
RUN = replace(SETTINGS, micro_batch_tokens=70, kl_coef=0.01, lr=1e-3)
LAYERS, EXPERTS, TAKEN = 2, 4, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every matrix fill whole panels, so that what is held is what is stored."""
    folder = tmp_path_factory.mktemp("base") / "m"
    return build_hf(folder, "qwen3_moe", hidden_size=96, moe_intermediate_size=96)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in float32, where differences between ranks are those of summation alone."""
    return build_hf(tmp_path_factory.mktemp("exact") / "m", "qwen3_moe", dtype="float32")


def loaded(path: Path, options: ModelOptions, ranks: Ranks) -> Decoder:
    return on_ranks(load_model(read_checkpoint(path), options, ranks.shard), ranks)


def adapter_tensors(path: Path, options: ModelOptions, layout: str = "per_expert", seed: int = 5) -> dict[str, Tensor]:
    """On attention and on every expert."""
    tensors = stack_experts(random_adapter(loaded(path, options, ALONE), SPEC, seed=seed))
    return share_outer(tensors) if layout == "shared_outer" else tensors


def sampled(batch: TrainingBatch, seed: int, *, with_experts: bool) -> TrainingBatch:
    """Plausible log-probs, and experts as if a sampler had recorded them."""
    rng = np.random.default_rng(seed)

    def drawn(rows: int) -> np.ndarray:
        keys = rng.random((rows, LAYERS, EXPERTS))
        return np.sort(np.argsort(keys, axis=-1)[..., :TAKEN], axis=-1).astype(np.int32)

    groups = []
    for group in batch.groups:
        rollouts = []
        for one in group.rollouts:
            logp = rng.normal(-4.8, 0.2, len(one.token_ids)).astype(np.float32)
            experts = drawn(len(group.prompt_ids) + len(one.token_ids) - 1) if with_experts else None
            rollouts.append(replace(one, logp=logp, experts=experts))
        groups.append(replace(group, rollouts=tuple(rollouts)))
    return TrainingBatch(groups, batch.advantages, batch.serial)


BATCHES = [
    sampled(random_batch(seed=0), 0, with_experts=False),
    sampled(random_batch(((9, (6,)),), seed=1), 1, with_experts=False),  # one rank has rows, the others have none
    sampled(random_batch(seed=2), 2, with_experts=True),
]


def steps(learner: Trainer, batches: Sequence[TrainingBatch]) -> list[StepResult]:
    results = []
    for batch in batches:
        for micro in learner.plan(batch):
            learner.accumulate(micro)
        results.append(learner.step())
    return results


def trained(
    path: Path, settings: TrainerSettings, tensors: dict[str, Tensor], ranks: Ranks, batches: Sequence[TrainingBatch]
) -> tuple[Trainer, list[StepResult]]:
    learner = Trainer(loaded(path, FP32, ranks), SPEC, tensors, settings, ranks)
    return learner, steps(learner, batches)


def copied(learner: Trainer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in learner.state_tensors().items()}


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor], prefix: str) -> float:
    """The largest ‖mine − theirs‖ / ‖theirs‖ of tensors under a prefix, none of which is zero."""
    names = [name for name in theirs if name.startswith(prefix)]
    assert mine.keys() == theirs.keys()
    assert names
    assert all(theirs[n].norm() > 0 for n in names)
    return max(float((mine[n] - theirs[n]).norm() / theirs[n].norm()) for n in names)


# ------------------------------------------------------------------ forward


@pytest.mark.parametrize("size", [2, 4])
def test_forward_is_bitwise_that_of_one_rank(tmp_path: Path, base: Path, size: int):
    """Prompts of very different lengths under an adapter; the last rank has none, and still answers."""
    options = replace(BF16, quantize="int4")
    tensors = adapter_tensors(base, options)
    prompts = [random_ids(n, n) for n in (23, 1, 40)][: size - 1]
    decoder = loaded(base, options, ALONE)
    one = decoder.build_adapter(tensors, SPEC)
    alone = [Walk(decoder).prefill(0, ids, adapter=one) for ids in prompts]

    def work(ranks: Ranks) -> Tensor | None:
        own = loaded(base, options, ranks)
        adapter = own.build_adapter(tensors, SPEC)
        if ranks.rank == size - 1:
            IdlePass(own).forward(adapter)
            return None
        return Walk(own).prefill(0, prompts[ranks.rank], adapter=adapter)

    *found, idle = on_ranks_of(size, tmp_path, work)
    assert idle is None
    for mine, wanted in zip(found, alone, strict=True):
        assert mine is not None
        assert torch.equal(mine, wanted)


def test_ranks_sample_under_different_versions(tmp_path: Path, base: Path):
    """Rank 0 decodes rows of two versions and of the base, rank 1 of the newer version alone."""
    decoder = loaded(base, BF16, ALONE)
    versions = [adapter_tensors(base, BF16, seed=seed) for seed in (5, 6)]
    ids = random_ids(12, 3)

    def walked(own: Decoder, which: Sequence[int | None], rows: slice) -> Tensor:
        """Row r is the first token of sequence r, under version which[r]."""
        served = [own.build_adapter(tensors, SPEC) for tensors in versions]
        walk = Walk(own, sequences=16)
        serve(walk.plan, served)
        mine = list(range(12))[rows]
        segments, start = [], 0
        for version, group in itertools.groupby(mine, lambda r: which[r]):
            stop = start + len(list(group))
            segments.append((start, stop, None if version is None else served[version]))
            start = stop
        return walk.run([(r, 0, int(ids[r])) for r in mine], segments)

    which: list[int | None] = [0, 0, 0, None, None, 1, 1, 1, 1, 1, 1, 1]
    alone = torch.cat([walked(decoder, which, slice(r, r + 1)) for r in range(12)])

    def work(ranks: Ranks) -> Tensor:
        return walked(loaded(base, BF16, ranks), which, slice(0, 7) if ranks.rank == 0 else slice(7, 12))

    assert torch.equal(torch.cat(on_ranks_of(2, tmp_path, work)), alone)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_only_its_own_experts(base: Path, size: int):
    """What it holds less than one rank alone is, to the byte, what the planner says."""
    checkpoint = read_checkpoint(base)
    planned = account(checkpoint.spec, checkpoint_base(checkpoint), size)
    whole = load_model(checkpoint, BF16).resident_bytes()
    for rank in planned.ranks:
        decoder = load_model(checkpoint, BF16, Shard(rank.rank, size))
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for block in decoder.blocks()
            for t in block.routed.storages()
        }
        assert sum(storages.values()) == rank.groups[TensorGroup.ROUTED_EXPERTS].n_bytes
        assert whole - decoder.resident_bytes() == planned.total.n_bytes - rank.total.n_bytes > 0


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_batch_is_shared_out_once(size: int):
    (micros,) = share_out(BATCHES[0], RUN, 1).parts
    rows = sorted((int(g), int(r)) for m in micros for g, r in zip(m.seq_group, m.seq_rollout, strict=True))
    shares = share_out(BATCHES[0], RUN, size).parts
    assert len({len(share) for share in shares}) == 1
    assert rows == sorted(
        (int(g), int(r)) for share in shares for m in share for g, r in zip(m.seq_group, m.seq_rollout, strict=True)
    )
    assert max(m.n_rows for share in shares for m in share) <= 70


def test_a_rank_is_sent_its_own_part_of_a_batch_and_no_other(tmp_path: Path, exact: Path):
    """Rank 0 shares out what each would have planned, which is less than the batch once for every other rank."""
    tensors = adapter_tensors(exact, FP32)
    planned = share_out(BATCHES[2], RUN, 4)

    def work(ranks: Ranks) -> Any:
        orders = Orders(ranks, WIRE)
        share = TrainerShare(Trainer(loaded(exact, FP32, ranks), SPEC, tensors, RUN, ranks), orders)
        got: list[MicroBatch] = []
        orders.handle(Accumulate, lambda _: got.extend(share._left))
        if ranks.rank > 0:
            orders.follow()
            return got, ()
        order = share.share_out(BATCHES[2], RUN)
        orders.give(order)
        for one in (Accumulate(), Stop()):
            orders.give(one)
        return got, order.sizes

    found = on_ranks_of(4, tmp_path, work)
    for (got, _), wanted in zip(found, planned.parts, strict=True):
        assert len(got) == len(wanted) > 0
        for mine, theirs in zip(got, wanted, strict=True):
            for field in fields(theirs):
                one, two = getattr(mine, field.name), getattr(theirs, field.name)
                assert (one is None) == (two is None)
                assert one is None or (one.dtype == two.dtype and np.array_equal(one, two)), field.name
    sizes = found[0][1]
    assert sizes[0] == 0
    assert sum(sizes) < 3 * len(Wire(*kinds_in(TrainingBatch)).encode(BATCHES[2]))


def test_a_rank_is_sent_only_what_it_scores_and_tells_only_rank_0(tmp_path: Path, exact: Path):
    """With recorded experts, and with a rank that has no rows; the scores are those of one rank, bit for bit."""
    tensors, groups = adapter_tensors(exact, FP32), [rewarded(BATCHES[2]), rewarded(BATCHES[1])]
    plan = ScoringPlan(prox=True, reference=True)
    one = BatchScorer(Trainer(loaded(exact, FP32, ALONE), SPEC, tensors, RUN), plan)
    wanted = []
    for batch in groups:
        for micro in one.plan(batch):
            one.score(micro)
        wanted.append(one.scores())

    def work(ranks: Ranks) -> Any:
        own, orders = Trainer(loaded(exact, FP32, ranks), SPEC, tensors, RUN, ranks), Orders(ranks, WIRE)
        share = TrainerShare(own, orders, BatchScorer(own, plan))
        sent: list[int] = []
        take = ranks.broadcast
        ranks.broadcast = lambda data=b"", **given: sent.append(len(out := take(data, **given))) or out  # type: ignore[method-assign]
        if ranks.rank > 0:
            orders.follow()
            return max(sent), []
        lead = LeadingTrainer(share, orders, scores=True)
        assert lead.scorer is not None
        found = []
        for batch in groups:
            for micro in lead.scorer.plan(batch):
                lead.scorer.score(micro)
            found.append(lead.scorer.scores())
        orders.give(Stop())
        return max(sent), found

    (largest, found), *_ = on_ranks_of(4, tmp_path, work)
    assert largest < 2000, "an order carries no rollouts"
    for mine, theirs in zip(found, wanted, strict=True):
        for name in ("prox_logp", "ref_logp"):
            rows = zip(getattr(mine, name), getattr(theirs, name), strict=True)
            for a, b in ((a, b) for row, other in rows for a, b in zip(row, other, strict=True)):
                assert (a is None) == (b is None)
                assert a is None or np.array_equal(a, b)


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_the_adapter_of_one_rank(tmp_path: Path, exact: Path, size: int, layout: str):
    """Three steps, one of them with rows on one rank only, one with replayed experts. Relative differences by tensor:
    gradients below 1e-6 (3e-7 measured), masters after the third step below 2e-6 (4e-7 measured).
    """
    settings = replace(RUN, activation_checkpointing=layout == "shared_outer")
    tensors = adapter_tensors(exact, FP32, layout)
    first, _ = trained(exact, settings, tensors, ALONE, BATCHES[:1])
    alone, results = trained(exact, settings, tensors, ALONE, BATCHES)

    def work(ranks: Ranks) -> Any:
        learner, (result,) = trained(exact, settings, tensors, ranks, BATCHES[:1])
        early = copied(learner)
        return early, [result, *steps(learner, BATCHES[1:])], copied(learner)

    found = on_ranks_of(size, tmp_path, work)
    early, told, late = found[0]
    for other in found[1:]:
        assert all(torch.equal(other[2][name], late[name]) for name in late), "ranks hold different bits"
        assert [r.metrics["loss"] for r in other[1]] == [r.metrics["loss"] for r in told]
    assert difference(early, copied(first), "optimizer/exp_avg/") < 1e-6
    assert difference(late, copied(alone), "adapter/") < 2e-6
    for mine, wanted in zip(told, results, strict=True):
        assert mine.metrics.keys() == wanted.metrics.keys()
        for name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "entropy", "kl_mean", "clip_frac"):
            assert mine.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-7)
    assert 0 < told[2].metrics["router_agreement"] < 1


def test_a_packed_base_in_bf16_trains_alike(tmp_path: Path, base: Path):
    """Rounded operands have the same bits on any rank: only sums of gradients differ, below 1e-6 (9e-8
    measured).
    """
    options = replace(BF16, quantize="int4")
    tensors = adapter_tensors(base, options)

    def first_step(ranks: Ranks) -> dict[str, Tensor]:
        learner = Trainer(loaded(base, options, ranks), SPEC, tensors, RUN, ranks)
        steps(learner, BATCHES[:1])
        return copied(learner)

    alone = first_step(ALONE)
    for state in on_ranks_of(2, tmp_path, first_step):
        assert difference(state, alone, "optimizer/exp_avg/") < 1e-6


def test_a_dense_model_is_data_parallel(tmp_path: Path):
    """No exchange; a rank without rows has nothing to do until gradients are summed."""
    path = build_hf(tmp_path / "dense", "qwen3", dtype="float32")
    tensors = random_adapter(loaded(path, FP32, ALONE), SPEC)

    def work(ranks: Ranks) -> dict[str, Tensor]:
        return copied(trained(path, RUN, tensors, ranks, BATCHES[:2])[0])

    alone = work(ALONE)
    for state in on_ranks_of(2, tmp_path / "ranks", work):
        assert difference(state, alone, "adapter/") < 2e-6


def test_killed_on_four_ranks_resumed_on_two(tmp_path: Path, exact: Path):
    """A state is nobody's in particular: two ranks take it bit for bit and go on as four would have."""
    tensors = adapter_tensors(exact, FP32)

    def four(ranks: Ranks) -> Any:
        learner, _ = trained(exact, RUN, tensors, ranks, BATCHES[:2])
        at_two = copied(learner), learner.state()
        steps(learner, BATCHES[2:])
        return at_two, copied(learner)

    (saved, numbers), wanted = on_ranks_of(4, tmp_path / "four", four)[3]

    def two(ranks: Ranks) -> Any:
        other = adapter_tensors(exact, FP32, seed=8)
        learner = Trainer(loaded(exact, FP32, ranks), SPEC, other, RUN, ranks)
        learner.load_state(saved, numbers)
        at_two = copied(learner)
        steps(learner, BATCHES[2:])
        return at_two, copied(learner), learner.state()

    for at_two, late, state in on_ranks_of(2, tmp_path / "two", two):
        assert all(torch.equal(at_two[name], saved[name]) for name in saved)
        assert difference(late, wanted, "adapter/") < 2e-6
        assert state == {"optimizer_step": 3, "adam_step": 3}


def test_all_ranks_skip_a_step_that_is_not_finite_on_one(tmp_path: Path, exact: Path):
    tensors = adapter_tensors(exact, FP32)
    broken = [list(group) for group in BATCHES[0].advantages]
    broken[2][0] = np.full_like(broken[2][0], np.nan)
    batch = replace(BATCHES[0], advantages=broken)

    def work(ranks: Ranks) -> Any:
        learner, (result,) = trained(exact, RUN, tensors, ranks, [batch])
        return result.skipped, copied(learner)

    for skipped, state in on_ranks_of(4, tmp_path, work):
        assert skipped
        assert all(torch.equal(state[f"adapter/{name}"], t) for name, t in tensors.items())


def test_ranks_that_were_given_different_batches_are_told(tmp_path: Path, exact: Path):
    """Moments that differ on one rank give other masters, which the step notices on all."""
    tensors = adapter_tensors(exact, FP32)

    def work(ranks: Ranks) -> None:
        own = {name: t + 1e-6 * ranks.rank for name, t in tensors.items()}
        trained(exact, RUN, own, ranks, BATCHES[:1])

    assert all("ranks hold different adapters" in text for _, text in outcomes(2, tmp_path, work))


# ------------------------------------------------------------------ scored beforehand, several steps, a critic

MIS = CorrectionSettings("mis", "geometric", low=0.4, high=1.3)
ADVANCED = {
    "ppo": (
        replace(RUN, algorithm="ppo", critic=CriticSettings(warmup_steps=1), kl_placement="reward", reference_every=2),
        ScoringPlan(prox=True, reference=True, value=True),
        AdvantagePlan(AdvantageRule("gae", "batch", lam=0.9), kl_in_reward=True),
    ),
    "mis": (
        replace(RUN, reference_every=1, loss=replace(RUN.loss, correction=MIS), activation_checkpointing=True),
        ScoringPlan(prox=True, rejection=MIS),
        AdvantagePlan(AdvantageRule(scale="none")),
    ),
}


def rewarded(batch: TrainingBatch) -> list[RolloutGroup]:
    return [
        replace(
            group,
            rollouts=tuple(
                replace(one, reward=float(one.sample % 2), logp_behaviour=one.logp) for one in group.rollouts
            ),
        )
        for group in batch.groups
    ]


def led(path: Path, name: str, ranks: Ranks) -> tuple[dict[str, Tensor], list[StepResult]]:
    """Two batches by orders, the second with rows on one rank only; each is scored, then trained twice."""
    settings, scoring, plan = ADVANCED[name]
    critic = adapter_tensors(path, FP32, seed=9) if settings.critic is not None else None
    own = Trainer(
        loaded(path, FP32, ranks), SPEC, adapter_tensors(path, FP32), replace(settings, ppo_epochs=2), ranks,
        critic=critic,
    )  # fmt: skip
    orders = Orders(ranks, WIRE)
    share = TrainerShare(own, orders, BatchScorer(own, scoring))
    if ranks.rank > 0:
        orders.follow()
        return copied(own), []
    lead = LeadingTrainer(share, orders, scores=True)
    learner = Learner(
        trainer=lead,
        lane=Here(),
        advantages=lambda groups, scores, whole: make_advantages(groups, plan, scores, whole),
        control=RunControl(),
        update=UpdatePlan(ppo_epochs=2),
        scorer=lead.scorer,
    )
    results = [learner.learn(rewarded(batch), serial) for serial, batch in enumerate(BATCHES[:2])]
    orders.give(Stop())
    return copied(own), [result for result in results if result is not None]


@pytest.mark.parametrize("name", sorted(ADVANCED))
def test_what_is_scored_beforehand_trains_the_same_on_two_ranks(tmp_path: Path, exact: Path, name: str):
    """Adapter, critic, optimizer and moving reference after four steps, and what every batch tells of them."""
    wanted, told = led(exact, name, ALONE)
    (state, results), (other, _) = on_ranks_of(2, tmp_path, lambda ranks: led(exact, name, ranks))
    assert state.keys() == other.keys() == wanted.keys()
    assert all(torch.equal(other[n], t) for n, t in state.items()), "ranks hold different bits"
    for prefix in ("adapter/", "reference/", *(["critic/model/"] if name == "ppo" else [])):
        assert difference(state, wanted, prefix) < 5e-6, prefix
    for mine, alone in zip(results, told, strict=True):
        assert mine.metrics.keys() - {"rank_peak_bytes"} == alone.metrics.keys()
        for key in alone.metrics.keys() - {"train_compute_s", "critic_compute_s"}:
            assert mine.metrics[key] == pytest.approx(alone.metrics[key], rel=1e-3, abs=1e-6), key
    seen = [result.metrics for result in results]
    if name == "ppo":
        assert seen[0]["value_loss"] > 0
        assert seen[1]["kl_mean"] > 0, "the reference is two steps behind"
    else:
        assert seen[0]["rejected_rollouts"] == 3, "of seven, with ratios from 0.28 to 1.41"
