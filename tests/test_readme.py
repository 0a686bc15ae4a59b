"""The README and docs keep their word: examples print what they say, links exist, commands are taken, the house is as drawn."""

import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs import house
from minitrain.cli import main
from minitrain.course import notebook
from minitrain.model.config import presets
from minitrain.model.data.token_files import write_pair
from minitrain.plan.strategy import Strategy
from minitrain.systems.plan.emit.training_job import Job, write
from tests import layouts

ROOT = Path(__file__).parent.parent
FRONT = ["README.md", "README.zh.md", "CONTRIBUTING.md"]
README, CHINESE, CONTRIBUTING = ((ROOT / name).read_text() for name in FRONT)
PAGES = [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "".join(page.read_text() for page in PAGES)
SHORT = [page.read_text() for page in PAGES if page.name != "recipes.md"]  # it has a test of its own
CODE = re.findall(r"```python\n(.*?)```", "".join(SHORT), re.S)


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
    Path("plan.json").write_text(write(Job(Strategy(dp=2), presets["small"], 8, 256)))
    Path("data").mkdir()
    write_pair(Path("data/wiki.bin"), [range(256)] * 2, 256)
    lines = [
        shlex.split(line, comments=True)
        for line in re.findall(r"^(?:torchrun .*-m minitrain|minitrain) (train .*)$", TEXT, re.M)
    ]
    assert len(lines) >= 5
    started = []
    run = lambda fn, settings, *, ranks, **_: started.append((str(settings.strategy), ranks))
    monkeypatch.setattr("minitrain.ranks.launch.run", run)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    for words in lines:
        result = CliRunner().invoke(main.app, words)
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
    assert len(started) == len(lines) and all(ranks > 1 for _, ranks in started)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{target} is not there"


def test_the_readme_is_short_and_leads_to_a_chapter_at_once():
    assert len(README.split()) <= 950
    numbers = lambda page: [sorted(re.findall(r"\d+(?:[.,]\d+)*", line)) for line in page.splitlines()]
    assert numbers(README) == numbers(CHINESE)
    assert "](notebooks/" in README[:2000] and "make course  " in README[:2000]
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT)}" in README, f"the README does not lead to {page.name}"


def test_chapters_and_their_minutes_are_those_of_the_notebooks():
    told = {
        n: (title, int(m))
        for n, title, m in re.findall(r"\| \[?(\d\d\w?)(?:\]\S+)? \| \[(.*?)\]\S+ \| (\d+) ", README)
    }
    assert told.keys() == notebook.chapters().keys()
    for number, path in notebook.chapters().items():
        text = path.read_text()
        time = r"\*\*Time\*\* (?:\d+ min to read, )?(\d+) (?:of them for the core path|min)"
        title, minutes = re.search(r"# \d\d\w? · ([^\\:]+)", text)[1], re.search(time, text)[1]
        assert told[number] == (title, int(minutes)), number


def test_the_house_is_drawn_as_it_is():
    """`python -m docs.house`, lines in hundreds."""
    assert house.drawn() in CONTRIBUTING, house.drawn()


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{command}:" in makefile for command in ("course", "test", "lab", "lint", "gpu"))
