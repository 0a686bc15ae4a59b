"""Dynamic sequence parallelism: stages work along different dims; cut one that the stage does not work along.

A video is x[B, T, S, D]: T frames of S patches. Its transformer attends within a frame, then along time, and
so on, by any layers on [N, length, D]. A stage along S sends nothing if T is cut; before T, one all-to-all:

    x[B, T/n, S, D]  stage along S  -> switch -> x[B, T, S/n, D]  stage along T  -> switch -> x[B, T/n, S, D]

    one stage along S, one along T     M = B·T·S·D elements, each all-to-all sends (P-1)/P · M/P
    here                               2 · M/P      whatever the stages do inside
    Ulysses, T cut throughout          4 · M/P      q, k, v and o of the stage along T; nothing along S
    Ulysses in every stage             8 · M/P      a sequence cut in one place, with no regard to the dims

Backward the same. Memory: activations 1/n everywhere; a switch holds x twice. Gradients of parameters are
sums over `group`. Zhao et al. 2024, DSP, arXiv:2403.10266. Differs: the stages tell where to switch.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.context.ulysses import switch
from minitrain.ranks.checks import require_ints

Stage = tuple[int, Callable[[Tensor], Tensor]]


def run_stages(x: Tensor, stages: Sequence[Stage], group: ProcessGroup, *, cut: int) -> Tensor:
    """x `[B, T, S, .., D]`, of which this rank has 1/n along dim `cut` -> the same after all stages, cut as x
    came. A stage is (dim, layer): the layer maps `[N, length, D]` to `[N, length, D]` along that dim."""
    dims = tuple(range(1, x.dim() - 1))
    if len(dims) < 2 or {cut, *(dim for dim, _ in stages)} - set(dims):
        what = f"stages along dims {[dim for dim, _ in stages]} of x {list(x.shape)}, cut along {cut}"
        raise ValueError(f"{what}; its dims are {list(dims)}: one to work along and one to cut, or more")
    here = cut
    for number, (dim, layer) in enumerate(stages):
        if dim == here:
            fit = [other for other in dims if x.size(other) % group.size() == 0 and other != dim]
            here = next_cut([later for later, _ in stages[number:]], fit or dims, home=cut)
            x = switch(x, group, cut=here, join=dim)
        x = along(x, dim, layer)
    return x if here == cut else switch(x, group, cut=cut, join=here)


def next_cut(coming: Sequence[int], dims: Sequence[int], home: int) -> int:
    """Which dim to cut, for few switches: the one that coming stages need whole last, or else as x came."""
    return max(dims, key=lambda dim: (coming.index(dim) if dim in coming else len(coming), dim == home))


def along(x: Tensor, dim: int, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer along one dim of `[B, T, S, .., D]`; all others are rows of its batch."""
    require_ints(-x.dim(), x.dim() - 1, dim=dim)
    rows = x.movedim(dim, -2)
    return layer(rows.flatten(0, -3)).unflatten(0, rows.shape[:-2]).movedim(-2, dim)
