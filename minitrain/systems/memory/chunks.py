"""PatrickStar: parameters in equal chunks that move between device and host; gradients take their places.

    chunks     parameters, in order, packed whole into blocks of one size; float32 masters and moments alike
    forward    a layer's chunks come to the device; for room goes the one that is used again latest
    backward   a layer's gradients are written over its parameters, which its graph has used for the last time
    update     chunk by chunk on the host: gradient -> moments, master -> parameter, in the gradient's place

So model data are 2 + 4 + 4 + 4 = 14 bytes per parameter in bfloat16, of device and host together, not 16. The
farthest next use goes, so no other choice loads fewer (Belady). What is unused at the end of chunks is the
price. Fang et al. 2021, PatrickStar, arXiv:2108.05818, sections 6 to 8. Differs: all room is for chunks
(theirs leaves what activations will need); the order is known (theirs traces a step); updates are the host's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from minitrain.memory.pools import Transfer, new_host, on_host, to_device, to_host, work
from minitrain.ranks.checks import require_nonempty, require_positive_ints
from minitrain.ranks.collectives import announce_host
from minitrain.systems.memory import window
from minitrain.systems.memory.window import Prefetch, forward_backward, lie_in, sent_home


def pack(sizes: Sequence[int], chunk: int) -> list[list[int]]:
    """Which tensors lie in which chunk: in order, each whole. ValueError: larger than a chunk."""
    chunks: list[list[int]] = []
    free = 0
    for number, size in enumerate(sizes):
        if size > chunk:
            raise ValueError(f"tensor {number} has {size} elements, a chunk {chunk}: use larger chunks")
        if not chunks or size > free:
            chunks.append([])
            free = chunk
        chunks[-1].append(number)
        free -= size
    return chunks


def utilization(sizes: Sequence[int], chunk: int) -> float:
    """The part of all chunks that is used."""
    require_nonempty(sizes=sizes)
    require_positive_ints(sizes=sizes, chunk=chunk)
    return sum(sizes) / (chunk * len(pack(sizes, chunk)))


def best_chunk(sizes: Sequence[int], most: int) -> int:
    """The chunk size up to `most` that wastes least; of those the smallest. Only sums of neighbours are
    tried: a chunk of any other size could be smaller."""
    require_nonempty(sizes=sizes)
    require_positive_ints(sizes=sizes)
    sums = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    fitting = sorted(size for size in sums if max(sizes) <= size <= most)
    if not fitting:
        raise ValueError(f"most={most}: the largest tensor has {max(sizes)} elements, use at least as many")
    return min(fitting, key=lambda size: (size * len(pack(sizes, size)), size))


class ChunkedTraining:
    """Takes the parameters of `layers`, of 16 bits, which are to be used through this only: chunks of `chunk`
    elements, as many on the device as `device_bytes` hold. `make_optimizer([masters])` makes one a chunk."""

    def __init__(self, layers, chunk: int, device_bytes: int, make_optimizer: Callable, device=None):
        self.layers = list(layers)
        params = window.parameters_of(self.layers)
        dtypes = {param.dtype for param in params}
        if dtypes not in ({torch.bfloat16}, {torch.float16}):
            raise ValueError(f"parameters are {dtypes}: chunks are for one 16-bit dtype with float32 masters")
        self.device, dtype = device or params[0].device, params[0].dtype
        packed = pack([param.numel() for param in params], chunk)
        self.chunks = [[params[i] for i in numbers] for numbers in packed]  # parameters of each
        chunk_bytes = chunk * dtype.itemsize
        room = device_bytes // chunk_bytes
        number_of = {param: number for number, owned in enumerate(self.chunks) for param in owned}
        self._needs = [sorted({number_of[param] for param in layer.parameters()}) for layer in self.layers]
        if (most := max(map(len, self._needs))) > room:
            raise ValueError(f"a layer needs {most} chunks, {device_bytes=} are {room}: give more room")
        self._blocks, self.optimizers = [], []
        for owned in self.chunks:
            self._blocks.append(sent_home(owned, chunk))
            lie_in(self._blocks[-1], owned)
            master = new_host((chunk,), torch.float32, kind="optimizer state").copy_(self._blocks[-1])
            self.optimizers.append(make_optimizer([nn.Parameter(master)]))
        order = [number for layer in window.order_of_use(len(self.layers)) for number in self._needs[layer]]
        sizes, settings = dict.fromkeys(order, chunk_bytes), dict(ahead=0, circular=False)
        self._engine = Prefetch(order, sizes, device_bytes, self._fetch, self._evict, **settings)
        self._have_gradients = False

    loads = property(lambda self: self._engine.fetched)  # chunks that came to the device, ever

    def forward_backward(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions); then chunks have gradients, and `step` must be next."""
        if self._have_gradients:
            raise ValueError("the chunks have gradients: call step() before the next forward")
        self._have_gradients = True
        come_and_go = self._enter, self._leave
        return forward_backward(self.layers, [x], lambda y, u: loss_of(y), *come_and_go, (positions,))

    def step(self) -> None:
        self._engine.clear()
        for optimizer, block in zip(self.optimizers, self._blocks):
            work(partial(_update, optimizer, block), block).result()
            for value in (value for state in optimizer.state.values() for value in state.values()):
                if isinstance(value, Tensor) and not on_host(value):
                    announce_host(value, "optimizer state")
        self._have_gradients = False

    def _enter(self, layer: int) -> None:
        for number in self._needs[layer]:  # neighbours, there and back: none of them goes for another
            self._engine.use(number)

    def _leave(self, layer: int) -> None:
        """Gradients go where the parameters were."""
        for param in self.layers[layer].parameters():
            param.data.copy_(param.grad)
            param.grad = None

    def _fetch(self, number: int) -> Transfer:
        transfer = to_device(self._blocks[number], self.device)
        self._move(number, transfer.wait())
        return transfer

    def _evict(self, number: int, transfer: Transfer) -> None:
        block = self._blocks[number]
        place = new_host(block.shape, block.dtype, block.is_cuda, "parameters")
        self._move(number, to_host(block, out=place).wait())

    def _move(self, number: int, block: Tensor) -> None:
        self._blocks[number] = block
        lie_in(block, self.chunks[number])


def _update(optimizer: torch.optim.Optimizer, block: Tensor) -> None:
    """A chunk of gradients becomes one of parameters."""
    (master,) = optimizer.param_groups[0]["params"]
    master.grad = block.to(torch.float32)
    optimizer.step()
    master.grad = None
    block.copy_(master.detach())
