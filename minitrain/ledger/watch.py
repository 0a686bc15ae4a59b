"""Sees every operator of this thread on its way to the kernel, and writes it down in a `Ledger`."""

from functools import cache, partial

from minitrain.ledger.operators import FLOATS, Operator, describe, tensors
from minitrain.simulate.events import Compute
from minitrain.torch_private import DEVICE_OF, DispatchMode


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
            self._account(operator, args, kwargs, result)
            if self._ledger._limited and not operator.allocates:  # it may yet turn out to be the host's
                self._memory.check_limits()
        return result

    def _account(self, operator: Operator, args: tuple, kwargs: dict, result) -> None:
        memory = self._memory
        inputs = [] if operator.allocates else operator.inputs(args, kwargs)
        read = [min(tensor.nbytes, memory.read(tensor)) for tensor in inputs]
        if operator.views and not operator.allocates:  # torch.tensor(..) ends in a view of what it has made
            return
        outputs = tensors(result)
        if operator.mutates:
            for target in operator.targets(args, kwargs):
                memory.read(target)  # lest it be taken for new-born below
                if all(target is not output for output in outputs):
                    outputs.append(target)
        births = memory.births
        written = sum([min(tensor.nbytes, memory.write(tensor)) for tensor in outputs])
        if operator.allocates or (births == memory.births and not operator.mutates):
            return  # memory that nobody has written yet, or a view by another name
        if operator.gathers:
            read[0] = written
        elif operator.scatters:
            read[0] = written = read[-1]
        elif operator.ignores_first and read:
            read[0] = 0
        flops = operator.flops(*args, **kwargs, out_val=result) if operator.flops else 0
        if flops or written:
            dtype = next((FLOATS[tensor.dtype] for tensor in outputs if tensor.dtype in FLOATS), "")
            shape = operator.shape(*args, **kwargs) if operator.shape else ()
            moved = sum(read) + written
            event = self._event(operator.name, flops, moved, self._ledger._phase, dtype, shape, written)
            self._ledger._events.append(event)
