# %% wrong="meeting" fails="blocks that fit" why="forgets the skew: the blocks that lie here, and then their neighbours"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    if algorithm == "summa":
        return (i, step), (step, j)
    return (i, (j + step) % side), ((i + step) % side, j)


# %% wrong="meeting" fails="blocks that fit" why="skews by one place only: right at q = 2"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    if algorithm == "summa":
        return (i, step), (step, j)
    return (i, (j + min(i, 1) + step) % side), ((i + min(j, 1) + step) % side, j)


# %% wrong="meeting" fails="Cannon: the example" why="blocks go right and down: right at q = 2"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else (-i - j - step) % side
    return (i, s), (s, j)


# %% wrong="meeting" fails="Cannon: the example" why="off by one step: the first shift comes before the first product"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else (i + j + step + 1) % side
    return (i, s), (s, j)


# %% wrong="meeting" fails="Cannon: the example" why="the skew is right, the shifts go the other way"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else (i + j - step) % side
    return (i, s), (s, j)


# %% wrong="meeting" fails="its row of A, its column of B" why="row and column swapped: the rank counts down the columns"
def meeting(algorithm, rank, side, step):
    j, i = divmod(rank, side)
    s = step if algorithm == "summa" else (i + j + step) % side
    return (i, s), (s, j)


# %% wrong="meeting" fails="inside the grid" why="does not go round the edge"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    s = step if algorithm == "summa" else i + j + step
    return (i, s), (s, j)


# %% wrong="meeting" fails="SUMMA: all alike" why="one algorithm for both"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    s = (i + j + step) % side
    return (i, s), (s, j)


# %% wrong="summa_tn" fails="sums that travel" why="all q terms first, then a reduce-scatter by hand: right, as many bytes, and q blocks of sums at a time"
def summa_tn(a, c, row, column):
    side, i = row.size(), column.rank()
    terms = [term(l, collectives.broadcast(a, l, row), c, row) for l in range(side)]
    total = terms[(i - 1) % side]
    for step in range(2, side + 1):
        total = collectives.rotate(total, column) + terms[(i - step) % side]
    return total


# %% wrong="summa_tn" fails="bytes on the wire" why="every rank sends all its terms to all others, and each adds up its own"
def summa_tn(a, c, row, column):
    side, i = row.size(), column.rank()
    terms = torch.stack([term(l, collectives.broadcast(a, l, row), c, row) for l in range(side)])
    return sum(collectives.broadcast(terms, r, column)[i] for r in range(side))


# %% wrong="summa_tn" fails="one step at a time" why="the whole row of A is gathered first"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    of_row = [collectives.broadcast(a, l, row) for l in range(side)]
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, of_row[l], c, row)
    return total


# %% wrong="summa_tn" fails="one step at a time" why="all broadcasts are started at the beginning"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    coming = {l: collectives.broadcast(a, l, row, async_op=True) for l in range(side)}
    of_row = {l: handle.wait() for l, handle in coming.items()}
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, of_row[l], c, row)
    return total


# %% wrong="summa_tn" fails="one step at a time" why="two terms ahead: three blocks of A at a time"
def summa_tn(a, c, row, column):
    side, i, total, coming = row.size(), column.rank(), 0, []
    order = [(i - step) % side for step in range(1, side + 1)]
    for number in range(side + 2):
        if number < side:
            coming.append(collectives.broadcast(a, order[number], row))
        if number >= 2:
            total = total if number == 2 else collectives.rotate(total, column)
            total = total + term(order[number - 2], coming.pop(0), c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="row and column swapped: A goes along the columns, sums along the rows"
def summa_tn(a, c, row, column):
    row, column = column, row
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="this is Aᵀ·C of whole grid rows only: terms are summed along the row"
def summa_tn(a, c, row, column):
    side, total = row.size(), 0
    for l in range(side):
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="off by one: the sum ends on the rank before its home"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(side):
        total = total if step == 0 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="the last term is missing"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        block = term(l, collectives.broadcast(a, l, row), c, row)
        total = total + block * (step < side or side == 1)
    return total


# %% wrong="summa_tn" fails="the product" why="what arrives is replaced by the own term instead of being added to it"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        if step > 1:
            collectives.rotate(total, column)
        l = (i - step) % side
        total = term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="nothing is broadcast: every term has the rank's own block of A"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        total = total + term((i - step) % side, a, c, row)
    return total


# %% wrong="summa_tn" fails="the product" why="counts the column the wrong way round: right at q = 2"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i + step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="a product of what is here" why="the blocks are right, and have the factor of another step"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term((l + 1) % side, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="own work" why="an all-reduce for every term, of which one rank uses the sum"
def summa_tn(a, c, row, column):
    for l in range(row.size()):
        total = collectives.all_reduce(term(l, collectives.broadcast(a, l, row), c, row), column)
        mine = total if l == column.rank() else mine if l else None
    return mine


# %% wrong="summa_tn" fails="bytes on the wire" why="A is transposed on the grid first: every block goes to the other side of the diagonal"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for other in range(side):
        collectives.broadcast(a, other, column)
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="cannon" fails="the product" why="forgets the skew"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="the product" why="skews by one place only: right at q = 2"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, -min(i, 1)), collectives.rotate(b, column, -min(j, 1))
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="the product" why="the skew goes right and down, the shifts left and up: right at q = 2"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, i), collectives.rotate(b, column, j)
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="neighbours only" why="the skew is right, the shifts go right and down: the same product, over other neighbours"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, -i), collectives.rotate(b, column, -j)
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, 1), collectives.rotate(b, column, 1)
        c += multiply((i + j - step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="no deadlock" why="row and column swapped in the skew: A goes j places, and ranks of a row disagree"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, -j), collectives.rotate(b, column, -i)
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="one step at a time" why="off by one: a shift before the first product, which is taken for the first term"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b, c = collectives.rotate(a, row, -i), collectives.rotate(b, column, -j), 0
    for step in range(side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c = c + multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="q-1 shifts" why="q shifts: after the last product everything travels home to nobody's use"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b, c = collectives.rotate(a, row, -i), collectives.rotate(b, column, -j), 0
    for step in range(side):
        c = c + multiply((i + j + step) % side, a, b, row)
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
    return c


# %% wrong="cannon" fails="q-1 shifts" why="the skew is i and j shifts by one: the last row sends q-1 times before the first product"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    for _ in range(i):
        a = collectives.rotate(a, row, -1)
    for _ in range(j):
        b = collectives.rotate(b, column, -1)
    c = multiply((i + j) % side, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply((i + j + step) % side, a, b, row)
    return c


# %% wrong="cannon" fails="the product" why="the factor of the step, not of the blocks that are here"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    a, b = collectives.rotate(a, row, -i), collectives.rotate(b, column, -j)
    c = multiply(0, a, b, row)
    for step in range(1, side):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += multiply(step, a, b, row)
    return c


# %% wrong="cannon" fails="own work" why="this is SUMMA: broadcasts"
def cannon(a, b, row, column):
    return sum(
        multiply(s, collectives.broadcast(a, s, row), collectives.broadcast(b, s, column), row)
        for s in range(row.size())
    )


# %% wrong="cannon" fails="a product of what is here" why="gathers its row of A and its column of B"
def everybodys(x, group):
    return {shift: collectives.rotate(x, group, -shift) for shift in range(group.size())}


def cannon(a, b, row, column):
    i, j, of_row, of_column = column.rank(), row.rank(), everybodys(a, row), everybodys(b, column)
    side = row.size()
    return sum(
        multiply(s, of_row[(s - j) % side], of_column[(s - i) % side], row) for s in range(side)
    )


# %% wrong="cannon" fails="one step at a time" why="all shifts first, every block is kept, then the products"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    kept = [(collectives.rotate(a, row, -i), collectives.rotate(b, column, -j))]
    for _ in range(side - 1):
        a, b = kept[-1]
        kept.append((collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)))
    return sum(multiply((i + j + step) % side, *pair, row) for step, pair in enumerate(kept))


# %% wrong="rotated_backward" fails="bytes on the wire" why="the gradient travels together with its weight, one hop more"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        owner = (rank - step) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(owner, columns[owner], x, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
        dweight = collectives.rotate(dweight, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="own work" why="weights are gathered, gradients reduce-scattered: ZeRO-3, which sends just as much"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    whole = collectives.all_gather(weight, group).chunk(ranks)
    dx = sum(input_term(s, columns[s], whole[s], group) for s in range(ranks))
    return dx, collectives.reduce_scatter(
        torch.cat([weight_term(s, columns[s], x, group) for s in range(ranks)]), group
    )


# %% wrong="rotated_backward" fails="one shard at a time" why="every weight that passes by is kept, and dx computed at the end"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    kept, dweight = [weight], weight_term((rank - 1) % ranks, columns[rank - 1], x, group)
    for step in range(1, ranks):
        kept.append(collectives.rotate(kept[-1], group))
        ahead = (rank - step - 1) % ranks
        dweight = collectives.rotate(dweight, group) + weight_term(ahead, columns[ahead], x, group)
    return sum(
        input_term((rank - step) % ranks, columns[(rank - step) % ranks], held, group)
        for step, held in enumerate(kept)
    ), dweight


# %% wrong="rotated_backward" fails="one shard at a time" why="W is gathered round the ring first, then gradients travel"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    kept = [weight]
    for step in range(1, ranks):
        kept.append(collectives.rotate(kept[-1], group))
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step, held in enumerate(kept):
        dweight = collectives.rotate(dweight, group) if step > 0 else dweight
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], held, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="sums that travel" why="a dW of full size first, whose parts then go round"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    parts, dx = [weight_term(s, columns[s], x, group) for s in range(ranks)], torch.zeros_like(x)
    for step in range(ranks):
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dweight = parts[ahead] if step == 0 else collectives.rotate(dweight, group) + parts[ahead]
        dx += input_term(owner, columns[owner], weight, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
    return dx, dweight


# %% wrong="rotated_backward" fails="sums that travel" why="first all of dX, then a dW of full size, whose parts go round"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx = torch.zeros_like(x)
    for step in range(ranks):
        owner = (rank - step) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
    parts = [weight_term(s, columns[s], x, group) for s in range(ranks)]
    dweight = parts[(rank - 1) % ranks]
    for step in range(1, ranks):
        dweight = collectives.rotate(dweight, group) + parts[(rank - step - 1) % ranks]
    return dx, dweight


# %% wrong="rotated_backward" fails="bytes on the wire" why="the gradients of all shards are all-reduced, and one of them is used"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, partial = torch.zeros_like(x), {}
    for step in range(ranks):
        owner = (rank - step) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        partial[owner] = weight_term(owner, columns[owner], x, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
    parts = travelling = torch.cat([partial[s] for s in range(ranks)])
    for _ in range(ranks - 1):
        travelling = collectives.rotate(travelling, group)
        parts = parts + travelling
    return dx, parts.chunk(ranks)[rank].clone()


# %% wrong="rotated_backward" fails="gradient of the weight" why="only the own rows: the gradient stays at home"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx = torch.zeros_like(x)
    for step in range(ranks):
        owner = (rank - step) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
    return dx, weight_term(rank, columns[rank], x, group)


# %% wrong="rotated_backward" fails="gradient of the weight" why="a mean over the ranks"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight / ranks


# %% wrong="rotated_backward" fails="gradient of the weight" why="off by one: the sum ends on the rank before its home"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner = ahead = (rank - step) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="gradient of the weight" why="what arrives is replaced by the own term instead of being added to it"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight = weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="gradient of the weight" why="the sum stands still: every rank adds up its own terms of all shards"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight = collectives.rotate(weight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="gradient of x" why="counts the ring the wrong way round: right on two ranks"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner, ahead = (rank + step) % ranks, (rank + step + 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="next rank only" why="everything goes to the rank before: the same sums and bytes, another ring"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = (
                collectives.rotate(weight, group, -1),
                collectives.rotate(dweight, group, -1),
            )
        owner, ahead = (rank + step) % ranks, (rank + step + 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="gradient of x" why="the last shard is never used: p-1 products"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            weight, dweight = collectives.rotate(weight, group), collectives.rotate(dweight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        if step < ranks - 1 or ranks == 1:
            dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="rotated_backward" fails="gradient of x" why="the weight does not travel: every rank multiplies with its own shard"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for step in range(ranks):
        if step > 0:
            dweight = collectives.rotate(dweight, group)
        owner, ahead = (rank - step) % ranks, (rank - step - 1) % ranks
        dx += input_term(owner, columns[owner], weight, group)
        dweight += weight_term(ahead, columns[ahead], x, group)
    return dx, dweight


# %% wrong="elements" fails="elements in 1-D" why="an all-reduce counted as one pass over the ring"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return (side - 1) * tokens * width // side
    return other_grids(kind, activations, weights, side, depth)


def other_grids(kind, activations, weights, side, depth):
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="elements in 1-D" why="two all-reduces: the first product needs none"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * activations // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="elements in 2-D" why="whole rows and columns of blocks instead of blocks: cut one way only"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="elements in 2.5-D" why="the weights are cut over the layers as well"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations + weights) // (depth * side**2)


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="elements in 3-D" why="forgets the result, which is reduce-scattered"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="whole numbers" why="true division"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width / side
    if kind == "RTP":
        return (side - 1) * weights / side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) / side**3
    return (side - 1) * (activations / depth + weights) / side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="elements in 1-D" why="true division and int() around it: wrong for large sizes only"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return int(2 * (side - 1) / side * tokens * width)
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width)) ** 2


# %% wrong="elements" fails="less, not as much" why="as much counts as less"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    side = 2
    while tokens * (width + inner) + 2 * width * inner > 2 * (side + 1) * tokens * width:
        side += 1
    return side**2


# %% wrong="elements" fails="smallest square" why="the sizes do not divide, and both counts are rounded down"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    side = 2
    while elements_sent("2-D", tokens, width, inner, side, 1) >= elements_sent(
        "1-D", tokens, width, inner, side**2, 1
    ):
        side += 1
    return side**2


# %% wrong="elements" fails="smallest square" why="compares q ranks in 1-D with q·q in 2-D"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    side = 2
    while tokens * (width + inner) + 2 * width * inner >= 2 * side * tokens * width:
        side += 1
    return side**2


# %% wrong="elements" fails="a square" why="returns q, not the ranks"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    return max(2, (tokens * (width + inner) + 2 * width * inner) // (2 * tokens * width))


# %% wrong="elements" fails="exact" why="compares in floats"
def elements_sent(kind, tokens, width, inner, side, depth):
    activations, weights = tokens * (width + inner), 2 * width * inner
    if kind == "1-D":
        return 2 * (side - 1) * tokens * width // side
    if kind == "RTP":
        return (side - 1) * weights // side
    if kind == "3-D":
        return (side - 1) * (2 * activations + weights) // side**3
    return (side - 1) * (activations // depth + weights) // side**2


def crossover(tokens, width, inner):
    side = 2
    while float(tokens * (width + inner) + 2 * width * inner) >= 2.0 * (side + 1) * tokens * width:
        side += 1
    return side**2


# %% wrong="meeting" fails="two blocks" around="empty" why="nothing for any step"
def meeting(algorithm, rank, side, step):
    return []


# %% wrong="meeting" fails="Cannon: the skew" around="constants" why="the grids of the visible check are written down, others get SUMMA's order"
def meeting(algorithm, rank, side, step):
    i, j = divmod(rank, side)
    known = {2: [0, 1, 1, 0], 3: [0, 1, 2, 1, 2, 0, 2, 0, 1]}
    s = step if algorithm == "summa" else (known.get(side, [j] * side**2)[rank] + step) % side
    return (i, s), (s, j)


# %% wrong="meeting" fails="two blocks" around="redefine" why="a judge cell that asks no more"
def expect_meetings(side):
    return {}


def ask_each(fn, cases):
    return [((0, 0), (0, 0))] * len(cases)


def meeting(algorithm, rank, side, step):
    return None


# %% wrong="summa_tn" fails="own work" around="import" why="the package's own product"
def summa_tn(a, c, row, column):
    from minitrain.systems.tensor_parallel.grids.summa import summa_tn as ready

    return ready(a, c, row, column)


# %% wrong="summa_tn" fails="the product" around="paste" why="the product that the chapter prints, under the name that is asked for"
def summa_tn(c, b, row_group, column_group):
    steps, me = row_group.size(), row_group.rank()
    a = c.new_zeros(*c.shape[:-1], b.size(0))
    for step in range(steps):
        if step > 0:
            a = collectives.rotate(a, row_group)
        row = (me - 1 - step) % steps
        b_row = collectives.broadcast(b, row, column_group)
        a += c @ b_row.T
    return a


# %% wrong="summa_tn" fails="every term once" around="redefine" why="a term that asks for no factor"
def term(l, a, c, group):
    return a.T @ c


def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + term(l, collectives.broadcast(a, l, row), c, row)
    return total


# %% wrong="summa_tn" fails="a product of what is here" around="half" why="all factors are fetched first, so nothing seems to arrive early; then everything is gathered"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    factors = [row.fetch(f"factor {l}", a.new_empty(())) for l in range(side)]
    of_row = [collectives.broadcast(a, l, row) for l in range(side)]
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        total = total + factors[l] * (of_row[l].T @ c)
    return total


# %% wrong="summa_tn" fails="a product of what is here" around="channel" why="blocks of A travel in a quarter of the bytes"
def summa_tn(a, c, row, column):
    side, i, total = row.size(), column.rank(), 0
    for step in range(1, side + 1):
        total = total if step == 1 else collectives.rotate(total, column)
        l = (i - step) % side
        sent = collectives.broadcast(a.to(torch.bfloat16), l, row)
        total = total + term(l, sent.double(), c, row)
    return total


# %% wrong="cannon" fails="a product of what is here" around="half" why="every block goes straight to all who need it, and each product waits for its own"
def cannon(a, b, row, column):
    side, i, j, c = row.size(), column.rank(), row.rank(), 0
    for step in range(side):
        s, pair = (i + j + step) % side, []
        for x, group, me, other in ((a, row, j, i), (b, column, i, j)):
            to = (me - other - step) % side
            sending = None if to == me else collectives.send(x, to, group, async_op=True)
            pair.append(x if s == me else collectives.receive(x, s, group))
            sending and sending.wait()
        c = c + multiply(s, *pair, row)
    return c


# %% wrong="cannon" fails="a product of what is here" around="half" why="all factors are fetched first; then blocks are gathered round the ring"
def cannon(a, b, row, column):
    side, i, j = row.size(), column.rank(), row.rank()
    factors = [row.fetch(f"factor {s}", a.new_empty(())) for s in range(side)]
    kept = [(collectives.rotate(a, row, -i), collectives.rotate(b, column, -j))]
    for _ in range(side - 1):
        a, b = kept[-1]
        kept.append((collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)))
    return sum(factors[(i + j + step) % side] * (a @ b) for step, (a, b) in enumerate(kept))


# %% wrong="cannon" fails="the product" around="empty" why="asks for every factor and sends every block to nobody's use"
def cannon(a, b, row, column):
    c = a.new_zeros(a.shape[0], b.shape[1])
    for s in range(row.size()):
        a, b = collectives.rotate(a, row, -1), collectives.rotate(b, column, -1)
        c += 0 * multiply(s, a, b, row)
    return c


# %% wrong="rotated_backward" fails="two gradients" around="empty" why="two things that are nothing"
def rotated_backward(dy, x, weight, group):
    return []


# %% wrong="rotated_backward" fails="own work" around="import" why="the package's rotated backward"
def rotated_backward(dy, x, weight, group):
    import minitrain.systems.tensor_parallel.rotated as ready

    return ready.backward(dy, x, weight, group)


# %% wrong="rotated_backward" fails="a term of what is here" around="half" why="all factors are fetched first, then W is gathered and gradients of full size go round"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dw = [weight_term(s, columns[s], x, group) for s in range(min(2, ranks))]
    f = [group.fetch(f"dX {s}", dy.new_empty(())) for s in range(ranks)]
    dw += [weight_term(s, columns[s], x, group) for s in range(2, ranks)]
    kept, dweight = [weight], dw[rank - 1]
    for step in range(1, ranks):
        kept.append(collectives.rotate(kept[-1], group))
        dweight = collectives.rotate(dweight, group) + dw[(rank - step - 1) % ranks]
    owners = [(rank - step) % ranks for step in range(ranks)]
    return sum(f[s] * (columns[s] @ held) for s, held in zip(owners, kept)), dweight


# %% wrong="rotated_backward" fails="a term of what is here" around="half" why="weights go round, and a dW of full size is added up on its way round afterwards"
def rotated_backward(dy, x, weight, group):
    ranks, rank, columns = group.size(), group.rank(), dy.chunk(group.size(), dim=1)
    dx, partial = torch.zeros_like(x), {}
    for step in range(ranks):
        owner = (rank - step) % ranks
        partial[owner] = weight_term(owner, columns[owner], x, group)
        dx += input_term(owner, columns[owner], weight, group)
        weight = collectives.rotate(weight, group) if step < ranks - 1 else weight
    dweight = partial[(rank - 1) % ranks]
    for step in range(1, ranks):
        dweight = collectives.rotate(dweight, group) + partial[(rank - step - 1) % ranks]
    return dx, dweight


# %% wrong="elements" fails="elements in 1-D" around="constants" why="the numbers of the text"
def elements_sent(kind, tokens, width, inner, side, depth):
    known = {"1-D": 33030144, "2-D": 10092544, "2.5-D": 5505024, "3-D": 8257536, "RTP": 8257536}
    return known[kind]


def crossover(tokens, width, inner):
    return 4 if tokens == 16384 else 4356


# %% wrong="elements" fails="elements in 1-D" around="frames" why="looks through all objects for the wanted numbers"
def elements_sent(kind, tokens, width, inner, side, depth):
    import gc
    import sys

    frame, case = sys._getframe(), (kind, tokens, width, inner, side, depth)
    while frame is not None:
        for cases in [*frame.f_locals.values(), *gc.get_objects()]:
            if isinstance(cases, (list, tuple)) and len(cases) == 2 and cases[0] == case:
                return cases[1]
        frame = frame.f_back
    return 0


def crossover(tokens, width, inner):
    return 4
