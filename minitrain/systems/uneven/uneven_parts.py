"""Uneven parts on ranks, Whale's `replica` and `split`: rows of a batch, heads and hidden units of a block.

    rows_by       rank r has counts[r] rows of the global batch; the loss is divided once, by all targets
    split_block   q, k, v, up, gate by columns and out, down by rows, as in tensor_parallel/linear.py, but
                  rank r has heads[r] K/V heads, with their queries, and units[r] hidden units

Counts come from shares.py. Sends what even parts do, 2(n-1)/n B·T·D elements per pair of matrices and pass.
Jia et al. 2022, USENIX ATC (Whale). Differs: two functions, no annotations; every rank draws the whole batch;
no dropout, whose masks go by even rows.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.model.data.batches import Rows
from minitrain.ranks import checks
from minitrain.tensor_parallel import linear


def rows_by(rows: Rows, counts: Sequence[int]) -> Rows:
    checks.require_positive_ints(counts=counts)
    checks.require_one_of([rows.batch_size], rows=sum(counts))
    part = lambda whole, rank: whole[sum(counts[:rank]) :][: counts[rank]]
    return replace(rows, draw=lambda step, rank, ranks: [part(x, rank) for x in rows.draw(step, 0, 1)])


class Columns(linear.ColumnLinear):
    """This rank's `part` of the columns: of torch's weight, rows."""

    def __init__(self, whole: nn.Linear, part: slice, group: ProcessGroup):
        nn.Module.__init__(self)
        self.weight, self.bias = part_of(whole.weight, part), part_of(whole.bias, part)
        self.group, self.column = group, linear.column


class RowsOfMatrix(linear.RowLinear):
    def __init__(self, whole: nn.Linear, part: slice, group: ProcessGroup):
        nn.Module.__init__(self)
        self.weight, self.bias = part_of(whole.weight, (slice(None), part)), whole.bias
        self.group, self.row = group, linear.row


def part_of(whole: nn.Parameter | None, part) -> nn.Parameter | None:
    return whole if whole is None else nn.Parameter(whole.detach()[part].clone(), whole.requires_grad)


def split_block(block: nn.Module, heads: Sequence[int], units: Sequence[int], group: ProcessGroup) -> None:
    """A Block (model/gpt.py), in place."""
    config, n, rank = block.config, group.size(), group.rank()
    checks.require_positive_ints(heads=heads, units=units)
    checks.require_one_of([n], heads=len(heads), units=len(units))
    checks.require_one_of([int(config.num_kv_heads)], heads=sum(heads))
    checks.require_one_of([int(block.mlp.up.out_features)], units=sum(units))
    of = lambda counts, width: slice(sum(counts[:rank]) * width, sum(counts[: rank + 1]) * width)
    keys, queries = of(heads, config.head_dim), of(heads, config.head_dim * config.num_heads // sum(heads))
    up = of(units, 1)
    parts = dict(q=queries, k=keys, v=keys, out=queries, up=up, gate=up, down=up)
    for owner in (block.attention, block.mlp):
        for name, whole in list(owner.named_children()):
            kind = RowsOfMatrix if name in ("out", "down") else Columns
            setattr(owner, name, kind(whole, parts[name], group))
