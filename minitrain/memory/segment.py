"""A piece of a forward that can be made again, and the tensors of it that are not kept.

    Slot       in the place of a saved tensor: its segment, and which of the tensors saved there it was
    Segment    what was run on what; `again()` runs it once more and catches the tensors of living Slots
    Results    the door through which a model computes what has a name: for each thread alone, as modes are

The second pass sees what the first saw: its inputs, torch's random state, modes of torch functions (one of
them puts products off; not autocast), and what `replay` brings back. Both number the tensors that are saved;
one that is wanted is held from when it is caught until its Slot is opened, every other goes at once. With a
graph that is used again (retain_graph) inputs stay, and each backward has its own second pass. Two passes
that differ in number, shape or dtype are refused. Sends what `run` sends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.ranks.random_state import drawing_from, random_state
from minitrain.ranks.torch_private import function_modes, keeps_graph, saved_hooks, storage_id

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # of hooks: what is kept, and the way back
Hold = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]  # a part of a tensor, and the way back


class Results(threading.local):
    """The door: compute(*inputs), unless the result is known. All tensors with gradients that `compute` reads
    must be inputs, or parameters."""

    frame = None

    def __call__(self, name: str, compute: Callable, *inputs):
        return compute(*inputs) if self.frame is None else self.frame.result(name, compute, inputs)

    @contextmanager
    def inside(self, frame) -> Iterator[None]:
        outside, self.frame = self.frame, frame
        try:
            yield
        finally:
            self.frame = outside

    def know(self, module: nn.Module, *_) -> None:
        """Its parameters are there anyway. A hook for modules that are about to run."""
        if hasattr(self.frame, "known"):
            self.frame.known |= storages((*module.parameters(), *module.buffers())).keys()


class Slot:
    """A tensor that was saved and not kept."""

    def __init__(self, segment: Segment, number: int, x: Tensor):
        self.segment, self.number, self.like = segment, number, (x.shape, x.dtype)


class Done(Exception):
    """The second pass has found all that is wanted."""


class Segment:
    """One call of `run`, that can be made again."""

    def __init__(self, run, inputs: Sequence, replay, early_stop, results: Results, hold: Hold | None = None):
        """Inputs are kept through the hooks that are in force around the segment."""
        self.outer = outer_hooks()
        self.run, self.early_stop, self.results = run, early_stop, results
        self.inputs = [saved_input(x, self.outer, hold) for x in inputs]
        self.devices = {x.device for x in inputs if isinstance(x, Tensor)} or {torch.device("cpu")}
        generators = [drawing_again(device) for device in self.devices]
        self.replay = [*generators, *(kept() for kept in replay)]
        self.modes = function_modes()
        self.count, self.last = 0, -1  # saved so far in this pass; the last one wanted in the second
        self.slots: dict[int, weakref.ref[Slot]] = {}
        self.outputs: dict[int, tuple] = {}  # of Slots that are views of results: which, and the view
        self.frame: Callable = lambda segment, may_stop: None  # what named results meet in the second pass
        self.recomputed: dict[int, Tensor] = {}

    def slot(self, number: int, x: Tensor) -> Slot:
        slot = Slot(self, number, x)
        self.slots[number] = weakref.ref(slot)
        return slot

    def output_slot(self, index: int, x: Tensor) -> Slot:
        number = -1 - len(self.outputs)
        self.outputs[number] = index, view(x)
        return self.slot(number, x)

    def unpack(self, packed) -> Tensor:
        return open_slot(packed) if isinstance(packed, Slot) else self.outer[1](packed)

    def wanted(self) -> list[int]:
        return [number for number, slot in self.slots.items() if slot() is not None]

    def again(self) -> None:
        """The second pass: fills `recomputed`."""
        if self.run is None:
            cure = "read ctx.saved_tensors once in a backward, or give retain_graph=True"
            raise RuntimeError(f"a recomputed tensor is opened a second time; {cure}")
        self.count, wanted = 0, self.wanted()
        self.last = max(wanted)
        outside = {number: self.outputs[number] for number in wanted if number in self.outputs}
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            for context in self.replay:
                stack.enter_context(context())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.results.inside(self.frame(self, self.early_stop)))
            stack.enter_context(saved_tensors_hooks(partial(self.catch, not outside), as_it_is))
            try:
                made = self.run(*(given() for given in self.inputs))
                for number, (index, place) in outside.items():
                    result = made[index] if isinstance(made, (tuple, list)) else made
                    self.recomputed[number] = result.detach().as_strided(*place)
            except Done:
                pass
        if missing := [number for number in wanted if number not in self.recomputed]:
            said = f"the second pass saved {self.count} tensors, without the {missing[0]}th of the first"
            raise RuntimeError(f"recomputation: {said}; a forward must do the same each time")
        if not keeps_graph():
            self.run = self.inputs = self.replay = self.frame = None

    def catch(self, may_stop: bool, x: Tensor) -> None:
        number, self.count = self.count, self.count + 1
        self.find(number, x)
        if may_stop and self.early_stop and number == self.last:
            raise Done

    def find(self, number: int, x: Tensor) -> None:
        slot = self.slots[number]() if number in self.slots else None
        if slot is None:
            return
        if (x.shape, x.dtype) != slot.like:
            (shape, dtype), now = slot.like, f"{list(x.shape)} {x.dtype}"
            said = f"tensor {number} was {list(shape)} {dtype} in the first pass and is {now} in the second"
            raise RuntimeError(f"recomputation: {said}; a forward must do the same each time")
        self.recomputed[number] = x.detach()


def open_slot(slot: Slot) -> Tensor:
    segment = slot.segment
    if slot.number not in segment.recomputed:
        segment.again()
    return segment.recomputed.pop(slot.number)


def saved_input(x, hooks: Pair, hold: Hold | None = None) -> Callable:
    """Makes an input of the second pass."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return lambda: x
    part, whole = hold(x.detach()) if hold else (x.detach(), as_it_is)
    (pack, unpack), wanted = hooks, x.requires_grad
    packed = pack(part)
    return lambda: whole(unpack(packed)).detach().requires_grad_(wanted)


def storages(tensors: Sequence) -> dict[int, tuple[int, torch.dtype]]:
    found = enumerate(tensors)
    return {storage_id(x.untyped_storage()): (i, x.dtype) for i, x in found if isinstance(x, Tensor)}


def view(x: Tensor) -> tuple:
    return x.size(), x.stride(), x.storage_offset()


def drawing_again(device: torch.device) -> Callable:
    return partial(drawing_from, random_state(device), device)


def as_it_is(x):
    return x


def outer_hooks() -> Pair:
    """Those in force here, of what is saved and opened."""
    return saved_hooks() or (as_it_is, as_it_is)
