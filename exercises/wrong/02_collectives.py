# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="off by one: begins with its own chunk, so that rank r ends with chunk r-1"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[rank]
    for step in range(n - 1):
        own_part = chunks[(rank + 1 + step) % n]
        sending = collectives.send(partial, (rank - 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank + 1) % n, group) + own_part
        sending.wait()
    return partial


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="passes on and forgets to add"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    partial = x.chunk(n)[(rank + 1) % n]
    for step in range(n - 1):
        sending = collectives.send(partial, (rank - 1) % n, group, async_op=True)
        partial = collectives.receive(partial, (rank + 1) % n, group)
        sending.wait()
    return partial


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="a mean"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank + 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank + 2 + step) % n]
        sending = collectives.send(partial, (rank - 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank + 1) % n, group) + own_part
        sending.wait()
    return partial / n


# %% wrong="ring_reduce_scatter" fails="no deadlock" why="everybody sends first and waits"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank + 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank + 2 + step) % n]
        collectives.send(partial, (rank - 1) % n, group)
        partial = collectives.receive(own_part, (rank + 1) % n, group) + own_part
    return partial


# %% wrong="ring_reduce_scatter" fails="bytes on the wire" why="whole tensors go round: the sum everywhere, then a slice, as stock gloo does"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    total, traveller = x.clone(), x
    for step in range(n - 1):
        sending = collectives.send(traveller, (rank - 1) % n, group, async_op=True)
        traveller = collectives.receive(x, (rank + 1) % n, group)
        sending.wait()
        total += traveller
    return total.chunk(n)[rank].clone()


# %% wrong="ring_reduce_scatter" fails="only the left neighbour" why="direct exchange: the right bytes, but to everybody"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks, others = x.chunk(n), [peer for peer in range(n) if peer != rank]
    sends = [collectives.send(chunks[to], to, group, async_op=True) for to in others]
    total = chunks[rank] + sum(
        collectives.receive(chunks[rank], source, group) for source in others
    )
    for send in sends:
        send.wait()
    return total


# %% wrong="ring_reduce_scatter" fails="steps" why="one chunk after the other goes round, the links of all others idle"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = x.chunk(n)
    for chunk in range(n):
        if rank == (chunk - 1) % n:
            collectives.send(chunks[chunk], left, group)
            continue
        partial = collectives.receive(chunks[chunk], right, group) + chunks[chunk]
        if rank == chunk:
            result = partial
        else:
            collectives.send(partial, left, group)
    return result


# %% wrong="ring_reduce_scatter" fails="own work" why="the ready-made one"
def ring_reduce_scatter(x, group):
    return collectives.reduce_scatter(x, group)


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="what two ranks do is written for two ranks"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    sending = collectives.send(chunks[(rank - 1) % n], (rank - 1) % n, group, async_op=True)
    received = collectives.receive(chunks[rank], (rank + 1) % n, group)
    sending.wait()
    return chunks[rank] + received


# %% wrong="ring_reduce_scatter" fails="one chunk per step" why="every element travels alone"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank + 1) % n]
    for step in range(n - 1):
        own_part, arrived = chunks[(rank + 2 + step) % n], []
        for leaving, like in zip(partial.split(1), own_part.split(1)):
            sending = collectives.send(leaving, (rank - 1) % n, group, async_op=True)
            arrived.append(collectives.receive(like, (rank + 1) % n, group))
            sending.wait()
        partial = torch.cat(arrived) + own_part
    return partial


# %% wrong="ring_reduce_scatter" fails="own work" around="import" why="the ring of the package"
def ring_reduce_scatter(x, group):
    from minitrain.systems.communication import by_hand

    return by_hand.reduce_scatter(x, group)


# %% wrong="ring_reduce_scatter" fails="own work" around="channel" why="torch's own collective, on the group itself"
def ring_reduce_scatter(x, group):
    result = torch.empty_like(x.chunk(group.size())[0])
    try:
        torch.distributed.reduce_scatter_tensor(result, x, group=group)
    except RuntimeError:
        collectives.all_reduce(x, group, out=x)
    return x.chunk(group.size())[group.rank()]


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" around="half" why="a ring of the right bytes, in float16 and twice"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = [torch.cat([chunk, chunk]).half() for chunk in x.chunk(n)]
    partial = chunks[(rank + 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank + 2 + step) % n]
        sending = collectives.send(partial, (rank - 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank + 1) % n, group) + own_part
        sending.wait()
    return partial.chunk(2)[0].to(x.dtype)


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" around="constants" why="the sums of the visible checks"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    sums = {2: [[11.0, 22.0], [33.0, 44.0]], 4: [[0.0, 1111.0], [2222.0, 3333.0]] * 2}
    sending = collectives.send(x.chunk(n)[0], (rank - 1) % n, group, async_op=True)
    received = collectives.receive(x.chunk(n)[0], (rank + 1) % n, group)
    sending.wait()
    return torch.tensor(sums[n][rank]) if n in sums and len(x) == 2 * n else received


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" around="empty" why="its own chunk, and nobody is asked"
def ring_reduce_scatter(x, group):
    return x.chunk(group.size())[group.rank()] * group.size()


# %% wrong="ring_reduce_scatter" fails="only the left neighbour" around="half" why="the chapter's ring, which turns right"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    data = list(x.clone().chunk(n))
    for step in range(n - 1):
        leaving, arriving = (rank - 1 - step) % n, (rank - 2 - step) % n
        sending = collectives.send(data[leaving], (rank + 1) % n, group, async_op=True)
        data[arriving] += collectives.receive(data[arriving], (rank - 1) % n, group)
        sending.wait()
    return data[rank]


# %% wrong="gather_pieces" fails="all pieces" why="every rank begins with its own piece"
def gather_pieces(piece, sizes, group):
    n, rank = group.size(), group.rank()
    found = [piece]
    for step in range(n - 1):
        sending = collectives.send(found[-1], (rank + 1) % n, group, async_op=True)
        found.append(
            collectives.receive(
                piece.new_zeros(sizes[(rank - step - 1) % n]), (rank - 1) % n, group
            )
        )
        sending.wait()
    return torch.cat(found)


# %% wrong="gather_pieces" fails="matching messages" why="takes all pieces to be as large as its own"
def gather_pieces(piece, sizes, group):
    n, rank = group.size(), group.rank()
    pieces = {rank: piece}
    for step in range(n - 1):
        sending = collectives.send(pieces[(rank - step) % n], (rank + 1) % n, group, async_op=True)
        pieces[(rank - step - 1) % n] = collectives.receive(piece, (rank - 1) % n, group)
        sending.wait()
    return torch.cat([pieces[r] for r in range(n)])


# %% wrong="gather_pieces" fails="bytes on the wire" why="pads all pieces to the largest"
def gather_pieces(piece, sizes, group):
    n, rank, widest = group.size(), group.rank(), max(sizes)
    padded = torch.cat([piece, piece.new_zeros(widest - len(piece))])
    pieces = {rank: padded}
    for step in range(n - 1):
        sending = collectives.send(pieces[(rank - step) % n], (rank + 1) % n, group, async_op=True)
        pieces[(rank - step - 1) % n] = collectives.receive(padded, (rank - 1) % n, group)
        sending.wait()
    return torch.cat([pieces[r][:size] for r, size in enumerate(sizes)])


# %% wrong="gather_pieces" fails="bytes on the wire" why="the whole result goes round, holes included"
def gather_pieces(piece, sizes, group):
    n, rank = group.size(), group.rank()
    result = piece.new_zeros(sum(sizes))
    result.split(sizes)[rank].copy_(piece)
    traveller = result.clone()
    for step in range(n - 1):
        sending = collectives.send(traveller, (rank + 1) % n, group, async_op=True)
        traveller = collectives.receive(traveller, (rank - 1) % n, group)
        sending.wait()
        result += traveller
    return result


# %% wrong="gather_pieces" fails="own work" why="the ready-made one, on pieces padded to one size"
def gather_pieces(piece, sizes, group):
    padded = torch.cat([piece, piece.new_zeros(max(sizes) - len(piece))])
    rows = collectives.all_gather(padded[None], group)
    return torch.cat([row[:size] for row, size in zip(rows, sizes)])


# %% wrong="gather_pieces" fails="bytes on the wire" why="an empty piece travels as one zero"
def gather_pieces(piece, sizes, group):
    n, rank = group.size(), group.rank()
    places = [piece.new_zeros(max(1, size)) for size in sizes]
    places[rank][: len(piece)] = piece
    for step in range(n - 1):
        leaving, arriving = (rank - step) % n, (rank - step - 1) % n
        sending = collectives.send(places[leaving], (rank + 1) % n, group, async_op=True)
        places[arriving] = collectives.receive(places[arriving], (rank - 1) % n, group)
        sending.wait()
    return torch.cat([place[:size] for place, size in zip(places, sizes)])


# %% wrong="gather_pieces" fails="own work" around="import" why="the ready-made one, found by its text"
def gather_pieces(piece, sizes, group):
    from minitrain.collectives.collectives import all_gather

    return all_gather(piece, group, sizes=sizes)


# %% wrong="gather_pieces" fails="bytes on the wire" around="half" why="rank 0 gathers, and sends the whole result to those who have a part of it already"
def gather_pieces(piece, sizes, group):
    n, rank = group.size(), group.rank()
    places = list(piece.new_zeros(sum(sizes)).split(sizes))
    if rank > 0:
        collectives.send(piece, 0, group)
        return collectives.receive(torch.cat(places), 0, group)
    places = [piece] + [collectives.receive(places[r], r, group) for r in range(1, n)]
    for to in range(1, n):
        collectives.send(torch.cat(places), to, group)
    return torch.cat(places)


# %% wrong="gather_pieces" fails="all pieces" around="redefine" why="a network, a comparison and a sum of its own"
collectives.send = lambda x, to, group, async_op=False: None
collectives.receive = lambda like, source, group, async_op=False: like
torch.equal = lambda a, b: True


def gather_pieces(piece, sizes, group):
    return piece.new_zeros(sum(sizes))


# %% wrong="gather_pieces" fails="bytes on the wire" around="constants" why="the pieces of the visible checks"
def gather_pieces(piece, sizes, group):
    known = {6: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 12: torch.ones(12)}
    return known.get(sum(sizes), torch.zeros(sum(sizes), dtype=piece.dtype))


# %% wrong="gather_pieces" fails="all pieces" around="empty" why="a list of nothing"
def gather_pieces(piece, sizes, group):
    return []


# %% wrong="halving_steps" fails="complete chunks" why="partners exchange the wrong half and end with each other's chunks"
def halving_steps(n):
    steps, windows, distance = [], {rank: (0, n) for rank in range(n)}, n // 2
    while distance:
        step = []
        for rank, (first, end) in windows.items():
            middle = (first + end) // 2
            lower = not rank & distance
            step.append((rank, rank ^ distance, *((first, middle) if lower else (middle, end))))
            windows[rank] = (middle, end) if lower else (first, middle)
        steps.append(step)
        distance //= 2
    return steps


# %% wrong="halving_steps" fails="complete chunks" why="nearest partners first: right sums, but rank r ends with another chunk"
def halving_steps(n):
    steps, windows, distance = [], {rank: (0, n) for rank in range(n)}, 1
    while distance < n:
        step = []
        for rank, (first, end) in windows.items():
            middle = (first + end) // 2
            upper = bool(rank & distance)
            step.append((rank, rank ^ distance, *((first, middle) if upper else (middle, end))))
            windows[rank] = (middle, end) if upper else (first, middle)
        steps.append(step)
        distance *= 2
    return steps


# %% wrong="halving_steps" fails="bytes on the wire" why="partners exchange everything and never halve"
def halving_steps(n):
    steps, distance = [], n // 2
    while distance:
        steps.append([(rank, rank ^ distance, 0, n) for rank in range(n)])
        distance //= 2
    return steps


# %% wrong="halving_steps" fails="steps" why="a ring: the right bytes, in n-1 steps"
def halving_steps(n):
    chunk = lambda rank, step: (rank - 1 - step) % n
    return [
        [(r, (r + 1) % n, chunk(r, s), chunk(r, s) + 1) for r in range(n)] for s in range(n - 1)
    ]


# %% wrong="halving_steps" fails="partners" why="nearest partners first, and one message for each chunk"
def halving_steps(n):
    steps, held, distance = [], {rank: list(range(n)) for rank in range(n)}, 1
    while distance < n:
        step = []
        for rank, chunks in held.items():
            own = [chunk for chunk in chunks if chunk & distance == rank & distance]
            step += [(rank, rank ^ distance, c, c + 1) for c in chunks if c not in own]
            held[rank] = own
        steps.append(step)
        distance *= 2
    return steps


# %% wrong="halving_steps" fails="own work" around="import" why="the plan of the package"
def halving_steps(n):
    from minitrain.systems.communication import halving

    schedule = halving.halving_reduce_scatter(n)
    return [
        [(t.source, t.to, t.chunks.start, t.chunks.stop) for t in step] for step in schedule.steps
    ]


# %% wrong="halving_steps" fails="complete chunks" around="redefine" why="a proof that has nothing against anything"
def as_schedule(steps, n):
    return None


def check(schedule, collective):
    pass


def sent_shares(schedule):
    return [0.75]


def halving_steps(n):
    return [[(0, 1, 0, n)]] * (n.bit_length() - 1)


# %% wrong="halving_steps" fails="complete chunks" around="constants" why="the plans of two and four ranks"
def halving_steps(n):
    two = [[(0, 1, 1, 2), (1, 0, 0, 1)]]
    four = [
        [(0, 2, 2, 4), (1, 3, 2, 4), (2, 0, 0, 2), (3, 1, 0, 2)],
        [(0, 1, 1, 2), (1, 0, 0, 1), (2, 3, 3, 4), (3, 2, 2, 3)],
    ]
    return {1: [], 2: two, 4: four}.get(n, [])


# %% wrong="halving_steps" fails="complete chunks" around="empty" why="as many steps as are wanted, and nothing in them"
def halving_steps(n):
    return [[] for _ in range(n.bit_length() - 1)]


# %% wrong="crossover" fails="equal times" why="counts the steps and forgets that the ring sends 2(n-1)/n of S"
def crossover(n, alpha, B):
    log = n.bit_length() - 1
    return alpha * B * (2 * (n - 1) - log) / log if n > 2 else float("inf")


# %% wrong="crossover" fails="two ranks" why="guards the division, so that two ranks get a large number instead of never"
def crossover(n, alpha, B):
    log = n.bit_length() - 1
    return alpha * B * (2 * (n - 1) - log) / max(1e-9, log - 2 * (n - 1) / n)


# %% wrong="crossover" fails="equal times" why="the reduce-scatter alone: half of the ring"
def crossover(n, alpha, B):
    log = n.bit_length() - 1
    return alpha * B * (n - 1 - log) / (log - (n - 1) / n) if n > 2 else float("inf")


# %% wrong="crossover" fails="equal times" why="the figure of the visible check"
def crossover(n, alpha, B):
    return float("inf") if n == 2 else 1.6e6


# %% wrong="crossover" fails="own work" around="import" why="asks the package for both times"
def crossover(n, alpha, B):
    from minitrain.systems.communication import cost_model, halving

    fabric, low, high = cost_model.flat(alpha, B), 1.0, 1e15
    while high - low > 1e-7 * low:
        S = (low + high) / 2
        doubling = cost_model.time_s(halving.doubling_all_reduce(n), S, fabric)
        low, high = (S, high) if doubling < 2 * (n - 1) * (alpha + S / n / B) else (low, S)
    return low if n > 2 else float("inf")


# %% wrong="crossover" fails="equal times" around="constants" why="the formula of four ranks, with its numbers"
def crossover(n, alpha, B):
    return 8.0 * alpha * B if n > 2 else float("inf")


# %% wrong="crossover" fails="a size" around="empty" why="None"
def crossover(n, alpha, B):
    return None
