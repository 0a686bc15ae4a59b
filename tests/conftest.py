"""With --atlas (as `make test` runs it): every test that the atlas names must have run and passed, or the run
fails.

Tests run side by side, and ranks beside them: threads of a caller's small sums would only wait for each other
(a check took 13 times as long), so torch gets one in every process, the notebooks' kernels too. Hypothesis
draws the same examples in every run and never looks at the clock: a test that fails does so again.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import hypothesis  # noqa: E402

from minitrain.course import atlas  # noqa: E402

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

PASSED: set[str] = set()


def pytest_addoption(parser):
    parser.addoption(
        "--atlas", action="store_true", help="fail unless every test that the atlas names ran and passed"
    )


def pytest_collection_finish():
    gc.freeze()  # thousands of tests stay to the end: nothing to look at each time that garbage is collected


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        PASSED.add(report.nodeid.split("[")[0])


def pytest_sessionfinish(session):
    if not session.config.getoption("--atlas") or hasattr(session.config, "workerinput"):
        return  # under xdist the controller hears of every test; the workers do not judge
    missing = [f"{row.id}: {row.test}" for row in atlas.rows() if row.test not in PASSED]
    if missing:
        session.exitstatus = 1
        print(
            f"\n{len(missing)} rows of the atlas have no test that ran and passed:\n  " + "\n  ".join(missing)
        )
