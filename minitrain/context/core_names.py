"""The cores over ranks by name, and what each asks of sizes, checked before any rank starts. No torch here.

A core's groups are axes of a mesh whose product is cp, in this order (`Mesh(dp=2, ring=2, ulysses=2, tp=2)`),
and tokens are laid out over all of them; compose/attention_cores.py makes layouts and cores.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minitrain.ranks.checks import require_one_of, require_positive_ints


class Kind(NamedTuple):
    """What a core asks for. `axes`: its groups, outermost first."""

    axes: tuple[str, ...]
    layouts: tuple[str, ...]
    slices: bool


LAYOUTS = {"contiguous": 1, "zigzag": 2, "striped": 1}  # pieces of a sequence for each rank of a ring
ALL = tuple(LAYOUTS)
CORES = {
    "ring": Kind(("ring",), ALL, True),
    "ring_self_attention": Kind(("ring",), ALL, True),
    "gathered": Kind(("ring",), ALL, True),
    "balanced": Kind(("ring",), ("contiguous",), False),
    "burst": Kind(("across", "inside"), ALL, True),
    "double_ring": Kind(("outer", "inner"), ALL, True),
    "wallfacer": Kind(("ring", "team"), ALL, False),
    "ulysses": Kind(("ulysses",), ALL, True),
    "usp": Kind(("ring", "ulysses"), ALL, True),
    "loongtrain": Kind(("outer", "inner", "ulysses"), ALL, True),
}


def check_choice(
    name: str, sizes: Mapping[str, int], layout: str, *, heads: int, slices=1, key_width=1, value_width=1
) -> None:
    """`sizes` of the core's groups; `heads`: query heads that a rank has before Ulysses (H/tp)."""
    require_one_of(CORES, core=name)
    require_one_of(LAYOUTS, layout=layout)
    kind, why = CORES[name], ""
    team, ring, ulysses = (sizes.get(axis, 1) for axis in ("team", "ring", "ulysses"))
    if layout not in kind.layouts:
        why = f"layout {layout!r}; it is written for {', '.join(kind.layouts)}"
    elif tuple(sizes) != kind.axes:
        axes = ", ".join(kind.axes)
        why = f"groups {', '.join(sizes) or 'none'}; its groups of cp are {axes}, in this order"
    elif slices > 1 and not kind.slices:
        takes = ", ".join(other for other, what in CORES.items() if what.slices)
        why = f"{slices} slices of a sequence in the pipeline, and it takes whole ones; use {takes}"
    elif heads % ulysses:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        why = f"{heads} heads of a rank cannot be dealt to ulysses={ulysses}; use {fits}"
    elif ring % team:
        why = f"teams of {team} on {ring * team} ranks; use a team whose square divides them"
    elif "team" in sizes and value_width > key_width:
        why = f"values {value_width} wide, keys {key_width}; use another core"
    if why:
        raise ValueError(f"{name}: {why}")


def dealt_to(name: str, sizes: Mapping[str, int]) -> int:
    """To how many ranks each rank of the rings deals its tokens; the layout is that of the rings."""
    require_one_of(CORES, name=name)
    return sizes["ulysses"] if len(CORES[name].axes) > 1 and "ulysses" in sizes else 1


def slice_lengths(length: int, slices: int | Sequence[int], ranks: int) -> list[int]:
    """Tokens of each slice on all ranks: as given, or each rank cuts its T/n in so many, longer first."""
    require_positive_ints(ranks=ranks)
    if not isinstance(slices, int):
        if sum(slices) != length:
            raise ValueError(f"slices {list(slices)} add up to {sum(slices)}, not to T={length}: make them")
        return list(slices)
    if slices < 1 or length % ranks or length // ranks < slices:
        what = f"{slices} slices of T={length} over {ranks} ranks"
        raise ValueError(f"{what}: each rank needs the same number of tokens, {slices} or more")
    size, longer = divmod(length // ranks, slices)
    return [(size + (number < longer)) * ranks for number in range(slices)]
