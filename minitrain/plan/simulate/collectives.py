"""What a collective costs: alpha per hop, bytes over bandwidth, for a group on a machine of two levels.

S bytes over a link cost alpha + S/B (Hockney 1994). n ranks, m on each of N nodes: a hop has alpha_in and
B_in inside a node; between nodes alpha_out and B_out, a rank's share of the network cards. A pipeline across
both runs at B = min(B_in, m B_out): the m ranks of a node feed m rings (NCCL's channels).

    all_reduce   ring          2 (n-1) (alpha + S/(nB))        min(N, n-1) hops leave a node, at alpha_out
                 tree          2 chunked(ceil(log2 n))         double binary tree: up, then down
                 halving       2 log2 n alpha + 2 (n-1)/n S/B  halving and doubling, near first; m, N = 2^k
                 hierarchical  2 (m-1) (alpha_in + S/(m B_in)) + 2 (N-1) (alpha_out + S/(m N B_out))
                 leader        tree to one rank a node, ring of the leaders over one card each, tree back
    all_gather, reduce_scatter: half of ring, halving or hierarchical
    broadcast    tree, ring    chunked(ceil(log2 n)), chunked(n-1)
    all_to_all   pairwise      n-1 messages of S/n: those that stay and those that leave use different wires
                 bruck         ceil(log2 n) (alpha + S/2B)
    send, receive, barrier     alpha + S/B of the link between the two; ceil(log2 n) alpha (dissemination)

S is the ledger's `payload_bytes`: the tensor, or the whole output (all-gather), or the whole input. Not
modelled: congestion, other groups on the same cards (replay.py has them), start-up, switches that add.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from minitrain.plan.simulate.machines import Machine
from minitrain.ranks.checks import require_nonnegative


@dataclass(frozen=True)
class Placement:
    """n ranks on `nodes` nodes of a machine, between `fewest` and `most` on each, and the wires they see."""

    n: int
    nodes: int
    fewest: int
    most: int
    alpha_in: float
    alpha_out: float
    rate_in: float  # bytes/s of a device inside its node, per direction
    rate_out: float  # bytes/s of a device's share of the network cards, per direction
    rate_card: float  # bytes/s of one whole network card

    @property
    def rate(self) -> float:
        """Bytes/s of a chunked pipeline that passes through all ranks."""
        if self.nodes == 1:
            return self.rate_in
        across = self.fewest * self.rate_out
        return across if self.most == 1 else min(self.rate_in, across)

    @property
    def ring_hops(self) -> tuple[int, int]:
        """Of the n-1 hops once round the ring: how many stay in a node, how many leave one."""
        out = 0 if self.nodes == 1 else min(self.nodes, self.n - 1)
        return self.n - 1 - out, out

    # From the root to the deepest leaf, with one tree in each node below a tree of the nodes.
    tree_hops = property(lambda self: (_ceil_log2(self.most), _ceil_log2(self.nodes)))

    def latency(self, hops: tuple[int, int]) -> float:
        return hops[0] * self.alpha_in + hops[1] * self.alpha_out


def place(members: Sequence[int], machine: Machine) -> Placement:
    """Where the global ranks `members` sit: rank r on node r // devices_per_node."""
    on_node = Counter(machine.node_of(rank) for rank in members).values()
    alphas = machine.intra.latency_s, machine.inter.latency_s
    rates = machine.intra_bytes_per_s, machine.inter_bytes_per_s, machine.nic_bytes_per_s
    return Placement(len(members), len(on_node), min(on_node), max(on_node), *alphas, *rates)


# ---- one function per algorithm: seconds for S bytes, of an all-reduce one way; None where not allowed ----
def _ring(S: float, p: Placement) -> float:
    return p.latency(p.ring_hops) + (p.n - 1) / p.n * S / p.rate


def _chunked(S: float, p: Placement, hops: tuple[int, int], rate: float) -> float:
    """S bytes down d hops in k chunks that follow each other: min over k >= 1 of (d-1+k) (alpha + S/(kB)),
    (sqrt((d-1) alpha) + sqrt(S/B))^2 for large S: more chunks fill the pipe, and cost alphas."""
    alpha = p.alpha_out if hops[1] else p.alpha_in
    behind = sum(hops) - 1
    chunks = max(1.0, sqrt(behind * S / (alpha * rate)) if alpha else inf)
    return p.latency(hops) + (chunks - 1) * alpha + (1 + behind / chunks) * S / rate


def _halving(S: float, p: Placement) -> float | None:
    """1/2 of S to the neighbour, 1/4 to the next, twice as far: what leaves the node is small."""
    m, N = p.most, p.nodes
    if p.fewest != m or m & (m - 1) or N & (N - 1):
        return None
    return p.latency(p.tree_hops) + (1 - 1 / m) * S / p.rate_in + (1 - 1 / N) * S / m / p.rate_out


def _hierarchical(S: float, p: Placement) -> float | None:
    """A ring in each node, then m rings across the nodes on the m shards, one after the other."""
    m, N = p.most, p.nodes
    if p.fewest != m or m == 1 or N == 1:
        return None
    return (m - 1) * (p.alpha_in + S / (m * p.rate_in)) + (N - 1) * (p.alpha_out + S / (m * N * p.rate_out))


def _leader(S: float, p: Placement) -> float | None:
    if p.most == 1 or p.nodes == 1:
        return None
    inside = _chunked(S, p, (p.tree_hops[0], 0), p.rate_in)
    return inside + (p.nodes - 1) * (p.alpha_out + S / (p.nodes * p.rate_card))


def _pairwise(S: float, p: Placement) -> float:
    stays, leaves = p.most - 1, p.n - p.fewest
    wires = max(stays / p.n * S / p.rate_in, leaves / p.n * S / p.rate_out)
    return stays * p.alpha_in + leaves * p.alpha_out + wires


def _direct(S: float, p: Placement) -> float:
    """Between the two ranks that are furthest apart."""
    return p.alpha_in + S / p.rate_in if p.nodes == 1 else p.alpha_out + S / p.rate_out


# Ring, halving, Bruck: Thakur, Rabenseifner, Gropp 2005; double tree: Sanders, Speck, Traeff 2009, NCCL 2.4;
# leader: Jia et al. 2018, section 3.3; hierarchical: Mikami et al. 2018, Cho et al. 2019.
_tree = lambda S, p: _chunked(S, p, p.tree_hops, p.rate)
_chain = lambda S, p: _chunked(S, p, p.ring_hops, p.rate)
_SHARDED = {"ring": _ring, "halving": _halving, "hierarchical": _hierarchical}
ALGORITHMS: dict[str, dict[str, Callable]] = {
    "all_reduce": {**_SHARDED, "tree": _tree, "leader": _leader},  # one way, and the same back
    "all_gather": _SHARDED,
    "reduce_scatter": _SHARDED,
    "broadcast": {"tree": _tree, "ring": _chain},
    "all_to_all": {"pairwise": _pairwise, "bruck": lambda S, p: _ceil_log2(p.n) * _direct(S / 2, p)},
    "send": {"direct": _direct},
    "receive": {"direct": _direct},
    "barrier": {"dissemination": lambda S, p: _ceil_log2(p.n) * _direct(0, p)},
}


def by_algorithm(op: str, payload_bytes: float, placement: Placement) -> dict[str, float]:
    """Seconds of every algorithm which this placement allows."""
    if op not in ALGORITHMS:
        raise ValueError(f"no cost is known for {op!r}; choose from {', '.join(ALGORITHMS)}")
    require_nonnegative(payload_bytes=payload_bytes)
    if placement.n == 1:
        return {name: 0.0 for name in ALGORITHMS[op]}
    costs = {name: cost(payload_bytes, placement) for name, cost in ALGORITHMS[op].items()}
    ways = 2 if op == "all_reduce" else 1
    return {name: ways * seconds for name, seconds in costs.items() if seconds is not None}


def chosen(op: str, payload_bytes: float, placement: Placement, algorithm: str = "auto") -> str:
    """The one asked for, which the placement must allow; "auto" is the cheapest, as in NCCL."""
    costs = by_algorithm(op, payload_bytes, placement)
    if algorithm == "auto":
        return min(costs, key=costs.get)
    if algorithm not in costs:
        case = f"{op} cannot run as {algorithm!r} with {placement.n} ranks on {placement.nodes} nodes"
        raise ValueError(f"{case}; choose from auto, {', '.join(costs)}")
    return algorithm


def seconds(op: str, payload_bytes: float, placement: Placement, algorithm: str = "auto") -> float:
    """From the last arrival until every member has its result."""
    return by_algorithm(op, payload_bytes, placement)[chosen(op, payload_bytes, placement, algorithm)]


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()
