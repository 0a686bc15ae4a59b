"""What a layer costs, by an account of its own forward: the figures where planners of recomputation start.

    units = account(Ledger, block, x, positions)         norm1 qkv core out norm2 up act down, in order
    sizes = layer_bytes(Ledger, block, x, positions)     what F, T and B of chain_plan.py allocate

Of each named result: FLOPs, bytes read and written, bytes that keeping it keeps (the result, and what
autograd saves inside that was not made before), and whether backward misses it if it is not kept. Then
"keep:up+core" keeps the input and the bytes of these two, and computes again what else is needed: exactly, as
this follows the second pass of recompute.py. `layer_bytes` are of the layer as a whole. Works on fake tensors
at any size too (launch.dryrun). Costs a forward, or two and a backward.
Yuan et al. 2024, USENIX ATC '24, section 3. Differs: they time operators on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from minitrain.memory.segment import Results, storages
from minitrain.ranks.torch_private import storage_id
from minitrain.systems.memory.chain_plan import LayerBytes


class UnitCost(NamedTuple):
    name: str  # of the result
    flops: int
    moved: int  # bytes read and written by its operators
    bytes: int  # kept for backward if the result is
    needed: bool  # if it is not kept, backward computes it again


def account(ledger: Callable, layer: nn.Module, *inputs) -> list[UnitCost]:
    """Of layer(*inputs), whose first input gets a gradient; `ledger()` makes a Ledger. The layer's modules
    compute by names (the hook `result`), which is put back."""
    x, *others = inputs
    frame = _Frame(ledger(), layer, x)
    if not hasattr(layer, "hooks"):
        raise ValueError(f"account: {type(layer).__name__} computes nothing by name; give a block of a model")
    results, door = Results(), layer.hooks.result
    try:
        layer.hooks.result = results
        with frame.ledger, results.inside(frame), saved_tensors_hooks(frame.pack, lambda x: x):
            layer(x.detach().requires_grad_(x.is_floating_point()), *others)
    finally:
        layer.hooks.result = door
    return frame.units()


class _Frame:
    """Follows a forward through its named results."""

    def __init__(self, ledger, layer: nn.Module, x: Tensor):
        self.ledger = ledger
        self.there = set(storages((x, *layer.parameters(), *layer.buffers())))
        self.names: list[str] = []
        self.kept: list[int] = []  # bytes of each
        self.maker: dict[int, int] = {}  # storage -> the unit that keeps it
        self.read: set[int] | None = None  # by the unit that is running
        self.last_needed = -1
        self.alive: list = []  # or the storage of a tensor that is gone would be taken for the next

    def result(self, name: str, compute: Callable, inputs: tuple):
        if self.read is not None:  # inside another
            return compute(*inputs)
        self.names.append(name)
        self.kept.append(0)
        self.read = set(storages(inputs))
        self.alive += inputs
        try:
            with self.ledger.phase(name):
                made = compute(*inputs)
            for x in [made] if isinstance(made, Tensor) else made:
                if storage_id(x.untyped_storage()) not in self.read:
                    self.keep(x)
        finally:
            self.read = None
        return made

    def keep(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage_id(storage) not in self.maker:
            self.maker[storage_id(storage)] = len(self.names) - 1
            self.kept[-1] += storage.nbytes()
            self.alive.append(x)

    def pack(self, x: Tensor) -> Tensor:
        key = storage_id(x.untyped_storage())
        if key not in self.there:
            self.alive.append(x)
            if self.read is not None and key not in self.read:
                self.keep(x)
            # what has no name is made behind the last unit that is over
            unnamed = len(self.names) - 1 - (self.read is not None)
            self.last_needed = max(self.last_needed, self.maker.get(key, unnamed))
        return x

    def units(self) -> list[UnitCost]:
        flops, moved = self.ledger.flops_by_phase, dict.fromkeys(self.names, 0)
        for event in self.ledger.events:
            if getattr(event, "phase", None) in moved and hasattr(event, "flops"):
                moved[event.phase] += event.bytes
        costs = zip(self.names, (flops.get(name, 0) for name in self.names), moved.values(), self.kept)
        return [UnitCost(*cost, number <= self.last_needed) for number, cost in enumerate(costs)]


def layer_bytes(ledger: Callable, layer: nn.Module, x: Tensor, *others, wanted: bool = True) -> LayerBytes:
    """What a forward with and without a graph and a backward of layer(x, *others) allocate. `wanted`: is the
    gradient of x asked for? Afterwards the layer's parameters have no gradients."""
    layer.zero_grad()
    tensors = (x, *others, *layer.parameters(), *layer.buffers())
    x = x.detach().requires_grad_(wanted and x.is_floating_point())
    with ledger() as seen:
        before, start = _now(seen, tensors)
        with torch.no_grad():
            y = layer(x, *others)
        output = seen.live_bytes - before
        forward = _most(seen, start) - before
    del y
    with ledger() as seen:
        before, start = _now(seen, tensors)
        y = layer(x, *others)
        taping = _most(seen, start) - before
        end = get_gradient_edge(y) if y.requires_grad else None
        y = y.detach()
        dy = torch.ones_like(y)
        del y
        tape = seen.live_bytes - before - dy.untyped_storage().nbytes()
        before, start = _now(seen, (dy,))
        if end is not None:
            torch.autograd.backward((end,), (dy,))
        del end
        backward = max(0, _most(seen, start) - before)
        gradient = 0 if x.grad is None else x.grad.untyped_storage().nbytes()
        left = seen.live_bytes - before + tape - gradient
    layer.zero_grad()
    return LayerBytes(output, forward, tape, taping, gradient, backward, left)


def _now(ledger, tensors) -> tuple[int, int]:
    """(live bytes once all of these have been read, the number of events up to here)."""
    for x in tensors:
        if isinstance(x, Tensor):
            x.clone()
    return ledger.live_bytes, len(ledger.events)


def _most(ledger, start: int) -> int:
    """The most that lived behind so many events."""
    return max(sum(live.values()) for event, live in ledger.timeline() if event >= start)
