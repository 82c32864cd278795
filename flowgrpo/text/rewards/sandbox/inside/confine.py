"""Limits that a process sets for itself for good: resources, and a filter of system calls (seccomp) on Linux."""

import ctypes
import os
import platform
import resource
import signal
import struct
from typing import Any

PARENT_DEATH, SECCOMP, NO_NEW_PRIVILEGES, FILTER = 1, 22, 38, 2  # of prctl(2)
# The machine's number in a filter, and which number of each call below is its own.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
CLONE, CLONE3, THREAD = (56, 220), (435, 435), 0x10000
# Processes, sockets, memory that no limit counts, other processes, namespaces, mounts, and rarely used kernel parts.
REFUSED = {
    "fork": (57, None), "vfork": (58, None), "socket": (41, 198),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
    "sync": (162, 81), "syncfs": (306, 267),
}


def confine(given: dict[str, Any]) -> bool:
    """Set the limits of a job, and the filter; return False if the job needs a filter and there is none."""
    limit(CPU=given["cpu"], AS=given["memory"], DATA=given["memory"], FSIZE=given["files"], NOFILE=64, NPROC=0, CORE=0,
          MSGQUEUE=0, MEMLOCK=0)
    return filter_calls() or not given["filter"]


def read_from(descriptor: int) -> None:
    """Make an open file the standard input."""
    os.dup2(descriptor, 0)
    os.close(descriptor)


def limit(**limits: int) -> None:
    """Set limits of this process, by their names of getrlimit(2) without RLIMIT, as far as the system has them."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(kind, (value, value))
            except (OSError, ValueError):  # a system without this limit
                pass


def filter_calls() -> bool:
    """Refuse the system calls of REFUSED and new processes from now on; False on a machine without a filter."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return False
    program = _program(*MACHINES[platform.machine()])
    steps = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return (prctl(PARENT_DEATH, signal.SIGKILL, 0, 0, 0) == 0 and prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
            and prctl(SECCOMP, FILTER, ctypes.addressof(head), 0, 0) == 0)


def _program(machine: int, column: int) -> bytes:
    """The filter's instructions, 8 bytes each."""
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of classic BPF
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, kill), (load, 0, 0, 0)]

    def answer(number: int, result: int, operation: int = equal) -> None:
        steps.extend([(operation, 0, 1, number), (end, 0, 0, result)])

    if machine == MACHINES["x86_64"][0]:
        answer(0x40000000, refuse | 1, at_least)  # the numbers of its x32 form
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            answer(number, refuse | 1)  # EPERM
    answer(CLONE3[column], refuse | 38)  # ENOSYS, after which the C library takes clone
    steps += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (any_bit, 1, 0, THREAD), (end, 0, 0, refuse | 1),
              (end, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def to_null(descriptor: int) -> int:
    """Point a descriptor at /dev/null, and return another one of what it was."""
    kept, null = os.dup(descriptor), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)
    return kept
