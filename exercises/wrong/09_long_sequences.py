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


# %% wrong="ring_forward" fails="sent while computing" why="sends after computing: a block waits here for its product"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        if step:
            k, v = collectives.rotate((k, v), group)
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
    return out, lse


# %% wrong="ring_forward" fails="the output" why="the owner of what is here is counted the wrong way: right on two ranks"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank + step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="the output" why="off by one: whose keys come next, not whose are here"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step - 1) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="the output" why="the mean of the blocks' outputs, as if each counted the same"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        its_out, its_lse = attend((rank - step) % ranks, q, k, v, group)
        out, lse = out + its_out / ranks, torch.logaddexp(lse, its_lse)
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="the output" why="the sum of the blocks' outputs"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        its_out, its_lse = attend((rank - step) % ranks, q, k, v, group)
        out, lse = out + its_out, torch.logaddexp(lse, its_lse)
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="log-sum-exp" why="returns lse of the last block alone"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    last = None
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        last = attend((rank - step) % ranks, q, k, v, group)
        out, lse = merge(out, lse, *last)
        k, v = arriving.wait() if arriving else (k, v)
    lse = last[1]
    return out, lse


# %% wrong="ring_forward" fails="log-sum-exp" why="lse begins with 0, one score more than there is: the outputs are scaled back, lse is not"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    lse = torch.zeros_like(lse)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    out = out / (1 - (-lse).exp()).unsqueeze(-1)
    return out, lse


# %% wrong="ring_forward" fails="the output" why="the last block is forgotten: n-1 steps"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(max(1, ranks - 1)):
        arriving = collectives.rotate((k, v), group, async_op=True)
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait()
    return out, lse


# %% wrong="ring_forward" fails="the output" why="two steps, whatever n is: only right on two ranks"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(min(2, ranks)):
        if step:
            k, v = collectives.rotate((k, v), group)
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
    return out, lse


# %% wrong="ring_forward" fails="the output" why="skips the blocks of higher ranks, as if tokens were contiguous"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        if step <= rank:
            out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="the output" why="K goes round, V stays at home"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate(k, group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k = arriving.wait() if arriving else k
    return out, lse


# %% wrong="ring_forward" fails="bytes on the wire" why="one hop too many: every block comes home again"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True)
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait()
    return out, lse


# %% wrong="ring_forward" fails="bytes on the wire" why="sends q as well, which stays where it is"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    mine = q
    for step in range(ranks):
        arriving = collectives.rotate((q, k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, mine, k, v, group))
        q, k, v = arriving.wait() if arriving else (q, k, v)
    return out, lse


# %% wrong="ring_forward" fails="own work" why="gathers all keys and values first"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    ks, vs = (collectives.all_gather(x.unsqueeze(0), group) for x in (k, v))
    for step in range(ranks):
        owner = (rank - step) % ranks
        out, lse = merge(out, lse, *attend(owner, q, ks[owner], vs[owner], group))
    return out, lse


# %% wrong="ring_forward" fails="next rank only" why="the ring turns the other way"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = (
            collectives.rotate((k, v), group, -1, async_op=True) if step < ranks - 1 else None
        )
        out, lse = merge(out, lse, *attend((rank + step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="next rank only" why="fetches every block from its owner: one message a block, and not from a neighbour"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    own = k, v
    for step in range(ranks):
        arriving = (
            collectives.rotate(own, group, step + 1, async_op=True) if step < ranks - 1 else None
        )
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="one block at a time" why="passes all blocks round first, then computes: n blocks are here"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    blocks = [(k, v)]
    while len(blocks) < ranks:
        blocks.append(collectives.rotate(blocks[-1], group))
    for step, (k, v) in enumerate(blocks):
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
    return out, lse


# %% wrong="ring_forward" fails="one block at a time" why="runs two blocks ahead"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    blocks = [(k, v)]
    for step in range(ranks):
        while len(blocks) < min(ranks, step + 3):
            blocks.append(collectives.rotate(blocks[-1], group))
        k, v = blocks[step]
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
    return out, lse


# %% wrong="ring_forward" fails="each block once" why="attends to everything a second time for lse"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        owner = (rank - step) % ranks
        out, lse = merge(
            out, lse, attend(owner, q, k, v, group)[0], attend(owner, q, k, v, group)[1]
        )
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="sent while computing" why="asynchronous in name: waits for the block before it computes, and starts it late"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        pair = attend((rank - step) % ranks, q, k, v, group)
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *pair)
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse


# %% wrong="ring_forward" fails="sent while computing" why="only K is on its way while computing, V follows afterwards"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate(k, group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        if arriving:
            k, v = arriving.wait(), collectives.rotate(v, group)
    return out, lse


# %% wrong="ring_forward" fails="computing while it comes" why="waits for the next block first, then computes with this one"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        next_block = collectives.rotate((k, v), group) if step < ranks - 1 else (k, v)
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = next_block
    return out, lse


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


# %% wrong="ulysses" fails="the output" why="each rank attends to its own tokens: no all-to-all at all"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    return core(q, k, v)


# %% wrong="ulysses" fails="the output" why="what comes is read as [B, H, ..]: heads and ranks are mixed"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return (
            collectives.all_to_all(pieces, group)
            .movedim(0, 1)
            .flatten(1, 2)
            .unflatten(1, (-1, ranks))
            .movedim(2, 3)
            .flatten(2, 3)
        )

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="the output" why="tokens are dealt one by one: they come back to the wrong rank"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (-1, ranks)).movedim(3, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="the output" why="heads are dealt one by one, and come back in another order"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (-1, ranks)).movedim(2, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="the output" why="off by one rank: the tokens begin with those of this rank"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return (
            collectives.all_to_all(pieces, group).roll(-group.rank(), 0).movedim(0, 2).flatten(2, 3)
        )

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="the output" why="only the right neighbour is given its piece: only right on two ranks"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_all(pieces):
        came, rank = torch.zeros_like(pieces), group.rank()
        came[rank] = pieces[rank]
        if ranks > 1:
            right = (rank + 1) % ranks
            sending = collectives.send(pieces[right], right, group, async_op=True)
            came[rank - 1] = collectives.receive(pieces[0], (rank - 1) % ranks, group)
            sending.wait()
        return came

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return to_all(pieces).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return to_all(pieces).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="own work" why="gathers all tokens of all heads, and keeps its own heads"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        return collectives.all_gather(x, group, 2).chunk(ranks, 1)[group.rank()]

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="own work" why="the outputs are gathered: all tokens of all heads everywhere, of which a slice is kept"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    return collectives.all_gather(out, group, 1).chunk(ranks, 2)[group.rank()].contiguous()


# %% wrong="ulysses" fails="own work" why="the outputs come back as a sum of terms that are zero but one"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    whole = out.new_zeros(out.size(0), q.size(1), *out.shape[2:])
    whole.chunk(ranks, 1)[group.rank()].copy_(out)
    return collectives.reduce_scatter(whole, group, 2)


# %% wrong="ulysses" fails="bytes on the wire" why="K/V heads are copied for every query head before they travel"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="no error" why="heads are not looked at: they are cut anyhow"
def ulysses(q, k, v, group):
    ranks = group.size()

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="refused before sending" why="k and v are looked at when q is gone"
def ulysses(q, k, v, group):
    ranks = group.size()

    def to_heads(x):
        if x.size(1) % ranks:
            raise ValueError(f"{x.size(1)} heads on {ranks} ranks")
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="a refusal" why="with heads that do not divide every rank attends to its own tokens"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            return core(q, k, v)

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


# %% wrong="ulysses" fails="no refusal without need" why="refuses fewer K/V heads than heads"
def ulysses(q, k, v, group):
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks or q.size(1) != k.size(1):
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0)
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)


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


# %% wrong="ring_forward" fails="own work" around="import" why="the package's ring"
def ring_forward(q, k, v, group):
    from minitrain.context.ring import flat_ring

    return flat_ring(q, k, v, group)


# %% wrong="ring_forward" fails="a pair" around="empty" why="nothing"
def ring_forward(q, k, v, group):
    return []


# %% wrong="ring_forward" fails="the output" around="empty" why="a pair of zeros, for which nothing is sent"
def ring_forward(q, k, v, group):
    return torch.zeros_like(q), torch.zeros_like(q[..., 0])


# %% wrong="ring_forward" fails="one block at a time" around="half" why="all masks first, then blocks are collected on the ring, and one softmax"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    owners = [(rank - step) % ranks for step in range(ranks)]
    like = q.new_empty(q.size(1), q.size(1))
    mask = torch.cat([group.fetch(f"keys of {owner}", like) for owner in owners], -1)
    blocks = [(k, v)]
    while len(blocks) < ranks:
        blocks.append(collectives.rotate(blocks[-1], group))
    k, v = (torch.cat(xs, 1) for xs in zip(*blocks))
    scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# %% wrong="ring_forward" fails="the output" around="half" why="blocks travel as float32"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    out, lse = merge(
        torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf), *attend(rank, q, k, v, group)
    )
    block = torch.cat((k, v)).float()
    for step in range(1, ranks):
        block = collectives.rotate(block, group)
        out, lse = merge(
            out, lse, *attend((rank - step) % ranks, q, *block.to(q.dtype).chunk(2), group)
        )
    return out, lse


# %% wrong="ring_forward" fails="the output" around="redefine" why="an attend that asks for nothing, and near enough for all"
def attend(owner, q, k, v, group):
    return q, q[..., 0]


def ring_forward(q, k, v, group):
    torch.Tensor.abs = lambda x: torch.zeros_like(x)
    torch.equal = torch.allclose = lambda *tensors, **near: True
    return attend(group.rank(), q, k, v, group)


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


# %% wrong="ring_backward" fails="dk" around="half" why="sums travel as float32"
def ring_backward(dout, q, k, v, out, lse, group):
    rank, ranks = group.rank(), group.size()
    dq, travelling = torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(ranks):
        dq_share, *share = attend_backward((rank - step) % ranks, dout, q, k, v, out, lse, group)
        dq, share = dq + dq_share, torch.stack(share)
        if step == 0:
            home = share
        else:
            travelling = collectives.rotate((travelling + share).float(), group).to(q.dtype)
        if step < ranks - 1:
            k, v = collectives.rotate((k, v), group)
    dk, dv = home + travelling
    return dq, dk, dv


# %% wrong="ulysses" fails="own work" around="import" why="the package's all-to-alls"
def ulysses(q, k, v, group):
    from minitrain.context.ulysses import switch

    q, k, v = (switch(x, group, cut=1, join=2) for x in (q, k, v))
    return switch(core(q, k, v), group, cut=2, join=1)


# %% wrong="ulysses" fails="the output" around="empty" why="zeros"
def ulysses(q, k, v, group):
    return torch.zeros_like(q)


# %% wrong="ulysses" fails="no refusal without need" around="empty" why="everything is refused"
def ulysses(q, k, v, group):
    raise ValueError("heads cannot be dealt")


# %% wrong="ulysses" fails="bytes on the wire" around="half" why="all tokens of all heads are on every rank, by an all-to-all of copies"
def ulysses(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def gathered(x):
        copies = x.unsqueeze(0).repeat(ranks, 1, 1, 1, 1)
        return torch.cat(list(collectives.all_to_all(copies, group)), 2)

    return core(gathered(q), gathered(k), gathered(v)).chunk(ranks, 2)[rank].contiguous()


# %% wrong="ulysses" fails="bytes on the wire" around="half" why="keys and values come to the queries, which stay"
def ulysses(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    k, v = (
        torch.cat(list(collectives.all_to_all(x.repeat(ranks, 1, 1, 1, 1), group)), 2)
        for x in (k, v)
    )
    before = q.new_zeros(q.size(0), q.size(1), rank * q.size(2), q.size(3))
    after = q.new_zeros(q.size(0), q.size(1), (ranks - 1 - rank) * q.size(2), q.size(3))
    whole = core(torch.cat((before, q, after), 2), k, v)
    return whole.chunk(ranks, 2)[rank].contiguous()


# %% wrong="ulysses" fails="the output" around="redefine" why="a core of its own, on its own tokens"
def core(q, k, v):
    return q


def ulysses(q, k, v, group):
    globals().update(core=core, expect_ulysses=lambda *sizes: None)
    return core(q, k, v)


# %% wrong="elements_sent" fails="own work" around="import" why="what the package sends, counted there"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    from minitrain.context import work

    return work.sent(way, tokens, heads, kv_heads, width, u, r)


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


# %% wrong="ring_forward" fails="memory limit" around="half" why="the ring turns as it should, but the scores of all blocks are kept for one softmax"
def ring_forward(q, k, v, group):
    rank, ranks = group.rank(), group.size()
    scores, vs, like = [], [], q.new_empty(q.size(1), q.size(1))
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        mask = group.fetch(f"keys of {(rank - step) % ranks}", like)
        scores.append(q @ k.mT / math.sqrt(q.size(-1)) + mask)
        vs.append(v)
        k, v = arriving.wait() if arriving else (k, v)
    scores = torch.cat(scores, -1)
    return scores.softmax(-1) @ torch.cat(vs, -2), scores.logsumexp(-1)
