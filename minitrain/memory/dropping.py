"""Results that are dropped alone: made again from what they are made of, when a backward asks for them.

    results = Results()                            the model calls results("act", compute, gate, up)
    with dropping({"act"}, results):
        y = block(x)                               kept: all but act and what is inside; so gate and up are

    dropped    what autograd saves inside, and the result itself wherever it is saved
    inside     (`inside=`) what is saved inside; the result stays: Korthikanti's selective recomputation
    kept       what the result is made from: if that is dropped too, it is made again first

Each such result is a segment of its own (segment.py); nothing between them is computed again. To drop the
core of attention costs as many FLOPs as to drop its inside only, and keeps one tensor less.
Sends what is made again sends. Memory: while one is made again, what it saves.
Korthikanti et al. 2022, arXiv:2205.05198, section 5. Megatron-Core calls the first output-discarding
checkpointing. Differs: results are named by the model, any set of them can be dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory.recompute import FirstPass
from minitrain.memory.segment import Results, Segment, Slot, as_it_is, open_slot, storages
from minitrain.ranks.torch_private import saved_hooks, storage_id


@contextmanager
def dropping(
    drop: Collection[str], results: Results, *, inside: Collection[str] = (), replay=(), early_stop=True
) -> Iterator[None]:
    """Inside, the results called `drop` are not kept, nor what is saved in them, but for what they are made
    from; of those called `inside` the result is kept. Each is made again, alone, when it is asked for."""
    frame = _Dropping(frozenset(drop), frozenset(inside), results, tuple(replay), early_stop)
    if not torch.is_grad_enabled():
        yield
        return
    with results.inside(frame), saved_tensors_hooks(frame.pack, frame.unpack):
        try:
            yield
        finally:
            frame.made.clear()


class _Dropping:
    def __init__(self, drop: frozenset, inside: frozenset, results: Results, replay: tuple, early_stop: bool):
        self.drop, self.inside, self.results = drop, inside, results
        self.replay, self.early_stop = replay, early_stop
        self.outer = saved_hooks() or (as_it_is, as_it_is)
        self.known: set[int] = set()  # parameters
        self.made: dict[int, tuple] = {}  # storage -> a weak reference to it, who makes it, which result

    def know(self, module: nn.Module) -> None:
        self.known |= storages((*module.parameters(), *module.buffers())).keys()

    def result(self, name: str, compute: Callable, inputs: tuple):
        if name not in self.drop | self.inside:
            return compute(*inputs)
        reads = storages(inputs)
        segment = Segment(compute, inputs, self.replay, self.early_stop, self.results)
        made = FirstPass(segment, frozenset(), self.known | reads.keys()).run(*inputs)
        for index, x in enumerate([made] if isinstance(made, Tensor) else made):
            storage = x.untyped_storage()
            if name in self.drop and storage_id(storage) not in reads:
                self.made[storage_id(storage)] = weakref.ref(storage), segment, index
        return made

    def pack(self, x: Tensor):
        storage, maker, index = self.made.get(storage_id(x.untyped_storage()), (lambda: None, None, None))
        return self.outer[0](x.detach()) if storage() is None else maker.output_slot(index, x)

    def unpack(self, packed) -> Tensor:
        return open_slot(packed) if isinstance(packed, Slot) else self.outer[1](packed)
