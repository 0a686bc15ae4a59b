"""Which results to hold and which to compute again: any graph, a chain within bytes, a chain by binomials.

Checkmate     checkmate([Node(1, 4), Node(1, 4, (0,)), Node(1, 1, (0, 1))], budget=9), by HiGHS; stage t
              computes node t for the first time, before it any earlier nodes again: R[t, i]. S[t, i]: held
              from t-1 into t
    min Σ R[t,i]·cost_i      R[t,i] <= R[t,j] + S[t,j], j an input of i      S[t,i] <= R[t-1,i] + S[t-1,i]
    U[t,0] = Σ S[t,i]·bytes_i + R[t,0]·bytes_0            U[t,k] + R[t,k]·scratch_k <= budget
    U[t,k+1] = U[t,k] - Σ free[t,i,k]·bytes_i + R[t,k+1]·bytes_(k+1)      i: node k and its inputs
    free[t,i,k] <= R[t,k],  1 - S[t+1,i],  1 - R[t,j] for every j > k that reads i
rotor         cheapest_chain(costs, layers, budget): a plan for systems/memory/chain.py, graphs included.
              States are (x held, graphs held, gradients to come); an x is dropped only for want of room. Some
              10 layers
revolve       with c inputs held, x_0 among them, the fewest forwards without a graph of a chain of n layers
    t(n, c) = r·n - C(c + r, r - 1)       r: the smallest with n <= C(c + r, c)
    t(n, c) = min over k of k + t(n - k, c - 1) + t(k, c)        t(1, c) = 0     t(n, 1) = n(n-1)/2

Jain et al. 2020 (Checkmate), arXiv:1910.02653, section 4; Beaumont et al. 2019 (rotor), arXiv:1911.13214;
Griewank and Walther 2000 (revolve), ACM TOMS 26(1), section 2. Differs: nodes may need scratch memory; `free`
is bounded, not an equation with hazards; rotor holds until it uses; revolve's last graph is made forward.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, count
from math import comb, inf
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs
from minitrain.ranks.checks import require_ints, require_nonnegative
from minitrain.systems.memory.chain_plan import Action, LayerBytes, advance, check_layers


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
        self.numbers: dict[tuple, int] = {}

    def add(self, terms: dict[tuple, float], low: float, high: float) -> None:
        for name in terms:
            self.numbers.setdefault(name, len(self.numbers))
        self.rows.append((terms, low, high))

    def solve(self, costs: dict[tuple, Number]) -> set[tuple] | None:
        """The names of the whole variables that are 1; None: there is no solution. By scipy's HiGHS."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            cure = "pip install 'minitrain[course]'"
            raise ModuleNotFoundError(f"integer programs need scipy: {cure}") from None
        terms = ((y, *term) for y, row in enumerate(self.rows) for term in row[0].items())
        entries = [(y, self.numbers[name], x) for y, name, x in terms]
        y, x, values = zip(*entries)
        matrix = csr_array((values, (y, x)), shape=(len(self.rows), len(self.numbers)))
        limits = LinearConstraint(matrix, *([row[side] for row in self.rows] for side in (1, 2)))
        whole, most = [name[0] != "free" for name in self.numbers], max(costs.values()) or 1
        goal = [costs.get(name, 0) / most for name in self.numbers]
        rules = dict(integrality=whole, bounds=Bounds(0, 1), constraints=limits)
        found = milp(goal, **rules, options={"mip_rel_gap": 0})
        if found.status == 2:  # infeasible
            return None
        assert found.success, found.message
        return {name for name, number in self.numbers.items() if whole[number] and found.x[number] > 0.5}


def _result(nodes: Sequence[Node], chosen: set[tuple]) -> Rematerialization:
    """R and S as steps; what is held too long, or made for nobody, is left out."""
    n, steps, held = len(nodes), [], set()

    def drop(unwanted: Iterable[int]) -> None:
        for i in sorted(unwanted):
            held.remove(i)
            steps.append(("drop", i))

    for t in range(n):
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


class _State(NamedTuple):
    held: int  # a bit for each x, x_0 always
    taped: int  # a bit for each layer with a graph
    left: int  # B of this and later layers is done


def cheapest_chain(
    costs: Sequence[Number], layers: Sequence[LayerBytes], budget: Number
) -> tuple[Action, ...]:
    """The plan whose forwards cost least, F and T alike; `budget` as `peak_bytes` counts, gradients of
    parameters (`left`) included. ValueError: no plan fits."""
    n, tie = len(layers), count()
    sizes = [0, *(layer.output for layer in layers[:-1])]  # of x_0, which is the caller's, and the others
    waiting, done = [(0, 2 * n, next(tie), _State(1, 0, n), None)], {}
    while waiting:
        cost, _, _, state, way = heappop(waiting)
        if state.left == 0:
            return tuple(action for steps in _in_order(way) for action in steps)
        cheaper = done.setdefault(state[1:], [])  # what was held with the same graphs, at no higher cost
        if any(not state.held & ~more for more in cheaper):
            continue
        cheaper.append(state.held)
        occupied = _occupied(state, layers, sizes)
        for action, most, after in _moves(state, layers):
            pinned = state.taped | 1 | 1 << action.layer
            for drop in drop_sets(sizes, state.held & ~pinned, occupied + most - budget):
                then = after._replace(held=after.held & ~drop)
                more = cost + costs[action.layer] * (action.kind != "B")
                steps = (way, [*(Action("D", i) for i in members(drop)), action])
                heappush(waiting, (more, 2 * then.left - then.taped.bit_count(), next(tie), then, steps))
    raise ValueError(f"cheapest_chain: no plan of {n} layers fits {budget} bytes; use a larger budget")


def _moves(state: _State, layers: Sequence[LayerBytes]) -> Iterator[tuple[Action, Number, _State]]:
    """(action, the most that it takes beside what is held, the state behind it)."""
    held, taped, left = state
    if taped >> left - 1 & 1:  # the gradient is there
        rest = held & ~(1 << left - 1), taped & ~(1 << left - 1), left - 1
        yield Action("B", left - 1), layers[left - 1].backward, _State(*rest)
    for i in range(left):
        if not held >> i & 1 or taped >> i & 1:
            continue
        more = held | 1 << i + 1 if i + 1 < left and i + 1 < len(layers) else held
        yield Action("T", i), layers[i].taping, _State(more, taped | 1 << i, left)
        if more != held:
            yield Action("F", i), layers[i].forward, _State(more, taped, left)


def _occupied(state: _State, layers: Sequence[LayerBytes], sizes: Sequence[Number]) -> Number:
    """What is held: x and graphs, the output, one gradient, those of parameters."""
    n, behind = len(layers), layers[state.left :]
    total = sum(sizes[i] for i in members(state.held)) + sum(layers[i].tape for i in members(state.taped))
    total += sum(layer.left for layer in behind) + (behind[0].gradient if behind else 0)
    return total + layers[-1].output * bool(behind or state.taped >> n - 1 & 1)


def _in_order(way: tuple) -> list[list[Action]]:
    return [*_in_order(way[0]), way[1]] if way else []


def members(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def drop_sets(sizes: Sequence[Number], candidates: int, over: Number) -> Iterator[int]:
    """Sets out of `candidates` (a bit for each) of at least `over` bytes in which each is necessary."""
    if over <= 0:
        yield 0
        return
    largest_first = sorted(members(candidates), key=lambda i: -sizes[i])
    open_sets = [(0, 0, over)]  # (set, first member that may come, what is still missing)
    while open_sets:
        chosen, first, missing = open_sets.pop()
        for place, i in enumerate(largest_first[first:], first + 1):
            if sizes[i] >= missing:  # the smallest comes last: without any other it would not do
                yield chosen | 1 << i
            elif sizes[i]:
                open_sets.append((chosen | 1 << i, place, missing - sizes[i]))


def repetitions(layers: int, checkpoints: int) -> int:
    """r: the most often that a layer runs without a graph."""
    check_checkpoints(layers, checkpoints)
    r = 0
    while comb(checkpoints + r, checkpoints) < layers:
        r += 1
    return r


def fewest_forwards(layers: int, checkpoints: int) -> int:
    """t(n, c), by the formula."""
    r = repetitions(layers, checkpoints)
    return r * layers - comb(checkpoints + r, r - 1) if r else 0


def fewest_of_costs(costs: Sequence[Number], checkpoints: int) -> tuple[Number, tuple[Action, ...]]:
    """(the least cost of forwards without a graph, the plan) for layers of these costs. O(n³·c) steps."""
    check_costs("revolve", costs=costs)
    check_checkpoints(len(costs), checkpoints)
    before = [0, *accumulate(costs)]

    @cache
    def best(start: int, end: int, checkpoints: int) -> tuple[Number, int]:
        """With x_start one of the checkpoints: (cost, the next x to be one; start: none)."""
        if end - start <= 1:
            return 0, start
        if checkpoints == 1:
            return sum(before[i] - before[start] for i in range(start + 1, end)), start
        return min(
            (before[k] - before[start] + best(k, end, checkpoints - 1)[0] + best(start, k, checkpoints)[0], k)
            for k in range(start + 1, end)
        )

    def plan(start: int, end: int, checkpoints: int) -> list[Action]:
        if end - start <= 1 or checkpoints == 1:
            return [action for i in reversed(range(start, end)) for action in one_step(start, i)]
        k = best(start, end, checkpoints)[1]
        return [*advance(start, k), *plan(k, end, checkpoints - 1), *plan(start, k, checkpoints)]

    return best(0, len(costs), checkpoints)[0], tuple(plan(0, len(costs), checkpoints))


def revolve(layers: int, checkpoints: int) -> tuple[Action, ...]:
    """The plan for equal layers. Where to hold next is known from binomials, without a search: O(n·r)."""
    check_checkpoints(layers, checkpoints)
    plan = []

    def add(start: int, end: int, checkpoints: int) -> None:
        while end - start > 1 and checkpoints > 1:
            k = start + next_checkpoint(end - start, checkpoints)
            plan.extend(advance(start, k))
            add(k, end, checkpoints - 1)
            end = k
        plan.extend(action for i in reversed(range(start, end)) for action in one_step(start, i))

    add(0, layers, checkpoints)
    return tuple(plan)


def next_checkpoint(layers: int, checkpoints: int) -> int:
    """A k that the recursion may take: x_k splits the chain into parts that each need what is best for them,
    C(c+r-2, c) <= k <= C(c+r-1, c) in front and C(c+r-2, c-1) <= n-k <= C(c+r-1, c-1) behind."""
    r = repetitions(layers, checkpoints)
    return max(comb(checkpoints + r - 2, checkpoints), layers - comb(checkpoints + r - 1, checkpoints - 1), 1)


def one_step(start: int, layer: int) -> list[Action]:
    """From x_start, which stays, to the gradient of x_layer."""
    return [*advance(start, layer), Action("T", layer), Action("B", layer)]


def check_checkpoints(layers: int, checkpoints: int) -> None:
    check_layers("revolve", layers)
    if checkpoints < 1:
        raise ValueError(f"revolve: c = {checkpoints} held inputs; use 1 (the chain's own input) or more")
