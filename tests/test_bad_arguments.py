"""Bad arguments of every command, for every parameter: no traceback, one line that says what was given."""

import inspect
import os
import random
import socket
import sys

import pytest
import typer

from minitrain import launch
from minitrain.cli import main
from minitrain.course import exercises, home, notebook
from minitrain.course.plot import charts
from minitrain.ranks.launch import dryrun

TEXTS = ["", "nope", "-1", "x" * 5000, "é\udce9", "a\nb"]
NUMBERS = ["", "nope", "-1", "0", "9" * 30, "nan", "inf", "1e400", "folder"]
PATHS = ["folder", "text.txt", "binary", "loop", "socket", "folder/missing", "missing/file", "text.txt/below"]


def bad_for(kind: str) -> list[str]:
    """What is wrong for a parameter of that type, or may be."""
    if "int" in kind or "float" in kind:
        return NUMBERS
    return TEXTS + PATHS * ("Path" in kind)


# What a command needs beside the parameter that is tried, and what would otherwise be read or drawn.
NEEDED = {
    "train": ["--text", "text.txt", "--batch", "2", "--length", "8", "--steps", "1"],
    "replay": ["tiny", "--ranks", "2", "--length", "8"], "convert": ["folder", "target"], "grade": ["02"],
    "run": ["00"],
}  # fmt: skip


def reached(*_, **__):
    """The command has accepted its arguments."""
    raise typer.Exit(0)


def commands(group, *words):
    """(words, its parameters) of every command there is."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            kinds = inspect.signature(command.callback, eval_str=True).parameters
            known = {key: str(one.annotation).partition(", <")[0] for key, one in kinds.items()}
            yield " ".join((*words, name)), [(one, known.get(one.name, "")) for one in command.params]


EVERY = dict(commands(typer.main.get_command(main.app)))


def tries(name: str):
    """Command lines of a command, with one bad value each."""
    words, (*_, last) = name.split(), name.split()
    needed = NEEDED.get(last, [])
    arguments = [param.name for param, _ in EVERY[name] if param.param_type_name == "argument"]
    for param, kind in EVERY[name]:
        for value in bad_for(kind) if param.name in arguments or not param.is_flag else ():
            if param.name not in arguments:
                yield param.name, value, [*words, *needed, f"{param.opts[0]}={value}"]
                continue
            given, options = needed[: len(arguments)], needed[len(arguments) :]
            at = arguments.index(param.name)
            yield param.name, value, [*words, *options, "--", *given[:at], value, *given[at + 1 :]]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with one of each kind of file; nothing that takes long is begun."""
    for owner, what in {
        launch: "run",
        dryrun: "run",
        notebook: "execute",
        os: "execv",
        exercises: "grade_answers",
        charts: "timeline",
    }.items():
        monkeypatch.setattr(owner, what, reached)
    monkeypatch.setattr(home, "files", lambda root: iter(()))
    group = typer.main.get_command(main.app)  # made once: it takes longer than to refuse a value
    monkeypatch.setattr(typer.main, "get_command", lambda _: group)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 99)
    (tmp_path / "binary").write_bytes(random.Random(0).randbytes(4000))
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def test_there_are_commands_with_parameters():
    assert len(EVERY) >= 13 and len(EVERY["train"]) > 50


@pytest.mark.parametrize("name", EVERY)
def test_every_bad_argument_is_one_line(name, place, monkeypatch, capsys):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket")
    wrong = []
    for param, value, words in tries(name):
        monkeypatch.setattr(sys, "argv", ["minitrain", *words])
        try:
            main.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
        out, err = capsys.readouterr()
        lines = err.splitlines()
        fine = code in (0, 1, 2) and len(lines) == (code != 0 and not out)
        fine &= not lines or len(err) < 1000 and err.startswith("minitrain: ")
        if not fine:
            wrong.append(f"{param}={value[:40]!r}: {code}: {err[-300:]!r}")
    listening.close()
    assert not wrong, f"{len(wrong)} of {name}\n" + "\n".join(wrong)
