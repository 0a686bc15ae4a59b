"""Over which ranks is each model state cut? Memory, bytes on the wire, and the fastest choice that fits.

    k ranks per node, n nodes, W = k·n    N  not cut    I  cut over the k of a node    G  cut over all W
    factors F_p, F_g, F_o                 parameters, gradients, optimizer state are cut into so many pieces
    rule   F_p | F_g | F_o | W            what is needed less often is cut as finely, or finer

Of PaRO's 27 shardings the rule leaves 10; of AMSP's factors all chains of divisors. A factor up to k divides
k, a larger one is a multiple of k. For Ψ parameters a rank holds 2Ψ/F_p + 2Ψ/F_g + 12Ψ/F_o: 16Ψ, (4 + 12/N)Ψ,
(2 + 14/N)Ψ, 16Ψ/N for DDP and ZeRO-1, 2, 3 on N ranks. It sends the five terms of `_sent`. To pass from f to
h pieces of M = 2Ψ bytes, or back, costs M (1/f - 1/c) inside nodes and M (1/c - 1/h) across, where c = max(f,
min(h, k)) pieces lie in between. Hybrid sharding (III, m = 1) sends 2M (W-k)/(kW) across; FSDP's paper has 2M
(W-1)/(kW), a host's share of one ring through all W ranks. Where W does not divide Ψ, bytes are fractions:
pad. Time is bytes by bandwidth, without overlap or latency.
Wu et al. 2023 (PaRO), arXiv:2310.06003; Chen et al. 2023 (AMSP), arXiv:2311.00257; Zhang et al. 2022 (MiCS),
arXiv:2205.00119, section 3; Zhao et al. 2023 (FSDP), arXiv:2304.11277, section 3.2.2; ZeRO, arXiv:1910.02054,
section 5. Differs: one rule for both searches, collectives in two levels, every chain is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement

from minitrain.plan.strategy import PARO_SHARDINGS
from minitrain.ranks.checks import require_nonempty, require_positive, require_positive_ints

STATE_BYTES = {"parameters": 2, "gradients": 2, "optimizer state": 12}  # bf16; fp32 master, Adam's two
WIRE_BYTES = 2  # a parameter or a gradient, bf16


@dataclass(frozen=True)
class Cluster:
    ranks: int
    per_node: int

    def __post_init__(self):
        require_positive_ints(ranks=self.ranks, per_node=self.per_node)
        if self.ranks % self.per_node:
            raise ValueError(f"{self.ranks} ranks do not fill nodes of {self.per_node}; use a multiple")

    def factors(self) -> list[int]:
        """Into how many pieces a state can be cut: so many neighbours lie in a node, or fill whole ones."""
        W, k = self.ranks, self.per_node
        return [f for f in range(1, W + 1) if W % f == 0 and (k % f == 0 or f % k == 0)]


@dataclass(frozen=True, order=True)
class Choice:
    """Into how many pieces each model state is cut: F_p, F_g, F_o."""

    parameters: int
    gradients: int
    optimizer: int

    def __post_init__(self):
        p, g, o = self.factors
        require_positive_ints(parameters=p, gradients=g, optimizer=o)
        if g % p or o % g:
            kinds = "parameters, gradients and optimizer state"
            raise ValueError(f"factors {p}, {g}, {o} of {kinds}: each must divide the next")

    factors = property(lambda self: (self.parameters, self.gradients, self.optimizer))


@dataclass(frozen=True)
class Traffic:
    """Bytes one rank sends in a step, to its node and to other nodes."""

    intra_bytes: float
    inter_bytes: float

    total_bytes = property(lambda self: self.intra_bytes + self.inter_bytes)


@dataclass(frozen=True)
class ShardingPlan:
    choice: Choice
    memory_bytes: float
    traffic: Traffic
    seconds: float


def paro(sharding: str, cluster: Cluster) -> Choice:
    """The choice that three letters mean here: "NIG" keeps parameters, cuts gradients in the node, ..."""
    if len(sharding) != 3 or not set(sharding) <= set("NIG"):
        raise ValueError(f"{sharding!r} is no choice; write N, I or G for each of the three states")
    factor = {"N": 1, "I": cluster.per_node, "G": cluster.ranks}
    return Choice(*(factor[letter] for letter in sharding))


def paro_choices(cluster: Cluster) -> dict[str, Choice]:
    """The 10 that obey the rule; on one node, or with one rank per node, some of them mean the same."""
    return {sharding: paro(sharding, cluster) for sharding in PARO_SHARDINGS}


def amsp_choices(cluster: Cluster) -> list[Choice]:
    triples = combinations_with_replacement(cluster.factors(), 3)
    return [Choice(p, g, o) for p, g, o in triples if g % p == 0 and o % g == 0]


# ---- what a choice costs: in fractions, rounded once at the end, so that equal bytes give equal times


def memory_bytes(choice: Choice, parameters: int) -> dict[str, float]:
    """Model states of one rank by kind, in bf16 with Adam. Gathered copies are buffers: not in here."""
    require_positive_ints(10**18, parameters=parameters)
    sizes = zip(STATE_BYTES.items(), choice.factors)
    return {kind: float(Fraction(size * parameters, factor)) for (kind, size), factor in sizes}


def traffic(choice: Choice, parameters: int, cluster: Cluster, microbatches: int = 1) -> Traffic:
    """Bytes one rank sends in a step of `microbatches`."""
    return Traffic(*map(float, _sent(choice, parameters, cluster, microbatches)))


def _sent(choice: Choice, parameters: int, cluster: Cluster, microbatches: int) -> list[Fraction]:
    """Inside, across."""
    require_positive_ints(10**18, parameters=parameters, microbatches=microbatches)
    W, k, m, fitting = cluster.ranks, cluster.per_node, microbatches, cluster.factors()
    if not set(choice.factors) <= set(fitting):
        raise ValueError(f"{choice} does not fit {W} ranks on nodes of {k}; choose from {fitting}")
    F_p, F_g, F_o = choice.factors
    terms = (  # how often, from pieces, to pieces
        (2 * m, 1, F_p),  # gather for forward and backward, every microbatch: what is cut is not kept whole
        (m, 1, F_g),  # reduce-scatter the gradients, every microbatch: a slice cannot accumulate the rest
        (1, F_g, F_o),  # reduce-scatter on, at the boundary, to the rank that will update the piece
        (2, F_o, W),  # all-reduce over its replicas: MiCS's second hop
        (1, F_p, F_o),  # gather what was updated
    )
    inside = across = Fraction(0)
    for times, coarse, fine in terms:
        between = max(coarse, min(fine, k))
        first, then, last = (Fraction(times * WIRE_BYTES * parameters, f) for f in (coarse, between, fine))
        inside, across = inside + first - then, across + then - last
    return [inside, across]


# ---- the search


def plans(
    choices, parameters: int, cluster: Cluster, *, intra_bytes_per_s, inter_bytes_per_s, microbatches=1
) -> list[ShardingPlan]:
    """Every choice with its price. The bandwidths are one rank's, per direction."""
    require_positive(intra_bytes_per_s=intra_bytes_per_s, inter_bytes_per_s=inter_bytes_per_s)
    priced = []
    for choice in choices:
        inside, across = _sent(choice, parameters, cluster, microbatches)
        seconds = inside / Fraction(intra_bytes_per_s) + across / Fraction(inter_bytes_per_s)
        memory = sum(Fraction(n * parameters, f) for n, f in zip(STATE_BYTES.values(), choice.factors))
        sent = Traffic(float(inside), float(across))
        priced.append(ShardingPlan(choice, float(memory), sent, float(seconds)))
    return priced


def cheapest(limit_bytes: float, candidates: Iterable[ShardingPlan]) -> ShardingPlan:
    """The fastest plan that needs at most `limit_bytes` per rank; of equally fast ones the smallest."""
    candidates = list(candidates)
    require_nonempty(candidates=candidates)
    fitting = [plan for plan in candidates if plan.memory_bytes <= limit_bytes]
    if not fitting:
        least = f"the smallest needs {min(plan.memory_bytes for plan in candidates) / 1e9:g} GB: add ranks"
        raise ValueError(f"no choice needs at most {limit_bytes / 1e9:g} GB per rank; {least}")
    return min(fitting, key=lambda plan: (plan.seconds, plan.memory_bytes, plan.choice))
