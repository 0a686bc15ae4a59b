"""A row enters the atlas only with a test that exists; with --atlas one that ran, on what the row says."""

import ast
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from minitrain.course import atlas
from tests import patience
from tests.proved import Case, shortfall

ROOT = Path(__file__).parents[2]


def test_rows_are_complete_and_unique():
    rows = atlas.rows()
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert all(vars(row).values()), f"{row.id} has an empty column"
        assert row.shown in atlas.SHOWN, f"{row.id}: shown {row.shown} is not one of {list(atlas.SHOWN)}"
        assert row.kind in atlas.KINDS, f"{row.id}: kind {row.kind} is not one of {atlas.KINDS}"
        assert re.fullmatch(r"\d\d[a-z]?", row.chapter), f"{row.id}: chapter {row.chapter}"


@cache
def functions_of(file: str) -> set[str]:
    nodes = ast.parse((ROOT / file).read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", atlas.rows(), ids=lambda row: row.id)
def test_module_and_test_exist(row):
    assert (ROOT / row.module).exists(), f"{row.id} names {row.module}, which is not there"
    file, _, name = row.test.partition("::")
    assert name in functions_of(file), f"{row.id} names {row.test}, which is not there"


def test_no_two_systems_share_a_test():
    tests = [row.test for row in atlas.rows()]
    assert len(set(tests)) == len(tests), sorted(test for test in tests if tests.count(test) > 1)


def test_training_stack_layers():
    """Each folder of minitrain is of one layer of the stack, and each layer has systems that the course covers."""
    layer_of = {folder: layer for layer, folders in atlas.LAYERS.items() for folder in folders.split()}
    assert len(layer_of) == sum(len(folders.split()) for folders in atlas.LAYERS.values()), "one is in two"
    folder = lambda path: Path(path).parts[1 + (Path(path).parts[1] == "systems")]
    modules = [path.relative_to(ROOT) for path in ROOT.glob("minitrain/*/**/*.py") if path.stem != "__init__"]
    assert {folder(path) for path in modules} == {*layer_of}
    assert {
        layer_of[folder(row.module)] for row in atlas.rows() if row.module != "minitrain/__init__.py"
    } == {*atlas.LAYERS}


def row(name="", idea="", module="", test="", shown="ranks") -> atlas.Row:
    return atlas.Row("x", name, idea, "RUN", shown, module, "00", test, "-")


def test_words_come_before_beginnings_and_both_before_letters_inside(monkeypatch):
    order = [
        row(name="Ring attention"), row(name="RingMaster"), row(idea="goes round a ring"),
        row(idea="goes through rings"), row(module="context/ring.py"), row(name="String sharing"),
    ]  # fmt: skip
    monkeypatch.setattr(atlas, "rows", lambda: [*reversed(order), row(name="tree")])
    assert atlas.search("ring") == order and atlas.search("RING") == order
    assert atlas.search("ring round") == [order[2]]
    both = [row(idea="a tree beside a ring"), row(name="Tree", idea="on strings")]
    monkeypatch.setattr(atlas, "rows", lambda: both[::-1])
    assert atlas.search("tree ring") == both, "the word that is worst to find decides"


# ---- what a run of the tests proves


def cases(*outcomes, ranks=0, needs_gpu=False):
    return [Case(f"t[{at}]", outcome, needs_gpu, ranks) for at, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    "shown, found, why",
    [
        ("computed", cases("passed", "passed"), None),
        ("computed", cases("passed", "failed"), "t[1] failed"),
        ("computed", cases("passed", "skipped"), "t[1] was skipped"),
        ("computed", [*cases("passed"), *cases("skipped", needs_gpu=True)], None),
        ("computed", cases("skipped", needs_gpu=True), "did not run and pass"),
        ("computed", [], "did not run and pass"),
        ("computed", cases("passed", ranks=4), None),
        ("simulated", cases("passed", ranks=4), None),
        ("tensors", cases("passed", ranks=1), None),
        ("tensors", cases("passed", ranks=2), "says tensors in one process, and 2 ranks were launched"),
        ("ranks", cases("passed", ranks=2), None),
        ("ranks", cases("passed", ranks=1), "the row says ranks, and none were launched"),
    ],
)
def test_a_row_is_proved_by_all_cases_of_its_test_on_what_it_says(shown, found, why):
    said = shortfall(row(shown=shown), found)
    assert said is why is None or why in said


def test_a_run_judges_every_row_and_counts_launches_wherever_they_are_asked_for(tmp_path):
    """By hand, by a fixture of the module, by a remembered function, by another process; reports come from a worker."""
    held, wrong = (
        ("by_hand", "by_fixture", "fixture_again", "cached", "cached_again", "other_process"),
        {
            "not_launched": "the row says ranks, and none were launched",
            "one_rank": "the row says ranks, and none were launched",
            "some_case": "test_x.py::test_some_case[1] failed",
            "skips": "test_x.py::test_skips was skipped",
            "broken_fixture": "test_x.py::test_broken_fixture failed",
            "late": "test_x.py::test_late failed",
            "absent": "did not run and pass",
        },
    )
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent(f"""
            from types import SimpleNamespace as Row
            from tests.proved import Proved

            def pytest_configure(config):
                names = {[*held, *wrong]}
                rows = [Row(id=name, shown="ranks", test=f"test_x.py::test_{{name}}") for name in names]
                config.pluginmanager.register(Proved(config, lambda: rows))
        """)
    )
    (tmp_path / "test_x.py").write_text(
        textwrap.dedent("""
            from functools import cache
            import pytest
            from minitrain import launch

            def ran(ranks=2): assert launch.run(int, ranks=ranks) == [0] * ranks
            @pytest.fixture(scope="module")
            def outcomes(): ran()
            @cache
            def remembered(): ran()
            @pytest.fixture
            def broken(): raise OSError
            @pytest.fixture
            def late():
                yield
                assert False

            def test_by_hand(): ran()
            def test_by_fixture(outcomes): pass
            def test_fixture_again(outcomes): pass
            def test_cached(): remembered()
            def test_cached_again(): remembered()
            def test_other_process(record_property): record_property("ranks", 4)
            def test_not_launched(): pass
            def test_one_rank(): ran(1)
            @pytest.mark.parametrize("case", [0, 1])
            def test_some_case(case, outcomes): assert not case
            def test_skips(outcomes): pytest.skip("no reason")
            def test_broken_fixture(broken, outcomes): pass
            def test_late(late, outcomes): pass
        """)
    )
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--rootdir", tmp_path,
    ]  # fmt: skip
    run = patience.run([*command, tmp_path], cwd=ROOT)
    said = dict(re.findall(r"^  (\w+): test_x.py::test_\w+: (.*)$", run.stdout, re.M))
    assert said == wrong and f"{len(wrong)} rows of the atlas" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 1
