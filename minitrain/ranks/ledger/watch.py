"""Sees every operator of this thread on its way to the kernel, and writes it down in a `Ledger`."""

from functools import cache, partial

from minitrain.ranks.events import Compute
from minitrain.ranks.ledger.operators import FLOATS, Operator, describe, tensors
from minitrain.ranks.torch_private import DEVICE_OF, DispatchMode


class Watch(DispatchMode):
    """Entered while the ledger is open."""

    def __init__(self, ledger) -> None:
        super().__init__()
        self._ledger, self._memory = ledger, ledger._memory
        self._describe = cache(partial(describe, causal=ledger.causal))
        # Equal events are one object: thousands would keep the garbage collector busy.
        self._event = cache(Compute)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every fake tensor that an operator gives
            return args[0].device
        kwargs = kwargs or {}
        operator = self._describe(func)
        if operator.composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not operator.bookkeeping:
            if event := self._account(operator, args, kwargs, result):
                self._ledger._events.append(event)
            if self._memory.limit_bytes is not None and not operator.allocates:  # it may yet be the host's
                self._memory.check_limit()
        return result

    def _account(self, operator: Operator, args: tuple, kwargs: dict, result) -> Compute | None:
        """Notes blocks that are read and born; what there is to write down."""
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
        moved, phase = sum(read) + written, self._ledger._phase
        return self._event(operator.name, flops, moved, phase, dtype, shape, written)
