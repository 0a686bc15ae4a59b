"""Checkmate: which results to hold and which to compute again, so that a step costs least. No torch.

    plan = checkmate([Node(1, 4), Node(1, 4, (0,)), Node(1, 1, (0, 1))], budget=9)
    plan.extra     cost of what is computed more than once           plan.steps    compute and drop, in order

A step is n stages. Stage t computes node t for the first time, and before it any earlier nodes again, each at
most once and in order: R[t, i]. S[t, i]: held from stage t-1 into t. A mixed-integer program:

    min Σ R[t,i]·cost_i      R[t,i] <= R[t,j] + S[t,j], j an input of i      S[t,i] <= R[t-1,i] + S[t-1,i]
    U[t,0] = Σ S[t,i]·bytes_i + R[t,0]·bytes_0            U[t,k] + R[t,k]·scratch_k <= budget
    U[t,k+1] = U[t,k] - Σ free[t,i,k]·bytes_i + R[t,k+1]·bytes_(k+1)      i: node k and its inputs
    free[t,i,k] <= R[t,k],  1 - S[t+1,i],  1 - R[t,j] for every j > k that reads i

`free` need not be whole: its bounds are. Solved by HiGHS to the optimum, for graphs of 20 or 30 nodes.
Jain et al. 2020 (Checkmate), arXiv:1910.02653, section 4. Differs: nodes may need scratch memory too; theirs
writes free as an equation with a count of hazards.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs
from minitrain.systems.memory.chain_plan import Action, LayerBytes


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
    check_graph(nodes, budget)
    program, n = _Program(nodes, budget), len(nodes)
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
        used = {held(i): program.share(nodes[i].bytes) for i in range(t)}
        for k in range(t + 1):
            used[again(k)] = program.share(nodes[k].bytes)
            program.add({**used, again(k): program.share(nodes[k].bytes + nodes[k].scratch)}, -inf, 1)
            for i in {*nodes[k].inputs, k}:
                free = ("free", t, i, k)
                used[free] = -program.share(nodes[i].bytes)
                bounds = [("R", t, j) for j in users[i] if k < j <= t] + [("S", t + 1, i)] * (t + 1 < n)
                program.add({free: 1, again(k): -1}, -inf, 0)
                for bound in bounds:
                    program.add({free: 1, bound: 1}, -inf, 1)
    chosen = program.solve({("R", t, i): nodes[i].cost for t in range(n) for i in range(t + 1)})
    if chosen is None:
        raise ValueError(f"Checkmate: no plan of {n} nodes fits {budget} bytes; use a larger budget")
    return _result(nodes, chosen)


class _Program:
    """Rows of a mixed-integer program over variables with names, each from 0 to 1; R and S are whole."""

    def __init__(self, nodes: Sequence[Node], budget: Number):
        self.budget, self.rows, self.numbers = budget, [], {}

    def share(self, size: Number) -> float:
        return size / self.budget if self.budget else 0.0

    def add(self, terms: dict[tuple, float], low: float, high: float) -> None:
        for name in terms:
            self.numbers.setdefault(name, len(self.numbers))
        self.rows.append((terms, low, high))

    def solve(self, costs: dict[tuple, Number]) -> set[tuple] | None:
        """The names of the whole variables that are 1; None: there is no way."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            cure = "pip install 'minitrain[course]'"
            raise ModuleNotFoundError(f"Checkmate's program needs scipy: {cure}") from None
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
    if len(costs) != len(sizes):
        raise ValueError(f"Checkmate: {len(costs)} costs of {len(sizes)} layers; give one a layer")
    layers = [LayerBytes(size, size, 0, size, before, before) for size, before in zip(sizes, [0, *sizes])]
    return checkmate(chain_nodes(costs, layers, [2 * cost for cost in costs], sizes[-1]), budget)


def checkmate_layers(costs, layers: Sequence[LayerBytes], budget: Number) -> tuple[Action, ...]:
    """The plan for chain.py whose `peak_bytes` are within the budget and whose forwards cost least, if
    the graph of a layer but the last is made right before its backward. The output, which stays with the
    caller, counts from the start, gradients of parameters do not."""
    nodes = chain_nodes(costs, layers, costs, 0)
    return actions(checkmate(nodes, budget - layers[-1].output), len(layers))


def chain_nodes(costs, layers: Sequence[LayerBytes], backward: Sequence, output: Number) -> list[Node]:
    """Of a chain: node i is F of layer i (of the last one T), 2n-1-i is T and B of layer i (of the last one
    B), which cost `backward`; `output` bytes of the last layer's result are let go with its graph."""
    if len(costs) != len(layers):
        raise ValueError(f"costs of {len(costs)} layers, of {len(layers)} in all: give a layer one")
    n, nodes = len(layers), []
    for i, (cost, layer) in enumerate(zip(costs, layers)):
        inputs = (i - 1,) if i else ()
        size = layer.tape + output if i == n - 1 else layer.output
        most = layer.taping - layer.output + output if i == n - 1 else layer.forward
        nodes.append(Node(cost, size, inputs, max(0, most - size)))
    for i in reversed(range(n)):
        layer, inputs = layers[i], (i - 1,) * (i > 0) + (len(nodes) - 1,)
        most = layer.backward if i == n - 1 else max(layer.taping, layer.tape + layer.backward)
        nodes.append(Node(backward[i], layer.gradient, inputs, max(0, most - layer.gradient)))
    return nodes


def actions(plan: Rematerialization, layers: int) -> tuple[Action, ...]:
    """The plan of `chain_nodes` as a list for systems/memory/chain.py."""
    found, left = [], layers
    for what, node in plan.steps:
        layer = min(node, 2 * layers - 1 - node)
        if what == "drop" and node + 1 < left:  # B has let the others go
            found.append(Action("D", node + 1))
        elif what == "compute" and node < layers:
            found.append(Action("F" if node < layers - 1 else "T", layer))
        elif what == "compute":
            found += [Action("T", layer)] * (layer < layers - 1) + [Action("B", layer)]
            left = layer
    return tuple(found)


def check_graph(nodes: Sequence[Node], budget: Number) -> None:
    if not nodes:
        raise ValueError("Checkmate: a graph without nodes; give one or more")
    costs, sizes, scratch = ([getattr(node, name) for node in nodes] for name in ("cost", "bytes", "scratch"))
    check_costs("Checkmate", cost=costs, bytes=sizes, scratch=scratch)
    for number, node in enumerate(nodes):
        if late := [i for i in node.inputs if not 0 <= i < number]:
            rule = "an input has a smaller number than what it is for"
            raise ValueError(f"Checkmate: node {number} has input {late[0]}; {rule}")
        inputs = sum(sizes[i] for i in set(node.inputs))
        if (need := inputs + node.bytes + node.scratch) > budget:
            parts = f"inputs {inputs}, result {node.bytes}, scratch {node.scratch}"
            alone = f"node {number} alone needs {need} bytes ({parts})"
            raise ValueError(f"Checkmate: {alone}, budget {budget}; use more")
