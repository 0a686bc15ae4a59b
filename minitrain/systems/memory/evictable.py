"""A tensor whose numbers may be dropped, because it knows the operator that makes them again.

    Evictable -> Hold -> Value -> block           the program's tensor; its name; the tensor; its memory
                         Value.taken -> Call      of a view: the operator that takes it of other values
    block.made_by -> work -> Call -> Values       of other results: what must run again, and what that reads

An `Evictable` has a shape and no memory, and autograd saves it as any tensor. The numbers lie in
`block.data`, which the evictor empties (eviction.py). A call keeps what it read, so that it can run
again with the same numbers, from the same state of the random generator (5 kB on the host, 16 bytes of
CUDA's). With its last Evictable a block is released; values stay as long as a call needs them.

Kirisame et al. 2021, arXiv:2006.09616, section 4: tensors, storages and views. Differs: a subclass in Python.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from minitrain.ranks import torch_private
from minitrain.ranks.random_state import drawing_from, random_state
from minitrain.ranks.torch_private import OpOverload, version_of


class Evictable(Tensor):
    """A tensor with the shape of its value and no memory; operators on it go to `run(func, args, kwargs)`."""

    __torch_function__ = torch_private.plain_torch_functions

    @staticmethod
    def __new__(cls, value: "Value", run: Callable):
        like = value.like
        layout = dict(strides=like.stride(), storage_offset=like.storage_offset())
        return torch_private.wrapper_tensor(cls, like.shape, dtype=like.dtype, device=like.device, **layout)

    def __init__(self, value: "Value", run: Callable):
        self.hold, self.run = Hold(value), run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = (x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, Evictable))
        return next(found).run(func, args, kwargs or {})

    def __repr__(self, **settings):
        state = "resident" if self.hold.value.block.resident else "evicted"
        return f"Evictable({list(self.shape)}, {self.dtype}, {state})"


class Value:
    """One tensor on a block: output `key` of the operator that makes the block, or a view, `taken` of others.

    `like` has its shape and no numbers."""

    __slots__ = ("block", "like", "key", "taken")

    def __init__(self, block, like: Tensor, key: object, taken: "tuple[Call, int] | None" = None):
        self.block, self.like, self.key, self.taken = block, like, key, taken

    def real(self) -> Tensor:
        """The numbers; its block is resident. Views of views are taken in a loop: there may be many."""
        held, wanted = self.block.data, [self]
        while wanted[-1].key not in held:
            wanted.append(wanted[-1].taken[0].values[0])
        for value in reversed(wanted[:-1]):
            call, index = value.taken
            held[value.key] = tensors(call.run())[index]
        return held[self.key]


class Hold:
    """The program's hold on a value; it ends with the tensor that has it."""

    def __init__(self, value: Value):
        self.value = value

    def __del__(self):
        self.value.block.evictor.release(self.value.block)


class Call:
    """An operator with its arguments, values in the place of tensors that may be dropped.

    `copied`: the position of an argument; the operator writes into a copy of it, which is then the result."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict):
        self.func, self.copied = func, None
        named = lambda x: x.hold.value if isinstance(x, Evictable) else x
        self.args, self.kwargs = torch_private.tree_map(named, (args, kwargs))
        leaves = torch_private.tree_leaves((self.args, self.kwargs))
        self.values = [leaf for leaf in leaves if isinstance(leaf, Value)]
        self.plain = tensors(leaves)
        self._versions = [version_of(tensor) for tensor in self.plain]
        self._state: tuple[Tensor, ...] | None = None

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__

    def run(self):
        """The operator's result, from the numbers and random state of the first time."""
        if self._versions != [version_of(tensor) for tensor in self.plain]:
            cure = "write to it when no result that may be made again depends on it"
            raise ValueError(f"{self.name} cannot run again: a constant it reads was written to; {cure}")
        args, kwargs = self.arguments(Value.real)
        with self._drawing():
            return self.on(args, kwargs)

    def arguments(self, numbers: Callable, plain: Callable = lambda tensor: tensor) -> tuple[list, dict]:
        """With `numbers` of values, and `plain` of tensors from outside."""

        def argument(x):
            return numbers(x) if isinstance(x, Value) else plain(x) if isinstance(x, Tensor) else x

        args, kwargs = torch_private.tree_map(argument, (list(self.args), self.kwargs))
        return args, kwargs

    def on(self, args: list, kwargs: dict):
        if self.copied is None:
            return self.func(*args, **kwargs)
        args = list(args)
        args[self.copied] = args[self.copied].clone()
        self.func(*args, **kwargs)
        return args[self.copied]

    def _drawing(self):
        """A random operator starts from the same state each time; draws of others do not change by it."""
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return nullcontext()
        devices = [value.like.device for value in self.values] + [tensor.device for tensor in self.plain]
        device = devices[0] if devices else torch.device(self.kwargs.get("device") or "cpu")
        source = self.kwargs.get("generator") or device
        if self._state is not None:
            return drawing_from(self._state, source)
        self._state = random_state(source)
        return nullcontext()


def tensors(nest) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and dicts, in order."""
    return [leaf for leaf in torch_private.tree_leaves(nest) if isinstance(leaf, Tensor)]
