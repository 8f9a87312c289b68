"""What a fresh copy must answer before it serves: numbers, near the trainer's, and not the version before's."""

from __future__ import annotations

import math

import pytest

from tithe.engines.copied import measure_gap
from tithe.errors import PublishRefused
from tithe.weight_sync import Probe

PROBE = Probe((1, 7, 9, 4), 2, (-0.5, -1.25), noise_floor=0.0, parent_logp=(-0.6, -1.5))


def test_a_near_answer_is_measured() -> None:
    gap = measure_gap(PROBE, [-0.5, -1.0], [-0.6, -1.4], 0.5, "v1")
    assert (gap.largest, gap.mean, gap.tolerance) == (0.25, 0.125, 0.5)


def test_a_quantized_copys_gap_is_measured_and_has_no_bound() -> None:
    assert measure_gap(PROBE, [-3.5, -1.25], None, None, "v1").largest == 3.0


@pytest.mark.parametrize(
    ("answer", "previous", "tolerance", "said"),
    [
        ([-0.5, math.nan], None, None, "no finite numbers"),
        ([-0.5], None, 0.5, "no finite numbers"),
        ([-0.5, -1.9], None, 0.5, "0.65 nats away .* 0.5 is allowed"),
        ([-0.6, -1.4], [-0.6, -1.4], 0.5, "still answers as the version before"),
        ([-0.45, -1.3], [-0.45, -1.3], None, "still answers as the version before"),
    ],
)
def test_a_wrong_answer_is_refused(
    answer: list[float], previous: list[float] | None, tolerance: float | None, said: str
) -> None:
    with pytest.raises(PublishRefused, match=f"v1 is refused: .*{said}"):
        measure_gap(PROBE, answer, previous, tolerance, "v1")


def test_a_mixtures_ties_are_named_with_their_remedies() -> None:
    with pytest.raises(PublishRefused, match=r"a tie of experts.* model\.base_dtype = fp32.*rl\.router_replay"):
        measure_gap(PROBE, [-0.5, -1.9], None, 0.5, "v1", is_mixture=True)
    with pytest.raises(PublishRefused) as caught:
        measure_gap(PROBE, [-0.5, -1.9], None, 0.5, "v1")
    assert "experts" not in str(caught.value)


def test_a_step_too_small_for_a_quantized_copy_may_leave_its_answer_as_it_was() -> None:
    gap = measure_gap(PROBE, [-1.5, -1.25], [-1.5, -1.25], None, "v1")
    assert gap.largest == 1.0
