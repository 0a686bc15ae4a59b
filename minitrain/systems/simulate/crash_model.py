"""A model of the file system: what a power cut may leave of a list of operations.

    Recorder                      a Disk that also writes down what it does
    Model(tree).do(operation)     ... and replays it
    model.states()                every tree that may be on the disk if the power goes now

Of a file that was not synced, each sector of 512 bytes is as after any one of the writes to it or before, and
its length any that it had or a border of sectors; what was never written is zero. Of a folder that was not
synced, any of the changes of names may have happened and others not, later ones without earlier ones; a
rename is one change. Files and folders are independent of each other. That is all that POSIX promises, and
more than ext4 loses, which keeps changes of names in order.

A tree is {path: bytes, or None for a folder}.
"""

import itertools
import random
from pathlib import Path

from minitrain.checkpoint.disk import Disk

SECTOR = 512
Tree = dict[str, bytes | None]


class Recorder(Disk):
    """Operations as tuples; files by number, folders by path below `root`."""

    def __init__(self, root: Path):
        super().__init__()
        self.root, self.log, self._numbers = root, [], {}

    def note(self, *operation) -> None:
        self.log.append(tuple(str(x.relative_to(self.root)) if isinstance(x, Path) else x for x in operation))

    def create(self, path):
        file = super().create(path)
        self._numbers[file] = object()  # descriptors are used again
        self.note("create", path, self._numbers[file])
        return file

    def write(self, file, offset, data):
        super().write(file, offset, data)
        self.note("write", self._numbers[file], offset, bytes(memoryview(data).cast("B")))

    def sync(self, file):
        super().sync(file)
        self.note("sync", self._numbers[file])

    def make_folder(self, path):
        super().make_folder(path)
        self.note("make_folder", path)

    def sync_folder(self, path):
        super().sync_folder(path)
        self.note("sync_folder", path)

    def rename(self, path, to):
        super().rename(path, to)
        self.note("rename", path, to)

    def remove(self, path):
        inside = sorted(path.iterdir()) if path.is_dir() else []
        super().remove(path)
        for name in (*inside, path):
            self.note("remove", name)


class _File:
    def __init__(self, durable: bytes = b""):
        self.durable, self.writes = durable, []  # a write: offset and data; None: cut to nothing

    def contents(self) -> list[bytes]:
        """After none of the writes, after the first, after the first two, .."""
        found = [self.durable]
        for write in self.writes:
            now = bytearray(b"" if write is None else found[-1])
            if write is not None:
                offset, data = write
                now.extend(bytes(max(0, offset + len(data) - len(now))))
                now[offset : offset + len(data)] = data
            found.append(bytes(now))
        return found

    def sync(self) -> None:
        self.durable, self.writes = self.contents()[-1], []

    def variants(self, draw: random.Random, most: int) -> list[bytes]:
        versions = self.contents()
        if len(versions) == 1:
            return versions
        longest = max(map(len, versions))
        padded = [version.ljust(longest, b"\0") for version in versions]
        borders = range(0, longest, SECTOR)
        sectors = [sorted({p[at : at + SECTOR] for p in (*padded, bytes(longest))}) for at in borders]
        lengths = sorted({len(version) for version in versions} | set(borders))
        total = 1
        for values in sectors:
            total *= len(values)
        if total * len(lengths) <= most:
            whole = map(b"".join, itertools.product(*sectors))
            return sorted({content[:length] for content in whole for length in lengths})
        drawn = (b"".join(map(draw.choice, sectors))[: draw.choice(lengths)] for _ in range(most))
        return sorted({*versions, *drawn})


class _Folder:
    def __init__(self):
        self.durable, self.changes = {}, []  # a change: {name: what it is, or None}

    def now(self, happened=None) -> dict:
        names = dict(self.durable)
        for change in self.changes if happened is None else happened:
            names |= change
        return {name: node for name, node in names.items() if node is not None}

    def sync(self) -> None:
        self.durable, self.changes = self.now(), []

    def variants(self, draw: random.Random, most: int) -> list[dict]:
        if 2 ** len(self.changes) <= most:
            picks = itertools.product((False, True), repeat=len(self.changes))
        else:
            picks = [[draw.random() < 0.5 for _ in self.changes] for _ in range(most)]
            picks += [
                [at < count for at in range(len(self.changes))] for count in range(len(self.changes) + 1)
            ]
        return [self.now(itertools.compress(self.changes, pick)) for pick in picks]


class Model:
    """Begins with a tree that is safely on the disk."""

    def __init__(self, tree: Tree | None = None):
        self.root, self.files = _Folder(), {}
        for path, content in sorted((tree or {}).items()):
            self._folder_of(path).durable[_last(path)] = _Folder() if content is None else _File(content)

    def do(self, operation: tuple) -> None:
        what, *of = operation
        if what == "create":
            path, number = of
            old = self._folder_of(path).now().get(_last(path))
            self.files[number] = old or _File()
            if old:
                old.writes.append(None)
            else:
                self._folder_of(path).changes.append({_last(path): self.files[number]})
        elif what == "write":
            self.files[of[0]].writes.append(tuple(of[1:]))
        elif what == "sync":
            self.files[of[0]].sync()
        elif what == "make_folder":
            self._folder_of(of[0]).changes.append({_last(of[0]): _Folder()})
        elif what == "sync_folder":
            self._at(of[0]).sync()
        elif what == "rename":
            path, to = of
            assert path.rpartition("/")[0] == to.rpartition("/")[0], "all our renames stay in their folder"
            self._folder_of(path).changes.append({_last(path): None, _last(to): self._at(path)})
        elif what == "remove":
            self._folder_of(of[0]).changes.append({_last(of[0]): None})

    def states(self, seed: int = 0, most: int = 100_000, most_of_one: int = 64) -> list[Tree]:
        """All of them if there are at most `most`; else as many, drawn."""
        draw = random.Random(seed)
        shapes = list(self._shapes(self.root, "", draw, most_of_one))
        variants: dict[_File, list[bytes]] = {}
        for node in {node for shape in shapes for node in shape.values() if isinstance(node, _File)}:
            variants[node] = node.variants(draw, most_of_one)
        count = sum(_product(len(variants.get(node, "1")) for node in shape.values()) for shape in shapes)
        found = {}
        if count <= most:
            for shape in shapes:
                for contents in itertools.product(*(variants.get(node, [None]) for node in shape.values())):
                    found[frozenset(zip(shape, contents))] = None
        else:
            for _ in range(most):
                shape = draw.choice(shapes)
                tree = {path: draw.choice(variants.get(node, [None])) for path, node in shape.items()}
                found[frozenset(tree.items())] = None
        return [dict(sorted(tree)) for tree in found]

    def _shapes(self, folder: _Folder, path: str, draw: random.Random, most: int):
        """Which names there may be: {path: file or folder}."""
        for names in folder.variants(draw, most):
            here = {path + name: node for name, node in names.items()}
            below = [
                list(self._shapes(node, f"{name}/", draw, most))
                for name, node in here.items()
                if isinstance(node, _Folder)
            ]
            for chosen in itertools.product(*below):
                yield here | {name: node for more in chosen for name, node in more.items()}

    def _at(self, path: str):
        node = self.root
        for name in filter(None, path.split("/")):
            node = node if name == "." else (node.durable | node.now())[name]
        return node

    def _folder_of(self, path: str) -> _Folder:
        return self._at(path.rpartition("/")[0])


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _product(numbers) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def write_tree(tree: Tree, folder: Path) -> None:
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def read_tree(folder: Path) -> Tree:
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in paths}
