"""A dozen of the faults of `python -m tests.ranks.launch.faults`: each way to fail, at each moment, by each of them."""

import pytest

from tests.ranks.launch import faults

SAMPLE = """
first-import-raise    last-import-hang    several-before-long    first-before-shape    several-before-order
first-inside-kill     last-inside-stop    last-async-dtype       several-async-segfault
first-after-hang      last-after-term    last-result-unpicklable    several-result-stop    first-result-os_exit
"""


@pytest.mark.parametrize("name", SAMPLE.split())
def test_a_fault_names_the_ranks_and_leaves_nothing(name, tmp_path):
    (fault,) = [fault for fault in faults.FAULTS if str(fault) == name]
    assert faults.trouble(fault, str(tmp_path)) == ""


def test_names_are_unique_and_the_check_sees_what_it_should():
    names = [str(fault) for fault in faults.FAULTS]
    assert len(set(names)) == len(names) > 150
    fault = faults.Fault("last", "before", "kill")
    good = faults.launch.RankError("rank 3 died of SIGKILL (kill -9)", (3,))
    assert faults.wrong_with(good, fault) == ""
    bad = [
        None,
        faults.launch.RankError("rank 3 died of SIGKILL", (0, 3)),
        faults.launch.RankError("rank 3 died of SIGKILL\n", (3,)),
        faults.launch.RankError("rank 3 died of SIGTERM", (3,)),
        faults.launch.LaunchTimeout("rank 3 died of SIGKILL", (3,)),
    ]
    assert all(faults.wrong_with(error, fault) for error in bad)
