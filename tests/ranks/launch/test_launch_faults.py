"""Every way a rank can fail ends the launch, names the rank and the line, and leaves no process.

Each function below fails on one of three ranks while the others wait for it in a collective, where they would
stay.
"""

import ctypes
import inspect
import os
import pickle
import signal
import sys
import textwrap
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.launch import local, report
from tests import patience


def together(x=None):
    return collectives.all_reduce(torch.ones(4) if x is None else x, dist.group.WORLD)


def line_of(fn, text: str) -> str:
    """The place "test_launch_faults.py:41" of the line in the body of `fn` that contains `text`."""
    lines, start = inspect.getsourcelines(fn)
    (number,) = [start + i for i, line in enumerate(lines) if text in line and i > 0]
    return f"{os.path.basename(__file__)}:{number}"


def failing(fn, **given) -> launch.RankError:
    limited = "timeout_s" in given
    with pytest.raises(launch.RankError) as caught:
        launch.run(fn, ranks=3, **{"timeout_s": 500} | given)
    error = caught.value
    late = isinstance(error, launch.LaunchTimeout)
    assert limited or not late, "the failure ends the launch, not the time-out"
    assert "\n" not in str(error) and late == ("not finished" in str(error))
    wait_for_no_children()
    return error


def wait_for_no_children() -> None:
    helper = psutil.Process(local.Helper.find().process.pid)
    patience.until(lambda: not helper.children(recursive=True))


# ---- exceptions ------------------------------------------------------------------------------------------


def before_a_collective():
    if dist.get_rank() == 2:
        raise ValueError("bad batch")
    together()


def during_a_collective():
    if dist.get_rank() == 2:
        together("not a tensor")
    together()


def after_a_collective():
    together()
    if dist.get_rank() == 2:
        raise KeyError("weight")
    dist.barrier()


def in_a_library():
    torch.nn.functional.linear(torch.ones(3), torch.ones(2, 2 if dist.get_rank() == 2 else 3))
    together()


@pytest.mark.parametrize(
    "fn, mark, message",
    [
        (before_a_collective, "bad batch", "rank 2 raised ValueError: bad batch"),
        (during_a_collective, "not a tensor", "rank 2 raised "),
        (after_a_collective, '"weight"', "rank 2 raised KeyError: 'weight'"),
        (in_a_library, "linear(", "rank 2 raised RuntimeError: "),
    ],
)
def test_an_exception_names_rank_and_line(fn, mark, message):
    error = failing(fn)
    line = line_of(together, "return") if fn is during_a_collective else line_of(fn, mark)
    assert str(error).startswith(message) and str(error).endswith(f"({line})") and error.ranks == (2,)
    assert f"in {fn.__name__}" in error.traceback and "ranks/launch/ranks.py" not in error.traceback
    assert error.__notes__ == ["\n" + error.traceback.rstrip()], "a traceback shows the rank's own below"


def test_equal_errors_are_named_together():
    def need_eight():
        raise ValueError("need 8 ranks")

    error = failing(need_eight)
    assert error.ranks == (0, 1, 2)
    assert str(error) == f"ranks 0, 1, 2 raised ValueError: need 8 ranks ({line_of(need_eight, 'raise')})"


def test_the_neighbours_of_a_rank_that_raises_hear_nothing(tmp_path):
    """Its sockets stay open until the caller decides; a lost connection would be blamed on the wrong rank."""

    def fail():
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("mine")
        try:
            dist.recv(torch.ones(1), 1)
        except RuntimeError as error:
            (tmp_path / "heard").write_text(str(error))

    assert failing(fail).ranks == (1,)
    assert not (tmp_path / "heard").exists()


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(failing(before_a_collective)))
    assert "bad batch" in str(error) and error.ranks == (2,) and "in before_a_collective" in error.traceback


def test_a_result_that_cannot_be_sent_back():
    error = failing(lambda: (i for i in range(3)) if dist.get_rank() == 1 else 0)
    assert str(error).startswith(
        "rank 1 raised TypeError: fn returned a generator, which cannot be sent back"
    )
    assert error.ranks == (1,)


def test_a_module_the_ranks_do_not_have(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "__init__.py").write_text("def work(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import gone

    (tmp_path / "gone" / "__init__.py").unlink()
    (tmp_path / "gone" / "__init__.py").write_text("raise ImportError('not any more')")
    assert "raised ImportError: not any more" in str(failing(gone.work))


# ---- processes that end ----------------------------------------------------------------------------------


def segfault():
    together()
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    together()


def killed():
    together()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    together(torch.ones(4_000_000))


def silent_exit():
    if dist.get_rank() == 1:
        os._exit(0)
    together()


def polite_exit():
    if dist.get_rank() == 1:
        sys.exit(3)
    together()


def native_abort():
    if dist.get_rank() == 1:
        os.write(2, b"terminate called after throwing")
        os.abort()
    together()


@pytest.mark.parametrize(
    "fn, message",
    [
        (segfault, f"rank 1 died of SIGSEGV at {line_of(segfault, 'string_at')}"),
        (killed, "rank 1 died of SIGKILL (kill -9, or the system ran out of memory"),
        (killed, f"; last collective: all_reduce #0 ({line_of(together, 'return')})"),
        (silent_exit, "rank 1 ended the process with status 0 (os._exit?) before fn returned"),
        (
            polite_exit,
            f"rank 1 called sys.exit(3) ({line_of(polite_exit, 'sys.exit')}); return from fn instead",
        ),
        (native_abort, f"rank 1 died of SIGABRT at {line_of(native_abort, 'os.abort')}"),
    ],
)
def test_a_process_that_ends_is_named_and_its_neighbours_are_not(fn, message):
    error = failing(fn)
    assert message in str(error) and error.ranks == (1,)
    assert "Connection closed" not in str(error), "what the neighbours saw is not the cause"
    if fn is native_abort:
        assert "terminate called after throwing" in error.traceback


def in_two_shapes():
    x = torch.ones(4 if dist.get_rank() else 6)
    collectives.all_reduce(x, dist.group.WORLD, async_op=True)  # nobody waits


def test_a_mismatch_in_a_call_that_nobody_waits_for_fails_the_launch():
    error = failing(in_two_shapes)
    assert "CollectiveMismatch" in str(error) and "nobody waited for this asynchronous call" in str(error)


def outside():
    collectives.all_reduce(torch.ones(2), None)


@pytest.mark.parametrize("call", [collectives.world, outside])
def test_a_collective_outside_a_launch_says_where_to_call_it(call):
    said = r"^there are no ranks here.*call this inside launch.run\(fn, ranks=4\)"
    with pytest.raises(ValueError, match=said):
        call()


# ---- hangs -----------------------------------------------------------------------------------------------


def asleep():
    together()
    if dist.get_rank() == 2:
        time.sleep(1000)
    together()


def in_a_loop():
    while dist.get_rank() == 2:  # asking for its rank is not waiting for anybody
        pass
    dist.barrier()


def one_call_fewer():
    together()
    if dist.get_rank() != 2:
        together()


def stopped():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    together()


def in_a_circle():
    dist.recv(torch.ones(1), (dist.get_rank() + 1) % 3)


@pytest.mark.parametrize(
    "fn, ranks, first, others",
    [
        (asleep, (2,), f"rank 2 stands at {line_of(asleep, 'sleep')}, in no collective", "all_reduce #1 ("),
        (in_a_loop, (2,), "rank 2 stands at test_launch_faults.py", "torch.distributed.barrier ("),
        (one_call_fewer, (2,), "rank 2 returned from fn", "all_reduce #1 ("),
        (stopped, (2,), "rank 2 gives no answer to signals (stopped?)", "all_reduce #0 ("),
        (in_a_circle, (0, 1, 2), "ranks 0, 1, 2 wait in torch.distributed.recv (", ""),
    ],
)
def test_a_hang_tells_where_every_rank_was(fn, ranks, first, others):
    error = failing(fn, timeout_s=2)
    assert type(error) is launch.LaunchTimeout and error.ranks == ranks
    assert str(error).startswith(f"not finished after 2 s: {first}"), str(error)
    assert not others or f"; ranks 0, 1 wait in {others}" in str(error), str(error)
    assert f"in {fn.__name__}" in error.traceback, "the stacks of the waiting ranks"


def test_a_rank_that_does_not_start_is_named():
    class Slow:
        def __reduce__(self):
            return time.sleep, (1000,)  # what a rank does to rebuild the argument

    with pytest.raises(launch.LaunchTimeout, match="0 of 2 ranks arrived after 1 s; missing: ranks 0, 1"):
        launch.run(lambda x: x, Slow(), start_timeout_s=1)
    wait_for_no_children()


# ---- the helper and the caller ---------------------------------------------------------------------------


def test_a_dead_helper_is_replaced():
    assert launch.run(dist.get_rank) == [0, 1]
    helper = local.Helper.find().process  # once: asked again after its death, `find` starts another
    helper.kill()
    helper.wait()
    assert launch.run(dist.get_rank) == [0, 1]


def test_a_helper_killed_during_a_launch_takes_its_ranks_along(tmp_path):
    def die():
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(launch.RankError, match="the helper process that forks ranks is gone"):
        launch.run(die, ranks=3)
    patience.until(lambda: all(patience.gone(int(path.name)) for path in tmp_path.iterdir()))
    assert launch.run(dist.get_rank) == [0, 1]


WAIT_FOR_EVER = """
    import os, sys, tempfile, time
    import torch, torch.distributed as dist
    from minitrain import launch
    folder = sys.argv[1]
    tempfile.tempdir = folder

    def wait(turn):
        with open(f"{folder}/{turn}-{os.getpid()}", "w"):
            pass
        dist.barrier()
        if dist.get_rank() == 0:
            with open(f"{folder}/waiting-{turn}", "w"):
                pass
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    for turn in (1, 2):
        try:
            launch.run(wait, turn, ranks=4, timeout_s=1000)
        except KeyboardInterrupt:
            assert not [name for name in os.listdir(folder) if name.startswith("minitrain-")]
            print("interrupted", launch.run(dist.get_rank), flush=True)
"""


def test_an_interrupt_is_for_the_caller_it_returns_at_once_and_a_killed_caller_leaves_nothing(tmp_path):
    """One process whose 4 ranks wait in gloo for ever: they are interrupted, then it, and, waiting again, killed."""
    (tmp_path / "script.py").write_text(textwrap.dedent(WAIT_FOR_EVER))
    env = dict(os.environ, PYTHONPATH=os.path.dirname(report.PACKAGE.rstrip(os.sep)))
    process = patience.start([sys.executable, tmp_path / "script.py", tmp_path], env=env, stderr=None)

    def waiting(turn: int) -> list[int]:
        """The process ids of the helper and its ranks, once these wait."""
        patience.until((tmp_path / f"waiting-{turn}").exists, process.pid)
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) == 5 and {int(path.name[2:]) for path in tmp_path.glob(f"{turn}-*")} < {*pids}
        return pids

    try:
        pids = waiting(1)
        assert {os.getpgid(pid) for pid in pids}.isdisjoint({os.getpgid(process.pid)})
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        # the terminal's, to all
        assert process.poll() is None and all(psutil.pid_exists(pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted [0, 1]\n"  # before the launch's own 1000 s
        again = waiting(2)
        (helper,) = {*pids} & {*again}
        patience.until(lambda: all(patience.gone(pid) for pid in pids if pid != helper))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    patience.until(lambda: all(map(patience.gone, again)))
    assert not list(tmp_path.glob("minitrain-*")), "the helper removes the directory that its owner cannot"
