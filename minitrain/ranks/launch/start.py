"""Run a function on N ranks: fresh processes of this machine or, under torchrun, the ranks there are.

    results = run(fn, *args, ranks=4)      fn(*args) on every rank, in one process group; results by rank

Every launch has new processes, forked from a helper that has torch loaded (`ranks.py`): the first takes 2 s,
every later one 0.1 s. `fn` travels by value (cloudpickle): a notebook's function, a lambda or a closure
works, and the caller's script is not run again. Ranks find each other through a file in a private directory,
and gloo is bound to the loopback. (A TCP store listens everywhere, and stalled 5 s in one start of five.)

The first rank that fails ends the launch within a second with a `RankError` that names it, too long a time
with a `LaunchTimeout` that says where each rank was. In any case all are killed before `run` returns. Under
torchrun `run` starts nothing: the ranks there are, on however many nodes, run fn, and all get all results. If
one fails while others wait, or time is up, its process ends, and torchrun ends the job.
"""

import atexit
import datetime
import faulthandler
import gc
import json
import math
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints
from minitrain.ranks.launch import local, pickled, report
from minitrain.ranks.launch import ranks as launch_ranks
from minitrain.ranks.launch.report import LaunchTimeout, RankError
from minitrain.ranks.process import JOB, PROCESS, in_a_job

LONGEST_S = 10 * 24 * 3600.0  # what torch can count in milliseconds, twice; `timeout_s=inf` means this
GRACE_S = 3.0  # for others of a job to come to an end too, after this rank failed
FOREVER = datetime.timedelta(days=30)  # the time-out of a job's groups: ours is the alarm


def run(
    fn: Callable,
    *args,
    ranks: int = 2,
    timeout_s: float = 60.0,
    start_timeout_s: float = 60.0,
    checked: bool | None = None,
    echo: bool = True,
    grace_s: float | None = None,
    survive: bool = False,
    replace_s: float | None = None,
    hung_s: float | None = None,
    restarts: int = 0,
) -> list:
    """Call fn(*args) on every rank and return the results in rank order.

    `timeout_s` is for fn, `start_timeout_s` for starting processes and finding each other. Time is up when no
    rank has computed or received for so long, or one has as much processor time behind it (in a job, when so
    much time has passed): a busy machine makes ranks slow, and no hang of it. `checked` compares every
    collective across ranks before it runs (None: yes, unless MINITRAIN_CHECKED=0). `echo` shows what ranks
    print, as "[rank 3] text" in rank order: rank 0 as it runs, the others at the end. A rank has the
    environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), one torch thread, and
    all seeds at 0; when fn has returned everywhere it is killed: what must be closed is closed in fn. For
    `grace_s` after the first failure the others may come to an end by themselves, to save what they have say:
    a collective that waits for a rank that is gone fails after a third of it (torchrun ends them itself).

    With `survive` a rank that dies ends itself alone, and its result is None: collectives of the others raise
    a RuntimeError, and `team().regroup()` gives them their next group (team.py). `replace_s` after a death a
    newcomer comes, with a result of its own. When nobody has got on for `hung_s`, longer than any rank works
    without a collective, the one furthest behind is killed. A rank that raises still ends the launch.

    A launch that fails is made anew up to `restarts` times, TORCHELASTIC_RESTART_COUNT as in torchrun: for an
    fn that goes on from its checkpoints. Each error is printed, the last is raised."""
    if os.environ.get("MINITRAIN_INSIDE"):
        cure = "call run from the outside, or use dist.new_group for fewer ranks than there are"
        raise ValueError(f"run was called inside a rank; a rank cannot start ranks: {cure}")
    if not callable(fn):
        raise ValueError(f"fn={fn!r} is not a function; write run(fn) with the function, not run(fn())")
    times = dict(timeout_s=timeout_s, start_timeout_s=start_timeout_s, grace_s=grace_s)
    times |= dict(replace_s=replace_s, hung_s=hung_s)
    require_positive_ints(ranks=ranks)
    require_ints(restarts=restarts)
    require_positive(**{name: seconds for name, seconds in times.items() if seconds not in (None, math.inf)})
    if survive and (grace_s or in_a_job()) or not survive and (replace_s or hung_s):
        need = "replace_s and hung_s need it, grace_s ends all, and so does torchrun"
        raise ValueError(f"survive={survive} with {grace_s=}, {replace_s=}, {hung_s=}: {need}")
    if restarts and in_a_job():
        raise ValueError(f"restarts={restarts} in a job of torchrun: give it --max-restarts")
    checked = os.environ.get("MINITRAIN_CHECKED") != "0" if checked is None else checked
    timeout_s, start_timeout_s = min(timeout_s, LONGEST_S), min(start_timeout_s, LONGEST_S)
    if in_a_job():
        PROCESS.job = job = PROCESS.job or Job(start_timeout_s)
        if ranks != job.size and job.rank == 0:
            print(f"this job has {job.size} ranks: running on all of them instead of ranks={ranks}")
        return job.run(fn, args, timeout_s, checked)
    with PROCESS.lock:
        call = pickled.call(fn, args)
        for life in range(restarts + 1):
            try:
                faults = grace_s, survive, replace_s, hung_s, life
                return local.run_local(call, int(ranks), timeout_s, start_timeout_s, checked, echo, *faults)
            except RankError as error:
                if life == restarts:
                    raise
                print(f"{error}; restart {life + 1} of {restarts}", file=sys.stderr, flush=True)


class Job:
    """This process as a rank of a torchrun job: joined at the first `run`, kept for the later ones."""

    def __init__(self, start_timeout_s: float):
        self.launches, self.rank = 0, int(os.environ["RANK"])
        self.file = tempfile.TemporaryFile()  # without a name: nothing stays if the job is killed
        self.log = f"/dev/fd/{self.file.fileno()}"
        cure = f"outside a job unset {' '.join(JOB)}, which are left over from one"
        with self.alarm(start_timeout_s, f"the ranks of this job have not all joined ({cure})"):
            wait = datetime.timedelta(seconds=start_timeout_s)
            store, self.rank, self.size = next(dist.rendezvous("env://", timeout=wait))
            # torchrun keeps one store for all restarts: in it are the addresses of ranks that are dead
            self.store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            if not dist.is_initialized():
                store = dist.PrefixStore("default", self.store)
                launch_ranks.init_group(store, self.rank, self.size, FOREVER)
            atexit.register(leave)
            self.talk = dist.group.WORLD  # results travel as bytes in host memory
            if "cpu" not in dist.get_backend_config():  # of a script that has made the group itself
                self.talk = dist.new_group(backend="gloo", timeout=FOREVER)
        collectives.log_to(self.log)

    def run(self, fn: Callable, args: tuple, timeout_s: float, checked: bool) -> list:
        collectives.set_checked(checked)
        self.launches += 1
        launch_ranks.seed_all()
        os.environ["MINITRAIN_INSIDE"] = "1"
        try:
            with self.alarm(timeout_s, "timeout_s is over: this rank has not finished"):
                data, error = None, None
                try:
                    result = fn(*args)
                    collectives.settle()
                    data = pickled.result(result, same_program=True)
                except BaseException as failure:  # sys.exit included
                    error = report.record(failure)
                self.agree(error, timeout_s)
                everyone = [None] * self.size
                dist.all_gather_object(everyone, data, group=self.talk)
        finally:
            del os.environ["MINITRAIN_INSIDE"]
        return [result if rank == self.rank else pickle.loads(data) for rank, data in enumerate(everyone)]

    def agree(self, error: dict | None, timeout_s: float) -> None:
        """Return if no rank failed; the same RankError on all if all came to an end; else end the job."""
        keys = [f"launch-{self.launches}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(error))
        try:
            self.store.wait(keys, datetime.timedelta(seconds=GRACE_S if error else timeout_s + GRACE_S))
        except dist.DistError:
            late = LaunchTimeout("other ranks are late")
            self.end(report.failure({self.rank: error}, {}) if error else late)
        errors = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys)}
        if any(errors.values()):
            raise report.failure({rank: error for rank, error in errors.items() if error}, {})

    def end(self, error: RankError) -> None:
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}", error.traceback, sep="\n\n", file=sys.stderr, flush=True)
        os._exit(1)  # torchrun stops the other ranks, which may wait in native code for this one

    @contextmanager
    def alarm(self, seconds: float, complaint: str) -> Iterator[None]:
        """Ends this process, saying where it is, unless the block ends in time."""

        def ring() -> None:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                stuck = report.stuck(file.read(), collectives.read_log(self.log), {})
            where = report.say(stuck.text, [self.rank])
            print(f"LaunchTimeout: {complaint} after {seconds:g} s: {where}", file=sys.stderr, flush=True)
            threading.Event().wait(GRACE_S)  # let the other ranks say where they are
            os._exit(1)

        timer = threading.Timer(seconds, ring)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # it refers to the job, and the job to its groups: see `leave`


def leave() -> None:
    """Let go of every group: gloo joins its threads then; a process that ends before may abort."""
    PROCESS.job = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what still refers to a group may be a cycle
