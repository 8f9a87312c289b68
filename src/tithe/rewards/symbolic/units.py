"""Units after a value: percent, degrees, words and abbreviations."""

from __future__ import annotations

import re
from typing import Final

from tithe.rewards.exact import NO_UNITS

_UNIT_TEXT: Final = re.compile(
    r"(?<![\s({\[=<>+\-*/,])\s*(?:\^ ?\{? ?\\circ ?\}?\s*)?\\text ?\{([^{}]{1,60})\}(\s*\^ ?\{?-?\d\}?)?$"
)
_UNIT_WORD: Final = re.compile(r"(?<=[\d}) ]) ([A-Za-z]{1,20}(?:[ /][A-Za-z]{2,20}){0,2})((?:\^ ?\{?-?\d\}?)?)$")
_DEGREES: Final = re.compile(r"\s*\^ ?\{? ?\\circ ?\}?\s*([CF]?)$")
_SHORT_UNITS: Final = frozenset(
    [
        "mm",
        "cm",
        "dm",
        "km",
        "mg",
        "kg",
        "ml",
        "mL",
        "cl",
        "dl",
        "in",
        "ft",
        "yd",
        "mi",
        "lb",
        "oz",
        "hr",
        "Hz",
        "kW",
        "kJ",
        "m",
        "g",
        "s",
        "l",
        "L",
        "h",
        "am",
        "pm",
        "AM",
        "PM",
        "N",
        "J",
        "W",
        "Pa",
        "V",
        "min",
        "sec",
        "mph",
        "kmh",
    ]
)
_NO_UNITS: Final = NO_UNITS | frozenset(
    ("ln", "pi", "if", "for", "where", "when", "with", "otherwise", "base", "is", "not")
)


def split_unit(text: str) -> tuple[str, str]:
    """The text before a unit, and the unit."""
    if text.endswith((r"\%", "%")):
        return text.removesuffix("%").removesuffix("\\").strip(), "%"
    if (match := _DEGREES.search(text)) is not None and match.start() > 0:
        return text[: match.start()], "°" + match[1]
    for pattern in (_UNIT_TEXT, _UNIT_WORD):
        match = pattern.search(text)
        if match is None or not match.start():
            continue
        name = match[1].strip().rstrip(".").strip()
        parts = re.findall(r"[a-z]+", name.lower())
        if not parts or not re.fullmatch(r"[A-Za-z /·.^0-9²³]+", name) or _NO_UNITS.intersection(parts):
            continue
        if re.search(r"(?<![A-Za-z^])[0-9]", name):  # a number of its own
            continue
        if pattern is _UNIT_WORD and len(name) < 3 and name not in _SHORT_UNITS:
            continue
        if pattern is _UNIT_TEXT and len(name) == 1 and name not in _SHORT_UNITS:
            continue
        power = re.sub(r"[ {}^]", "", match[2] or "")
        unit = re.sub(r"[ {}^]", "", name).lower() if len(name) > 3 else re.sub(r"[ {}^.]", "", name)
        return text[: match.start()].strip(), {"percent": "%", "degrees": "°", "degree": "°"}.get(unit, unit + power)
    return text, ""
