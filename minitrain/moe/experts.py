"""The work of the experts on rows that stand sorted by expert: two ways, one result.

rows [R, D], counts [E] (sum R), up [E, D, F], down [E, F, D]  ->  [R, D]        act(rows · up_e) · down_e

loop      one product after the other                      E small products, nothing in excess
padded    [E, max count, D], two batched products          works on E · max - R rows of zeros as well
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def loop(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, act: Callable = F.gelu) -> Tensor:
    """The reference."""
    parts = rows.split(counts.tolist())
    return torch.cat([act(part @ up[e]) @ down[e] for e, part in enumerate(parts)])


def padded(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, act: Callable = F.gelu) -> Tensor:
    """All experts at once, each with room for the busiest."""
    most = int(counts.max()) if len(rows) else 0
    expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[expert]
    place = expert * most + torch.arange(len(rows), device=rows.device) - first
    batch = rows.new_zeros(len(counts) * most, rows.shape[1]).index_copy(0, place, rows)
    out = act(batch.view(len(counts), most, rows.shape[1]) @ up) @ down
    return out.flatten(0, 1)[place]
