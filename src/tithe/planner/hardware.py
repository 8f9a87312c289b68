"""Accelerators: memory, bandwidth, arithmetic, links, prices. Each figure has its source in data/accelerators.json."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tithe.arch.files import read_json
from tithe.errors import ConfigError

_FILE: Final = Path(__file__).parent / "data" / "accelerators.json"
MAX_GPUS: Final = 65_536
CPU_NAME: Final = "CPU"
"""The processor of one machine, two cores: nominal figures, to be calibrated with a run."""
CNY_PER_USD: Final = 7.1
"""For accelerators that are priced in one currency only (2026-05, rounded)."""

_FALLBACK_LINK: Final = 32e9
"""PCIe 4.0 x16 in one direction, where no faster link is known."""
_FALLBACK_SCALEOUT: Final = 25e9
"""200 Gbit/s, the slowest network of the table, where none is known."""
_FALLBACK_HBM: Final = 1.2e12
"""Ascend 910B: sources disagree between 1.2 and 1.6 TB/s; the lower counts."""


@dataclass(frozen=True)
class Price:
    """Rent of one accelerator, dollars an hour: the range that was seen and the figure that plans use."""

    low_usd_per_hour: float
    typical_usd_per_hour: float
    high_usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True)
class Accelerator:
    """One kind of card.

    Example: ``find_accelerator("B200")`` has 193273528320 bytes at 7.7 TB/s and 2250 TFLOP/s in BF16.
    """

    name: str
    mem_bytes: int
    hbm_bytes_per_s: float
    bf16_flop_per_s: float
    """Dense, without sparsity."""
    fp8_flop_per_s: float | None
    fp4_flop_per_s: float | None
    link_bytes_per_s: float
    """To a card of the same node, one direction."""
    has_nvlink: bool
    scaleout_bytes_per_s: float
    """To another node, one direction, per card."""
    gpus_per_node: int
    price: Price | None
    price_cny_per_hour: tuple[float, float] | None
    """(low, high) where a price in yuan was seen."""
    source: str
    unverified: str
    """What of this is not backed by a vendor's sheet; empty when all is."""


@dataclass(frozen=True)
class Hardware:
    """So many cards of one kind, as `8xB200` says."""

    gpus: int
    accelerator: Accelerator

    @property
    def name(self) -> str:
        """As it would be written on the command line."""
        return f"{self.gpus}x{self.accelerator.name}"

    @property
    def nodes(self) -> int:
        """Machines that hold the cards."""
        return -(-self.gpus // self.accelerator.gpus_per_node)

    @property
    def gpus_on_node(self) -> int:
        """Cards of the fullest machine."""
        return min(self.gpus, self.accelerator.gpus_per_node)

    @property
    def total_hbm_bytes(self) -> int:
        """Memory of all cards together."""
        return self.gpus * self.accelerator.mem_bytes

    def with_gpus(self, gpus: int) -> Hardware:
        """The same kind, another number."""
        return Hardware(gpus, self.accelerator)


def parse_hardware(text: str) -> Hardware:
    """`8xB200`, `B200` (one), `64 x H100-SXM`. `ConfigError` with the nearest names for anything else.

    >>> parse_hardware("8xB200").total_hbm_bytes
    1546188226560
    """
    found = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x×*]\s*)?(\S.*?)\s*", text)
    if found is None:
        raise ConfigError(f"--hardware {text!r}: give a number and a card, such as 8xB200", key="hardware")
    gpus = int(found[1] or 1)
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"--hardware {text}: from 1 to {MAX_GPUS} cards are planned for", key="hardware")
    return Hardware(gpus, find_accelerator(found[2]))


def find_accelerator(name: str) -> Accelerator:
    """By its name in any case, or the part before a hyphen when that is unique. `ConfigError` names the nearest."""
    known = accelerators()
    wanted = name.lower()
    for accelerator in known:
        if accelerator.name.lower() == wanted:
            return accelerator
    started = [one for one in known if one.name.lower().startswith(f"{wanted}-")]
    if len(started) == 1:
        return started[0]
    by_name = {one.name.lower(): one.name for one in known} | {
        one.name.lower().split("-")[0]: one.name for one in known
    }
    near = difflib.get_close_matches(wanted, by_name, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(dict.fromkeys(by_name[one] for one in near))}?" if near else ""
    names = ", ".join(one.name for one in known)
    raise ConfigError(f"--hardware: no card is called {name!r} here.{hint} Known: {names}", key="hardware")


@lru_cache(maxsize=1)
def accelerators() -> tuple[Accelerator, ...]:
    """All that are known, in the order of the file."""
    return tuple(_read(row) for row in read_json(_FILE)["accelerators"])


def _read(row: dict[str, Any]) -> Accelerator:
    cny = row["price_cny"]
    return Accelerator(
        name=row["name"],
        mem_bytes=row["mem_bytes"],
        hbm_bytes_per_s=row["hbm_bytes_per_s"] or _FALLBACK_HBM,
        bf16_flop_per_s=row["bf16_flop_per_s"],
        fp8_flop_per_s=row["fp8_flop_per_s"],
        fp4_flop_per_s=row["fp4_flop_per_s"],
        link_bytes_per_s=row["link_bytes_per_s"] or row["pcie_bytes_per_s"] or _FALLBACK_LINK,
        has_nvlink=row["has_nvlink"],
        scaleout_bytes_per_s=row["scaleout_bytes_per_s"] or _FALLBACK_SCALEOUT,
        gpus_per_node=row["gpus_per_node"],
        price=_price(row["price"]),
        price_cny_per_hour=(cny["low_cny_per_hour"], cny["high_cny_per_hour"]) if cny else None,
        source=row["source"],
        unverified=row.get("unverified", ""),
    )


def _price(row: dict[str, Any] | None) -> Price | None:
    """The typical figure is the published median or point, else the middle of the range."""
    if row is None:
        return None
    low, high = row["low_usd_per_hour"], row["high_usd_per_hour"]
    return Price(low, row.get("typical_usd_per_hour", (low + high) / 2), high, row["date"], row["source"])
