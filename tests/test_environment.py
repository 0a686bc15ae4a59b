"""One list of dependencies: pyproject.toml names the bounds, constraints.txt pins them, minitrain/course/install.py
knows the builds of torch, and environment.yml leads there.
"""

import ast
import re
import runpy
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from minitrain.course import install

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = {
    Requirement(line).name: Requirement(line)
    for line in [*PROJECT["dependencies"], *EXTRAS["course"], *EXTRAS["test"]]
}
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PINNED = dict(line.split("==") for line in CONSTRAINTS if "==" in line) | {"torch": install.TORCH}
IMPORT_NAMES = {"pytest-xdist": "xdist", "pillow": "PIL"}


def conda_file() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def test_one_version_is_told_and_windows_is_told_where_to_go(monkeypatch):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert cited == PROJECT["version"] and f"## {cited}, " in (ROOT / "CHANGELOG.md").read_text()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="^minitrain runs on .* inside WSL$"):
        runpy.run_path(str(ROOT / "minitrain/__init__.py"))


def test_conda_users_install_as_make_does():
    head = (ROOT / "environment.yml").read_text().splitlines()[0]
    assert head.endswith("conda activate minitrain && python minitrain/course/install.py")
    assert "install.py $(VENV)" in (ROOT / "Makefile").read_text()


def test_conda_gives_python_and_pip_only():
    plain = [entry for entry in conda_file()["dependencies"] if isinstance(entry, str)]
    assert [Requirement(entry).name for entry in plain] == ["python", "pip"]
    floor = next(spec.version for spec in Requirement(plain[0]).specifier if spec.operator == ">=")
    assert PROJECT["requires-python"] == f">={floor}"


def test_every_bound_has_a_floor_and_a_ceiling_and_admits_its_pin():
    for name, requirement in DECLARED.items():
        operators = {spec.operator for spec in requirement.specifier}
        assert operators == {">=", "<"}, f"{name} needs a floor and a ceiling, has {requirement.specifier}"
        assert name in PINNED, f"{name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(PINNED[name]), (
            f"{name}=={PINNED[name]}: {requirement.specifier}"
        )
    assert DECLARED["torch"].specifier.contains("2.11.0") and PINNED["torch"] == "2.13.0"


def test_no_constraint_replaces_a_torch_that_is_there():
    """Nor its CUDA libraries: which belong to a torch, it says itself."""
    ours = [line for line in CONSTRAINTS if re.match("torch|triton|nvidia|cuda", line)]
    assert ours == [] and all(install.is_supported(version) for version in ("2.11.0", PINNED["torch"]))


def test_what_is_installed_is_inside_the_bounds():
    for name, requirement in DECLARED.items():
        installed = Version(metadata.version(name)).public
        assert requirement.specifier.contains(installed), f"{name} {installed}: {requirement.specifier}"


def test_every_import_of_the_package_is_declared():
    known = {IMPORT_NAMES.get(name, name) for name in DECLARED} | set(sys.stdlib_module_names) | {"minitrain"}
    known |= {"IPython"}  # comes with ipykernel, always
    known |= {Requirement(line).name for line in EXTRAS["triton"]}
    for path in (ROOT / "minitrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            unknown = [name for name in names if name.split(".")[0] not in known]
            assert not unknown, f"{path.relative_to(ROOT)}: pyproject.toml does not declare {unknown}"
