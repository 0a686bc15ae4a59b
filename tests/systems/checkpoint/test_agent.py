"""An agent owns the memory: what a killed trainer left there reaches the disk and the next trainer, and nothing is
left when it ends, whoever ends first."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from minitrain import collectives, launch
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import write_file
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store, copy_step, file_name
from minitrain.systems.checkpoint.agent import Agent, Connection, persist, persist_newest
from minitrain.systems.checkpoint.in_memory import SHARED_MEMORY, newest_whole
from tests.saving import spoil
from tests.systems.checkpoint import memory_runs

LAYOUT = dict(dp=2)


@pytest.fixture
def agent(tmp_path):
    """Its memory and process are gone at the end of a test."""
    agent = Agent(tmp_path / "disk")
    yield agent
    agent.close()
    assert not agent.memory.exists() and agent.process.returncode is not None


def start(memory, disk, dying=None, dies_at=4):
    """A start of the job: to memory after every step, to disk when step 2 is in memory; rank 1 is killed within
    the step after `dies_at`."""
    run, rank = memory_runs.make_run(**LAYOUT), collectives.world().rank()
    hot, cold = Store(memory), Store(disk)
    saver, trainer, first, read = Saver(hot), Connection(memory) if rank == 0 else None, 0, {}
    store, step, _ = newest_whole(hot, cold)
    if store is not None:
        manifest, files = store.open(step)
        first = memory_runs.load(run, manifest, files)
        for file in files:
            read[file.path.parents[1]] = read.get(file.path.parents[1], 0) + file.read_bytes
    victim = next(param for param in run.model.parameters() if param.requires_grad)

    def after(step):
        saver.save(step, run.pieces(), run.plain_state(), {"of": "a test"})
        if step == 2 and trainer:
            trainer.persist(step)
            trainer.wait()
        if rank == dying and step == dies_at:
            victim.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    losses = memory_runs.train(run, first, memory_runs.STEPS, after)
    return first, losses, memory_runs.digest(run), read


def test_dlrover_flash(agent, tmp_path):
    """The trainer is killed: the next one goes on from memory, no byte is read from disk; and the agent has brought
    the same step to the disk."""
    memory, disk = agent.memory, tmp_path / "disk"
    assert memory.parent == SHARED_MEMORY
    whole = launch.run(lambda: memory_runs.uninterrupted(**LAYOUT), ranks=2)
    with pytest.raises(launch.RankError, match="rank 1 died of SIGKILL"):
        launch.run(lambda: start(memory, disk, dying=1), ranks=2)
    settle(memory)
    assert Store(disk).steps() == [2, 4], "asked for, and the last that was complete"
    Store(disk).verify(4)
    second = launch.run(lambda: start(memory, disk), ranks=2)
    for (losses, end), (first, after, end_too, read) in zip(whole, second):
        assert first == 4 and after == losses[4:] and end == end_too
        assert set(read) == {memory} and read[memory] > 0, "0 bytes from the disk"
    agent.close()
    assert Store(disk).steps() == [4, 6], "the end of the job is on the disk"


def settle(memory, stay=False):
    """The agent has done what came before this: it handles what is there before what comes after."""
    trainer = Connection(memory)
    trainer.persist(10**6)
    with pytest.raises(ValueError, match="step 1000000 is not on the disk: .* missing") as error:
        trainer.wait()
    assert "\n" not in str(error.value)
    if not stay:
        trainer.close()
    return trainer


# ---- without a model


def put(store, *steps):
    for step in steps:
        written = write_file(
            store.disk, store.begin(step) / file_name(0), memory_runs.as_pieces(step, 0), {"at": step}
        )
        store.commit(step, [written], {"of": "a test"})
    return store


def flip(store, step):
    spoil(store.path(step) / file_name(0))


def test_an_agent_ends_when_told(agent, tmp_path):
    """Not by an interrupt, which is for the launching process; and the newest step is on the disk by then."""
    assert os.stat(agent.memory).st_mode & 0o777 == 0o700
    hot, cold = put(Store(agent.memory), 1, 2), Store(tmp_path / "disk")
    trainer = Connection(agent.memory)
    trainer.persist(1)
    trainer.wait()
    agent.process.send_signal(signal.SIGINT)
    trainer.persist(2)
    trainer.wait()
    assert cold.steps() == [1, 2]
    put(hot, 3)  # not asked for
    trainer.close()
    settle(agent.memory)
    assert cold.steps() == [2, 3]
    quiet = settle(agent.memory, stay=True)  # no trainer ends from here on
    put(hot, 4)
    agent.close()
    assert cold.steps() == [3, 4]
    quiet.close()


def test_the_memory_of_an_agent_that_was_killed_is_given_back(tmp_path):
    agent = Agent(tmp_path / "disk")
    trainer = Connection(agent.memory)
    agent.process.kill()
    trainer.persist(1)
    agent.close()
    assert not agent.memory.exists()
    with pytest.raises(ValueError, match="the agent is gone, its memory with it: start again, from disk"):
        trainer.wait()
    trainer.close()


LAUNCHER = """
    import sys
    from pathlib import Path
    from minitrain.systems.checkpoint.agent import Agent
    from minitrain.checkpoint.store import Store
    from tests.systems.checkpoint.test_agent import put

    agent = Agent(sys.argv[1])
    put(Store(agent.memory), 1)
    print(agent.memory, agent.process.pid, flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_a_launching_process_that_is_killed(tmp_path):
    """What it had in memory is on the disk; the agent is gone, and so is the memory."""
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]))
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(tmp_path / "disk")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    with subprocess.Popen(command, **pipes) as launcher:
        memory, pid = launcher.stdout.readline().split()
        assert Path(memory).exists() and psutil.pid_exists(int(pid))
        launcher.kill()
        assert launcher.stdout.read() == ""  # ends when nobody has it open: not the agent either
    assert not Path(memory).exists() and Store(tmp_path / "disk").steps() == [1]


def test_the_newest_sound_step_goes_to_the_disk(tmp_path, capsys):
    hot, cold = put(Store(tmp_path / "hot", keep=4), 1, 2, 3), Store(tmp_path / "cold")
    flip(hot, 3)
    hot.begin(4)  # never complete
    persist_newest(hot, cold)
    assert cold.steps() == [2] and cold.manifest(2) == hot.manifest(2)
    said = capsys.readouterr().err
    assert said.startswith("step 3 is not on the disk: ") and "damaged" in said and said.count("\n") == 1
    persist_newest(hot, put(cold, 5))  # has a newer one
    assert cold.steps() == [2, 5] and capsys.readouterr().err == "", "nothing to do, nothing to say"
    assert persist(3, hot, cold).startswith("step 3 is not on the disk")
    assert persist(5, hot, cold) == "done" and cold.steps() == [2, 5], "it is there"


def test_a_disk_that_fails_is_one_line_and_later_tried_again(tmp_path):
    hot, disk = put(Store(tmp_path / "hot"), 1), tmp_path / "disk"
    disk.write_text("a file where the folder is to be")
    said = persist(1, hot, Store(disk))
    assert said.startswith("step 1 is not on the disk: ") and str(disk) in said and "\n" not in said
    disk.unlink()
    assert persist(1, hot, Store(disk)) == "done"


def test_a_step_that_memory_gives_up_meanwhile_is_copied_all_the_same(tmp_path):
    hot = put(Store(tmp_path / "hot"), 1)

    class Slow(Disk):
        def create(self, path):
            shutil.rmtree(hot.path(1), ignore_errors=True)
            return super().create(path)

    cold = Store(tmp_path / "cold", disk=Slow())
    copy_step(1, hot, cold)
    cold.verify(1)
    assert not hot.steps()


def test_two_levels(tmp_path):
    """Memory often, disk rarely: the newest step that is whole, of memory where both have it."""
    hot, cold = put(Store(tmp_path / "hot"), 3, 4), put(Store(tmp_path / "cold"), 2, 4)

    def found():
        store, step, passed = newest_whole(
            Store(hot.folder), Store(cold.folder)
        )  # as a new process sees them
        return store.folder.name, step, passed

    assert found() == ("hot", 4, [])
    flip(hot, 4)
    name, step, passed = found()
    assert (name, step) == ("cold", 4) and len(passed) == 1 and "step 4 is passed over: " in passed[0]
    flip(cold, 4)
    assert found()[:2] == ("hot", 3)
    shutil.rmtree(hot.folder)
    name, step, passed = found()
    assert (name, step) == ("cold", 2) and "damaged" in passed[0]
    assert newest_whole(Store(tmp_path / "none"), Store(tmp_path / "none")) == (None, None, [])
