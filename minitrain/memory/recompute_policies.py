"""What each block keeps for its backward, in words; no torch.

    none          everything               full       its input only: all else is computed again
    selective     all but what is inside the core of its attention (its output is kept)
    keep:core     its input, and the core's output and what the core itself keeps (lse), so that the second
                  pass runs everything but the core; keep:NAME+NAME of any results
    drop:act      everything but that result and what is inside it; drop:NAME+NAME
    every:k       the input of every k-th block    sqrt    as many segments as they are long
    revolve:c     c inputs of blocks at once, by the binomial schedule (systems/plan/rematerialize.py)
    stage         the input of a pipeline's stage: the schedule has an action R for it

Layer by layer with commas, "full*4,selective*2,none": the last goes on. NAMES are of a block's results, in
this order; only latent attention has latents. A mixture has `experts`, from its rows on their way there to
their sum; up, act and down are its shared expert's then. A name that a block has not says nothing.
Chen et al. 2016, arXiv:1604.06174, section 4 (sqrt); Korthikanti et al. 2022, arXiv:2205.05198, section 5
(selective); Li et al. 2023 (DistFlashAttention), arXiv:2310.03294, section 3.3 and Gu et al. 2024
(LoongTrain, Selective Checkpoint++), arXiv:2406.18485, section 4.4 (keep:core).
"""

import math
from dataclasses import dataclass

from minitrain.ranks.checks import require_text

NAMES = ("norm1", "latents", "qkv", "core", "out", "norm2", "up", "act", "down", "experts")
USAGE = "none, stage, full, selective, keep:core, drop:act, every:2, sqrt, revolve:3, or a list full*2,none"


@dataclass(frozen=True)
class Policy:  # of one block, or of a segment of several
    again: bool = False  # the whole segment runs again, but for `keep`
    keep: frozenset[str] = frozenset()  # results that are not computed again
    drop: frozenset[str] = frozenset()  # results that are, alone, when they are asked for
    inside: frozenset[str] = frozenset()  # results that stay, and of which only the inside is dropped
    blocks: int = 1  # in a segment; 0: sqrt
    slots: int = 0  # of revolve

    drops = property(lambda self: self.again or bool(self.drop or self.inside))


NONE, FULL = Policy(), Policy(again=True)
POLICIES = dict(none=NONE, stage=NONE, full=FULL, sqrt=Policy(again=True, blocks=0))
POLICIES["selective"] = Policy(inside=frozenset({"core"}))


def parse(text: str) -> list[Policy]:
    """One policy for each block in front, the last for all others; "stage" is none for blocks."""
    require_text(recompute=text)
    policies = []
    for item in text.split(","):
        name, star, times = item.strip().partition("*")
        if star and not (times.isdigit() and int(times)):
            raise ValueError(f"recompute={text!r}: {item!r} is repeated {times!r} times; use 1 or more")
        policies += [policy_of(name, text)] * int(times or 1)
    if len(policies) > 1 and any(policy.blocks != 1 or policy.slots for policy in policies):
        rule = "every, sqrt and revolve are about all blocks of a stage; use one of them alone"
        raise ValueError(f"recompute={text!r}: {rule}")
    return policies


def policy_of(name: str, text: str) -> Policy:
    kind, _, rest = name.partition(":")
    if name == "stage" and text != "stage":
        raise ValueError(f"recompute={text!r}: stage is about whole stages; use it alone")
    if name in POLICIES:
        return POLICIES[name]
    if kind in ("keep", "drop"):
        names = frozenset(rest.split("+"))
        if wrong := sorted(names - set(NAMES)):
            missing = f"no result is called {wrong[0]!r}"
            raise ValueError(f"recompute={text!r}: {missing}; use {', '.join(NAMES)}")
        return Policy(again=True, keep=names) if kind == "keep" else Policy(drop=names)
    if kind in ("every", "revolve") and rest.isdigit() and int(rest):
        return Policy(again=True, **{"blocks" if kind == "every" else "slots": int(rest)})
    raise ValueError(f"recompute={text!r}; use {USAGE}")


def of_block(policies: list[Policy], block: int) -> Policy:
    return policies[min(block, len(policies) - 1)]


def segments(policies: list[Policy], blocks: range) -> list[tuple[range, Policy]]:
    """Consecutive blocks of a stage, each of a part of them: what is run again at once."""
    first = of_block(policies, 0)
    if first.slots:
        return [(blocks, first)]
    # of sqrt: as many blocks in a segment as there are segments, or one more; at least 1
    length = first.blocks or max(1, math.ceil(len(blocks) / max(1, math.isqrt(len(blocks)))))
    if length == 1:
        return [(range(block, block + 1), of_block(policies, block)) for block in blocks]
    return [(blocks[start : start + length], first) for start in range(0, len(blocks), length)]
