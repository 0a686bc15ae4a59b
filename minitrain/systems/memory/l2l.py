"""L2L: one layer at a time on the device, all others on the host; layers outside, microbatches inside.

    run = LayerToLayer(layers, loss_fn)            layers: modules x -> y; their parameters move to the host
    loss = run(inputs, targets)                    lists, one tensor a microbatch; .grad on the host

    for layer in 0 .. L-2:      fetch it;  x[u] kept, x[u] = layer(x[u])             for every microbatch u
    for layer in L-1 .. 0:      fetch it;  y = layer(x[u]) again, backward from dy   for every microbatch u
                                its gradient, a sum over microbatches, -> host

A window of one layer (window.py) that all microbatches pass together. Parameters on the device: two layers,
the one at work and the next, however deep the model is; gradients: of one layer, and of one on its way down.
What is kept of activations, the inputs of all layers, is on the device or (`stash="host"`) on the host too.
Sent over the link in a step, for Ψ parameters of L equal layers: up (2 - 2/L) Ψ, for the last two are still
there, and Ψ down, with any number of microbatches. Every layer but the last runs its forward twice; it must
draw no random numbers that differ the second time.
Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory using a New Execution Algorithm,
arXiv:2002.05645, section 3. Differs: the last layer is not run twice; updates are the caller's.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from minitrain.memory.pools import to_device, to_host
from minitrain.systems.memory.in_turn import Kept, of_microbatches
from minitrain.systems.memory.window import LayerWindow, views


class _Stashed(Kept):
    """An input on the host, fetched when it is wanted."""

    def __init__(self, x: Tensor):
        self.device, self.transfer = x.device, to_host(x)

    def settle(self) -> None:
        self.transfer.wait()

    def wait(self) -> Tensor:
        return to_device(self.transfer.wait(), self.device).wait()


STASHES = {"device": Kept, "host": _Stashed}


class LayerToLayer(LayerWindow):
    """`loss_fn(y, target)` is a sum over the rows of a microbatch; the loss is the sum over all."""

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Callable, stash: str = "device"):
        if stash not in STASHES:
            raise ValueError(f"stash={stash!r}; use {' or '.join(STASHES)}")
        super().__init__(layers, window=1)
        self.loss_fn, self.keep = loss_fn, STASHES[stash]

    def __call__(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The loss; gradients are written, not added to."""
        if len(inputs) != len(targets) or not inputs:
            found = f"{len(inputs)} microbatches of inputs and {len(targets)} of targets"
            raise ValueError(f"{found}; give as many of both, at least one")
        for param in (*self.parameters, *(param for params in self._owned.values() for param in params)):
            param.grad = None
        loss_of, come_and_go = lambda y, u: self.loss_fn(y, targets[u]), (self._enter, self._send_gradients)
        loss = of_microbatches(self.layers, inputs, loss_of, *come_and_go, keep=self.keep)
        self._take_gradients()
        self.release()
        for number, params in self._owned.items():
            for param, grad in zip(params, views(self._home[number].grad, params)):
                param.grad = grad
        return loss
