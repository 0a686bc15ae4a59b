"""ZeRO-Infinity's arithmetic: what a model needs of GPU, CPU and disk, and how fast they must be. No torch.

    model states          20·P bytes           12·L·D² parameters; 2 weight, 6 gradient, 12 optimizer each
    kept activations      2·b·s·D·L / c        one input in fp16 of every c-th block, the rest recomputed
    working memory        4·D·4D               weight and gradient in fp16 of the largest linear, D -> 4D
                          b·s·c·(16·D + 2·H·s) activations between two that are kept

    efficiency            t_compute / (t_compute + t_move) = ait·bandwidth / (ait·bandwidth + peak)
    ait, FLOPs per byte   weights and gradients s·b;  optimizer states s·b / 4;  kept activations 24·c·D

Bandwidth is per GPU. One that holds a tensor for all gives it at its own link's speed; N that hold 1/N each
give it at N links' (`fetch_s`). Bytes are exact integers. TiB = 2**40.
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, sections 3, 4 and 5.1, figure 2a. Theirs prints TiB
as TB. Differs: a survey's 4 TB of activations at 100T parameters is not in it: it has 3.08.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from minitrain.plan.accounting.memory_formulas import model_state_bytes
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints

TIB = 2**40


@dataclass(frozen=True)
class Shape:
    """A Transformer as that paper counts it: blocks of width D with MLPs of 4·D, embeddings left out."""

    num_layers: int  # L
    width: int  # D
    heads: int  # H

    @property
    def parameters(self) -> int:
        return 12 * self.num_layers * self.width**2

    def model_state_bytes(self) -> int:
        return model_state_bytes(self.parameters, gradient=6)  # the gradient in fp16 and in fp32

    def checkpoint_bytes(self, batch: int = 32, length: int = 1024, every: int = 1) -> int:
        """Of all kept activations; `every` must divide the number of layers."""
        if every < 1 or self.num_layers % every:
            raise ValueError(f"every={every}: use a divisor of {self.num_layers} layers")
        return 2 * batch * length * self.width * (self.num_layers // every)

    def working_bytes(self, tiles: int = 1) -> int:
        """Of the largest linear's weight and gradient, gathered for use, whole or a tile at a time."""
        if tiles < 1 or 4 * self.width % tiles:
            raise ValueError(f"tiles={tiles}: use a divisor of {4 * self.width} columns")
        return 4 * self.width * 4 * self.width // tiles

    def activation_bytes(self, batch: int = 32, length: int = 1024, every: int = 1) -> int:
        """Between two kept activations, while they are recomputed."""
        return batch * length * every * (16 * self.width + 2 * self.heads * length)


# Figure 2a, the row of every model: 0.1, 0.5, 1, 10 and 100 trillion parameters.
FIGURE_2A = {
    "0.1T": Shape(80, 10 << 10, 128),
    "0.5T": Shape(100, 20 << 10, 160),
    "1T": Shape(128, 25 << 10, 256),
    "10T": Shape(195, 64 << 10, 512),
    "100T": Shape(315, 160 << 10, 1024),
}


def flops_per_byte(kind: str, batch: int, length: int, width: int = 0, every: int = 1) -> float:
    """What is computed for each byte that is moved, on one GPU with `batch` sequences.

    8·b·s·P FLOPs (forward, recomputation, backward) over 8·P bytes (weights three times, gradients once),
    32·P (states, masters and gradients in fp32, read and written) or 4·b·s·D·L/c (there and back)."""
    require_positive_ints(batch=batch, length=length)
    match kind:
        case "parameters":
            return length * batch
        case "optimizer":
            return length * batch / 4
        case "activations":
            return 24 * width * every
    raise ValueError(f"{kind!r}: use 'parameters' (with gradients), 'optimizer' or 'activations'")


def efficiency(flops_per_byte: float, bandwidth_bytes_per_s: float, peak_flops: float) -> float:
    """Share of the peak that is left if nothing overlaps."""
    rate = flops_per_byte * bandwidth_bytes_per_s
    return rate / (rate + peak_flops)


def bandwidth_for(efficiency: float, flops_per_byte: float, peak_flops: float) -> float:
    """Bytes per second that an efficiency asks for."""
    if not 0 < efficiency < 1:
        raise ValueError(f"efficiency={efficiency}: without overlap it is between 0 and 1, and is neither")
    require_positive(flops_per_byte=flops_per_byte, peak_flops=peak_flops)
    return efficiency / (1 - efficiency) * peak_flops / flops_per_byte


def fetch_s(bytes: int, links: Mapping[str, float], ranks: int, *, partitioned: bool) -> float:
    """Seconds until every rank has a tensor that is kept away from the devices.

    `links`: bytes per second of a rank's own "slow" link (PCIe, disk) and of "network" between ranks. One
    owner reads all and sends it on, or all read 1/n at once and gather, (n-1)/n over the network (ring)."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: use at least 1")
    require_ints(bytes=bytes)
    require_positive_ints(ranks=ranks)
    read = bytes / ranks if partitioned else bytes
    sent = bytes * (ranks - 1) / ranks if partitioned else bytes * (ranks > 1)
    return read / links["slow"] + sent / links["network"]
