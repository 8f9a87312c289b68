"""The optional packages of the math verifier: whether they are there, and loading them before the first judgement."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Final

from tithe.errors import ConfigError

_PACKAGES: Final = ("mpmath", "sympy", "latex2sympy2_extended", "math_verify")
"""Licences: BSD, BSD, MIT, Apache-2.0; and antlr4-python3-runtime, BSD, which the third needs."""


@lru_cache(maxsize=1)
def require() -> None:
    """Raise `ConfigError` when one is not installed. Imports nothing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"symbolic_math needs {' and '.join(missing)}: pip install -e '.[math]'; or set reward.function = math, "
            "which compares numbers, fractions and lists without them",
            "reward.function",
        )


def preload() -> None:
    """Import them all, a second or two, so that no judgement's time limit pays for it."""
    require()
    for name in (*_PACKAGES, "math_verify.grader"):
        importlib.import_module(name)
