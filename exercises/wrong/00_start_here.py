# %% wrong="pass_on" fails="no deadlock" why="everybody sends first"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    collectives.send(x, (rank + 1) % size, group)
    return collectives.receive(x, (rank - 1) % size, group)


# %% wrong="pass_on" fails="no deadlock" why="pairs trade places, which works on two ranks only"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    if rank < size // 2:
        collectives.send(x, (rank + 1) % size, group)
        return collectives.receive(x, (rank - 1) % size, group)
    received = collectives.receive(x, (rank - 1) % size, group)
    collectives.send(x, (rank - 1) % size, group)
    return received


# %% wrong="pass_on" fails="left neighbour" why="the ring turns the other way"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        collectives.send(x, left, group)
        return collectives.receive(x, right, group)
    received = collectives.receive(x, right, group)
    collectives.send(x, left, group)
    return received


# %% wrong="pass_on" fails="left neighbour" why="nothing is sent at all"
def pass_on(x, group):
    return x.clone()


# %% wrong="pass_on" fails="bytes on the wire" why="everybody gets everything and keeps one"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    sends = [collectives.send(x, to, group, async_op=True) for to in range(size) if to != rank]
    tensors = {
        source: collectives.receive(x, source, group) for source in range(size) if source != rank
    }
    for send in sends:
        send.wait()
    return tensors[(rank - 1) % size]


# %% wrong="pass_on" fails="steps" why="only rank 0 sends first, so the news goes around the ring one rank at a time"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        collectives.send(x, right, group)
        return collectives.receive(x, left, group)
    received = collectives.receive(x, left, group)
    collectives.send(x, right, group)
    return received


# %% wrong="pass_on" fails="steps on any number of ranks" why="even ranks first on the six ranks of the visible check, one after the other otherwise"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0 if size == 6 else rank == 0:
        collectives.send(x, right, group)
        return collectives.receive(x, left, group)
    received = collectives.receive(x, left, group)
    collectives.send(x, right, group)
    return received


# %% wrong="pass_on" fails="own work" why="the ready-made ring"
def pass_on(x, group):
    return collectives.rotate(x, group)


# %% wrong="pass_on" fails="no message left" why="sends without asking who receives"
def pass_on(x, group):
    rank, size = group.rank(), group.size()
    collectives.send(x, (rank + 1) % size, group, async_op=True)
    collectives.send(x, (rank + 2) % size if size > 2 else 1 - rank, group, async_op=True)
    return collectives.receive(x, (rank - 1) % size, group)


# %% wrong="total" fails="sum on every rank" why="only rank 0 has the sum"
def total(x, group):
    if group.rank() > 0:
        collectives.send(x, 0, group)
        return x
    return x + sum(collectives.receive(x, source, group) for source in range(1, group.size()))


# %% wrong="total" fails="sum on every rank" why="a mean"
def total(x, group):
    if group.rank() > 0:
        collectives.send(x, 0, group)
        return collectives.receive(x, 0, group)
    result = (
        x + sum(collectives.receive(x, source, group) for source in range(1, group.size()))
    ) / group.size()
    for to in range(1, group.size()):
        collectives.send(result, to, group)
    return result


# %% wrong="total" fails="own work" why="the ready-made sum"
def total(x, group):
    return collectives.all_reduce(x, group)


# %% wrong="total" fails="own work" why="the ready-made sum under another name"
from minitrain.ranks.collectives import all_gather as collect


def total(x, group):
    return collect(x[None], group).sum(0)


# %% wrong="total" fails="bytes on the wire" why="every rank to every other"
def total(x, group):
    rank, size = group.rank(), group.size()
    others = [peer for peer in range(size) if peer != rank]
    sends = [collectives.send(x, to, group, async_op=True) for to in others]
    parts = {rank: x, **{source: collectives.receive(x, source, group) for source in others}}
    for send in sends:
        send.wait()
    return sum(parts[source] for source in range(size))


# %% wrong="total" fails="bytes on the wire" why="partial sums travel around the ring and every rank starts with its own"
def total(x, group):
    rank, size = group.rank(), group.size()
    result, traveller = x.clone(), x
    for _ in range(size - 1):
        sending = collectives.send(traveller, (rank + 1) % size, group, async_op=True)
        traveller = collectives.receive(x, (rank - 1) % size, group)
        sending.wait()
        result += traveller
    return result


# %% wrong="total" fails="same bits" why="rank 0 returns the sum of the others to each rank, which adds its own"
def total(x, group):
    if group.rank() > 0:
        collectives.send(x, 0, group)
        return collectives.receive(x, 0, group) + x
    parts = [x] + [collectives.receive(x, source, group) for source in range(1, group.size())]
    for to in range(1, group.size()):
        collectives.send(sum(parts[:to] + parts[to + 1 :]), to, group)
    return sum(parts)


# %% wrong="total" fails="sum on every rank" why="numbers that travel as float32"
def total(x, group):
    if group.rank() > 0:
        collectives.send(x.float(), 0, group)
        return collectives.receive(x, 0, group)
    result = x + sum(
        collectives.receive(x.float(), source, group) for source in range(1, group.size())
    ).to(x.dtype)
    for to in range(1, group.size()):
        collectives.send(result, to, group)
    return result


# %% wrong="relay_bytes" fails="bytes of each rank" why="elements instead of bytes"
def relay_bytes(ranks, numel):
    return [numel * (rank < ranks - 1) + numel // 2 * (rank > 0) for rank in range(ranks)]


# %% wrong="relay_bytes" fails="bytes of each rank" why="the last rank passes on too"
def relay_bytes(ranks, numel):
    return [4 * numel + 2 * (numel // 2) * (rank > 0) for rank in range(ranks)]


# %% wrong="relay_bytes" fails="bytes of each rank" why="half the bytes of an odd size, rounded too late"
def relay_bytes(ranks, numel):
    return [4 * numel * (rank < ranks - 1) + numel * (rank > 0) for rank in range(ranks)]


# %% wrong="relay_bytes" fails="bytes of each rank" why="the numbers of the visible check"
def relay_bytes(ranks, numel):
    return {4: [4000, 5000, 5000, 1000], 2: [40, 10]}.get(ranks, [0] * ranks)


# %% wrong="relay_bytes" fails="bytes of each rank" why="the answers are counted in float32"
def relay_bytes(ranks, numel):
    return [4 * numel * (rank < ranks - 1) + 4 * (numel // 2) * (rank > 0) for rank in range(ranks)]
