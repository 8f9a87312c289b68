"""What the room shows and how it is opened: by Bubblewrap when that is installed, else by namespaces from Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tithe.errors import UserError

REMEDY: Final = (
    "install bubblewrap (apt install bubblewrap), or allow user namespaces (sysctl user.max_user_namespaces=10000, "
    "and kernel.apparmor_restrict_unprivileged_userns=0 where that exists); in a container: add the capability "
    "SYS_ADMIN and let the seccomp and AppArmor profiles pass unshare and mount (docker run --cap-add SYS_ADMIN "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
)

_PACKAGES: Final = ("site-packages", "dist-packages")
_LIBRARIES: Final = """
import importlib, os, sys, sysconfig
folder = sysconfig.get_config_var("DESTSHARED")
for name in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else ():
    if name.startswith(("_tkinter", "_test", "nis", "ossaudiodev", "spwd")):
        continue
    try:
        importlib.import_module(name.partition(".")[0])
    except Exception:
        pass
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
print("\\n".join(sorted(f for f in files if f.startswith("/") and not f.endswith("(deleted)"))))
"""


class SandboxUnavailableError(UserError):
    """This machine allows no sandbox of full strength; the message says how to allow one. There is no weaker one."""


@dataclass(frozen=True)
class Room:
    """What a room shows: whole `folders` except those `hidden`, single `files`, and `links`."""

    folders: tuple[str, ...]
    hidden: tuple[str, ...]
    files: tuple[str, ...]
    links: dict[str, str]

    def plan(self, mode: str, root: str) -> dict[str, Any]:
        """For `inside.zygote`."""
        is_root = os.geteuid() == 0
        shown = {"folders": self.folders, "hidden": self.hidden, "files": self.files, "links": self.links}
        return {"mode": mode, "root": root, "is_root": is_root, **shown}


def interpreter() -> str:
    """The interpreter itself, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def survey() -> Room:
    """The standard library without installed packages, and every shared library that its modules map. Blocks for a
    second."""
    command = [interpreter(), "-I", "-S", "-W", "ignore", "-c", _LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)  # noqa: S603
    if done.returncode != 0:
        raise SandboxUnavailableError(f"the interpreter's libraries cannot be listed: {done.stderr.strip()[-300:]}")
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    folders = {os.path.realpath(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib")}
    hidden = [f"{folder}/{name}" for folder in folders for name in _PACKAGES if Path(folder, name).is_dir()]
    files = [file for file in done.stdout.splitlines() if not any(file.startswith(f"{f}/") for f in folders)]
    if Path("/etc/ld.so.cache").exists():
        files.append("/etc/ld.so.cache")
    return Room(tuple(sorted(folders)), tuple(hidden), tuple(files), _links(files))


def _links(files: list[str]) -> dict[str, str]:
    """Symbolic links by which the files are found: other names in their folders, and merged folders such as /lib."""
    links: dict[str, str] = {}
    wanted = set(files)
    loader = {os.path.realpath("/lib64")} & {"/lib64", "/usr/lib64"}  # where programs look for the dynamic loader
    for folder in {str(Path(file).parent) for file in files} | {name for name in loader if Path(name).is_dir()}:
        for entry in os.scandir(folder):
            if entry.is_symlink() and os.path.realpath(entry.path) in wanted:
                links[entry.path] = os.path.realpath(entry.path)
    for name in ("/lib", "/lib64", "/lib32"):
        if Path(name).is_symlink():
            links[name] = str(Path(name).readlink())
    return links


def has_bubblewrap() -> bool:
    """Whether `bwrap` is on the path."""
    return shutil.which("bwrap") is not None


def bubblewrap(room: Room, source: Path) -> list[str]:
    """Arguments that open the room and run what follows in it. It stays capable of what each program's own namespaces
    need; the program itself is capable of nothing. `source` holds this package; only its inside is shown."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--as-pid-1"]
    if os.geteuid() != 0:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    command += ["--cap-add", "ALL", "--new-session", "--tmpfs", "/", "--proc", "/proc"]
    shown = (*room.folders, *room.files, interpreter(), str(source / "tithe" / "sandbox" / "inside"))
    parents = {str(parent) for path in (*shown, *room.links) for parent in Path(path).parents}
    for folder in sorted({"/dev", *parents} - {"/", *room.links}):
        command += ["--perms", "0755", "--dir", folder]  # left to itself it makes some for root alone
    for link, target in room.links.items():
        command += ["--symlink", target, link]
    for path in shown:
        command += ["--ro-bind", path, path]
    for path in room.hidden:
        command += ["--tmpfs", path, "--remount-ro", path]
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", path, path]
    return [*command, "--dir", "/tmp", "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/"]  # noqa: S108  the room's own


def require_ready(reply: bytes, mode: str, complaint: Callable[[], str]) -> None:
    """Raise `SandboxUnavailableError` unless the zygote says that the room is open."""
    answer = json.loads(reply) if reply else {"ready": False, "error": complaint()}
    if not answer["ready"]:
        raise SandboxUnavailableError(f"no sandbox by {mode} here ({answer['error']}): {REMEDY}")
