"""The `minitrain` command: what it prints, and that an error is one line."""

import json
import subprocess
import sys

import nbformat
import pytest
from typer.testing import CliRunner

from minitrain import cli
from minitrain.course import atlas, notebook


def invoke(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def test_doctor_lets_four_ranks_meet():
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output and "first launch" in result.output


def test_list_names_every_chapter_with_its_facts():
    printed = invoke("list").output
    for number, path in notebook.chapters().items():
        assert f"{number} · " in printed and path.name in printed
    assert printed.count("Ranks") == len(notebook.chapters())


def test_atlas_is_searched_by_all_words():
    printed = invoke("atlas", "ring", "all-reduce").output
    found = atlas.search("ring all-reduce")
    assert 0 < len(found) < len(atlas.rows()) and printed.endswith(f"{len(found)} systems\n")
    assert all(row.test in printed for row in found)


def test_replay_of_a_small_model(tmp_path):
    result = invoke(
        "replay",
        "tiny",
        "--ranks",
        "16",
        "--length",
        "64",
        "--trace",
        str(tmp_path / "t.json"),
        "--picture",
        str(tmp_path / "t.png"),
    )
    assert result.exit_code == 0, result.output
    assert "16 ranks of H100" in result.output and "MFU" in result.output
    assert json.loads((tmp_path / "t.json").read_text()) and (tmp_path / "t.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "77"], "there is no chapter '77'; there are 00, 01, 02, 03"),
        (["replay", "gpt9"], "no preset is called 'gpt9'; choose from tiny"),
        (["replay", "tiny", "--machine", "abacus"], "no machine is called 'abacus'; choose from"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["minitrain", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capfd.readouterr().err
    assert ended.value.code == 2 and message in errors and errors.count("\n") == 1


def test_the_same_of_the_command_itself():
    command = [sys.executable, "-m", "minitrain.cli", "run", "77"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("minitrain: ") and done.stderr.count("\n") == 1


def test_a_chapter_that_fails_names_the_cell_and_is_written_all_the_same(tmp_path):
    cells = [
        nbformat.v4.new_code_cell("1 + 1"),
        nbformat.v4.new_code_cell("1 / 0"),
        nbformat.v4.new_code_cell("3"),
    ]
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    seen = []
    with pytest.raises(
        RuntimeError, match="broken.ipynb stopped in cell 2: ZeroDivisionError: division by zero"
    ):
        notebook.execute(
            path, tmp_path / "out" / "broken.ipynb", lambda done, total: seen.append((done, total))
        )
    written = nbformat.read(tmp_path / "out" / "broken.ipynb", as_version=4)
    assert written.cells[0].outputs[0].data["text/plain"] == "2" and seen[0] == (1, 3)
    assert [cell.id for cell in written.cells] == ["cell-000", "cell-001", "cell-002"]
