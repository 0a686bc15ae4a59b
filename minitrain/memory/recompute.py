"""Recomputation: a forward keeps what it began with, and a backward runs it again for the rest.

    y = recompute(block, x)                                        kept: x
    y = recompute(block, x, results=results, keep={"core"})        kept: x, what the core gives and keeps

    forward     the ordinary graph; of a tensor that autograd saves, a Slot with a number is kept
    backward    the first Slot that is opened runs the forward again, which saves the same tensors in the same
                order: each is caught by its number, and goes when its Slot is opened. After the last one
                that is wanted the second pass stops (early_stop): a block's last product is not repeated

Gradients flow through the first graph, so frozen parameters, hooks, products put off and several backwards
work as always. A named result, `results("core", compute, q, k, v)` in the model, is computed once if it is
kept: neither its FLOPs nor its messages are repeated, and what it has saved of its inputs is found in those
of the second pass. Sends nothing itself; what is run again sends again.
Memory: inputs and kept results until the second pass is over; what that finds until it is used.
Chen et al. 2016, arXiv:1604.06174, section 3. Differs from torch.utils.checkpoint: what is kept has a name in
the model and is no list of operators; a named computation whose inputs are all that is wanted is not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory.segment import Done, Hold, Results, Segment, saved_input, storages, view
from minitrain.ranks.random_state import random_state, same, set_random_state
from minitrain.ranks.torch_private import storage_id


def recompute(
    run: Callable,
    *inputs,
    results: Results | None = None,
    keep: Collection[str] = (),
    early_stop: bool = True,
    hold: Hold | None = None,
    replay: Iterable[Callable[[], Callable]] = (),
):
    """run(*inputs), of which only the inputs and the results called `keep` are kept for backward.

    `hold` says what is kept of a floating-point input (a part), and how it becomes whole again. Each of
    `replay` is called now and gives what makes a context for the second pass. Without gradients it is
    run(*inputs)."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    segment = Segment(run, inputs, replay, early_stop, results or Results(), hold=hold)
    first = FirstPass(segment, frozenset(keep), set(storages(() if hold else inputs)))
    if isinstance(run, nn.Module):
        first.know(run)
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

    def know(self, module: nn.Module) -> None:
        self.known |= storages((*module.parameters(), *module.buffers())).keys()

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
        if call.kept is None and not (ends and self.all_filled(call)):
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

    def all_filled(self, call: _Call) -> bool:
        rest = [number for number in self.segment.wanted() if number >= call.first]
        return all(number in call.fills for number in rest)
