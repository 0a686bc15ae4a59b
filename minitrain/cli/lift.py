"""A part of minitrain as one file: all that a name needs, as it stands in the source, over torch alone.

    lift(["data_parallel.zero1:Zero1"])  ->  the text of the file

What is reached is followed name by name through the modules. Of a class that was asked for all that is public
is kept; of others, and of one that was asked for with methods, what is called by name in the file.

    ranks/collectives   those of plain.py take their place
    the ledger          calls that tell it something go
    checks              of arguments go, unless `with_checks`: assert, `if ..: raise ValueError`, calls of
                        what only checks, what is worked out for these; all stay if something catches them
    annotations         with classes that nothing needs go
    names that collide  get that of their module in front
"""

import ast
import builtins
import re
import subprocess
import symtable
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import minitrain

ROOT = Path(minitrain.__file__).parent
PLAIN = "minitrain.ranks.collectives.plain"
REPLACED = ("minitrain.ranks.collectives", "minitrain.ranks.launch")  # by PLAIN
CHECKS = "minitrain.ranks.checks"
SILENT = {"announce": 1, "announce_host": 0}  # calls that tell the ledger: which argument they return
SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Of a class that is made of these, what others call without naming it.
CALLED = {"torch.autograd.Function": {"forward", "backward"}, "nn.Module": {"forward"}, "NamedTuple": set()}
Ours = tuple[str, str]  # (module, name)
Theirs = tuple[str, str | None]  # (module, name, or None for all of it)


def lift(targets: Sequence[str], with_checks: bool = False) -> str:
    """ValueError in one line where it cannot be done: no such name, or what only minitrain can have."""
    methods: dict[Ours, set[str]] = {}
    for text in targets:
        one, wanted = ours(text)
        methods.setdefault(one, set()).update(wanted)
    lifting = Lifting(methods, with_checks)
    if lifting.catches and not with_checks:
        return lift(targets, with_checks=True)
    modules = in_order(module for module, _ in lifting.reached)
    blocks = [Writer(lifting, source_of(module)).block() for module in modules]
    wanted = {node.id for text in blocks for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    imports, needs = imported({name: lifting.theirs[name] for name in sorted(wanted & lifting.theirs.keys())})
    read = [source_of(module).text.count(b"\n") for module in modules if module != PLAIN]
    command = f"minitrain lift {' '.join(targets)}{' --with-checks' * with_checks}"
    said = (
        f"Lifted from minitrain {version('minitrain')}{commit(ROOT)} by `{command}`, out of {len(read)} "
        f"modules with {sum(read):,} lines. Needs {needs or 'Python alone'}."
        f"{' Collectives are those of torch.' * (PLAIN in modules)} Left out: what tells the ledger, "
        f"{'' if with_checks else 'checks of arguments, '}what nothing here calls. Licence: Apache 2.0."
    )
    first = ast.get_docstring(source_of(next(iter(methods))[0]).tree, clean=False).rstrip()
    head = f'"""{first}\n\n{textwrap.fill(said, 106)}\n"""\n\nfrom __future__ import annotations\n\n'
    text = f"{head}{imports}\n" + "\n\n".join(blocks)
    check(text, targets)
    return text


def ours(text: str) -> tuple[Ours, list[str]]:
    """((module, name), methods) of "data_parallel.zero1:Zero1" or "data_parallel.zero1:Zero1.finish,step"."""
    module, _, name = text.removeprefix("minitrain.").partition(":")
    name, _, methods = name.partition(".")
    full, wanted = f"minitrain.{module}", methods.split(",") if methods else []
    if not module or file_of(full) is None:
        raise ValueError(f"{text}: there is no module {full}; give one of `minitrain lift --list`")
    defs = source_of(full).defs
    if name not in defs:
        there = [one for one in defs if not one.startswith("_")]
        raise ValueError(f"{text}: {full} has no {name or 'name given'}; use one of {', '.join(there)}")
    nodes = [node for base in bases((full, name)) for node in source_of(base[0]).defs[base[1]]]
    there = sorted({name for node in nodes for name in stored(getattr(node, "body", ()))})
    if lacks := [one for one in wanted if one not in there]:
        raise ValueError(f"{text}: {name} has no {lacks[0]}; use some of {', '.join(there)}")
    return (full, name), wanted


# ---- modules and their names -------------------------------------------------------------------------------


class Source:
    """A module: its text, in bytes as positions in its tree are; what it defines, and imports from whom."""

    def __init__(self, module: str):
        self.module, self.path = module, file_of(module)
        self.text = self.path.read_bytes()
        self.tree = ast.parse(self.text)
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.ours: dict[str, Ours] = {}
        self.theirs: dict[str, Theirs] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.theirs |= {one.asname or one.name.split(".")[0]: (one.name, None) for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = self.ours if node.module.startswith("minitrain") else self.theirs
                names.update({one.asname or one.name: (node.module, one.name) for one in node.names})
        self.defs: dict[str, list[ast.stmt]] = {}
        for node in self.tree.body:
            for name in stored([node]):
                self.defs.setdefault(name, []).append(node)

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def lines(self, node: ast.stmt) -> tuple[int, int]:
        """Of a statement, with its decorators and the comments right above it: whole lines."""
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        while re.match(rb" *# (?!----)", self.text[self.starts[first - 2] : self.starts[first - 1]]):
            first -= 1
        return self.starts[first - 1], self.starts[node.end_lineno]

    def resolve(self, name: str) -> Ours | str | None:
        """What a name in the module is: a thing of ours, a module of ours, or neither."""
        return (self.module, name) if name in self.defs else target(*self.ours.get(name, ("", "")))

    def meaning(self, node: ast.AST, bound: Iterable[str] = ()) -> Ours | str | None:
        """The same for a name, or an attribute of a module, where other names are `bound`."""
        match node:
            case ast.Name(id=name) if name not in bound:
                return self.resolve(name)
            case ast.Attribute(ast.Name(id=name), attribute) if name in self.ours and name not in bound:
                module = self.resolve(name)
                return target(module, attribute) if isinstance(module, str) else None

    def told(self, node: ast.AST) -> ast.expr | None:
        """What a call gives back whose purpose is to tell the ledger."""
        if isinstance(node, ast.Call) and (found := self.meaning(node.func)) and found[0] == PLAIN:
            return node.args[SILENT[found[1]]] if found[1] in SILENT else None

    def walk(self, node: ast.AST | None, dropped: set, bound: frozenset = frozenset()) -> Iterator[tuple]:
        """(node, names that are bound where it stands), without annotations and what is `dropped`."""
        if node is None or node in dropped:
            return
        yield node, bound
        children = [(field, child) for field, child in ast.iter_fields(node) if field != "annotation"]
        if (given := self.told(node)) is not None:
            children = [("", given)]
        inner = bound | bound_in(node)
        for field, child in children:
            for one in child if isinstance(child, list) else [child]:
                there = bound if field in ("decorator_list", "args") else inner
                if isinstance(one, ast.AST) and field != "returns":
                    yield from self.walk(one, dropped, there)


@cache
def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


source_of = cache(Source)


def target(module: str, name: str) -> Ours | str | None:
    """Where what is imported so is defined; a module's name, if it is one."""
    full = f"{module}.{name}"
    if full.startswith(REPLACED) and module != PLAIN:
        return PLAIN if full in REPLACED else (PLAIN, name)
    if not module:
        return None
    return full if file_of(full) else source_of(module).resolve(name) or (module, name)


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these bind, without those inside of functions, classes and comprehensions."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.MatchAs() | ast.MatchStar() | ast.ExceptHandler():
                names |= {node.name} - {None}
        if not isinstance(node, (ast.ClassDef, *SCOPES)):
            names |= stored(ast.iter_child_nodes(node))
    return names


def bound_in(node: ast.AST) -> set[str]:
    """The names that a scope binds, if the node is one."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        body = node.body if isinstance(node.body, list) else [node.body]
        return stored(body) | {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    return stored(one.target for one in node.generators) if isinstance(node, SCOPES) else set()


def in_order(modules: Iterable[str]) -> list[str]:
    """Each after those that it imports, the collectives first."""
    wanted, seen, order = set(modules), set(), []

    def visit(module: str) -> None:
        if module not in seen:
            seen.add(module)
            for where in source_of(module).ours.values():
                found = target(*where)
                visit(found if isinstance(found, str) else found[0])
            order.append(module)

    for module in sorted(wanted, key=lambda one: (one != PLAIN, one)):
        visit(module)
    return [module for module in order if module in wanted]


@cache
def bases(one: Ours) -> set[Ours]:
    """A class, and the classes of ours that it is made of."""
    source = source_of(one[0])
    found = [source.meaning(base) for node in source.defs[one[1]] for base in getattr(node, "bases", ())]
    return {one}.union(*(bases(base) for base in found if isinstance(base, tuple)))


# ---- what goes ---------------------------------------------------------------------------------------------


class Cut:
    """Of one function, or another statement: what goes. `only_checks`: nothing is left of it."""

    def __init__(self, source: Source, top: ast.stmt, owner: Ours | None, with_checks: bool):
        own = isinstance(top, ast.FunctionDef) and len(top.args.args) == 1  # a method that looks at itself
        self.source, self.owner, self.with_checks = source, owner, with_checks or bool(own and owner)
        self.dropped: set[ast.stmt] = set()
        self.only_checks = False
        before, self.unused = Counter(self.asked(top)), set()  # names that only what goes has asked for
        shared = {name for node in ast.walk(top) if isinstance(node, ast.Nonlocal) for name in node.names}
        self.before, grew = before, True
        while grew and isinstance(top, ast.FunctionDef):
            self.dropped.clear()
            self.emptied: set[ast.stmt] = set()  # in their place stands `pass`
            self.only_checks = self.all_go(top.body)
            unused = before.keys() - set(self.asked(top)) - shared
            grew, self.unused = not unused <= self.unused, self.unused | unused

    def asked(self, node: ast.AST) -> Iterator[str]:
        """Names that what is left asks for."""
        if node not in self.dropped:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id
            for one in ast.iter_child_nodes(node):
                yield from self.asked(one)

    def all_go(self, body: list[ast.stmt]) -> bool:
        going = [one for one in body if self.goes(one)]
        self.dropped.update(going)
        if going and len(going) == len(body):
            self.emptied.add(going[0])
        return bool(going) and all(one in going or is_text(one) for one in body)

    def goes(self, node: ast.stmt) -> bool:
        match node:
            case ast.ImportFrom():
                return node.module.startswith("minitrain")
            case ast.Expr(ast.Call() as call):
                return self.source.told(call) is not None or not self.with_checks and self.checks(call)
            case ast.Assert():
                return not self.with_checks
            case ast.FunctionDef(name=name, body=body):
                return name in self.unused or self.all_go(body) and False
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign(value=ast.expr()):
                places = [one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
                plain = all(isinstance(one, (ast.Name, ast.Tuple)) for one in places)
                return plain and stored([node]) <= self.unused
            case ast.If(test, body, orelse):
                needed = {one.target.id for one in ast.walk(test) if isinstance(one, ast.NamedExpr)}
                raises = self.only_raises(body) and not any(self.asked_outside(name, node) for name in needed)
                gone, rest = raises or self.all_go(body), not orelse or self.all_go(orelse)
                return gone and rest
            case ast.Match(cases=parts) | ast.Try(handlers=parts):
                for part in parts:
                    self.all_go(part.body)
                return isinstance(node, ast.Try) and self.all_go(node.body)
            case ast.For(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
                return (self.all_go(body) or self.only_raises(body)) and not orelse
            case ast.With(body=body):
                return self.all_go(body)
        return False

    def asked_outside(self, name: str, node: ast.stmt) -> bool:
        return self.before[name] > list(self.asked(node)).count(name)

    def only_raises(self, body: list[ast.stmt]) -> bool:
        """Of what is wrong with arguments; what is wrong with the world, a damaged file, is still said."""
        match body[-1]:
            case ast.Raise(ast.Call(ast.Name(id=error))):
                pass
            case ast.Raise(ast.Call(ast.Attribute(ast.Name(id="self"), method))):
                error = next((ast.unparse(one.returns) for one in self.methods(method) if one.returns), "")
            case _:
                return False
        sorry = error in ("ValueError", "TypeError") and not self.with_checks
        return sorry and all(isinstance(one, ast.Assign) for one in body[:-1])

    def methods(self, name: str) -> list[ast.FunctionDef]:
        classes = [source_of(base[0]).defs[base[1]][0] for base in bases(self.owner)] if self.owner else []
        return [one for cls in classes for one in cls.body if getattr(one, "name", "") == name]

    def checks(self, call: ast.Call) -> bool:
        """Is this a call of something that only checks? It is called so."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        found = self.source.meaning(call.func)
        if not re.match("_?(check|require)", name):
            return False
        if not isinstance(found, tuple):
            return any(cut(self.source, one, self.owner, False).only_checks for one in self.methods(name))
        bodies = source_of(found[0]).defs.get(found[1], ()) if found[0] != CHECKS else ()
        only = [cut(source_of(found[0]), one, None, False).only_checks for one in bodies]
        return any(only) or found[0] == CHECKS


cut = cache(Cut)


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# ---- what is reached -------------------------------------------------------------------------------------


class Lifting:
    """`methods`: what was asked for, and of classes which methods, none for all that are public."""

    def __init__(self, methods: dict[Ours, set[str]], with_checks: bool):
        self.methods, self.with_checks = methods, with_checks
        self.reached: dict[Ours, None] = {}
        self.members: dict[Ours, list[ast.stmt]] = {}  # of classes
        self.called: set[tuple[Ours | None, str]] = set()  # attributes: of self in a class, or of anything
        self.theirs: dict[str, Theirs] = {}
        self.shadowed: set[Ours] = set()  # asked for where a variable has their name
        self.catches = False  # an error of a check
        self.todo = list(methods)
        while self.todo or any([self.keep(one) for one in list(self.members)]):
            while self.todo:
                self.reach(self.todo.pop())
        count = Counter(name for _, name in self.reached)
        self.names: dict[Ours, str] = {}
        for one in self.reached:
            clash = count[one[1]] > 1 or one[1] in self.theirs or one in self.shadowed
            module = one[0].rpartition(".")[2]
            self.names[one] = f"{module}_{one[1]}" if clash and one not in methods else one[1]
        for name, number in Counter([*self.names.values(), *self.theirs]).items():
            if number > 1:
                self.refuse(f"two things are called {name}")

    def refuse(self, why: str) -> None:
        module, name = next(iter(self.methods))
        raise ValueError(f"{module.removeprefix('minitrain.')}:{name} cannot be lifted: {why}")

    def reach(self, one: Ours) -> None:
        if one in self.reached:
            return
        source = source_of(one[0])
        if one[0] == "minitrain.ranks.process":
            self.refuse("it needs what the ranks of minitrain's launches share (ranks/process.py)")
        if one[1] not in source.defs:
            whose = "ranks" if one[0] == PLAIN else one[0]
            self.refuse(f"it needs {one[1]} of {whose}, which is no part of a file")
        self.reached[one] = None
        for node in source.defs[one[1]]:
            if isinstance(node, ast.ClassDef):
                self.members[one] = []
                for part in [*node.bases, *node.decorator_list]:
                    self.read(source, part, set())
            else:
                self.read(source, node, cut(source, node, None, self.with_checks).dropped)

    def read(self, source: Source, node: ast.AST, dropped: set, owner: Ours | None = None) -> None:
        for part, bound in source.walk(node, dropped):
            found = source.meaning(part, bound)
            if source.told(part) is None and isinstance(found, tuple) and found[1] not in SILENT:
                self.todo.append(found)
                if found[1] in bound:
                    self.shadowed.add(found)
            match part:
                case ast.Name(id=name) if name not in bound and found is None and name in source.theirs:
                    self.need(name, source)
                case ast.Attribute(ast.Name(id="self"), attribute):
                    self.called.add((owner, attribute))
                case ast.Attribute(attr=attribute):
                    self.called.add((None, attribute))
                case ast.Call(ast.Name(id="getattr" | "hasattr" | "attrgetter"), args):
                    self.called |= {(None, one.value) for one in args if isinstance(one, ast.Constant)}
                case ast.ExceptHandler(type=error) if error is None or "ValueError" in ast.unparse(error):
                    self.catches = True
                case ast.Global(names=names):
                    self.refuse(f"{names[0]} of {source.module} is a state of its module")

    def need(self, name: str, source: Source) -> None:
        where = self.theirs.setdefault(name, source.theirs[name])
        if where != source.theirs[name]:
            self.refuse(f"{name} is from {where[0]} and from {source.theirs[name][0]}")

    def keep(self, one: Ours) -> bool:
        """Reads members of a class that are needed by now."""
        source, before = source_of(one[0]), len(self.members[one])
        (cls,) = source.defs[one[1]]
        others = {ast.unparse(base) for base in cls.bases if source.meaning(base) is None}
        record = "NamedTuple" in others or "dataclass" in "".join(map(ast.unparse, cls.decorator_list))
        asked = any(one in bases(whole) for whole, methods in self.methods.items() if not methods)
        related = lambda owner: owner is None or {owner, one} & bases(owner) & bases(one)
        called = {name for owner, name in self.called if related(owner)}
        called = called.union(*(methods for whole, methods in self.methods.items() if one in bases(whole)))
        called = called.union(*(CALLED.get(base, ()) for base in others))
        for node in cls.body:
            empty = isinstance(node, ast.FunctionDef) and all(map(is_text, node.body))
            public = (asked or bool(others - CALLED.keys())) and not empty
            needed = [
                name in called or name.startswith("__") or public and not name.startswith("_")
                for name in stored([node])
            ]
            field = record and isinstance(node, ast.AnnAssign) or is_text(node)
            if node not in self.members[one] and (field or any(needed)):
                self.members[one].append(node)
                self.read(source, node, cut(source, node, one, self.with_checks).dropped, one)
                for part in ast.walk(node) if isinstance(node, ast.Assign) else ():  # of methods, by name
                    if isinstance(name := getattr(part, "value", getattr(part, "id", None)), str):
                        self.called.add((one, name))
        return len(self.members[one]) > before


# ---- how it is written -----------------------------------------------------------------------------------


class Writer:
    """What is kept of a module, as it stands there but for these edits: (first, last) -> text."""

    def __init__(self, lifting: Lifting, source: Source):
        self.lifting, self.source = lifting, source
        self.edits: dict[tuple[int, int], str] = {}

    def block(self) -> str:
        source, lifting = self.source, self.lifting
        kept, parts = {name for module, name in lifting.reached if module == source.module}, []
        for node in source.tree.body:
            if not kept.isdisjoint(stored([node])):
                one = (source.module, getattr(node, "name", ""))
                members = lifting.members.get(one)
                text = self.text(node, None) if members is None else self.cls(node, one, members)
                head, name = rf"^(def|class) {one[1]}\b", lifting.names.get(one, one[1])
                parts.append((node, re.sub(head, rf"\1 {name}", text, flags=re.MULTILINE)))
        first = ast.get_docstring(source.tree).partition("\n\n")[0].replace("\n", " ")
        title = f"# ---- {source.path.relative_to(ROOT)} ".ljust(100, "-") + f"\n# {first}\n"
        asked = source.module == next(iter(lifting.methods))[0]
        return self.joined(parts, "" if asked else title, 2)

    def cls(self, node: ast.ClassDef, one: Ours, members: list[ast.stmt]) -> str:
        for part in [*node.bases, *node.decorator_list]:
            self.edit(part, set())
        head = self.between(self.source.lines(node)[0], self.source.lines(node.body[0])[0])
        parts = [(member, self.text(member, one)) for member in node.body if member in members]
        return head + self.joined(parts, "", 1) if members else f"{head}    pass\n"

    def joined(self, parts: list[tuple[ast.stmt, str]], text: str, gap: int) -> str:
        """With blank lines as there were; around functions and classes, and behind a docstring, `gap`."""
        before, large = None, (ast.FunctionDef, ast.ClassDef)
        for node, part in parts:
            apart = isinstance(node, large) or isinstance(before, large) or before and is_text(before)
            was_apart = self.source.text[: self.source.lines(node)[0]].endswith(b"\n\n")
            text += "\n" * (gap if apart and (before or text) else was_apart and before is not None) + part
            before = node
        return text

    def text(self, node: ast.stmt, owner: Ours | None) -> str:
        out = cut(self.source, node, owner, self.lifting.with_checks)
        end, alone = 0, False  # of what goes, one behind the other: did it stand alone?
        for one in sorted(out.dropped, key=lambda one: one.lineno):
            first, last = self.source.lines(one)
            if last > end:  # else it goes with what is around it
                alone = alone if first == end else self.source.text[:first].endswith((b":\n", b"\n\n"))
                blank = re.match(rb"\n*", self.source.text[last:])[0]
                end = last + len(blank) * (alone and one not in out.emptied)
                end = min(end, self.source.lines(node)[1])
                self.edits[first, end] = f"{' ' * one.col_offset}pass\n" * (one in out.emptied)
        self.edit(node, out.dropped, out.unused)
        return self.between(*self.source.lines(node)).rstrip("\n") + "\n"

    def between(self, first: int, last: int) -> str:
        parts, at = [], first
        for (begin, end), text in sorted(self.edits.items()):
            if at <= begin and end <= last:
                parts += [self.source.text[at:begin], text.encode()]
                at = end
        return b"".join([*parts, self.source.text[at:last]]).decode()

    def edit(self, node: ast.AST, dropped: set, unused: Iterable[str] = ()) -> None:
        source = self.source
        for part, bound in source.walk(node, dropped):
            found = source.meaning(part, bound)
            if (given := source.told(part)) is not None:
                (first, last), (begin, end) = source.span(part), source.span(given)
                self.edits |= {(first, begin): "", (end, last): ""}
            elif isinstance(found, tuple) and found in self.lifting.names:
                if isinstance(part, ast.Attribute) or self.lifting.names[found] != part.id:
                    self.edits[source.span(part)] = self.lifting.names[found]
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id in unused:
                self.edits[source.span(part)] = "_"
            elif isinstance(part, ast.AnnAssign) and not self.keeps(part.annotation):
                place = source.span(part.target)[1], source.span(part.annotation)[1]
                self.edits[place] = "" if part.value else ": object"
            elif isinstance(part, ast.FunctionDef):
                self.annotations(part)

    def annotations(self, node: ast.FunctionDef) -> None:
        args, span = node.args, self.source.span
        plain = [*args.posonlyargs, *args.args]
        default = dict(zip(plain[::-1], args.defaults[::-1])) | dict(zip(args.kwonlyargs, args.kw_defaults))
        for one in ast.walk(args):
            if isinstance(one, ast.arg) and one.annotation and not self.keeps(one.annotation):
                after = default.get(one)
                last = span(after)[0] if after else span(one.annotation)[1]
                self.edits[span(one)[0] + len(one.arg.encode()), last] = "=" if after else ""
        if node.returns and not self.keeps(node.returns):
            first, last = span(node.returns)
            self.edits[self.source.text.rindex(b" ->", 0, first), last] = ""

    def keeps(self, annotation: ast.expr) -> bool:
        """Is all that it names in the file, by this name?"""
        source, names = self.source, self.lifting.names
        for node in ast.walk(annotation):
            text = node.value if isinstance(node, ast.Constant) else getattr(node, "id", None)
            if isinstance(text, str) and not hasattr(builtins, text):
                if source.resolve(text) is None and text in source.theirs:
                    self.lifting.need(text, source)
                elif names.get(source.resolve(text)) != text:
                    return False
        return True


def imported(theirs: dict[str, Theirs]) -> tuple[str, str]:
    """The lines that import these names, and the packages that they need."""
    sections: dict[bool, dict[tuple, list]] = {True: {}, False: {}}
    for name, (module, part) in theirs.items():
        line = sections[module.partition(".")[0] in sys.stdlib_module_names]
        said = part if part == name or part is None else f"{part} as {name}"
        alias = f" as {name}" if part is None and name != module else ""
        line.setdefault((part is not None, module + alias), []).append(said)
    kind = lambda name: (not name.isupper(), not name[0].isupper(), name)
    texts = []
    for lines in filter(None, sections.values()):
        written = [
            f"from {module} import {', '.join(sorted(names, key=kind))}" if parts else f"import {module}"
            for (parts, module), names in sorted(lines.items())
        ]
        texts.append("\n".join(written) + "\n")
    packages = {module.partition(" ")[0].partition(".")[0] for _, module in sections[False]}
    named = sorted(packages, key=lambda one: (one != "torch", one))
    return "\n".join(texts), ", ".join(named).replace("torch", "torch 2.11 or newer", 1)


@cache
def commit(root: Path) -> str:
    """Of a clone of minitrain; an installed one may lie in somebody else's."""
    words = "ls-files __init__.py", "describe --always --dirty --exclude=*"
    git = lambda one: subprocess.run(["git", "-C", root, *one.split()], capture_output=True, text=True).stdout
    try:
        in_git, named = map(git, words)
    except OSError:  # no git
        return ""
    return f" (commit {named.strip()})" if in_git else ""


def check(text: str, targets: Sequence[str]) -> None:
    """Every name in the file is there: else there is a mistake here, and the file is worth nothing."""
    table = symtable.symtable(text, "lifted", "exec")
    there, scopes = {*table.get_identifiers(), *dir(builtins)}, list(table.get_children())
    for scope in scopes:
        scopes.extend(scope.get_children())  # the loop goes on with these
    symbols = (one for scope in scopes for one in scope.get_symbols())
    missing = {one.get_name() for one in symbols if one.is_global() and not one.is_local()}
    lost = missing - there - {"__class__"}
    if "__file__" in lost:
        raise ValueError(f"{' '.join(targets)} cannot be lifted: it reads a file that lies beside its module")
    if lost:
        raise AssertionError(f"{' '.join(targets)}: the lifted file lacks {', '.join(sorted(lost))}")
