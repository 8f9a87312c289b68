"""Versions side by side, one after another, refused, dropped; and what a publication does to requests that run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from support.decoders import FP32, WIDE, random_adapter, random_ids, tiny_decoder
from support.learning import SETTINGS, SPEC, WAIT_S, Forgetful, Rig, request, same
from tithe.errors import AdapterError, EngineError, PublishRefused
from tithe.lora import LoraSpec
from tithe.trainer import Trainer
from tithe.types import Completion, PolicyVersion
from tithe.weight_sync import load_published, manifest_fields, read_manifest

PROMPT = tuple(range(20, 41))


def serials(answer: Completion) -> set[int]:
    return set(answer.serials.tolist())


# ------------------------------------------------------------------ several at once


def test_rows_of_several_versions_in_one_batch_are_those_of_engines_with_one(rigs) -> None:
    many = rigs()
    names: list[str | None] = [None, *(many.publish_random(seed) for seed in (1, 2, 3))]
    asked = [(i, request(random_ids(9 + i, i), group=i, adapter=names[i % 4], max_new_tokens=10)) for i in range(8)]
    asked.append((8, request(random_ids(9, 0), group=0, adapter=names[2], max_new_tokens=10)))  # version 0's prompt
    mixed = many.answers([r for _, r in asked])
    for version, name in enumerate(names):
        single = rigs()
        if name is not None:
            single.publish_random(version)
        for (_, r), answer in zip(asked, mixed, strict=True):
            if r.adapter == name and name is not None:
                assert same(answer, single.answer(request(r.prompt_ids, group=r.params.group, max_new_tokens=10)))
    assert [serials(a) for a in mixed[:4]] == [{2}, {0}, {1}, {2}], "no name: what is served; else the one asked for"


def test_adapters_of_different_ranks_and_targets_share_a_batch(rigs, decoder) -> None:
    """Wider adapters replace the buffer that narrower ones were bound to."""
    specs = [LoraSpec(2, 4, 0.0, ("q_proj",)), LoraSpec(13, 20), LoraSpec(5, 4, 0.0, ("down_proj", "v_proj"))]

    def publish(rig: Rig, i: int) -> str:
        rig.trainer = Trainer(decoder, specs[i], random_adapter(decoder, specs[i], i, 0.2), SETTINGS)
        return rig.publish()

    many = rigs()
    names = [publish(many, i) for i in range(3)]
    asked = [request(random_ids(8, i), group=i, adapter=names[i % 3]) for i in (0, 1, 2, 3, 4, 5)]
    mixed = many.answers(asked)
    for i in range(3):
        single = rigs()
        publish(single, i)
        own = single.answers([request(r.prompt_ids, group=r.params.group) for r in asked[i::3]])
        assert all(same(a, b) for a, b in zip(mixed[i::3], own, strict=True))


def test_too_many_live_versions_are_refused_with_the_key(rigs) -> None:
    rig = rigs(max_live_versions=2)
    first = rig.publish_random(1)
    rig.publish_random(2)
    path = rig.write(random_adapter(rig.decoder, SPEC, 3))
    with pytest.raises(EngineError, match=r"2 versions are live, engine\.max_live_versions is 2"):
        rig.engine.load_adapter(path)
    assert serials(rig.answer(request(PROMPT))) == {1}, "the old one keeps serving"
    rig.engine.drop_adapter(first)
    assert rig.engine.load_adapter(path) == path.name


def test_a_dropped_version_finishes_its_requests_and_then_leaves_nothing_behind(rigs) -> None:
    rig = rigs()
    old = rig.publish_random(1)
    alone = rig.answers([request(PROMPT, group=1, max_new_tokens=10)])[0]
    running = rig.engine.submit(request(PROMPT, group=1, adapter=old, max_new_tokens=10))
    rig.tick(3)
    waiting = [rig.engine.submit(request(PROMPT, group=g, adapter=old, max_new_tokens=10)) for g in range(2, 12)]
    rig.publish_random(2)
    rig.engine.drop_adapter(old)
    with pytest.raises(EngineError, match="is not live"):
        rig.engine.submit(request(PROMPT, adapter=old)).result(0)
    assert rig.engine.stats()["live_versions"] == 2, "still held"
    assert len(rig.engine._plan._adapters) == 2
    rig.engine.cancel(11)
    rig.lane.settle()
    assert same(running.result(0), alone)
    assert {s for f in waiting for s in serials(f.result(0))} == {0}
    assert rig.engine.stats()["live_versions"] == 1
    assert len(rig.engine._plan._adapters) == 1, "its launches are gone"
    assert all(key[0] != old for key in rig.engine._cache._prompts), "its prompts are gone"


def test_the_served_version_cannot_be_dropped_and_unknown_names_are_nobodys(rig) -> None:
    name = rig.publish_random(1)
    rig.engine.drop_adapter(name)
    rig.engine.drop_adapter("nobody")
    assert serials(rig.answer(request(PROMPT, adapter=name))) == {0}


def test_loading_a_live_version_again_holds_it_once(rig) -> None:
    path = rig.write(random_adapter(rig.decoder, SPEC, 1))
    assert rig.engine.load_adapter(path) == rig.engine.load_adapter(path)
    assert rig.engine.stats()["live_versions"] == 1
    assert len(rig.engine._plan._adapters) == 1


# ------------------------------------------------------------------ D01: nothing outlives its version


def test_a_prompt_of_the_version_before_is_not_read_under_the_next(rigs) -> None:
    rig = rigs()
    rig.publish_random(1)
    before = rig.answer(request(PROMPT))
    prefilled = rig.engine.stats()["prefill_tok"]
    rig.publish_random(2)
    probed = rig.engine.stats()["prefill_tok"]
    after = rig.answer(request(PROMPT))
    assert rig.engine.stats()["prefill_tok"] == probed + len(PROMPT) > prefilled
    fresh = rigs()
    fresh.serial = 1
    fresh.publish_random(2)
    assert same(after, fresh.answer(request(PROMPT)))
    assert not same(after, before)


@pytest.mark.parametrize("mode", ["bf16", "wide"])
def test_sampler_and_trainer_agree_to_the_bit_update_after_update(tmp_path, decoder, mode) -> None:
    base = decoder if mode == "bf16" else tiny_decoder(tmp_path / "m", "qwen3", WIDE)
    with Rig(base, tmp_path) as rig:
        prompts = [random_ids(5 + 6 * i, i) for i in range(3)]
        moved, previous = 0.0, ""
        for step in range(20 if mode == "bf16" else 6):
            name = rig.publish()
            rig.engine.drop_adapter(previous)
            previous = name
            result = rig.learn(rig.rollouts(prompts, 4, first_group=3 * step, temperature=0.8))
            assert result.metrics["ratio_max"] == result.metrics["ratio_mean"] == 1.0
            assert result.metrics["approx_kl"] == 0.0
            moved += result.metrics["grad_norm"]
        assert moved > 0
        assert rig.engine.stats()["live_versions"] == 1


# ------------------------------------------------------------------ refused publications


def keeps_serving(rig: Rig, broken: Callable[[], Path], error: type[Exception], said: str) -> None:
    rig.publish_random(1)
    before, held = rig.answer(request(PROMPT)), rig.engine.stats()
    path = broken()
    with pytest.raises(error, match=said):
        rig.engine.load_adapter(path)
    assert same(rig.answer(request(PROMPT)), before)
    after = rig.engine.stats()
    assert after["live_versions"] == held["live_versions"]
    assert len(rig.engine._plan._adapters) == 1
    assert {key[0] for key in rig.engine._cache._prompts} <= {"", *rig.engine._live}


def test_a_torn_file_is_refused(rig) -> None:
    def torn() -> Path:
        path = rig.write(random_adapter(rig.decoder, SPEC, 2))
        file = path / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        return path

    keeps_serving(rig, torn, AdapterError, "were published")


def test_changed_bytes_are_refused(rig) -> None:
    def changed() -> Path:
        path = rig.write(random_adapter(rig.decoder, SPEC, 2))
        file = path / "adapter_model.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        return path

    keeps_serving(rig, changed, AdapterError, "checksum")


def renamed(rig: Rig, old: str, new: str) -> Path:
    """A version whose tensors go under other names, its checksums right: only names can give it away."""
    published, tensors, _ = load_published(rig.write(random_adapter(rig.decoder, SPEC, 2)))
    other = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert other.keys() != tensors.keys()
    version = PolicyVersion(0, rig.serial)
    fields = manifest_fields(
        lora=SPEC,  # all-linear: what it names depends on the model that reads it
        parent=published.parent,
        optimizer_step=published.optimizer_step,
        base_checksum=published.base_checksum,
        numeric_mode=published.numeric_mode,
        probe=published.probe,
    )
    return rig.channel.publish(version, other, fields)


@pytest.mark.parametrize(
    ("old", "new"),
    [("base_model.model.", "base_model.model.base_model.model."), ("layers.1.mlp.down_proj", "layers.1.mlp.odd_proj")],
)
def test_tensor_names_that_fit_no_linear_are_refused_by_name(rig, old, new) -> None:
    """D03: one prefix too many, or a single unknown module."""
    keeps_serving(rig, lambda: renamed(rig, old, new), AdapterError, new.rstrip("."))


def test_a_delta_that_got_lost_is_refused(rig) -> None:
    """The probe speaks of a policy that moved; the tensors that arrived are the bare base's."""

    def lost() -> Path:
        honest = random_adapter(rig.decoder, SPEC, 2)
        zero = {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in honest.items()}
        return rig.write(zero, probe=read_manifest(rig.write(honest)).probe)

    keeps_serving(rig, lost, PublishRefused, "zero_delta")


def test_the_tensors_of_the_version_before_are_refused(rig) -> None:
    def stale() -> Path:
        probe = read_manifest(rig.write(random_adapter(rig.decoder, SPEC, 2, 0.2))).probe
        return rig.write(random_adapter(rig.decoder, SPEC, 1, 0.2), probe=probe)

    keeps_serving(rig, stale, PublishRefused, "stale")


def test_a_version_of_another_base_or_numeric_mode_is_refused(rigs, decoder) -> None:
    rig = rigs()
    tensors = random_adapter(decoder, SPEC, 2)
    keeps_serving(rig, lambda: rig.write(tensors, base_checksum="0" * 64), AdapterError, r"another base.*model\.path")
    other = FP32.numeric_mode
    said = r"base=fp32.*model\.base_dtype and model\.compute_dtype"
    with pytest.raises(AdapterError, match=said):
        rig.engine.load_adapter(rig.write(tensors, numeric_mode=other))
    assert serials(rig.answer(request(PROMPT))) == {0}


def test_a_cache_that_outlives_its_version_is_caught_by_the_probe(rigs, monkeypatch) -> None:
    monkeypatch.setattr("tithe.engines.shared.PromptCache", Forgetful)
    rig = rigs()
    rig.publish_random(1)
    before = rig.answer(request(PROMPT))
    with pytest.raises(PublishRefused, match=r"mismatch|stale"):
        rig.publish_random(2)
    assert same(rig.answer(request(PROMPT)), before)
    assert serials(rig.answer(request(PROMPT, group=5))) == {0}


def test_a_small_update_over_a_stale_prompt_is_caught_too(tmp_path, decoder, monkeypatch) -> None:
    monkeypatch.setattr("tithe.engines.shared.PromptCache", Forgetful)
    with Rig(decoder, tmp_path) as rig:
        rig.publish()
        rig.learn(rig.rollouts([PROMPT, PROMPT[:7]], 6, max_new_tokens=6))
        with pytest.raises(PublishRefused):
            rig.publish()


def test_a_probe_the_engine_cannot_hold_is_an_error_and_leaves_no_trace(rigs) -> None:
    rig = rigs(kv_bytes=1)
    assert rig.engine.stats()["kv_pages"] == 1, "there is always one page"
    with pytest.raises(EngineError, match=r"engine\.kv_memory_mib"):
        rig.publish_random(2)
    assert rig.engine.stats()["live_versions"] == 0
    assert rig.engine._plan._adapters == {}


def test_pages_that_an_overflowing_version_wrote_do_not_spoil_later_requests(rigs, decoder) -> None:
    """NaN lies in the free pages; nothing may read what it has not written."""
    rig = rigs()
    good = rig.write(random_adapter(decoder, SPEC, 1, 0.2))
    rig.engine.load_adapter(good)
    enormous = {name: tensor * 1e25 for name, tensor in random_adapter(decoder, SPEC, 2).items()}
    with pytest.raises(PublishRefused, match="not finite"):
        rig.engine.load_adapter(rig.write(enormous, probe=read_manifest(good).probe))
    assert torch.isnan(rig.engine.pages.keys).any()
    fresh = rigs()
    fresh.publish_random(1)
    asked = [request(random_ids(1 + i % 5, i), group=i, max_new_tokens=1 + i % 4) for i in range(20)]
    assert all(same(a, b) for a, b in zip(rig.answers(asked), fresh.answers(asked), strict=True))


def test_what_is_drawn_while_a_version_is_being_proved_belongs_to_the_one_before(rigs, monkeypatch) -> None:
    """D13: the tag moves when the engine has confirmed, not when the files are there."""
    rig = rigs(threaded=True)
    rig.publish_random(1)
    path = rig.write(random_adapter(rig.decoder, SPEC, 2))
    original = rig.engine._prove_and_serve
    seen: list[set[int]] = []

    def prove(*arguments):
        future = rig.engine.submit(request(PROMPT, group=4))
        while not future.done():
            rig.engine.tick()
        seen.append(serials(future.result(0)))
        original(*arguments)

    monkeypatch.setattr(rig.engine, "_prove_and_serve", prove)
    rig.engine.load_adapter(path)
    assert seen == [{0}]
    assert serials(rig.answer(request(PROMPT, group=4))) == {1}


# ------------------------------------------------------------------ on_publish


def published_midway(rigs, policy: str, ticks: int = 6) -> tuple[Rig, list[Completion], int]:
    """Four requests without a name, two of them still waiting, when version 1 is served."""
    rig = rigs(on_publish=policy, max_running=2)
    rig.publish_random(1)
    futures = [rig.engine.submit(request(PROMPT, group=g, max_new_tokens=14)) for g in range(4)]
    rig.tick(ticks)
    drawn = len(rig.engine._running[0].tokens)
    rig.publish_random(2)
    rig.lane.settle()
    return rig, [f.result(0) for f in futures], drawn


def test_finish_ends_a_request_on_the_version_it_was_submitted_under(rigs) -> None:
    _, answers, drawn = published_midway(rigs, "finish")
    assert 0 < drawn < 14
    only = rigs()
    only.publish_random(1)
    for g, answer in enumerate(answers):
        assert serials(answer) == {0}
        assert same(answer, only.answer(request(PROMPT, group=g, max_new_tokens=14)))


def test_recompute_goes_on_exactly_as_if_the_new_version_had_read_everything(rigs) -> None:
    rig, answers, drawn = published_midway(rigs, "recompute")
    for g, answer in enumerate(answers):
        old = drawn if g < 2 else 0
        assert answer.serials.tolist() == [0] * old + [1] * (14 - old)
        ids = answer.token_ids.tolist()
        fresh = rig.engine.score(None, PROMPT, ids)
        assert answer.logp[old:].tolist() == fresh[old:], "keys and values of the new version alone"
    first = rigs()
    first.publish_random(1)
    assert (
        answers[0].token_ids[:drawn].tolist()
        == first.answer(request(PROMPT, group=0, max_new_tokens=drawn)).token_ids.tolist()
    )


def test_keep_goes_on_over_the_old_keys_and_values(rigs) -> None:
    rig, answers, drawn = published_midway(rigs, "keep")
    for g, answer in enumerate(answers):
        old = drawn if g < 2 else 0
        assert answer.serials.tolist() == [0] * old + [1] * (14 - old)
    fresh = rig.engine.score(None, PROMPT, answers[0].token_ids.tolist())
    assert answers[0].logp[drawn:].tolist() != fresh[drawn:], "which no single version would give"
    fresh = rig.engine.score(None, PROMPT, answers[2].token_ids.tolist())
    assert answers[2].logp.tolist() == fresh, "what had not begun is all new"


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_request_that_names_its_version_never_changes_it(rigs, policy) -> None:
    rig = rigs(on_publish=policy)
    name = rig.publish_random(1)
    bound = rig.engine.submit(request(PROMPT, adapter=name, max_new_tokens=12))
    rig.tick(5)
    rig.publish_random(2)
    rig.lane.settle()
    assert serials(bound.result(0)) == {0}


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_the_version_before_leaves_nothing_behind_once_dropped(rigs, policy) -> None:
    rig, _, _ = published_midway(rigs, policy)
    old = next(name for name, v in rig.engine._live.items() if v.serial == 0)
    rig.engine.drop_adapter(old)
    assert rig.engine.stats()["live_versions"] == 1
    assert len(rig.engine._plan._adapters) == 1
    rig.answers([request(random_ids(200, g), group=g) for g in range(40)])  # idle prompts give way
    free = rig.engine._cache.allocator.free + sum(len(p.pages) for p in rig.engine._cache._prompts.values())
    assert free == rig.engine.pages.pages


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_prompt_that_is_half_read_begins_again_under_the_new_version(rigs, policy) -> None:
    rig = rigs(on_publish=policy, prefill_tokens=8, max_running=1)
    rig.publish_random(1)
    future = rig.engine.submit(request(PROMPT, max_new_tokens=6))
    rig.tick(1)
    rig.publish_random(2)
    rig.lane.settle()
    assert serials(future.result(0)) == {1}
    assert future.result(0).logp.tolist() == rig.engine.score(None, PROMPT, future.result(0).token_ids.tolist())


def test_versions_may_be_published_while_others_sample(rigs) -> None:
    """A real lane under load: answers keep coming, each wholly of one version."""
    rig = rigs(threaded=True, max_live_versions=3)
    previous = rig.publish_random(0)
    futures = []
    for seed in range(1, 5):
        futures += [rig.engine.submit(request(PROMPT, group=10 * seed + g, max_new_tokens=16)) for g in range(6)]
        name = rig.publish_random(seed)
        rig.engine.drop_adapter(previous)
        previous = name
    answers = [f.result(WAIT_S) for f in futures]
    assert all(len(serials(a)) == 1 for a in answers)
    assert rig.engine.drain(WAIT_S)
    rig.lane.call(lambda: None)
    assert rig.engine.stats()["live_versions"] == 1
    for seed in range(1, 5):
        single = rigs()
        single.publish_random(seed - 1)
        own = single.answer(request(PROMPT, group=10 * seed, max_new_tokens=16))
        assert np.array_equal(own.token_ids, answers[6 * (seed - 1)].token_ids)
