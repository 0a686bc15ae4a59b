"""Over which ranks is each model state cut? Memory, bytes on the wire, and the fastest choice that fits.

    k ranks a node, n nodes, W = k·n      state     N  not cut    I  over the k of a node    G  over all W
    factors F_p, F_g, F_o                 parameters, gradients, optimizer state are cut into so many pieces
    rule   F_p | F_g | F_o | W            needed twice a microbatch, once a microbatch, once a step: what is needed
                                          less often is cut as finely as what is needed more often, or finer

    NNN DDP      NNG ZeRO-1      NGG ZeRO-2      GGG ZeRO-3, FSDP      III MiCS, FSDP's hybrid sharding

Of PaRO's 27 words the rule leaves 10; of AMSP's factors all chains of divisors. A factor up to k lies inside a node and
divides k, a larger one is a multiple of k and spans F/k nodes. For Ψ parameters a rank holds

    2Ψ/F_p + 2Ψ/F_g + 12Ψ/F_o        16Ψ, (4 + 12/N)Ψ, (2 + 14/N)Ψ, 16Ψ/N for DDP and ZeRO-1, 2, 3 on N ranks

and sends, with M = 2Ψ the bytes of parameters or gradients and m microbatches a step,

    gather for forward and backward     2m · M (1 - 1/F_p)         every microbatch: what is cut is not kept whole
    reduce-scatter the gradients         m · M (1 - 1/F_g)         every microbatch: a slice cannot accumulate the rest
    reduce-scatter on, at the boundary       M (1/F_g - 1/F_o)     to the rank that will update the piece
    all-reduce over its replicas         2 · M (1/F_o - 1/W)       MiCS's second hop
    gather what was updated                  M (1/F_p - 1/F_o)

Each line is the passage from f to h pieces (or back), M (1/f - 1/h), a ring of h/f ranks: inside the node first, then
across with what is left (a gather goes the other way). With c = max(f, min(h, k)) pieces in between a rank sends

    inside  M (1/f - 1/c)            across  M (1/c - 1/h)

Hybrid sharding (III, m = 1) so sends across M (2/k - 2/W) = 2M (W-k)/(kW). FSDP's paper has 2M (W-1)/(GW), G = k: the
fraction (W-1)/W of one ring through all W ranks, shared by the G of a host, though only the W/G ranks of equal place
have to meet. One host, W = G, shows it: ours is 0, theirs 2M (W-1)/W². The difference, 2M (G-1)/(GW), is what that
ring sends more over a host's link; it is gone for G = 1 and a small part for many hosts.

Time is bytes by bandwidth, inside and across in turn: no overlap, no latency. NNN is never the answer where NNG may be:
it sends the same and holds more. A fraction of a byte means that W does not divide Ψ: pad.
Raises ValueError for ranks that do not fill nodes, factors that do not fit the cluster or break the rule, a bandwidth
or a count that is not positive, and a limit which no choice meets.
Wu et al. 2023 (PaRO), arXiv:2310.06003, abstract: the combinations; Chen et al. 2023 (AMSP), arXiv:2311.00257,
abstract: factor by state; Zhang et al. 2022 (MiCS), arXiv:2205.00119, sections 3.3, 3.4; Zhao et al. 2023 (FSDP),
arXiv:2304.11277, section 3.2.2; Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, sections 5 and 7. Differs: one rule
for both searches, all collectives in two levels, ring volumes with their (f-1)/f, every chain is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement

WORDS = tuple(
    "".join(word) for word in combinations_with_replacement("NIG", 3)
)  # parameters, gradients, optimizer state: none cut finer than the next
NAMED = {"DDP": "NNN", "ZeRO-1": "NNG", "ZeRO-2": "NGG", "ZeRO-3": "GGG", "MiCS": "III"}
STATE_BYTES = {
    "parameters": 2,
    "gradients": 2,
    "optimizer state": 12,
}  # bf16, bf16; fp32 master, momentum, variance
WIRE_BYTES = 2  # a parameter or a gradient, bf16


@dataclass(frozen=True)
class Cluster:
    """W ranks on nodes of k."""

    ranks: int
    per_node: int

    def __post_init__(self):
        if min(self.ranks, self.per_node) < 1 or self.ranks % self.per_node:
            raise ValueError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node}; use a positive multiple"
            )

    def fits(self, factor: int) -> bool:
        """Whether groups of `factor` neighbours lie inside nodes, or are made of whole ones."""
        if factor < 1 or self.ranks % factor:
            return False
        return self.per_node % factor == 0 or factor % self.per_node == 0

    def factors(self) -> list[int]:
        """Into how many pieces a state can be cut, ascending: divisors of k, then k times divisors of n."""
        return [factor for factor in range(1, self.ranks + 1) if self.fits(factor)]


@dataclass(frozen=True, order=True)
class Choice:
    """Into how many pieces each model state is cut: F_p, F_g, F_o."""

    parameters: int
    gradients: int
    optimizer: int

    def __post_init__(self):
        p, g, o = self.parameters, self.gradients, self.optimizer
        if min(p, g, o) < 1 or g % p or o % g:
            raise ValueError(
                f"factors {p}, {g}, {o} of parameters, gradients and optimizer state: each must be "
                f"positive and divide the next"
            )


@dataclass(frozen=True)
class Traffic:
    """Bytes one rank sends in a step, to its node and to other nodes."""

    intra_bytes: float
    inter_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.intra_bytes + self.inter_bytes


@dataclass(frozen=True)
class Plan:
    """A choice and its price."""

    choice: Choice
    memory_bytes: float
    traffic: Traffic
    seconds: float


# ---- the choices -----------------------------------------------------------------------------------------------------


def paro(word: str, cluster: Cluster) -> Choice:
    """The choice that a word of three letters means here: "NIG" keeps parameters, cuts gradients in the node, ..."""
    if len(word) != 3 or not set(word) <= set("NIG"):
        raise ValueError(
            f"{word!r} is no choice; write N, I or G for parameters, gradients and optimizer state"
        )
    factor = {"N": 1, "I": cluster.per_node, "G": cluster.ranks}
    return Choice(*(factor[letter] for letter in word))


def paro_choices(cluster: Cluster) -> dict[str, Choice]:
    """The 10 words that obey the rule; on one node, or with one rank a node, some of them mean the same."""
    return {word: paro(word, cluster) for word in WORDS}


def amsp_choices(cluster: Cluster) -> list[Choice]:
    """All triples of factors that obey the rule."""
    return [
        Choice(p, g, o)
        for p, g, o in combinations_with_replacement(cluster.factors(), 3)
        if g % p == 0 and o % g == 0
    ]


# ---- what a choice costs ---------------------------------------------------------------------------------------------


def memory_bytes(choice: Choice, parameters: int) -> dict[str, float]:
    """Model states of one rank by kind, in bf16 mixed precision with Adam. Gathered copies are buffers: not in here."""
    return {kind: float(held) for kind, held in _held(choice, parameters).items()}


def traffic(choice: Choice, parameters: int, cluster: Cluster, microbatches: int = 1) -> Traffic:
    """Bytes one rank sends in a step of `microbatches`: the sum of the five terms."""
    return Traffic(*map(float, _sum(_terms(choice, parameters, cluster, microbatches))))


def traffic_by_term(
    choice: Choice, parameters: int, cluster: Cluster, microbatches: int = 1
) -> dict[str, Traffic]:
    """The same, line by line of the table above."""
    terms = _terms(choice, parameters, cluster, microbatches)
    return {name: Traffic(float(inside), float(across)) for name, (inside, across) in terms.items()}


# Fractions, rounded once at the very end: choices that send the same bytes then have the same time, to the last bit.
Terms = dict[str, tuple[Fraction, Fraction]]  # name -> inside, across


def _held(choice: Choice, parameters: int) -> dict[str, Fraction]:
    factors = (choice.parameters, choice.gradients, choice.optimizer)
    return {
        kind: Fraction(size * parameters, factor)
        for (kind, size), factor in zip(STATE_BYTES.items(), factors)
    }


def _terms(choice: Choice, parameters: int, cluster: Cluster, microbatches: int) -> Terms:
    for factor in (choice.parameters, choice.gradients, choice.optimizer):
        if not cluster.fits(factor):
            raise ValueError(
                f"{factor} pieces do not fit {cluster.ranks} ranks on nodes of {cluster.per_node}; "
                f"choose from {', '.join(map(str, cluster.factors()))}"
            )
    for name, count in (("parameters", parameters), ("microbatches", microbatches)):
        if count < 1:
            raise ValueError(f"{name}={count}; a step has at least one")
    F_p, F_g, F_o, W = choice.parameters, choice.gradients, choice.optimizer, cluster.ranks
    lines = {
        "gather for forward and backward": (2 * microbatches, 1, F_p),
        "reduce-scatter the gradients": (microbatches, 1, F_g),
        "reduce-scatter on, at the boundary": (1, F_g, F_o),
        "all-reduce over its replicas": (2, F_o, W),
        "gather what was updated": (1, F_p, F_o),
    }
    return {
        name: _passage(times * WIRE_BYTES * parameters, coarse, fine, cluster.per_node)
        for name, (times, coarse, fine) in lines.items()
    }


def _passage(size: int, coarse: int, fine: int, per_node: int) -> tuple[Fraction, Fraction]:
    """Sent inside and across when `size` bytes go from `coarse` to `fine` pieces, or back."""
    between = max(coarse, min(fine, per_node))
    return Fraction(size, coarse) - Fraction(size, between), Fraction(size, between) - Fraction(size, fine)


def _sum(terms: Terms) -> tuple[Fraction, Fraction]:
    return sum(inside for inside, _ in terms.values()), sum(across for _, across in terms.values())


# ---- the search ------------------------------------------------------------------------------------------------------


def plans(
    choices: Iterable[Choice],
    parameters: int,
    cluster: Cluster,
    *,
    intra_bytes_per_s: float,
    inter_bytes_per_s: float,
    microbatches: int = 1,
) -> list[Plan]:
    """Every choice with its price. The bandwidths are one rank's, per direction: as of `simulate.machines`."""
    for name, rate in (("intra_bytes_per_s", intra_bytes_per_s), ("inter_bytes_per_s", inter_bytes_per_s)):
        if not rate > 0:
            raise ValueError(f"{name}={rate} is not a bandwidth; give a positive number")
    priced = []
    for choice in choices:
        inside, across = _sum(_terms(choice, parameters, cluster, microbatches))
        seconds = inside / Fraction(intra_bytes_per_s) + across / Fraction(inter_bytes_per_s)
        held = sum(_held(choice, parameters).values())
        priced.append(Plan(choice, float(held), Traffic(float(inside), float(across)), float(seconds)))
    return priced


def cheapest(limit_bytes: float, candidates: Iterable[Plan]) -> Plan:
    """The fastest plan that holds at most `limit_bytes` a rank; of equally fast ones the smallest."""
    candidates = list(candidates)
    if not candidates:
        raise ValueError("no choice to search in; give at least one, paro_choices(cluster).values() say")
    fitting = [plan for plan in candidates if plan.memory_bytes <= limit_bytes]
    if not fitting:
        least = min(plan.memory_bytes for plan in candidates)
        raise ValueError(
            f"no choice holds at most {limit_bytes / 1e9:g} GB a rank; the smallest holds "
            f"{least / 1e9:g} GB: take more ranks or a smaller model"
        )
    return min(fitting, key=lambda plan: (plan.seconds, plan.memory_bytes, plan.choice))
