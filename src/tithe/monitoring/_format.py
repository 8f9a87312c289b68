"""Numbers as people read them; shared by the terminal and the report."""

from __future__ import annotations

import math

MISSING = "—"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, thousands set apart, tiny and huge ones with an exponent.

    >>> format_number(1234.5), format_number(0.03141), format_number(2e-5), format_number(12.0), format_number(None)
    ('1,234', '0.0314', '2e-5', '12', '—')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_percent(fraction: float | None, decimals: int = 0) -> str:
    """A fraction in percent.

    >>> format_percent(0.8512), format_percent(0.8512, 1), format_percent(None)
    ('85 %', '85.1 %', '—')
    """
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    return f"{100 * fraction:.{decimals}f} %"


def format_score(value: float | None, *, is_reward: bool) -> str:
    """A held-out score: a share in percent, or a mean reward as it is.

    >>> format_score(0.8512, is_reward=False), format_score(-1.62, is_reward=True)
    ('85.1 %', '-1.62')
    """
    return format_number(value) if is_reward else format_percent(value, 1)


def format_duration(seconds: float | None) -> str:
    """A span of time in its two largest units.

    >>> [format_duration(s) for s in (0.25, 3.14, 75, 3600 + 125, 90000, None)]
    ['0.25 s', '3.1 s', '1 min 15 s', '1 h 02 min', '25 h 00 min', '—']
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_bytes(count: float | None) -> str:
    """A size in bytes, KiB, MiB, GiB or TiB.

    >>> format_bytes(98362432), format_bytes(512), format_bytes(None)
    ('93.8 MiB', '512 bytes', '—')
    """
    if count is None or not math.isfinite(count):
        return MISSING
    if abs(count) < 1024:
        return f"{count:.0f} bytes"
    power = min(4, int(math.log2(abs(count)) / 10))
    return f"{format_number(count / 1024**power)} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
