"""Memory of this process: giving freed blocks back, and what it holds."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library: its defaults stand
        return None
    return libc if hasattr(libc, "malloc_trim") else None


def release_unused() -> None:
    """Give freed memory back now, after a phase that needed much for a moment (loading)."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def pss_bytes() -> int | None:
    """Proportional set size of this process, or None where the kernel does not say."""
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
