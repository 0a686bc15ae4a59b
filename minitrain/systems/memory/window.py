"""Layer by layer: a few layers on the device, all others on the host, and so are gradients and states.

    forward     x0 -> x1 -> ... -> xL                  without a graph; the inputs are stashed
    backward    layer L, with the loss; ... layer 1    each runs again from its input; its graph goes with it

All microbatches pass a layer before the next one is asked for. Layers must do the same twice: dropout by
place, not by torch's stream. For L layers of P/L parameters in n bytes:

    LayerWindow     STRONGHOLD: while layer i computes, the next m are here or coming; copied on the device
                    n·P/L·(m + 1) parameters, 2·n·P/L gradients; to device n·P/L·(2·L - m - 1), to host n·P
    LayerToLayer    L2L: m = 1, the same bytes for any number of microbatches; inputs wait where `stash` says

How large must m be? See plan/offload.py. Chen et al. 2016, arXiv:1604.06174, section 3. Sun et al. 2022,
STRONGHOLD, SC22, section III. Pudipeddi et al. 2020, L2L, arXiv:2002.05645, section 3. Differs: one optimizer
may step when all gradients are there (so they can be clipped); the last layer runs once.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from minitrain.data_parallel.buckets import views
from minitrain.memory.pools import Transfer, new_host, to_device, to_host, work
from minitrain.ranks.checks import MOST, require_ints, require_one_of


class Prefetch:
    """What is used in a known order waits where there is room, and is fetched before it is needed.

    `value = engine.use(chunk)` is valid until the next `use`. `order` names the chunk of every use of one
    pass, and passes repeat (`circular`). `fetch` begins to bring one and returns something with `wait()`;
    `evict(chunk, that)` takes it back. A use that finds its chunk neither here nor on its way is late. After
    it the chunks of the next `ahead` uses are fetched as long as there is room, or a chunk that is used later
    than they are to make room: by "belady" the one used again latest (the fewest fetches there can be, for
    chunks of one size), by "lru" the one not used for longest. With one chunk ahead the room must hold two.
    Belady 1966, IBM Systems Journal 5(2), section on MIN."""

    def __init__(self, order, sizes, room_bytes, fetch, evict, *, ahead=1, policy="belady", circular=True):
        require_one_of(("belady", "lru"), policy=policy)
        require_ints(0, MOST, ahead=ahead)
        if not order or not set(order) <= sizes.keys():
            raise ValueError("give the order in which chunks of known size are used in one pass")
        if (largest := max(sizes[chunk] for chunk in order)) > room_bytes:
            raise ValueError(f"a chunk has {largest:,} bytes, room is {room_bytes:,}; give more room")
        self.order, self.sizes, self.room_bytes, self.policy = list(order), sizes, room_bytes, policy
        self.ahead, self.circular = ahead, circular
        self._fetch, self._evict = fetch, evict
        self._uses: dict[Hashable, list[int]] = defaultdict(list)
        for position, chunk in enumerate(self.order):
            self._uses[chunk].append(position)
        self._here: dict[Hashable, Any] = {}  # chunk -> what fetch returned; least recently used first
        self._position = 0  # of the next use, in the order
        self.fetched = self.late = 0  # chunks, uses

    def use(self, chunk: Hashable) -> Any:
        """What `fetch(chunk).wait()` gives. Uses must come in the order given."""
        if chunk != (wanted := self.order[self._position]):
            raise ValueError(f"use of {chunk!r}, and {wanted!r} is next; give the order as it is used")
        if chunk not in self._here:
            self.late += 1
            self._bring(chunk, set())
        transfer = self._here[chunk] = self._here.pop(chunk)  # now the most recently used
        value = transfer.wait()
        self._look_ahead(chunk)
        self._position = (self._position + 1) % len(self.order)
        return value

    def clear(self) -> None:
        """Give back everything; the next use is the first of a pass."""
        for chunk in list(self._here):
            self._evict(chunk, self._here.pop(chunk))
        self._position = 0

    def next_use(self, chunk: Hashable, after: int) -> float:
        """Position of the first use of a chunk behind `after`, counted on into the next pass."""
        uses = self._uses[chunk]
        index = bisect_right(uses, after)
        if index < len(uses):
            return uses[index]
        return uses[0] + len(self.order) if self.circular else inf

    def _look_ahead(self, current: Hashable) -> None:
        keep = {current}  # and what is used before the chunk that is to come
        for position in range(self._position + 1, self._position + 1 + self.ahead):
            if position >= len(self.order) and not self.circular:
                return
            chunk = self.order[position % len(self.order)]
            if chunk not in self._here and not self._bring(chunk, keep):
                return
            keep.add(chunk)

    def _bring(self, chunk: Hashable, keep: set) -> bool:
        """Fetch it, in the room of others but of none in `keep`: rather nothing at all, and False."""
        size = self.sizes[chunk]
        free, victims = self.room_bytes - sum(map(self.sizes.get, self._here)), []
        candidates = [other for other in self._here if other not in keep]
        if self.policy == "belady":
            candidates.sort(key=lambda other: self.next_use(other, self._position), reverse=True)
        for other in candidates:
            if free >= size:
                break
            victims.append(other)
            free += self.sizes[other]
        if free < size:
            return False
        for other in victims:
            self._evict(other, self._here.pop(other))
        self._here[chunk] = self._fetch(chunk)
        self.fetched += 1
        return True


# ---- layers


def order_of_use(count: int) -> list[int]:
    """Which layer is asked for, step by step, by `forward_backward`: the last one once."""
    return [*range(count - 1), *reversed(range(count))]


def forward_backward(
    layers, x, loss_of, before=lambda number: None, after=lambda number: None, others=(), on_host=False
) -> Tensor:
    """The sum of loss_of(layers(x[u]), u) over microbatches u; gradients are where its backward leaves them.

    `before(i)` brings layer i's parameters, `after(i)` may take them and their gradients away; `others` are
    given to every layer. With `on_host` inputs of layers wait there for their backward."""
    inputs: list[list] = []  # of each layer: a tensor, or what brings it to the host, per microbatch
    x, last, device = list(x), len(layers) - 1, x[0].device
    with torch.no_grad():
        for number in range(last):
            before(number)
            for leaving in inputs[-1] if on_host and inputs else ():
                leaving.wait()  # the device has its memory back
            inputs.append([to_host(part) for part in x] if on_host else x)
            x = [layers[number](part, *others) for part in x]
    inputs.append(x)
    total, gradients = 0, [None] * len(x)
    for number in reversed(range(len(layers))):
        before(number)
        waiting = inputs.pop()
        for u in range(len(waiting)):
            x, waiting[u] = waiting[u], None
            x = to_device(x.wait(), device).wait() if isinstance(x, Transfer) else x.detach()
            x.requires_grad_(number > 0 and x.is_floating_point())
            y = layers[number](x, *others)
            if number == last:
                y = loss_of(y, u)
                total = total + y.detach()
            if y.requires_grad:
                y.backward(gradients[u])
            gradients[u] = x.grad
            del x, y
        after(number)
    return total


class LayerWindow:
    """Takes the parameters of `layers`, which are to be used through this only:

        window = LayerWindow(model.layers, window=2)
        optimizer = AdamW(window.parameters)              one flat parameter a layer, on the host
        loss = window.forward_backward(tokens, positions, loss_of)

    ValueError: parameters that are shared, frozen or of several dtypes, a window of all layers."""

    def __init__(self, layers: Sequence[nn.Module], window: int, device: torch.device | str | None = None):
        self.layers, most = list(layers), max(1, len(layers) - 1)
        if not 1 <= window <= most:
            raise ValueError(f"window={window} of {len(self.layers)} layers: use 1 to {most}")
        params = parameters_of(self.layers)
        if len({param.dtype for param in params}) != 1:
            raise ValueError("parameters have several dtypes: use one, a layer is one block of memory")
        self.device = device or params[0].device
        of_layers = enumerate(list(layer.parameters()) for layer in self.layers)
        self._params = {number: params for number, params in of_layers if params}
        sizes = {number: sum(param.nbytes for param in params) for number, params in self._params.items()}
        runs = [range(first, first + window + 1) for first in range(max(1, len(self.layers) - window))]
        self.room_bytes = max(sum(sizes.get(number, 0) for number in run) for run in runs)
        self._home = {number: nn.Parameter(sent_home(params)) for number, params in self._params.items()}
        self._here: dict[int, Tensor] = {}  # layers on the device, that have been used there
        self._going: list[tuple[nn.Parameter, Tensor, list[Transfer]]] = []  # gradients on their way
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
        self._updates: list[Future] = []  # of layers, under way
        for number in self._params:
            self._leave(number)
        order = [number for number in order_of_use(len(self.layers)) if number in sizes]
        fetch = lambda number: to_device(self._home[number], self.device)
        settings = dict(ahead=window, circular=False)
        self._engine = Prefetch(order, sizes, self.room_bytes, fetch, self._leave, **settings)

    parameters = property(lambda self: list(self._home.values()))  # the host's, for an optimizer

    def update_on_host(self, make_optimizer: Callable) -> None:
        """From now on the host updates each layer by an optimizer of its own, beside the backward of those in
        front of it; gradients are gone then."""
        self._optimizers = {home: make_optimizer([home]) for home in self.parameters}

    def forward_backward(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions); gradients are added to those of `parameters`."""
        for number in self._here:  # what is still here has been updated since, at home
            to_device(self._home[number], out=self._here[number]).wait()
        return self._pass([x], lambda y, u: loss_of(y), (positions,))

    def _pass(self, x, loss_of: Callable, others: tuple = (), on_host: bool = False) -> Tensor:
        loss = forward_backward(self.layers, x, loss_of, self._enter, self._send_gradients, others, on_host)
        self._add_gradients()
        while self._updates:
            self._updates.pop().result()
        return loss

    def _enter(self, number: int) -> None:
        if number in self._params:
            copy = self._engine.use(number)
            if number not in self._here:
                self._here[number] = copy
                lie_in(copy, self._params[number])

    def _leave(self, number: int, transfer: Transfer | None = None) -> None:
        self._here.pop(number, None)
        lie_in(self._home[number], self._params[number])

    def _send_gradients(self, number: int) -> None:
        self._add_gradients()  # those of the layer behind it
        if number in self._params:
            home, params = self._home[number], self._params[number]
            grad = new_host(home.shape, home.dtype, home.is_pinned(), "gradients")
            copies = [to_host(param.grad, out=place) for param, place in zip(params, views(grad, params))]
            self._going.append((home, grad, copies))
            for param in params:
                param.grad = None

    def _add_gradients(self) -> None:
        for home, grad, copies in self._going:
            for copy in copies:
                copy.wait()
            home.grad = grad if home.grad is None else home.grad.add_(grad)
            if optimizer := self._optimizers.get(home):
                self._updates.append(work(lambda of=optimizer: (of.step(), of.zero_grad()), home))
        self._going.clear()


class LayerToLayer(LayerWindow):
    """run(inputs, targets): lists, one tensor a microbatch -> the loss; sets .grad of host parameters, or
    updates them. `loss_fn(y, target)` is a sum over the rows of a microbatch, the loss one over all."""

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Callable, stash: str = "device"):
        require_one_of(("device", "host"), stash=stash)
        super().__init__(layers, window=1)
        self.loss_fn, self.on_host = loss_fn, stash == "host"

    def __call__(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        if len(inputs) != len(targets) or not inputs:
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; give as many of both, some")
        for param in (*self.parameters, *(param for params in self._params.values() for param in params)):
            param.grad = None
        loss = self._pass(inputs, lambda y, u: self.loss_fn(y, targets[u]), on_host=self.on_host)
        self._engine.clear()
        for number, params in self._params.items():
            grad = self._home[number].grad  # none if the host has made its update
            for param, place in zip(params, views(grad, params) if grad is not None else ()):
                param.grad = place
        return loss


# ---- parameters in blocks of memory ------------------------------------------------------------------------


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Of all layers, each of one layer alone, all trained. ValueError: what there is else."""
    params = [param for layer in layers for param in layer.parameters()]
    if not params:
        raise ValueError("these layers have no parameters: give at least one that has some")
    if len(set(params)) < len(params):
        raise ValueError("two layers share a parameter (a tied table): untie it, or keep both outside")
    if any(not param.requires_grad for param in params):
        raise ValueError("a parameter is frozen: keep its layer outside, or train all")
    return params


def sent_home(params: Sequence[Tensor], size: int = 0) -> Tensor:
    """A copy of them on the host, in one block, of `size` elements if it is to have more than they have."""
    size, some = size or sum(param.numel() for param in params), params[0]
    home = new_host((size,), some.dtype, some.is_cuda, "parameters").zero_()
    for param, place in zip(params, views(home, params)):
        to_host(param, out=place).wait()
    return home


def lie_in(block: Tensor, params: Sequence[nn.Parameter]) -> None:
    for param, place in zip(params, views(block.detach(), params)):
        param.data = place
