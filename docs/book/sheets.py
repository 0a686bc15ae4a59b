"""Pages made of tables and docstrings: systems, formulas, interfaces, words, published runs.

    pages(repo) -> {name of a page: its Markdown}         texts from docs/book/pages, %NAMES% filled in

A link `repo:path#L3` leads to a listing; `make.py` resolves it.
"""

import ast
import csv
import html
import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from textwrap import dedent

HERE = Path(__file__).parent
TECHNIQUES = {  # what the interfaces and the formula sheet cover
    "ranks": "Ranks",
    "data_parallel": "Data parallelism and ZeRO",
    "tensor_parallel": "Tensor parallelism",
    "context": "Long sequences",
    "attention": "Attention",
    "pipeline": "Pipelines",
    "moe": "Mixture of experts",
    "precision": "Precision",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
}
# Sentences of a docstring that say what is sent or held.
COST = re.compile(r"^(Sends|Memory|Holds|Bubble|Peak|Interleaving|Depth-first)\b|\b[Ss]ends\b.*[/·\d]")
MORE = re.compile(r"\b(bytes|holds|elements|messages|gathers|bubble)\b.*([·/]\w|\b\d+/)")
SHOWN = {"ranks": "on ranks", "tensors": "on tensors", "simulated": "simulated", "computed": "computed"}
KIND = {"RUN": "runs here", "SIM": "simulation", "MODEL": "formula", "CASE": "published run"}


def pages(repo: Path) -> dict[str, str]:
    made = {"atlas.md": atlas(repo), "formulas.md": formulas(repo), "published.md": published(repo)}
    return made | {"glossary.md": glossary(repo)} | interfaces(repo)


def filled(name: str, **values: object) -> str:
    """A page of docs/book/pages with its %NAMES% filled in."""
    text = (HERE / "pages" / name).read_text()
    for key, value in values.items():
        text = text.replace(f"%{key.upper()}%", str(value))
    return text


# ---- tables ------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def table(heads: dict[str, bool], lines: list[list[str]]) -> str:
    """HTML that filter.js knows; `heads`: whether a column gets a menu. Cells are HTML."""
    menu = {True: " data-menu=1", False: ""}
    head = "".join(f"<th{menu[filtered]}>{name}</th>" for name, filtered in heads.items())
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return (
        f'<div class="wide"><table class="table filtered">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
    )


@cache
def chapters(repo: Path) -> dict[str, Path]:
    return {path.name.split("_")[0]: path for path in sorted(repo.glob("notebooks/*.ipynb"))}


def cells(repo: Path, number: str) -> list[dict]:
    return json.loads(chapters(repo)[number].read_text())["cells"]


def chapter_link(repo: Path, number: str) -> str:
    return f'<a href="notebooks/{chapters(repo)[number].stem}.html">{number}</a>'


def code(text: str) -> str:
    """HTML of one line of text with `code` in it."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def atlas(repo: Path) -> str:
    lines = []
    for row in rows(repo / "minitrain/course/atlas.tsv"):
        module, test = row["module"], test_place(repo, row["test"])
        differs = "" if row["differs"] == "-" else f"<br><i>Differs: {code(row['differs'])}</i>"
        links = f'<a href="repo:{module}">{"/".join(module.split("/")[-2:])}</a>'
        links += f'<br><a href="repo:{test}">{row["test"].split("::")[-1]}</a>'
        name = f'<b id="{row["id"]}">{code(row["name"])}</b>'
        chapter = chapter_link(repo, row["chapter"])
        lines.append(
            [name, code(row["idea"]) + differs, chapter, KIND[row["kind"]], SHOWN[row["shown"]], links]
        )
    heads = {"system": False, "idea": False, "chapter": True, "kind": True, "shown": True}
    return filled("atlas.md", count=len(lines), table=table(heads | {"module and test": False}, lines))


@cache
def test_place(repo: Path, test: str) -> str:
    """tests/test_x.py::test_y -> tests/test_x.py#L12"""
    path, name = test.split("::", 1)
    text = (repo / path).read_text()
    found = re.search(rf"^ *def {re.escape(name.split('::')[-1].split('[')[0])}\b", text, re.M)
    if not found:
        raise SystemExit(f"{path} has no {name}")
    return f"{path}#L{text.count(chr(10), 0, found.end()) + 1}"


def glossary(repo: Path) -> str:
    """Words as chapters use them: each must occur in the chapter it names."""
    lines = []
    for row in rows(HERE / "glossary.tsv"):
        term, number = row["term"], row["chapter"]
        said = " ".join("".join(cell["source"]) for cell in cells(repo, number))
        forms = [term, *row["forms"].removeprefix("-").split("|")]
        if not any(form and re.search(rf"\b{re.escape(form)}", said, re.I) for form in forms):
            raise SystemExit(f"glossary: chapter {number} does not say {' or '.join(forms)}")
        lines.append([f"<b>{term}</b>", row["chinese"], code(row["meaning"]), chapter_link(repo, number)])
    heads = {"term": False, "中文": False, "meaning": False, "chapter": True}
    return filled("glossary.md", count=len(lines), table=table(heads, lines))


# A line of chapter 29: run, devices, dp, pp, cp, tp, parameters, published, predicted, MFU.
PREDICTED = re.compile(r"(.+?)" + r" +(\d+)" * 5 + r" +([\d,]+)" + r" +([\d.]+) s" * 2 + r" +([\d.]+%)")


def published(repo: Path) -> str:
    outputs = [output for cell in cells(repo, "29") for output in cell.get("outputs", ())]
    printed = [line for output in outputs for line in "".join(output.get("text", "")).splitlines()]
    found = [match.groups() for match in map(PREDICTED.fullmatch, printed) if match]
    if not found:
        raise SystemExit("chapter 29 does not print the predictions that the page of published runs shows")
    predicted = []
    for *run, said, ours, mfu in found:
        predicted.append(f"| {' | '.join([*run, said, ours, f'{float(ours) / float(said):.2f}', mfu])} |")
    source = repo / "minitrain/systems/plan/published.tsv"
    lines = []
    for row in rows(source):
        name, more = row["name"], (row["more"] or "-").removeprefix("-")
        model = f"{row['L']} × {row['h']}" if row["L"] != "0" else html.escape(more.split(" ")[0])
        degrees = [f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp", "cp") if row[axis] not in ("0", "1")]
        layout, rows_ = ", ".join(degrees), f"{row['mbs']} of {row['gbs']}"
        line = [
            f"<b>{name}</b>",
            name.split(" ")[0],
            row["mach"],
            model,
            row["s"],
            layout,
            rows_,
            row["zero"],
        ]
        lines.append([*line, row["recompute"], row["step_s"]])
    heads = {"run": False, "publication": True, "machine": True, "layers × width": False, "tokens": True}
    heads |= {
        "layout": False,
        "microbatch of batch": False,
        "ZeRO": True,
        "recomputation": True,
        "step, s": False,
    }
    notes = [line.lstrip("# ") for line in source.read_text().splitlines() if line.startswith("#")]
    values = dict(predicted="\n".join(predicted), count=len(lines), table=table(heads, lines))
    return filled("published.md", **values, notes=escaped("\n\n".join(notes)))


# ---- docstrings --------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstring(path: Path) -> str:
    return ast.get_docstring(parsed(path)) or ""


def first_line(path: Path) -> str:
    path = path / "__init__.py" if path.is_dir() else path
    return docstring(path).split("\n")[0] if path.suffix == ".py" else ""


def escaped(text: str) -> str:
    """Plain text as Markdown; what stands in backticks stays, papers become links."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_<>\[\]$#|~])", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", "".join(parts))


def prose(doc: str) -> str:
    """A docstring as Markdown: what is indented stays as it is."""
    made = []
    for paragraph in re.split(r"\n\s*\n", doc):
        lines = paragraph.splitlines()
        aligned = any(re.match(r"\S.*\S {3,}\S", line) for line in lines)
        for indented, group in groupby(lines, lambda line: aligned or line.startswith("    ")):
            text = dedent("\n".join(group))
            made.append(f"```text\n{text}\n```" if indented else escaped(text))
    return "\n\n".join(made)


@dataclass
class Entry:  # a public function or class of a module
    name: str
    kind: str
    signature: str
    doc: str
    line: int
    methods: list["Entry"]


def signature(function: ast.FunctionDef, method: bool) -> str:
    text = ast.unparse(function.args)
    if method and not any(ast.unparse(one) == "staticmethod" for one in function.decorator_list):
        text = re.sub(r"^\w+(, )?", "", text)  # self
    return f"({text})" + (f" -> {ast.unparse(function.returns)}" if function.returns else "")


def entries(body: list[ast.stmt], inside: bool = False) -> list[Entry]:
    """What is public, in the order of the file."""
    found = []
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        doc, decorators = ast.get_docstring(node) or "", {ast.unparse(one) for one in node.decorator_list}
        if isinstance(node, ast.ClassDef):
            made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
            arguments = signature(made[0], True).removesuffix(" -> None") if made else ""
            if any(one.startswith("dataclass") for one in decorators):
                arguments = f"({', '.join(fields)})"
            methods = entries(node.body, True)
            found.append(Entry(node.name, "class", arguments, doc, node.lineno, methods))
        elif decorators & {"property", "cached_property"}:
            found.append(Entry(node.name, "property", "", doc, node.lineno, []))
        elif not any(one.endswith((".setter", "overload")) for one in decorators):
            kind = "method" if inside else "function"
            found.append(Entry(node.name, kind, signature(node, inside), doc, node.lineno, []))
    return found


def directive(entry: Entry, path: str, depth: int = 6) -> str:
    fence, told = "`" * depth, [one for one in entry.methods if one.doc or one.kind == "property"]
    quiet = ", ".join(f"`{one.name}`" for one in entry.methods if one not in told)
    said, link = prose(entry.doc), f"[source](repo:{path}#L{entry.line})"
    said = f"{said}\n\n{link}" if said.endswith("```") else f"{said} {link}"
    parts = [f"{fence}{{py:{entry.kind}}} {entry.name}{entry.signature}", said]
    parts += [f"Also {quiet}."] if quiet else []
    parts += [directive(one, path, depth - 1) for one in told]
    return "\n\n".join(parts) + f"\n{fence}"


def modules(folder: Path) -> list[Path]:
    """The files of a package in the order in which its docstring names them, then the others."""
    guide = docstring(folder / "__init__.py")
    place = lambda path: (found := re.search(rf"\b{path.stem}\b", guide)) and found.start() or len(guide)
    files = (path for path in folder.glob("*.py") if path.name != "__init__.py")
    return sorted(files, key=lambda path: (place(path), path.name))


def interfaces(repo: Path) -> dict[str, str]:
    """A page per package: docstrings of modules, public functions and classes."""
    made, lines = {}, []
    for technique in TECHNIQUES:
        top = repo / "minitrain" / technique
        for folder in [top, *sorted(one.parent for one in top.glob("*/__init__.py"))]:
            package = folder.relative_to(repo).as_posix()
            name = package.replace("/", ".")
            text = [f"# {name}", prose(docstring(folder / "__init__.py"))]
            for file in modules(folder):
                path = f"{package}/{file.name}"
                text += [f"## {file.stem}", f"```{{py:module}} {name}.{file.stem}\n```"]
                text += [f"[`{path}`](repo:{path})", prose(docstring(file))]
                text += [directive(entry, path) for entry in entries(parsed(file).body)]
            made[f"api/{name}.md"] = "\n\n".join(text) + "\n"
            lines.append((name, escaped(first_line(folder))))
    packages = "\n".join(f"| [{name}]({name}.md) | {first} |" for name, first in lines)
    names = "\n".join(f"{name.removeprefix('minitrain.')} <{name}>" for name, _ in lines)
    return made | {"api/index.md": filled("api.md", packages=packages, names=names)}


def costs(doc: str, *patterns: re.Pattern) -> list[str]:
    """The sentences that a pattern finds, of what is not indented."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"(?m)^ {4}.*$", "", doc))
    plain = [re.sub(r"\s+", " ", paragraph) for paragraph in paragraphs]
    sentences = [one.strip() for paragraph in plain for one in re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph)]
    return [one for one in sentences if any(pattern.search(one) for pattern in patterns)]


def formulas(repo: Path) -> str:
    """For each module with a cost: its equations, those sentences, and the tests of the atlas."""
    tests: dict[str, list[str]] = {}
    for row in rows(repo / "minitrain/course/atlas.tsv"):
        tests.setdefault(row["module"], []).append(row["test"])
    parts, count = [], 0
    for technique, title in TECHNIQUES.items():
        parts.append(f"## {title}")
        for file in sorted((repo / "minitrain" / technique).rglob("*.py")):
            path, doc = file.relative_to(repo).as_posix(), docstring(file)
            if file.name == "__init__.py" or "/ranks/l" in path:  # launch and ledger send nothing
                continue
            public = [one for top in entries(parsed(file).body) for one in (top, *top.methods)]
            lines = [f"- {escaped(one)}" for one in costs(doc, COST, MORE)]
            equations = re.search(r"(?m)(?:^ {4}.*\n?)+", doc) if lines else None
            inner = [(one.name, " ".join(costs(one.doc, COST))) for one in public]
            lines += [f"- `{name}`: {escaped(said)}" for name, said in inner if said]
            if not lines:
                continue
            count += 1
            name = path.removeprefix(f"minitrain/{technique}/").removesuffix(".py")
            parts.append(f"### {name}\n\n{escaped(doc.splitlines()[0])} [Source](repo:{path})")
            parts += [f"```text\n{dedent(equations[0]).rstrip()}\n```"] if equations else []
            proofs = dict.fromkeys(tests.get(path, ()))
            shown = (f"[`{one.split('::')[-1]}`](repo:{test_place(repo, one)})" for one in proofs)
            parts += ["\n".join(lines), *([f"Tests: {', '.join(shown)}"] if proofs else [])]
    return filled("formulas.md", count=count, sheet="\n\n".join(parts))
