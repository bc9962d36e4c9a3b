"""The system-call filter: an allow-list as a BPF program, searched by halves.

Calls on no list fail with EPERM, those of `syscall_table.forbidden` end the process with SIGSYS, which the supervisor
reports as a denial. A network socket fails with ENETUNREACH, which a program's message then names.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from kestrl_sandbox.inside import syscall_table as table
from kestrl_sandbox.inside.syscalls import PR_SET_SECCOMP, prctl

ALLOW = 0x7FFF0000
KILL = 0x80000000
SECCOMP_MODE_FILTER = 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4
_FIRST_ARGUMENT = 16
"""Offset of the low half of the first argument; the others follow at distances of 8."""
_X32 = 0x40000000
_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags of `clone`."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SHARED = (fcntl.F_SETPIPE_SZ, fcntl.F_SETLEASE, fcntl.F_NOTIFY)
SUPERVISOR = 1
"""Number of the supervisor in each sandbox."""

Instruction = tuple[int, int, int, int]


def failing(number: int) -> int:
    """Action that makes the call fail with an errno."""
    return 0x00050000 | number


DENY = failing(errno.EPERM)
SUCCEED = failing(0)
"""Action that makes the call return 0 without being made."""


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index)


def _not_of_supervisor() -> list[Instruction]:
    """Refuses a call whose first argument is the supervisor's number."""
    return [_argument(0), (_JUMP_EQUAL, 0, 1, SUPERVISOR), _return(DENY), _return(ALLOW)]


def _conditions() -> dict[str, list[Instruction]]:
    """Programs for calls whose arguments decide."""
    return {
        # New namespaces are refused; threads and processes are not.
        "clone": [_argument(0), (_JUMP_ANY, 0, 1, _NAMESPACES), _return(DENY), _return(ALLOW)],
        # Its flags lie in memory, where no filter sees them; libc then uses clone.
        "clone3": [_return(failing(errno.ENOSYS))],
        "socket": [
            _argument(0),
            (_JUMP_EQUAL, 0, 1, socket.AF_UNIX),
            _return(ALLOW),
            _return(failing(errno.ENETUNREACH)),
        ],
        # Characters put into a terminal would be read by whatever runs there later.
        "ioctl": [
            _argument(1),
            (_JUMP_EQUAL, 1, 0, _TIOCSTI),
            (_JUMP_EQUAL, 0, 1, _TIOCLINUX),
            _return(DENY),
            _return(ALLOW),
        ],
        "personality": [
            _argument(0),
            (_JUMP_EQUAL, 1, 0, 0),
            (_JUMP_EQUAL, 0, 1, 0xFFFFFFFF),
            _return(ALLOW),
            _return(DENY),
        ],
        "seccomp": [_return(DENY)],
        # Buffers of pipes are counted for the node's user; leases and notices stay with files of the node.
        "fcntl": [
            _argument(1),
            *((_JUMP_EQUAL, len(_SHARED) - index, 0, command) for index, command in enumerate(_SHARED)),
            _return(ALLOW),
            _return(DENY),
        ],
        # Process 1 is the supervisor, and of the code's own user.
        "prlimit64": _not_of_supervisor(),
        "sched_setparam": _not_of_supervisor(),
        "sched_setscheduler": _not_of_supervisor(),
        "sched_setaffinity": _not_of_supervisor(),
        "sched_setattr": _not_of_supervisor(),
        # Of one process alone: that of a group or a user would be the supervisor's, too.
        "setpriority": [
            _argument(0),
            (_JUMP_EQUAL, 0, 2, 0),
            _argument(1),
            (_JUMP_EQUAL, 0, 1, SUPERVISOR),
            _return(DENY),
            _return(ALLOW),
        ],
    }


def _ranges(actions: dict[int, list[Instruction]]) -> list[tuple[int, list[Instruction]]]:
    """Start of every run of numbers with the same action, in order, from 0 on."""
    ranges: list[tuple[int, list[Instruction]]] = []
    for number in range(max(actions) + 2):
        action = actions.get(number, [_return(DENY)])
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _search(ranges: Sequence[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Binary search over the ranges; expects the number in the accumulator."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    if len(low) <= 255:
        return [(_JUMP_GREATER_EQUAL, len(low), 0, ranges[middle][0]), *low, *high]
    # Offsets of conditional jumps have 8 bits; an unconditional one has 32.
    return [(_JUMP_GREATER_EQUAL, 0, 1, ranges[middle][0]), (0x05, 0, 0, len(low)), *low, *high]


def program(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`."""
    actions: dict[int, list[Instruction]] = {number: [_return(ALLOW)] for number in table.allowed(machine).values()}
    actions |= {number: [_return(SUCCEED)] for number in table.idle(machine).values()}
    actions |= {number: [_return(KILL)] for number in table.forbidden(machine).values()}
    conditions = _conditions()
    actions |= {number: conditions[name] for name, number in table.conditional(machine).items()}
    instructions: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _return(KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        instructions += [(_JUMP_GREATER_EQUAL, 0, 1, _X32), _return(KILL)]
    instructions += _search(_ranges(actions))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


_machine = os.uname().machine  # not platform's, which would remember the name of the node
_compiled = program(_machine) if _machine in AUDIT_ARCH else b""
_code = ctypes.create_string_buffer(_compiled)
_header = ctypes.create_string_buffer(struct.pack("@HP", len(_compiled) // 8, ctypes.addressof(_code)))


def install() -> None:
    """Installs the filter for this process and all that it starts; needs no_new_privs."""
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _header)
