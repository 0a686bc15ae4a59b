"""Tensor parallelism whose products are in few bits: scales that ranks agree on, gathers in few bits.

    W[F/t, D], x alike          column: dx is summed          scales over all of W and of dy, over the ranks
    W[D, F/t], x[.., F/t]       row: y is summed              of x and W
    with sequence parallelism   the codes of x (column) and of dy (row) are gathered, in forward and again in
                                backward; sums are scattered

One scale for a tensor is then that of the whole tensor, and one for a row that of the whole row: the codes
are those of one process; but of a K/V head that ranks share each casts its own term of dy, not the sum. Tiles
end where a rank's part ends. Sums travel in the dtype of the activations.
Sends, with E4M3 codes, (t-1)/t · B·T·D bytes per gather in the place of as many elements (and the scales),
and 4 bytes for each scale that is agreed on, 4 per row of 0-tiles.
NVIDIA Transformer Engine (amax over tp, FP8 all-gather). Differs: 2-D tiles gather what they are made from.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.precision.blocks import Quantized
from minitrain.precision.products import Route, Scales, multiply
from minitrain.ranks import collectives
from minitrain.tensor_parallel.linear import RowLinear, add_bias
from minitrain.tensor_parallel.sequence import TIME, check_time


def column(x, linears, group: ProcessGroup, *, products: Any, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """x `[.., D]`, alike on all ranks or this rank's tokens of it -> this rank's slice of each output."""
    weights, biases = zip(*(linear.local_params() for linear in linears))
    if not sequence_parallel:
        route = Route(dx=partial(collectives.all_reduce, group=group))
    elif products.travels:
        scattered = partial(collectives.reduce_scatter, group=group, dim=TIME)
        route = Route(x=partial(gathered, group=group), dx=scattered)
    else:
        x, route = collectives.gather_to(x, group, TIME), Route()
    ys = multiply(x, weights, [linear.scales for linear in linears], products, route)
    return tuple(y if bias is None else y + bias for y, bias in zip(ys, biases))


def row(x, linear: nn.Module, group: ProcessGroup, *, products: Any, sequence_parallel: bool) -> Tensor:
    """x `[.., F/t]` -> the product `[.., D]`, of all tokens or this rank's; the bias once."""
    if sequence_parallel:
        check_time(x.size(TIME), group)
    route = Route(y=partial(collectives.all_reduce, group=group))
    if sequence_parallel and products.travels:
        scattered = partial(collectives.reduce_scatter, group=group, dim=TIME)
        route = Route(y=scattered, dy=partial(gathered, group=group))
    elif sequence_parallel:
        route = Route()
    (y,) = multiply(x, [linear.weight], [linear.scales], products, route)
    if sequence_parallel and not products.travels:
        y = collectives.reduce_scatter_to(y, group, TIME)
    return add_bias(y, linear)


def gathered(q: Quantized, group: ProcessGroup) -> Quantized:
    """Of this rank's tokens `[B, T/t, D]` -> of all `[B, T, D]`."""
    codes = collectives.all_gather(q.codes, group, TIME)
    scales = q.scales
    if q.blocks.tile:
        scales = collectives.all_gather(scales.view(torch.uint8), group, TIME).view(scales.dtype)
    shape = (*q.shape[:-2], codes.shape[TIME], q.shape[-1])
    return replace(q, codes=codes, scales=scales, shape=type(q.shape)(shape))


def give_scales(owners: Iterable[nn.Module], group: ProcessGroup, products: Any, sequence: bool) -> None:
    """To every cut matrix below these."""
    for owner in owners:
        for linear in owner.modules():
            if hasattr(linear, "local_params") or isinstance(linear, RowLinear):
                cut = ("K" if isinstance(linear, RowLinear) else "N") + "M" * sequence
                linear.scales = Scales(products.history, group, cut, linear.weight.device)
