"""What a fresh copy must answer before it serves: numbers, near the trainer's, and not the version before's."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from support.decoders import BF16
from support.ranks import on_ranks_of
from tithe.engines import CopiedEngine, Here
from tithe.engines.copied import measure_gap
from tithe.errors import AdapterError, PublishRefused
from tithe.models import Agreed, Ranks
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


@pytest.mark.liveness
def test_ranks_wait_for_one_that_reads_a_copy_for_longer_than_a_message_may_take(tmp_path: Path) -> None:
    """Rank 1 needs three seconds where a silent rank is given up after two; what it then refuses is refused by both."""

    def work(ranks: Ranks) -> str:
        engine = CopiedEngine(Here(), BF16, origin="o", numeric_mode="m", settings={}, ranks=ranks)

        def read(_: Path) -> None:
            if ranks.rank == 1:
                time.sleep(3)
                raise AdapterError("torn")

        engine._copy_from = read  # type: ignore[method-assign,assignment]
        with pytest.raises(Agreed) as caught:
            engine.load_adapter(tmp_path)
        return f"{type(caught.value.error).__name__}: {caught.value.error}"

    assert on_ranks_of(2, tmp_path / "ranks", work, 2.0) == ["AdapterError: rank 1: torn"] * 2
