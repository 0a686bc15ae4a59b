"""N ranks: fresh processes of this machine, the ranks of torchrun, or one of thousands in a dry run.

First  start               launch.run(fn, ranks=4): the reader's function on N ranks
       dryrun              dryrun.run(fn, rank=0, ranks=4096): the same as one rank, shapes without numbers
then   local               the caller's side of a launch on this machine
       ranks               the other: a helper that has loaded what ranks are forked with, and a rank
       report              who is to blame, in one sentence
       team                who is a member of a launch that goes on when ranks die
       pickled             what travels between them: anything, tensors of all dtypes
beside shared_cores        what Linux's scheduler is asked when ranks share cores

This folder is one module to its users: `from minitrain import launch`.
"""

from minitrain.ranks.launch.ranks import device, where
from minitrain.ranks.launch.report import LaunchTimeout, RankError
from minitrain.ranks.launch.start import leave, run
from minitrain.ranks.launch.team import team

__all__ = ["LaunchTimeout", "RankError", "device", "leave", "run", "team", "where"]
