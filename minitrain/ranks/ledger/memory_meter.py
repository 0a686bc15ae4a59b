"""Every block of tensor memory from its birth to its death, and what it was for.

A block (torch's storage, shared by tensors and views) is born when an operator returns it and dies when the
last tensor on it is gone: a weak reference tells. All are written down, so these are exact:

    live bytes = blocks older than the meter and seen by it + births - deaths         peak = its largest value

A block that an operator reads and nobody was seen to make counts from the start. Unseen: untouched memory,
scratch in a kernel, an allocator's rounding. Of several kinds the first holds; buffers before activations:

    parameters         some nn.Parameter lies on it, or a tensor that an optimizer updates
    gradients          it was the .grad of a parameter at some moment (hence kinds are settled at the end)
    optimizer state    an optimizer keeps it in its `state`
    activations        everything else: what forward and backward make, and the batch
    buffers            scratch of a collective or of an optimizer's step, gathered parameters
    checkpoint         of the host alone: what is copied to be saved
"""

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from minitrain.ranks.torch_private import grad_hooks, storage_id

KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")
GATHERED = "gathered parameters"  # buffers of their own in a timeline that asks for it
PRECEDENCE = ("parameters", "gradients", "optimizer state", "checkpoint", "buffers", "activations")


class _Block(weakref.ref):
    __slots__ = ("key", "number", "bytes", "is_parameter")


class MemoryMeter:
    """`now()` is the index of the event during which something happens. A block resized in place
    (`resize_`) is measured when it is next used, or announced. The host's blocks are counted apart."""

    def __init__(self, now: Callable[[], int], limit_bytes: int | None = None) -> None:
        self._now = now
        self._alive: dict[int, _Block] = {}  # address of the storage -> its block
        self._kinds: list[str] = []  # block number -> kind
        self._older: list[tuple[int, int]] = []  # (block number, bytes) of blocks older than the meter
        self._changes = array("q")  # event, block number, bytes (deaths: negative), event, ...
        self._host: set[int] = set()  # numbers of the host's blocks
        self._gathered: set[int] = set()  # of those where parameters are whole for a while
        self.limit_bytes = limit_bytes  # of the device
        # As far as changes were looked at: bytes of the blocks that live, and of the device and the host.
        self._sizes: dict[int, int] = {}
        self._live, self._seen, self._seen_older = [0, 0], 0, 0
        self._parameters: dict[int, weakref.ref] = {}  # id of a parameter -> it, unless it is gone
        self._hooks: list = []
        self._kind_of_births = "activations"

    # ---- watching -----------------------------------------------------------------------------------------

    def open(self) -> None:
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        self._hooks = [before, torch_optimizer.register_optimizer_step_post_hook(self._after_step)]

    def close(self) -> None:
        self._name_gradients()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._parameters, self._alive = [], {}, {}
        self._now = None

    def read(self, tensor: Tensor) -> int:
        """Bytes of the block, which an operator reads; if unknown, it is older than the meter."""
        block, kind = self._block(tensor, older=True), type(tensor)
        # isinstance(tensor, Parameter), in a third of the time: a dry run asks it of every argument
        if kind is not Tensor and (Parameter in kind.__mro__ or getattr(tensor, "_is_param", False)):
            self._adopt(tensor, block)
        return block.bytes

    def write(self, tensor: Tensor) -> int:
        """Bytes of the block, which an operator returns; if unknown, it was born just now."""
        return self._block(tensor, older=False).bytes

    def name(self, tensor: Tensor, kind: str, older: bool = True) -> None:
        """The block of `tensor` is of this kind, unless it has a kind that comes first."""
        if older:
            self.read(tensor)
        number = self._block(tensor, older).number
        self._kinds[number] = min(kind, self._kinds[number], key=PRECEDENCE.index)

    def resized(self, tensor: Tensor) -> None:
        block = self._block(tensor, older=False)
        block.is_parameter, self._kinds[block.number] = True, "buffers"
        self._gathered.add(block.number)

    def is_host(self, tensor: Tensor) -> None:
        self._mark_host(self._block(tensor, older=False).number, tensor.untyped_storage().on_host)

    def _mark_host(self, number: int, kind: str) -> None:
        if number not in self._host:
            self._live[0] -= (size := self._sizes.get(number, 0))
            self._live[1] += size
        self._host.add(number)
        self._kinds[number] = kind

    def _block(self, tensor: Tensor, older: bool) -> _Block:
        """Its block, perhaps seen for the first time, or with another size than last time."""
        storage = tensor.untyped_storage()
        block, size = self._alive.get(storage_id(storage)), storage.nbytes()
        if block is not None:
            if block.bytes != size:
                self._change(block.number, size - block.bytes)
                block.bytes = size
            return block
        block = self._alive[storage_id(storage)] = _Block(storage, self._died)
        block.key, block.number = storage_id(storage), len(self._kinds)
        block.bytes, block.is_parameter = size, False
        self._kinds.append("activations" if older else self._kind_of_births)
        if kind := getattr(storage, "on_host", ""):
            self._mark_host(block.number, kind)
        if older:
            self._older.append((block.number, size))
        else:
            self._change(block.number, size)
        return block

    def _died(self, block: _Block) -> None:
        if self._alive.get(block.key) is block:
            del self._alive[block.key]
            self._change(block.number, -block.bytes)

    def _change(self, number: int, size: int) -> None:
        # Tensors die in any thread at any moment: one call that cannot be interrupted, and no sums are kept
        # on the way. An array holds no objects: the garbage collector has nothing to look at.
        self._changes.extend((self._now(), number, size))

    # ---- naming -------------------------------------------------------------------------------------------

    def _adopt(self, parameter: Parameter, block: _Block) -> None:
        if not block.is_parameter:
            block.is_parameter, self._kinds[block.number] = True, "parameters"
        known = self._parameters.get(id(parameter))
        if known is None or known() is not parameter:  # several may lie on one block
            self._parameters[id(parameter)] = weakref.ref(parameter)
            if parameter.requires_grad and parameter.is_leaf:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._name_gradient))
                # Ours goes first in line: a reducer's hook may send the gradient away and drop it.
                hooks = grad_hooks(parameter)
                for key in list(hooks)[:-1]:
                    hooks[key] = hooks.pop(key)
            self._name_gradient(parameter)

    def _name_gradient(self, parameter: Parameter | None) -> None:
        if parameter is not None and parameter.grad is not None:
            self.name(parameter.grad, "gradients")

    def _name_gradients(self) -> None:
        for known in self._parameters.values():
            self._name_gradient(known())

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> None:
        self._name_states(optimizer)
        self._kind_of_births = "buffers"  # what does not turn out to be state is the step's scratch memory

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        self._kind_of_births = "activations"
        self._name_states(optimizer)

    def _name_states(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.name(parameter, "parameters")
                self._name_gradient(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.name(value, "optimizer state")

    # ---- answers ------------------------------------------------------------------------------------------

    births = property(lambda self: len(self._kinds))  # how many blocks have been seen so far

    def block_kinds(self) -> list[str]:
        self._name_gradients()
        return list(self._kinds)

    def trace(self) -> Iterator[tuple[str, int, int]]:
        """("alloc" or "free", block number, bytes) of the device's blocks; older ones come first."""
        sizes: Counter[int] = Counter()
        for number, change in (*self._older, *zip(self._changes[1::3], self._changes[2::3])):
            if number in self._host or not change:
                continue
            if sizes[number]:
                yield "free", number, sizes[number]
            sizes[number] += change
            if sizes[number]:
                yield "alloc", number, sizes[number]

    def check_limit(self) -> None:
        if self.limit_bytes is not None and (live := self.live_bytes()) > self.limit_bytes:
            what = ", ".join(f"{kind} {size:,}" for kind, size in self.by_kind().items() if size)
            raise MemoryError(f"{live:,} bytes on the device, which has {self.limit_bytes:,}: {what}")

    def timeline(self, gathered: bool = False) -> Iterator[tuple[int, dict[str, int]]]:
        kinds, totals = self.block_kinds(), self.totals()
        for number in self._gathered if gathered else ():
            kinds[number] = GATHERED
        live = dict.fromkeys((*KINDS, GATHERED) if gathered else KINDS, 0)
        for number, size in self._older:
            if number not in self._host:
                live[kinds[number]] += size
        event, fullest, most = 0, dict(live), totals[0]
        for index, number, size, total in zip(*(self._changes[i::3] for i in range(3)), totals[1:]):
            if index != event:
                yield event, fullest
                event, most = index, -1
            if number not in self._host:
                live[kinds[number]] += size
            if total > most:
                fullest, most = dict(live), total
        yield event, fullest

    def totals(self, host: bool = False) -> list[int]:
        """Live bytes at the start and after each change, of one of the two pools."""
        older = sum(size for number, size in self._older if (number in self._host) == host)
        changes: Iterable[int] = self._changes[2::3]
        if host or self._host:
            changes = (size * ((n in self._host) == host) for n, size in zip(self._changes[1::3], changes))
        return list(accumulate(changes, initial=older))

    def by_kind(self, after: int | None = None, host: bool = False) -> dict[str, int]:
        """Live bytes after so many changes, or now."""
        self._name_gradients()
        live = dict.fromkeys(KINDS, 0)
        if after is None:
            self._look()
            blocks = self._sizes.items()
        else:
            blocks = (*self._older, *zip(self._changes[1 : 3 * after : 3], self._changes[2 : 3 * after : 3]))
        for number, size in blocks:
            if (number in self._host) == host:
                live[self._kinds[number]] = live.get(self._kinds[number], 0) + size
        return live

    def live_bytes(self, host: bool = False) -> int:
        self._look()
        return self._live[host]

    def _look(self) -> None:
        """Add up what has changed since the last time: some ask after each of many actions."""
        older, self._seen_older = self._older[self._seen_older :], len(self._older)
        start, self._seen = self._seen, len(self._changes)
        changes = self._changes[start : self._seen]
        for number, size in (*older, *zip(changes[1::3], changes[2::3])):
            self._live[number in self._host] += size
            left = self._sizes.pop(number, 0) + size
            if left:
                self._sizes[number] = left
