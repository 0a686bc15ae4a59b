"""The README keeps its word: its example prints what it says, its links exist, its commands are targets."""

import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.model.config import presets
from minitrain.plan.emit import plan_file
from minitrain.plan.emit.training_job import Job
from minitrain.plan.strategy import Strategy
from tests import layouts

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


CODE = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("number", range(len(CODE)))
def test_an_example_is_ten_lines_and_prints_what_the_readme_says(number, tmp_path, capsys):
    code = CODE[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "example.py"
    script.write_text(code)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip() == re.search(r"# (.*?):", code).group(1)


def test_the_table_of_layouts_is_what_the_generator_draws():
    """`python -m tests.layouts --draws 90 --seed 7 --table`, but for the runs."""
    drawn = sum((layouts.together(layouts.draw(number, 7)) for number in range(90)), Counter())
    assert layouts.table(drawn).strip() in TEXT


def test_commands_that_train_are_what_the_command_takes(monkeypatch, tmp_path):
    """Every `minitrain train` line, also behind torchrun: its flags exist and its layout can be."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan_file.write(Job(Strategy(dp=2), presets["small"], 8, 256)))
    lines = [
        shlex.split(line, comments=True)
        for line in re.findall(r"^(?:torchrun .*-m minitrain\.cli|minitrain) (train .*)$", TEXT, re.M)
    ]
    assert len(lines) >= 5
    started = []
    monkeypatch.setattr(
        "minitrain.ranks.launch.run",
        lambda fn, config, strategy, *_, ranks, **__: started.append((str(strategy), ranks)),
    )
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    for words in lines:
        result = CliRunner().invoke(main.app, words)
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
    assert len(started) == len(lines) and all(ranks > 1 for _, ranks in started)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), (
            f"README links to {target}, which is not there"
        )


def test_every_module_folder_is_on_the_map():
    for folder in (ROOT / "minitrain").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"minitrain/{folder.name}" in TEXT, f"the map does not know {folder.name}"


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("course", "test", "lab", "bench"):
        assert re.search(rf"^{command}:", makefile, re.M)
