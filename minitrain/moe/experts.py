"""The work of the experts on rows that stand sorted by expert: several implementations, one result.

rows [R, D], counts [E] (sum R), up, gate [E, D, F], down [E, F, D]  ->  [R, D]

    y = act(rows · up_e) · down_e       or, with a gate,    y = (act(rows · gate_e) * (rows · up_e)) · down_e

loop       product after product, as autograd sees them       the reference
padded     [E, max count, D], batched products                E · max - R rows of zeros are worked on as well
blocked    each count padded to a multiple of `block`         at most E · (block - 1) such rows
grouped    nothing in excess: 2·R·D·F FLOPs per matrix        saves rows and the hidden layer before act
scattered  x [N, D] read and added to through indices         saves x, which others save too, and no row
LowBits    product after product in few bits                  saves codes of rows and of the hidden layer

`grouped` is torch's grouped product on a GPU in bfloat16 with widths of whole 16 bytes; elsewhere (torch's
kernel on a CPU is a loop too, and knows no float64) the experts take turns (turns.py). All need the counts on
the host: give them as `sizes` where you know them (a dry run).
Gale et al. 2022 (MegaBlocks, arXiv:2211.15841, section 4); Tan et al. 2024 (ScatterMoE, arXiv:2403.08245,
section 3). Differs: dense products per expert for their kernels; MegaBlocks' blocks are rows, its F is whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.moe.turns import Act, Given, hidden, in_turns
from minitrain.precision.products import Products, Scales
from minitrain.precision.quantized_linear import multiply
from minitrain.ranks.checks import require_positive_ints


def loop(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """The reference."""
    parts = rows.split(numbers(counts, sizes, len(rows)))
    gates = [None] * len(up) if gate is None else gate.unbind()
    experts = zip(parts, up.unbind(), down.unbind(), gates)
    return torch.cat(
        [hidden(act, part @ u, None if g is None else part @ g) @ d for part, u, d, g in experts]
    )


# ---- room for zeros --------------------------------------------------------------------------------------


def padded(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """All experts at once, each with room for the busiest (GShard's C, with nothing dropped)."""
    sizes = numbers(counts, sizes, len(rows))
    place = places(sizes, [max(sizes)] * len(sizes), rows.device)
    batch = rows.new_zeros(len(sizes) * max(sizes), rows.shape[1]).index_copy(0, place, rows)
    batch = batch.unflatten(0, (len(sizes), max(sizes)))
    y = hidden(act, batch @ up, None if gate is None else batch @ gate) @ down
    return y.flatten(0, 1).index_select(0, place)


def blocked(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None, block: int = 16) -> Tensor:
    """Groups of whole blocks, as kernels want them that work on tiles: then the grouped products."""
    require_positive_ints(block=block)
    sizes = numbers(counts, sizes, len(rows))
    room = whole_blocks(sizes, block)
    place = places(sizes, room, rows.device)
    padded_rows = rows.new_zeros(sum(room), rows.shape[1]).index_copy(0, place, rows)
    counts = torch.tensor(room, device=rows.device)
    return grouped(padded_rows, counts, up, down, act, gate, sizes=room).index_select(0, place)


def whole_blocks(sizes: list[int], block: int) -> list[int]:
    """Each size rounded up to a multiple of `block`."""
    return [-(-size // block) * block for size in sizes]


def places(sizes: list[int], room: list[int], device: torch.device) -> Tensor:
    """[R]: where row i stands when expert e, with sizes[e] rows, has room for room[e]."""
    starts = [sum(room[:e]) for e in range(len(room))]
    return torch.cat([torch.arange(start, start + size, device=device) for start, size in zip(starts, sizes)])


# ---- nothing in excess -----------------------------------------------------------------------------------


def grouped(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """Each expert on its own rows, however many."""
    if has_kernel(rows, up, down):
        return by_kernel(rows, counts, up, down, act, gate)
    sizes = numbers(counts, sizes, len(rows))
    return in_turns(rows, None, None, up, down, gate, act, sizes)


def scattered(x, tokens, weights, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """x [N, D] -> [N, D]. Row r of the experts is token tokens[r], and counts weights[r] in its sum.

    Neither the rows nor their results [R, D] ever exist at once, nor are they kept: the gradient of a weight
    comes from the hidden layer."""
    sizes = numbers(counts, sizes, len(tokens))
    return in_turns(x, tokens, weights, up, down, gate, act, sizes)


class LowBits(nn.Module):
    """Product after product in few bits, used as the functions of this file. `inwards` scales what up and
    gate multiply, `outwards` what down does."""

    def __init__(self, products: Products, inwards: Scales, outwards: Scales):
        super().__init__()
        self.products, self.inwards, self.outwards = products, inwards, outwards

    def forward(self, rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
        results = []
        for e, part in enumerate(rows.split(numbers(counts, sizes, len(rows)))):
            matrices = [matrix[e].mT for matrix in (up, gate) if matrix is not None]
            made = multiply(part, matrices, [self.inwards] * len(matrices), self.products)
            results += multiply(hidden(act, *made), [down[e].mT], [self.outwards], self.products)
        return torch.cat(results)


def has_kernel(rows: Tensor, up: Tensor, down: Tensor) -> bool:
    """Has torch a grouped product that is one kernel for these?"""
    whole = all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in (up, down))
    return rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows) > 0 and whole


def by_kernel(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, act: Act, gate: Given) -> Tensor:
    """One call per matrix: group e ends at row ends[e]."""
    ends = counts.cumsum(0).to(torch.int32)
    made = [None if matrix is None else F.grouped_mm(rows, matrix, offs=ends) for matrix in (up, gate)]
    y = F.grouped_mm(hidden(act, *made), down, offs=ends)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)  # the kernel refuses a gradient that is one number, expanded
    return y


def numbers(counts: Tensor, sizes: list[int] | None, rows: int) -> list[int]:
    """The counts on the host, where each product gets its shape from."""
    sizes = counts.tolist() if sizes is None else sizes
    if sum(sizes) != rows:
        raise ValueError(
            f"counts {sizes} add up to {sum(sizes)}, but there are {rows} rows; each has one expert"
        )
    return sizes


IMPLEMENTATIONS = {"loop": loop, "padded": padded, "blocked": blocked, "grouped": grouped}
