"""Files of the repository as pages with an anchor for each line, and folders as lists of what they hold."""

import html
import os
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sheets import HERE, filled, first_line


def address(repo: Path, path: str) -> str:
    """Where the listing of a file or folder stands on the site."""
    return f"code/{path}/index.html" if (repo / path).is_dir() else f"code/{path}.html"


def write(repo: Path, site: Path, paths: set[str]) -> int:
    """Lists `paths`, what stands in folders among them, and the folders above; returns how many pages."""
    todo, seen = list(paths), set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += contents(repo, path) if (repo / path).is_dir() else []
            todo += [os.path.dirname(path)] if path.startswith("minitrain/") else []
    for path in seen:
        target = site / address(repo, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        up = os.path.relpath(site / "code", target.parent) + "/"
        body = folder(repo, path) if (repo / path).is_dir() else listing(repo / path)
        crumbs = " / ".join(crumb(repo, above, up, above in seen) for above in ancestors(path))
        target.write_text(filled("listing.html", title=path, up=up, crumbs=crumbs, body=body))
    light, dark = (HtmlFormatter(style=f"a11y-{kind}").get_style_defs for kind in ("light", "dark"))
    css = (HERE / "pages/listing.css").read_text() + light("pre") + dark('[data-theme="dark"] pre')
    (site / "code/listing.css").write_text(css)
    return len(seen)


def ancestors(path: str) -> list[str]:
    """ "a/b/c" -> ["a", "a/b", "a/b/c"]"""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def crumb(repo: Path, path: str, up: str, listed: bool) -> str:
    name = os.path.basename(path)
    return f'<a href="{up}{address(repo, path).removeprefix("code/")}">{name}</a>' if listed else name


def listing(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = highlight(path.read_text(), lexer, HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
    return "<pre>" + "\n".join(f"<i id=L{i}></i>{line}" for i, line in enumerate(lines, start=1)) + "</pre>"


def folder(repo: Path, path: str) -> str:
    lines = []
    for entry in contents(repo, path):
        link = address(repo, entry).removeprefix(f"code/{path}/")
        said = html.escape(first_line(repo / entry))
        lines.append(f"<tr><td><a href={link}>{os.path.basename(entry)}</a><td>{said}")
    return f"<table>{''.join(lines)}</table>"


@cache
def contents(repo: Path, path: str) -> list[str]:
    """Modules, tables and packages of a folder."""
    found = [one for one in (repo / path).iterdir() if one.suffix in (".py", ".tsv")]
    found += [one.parent for one in (repo / path).glob("*/__init__.py")]
    return [
        one.relative_to(repo).as_posix() for one in sorted(found, key=lambda one: (one.is_dir(), one.name))
    ]
