"""A process beside the trainer that owns the memory of its checkpoints, and brings them to disk.

    launching process    agent = Agent(disk), launch.run(train, agent.memory, ..), again if it fails, close()
      |  end of its life = end of file
    agent                owns agent.memory, a store in shared memory; copies steps to the disk, verified
      |  a socket in that folder
    trainer, rank 0      saves to Store(agent.memory), often; Connection(agent.memory).persist(step), rarely

The trainer stalls for a copy to memory and never for the disk. Its end, kill -9 too, closes the socket: then
the newest complete step goes to the disk, and the next trainer finds it in memory. The agent ends with the
launching process or when its folder is gone. Only kill -9 of both leaves the folder.
DLRover, Flash Checkpoint (github.com/intelligent-machine-learning/dlrover, docs/blogs/flash_checkpoint.md).
Differs: the memory is a folder of verified files, and an agent serves one machine's launch.
"""

import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

from minitrain.checkpoint.store import Store, copy_step
from minitrain.systems.checkpoint.in_memory import memory_folder

SOCKET = "agent"
START = "import sys; sys.path[:] = {path}; from minitrain.systems.checkpoint.agent import serve; serve{given}"
LOOK_S = 0.5  # how often the agent looks whether its folder is there


class Agent:
    """Started by the process that launches trainers; `memory` is the folder for their Store."""

    def __init__(self, disk: Path | str, keep: int = 2):
        Store(disk, keep)  # ValueError
        self.memory = memory_folder()
        with socket.socket(socket.AF_UNIX) as listener:  # trainers can connect before the agent has started
            listener.bind(str(self.memory / SOCKET))
            listener.listen()
            given = str(self.memory), str(disk), keep, listener.fileno()
            command = [sys.executable, "-c", START.format(path=sys.path, given=given)]
            files = dict(stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
            self.process = subprocess.Popen(command, start_new_session=True, **files)

    def close(self) -> None:
        """What memory has and the disk has not goes there; the agent and the memory are gone."""
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.memory, ignore_errors=True)  # in case the agent was killed


class Connection:
    """The connection of rank 0, as long as it lives."""

    def __init__(self, memory: Path | str):
        self.line, self.asked = connection.Client(str(Path(memory) / SOCKET)), 0

    def persist(self, step: int) -> None:
        """Ask for a step that is complete in memory; returns at once."""
        with suppress(ConnectionError):  # `wait` tells
            self.line.send(step)
        self.asked += 1

    def wait(self) -> None:
        """All that was asked for is on the disk. ValueError: what is not, and why."""
        while self.asked:
            self.asked -= 1
            try:
                said = self.line.recv()
            except (EOFError, ConnectionError):
                said = "the agent is gone, its memory with it: start again, from disk"
            if said != "done":
                raise ValueError(said)

    def close(self) -> None:
        self.line.close()


def serve(memory: str, disk: str, keep: int, listener_fd: int) -> None:
    """Until the launching process closes our standard input or ends, or the folder is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed at a terminal, it is for the launching process
    hot, cold, trainers = Store(memory), Store(disk, keep), []
    try:
        with socket.socket(fileno=listener_fd) as listener:
            while hot.folder.exists():
                for line in connection.wait([0, listener, *trainers], LOOK_S):
                    if line == 0:
                        return
                    if line is listener:
                        trainers.append(connection.Connection(listener.accept()[0].detach()))
                        continue
                    try:
                        line.send(persist(line.recv(), hot, cold))
                    except (EOFError, ConnectionError):  # the trainer has ended
                        trainers.remove(line)
                        line.close()
                        persist_newest(hot, cold)
    finally:
        try:
            persist_newest(hot, cold)
        finally:
            shutil.rmtree(memory, ignore_errors=True)


def persist(step: int, hot: Store, cold: Store) -> str:
    """What the trainer is told: done, or why not."""
    try:
        if not cold.is_complete(step):
            copy_step(step, hot, cold)
        return "done"
    except (OSError, ValueError) as error:
        return f"step {step} is not on the disk: {' '.join(str(error).split())}"


def persist_newest(hot: Store, cold: Store) -> None:
    """The newest step in memory that can be read, if the disk has none as new."""
    for step in reversed(hot.steps()):
        if cold.steps()[-1:] >= [step] or (said := persist(step, hot, cold)) == "done":
            return
        print(said, file=sys.stderr, flush=True)
