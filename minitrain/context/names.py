"""The cores over ranks by name, and what each asks of sizes: plain values, checked before any rank starts. No torch here.

    core                   groups of cp, outermost first      layouts         slices     a rank's share of the heads
    ring                   ring                               all             yes        all
    ring_self_attention    ring                               all             yes        all
    gathered               ring                               all             yes        all
    balanced               ring                               contiguous      no         all
    burst                  across, inside                     all             yes        all
    double_ring            outer, inner                       all             yes        all
    wallfacer              ring, team                         all             no         all
    ulysses                ulysses                            all             yes        1/ulysses
    usp                    ring, ulysses                      of the ring     yes        1/ulysses
    loongtrain             outer, inner, ulysses              of the rings    yes        1/ulysses

A core's groups are axes of a mesh whose product is cp, in this order (`Mesh(dp=2, ring=2, ulysses=2, tp=2)`), and tokens are laid out
over all of them together: choices.py makes layouts and cores. With Ulysses the layout is that of the rings, and each of their ranks deals
its tokens to `ulysses` ranks.

Sends nothing. Raises ValueError in one line for a name or layout that is not there, groups that are not the core's, heads that Ulysses
cannot deal, teams whose square does not divide, lengths and slices that do not divide, and sequences longer than a model's positions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


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
    name: str,
    sizes: Mapping[str, int],
    layout: str,
    *,
    heads: int,
    slices: int = 1,
    key_width: int = 1,
    value_width: int = 1,
) -> None:
    """`sizes` of the core's groups; `heads`: query heads that a rank has before Ulysses (H/tp)."""
    kind = _named("attention core", name, CORES)
    _named("layout", layout, LAYOUTS)
    if layout not in kind.layouts:
        raise ValueError(f"{name}: layout {layout!r}; it is written for {', '.join(kind.layouts)}")
    if tuple(sizes) != kind.axes:
        raise ValueError(
            f"{name}: groups {', '.join(sizes) or 'none'}; its groups of cp are {', '.join(kind.axes)}, in this order"
        )
    if slices > 1 and not kind.slices:
        takes = ", ".join(other for other, what in CORES.items() if what.slices)
        raise ValueError(
            f"{name}: {slices} slices of a sequence in the pipeline, and it takes whole ones; use {takes}, or a schedule without "
            "slices"
        )
    if heads % sizes.get("ulysses", 1):
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{name}: {heads} heads of a rank cannot be dealt to ulysses={sizes['ulysses']}; use {', '.join(map(str, fits))}"
        )
    if "team" in sizes and sizes["ring"] % sizes["team"]:
        raise ValueError(
            f"{name}: teams of {sizes['team']} on {sizes['ring'] * sizes['team']} ranks; use a team whose square divides them"
        )
    if "team" in sizes and value_width > key_width:
        raise ValueError(f"{name}: values {value_width} wide, keys {key_width}; use another core")


def check_tokens(
    name: str, sizes: Mapping[str, int], layout: str, length: int, slices: int | Sequence[int] = 1
) -> None:
    """T divides as the layout needs it; with slices (how many, or the tokens of each), every one of them does."""
    ranks = math.prod(sizes.values())
    pieces = math.lcm(ranks // dealt_to(name, sizes) * LAYOUTS[layout], ranks)
    if slices == 1:
        if length % pieces or not length:
            raise ValueError(
                f"{name}, {layout}: T={length} is not a multiple of {pieces} on cp={ranks}; pad the sequence to "
                f"{-(-max(length, 1) // pieces) * pieces}"
            )
        return
    lengths = even_slices(length, slices, ranks) if isinstance(slices, int) else list(slices)
    if sum(lengths) != length:
        raise ValueError(
            f"slices of {lengths} tokens are {sum(lengths)}, the sequence has {length}; make them add up"
        )
    if any(size % pieces or not size for size in lengths):
        raise ValueError(
            f"{name}, {layout}: slices of {lengths} tokens are not all multiples of {pieces} on cp={ranks}; use a T that is a "
            f"multiple of {len(lengths) * pieces}, or give the lengths of slices"
        )


def dealt_to(name: str, sizes: Mapping[str, int]) -> int:
    """To how many ranks each rank of the rings deals its tokens; the layout is that of the rings."""
    return sizes["ulysses"] if len(CORES[name].axes) > 1 and "ulysses" in sizes else 1


def even_slices(length: int, count: int, ranks: int) -> list[int]:
    """Tokens of each slice, if every rank cuts its own T/n into `count` pieces, the first ones a token longer if need be."""
    if count < 1 or length % ranks or length // ranks < count:
        raise ValueError(
            f"{count} slices of T={length} over {ranks} ranks: each rank needs the same number of tokens, {count} or more"
        )
    size, longer = divmod(length // ranks, count)
    return [(size + (number < longer)) * ranks for number in range(count)]


def check_length(max_positions: int, length: int) -> None:
    """Of a whole sequence; a rank of cp sees a part of it only."""
    if length > max_positions:
        raise ValueError(
            f"sequence {length} > max_positions {max_positions}; cut the sequence or raise max_positions"
        )


def _named(what: str, name: str, table: Mapping[str, object]):
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    raise ValueError(
        f"no {what} {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"use {', '.join(table)}")
    )
