"""The site of the course, from what is committed: nothing is executed, nothing of minitrain is imported.

    python docs/book/make.py           files of the repository -> build/book/pages -> build/book/site

Chapters and documents are copied to the places they have in the repository, so the links between them hold.
A link to any other file leads to a listing of it (`listings.py`), with an anchor for each line. Pages of
systems, formulas, interfaces, words and published runs are made from tables and docstrings (`sheets.py`).
Exit code 1 if a link leads nowhere, or if Sphinx warns: of a broken reference, a picture that is missing.

Sphinx with myst-nb and the theme of Jupyter Book: it reads notebooks with their outputs, searches without a
network, and is all there as packages of Python, MathJax too; MyST's own builder fetches its theme.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import listings
import sheets
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
PAGES, SITE = REPO / "build/book/pages", REPO / "build/book/site"
NOTEBOOKS, EXERCISES = sorted(REPO.glob("notebooks/*.ipynb")), sorted(REPO.glob("exercises/*.ipynb"))
MORE = ["README", "docs/map", *(f"docs/{path.stem}" for path in sorted(REPO.glob("docs/*.md"), reverse=True))]
MORE = list(
    dict.fromkeys([*MORE, "exercises/index", "CONTRIBUTING", "notebooks/AUTHORING", "exercises/AUTHORING"])
)
REFERENCE = ["atlas", "formulas", "glossary", "published", "benchmarks/README", "api/index"]
DOCUMENTS = {f"{page}.md" for page in [*MORE, "benchmarks/README", "exercises/README", "exercises/AGENTS"]}
PARTS = {  # the first chapter of each part of the course
    "00": "Ranks and costs",
    "03": "Data parallelism",
    "06": "Tensors and sequences",
    "10": "Pipelines",
    "13": "Experts",
    "15": "Numbers and memory",
    "19": "Checkpoints and failures",
    "22": "Putting it together",
    "25": "Networks, clusters, kernels",
    "29": "Published runs",
}
EXPLORERS = "collectives", "schedules", "layout", "network"  # pages of docs/book/explorers
PICTURE = re.compile(r'<picture><source.* srcset="(.+?)"><img alt="(.+?)" src="(.+?)"></picture>')
EXPLORER = re.compile(r"[^\n]*\[([^]]+)\]\(site:explorers/(\w+\.html)\).*")  # a paragraph with such a link
FRAME = """

```{raw} html
<iframe class="explorer" loading="lazy" title="%s" src="../explorers/%s"></iframe>
```
"""
LINK = re.compile(r"(?<=\]\()[^()\s]+(?=\))")
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)


class Pages:
    """The pages that Sphinx reads, and what they link to."""

    def __init__(self) -> None:
        self.written: set[Path] = set()
        self.listed: set[str] = set()  # files of the repository that need a listing

    def put(self, page: str, content: str | bytes) -> None:
        """A page that is as it was keeps its date, so Sphinx reads it no second time."""
        content, path = content if isinstance(content, bytes) else content.encode(), PAGES / page
        self.written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)

    def moved(self, link: str, page: str) -> str:
        """A link on a page of the repository, as it is on the site."""
        if re.match(r"\w+:|#", link):
            return link
        name, _, anchor = link.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), name))
        if not (REPO / path).exists():
            raise SystemExit(f"{page} links to {link}, which is not there")
        if path in DOCUMENTS or path.endswith((".png", ".ipynb")):
            return link
        if path.startswith("docs/book/explorers/"):
            return "site:" + path.removeprefix("docs/book/")
        return self.site(path) + (f"#{anchor}" if anchor else "")

    def site(self, path: str) -> str:
        self.listed.add(path)
        return "site:" + listings.address(REPO, path)

    def text(self, source: str, page: str) -> str:
        """Markdown with its links moved, outside code; pictures by the theme of the page."""
        shown = "```{image} %s\n:alt: %s\n:class: only-%s\n```\n"
        source = PICTURE.sub(lambda p: shown % (p[3], p[2], "light") + shown % (p[1], p[2], "dark"), source)
        parts = CODE.split(source)
        parts[::2] = [LINK.sub(lambda link: self.moved(link[0], page), part) for part in parts[::2]]
        return "".join(parts)

    def notebook(self, path: Path) -> str:
        """Links moved; answers to predictions folded; sizes and texts of pictures where myst-nb looks."""
        page, notebook = path.relative_to(REPO).as_posix(), json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                source = self.text("".join(cell["source"]), page)
                cell["source"] = EXPLORER.sub(lambda said: said[0] + FRAME % (said[1], said[2]), source)
            if cell["metadata"].get("jupyter", {}).get("outputs_hidden"):
                cell["metadata"].setdefault("tags", []).append("hide-output")
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if "text/markdown" in data:
                    data["text/markdown"] = self.text("".join(data["text/markdown"]), page)
                for kind in {"image/png", "image/svg+xml"} & data.keys():
                    known = output["metadata"].get(kind, {})
                    image = {"width": f"{known['width']}px"} if "width" in known else {}
                    cell["metadata"]["mystnb"] = {"image": image | {"alt": known.get("alt", "")}}
        return json.dumps(notebook)


def explored() -> list[str]:
    """A link to each page of explorers/."""
    found = []
    for name in EXPLORERS:
        title = re.search(r"<title>(.*?)(:.*)?</title>", (HERE / f"explorers/{name}.html").read_text())[1]
        found.append(f"[{title}](site:explorers/{name}.html)")
    return found


def titles() -> dict[str, str]:
    """Chapter -> its title, up to a colon."""
    found = {}
    for path in NOTEBOOKS:
        number, _, title = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition(" · ")
        found[number.removeprefix("# ")] = re.split(r"[:\n]", title)[0]
    return found


def paths() -> str:
    """The reading paths of docs/map.md, with titles beside numbers."""
    named, lines = titles(), []
    for line in (REPO / "docs/map.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2].startswith("[00]"):
            name, who, links, hours = cells
            full = re.sub(r"\[(\w+)\]\(\.\./", lambda one: f"[{one[1]} {named[one[1]]}](", links)
            said = f"**{name.capitalize()}**, who {who} ({hours} hours)"
            lines.append(f"{said}\n: {full.replace('), [', ') · [')}\n")
    return "\n".join(lines)


def tree(caption: str | None, entries: list[str]) -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


def landing(readme: str) -> str:
    parts: dict[str, list[str]] = {}
    for path in NOTEBOOKS:
        if path.name[:2] in PARTS:
            parts.setdefault(PARTS[path.name[:2]], [])
        list(parts.values())[-1].append(f"notebooks/{path.stem}")
    trees = [
        tree(name, entries)
        for name, entries in (
            parts | {"Reference": REFERENCE, "More": ["The README <README>", *MORE[1:]]}
        ).items()
    ]
    links = [f"- {link}" for link in explored()]
    play = "\n".join(["## To play with", "", *links]) if links else ""
    claim = re.search(r"^\*\*.+\*\*$", readme, re.M)[0]
    picture = readme[readme.index("```{image}") : readme.index("## ")]
    values = dict(claim=claim, picture=picture, paths=paths(), play=play)
    return sheets.filled("index.md", **values) + "\n" + "\n".join(trees)


def stage() -> set[str]:
    """Write all pages; returns the files that need listings."""
    pages = Pages()
    for path in NOTEBOOKS + EXERCISES:
        pages.put(path.relative_to(REPO).as_posix(), pages.notebook(path))
    for page in sorted(DOCUMENTS - {"exercises/index.md"}):
        pages.put(page, pages.text((REPO / page).read_text(), page))
    in_html = lambda link: pages.site(link[2]).removeprefix("site:" if link[1] == '"' else "")
    for page, content in sheets.pages(REPO).items():
        pages.put(page, re.sub(r"([(\"])repo:([^)#\"\s]+)", lambda link: link[1] + in_html(link), content))
    tasks = ["README", "AGENTS", *(path.stem for path in EXERCISES)]
    shown = "\n".join(f"- [{path.stem.replace('_', ' ')}]({path.name})" for path in EXERCISES)
    pages.put(
        "exercises/index.md",
        f"# The exercises\n\n[What they are](README.md)\n\n{shown}\n\n{tree(None, tasks)}",
    )
    pages.put("index.md", landing(pages.text((REPO / "README.md").read_text(), "README.md")))
    for path in [HERE / "conf.py", *HERE.glob("static/*")]:
        pages.put(path.relative_to(HERE).as_posix(), path.read_bytes())
    for path in REPO.glob("notebooks/pictures/*.png"):
        pages.put(path.relative_to(REPO).as_posix(), path.read_bytes())
    for path in set(PAGES.rglob("*.*")) - pages.written:  # of a file that is gone
        if path.suffix in (".md", ".ipynb"):
            path.unlink()
    return pages.listed


def make() -> int:
    begun, listed = time.time(), stage()
    known = SITE.parent / "doctrees"
    if sphinx(["-q", "-W", "--keep-going", "-j", "2", "-d", str(known), str(PAGES), str(SITE)]):
        shutil.rmtree(known)  # or the next run would not read again, and not say again, what was wrong
        return 1
    shutil.rmtree(SITE / "code", ignore_errors=True)
    count = listings.write(REPO, SITE, listed)
    if (HERE / "explorers").exists():
        none_of = shutil.ignore_patterns("check.*", "*.py", "__pycache__")
        shutil.copytree(HERE / "explorers", SITE / "explorers", dirs_exist_ok=True, ignore=none_of)
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    told = f"{len(list(SITE.rglob('*.html')))} pages, {count} of them listings, {size / 1e6:.0f} MB"
    print(f"{told}, {time.time() - begun:.0f} s: {SITE}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(make())
