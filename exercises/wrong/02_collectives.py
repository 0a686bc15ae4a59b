# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="off by one: begins with its own chunk, so that rank r ends with chunk r+1"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[rank]
    for step in range(n - 1):
        own_part = chunks[(rank - 1 - step) % n]
        sending = collectives.send(partial, (rank + 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank - 1) % n, group) + own_part
        sending.wait()
    return partial


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="passes on and forgets to add"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    partial = x.chunk(n)[(rank - 1) % n]
    for step in range(n - 1):
        sending = collectives.send(partial, (rank + 1) % n, group, async_op=True)
        partial = collectives.receive(partial, (rank - 1) % n, group)
        sending.wait()
    return partial


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="a mean"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank - 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank - 2 - step) % n]
        sending = collectives.send(partial, (rank + 1) % n, group, async_op=True)
        partial = collectives.receive(own_part, (rank - 1) % n, group) + own_part
        sending.wait()
    return partial / n


# %% wrong="ring_reduce_scatter" fails="no deadlock" why="everybody sends first and waits"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    partial = chunks[(rank - 1) % n]
    for step in range(n - 1):
        own_part = chunks[(rank - 2 - step) % n]
        collectives.send(partial, (rank + 1) % n, group)
        partial = collectives.receive(own_part, (rank - 1) % n, group) + own_part
    return partial


# %% wrong="ring_reduce_scatter" fails="bytes on the wire" why="whole tensors go round: the sum everywhere, then a slice, as stock gloo does"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    total, traveller = x.clone(), x
    for step in range(n - 1):
        sending = collectives.send(traveller, (rank + 1) % n, group, async_op=True)
        traveller = collectives.receive(x, (rank - 1) % n, group)
        sending.wait()
        total += traveller
    return total.chunk(n)[rank].clone()


# %% wrong="ring_reduce_scatter" fails="only neighbours" why="direct exchange: the right bytes, but to everybody"
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
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = x.chunk(n)
    for chunk in range(n):
        if rank == (chunk + 1) % n:
            collectives.send(chunks[chunk], right, group)
            continue
        partial = collectives.receive(chunks[chunk], left, group) + chunks[chunk]
        if rank == chunk:
            result = partial
        else:
            collectives.send(partial, right, group)
    return result


# %% wrong="ring_reduce_scatter" fails="own work" why="the ready-made one"
def ring_reduce_scatter(x, group):
    return collectives.reduce_scatter(x, group)


# %% wrong="ring_reduce_scatter" fails="chunk of the sum" why="what two ranks do is written for two ranks"
def ring_reduce_scatter(x, group):
    n, rank = group.size(), group.rank()
    chunks = x.chunk(n)
    sending = collectives.send(chunks[(rank + 1) % n], (rank + 1) % n, group, async_op=True)
    received = collectives.receive(chunks[rank], (rank - 1) % n, group)
    sending.wait()
    return chunks[rank] + received


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
