"""The house as it is: which room stands on which, how large each is, and what one module needs to be read.

    python -m docs.house                              floors, lines, arrows
    python -m docs.house minitrain.moe.router         the modules that it needs, and their lines

A room is a folder of minitrain, or a module at its top. Imports are read from the source with `ast`, those
inside functions too; nothing is imported.
"""

import ast
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "minitrain"


def name_of(path: Path) -> str:
    parts = ("minitrain", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imported_by(path: Path) -> set[str]:
    """The modules of minitrain that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & modules().keys() or {node.module}
    return names & modules().keys()


@cache
def graph() -> dict[str, set[str]]:
    return {name: imported_by(path) - {name} for name, path in modules().items()}


def rooms() -> dict[str, set[str]]:
    """{room: the rooms it imports from}; minitrain/__init__.py, which gives short names, is none."""
    found: dict[str, set[str]] = {room_of(name): set() for name in modules() if name != "minitrain"}
    for name, others in graph().items():
        for other in others - {"minitrain"} if name != "minitrain" else ():
            if room_of(other) != room_of(name):
                found[room_of(name)].add(room_of(other))
    return found


def floors() -> list[list[str]]:
    """Rooms from the ground up: each stands on lower floors only. ValueError: two rooms need each other."""
    left, up = rooms(), []
    while left:
        ready = sorted(room for room, others in left.items() if not others & left.keys())
        if not ready:
            raise ValueError(f"rooms import each other in a circle: {', '.join(sorted(left))}")
        up.append(ready)
        left = {room: others for room, others in left.items() if room not in ready}
    return up


def lines_of(names) -> int:
    return sum(modules()[name].read_bytes().count(b"\n") for name in names)


def closure(module: str, without: str = "minitrain.ranks") -> list[str]:
    """What a reader of a module opens: it, what it imports, and so on, but for one folder."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name != "minitrain" and not f"{name}.".startswith(f"{without}."):
            seen.add(name)
            waiting += graph()[name]
    return sorted(seen)


def drawn() -> str:
    """A line for each floor, the top one first: its rooms with their lines, in hundreds."""
    text, size = [], {room: lines_of(n for n in modules() if room_of(n) == room) for room in rooms()}
    for number, floor in reversed([*enumerate(floors(), 1)]):
        text.append(f"{number:2}  " + "   ".join(f"{room} {round(size[room], -2):,}" for room in floor))
    arrows, lines = sum(map(len, rooms().values())), round(sum(size.values()), -2)
    text.append(f"{len(rooms())} rooms on {len(floors())} floors, {arrows} arrows, {lines:,} lines")
    return "\n".join(text)


def main(names: list[str]) -> None:
    if not names:
        print(drawn())
    for module in names:
        if module not in modules():
            raise SystemExit(f"no module {module}; give one as minitrain.data_parallel.zero1")
        needed = closure(module)
        for name in needed:
            print(f"{lines_of([name]):6,}  {name}")
        print(f"{lines_of(needed):6,}  lines in {len(needed)} modules, without minitrain.ranks")


if __name__ == "__main__":
    main(sys.argv[1:])
