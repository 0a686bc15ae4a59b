"""Sees every operator of this thread on its way to the kernel, and writes it down in a `Ledger`.

In a dry run most operators have been seen before with arguments of the same shapes. Then the results are what
the mode below remembers (shapes.py), the event is that of the last time, and only memory is looked at
anew: which blocks are read, which are born.
"""

from functools import cache, partial

from minitrain.ranks.events import Compute
from minitrain.ranks.ledger.operators import FLOATS, Operator, describe, tensors
from minitrain.ranks.torch_private import DEVICE_OF, DispatchMode, dispatch_modes


class Watch(DispatchMode):
    """Entered while the ledger is open."""

    def __init__(self, ledger) -> None:
        super().__init__()
        self._ledger, self._memory = ledger, ledger._memory
        self._describe = cache(partial(describe, causal=ledger.causal))
        # Equal events are one object: thousands would keep the garbage collector busy.
        self._event = cache(Compute)
        self._below = None  # the mode of a dry run, if nothing is between
        # Key of a call -> how its results are made, operator, fields of its event, and that by phase.
        self._known: dict[tuple, tuple] = {}

    def __enter__(self):
        top = next(reversed(dispatch_modes()), None)
        self._below = top if hasattr(top, "key_of") else None
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every fake tensor that an operator gives
            return args[0].device
        kwargs, key = kwargs or {}, None
        if self._below is not None:
            key = self._below.key_of(func, args, kwargs)
            known = self._known.get(key)
            if known is not None:
                return self._again(*known, args)
        operator = self._describe(func)
        if operator.composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not operator.bookkeeping:
            fields = self._account(operator, args, kwargs, result)
            recipe = key and self._below.recipes.get(key)
            plain = not tensors(tuple(kwargs.values())) and not (operator.allocates and operator.mutates)
            if recipe and plain:
                self._known[key] = recipe, operator, fields, {}
            self._write_down(operator, fields, {})
        return result

    def _again(self, recipe, operator: Operator, fields: tuple | None, events: dict, args: tuple):
        result = self._below.make(recipe, args)
        if not operator.allocates:
            for tensor in tensors(args):
                self._memory.read(tensor)
        if operator.allocates or not operator.views:
            for tensor in tensors(result):
                self._memory.write(tensor)
        self._write_down(operator, fields, events)
        return result

    def _write_down(self, operator: Operator, fields: tuple | None, events: dict) -> None:
        if fields:
            phase = self._ledger._phase
            if phase not in events:
                name, flops, moved, dtype, shape, written = fields
                events[phase] = self._event(name, flops, moved, phase, dtype, shape, written)
            self._ledger._events.append(events[phase])
        if self._memory.limit_bytes is not None and not operator.allocates:  # it may yet be the host's
            self._memory.check_limit()

    def _account(self, operator: Operator, args: tuple, kwargs: dict, result) -> tuple | None:
        """Blocks that are read and born; what there is to write down, but for the phase."""
        memory = self._memory
        inputs = [] if operator.allocates else operator.inputs(args, kwargs)
        read = [min(tensor.nbytes, memory.read(tensor)) for tensor in inputs]
        if operator.views and not operator.allocates:  # torch.tensor(..) ends in a view of what it has made
            return None
        outputs = tensors(result)
        if operator.mutates:
            for target in operator.targets(args, kwargs):
                memory.read(target)  # lest it be taken for new-born below
                if all(target is not output for output in outputs):
                    outputs.append(target)
        births = memory.births
        written = sum([min(tensor.nbytes, memory.write(tensor)) for tensor in outputs])
        if operator.allocates or (births == memory.births and not operator.mutates):
            return None  # memory that nobody has written yet, or a view by another name
        if operator.gathers:
            read[0] = written
        elif operator.scatters:
            # the last one brings values, or the indices of a number
            read[0] = written = read[-1] * inputs[0].itemsize // inputs[-1].itemsize
        elif operator.ignores_first and read:
            read[0] = 0
        flops = operator.flops(*args, **kwargs, out_val=result) if operator.flops else 0
        if not flops and not written:
            return None
        of_codes = inputs[:1] if flops else []  # an FP8 product gives bfloat16, and runs at FP8's rate
        dtype = next((FLOATS[tensor.dtype] for tensor in of_codes + outputs if tensor.dtype in FLOATS), "")
        shape = operator.shape(*args, **kwargs) if operator.shape else ()
        return operator.name, flops, sum(read) + written, dtype, shape, written
