"""`minitrain lift`: a part of minitrain as one file that needs torch alone."""

import ast
from typing import Annotated

from typer import Argument, Option, echo

from minitrain.cli.lift import ROOT, lift

TECHNIQUES = "data_parallel tensor_parallel context pipeline moe precision memory checkpoint attention"
LISTED = "what can be lifted, with its lines, blank ones aside; names are words then"
ROOMS = f"{TECHNIQUES} model systems"


def lift_command(
    names: Annotated[
        list[str] | None, Argument(help="such as data_parallel.zero1:Zero1, several in one file")
    ] = None,
    with_checks: Annotated[bool, Option(help="keep what says that arguments are wrong")] = False,
    listed: Annotated[bool, Option("--list", help=LISTED)] = False,
) -> None:
    """Write a part of minitrain to the screen as one file, to be used anywhere that has torch (the head says
    if it needs more).

    A class keeps its public methods; with Class.method what that needs. A name may be private.

    \b
    minitrain lift data_parallel.zero1:Zero1 > zero1.py
    minitrain lift pipeline.runtime:Runner.__call__ > pipeline.py
    minitrain lift --list ring"""
    if listed:
        return list_all(names or [])
    if not names:
        raise ValueError("lift what? give a name, data_parallel.zero1:Zero1, or see `minitrain lift --list`")
    echo(lift(names, with_checks), nl=False)


def list_all(words: list[str]) -> None:
    """The techniques' public classes and functions; of all rooms those with all these words."""
    found = without = 0
    for room in (ROOMS if words else TECHNIQUES).split():
        for path in sorted((ROOT / room).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                name = getattr(node, "name", "_")
                if name.startswith("_") or path.stem.startswith("first"):
                    continue
                said = f"{module}:{name}  {(ast.get_docstring(node) or '').partition(chr(10))[0]}"
                if not all(word in said.lower() for word in " ".join(words).lower().split()):
                    continue
                try:
                    lines = sum(map(bool, lift([f"{module}:{name}"]).splitlines()))
                except ValueError:
                    without += 1
                    continue
                found += 1
                echo(f"{lines:5}  {said}"[:120])
    echo(f"{found} can be lifted" + f", {without} cannot" * bool(without))
