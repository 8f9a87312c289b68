import math

import pytest

from tithe.errors import PublishRefused
from tithe.weight_sync import Probe, ProbeCause, compare_probe

OLD, NEW, BASE = (-0.6, -1.5, -2.0), (-0.5, -1.25, -2.25), (-0.9, -1.0, -2.5)
PROBE = Probe((1, 7, 9, 4, 3), 2, NEW, noise_floor=1e-6, parent_logp=OLD)


def shifted(logp, by):
    return tuple(x + by for x in logp)


def test_the_same_answer_matches_with_nothing_to_compare_or_all():
    for previous, base in ((None, None), (OLD, None), (OLD, BASE)):
        verdict = compare_probe(PROBE, NEW, previous, base)
        assert verdict.ok
        assert verdict.max_abs_delta == 0
        verdict.require("run-0-v1-00c0ffee")


def test_tolerance_is_some_noise_floors_but_never_nothing():
    assert compare_probe(PROBE, shifted(NEW, 7e-6), OLD).ok
    assert compare_probe(PROBE, shifted(NEW, 9e-6), OLD).cause is ProbeCause.MISMATCH
    exact = Probe(PROBE.token_ids, 2, NEW, noise_floor=0.0)
    assert compare_probe(exact, shifted(NEW, 5e-7)).ok
    assert not compare_probe(exact, shifted(NEW, 2e-6)).ok
    assert compare_probe(exact, shifted(NEW, 2e-6), tiny=1e-5).ok
    assert compare_probe(PROBE, shifted(NEW, 9e-6), OLD, factor=10).ok


def test_each_fault_has_its_own_cause_and_the_numbers():
    """Stale cache, no effect, something else: told apart, so that the message points at the right part."""
    stale = compare_probe(PROBE, OLD, OLD, BASE)
    zero = compare_probe(PROBE, BASE, OLD, BASE)
    other = compare_probe(PROBE, shifted(NEW, 0.1), OLD, BASE)
    assert [v.cause for v in (stale, zero, other)] == [ProbeCause.STALE, ProbeCause.ZERO_DELTA, ProbeCause.MISMATCH]
    assert stale.trainer_change == 0.25
    assert stale.engine_change == 0
    assert stale.max_abs_delta == 0.25
    assert "still the previous one" in stale.reason
    assert "the adapter does nothing" in zero.reason
    for verdict in (stale, zero, other):
        with pytest.raises(PublishRefused, match=rf"run-0-v2.*\({verdict.cause}\)"):
            verdict.require("run-0-v2-00c0ffee")


def test_a_step_smaller_than_the_tolerance_does_not_hide_a_stale_engine():
    old = shifted(NEW, -3e-6)
    probe = Probe(PROBE.token_ids, 2, NEW, noise_floor=1e-6, parent_logp=old)
    assert compare_probe(probe, old, old).cause is ProbeCause.STALE
    assert compare_probe(probe, old, BASE, old).cause is ProbeCause.ZERO_DELTA
    assert compare_probe(probe, shifted(NEW, -1e-6), old).ok


def test_an_unchanged_trainer_needs_no_change():
    """A skipped step publishes the same policy; the first version's adapter is zero."""
    same = Probe(PROBE.token_ids, 2, NEW, noise_floor=1e-6, parent_logp=NEW)
    assert compare_probe(same, NEW, NEW, NEW).ok
    assert compare_probe(same, shifted(NEW, 1e-6), shifted(NEW, 1e-6)).ok
    first = Probe(PROBE.token_ids, 2, BASE, noise_floor=0.0)
    assert compare_probe(first, BASE, None, BASE).ok
    # but an engine that is wrong and unchanged is wrong
    assert compare_probe(same, OLD, OLD).cause is ProbeCause.MISMATCH


def test_an_engine_that_moves_within_the_trainers_bits_is_not_stale():
    """The previous version may be so close that both engines answer the same bits as the new trainer."""
    probe = Probe(PROBE.token_ids, 2, NEW, noise_floor=0.0, parent_logp=shifted(NEW, 1e-7))
    assert compare_probe(probe, NEW, NEW).ok


@pytest.mark.parametrize("answer", [(), NEW[:2], (*NEW, -1.0), (*NEW[:2], math.nan), (*NEW[:2], -math.inf)])
def test_a_malformed_answer_is_refused(answer):
    assert compare_probe(PROBE, answer, OLD).cause is ProbeCause.MALFORMED
    assert compare_probe(PROBE, NEW, answer).cause is ProbeCause.MALFORMED


@pytest.mark.parametrize(
    "values",
    [
        {"prompt_len": 0},
        {"prompt_len": 5},
        {"logp": NEW[:2]},
        {"logp": (*NEW[:2], math.nan)},
        {"parent_logp": OLD[:1]},
        {"parent_logp": (*OLD[:2], math.inf)},
        {"noise_floor": -1.0},
        {"noise_floor": math.nan},
    ],
)
def test_a_probe_that_could_prove_nothing_cannot_be_made(values):
    good = {"token_ids": PROBE.token_ids, "prompt_len": 2, "logp": NEW, "noise_floor": 0.0, "parent_logp": OLD}
    assert Probe(**good).prompt_ids == (1, 7)
    with pytest.raises(ValueError, match=r"prompt|logp|noise_floor"):
        Probe(**{**good, **values})
