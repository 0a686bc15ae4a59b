"""minitrain lift: what it writes runs alone, equals one process, and is clean; what it cannot write it says."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from minitrain import collectives, launch
from minitrain.cli import lift as lifting
from minitrain.cli.lift import lift
from minitrain.cli.main import app, main
from minitrain.ranks.collectives import plain
from tests import patience

ROOT = Path(__file__).parents[2]
ALONE = Path(__file__).with_name("lifted_alone.py")
LIFTS = {  # what is asked for, and how many lines it may have, blank ones aside
    "GradReducer": (200, "data_parallel.bucketed:GradReducer"),
    "linear": (200, "tensor_parallel.linear:ColumnLinear tensor_parallel.linear:RowLinear"),
    "Zero1": (400, "data_parallel.zero1:Zero1.zero_grad,finish,step"),
    "Zero3": (560, "data_parallel.zero3:Zero3.zero_grad,finish,step"),
    "ring": (
        450,
        "context.ring:ring_forward context.ring:ring_backward context.ring:Rings context.layout:zigzag attention.kernel:PLAIN",
    ),
    "ulysses": (300, "context.ulysses:ulysses_attention"),
    "Runner": (545, "pipeline.runtime:Runner.__call__ pipeline.schedules.one_direction:one_f_one_b"),
    "experts": (350, "moe.dispatch:Dispatch moe.router:top_k moe.experts:grouped"),
    "fp8": (
        565,
        "precision.products:multiply precision.products:Products precision.products:Scales precision.blocks:RECIPES",
    ),
    "recompute": (270, "memory.recompute:recompute"),
    "HostOptimizer": (300, "memory.host_optimizer:HostOptimizer.zero_grad,on_grad_final,step"),
    "checkpoint": (
        600,
        "ranks.pieces:Piece ranks.pieces:share_out checkpoint.format:write_file checkpoint.format:File checkpoint.load:Saved checkpoint.disk:Disk",
    ),
}


def write(folder: Path, **settings) -> None:
    for name, (_, targets) in LIFTS.items():
        (folder / f"{name}.py").write_text(lift(targets.split(), **settings))


def on_ranks(folder: Path, ranks: int) -> list[list[dict]]:
    """Of each rank: what was found, and without messages."""
    started = [patience.start([sys.executable, "-I", ALONE, folder, rank, ranks]) for rank in range(ranks)]
    said = [patience.output_of(process)[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(said)[-3000:]
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lifted")
    write(folder)
    return folder, *zip(*on_ranks(folder, 2))


@pytest.mark.parametrize("name", LIFTS)
def test_a_lifted_file_is_short_and_equals_one_process_where_there_is_no_minitrain(name, alone):
    folder, found, control = alone
    assert max(one[name] for one in found) < 1e-12
    assert all(one[name] < 1e-3 for one in control) == (
        name in ("recompute", "checkpoint")
    )  # they send nothing
    text = (folder / f"{name}.py").read_text()
    assert (
        sum(map(bool, text.split("\n"))) <= LIFTS[name][0] and "minitrain lift" in text and "Apache" in text
    )
    assert text.count("raise ValueError") <= 3 or name == "checkpoint"  # of its own state; which catches them


def test_the_head_names_a_commit_of_minitrain_and_of_nobody_else(tmp_path, monkeypatch):
    run = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(run, capture_output=True, text=True).stdout.strip()
    assert f"(commit {head}" in lifting.commit(lifting.ROOT) if head else not lifting.commit(lifting.ROOT)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(lifting, "ROOT", tmp_path)
    assert lifting.commit(lifting.ROOT) == ""


def test_errors_of_the_world_stay():
    text = lift(["memory.recompute:recompute"])
    assert "raise RuntimeError" in text and "raise ValueError" not in text


@pytest.mark.parametrize("rule", ["check", "format"])
def test_ruff_finds_nothing_in_lifted_files(rule, alone, tmp_path):
    run = [sys.executable, "-m", "ruff", rule, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*run, *["--check"] * (rule == "format"), str(alone[0])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_with_checks_the_errors_stay(tmp_path):
    write(tmp_path, with_checks=True)
    for name in ("GradReducer", "linear", "ulysses", "Runner"):
        text = (tmp_path / f"{name}.py").read_text()
        assert "raise ValueError" in text and "checks of arguments" not in text
    on_ranks(tmp_path, 2)


def test_every_public_name_of_the_techniques_can_be_lifted():
    """Each is written, and all names in the file are there; a file beside a module is the one excuse."""
    lines = CliRunner().invoke(app, ["lift", "--list"]).output.splitlines()
    assert lines[-1] == f"{len(lines) - 1} can be lifted" and len(lines) > 400
    assert any(line.split()[1] == "memory.recompute:recompute" for line in lines[:-1])


@pytest.mark.parametrize(
    "names, said",
    [
        ([], "lift what? give a name"),
        (["zero1"], "there is no module minitrain.zero1"),
        (["data_parallel.zero1:Zero9"], "has no Zero9; use one of WholeParameters, Zero1"),
        (["data_parallel.zero1:Zero1.finish,jump"], "Zero1 has no jump; use some of __init__"),
        (["ranks.process:PROCESS"], "it needs what the ranks of minitrain's launches share"),
        (["plan.simulate.machines:machine"], "it reads a file that lies beside its module"),
        pytest.param(["compose.parallelize:parallelize"], "cannot be lifted: ", marks=pytest.mark.slow),
        (["moe.router:top_k", "systems.moe.balance:no_such"], "has no no_such"),
    ],
)
def test_what_cannot_be_lifted_is_said_in_one_line(names, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minitrain", "lift", *names])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and said in err and err.count("\n") == 1 and not out


SMALL = {
    "names that collide": (
        "def scale(x):\n    return 2 * x\n",
        "from minitrain.ranks import small_a\n\n\ndef scale(x):\n    return 3 * small_a.scale(x)\n",
        "scale(5)",
        30,
    ),
    "a variable of the same name": (
        "def width(x):\n    return x + 1\n",
        "from minitrain.ranks import small_a\n\n\ndef run(x):\n    width = small_a.width(x)\n    return width\n",
        "run(1)",
        2,
    ),
    "what a check asked for is used": (
        "",
        "def run(x):\n    if not (y := x + 1):\n        raise ValueError('no')\n    return y\n",
        "run(4)",
        5,
    ),
    "a check that is caught": (
        "def positive(x):\n    if x < 0:\n        raise ValueError('no')\n    return x\n",
        "from minitrain.ranks.small_a import positive\n\n\ndef run(x):\n    try:\n        return positive(x)\n"
        "    except ValueError:\n        return 0\n",
        "run(-3)",
        0,
    ),
    "what is worked out for a check": (
        "",
        "def run(x):\n    size, top = len(x), max(x)\n    above = top / size\n    if above > 9:\n"
        "        raise ValueError(above)\n    return size\n",
        "run([0])",
        1,
    ),
    "a method by name": (
        "",
        "class Run:\n    table = {'a': 'first'}\n\n    def first(self):\n        return 1\n\n"
        "    def __call__(self, what):\n        return getattr(self, self.table[what])()\n",
        "Run()('a')",
        1,
    ),
}


@pytest.mark.parametrize("case", SMALL)
def test_small_programs_do_what_they_did(case, tmp_path, monkeypatch):
    first, second, call, wanted = SMALL[case]
    files = {"minitrain.ranks.small_a": first, "minitrain.ranks.small_b": second}
    for module, text in files.items():
        (tmp_path / f"{module[-7:]}.py").write_text(f'"""Small."""\n\n{text}')
    known = lifting.file_of
    there = lambda module: tmp_path / f"{module[-7:]}.py" if module in files else known(module)
    for name in ("file_of", "ROOT"):
        monkeypatch.setattr(lifting, name, there if name == "file_of" else tmp_path)
    lifting.source_of.cache_clear(), lifting.cut.cache_clear(), lifting.bases.cache_clear()
    name = call.partition("(")[0]
    target = f"ranks.small_b:{name}" + ".__call__" * (name == "Run")
    scope: dict = {}
    exec(lift([target]), scope)
    lifting.source_of.cache_clear(), lifting.cut.cache_clear(), lifting.bases.cache_clear()
    assert eval(call, scope) == wanted


def compared(name):
    """A collective of minitrain and its plain form, on this rank."""
    group, x = collectives.world(), torch.arange(54.0, dtype=torch.float64).view(3, 6, 3) + dist.get_rank()
    n, rank, both = group.size(), group.rank(), []
    for module in (collectives, plain):
        call, start = getattr(module, name), x.clone().requires_grad_(name.endswith(("_to", "_from")))
        more = {
            "all_reduce": [dict(), dict(op="max"), dict(async_op=True), dict(out=x.clone())],
            "all_gather": [dict(dim=1), dict(async_op=True), dict(out=x.new_empty(3 * n, 6, 3))],
            "reduce_scatter": [dict(dim=1), dict(dim=0, async_op=True)],
            "all_to_all": [dict(dim=1), dict(send_sizes=[rank] * n, receive_sizes=[*range(n)])],
            "broadcast": [dict(source=1)],
            "exchange": [dict(to=(rank + 1) % n, source=(rank - 1) % n)],
            "rotate": [dict(), dict(shift=-1, async_op=True), dict(shift=n)],
        }.get(name, [dict(dim=1)] if "copy" not in name and name != "reduce_from" else [dict()])
        for settings in more:
            given = start.flatten(0, 1)[: rank * n] if "send_sizes" in settings else start
            y = call(given, group=group, **settings)
            y = y.wait() if settings.get("async_op") else y
            both.append(y.detach().clone())
            if start.requires_grad:
                y.square().sum().backward()
                both.append(start.grad.clone())
    half = len(both) // 2
    return all(torch.equal(a, b) for a, b in zip(both[:half], both[half:])) and half > 0


def test_the_plain_collectives_take_and_give_the_same():
    calls = "all_reduce all_gather reduce_scatter all_to_all broadcast exchange rotate copy_to reduce_from"
    calls += " gather_from scatter_to reduce_scatter_to gather_to"
    for name in [*calls.split(), "send", "receive", "barrier", "world", "members", "axis_of"]:
        full, short = (list(inspect.signature(getattr(m, name)).parameters) for m in (collectives, plain))
        assert full == short, name
    for name in calls.split():
        assert all(launch.run(compared, name, ranks=3)), name
