"""No checkpoint until something fails: then the ranks that are well save what they have, and leave.

    jit = JustInTime(folder, group)                                           its place, a hash, to all; then
    with jit.guard():                                                         an error, of a collective say:
        for step in ..:                                                       save, and the error goes on
            run.step(run.batch(rows, step))
            jit.boundary(step + 1, run.pieces(), run.plain_state(), manifest) nothing is sent or copied: views
    launch.run(train, grace_s=60)                                             gives the others time for it
    manifest, files = survivors(folder)                                       in the next start: any layout

A rank whose neighbour dies sees its collective fail. Until the update begins, what it holds is the state of
the last boundary: torch's own counts of writes tell; a rank that finds a tensor written to says so and saves
nothing. A place is what a rank holds of the model, names and rectangles; replicas (data parallelism) have the
same. One survivor of each place is a checkpoint; without one, or where survivors are a step apart, Lost says
what is missing. Sends nothing after the start. Written after a failure: per survivor all that it holds. Gupta
et al. 2024, Just-In-Time Checkpointing, EuroSys, doi 10.1145/3627703.3650085. Differs: the error of the
collective is the detector (theirs is a time-out beside a hanging GPU), the loop says where a step begins; a
wait that nothing ends lasts a third of `grace_s` after the death, so the rest must suffice to save.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed import ProcessGroup

from minitrain.checkpoint.format import Damaged, File, Written, write_file
from minitrain.checkpoint.store import Store, file_name
from minitrain.ranks.pieces import Piece
from minitrain.ranks.torch_private import version_of
from minitrain.systems.checkpoint.in_memory import Lost, gather_plain


class JustInTime:
    """Of one rank; `folder` is one that a later start sees, on disk or in memory."""

    def __init__(self, folder: Path | str, group: ProcessGroup):
        self.group, self.rank = group, group.rank()
        self.store = Store(Path(folder) / f"rank-{self.rank:05d}", keep=1)
        self.places: list[str] | None = None

    def boundary(self, step: int, pieces: Iterable[Piece], plain: dict, manifest: dict) -> None:
        """What to save if something fails from here on; at the start, and right after each update."""
        self.step, self.pieces, self.plain, self.manifest = step, list(pieces), plain, manifest
        self.versions = [version_of(piece.values) for piece in self.pieces]
        if self.places is None:
            parameters = [piece for piece in self.pieces if piece.name.startswith("parameters/")]
            held = sorted((piece.name, piece.start, piece.shape) for piece in parameters)
            self.places = gather_plain(xxhash.xxh3_64_hexdigest(repr(held).encode()), self.group)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An error inside: save, say if that cannot be, and let it go on."""
        try:
            yield
        except Exception:
            try:
                self.save()
            except (OSError, ValueError) as why:
                print(f"nothing of step {self.step} is saved: {why}", file=sys.stderr, flush=True)
            raise

    def save(self) -> None:
        for piece, version in zip(self.pieces, self.versions):
            if version_of(piece.values) != version:
                raise ValueError(f"{piece.name} was written to after the boundary")
        store, more = self.store, self.manifest | {"places": self.places}
        for later in (step for step in store.steps() if step >= self.step):
            if later == self.step and store.manifest(later)["places"] == self.places:
                return  # a start that failed before its first step was done
            store.disk.remove(store.path(later))  # of another layout, or of a future that was given up
        path = store.begin(self.step) / file_name(self.rank)
        held = [replace(piece, values=piece.values.cpu(), holders=()) for piece in self.pieces]
        store.commit(self.step, [write_file(store.disk, path, held, self.plain)], more)
        store.unlock()


def survivors(folder: Path | str) -> tuple[dict[str, Any], list[File]]:
    """The manifest of the newest whole step, and files that hold each piece once. Lost: what each lacks."""
    found: dict[tuple, list] = {}  # by step and layout
    why = []
    for store in map(Store, sorted(Path(folder).glob("rank-*"))):
        for step in store.steps():
            try:
                manifest = store.manifest(step)
                found.setdefault((step, *manifest["places"]), []).append((store, manifest))
            except Damaged as error:
                why.append(str(error))
    for (step, *places), saved in sorted(found.items(), key=lambda item: item[0], reverse=True):
        files = {}
        for store, manifest in saved:
            (written,), rank = manifest["files"], int(store.folder.name.removeprefix("rank-"))
            try:
                if places[rank] not in files:
                    file = File(store.path(step) / written["name"], Written(**written))
                    files[places[rank]] = file.verify()
            except (Damaged, OSError) as error:
                why.append(str(error))
        if files.keys() == set(places):
            seen: set[tuple] = set()
            for file in files.values():  # what two places hold alike, as ranks of tp hold norms, counts once
                file.entries = [entry for entry in file.entries if (entry.name, entry.start) not in seen]
                seen |= {(entry.name, entry.start) for entry in file.entries}
            return manifest, list(files.values())
        lost = [rank for rank, place in enumerate(places) if place not in files]
        why.append(f"step {step}: nobody is left who has what ranks {lost} held")
    raise Lost(f"{folder} has no whole step of survivors ({'; '.join(why) or 'it is empty'})")
