"""The list of mutants fits the tree, and the command that tries them tells the killed from the others.
`python -m tests.mutants` tries them all; that takes too long for every run."""

import ast
import subprocess
from collections import Counter

import pytest

from tests import mutants

ALL = mutants.read()


def test_every_mutant_can_be_made():
    """Its line stands once in its file, as the code is now; a line that moved is adapted, or the mutant goes."""
    assert len({mutant.id for mutant in ALL}) == len(ALL)
    problems = [f"{mutant.id}: {problem}" for mutant in ALL if (problem := mutant.problem(mutants.ROOT))]
    assert not problems, "\n".join(problems)


def test_every_mutant_is_python_and_names_tests_that_exist():
    names: dict[str, set[str]] = {}
    for mutant in ALL:
        text = (mutants.ROOT / mutant.file).read_text()
        if mutant.file.endswith(".py"):
            compile(text.replace(mutant.old, mutant.new), mutant.id, "exec")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            if file not in names:
                nodes = ast.walk(ast.parse((mutants.ROOT / file).read_text()))
                names[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert not name or name.split("[")[0] in names[file], (
                f"{mutant.id} names {test}, which is not there"
            )


@pytest.fixture
def tree(tmp_path):
    """A tree of one function, and a test that looks at its sign alone."""
    (tmp_path / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "test_half.py").write_text(
        "from half import half\n\ndef test_sign():\n    assert half(4) > 0\n\n"
        "def test_wrong():\n    assert not half(4)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_verdicts(tree, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than pytest
    line = lambda name, old, new, tests: mutants.Mutant(name, "half.py", old, new, tests, "halves")
    sign = ("test_half.py::test_sign",)
    tried = [
        line("other sign", "x / 2", "-x / 2", sign),
        line("thirds", "/ 2", "/ 3", sign),
        line("red before", "/ 2", "* 0", ("test_half.py::test_wrong",)),
        line("twice", "x", "y", sign),
    ]
    said = []
    counts = mutants.judge(tried, tree, jobs=1, limit_s=300, say=said.append)
    counts += mutants.judge([line("loop", "return x / 2", "while 1: pass", sign)], tree, 1, 3, said.append)
    assert counts == Counter(killed=1, survived=1, unclear=2, time=1)
    verdicts = [text.split(": halves")[0] for text in said]
    assert verdicts[0] == "killed    other sign" and verdicts[1] == "survived  thirds"
    assert "its tests do not pass without it red before" in verdicts[2]
    assert "half.py has 'x' 2 times" in verdicts[3] and verdicts[4] == "time      loop"
    assert (tree / "half.py").read_text() == "def half(x):\n    return x / 2\n", "the tree is not touched"


def test_lines_are_read_with_their_new_lines_and_tabs(tmp_path):
    path = tmp_path / "list.tsv"
    head = "\t".join(mutants.COLUMNS)
    path.write_text(head + '\n1\tf.py\ta\\n    b "\\\\n" \\d\tc\\td\tt.py u.py::v\twhat\n')
    (mutant,) = mutants.read(path)
    assert (mutant.old, mutant.new, mutant.tests) == ('a\n    b "\\n" \\d', "c\td", ("t.py", "u.py::v"))
    path.write_text(head + "\n1\tf.py\n")
    with pytest.raises(ValueError, match="line 2 has 2 columns"):
        mutants.read(path)
