"""Recomputation: a forward keeps what it began with, and a backward runs it again for the rest.

    y = recompute(block, x)                                        kept: x
    y = recompute(block, x, results=results, keep={"core"})        kept: x, what the core gives and keeps

    forward     the ordinary graph; of a tensor that autograd saves, a Slot with a number is kept
    backward    the first Slot that is opened runs the forward again, which saves the same tensors in the same
                order: each is caught by its number, and goes when its Slot is opened. After the last one
                that is wanted the second pass stops (early_stop): a block's last product is not repeated

Gradients flow through the first graph, so frozen parameters, hooks, products put off and several backwards
work as always. A named result, `results("core", compute, q, k, v)` in the model, is computed once if it is
kept: neither its FLOPs nor its messages are repeated. The second pass sees what the first saw: inputs,
torch's random state, modes of torch functions (one puts products off; not autocast), and what `replay` brings
back. With a graph that is used again (retain_graph) inputs stay, and each backward has its own second pass.
Two passes that differ in number, shape or dtype are refused. Sends what is run again sends. Memory: inputs
and kept results until the second pass is over; what it finds and is wanted, until it is used. Chen et al.
2016, arXiv:1604.06174, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 5, and Megatron-Core's
output discarding (`dropping`). Differs from torch.utils.checkpoint: what is kept has a name in the model;
if backward needs only the inputs of a named result, the result is not recomputed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.ranks.random_state import drawing_from, random_state, same, set_random_state
from minitrain.ranks.torch_private import function_modes, keeps_graph, saved_hooks, storage_id

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # of hooks: what is kept, and the way back
Hold = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]  # a part of a tensor, and the way back


def recompute(
    run: Callable, *inputs, results: Results | None = None, keep=(), early_stop=True, hold=None, replay=()
):
    """run(*inputs), of which only the inputs and the results called `keep` are kept for backward. `hold` says
    what is kept of a floating-point input (a part), and how it becomes whole again. Each of `replay` is
    called now and makes a context for the second pass. Without gradients it is run(*inputs)."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    results = results or Results()
    segment = Segment(run, inputs, replay, early_stop, results, hold=hold)
    first = FirstPass(segment, frozenset(keep), set(storages(() if hold else inputs)))
    if isinstance(run, nn.Module):
        with results.inside(first):
            results.know(run)
    return first.run(*inputs)


class Results(threading.local):
    """The door through which a model computes what has a name, on each thread: compute(*inputs), unless the
    result is known. All tensors with gradients that `compute` reads must be inputs, or parameters."""

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


class Slot:  # a tensor that was saved and not kept
    def __init__(self, segment: Segment, number: int, x: Tensor):
        self.segment, self.number, self.like = segment, number, (x.shape, x.dtype)


class Done(Exception):
    """The second pass has found all that is wanted."""


class Segment:
    """One call of `run`, that can be made again. Inputs are kept through the hooks in force around it."""

    def __init__(self, run, inputs: Sequence, replay, early_stop, results: Results, hold: Hold | None = None):
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


def outer_hooks() -> Pair:  # those in force here
    return saved_hooks() or (as_it_is, as_it_is)


class _Call(NamedTuple):
    name: str
    first: int  # the number of the first tensor saved inside,
    end: int  # and of the first behind it
    fills: dict[int, tuple]  # which of them are views of an input: which one, and the view
    kept: list[Callable] | None  # makes the results
    single: bool
    drawn: list[tuple]  # the random state behind it, if it has drawn numbers, and the device


class FirstPass:  # decides what is kept; `known`: storages that are there anyway
    def __init__(self, segment: Segment, keep: frozenset[str], known: set[int]):
        self.segment, self.keep, self.known = segment, keep, known
        self.reads: dict[int, tuple[int, torch.dtype]] | None = None  # inputs of a named result, inside of it
        self.keeps, self.fills, self.calls = False, {}, []
        segment.frame = partial(_Second, self.calls)

    def run(self, *inputs):
        with self.segment.results.inside(self), saved_tensors_hooks(self.pack, self.segment.unpack):
            return self.segment.run(*inputs)

    def pack(self, x: Tensor):
        segment, key = self.segment, storage_id(x.untyped_storage())
        number, segment.count = segment.count, segment.count + 1
        if key in self.known:
            return segment.outer[0](x.detach())
        if self.reads is not None:
            index, dtype = self.reads.get(key, (None, None))
            if dtype == x.dtype:
                self.fills[number] = index, view(x)
            elif self.keeps:
                return segment.outer[0](x.detach())  # a node that holds its own result would never go
        return segment.slot(number, x)

    def result(self, name: str, compute: Callable, inputs: tuple):
        if self.reads is not None:  # inside another
            return compute(*inputs)
        start, self.fills, self.keeps = self.segment.count, {}, name in self.keep
        self.reads, devices = storages(inputs), self.segment.devices if self.keeps else ()
        before = [random_state(device) for device in devices]
        try:
            made = compute(*inputs)
        finally:
            self.reads = None
        kept, single = None, isinstance(made, Tensor)
        if self.keeps:
            tensors = [made] if single else made
            kept = [saved_input(x, self.segment.outer) for x in tensors]
            self.known |= storages(tensors).keys()
        after = [(random_state(device), device) for device in devices]
        drawn = [new for new, old in zip(after, before) if not same(new[0], old)]
        self.calls.append(_Call(name, start, self.segment.count, self.fills, kept, single, drawn))
        return made


class _Second:  # the second pass: what is kept is not computed
    def __init__(self, calls: list[_Call], segment: Segment, may_stop: bool):
        self.segment, self.may_stop = segment, may_stop
        self.calls, self.within = iter(calls), False

    def result(self, name: str, compute: Callable, inputs: tuple):
        if self.within:
            return compute(*inputs)
        segment, call = self.segment, next(self.calls, None)
        if call is None or (call.name, call.first) != (name, segment.count):
            said = f"the second pass comes to {name!r} after {segment.count} tensors, the first came to"
            raise RuntimeError(f"recomputation: {said} {call and call.name!r}; it must do the same each time")
        ends = self.may_stop and segment.last < call.end
        rest = [number for number in segment.wanted() if number >= call.first]
        if call.kept is None and not (ends and all(number in call.fills for number in rest)):
            self.within = True
            try:
                return compute(*inputs)
            finally:
                self.within = False
        for number, (index, place) in call.fills.items():
            segment.find(number, inputs[index].detach().as_strided(*place))
        if ends:
            raise Done
        segment.count = call.end
        for state, device in call.drawn:
            set_random_state(state, device)
        made = [given() for given in call.kept]
        return made[0] if call.single else tuple(made)


@contextmanager
def dropping(drop: Collection[str], results: Results, *, inside=(), replay=(), early_stop=True) -> Iterator:
    """Single results are dropped, each made again, alone, when a backward asks for it:

        with dropping({"act"}, results):         the model calls results("act", compute, gate, up)
            y = block(x)                         kept: all but act and what is inside; so gate and up are

        `drop`     not kept is what autograd saves inside, nor the result itself wherever it is saved
        `inside`   what is saved inside; the result stays: Korthikanti's selective recomputation

    What a result is made from is kept or, if dropped too, made again first; nothing between them is. To drop
    attention's core costs as many FLOPs as to drop its inside, and keeps one tensor less. Memory: while one
    is made again, what it saves."""
    frame = _Dropping(frozenset(drop), frozenset(inside), results, tuple(replay), early_stop)
    if not torch.is_grad_enabled():
        yield
        return
    with results.inside(frame), saved_tensors_hooks(frame.pack, frame.unpack):
        try:
            yield
        finally:
            frame.made.clear()


class _Dropping:
    def __init__(self, drop: frozenset, inside: frozenset, results: Results, replay: tuple, early_stop: bool):
        self.drop, self.inside, self.results = drop, inside, results
        self.replay, self.early_stop = replay, early_stop
        self.outer = outer_hooks()
        self.known: set[int] = set()  # storages of parameters
        self.made: dict[int, tuple] = {}  # storage -> a weak reference to it, who makes it, which result

    def result(self, name: str, compute: Callable, inputs: tuple):
        if name not in self.drop | self.inside:
            return compute(*inputs)
        reads = storages(inputs)
        segment = Segment(compute, inputs, self.replay, self.early_stop, self.results)
        made = FirstPass(segment, frozenset(), self.known | reads.keys()).run(*inputs)
        for index, x in enumerate([made] if isinstance(made, Tensor) else made):
            storage = x.untyped_storage()
            if name in self.drop and storage_id(storage) not in reads:
                self.made[storage_id(storage)] = weakref.ref(storage), segment, index
        return made

    def pack(self, x: Tensor):
        storage, maker, index = self.made.get(storage_id(x.untyped_storage()), (lambda: None, None, None))
        return self.outer[0](x.detach()) if storage() is None else maker.output_slot(index, x)

    def unpack(self, packed) -> Tensor:
        return open_slot(packed) if isinstance(packed, Slot) else self.outer[1](packed)
