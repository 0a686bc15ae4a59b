"""Walls around an answer's process: what it can see, whom it can reach, how much it can take.

`build_walls` is called once, in the server that answers are forked from; the new root holds read-only binds
of Python, its libraries and minitrain, and nothing else: no home, no exercises, no /proc. `confine_rank` is
called in each forked process and gives it

    its own        processes, network (no interface is up), IPC, host name, one place to write (`PRIVATE`)
    its limits     processes, address space, data, file size, descriptors, CPU seconds; no core dumps
    no way back    an unprivileged user, no capabilities, privileges or user namespaces, death with its parent

All of it hangs on a user namespace of Linux, so root and an ordinary user get the same walls. Where the
system forbids or lacks one, only the limits stay, and the report calls itself a self-check. Not covered: bugs
of the kernel, accomplices who signal by timing or file locks, and the memory of unmapped files (64 MB each).
namespaces(7), user_namespaces(7), pivot_root(2), mount_setattr(2); built like bubblewrap.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

LINUX = sys.platform == "linux"
NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MNT_DETACH = 4096, 16384, 1 << 18, 2, 4, 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
SYSCALLS = {"mount_setattr": 442, "pivot_root": PIVOT_ROOT}  # which libc does not know; -1 is refused
NOBODY = 65534
PRIVATE = "/private"
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
SYSTEM = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/nix/store", *DEVICES]

libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *args) -> None:
    """A libc function or system call that answers 0, or OSError with its name."""
    known = function not in SYSCALLS
    answer = getattr(libc, function)(*args) if known else libc.syscall(SYSCALLS[function], *args)
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


# ---- once, in the server ---------------------------------------------------------------------------------


def separate_mounts() -> None:
    """Leave the caller's user and mount namespaces; OSError where that is forbidden."""
    if not LINUX:
        raise OSError(f"{sys.platform} has no namespaces")
    if tuple(int(number) for number in os.uname().release.split(".")[:2]) < (5, 14):
        raise OSError("Linux is older than 5.14")
    call("unshare", NEWUSER | NEWNS)


def separate_processes() -> int:
    """Fork into a new process namespace and go on as its first process; the one left behind waits for it.

    Returns a descriptor of that namespace. When its first process ends, the kernel ends all forked below.
    """
    call("unshare", NEWPID)
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
    die_with_parent()
    return os.open("/proc/thread-self/ns/pid_for_children", os.O_RDONLY)


def visible_paths(package: Path) -> list[str]:
    """What an answer may read: the system's libraries, this Python and its packages, minitrain itself."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    packages = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return [path for path in [*SYSTEM, *sorted(python | packages), str(package)] if os.path.lexists(path)]


def build_walls(package: Path, hidden: Path) -> None:
    """Make a root that holds only `visible_paths`, read-only. Raises OSError if that would show `hidden`."""
    paths = visible_paths(package)
    for path in paths:
        if hidden.is_relative_to(os.path.realpath(path)):
            raise OSError(f"{hidden} lies inside {path}, which an answer must be able to read")
    # No second way to capabilities. /proc/sys is read-only in many containers: they still open no wall then.
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    new = "/proc"  # a directory that every system has and that must not be seen any more
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", new, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for path in paths:
        show(path, new + path)
    for folder in (PRIVATE, "/.old"):
        os.mkdir(new + folder)
    os.chdir(new)
    call("pivot_root", b".", b".old")
    os.chdir("/")
    call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    call("mount_setattr", AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def show(path: str, target: str) -> None:
    """Make `path` visible as `target`: a bind of it, or the same symbolic link."""
    if os.path.lexists(target):
        return  # part of something shown before
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and os.path.realpath(path).startswith("/usr/"):
        os.symlink(os.readlink(path), target)  # /lib -> usr/lib
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        open(target, "x").close()
    mount(path, target, "", MS_BIND | MS_REC)


# ---- in the processes of each rank -----------------------------------------------------------------------


def die_with_parent() -> None:
    if LINUX:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes whose parent ends below us become our children, so that we find them when we clean up."""
    if LINUX:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def open_proc() -> int | None:
    """A descriptor of /proc to look into after /proc is out of sight; None where there is no /proc."""
    return os.open("/proc", os.O_PATH | os.O_DIRECTORY) if os.path.exists("/proc/self/statm") else None


class OwnMemory:
    """How much memory this process has mapped, by the kernel's count. `proc`: see `open_proc`."""

    def __init__(self, proc: int | None) -> None:
        self.statm = None if proc is None else os.open("self/statm", os.O_RDONLY, dir_fd=proc)

    def bytes(self) -> tuple[int, int]:
        """(address space, private data)"""
        if self.statm is None:
            return 1 << 33, 1 << 32
        fields = os.pread(self.statm, 200, 0).split()
        return int(fields[0]) * resource.getpagesize(), int(fields[5]) * resource.getpagesize()


@dataclass(frozen=True)
class Limits:
    """What one rank may take. `processes` counts threads too, of all ranks of an answer together."""

    memory_bytes: int = 1 << 30
    cpu_s: int = 60
    processes: int = 128
    uid: int | None = None  # the user to become; None: stay who we are


def confine_rank(limits: Limits, memory: OwnMemory, walls: bool) -> None:
    """Give up everything an answer does not need, for good: a hard limit cannot be raised again."""
    if walls:
        call("unshare", NEWNET | NEWIPC | NEWUTS | NEWNS)
        mount("tmpfs", PRIVATE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
        os.chdir(PRIVATE)
    address_space, data = memory.bytes()
    limit("CORE", 0)
    limit("FSIZE", 64 << 20)
    limit("NOFILE", 128)
    limit("CPU", limits.cpu_s)
    limit("NPROC", limits.processes)
    limit("DATA", data + limits.memory_bytes)
    limit("AS", address_space + 2 * limits.memory_bytes)
    if limits.uid is not None:
        become(limits.uid, must=walls)
    if LINUX:
        version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        call("capset", version, none)
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    die_with_parent()  # last: a change of user clears it


def become(uid: int, must: bool) -> None:
    """Change the user. Without walls a root that may not goes on: the report says "self-check"."""
    with contextlib.nullcontext() if must else contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def limit(what: str, most: int) -> None:
    which = getattr(resource, f"RLIMIT_{what}")
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS does not know all of them
        resource.setrlimit(which, (most, most))
