"""Attention cores over the ranks of cp by name, as plain values: into which groups cp is cut, which layouts a core takes. No torch.

    core                  groups, outermost first         tokens
    ring                  cp                              any layout
    ring_self_attention   cp                              any layout
    balanced              cp                              contiguous
    ulysses               cp                              any layout; heads are a multiple of cp
    double_ring, burst    outer, inner                    any layout over outer · inner
    wallfacer             outer, inner (its team)         any layout over outer · inner
    usp                   ring, ulysses                   any layout over the ring, dealt to ulysses; heads are a multiple of that
    loongtrain            outer, inner, ulysses           any layout over outer · inner, dealt to ulysses

choices.py makes a core of a name and its groups. Raises ValueError in one line for what is not in this table.
"""
from __future__ import annotations

import math

GROUPS = {"ring": ("cp",), "ring_self_attention": ("cp",), "balanced": ("cp",), "ulysses": ("cp",), "double_ring": ("outer", "inner"),
          "burst": ("outer", "inner"), "wallfacer": ("outer", "inner"), "usp": ("ring", "ulysses"), "loongtrain": ("outer", "inner", "ulysses")}
LAYOUTS = {"contiguous": 1, "zigzag": 2, "striped": 1}          # pieces a rank


def axes(core: str, cp: int, inner: int = 1, ulysses: int = 1) -> dict[str, int]:
    """The axes into which cp is cut, outermost first."""
    sizes = {"inner": inner, "ulysses": ulysses}
    first, *rest = GROUPS[core]
    return {first: cp // math.prod(sizes[axis] for axis in rest), **{axis: sizes[axis] for axis in rest}}


def check(core: str, layout: str, cp: int, inner: int = 1, ulysses: int = 1) -> None:
    """Values that name a core and a layout and cut cp."""
    if core not in GROUPS:
        raise ValueError(f"core={core!r}; use {', '.join(GROUPS)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; use {', '.join(LAYOUTS)}")
    if core == "balanced" and layout != "contiguous" and cp > 1:
        raise ValueError(f"layout={layout!r} with core='balanced', which helps the ranks with little work; use layout='contiguous', or core='ring'")
    for name, size in (("inner", inner), ("ulysses", ulysses)):
        if size > 1 and name not in GROUPS[core]:
            fit = [other for other, groups in GROUPS.items() if name in groups]
            raise ValueError(f"{name}={size} with core={core!r}, which has no such group; use {name}=1, or core {', '.join(fit)}")
    if cp % (inner * ulysses):
        raise ValueError(f"inner={inner} x ulysses={ulysses} does not divide cp={cp}; their product must")


def dealt_over(core: str, cp: int, ulysses: int = 1) -> int:
    """Among how many of the cp ranks heads are shared out."""
    return cp if core == "ulysses" else ulysses


def pieces(core: str, layout: str, cp: int, ulysses: int = 1) -> int:
    """What the length of a sequence is a multiple of."""
    return 1 if cp == 1 else math.lcm(cp, LAYOUTS[layout] * (cp // ulysses))


def check_model(core: str, cp: int, ulysses: int, heads: int, kv_latent: int) -> None:
    """Does a core take these heads of one rank (of tp)?"""
    if kv_latent:
        raise ValueError(f"cp={cp} with latent attention (kv_latent={kv_latent}): its values are narrower than its keys, and cores over ranks take "
                         "both of one width; use cp=1, or multi-head or grouped-query attention")
    over = dealt_over(core, cp, ulysses)
    if heads % over:
        fit = " or ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"core={core!r} shares out heads over {over} ranks, and there are {heads} (on each rank of tp); use {fit} of them")
