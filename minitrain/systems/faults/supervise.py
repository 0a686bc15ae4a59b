"""A launch that is made again when a rank has failed: for a job that goes on from its checkpoints.

    supervise(train, folder, ranks=4, restarts=5)      train(folder) resumes from what it finds there

A restart costs new processes, the load, and the steps since the checkpoint; nothing else of minitrain is
needed for it, and any error of a rank or a hang (`timeout_s`) is its case. Sends nothing itself. The last
error is raised when `restarts` are used up, others than RankError at once. torchrun's --max-restarts. Differs
in that each error is said, with the rank that is to blame.
"""

import os
import sys
from collections.abc import Callable

from minitrain.ranks import launch
from minitrain.ranks.checks import require_ints
from minitrain.ranks.launch.report import RankError


def supervise(fn: Callable, *args, restarts: int = 5, **settings) -> list:
    """launch.run(fn, *args, **settings), which is made again up to `restarts` times when a rank fails."""
    require_ints(restarts=restarts)
    for life in range(restarts + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life)  # as torchrun tells its ranks
        try:
            return launch.run(fn, *args, **settings)
        except RankError as error:
            if life == restarts:
                raise
            print(f"{error}; restart {life + 1} of {restarts}", file=sys.stderr, flush=True)
        finally:
            del os.environ["TORCHELASTIC_RESTART_COUNT"]
