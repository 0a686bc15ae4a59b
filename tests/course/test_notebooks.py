"""What nbval does not see: missing outputs, cells out of order, numbers that differ from run to run."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from minitrain.course import notebook

UNSTABLE = re.compile(
    r"0x[0-9a-f]{6,}|/(tmp|home|Users)/|\.venv|\b\d+(\.\d+)? ?(it/s|s/it|tokens/s)\b"
)  # replayed times repeat
FREE = {"nbval-ignore-output", "nbval-skip"}
CHAPTERS = list(notebook.chapters().values())


def cells(path: Path, kind: str) -> list:
    found = (cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind)
    return [cell for cell in found if "".join(cell.source).strip()]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def text_of(output) -> str:
    return output.get("text", "") or "".join(output.get("data", {}).get("text/plain", ""))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
class TestChapter:
    def test_was_run_from_top_to_bottom(self, path):
        counts = [cell.execution_count for cell in cells(path, "code")]
        assert counts == list(range(1, len(counts) + 1)), f"run it with `minitrain run --save`: {counts}"

    def test_has_no_error_that_is_not_meant(self, path):
        for cell in cells(path, "code"):
            if "raises-exception" not in tags(cell):
                assert not [out for out in cell.outputs if out.output_type == "error"], cell.source

    def test_no_output_names_where_it_was_run(self, path):
        """A traceback's paths begin at the project, wherever its environment stands."""
        assert not re.search(r"[^.\w]/\S*/site-packages|m/\S*/site-packages", path.read_text())

    def test_no_cell_hides_its_last_value_with_a_semicolon(self, path):
        for cell in cells(path, "code"):
            assert not cell.source.rstrip().endswith(";"), f"nbval shows what `;` hides: {cell.source[-60:]}"

    def test_checked_outputs_hold_nothing_that_changes(self, path):
        for cell in cells(path, "code"):
            if not tags(cell) & FREE:
                for output in cell.outputs:
                    found = UNSTABLE.search(text_of(output))
                    assert not found, (
                        f"{found.group()!r} in a checked output; tag the cell nbval-ignore-output: {cell.source[:80]}"
                    )

    def test_checks_something(self, path):
        checked = [cell for cell in cells(path, "code") if not tags(cell) & FREE]
        checked = [cell for cell in checked if any(text_of(out) for out in cell.outputs)]
        assert len(checked) >= 8, f"only {len(checked)} cells have an output that is compared"

    def test_defines_no_class_and_says_what_it_needs(self, path):
        # a class belongs in a module
        assert not [cell for cell in cells(path, "code") if re.search(r"^class ", cell.source, re.M)]
        title, facts = notebook.heading(path)
        assert title.startswith(path.name.partition("_")[0] + " "), (
            f"the title {title!r} starts with the number of the chapter"
        )
        assert all(word in facts for word in ("Time", "Ranks", "Hardware")), (
            f"the second line tells time, ranks, hardware: {facts!r}"
        )

    def test_is_small_enough_to_read_in_a_browser(self, path):
        assert path.stat().st_size < 1_000_000
        for cell in cells(path, "code"):
            for output in cell.outputs:
                assert "<script" not in output.get("data", {}).get("text/html", "")


def test_source_and_outputs_are_normalised():
    for path in CHAPTERS:
        raw = json.loads(path.read_text())
        assert [cell["id"] for cell in raw["cells"]] == [f"cell-{i:03d}" for i in range(len(raw["cells"]))], (
            f"{path.name}: save it with `minitrain run {path.name.partition('_')[0]} --save`"
        )
        assert "widget-view" not in path.read_text(), (
            f"{path.name} holds a widget, which is gone with its kernel and has another id every time"
        )
        for outputs in (cell.get("outputs", []) for cell in raw["cells"]):
            assert len(notebook.joined(outputs)) == len(outputs), (
                f"{path.name}: prints are cut where the kernel paused; save it with --save"
            )


def test_show_prints_source_without_docstring(capsys):
    notebook.show(notebook.key_among)
    printed = capsys.readouterr().out
    place, first = printed.splitlines()[:2]
    assert re.fullmatch(r"# minitrain/course/notebook\.py:\d+", place) and first.startswith("def key_among(")
    assert "Raises" not in printed and "raise ValueError" in printed


def test_beside_prints_exact_ratio(capsys):
    notebook.compare({"ring": (24, 24), "half": (1, 2)})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "ring                    24                    24  1.000",
        "half                     1                     2  0.500",
    ]


def test_unknown_chapter_is_one_line():
    with pytest.raises(ValueError, match="there is no chapter '77'; there are"):
        notebook.chapter("77")
