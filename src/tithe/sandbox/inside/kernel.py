"""The Linux calls that Python does not have: namespaces, mounts, capabilities. Each raises `OSError` when refused."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_GET_SECCOMP: Final = 21
PR_SET_NO_NEW_PRIVS: Final = 38

_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3: Final = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces of the parent."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system, as the system call does."""
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None),
        f"mount {target}",
    )


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Show `source` (a file or a folder) at `target`, which exists. A remount may only add to the flags that the mount
    below has locked, so those are kept."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        flags = os.statvfs(target).f_flag & 0xFFFF & ~os.ST_MANDLOCK & ~32
        relatime = (1 << 21) if flags & 4096 else 0  # ST_RELATIME has another number as a mount flag
        kept = (flags & ~4096) | relatime
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(root: str) -> None:
    """Make `root`, a mount point, the root folder, and drop the old one."""
    os.chdir(root)
    here = ctypes.c_char_p(b".")
    _checked(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), here, here), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int = 0, more: int = 0) -> int:
    """The system call, with up to two arguments."""
    return _checked(_libc.prctl(option, value, more, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Empty all capability sets of this thread."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    number = ctypes.c_long(_CAPSET[platform.machine()])
    _checked(_libc.syscall(number, ctypes.byref(header), ctypes.byref(data)), "capset")


def map_ids(proc: int, inner: int, outer_uid: int, outer_gid: int) -> None:
    """Call this process, alone in its new user namespace, user and group `inner`. `proc` is a descriptor of a mounted
    /proc; the outer numbers are those it had before."""
    texts = {"setgroups": "deny", "uid_map": f"{inner} {outer_uid} 1", "gid_map": f"{inner} {outer_gid} 1"}
    for name, text in texts.items():
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
