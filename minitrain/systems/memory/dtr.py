"""Dynamic tensor rematerialization: tensors that may be dropped at any moment, and make themselves again.

    evictor = Evictor(limit_bytes=2_000_000, rule="dtr")            systems/simulate/eviction.py: who goes
    with Dynamic(evictor, operator_cost, model.parameters()):       ranks/ledger/operators.py: FLOPs and bytes
        loss_of(model(tokens), targets).backward()

Inside, every result of an operator is an `Evictable`: a tensor with a shape and no memory, whose numbers lie
in a block that the evictor may empty. An operator that reads it runs what made it again, from the same state
of the random generator. All tensor memory counts towards the limit; parameters, inputs and finished gradients
are never dropped. No plan, no look ahead: any Python will do.

    Evictable -> Handle -> Value -> block         the program's tensor; its name; the tensor; its memory
                           Value.source -> Call   of a view: the operator that makes it of other values
    block.made_by -> work -> Call -> Values       of other results: what must run again, and what that reads

In place, x.add_(y) works on a copy, and is refused while a view is alive, as is a size that is in the data
(nonzero). Not counted: scratch in a kernel, 5 kB on the host a random operator. The optimizer steps behind.
Kirisame et al. 2021, arXiv:2006.09616, sections 2, 4 and 5. Differs: a tensor subclass above the allocator.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.ranks import torch_private
from minitrain.ranks.random_state import drawing_from, random_state
from minitrain.ranks.torch_private import OpOverload, schema_of, storage_id, version_of


class Evictable(Tensor):
    """A tensor with the shape of its value and no memory; operators on it go to `run(func, args, kwargs)`."""

    __torch_function__ = torch_private.plain_torch_functions

    @staticmethod
    def __new__(cls, value: "Value", run: Callable):
        like = value.like
        layout = dict(strides=like.stride(), storage_offset=like.storage_offset())
        return torch_private.wrapper_tensor(cls, like.shape, dtype=like.dtype, device=like.device, **layout)

    def __init__(self, value: "Value", run: Callable):
        self.handle, self.run = Handle(value), run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = (x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, Evictable))
        return next(found).run(func, args, kwargs or {})

    def __repr__(self, **settings):
        return f"Evictable({list(self.shape)}, {self.dtype})"


class Value:
    """One tensor on a block: output `key` of the operator that makes the block, or a view, made by a
    `source`: a call, and which result of it. `like` has its shape and no numbers."""

    def __init__(self, block, like: Tensor, key: object, source: "tuple[Call, int] | None" = None):
        self.block, self.like, self.key, self.source = block, like, key, source

    def real(self) -> Tensor:
        """The numbers; its block is resident. Views of views in a loop: there may be many."""
        held, wanted = self.block.data, [self]
        while wanted[-1].key not in held:
            wanted.append(wanted[-1].source[0].values[0])
        for value in reversed(wanted[:-1]):
            call, index = value.source
            held[value.key] = tensors(call.run())[index]
        return held[self.key]


class Handle:
    """The program's hold on a value; it ends with the tensor that has it."""

    def __init__(self, value: Value):
        self.value = value

    def __del__(self):
        self.value.block.evictor.release(self.value.block)


class Call:
    """An operator with its arguments, values in the place of tensors that may be dropped. It writes into a
    copy of the argument at position `copied`, which is then the result."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict):
        self.func, self.name, self.copied = func, func.overloadpacket.__name__, None
        named = lambda x: x.handle.value if isinstance(x, Evictable) else x
        self.args, self.kwargs = torch_private.tree_map(named, (args, kwargs))
        leaves = torch_private.tree_leaves((self.args, self.kwargs))
        self.values = [leaf for leaf in leaves if isinstance(leaf, Value)]
        self.plain = tensors(leaves)
        self._versions = [version_of(tensor) for tensor in self.plain]
        self._state: tuple[Tensor, ...] | None = None

    def run(self):
        if self._versions != [version_of(tensor) for tensor in self.plain]:
            raise ValueError(f"{self.name} cannot run again: a constant was written to; use a clone")
        args, kwargs = self.arguments(Value.real)
        if torch.Tag.nondeterministic_seeded not in self.func.tags:
            return self.on(args, kwargs)
        devices = [tensor.device for tensor in (*(value.like for value in self.values), *self.plain)]
        device = torch.device((devices or [self.kwargs.get("device") or "cpu"])[0])
        source = self.kwargs.get("generator") or device
        if self._state is None:
            self._state = random_state(source)
            return self.on(args, kwargs)
        with drawing_from(self._state, source):  # draws of others do not change by it
            return self.on(args, kwargs)

    def arguments(self, of_value: Callable, of_plain: Callable = lambda tensor: tensor) -> tuple[list, dict]:
        plain = lambda x: of_plain(x) if isinstance(x, Tensor) else x
        argument = lambda x: of_value(x) if isinstance(x, Value) else plain(x)
        return torch_private.tree_map(argument, (list(self.args), self.kwargs))

    def on(self, args: list, kwargs: dict):
        if self.copied is None:
            return self.func(*args, **kwargs)
        args[self.copied] = args[self.copied].clone()
        self.func(*args, **kwargs)
        return args[self.copied]


def tensors(nest) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and dicts, in order."""
    return [leaf for leaf in torch_private.tree_leaves(nest) if isinstance(leaf, Tensor)]


class _Foreseen(NamedTuple):
    like: object  # results without numbers
    cost: int
    sizes: list[int]
    position: dict[int, int]  # index of a result -> which of the new blocks
    views: dict[int, object]  # index of a result -> the block of an argument


class Dynamic(torch_private.DispatchMode):
    """Inside, what operators make is evictable; what is alive after the `with` may be used (loss.item()).
    `cost(func, args, kwargs, out)` sees tensors without numbers. `constants`, such as model.parameters(),
    count from the start; others from their first use."""

    def __init__(self, evictor, cost: Callable[..., int], constants: Iterable[Tensor] = ()):
        super().__init__()
        self.evictor, self._cost = evictor, cost
        self._fakes = torch_private.FakeTensorMode()
        self._constants: dict[int, object] = {}  # storage -> its block, as long as there is the storage
        self._hooks: dict[int, tuple] = {}  # id -> (the leaf, what makes its gradient a plain tensor)
        self._aside = False  # while a hook of autograd runs operators of our own
        for tensor in constants:
            self._constant(tensor)

    def __exit__(self, *error):
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {}) if self._aside else self.run(func, args, kwargs or {})

    def run(self, func: OpOverload, args: tuple, kwargs: dict):
        call, written = Call(func, args, kwargs), _written(func, args, kwargs)
        makes = any("Tensor" in str(result.type) for result in schema_of(func).returns)
        if not call.values and (_is_view(func) or not (call.plain or makes)):
            for tensor in call.plain:
                self._constant(tensor)
            return func(*args, **kwargs)
        if any(isinstance(target, Evictable) for target in written):
            return self._write(call, args, written)
        summing = call.plain and not call.values and torch_private.in_backward()  # of finished gradients
        if written or summing or not makes:
            return self._run_once(call, makes)
        seen = self._foresee(call)
        blocks, results = self._execute(call, seen), []
        for index, tensor in enumerate(tensors(seen.like)):
            if index in seen.views:
                value = Value(seen.views[index], tensor, object(), source=(call, index))
            else:
                value = Value(blocks[index], tensor, index)
            value.block.uses += index in seen.views or any(value.block is blocks.get(i) for i in range(index))
            results.append(Evictable(value, self.run))
        return torch_private.tree_map(lambda x: results.pop(0) if isinstance(x, Tensor) else x, seen.like)

    def _write(self, call: Call, args: tuple, written: list):
        """In place: the tensor gets the result of the operator on a copy."""
        target, cure = written[0], "write to a clone, or not in place"
        position = next((i for i, x in enumerate(args) if x is target), None)
        if position is None or len(written) > 1:
            raise ValueError(f"{call.name} writes into {len(written)} tensors or out=; {cure}")
        if target.handle.value.block.uses > 1:
            raise ValueError(f"{call.name} writes into memory that a view or another tensor shares; {cure}")
        call.copied = position
        seen = self._foresee(call)
        before, behind = ((x.shape, x.stride(), x.storage_offset()) for x in (target, seen.like))
        if before != behind:
            raise ValueError(f"{call.name} writes into a tensor whose copy has another layout; {cure}")
        target.handle = Handle(Value(self._execute(call, seen)[0], seen.like, 0))
        return target

    def _run_once(self, call: Call, makes: bool):
        """Results that stay: numbers for Python, sums of gradients, constants that are written to."""
        results: list = []
        seen = self._foresee(call) if makes else _Foreseen(None, 0, [], {}, {})
        blocks = self._execute(call, seen, results.append)
        for block, index in {block: index for index, block in blocks.items()}.items():
            self._know(tensors(results[0])[index], self.evictor.pin(block))
            self.evictor.release(block)
        return results[0]

    def _foresee(self, call: Call) -> _Foreseen:
        with torch_private.outside_modes():
            args, kwargs = call.arguments(lambda value: value.like, self._fakes.from_tensor)
            try:
                with self._fakes:
                    like = call.on(args, kwargs)
            except (torch_private.DataDependentOutputException, torch_private.DynamicOutputShapeException):
                raise ValueError(f"the size of {call.name}'s result is in the data; use a mask") from None
            blocks = [value.block for value in call.values] + [self._constant(x) for x in call.plain]
            shapes = [value.like for value in call.values] + [self._fakes.from_tensor(x) for x in call.plain]
            homes = {storage_id(x.untyped_storage()): block for x, block in zip(shapes, blocks)}
            seen = _Foreseen(like, self._cost(call.func, args, kwargs, like), [], {}, {})
            new: list[int] = []
            for index, tensor in enumerate(tensors(like)):
                if (key := storage_id(tensor.untyped_storage())) in homes:
                    seen.views[index] = homes[key]
                    continue
                if key not in new:
                    new.append(key)
                    seen.sizes.append(tensor.untyped_storage().nbytes())
                seen.position[index] = new.index(key)
            return seen

    def _execute(self, call: Call, seen: _Foreseen, keep: Callable | None = None) -> dict:
        """Runs it -> {index of a result: its new block}; `keep` gets the result, or the blocks do."""
        if not seen.sizes and not keep:
            return {}

        def work(wanted: list) -> None:
            result = call.run()
            if keep:
                return keep(result)
            for index, tensor in enumerate(tensors(result)):
                if index in seen.position and (block := wanted[seen.position[index]]):
                    block.data[index] = tensor

        inputs = [value.block for value in call.values] + [self._constant(x) for x in call.plain]
        made = self.evictor.run(call.name, inputs, seen.sizes, seen.cost, work)
        return {index: made[position] for index, position in seen.position.items()}

    def _constant(self, tensor: Tensor):
        """The block of a plain tensor, which is not evicted."""
        key = storage_id(tensor.untyped_storage())
        if key not in self._constants:
            self._know(tensor, self.evictor.constant(tensor.untyped_storage().nbytes()))
        leaf = tensor.requires_grad and tensor.is_leaf and not torch_private.in_backward()
        if leaf and id(tensor) not in self._hooks:
            self._hooks[id(tensor)] = tensor, tensor.register_hook(self._gradient)
        return self._constants[key]

    def _know(self, tensor: Tensor, block) -> None:
        storage, me = tensor.untyped_storage(), weakref.ref(self)
        key = storage_id(storage)

        def gone() -> None:
            if (dynamic := me()) is not None:
                dynamic.evictor.release(dynamic._constants.pop(key))

        self._constants[key] = block
        weakref.finalize(storage, gone).atexit = False

    def _gradient(self, gradient: Tensor) -> Tensor:
        """What autograd adds to a parameter's gradient is plain."""
        if not isinstance(gradient, Evictable):
            return gradient
        value, self._aside = gradient.handle.value, True
        try:
            self.evictor.restore(value.block)
            self._know(plain := value.real(), self.evictor.pin(value.block))
            return plain
        finally:
            self._aside = False


def _written(func: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    schema = schema_of(func).arguments
    names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in schema), args)) | kwargs
    return tensors([given.get(name) for name in names])


def _is_view(func: OpOverload) -> bool:
    returns = [result.alias_info for result in schema_of(func).returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
