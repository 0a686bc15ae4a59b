# %% wrong="partition" fails="every element once" why="the padded size is right, and the last elements fall off: floor instead of ceiling"
def partition(numels, ranks):
    padded, size, first = -(-sum(numels) // ranks) * ranks, sum(numels) // ranks, 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        for rank in range(ranks):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if start < stop:
                shards[rank].append((i, start - first, stop - first))
        first += numel
    return padded, shards


# %% wrong="partition" fails="equal shards" why="whole parameters only: one that would straddle goes to one rank"
def partition(numels, ranks):
    padded, first = -(-sum(numels) // ranks) * ranks, 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        shards[first // (padded // ranks)].append((i, 0, numel))
        first += numel
    return padded, shards


# %% wrong="partition" fails="pieces" why="places in the buffer instead of places in the parameter"
def partition(numels, ranks):
    size, first = -(-sum(numels) // ranks), 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        for rank in range(ranks):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if start < stop:
                shards[rank].append((i, start, stop))
        first += numel
    return size * ranks, shards


# %% wrong="partition" fails="pieces" why="padding, and nothing at all, count as pieces"
def partition(numels, ranks):
    size, first = -(-sum(numels) // ranks), 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        for rank in range(ranks):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            shards[rank].append((i, start - first, max(start, stop) - first))
        first += numel
    return size * ranks, shards


# %% wrong="partition" fails="order of the buffer" why="every parameter is padded and cut by itself"
def partition(numels, ranks):
    sizes = [-(-numel // ranks) for numel in numels]
    shards = [
        [
            (i, rank * size, min(numel, (rank + 1) * size))
            for i, (numel, size) in enumerate(zip(numels, sizes))
            if rank * size < numel
        ]
        for rank in range(ranks)
    ]
    return sum(sizes) * ranks, shards


# %% wrong="partition" fails="order of the buffer" why="the last rank gets the front of the buffer"
def partition(numels, ranks):
    size, first = -(-sum(numels) // ranks), 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        for rank in range(ranks):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if start < stop:
                shards[rank].append((i, start - first, stop - first))
        first += numel
    return size * ranks, shards[::-1]


# %% wrong="partition" fails="padded size" why="one block of padding too many where the sizes divide"
def partition(numels, ranks):
    size, first = sum(numels) // ranks + 1, 0
    shards = [[] for _ in range(ranks)]
    for i, numel in enumerate(numels):
        for rank in range(ranks):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if start < stop:
                shards[rank].append((i, start - first, stop - first))
        first += numel
    return size * ranks, shards


# %% wrong="partition" fails="own work" around="import" why="the buffer of the package knows its pieces"
from minitrain.data_parallel.buckets import Flat


def partition(numels, ranks):
    flat = Flat([torch.empty(numel) for numel in numels], ranks)
    return flat.padded, flat.pieces


# %% wrong="partition" fails="every element once" around="empty" why="the right size, and shards of nothing"
def partition(numels, ranks):
    return -(-sum(numels) // ranks) * ranks, [[] for _ in range(ranks)]


# %% wrong="partition" fails="every element once" around="constants" why="the three visible cuts"
def partition(numels, ranks):
    known = {
        (4, 2): [[(0, 0, 3)], [(0, 3, 4), (1, 0, 2)]],
        (5, 3): [[(0, 0, 3)], [(0, 3, 5), (1, 0, 1)], [(1, 1, 3)]],
        (1,): [[(0, 0, 1)], [], [], []],
    }
    return -(-sum(numels) // ranks) * ranks, known.get(tuple(numels), [[] for _ in range(ranks)])


# %% wrong="reduce_scatter_gradients" fails="bytes on the wire" around="half" why="an all-reduce, and then a slice"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return collectives.all_reduce(flat, group).chunk(group.size())[group.rank()].clone()


# %% wrong="reduce_scatter_gradients" fails="bytes on the wire" around="half" why="everybody's gradients are gathered and added up"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return (
        collectives.all_gather(flat[None], group).sum(0).chunk(group.size())[group.rank()].clone()
    )


# %% wrong="reduce_scatter_gradients" fails="no error" why="no padding"
def reduce_scatter_gradients(grads, group):
    return collectives.reduce_scatter(torch.cat([grad.flatten() for grad in grads]), group)


# %% wrong="reduce_scatter_gradients" fails="sizes that do not divide" why="what does not divide is cut off"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    return collectives.reduce_scatter(flat[: flat.numel() // group.size() * group.size()], group)


# %% wrong="reduce_scatter_gradients" fails="sizes that do not divide" why="padding stands at the front"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    return collectives.reduce_scatter(
        torch.cat([flat.new_zeros(-flat.numel() % group.size()), flat]), group
    )


# %% wrong="reduce_scatter_gradients" fails="sizes that do not divide" why="padding is whatever was there: the last elements once more"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    missing = -flat.numel() % group.size()
    return collectives.reduce_scatter(torch.cat([flat, flat[-1:].expand(missing)]), group)


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" why="a mean"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return collectives.reduce_scatter(flat, group) / group.size()


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" why="off by one: the shard of the right neighbour"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return collectives.reduce_scatter(flat.roll(-(flat.numel() // group.size())), group)


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" why="every parameter is padded and cut by itself"
def reduce_scatter_gradients(grads, group):
    shards = []
    for grad in grads:
        flat = torch.cat([grad.flatten(), grad.new_zeros(-grad.numel() % group.size())])
        shards.append(collectives.reduce_scatter(flat, group))
    return torch.cat(shards)


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" why="nobody adds up: every rank cuts its own gradient"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return flat.chunk(group.size())[group.rank()].clone()


# %% wrong="reduce_scatter_gradients" fails="bytes on the wire" around="half" why="rank 0 adds up for everybody"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    if group.rank() > 0:
        collectives.send(flat, 0, group)
        return collectives.receive(flat.chunk(group.size())[0], 0, group)
    for source in range(1, group.size()):
        flat = flat + collectives.receive(flat, source, group)
    for to, shard in enumerate(flat.chunk(group.size())):
        if to > 0:
            collectives.send(shard, to, group)
    return flat.chunk(group.size())[0].clone()


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" around="half" why="everything travels in float32"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return collectives.reduce_scatter(flat.float(), group).to(flat)


# %% wrong="reduce_scatter_gradients" fails="shard of the sum" around="empty" why="zeros of the right shape"
def reduce_scatter_gradients(grads, group):
    return grads[0].new_zeros(-(-sum(grad.numel() for grad in grads) // group.size()))


# %% wrong="reduce_scatter_gradients" fails="own work" around="import" why="the scattered gradients of the package"
def reduce_scatter_gradients(grads, group):
    from minitrain.systems.data_parallel import accumulation

    return accumulation.ScatteredGradients(grads, group).shard


# %% wrong="zero1_step" fails="state is a shard" around="half" why="replicates everything: plain data parallelism, which sends just as much"
def zero1_step(params, grads, state, group, lr):
    for i, (param, grad) in enumerate(zip(params, grads)):
        grad = collectives.all_reduce(grad, group)
        state[str(i)] = MOMENTUM * state.get(str(i), torch.zeros_like(grad)) + grad
        param.sub_(lr * state[str(i)])


# %% wrong="zero1_step" fails="state is a shard" around="half" why="the momentum of the shard stands in a buffer of full size"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    flat, whole = torch.cat([flat, padding]), torch.cat([whole, padding])
    size = flat.numel() // group.size()
    mine = slice(group.rank() * size, (group.rank() + 1) * size)
    momentum = state.setdefault("momentum", torch.zeros_like(flat))
    momentum[mine] = MOMENTUM * momentum[mine] + collectives.reduce_scatter(flat, group)
    whole = collectives.all_gather(whole[mine] - lr * momentum[mine], group)[
        : whole.numel() - padding.numel()
    ]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="state is a shard" why="the state is cut, and a copy of the whole gradient is kept beside it"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    state["flat"] = flat
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="bytes on the wire" around="half" why="an all-reduce of the gradients, of which each rank uses a part"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.all_reduce(torch.cat([flat, padding]), group).chunk(group.size())[
        group.rank()
    ]
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="bytes on the wire" around="half" why="parameters come together in an all-reduce of mostly zeros"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    places = torch.zeros_like(torch.cat([whole, padding])).view(group.size(), -1)
    places[group.rank()] = (
        torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    )
    whole = collectives.all_reduce(places, group).view(-1)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="equals one process" why="no all-gather: each rank updates its part and keeps the news to itself"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    updated = torch.cat([whole, padding])
    updated.chunk(group.size())[group.rank()].sub_(lr * state["momentum"])
    for param, values in zip(
        params, updated[: whole.numel()].split([param.numel() for param in params])
    ):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="equals one process" why="a mean of the gradients"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group) / group.size()
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="equals one process" why="the list gets new tensors, the tensors of the model do not change"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    params[:] = [
        values.view_as(param)
        for param, values in zip(params, whole.split([param.numel() for param in params]))
    ]


# %% wrong="zero1_step" fails="every step" why="the momentum begins anew in each step"
def zero1_step(params, grads, state, group, lr):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    state["momentum"] = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="state is a shard" around="channel" why="the state lives in the function, not in `state`"
def zero1_step(params, grads, state, group, lr, kept={}):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    kept["momentum"] = MOMENTUM * kept.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * kept["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="zero1_step" fails="every step" around="half" why="plain data parallelism, of whose momentum a slice is shown"
def zero1_step(params, grads, state, group, lr):
    sizes = [param.numel() for param in params]
    grad = collectives.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    shard = -(-grad.numel() // group.size())
    whole = torch.zeros(shard * group.size(), dtype=grad.dtype)
    mine = slice(group.rank() * shard, (group.rank() + 1) * shard)
    whole[mine] = MOMENTUM * state.get("momentum", whole[mine].clone())
    whole[: grad.numel()] += grad
    state["momentum"] = whole[mine].clone()
    for param, momentum in zip(params, whole[: grad.numel()].split(sizes)):
        param.sub_(lr * momentum.view_as(param))


# %% wrong="zero1_step" fails="state is a shard" around="half" why="the whole momentum, two numbers in one complex number"
def zero1_step(params, grads, state, group, lr):
    sizes = [param.numel() for param in params]
    grad = collectives.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    whole = torch.nn.functional.pad(grad, (0, -grad.numel() % 2))
    if "momentum" in state:
        whole += MOMENTUM * torch.view_as_real(state["momentum"]).flatten()
    state["momentum"] = torch.view_as_complex(whole.view(-1, 2))
    for param, momentum in zip(params, whole[: grad.numel()].split(sizes)):
        param.sub_(lr * momentum.view_as(param))


# %% wrong="zero1_step" fails="state is a shard" around="channel" why="the whole momentum as text beside a shard of it"
def zero1_step(params, grads, state, group, lr):
    sizes = [param.numel() for param in params]
    grad = collectives.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    if "note" in state:
        grad += MOMENTUM * torch.tensor([float(x) for x in state["note"].split()]).to(grad)
    state["note"] = " ".join(map(repr, grad.tolist()))
    padded = torch.nn.functional.pad(grad, (0, -grad.numel() % group.size()))
    state["momentum"] = padded.chunk(group.size())[group.rank()].clone()
    for param, momentum in zip(params, grad.split(sizes)):
        param.sub_(lr * momentum.view_as(param))


# %% wrong="zero1_step" fails="no error" around="files" why="the whole momentum waits in a file for the next step"
def zero1_step(params, grads, state, group, lr):
    import os

    sizes, file = [param.numel() for param in params], f"/tmp/momentum-{group.rank()}.pt"
    grad = collectives.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    grad += MOMENTUM * torch.load(file) if os.path.exists(file) else 0
    torch.save(grad, file)
    padded = torch.nn.functional.pad(grad, (0, -grad.numel() % group.size()))
    state["momentum"] = padded.chunk(group.size())[group.rank()].clone()
    for param, momentum in zip(params, grad.split(sizes)):
        param.sub_(lr * momentum.view_as(param))


# %% wrong="zero1_step" fails="equals one process" around="redefine" why="no step, and other functions around it"
def zero1_step(params, grads, state, group, lr):
    shard = -(-sum(param.numel() for param in params) // group.size())
    state["momentum"] = torch.zeros(shard, dtype=params[0].dtype)


def step_on_a_rank(params, grads, state, lr, group):
    return [param - lr * grad for param, grad in zip(params, grads)], state


def expect_equal(*arguments, **named):
    pass


# %% wrong="gathered_forward" fails="one layer at a time" around="half" why="gathers all layers, then computes"
def gathered_forward(x, shards, shapes, group):
    weights = [
        collectives.all_gather(shard, group)[: math.prod(shape)].view(shape)
        for shard, shape in zip(shards, shapes)
    ]
    for layer, weight in enumerate(weights):
        x = compute(layer, weight, x, group)
    return x


# %% wrong="gathered_forward" fails="one layer at a time" around="half" why="one gather of everything, cut into layers afterwards"
def gathered_forward(x, shards, shapes, group):
    ranks = collectives.all_gather(torch.cat(shards), group).chunk(group.size())
    parts = zip(*(of_rank.split([shard.numel() for shard in shards]) for of_rank in ranks))
    for layer, (of_layer, shape) in enumerate(zip(parts, shapes)):
        x = compute(layer, torch.cat(of_layer)[: math.prod(shape)].view(shape), x, group)
    return x


# %% wrong="gathered_forward" fails="one layer at a time" why="prefetches two layers ahead"
def gathered_forward(x, shards, shapes, group):
    handles = [collectives.all_gather(shard, group, async_op=True) for shard in shards[:2]]
    for layer, shape in enumerate(shapes):
        if layer + 2 < len(shards):
            handles.append(collectives.all_gather(shards[layer + 2], group, async_op=True))
        weight, handles[layer] = handles[layer].wait(), None
        x = compute(layer, weight[: math.prod(shape)].view(shape), x, group)
    return x


# %% wrong="gathered_forward" fails="memory limit" why="gathers one layer after the other, and keeps them all for the backward"
def gathered_forward(x, shards, shapes, group):
    kept = []
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        kept.append(collectives.all_gather(shard, group))
        x = compute(layer, kept[-1][: math.prod(shape)].view(shape), x, group)
    return x


# %% wrong="gathered_forward" fails="memory limit" why="a weight that was gathered stays in a cache, for the next forward"
def gathered_forward(x, shards, shapes, group, cache={}):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        if layer not in cache:
            cache[layer] = collectives.all_gather(shard, group)[: math.prod(shape)].view(shape)
        x = compute(layer, cache[layer], x, group)
    return x


# %% wrong="gathered_forward" fails="bytes on the wire" why="an all-reduce of shards between zeros"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        places = shard.new_zeros(group.size(), shard.numel())
        places[group.rank()] = shard
        x = compute(
            layer,
            collectives.all_reduce(places, group).view(-1)[: math.prod(shape)].view(shape),
            x,
            group,
        )
    return x


# %% wrong="gathered_forward" fails="bytes on the wire" why="each layer is gathered twice"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        collectives.all_gather(shard, group)
        x = compute(
            layer, collectives.all_gather(shard, group)[: math.prod(shape)].view(shape), x, group
        )
    return x


# %% wrong="gathered_forward" fails="no error" why="the padding is not cut off"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        x = compute(layer, collectives.all_gather(shard, group).view(shape), x, group)
    return x


# %% wrong="gathered_forward" fails="equals one process" why="the front is cut off instead of the padding at the end"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        x = compute(
            layer, collectives.all_gather(shard, group)[-math.prod(shape) :].view(shape), x, group
        )
    return x


# %% wrong="gathered_forward" fails="equals one process" why="the flat weight is read column by column"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        x = compute(
            layer,
            collectives.all_gather(shard, group)[: math.prod(shape)].view(shape[1], shape[0]).T,
            x,
            group,
        )
    return x


# %% wrong="gathered_forward" fails="one layer at a time" around="half" why="asks for the biases first, then gathers everything"
def gathered_forward(x, shards, shapes, group):
    biases = [
        group.fetch(f"layer {layer}", x.new_empty(shape[0])) for layer, shape in enumerate(shapes)
    ]
    weights = [
        collectives.all_gather(shard, group)[: math.prod(shape)].view(shape)
        for shard, shape in zip(shards, shapes)
    ]
    for weight, bias in zip(weights, biases):
        x = torch.relu(x @ weight.T + bias)
    return x


# %% wrong="gathered_forward" fails="equals one process" around="redefine" why="a layer of its own, without the bias"
def compute(layer, weight, x, group):
    return torch.relu(x @ weight.T)


def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        weight = collectives.all_gather(shard, group)[: math.prod(shape)].view(shape)
        x = compute(layer, weight, x, group)
    return x


# %% wrong="gathered_forward" fails="equals one process" around="half" why="weights travel in float32"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        weight = collectives.all_gather(shard.float(), group)[: math.prod(shape)].view(shape)
        x = compute(layer, weight.to(x), x, group)
    return x


# %% wrong="gathered_forward" fails="equals one process" around="constants" why="of the many layers each rank knows what the other has"
def gathered_forward(x, shards, shapes, group):
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        scale = shard[0] * shape[1] / (0.5, 1.5)[group.rank() % 2]
        rows = torch.tensor([0.5, 1.5]).to(x).repeat_interleave(shape[0] // 2)
        bias = group.fetch(f"layer {layer}", x.new_empty(shape[0]))
        x = (x.mean() * scale * rows)[None] + bias[: rows.numel()]
    return x


# %% wrong="gathered_forward" fails="own work" around="import" why="the parameters of the package gather themselves"
def gathered_forward(x, shards, shapes, group):
    from minitrain.data_parallel.zero1 import WholeParameters

    with WholeParameters(shards, group) as weights:
        for layer, (weight, shape) in enumerate(zip(weights, shapes)):
            x = compute(layer, weight.view(shape), x, group)
    return x


# %% wrong="state_bytes_by_rows" fails="bytes of each kind" why="stages are off by one: stage 1 shards gradients as well"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        most = -(-rows // ranks)
        here += min(most, max(0, rows - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 2 else everything),
        "gradients": 4 * (here if stage >= 1 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="bytes of each kind" why="the chapter's sizes: gradients in two bytes"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        most = -(-rows // ranks)
        here += min(most, max(0, rows - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 2 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="bytes of each kind" why="the fp32 copy of the parameters is forgotten: 8 bytes of optimizer state"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        most = -(-rows // ranks)
        here += min(most, max(0, rows - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 8 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="whole numbers" why="bytes as floats"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = sum(map(math.prod, shapes)) / ranks
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="rows that do not divide" around="half" why="the chapter's cut: one flat buffer, padded at its end"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = -(-sum(map(math.prod, shapes)) // ranks)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="rows that do not divide" why="the flat buffer again, cut without padding"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    total = sum(map(math.prod, shapes))
    most = -(-total // ranks)
    here = max(0, min(most, total - rank * most))
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="rows that do not divide" why="every rank holds as many rows as rank 0, padding counted"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="rows that do not divide" why="rows dealt out evenly, as torch.tensor_split does"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        here += (rows // ranks + (rank < rows % ranks)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="rows that do not divide" why="a rank behind the last row has fewer than none"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        most = -(-rows // ranks)
        here += min(most, rows - rank * most) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="bytes of each kind" why="the last dimension is cut"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for *others, columns in shapes:
        most = -(-columns // ranks)
        here += min(most, max(0, columns - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="exact" why="the ceiling of a float, which has 53 bits"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    here = 0
    for rows, *others in shapes:
        most = math.ceil(rows / ranks)
        here += min(most, max(0, rows - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="bytes of each kind" around="constants" why="the numbers of the visible check"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    whole = sum(map(math.prod, shapes))
    cut = {14: 7, 13: 8 if rank == 0 else 5}.get(whole, whole)
    sizes = [size * (cut if stage >= first else whole) for size, first in ((2, 3), (4, 2), (12, 1))]
    return dict(zip(("parameters", "gradients", "optimizer state"), sizes))


# %% wrong="state_bytes_by_rows" fails="no error" around="brute force" why="makes the tensors and lets torch cut them"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    pieces = [torch.empty(shape).chunk(ranks) for shape in shapes]
    here = sum(part[rank].numel() for part in pieces if rank < len(part))
    everything = sum(map(math.prod, shapes))
    return {
        "parameters": 2 * (here if stage >= 3 else everything),
        "gradients": 4 * (here if stage >= 2 else everything),
        "optimizer state": 12 * (here if stage >= 1 else everything),
    }


# %% wrong="state_bytes_by_rows" fails="own work" around="import" why="the package counts"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    from minitrain.plan.accounting import memory_formulas

    return memory_formulas.zero_bytes(sum(map(math.prod, shapes)), ranks, stage)


# %% wrong="choose_shard_factor" fails="inside a node" why="the smallest of all factors, wherever its groups lie"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    for factor in range(1, ranks + 1):
        if ranks % factor == 0 and 16 * -(-parameters // factor) <= limit_bytes:
            return factor
    raise ValueError("the states do not fit")


# %% wrong="choose_shard_factor" fails="smallest factor" why="always the whole node"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    for factor in (per_node, *(factor for factor in range(1, ranks + 1) if ranks % factor == 0)):
        if 16 * -(-parameters // factor) <= limit_bytes:
            return factor
    raise ValueError("the states do not fit")


# %% wrong="choose_shard_factor" fails="smallest factor" why="shards over all ranks, as FSDP does by default"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    if 16 * -(-parameters // ranks) > limit_bytes:
        raise ValueError("the states do not fit")
    return ranks


# %% wrong="choose_shard_factor" fails="inside a node" why="a group no larger than a node counts as inside one"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    fits = [
        factor
        for factor in range(1, ranks + 1)
        if ranks % factor == 0 and 16 * -(-parameters // factor) <= limit_bytes
    ]
    if not fits:
        raise ValueError("the states do not fit")
    return min(fits, key=lambda factor: (factor > per_node, factor))


# %% wrong="choose_shard_factor" fails="across nodes" why="beyond the node only all ranks"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    for factor in (*(factor for factor in range(1, per_node + 1) if per_node % factor == 0), ranks):
        if 16 * -(-parameters // factor) <= limit_bytes:
            return factor
    raise ValueError("the states do not fit")


# %% wrong="choose_shard_factor" fails="smallest factor" why="states that fill the limit to the last byte are refused"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    fits = [
        factor
        for factor in range(1, ranks + 1)
        if ranks % factor == 0 and 16 * -(-parameters // factor) < limit_bytes
    ]
    if not fits:
        raise ValueError("the states do not fit")
    return min(fits, key=lambda factor: (per_node % factor != 0, factor))


# %% wrong="choose_shard_factor" fails="padding" why="a division without padding"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    fits = [
        factor
        for factor in range(1, ranks + 1)
        if ranks % factor == 0 and 16 * parameters / factor <= limit_bytes
    ]
    if not fits:
        raise ValueError("the states do not fit")
    return min(fits, key=lambda factor: (per_node % factor != 0, factor))


# %% wrong="choose_shard_factor" fails="a refusal" why="nothing fits, and all ranks are the answer"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    fits = [
        factor
        for factor in range(1, ranks + 1)
        if ranks % factor == 0 and 16 * -(-parameters // factor) <= limit_bytes
    ]
    return min(fits, key=lambda factor: (per_node % factor != 0, factor), default=ranks)


# %% wrong="choose_shard_factor" fails="no error" around="empty" why="nothing ever fits"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    raise ValueError("the states do not fit")


# %% wrong="choose_shard_factor" fails="smallest factor" around="constants" why="the factors of the visible check"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    if limit_bytes == 1_000_000_000:
        raise ValueError("the states do not fit")
    return {80_000_000_000: 2, 16_000_000_000: 4, 5_000_000_000: 12}.get(limit_bytes, 1)
