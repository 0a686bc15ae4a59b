"""Products one behind another, in blocks: which order moves least (Chimera), what to fuse at all (Welder).

    PAIR       C[m, l] = A[m, k] B[k, l]        E[m, n] = C[m, l] D[l, n]        an MLP, or attention's two

Fused, a block of C never leaves fast memory: it is complete before it is used, so loop k runs inside of m and
l. Every array has one block on chip, which is loaded anew whenever it changes, that is for every step of the
loops down to the innermost one that the array depends on (`volume`); the loops that only earlier operators
have are over by then. `blocks` gives the blocks in the order in which they are touched, to be counted.

`welder` cuts a chain into fused groups, each with the best order and blocks that fit: the cheapest cut. Is
fusion worth it? For an MLP of width d the fused one loads all weights for every block of rows, and its rows
are as long as fast memory allows. Zheng et al. 2023 (Chimera), HPCA, section IV, algorithm 1; Shi et al. 2023
(Welder), OSDI, section 3. Differs: sizes of blocks are powers of two, tried out, not solved for; one level.
"""

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from math import inf, prod
from typing import NamedTuple

from minitrain.ranks.checks import require_positive, require_positive_ints
from minitrain.systems.kernels.tiles import Touch


class Operator(NamedTuple):
    """A product or an elementwise operator: its output and inputs, each a name and the loops of its axes."""

    output: tuple[str, str]
    inputs: Mapping[str, str]

    loops = property(lambda self: frozenset("".join([self.output[1], *self.inputs.values()])))


PAIR = (Operator(("C", "ml"), {"A": "mk", "B": "kl"}), Operator(("E", "mn"), {"C": "ml", "D": "ln"}))
MLP = (PAIR[0], Operator(("G", "ml"), {"C": "ml"}), Operator(("E", "mn"), {"G": "ml", "D": "ln"}))
Chain = Sequence[Operator]
# Operators in one kernel: elements that go to it and come from it, its order, its blocks' sizes.
Group = namedtuple("Group", "moved order block outputs")


def finished(chain: Chain) -> list[frozenset[str]]:
    """[operator] -> loops of earlier operators that it does not have and its producer has summed over."""
    outside = [one.loops - set(one.output[1]) for one in chain]
    return [frozenset().union(*outside[:at]) for at in range(len(chain))]


def outside(chain: Chain) -> list[tuple[int, str, str]]:
    """(operator, array, loops) of what comes from slow memory and goes there: all but arrays between."""
    made = {one.output[0] for one in chain[:-1]}
    arrays = [(at, *array) for at, one in enumerate(chain) for array in one.inputs.items()]
    return [array for array in arrays if array[1] not in made] + [(len(chain) - 1, *chain[-1].output)]


def orders(chain: Chain) -> list[str]:
    """Those in which an operator's sum is complete before the next one needs it."""
    loops = sorted(frozenset().union(*(one.loops for one in chain)))
    made = [(one.loops - set(one.output[1]), one.output[1]) for one in chain[:-1]]
    pairs = [pair for summed, output in made for pair in product(summed, output)]
    fits = lambda order: all(order.index(summed) > order.index(loop) for summed, loop in pairs)
    return ["".join(order) for order in permutations(loops) if fits(order)]


def volume(chain: Chain, order: str, counts: Mapping[str, int]) -> dict[str, int]:
    """Array -> blocks loaded and stored, for so many along each loop; a sum not yet complete comes back."""
    _check(order, counts)
    over, moved = finished(chain), {}
    for at, array, loops in outside(chain):
        running = [loop for loop in order if loop not in over[at] and counts[loop] > 1]
        inner = max((running.index(loop) for loop in loops if loop in running), default=-1)
        moved[array] = prod(counts[loop] for loop in running[: inner + 1])
    result, loops = chain[-1].output
    return moved | {result: 2 * moved[result] - prod(counts[loop] for loop in loops)}


def blocks(chain: Chain, order: str, counts: Mapping[str, int]) -> Iterator[Touch]:
    """The blocks of slow memory as the loops run: an operator's once the sums before it are complete, and of
    the steps of a loop that it does not have, inside of its own, in the first."""
    _check(order, counts)
    over, arrays = finished(chain), outside(chain)
    for at in product(*(range(counts[loop]) for loop in order)):
        place = dict(zip(order, at))
        for number, array, loops in arrays:
            inner = max(order.index(loop) for loop in chain[number].loops)
            first = all(place[loop] == 0 for loop in set(order[inner + 1 :]) - over[number])
            if first and all(place[loop] == counts[loop] - 1 for loop in over[number]):
                yield Touch(array, tuple(place[loop] for loop in loops), 1, array == chain[-1].output[0])


def _check(order: str, counts: Mapping[str, int]) -> None:
    require_positive_ints(1 << 20, **counts)
    if sorted(order) != sorted(counts):
        raise ValueError(f"order={order!r}: name each of {', '.join(sorted(counts))} once")


def fused(chain: Chain, sizes: Mapping[str, int], fast_elements: int, least: int = 16) -> Group | None:
    """The chain in one kernel: the least traffic of all orders and blocks of 16, 32, .. or a whole axis of
    which one of every array fits; None if none does."""
    require_positive_ints(1 << 20, least=least, **sizes)
    arrays = [array for one in chain for array in (one.output, *one.inputs.items())]
    best, outputs = None, tuple(one.output[0] for one in chain)
    steps = {at: {min(least << i, n) for i in range(n.bit_length())} for at, n in sizes.items()}
    ways = orders(chain)
    for block in (dict(zip(ways[0], chosen)) for chosen in product(*(sorted(steps[at]) for at in ways[0]))):
        size = {array: prod(block[loop] for loop in axes) for array, axes in arrays}
        counts = {loop: -(-sizes[loop] // n) for loop, n in block.items()}
        for order in ways if sum(size.values()) <= fast_elements else ():
            moved = sum(n * size[array] for array, n in volume(chain, order, counts).items())
            if best is None or moved < best.moved:
                best = Group(moved, order, block, outputs)
    return best


def welder(chain: Chain, sizes: Mapping[str, int], fast_elements: int) -> list[Group]:
    """The chain cut into fused groups that move least together. Raises ValueError if nothing fits."""
    require_positive(fast_elements=fast_elements)
    best: list[tuple[float, list[Group]]] = [(0, [])]  # of the first operators
    for end in range(1, len(chain) + 1):
        found = [(*one, fused(chain[start:end], sizes, fast_elements)) for start, one in enumerate(best)]
        options = [(moved + last.moved, [*groups, last]) for moved, groups, last in found if last]
        best.append(min(options, key=lambda one: one[0], default=(inf, [])))
    if best[-1][0] == inf:
        raise ValueError(f"no block of 16 along each loop fits {fast_elements:,} elements; give more")
    return best[-1][1]
