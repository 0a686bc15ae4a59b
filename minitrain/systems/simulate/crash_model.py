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
import math
import random
from pathlib import Path

from minitrain.checkpoint.disk import Disk

SECTOR = 512
Tree = dict[str, bytes | None]


class Watched(Disk):
    """All that a save does goes through `on(what, path, call, *args)`, which makes the call."""

    def create(self, path):
        return self.on("create", path, super().create, path)

    def write(self, file, offset, data):
        self.on("write", self._paths[file], super().write, file, offset, data)

    def sync(self, file):
        self.on("sync", self._paths[file], super().sync, file)

    def make_folder(self, path):
        self.on("make_folder", path, super().make_folder, path)

    def sync_folder(self, path):
        self.on("sync_folder", path, super().sync_folder, path)

    def rename(self, path, to):
        self.on("rename", to, super().rename, path, to)

    def remove(self, path):
        self.on("remove", path, super().remove, path)


class Recorder(Watched):
    """Operations as tuples; files by number, folders by path below `root`."""

    def __init__(self, root: Path):
        super().__init__()
        self.root, self.log, self._numbers = root, [], {}

    def on(self, what, path, call, *args):
        inside = sorted(path.iterdir()) if what == "remove" and path.is_dir() else []
        file = call(*args)
        if what == "create":
            self._numbers[file] = object()  # descriptors are used again
            args = path, self._numbers[file]
        elif what in ("write", "sync"):
            args = self._numbers[args[0]], *args[1:-1], *(bytes(memoryview(x).cast("B")) for x in args[2:])
        for of in (*([name] for name in inside), args):
            names = (str(x.relative_to(self.root)) if isinstance(x, Path) else x for x in of)
            self.log.append((what, *names))
        return file


class _File:
    def __init__(self, durable: bytes = b""):
        self.versions = [durable]  # what is safely there, and after each write since

    def write(self, offset: int, data: bytes) -> None:
        now = self.versions[-1]
        self.versions.append(now[:offset].ljust(offset, b"\0") + data + now[offset + len(data) :])

    def sync(self) -> None:
        del self.versions[:-1]

    def variants(self, draw: random.Random, most: int) -> list[bytes]:
        if len(self.versions) == 1:
            return self.versions
        longest = max(map(len, self.versions))
        padded = [version.ljust(longest, b"\0") for version in (*self.versions, b"")]
        borders = range(0, longest, SECTOR)
        sectors = [sorted({whole[at : at + SECTOR] for whole in padded}) for at in borders]
        lengths = sorted({*map(len, self.versions), *borders})
        if math.prod(map(len, (*sectors, lengths))) <= most:
            whole = map(b"".join, itertools.product(*sectors))
            return sorted({content[:length] for content in whole for length in lengths})
        drawn = (b"".join(map(draw.choice, sectors))[: draw.choice(lengths)] for _ in range(most))
        return sorted({*self.versions, *drawn})


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
            places = range(len(self.changes))
            picks += [[at < count for at in places] for count in (*places, len(places))]
        return [self.now(itertools.compress(self.changes, pick)) for pick in picks]


class Model:
    """Begins with a tree that is safely on the disk."""

    def __init__(self, tree: Tree | None = None):
        self.root, self.files = _Folder(), {}
        for path, content in sorted((tree or {}).items()):
            folder, name = self._place(path)
            folder.durable[name] = _Folder() if content is None else _File(content)

    def do(self, operation: tuple) -> None:
        what, of, *more = operation
        if what in ("write", "sync"):
            getattr(self.files[of], what)(*more)
            return
        if what == "sync_folder":
            self._at(of).sync()
            return
        folder, name = self._place(of)
        if what == "create" and (old := folder.now().get(name)):
            self.files[more[0]] = old
            old.versions.append(b"")
        elif what == "create":
            self.files[more[0]] = _File()
            folder.changes.append({name: self.files[more[0]]})
        elif what == "rename":
            there, new = self._place(more[0])
            assert there is folder, "all our renames stay in their folder"
            folder.changes.append({name: None, new: self._at(of)})
        else:
            folder.changes.append({name: _Folder() if what == "make_folder" else None})

    def states(self, seed: int = 0, most: int = 100_000, most_of_one: int = 64) -> list[Tree]:
        """All of them if there are at most `most`; else as many, drawn."""
        draw = random.Random(seed)
        shapes = list(self._shapes(self.root, "", draw, most_of_one))
        files = dict.fromkeys(node for shape in shapes for node in shape.values() if isinstance(node, _File))
        variants = {file: file.variants(draw, most_of_one) for file in files}
        contents = [[variants.get(node, [None]) for node in shape.values()] for shape in shapes]
        if sum(math.prod(map(len, each)) for each in contents) <= most:
            trees = [zip(shape, x) for shape, each in zip(shapes, contents) for x in itertools.product(*each)]
        else:
            some = (draw.choice([*zip(shapes, contents)]) for _ in range(most))
            trees = [zip(shape, map(draw.choice, each)) for shape, each in some]
        return [dict(sorted(tree)) for tree in dict.fromkeys(map(frozenset, trees))]

    def _shapes(self, folder: _Folder, path: str, draw: random.Random, most: int):
        """Which names there may be: {path: file or folder}."""
        for names in folder.variants(draw, most):
            here = {path + name: node for name, node in names.items()}
            folders = ((name, node) for name, node in here.items() if isinstance(node, _Folder))
            below = [list(self._shapes(node, f"{name}/", draw, most)) for name, node in folders]
            for chosen in itertools.product(*below):
                yield here | {name: node for more in chosen for name, node in more.items()}

    def _at(self, path: str):
        node = self.root
        for name in filter(None, path.split("/")):
            node = node if name == "." else (node.durable | node.now())[name]
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        return self._at(above), name


def write_tree(tree: Tree, folder: Path) -> None:
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def read_tree(folder: Path) -> Tree:
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in paths}
