"""Launches where the system gives too little: no loopback, no processes; and a caller that is killed at once."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress

import psutil
import pytest

from minitrain.ranks.launch import report
from tests import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and /proc are Linux's")
PROGRAM = """
import torch.distributed as dist
from minitrain import launch
try:
    print(launch.run(dist.get_rank, ranks=2))
except launch.RankError as error:
    print(f"{type(error).__name__}: {error}")
"""


def environment(folder) -> dict:
    here = os.path.dirname(report.PACKAGE.rstrip(os.sep))
    return os.environ | {"TMPDIR": str(folder), "PYTHONPATH": here, "PYTHONDONTWRITEBYTECODE": "1"}


def under(command: list[str], folder, **env) -> str:
    """What the program prints under a command that changes its surroundings, one line; nothing is left in `folder`."""
    command, env = [*command, sys.executable, "-c", PROGRAM], environment(folder) | env
    done = patience.run(command, cwd="/", env=env)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout + done.stderr
    assert not list(folder.iterdir())
    return done.stdout.strip()


def needs(command: list[str], what: str) -> None:
    if not shutil.which(command[0]) or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"{what} is not permitted here: {' '.join(command)} fails")


def test_a_limit_on_processes_ends_the_launch(tmp_path):
    """It does not bind root: another user, who may read root's files and has no other process, runs the program."""
    may_read = "-all,+dac_override,+dac_read_search"
    user = ["--reuid", "54321", "--regid", "54321", "--clear-groups"]
    command = ["setpriv", *user, f"--inh-caps={may_read}", f"--ambient-caps={may_read}"]
    needs(command, "to run as another user")
    said = under([*command, "prlimit", "--nproc=3"], tmp_path)
    assert said.startswith("RankError: "), said


@pytest.mark.parametrize("moment", ["the helper is there", "the directory is there"])
def test_nothing_is_left_of_a_caller_that_is_killed_while_the_helper_imports(moment, tmp_path):
    """The helper is slow: it sleeps before it imports torch, and finds out afterwards."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import sys, time
            if any("minitrain.ranks.launch.ranks import serve" in word for word in sys.orig_argv):
                time.sleep(1.5)
        """)
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    env = environment(folder)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    caller = subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, cwd="/", stdout=subprocess.DEVNULL)
    process = psutil.Process(caller.pid)
    try:
        patience.until(process.children, caller.pid)
        (helper,) = process.children()
        if moment == "the directory is there":
            patience.until(lambda: any(folder.glob("minitrain-*")))
            assert helper.is_running(), "the control: it would be gone anyway"
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    patience.until(lambda: patience.gone(helper.pid))
    with suppress(psutil.NoSuchProcess):
        helper.kill()
    assert not list(folder.iterdir())


def test_a_launch_works_in_the_plainest_locale_with_a_folder_of_letters_it_has_not(tmp_path):
    folder = tmp_path / "größe"
    folder.mkdir()
    assert under([], folder, LC_ALL="POSIX", LANG="C") == "[0, 1]"
