"""One program's supervisor: puts it into namespaces of its own, watches time and memory, kills the whole tree, reports.

The program's first process is the first process of its namespace: when that ends, by itself or by a kill, the kernel
ends every other process in it before `wait4` returns. The program holds neither the report's connection nor /proc.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from tithe.sandbox.inside import kernel, program, room, syscalls

INNER_ID: Final = 1000
LOOK_S: Final = 0.1
"""Seconds between two looks at the memory of a tree."""

STACK_BYTES: Final = 64 << 20
"""The main thread's: deep recursion is honest work."""

_OWN_SPACES: Final = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
"""Network and IPC namespaces are the room's: `syscalls` refuses every way into them."""

_HIGH: Final = 200
_PAGE: Final = resource.getpagesize()


class Zygote(NamedTuple):
    """What the process that programs are forked from hands on: a descriptor of /proc, its plan, the compiled filter."""

    proc: int
    plan: Mapping[str, Any]
    filtering: bytes


def run(order: Mapping[str, Any], descriptors: Sequence[int], zygote: Zygote) -> NoReturn:
    """Body of the supervisor. `descriptors`: the report's connection, then what the program gets as 0, 1, 2, …"""
    report, *given = descriptors
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        answer = _supervise(order, report, given, zygote)
    except OSError as error:
        answer = {"end": "setup", "detail": str(error)}
    try:
        os.write(report, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _supervise(order: Mapping[str, Any], report: int, given: Sequence[int], zygote: Zygote) -> dict[str, Any]:
    if zygote.plan["is_root"]:
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would still be root's
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_OWN_SPACES)
    kernel.map_ids(zygote.proc, INNER_ID, uid, gid)
    ready, written = os.pipe()
    first = os.fork()
    if first == 0:
        _become_program(order["limits"], given, written, zygote)
    os.close(written)
    for number in given:
        os.close(number)
    problem = os.read(ready, 4096).decode(errors="replace")
    os.close(ready)
    if problem != "ready":
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        return {"end": "setup", "detail": problem}
    return _watch(first, order["limits"], report, zygote.proc)


def _watch(first: int, limits: Mapping[str, Any], report: int, proc: int) -> dict[str, Any]:
    """Until the program ends or must: `exit`, `wall`, `memory`, or `stopped` when the caller says so or is gone."""
    began = time.monotonic()
    poll = select.poll()
    exited = os.pidfd_open(first)
    poll.register(exited, select.POLLIN)
    poll.register(report, select.POLLIN)
    bound = limits["memory_mib"] << 20
    children = "thread-self/children"
    end, peak = "", 0
    while not end:
        left = began + limits["wall_s"] - time.monotonic()
        events = dict(poll.poll(max(0.0, min(left, LOOK_S)) * 1000))
        if exited in events:
            end = "exit"
        elif report in events:
            end = "stopped"
        elif left <= 0:
            end = "wall"
        else:
            peak = max(peak, used := _tree_bytes(proc, children))
            end = "memory" if used > bound else ""
    os.kill(first, signal.SIGKILL)
    _, status, usage = os.wait4(first, 0)
    return {
        "end": end,
        "code": os.waitstatus_to_exitcode(status),
        "wall_s": time.monotonic() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": max(peak >> 20, usage.ru_maxrss >> 10),
    }


def _tree_bytes(proc: int, children: str) -> int:
    """Private memory of the processes named in a `children` file and of all theirs."""
    total = 0
    for number in _read(proc, children).split():
        fields = _read(proc, f"{number}/statm").split()
        if len(fields) > 2:
            total += (int(fields[1]) - int(fields[2])) * _PAGE
        total += sum(_tree_bytes(proc, f"{number}/task/{thread}/children") for thread in _threads(proc, number))
    return total


def _threads(proc: int, number: str) -> list[str]:
    try:
        folder = os.open(f"{number}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    except OSError:  # ended meanwhile
        return []
    try:
        return os.listdir(folder)
    except OSError:
        return []
    finally:
        os.close(folder)


def _read(proc: int, name: str) -> str:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=proc)
    except OSError:  # ended meanwhile
        return ""
    try:
        return os.read(descriptor, 65536).decode()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _become_program(limits: Mapping[str, Any], given: Sequence[int], ready: int, zygote: Zygote) -> NoReturn:
    """In the child: give up everything, then run what the job's descriptor says."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        size = f"size={limits['disk_mib']}m,nr_inodes=4096,mode=700"
        kernel.mount("none", room.SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        if zygote.plan["mode"] != "namespaces":
            kernel.mount("none", "/proc", "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID, "size=4k")
        os.chdir(room.SCRATCH)
        _take_descriptors([*given, ready])
        ready = len(given)
        _limit(limits)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.install(zygote.filtering)
    except OSError as error:
        os.write(ready, str(error).encode())
        os._exit(1)
    os.write(ready, b"ready")
    os.close(ready)
    program.main()


def _take_descriptors(given: Sequence[int]) -> None:
    """Make them 0, 1, 2, … and close all others."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _HIGH) for number in given]
    for place, number in enumerate(high):
        os.dup2(number, place, inheritable=place < 3)
    os.closerange(len(high), 65536)


def _limit(limits: Mapping[str, Any]) -> None:
    cpu = int(-(-limits["cpu_s"] // 1))
    # the supervisor has the same user number in the same namespace, and counts too
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_AS: limits["memory_mib"] << 20,
        resource.RLIMIT_NPROC: limits["processes"] + 1,
        resource.RLIMIT_FSIZE: limits["file_mib"] << 20,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))
