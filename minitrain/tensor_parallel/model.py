"""Tensor parallelism of a whole model: every layer cut over the same ranks, in place, and its loss.

    layer         cut                                     its output, without and with sequence parallelism
    token table   rows V/t (vocabulary.py)                x[B, T, D] on all ranks      x[B, T/t, D]
    attention     q, k, v by columns = whole heads, H/t per rank; core: local; out by rows
    MLP           up (and gate) by columns, F/t hidden units; activation: local; down by rows
    head          columns V/t, tied to the table's rows   logits[B, T, V/t]            logits[B, T, V/t]

A layer is known by what it has: `tokens`, `attention` and `mlp`, or `out`. Parameters keep their names;
placements say how they are cut; a layer infers its number of heads from its width. `column` and `row` say how
activations travel (linear.py, sequence.py, overlap.py, ring_overlap.py). Fewer K/V heads than ranks, which
they divide, stay whole: each rank computes the head its queries need, and the gradient is summed, 2(t-1)/t of
the bytes of two narrow matrices in backward. Memory: whole layers while they are cut.
Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
Differs from Megatron-LM, which keeps a copy of the K/V head per rank and sums over the ranks that share it.
"""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.sharding import placement, shard
from minitrain.tensor_parallel import linear, low_precision, ring_overlap, sequence, vocabulary
from minitrain.tensor_parallel import overlap as chunked
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear, check_divides, check_whole, divisors


def cut_mlp(mlp: nn.Module, group: ProcessGroup, column: Callable, row: Callable) -> None:
    """up, gate (if there is one) and down of `mlp`."""
    for name in ("up", "gate"):
        if hasattr(mlp, name):
            setattr(mlp, name, ColumnLinear(getattr(mlp, name), group, column))
    mlp.down = RowLinear(mlp.down, group, row)


def cut_attention(attention: nn.Module, head_dim: int, group: ProcessGroup, column: Callable, row: Callable):
    """q, k, v and out of `attention`, whose heads are `head_dim` wide; ALiBi's slopes go with their heads."""
    require_positive_ints(head_dim=head_dim)
    heads, kv_heads = (linear.out_features // head_dim for linear in (attention.q, attention.k))
    check_divides("attention: query heads", heads, group)
    ranks = group.size()
    if kv_heads % ranks and ranks % kv_heads:
        what = f"{kv_heads} K/V heads over {ranks} ranks of {collectives.axis_of(group)}"
        fits = f"{divisors(kv_heads, kv_heads + 1)} ranks, or a multiple of {kv_heads}"
        raise ValueError(f"attention: {what}: neither divides the other; take {fits}")
    kv = partial(SharedHead, head_dim=head_dim) if kv_heads % group.size() else ColumnLinear
    attention.q = ColumnLinear(attention.q, group, column)
    attention.k, attention.v = kv(attention.k, group, column), kv(attention.v, group, column)
    attention.out = RowLinear(attention.out, group, row)
    if hasattr(attention, "slopes"):
        attention.slopes = shard(attention.slopes, 0, group)


class SharedHead(nn.Module):
    """Keys or values with fewer heads than ranks: a whole weight on every rank, which uses one head of it."""

    together, forward = ColumnLinear.together, ColumnLinear.forward

    def __init__(self, linear: nn.Linear, group: ProcessGroup, column: Callable, head_dim: int):
        super().__init__()
        check_whole("SharedHead", linear)
        self.weight, self.bias, self.group, self.column = linear.weight, linear.bias, group, column
        ranks_per_head = group.size() // (linear.out_features // head_dim)
        self.first, self.head_dim = group.rank() // ranks_per_head * head_dim, head_dim

    def local_params(self) -> tuple[Tensor, Tensor | None]:
        """The rows of this rank's head. Backward sums the gradient over the ranks: each has one head."""

        def rows(param: Tensor) -> Tensor:
            return collectives.copy_to(param, self.group).narrow(0, self.first, self.head_dim)

        return rows(self.weight), None if self.bias is None else rows(self.bias)


# ---- a whole model -----------------------------------------------------------------------------------------

# (sequence_parallel, overlap) -> how activations travel. On the ring, dW in one product is faster.
COLUMN_AND_ROW = {
    (False, False): (linear.column, linear.row),
    (True, False): (sequence.column, sequence.row),
    (False, True): (chunked.column, chunked.row),
    (True, True): [partial(way, dw_by_slice=False) for way in (ring_overlap.column, ring_overlap.row)],
}


def cut_layers(
    layers: Iterable, head_dim, vocab_size, group, *, sequence_parallel=False, overlap=False, products=None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Cuts every layer of a model, or stage, in place; returns the loss of the logits left on this rank.
    `products` in few bits (precision/products.py) are those of blocks."""
    column, row = COLUMN_AND_ROW[sequence_parallel, overlap]
    in_block = column, row
    if products is not None:
        settings = dict(products=products, sequence_parallel=sequence_parallel)
        in_block = partial(low_precision.column, **settings), partial(low_precision.row, **settings)
    leave = sequence.scatter_time if sequence_parallel else collectives.reduce_from
    tables: dict[nn.Parameter, nn.Parameter] = {}  # whole -> cut: a tied head takes what the table has become
    for layer in layers:
        if hasattr(layer, "tokens"):
            whole, layer.tokens = layer.tokens, shard(layer.tokens, 0, group, pad=True)
            tables[whole] = layer.tokens
            how = dict(group=group, vocab_size=vocab_size, leave=leave)
            layer.hooks.token_rows = partial(vocabulary.lookup, **how)
            if sequence_parallel:
                at, rows = partial(sequence.local_tokens, group=group), layer.hooks.position_rows
                layer.hooks.position_rows = lambda x, t, *names, rows=rows: rows(x, at(t), *names)
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
            whole, layer.out = layer.out.weight, ColumnLinear(layer.out, group, column, pad=True)
            if whole in tables:
                layer.out.weight = tables[whole]
    return partial(vocabulary.cross_entropy_sum, group=group, vocab_size=vocab_size)


def sequence_sharded_params(layers: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters that see this rank's tokens only under sequence parallelism: those that no rank has cut."""
    modules = [module for layer in layers for module in layer.modules()]
    shared = {param for module in modules if isinstance(module, SharedHead) for param in module.parameters()}
    params = {param for module in modules for param in module.parameters(recurse=False)}
    return {param for param in params if not placement(param).shards} - shared
