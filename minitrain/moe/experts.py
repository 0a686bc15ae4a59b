"""The work of the experts on rows that stand sorted by expert: several implementations, one result.

rows [R, D], counts [E] (sum R), up, gate [E, D, F], down [E, F, D]  ->  [R, D]

    y = act(rows · up_e) · down_e       or, with a gate,    y = (act(rows · gate_e) * (rows · up_e)) · down_e

loop       product after product, as autograd sees them       the reference
padded     [E, max count, D], batched products                E · max - R rows of zeros are worked on as well
blocked    each count padded to a multiple of `block`         at most E · (block - 1) such rows
grouped    nothing in excess: 2·R·D·F FLOPs per matrix        saves rows and the hidden layer before act
scattered  x [N, D] read and added to through indices         saves x, which others save too, and no row
LowBits    product after product in few bits                  saves codes of rows and of the hidden layer

`grouped` is torch's grouped product on a GPU in bfloat16 with widths of whole 16 bytes; elsewhere the experts
take turns (`in_turns`). All need the counts on the host: give them as `sizes` where you know them. Gale et
al. 2022 (MegaBlocks, arXiv:2211.15841, section 4); Tan et al. 2024 (ScatterMoE, arXiv:2403.08245, section 3:
reads and writes through indices inside one kernel). Differs: dense products per expert for their kernels, a
copy of one expert's rows at a time; MegaBlocks' blocks are rows, its F is whole.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.precision.products import Products, Scales, multiply
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.checks import require_positive_ints

Given = Tensor | None
Tensors = Sequence[Tensor]
Act = Callable[[Tensor], Tensor]


def hidden(act: Act, up: Tensor, gate: Given = None) -> Tensor:
    """The layer between, [rows, F], from what one or two products made of the rows."""
    return act(up) if gate is None else act(gate) * up


def loop(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """The reference."""
    parts = rows.split(numbers(counts, sizes, len(rows)))
    gates = [None] * len(up) if gate is None else gate.unbind()
    made = [hidden(act, x @ u, None if g is None else x @ g) for x, u, g in zip(parts, up.unbind(), gates)]
    return torch.cat([layer @ d for layer, d in zip(made, down.unbind())])


def padded(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None, room=0) -> Tensor:
    """All experts at once, each with room for the busiest (GShard's C, nothing dropped), or with more."""
    sizes = numbers(counts, sizes, len(rows))
    place = places(sizes, [room := max(room, *sizes)] * len(sizes), rows.device)
    batch = rows.new_zeros(len(sizes) * room, rows.shape[1]).index_copy(0, place, rows)
    batch = batch.unflatten(0, (len(sizes), room))
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


def grouped(rows, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """Each expert on its own rows, however many."""
    if has_kernel(rows, up, down):
        return by_kernel(rows, counts, up, down, act, gate)
    sizes = numbers(counts, sizes, len(rows))
    return in_turns(rows, None, None, up, down, gate, act, sizes)


def scattered(x, tokens, weights, counts, up, down, act=F.gelu, gate: Given = None, *, sizes=None) -> Tensor:
    """x [N, D] -> [N, D]. Row r of the experts is token tokens[r], and counts weights[r] in its sum.

    Neither rows nor results [R, D] ever exist at once: a weight's gradient comes from the hidden layer."""
    sizes = numbers(counts, sizes, len(tokens))
    return in_turns(x, tokens, weights, up, down, gate, act, sizes)


class LowBits(nn.Module):
    """Product after product in few bits; `inwards` scales what up and gate multiply, `outwards` down."""

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
        raise ValueError(f"counts {sizes} add up to {sum(sizes)}, not to the {rows} rows: each has an expert")
    return sizes


IMPLEMENTATIONS = {"loop": loop, "padded": padded, "blocked": blocked, "grouped": grouped}


# ---- one expert after the other, forward and backward by hand --------------------------------------------


def in_turns(x, tokens: Given, weights: Given, up, down, gate: Given, act: Act, sizes: list[int]) -> Tensor:
    """The rows of the experts, sizes[e] of each, are x itself; or row r is x[tokens[r]], and weights[r] times
    its result is added to y[tokens[r]].

        rows · up_e, rows · gate_e -> z      d up_e = rowsᵀ · dz;  d rows = dz · up_eᵀ
        hidden(z) · down_e -> y              d hidden = dy · down_eᵀ;  d down_e = hiddenᵀ · dy

    Saved are x, z [R, F] (two with a gate) and the weights of the routing, but no result: hidden [rows, F] is
    there for one turn and made again in backward, as is dz (by autograd); with weight w the result is w ·
    (hidden · down_e), so dw = hidden · d hidden. A forward turn makes (F + D) · rows elements, or 2F · rows
    with a gate if that is more; a backward turn 3F · rows, 5F with a gate; and 2D where rows are copies of
    tokens. FLOPs: 2·R·D·F per matrix, twice that in backward, less a product for a frozen matrix."""

    def forward(x: Tensor, weights: Given, down: Tensor, *matrices: Tensor) -> tuple[Tensor, tuple]:
        made = [x.new_empty(sum(sizes), matrix.shape[2]) for matrix in matrices]
        y = (x.new_empty if tokens is None else x.new_zeros)(len(x), down.shape[2])
        for e, here in enumerate(slices(sizes)):
            given = rows_at(x, tokens, here), weight_at(weights, here), of(e, matrices), down[e]
            add_rows(y, tokens, here, turn(*given, of(here, made), act))
            del given  # lest the rows stay beside those of the next turn
        return y, (x, tokens, weights, down, *matrices, *made)

    def backward(dys: Tensors, saved: Tensors, wanted: Sequence[bool]) -> tuple[Given, ...]:
        (dy,), (x, tokens, weights, down, *rest) = dys, saved
        matrices, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        wants = zip((weights, down, *matrices), wanted[1:])
        dweights, *grads = (torch.empty_like(param) if want else None for param, want in wants)
        dx = (torch.empty_like(x) if tokens is None else torch.zeros_like(x)) if wanted[0] else None
        for e, here in enumerate(slices(sizes)):
            given = rows_at(dy, tokens, here), rows_at(x, tokens, here), weight_at(weights, here)
            given += of(e, matrices), down[e], of(here, made), act, [*of(here, [dweights]), *of(e, grads)]
            drows = turn_backward(*given, wanted[0], dx[here] if wanted[0] and tokens is None else None)
            if wanted[0] and tokens is not None:
                add_rows(dx, tokens, here, drows)
            del given, drows
        return dx, dweights, *grads

    return custom_vjp(forward, backward, x, weights, down, up, *(() if gate is None else (gate,)))


def turn(rows: Tensor, weight: Given, matrices: Tensors, down: Tensor, made: Tensors, act: Act) -> Tensor:
    """One expert's rows [rows, D] -> their results. The products before act are written into `made`."""
    for matrix, room in zip(matrices, made):
        torch.mm(rows, matrix, out=room)
    y = hidden(act, *made) @ down
    return y if weight is None else y.mul_(weight)


def turn_backward(dy, rows, weight: Given, matrices, down, made, act, rooms, wants_rows, out: Given = None):
    """dy of an expert's rows -> that of the rows; those of weight, down and matrices go into `rooms`."""
    dweight, ddown, *dmatrices = rooms
    with torch.enable_grad():
        leaves = [room.detach().requires_grad_() for room in made]
        layer = hidden(act, *leaves)
    dlayer = dy @ down.T
    if dweight is not None:
        torch.sum(dlayer * layer.detach(), 1, out=dweight)
    if weight is not None:
        dy, dlayer = dy * weight, dlayer.mul_(weight)
    if ddown is not None:
        torch.mm(layer.detach().T, dy, out=ddown)
    dmade = torch.autograd.grad(layer, leaves, dlayer)
    del layer, dlayer
    for d, room in zip(dmade, dmatrices):
        if room is not None:
            torch.mm(rows.T, d, out=room)
    if not wants_rows:
        return None
    drows = torch.mm(dmade[0], matrices[0].T, out=out)
    for d, matrix in zip(dmade[1:], matrices[1:]):
        drows.addmm_(d, matrix.T)
    return drows


def of(which: int | slice, tensors: Sequence[Given]) -> list[Given]:
    """An expert's matrices, or its rows, of each."""
    return [None if tensor is None else tensor[which] for tensor in tensors]


def slices(sizes: list[int]) -> list[slice]:
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes)]


def weight_at(weights: Given, here: slice) -> Given:
    return None if weights is None else weights[here, None]


def rows_at(x: Tensor, tokens: Given, here: slice) -> Tensor:
    """The rows of a turn: a view of x, or a copy of those of its tokens."""
    return x[here] if tokens is None else x.index_select(0, tokens[here])


def add_rows(out: Tensor, tokens: Given, here: slice, rows: Tensor) -> None:
    if tokens is None:
        out[here] = rows
    else:
        out.index_add_(0, tokens[here], rows)
