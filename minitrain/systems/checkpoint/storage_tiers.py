"""Tiers: the newest checkpoints in a hot folder, all older ones in a cold one; to others both are one Store.

    commit     hot has k + 1 complete           training goes on
    move       the oldest: read from hot, written to cold, committed there, verified; then removed from hot
    open       from hot if it is there, else from cold

A crash at any point of a move leaves the checkpoint complete in hot or cold; the next move goes on from
there. Moves run on a thread; an error of one is told at the next `begin` or `settle`: what could not move
stays in hot, and is tried again after the next commit. Cai et al. 2024 (InternEvo), arXiv:2403.17297.
"""

import sys
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import Damaged, File, Written
from minitrain.checkpoint.store import MANIFEST, Store, copy_step


class Tiers(Store):
    """The `keep` newest in the folder `hot`, all others in `cold`."""

    def __init__(self, hot: Path | str, cold: Path | str, keep: int = 2, disk: Disk | None = None):
        super().__init__(hot, keep, disk)
        if Path(hot).resolve() == Path(cold).resolve():
            raise ValueError(f"{hot} is both the hot and the cold folder; use two")
        self.cold = Store(cold, sys.maxsize, self.disk)
        self._mover: futures.ThreadPoolExecutor | None = None
        self._moving: futures.Future | None = None

    def in_hot(self, step: int) -> bool:
        return (super().path(step) / MANIFEST).exists()

    def path(self, step: int) -> Path:
        only_cold = not self.in_hot(step) and self.cold.is_complete(step)
        return self.cold.path(step) if only_cold else super().path(step)

    def is_complete(self, step: int) -> bool:
        return self.in_hot(step) or self.cold.is_complete(step)

    def hot_steps(self) -> list[int]:
        return [step for step in super().steps() if self.in_hot(step)]

    def steps(self) -> list[int]:
        hot = self.hot_steps()  # first: a step may be moving
        return sorted({*hot, *self.cold.steps()})

    def open(self, step: int) -> tuple[dict[str, Any], list[File]]:
        """As Store's: from hot, or if it is not there or its headers are damaged, from cold."""
        try:
            return super().open(step)
        except Damaged:
            if not self.cold.is_complete(step):
                raise
            return self.cold.open(step)

    def begin(self, step: int) -> Path:
        """It may raise the error of the last move, once."""
        self.settle()
        return super().begin(step)

    def commit(self, step: int, files: Iterable[Written], plain: dict[str, Any]) -> list[str]:
        lines = super().commit(step, files, plain)
        self._mover = self._mover or futures.ThreadPoolExecutor(1, thread_name_prefix="move a checkpoint")
        self._moving = self._mover.submit(self.move)
        return lines

    def settle(self) -> None:
        """Wait for a move under way. Raises its error."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.result()

    def unlock(self) -> None:
        """Of both; no thread is left. It may raise the error of the last move."""
        try:
            self.settle()
        finally:
            if self._mover:
                self._mover.shutdown()
                self._mover = None
            super().unlock()
            self.cold.unlock()

    def set_aside(self, step: int) -> None:
        super().set_aside(step) if self.in_hot(step) else self.cold.set_aside(step)

    def _too_many(self) -> list[int]:
        """None is removed that has not moved."""
        return []

    def move(self) -> None:
        """Until hot has `keep`: the oldest to cold. What a crash has left there is used if it is whole."""
        for step in self.hot_steps()[: -self.keep]:
            if not self.cold.is_good(step):
                if self.cold.is_complete(step):
                    self.cold._discard([step])
                copy_step(step, self, self.cold)
            self._discard([step])  # from hot
