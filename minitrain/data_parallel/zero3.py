"""ZeRO stage 3, fully sharded data parallelism: stage 2, and parameters are whole only while a layer needs them.

    forward    all_gather(W shard) -> W    y = layer(x)    free W                      the next layer's W is on its way
    backward   all_gather(W shard) -> W    dx, dW          free W    reduce_scatter(dW) -> grad shard[P/n]
    step       optimizer.step() on the shards, and nothing to gather: the next forward does

The unit of gathering is a module (of `units`). By default the model is opened, and in it every module that has a ModuleList,
ModuleDict or Sequential or is one; a unit is each member of a list and each child beside, if it has parameters.
A unit inside another keeps its own parameters, what no unit has belongs to the model itself. A rank holds its shards, 16/n
bytes a parameter with Adam in mixed precision, and beside them one unit whole, two with prefetch. A parameter that several
units share (a tied table) is gathered for each of them in forward and stays whole in backward until its last use.

A gathered buffer keeps its address in life: freeing it shrinks its storage to nothing, gathering grows it again. So the
views of a weight that autograd saved in forward find the data again in backward. Between times a parameter reads as NaN, so
a unit must be called as a module, and nobody else may read its parameters.

Sends 3 (n-1)/n of the parameters a step (two gathers, one reduce-scatter); with `reshard=False` parameters stay whole from
forward to backward, and it is 2 (n-1)/n. Under recomputation the layers of backward are gathered once, as without.
Accumulation: as in zero2.py, and every microbatch gathers anew. Whoever has memory for it sets `reshard=False`. In a pipeline units
are gathered and freed in each action of their stage, and a stage's gradients are scattered when its backward (or W) is done.
Raises ValueError for units without parameters and other values of `accumulate`, in backward for a unit whose parameters were
used and which was never called, in `finish()` for missing gradients, and what flat.py refuses.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3 and 7.2.2 (P_os+g+p); Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.1 and 3.3 (units, prefetch). Differs: SUM instead of mean; the last unit is freed after
forward like all others; the order of prefetch is the order of the last forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.collectives import Handle
from minitrain.data_parallel.flat import Flat, Shards
from minitrain.data_parallel.sync import MakeOptimizer, built, check_trainable, parts_of, sums_alike, together
from minitrain.data_parallel.units import Unit, Way, assign, elements
from minitrain.data_parallel.zero2 import check_accumulate
from minitrain.torch_private import in_backward, tree_leaves


class Gathered(Flat):
    """A flat buffer that comes and goes: the whole of it is there between `gather` and `free`."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        super().__init__(params, *groups)
        self.whole = self.pack(params)
        self.places = self.views(self.whole)
        self.divide()
        self.handle: Handle | None = None
        self.grads: Tensor | None = None  # of the whole, while they come in
        self.sum: Tensor | None = None  # of what came back, over the microbatches
        self.arrived = 0
        self.free()

    def divide(self) -> None:
        """The shard gets memory of its own."""
        self.cut(self.own(self.whole).clone())

    @property
    def is_whole(self) -> bool:
        return self.whole.untyped_storage().nbytes() > 0

    def start(self, gather) -> None:
        """Set the gather in motion, unless the whole is there or on its way."""
        if not self.is_whole:
            self._resize(self.numel)
            self.handle = gather(self)

    def wait(self) -> None:
        """The parameters are whole."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        for param, place in zip(self.params, self.places):
            param.data = place

    def free(self) -> None:
        if self.handle is not None:  # gathered for nothing
            self.handle.wait()
            self.handle = None
        for param in self.params:
            param.data = param.new_full((), float("nan")).expand(param.shape)
        self._resize(0)

    def _resize(self, numel: int) -> None:
        self.whole.untyped_storage().resize_(numel * self.whole.element_size())
        collectives.announce_resized(self.whole)


class Zero3(Shards):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 3

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        make_optimizer: MakeOptimizer,
        units: Iterable[nn.Module] | None = None,
        *,
        reshard: bool = True,
        prefetch: bool = True,
        accumulate: str = "scatter",
    ):
        check_accumulate(accumulate)
        self.keep, self.reshard, self.prefetch = accumulate == "keep", reshard, prefetch
        self.group = group
        parts = parts_of(model)
        names = check_trainable(together(parts), model)
        optimizer, early, group_of = built(make_optimizer, names)
        self.units = assign(
            model,
            list(elements(model) if units is None else units),
            self.make_flat,
            dict(sums_alike(parts, self.levels(), group_of)),
        )
        self.called: set[Unit] = set()  # in this step
        flats = list(dict.fromkeys(flat for unit in self.units for flat in unit.flats))
        super().__init__(names, flats, optimizer, early, group_of)
        self.flat_of = {param: flat for flat in flats for param in flat.params}
        self._in_flight: tuple[Gathered, Handle] | None = None
        for part in parts:
            units = [
                unit
                for unit in self.units
                if unit.way is None and any(param in part for flat in unit.flats for param in flat.params)
            ]
            way = Way(units)
            for unit in units:
                unit.way = way
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        for flat in flats:
            for param in flat.params:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(partial(self._on_grad, flat))

    # ---- how parameters are cut and bytes travel: what hybrid sharding and ZeRO++ replace ------------------------------

    def levels(self) -> tuple[ProcessGroup, ...]:
        """The groups, one inside the other, over whose ranks a gradient is a sum; a parameter's placement may name others."""
        return (self.group,)

    def make_flat(self, params: list[nn.Parameter], groups: tuple[ProcessGroup, ...]) -> Gathered:
        return Gathered(params, *groups)

    def gather(self, flat: Gathered) -> Handle:
        """Start to fill flat.whole from everyone's shards."""
        return collectives.all_gather(flat.shard.detach(), flat.groups[0], out=flat.whole, async_op=True)

    def scatter(self, flat: Gathered, grads: Tensor) -> Handle:
        """Start to add up everyone's whole gradient; the result is this rank's slice."""
        return collectives.reduce_scatter(grads, flat.groups[0], async_op=True)

    def complete(self, flat: Gathered) -> Tensor:
        """The shard's gradient from the sum of what came back: here it is that."""
        return flat.sum

    # ---- forward and backward ------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        way = unit.way
        if not in_backward():  # else a recomputation: what it needs is whole
            if unit in way.seen or way.done:  # a new pass
                way.seen, way.done = [], set()
            way.seen.append(unit)
            self.called.add(unit)
            if len(way.seen) == len(way.order):
                way.order = list(way.seen)
            inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if inputs and (self.driven or any(not flat.shard.requires_grad for flat in unit.flats)):
                left = [None] * len(inputs)
                for leaf in inputs:
                    leaf.register_hook(lambda grad: self._after_backward(unit, left))
        self._make_whole(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output) -> None:
        if in_backward():
            return
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for result in results:  # a node's hooks come after those of its tensor: the unit behind is freed before the next is gathered
            (result.register_hook if result.is_leaf else result.grad_fn.register_prehook)(
                lambda grads: self._before_backward(unit)
            )
        if self.reshard or not results:
            for flat in unit.flats:
                flat.free()

    def _before_backward(self, unit: Unit) -> None:
        if unit in unit.way.done:  # of another microbatch, with no forward between
            unit.way.done.clear()
        unit.way.done.add(unit)
        self._make_whole(unit)

    def _make_whole(self, unit: Unit) -> None:
        """Gather what the unit needs, and start on its neighbour."""
        for flat in unit.flats:
            flat.start(self.gather)
        for flat in unit.flats:
            flat.wait()
        order = unit.way.order
        position = order.index(unit) + (-1 if in_backward() else 1)
        if self.prefetch and 0 <= position < len(order) and order[position] not in unit.way.done:
            for flat in order[position].flats:
                flat.start(self.gather)

    def _on_grad(self, flat: Gathered, param: nn.Parameter) -> None:
        """A parameter's gradient is complete for this backward. With the last of a buffer, its part of the step is over."""
        if param.grad is None:  # W makes it
            return
        if flat.grads is None:
            self._check_called(flat)
            flat.grads = collectives.announce_buffer(param.new_zeros(flat.numel))
        place = next(place for known, place in zip(flat.params, flat.views(flat.grads)) if known is param)
        place.add_(param.grad)
        param.grad = None
        if self.driven:
            return
        flat.arrived += 1
        if flat.arrived == len(flat.params):
            flat.arrived = 0
            flat.free()  # every operator that used these parameters has been differentiated
            if self.enabled or not self.keep:
                self._send(flat)

    def arrived(self, params: Iterable[nn.Parameter]) -> None:
        """Told by a pipeline: free the stage, send what it has found."""
        for flat in dict.fromkeys(self.flat_of[param] for param in reversed(list(params))):
            for param in flat.params:
                if param.grad is not None:  # made by W, which no hook sees
                    self._on_grad(flat, param)
            flat.free()
            if flat.grads is not None and not self.keep:
                self._send(flat)

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        for flat in dict.fromkeys(self.flat_of[param] for param in params):
            if flat.grads is not None:
                self._send(flat)

    def lives(self) -> list[Tensor]:
        return [flat.whole for flat in self.flats]

    def _send(self, flat: Gathered) -> None:
        """Scatter a buffer of gradients in the background; one at a time is under way."""
        self._settle()
        grads, flat.grads = flat.grads, None
        self._in_flight = flat, self.scatter(flat, grads)

    def _check_called(self, flat: Gathered) -> None:
        users = [unit for unit in self.units if flat in unit.flats]
        if not self.called.intersection(users):
            raise ValueError(
                f"unit {type(users[0].module).__name__} of {self.names[flat.params[0]]} never ran forward, yet its "
                f"parameters were used, which read as NaN; call it as a module, or give units=[...] without it, so that "
                f"the module around it gathers them"
            )

    def _after_backward(self, unit: Unit, left: list) -> None:
        """The gradient of one of a unit's inputs is there; with the last of them the unit is done: for what is frozen nothing else says
        so, and in a pipeline W may come much later."""
        left.pop()
        if left:
            return
        for flat in unit.flats:
            if self.driven or not flat.shard.requires_grad:
                flat.free()

    def _settle(self) -> None:
        """Wait for the gradients in flight and add what came to the shard's."""
        if self._in_flight is not None:
            (flat, handle), self._in_flight = self._in_flight, None
            mine = handle.wait()
            flat.sum = mine if flat.sum is None else flat.sum.add_(mine)

    def finish(self) -> None:
        """Every shard has its gradient, summed over the group and over the microbatches; nothing is whole any more."""
        self._settle()
        self.called.clear()
        for flat in self.flats:
            flat.free()
        trainable = [flat for flat in self.flats if flat.shard.requires_grad]
        missing = [flat for flat in trainable if flat.sum is None or flat.arrived or flat.grads is not None]
        if missing:
            raise self.missing(param for flat in missing for param in flat.params)
        for flat in trainable:
            flat.shard.grad, flat.sum = self.complete(flat), None
            self.add_copies(flat)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model's parameters can be read: `with zero.whole(): print(model.head.weight)`."""
        for flat in self.flats:
            flat.start(self.gather)
            flat.wait()
        try:
            yield
        finally:
            for flat in self.flats:
                flat.free()
