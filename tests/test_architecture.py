"""The arrows of the house point down: who may import whom, read from the source with `ast`.

A row says which parts of minitrain a part may import. A part is the first name after `minitrain` (a module or a folder).
Techniques never import each other, nor the mesh, the model or a config: what one needs of another arrives as an argument.
"""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minitrain"
BASE = {"alibi", "collectives", "dropout", "sharding"}                            # all a technique may lean on
TECHNIQUES = {"data_parallel", "tensor_parallel", "pipeline", "context", "moe", "precision", "memory", "checkpoint",
              "fault", "communication", "kernels"}
NO_TORCH = {"events", "deduplicate", "simulate", "plan", "accounting", "config", "plot", "plot_pipeline", "house_style", "atlas",
            "notebook", "shared_cores", "flags", "strategy"}
EVERYTHING = {"*"}
DOOR = {"collectives", "channel", "messages", "transport", "sharding", "mesh", "launch", "launch_ranks", "dryrun", "grading"}
ARROWS = {
    "events": set(), "config": set(), "accounting": {"config"}, "layers": {"alibi", "config"}, "model": {"config", "layers"}, "alibi": set(),
    "hugging_face": {"config", "model"},
    "data": set(), "dropout": set(), "deduplicate": set(), "atlas": set(), "notebook": set(),
    "call_log": set(), "checked": {"call_log"}, "shared_cores": set(), "channel": {"call_log", "shared_cores"},
    "transport": {"call_log", "checked", "channel"},
    "messages": {"call_log", "channel", "transport"},
    "collectives": {"call_log", "checked", "channel", "messages", "transport"}, "mesh": {"collectives"}, "sharding": {"collectives"},
    "launch": {"collectives", "launch_local", "launch_ranks", "launch_report"}, "launch_local": {"collectives", "launch_ranks", "launch_report"},
    "launch_ranks": {"collectives", "launch_report"}, "launch_report": set(), "wire": {"collectives", "launch"},
    "operators": set(), "memory_meter": set(), "ledger": {"call_log", "collectives", "events", "memory_meter", "operators"},
    "dryrun": {"collectives", "launch_local", "launch_report"},
    "optim": BASE, **{name: BASE for name in TECHNIQUES},
    "simulate": {"events"}, "plan": {"simulate", "accounting", "config", "events"},
    "house_style": set(), "plot": {"house_style", "simulate"}, "plot_pipeline": {"house_style"},
    "pipeline_widget": {"house_style", "pipeline", "plot_pipeline"},
    "train": {"collectives", "data", "optim"}, "recipe": {"optim"}, "flags": set(), "strategy": {"config", "context", "data_parallel", "pipeline"},
    "run": EVERYTHING, "trainer": EVERYTHING, "train_command": EVERYTHING, "parallelize": EVERYTHING, "cli": EVERYTHING,
    "grading": {"collectives"}, "exercises": {"grading"},
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(path: Path) -> set[str]:
    """Full names of every module `path` imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import; write the whole name"
            names.add(node.module)
            if node.module == "minitrain":
                names |= {f"minitrain.{alias.name}" for alias in node.names}
    return names


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert part in ARROWS, f"{part} has no row in the table of arrows"
    used = {part_of(name) for name in imports_of(path) if name.startswith("minitrain.")} - {part}
    wrong = set() if ARROWS[part] == EVERYTHING else used - ARROWS[part]
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}; allowed: {sorted(ARROWS[part]) or 'torch only'}"
    if part in NO_TORCH:
        assert "torch" not in {name.split(".")[0] for name in imports_of(path)}, f"{part} must not need torch"
    elif part not in DOOR:
        taken = {name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
                 and node.module == "torch.distributed" for name in (alias.name for alias in node.names)}
        assert "torch.distributed" not in imports_of(path) or taken == {"ProcessGroup"}, \
            f"{path.name}: collectives is the only door to torch.distributed; only the type ProcessGroup goes past it"


def test_packages_re_export_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and ast.get_docstring(ast.parse(path.read_text())), f"{path}: one docstring, nothing else"


def test_no_drawer_for_odds_and_ends():
    assert not {path.name for path in SOURCES} & {"utils.py", "common.py", "helpers.py", "misc.py"}


def test_every_module_says_what_it_is_and_fits_in_the_head():
    for path in SOURCES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
        assert text.count("\n") <= 320, f"{path} has {text.count(chr(10))} lines; split it by idea"


def test_a_forbidden_arrow_is_seen(tmp_path):
    bad = tmp_path / "zero.py"
    bad.write_text("from minitrain.mesh import Mesh\nfrom minitrain import model\n")
    assert {part_of(name) for name in imports_of(bad) if "." in name} == {"mesh", "model"}
