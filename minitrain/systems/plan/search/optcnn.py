"""OptCNN: a graph of layers is made smaller, without loss, until what is left can be tried out.

    node elimination    i -> j -> k, nothing else at j    becomes an edge i -> k: for every (a, c) the best b
    edge elimination    two edges i -> k                  become one:      their sum

A chain shrinks to two layers, and so does every graph of branches that part and join again; O(L·C³) sums for
C options. What does not shrink further is enumerated.
Jia et al. 2018, arXiv:1802.04924. Differs: options are words on levels, not degrees of
the dims of an image.
"""

from collections.abc import Iterator

from minitrain.systems.plan.search.problem import Found, Graph, Problem, cheapest


def optcnn(problem: Problem, unit: str = "seconds") -> Found:
    return eliminate(problem.graph(unit=unit))


def eliminate(graph: Graph) -> Found:
    """The cheapest choice, whatever the memory. Of equal ones any."""
    edges, left, gone, looked_at = dict(graph.edge), list(range(len(graph.options))), [], 0
    while (found := next(between_two(edges, left), None)) is not None:
        i, j, k = found
        into, own, out = edges.pop((i, j)), graph.node[j], edges.pop((j, k))
        sums = [[list(map(sum, zip(row, own, column))) for column in zip(*out)] for row in into]
        best = [[each.index(min(each)) for each in row] for row in sums]
        through = [[min(each) for each in row] for row in sums]
        looked_at += len(into) * len(own) * len(out[0])
        if (beside := edges.get((i, k))) is not None:  # edge elimination
            through = [[a + b for a, b in zip(*rows)] for rows in zip(through, beside)]
        edges[i, k] = through
        left.remove(j)
        gone.append((found, best))
    place = {layer: at for at, layer in enumerate(left)}
    small = Graph(
        [graph.options[i] for i in left],
        [graph.node[i] for i in left],
        {(place[i], place[j]): costs for (i, j), costs in edges.items()},
        [[0.0] * len(graph.options[i]) for i in left],
    )
    cost, _, few = cheapest(small.every())
    picks = dict(zip(left, few))
    for (i, j, k), best in reversed(gone):
        picks[j] = best[picks[i]][picks[k]]
    return Found(graph.choice([picks[i] for i in sorted(picks)]), cost, looked_at + small.size)


def between_two(edges: dict, left: list[int]) -> Iterator[tuple[int, int, int]]:
    """(i, j, k): all that touches j is one edge from i and one to k."""
    for j in left:
        before, after = [i for i, to in edges if to == j], [k for by, k in edges if by == j]
        if len(before) == len(after) == 1:
            yield before[0], j, after[0]
