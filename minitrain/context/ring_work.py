"""How even a ring's work is: score entries per step and rank, counted from the layout alone, as fractions.

    entries[s][r] = scores between the queries of rank r and the keys of rank r - s that a causal mask leaves

A ring goes at the pace of the slowest rank in each step: efficiency = Σ entries / (n · Σ_s max_r entries[s]).
With c = T/n tokens per rank, and a token's score with itself counted as half (as papers do) or one:

                  diagonal=1/2                               diagonal=1                 large c, n = 2, 4, 8
    contiguous    n / (2n-1)                                 (nc+1) / ((2n-1)c+1)       2/3, 4/7, 8/15
    striped       nc / (nc+n-1)                              (nc+1) / (nc+n)            1
    zigzag        1, and c²/2 in every step on every rank    1                          1

Brandon et al. 2023 (Striped Attention), arXiv:2311.09431, section 3; Dubey et al. 2024 (Llama 3),
arXiv:2407.21783, section 3.3.2. Differs: entries of the mask are counted, where kernels work in tiles of some
64 x 64.
"""

from fractions import Fraction

from minitrain.context.layout import Layout, tiles
from minitrain.ranks.checks import require_fractions, require_positive_ints


def entries(layout: Layout, ranks: int, length: int, *, causal=True, diagonal=1) -> list[list[Fraction]]:
    """[step][rank]: scores that are computed and count."""
    require_fractions(diagonal=diagonal)
    require_positive_ints(ranks=ranks, length=length)
    held = [layout(rank, ranks, length) for rank in range(ranks)]
    # in step 0 every token's score with itself is one of them
    less = length // ranks * (1 - Fraction(diagonal)) if causal else Fraction(0)

    def count(step: int, rank: int) -> Fraction:
        seen = tiles(held[rank], held[(rank - step) % ranks], causal)
        return sum(tile.entries for tile in seen) - (less if step == 0 else 0)

    return [[count(step, rank) for rank in range(ranks)] for step in range(ranks)]


def efficiency(layout: Layout, ranks: int, length: int, *, causal=True, diagonal=1) -> Fraction:
    """Work / (ranks x time), if each step takes as long as its fullest rank."""
    table = entries(layout, ranks, length, causal=causal, diagonal=diagonal)
    return Fraction(sum(map(sum, table)), ranks * sum(map(max, table)))
