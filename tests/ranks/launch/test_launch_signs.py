"""What a launch says of causes that look like something else: signals that somebody sent, long texts, lost
connections, calls that nobody waited for, groups in another order, variables that torchrun left.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.launch import report


def failing(fn, *args, ranks=2, timeout_s=60) -> launch.RankError:
    with pytest.raises(launch.RankError) as caught:
        launch.run(fn, *args, ranks=ranks, timeout_s=timeout_s)
    assert "\n" not in str(caught.value)
    return caught.value


def by_signal(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
        time.sleep(60)
    collectives.barrier(dist.group.WORLD)


@pytest.mark.parametrize(
    "number, name",
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGALRM, "SIGALRM"),
        (signal.SIGHUP, "SIGHUP"),
        (signal.SIGRTMIN + 6 if sys.platform == "linux" else signal.SIGUSR1, None),
    ],
)
def test_a_signal_that_somebody_sent_is_no_crash_in_native_code(number, name):
    error = failing(by_signal, number)
    assert error.ranks == (1,)
    assert f"rank 1 died of {name or report.signal_name(number)}" in str(error) and "crashed" not in str(
        error
    )


def test_the_system_s_own_signals_and_limits_are_told_apart():
    told = {number: report.crash_record(-number, "", [], {})["message"] for number in (11, 24, 15, 40)}
    assert told[11].startswith("crashed in native code (SIGSEGV)")
    assert "ulimit -t" in told[signal.SIGXCPU] and "real-time signal 40" in told[40]
    first = signal.SIGRTMIN  # which Python has a name for
    assert [report.signal_name(number) for number in (15, first)] == [
        "SIGTERM",
        f"real-time signal {first:d}",
    ]


@pytest.mark.parametrize(
    "text", ["Connection refused", "Connection reset by peer", "Connection closed by peer"]
)
def test_a_crash_is_named_before_all_connections_that_it_cost(text):
    lost = {"type": "RuntimeError", "message": text, "frames": [], "traceback": ""}
    crashed = {"type": None, "message": "was killed (SIGKILL)", "frames": [], "traceback": ""}
    other = {"type": "ValueError", "frames": [], "traceback": ""}
    records = {rank: lost for rank in range(3)} | {3: crashed}
    assert report.failure(records, {}).ranks == (3,) and "rank 3 was killed" in str(
        report.failure(records, {})
    )
    records = {rank: {**other, "message": f"text {rank}"} for rank in range(5)} | {5: crashed}
    error = report.failure(records, {})  # six different errors, of which three are told
    assert str(error).startswith("rank 5 was killed") and str(error).endswith("; and 3 other errors")


def outside():
    collectives.all_reduce(torch.ones(2), None)


@pytest.mark.parametrize("call", [collectives.world, outside])
def test_a_collective_outside_a_launch_says_where_to_call_it(call):
    with pytest.raises(
        ValueError, match=r"^there are no ranks here.*call this inside launch.run\(fn, ranks=4\)"
    ):
        call()


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e30])
def test_no_time_limit_is_one_as_long_as_there_can_be(timeout_s):
    assert launch.run(dist.get_rank, ranks=2, timeout_s=timeout_s) == [0, 1]


def with_a_long_text():
    raise ValueError("first line\n" + "x" * 20_000_000 + "\nlast line")


def test_a_text_of_20_megabytes_is_a_line():
    error = failing(with_a_long_text)
    assert "first line x" in str(error) and "x last line" in str(error) and "letters left out" in str(error)
    assert len(str(error)) < 1500 and len(error.traceback) < 100_000


def in_two_shapes(folder):
    x = torch.ones(4 if dist.get_rank() else 6)
    collectives.all_reduce(x, dist.group.WORLD, async_op=True)  # nobody waits


def test_a_mismatch_in_a_call_that_nobody_waits_for_fails_the_launch(tmp_path):
    error = failing(in_two_shapes, tmp_path)
    assert "CollectiveMismatch" in str(error) and "nobody waited for this asynchronous call" in str(error)


def in_another_order():
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    for group in reversed(groups) if dist.get_rank() == 1 else groups:
        collectives.all_reduce(torch.ones(3), group)


def test_of_two_groups_in_another_order_the_smaller_side_is_to_blame():
    error = failing(in_another_order, ranks=3, timeout_s=3)
    assert isinstance(error, launch.LaunchTimeout) and error.ranks == (1,)


def in_a_shell(program: str, folder, **env) -> subprocess.CompletedProcess:
    """The program in a process of its own, with `folder` as its place and its temporary one."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    env = (
        os.environ
        | {"TMPDIR": str(folder), "PYTHONPATH": os.path.dirname(report.PACKAGE.rstrip(os.sep))}
        | env
    )
    command = [sys.executable, folder / "program.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_left_over_variables_of_torchrun_are_one_line(monkeypatch):
    left_over = dict(RANK="0", WORLD_SIZE="two", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="^RANK='0', WORLD_SIZE='two', .*; outside a job unset RANK WORLD_SIZE"
    ):
        launch.run(dist.get_rank)


def test_a_launch_works_in_the_plainest_locale_with_a_folder_of_letters_it_has_not(tmp_path):
    folder = tmp_path / "größe"
    folder.mkdir()
    program = "import torch.distributed as dist\nfrom minitrain import launch\nprint(launch.run(dist.get_rank, ranks=2))\n"
    done = in_a_shell(program, folder, LC_ALL="POSIX", LANG="C")
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr
