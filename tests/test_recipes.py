"""docs/recipes.md: each block is a file of 20 lines that prints what stands below it, and would not without its technique."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
NAMES = ("zero2", "ring", "pipeline", "fp8", "checkpoint", "account", "lift")
BLOCKS = dict(zip(NAMES, re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S), strict=True))
WITHOUT = {  # the essential call, and what stands in its place: another output, or an error
    "zero2": ("zero.finish)", "lambda: setattr(zero, 'finished', True))"),
    "ring": ("here, rings)", "here, whole)"),
    "pipeline": ('named("1f1b"', 'named("gpipe"'),
    "fp8": ("convert(mlp, recipe)", "pass"),
    "checkpoint": ("states.load_pieces(zero, ", "print("),
    "account": ("nn.parallel.DistributedDataParallel(model)", "model"),
    "lift": ('lift(["data_parallel.zero2:Zero2"])', '"from minitrain.data_parallel.zero2 import Zero2"'),
}


def lines_of(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.fixture
def output_of(tmp_path, monkeypatch, capfd):
    def run(code: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        Path("recipe.py").write_text(code)
        runpy.run_path("recipe.py", run_name="__main__")
        return lines_of(capfd.readouterr().out)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_short_and_prints_what_the_page_says(name, output_of):
    code, expected = BLOCKS[name]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20, name
    assert output_of(code) == lines_of(expected)


@pytest.mark.parametrize("name", NAMES)
def test_without_its_technique_it_prints_something_else(name, output_of):
    (code, expected), (call, instead) = BLOCKS[name], WITHOUT[name]
    assert code.count(call) == 1
    try:
        assert output_of(code.replace(call, instead)) != lines_of(expected)
    except Exception as error:
        assert "gradient" in str(error), error


@pytest.mark.parametrize("name", ["ring", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_under_torchrun_a_rank_prints_the_same(name, tmp_path):
    code, expected = BLOCKS[name]
    (tmp_path / "recipe.py").write_text(code)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += ["--local-ranks-filter=0", "recipe.py"]  # else lines of two ranks run into each other
    job = patience.run([sys.executable, *words], cwd=tmp_path)
    assert job.returncode == 0, job.stderr[-2000:]
    printed = [line for line in lines_of(job.stdout) if not line.startswith("this job has")]
    assert printed == lines_of(expected)


def closure(path: Path) -> set[Path]:
    """The file and all files of minitrain that it imports, followed."""
    found, rest = set(), [path]
    while rest:
        if (path := rest.pop()) not in found:
            found.add(path)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                places = [ROOT / name.replace(".", "/") for name in names]
                files = [one for place in places for one in (place.with_suffix(".py"), place / "__init__.py")]
                rest += [file for file in files if file.exists()]
    return {file for file in found if file.read_text().strip()}


def lines_in(*files: Path) -> int:
    return sum(bool(line.strip()) for file in files for line in file.read_text().splitlines())


def test_the_table_of_lines_is_of_minitrain_as_it_is():
    cells = re.findall(r"\[(\d+)\]\(\.\./(minitrain/\S+?)\) \(([\d,]+) in (\d+)\)", PAGE)
    assert len(cells) == 20
    for lines, name, followed, files in cells:
        every = closure(ROOT / name)
        now = lines_in(ROOT / name), lines_in(*every), len(every)
        told = int(lines), int(followed.replace(",", "")), int(files)
        assert all(abs(a - b) <= b / 20 for a, b in zip(told, now)), f"{name}: {told}, and now {now}"
