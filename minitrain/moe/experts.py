"""The work of the experts on rows that stand sorted by expert: several ways, one result.

rows [R, D], counts [E] (sum R), up, gate [E, D, F], down [E, F, D]  ->  [R, D]

    y = act(rows · up_e) · down_e       or, with a gate,    y = (act(rows · gate_e) * (rows · up_e)) · down_e

loop       product after product, as autograd sees them       the reference
padded     [E, max count, D], batched products                E · max - R rows of zeros are worked on as well
blocked    each count padded to a multiple of `block`         at most E · (block - 1) such rows
grouped    nothing in excess: 2·R·D·F FLOPs per matrix        keeps rows and the hidden layer before act
scattered  x [N, D] read and added to through indices         keeps x, which others keep too, and no row

`grouped` is torch's grouped product on a GPU in bfloat16 with widths of whole 16 bytes. Everywhere else, CPUs
included (torch's kernel there is a loop too, no faster, and knows no float64), the experts take turns: what
act makes of an expert's rows lives for its turn only and is made again in backward. Counts are numbers on the
host for all ways: give them as `sizes` where you know them (a dry run), else counts are asked. Gale et al.
2022 (MegaBlocks, arXiv:2211.15841, section 4); Tan et al. 2024 (ScatterMoE, arXiv:2403.08245, section 3).
Differs: dense products per expert in place of their kernels; MegaBlocks' blocks are rows, its F is whole.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = list[int] | None
Given = Tensor | None
Act = Callable[[Tensor], Tensor]


def loop(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act = F.gelu,
    gate: Given = None,
    *,
    sizes: Sizes = None,
) -> Tensor:
    """The reference."""
    parts = rows.split(counts.tolist() if sizes is None else sizes)
    gates = [None] * len(up) if gate is None else gate.unbind()
    experts = zip(parts, up.unbind(), down.unbind(), gates)
    return torch.cat(
        [hidden(act, part @ u, None if g is None else part @ g) @ d for part, u, d, g in experts]
    )


def hidden(act: Act, up: Tensor, gate: Given = None) -> Tensor:
    """The layer between, [rows, F], from what one or two products made of the rows."""
    return act(up) if gate is None else act(gate) * up


# ---- room for zeros --------------------------------------------------------------------------------------


def padded(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act = F.gelu,
    gate: Given = None,
    *,
    sizes: Sizes = None,
) -> Tensor:
    """All experts at once, each with room for the busiest (GShard's C, with nothing dropped)."""
    sizes = counts.tolist() if sizes is None else sizes
    place = places(sizes, [max(sizes)] * len(sizes), rows.device)
    batch = rows.new_zeros(len(sizes) * max(sizes), rows.shape[1]).index_copy(0, place, rows)
    batch = batch.unflatten(0, (len(sizes), max(sizes)))
    y = hidden(act, batch @ up, None if gate is None else batch @ gate) @ down
    return y.flatten(0, 1).index_select(0, place)


def blocked(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act = F.gelu,
    gate: Given = None,
    *,
    sizes: Sizes = None,
    block: int = 16,
) -> Tensor:
    """Groups of whole blocks, as kernels want them that work on tiles: then the grouped products."""
    sizes = counts.tolist() if sizes is None else sizes
    room = whole_blocks(sizes, block)
    place = places(sizes, room, rows.device)
    padded_rows = rows.new_zeros(sum(room), rows.shape[1]).index_copy(0, place, rows)
    counts = torch.tensor(room, device=rows.device)
    return grouped(padded_rows, counts, up, down, act, gate, sizes=room).index_select(0, place)


def whole_blocks(sizes: list[int], block: int) -> list[int]:
    """Each size rounded up to a multiple of `block`."""
    if block < 1:
        raise ValueError(f"block = {block}; a block has 1 row or more")
    return [-(-size // block) * block for size in sizes]


def places(sizes: list[int], room: list[int], device: torch.device) -> Tensor:
    """[R]: where row i stands when expert e, with sizes[e] rows, has room for room[e]."""
    starts = [sum(room[:e]) for e in range(len(room))]
    return torch.cat([torch.arange(start, start + size, device=device) for start, size in zip(starts, sizes)])


# ---- nothing in excess -----------------------------------------------------------------------------------


def grouped(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act = F.gelu,
    gate: Given = None,
    *,
    sizes: Sizes = None,
) -> Tensor:
    """Each expert on its own rows, however many."""
    if has_kernel(rows, up, down):
        return by_kernel(rows, counts, up, down, act, gate)
    sizes = counts.tolist() if sizes is None else sizes
    return _Turns.apply(rows, None, None, up, down, gate, act, sizes)


def scattered(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act = F.gelu,
    gate: Given = None,
    *,
    sizes: Sizes = None,
) -> Tensor:
    """x [N, D] -> [N, D]. Row r of the experts is token tokens[r], and counts weights[r] in its sum.

    Neither the rows nor their results [R, D] ever exist at once, nor are they kept: the gradient of a weight
    comes from the hidden layer.
    """
    sizes = counts.tolist() if sizes is None else sizes
    return _Turns.apply(x, tokens, weights, up, down, gate, act, sizes)


def has_kernel(rows: Tensor, up: Tensor, down: Tensor) -> bool:
    """Has torch a grouped product that is one kernel for these?"""
    whole = all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in (up, down))
    return rows.is_cuda and rows.dtype == torch.bfloat16 and whole


def by_kernel(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, act: Act, gate: Given) -> Tensor:
    """One call per matrix: group e ends at row ends[e]."""
    ends = counts.cumsum(0).to(torch.int32)
    made = [None if matrix is None else F.grouped_mm(rows, matrix, offs=ends) for matrix in (up, gate)]
    y = F.grouped_mm(hidden(act, *made), down, offs=ends)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)  # the kernel refuses a gradient that is one number, expanded
    return y


class _Turns(torch.autograd.Function):
    """One expert after the other. Its rows are x[tokens[here]], or x[here] itself if `tokens` is None."""

    @staticmethod
    def forward(ctx, x, tokens, weights, up, down, gate, act, sizes):
        matrices = [up] if gate is None else [up, gate]
        made = [x.new_empty(sum(sizes), up.shape[2]) for _ in matrices]
        out = torch.empty_like(x) if tokens is None else torch.zeros_like(x)
        for e, here in enumerate(slices(sizes)):
            part = here if tokens is None else tokens[here]
            rows = x[part]
            for matrix, room in zip(matrices, made):
                torch.mm(rows, matrix[e], out=room[here])
            y = hidden(act, *(room[here] for room in made)) @ down[e]
            put(out, part, y if weights is None else y.mul_(weights[here, None]))
        ctx.save_for_backward(x, tokens, weights, down, *matrices, *made)
        ctx.act, ctx.sizes = act, sizes
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, tokens, weights, down, *rest = ctx.saved_tensors
        matrices, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        wants_x, _, _, wants_up, wants_down, wants_gate, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if tokens is None else torch.zeros_like(x)
        dweights = None if weights is None else torch.empty_like(weights)
        ddown = torch.empty_like(down) if wants_down else None
        dmatrices = [torch.empty_like(m) if w else None for m, w in zip(matrices, (wants_up, wants_gate))]
        for e, here in enumerate(slices(ctx.sizes)):
            part = here if tokens is None else tokens[here]
            rows, dout = x[part], dy[part]
            with torch.enable_grad():
                inputs = [room[here].detach().requires_grad_() for room in made]
                out = hidden(ctx.act, *inputs)
            act, dact = out.detach(), dout @ down[e].T
            if weights is not None:
                torch.sum(dact * act, 1, out=dweights[here])
                dout, dact = dout * weights[here, None], dact.mul_(weights[here, None])
            if wants_down:
                torch.mm(act.T, dout, out=ddown[e])
            dmade = torch.autograd.grad(out, inputs, dact)
            for d, dmatrix in zip(dmade, dmatrices):
                if dmatrix is not None:
                    torch.mm(rows.T, d, out=dmatrix[e])
            if wants_x:
                drows = dmade[0] @ matrices[0][e].T
                for d, matrix in zip(dmade[1:], matrices[1:]):
                    drows.addmm_(d, matrix[e].T)
                put(dx, part, drows)
        dup, dgate = (*dmatrices, None)[:2]
        return dx if wants_x else None, None, dweights, dup, ddown, dgate, None, None


def slices(sizes: list[int]) -> list[slice]:
    """Where the rows of each expert are."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]


def put(out: Tensor, part: slice | Tensor, rows: Tensor) -> None:
    """A slice is written once; of a token, all rows are added."""
    if isinstance(part, slice):
        out[part] = rows
    else:
        out.index_add_(0, part, rows)


WAYS = {"loop": loop, "padded": padded, "blocked": blocked, "grouped": grouped}
