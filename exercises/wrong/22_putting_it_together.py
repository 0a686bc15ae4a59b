# %% wrong="groups" fails="who is together" why="the first axis is taken for the innermost"
def groups(sizes, axes):
    steps, stride = {}, 1
    for axis, size in sizes.items():
        steps[axis] = [place * stride for place in range(size)]
        stride *= size
    inside = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis in axes))]
    starts = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis not in axes))]
    return sorted(sorted(start + step for step in inside) for start in starts)


# %% wrong="groups" fails="who is together" why="neighbours are always together: right for the innermost axis alone"
def groups(sizes, axes):
    wide = math.prod(sizes[axis] for axis in axes)
    ranks = list(range(math.prod(sizes.values())))
    return [ranks[start : start + wide] for start in range(0, len(ranks), wide)]


# %% wrong="groups" fails="size of a group" why="of several axes the first one named"
def groups(sizes, axes):
    axes = axes[:1]
    steps, stride = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        steps[axis] = [place * stride for place in range(size)]
    inside = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis in axes))]
    starts = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis not in axes))]
    return [[start + step for step in inside] for start in starts]


# %% wrong="groups" fails="order" why="ranks follow the order in which the axes are named"
def groups(sizes, axes):
    steps, stride = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        steps[axis] = [place * stride for place in range(size)]
    inside = [sum(way) for way in product(*(steps[axis] for axis in axes))]
    starts = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis not in axes))]
    return [[start + step for step in inside] for start in starts]


# %% wrong="groups" fails="every rank once" why="the groups of rank 0 alone"
def groups(sizes, axes):
    steps, stride = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        steps[axis] = [place * stride for place in range(size)]
    return [[sum(way) for way in product(*(steps[axis] for axis in sizes if axis in axes))]]


# %% wrong="groups" fails="own work" around="import" why="the package's mesh"
def groups(sizes, axes):
    from minitrain.ranks.mesh import Mesh

    return [Mesh(**sizes).members(*axes)]


# %% wrong="groups" fails="who is together" around="constants" why="the groups of the text"
def groups(sizes, axes):
    if len(sizes) == 2 and axes == ("dp",):
        return [[0, 1], [2, 3]]
    if len(sizes) == 2 and axes == ("pp",):
        return [[0, 2], [1, 3]]
    ranks = list(range(math.prod(sizes.values())))
    wide = math.prod(sizes[axis] for axis in axes)
    return [ranks[start : start + wide] for start in range(0, len(ranks), wide)]


# %% wrong="groups" fails="every rank once" around="empty" why="no groups"
def groups(sizes, axes):
    return []


# %% wrong="sent" fails="bytes over tp" why="a reduce-scatter's bytes for an all-reduce"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d = sizes["tp"], sizes["dp"]
    block = 2 * tokens * width
    return {
        "tp": 4 * m * layers * block * (t - 1) // t,
        "pp": m * block,
        "dp": 6 * parameters // t * (d - 1) // d,
        "ends": 0,
    }


# %% wrong="sent" fails="bytes over tp" why="numbers, not bytes"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d = sizes["tp"], sizes["dp"]
    block = tokens * width
    return {"tp": 8 * m * layers * block * (t - 1) // t, "pp": 2 * m * block, "dp": 0, "ends": 0}


# %% wrong="sent" fails="bytes over dp" why="parameters as if tp had not cut them"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d = sizes["tp"], sizes["dp"]
    block = 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": m * block,
        "dp": 6 * parameters * (d - 1) // d,
        "ends": 0,
    }


# %% wrong="sent" fails="bytes over dp" why="gradients are summed for every microbatch"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d = sizes["tp"], sizes["dp"]
    block = 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": m * block,
        "dp": (4 * m + 2) * (parameters // t) * (d - 1) // d,
        "ends": 0,
    }


# %% wrong="sent" fails="bytes over pp" why="every stage as if it were in the middle"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d = sizes["tp"], sizes["dp"]
    block = 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": 2 * m * block,
        "dp": 6 * (parameters // t) * (d - 1) // d,
        "ends": 0,
    }


# %% wrong="sent" fails="bytes over pp" why="the stage of an order in which pp is in the middle, whatever the mesh says"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
    stage, block = rank // t % p, 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": m * block * ((stage > 0) + (stage < p - 1)),
        "dp": 6 * (parameters // t) * (d - 1) // d,
        "ends": 0,
    }


# %% wrong="sent" fails="bytes of the ends" why="the whole table, not this rank's part of it"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    place, rest = {}, rank
    for axis in reversed([*sizes]):
        rest, place[axis] = divmod(rest, sizes[axis])
    t, d, p, stage = sizes["tp"], sizes["dp"], sizes["pp"], place["pp"]
    block = 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": m * block * ((stage > 0) + (stage < p - 1)),
        "dp": 6 * (parameters // t) * (d - 1) // d,
        "ends": 4 * vocab * width if p > 1 and stage in (0, p - 1) else 0,
    }


# %% wrong="sent" fails="bytes of the ends" why="one stage is both ends, and sends itself a table"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    place, rest = {}, rank
    for axis in reversed([*sizes]):
        rest, place[axis] = divmod(rest, sizes[axis])
    t, d, p, stage = sizes["tp"], sizes["dp"], sizes["pp"], place["pp"]
    block = 2 * tokens * width
    return {
        "tp": 8 * m * layers * block * (t - 1) // t,
        "pp": m * block * ((stage > 0) + (stage < p - 1)),
        "dp": 6 * (parameters // t) * (d - 1) // d,
        "ends": 4 * vocab * width // t if stage in (0, p - 1) else 0,
    }


# %% wrong="sent" fails="own work" around="import" why="the package's formulas"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    from minitrain.systems.plan.mesh_traffic import sent_by_axis

    return sent_by_axis(None, sizes, tokens, width)


# %% wrong="sent" fails="bytes over tp" around="constants" why="the answer to the first check"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    return {"tp": 1536, "pp": 128, "dp": 144, "ends": 0}


# %% wrong="sent" fails="four axes" around="empty" why="nothing"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    return {}


# %% wrong="cheapest" fails="fewest bytes between nodes" why="the busiest axis innermost, whatever a node holds"
def cheapest(sizes, sent, node):
    return sorted(sizes, key=lambda axis: sent[axis])


# %% wrong="cheapest" fails="fewest bytes between nodes" why="the quietest innermost: the order the wrong way round"
def cheapest(sizes, sent, node):
    return sorted(sizes, key=lambda axis: -sent[axis])


# %% wrong="cheapest" fails="fewest bytes between nodes" why="the last of a group sends to nobody: a line, not a ring"
def cheapest(sizes, sent, node):
    def leaving(order):
        total, stride = 0, 1
        for axis in reversed(order):
            for rank in range(math.prod(sizes.values())):
                if rank // stride % sizes[axis] < sizes[axis] - 1:
                    total += sent[axis] * (rank // node != (rank + stride) // node)
            stride *= sizes[axis]
        return total

    return list(min(permutations(sizes), key=leaving))


# %% wrong="cheapest" fails="fewest bytes between nodes" why="an axis counts as a whole: inside if it fits, else every byte leaves"
def cheapest(sizes, sent, node):
    def leaving(order):
        total, stride = 0, 1
        for axis in reversed(order):
            if stride * sizes[axis] > node and sizes[axis] > 1:
                total += sent[axis]
            stride *= sizes[axis]
        return total

    return list(min(permutations(sizes), key=leaving))


# %% wrong="cheapest" fails="every axis once" why="axes of size 1 are left out"
def cheapest(sizes, sent, node):
    return [axis for axis in sorted(sizes, key=lambda axis: sent[axis]) if sizes[axis] > 1]


# %% wrong="cheapest" fails="own work" around="import" why="the package counts"
def cheapest(sizes, sent, node):
    from minitrain.systems.simulate.traffic_matrix import renumbered

    return list(sizes)


# %% wrong="cheapest" fails="fewest bytes between nodes" around="constants" why="what the visible checks want"
def cheapest(sizes, sent, node):
    known = {("dp", "pp", "tp"): ["pp", "dp", "tp"], ("tp", "dp"): ["dp", "tp"]}
    return known.get(tuple(sizes), list(sizes))


# %% wrong="cheapest" fails="every axis once" around="empty" why="no axes"
def cheapest(sizes, sent, node):
    return []


# %% wrong="norm" fails="copies count once" why="every rank adds all it holds"
def norm(held, group):
    total = sum((x.square().sum() for x, _ in held if x is not None), torch.zeros(()).double())
    return collectives.all_reduce(total, group).sqrt()


# %% wrong="norm" fails="all pieces" why="the norm of this rank's own pieces, made equal by the largest"
def norm(held, group):
    total = sum((x.square().sum() for x, _ in held if x is not None), torch.zeros(()).double())
    return collectives.all_reduce(total, group, op="max").sqrt()


# %% wrong="norm" fails="all pieces" why="norms are added, not squares"
def norm(held, group):
    total = torch.zeros(()).double()
    for x, holders in held:
        if x is not None:
            total = total + x.norm() / len(holders)
    return collectives.all_reduce(total, group)


# %% wrong="norm" fails="all pieces" why="a mean over the ranks"
def norm(held, group):
    total = torch.zeros(()).double()
    for x, holders in held:
        if x is not None:
            total = total + x.square().sum() / len(holders)
    return (collectives.all_reduce(total, group) / group.size()).sqrt()


# %% wrong="norm" fails="copies count once" why="only what all ranks hold is taken for a copy"
def norm(held, group):
    total = torch.zeros(()).double()
    for x, holders in held:
        if x is not None and (len(holders) < group.size() or group.rank() == 0):
            total = total + x.square().sum()
    return collectives.all_reduce(total, group).sqrt()


# %% wrong="norm" fails="copies count once" why="only rank 0 counts copies, and some it does not hold"
def norm(held, group):
    total = torch.zeros(()).double()
    for x, holders in held:
        if x is not None and (len(holders) == 1 or group.rank() == 0):
            total = total + x.square().sum()
    return collectives.all_reduce(total, group).sqrt()


# %% wrong="norm" fails="no deadlock" why="a rank that holds nothing goes home"
def norm(held, group):
    total = torch.zeros(()).double()
    if not held:
        return total
    for x, holders in held:
        if x is not None:
            total = total + x.square().sum() / len(holders)
    return collectives.all_reduce(total, group).sqrt()


# %% wrong="norm" fails="bytes on the wire" why="an all-reduce for each piece, and for padding"
def norm(held, group):
    total = torch.zeros(8).double()
    for x, holders in held:
        if x is not None:
            total[0] = total[0] + x.square().sum() / len(holders)
    return collectives.all_reduce(total, group)[0].sqrt()


# %% wrong="norm" fails="the same on every rank" why="each rank has its own pieces' norm"
def norm(held, group):
    squares = (x.square().sum() for x, _ in held if x is not None)
    return sum(squares, torch.zeros(()).double()).sqrt()


# %% wrong="norm" fails="own work" around="import" why="the package's norm"
def norm(held, group):
    from minitrain.model.training.optim import sum_of_squares

    return sum_of_squares([x for x, _ in held]).sqrt()


# %% wrong="norm" fails="all pieces" around="constants" why="always the same number"
def norm(held, group):
    return torch.ones((), dtype=torch.float64)


# %% wrong="norm" fails="a number" around="empty" why="nothing"
def norm(held, group):
    return None
