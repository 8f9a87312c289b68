"""Memory of this process: giving freed blocks back, and what it holds."""

from __future__ import annotations

import ctypes
import mmap
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


def give_back(address: int, n_bytes: int) -> None:
    """Return the whole system pages inside a stretch of anonymous memory; they read as zeros from then on.

    Does nothing where the C library has no `madvise`.
    """
    libc = _libc()
    if libc is None or not hasattr(libc, "madvise"):
        return
    size = mmap.PAGESIZE
    begin, end = -(-address // size) * size, (address + n_bytes) // size * size
    if end > begin:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))


def peak_rss_bytes() -> int | None:
    """The largest resident size that this process has had, or None where the kernel does not say."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def pss_bytes() -> int | None:
    """Proportional set size of this process, or None where the kernel does not say."""
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
