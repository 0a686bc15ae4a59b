"""The pass of `parallelize` for products in few bits, and what their scales learn from a step.

A block's projections and MLPs get linear layers of quantized_linear.py, experts the way `low`. Parameters and
their names stay. With tensor parallelism the cut layers have them already (tensor_parallel/low_precision.py).

Delayed scaling: after a step the largest numbers that a block has seen are agreed over all ranks that have it
with other tokens, or another part of it: 8 bytes a matrix in one message a block and group.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.compose.products_by_name import PRODUCTS
from minitrain.model.mixture import mixtures
from minitrain.moe import experts
from minitrain.plan.strategy import Strategy
from minitrain.precision.products import Scales, emulated
from minitrain.precision.quantized_linear import LowLinear, project
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import placement


def multiply_in(module: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    """Says once, on a GPU, if products are emulated there."""
    if (products := PRODUCTS.get(strategy.products)) is None:
        return
    group = mesh.group("tp") if strategy.tp > 1 else None
    for layer in module.layers:
        if hasattr(layer, "attention") and group is None:
            for owner in (layer.attention, getattr(layer.mlp, "shared", layer.mlp)):
                if owner is not None:
                    swap(owner, products)
    for mixture in mixtures(module.layers):
        own = mixture.experts
        own.inwards, own.outwards = (
            Scales(products.history, group, cut if group else "", own.up.device) for cut in "NK"
        )
        own.way = partial(experts.low, products=products, inwards=own.inwards, outwards=own.outwards)
    said = emulation(module.layers, strategy)
    if said and "cuda" in said and collectives.world().rank() == 0:
        warnings.warn(said, stacklevel=3)


def swap(owner: nn.Module, products) -> None:
    """Every linear layer right below `owner`."""
    for name, child in list(owner.named_children()):
        if isinstance(child, nn.Linear):
            scales = Scales(products.history, device=child.weight.device)
            setattr(owner, name, LowLinear(child, products, scales))
    owner.project = project


def emulation(layers: Iterable[nn.Module], strategy: Strategy) -> str | None:
    """What to tell whoever asked for products that this machine has no kernels for."""
    products = PRODUCTS.get(strategy.products)
    blocks = [layer for layer in layers if hasattr(layer, "attention")] if products else []
    named = [pair for block in blocks for pair in block.named_parameters()]
    weights = [param for name, param in named if param.dim() > 1 and "router" not in name]
    if not any(emulated(products, weight) for weight in weights):
        return None
    where = f"{str(weights[0].dtype).removeprefix('torch.')} on {weights[0].device.type}"
    return f"products={strategy.products!r} are emulated, at no gain in time: no kernel for {where}"


def scales_of(layers: Iterable[nn.Module]) -> dict[str, Scales]:
    """Those that remember, by the names of what they belong to in the whole model."""
    found = ((layer.name, path, one) for layer in layers for path, one in layer.named_modules())
    return {f"{name}.{path}": one for name, path, one in found if isinstance(one, Scales) and one.steps}


@torch.no_grad()
def roll_scales(layers: Iterable[nn.Module], tp: ProcessGroup | None) -> None:
    """After a step, which every rank makes."""
    for layer in layers:
        if not (found := list(scales_of([layer]).values())):
            continue
        largest = torch.stack([one.largest for one in found])
        at = placement(next(layer.attention.parameters()))
        for group in (*at.summed_over, at.copies, tp):
            if group is not None:
                largest = collectives.all_reduce(largest, group, op="max")
        for one, own in zip(found, largest):
            one.roll(own)


def histories(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    return {name: one.history.clone() for name, one in scales_of(layers).items()}


def load_histories(layers: Iterable[nn.Module], known: dict[str, Tensor]) -> None:
    """Of a state that has none the scales begin anew."""
    for name, one in scales_of(layers).items():
        one.history.copy_(known[name]) if name in known else one.history.zero_()
