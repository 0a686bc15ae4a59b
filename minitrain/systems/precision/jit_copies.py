"""Copies just in time: only the exact weights stay; a layer's narrow copies are there while it computes.

    forward    W[float32] -> copy[bfloat16]    y = layer(x; copy)    the copies go when the layer is done
    backward   W -> copy, once more, where dx = dy · W asks for it; dW, in bfloat16, is W's gradient

The weights are the masters, and the copy costs 2 bytes for each parameter of one layer: 4 + 2 + 8 = 14 bytes
instead of 16, for a cast in forward and one in backward. The numbers are those of a stored copy, to the bit.
Inside a layer's forward its modules have the copies as attributes, in front of the parameters; what autograd
would save of a copy is exchanged for the parameter it was made of. Sends nothing. ZeRO cuts and gathers
float32 weights, twice a copy's bytes; with stages 1 and 2, which keep weights whole, 4 + 2 + 8/n may be more
than 2 + 2 + 12/n. Ibrahim et al. 2024 (JIT-Q), MLSys, in which memory that computes makes the copies.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.precision.fp8_lm import wide
from minitrain.precision.policies import Policy
from minitrain.ranks.collectives import announce
from minitrain.ranks.torch_private import saved_hooks, storage_id


def copy_in_time(layers: Iterable[nn.Module], policy: Policy) -> None:
    """A pass of `parallelize`: the copies of a precision that has them."""
    if policy.copies:
        dtype = getattr(torch, policy.copies)

        def copy_of(param: nn.Parameter) -> Tensor:
            return (wide(param, param.largest) if policy.scaled else param.detach()).to(dtype)

        make_copies(layers, copy_of)


def make_copies(layers: Iterable[nn.Module], copy_of: Callable[[nn.Parameter], Tensor]) -> None:
    """Every forward of these layers computes with `copy_of(param)`, new memory, in the place of each of their
    parameters. A layer must be called as a module and be done with its parameters when it returns."""
    for layer in layers:
        copies = _Copies(copy_of)
        layer.register_forward_pre_hook(copies.come)
        layer.register_forward_hook(copies.go, prepend=True, always_call=True)


class _Copies:  # of one layer, while it computes: on one thread, or with the halves of a pair on two
    def __init__(self, copy_of: Callable[[nn.Parameter], Tensor]):
        self.copy_of, self.shown = copy_of, defaultdict(list)  # thread -> what takes the copies away again

    def come(self, layer: nn.Module, _) -> None:
        made: dict[int, nn.Parameter] = {}  # the storage of a copy -> what it was made of
        self.shown[get_ident()].append(away := ExitStack())
        for module in layer.modules():
            for name, param in module.named_parameters(recurse=False):
                copy = announce("buffer", _Copy.apply(param, self.copy_of))
                copy.copy_of = param
                made[storage_id(copy.untyped_storage())] = param
                module.__dict__[name] = copy
                away.callback(module.__dict__.pop, name)
        away.enter_context(saved_tensors_hooks(*self.exchanged(made)))

    def go(self, *_) -> None:
        self.shown[get_ident()].pop().close()

    def exchanged(self, made: dict[int, nn.Parameter]) -> tuple[Callable, Callable]:
        pack_other, unpack_other = saved_hooks() or (lambda x: x, lambda x: x)

        def pack(x: Tensor) -> tuple:
            param = made.get(storage_id(x.untyped_storage()))
            if param is None:
                return None, pack_other(x)
            return param, (x.size(), x.stride(), x.storage_offset())

        def unpack(saved: tuple) -> Tensor:
            param, rest = saved
            if param is None:
                return unpack_other(rest)
            return announce("buffer", self.copy_of(param)).as_strided(*rest)

        return pack, unpack


class _Copy(torch.autograd.Function):
    """The parameter's gradient is the copy's, in the copy's dtype (`param.grad_dtype`)."""

    @staticmethod
    def forward(ctx, param: nn.Parameter, copy_of: Callable) -> Tensor:
        ctx.set_materialize_grads(False)  # of a product put off (pipeline/deferred.py) there is none yet
        return copy_of(param)

    @staticmethod
    def backward(ctx, dcopy: Tensor | None):
        return dcopy, None
