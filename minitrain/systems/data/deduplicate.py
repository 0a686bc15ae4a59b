"""Fuzzy deduplication: find documents that say nearly the same without comparing every pair.

A document becomes the set A of its shingles, all runs of k words. Two documents are near-duplicates if their
Jaccard similarity J = |A ∩ B| / |A ∪ B| reaches a threshold. Of a random order of all shingles the first in A
equals the first in B with probability J, so the minima under h hash functions estimate J without the sets
(MinHash). Compared are only documents that agree in all r rows of at least one of b bands:

    P(candidate) = 1 - (1 - J^r)^b        b = 16, r = 4, h = b·r: 0.06 at J = 0.25, 0.64 at 0.5, 0.998 at 0.75

Time and memory grow with the number of documents, not with its square. Broder 1997, "On the resemblance and
containment of documents"; in a pipeline: WanJuan-CC, arXiv:2402.19282. Differs: candidates are checked
against the exact J; a real pipeline spreads the bands over thousands of machines.
"""

from collections import defaultdict
from collections.abc import Sequence

from minitrain.model.data.batches import hashed
from minitrain.ranks.checks import require_positive_ints, require_text


def keep_first_of_each(documents: Sequence[str], threshold=0.7, words=5, bands=16, rows=4) -> list[int]:
    """Numbers of the documents to keep, in order: each that is no near-duplicate of one kept before it."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: a share of common shingles, in (0, 1]")
    require_positive_ints(words=words, bands=bands, rows=rows)
    kept: list[int] = []
    sets: dict[int, set[str]] = {}
    in_band: dict[tuple, list[int]] = defaultdict(list)  # (band, its minima) -> kept documents that have them
    for number, document in enumerate(documents):
        mine = shingles(document, words)
        minima = minhash(mine, bands * rows)
        keys = [(band, *minima[band * rows : (band + 1) * rows]) for band in range(bands)]
        candidates = {other for key in keys for other in in_band[key]}
        if all(jaccard(mine, sets[other]) < threshold for other in candidates):
            kept.append(number)
            sets[number] = mine
            for key in keys:
                in_band[key].append(number)
    return kept


def shingles(document: str, words: int = 5) -> set[str]:
    """All runs of `words` words, blind to case and spacing; the whole document if it is shorter."""
    require_text(document=document)
    split = document.lower().split()
    return {" ".join(split[i : i + words]) for i in range(max(1, len(split) - words + 1))}


def jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b)


def minhash(items: set[str], num_hashes: int) -> list[int]:
    """The least hash of any item, for each of `num_hashes` hash functions x -> (a·x + b) mod 2^61 - 1."""
    require_positive_ints(1 << 16, num_hashes=num_hashes)
    prime, xs = (1 << 61) - 1, [hashed(item) for item in items]
    functions = [(hashed(f"a{i}"), hashed(f"b{i}")) for i in range(num_hashes)]
    return [min((a * x + b) % prime for x in xs) for a, b in functions]
