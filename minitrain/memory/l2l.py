"""L2L: one layer at a time on the device, all others on the host; layers outside, microbatches inside.

    run = LayerToLayer(layers, loss_fn)            layers: modules x -> y; their parameters move to the host
    loss = run(inputs, targets)                    lists, one tensor a microbatch; .grad on the host

    for layer in 0 .. L-2:      fetch it;  x[u] kept, x[u] = layer(x[u])             for every microbatch u
    for layer in L-1 .. 0:      fetch it;  y = layer(x[u]) again, backward from dy   for every microbatch u
                                its gradient, a sum over microbatches, -> host

Parameters on the device: two layers, the one at work and the next, however deep the model is; a gradient of
one layer, and one on its way down. What is kept of activations, the inputs of all layers, is on the device or
(`stash="host"`) on the host too. Sent over the link in a step, for Ψ parameters of L equal layers: up
(2 - 2/L) Ψ, for the last two are still there, and Ψ down, with any number of microbatches. Every layer but
the last runs its forward twice; it must draw no random numbers that differ the second time.
Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory using a New Execution Algorithm,
arXiv:2002.05645, section 3. Differs: the last layer is not run twice; updates are the caller's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minitrain import collectives
from minitrain.memory.pools import Transfer, new_host, to_device, to_host
from minitrain.memory.prefetch import Prefetch

STASHES = ("device", "host")


class _Layer:
    """A module whose parameters are views of one flat tensor of the host, and so are their gradients."""

    def __init__(self, module: nn.Module):
        self.module, params = module, dict(module.named_parameters())
        if not params:
            kind = type(module).__name__
            raise ValueError(f"layer {kind} has no parameters; put it into the layer before it")
        if len({(param.dtype, param.device) for param in params.values()}) > 1:
            raise ValueError(f"layer {type(module).__name__} has parameters of several dtypes or devices")
        self.names, self.shapes = list(params), [param.shape for param in params.values()]
        self.sizes = [param.numel() for param in params.values()]
        some = next(iter(params.values()))
        self.device = some.device
        self.flat = new_host((sum(self.sizes),), some.dtype, some.is_cuda, "parameters")
        self.grad = new_host((sum(self.sizes),), some.dtype, some.is_cuda, "gradients")
        to_host(torch.cat([param.detach().view(-1) for param in params.values()]), out=self.flat).wait()
        for param, data, grad in zip(params.values(), self._parts(self.flat), self._parts(self.grad)):
            param.data, param.grad = data, grad

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes)]

    def __call__(self, flat: Tensor, x: Tensor) -> Tensor:
        """With the parameters in `flat`, on the device."""
        return functional_call(self.module, dict(zip(self.names, self._parts(flat))), (x,))


class LayerToLayer:
    """`loss_fn(y, target)` is a sum over the rows of a microbatch; the loss is the sum over all."""

    def __init__(
        self, layers: Sequence[nn.Module], loss_fn: Callable[[Tensor, Tensor], Tensor], stash: str = "device"
    ):
        if stash not in STASHES:
            raise ValueError(f"stash={stash!r}; use {' or '.join(STASHES)}")
        if not layers:
            raise ValueError("no layers; give at least one module with parameters")
        self.layers, self.loss_fn, self.stash = [_Layer(layer) for layer in layers], loss_fn, stash
        numbers = range(len(self.layers))
        sizes = {number: self.layers[number].flat.nbytes for number in numbers}
        order = [*numbers, *reversed(numbers[:-1])]
        room = max(sizes.values()) if len(sizes) == 1 else sum(sorted(sizes.values())[-2:])
        self.fetches = Prefetch(order, sizes, room, self._fetch, lambda number, transfer: None)

    def _fetch(self, number: int) -> Transfer:
        layer = self.layers[number]
        out = torch.empty(layer.flat.shape, dtype=layer.flat.dtype, device=layer.device)
        return to_device(layer.flat, out=collectives.announce_buffer(out))

    def __call__(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The loss; gradients are written, not added to."""
        if len(inputs) != len(targets) or not inputs:
            found = f"{len(inputs)} microbatches of inputs and {len(targets)} of targets"
            raise ValueError(f"{found}; give as many of both, at least one")
        last, x, kept = len(self.layers) - 1, list(inputs), []
        with torch.no_grad():
            for number, layer in enumerate(self.layers[:-1]):
                flat = self.fetches.use(number)
                for before in kept[-1] if kept else ():
                    before.settle()
                kept.append([self._put_away(part) for part in x])
                x = [layer(flat, part) for part in x]
                del flat  # or there would be three
        kept.append([_There(part) for part in x])
        del x
        loss, grads, going = 0, [None] * len(inputs), []
        for number in range(last, -1, -1):
            leaf = self.fetches.use(number).detach().requires_grad_()
            inputs_here = kept.pop()
            for u in range(len(targets)):
                x, inputs_here[u] = inputs_here[u].wait().detach(), None
                x.requires_grad_(number > 0)
                y = self.layers[number](leaf, x)
                if number == last:
                    y = self.loss_fn(y, targets[u])
                    loss = loss + y.detach()
                y.backward(grads[u])
                grads[u] = x.grad
            for transfer in going:
                transfer.wait()
            grad = collectives.announce_gradient(leaf.grad)
            going = [to_host(grad, out=self.layers[number].grad)]
            del leaf, grad, x, y
        for transfer in going:
            transfer.wait()
        self.fetches.clear()
        return loss

    def _put_away(self, x: Tensor):
        return _Stashed(x) if self.stash == "host" else _There(x)


class _There:
    """An input that stays where it is."""

    def __init__(self, x: Tensor):
        self.x = x

    def settle(self) -> None:
        """Nothing is on its way."""

    def wait(self) -> Tensor:
        return self.x


class _Stashed:
    """An input on the host, fetched when it is wanted."""

    def __init__(self, x: Tensor):
        self.device, self.transfer = x.device, to_host(x)

    def settle(self) -> None:
        """The device has its memory back."""
        self.transfer.wait()

    def wait(self) -> Tensor:
        return to_device(self.transfer.wait(), self.device).wait()
