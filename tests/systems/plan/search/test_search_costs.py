"""What the one problem says a choice costs, against a run of it: forward and backward of a chain of products
and blocks under drawn shardings, on ranks, every byte on every level, what is stored and kept, and the replay.
"""

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from minitrain import collectives, launch
from minitrain.plan.simulate.machines import Link, machine
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.plan.search.problem import CUT, SHARDINGS, Level, Option, Problem, block, linear
from minitrain.systems.simulate.replay import replay

ELEMENT = 8
LAYERS = (linear("a", 16, 32), linear("b", 32, 16), block("c", 16, 64), linear("d", 16, 16))
CHAIN = (linear("a", 16, 32), linear("b", 32, 32), block("c", 32, 64), linear("d", 32, 16))


def problem(degrees, layers=LAYERS, **changes):
    levels = tuple(Level(degree, 2.0 ** (20 + i)) for i, degree in enumerate(degrees))
    sizes = dict(element_bytes=ELEMENT, state_bytes=4 * ELEMENT, flops_per_s=2.0**30)
    return Problem(layers, rows=16, levels=levels, **sizes | changes)


def drawn_words(seed, degrees, layers):
    draw = random.Random(seed)
    shardings = [[one for one in SHARDINGS if (one == "tp") <= bool(layer.keeps)] for layer in layers]
    shardings = [
        [sharding for sharding in some if not layer.keeps or sharding not in ("col", "row")]
        for some, layer in zip(shardings, layers)
    ]
    return [tuple(draw.choice(some) for _ in degrees) for some in shardings]


class Levels:
    """The ranks as a grid, one axis a level; dim i of a digit tensor [rows.., r, features.., f] is its digit."""

    def __init__(self, degrees):
        self.degrees, self.n = degrees, len(degrees)
        mesh = Mesh(**{f"level{i}": degree for i, degree in enumerate(degrees)})
        self.groups = [mesh.group(f"level{i}") for i in range(self.n)]
        self.place = [mesh.rank(f"level{i}") for i in range(self.n)]

    def digits(self, x):
        sizes = [(*self.degrees, size // prod(self.degrees)) for size in x.shape]
        return x.reshape(*sizes[0], *sizes[1])

    def dim(self, cut, level):
        return level if cut == "rows" else self.n + 1 + level

    def own(self, x, dim, level):
        return x.narrow(dim, self.place[level], 1)

    def placed(self, x, placement):
        for level, cut in enumerate(placement):
            if cut in CUT:
                x = self.own(x, self.dim(cut, level), level)
        return x

    def move(self, x, source, target):
        levels = list(enumerate(zip(source, target)))
        for level, (a, b) in levels:
            if a == "whole" and b in CUT:
                x = self.own(x, self.dim(b, level), level)
        for level, (a, b) in reversed(levels):
            if a == "sum":
                to = self.dim(b if b in CUT else "rows", level)
                x = collectives.reduce_scatter(x.contiguous(), self.groups[level], to)
            elif a in CUT and b in CUT and a != b:
                there, here = self.dim(b, level), self.dim(a, level)
                x = collectives.all_to_all(x.contiguous(), self.groups[level], there).transpose(there, here)
        for level, (a, b) in levels:
            if b == "whole" and a != "whole":
                dim = self.dim(a if a in CUT else "rows", level)
                x = collectives.all_gather(x.contiguous(), self.groups[level], dim)
        return x

    def product(self, x, w):
        """x's features with w's rows, digit by digit."""
        dims = list(range(self.n + 1, 2 * self.n + 2)), list(range(self.n + 1))
        return torch.tensordot(x, w, dims=dims)

    def turned(self, x):
        half = self.n + 1
        return x.permute(*range(half, 2 * half), *range(half))

    def stored(self, w, shardings, part):
        """`part` 0: the only matrix or a block's first; 1: its second."""
        for level, sharding in enumerate(shardings):
            cut = {"col": "cols", "row": "rows", "tp": ("cols", "rows")[part], "sdp": "rows"}.get(sharding)
            w = w if cut is None else self.own(w, self.dim(cut, level), level)
        return w

    def gathered(self, w, shardings):
        for level, sharding in enumerate(shardings):
            if sharding == "sdp":
                w = collectives.all_gather(w.contiguous(), self.groups[level], level)
        return w

    def summed(self, dw, shardings):
        """Over the levels whose devices have other rows: sdp keeps its part, dp gets all again."""
        for kind in ("sdp", "dp"):
            for level in reversed(range(self.n)):
                if shardings[level] == kind:
                    dw = collectives.reduce_scatter(dw.contiguous(), self.groups[level], level)
        for level, sharding in enumerate(shardings):
            if sharding == "dp":
                dw = collectives.all_gather(dw.contiguous(), self.groups[level], level)
        return dw


def whole_tensors(problem):
    draw = torch.Generator().manual_seed(1)
    integer = lambda *shape: torch.randint(-2, 3, shape, generator=draw).double()
    weights = []
    for layer in problem.layers:
        inner = layer.keeps
        shapes = [(layer.takes, inner), (inner, layer.gives)] if inner else [(layer.takes, layer.gives)]
        weights.append([integer(*shape) for shape in shapes])
    ends = problem.layers[0].takes, problem.layers[-1].gives
    x, dy = (integer(problem.rows, width) for width in ends)
    return x, weights, dy


def one_process(problem):
    """Gradients of every matrix."""
    x, weights, dy = whole_tensors(problem)
    weights, results = [[w.requires_grad_() for w in some] for some in weights], []
    for j, some in enumerate(weights):
        inputs = [results[i] for i, to in problem.edges if to == j]
        y = sum(inputs) if inputs else x
        for w in some:
            y = y @ w
        results.append(y)
    (results[-1] * dy).sum().backward()
    return [[w.grad for w in some] for some in weights]


def run(problem, shardings, numbers=True):
    """(worst difference from one process, {what: bytes by level}, bytes of states, bytes kept, ledger)."""
    levels = Levels([level.devices for level in problem.levels])
    x, weights, dy = whole_tensors(problem)
    stored = [
        [levels.stored(levels.digits(w), sharding, part) for part, w in enumerate(some)]
        for some, sharding in zip(weights, shardings)
    ]
    placement = lambda j, what: [getattr(SHARDINGS[sharding], what) for sharding in shardings[j]]
    ends, count, sent = [problem.ends] * levels.n, len(shardings), {}
    with Ledger() as ledger:

        def counted(what, fn, *args):
            read = lambda: [ledger.sent_bytes(axis=f"level{i}") for i in range(levels.n)]
            before, result = read(), fn(*args)
            sent[what] = [a - b + c for a, b, c in zip(read(), before, sent.get(what, [0] * levels.n))]
            return result

        kept, results, grads = [], [], [[] for _ in shardings]
        for j in range(count):
            came = [
                counted(("forward", i, j), levels.move, results[i], placement(i, "y"), placement(j, "x"))
                for i, to in problem.edges
                if to == j
            ]
            y = sum(came[1:], came[0]) if came else levels.placed(levels.digits(x), placement(j, "x"))
            kept.append([])
            for w in stored[j]:
                kept[j].append(y)
                y = levels.product(y, counted(("weights", j), levels.gathered, w, shardings[j]))
            results.append(y)
        counted(("forward", count - 1, None), levels.move, results[-1], placement(count - 1, "y"), ends)
        last, given = ("backward", count - 1, None), levels.placed(levels.digits(dy), ends)
        coming = {count - 1: [counted(last, levels.move, given, ends, placement(count - 1, "dy"))]}
        for j in reversed(range(count)):
            gradient = sum(coming[j][1:], coming[j][0])
            for part in reversed(range(len(stored[j]))):
                w = counted(("weights", j), levels.gathered, stored[j][part], shardings[j])
                dw = levels.product(levels.turned(kept[j][part]), gradient)
                grads[j].insert(0, counted(("weights", j), levels.summed, dw, shardings[j]))
                gradient = levels.product(gradient, levels.turned(w))
            for i, to in problem.edges:
                if to == j:
                    ways = placement(j, "dx"), placement(i, "dy")
                    came = counted(("backward", i, j), levels.move, gradient, *ways)
                    coming.setdefault(i, []).append(came)
    worst = 0.0
    for j, some in enumerate(one_process(problem) if numbers else []):
        for part, (whole, mine) in enumerate(zip(some, grads[j])):
            own = levels.stored(levels.digits(whole), shardings[j], part)
            assert own.shape == mine.shape
            worst = max(worst, (own - mine).abs().max().item())
    numel = lambda tensors: sum(tensor.numel() for some in tensors for tensor in some)
    return worst, sent, numel(stored) * problem.state_bytes, numel(kept) * ELEMENT, ledger


def formula(problem, shardings):
    found = {}
    for j, layer in enumerate(problem.layers):
        often, once = problem.weight_bytes(layer, shardings[j], problem.levels)
        found["weights", j] = [a + b for a, b in zip(often, once)]
        for i, to in (*problem.edges, (j, None)):
            if i == j and (to is not None or j == len(shardings) - 1):
                then = None if to is None else shardings[to]
                for way, size in zip(
                    ("forward", "backward"), problem.edge_bytes(layer, shardings[j], then, problem.levels)
                ):
                    found[way, i, to] = list(size)
    return found


CASES = [
    *[(problem((2, 2)), seed) for seed in range(8)],
    *[(problem((2, 2), CHAIN, skips=((0, 2),), ends="whole"), seed) for seed in range(24, 30)],
]


def rank(cases):
    rows = []
    for case, seed in cases:
        shardings = drawn_words(seed, case.levels, case.layers)
        worst, sent, states, kept, ledger = run(case, shardings)
        rows.append((worst, sent, states, kept, ledger.events))
    return rows


def check(case, seed, row):
    shardings = drawn_words(seed, case.levels, case.layers)
    worst, sent, states, kept, _ = row
    assert worst == 0, (shardings, worst)
    assert sent == formula(case, shardings), shardings
    options = [Option(sharding) for sharding in shardings]
    memory = sum(case.memory(layer, option, case.levels) for layer, option in zip(case.layers, options))
    assert memory == states + kept, shardings
    return options


def test_every_byte_on_ranks():
    """14 drawn choices on 2 x 2 ranks equal one process, gradient by gradient; each layer's and each edge's
    bytes, forward and backward, on each level, what is stored and what is kept are the problem's. Replayed on
    links without latency, each takes the problem's seconds."""
    shown, by_rank = set(), launch.run(rank, CASES, ranks=4)
    for number, (case, seed) in enumerate(CASES):
        options = [check(case, seed, rows[number]) for rows in by_rank][0]
        shown |= {sharding for option in options for sharding in option.shardings}
        assert replayed(case, {r: rows[number][4] for r, rows in enumerate(by_rank)}) == pytest.approx(
            case_seconds(case, options), rel=1e-9
        )
    assert shown == set(SHARDINGS)


def case_seconds(case, options):
    return case.cost(options)


def replayed(case, events):
    h100 = machine("h100")
    inner, outer = (Link("", 0.0, case.levels[i].bytes_per_s, "") for i in (-1, 0))
    device = replace(h100.device, peak_flops={"float64": case.flops_per_s}, memory_bandwidth_bytes_per_s=1e30)
    size = case.levels[-1].devices
    node = dict(devices_per_node=size, nics_per_node=size, intra=inner, inter=outer)
    here = replace(h100, device=device, **node)
    ways = {"all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "pairwise"}
    timeline = replay(events, here, algorithms=ways)
    return timeline.step_s
