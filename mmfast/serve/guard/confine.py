"""Take from a process what decoding does not need: network, programs, files to write.

A seccomp filter (Linux); where the system has none, limits and front-ends stand alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_WRITES = 0o3 | 0o100  # O_WRONLY, O_RDWR, O_CREAT
# Machine -> (its number, refused calls by number, `open` calls -> argument that holds the flags,
# calls whose first argument must be this process, or 0).
_CALLS: dict[str, tuple[int, tuple[int, ...], dict[int, int], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(41, 42, 43, 49, 50, 53, 288),  # socket connect accept bind listen socketpair accept4
            *(59, 322, 57, 58, 62, 101),  # execve execveat fork vfork kill ptrace
            *(200, 129, 297),  # tkill rt_sigqueueinfo rt_tgsigqueueinfo
            *(76, 82, 83, 84, 85, 86, 87, 88, 90, 92, 94),  # truncate rename mkdir … lchown
            *(258, 260, 263, 264, 265, 266, 268, 316, 310, 311),  # the same …at; process_vm
            *(425, 426, 427, 437, 438, 424),  # io_uring, openat2, pidfd_getfd, pidfd_send_signal
        ),
        {2: 1, 257: 2},
        (234, 302),  # tgkill prlimit64
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(198, 199, 200, 201, 202, 203, 242),  # socket socketpair bind listen accept connect
            *(221, 281, 129, 117),  # execve execveat kill ptrace
            *(130, 138, 240),  # tkill rt_sigqueueinfo rt_tgsigqueueinfo
            *(33, 34, 35, 36, 37, 38, 45, 53, 54, 276, 270, 271),  # mknodat mkdirat unlinkat …
            *(425, 426, 427, 437, 438, 424),
        ),
        {56: 2},
        (131, 261),
    ),
}


def confine() -> bool:
    """Refuse these calls to this process from here on, for good; say whether that took hold."""
    known = _CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or known is None:
        return False
    program = _program(*known, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(libc.prctl(_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0) == 0)


def _program(
    machine: int, refused: tuple[int, ...], opens: dict[int, int], own: tuple[int, ...], me: int
) -> bytes:
    """The filter: struct seccomp_data has nr at 0, arch at 4, arguments from 16 on."""
    code = [
        _step(_LOAD, 4),
        _step(_EQUAL, machine, 1, 0),
        _step(_RETURN, _REFUSE),
        _step(_LOAD, 0),
        _step(_AT_LEAST, 0x40000000, 0, 1),  # the x32 names of the same calls
        _step(_RETURN, _REFUSE),
    ]
    for number in refused:
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _REFUSE)]
    for number in own:
        code += [
            _step(_EQUAL, number, 0, 5),
            _step(_LOAD, 16),  # the lower half: these are numbers of 32 bits
            _step(_EQUAL, me, 2, 0),
            _step(_EQUAL, 0, 1, 0),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    for number, argument in opens.items():
        code += [
            _step(_EQUAL, number, 0, 4),
            _step(_LOAD, 16 + 8 * argument),
            _step(_ANY_BIT, _WRITES, 0, 1),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
