"""Which tests may run on another core than the rest of their file, when `--dist loadscope` shares them out.

pytest-xdist keeps a file on one worker, so that what its tests share is made once, and begins with the files of
the most tests. A file of few tests that take long then comes last and runs on one core while the other has
nothing left to do. Tests of the files below share nothing that is not there in every worker; each goes alone.
Alone they come last, in the order of their files, so that the end is filled with small pieces.
"""

from xdist.scheduler import LoadScopeScheduling

ALONE = (  # seconds of processor time of a test, as measured
    "tests/checkpoint/test_kills.py",  # 48 and 68
    "tests/course/test_exercises_proofs.py",  # 8 to 24 for a proof
    "tests/test_layouts.py",  # 7 to 14
)


def scope_of(nodeid: str) -> str:
    """What is given to one worker as a whole: a file, or a test."""
    file = nodeid.partition("::")[0]
    return nodeid if file in ALONE else nodeid.rpartition("::")[0]


class Turns(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
