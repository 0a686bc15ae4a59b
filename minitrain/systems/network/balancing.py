"""Many flows, few uplinks: what hashing costs, and four cures.

    expected_max_load(8, 8)        2.597: eight flows hashed to eight uplinks; on the busiest one has 38.5 %
    expected_max_load(8, 8, 16)    1.369: each in 16 parts, with hashes of their own (Llama 3's E-ECMP)
    mean_rate(128, 64, 2)          0.731, not 0.635: uplinks on which two flows fit (MegaScale)
    ethereal(flows, paths)         flows / paths, exactly: whole flows in turn, only the remainder is split
    probed_ports(graph, pairs)     one flow a path: try source ports until the hash says a free one (HPN)

All exact, in Fractions. Training is where hashing hurts most: flows are few, large, of one size, and start
together; all ranks wait for the unlucky one. Meta 2024, arXiv:2407.21783, section 3.3.1 (Llama 3); Jiang et
al. 2024, arXiv:2402.15627, section 3.6 (MegaScale); Qian et al. 2024 (HPN), SIGCOMM; Addanki et al. 2024,
arXiv:2407.00550 (Ethereal). Differs: hashes are independent draws; HPN's library also looks at load.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import comb, perm

from minitrain.ranks.checks import require_nonempty, require_positive, require_positive_ints
from minitrain.systems.network.graph import Graph, Link, ecmp


def no_collision(flows: int, uplinks: int) -> Fraction:
    """The probability that no uplink gets two."""
    require_positive_ints(1024, flows=flows, uplinks=uplinks)
    return Fraction(perm(uplinks, flows), uplinks**flows)


def expected_max_load(flows: int, uplinks: int, parts: int = 1) -> Fraction:
    """Of the busiest uplink, in flows: the sum over m of the probability that one has more than m parts."""
    require_positive_ints(64, flows=flows, uplinks=uplinks, parts=parts)
    require_positive_ints(256, flows_times_parts=(balls := flows * parts))
    full, draws = -(-balls // uplinks), uplinks**balls  # some uplink always has `full` parts
    more = sum(draws - _at_most(m, balls, uplinks)[balls] for m in range(full, balls))
    return (full + Fraction(more, draws)) / parts


def _at_most(m: int, balls: int, bins: int) -> list[int]:
    """[i] -> in how many ways i balls fall into the bins, at most m into each."""
    if bins == 1:
        return [int(i <= m) for i in range(balls + 1)]
    half = _at_most(m, balls, bins // 2)
    rest = half if bins % 2 == 0 else _at_most(m, balls, bins // 2 + 1)
    return [sum(comb(i, j) * half[j] * rest[i - j] for j in range(i + 1)) for i in range(balls + 1)]


def mean_rate(flows: int, uplinks: int, ratio: int = 1) -> Fraction:
    """What a hashed flow gets of its line rate, if an uplink carries `ratio` of them and shares evenly."""
    require_positive_ints(1024, flows=flows, uplinks=uplinks)
    require_positive(ratio=ratio)
    others = range(flows)  # so many on the same uplink, each there with probability 1 / uplinks
    ways = [comb(flows - 1, j) * (uplinks - 1) ** (flows - 1 - j) for j in others]
    return sum(min(Fraction(1), Fraction(ratio) / (1 + j)) * ways[j] for j in others) / uplinks ** (flows - 1)


def ethereal(flows: int, paths: int) -> list[dict[int, Fraction]]:
    """[flow] -> {path: share}, for equal flows from one leaf to another."""
    require_positive_ints(1 << 16, flows=flows, paths=paths)
    whole, rest = divmod(flows, paths)
    shares = [{flow % paths: Fraction(1)} for flow in range(whole * paths)]
    room = Fraction(rest, paths)  # of each path for the remainder, which is laid over the paths end to end
    for number in range(rest):
        first, last = number / room, (number + 1) / room
        parts = range(int(first), -(-last.numerator // last.denominator))
        shares.append({path: (min(last, path + 1) - max(first, path)) * room for path in parts})
    return shares


def probed_ports(graph: Graph, pairs: Sequence[Link]) -> list[int]:
    """[pair] -> a source port whose path shares no cable with those before it; 0 where 1,000 fail."""
    require_nonempty(pairs=pairs)
    used, ports = set(), []
    for a, b in pairs:
        free = (port for port in range(1000) if not used & ecmp(graph, a, b, port).keys())
        ports.append(next(free, 0))
        used |= ecmp(graph, a, b, ports[-1]).keys()
    return ports
