"""What follows from the rest of a chapter: how long it takes to read, where links lead, what stands where.

    python -m docs.reading          sets all chapters right, without running them

Nothing here is a matter of opinion: times are counted, paths and papers become links, shown sources say their
present line. `tests/course/test_reading.py` holds every chapter to it, and to the rules of a chapter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from minitrain.course.notebook import CHAPTERS, FOLDED, chapters, heading

ROOT = CHAPTERS.parent
MAP, TABLE = ROOT / "docs" / "map.md", re.compile(r"^\| path \|.*\n(\|.*\n)+", re.M)  # of reading paths
WORDS, CODE_LINES, OUTPUT_LINES = 200, 8, 30  # that are read in a minute; a picture takes one too
SHOWN = re.compile(
    r"\[`(minitrain/[\w/]+\.py):(\d+)`\]\(\.\./minitrain/[\w/]+\.py#L\d+\)(.*\n\n```python\n)(.*)"
)
NOT_READ = re.compile(r"\]\([^)]*\)|^\*\*Time\*\*.*|^---\n.*\(../docs/map.md\).*", re.M)
CODE = re.compile(r"(```.*?```|\[[^]\n]*\]\([^)\n]*\)|^#.*?$)", re.S | re.M)  # what no link is put into


PATHS = {  # whose path: what for, its chapters
    "fine-tuner": ("adapts a model on one node", "00 01 03 04 05 15 17 18 19 24"),
    "pre-trainer": (
        "trains a model on a cluster",
        "00 01 02 03 04 06 08 09 10 11 13 14 15 17 19 20 21 22 23 29",
    ),
    "researcher": (
        "takes a technique apart, or adds one",
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 14b 15 16 17 18 18b 22 23 25 28",
    ),
    "platform engineer": (
        "keeps the cluster and its jobs running",
        "00 02 03 04 10 19 20 21 22 23 24 25 26 27 29",
    ),
}


def paths() -> str:
    """The table of reading paths: whose, what for, chapters, hours of their core paths."""
    known = chapters()
    core = {number: minutes(json.loads(path.read_text())["cells"])[1] for number, path in known.items()}
    lines = ["| path | who | chapters | hours, core paths |", "|---|---|---|---|"]
    for name, (who, listed) in PATHS.items():
        on = [number for number in listed.split() if number in known]
        links = ", ".join(f"[{number}](../notebooks/{known[number].name})" for number in on)
        lines.append(f"| {name} | {who} | {links} | {sum(core[number] for number in on) / 60:.0f} |")
    return "\n".join(lines)


def minutes(cells: list[dict]) -> tuple[int, int]:
    """(all, without optional sections): words, code, shown sources, printed lines, pictures; to 5 minutes."""
    total = core = 0.0
    optional_level = 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for part in re.split(r"(?m)^(?=#+ )", source):
                level = len(part) - len(part.lstrip("#"))
                if level and (not optional_level or level <= optional_level):
                    optional_level = level if "optional" in part.partition("\n")[0] else 0
                spent = len(NOT_READ.sub("", part).split()) / WORDS
                total, core = total + spent, core + spent * (not optional_level)
            continue
        spent = len(source.splitlines()) / CODE_LINES
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data or "image/svg+xml" in data:
                spent += 1
            elif "text/markdown" in data:  # shown sources
                spent += len("".join(data["text/markdown"]).splitlines()) / CODE_LINES
            else:
                text = "".join(output.get("text", "")) or "".join(data.get("text/plain", ""))
                spent += len(text.removeprefix(FOLDED).splitlines()) / OUTPUT_LINES
        total, core = total + spent, core + spent * (not optional_level)
    return max(5, 5 * round(total / 5)), max(5, 5 * round(core / 5))


def set_right(notebook: dict, number: str) -> dict:
    """The chapter (as JSON) with times, links and lines as they follow from it; twice is the same as once."""
    cells, known = notebook["cells"], chapters()
    sources = ["".join(cell["source"]) for cell in cells]
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            sources[index] = _linked(sources[index], number)
        for output in cell.get("outputs", []):
            shown = output.get("data", {}).get("text/markdown")
            if shown:
                output["data"]["text/markdown"] = _lines(_at_its_line("".join(shown)))
    sources[0] = _facts(sources[0], number, *minutes(cells))
    sources[-1] = _with_neighbours(sources[-1], number, list(known))
    for cell, source in zip(cells, sources):
        cell["source"] = _lines(source)
    return notebook


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _linked(text: str, number: str) -> str:
    """Modules, exercises, papers and other chapters of a piece of Markdown, as links."""
    known = chapters()

    def module(found: re.Match) -> str:
        path = found[1]
        return f"[`{path}`](../{path})" if (ROOT / path).exists() else found[0]

    def chapter(found: re.Match) -> str:
        key = found[2]
        return f"[{found[0]}]({known[key].name})" if key in known and key != number else found[0]

    def link(piece: str) -> str:
        piece = re.sub(r"`((?:minitrain|exercises|benchmarks)/[\w/.]+)`", module, piece)
        parts = re.split(r"(\[[^]\n]*\]\([^)\n]*\)|`[^`\n]*`)", piece)
        for index in range(0, len(parts), 2):
            parts[index] = re.sub(r"\b([Cc]hapter) (\d\d[a-z]?)\b(?! \(planned)", chapter, parts[index])
            parts[index] = re.sub(
                r"\barXiv:(\d{4}\.\d{5})\b", r"[arXiv:\1](https://arxiv.org/abs/\1)", parts[index]
            )
        return "".join(parts)

    parts = CODE.split(text)
    parts[::2] = map(link, parts[::2])
    return "".join(parts)


def _facts(first: str, number: str, total: int, core: int) -> str:
    """The line of facts below a title: times as counted, modules as links, the paths that it is on."""
    on = [f"[{name}](../docs/map.md)" for name, (_, listed) in PATHS.items() if number in listed.split()]
    return "\n".join(
        _modules(_times(line.partition(" · **Paths**")[0], total, core)) + " · **Paths** " + ", ".join(on)
        if line.startswith("**Time**")
        else line
        for line in first.split("\n")
    )


def _times(line: str, total: int, core: int) -> str:
    shorter = f", {core} of them for the core path" if core < total else ""
    runs = re.search(r"\d+ s to run", line)[0]
    return re.sub(r"\*\*Time\*\* .*? s to run", f"**Time** {total} min to read{shorter}, {runs}", line)


def _modules(line: str) -> str:
    """`ring.py` after a link into a folder is a file of that folder, or the only one of that name."""
    folder, parts = "minitrain", re.split(r"(\[[^]]*\]\([^)]*\)|`[^`]*`)", line)
    for index, part in enumerate(parts):
        if found := re.match(r"\[`(minitrain/[\w/.]+)`\]", part):
            folder = found[1].rstrip("/") if (ROOT / found[1]).is_dir() else str(Path(found[1]).parent)
        elif re.fullmatch(r"`\w+\.py`", part):
            name = part.strip("`")
            named = [str(path.relative_to(ROOT)) for path in (ROOT / "minitrain").rglob(name)]
            if (ROOT / folder / name).exists() or len(named) == 1:
                target = f"{folder}/{name}" if (ROOT / folder / name).exists() else named[0]
                parts[index] = f"[{part}](../{target})"
    return "".join(parts)


def _with_neighbours(last: str, number: str, known: list[str]) -> str:
    """The chapter's last line: back, the map, on."""
    at, paths = known.index(number), chapters()

    def to(key: str) -> str:
        return f"[{heading(paths[key])[0]}]({paths[key].name})"

    back = [f"← {to(known[at - 1])}"] if at else []
    on = [f"{to(known[at + 1])} →"] if at + 1 < len(known) else []
    line = " | ".join([*back, "[the map](../docs/map.md)", *on])
    text = last.rstrip("\n")
    if "(../docs/map.md)" in text.rpartition("\n")[2]:
        text = text.rpartition("\n")[0].rstrip("\n").removesuffix("---").rstrip("\n")
    return f"{text}\n\n---\n{line}"


def _at_its_line(shown: str) -> str:
    """A shown source under its present place: the line in the file that is nearest to where it was."""

    def place(found: re.Match) -> str:
        path, number, between, first = found.groups()
        lines = (ROOT / path).read_text().splitlines()
        equal = [at for at, line in enumerate(lines, 1) if line.strip() == first.strip()]
        at = min(equal, key=lambda at: abs(at - int(number)), default=int(number))
        return f"[`{path}:{at}`](../{path}#L{at}){between}{first}"

    return SHOWN.sub(place, shown)


def main() -> None:
    MAP.write_text(TABLE.sub(lambda _: paths() + "\n", MAP.read_text()))
    for number, path in chapters().items():
        before = path.read_text()
        notebook = set_right(json.loads(before), number)
        after = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if after != before:
            path.write_text(after)
            print(f"{path.name} set right: {heading(path)[1].partition(' · ')[0]}")


if __name__ == "__main__":
    main()
