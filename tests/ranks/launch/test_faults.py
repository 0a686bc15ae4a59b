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
