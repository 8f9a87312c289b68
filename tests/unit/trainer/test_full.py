"""Training every parameter: the gradient is autograd's through transformers, the state comes back, ranks agree."""

from __future__ import annotations

import errno
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.checkpoints import build_hf
from support.decoders import BF16, random_ids, transformers_twin
from support.learning import SETTINGS, batch, group, rollout, snapshot, train
from tithe.arch import read_checkpoint
from tithe.errors import ResumeError
from tithe.losses import Aggregation, LossSettings
from tithe.models import load_model
from tithe.packing import plan_micro_batches
from tithe.trainer import FullTrainer, TrainerSettings
from tithe.trainer.full_model import unpack
from tithe.types import TrainingBatch

N_TOKENS = 116
EXACT = replace(SETTINGS, lr=1e-3, betas=(0.0, 0.95), max_grad_norm=1e30)
"""No memory of earlier steps: Adam's first moment is the gradient itself."""
OBJECTIVES = {
    "plain": EXACT,
    "kl": replace(EXACT, kl_coef=0.3, loss=LossSettings(Aggregation.SEQ_MEAN_TOKEN_MEAN, kl_coef=0.3)),
    "entropy": replace(EXACT, loss=LossSettings(Aggregation.SEQ_MEAN_TOKEN_SUM, entropy_coef=0.05)),
    "checkpointed": replace(EXACT, activation_checkpointing=True),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, its head untied: a tied random one mostly repeats its input."""
    return build_hf(tmp_path_factory.mktemp("full") / "m", "llama", dtype="float32", tie_word_embeddings=False)


def unequal() -> TrainingBatch:
    """Prompts and answers of unequal length, masked tokens, a one-token answer, two temperatures."""
    groups = []
    for g, (prompt, lengths, temperature) in enumerate([(9, (6, 1, 4), 1.0), (3, (2, 7), 0.7)]):
        rows = []
        for s, n in enumerate(lengths):
            logp = -4.5 - 0.3 * np.random.default_rng(10 * g + s).random(n)
            mask = [i % 4 != 2 for i in range(n)]
            ids = random_ids(n, 10 * g + s).tolist()
            rows.append(rollout(ids, sample=s, logp=logp.tolist(), mask=mask, temperature=temperature))
        groups.append(group(random_ids(prompt, 50 + g), rows, g))
    return batch(groups, [[1.0, -0.5, 0.25], [-1.5, 0.75]])


def by_hand(
    path: Path, what: TrainingBatch, s: TrainerSettings, weights: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by autograd, one whole sequence at a time."""
    model: Any = transformers_twin(path)
    frozen: Any = transformers_twin(path)
    model.load_state_dict(weights)
    model.requires_grad_(requires_grad=True)
    n_tokens = sum(int(r.loss_mask.sum()) for g in what.groups for r in g.rollouts)
    n_seqs = sum(len(g.rollouts) for g in what.groups)
    total = torch.zeros(())
    for g, row in zip(what.groups, what.advantages, strict=True):
        for r, advantage in zip(g.rollouts, row, strict=True):
            ids = torch.tensor([[*g.prompt_ids.tolist(), *r.token_ids.tolist()]])
            start, targets = len(g.prompt_ids), torch.from_numpy(r.token_ids).long()[:, None]

            def logs(m: Any, ids: Tensor = ids, start: int = start, t: float = r.temperature) -> Tensor:
                return (m(input_ids=ids).logits[0, start - 1 : -1, :N_TOKENS].float() / t).log_softmax(-1)

            full = logs(model)
            p = full.gather(1, targets)[:, 0]
            q = logs(frozen).detach().gather(1, targets)[:, 0]
            assert advantage is not None
            a = torch.from_numpy(advantage)
            ratio = torch.exp(p - torch.from_numpy(r.logp))
            token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            token = token + s.loss.kl_coef * (torch.exp(q - p) - (q - p) - 1)
            token = token + s.loss.entropy_coef * (full.exp() * full).sum(-1)
            summed = token[torch.from_numpy(r.loss_mask)].sum()
            if s.loss.aggregation is Aggregation.TOKEN_MEAN:
                total = total + summed / n_tokens
            elif s.loss.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM:
                total = total + summed / n_seqs
            else:
                total = total + summed / int(r.loss_mask.sum()) / n_seqs
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters()}


def moments(trainer: FullTrainer) -> dict[str, Tensor]:
    prefix = "optimizer/exp_avg/"
    return {n.removeprefix(prefix): t for n, t in trainer.state_tensors().items() if n.startswith(prefix)}


def weights(trainer: FullTrainer) -> dict[str, Tensor]:
    return {n.removeprefix("model/"): t.clone() for n, t in trainer.state_tensors().items() if n.startswith("model/")}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("budget", [16, 1000])
def test_loss_and_gradient_of_a_step_are_autograds(llama: Path, name: str, budget: int) -> None:
    settings = replace(OBJECTIVES[name], micro_batch_tokens=budget)
    trainer = FullTrainer(llama, N_TOKENS, settings, dtype=torch.float32)
    train(trainer, unequal())  # the policy is no longer its reference
    loss, wanted = by_hand(llama, unequal(), settings, weights(trainer))
    result = train(trainer, unequal())
    assert not result.skipped
    assert (result.metrics.get("kl_mean", 0.0) > 1e-4) == (name == "kl")
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
    got = moments(trainer)
    assert got.keys() == wanted.keys()
    whole = torch.cat([g.flatten() for g in wanted.values()]).norm()
    assert whole > 0.1
    assert max(float((got[n] - wanted[n]).norm() / whole) for n in wanted) < 1e-5


def test_a_mixture_learns_its_experts_and_routers(tmp_path: Path) -> None:
    """Through the routing weights, too; the choice has no gradient. Experts lie stacked in training, one by one in the
    file."""
    base = build_hf(tmp_path / "moe", "qwen3_moe", dtype="float32")
    trainer = FullTrainer(base, N_TOKENS, EXACT, dtype=torch.float32)
    loss, wanted = by_hand(base, unequal(), EXACT, weights(trainer))
    assert train(trainer, unequal()).metrics["loss"] == pytest.approx(loss, abs=1e-5)
    got = moments(trainer)
    assert got.keys() == wanted.keys()
    whole = torch.cat([g.flatten() for g in wanted.values()]).norm()
    assert max(float((got[n] - wanted[n]).norm() / whole) for n in wanted) < 1e-5
    for part in ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        assert float(got[f"model.layers.0.{part}"].norm() / whole) > 1e-3
    target = tmp_path / "published"
    target.mkdir()
    trainer.write(target)
    published, before = load_file(target / "model.safetensors"), load_file(base / "model.safetensors")
    assert {n: t.shape for n, t in published.items()} == {n: t.shape for n, t in before.items()}
    stacked = weights(trainer)["model.layers.1.mlp.experts.down_proj"]
    for expert, weight in enumerate(stacked):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(published[name], weight)
        assert not torch.equal(published[name], before[name])


def test_what_is_trained_in_bf16_is_the_rounded_master_and_what_is_published_loads_everywhere(
    tmp_path: Path,
) -> None:
    """A tied head, too: one file, the same log-probs in transformers and, up to rounding, in the engine's decoder."""
    base = build_hf(tmp_path / "tied", "llama")
    trainer = FullTrainer(base, N_TOKENS, replace(EXACT, lr=1e-2))
    before = weights(trainer)
    answers = [[7, 8, 40, 12], [60, 61]]
    drafts = [group([5, 9, 33], [rollout(ids, sample=s) for s, ids in enumerate(answers)])]
    own = [logp.tolist() for logp in trainer.score(drafts)[0] if logp is not None]
    rows = [rollout(ids, sample=s, logp=logp) for s, (ids, logp) in enumerate(zip(answers, own, strict=True))]
    groups = [group([5, 9, 33], rows)]
    train(trainer, batch(groups, [[1.0, -1.0]]))
    after = weights(trainer)
    assert any(not torch.equal(before[n], after[n]) for n in after)
    assert all(t.dtype is torch.float32 for t in after.values())
    target = tmp_path / "published"
    target.mkdir()
    trainer.write(target)
    logp = trainer.score(groups)[0]
    again = trainer.score(groups, trainer.load_version(target))[0]
    assert all(a is not None and b is not None and np.array_equal(a, b) for a, b in zip(logp, again, strict=True))
    twin = transformers_twin(target)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, after[name].bfloat16().float()), name
    decoder = load_model(read_checkpoint(target), BF16)
    assert torch.equal(decoder.final_norm, after["model.norm.weight"].bfloat16().float())
    assert {p.name for p in target.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_state_comes_back_bit_for_bit_and_a_wrong_one_is_refused(llama: Path) -> None:
    settings = replace(SETTINGS, lr=1e-3)
    one = FullTrainer(llama, N_TOKENS, settings)
    train(one, unequal())
    tensors, state = snapshot(one.state_tensors()), one.state()
    two = FullTrainer(llama, N_TOKENS, settings)
    two.load_state(tensors, state)
    for trainer in (one, two):
        train(trainer, unequal())
    assert all(torch.equal(t, two.state_tensors()[n]) for n, t in one.state_tensors().items())
    assert one.state() == two.state() == {"optimizer_step": 2, "adam_step": 2}
    del tensors["optimizer/exp_avg/lm_head.weight"]
    with pytest.raises(ResumeError, match=r"optimizer/exp_avg/lm_head\.weight"):
        two.load_state(tensors, state)


def test_a_step_that_is_no_number_changes_nothing(llama: Path) -> None:
    trainer = FullTrainer(llama, N_TOKENS, EXACT)
    before = snapshot(trainer.state_tensors())
    groups = [group([5, 9], [rollout([7, 8]), rollout([60], sample=1)])]
    assert train(trainer, batch(groups, [[float("nan"), 1.0]])).skipped
    assert all(torch.equal(t, before[n]) for n, t in trainer.state_tensors().items())


def test_a_packed_micro_batch_becomes_whole_sequences() -> None:
    groups = [group([4, 5], [rollout([7, 8, 2]), rollout([9], sample=1, temperature=0.0)])]
    (micro,) = plan_micro_batches(batch(groups, [[1.0, 1.0]]), 100)
    ids, places, targets, temperature = unpack(micro)
    assert ids.tolist() == [[4, 5, 7, 8], [4, 5, 0, 0]]
    assert places.tolist() == [1, 2, 3, 5]
    assert targets.tolist() == [7, 8, 2, 9]
    assert temperature.tolist() == [1, 1, 1, 1]


def test_a_model_that_the_disk_refuses_is_an_os_error(llama: Path, tmp_path: Path) -> None:
    """safetensors says it in its own words; publishing explains the system's."""
    trainer, target = FullTrainer(llama, N_TOKENS, EXACT), tmp_path / "published"
    target.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            trainer.write(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG


def test_what_the_model_did_not_write_has_no_log_probs(llama: Path) -> None:
    trainer = FullTrainer(llama, N_TOKENS, EXACT)
    told = rollout([7, 8], sample=1, mask=[False, False])
    (scored,) = trainer.score([group([5, 9], [rollout([7, 8]), told])])
    assert scored[0] is not None
    assert np.all(scored[0] < 0)
    assert scored[1] is None
