"""Walls around an answer: a rank puts them up before the first line of it runs, and cannot take them down.

    files      Landlock: it reads Python, its packages and the system's libraries, and writes nothing
    calls      seccomp: those that torch needs. No socket, process, signal, keyring, lock, memfd, shared
               memory, or futex that another process could see; all that is not listed is not permitted
    amounts    private memory (there is no other: a budget holds for mmap too), threads, CPU seconds
    user       where root grades: an id nobody owns, another for each rank, with one right left, to read

They need no rights, so root and an ordinary user get the same walls, in a container too. Where a system lacks
some (`Walls.missing` says which), the others stay. Not covered: bugs of the kernel, accomplices who signal by
timing and, where root does not grade, by access times of libraries.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LINUX = sys.platform == "linux"
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store", "/dev/null", "/dev/urandom"]
READ_FILE, READ_DIR = 1 << 2, 1 << 3
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many each version of Landlock knows; later ones 16
SYSCALLS = {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}
SYSCALLS |= {"mount_setattr": 442}  # libc does not know these; they have the same number on every machine
SET_PDEATHSIG, SET_KEEPCAPS, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 8, 36, 38
SET_SECCOMP, FILTER = 22, 2
NEWNS, NOATIME, ATIME, MS_PRIVATE, AT_FDCWD, AT_RECURSIVE = 0x20000, 0x10, 0x70, 1 << 18, -100, 0x8000
MAY_READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH: packages in a home that the stranger could not enter

ALLOWED = """
    read readv pread64 write writev lseek close dup dup2 dup3 poll ppoll select pselect6 sendto recvfrom
    open openat mkdir mkdirat stat lstat fstat newfstatat statx access faccessat faccessat2
    readlink readlinkat getdents64 getcwd munmap mprotect mremap madvise brk membarrier
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall exit exit_group
    setitimer set_robust_list get_robust_list rseq gettid getpid getppid getuid geteuid getgid getegid
    sched_yield sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom uname getrusage times
    arch_prctl getrlimit set_tid_address epoll_create1 epoll_ctl epoll_wait epoll_pwait""".split()
ALLOWED_IF = [  # (call, number of an argument, these bits of it, what they must be)
    ("clone", 0, 0x10000, 0x10000),  # a thread
    ("mmap", 3, 1, 0),  # nothing shared
    ("futex", 1, 128, 128),  # private to the process
    *(("fcntl", 1, ~0, what) for what in (1, 2, 3, 1030)),  # descriptors; no lock, lease, size of a pipe
    *(("ioctl", 1, ~0, what) for what in (0x5401, 0x5450, 0x5451)),  # is it a terminal?; close on exec
    ("prlimit64", 0, ~0, 0),  # its own limits
]

libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *args) -> int:
    """A function of libc or system call. Raises OSError with its name."""
    unknown = SYSCALLS.get(function)
    answer = libc.syscall(unknown, *args) if unknown else getattr(libc, function)(*args)
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return answer


def prctl(option: int, value: int) -> None:
    if LINUX:
        call("prctl", option, value, 0, 0, 0)


class Walls:
    """What the server prepares for all ranks. `missing`: what this system lacks, "" if nothing."""

    def __init__(self, wanted: bool, hidden: Sequence[str]) -> None:
        self.files = self.calls = None
        lacks = [] if wanted else ["it was told to do without"]
        for kind, prepare in ("files", lambda: readable_files(hidden)), ("calls", allowed_calls):
            try:
                setattr(self, kind, prepare() if wanted else None)
            except (OSError, ImportError, RuntimeError) as error:
                lacks.append(f"this system has no walls for {kind}: {error}")
        self.missing = "; ".join(lacks)


def readable_files(hidden: Sequence[str]) -> int:
    """A Landlock ruleset: Python and libraries can be read. Raises OSError if `hidden` is in them."""
    if not LINUX:
        raise OSError(f"{sys.platform} has no Landlock")
    version = call("landlock_create_ruleset", None, 0, 1)
    handled = struct.pack("Q", (1 << RIGHTS.get(version, 16)) - 1)
    ruleset = call("landlock_create_ruleset", handled, len(handled), 0)
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    packages = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    for path in filter(os.path.exists, [*SYSTEM, *sorted(python | packages)]):
        for secret in hidden:
            if Path(secret).is_relative_to(os.path.realpath(path)):
                raise OSError(f"{secret} lies inside {path}, which an answer must be able to read")
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, below), 0)
        os.close(below)
    with contextlib.suppress(OSError):  # root: reading a library leaves no trace that another rank could see
        call("unshare", NEWNS)
        attributes = (ctypes.c_uint64 * 4)(NOATIME, ATIME, MS_PRIVATE, 0)
        call("mount_setattr", AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    return ruleset


def allowed_calls() -> bytes:
    """A seccomp filter as the kernel takes it: written once, loaded by each rank."""
    if not LINUX:
        raise OSError(f"{sys.platform} has no seccomp")
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in ALLOWED:
        with contextlib.suppress(OSError):  # not every machine has each of them
            rules.add_rule(pyseccomp.ALLOW, name)
    for name, argument, bits, value in ALLOWED_IF:
        condition = pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, bits & 0xFFFFFFFF, value)
        rules.add_rule(pyseccomp.ALLOW, name, condition)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; libc then takes clone
    # libstdc++ waits on such a futex while another thread sets a static variable: now it looks again instead
    shared = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 128, 0)
    rules.add_rule(pyseccomp.ERRNO(errno.EAGAIN), "futex", shared)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def confine_rank(limits: dict[str, int], uid: int | None, walls: Walls, statm: int | None) -> None:
    """Give up everything an answer does not need, for good; with a `uid`, become that user."""
    limit({"CORE": 0, "FSIZE": 0, "NOFILE": 128, **limits}, statm)
    if uid is not None:
        become(uid)
    prctl(SET_NO_NEW_PRIVS, 1)
    prctl(SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
    if walls.files is not None:
        call("landlock_restrict_self", walls.files, 0)
        os.close(walls.files)
    if walls.calls is not None:
        program = ctypes.create_string_buffer(walls.calls)  # of instructions of 8 bytes
        head = struct.pack("@HP", len(walls.calls) // 8, ctypes.addressof(program))
        call("prctl", SET_SECCOMP, FILTER, head, 0, 0)


def become(uid: int) -> None:
    """Change from root to `uid`, with one right left: to read. Landlock says what."""
    prctl(SET_KEEPCAPS, 1)
    with contextlib.suppress(OSError):  # root of a namespace that has no other user
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if LINUX:
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        call("capset", version, (ctypes.c_uint32 * 6)(MAY_READ_ALL, MAY_READ_ALL, 0, 0, 0, 0))


def limit(limits: dict[str, int], statm: int | None) -> None:
    """Set limits for good; "DATA" is what may come to the private memory that the process's `statm` tells."""
    for what, most in limits.items():
        if what == "DATA":
            pages = int(os.pread(statm, 200, 0).split()[5]) if statm is not None else 1 << 20  # macOS
            most += pages * resource.getpagesize()
        which = getattr(resource, f"RLIMIT_{what}")
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS does not know all of them
            resource.setrlimit(which, (most, most))
