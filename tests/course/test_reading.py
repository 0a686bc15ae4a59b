"""The rules of a chapter that a program can check: what a reader meets, and what follows from the rest."""

import ast
import difflib
import dis
import importlib
import io
import json
import re
import tokenize
import warnings
from pathlib import Path

import pytest

from docs import reading
from minitrain.course import notebook
from minitrain.course.plot import style

CHAPTERS = notebook.chapters()
APPENDICES = {
    number for number in CHAPTERS if len(number) > 2
}  # further systems; the chapter asks and breaks
ROOT = notebook.CHAPTERS.parent
GUESS = re.compile(r"^guess = None  # .+\bbefore you run on$", re.M)
SECTIONS = ["## Exercise", "## The bridge", "## What you measured, and what you modelled", "## Sources"]
COST = re.compile(r"\b(bytes|sent|[KMG]B|ms|makespan|peak|held|overhead|bubble|period|messages|FLOPs)\b")
# How many tables of costs older chapters have without a prediction: these numbers only get smaller.
NOT_ASKED = dict(zip(("00", "01", "02", "04", "07", "09"), (1, 1, 3, 2, 3, 2)))
NOT_ASKED |= dict(zip(("13", "14", "16", "17", "18", "19"), (2, 1, 3, 7, 2, 4)))
# Core paths of more than an hour: these numbers only get smaller.
LONGER = {}
# Chapters whose core path still reads a name that only an optional section binds: this only gets shorter.
BORROWS = "".split()
PER_UNIT = re.compile(
    r"\b(bytes?|bits?|numbers?|FLOPs?|messages?|tokens?|stages?|elements?|microbatch(?:es)?|[GMK]B)"
    r" an? (parameter|rank|token|step|layer|element|number|value|microbatch|stage|expert|device|node|weight|row"
    r"|update)\b(?! (?:sends|has|holds|may|keeps|receives|gets|needs|can|must|waits|below)\b)"
)


def cells(number: str, kind: str) -> list[dict]:
    found = json.loads(CHAPTERS[number].read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found if cell["cell_type"] == kind]


def prose(number: str) -> str:
    return "\n\n".join(cell["source"] for cell in cells(number, "markdown"))


def sources_shown(number: str) -> str:
    """All code that a reader of the chapter has seen: its cells, and what `show` prints."""
    shown = [
        "".join(output.get("data", {}).get("text/plain", ""))
        for cell in cells(number, "code")
        for output in cell["outputs"]
        if "text/markdown" in output.get("data", {})
    ]
    return "\n\n\n".join([cell["source"] for cell in cells(number, "code")] + shown)


def test_reading_paths_are_those_of_the_map_and_leave_no_chapter_out():
    assert reading.paths() in reading.MAP.read_text()  # run: python -m docs.reading
    assert {*CHAPTERS} <= {number for _, listed in reading.PATHS.values() for number in listed.split()}


@pytest.mark.parametrize("number", CHAPTERS)
class TestChapter:
    def test_what_follows_from_the_rest_is_set(self, number):
        """Times as counted, links to modules, exercise, papers and neighbours, sources at their present line."""
        found = json.loads(CHAPTERS[number].read_text())
        before = json.dumps(found)
        assert json.dumps(reading.set_right(found, number)) == before  # python -m docs.reading

    def test_the_core_path_takes_an_hour(self, number):
        """What does not fit is an optional section, which nothing in the core path needs, or an appendix."""
        _, core = reading.minutes(json.loads(CHAPTERS[number].read_text())["cells"])
        assert core <= LONGER.get(number, 60), f"{core} minutes"

    def test_the_core_path_needs_no_optional_section(self, number):
        """Every name that its cells read was bound last by a cell of the core path, or by Python."""
        lost, level = set(), 0
        for cell in json.loads(CHAPTERS[number].read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                for marks, title in re.findall(r"^(#+) (.*)", source, re.M):
                    if not level or len(marks) <= level:
                        level = len(marks) * ("optional" in title)
                continue
            read, bound = names(compile(source, number, "exec"))
            assert level or number in BORROWS or not (read - bound) & lost, (
                cell["id"],
                (read - bound) & lost,
            )
            lost = lost | bound if level else lost - bound

    def test_links_lead_somewhere(self, number):
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", prose(number)):
            assert (CHAPTERS[number].parent / target).exists(), target

    def test_cells_are_short(self, number):
        for cell in cells(number, "code"):
            lines = cell["source"].splitlines()
            assert len(lines) <= 25, f"{len(lines)} lines: {lines[0]}"
            assert max(map(len, lines), default=0) <= 100, max(lines, key=len)

    def test_predictions_are_answered_soon_and_folded(self, number):
        code = cells(number, "code")
        asked = [at for at, cell in enumerate(code) if re.search(r"^guess(?:es)? *=", cell["source"], re.M)]
        assert len(asked) >= 2 * (number not in APPENDICES)
        assert len(asked) == prose(number).count("**Predict.**")
        for at in asked:
            assert GUESS.search(code[at]["source"]), code[at]["source"]
            answers = [cell for cell in code[at : at + 6] if notebook.answers_a_prediction(cell["source"])]
            assert answers, f"nobody answers within five cells: {code[at]['source']}"
        for cell in code:
            hidden = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            assert hidden == notebook.answers_a_prediction(cell["source"]), cell["source"]
            for first in cell["outputs"][: hidden and 1]:
                assert "".join(first.get("text", notebook.FOLDED)).startswith(notebook.FOLDED), cell["source"]

    def test_a_table_of_costs_comes_after_a_prediction(self, number):
        """In its section, the text below one heading: numbers are more than read where one was guessed."""
        bare = tables_without_prediction(json.loads(CHAPTERS[number].read_text())["cells"])
        most = NOT_ASKED.get(number, 0)
        assert len(bare) <= most, f"ask for a number first, before the tables {bare}"

    def test_has_something_to_break(self, number):
        assert number in APPENDICES or any(
            re.search(r"^\w[^\n]*# turn me", cell["source"], re.M) for cell in cells(number, "code")
        ), "a parameter for the reader, with the comment `# turn me: values to try`"

    def test_pictures_say_what_they_show(self, number):
        """By the table of titles; the text of a widget, or of a picture with another title, is made of its parts."""
        told = set()
        for cell in cells(number, "code"):
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    about = output["metadata"].get("image/png", {})
                    assert len(about.get("alt", "")) >= 20, cell["source"]
                    told.add(about["alt"])
                    assert about["width"] <= 720, "twice as many pixels as it is wide"
        rows = (line.split("\t") for line in style.Path(style.__file__).with_name("pictures.tsv").open())
        untold = {row[2].strip() for row in rows if row[0] == number} - told
        assert not untold, f"pictures.tsv: titles that no picture of the chapter has, {untold}"

    def test_ends_with_the_same_sections(self, number):
        headings = re.findall(r"^## .*$", prose(number), re.M)
        ends = SECTIONS[number in APPENDICES :]  # an appendix has no exercise
        assert headings[-len(ends) :] == ends
        last = prose(number).partition(SECTIONS[2])[2].partition(SECTIONS[3])[0]
        assert re.search(r"\*\*Measured", last), last
        assert re.search(r"\*\*(Modelled|Computed|Replayed|Simulated|Quoted)", last), last

    def test_bridge_says_what_it_was_checked_against(self, number):
        bridge = prose(number).partition("## The bridge")[2].partition("\n## ")[0]
        assert "2.13" in bridge and len(re.findall(r"\d+\.\d+|20\d\d|[0-9a-f]{7}", bridge)) >= 2, bridge

    def test_names_of_torch_exist(self, number):
        with warnings.catch_warnings(action="ignore"):  # some are old, and say so
            for name in set(re.findall(r"`(torch(?:\.\w+)+)[`(]", prose(number))):
                assert imported(name) is not None, name


def names(code) -> tuple[set, set]:
    """Those that a cell reads, in functions as well, and those that it binds."""
    ops = list(dis.get_instructions(code))
    read = {op.argval for op in ops if op.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    inner = [names(one)[0] for one in code.co_consts if hasattr(one, "co_code")]
    return read.union(*inner), {op.argval for op in ops if op.opname == "STORE_NAME"}


def printed(cell: dict) -> str:
    streams = (output for output in cell["outputs"] if output["output_type"] == "stream")
    return "".join("".join(output["text"]) for output in streams)


def cost_table(text: str) -> str:
    """The head of the first table of costs in a text: columns named by what they cost, above rows of numbers."""
    lines = text.splitlines()
    for head, *rows in zip(lines, lines[1:], lines[2:]):
        columns = re.split(r"\s{2,}", head.strip())
        numbers = min(len(re.findall(r"(?<![\w.])\d[\d.,/]*", row)) for row in rows)
        if len(columns) > 1 and numbers > 1 and COST.search(head) and "True" not in head:
            return head.strip()
    return ""


def tables_without_prediction(cells: list[dict]) -> list[str]:
    """The tables of costs with no "Predict." between them and the heading above."""
    bare, asked = [], False
    for cell in cells:
        if cell["cell_type"] == "markdown":
            for part in re.split(r"(?m)^(?=#+ )", "".join(cell["source"])):
                asked = "**Predict.**" in part or asked and not part.startswith("#")
        elif not asked and (table := cost_table(printed(cell))):
            bare.append(table)
    return bare


def imported(name: str):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found


def test_no_question_is_asked_twice():
    found = ((re.findall(r"\*\*Predict\.\*\* (.+)", prose(number)), number) for number in CHAPTERS)
    asked = [(question, number) for questions, number in found for question in questions]
    assert len({question for question, _ in asked}) == len(asked)
    for (one, first), (other, second) in zip(sorted(asked), sorted(asked)[1:]):
        assert difflib.SequenceMatcher(None, one, other).ratio() < 0.8, (first, one, second, other)


def texts() -> dict[str, str]:
    """Everything that a reader reads: chapters, README, exercises, docstrings and comments of the package."""
    files = [ROOT / "README.md", *ROOT.glob("exercises/*.md"), *ROOT.glob("exercises/source/*.py")]
    files += [path for path in (ROOT / "minitrain").rglob("*.py")]
    others = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    return {number: prose(number) for number in CHAPTERS} | others


def test_a_chapter_that_is_to_come_is_marked_as_planned():
    for name, text in texts().items():
        for number, planned in re.findall(
            r"\b[Cc]hapters? (\d\d[a-z]?)\b(?:\]\([^)]*\))?( \(planned\))?", text
        ):
            assert (number in CHAPTERS) != bool(planned), f"{name}: chapter {number}{planned}"


def test_units_are_per_something():
    """In prose, in messages, in code that is shown and in what it prints."""
    found = {name: PER_UNIT.search(text.replace("\\n", "\n")) for name, text in texts().items()}
    assert not {name: where[0] for name, where in found.items() if where}
    code = {(number, cell["id"]): cell for number in CHAPTERS for cell in cells(number, "code")}
    seen = {place: cell["source"].replace("\\n", "\n") + printed(cell) for place, cell in code.items()}
    found = {place: PER_UNIT.search(text) for place, text in seen.items()}
    assert not {place: where[0] for place, where in found.items() if where}


# Tasks ask for the idea: no solution stands in its chapter


def tokens(function: ast.AST) -> list[str]:
    """The body without its docstring, comments and layout."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    source = "\n".join(map(ast.unparse, body))
    quiet = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in found if token.type not in quiet]


def functions(source: str) -> list[ast.FunctionDef]:
    """Of a piece of code, that of a method shown alone included; what is no Python has none."""
    found = []
    for part in re.split(r"\n(?=def |class |@|# minitrain/)", source):
        try:
            found += [node for node in ast.walk(ast.parse(part)) if isinstance(node, ast.FunctionDef)]
        except SyntaxError:
            continue
    return found


def copied(solution: list[str], shown: list[str]) -> float:
    """The share of a solution that stands in a shown function, in pieces of at least 6 tokens."""
    blocks = difflib.SequenceMatcher(None, solution, shown, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 6) / len(solution)


@pytest.mark.parametrize("number", sorted(CHAPTERS.keys() - APPENDICES))
def test_no_solution_stands_in_its_chapter(number):
    cells_of = [sources_shown(one) for one in CHAPTERS if one.startswith(number)]
    shown = [(function.name, tokens(function)) for one in cells_of for function in functions(one)]
    source = next((ROOT / "exercises/source").glob(f"{number}_*.py")).read_text()
    for cell in re.split(r"(?m)^# %%", source):
        if not cell.startswith(" answer="):
            continue
        for solution in functions(cell.partition("\n")[2]):
            asked = tokens(solution)
            for name, found in shown:
                if len(asked) >= 20:
                    assert copied(asked, found) < 0.6, f"{solution.name} stands in the chapter as {name}"


# Every task says what it may call


@pytest.mark.parametrize("path", sorted((ROOT / "exercises/source").glob("*.py")), ids=lambda path: path.stem)
def test_each_task_has_a_box_of_its_api(path: Path):
    for task in re.split(r"(?m)^# ## (?=\d)", path.read_text())[1:]:
        statement = task.partition("# %%")[0]
        boxes = re.findall(r"(?m)^# > \*\*API\*\*.*(?:\n# >.*)*", statement)
        title = statement.partition("\n")[0]
        assert len(boxes) == 1, f"task {title} has {len(boxes)} boxes"
        assert len(boxes[0].splitlines()) <= 6, f"the box of task {title} is longer than six lines"
