"""The same program under torchrun: `run` uses the ranks that exist; here two nodes of two ranks."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch.distributed as dist

from minitrain.ranks.launch import report
from tests import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the loopback's name and /proc are Linux's")


def torchrun(program: str, folder, nodes: int, ranks_per_node: int) -> Callable[[], list[tuple]]:
    """Start `program` with one agent per node; what it returns waits: (status, stdout, stderr) of each."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    place = dict(PYTHONPATH=os.path.dirname(report.PACKAGE.rstrip(os.sep)), TMPDIR=str(folder / "temporary"))
    env = os.environ | place | dict(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    (folder / "temporary").mkdir()
    # Agents and ranks meet at a store that is held here: nobody picks a port which another may take meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = []
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
    command += [f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0"]
    command += [f"--rdzv-endpoint=127.0.0.1:{store.port}", folder / "program.py"]
    for node in range(nodes):
        with open(folder / f"{node}.out", "w") as out, open(folder / f"{node}.err", "w") as err:
            agents.append(subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=folder))

    def ended() -> list[tuple[int, str, str]]:
        assert store.port  # it is there for as long as somebody may ask
        for agent in agents:
            patience.output_of(agent)
        assert not list((folder / "temporary").glob("minitrain*"))
        return [
            (agent.wait(), (folder / f"{node}.out").read_text(), (folder / f"{node}.err").read_text())
            for node, agent in enumerate(agents)
        ]

    return ended


def test_two_nodes(tmp_path):
    """Results reach all ranks in rank order; an error of all is raised on all, and the job goes on."""
    done = torchrun(
        """
        import os
        import torch, torch.distributed as dist
        from minitrain import collectives, launch

        class Answer:
            pass

        def train(scale):
            x = collectives.all_reduce(torch.tensor([float(dist.get_rank())]), dist.group.WORLD)
            answer = Answer()
            answer.value = scale * x.item()
            return dist.get_rank(), os.environ["GROUP_RANK"], answer

        results = launch.run(train, 10, ranks=2)
        assert [(rank, node) for rank, node, _ in results] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
        assert [answer.value for _, _, answer in results] == [60.0] * 4 and {type(r[2]) for r in results} == {Answer}
        assert [back() for back in launch.run(lambda: (lambda r: lambda: r)(dist.get_rank()), ranks=4)] == [0, 1, 2, 3]
        own = []
        assert launch.run(lambda: own, ranks=4)[dist.get_rank()] is own, "what fn returned here, not a copy"

        def fail():
            if dist.get_rank() >= 2:
                raise ValueError("second node")

        try:
            launch.run(fail, ranks=4)
        except launch.RankError as error:
            assert str(error) == "ranks 2, 3 raised ValueError: second node (program.py:24)", error
            assert error.ranks == (2, 3)
        try:
            launch.run(lambda: launch.run(fail), ranks=4)
        except launch.RankError as error:
            assert "a rank cannot start ranks" in str(error)
        os.write(1, f"{launch.run(dist.get_rank, ranks=4)} {launch.device()}\\n".encode())  # one write: lines stay whole
        launch.leave()
        tasks = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        assert not [task for task in tasks if "gloo" in task], "a process that ends with gloo running may abort"
    """,
        tmp_path,
        nodes=2,
        ranks_per_node=2,
    )()
    first, second = sorted(done, key=lambda node: "instead of" not in node[1])  # who is node 0 is drawn
    assert first[0] == second[0] == 0, f"{first}\n{second}"
    assert first[1].count("this job has 4 ranks: running on all of them instead of ranks=2\n") == 1
    assert (first[1] + second[1]).count("[0, 1, 2, 3] cpu\n") == 4 and "instead of" not in second[1]


FAILS = """
import torch, torch.distributed as dist
from minitrain import collectives, launch

def train():
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    collectives.all_reduce(torch.ones(1), dist.group.WORLD)

launch.run(train, ranks=2, timeout_s=1000)
"""
HANGS = """
import time
import torch, torch.distributed as dist
from minitrain import collectives, launch

def train():
    if dist.get_rank() == 1:
        time.sleep(1000)
    collectives.all_reduce(torch.ones(1), dist.group.WORLD)

launch.run(train, ranks=2, timeout_s=3)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Both at once: each of them mostly waits."""
    folders = {program: tmp_path_factory.mktemp("job") for program in (FAILS, HANGS)}
    return {program: torchrun(program, folder, 1, 2) for program, folder in folders.items()}


def test_one_rank_that_fails_while_others_wait_ends_the_job(jobs):
    ((status, _, errors),) = jobs[FAILS]()
    assert status != 0 and "RankError: rank 1 raised ValueError: bad batch (program.py:7)\n" in errors, errors


def test_a_hang_ends_the_job_and_says_where_each_rank_was(jobs):
    ((status, _, errors),) = jobs[HANGS]()
    assert status != 0
    for where in (
        "rank 1 stands at program.py:8, in no collective",
        "rank 0 waits in all_reduce #0 (program.py:9)",
    ):
        assert (
            f"LaunchTimeout: timeout_s is over: this rank has not finished after 3 s: {where}\n" in errors
        ), errors
