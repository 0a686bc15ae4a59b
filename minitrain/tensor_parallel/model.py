"""Tensor parallelism of a whole model: every layer cut over the same ranks, in place, and its loss.

    layer         cut                                     its output, without and with sequence parallelism
    token table   rows V/t (vocabulary.py)                x[B, T, D] on all ranks      x[B, T/t, D]
    block         heads and hidden units (block.py)       the same                     the same
    head          columns V/t, tied to the table's rows   logits[B, T, V/t]            logits[B, T, V/t]

A layer is known by what it has: `tokens`, `attention` and `mlp`, or `out`. Parameters keep their names;
placements say how they are cut. The cut model sends what linear.py or sequence.py say. Memory: whole layers.
Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.sharding import placement
from minitrain.tensor_parallel import linear, low_precision, ring_overlap, sequence, vocabulary
from minitrain.tensor_parallel import overlap as chunked
from minitrain.tensor_parallel.block import SharedHead, cut_attention, cut_mlp

# (sequence_parallel, overlap) -> how activations travel. On the ring, dW in one product is faster.
WAYS = {
    (False, False): (linear.column, linear.row),
    (True, False): (sequence.column, sequence.row),
    (False, True): (chunked.column, chunked.row),
    (True, True): tuple(partial(way, dw_by_slice=False) for way in (ring_overlap.column, ring_overlap.row)),
}


def cut_layers(
    layers: Iterable, head_dim, vocab_size, group, *, sequence_parallel=False, overlap=False, products=None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Cuts every layer of a model, or stage, in place; returns the loss of the logits left on this rank.
    `products` in few bits (precision/products.py) are those of blocks."""
    column, row = WAYS[sequence_parallel, overlap]
    in_block = (column, row) if products is None else low_precision.ways(products, sequence_parallel)
    leave = sequence.scatter_time if sequence_parallel else collectives.reduce_from
    tables: dict[nn.Parameter, nn.Parameter] = {}  # whole -> cut: a tied head takes what the table has become
    for layer in layers:
        if hasattr(layer, "tokens"):
            whole, layer.tokens = layer.tokens, vocabulary.cut_table(layer.tokens, group)
            tables[whole] = layer.tokens
            layer.hooks.token_rows = partial(
                vocabulary.lookup, group=group, vocab_size=vocab_size, leave=leave
            )
            if sequence_parallel:
                layer.hooks.position_rows = partial(_own_rows, layer.hooks.position_rows, group)
        elif hasattr(layer, "attention"):
            if not hasattr(layer.attention, "q"):
                raise ValueError("tensor parallelism does not cut latent attention (kv_latent)")
            cut_attention(layer.attention, head_dim, group, *in_block)
            mlp = getattr(layer.mlp, "shared", layer.mlp)  # beside experts, which are cut where they are sent
            if mlp is not None:
                cut_mlp(mlp, group, *in_block)
            if products is not None:
                owners = [owner for owner in (layer.attention, mlp) if owner is not None]
                low_precision.give_scales(owners, group, products, sequence_parallel)
        elif hasattr(layer, "out"):
            whole, layer.out = layer.out.weight, linear.ColumnLinear(layer.out, group, column, pad=True)
            if whole in tables:
                layer.out.weight = tables[whole]
    return partial(vocabulary.cross_entropy_sum, group=group, vocab_size=vocab_size)


def _own_rows(lookup: Callable, group: ProcessGroup, table: Tensor, positions: Tensor, *names: str) -> Tensor:
    return lookup(table, sequence.own_time(positions, group), *names)


def seen_in_slices(layers: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters that sequence parallelism shows this rank's tokens only: those that no rank has cut."""
    modules = [module for layer in layers for module in layer.modules()]
    shared = {param for module in modules if isinstance(module, SharedHead) for param in module.parameters()}
    params = {param for module in modules for param in module.parameters(recurse=False)}
    return {param for param in params if not placement(param).shards} - shared
