"""The pass of `parallelize` for products in few bits, and what their scales learn from a step.

A block's projections and MLPs get the linear layers of quantized_linear.py, experts `LowBits`. Parameters and
their names stay. With tensor parallelism the cut layers have them already (tensor_parallel/low_precision.py).

Delayed scaling: after a step the largest numbers that a block has seen are agreed over all ranks that have it
with other tokens, or another part of it: 8 bytes a matrix in one message a block and group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.model.mixture import mixtures
from minitrain.moe.experts import LowBits
from minitrain.plan.strategy import Strategy
from minitrain.precision import products as eight_bits
from minitrain.precision.products import Scales, emulated
from minitrain.precision.quantized_linear import LowLinear
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import placement
from minitrain.systems.precision import bitnet, early_fp8, int4, int8

# Every way to compute the products of linear layers, by the names of policies.PRODUCTS.
PRODUCTS = eight_bits.PRODUCTS | bitnet.PRODUCTS | early_fp8.PRODUCTS | int4.PRODUCTS | int8.PRODUCTS


def multiply_in(module: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    if (products := PRODUCTS.get(strategy.products)) is None:
        return
    group = mesh.group("tp") if strategy.tp > 1 else None
    for layer in module.layers:
        if hasattr(layer, "attention") and group is None:
            swap(layer.attention, products)
            swap(getattr(layer.mlp, "shared", layer.mlp), products)
    for mixture in mixtures(module.layers):
        device = mixture.experts.up.device
        scales = [Scales(products.history, group, cut if group else "", device) for cut in "NK"]
        mixture.experts.work = LowBits(products, *scales)


def swap(module: nn.Module | None, products) -> None:
    """A layer with these products in the place of every linear one right below `module`."""
    for name, child in [] if module is None else list(module.named_children()):
        if isinstance(child, nn.Linear):
            scales = Scales(products.history, device=child.weight.device)
            setattr(module, name, LowLinear(child, products, scales))


def emulation(layers: Iterable[nn.Module], strategy: Strategy) -> str | None:
    """What to tell whoever asked for products that this machine has no kernels for."""
    products = PRODUCTS.get(strategy.products)
    blocks = [layer for layer in layers if hasattr(layer, "attention")] if products else []
    params = [pair for block in blocks for pair in block.named_parameters()]
    weights = [param for name, param in params if param.dim() > 1 and "router" not in name]
    if not any(emulated(products, weight) for weight in weights):
        return None
    where = f"{str(weights[0].dtype).removeprefix('torch.')} on {weights[0].device.type}"
    return f"products={strategy.products!r} are emulated, at no gain in time: no kernel for {where}"


def scales_of(layers: Iterable[nn.Module]) -> dict[str, Scales]:
    """Those that remember, by the names of what they belong to in the whole model."""
    named = ((f"{layer.name}.{path}", part) for layer in layers for path, part in layer.named_modules())
    return {name: part for name, part in named if isinstance(part, Scales) and part.steps}


@torch.no_grad()
def roll_scales(layers: Iterable[nn.Module], tp: ProcessGroup | None) -> None:
    """After a step, which every rank makes."""
    for layer in layers:
        scales = list(scales_of([layer]).values())
        if not scales:
            continue
        largest = torch.stack([one.largest for one in scales])
        at = placement(next(layer.attention.parameters()))
        for group in (*at.summed_over, at.copies, tp):
            if group is not None:
                largest = collectives.all_reduce(largest, group, op="max")
        for one, amax in zip(scales, largest):
            one.roll(amax)


def histories(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    return {name: one.history.clone() for name, one in scales_of(layers).items()}


def load_histories(layers: Iterable[nn.Module], known: dict[str, Tensor]) -> None:
    """Of a state that has none the scales begin anew."""
    for name, one in scales_of(layers).items():
        one.history.copy_(known[name]) if name in known else one.history.zero_()
