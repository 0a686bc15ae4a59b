"""What a run of the tests proves of the atlas: each row's test passed, and on ranks where the row says so.

A row holds if every case of its test that ran passed, one at least did, and no case was skipped but for want
of a GPU (the mark `cuda`). It says "ranks" only if its test, or a fixture that it uses, launched more than one
of them, and "tensors" only if nothing did; what is simulated or computed may be compared with ranks.

A launch is seen where the caller starts one (`local.run_local`): the number of ranks is put down. What a
fixture launched counts for every test that uses it; so does what a function launched whose results are
remembered (`functools.cache`) in the test's module. A test that leaves launching to a process of its own
(torchrun, a killed launcher) says `record_property("ranks", 4)`, once it has heard from so many.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Case:
    """One test with one set of parameters, as the reports of its phases have it."""

    name: str
    outcome: str  # passed, failed, skipped
    needs_gpu: bool = False
    ranks: int = 0  # the most that it launched at once


def shortfall(row, cases: list[Case]) -> str | None:
    """Why the row is not proved by the cases of its test; None if it is."""
    passed = [case for case in cases if case.outcome == "passed"]
    for case in cases:
        if case.outcome == "failed" or (case.outcome == "skipped" and not case.needs_gpu):
            return f"{case.name} {'failed' if case.outcome == 'failed' else 'was skipped'}"
    if not passed:
        return "did not run and pass"
    ranks = max(case.ranks for case in passed)
    if row.shown == "ranks" and ranks < 2:
        return "the row says ranks, and none were launched"
    if row.shown == "tensors" and ranks > 1:
        return f"the row says tensors in one process, and {ranks} ranks were launched"
    return None


class Proved:
    """The plugin: counts launches where tests run, judges where their reports arrive."""

    def __init__(self, config, rows: Callable):
        self.config, self.rows = config, rows
        self.launched: list[int] = []  # ranks of every launch of this process so far
        self.by_fixture: dict[tuple, int] = {}
        self.cases: dict[str, Case] = {}

    # ---- where tests run

    def watch_launches(self) -> None:
        """From now on; again if the module has been loaded since."""
        local = sys.modules.get("minitrain.ranks.launch.local")
        if local is None or hasattr(local.run_local, "__wrapped__"):
            return
        run_local = local.run_local

        @functools.wraps(run_local)
        def counted(call, ranks, *args, **more):
            self.launched.append(ranks)
            return run_local(call, ranks, *args, **more)

        local.run_local = counted

    def most_since(self, start: int) -> int:
        return max(self.launched[start:], default=0)

    def pytest_collection_finish(self, session):
        found = {}  # a function that several modules import is one
        for module in {getattr(item, "module", None) for item in session.items} - {None}:
            for name, value in list(vars(module).items()):
                if isinstance(value, functools._lru_cache_wrapper):
                    found.setdefault(value, Remembered(value, self.launched))
                    setattr(module, name, found[value])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        self.watch_launches()
        start = len(self.launched)
        try:
            return (yield)
        finally:
            self.by_fixture[fixturedef.baseid, fixturedef.argname] = self.most_since(start)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.watch_launches()
        start = len(self.launched)
        try:
            return (yield)
        finally:
            used = getattr(item, "fixturenames", ())
            fixtures = [
                most
                for (base, name), most in self.by_fixture.items()
                if name in used and item.nodeid.startswith(base)
            ]
            item.user_properties.append(("ranks", max(self.most_since(start), *fixtures, 0)))

    # ---- where their reports arrive

    def pytest_runtest_logreport(self, report):
        last = self.cases.get(report.nodeid)
        if report.outcome == "failed" or (report.outcome == "skipped" and last is None):
            outcome = report.outcome
        elif report.when == "call":
            outcome = report.outcome
        else:
            return
        ranks = max((most for name, most in report.user_properties if name == "ranks"), default=0)
        self.cases[report.nodeid] = Case(report.nodeid, outcome, "cuda" in report.keywords, ranks)

    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput"):
            return  # under xdist the controller hears of every test; the workers do not judge
        by_test = defaultdict(list)
        for case in self.cases.values():
            by_test[case.name.split("[")[0]].append(case)
        wrong = [(row, shortfall(row, by_test[row.test])) for row in self.rows()]
        wrong = [f"{row.id}: {row.test}: {why}" for row, why in wrong if why]
        if wrong:
            session.exitstatus = 1
            print(f"\n{len(wrong)} rows of the atlas are not proved by this run:\n  " + "\n  ".join(wrong))


class Remembered:
    """A cached function; who is given a result again is told again what was launched for it."""

    def __init__(self, function: Callable, launched: list[int]):
        functools.update_wrapper(self, function)
        self.function, self.launched, self.by_call = function, launched, {}

    def __call__(self, *args, **more):
        call, start = (args, tuple(more.items())), len(self.launched)
        result = self.function(*args, **more)
        if len(self.launched) > start:
            self.by_call[call] = self.launched[start:]
        else:
            self.launched += self.by_call.get(call, ())
        return result

    def __getattr__(self, name):
        return getattr(self.function, name)
