"""Two pools of memory, the device's and its host's, and copies between them that run beside computation.

    host = to_host(x)           a Transfer: the copy has begun, x must not be written into until it ends
    ...                         computation goes on
    y = host.wait()             the host's tensor; another block than x
    back = to_device(y, x.device).wait()

On an accelerator host blocks are pinned, and each direction has a stream. On a CPU both pools are the same
memory: a mark on a block says whose it is (`collectives.announce_host`), and each direction has a worker
thread. Of fake tensors nothing moves, but blocks and events are the same. Bytes of a copy: those of x,
counted by the ledger at its start (`copied_bytes`). Until `wait` or `release` a Transfer keeps x alive. Rhu
et al. 2016 (vDNN), arXiv:1602.08124, section 3. Differs: threads in place of streams on a CPU.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from math import prod

import psutil
import torch
from torch import Tensor

from minitrain.ranks import collectives
from minitrain.ranks.torch_private import outside_modes


class Transfer:
    """A copy of `bytes` under way, in one of ranks/events.py's DIRECTIONS. `finish` blocks until it is there;
    `sources` are kept alive until then. An error of the copy is raised by `wait`. `event`: its end on a
    stream, for other streams to wait for."""

    def __init__(self, direction: str, bytes: int, result: Tensor, finish: Callable, sources=(), event=None):
        self.direction, self.bytes, self.event = direction, bytes, event
        self._result, self._finish, self._sources = result, finish, sources
        collectives.announce("copy", self)

    def wait(self) -> Tensor:
        """The copy, once it is complete. Waiting again gives it again."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._drop_sources()

    def release(self) -> Tensor:
        """The copy, on a stream perhaps still under way: its source's memory is free once it has ended, and
        this thread goes on. Without streams as `wait`."""
        return self._drop_sources() if self.event is not None else self.wait()

    def _drop_sources(self) -> Tensor:
        if self._sources is not None:
            self._sources = None
            collectives.announce("copied", self)
        return self._result


def to_host(x: Tensor, out: Tensor | None = None) -> Transfer:
    """Copy x to the host: into new memory, or into `out`, a host tensor of its shape and dtype."""
    if out is None:
        out = new_host(x.shape, x.dtype, pinned=x.is_cuda)
    return _copy("to_host", x, out)


def to_device(x: Tensor, device=None, out: Tensor | None = None, after: Transfer | None = None) -> Transfer:
    """Copy host tensor x to `device` ("cpu" stands for one, if there is none), or into `out` there. `after`:
    the copy that x is the result of, if it was released."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=device or "cpu")
    return _copy("to_device", x, out, after and after.event)


def new_host(shape: Iterable[int], dtype: torch.dtype, pinned=False, kind="activations") -> Tensor:
    """Memory of the host, not yet written, of a `kind` of the ledger's. MemoryError where it has no room."""
    shape = tuple(shape)
    size = prod(shape) * dtype.itemsize
    if pinned:
        size = 1 << (size - 1).bit_length()  # as torch's allocator of pinned memory has it
    large = size >= 1 << 20 and not is_fake(torch.empty(0))  # a small one is not worth the question
    if large and size > (free := psutil.virtual_memory().available):
        sizes = f"{size / 1e9:.3g} GB, and the host has {free / 1e9:.3g} GB left"
        raise MemoryError(f"offload needs {sizes}; offload less, or take a smaller model or more ranks")
    return collectives.announce_host(torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned), kind)


def on_host(x: Tensor) -> bool:
    return hasattr(x.untyped_storage(), "on_host")


def is_fake(x: Tensor) -> bool:
    return x.untyped_storage().device.type == "meta"


def work(fn: Callable[[], object], like: Tensor, after: Transfer | None = None) -> Future:
    """Let the host compute `fn()` beside this thread, one such work after the other, and `after` a copy to
    it; in no account. For a fake tensor `like` it is done at once."""
    if not is_fake(like):
        return _worker("work").submit(lambda: (after and after.wait(), fn())[1])
    done: Future = Future()
    with outside_modes(), like.fake_mode:
        done.set_result(fn())
    return done


def _copy(direction: str, x: Tensor, out: Tensor, after=None) -> Transfer:
    if out.shape != x.shape or out.dtype != x.dtype:
        found = f"out is {list(out.shape)} {out.dtype}, x {list(x.shape)} {x.dtype}"
        raise ValueError(f"{direction}: {found}; a copy changes neither, give an out like x")
    x, out, event = x.detach(), out.detach(), None
    if is_fake(x):
        finish = lambda: None  # it is there at once
    elif x.is_cuda or out.is_cuda:
        event, finish = _on_a_stream(direction, x, out, after)
    else:
        finish = _worker(direction).submit(_move, [x, out]).result
    return Transfer(direction, x.nbytes, out, finish, (x,), event)


def _move(both: list[Tensor]) -> None:
    x, out = both
    both.clear()  # or the worker would hold them for a moment after it is done
    out.copy_(x)


def _on_a_stream(direction: str, x: Tensor, out: Tensor, after) -> tuple[object, Callable[[], object]]:
    on_device = x if x.is_cuda else out
    device, side = on_device.device, _stream(on_device.device, direction)
    with outside_modes(), torch.cuda.stream(side), torch.no_grad():
        side.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            side.wait_event(after)
        out.copy_(x, non_blocking=True)
        on_device.record_stream(side)
        done = side.record_event()
    # The host reads what it was sent; a kernel of the device waits on the device.
    to_host = direction == "to_host"
    return done, done.synchronize if to_host else lambda: torch.cuda.current_stream(device).wait_event(done)


@cache
def _worker(direction: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"copy {direction}")


@cache
def _stream(device: torch.device, direction: str):
    return torch.cuda.Stream(device)
