"""The arrows of the house point down: who may import whom, read from the source with `ast`.

A room is a folder of minitrain, or a module at its top. `FLOORS` are what the room stands on: it may import
from rooms of lower floors only, and techniques not each other's (what one needs of another arrives as an
argument). No module imports itself round a circle.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from docs import house
from docs.house import name_of, room_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minitrain"
FLOORS = [  # from the ground up
    {"ranks"},
    {"attention"},
    {"precision"},
    {"data_parallel", "tensor_parallel", "context", "pipeline", "moe", "memory", "checkpoint"},
    {"model"},
    {"plan"},
    {"systems"},
    {"compose", "course"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
BUDGETS = {  # lines of Python, and of wrong solutions, as `wc -l` counts them: (where, without, most, goal)
    "minitrain without systems and course": (
        ["minitrain"],
        ["minitrain/systems", "minitrain/course"],
        24_000,
        24_000,
    ),
    "minitrain/systems": (["minitrain/systems"], [], 25_000, 25_000),
    "minitrain/course": (["minitrain/course"], [], 7_940, 8_000),
    "exercises/wrong": (["exercises/wrong"], [], 9_971, 12_000),  # 400 a chapter
    "tests": (["tests"], [], 70_000, 70_000),
}
FACES = {"collectives", "launch", "ledger"}  # folders that are one module to their users
NO_TORCH = (
    "ranks.checks", "ranks.tables", "plan", "systems.plan", "systems.simulate",
    "systems.annotate.annotators", "systems.communication.algorithms",
    "systems.communication.chunk_schedule", "systems.communication.cost_model", "systems.network",
    "systems.kernels.tiles", "systems.kernels.roofline", "systems.kernels.roller",
    "systems.kernels.tile_chains", "systems.uneven.shares", "systems.uneven.stage_devices",
    "course.plot.charts",
    "course.plot.pipeline_charts", "course.plot.plan_widget", "course.plot.style", "model.config",
    "model.training.flags", "course.atlas", "course.notebook", "pipeline.schedules", "pipeline.schedule",
    "pipeline.simulate", "pipeline.lower",
)  # fmt: skip
ALONE = PACKAGE / "course" / "grading" / "inside"  # runs where an answer does, and there is no minitrain
DOOR = {"ranks", "course"}  # may speak to torch.distributed themselves


MODULES = house.modules()
SOURCES = [path for path in MODULES.values() if path.name != "__init__.py"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Full names of every module `path` imports, also inside functions."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            where = f"{path}:{node.lineno} uses a relative import; write the whole name"
            assert node.level == 0 or path.parent == ALONE, where
            module = node.module or ""
            if node.level:
                module = f"{name_of(ALONE)}.{module}".rstrip(".")
            inside = {f"{module}.{alias.name}" for alias in node.names}
            names |= inside & MODULES.keys() | ({module} if inside - MODULES.keys() else set())
    return frozenset(names)


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports_of(path) & MODULES.keys() - {name} for name, path in MODULES.items()}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    """Each room imports from lower floors only: no exception by name."""
    name = name_of(path)
    room = room_of(name)
    assert room in FLOOR, f"{room} stands on no floor"
    used = {room_of(other) for other in graph()[name] if other != "minitrain"} - {room}
    wrong = {other for other in used if FLOOR[other] >= FLOOR[room]}
    assert not wrong, f"{name} imports from {sorted(wrong)}; allowed: rooms below floor {FLOOR[room]}"
    if room not in DOOR and not path.name.startswith("first"):  # a page needs torch alone
        taken = {
            alias.name
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed"
            for alias in node.names
        }
        assert "torch.distributed" not in imports_of(path) or taken == {"ProcessGroup"}, (
            f"{path.name}: collectives is the only door to torch.distributed; only the type ProcessGroup goes past it"
        )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next(filter(None, (visit(other, [*path, name]) for other in sorted(graph[name]))), [])
        done.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def test_no_circle():
    assert not circle(graph()), " -> ".join(circle(graph()))
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def loads(name: str) -> set[str]:
    """What is loaded with a module from outside: its imports, theirs, and those of their folders."""
    seen, outside, waiting = set(), set(), [name]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        outside |= {other.split(".")[0] for other in imports_of(MODULES[module]) if other not in MODULES}
        parents = [module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)]
        waiting += [*graph()[module], *parents]
    return outside


@pytest.mark.parametrize("start", NO_TORCH)
def test_no_torch_is_loaded_with(start):
    """Planners, simulators and pictures, and whatever they import, run where no torch is."""
    own = [name for name in MODULES if name == f"minitrain.{start}" or name.startswith(f"minitrain.{start}.")]
    heavy = {name: loads(name) & {"torch"} for name in own}
    assert not any(heavy.values()), f"{[name for name, found in heavy.items() if found]} need torch"
    assert "torch" in loads("minitrain.compose.parallelize")


MUTATORS = set(
    "add append appendleft clear discard extend insert pop popitem remove setdefault update acquire".split()
)
STATE = {  # what is changed all the same, and why; PROCESS of ranks/process.py is what everything else is in
    "compose.dry_runs _measured": "what was measured once, for the planner's next question",
    "course.grading.kit _lanes": "an answer's process, where there is no minitrain",
    "precision.products quantize": "to become an argument",
}


def changed_by_functions(path: Path) -> set[str]:
    """Names of a module, bound when it is imported, that its functions bind anew or change in place."""
    tree = tree_of(path)
    bound = {
        name.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    } | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    changed = set()
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        nodes = list(ast.walk(function))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)}
        local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        changed |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        for node in nodes:
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
                owner = node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MUTATORS:
                owner = node.func.value
            else:
                continue
            if isinstance(owner, ast.Name) and (owner.id in bound - local or owner.id == "cls"):
                changed.add(owner.id)
    return changed


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_keep_no_state(path):
    """What a call changes came as an argument, or is in the one object of the process."""
    names = {f"{name_of(path).removeprefix('minitrain.')} {name}" for name in changed_by_functions(path)}
    assert names <= STATE.keys(), f"{sorted(names - STATE.keys())}: state of a module; see ranks/process.py"
    loops = [node for node in tree_of(path).body if isinstance(node, (ast.For, ast.While, ast.With))]
    assert not loops or "minitrain/ranks" in str(path), (
        "a table filled by a loop: `minitrain lift` would leave it empty"
    )


# Of os, sys and named tuples: documented, whatever they are called.
PYTHONS_OWN = {"_exit", "_getframe", "_replace"}
PRIVATE = re.compile(r"\btorch(\.\w+)*\._|distributed_c10d")


def private_names(tree: ast.Module, ours: set[str]) -> set[str]:
    """What a module names of torch's private API: imports, attributes with _, words outside docstrings."""
    found, documented = set(), (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [node for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    docs = {id(node.body[0].value) for node in texts}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {name for alias in node.names if PRIVATE.search(name := f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if PRIVATE.search(alias.name)}
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            found |= set() if node.attr in ours else {ast.unparse(node)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found |= {node.value} if PRIVATE.search(node.value) else set()
    return found


def test_only_torch_private_names_what_torch_does_not_document():
    assigned = (ast.Name, ast.Attribute)
    ours = PYTHONS_OWN | {
        getattr(node, "attr", None) or getattr(node, "id", None) or node.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        or (isinstance(node, assigned) and isinstance(node.ctx, ast.Store))
    }
    found = {name: private_names(tree_of(path), ours) for name, path in MODULES.items()}
    assert found.pop("minitrain.ranks.torch_private"), "it names nothing, so nothing would be found elsewhere"
    assert found.pop(f"{name_of(ALONE)}.rank"), "what it takes away from an answer, it must name"
    assert not any(found.values()), {name: names for name, names in found.items() if names}
    planted = "import torch._dynamo\nfrom torch._C import x\nfrom torch.utils import _pytree\ny._cdata\nz = 'torch._C'"
    assert len(private_names(ast.parse(planted), ours)) == 5


def test_every_declared_dependency_is_used():
    """By the package, the tests or the benchmarks, or as a tool by its name."""
    tools = {
        "jupyterlab": "jupyter", "ipykernel": "nbclient", "nbval": "--nbval", "pytest-xdist": "--dist",
        "ruff": "ruff",
    }  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
    ]
    names = {line.split(">")[0].split("[")[0].strip() for line in lines} - {"minitrain"}
    used = {
        name
        for folder in ("minitrain", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)
    }
    texts = "".join(
        (ROOT / name).read_text()
        for name in ("Makefile", "minitrain/cli/main.py", "minitrain/course/notebook.py")
    )
    modules = {"pillow": "PIL"}
    unused = {
        name
        for name in names
        if modules.get(name, name).replace("-", "_") not in used and tools.get(name, "no tool") not in texts
    }
    assert not unused, f"declared and never used: {sorted(unused)}"


def test_packages_re_export_nothing():
    """But for three folders that are one module to their users, and say so."""
    for path in PACKAGE.rglob("__init__.py"):
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{path} has no map"
        if path.parent == PACKAGE:
            continue  # three short names, by a function
        if path.parent.name in FACES and path.parent.parent == PACKAGE / "ranks":
            assert all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in tree.body), (
                f"{path}: a docstring and imports, nothing else"
            )
        else:
            assert len(tree.body) == 1, f"{path}: one docstring, nothing else"


def test_maps_name_every_room():
    """The docstring of a folder names each of its modules, and nothing that is not there."""
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            words = set(ast.get_docstring(tree_of(path)).replace(",", " ").replace("/", " ").split())
            there = {
                other.stem if other.suffix else other.name
                for other in path.parent.iterdir()
                if other.suffix == ".py" and other.name != "__init__.py" or (other / "__init__.py").exists()
            }
            assert there <= words, f"{path.parent.name}: the map does not know {sorted(there - words)}"


def test_a_name_says_which_module():
    """No two modules share a base name, but for a folder's map and a technique's first page."""
    stems = Counter(path.stem for path in SOURCES if path.stem != "first")
    shared = {stem: count for stem, count in stems.items() if count > 1}
    assert not shared, f"modules with one name: {shared}"


def test_at_most_eighteen_rooms():
    top = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(top) <= 18, sorted(path.name for path in top)


def lines_of(folders: list[str], less: list[str]) -> int:
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    paths -= {path for folder in less for path in (ROOT / folder).rglob("*")}
    return sum(path.read_bytes().count(b"\n") for path in paths if path.suffix in (".py", ".txt"))


@pytest.mark.parametrize("what", BUDGETS)
def test_budgets_of_lines(what):
    """What is there may only shrink, down to the goal: whoever cuts lowers `most`."""
    *where, most, goal = BUDGETS[what]
    lines = lines_of(*where)
    assert lines <= most, f"{what} has {lines} lines, {lines - most} more than its budget"
    assert most <= max(goal, lines + 300), f"{what} has {lines} lines: lower its budget of {most}"


def test_a_reader_of_zero_opens_few_lines():
    """`python -m docs.house minitrain.data_parallel.zero1`: all it needs, without ranks/."""
    assert house.lines_of(house.closure("minitrain.data_parallel.zero1")) <= 400
    assert house.lines_of(house.closure("minitrain.data_parallel.zero2")) <= 500


NO_WORDS_OF_THE_FIELD = set(
    "found held kept way ways word lives arrived taken take stay own beside spread".split()
)
TERM = "held_out"  # the field's, with such a word in it


def public_names(tree: ast.Module) -> set[str]:
    """Functions, classes, methods, their parameters and fields, as a caller writes them."""
    names, waiting = set(), [(node, False) for node in tree.body]
    while waiting:
        node, in_class = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.name.startswith("_") or node.name == "__init__":
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                names |= {node.name, *(one.arg for one in given)}
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names.add(node.name)
            waiting += [(inner, True) for inner in node.body]
        elif in_class and isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def private_language(names: set[str]) -> set[str]:
    spelled = {name: re.sub("([A-Z])", r"_\1", name.replace(TERM, "")).lower() for name in names}
    return {name for name in names if set(re.findall("[a-z0-9]+", spelled[name])) & NO_WORDS_OF_THE_FIELD}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_names_are_the_fields(path):
    assert not (wrong := private_language(public_names(tree_of(path)))), f"{path.name}: {sorted(wrong)}"


def test_a_private_word_is_seen():
    source = "class Kept:\n    held: int\n    def go(self, way, _own): ...\n    def _take(self): ...\ndef is_taken(): ..."
    assert private_language(public_names(ast.parse(source))) == {"Kept", "held", "way", "is_taken"}


def test_no_drawer_for_odds_and_ends():
    assert not {path.name for path in SOURCES} & {"utils.py", "common.py", "helpers.py", "misc.py"}


def test_every_module_says_what_it_is_and_fits_in_the_head():
    for path in SOURCES:
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
                said := ast.get_docstring(node)
            ):
                assert said.count("\n") < 20, (
                    f"{path}: a docstring of more than 20 lines; the chapter derives"
                )


def test_a_forbidden_arrow_is_seen(tmp_path):
    bad = tmp_path / "zero.py"
    bad.write_text(
        "from minitrain.ranks.mesh import Mesh\nfrom minitrain.model import gpt\nimport minitrain.ranks.launch.dryrun\n"
    )
    assert {room_of(name) for name in imports_of(bad)} == {"ranks", "model"}


def test_the_core_needs_few_packages():
    """All but pictures, notebooks and exercises runs with what `pip install minitrain` brings; what is
    imported inside a function may be an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = (
        {line.split(">")[0] for line in project["dependencies"]}
        | set(sys.stdlib_module_names)
        | {"minitrain"}
    )
    at_top = {}
    for name, path in MODULES.items():
        tree = tree_of(path)
        inside = {
            f"{node.module}.{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        at_top[name] = {
            alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
        } | inside
    roots = {name: {other.split(".")[0] for other in imported} for name, imported in at_top.items()}
    extra = {name for name in MODULES if not roots[name] <= core}
    more = {n for n, imported in at_top.items() if {x.rpartition(".")[0] for x in imported} & extra}
    assert all(name.startswith("minitrain.course") for name in extra | more), (
        f"{extra | more} need more than {core}"
    )
