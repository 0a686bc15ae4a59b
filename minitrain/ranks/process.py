"""What the functions of this process share, in one object: minitrain's only state that no argument carries.

A process is one rank: torch has one default group per process, and autograd runs backward on threads of its
own. So what holds "here" (is checked mode on? who observes the calls? is a rank gone?) holds on all threads;
a ContextVar, whose value a new thread does not see, cannot carry it.
"""

import os
import threading
from collections import deque

LAST_CALLS = 64  # how many calls are remembered
JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a rank of its job


class Process:
    def __init__(self) -> None:
        # collectives: the log of calls (call_log.py), and who hears of them
        self.recent: deque = deque(maxlen=LAST_CALLS)
        self.num_calls = 0
        self.log_file = None
        self.observers: list = []
        self.begin = lambda ch, what, start: start()  # a call; faults on purpose put theirs in its place
        self.labels: dict[str, str | None] = {}  # file name -> how call sites print it; None: not at all
        self.thread = threading.local()  # .site: whose line a backward belongs to; .lane: where it waits
        # groups (functions.py): a ProcessGroup has no attributes, so its channel is found by its id
        self.channels: dict[int, object] = {}
        self.on_open = lambda: None  # what a rank does when it first uses a group on gloo
        self.on_streams: list = []  # works of NCCL that are under way, and whose calls they are;
        self.watcher = None  # who looks for those that are done (transport.py)
        self.checked = False  # is checked mode on? (call_log.py)
        # a rank that is gone (channel.py): since when, and how long a wait lasts from then on
        self.lost_since, self.patience_s = None, None
        # launch: the helper of a caller, the job of a rank that torchrun has started, a rank as a member
        self.helper, self.job, self.team = None, None, None
        self.lock = threading.Lock()  # one launch at a time: of the helper, and of cloudpickle's lists

    def __reduce__(self) -> str:
        return "PROCESS"  # in a function that travels to ranks it is theirs


PROCESS = Process()


def in_a_job() -> bool:
    return all(variable in os.environ for variable in JOB)
