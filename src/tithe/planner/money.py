"""Rent: dollars and yuan an hour with their range, per step, per run, per million sampled tokens, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass

from tithe.planner.hardware import CNY_PER_USD, Hardware
from tithe.planner.step import StepTime


@dataclass(frozen=True)
class Money:
    """Dollars of one plan; None where no price of the card is known.

    Example: 8 B200 at 8.015 $/h (range 6.03 to 10, 2026-03) cost 64.12 $ an hour.
    """

    usd_per_hour: float | None
    usd_per_hour_range: tuple[float, float] | None
    cny_per_hour: float | None
    usd_per_step: float | None
    usd_per_run: float | None
    usd_per_million_sampled_tokens: float | None
    """None too where nothing is sampled."""
    usd_per_step_by_part: dict[str, float] | None
    date: str
    source: str


def price(hardware: Hardware, time: StepTime, steps: int) -> Money:
    """The price of a plan's step and run, in yuan of the card's own market or by `CNY_PER_USD`; reward workers' CPUs
    are not priced."""
    card, gpus = hardware.accelerator, hardware.gpus
    if card.price is None:
        cny = card.price_cny_per_hour
        return Money(None, None, sum(cny) / 2 * gpus if cny else None, None, None, None, None, "", "no price is known")
    hourly = card.price.typical_usd_per_hour * gpus
    per_s = hourly / 3600
    per_step = per_s * time.total_s
    cny = card.price_cny_per_hour
    return Money(
        usd_per_hour=hourly,
        usd_per_hour_range=(card.price.low_usd_per_hour * gpus, card.price.high_usd_per_hour * gpus),
        cny_per_hour=sum(cny) / 2 * gpus if cny else hourly * CNY_PER_USD,
        usd_per_step=per_step,
        usd_per_run=per_step * steps,
        usd_per_million_sampled_tokens=per_step / time.sampled_tokens * 1e6 if time.sample_s else None,
        usd_per_step_by_part={name: per_s * seconds for name, seconds in time.parts.items()},
        date=card.price.date,
        source=card.price.source,
    )
