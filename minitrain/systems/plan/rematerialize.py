"""Which results to hold and which to compute again: any graph within bytes, a chain by binomials.

Checkmate     checkmate([Node(1, 4), Node(1, 4, (0,)), Node(1, 1, (0, 1))], budget=9), by HiGHS; stage t
              computes node t for the first time, before it any earlier nodes again: R[t, i]. S[t, i]: held
              from t-1 into t
    min Σ R[t,i]·cost_i      R[t,i] <= R[t,j] + S[t,j], j an input of i      S[t,i] <= R[t-1,i] + S[t-1,i]
    U[t,0] = Σ S[t,i]·bytes_i + R[t,0]·bytes_0            U[t,k] + R[t,k]·scratch_k <= budget
    U[t,k+1] = U[t,k] - Σ free[t,i,k]·bytes_i + R[t,k+1]·bytes_(k+1)      i: node k and its inputs
    free[t,i,k] <= R[t,k],  1 - S[t+1,i],  1 - R[t,j] for every j > k that reads i
revolve       with c inputs held, x_0 among them, the fewest forwards without a graph of a chain of n layers
    t(n, c) = r·n - C(c + r, r - 1)       r: the smallest with n <= C(c + r, c)
    t(n, c) = min over k of k + t(n - k, c - 1) + t(k, c)        t(1, c) = 0     t(n, 1) = n(n-1)/2

Jain et al. 2020 (Checkmate), arXiv:1910.02653, section 4; Griewank and Walther 2000 (revolve), ACM TOMS
26(1), section 2. Differs: nodes may need scratch memory; `free` is bounded, not an equation with hazards;
revolve's last graph is made forward.
"""

from collections.abc import Iterable, Sequence
from math import comb, inf
from typing import NamedTuple

from minitrain.pipeline.partition import Number
from minitrain.ranks.checks import require_ints, require_nonnegative
from minitrain.systems.memory.chain_plan import Action, advance, check_layers


class Node(NamedTuple):
    cost: Number
    bytes: Number  # of its result
    inputs: tuple[int, ...] = ()  # earlier nodes
    scratch: Number = 0  # bytes besides, while it is computed


class Rematerialization(NamedTuple):
    cost: Number  # of all that is computed
    extra: Number  # of what is computed again
    peak: Number
    steps: tuple[tuple[str, int], ...]  # ("compute" or "drop", node)

    @property
    def recomputed(self) -> int:
        """How many nodes are computed once more, counted as often as they are."""
        computed = [node for what, node in self.steps if what == "compute"]
        return len(computed) - len(set(computed))


def checkmate(nodes: Sequence[Node], budget: Number) -> Rematerialization:
    """The cheapest plan that ends with the last node and never holds more than `budget` bytes; nodes in an
    order in which they can be computed. ValueError: an operator, or no plan, fits the budget."""
    for number, node in enumerate(nodes):
        inputs = sum(nodes[i].bytes for i in set(node.inputs))
        if (need := inputs + node.bytes + node.scratch) > budget:
            raise ValueError(f"Checkmate: node {number} alone needs {need} bytes, budget {budget}; use more")
    program, n = IntegerProgram(), len(nodes)
    share = lambda size: size / budget if budget else 0.0
    users = [[j for j in range(n) if i in nodes[j].inputs] for i in range(n)]
    for t in range(n):
        again, held = (lambda i, t=t: ("R", t, i)), (lambda i, t=t: ("S", t, i))
        program.add({again(t): 1}, 1, 1)
        for i in range(t + 1):
            for j in nodes[i].inputs:
                program.add({again(i): 1, again(j): -1, held(j): -1}, -inf, 0)
            if i < t:
                before = {} if i == t - 1 else {("S", t - 1, i): -1}
                program.add({held(i): 1, ("R", t - 1, i): -1, **before}, -inf, 0)
        used = {held(i): share(nodes[i].bytes) for i in range(t)}
        for k in range(t + 1):
            used[again(k)] = share(nodes[k].bytes)
            program.add({**used, again(k): share(nodes[k].bytes + nodes[k].scratch)}, -inf, 1)
            for i in {*nodes[k].inputs, k}:
                free = ("free", t, i, k)
                used[free] = -share(nodes[i].bytes)
                bounds = [("R", t, j) for j in users[i] if k < j <= t] + [("S", t + 1, i)] * (t + 1 < n)
                program.add({free: 1, again(k): -1}, -inf, 0)
                for bound in bounds:
                    program.add({free: 1, bound: 1}, -inf, 1)
    chosen = program.solve({("R", t, i): nodes[i].cost for t in range(n) for i in range(t + 1)})
    if chosen is None:
        raise ValueError(f"Checkmate: no plan of {n} nodes fits {budget} bytes; use a larger budget")
    return _result(nodes, chosen)


class IntegerProgram:
    """Rows over variables with names, each from 0 to 1; those called ("free", ..) need not be whole."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[tuple, float], float, float]] = []

    def add(self, terms: dict[tuple, float], low: float, high: float) -> None:
        self.rows.append((terms, low, high))

    def solve(self, costs: dict[tuple, Number]) -> set[tuple] | None:
        """The names of the whole variables that are 1; None: there is no solution. By scipy's HiGHS."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            cure = "pip install 'minitrain[course]'"
            raise ModuleNotFoundError(f"integer programs need scipy: {cure}") from None
        rows, low, high = zip(*self.rows)
        names = list(dict.fromkeys(name for terms in rows for name in terms))
        number = {name: x for x, name in enumerate(names)}
        entries = [(y, number[name], of) for y, terms in enumerate(rows) for name, of in terms.items()]
        y, x, values = zip(*entries)
        limits = LinearConstraint(csr_array((values, (y, x)), shape=(len(rows), len(names))), low, high)
        whole, most = [name[0] != "free" for name in names], max(map(abs, costs.values())) or 1
        goal = [costs.get(name, 0) / most for name in names]
        rules = dict(integrality=whole, bounds=Bounds(0, 1), constraints=limits)
        found = milp(goal, **rules, options={"mip_rel_gap": 0})
        if found.status == 2:  # infeasible
            return None
        assert found.success, found.message
        return {name for name, is_whole, x in zip(names, whole, found.x) if is_whole and x > 0.5}


def _result(nodes: Sequence[Node], chosen: set[tuple]) -> Rematerialization:
    """R and S as steps; what is held too long, or made for nobody, is left out."""
    steps, held = [], set()

    def drop(unwanted: Iterable[int]) -> None:
        steps.extend(("drop", i) for i in sorted(unwanted))
        held.difference_update(unwanted)

    for t in range(len(nodes)):
        drop({i for i in held if ("S", t, i) not in chosen})
        now = [k for k in range(t + 1) if ("R", t, k) in chosen]
        for place, k in enumerate(now):
            steps.append(("compute", k))
            held.add(k)
            later = {i for j in now[place + 1 :] for i in nodes[j].inputs}
            drop({i for i in {*nodes[k].inputs, k} if i not in later and ("S", t + 1, i) not in chosen})
    cost, peak = carried_out(nodes, steps)
    return Rematerialization(cost, cost - sum(node.cost for node in nodes), peak, tuple(steps))


def carried_out(nodes: Sequence[Node], steps: Sequence[tuple[str, int]]) -> tuple[Number, Number]:
    """(cost, peak bytes) of steps. ValueError: a step that cannot be done."""
    held, cost, peak = set(), 0, 0
    for number, (what, i) in enumerate(steps):
        missing = set(nodes[i].inputs) - held if what == "compute" else {i} - held
        if missing:
            raise ValueError(f"step {number}, {what} {i}: node {min(missing)} is not held; compute it before")
        if what == "drop":
            held.remove(i)
            continue
        cost += nodes[i].cost
        held.add(i)
        peak = max(peak, sum(nodes[j].bytes for j in held) + nodes[i].scratch)
    return cost, peak


def checkmate_chain(costs: Sequence[Number], sizes: Sequence[Number], budget: Number) -> Rematerialization:
    """For n layers of these costs whose outputs, and the gradients of which, have these sizes. Nodes 0 .. n-1
    are forwards, n .. 2n-1 backwards from the last layer on, which cost twice as much and need the layer's
    input and the gradient of its output. The chain's own input is always there and not counted."""
    require_nonnegative(costs=costs)
    require_ints(len(costs), len(costs), sizes=len(sizes))
    n = len(costs)
    nodes = [Node(cost, size, (i - 1,) if i else ()) for i, (cost, size) in enumerate(zip(costs, sizes))]
    for i in reversed(range(n)):
        gradient = sizes[i - 1] if i else 0
        inputs = (i - 1, len(nodes) - 1) if i else (len(nodes) - 1,)
        output_again = max(0, sizes[i] - gradient) if i < n - 1 else 0
        nodes.append(Node(2 * costs[i], gradient, inputs, output_again))
    return checkmate(nodes, budget)


def repetitions(layers: int, checkpoints: int) -> int:
    """r: the most often that a layer runs without a graph."""
    check_layers("revolve", layers)
    if checkpoints < 1:
        raise ValueError(f"revolve: c = {checkpoints} held inputs; use 1 (the chain's own input) or more")
    r = 0
    while comb(checkpoints + r, checkpoints) < layers:
        r += 1
    return r


def fewest_forwards(layers: int, checkpoints: int) -> int:
    """t(n, c), by the formula."""
    r = repetitions(layers, checkpoints)
    return r * layers - comb(checkpoints + r, r - 1) if r else 0


def revolve(layers: int, checkpoints: int) -> tuple[Action, ...]:
    """The plan for equal layers. Where to hold next is known from binomials, without a search: O(n·r)."""
    repetitions(layers, checkpoints)  # looks at both
    plan = []

    def add(start: int, end: int, checkpoints: int) -> None:
        while end - start > 1 and checkpoints > 1:
            k = start + next_checkpoint(end - start, checkpoints)
            plan.extend(advance(start, k))
            add(k, end, checkpoints - 1)
            end = k
        for i in reversed(range(start, end)):  # from x_start, which stays, to the gradient of x_i
            plan.extend([*advance(start, i), Action("T", i), Action("B", i)])

    add(0, layers, checkpoints)
    return tuple(plan)


def next_checkpoint(layers: int, checkpoints: int) -> int:
    """A k that the recursion may take: x_k splits the chain into parts that each need what is best for them,
    C(c+r-2, c) <= k <= C(c+r-1, c) in front and C(c+r-2, c-1) <= n-k <= C(c+r-1, c-1) behind."""
    r = repetitions(layers, checkpoints)
    return max(comb(checkpoints + r - 2, checkpoints), layers - comb(checkpoints + r - 1, checkpoints - 1), 1)
