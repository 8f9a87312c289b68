"""Builds the room: a root folder in memory that shows the interpreter's standard library, the shared libraries it maps,
four devices, and nothing else of the host. Read-only, without network, with process numbers of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tithe.sandbox.inside import kernel

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH: Final = "/tmp"  # noqa: S108  the room's own, made anew for each program


def build(plan: Mapping[str, Any]) -> int:
    """Move this process into a new room; the next child is its first process. `plan` names the parts
    (`rooms.plan_room`). Returns a descriptor of the host's /proc, for `kernel.map_ids` alone.

    Raises `OSError` when the machine does not allow it.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    uid, gid = os.geteuid(), os.getegid()
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    kernel.unshare(spaces | (0 if plan["is_root"] else kernel.CLONE_NEWUSER))
    if not plan["is_root"]:
        kernel.map_ids(proc, 0, uid, gid)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root: str = plan["root"]
    kernel.mount("none", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m,nr_inodes=16k")
    _furnish(root, plan["folders"], [*plan["files"], *DEVICES], plan["links"])
    for hidden in plan["hidden"]:
        kernel.mount("none", root + hidden, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID, "size=4k,mode=755")
    kernel.pivot_root(root)
    kernel.mount(
        "none", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )
    return proc


def _furnish(root: str, folders: Sequence[str], files: Sequence[str], links: Mapping[str, str]) -> None:
    for link, target in links.items():
        os.makedirs(os.path.dirname(root + link), exist_ok=True)
        os.symlink(target, root + link)
    for folder in folders:
        os.makedirs(root + folder, exist_ok=True)
        kernel.bind(folder, root + folder)
    for file in files:
        os.makedirs(os.path.dirname(root + file), exist_ok=True)
        with open(root + file, "wb"):
            kernel.bind(file, root + file, read_only=file not in DEVICES)
    os.mkdir(root + SCRATCH)
    os.symlink(SCRATCH, root + "/dev/shm")  # noqa: S108  semaphores of multiprocessing
