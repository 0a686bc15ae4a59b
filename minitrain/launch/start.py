"""Run a function on N ranks: fresh processes of this machine or, under torchrun, the ranks there are.

    results = run(fn, *args, ranks=4)      fn(*args) on every rank, in one process group; results by rank

Ranks are forked from a helper that has torch loaded (`ranks.py`): the first launch of a process takes 2 s,
every later one 0.1 s. `fn` travels by value (cloudpickle): a function of a notebook cell, a lambda or a
closure works, and the caller's script is not run again. Every launch has new processes.

Ranks find each other through a file in a private directory, and gloo is bound to the loopback. (A TCP store
listens on every interface, needs a free port, and stalled 5 s in one start of five.)

The first rank that fails ends the launch within a second with a `RankError` that names it; a launch that
takes longer than `timeout_s` ends with a `LaunchTimeout` that says where each rank was. Either way, and after
an interrupt, every process is killed before `run` returns.

Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set) `run` starts nothing, runs `fn` on the
ranks there are, on however many nodes, and gives all results to all of them. A rank cannot stop its
neighbours there: if one fails while others wait, or time is up, the process ends, and torchrun ends the job.
"""

import atexit
import copyreg
import datetime
import faulthandler
import gc
import importlib
import inspect
import json
import operator
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from types import ModuleType

import cloudpickle
import torch
import torch.distributed as dist

from minitrain import collectives
from minitrain.launch import local, pickled, report
from minitrain.launch import ranks as launch_ranks
from minitrain.launch.report import LaunchTimeout, RankError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 3.0  # under torchrun: for others to come to an end too, after this rank failed
FOREVER = datetime.timedelta(days=30)  # the group's own time-out: ours is the alarm


def run(
    fn: Callable,
    *args,
    ranks: int = 2,
    timeout_s: float = 60.0,
    start_timeout_s: float = 60.0,
    checked: bool | None = None,
    echo: bool = True,
    grace_s: float | None = None,
) -> list:
    """Call fn(*args) on every rank and return the results in rank order.

    `timeout_s` is for fn, `start_timeout_s` for starting processes and finding each other. `checked` compares
    every collective across ranks before it runs (None: yes, unless MINITRAIN_CHECKED=0). `echo` shows what
    ranks print, as "[rank 3] text" in rank order: rank 0 as it runs, the others at the end. A rank has the
    environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), one torch thread, and
    all seeds at 0. When fn has returned everywhere the ranks are killed, not asked to leave: what must be
    closed is closed in fn, with `with`. `grace_s`: after the first failure the other ranks have that long to
    see it and come to an end by themselves, to save what they have say (not under torchrun, which ends them
    itself). Raises ValueError before anything starts; RankError and LaunchTimeout
    after.
    """
    ranks = _check(fn, args, ranks, timeout_s, start_timeout_s, 1 if grace_s is None else grace_s)
    checked = os.environ.get("MINITRAIN_CHECKED", "1") != "0" if checked is None else checked
    if all(variable in os.environ for variable in TORCHRUN):
        return Job.find(ranks, start_timeout_s).run(fn, args, timeout_s, checked)
    if ranks > 64 * (os.cpu_count() or 1):
        warnings.warn(
            f"{ranks} ranks on {os.cpu_count()} cores will mostly wait; minitrain.launch.dryrun "
            "runs one rank of a world of any size",
            stacklevel=2,
        )
    call = pickled_call(fn, args)
    return local.run_local(call, ranks, timeout_s, start_timeout_s, checked, echo, grace_s)


def device() -> torch.device:
    """The device of this rank: a GPU of its own if there are enough, a shared one if there are fewer, else
    the CPU.
    """
    gpus = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")


def _check(fn, args, ranks, timeout_s, start_timeout_s, grace_s) -> int:
    if os.environ.get("MINITRAIN_INSIDE"):
        raise ValueError(
            "run was called inside a rank; a rank cannot start ranks: call run from the outside, or use "
            "dist.new_group for fewer ranks than there are"
        )
    if not callable(fn):
        raise ValueError(
            f"fn = {fn!r} is not a function; write run(fn) with the function itself, not run(fn())"
        )
    try:
        count = 0 if isinstance(ranks, bool) else operator.index(ranks)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"ranks = {ranks!r}; use a whole number, 1 or more")
    times = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s, "grace_s": grace_s}
    for name, seconds in times.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"{name} = {seconds!r}; use a number of seconds above 0")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions have none
        return count
    try:
        signature.bind(*args)
    except TypeError as error:
        called = f"{getattr(fn, '__name__', fn)}{signature}"
        raise ValueError(f"{called} cannot be called with the {len(args)} arguments given: {error}") from None
    return count


# ---- local ranks: what travels to them -------------------------------------------------------------------

pickling = threading.Lock()  # cloudpickle's list of modules that go by value belongs to the whole process
# torch.backends and a few more are objects of classes of their own in place of modules; they travel by name
# as well.
for kind in {type(module) for module in sys.modules.values() if isinstance(module, ModuleType)} - {
    ModuleType
}:
    copyreg.pickle(kind, lambda module: (importlib.import_module, (module.__name__,)))


def pickled_call(fn: Callable, args: tuple) -> bytes:
    for modules in (single_files(), []):  # by reference where by value fails, over a global lock for instance
        with pickling:
            for module in modules:
                cloudpickle.register_pickle_by_value(module)
            try:
                return pickled.dumps((fn, args))
            except Exception as failure:
                error = failure
            finally:
                for module in modules:
                    cloudpickle.unregister_pickle_by_value(module)
    culprit = "fn"
    for number, argument in enumerate(args):
        try:
            pickled.dumps(argument)
        except Exception:
            culprit = f"argument {number} (a {type(argument).__name__})"
    raise ValueError(
        f"{culprit} cannot be sent to the ranks: {error}; make files, locks, groups and generators in fn"
    )


def single_files() -> list:
    """The reader's own one-file modules, a test or a helper beside a notebook. Their functions travel by
    value as those of a notebook do: as they are loaded here, not as the file is by now, and the file is not
    run once per rank.
    """
    known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    found = []
    for name, module in sys.modules.copy().items():
        if (
            "." in name
            or name in known
            or name != getattr(module, "__name__", "")
            or hasattr(module, "__path__")
        ):
            continue
        file = getattr(module, "__file__", None)
        if file and not file.startswith(report.LIBRARIES):
            found.append(module)
    return found


# ---- under torchrun --------------------------------------------------------------------------------------


class Job:
    """This process as a rank of a torchrun job: joined at the first `run`, kept for the later ones."""

    current: "Job | None" = None

    @classmethod
    def find(cls, ranks: int, start_timeout_s: float) -> "Job":
        if cls.current is None:
            cls.current = cls(start_timeout_s)
        job = cls.current
        if ranks != job.size and job.rank == 0:
            print(f"this job has {job.size} ranks: running on all of them instead of ranks={ranks}")
        return job

    def __init__(self, start_timeout_s: float):
        self.launches, self.rank = 0, int(os.environ["RANK"])
        self.file = tempfile.TemporaryFile()  # without a name: nothing stays if the job is killed
        self.log = f"/dev/fd/{self.file.fileno()}"
        with Alarm(self, start_timeout_s, "the ranks of this job have not all joined"):
            wait = datetime.timedelta(seconds=start_timeout_s)
            self.store, self.rank, self.size = next(dist.rendezvous("env://", timeout=wait))
            if not dist.is_initialized():
                store = dist.PrefixStore("default", self.store)
                launch_ranks.init_group(store, self.rank, self.size, FOREVER)
            atexit.register(leave)
            # results travel as bytes in host memory, whatever moves the tensors
            self.talk = dist.group.WORLD
            if dist.get_backend() != "gloo":
                self.talk = dist.new_group(backend="gloo", timeout=FOREVER)
        collectives.log_to(self.log)

    def run(self, fn: Callable, args: tuple, timeout_s: float, checked: bool) -> list:
        collectives.set_checked(checked)
        self.launches += 1
        launch_ranks.seed_all()
        os.environ["MINITRAIN_INSIDE"] = "1"
        try:
            with Alarm(self, timeout_s, "this rank has not finished"):
                try:
                    result = fn(*args)
                    pickled, error = portable(result), None
                except BaseException as failure:  # sys.exit included
                    pickled, error = None, report.record(failure)
                self.agree(error, timeout_s)
                everyone = [None] * self.size
                dist.all_gather_object(everyone, pickled, group=self.talk)
        finally:
            del os.environ["MINITRAIN_INSIDE"]
        return [result if rank == self.rank else pickle.loads(data) for rank, data in enumerate(everyone)]

    def agree(self, error: dict | None, timeout_s: float) -> None:
        """Return if no rank failed; raise the same RankError on all if all came to an end; else end the
        job.
        """
        key = f"launch-{self.launches}"
        self.store.set(f"{key}/{self.rank}", json.dumps(error))
        try:
            patience = datetime.timedelta(seconds=GRACE_S if error else timeout_s + GRACE_S)
            self.store.wait([f"{key}/{rank}" for rank in range(self.size)], patience)
        except dist.DistError:
            self.end(
                report.failure({self.rank: error}, {}) if error else LaunchTimeout("other ranks are late")
            )
        errors = {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)}
        if any(errors.values()):
            raise report.failure({rank: error for rank, error in errors.items() if error}, {})

    def end(self, error: RankError) -> None:
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}", error.traceback, sep="\n\n", file=sys.stderr, flush=True)
        os._exit(1)  # torchrun stops the other ranks, which may wait in native code for this one


def leave() -> None:
    """Let go of every group: gloo joins its threads then, and a process that ends with them running may
    abort.
    """
    Job.current = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what still refers to a group may be a cycle


class Alarm:
    """Ends this process of a torchrun job, saying where it is, unless the block ends in time."""

    def __init__(self, job: Job, seconds: float, complaint: str):
        self.job, self.seconds, self.complaint = job, seconds, complaint
        self.timer = threading.Timer(seconds, self.ring)
        self.timer.daemon = True

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_) -> None:
        self.timer.cancel()
        self.timer.join()  # it refers to the job, and the job to its groups: see `leave`

    def ring(self) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            dump = file.read()
        stuck = report.stuck(dump, collectives.read_log(self.job.log), {})
        where = report.say(stuck.text, [self.job.rank])
        sys.stderr.write(f"LaunchTimeout: {self.complaint} after {self.seconds:g} s: {where}\n")
        sys.stderr.flush()
        threading.Event().wait(GRACE_S)  # let the other ranks say where they are
        os._exit(1)


def portable(result) -> bytes:
    """Plain pickle where it suffices: every rank runs the same program, so classes keep their identity."""
    try:
        return pickle.dumps(result)
    except Exception:
        return launch_ranks.pickled_result(result)
