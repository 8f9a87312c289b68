"""What glibc's allocator should do in a process that computes, and what the process holds."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library: its defaults stand
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def keep_large_blocks() -> bool:
    """Reuse freed large blocks instead of returning them: mapping and zeroing pages for every temporary tensor
    costs more system time than its arithmetic. True when the allocator took the settings."""
    libc = _libc()
    if libc is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


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
