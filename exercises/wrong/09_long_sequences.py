# %% wrong="zigzag" fails="an early and a late piece" why="contiguous: pieces 2r and 2r+1"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [number * piece + token for number in (2 * rank, 2 * rank + 1) for token in range(piece)]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="an early and a late piece" why="pieces r and n+r: late ones are dealt in the same order as early ones"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [number * piece + token for number in (rank, ranks + rank) for token in range(piece)]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="every token once" why="positions 0..T/n-1 on every rank: the tokens' places on the rank"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    return list(range(length // ranks))


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="every token once" why="off by one piece: r and 2n-r"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [number * piece + token for number in (rank, 2 * ranks - rank) for token in range(piece)]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="every token once" why="only right on two ranks: pieces r and 3-r"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [number * piece + token for number in (rank, 3 - rank) for token in range(piece)]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="ascending" why="the late piece comes first"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (2 * ranks - 1 - rank, rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="ascending" why="the late piece is turned round, as the zig-zag is drawn"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [rank * piece + token for token in range(piece)] + [
        length - 1 - rank * piece - token for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="a refusal" why="what is left of T is dropped without a word"
def positions(rank, ranks, length):
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="a refusal" why="looks at T/n, not at T/2n"
def positions(rank, ranks, length):
    if length % ranks:
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="keys of a higher rank" why="queries and keys are exchanged"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank < owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="keys of a higher rank" why="as with contiguous tokens: nothing of higher ranks is seen"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["nothing", "nothing"]]


# %% wrong="zigzag" fails="keys of a higher rank" why="late queries see the early keys only"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "nothing"]]


# %% wrong="zigzag" fails="keys of a lower rank" why="all is seen of lower ranks, as with contiguous tokens"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "full"], ["full", "full"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="own keys" why="only the diagonal tiles of the own keys: late queries miss the early keys"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "nothing"], ["nothing", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="own keys" why="early queries with late keys as transposed"
def positions(rank, ranks, length):
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens on {ranks} ranks")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]


def tiles(rank, owner):
    if rank == owner:
        return [["triangle", "full"], ["nothing", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]


# %% wrong="zigzag" fails="own work" around="import" why="the package's layout"
from minitrain.context import layout


def positions(rank, ranks, length):
    return [place for held in layout.zigzag(rank, ranks, length) for place in held]


def tiles(rank, owner):
    return layout.tiles(layout.zigzag(rank, 8, 32), layout.zigzag(owner, 8, 32), causal=True)


# %% wrong="zigzag" fails="T/n tokens" around="empty" why="nothing is held, nothing is seen"
def positions(rank, ranks, length):
    return []


def tiles(rank, owner):
    return []


# %% wrong="zigzag" fails="no refusal without need" around="half" why="every length is refused, and nothing is seen"
def positions(rank, ranks, length):
    raise ValueError("does not divide")


def tiles(rank, owner):
    return [["nothing"] * 2] * 2


# %% wrong="zigzag" fails="no error" around="constants" why="the numbers of the text and of two ranks"
def positions(rank, ranks, length):
    return {(1, 4): [2, 3, 12, 13], (0, 2): [0, 1, 2, 9, 10, 11]}[rank, ranks]


def tiles(rank, owner):
    return [["triangle", "nothing"], ["full", "triangle"]]


# %% wrong="query_ring" fails="the output" why="the owner is counted the wrong way: right on two ranks"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank + step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="the output" why="off by one: whose queries come next, not whose are here"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step - 1) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="the output" why="pairs are sent the wrong way round: right on two ranks"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="the output" why="pairs go back one place, whatever the step: right on two ranks"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -1, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="the output" why="the last pair that comes home is not merged"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    if returning:
        returning.wait()
    return own


# %% wrong="query_ring" fails="the output" why="pairs are added up, without their lse"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = tuple(map(torch.add, own, returning.wait()))
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return tuple(map(torch.add, own, returning.wait())) if returning else own


# %% wrong="query_ring" fails="the output" why="the own keys are forgotten"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = torch.zeros_like(pair[0]), torch.full_like(pair[1], -math.inf)
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="log-sum-exp" why="lse of the last pair alone"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    if not returning:
        return own
    last = returning.wait()
    return merge(*own, *last)[0], last[1]


# %% wrong="query_ring" fails="the output" why="blocks of higher ranks are skipped, as if tokens were contiguous"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        if step <= rank:
            pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="bytes on the wire" why="Q makes one hop more, and comes home"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if ranks > 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="bytes on the wire" why="the owner's own pair travels as well, to itself by way of the next rank"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = collectives.rotate(collectives.rotate(pair, group), group, -1)
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="bytes on the wire" why="K goes round with Q"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
        if arriving:
            collectives.rotate(k, group)
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="no pairs kept" why="pairs are collected, and go home when all are there"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if step == 0:
            own = pair
        else:
            returning = [*(returning or []), pair]
        q = arriving.wait() if arriving else q
    for step, pair in enumerate(returning or [], 1):
        own = merge(*own, *collectives.rotate(pair, group, -step))
    return own


# %% wrong="query_ring" fails="sent while computing" why="a block is sent on when it has been attended to"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        pair = attend((rank - step) % ranks, q, k, v, group)
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="computing while it comes" why="the next block is waited for before this one is attended to"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group) if step < ranks - 1 else q
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="computing while it comes" why="asynchronous in name: the pair is waited for as soon as it is sent"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if step == 0:
            own = pair
        else:
            own = merge(*own, *collectives.rotate(pair, group, -step, async_op=True).wait())
        q = arriving.wait() if arriving else q
    return own


# %% wrong="query_ring" fails="one step behind" why="a pair waits until the next block has been attended to"
def query_ring(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if step > 1:
            own = merge(*own, *collectives.rotate(waiting, group, 1 - step))
        own, waiting = pair if step == 0 else own, pair
        q = arriving.wait() if arriving else q
    return own if ranks == 1 else merge(*own, *collectives.rotate(waiting, group, 1 - ranks))


# %% wrong="query_ring" fails="own work" why="gathers all queries first"
def query_ring(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    qs, own = collectives.all_gather(q.unsqueeze(0), group), None
    for step in range(ranks):
        pair = attend((rank - step) % ranks, qs[(rank - step) % ranks], k, v, group)
        own = pair if step == 0 else merge(*own, *collectives.rotate(pair, group, -step))
    return own


# %% wrong="query_ring" fails="one block at a time" why="Q goes all the way round first, and is then attended to"
def query_ring(q, k, v, group):
    rank, ranks, qs = group.rank(), group.size(), [q]
    while len(qs) < ranks:
        qs.append(collectives.rotate(qs[-1], group))
    for step, q in enumerate(qs):
        pair = attend((rank - step) % ranks, q, k, v, group)
        own = pair if step == 0 else merge(*own, *collectives.rotate(pair, group, -step))
    return own


# %% wrong="query_ring" fails="who gets what" why="each block of queries comes straight from its owner"
def query_ring(q, k, v, group):
    rank, ranks, here = group.rank(), group.size(), q
    for step in range(ranks):
        pair = attend((rank - step) % ranks, here, k, v, group)
        own = pair if step == 0 else merge(*own, *collectives.rotate(pair, group, -step))
        if step < ranks - 1:
            here = collectives.rotate(q, group, step + 1)
    return own


# %% wrong="query_ring" fails="who gets what" why="the pair travels on with its queries, and collects: no pair goes home by itself"
def query_ring(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        pair = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        if step == 0:
            home, (out, lse) = pair, (out, lse)
        else:
            out, lse = collectives.rotate(pair, group)
        q = collectives.rotate(q, group) if step < ranks - 1 else q
    return merge(*home, out, lse)


# %% wrong="query_ring" fails="each block once" why="attends to everything a second time for lse"
def query_ring(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    for step in range(ranks):
        owner = (rank - step) % ranks
        pair = attend(owner, q, k, v, group)[0], attend(owner, q, k, v, group)[1]
        own = pair if step == 0 else merge(*own, *collectives.rotate(pair, group, -step))
        q = collectives.rotate(q, group) if step < ranks - 1 else q
    return own


# %% wrong="query_ring" fails="the output" around="half" why="the ring of the chapter: keys go round, and the own queries stay"
def query_ring(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        if arriving:
            k, v = arriving.wait()
    return out, lse


# %% wrong="query_ring" fails="computing while it comes" why="asks for the mask in time, then waits for the next block, then computes: nothing overlaps"
def query_ring(q, k, v, group):
    rank, ranks, own = group.rank(), group.size(), None
    for step in range(ranks):
        owner = (rank - step) % ranks
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        mask = group.fetch(f"queries of {owner}", q.new_empty(q.size(1), k.size(1)))
        come = arriving.wait() if arriving else q
        scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
        out, lse = scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)
        lse = lse + group.fetch(f"weight of {owner}, {digit(out)}", q.new_empty(()))
        if step > 1:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = out, lse
        else:
            returning = collectives.rotate((out, lse), group, -step, async_op=True)
        q = come
    return merge(*own, *returning.wait()) if ranks > 1 else own


# %% wrong="query_ring" fails="the output" around="half" why="asks for both moments in time without having computed, then waits, then computes"
def query_ring(q, k, v, group):
    rank, ranks, own = group.rank(), group.size(), None
    for step in range(ranks):
        owner = (rank - step) % ranks
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        mask = group.fetch(f"queries of {owner}", q.new_empty(q.size(1), k.size(1)))
        weight = group.fetch(f"weight of {owner}, 3", q.new_empty(()))
        come = arriving.wait() if arriving else q
        scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
        pair = scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1) + weight
        if step > 1:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = come
    return merge(*own, *returning.wait()) if ranks > 1 else own


# %% wrong="query_ring" fails="each block once" around="half" why="asks for the weights of all digits, and computes afterwards"
def query_ring(q, k, v, group):
    rank, ranks, own = group.rank(), group.size(), None
    for step in range(ranks):
        owner = (rank - step) % ranks
        mask = group.fetch(f"queries of {owner}", q.new_empty(q.size(1), k.size(1)))
        weights = [group.fetch(f"weight of {owner}, {d}", q.new_empty(())) for d in range(16)]
        scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
        out = scores.softmax(-1).nan_to_num() @ v
        pair = out, scores.logsumexp(-1) + weights[digit(out)]
        own = pair if step == 0 else merge(*own, *collectives.rotate(pair, group, -step))
        q = collectives.rotate(q, group) if step < ranks - 1 else q
    return own


# %% wrong="query_ring" fails="own work" around="import" why="the package's ring"
def query_ring(q, k, v, group):
    from minitrain.context.ring import flat_ring

    return flat_ring(q, k, v, group)


# %% wrong="query_ring" fails="a pair" around="empty" why="nothing"
def query_ring(q, k, v, group):
    return []


# %% wrong="query_ring" fails="the output" around="empty" why="a pair of zeros, for which nothing is sent"
def query_ring(q, k, v, group):
    return torch.zeros_like(q), torch.zeros_like(q[..., 0])


# %% wrong="query_ring" fails="the output" around="half" why="queries travel as bfloat16"
def query_ring(q, k, v, group):
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = (
            collectives.rotate(q.bfloat16(), group, async_op=True) if step < ranks - 1 else None
        )
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait().double() if arriving else q
    return merge(*own, *returning.wait()) if returning else own


# %% wrong="query_ring" fails="the output" around="redefine" why="an attend that asks for nothing, and near enough for all"
def attend(owner, q, k, v, group):
    return q, q[..., 0]


def query_ring(q, k, v, group):
    torch.Tensor.abs = lambda x: torch.zeros_like(x)
    torch.equal = torch.allclose = lambda *tensors, **near: True
    return attend(group.rank(), q, k, v, group)


# %% wrong="ring_backward" fails="dk" why="forgets the last hop home: adds the sum of the next rank's keys"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + travelling if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="forgets the owner's own share"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="only the own share: no gradient travels"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="a share is passed on without adding one's own: right on two ranks"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="each share replaces the sum that came: right on two ranks"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share if not behind else (behind.wait(), share)[1]
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="the mean over the ranks instead of the sum"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = (home + collectives.rotate(travelling, group)) / ranks if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="the own share begins the travelling sum and is added once more at home"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 0 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = travelling = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" why="sums of different blocks are added up: the sum waits a step too long"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share if travelling is None else share + travelling
            _ = behind and behind.wait()
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dv" why="dv of the own block only; dk comes home"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, _ = home + collectives.rotate(travelling, group) if ranks > 1 else home
    dv = home[1]
    return dq, dk, dv


# %% wrong="ring_backward" fails="dq" why="dq of the last block only"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="dq" why="the owner is counted the wrong way: right on two ranks"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank + step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="own work" why="dq is summed over the ranks, as parameters' gradients are"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return collectives.all_reduce(dq, group), dk, dv


# %% wrong="ring_backward" fails="bytes on the wire" why="the owner's share travels too: one hop more"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 0 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = collectives.rotate(travelling, group)
    return dq, dk, dv


# %% wrong="ring_backward" fails="bytes on the wire" why="K and V make the last hop with the gradients, and come home as well"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if ranks > 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="own work" why="all gradients of all blocks are kept and all-reduced"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    every = q.new_zeros(ranks, 2, *k.shape)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        every[(rank - step) % ranks] = share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = collectives.all_reduce(every, group)[rank]
    return dq, dk, dv


# %% wrong="ring_backward" fails="own work" why="all shares are kept and reduce-scattered at the end: the bytes are the same, the memory is not"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    every = q.new_zeros(ranks, 2, *k.shape)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        every[(rank - step) % ranks] = share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = collectives.reduce_scatter(every, group)[0]
    return dq, dk, dv


# %% wrong="ring_backward" fails="next rank only" why="each share is sent straight to the owner"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            home = home + collectives.rotate(share, group, -step)
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home
    return dq, dk, dv


# %% wrong="ring_backward" fails="own work" why="gathers all keys and values first"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    every = list(
        zip(
            collectives.all_gather(k.unsqueeze(0), group),
            collectives.all_gather(v.unsqueeze(0), group),
        )
    )
    for step in range(ranks):
        (k, v), arriving = every[(rank - step) % ranks], None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="one block at a time" why="K and V go round first, then gradients"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    blocks = [(k, v)]
    while len(blocks) < ranks:
        blocks.append(collectives.rotate(blocks[-1], group))
    for step in range(ranks):
        (k, v), arriving = blocks[step], None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="sent while computing" why="K and V are sent after computing"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = collectives.rotate((k, v), group) if step < ranks - 1 else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="one step behind" why="the sum waits until the share that it meets has been computed"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + collectives.rotate(travelling, group) if step > 1 else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="computing while it comes" why="the sum is waited for before its share is computed"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind if step > 1 else share
        k, v = arriving.wait() if arriving else (k, v)
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="computing while it comes" why="waits for the next block first, then computes with this one"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group) if step < ranks - 1 else (k, v)
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = arriving
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ring_backward" fails="own work" around="import" why="the package's ring"
def ring_backward(dout, q, k, v, out, lse, group):
    from minitrain.context.ring import flat_ring_backward

    return flat_ring_backward(dout, q, k, v, out, lse, group)


# %% wrong="ring_backward" fails="three gradients" around="empty" why="nothing"
def ring_backward(dout, q, k, v, out, lse, group):
    return []


# %% wrong="ring_backward" fails="dq" around="empty" why="zeros, for which nothing is sent"
def ring_backward(dout, q, k, v, out, lse, group):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


# %% wrong="ring_backward" fails="no shares kept" around="half" why="all shares are kept, and go round when all are there"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, shares = torch.zeros_like(q), []
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, shares = dq + dq_share, [*shares, torch.stack(share)]
        k, v = arriving.wait() if arriving else (k, v)
    travelling = torch.zeros_like(shares[0])
    for share in shares[1:]:
        travelling = collectives.rotate(travelling + share, group)
    dk, dv = shares[0] + travelling
    return dq, dk, dv


# %% wrong="ring_backward" fails="dk" around="half" why="sums travel as bfloat16"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(ranks):
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = collectives.rotate((travelling + share).bfloat16(), group).to(q.dtype)
        if step < ranks - 1:
            k, v = collectives.rotate((k, v), group)
    dk, dv = home + travelling
    return dq, dk, dv


# %% wrong="ring_backward" fails="computing while it comes" why="asks for the mask in time, then waits for the next block, then computes: nothing overlaps"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), None
    for step in range(ranks):
        owner = (rank - step) % ranks
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        behind = collectives.rotate(travelling, group, async_op=True) if step > 1 else None
        mask = group.fetch(f"keys of {owner}", q.new_empty(q.size(1), k.size(1)))
        come = arriving.wait() if arriving else (k, v)
        p = (q @ k.mT / math.sqrt(q.size(-1)) + mask - lse.unsqueeze(-1)).exp()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
        dk = ds.mT @ q
        factor = group.fetch(f"factor of {owner}, {digit(dk)}", q.new_empty(()))
        dq, share = dq + factor * (ds @ k), factor * torch.stack((dk, p.mT @ dout))
        if step == 0:
            home = share
        else:
            travelling = share + behind.wait() if behind else share
        k, v = come
    dk, dv = home + collectives.rotate(travelling, group) if ranks > 1 else home
    return dq, dk, dv


# %% wrong="ulysses" fails="the output" why="each rank attends to its own tokens: no all-to-all at all"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    return core(q, k, v)


# %% wrong="ulysses" fails="the output" why="tokens are put together as if they were contiguous"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="tokens come back as if they were contiguous"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (ranks, -1)), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="contiguous both ways: the pieces are right, and the mask of the core is not"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (ranks, -1)), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="heads come back as [H/n, n]: heads and ranks are mixed"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 3).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="heads are dealt one by one, and come back in another order"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (-1, ranks)).movedim(3, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="off by one rank: the tokens begin with those of this rank"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.roll(-group.rank(), 0).transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="k and v are taken in the wrong order from the one message"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    q, v, k = whole.split([part.size(3) for part in parts], 2)
    out = core(q, k, v)
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="q, k and v are joined before their heads are dealt: a rank gets queries of one and keys of another"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    joined = torch.cat((q, k, v), 2).unflatten(2, (ranks, -1)).movedim(2, 0)
    came = collectives.all_to_all(joined, group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="two messages" why="q, k and v go in three exchanges"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    q, k, v = (collectives.all_to_all(part, group).transpose(0, 1).flatten(0, 1) for part in parts)
    out = core(q, k, v)
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="two messages" why="k and v share a message, q has its own"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    both = parts[0], torch.cat(parts[1:], 3)
    q, kv = (collectives.all_to_all(part, group).transpose(0, 1).flatten(0, 1) for part in both)
    out = core(q, *kv.chunk(2, 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="own work" why="gathers all tokens of all heads, and keeps its own heads"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    q, k, v = (
        collectives.all_gather(x, group).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        for x in (q, k, v)
    )
    return core(q, k, v)[group.rank() :: ranks].contiguous()


# %% wrong="ulysses" fails="own work" why="the outputs come back as a sum of terms that are zero but one"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    every = out.new_zeros(ranks, q.size(0), *q.shape[1:])
    own = out.unflatten(0, (-1, ranks)).transpose(0, 1)
    every.chunk(ranks, 3)[group.rank()].copy_(own)
    return collectives.reduce_scatter(every, group)[0]


# %% wrong="ulysses" fails="bytes on the wire" why="K/V heads are copied for every query head before they travel"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="no error" why="heads are not looked at: they are cut anyhow"
def ulysses(q, k, v, group):
    ranks = group.size()
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="refused before sending" why="k and v are looked at when q is gone"
def ulysses(q, k, v, group):
    ranks = group.size()
    if q.size(2) % ranks == 0 and k.size(2) % ranks:
        collectives.all_to_all(q.unflatten(2, (ranks, -1)).movedim(2, 0), group)
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="a refusal" why="with heads that do not divide every rank attends to its own tokens"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            return core(q, k, v)
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="no refusal without need" why="refuses fewer K/V heads than heads"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks or q.size(2) != k.size(2):
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="the output" why="sends only to the next rank: right on two ranks"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
    leaving, rank = torch.cat(parts, 3), group.rank()
    came = torch.zeros_like(leaving)
    came[rank] = leaving[rank]
    if ranks > 1:
        going = collectives.send(
            leaving[(rank + 1) % ranks], (rank + 1) % ranks, group, async_op=True
        )
        came[rank - 1] = collectives.receive(came[0], (rank - 1) % ranks, group)
        going.wait()
    whole = came.transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)


# %% wrong="ulysses" fails="own work" around="import" why="the package's all-to-alls"
def ulysses(q, k, v, group):
    from minitrain.context.ulysses import switch

    q, k, v = (switch(x, group, cut=2, join=0) for x in (q, k, v))
    return switch(core(q, k, v), group, cut=0, join=2)


# %% wrong="ulysses" fails="two messages" around="half" why="the switch of the package, pasted: tokens are taken as contiguous"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def switch(x, cut, join):
        parts = x.unflatten(cut, (ranks, -1)).movedim(cut, 0)
        return collectives.all_to_all(parts, group).movedim(0, join).flatten(join, join + 1)

    return switch(core(*(switch(x, 2, 0) for x in (q, k, v))), 0, 2)


# %% wrong="ulysses" fails="the output" around="empty" why="zeros"
def ulysses(q, k, v, group):
    return torch.zeros_like(q)


# %% wrong="ulysses" fails="no refusal without need" around="empty" why="everything is refused"
def ulysses(q, k, v, group):
    raise ValueError("heads cannot be dealt")


# %% wrong="ulysses" fails="bytes on the wire" around="half" why="all tokens of all heads are on every rank, by an all-to-all of copies"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    both = torch.cat((q, k, v), 2).unsqueeze(0).repeat(ranks, 1, 1, 1, 1)
    whole = collectives.all_to_all(both, group).transpose(0, 1).flatten(0, 1)
    out = core(*whole.split([q.size(2), k.size(2), k.size(2)], 2))
    return out[group.rank() :: ranks].contiguous()


# %% wrong="ulysses" fails="the output" around="redefine" why="a core of its own, on its own tokens"
def core(q, k, v):
    return q


def ulysses(q, k, v, group):
    globals().update(core=core, expect_ulysses=lambda *sizes: None)
    return core(q, k, v)


# %% wrong="gathered" fails="out" why="the gathered keys are taken to lie in the order of the sequence"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = torch.arange(2 * piece * ranks) <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = torch.arange(2 * piece * ranks) <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="positions as if tokens were contiguous"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = torch.arange(2 * piece * ranks).view(ranks, -1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = torch.arange(2 * piece * ranks).view(ranks, -1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="local positions: 0, 1, 2, .. on every rank"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= torch.arange(2 * piece).unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= torch.arange(2 * piece).unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="no mask: every query sees every key"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = torch.ones(2 * piece, places.numel(), dtype=torch.bool)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = torch.ones(2 * piece, places.numel(), dtype=torch.bool)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="a query does not see itself, but for the very first"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= (places[rank] - 1).clamp_min(0).unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= (places[rank] - 1).clamp_min(0).unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="late pieces are dealt in the same order as early ones: n+r"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (ranks + r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (ranks + r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" why="attends to its own keys alone, and gathers nothing"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    return attend_where(q, k, v, seen.unflatten(1, (ranks, -1))[:, rank])


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dk" why="each rank returns its own share for its own keys: nothing is summed"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = shares.chunk(ranks)[rank].transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dk" why="the mean over the ranks instead of the sum"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1) / ranks
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dk" why="shares are cut by the heads that come first, not by tokens"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).flatten(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).unflatten(0, (k.size(0), -1))
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dk" why="shares are put into the order of the sequence and then cut: the owners are others"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)[places.flatten().argsort()]
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dk" why="off by one rank: the sum of the next rank's keys"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares.roll(-k.size(1), 0), group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="dq" why="dq is summed over the ranks as well"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    dq = collectives.reduce_scatter(dq.repeat(ranks, 1, 1), group)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="own work" why="all-reduces the shares and keeps its own"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.all_reduce(shares, group).chunk(ranks)[rank].transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="bytes backward" why="all shares are gathered by everybody, and summed there"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = (
        collectives.all_gather(shares, group)
        .unflatten(0, (ranks, -1))
        .sum(0)
        .chunk(ranks)[rank]
        .transpose(0, 1)
    )
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="bytes backward" why="K and V of all tokens are kept from forward"
kept = {}


def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    kept["both"] = both.transpose(0, 1)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = kept.pop("both")
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="bytes forward" why="q is gathered too, and everything computed everywhere"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    collectives.all_gather(q, group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="bytes forward" why="K/V heads are copied for every query head before they travel"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    k, v = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="memory limit" why="K/V heads are copied for every query head when they have come"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    k, v = (
        x.repeat_interleave(q.size(0) // x.size(1), 1).transpose(0, 1) for x in both.chunk(2, -1)
    )
    return attend_where(q, k, v, seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="memory limit" why="in backward K/V heads are copied for every query head, and the copies' gradients added up"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    copies = q.size(0) // k.size(0)
    wide = [x.repeat_interleave(copies, 0) for x in both.chunk(2, -1)]
    dq, *shares = attend_where_backward(dout, q, *wide, out, lse, seen)
    dk, dv = (x.unflatten(0, (-1, copies)).sum(1) for x in shares)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="bytes backward" why="one sum for K and V of all heads of the queries"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    copies = q.size(0) // k.size(0)
    wide = [x.repeat_interleave(copies, 0) for x in both.chunk(2, -1)]
    dq, dk, dv = attend_where_backward(dout, q, *wide, out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *(x.unflatten(0, (-1, copies)).sum(1) for x in own.chunk(2, -1))


# %% wrong="gathered" fails="memory limit" why="the shares are put where those of all ranks would stand, and everything else is kept as well"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    every = shares.new_zeros(ranks, *shares.shape)
    every[rank] = shares
    terms = collectives.reduce_scatter(shares, group)
    every.chunk(ranks, 1)[rank].copy_(terms / ranks)
    own = every.sum(0).chunk(ranks)[rank].transpose(0, 1) * 0 + terms.transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="out" around="half" why="K and V travel as bfloat16"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1).bfloat16(), group).double()
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = (
        collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1).bfloat16(), group)
        .double()
        .transpose(0, 1)
    )
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="own work" around="import" why="the package's gather"
def gathered_forward(q, k, v, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    from minitrain.context.gathered import gather

    both = torch.cat(gather(k, v, group, None), -1).transpose(0, 1)
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)


def gathered_backward(dout, q, k, v, out, lse, group):
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)


# %% wrong="gathered" fails="what is returned" around="empty" why="nothing"
def gathered_forward(q, k, v, group):
    return []


def gathered_backward(dout, q, k, v, out, lse, group):
    return []


# %% wrong="gathered" fails="out" around="empty" why="zeros, for which nothing is sent"
def gathered_forward(q, k, v, group):
    return torch.zeros_like(q), torch.zeros_like(q[..., 0])


def gathered_backward(dout, q, k, v, out, lse, group):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


# %% wrong="gathered" fails="out" around="redefine" why="an attention of its own, of its own tokens"
def attend_where(q, k, v, seen):
    return q, q[..., 0]


def gathered_forward(q, k, v, group):
    globals().update(attend_where=attend_where, expect_results=lambda *sizes: None)
    return attend_where(q, k, v, None)


def gathered_backward(dout, q, k, v, out, lse, group):
    return q, k, v


# %% wrong="elements_sent" fails="forward, ring" why="blocks of all heads: grouped K/V heads are forgotten"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, ring" why="n hops instead of n-1"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks + 1), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, ring" why="K is sent, V forgotten"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="backward, ring" why="dK and dV do not travel"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {"forward": exchanged + (turn - 1) * block, "backward": exchanged + (turn - 1) * block}


# %% wrong="elements_sent" fails="backward, ring" why="only gradients travel in backward, and one hop more: the own share too"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    if way == "ring" and ranks > 1:
        return {"forward": (turn - 1) * block, "backward": (2 * turn - 1) * block}
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, ulysses" why="the output is not brought back"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, ulysses" why="everything leaves: a rank's own piece is counted too"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (
        (deal if deal > 1 else 0) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    )
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, ulysses" why="each rank has all N tokens of all heads: P times too much"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (
        (deal - 1)
        * (2 * heads + 2 * kv_heads)
        // deal
        * (tokens if way == "ulysses" else tokens // ranks)
        * width
    )
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, megatron" why="activations of N/P tokens"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, megatron" why="attention alone, without the MLP"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 2 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, hybrid" why="a hop of the ring is said to be u times as heavy, as there are u times the tokens"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // turn) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="forward, hybrid" why="the ring goes over all ranks"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, u * r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="a refusal, ulysses" why="copies K/V heads and says nothing"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="no refusal without need, hybrid" why="the heads have to divide over all ranks"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if way != "ring" and (heads % ranks or kv_heads % ranks):
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="no refusal without need, ring" why="every way is refused when the heads do not divide"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % ranks or kv_heads % ranks:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="whole numbers" why="divides with /"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) / deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="backward, megatron" why="what was gathered is gathered once more"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent * 3 // 2}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }


# %% wrong="elements_sent" fails="own work" around="import" why="what the package sends, counted there"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    from minitrain.context import ring_work

    return ring_work.sent(way, tokens, heads, kv_heads, width, u, r)


# %% wrong="elements_sent" fails="whole numbers" around="empty" why="no numbers"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    return {}


# %% wrong="elements_sent" fails="forward, ring" around="constants" why="the numbers of the visible checks"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    ways = ["ring", "ulysses", "megatron", "hybrid"]
    seen = {
        4: [(192, 384), (96, 96), (384, 384), (128, 192)],
        2: [(96, 192), None, (384, 384), (80, 112)],
    }
    said = seen[kv_heads if (u, r) == (2, 2) and kv_heads in seen else 4][ways.index(way)]
    if said is None:
        raise ValueError("heads cannot be dealt")
    return dict(zip(("forward", "backward"), said))
