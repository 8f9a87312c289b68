"""The seccomp filter: system calls that no test program needs and that reach into the kernel, into other processes, out
of the namespaces or around the limits. They answer EPERM. Numbers are those of the kernel's own tables (x86_64's
syscall_64.tbl, and the generic table for aarch64)."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import Final

from tithe.sandbox.inside import kernel

# name: (x86_64, aarch64); None where the machine has no such call
_REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes, and views of them
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # every network, vsock and abstract addresses included (socketpair stays)
    "socket": (41, 198),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # parts of the kernel with a history of faults
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "remap_file_pages": (216, 234),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    # the machine itself
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_NEW_NAMESPACES: Final = 0x7E020000
_MACHINES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32: Final = 0x40000000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_FAIL: Final = 0x00050000
_NUMBER, _MACHINE, _ARGUMENT_0 = 0, 4, 16  # offsets in struct seccomp_data

_SECCOMP_MODE_FILTER: Final = 2
_PR_SET_SECCOMP: Final = 22


def is_known_machine() -> bool:
    """Whether the filter has numbers for this processor."""
    return platform.machine() in _MACHINES


def build() -> bytes:
    """The filter's program. A call of another architecture (32 bit, x32) kills the process."""
    column, machine = _MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),  # its flags lie in memory; the C library then takes clone
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install(program: bytes) -> None:
    """Filter this thread and all that come from it, for good. Needs no privilege once no_new_privs is set."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(header, len(header))
    kernel.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(pointer))
