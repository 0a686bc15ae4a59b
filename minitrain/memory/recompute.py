"""Recomputation: a forward keeps what it began with, and a backward runs it again for the rest.

    y = recompute(block, x)                                        kept: x
    y = recompute(block, x, results=results, keep={"core"})        kept: x, what the core gives and keeps

    forward     the ordinary graph; of a tensor that autograd saves, a Slot with a number is kept
    backward    the first Slot that is opened runs the forward again, which saves the same tensors in the same
                order: each is caught by its number, and goes when its Slot is opened. After the last one
                that is wanted the second pass stops (early_stop): a block's last product is not repeated

Gradients flow through the first graph, so frozen parameters, hooks, products put off and several backwards
work as always. A named result, `results("core", compute, q, k, v)` in the model, is computed once if it is
kept: neither its FLOPs nor its messages are repeated. Sends what is run again sends. Memory: inputs and kept
results until the second pass is over; what that finds until it is used. Chen et al. 2016, arXiv:1604.06174,
section 3. Korthikanti et al. 2022, arXiv:2205.05198, section 5, and Megatron-Core's output-discarding
checkpointing (`dropping`). Differs from torch.utils.checkpoint: what is kept has a name in the model; a named
computation whose inputs are all that is wanted is not begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory import segment as segments
from minitrain.memory.segment import Done, Results, Segment, Slot, saved_input, storages, view
from minitrain.ranks.random_state import random_state, same, set_random_state
from minitrain.ranks.torch_private import storage_id


def recompute(
    run: Callable, *inputs, results: Results | None = None, keep=(), early_stop=True, hold=None, replay=()
):
    """run(*inputs), of which only the inputs and the results called `keep` are kept for backward.

    `hold` says what is kept of a floating-point input (a part), and how it becomes whole again. Each of
    `replay` is called now and gives what makes a context for the second pass. Without gradients it is
    run(*inputs)."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    results = results or Results()
    segment = Segment(run, inputs, replay, early_stop, results, hold=hold)
    first = FirstPass(segment, frozenset(keep), set(storages(() if hold else inputs)))
    if isinstance(run, nn.Module):
        with results.inside(first):
            results.know(run)
    return first.run(*inputs)


class _Call(NamedTuple):
    """Of a named result in the first pass."""

    name: str
    first: int  # the number of the first tensor saved inside,
    end: int  # and of the first behind it
    fills: dict[int, tuple]  # which of them are views of an input: which one, and the view
    kept: list[Callable] | None  # makes the results
    single: bool
    drawn: list[tuple]  # the random state behind it, if it has drawn numbers, and the device


class FirstPass:
    """Decides what is kept. `known`: storages that are there anyway."""

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


class _Second:
    """The second pass: what is kept is not computed."""

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


# ---- single results


@contextmanager
def dropping(drop: Collection[str], results: Results, *, inside=(), replay=(), early_stop=True) -> Iterator:
    """Single results are dropped, each made again, alone, when a backward asks for it:

        with dropping({"act"}, results):         the model calls results("act", compute, gate, up)
            y = block(x)                         kept: all but act and what is inside; so gate and up are

        `drop`     not kept is what autograd saves inside, nor the result itself wherever it is saved
        `inside`   what is saved inside; the result stays: Korthikanti's selective recomputation

    What a result is made from is kept; if that is dropped too, it is made again first. Each is a segment of
    its own; nothing between them is computed again. To drop the core of attention costs as many FLOPs as to
    drop its inside only, and keeps one tensor less. Memory: while one is made again, what it saves."""
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
        self.outer = segments.outer_hooks()
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
        return segments.open_slot(packed) if isinstance(packed, Slot) else self.outer[1](packed)
