"""Filter of a child's system calls: they compute, write its answer, and end it. All others fail with EPERM.

Limits of resources alone do not hold a child that runs foreign code: root may raise them, and without a descriptor a
process may still delete files, signal others of its user, or start more. A filter of seccomp holds for root too.
"""

import ctypes
import errno
import os
import platform
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

# Of prctl.
_SET_SECCOMP = 22
_NO_NEW_PRIVILEGES = 38
_FILTER = 2
# Of BPF.
_LOAD = 0x20
_RETURN = 0x06
_IF_EQUAL = 0x15
_IF_BITS = 0x45
# Where seccomp's data have them.
_NUMBER = 0
_MACHINE = 4
_FIRST_ARGUMENT = 16
_ALLOW = 0x7FFF0000
_REFUSE = 0x50000 | errno.EPERM
_ABSENT = 0x50000 | errno.ENOSYS
_THREAD = 0x10000  # CLONE_THREAD: decoders of videos have threads

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOWED = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
    mremap 25 216, madvise 28 233, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, futex 202 98,
    sched_yield 24 124, sched_getaffinity 204 123, set_robust_list 273 99, rseq 334 293, getpid 39 172, gettid 186 178,
    getrusage 98 165, getrandom 318 278, nanosleep 35 101, clock_gettime 228 113, clock_nanosleep 230 115, exit 60 93,
    exit_group 231 94
"""  # each with its number on x86_64, then on aarch64
_CLONE = (56, 220)
_SIGNAL_THREAD = (234, 131)
_CLONE_BY_STRUCT = (435, 435)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def can_filter() -> bool:
    """Return whether the kernel takes filters, and the numbers of its calls are known here."""
    is_known = LIBC.prctl(_SET_SECCOMP, _FILTER, None) == -1 and ctypes.get_errno() == errno.EFAULT
    return is_known and platform.machine() in _MACHINES


def refuse_system_calls() -> None:
    """Let this process, from now on, make threads, signal itself, and make the calls of `_ALLOWED`; nothing else.

    OSError: the kernel has refused the filter.
    """
    at = list(_MACHINES).index(platform.machine())
    allowed = [int(call.split()[1 + at]) for call in _ALLOWED.split(",")]
    program = [
        (_LOAD, 0, 0, _MACHINE),
        *((_IF_EQUAL, 1, 0, _MACHINES[platform.machine()]), (_RETURN, 0, 0, _REFUSE)),  # calls of 32 bits, too
        (_LOAD, 0, 0, _NUMBER),
        *_where(_IF_EQUAL, _CLONE_BY_STRUCT[at], [(_RETURN, 0, 0, _ABSENT)]),  # libc then takes the older call
        *_only_with(_CLONE[at], _IF_BITS, _THREAD),
        *_only_with(_SIGNAL_THREAD[at], _IF_EQUAL, os.getpid()),
        *(each for number in allowed for each in _where(_IF_EQUAL, number, [(_RETURN, 0, 0, _ALLOW)])),
        (_RETURN, 0, 0, _REFUSE),
    ]
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    asked = ctypes.byref(_Program(len(program), packed))
    if LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or LIBC.prctl(_SET_SECCOMP, _FILTER, asked):
        raise OSError(ctypes.get_errno(), "the kernel has refused a filter of system calls")


_Instructions = list[tuple[int, int, int, int]]


def _where(test: int, value: int, then: _Instructions) -> _Instructions:
    return [(test, 0, len(then), value), *then]


def _only_with(call: int, test: int, value: int) -> _Instructions:
    """Allow a call whose first argument stands the test."""
    allowed = _where(test, value, [(_RETURN, 0, 0, _ALLOW)])
    return _where(_IF_EQUAL, call, [(_LOAD, 0, 0, _FIRST_ARGUMENT), *allowed, (_RETURN, 0, 0, _REFUSE)])
