"""With --atlas (as `make test` runs it) the run fails unless every row of the atlas is proved (`proved.py`).

Tests run side by side, and ranks beside them: threads of a caller's small sums would only wait for each other
(a check took 13 times as long), so torch gets one in every process, the notebooks' kernels too. Hypothesis
draws the same examples in every run and never looks at the clock: a test that fails does so again.

Ranks compare the headers of collectives, as many messages again, but in tests of the techniques (UNCHECKED).
Tests marked `slow` are the dearest cases of what others show at a smaller size or in another layout:
with --runslow they run, too (`make test ARGS=--runslow`).

Tests marked `cuda` are those of a GPU, `pytest -m cuda`, and each runs in one process or on ranks that put
tensors on `launch.device()`. No other run sees a GPU: its bytes and bits are the CPU's, on every machine. With
--rehearse they run on the CPU, but for those that are about a GPU alone, `cuda(alone=True)`.
"""

import gc
import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from minitrain.course import atlas  # noqa: E402
from tests.proved import Proved  # noqa: E402

TECHNIQUES = "data_parallel|tensor_parallel|context|pipeline|moe|precision|memory|checkpoint"
UNCHECKED = f"tests/({TECHNIQUES}|compose|model|cli|systems)/(?!faults/)"
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--atlas", action="store_true", help="fail unless the test of every row of the atlas proves it"
    )
    parser.addoption("--runslow", action="store_true", help="those marked slow, too")
    parser.addoption("--rehearse", action="store_true", help="tests of a GPU, on the CPU")


def pytest_configure(config):
    if config.getoption("--atlas"):
        config.pluginmanager.register(Proved(config, atlas.rows), "proved")
    if config.getoption("markexpr") != "cuda" or config.getoption("--rehearse"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--runslow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        mark = item.get_closest_marker("cuda")
        rehearsed = config.getoption("--rehearse") and mark and not mark.kwargs.get("alone")
        if mark and not (rehearsed or torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and is run by -m cuda"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") == "loadscope":
        from tests.turns import Turns

        return Turns(config, log)


@pytest.fixture(autouse=True)
def headers_are_not_compared_where_others_compare_them(request, monkeypatch):
    if re.match(UNCHECKED, request.node.nodeid):
        monkeypatch.setenv("MINITRAIN_CHECKED", "0")


def pytest_collection_finish():
    gc.freeze()  # thousands of tests stay to the end: nothing to look at each time that garbage is collected
