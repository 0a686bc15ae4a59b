"""Under torchrun: the ranks are there, on however many nodes, and `run` runs fn on them.

All results reach all ranks. A rank cannot stop its neighbours here: if one fails while others wait, or time
is up, the process ends, and torchrun ends the job.
"""

import atexit
import datetime
import faulthandler
import gc
import json
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from minitrain.ranks import collectives
from minitrain.ranks.launch import pickled, report
from minitrain.ranks.launch import ranks as launch_ranks
from minitrain.ranks.launch.report import LaunchTimeout, RankError
from minitrain.ranks.process import PROCESS

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 3.0  # for others to come to an end too, after this rank failed
FOREVER = datetime.timedelta(days=30)  # the group's own time-out: ours is the alarm


def here() -> bool:
    """Is this process a rank of a job?"""
    return all(variable in os.environ for variable in VARIABLES)


class Job:
    """This process as a rank of a torchrun job: joined at the first `run`, kept for the later ones."""

    @classmethod
    def find(cls, ranks: int, start_timeout_s: float) -> "Job":
        job = PROCESS.job = PROCESS.job or cls(start_timeout_s)
        if ranks != job.size and job.rank == 0:
            print(f"this job has {job.size} ranks: running on all of them instead of ranks={ranks}")
        return job

    def __init__(self, start_timeout_s: float):
        self.launches, self.rank = 0, int(os.environ["RANK"])
        self.file = tempfile.TemporaryFile()  # without a name: nothing stays if the job is killed
        self.log = f"/dev/fd/{self.file.fileno()}"
        cure = f"outside a job unset {' '.join(VARIABLES)}, which are left over from one"
        with alarm(self, start_timeout_s, f"the ranks of this job have not all joined ({cure})"):
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
            with alarm(self, timeout_s, "this rank has not finished"):
                try:
                    result = fn(*args)
                    collectives.settle()
                    try:  # every rank runs the same program: with plain pickle classes keep their identity
                        data, error = pickle.dumps(result), None
                    except Exception:
                        data, error = pickled.result(result), None
                except BaseException as failure:  # sys.exit included
                    data, error = None, report.record(failure)
                self.agree(error, timeout_s)
                everyone = [None] * self.size
                dist.all_gather_object(everyone, data, group=self.talk)
        finally:
            del os.environ["MINITRAIN_INSIDE"]
        return [result if rank == self.rank else pickle.loads(data) for rank, data in enumerate(everyone)]

    def agree(self, error: dict | None, timeout_s: float) -> None:
        """Return if no rank failed; the same RankError on all if all came to an end; else end the job."""
        key = f"launch-{self.launches}"
        self.store.set(f"{key}/{self.rank}", json.dumps(error))
        try:
            patience = datetime.timedelta(seconds=GRACE_S if error else timeout_s + GRACE_S)
            self.store.wait([f"{key}/{rank}" for rank in range(self.size)], patience)
        except dist.DistError:
            late = LaunchTimeout("other ranks are late")
            self.end(report.failure({self.rank: error}, {}) if error else late)
        errors = {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)}
        if any(errors.values()):
            raise report.failure({rank: error for rank, error in errors.items() if error}, {})

    def end(self, error: RankError) -> None:
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}", error.traceback, sep="\n\n", file=sys.stderr, flush=True)
        os._exit(1)  # torchrun stops the other ranks, which may wait in native code for this one


def leave() -> None:
    """Let go of every group: gloo joins its threads then; a process that ends before may abort."""
    PROCESS.job = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what still refers to a group may be a cycle


@contextmanager
def alarm(job: Job, seconds: float, complaint: str) -> Iterator[None]:
    """Ends this process of a torchrun job, saying where it is, unless the block ends in time."""
    timer = threading.Timer(seconds, ring, (job, seconds, complaint))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it refers to the job, and the job to its groups: see `leave`


def ring(job: Job, seconds: float, complaint: str) -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stuck = report.stuck(file.read(), collectives.read_log(job.log), {})
    where = report.say(stuck.text, [job.rank])
    print(f"LaunchTimeout: {complaint} after {seconds:g} s: {where}", file=sys.stderr, flush=True)
    threading.Event().wait(GRACE_S)  # let the other ranks say where they are
    os._exit(1)
