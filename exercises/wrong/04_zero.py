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


# %% wrong="reduce_scatter_gradients" fails="bytes on the wire" why="an all-reduce, and then a slice"
def reduce_scatter_gradients(grads, group):
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
    return collectives.all_reduce(flat, group).chunk(group.size())[group.rank()].clone()


# %% wrong="reduce_scatter_gradients" fails="bytes on the wire" why="everybody's gradients are gathered and added up"
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


# %% wrong="zero1_step" fails="state is a shard" why="replicates everything: plain data parallelism, which sends just as much"
def zero1_step(params, grads, state, group, lr):
    for i, (param, grad) in enumerate(zip(params, grads)):
        grad = collectives.all_reduce(grad, group)
        state[str(i)] = MOMENTUM * state.get(str(i), torch.zeros_like(grad)) + grad
        param.sub_(lr * state[str(i)])


# %% wrong="zero1_step" fails="state is a shard" why="the momentum of the shard stands in a buffer of full size"
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


# %% wrong="zero1_step" fails="bytes on the wire" why="an all-reduce of the gradients, of which each rank uses a part"
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


# %% wrong="zero1_step" fails="bytes on the wire" why="parameters come together in an all-reduce of mostly zeros"
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


# %% wrong="zero1_step" fails="every step" why="the state lives in the function, not in `state`"
def zero1_step(params, grads, state, group, lr, kept={}):
    flat, whole = (torch.cat([x.flatten() for x in xs]) for xs in (grads, params))
    padding = flat.new_zeros(-flat.numel() % group.size())
    grad = collectives.reduce_scatter(torch.cat([flat, padding]), group)
    kept["momentum"] = MOMENTUM * kept.get("momentum", torch.zeros_like(grad)) + grad
    mine = torch.cat([whole, padding]).chunk(group.size())[group.rank()] - lr * kept["momentum"]
    whole = collectives.all_gather(mine, group)[: whole.numel()]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))


# %% wrong="gathered_forward" fails="one layer at a time" why="gathers all layers, then computes"
def gathered_forward(x, shards, shapes, group):
    weights = [
        collectives.all_gather(shard, group)[: math.prod(shape)].view(shape)
        for shard, shape in zip(shards, shapes)
    ]
    for layer, weight in enumerate(weights):
        x = compute(layer, weight, x, group)
    return x


# %% wrong="gathered_forward" fails="one layer at a time" why="one gather of everything, cut into layers afterwards"
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


# %% wrong="model_state_bytes" fails="bytes of each kind" why="stages are off by one: stage 1 shards gradients as well"
def model_state_bytes(parameters, ranks, stage):
    shard = -(-parameters // ranks)
    return {
        "parameters": 2 * (shard if stage >= 2 else parameters),
        "gradients": 2 * (shard if stage >= 1 else parameters),
        "optimizer state": 12 * (shard if stage >= 1 else parameters),
    }


# %% wrong="model_state_bytes" fails="bytes of each kind" why="the fp32 copy of the parameters is forgotten: 8 bytes of optimizer state"
def model_state_bytes(parameters, ranks, stage):
    shard = -(-parameters // ranks)
    return {
        "parameters": 2 * (shard if stage >= 3 else parameters),
        "gradients": 2 * (shard if stage >= 2 else parameters),
        "optimizer state": 8 * (shard if stage >= 1 else parameters),
    }


# %% wrong="model_state_bytes" fails="whole numbers" why="bytes as floats"
def model_state_bytes(parameters, ranks, stage):
    shard = parameters / ranks
    return {
        "parameters": 2 * (shard if stage >= 3 else parameters),
        "gradients": 2 * (shard if stage >= 2 else parameters),
        "optimizer state": 12 * (shard if stage >= 1 else parameters),
    }


# %% wrong="model_state_bytes" fails="padding" why="no padding: the rest of the division is nobody's"
def model_state_bytes(parameters, ranks, stage):
    shard = parameters // ranks
    return {
        "parameters": 2 * (shard if stage >= 3 else parameters),
        "gradients": 2 * (shard if stage >= 2 else parameters),
        "optimizer state": 12 * (shard if stage >= 1 else parameters),
    }


# %% wrong="model_state_bytes" fails="padding" why="what is not sharded is padded as well"
def model_state_bytes(parameters, ranks, stage):
    shard = -(-parameters // ranks)
    return {
        "parameters": 2 * shard * (1 if stage >= 3 else ranks),
        "gradients": 2 * shard * (1 if stage >= 2 else ranks),
        "optimizer state": 12 * shard * (1 if stage >= 1 else ranks),
    }


# %% wrong="model_state_bytes" fails="padding" why="bytes are padded instead of elements"
def model_state_bytes(parameters, ranks, stage):
    return {
        "parameters": -(-2 * parameters // (ranks if stage >= 3 else 1)),
        "gradients": -(-2 * parameters // (ranks if stage >= 2 else 1)),
        "optimizer state": -(-12 * parameters // (ranks if stage >= 1 else 1)),
    }


# %% wrong="model_state_bytes" fails="exact" why="the ceiling of a float, which has 53 bits"
def model_state_bytes(parameters, ranks, stage):
    shard = math.ceil(parameters / ranks)
    return {
        "parameters": 2 * (shard if stage >= 3 else parameters),
        "gradients": 2 * (shard if stage >= 2 else parameters),
        "optimizer state": 12 * (shard if stage >= 1 else parameters),
    }


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
