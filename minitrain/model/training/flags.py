"""Flags of a command from the fields of frozen dataclasses: a field is a flag, its comment the help.

    @options(flags(Strategy), flags(GPTConfig, unset=True, leave_out=("vocab_size",)))
    def train(**values):
        strategy, changes = Strategy(**chosen(Strategy, values)), chosen(GPTConfig, values)

`overlap: bool = False  # hide what tp sends` is `--overlap / --no-overlap`; `int | str` is a word, a tuple
may be given many times. Values are checked by the dataclass alone. `panel` is the title over its flags in the
help of a `Command`, and Tab completes a field in `choices`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import Annotated, Any, Optional, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

HELP_AT = 34  # the column where the help of a flag begins


def flags(
    cls: type, *, panel="", unset=False, leave_out: Iterable = (), short: Mapping = {}, choices: Mapping = {}
) -> list[Parameter]:
    """A parameter of a command per field. `unset`: what is not given is None; `short` are second names."""
    kinds, found = get_type_hints(cls), []
    # what stands beside each field in the source
    help_of = dict(re.findall(r"^ +(\w+):[^#\n]*# *(.+)$", inspect.getsource(cls), re.M))
    for field in fields(cls):
        name, kind, default = field.name, flag_type(kinds[field.name]), None if unset else field.default
        if name in leave_out:
            continue
        if isinstance(default, tuple):
            default = list(default)
        names = [f"--{name.replace('_', '-')}", short[name]] if name in short else []
        said = help_of.get(name, "")
        said = f"{field.default} {said}" if said.startswith("or ") else said
        more = dict(show_default=default not in (None, []), rich_help_panel=panel)
        more |= dict(autocompletion=among(choices[name])) if name in choices else {}
        option = typer.Option(*names, help=said, **more)
        annotation = Annotated[Optional[kind] if default is None else kind, option]
        found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return found


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What the Tab key offers: the names that begin with what is typed."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


class Command(TyperCommand):
    def format_options(self, ctx, formatter) -> None:
        """A panel after the other, without rich, which takes long to import; no word is cut."""
        panels = {}
        for one in self.get_params(ctx):
            if (record := one.get_help_record(ctx)) and one.name != "help":
                panels.setdefault(
                    getattr(one, "rich_help_panel", "") or f"{one.param_type_name}s".title(), []
                ).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                for names, said in records:
                    lines = textwrap.wrap(said, formatter.width - HELP_AT, break_on_hyphens=False)
                    lines = [""] * (len(names) > HELP_AT - 4) + lines
                    formatter.write(f"  {names:{HELP_AT - 2}}{lines[0]}".rstrip() + "\n")
                    formatter.write("".join(f"{'':{HELP_AT}}{line}\n" for line in lines[1:]))


class Group(TyperGroup):
    def format_commands(self, ctx, formatter) -> None:
        """What each is for, in whole sentences."""
        said = [(name, self.commands[name].get_short_help_str(400)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(said)


def flag_type(kind: Any) -> type:
    if get_origin(kind) is tuple:
        return list[get_args(kind)[0]]
    kinds = [one for one in get_args(kind) if one is not type(None)] or [kind]
    return str if str in kinds else kinds[0]


def chosen(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are fields of `cls` and were given."""
    given = {field.name: values[field.name] for field in fields(cls) if values.get(field.name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def options(*groups: list[Parameter]) -> Callable:
    """The command's own parameters, then those of the groups, in the place of its **values."""

    def given(command: Callable) -> Callable:
        own = inspect.signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in own if parameter.kind is not Parameter.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([*own, *(flag for group in groups for flag in group)])
        return command

    return given
