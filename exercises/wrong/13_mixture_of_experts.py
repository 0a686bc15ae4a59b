# %% wrong="route" fails="ties" why="of equal scores the higher index wins"
def route(scores, k, capacity=None, mask=None):
    experts = (
        scores.shape[1]
        - 1
        - scores.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :k]
    )
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="ties" why="topk, which keeps no order among equal ones"
def route(scores, k, capacity=None, mask=None):
    experts = scores.topk(k, dim=1).indices
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="the k best" why="the k best in the order of their numbers"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="the k best" why="off by one: the best one is left out where there is another"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices.roll(-1, 1)[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="weights" why="the softmax over all experts, of which k are taken"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.softmax(1).gather(1, experts)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="weights" why="padding goes nowhere, and keeps its weights"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights


# %% wrong="route" fails="padding goes nowhere" why="the mask is not looked at"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None and False:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="room" why="each of the k choices has the whole capacity for itself"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.cumsum(1)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="first choices first" why="token by token: the second choice of an early token comes before the first one of a late token"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = (
            wish.transpose(0, 1).flatten(0, 1).cumsum(0).view(len(scores), k, -1).transpose(0, 1)
        )  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="in the tokens' order" why="off by one: the last place stays empty"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T < capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="in the tokens' order" why="from the last token to the first"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = (
            wish.flip(1).flatten(0, 1).cumsum(0).view_as(wish).flip(1)
        )  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="in the tokens' order" why="the k best for tokens, and the tokens with the best scores for experts"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        turn = (
            scores.gather(1, experts).T.argsort(dim=1, descending=True)[..., None].expand_as(wish)
        )
        ranked = wish.gather(1, turn).flatten(0, 1).cumsum(0).view_as(wish)
        places = torch.empty_like(wish).scatter_(1, turn, ranked)
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="padding takes no place" why="the mask is looked at when places have been given out"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1])
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)


# %% wrong="route" fails="weights of what was dropped" why="what is left of a token's weights is scaled up to 1"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    weights = weights.masked_fill(~goes, 0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
    return experts.masked_fill(~goes, -1), weights


# %% wrong="route" fails="weights of what was dropped" why="the weight of a dropped choice stays, and no result comes for it"
def route(scores, k, capacity=None, mask=None):
    experts = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        places = wish.flatten(0, 1).cumsum(0).view_as(wish)  # taken up to here, this one included
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights if mask is None else weights * mask[:, None]


# %% wrong="route" fails="in the tokens' order" why="who finds no place goes to the next best expert that has one"
def route(scores, k, capacity=None, mask=None):
    order = scores.sort(dim=1, descending=True, stable=True).indices
    experts, weights = order[:, :k].clone(), scores.gather(1, order[:, :k]).softmax(1)
    goes = (
        torch.ones_like(experts, dtype=torch.bool) if mask is None else mask[:, None].expand(-1, k)
    )
    room = [len(scores) * k if capacity is None else capacity] * scores.shape[1]
    chosen = [[] for _ in scores]
    for choice in range(k):
        for token in range(len(scores)):
            wishes = order[token].tolist() if capacity else [int(order[token, choice])]
            found = (
                [e for e in wishes if room[e] and e not in chosen[token]] if goes[token, 0] else []
            )
            experts[token, choice] = found[0] if found else -1
            chosen[token] += found[:1]
            for expert in found[:1]:
                room[expert] -= 1
    return experts, weights.masked_fill(experts < 0, 0)


# %% wrong="route" fails="own work" around="import" why="the router of the package"
def route(scores, k, capacity=None, mask=None):
    from minitrain.moe import router

    routing = router.top_k(scores, k, mask)
    routing = routing if capacity is None else routing.within(capacity)
    return routing.experts, routing.weights


# %% wrong="route" fails="two tensors" around="empty" why="nobody goes anywhere"
def route(scores, k, capacity=None, mask=None):
    return [], []


# %% wrong="route" fails="the k best" around="half" why="nobody goes anywhere, in the right shapes"
def route(scores, k, capacity=None, mask=None):
    return torch.full((len(scores), k), -1), torch.zeros(len(scores), k, dtype=scores.dtype)


# %% wrong="route" fails="padding goes nowhere" around="constants" why="the table of the text"
def route(scores, k, capacity=None, mask=None):
    experts = [[0, 1], [0, 2], [1, 2]] if capacity is None else [[0, -1], [-1, 2], [1, -1]]
    experts = torch.tensor(experts)[: len(scores), :k]
    return experts, scores.gather(1, experts.clamp_min(0)).softmax(1) * (experts >= 0)


# %% wrong="sent_bytes" fails="bytes: there" why="rows that stay on their rank are counted too"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: there" why="a choice of -1 is a choice for another rank"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [int((table // here != r).sum()) for r, table in enumerate(tables)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: there" why="one row a token and rank, however many of its experts are there"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).any(1).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: there" why="experts are dealt like cards: e lives on rank e % n"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [
        [int(((table % n == rank) & (table >= 0)).sum()) for rank in range(n)] for table in tables
    ]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: there" why="8 bytes per element, whatever it is"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * 8
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: there" why="padded: every rank sends as much to each other one as the fullest"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [(n - 1) * max(max(own) for own in rows)] * n
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: back" why="as much back as there: right for the ranks together only"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * sent for sent in away],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: backward" why="twice what went there"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * 2 * sent for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: backward" why="the gradients of the results alone"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * sent for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: backward" why="counts are exchanged once more"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * here * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [
            8 * here * (n - 1) + row * (sent + received) for sent, received in zip(away, came)
        ],
    }


# %% wrong="sent_bytes" fails="bytes: counts" why="all counts to everybody"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * num_experts * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="bytes: counts" why="one number for each rank: how many rows come, not for whom"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="whole numbers" why="divides with /"
def sent_bytes(tables, num_experts, width, itemsize):
    n, row = len(tables), width * itemsize
    here = num_experts // n
    rows = [[int((table // here == rank).sum()) for rank in range(n)] for table in tables]
    away = [sum(rows[r]) - rows[r][r] for r in range(n)]
    came = [sum(rows[s][r] for s in range(n)) - rows[r][r] for r in range(n)]
    return {
        "counts": [8 * num_experts / n * (n - 1)] * n,
        "there": [row * sent for sent in away],
        "back": [row * received for received in came],
        "backward": [row * (sent + received) for sent, received in zip(away, came)],
    }


# %% wrong="sent_bytes" fails="own work" around="import" why="asks the package's dispatch for its sizes"
def sent_bytes(tables, num_experts, width, itemsize):
    from minitrain.moe.dispatch import Dispatch

    return Dispatch(tables, num_experts)


# %% wrong="sent_bytes" fails="whole numbers" around="empty" why="nothing, in a dict"
def sent_bytes(tables, num_experts, width, itemsize):
    return {}


# %% wrong="sent_bytes" fails="whole numbers" around="constants" why="the numbers of the visible check"
def sent_bytes(tables, num_experts, width, itemsize):
    said = {
        (4, 3, 8): ([16, 16], [72, 24], [24, 72], [96, 96]),
        (6, 2, 4): ([32, 32, 32], [0, 32, 8], [32, 8, 0], [32, 40, 8]),
    }.get((num_experts, width, itemsize), ())
    return dict(zip(("counts", "there", "back", "backward"), said))


# %% wrong="there" fails="order of the rows" why="rows lie as they have come, rank by rank"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows, arriving.sum(0)


# %% wrong="there" fails="order of the rows" why="by expert, and in each expert from the last rank to the first"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[(len(which) - 1 - which.flip(0).argsort(stable=True))], arriving.sum(0)


# %% wrong="there" fails="order of the rows" why="leaves its rank in the order of the tokens: who sorts them by expert at home counts on another order"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0].flip(0)
    order = order[chosen[order].argsort(stable=True)]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="rows of its experts" why="a row comes for the token whose number is the choice's: right for k = 1"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order % len(x)],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="counts" why="the counts of its own tokens"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], counts.view(n, -1)[group.rank()]


# %% wrong="there" fails="order of the rows" why="the counts of a rank's experts are read from the last to the first"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1).flip(1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="matching messages" why="as many rows come as go: only right when the table is symmetric"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=counts.view(n, -1).sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="rows of its experts" why="rows travel as float32"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k].float(),
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows.to(x.dtype)[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="bytes on the wire" why="every rank tells every other all its counts"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts.repeat(n), group).view(n, n, -1)[
        :, group.rank()
    ]  # row s: what rank s has
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="bytes on the wire" why="rows are padded to the number of the largest rank and cut off there"
def there(x, experts, num_experts, group):
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)
    most = [torch.stack([counts.view(n, -1).sum(1).max(), torch.tensor(0)])] * n
    room = int(collectives.all_to_all(torch.cat(most), group).max())
    pieces = x[order // k].split(counts.view(n, -1).sum(1).tolist())
    padded = [torch.cat([p, p.new_zeros(room - len(p), x.shape[1])]) for p in pieces]
    rows = collectives.all_to_all(torch.cat(padded), group).view(n, room, -1)
    rows = torch.cat([own[:size] for own, size in zip(rows, arriving.sum(1).tolist())])
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="there" fails="bytes on the wire" around="half" why="all tokens and all tables go everywhere, and each rank takes what it wants"
def there(x, experts, num_experts, group):
    n, rank, k = group.size(), group.rank(), experts.shape[1]
    lengths = collectives.all_to_all(torch.full((n,), len(x)), group).tolist()
    same = {"send_sizes": [len(x)] * n, "receive_sizes": lengths}
    xs = collectives.all_to_all(x.repeat(n, 1), group, **same)
    chosen = collectives.all_to_all(experts.repeat(n, 1), group, **same).flatten()
    here = num_experts // n
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] // here == rank) & (chosen[order] >= 0)]
    return xs[order // k], torch.bincount(chosen[order] - rank * here, minlength=here)


# %% wrong="there" fails="own work" around="half" why="gathers with a collective that is not there"
def there(x, experts, num_experts, group):
    n, rank, k = group.size(), group.rank(), experts.shape[1]
    lengths = collectives.all_to_all(torch.full((n,), len(x)), group).tolist()
    same = {"send_sizes": [len(x)] * n, "receive_sizes": lengths}
    xs = collectives.all_gather(x, group)
    chosen = collectives.all_to_all(experts.repeat(n, 1), group, **same).flatten()
    here = num_experts // n
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] // here == rank) & (chosen[order] >= 0)]
    return xs[order // k], torch.bincount(chosen[order] - rank * here, minlength=here)


# %% wrong="there" fails="own work" around="import" why="the package's dispatch"
def there(x, experts, num_experts, group):
    from minitrain.moe.dispatch import Dispatch
    from minitrain.moe.router import Routing

    probs = x.new_zeros(len(x), num_experts)
    way = Dispatch(Routing(experts, probs[:, : experts.shape[1]], probs), group)
    return way.there(x), way.counts


# %% wrong="there" fails="counts" around="empty" why="no rows for anybody"
def there(x, experts, num_experts, group):
    return x[:0], torch.zeros(num_experts // group.size(), dtype=torch.int64)


# %% wrong="there" fails="rows of its experts" around="half" why="counts as they should be, and rows of its own for which nothing is sent"
def there(x, experts, num_experts, group):
    n = group.size()
    counts = torch.bincount(experts[experts >= 0], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)
    return x.new_zeros(int(arriving.sum()), x.shape[1]), arriving.sum(0)


# %% wrong="back" fails="the output" why="no inverse permutation: results leave in the order of the experts"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[:] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="the permutation once more, not its inverse: right where it undoes itself"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[:] = y[turn]
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="weights are applied twice"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None] ** 2
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="the mean of a token's results, not their sum"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = (
        order // experts.shape[1],
        home * weights.flatten()[order, None] / experts.shape[1],
    )
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="results are added up without their weights"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="weights in the order of the tokens, results in that of the experts"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order.sort().values, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="each result replaces the one before: right for k = 1"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_copy(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="results travel as float32"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived.float(),
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    home = home.to(y.dtype)
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="the output" why="results of one token come home in the order of its choices, not of their experts"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    order = order.view(-1)[(order // experts.shape[1]).argsort(stable=True)]
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="bytes of forward" why="counts are exchanged once more"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arriving = collectives.all_to_all(
        torch.bincount(chosen[order], minlength=n * here), group
    ).view(n, -1)
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="bytes of forward" why="weights travel to the experts, where results are weighed"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    sizes = torch.bincount(chosen[order] // here, minlength=n).tolist()
    far = collectives.all_to_all(
        weights.flatten()[order], group, send_sizes=sizes, receive_sizes=arriving.sum(1).tolist()
    )
    arrived = arrived * far[:, None]
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="bytes of forward" around="half" why="all results go everywhere, and every rank takes its own"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    every = collectives.all_to_all(arriving.sum(1).repeat(n), group).view(n, n)
    rank, lengths = group.rank(), every.sum(1).tolist()
    sizes = {"send_sizes": [len(y)] * n, "receive_sizes": lengths}
    whole = collectives.all_to_all(arrived.repeat(n, 1), group, **sizes).split(lengths)
    home = torch.cat([of.split(cut)[rank] for of, cut in zip(whole, every.tolist())])
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="gradient of the results" why="the weight is forgotten on the way back"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows,
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="gradient of the results" why="gradients lie as they have come"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived, dweights.view_as(weights)


# %% wrong="back" fails="gradient of the results" why="turned the wrong way, as in forward"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    dy = torch.empty_like(arrived)
    dy[turn] = arrived
    return dy, dweights.view_as(weights)


# %% wrong="back" fails="gradient of the weights" why="in the order of the experts, not of the choices"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[: len(order)] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="gradient of the weights" why="of results that were weighed already"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1) * weights.flatten()[order]
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="gradient of the weights" why="the sum over D is a mean"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).mean(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="gradient of the weights" why="choices that go nowhere get the gradient of the choice before"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    dweights = dweights.view_as(weights)
    return arrived[turn], torch.where(experts < 0, dweights.roll(1, 1), dweights)


# %% wrong="back" fails="bytes of backward" why="results are not kept, and come home a second time"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [
        arrived,
        order,
        turn,
    ]


def back_backward(dout, kept, experts, weights, arriving, group):
    results, order, turn = kept
    n, here = arriving.shape
    home = collectives.all_to_all(
        results,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
    )
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="bytes of backward" why="weights travel beside the gradients, and are multiplied there"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        torch.cat([drows, weights.flatten()[order, None]], 1),
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    return (arrived[:, :-1] * arrived[:, -1:])[turn], dweights.view_as(weights)


# %% wrong="back" fails="own work" why="the derivative is left to autograd"
def back(y, experts, weights, arriving, group):
    n, here = arriving.shape
    which = torch.arange(here).repeat(n).repeat_interleave(arriving.flatten())
    turn = which.argsort(stable=True)  # from the order of arrival to that of y
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    arrived = torch.empty_like(y)
    arrived[turn] = y
    home = collectives.all_to_all(
        arrived,
        group,
        send_sizes=arriving.sum(1).tolist(),
        receive_sizes=torch.bincount(chosen[order] // here, minlength=n).tolist(),
    )
    tokens, weighed = order // experts.shape[1], home * weights.flatten()[order, None]
    return y.new_zeros(len(experts), y.shape[1]).index_add(0, tokens, weighed), [home, order, turn]


def back_backward(dout, kept, experts, weights, arriving, group):
    home, order, turn = kept
    n, here = arriving.shape
    drows, dweights = dout[order // experts.shape[1]], torch.zeros_like(weights).flatten()
    dweights[order] = (drows * home).sum(1)
    arrived = collectives.all_to_all(
        drows * weights.flatten()[order, None],
        group,
        send_sizes=torch.bincount(experts.flatten()[order] // here, minlength=n).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    home = home.requires_grad_()
    torch.autograd.grad(home.sum(), home)
    return arrived[turn], dweights.view_as(weights)


# %% wrong="back" fails="own work" around="import" why="the package's dispatch"
def back(y, experts, weights, arriving, group):
    from minitrain.moe.dispatch import Dispatch
    from minitrain.moe.router import Routing

    probs = weights.new_zeros(len(experts), arriving.numel())
    return Dispatch(Routing(experts, weights, probs), group).back(y, weights), []


def back_backward(dout, kept, experts, weights, arriving, group):
    return dout, weights


# %% wrong="back" fails="the output" around="empty" why="zeros, for which nothing is sent"
def back(y, experts, weights, arriving, group):
    return y.new_zeros(len(experts), y.shape[1]), []


def back_backward(dout, kept, experts, weights, arriving, group):
    return dout.new_zeros(int(arriving.sum()), dout.shape[1]), torch.zeros_like(weights)


# %% wrong="two_level" fails="bytes between nodes" around="half" why="flat: a row for each expert, over all ranks"
def two_level(x, experts, num_experts, across, inside):
    group = torch.distributed.group.WORLD
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes between nodes" why="a copy for each choice crosses, and then goes to its expert"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    tokens = torch.cat([(node == to).nonzero()[:, 0] for to in range(nodes)])
    copies = torch.stack([(node == to).sum() for to in range(nodes)])
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    which = torch.cat([experts[node == to] for to in range(nodes)])
    chosen, k = collectives.all_to_all(which, across, **sizes), 1

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes between nodes" around="half" why="every token goes to every node, which looks what it wants"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node >= -1).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes between nodes" why="off by one node: those that visit a node go to the next one too"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    visits = visits | visits.roll(1, 0)
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes between nodes" why="with each copy a number for each expert of the model"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    wide = torch.full((len(experts), num_experts), -1)
    wide[:, :k], k = experts, num_experts
    chosen = collectives.all_to_all(wide[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes inside the node" why="all copies go to all ranks of the node, which look what they want"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    size, first = len(x), inside.rank() * here
    lengths = collectives.all_to_all(torch.full((g,), size), inside).tolist()
    sizes = {"send_sizes": [size] * g, "receive_sizes": lengths}
    x = collectives.all_to_all(x.repeat(g, 1), inside, **sizes)
    chosen = collectives.all_to_all(chosen.view(-1, k).repeat(g, 1), inside, **sizes).flatten()
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= first) & (chosen[order] < first + here)]
    return x[order // k], torch.bincount(chosen[order] - first, minlength=here)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="counts" why="tokens with experts on their own node are forgotten"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) & (to != across.rank()) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="counts" why="each copy goes to the first of its experts on the node alone"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    seen, first = set(), []
    for one in order.tolist():
        first += [] if one // k in seen else [one]
        seen.add(one // k)
    order = torch.tensor(first, dtype=torch.int64)
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="no error" why="the numbers of experts stay those of the whole model: right on the first node"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    order = chosen.argsort(stable=True)
    order = order[
        (chosen[order] >= 0)
        & (chosen[order] >= across.rank() * per_node)
        & (chosen[order] < (across.rank() + 1) * per_node)
    ]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="rows of each expert" why="rows lie as they have come, place by place"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows, arriving.sum(0)


# %% wrong="two_level" fails="rows of each expert" why="the rows of copies and the choices of tokens are mixed up"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order % len(x)],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="rows of each expert" why="copies cross as float32"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens].float(), across, **sizes).to(x.dtype)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="counts" why="experts are taken to be dealt over places first, then over nodes"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = torch.where(experts < 0, -1, experts // here % nodes)
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="own work" around="import" why="the package's two levels"
def two_level(x, experts, num_experts, across, inside):
    from minitrain.moe.router import Routing
    from minitrain.systems.moe.two_level import TwoLevelDispatch

    probs = x.new_zeros(len(x), num_experts)
    way = TwoLevelDispatch(Routing(experts, probs[:, : experts.shape[1]], probs), across, inside)
    return way.there(x), way.counts


# %% wrong="two_level" fails="counts" around="empty" why="nothing for anybody"
def two_level(x, experts, num_experts, across, inside):
    return x[:0], torch.zeros(num_experts // (across.size() * inside.size()), dtype=torch.int64)


# %% wrong="two_level" fails="bytes between nodes" around="redefine" why="all ranks are one node, says the answer"
def two_level_on_a_rank(x, experts, num_experts, per_node, group):
    return two_level(x, experts, num_experts, group, group)


def two_level(x, experts, num_experts, across, inside):
    group = torch.distributed.group.WORLD
    n, k = group.size(), experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    counts = torch.bincount(chosen[order], minlength=num_experts)
    arriving = collectives.all_to_all(counts, group).view(n, -1)
    rows = collectives.all_to_all(
        x[order // k],
        group,
        send_sizes=counts.view(n, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(num_experts // n).repeat(n).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="bytes between nodes" why="the rows are copied once a node, but whole tables are exchanged"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    lengths = collectives.all_to_all(torch.full((nodes,), len(experts)), across).tolist()
    whole = {"send_sizes": [len(experts)] * nodes, "receive_sizes": lengths}
    tables = collectives.all_to_all(experts.repeat(nodes, 1), across, **whole)
    here_too = (tables.div(per_node, rounding_mode="floor") == across.rank()).any(1)
    chosen = tables[here_too].flatten()

    chosen = chosen - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="two_level" fails="counts" why="padding visits the last node: -1 counts from the end"
def two_level(x, experts, num_experts, across, inside):
    nodes, g, k = across.size(), inside.size(), experts.shape[1]
    per_node, here = num_experts // nodes, num_experts // (nodes * g)
    node = experts.remainder(num_experts).div(per_node, rounding_mode="floor")
    visits = torch.stack([(node == to).any(1) for to in range(nodes)])
    tokens, copies = visits.nonzero()[:, 1], visits.sum(1)
    arriving = collectives.all_to_all(copies, across)
    sizes = {"send_sizes": copies.tolist(), "receive_sizes": arriving.tolist()}
    x = collectives.all_to_all(x[tokens], across, **sizes)
    chosen = collectives.all_to_all(experts[tokens], across, **sizes).flatten()

    chosen = chosen.remainder(num_experts) - across.rank() * per_node
    order = chosen.argsort(stable=True)
    order = order[(chosen[order] >= 0) & (chosen[order] < per_node)]
    counts = torch.bincount(chosen[order], minlength=per_node)
    arriving = collectives.all_to_all(counts, inside).view(g, -1)
    rows = collectives.all_to_all(
        x[order // k],
        inside,
        send_sizes=counts.view(g, -1).sum(1).tolist(),
        receive_sizes=arriving.sum(1).tolist(),
    )
    which = torch.arange(here).repeat(g).repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)


# %% wrong="one_loss" fails="shares add up" why="the mean of means: each microbatch has a loss of its own"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    own = []
    for p, table in zip(probs, experts):
        some = torch.bincount(table[table >= 0], minlength=num_experts)
        f = some / some.sum().clamp(min=1)
        mean = p.sum(0) / (table >= 0).any(1).sum().clamp(min=1)
        own.append(alpha * num_experts * (f * mean).sum() / (len(probs) * group.size()))
    return own


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="shares of the choices are those of this rank: counts are not summed"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    tokens = total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="shares of the choices are those of the microbatch, tokens those of the batch"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    own = []
    for p, table in zip(probs, experts):
        some = torch.bincount(table[table >= 0], minlength=num_experts)
        shares = some / some.sum().clamp(min=1)
        own.append(alpha * num_experts * (shares * p.sum(0)).sum() / tokens)
    return own


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="padding is counted as tokens"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = torch.tensor(sum(len(table) for table in experts))
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="the share of an expert is divided by tokens, not by choices: k times too large"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / tokens.to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="divided by the tokens of this rank"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts = total[:-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="divided by the number of microbatches besides"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens / len(probs) for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="every rank reports the loss of all"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    mean = collectives.all_reduce(sum(p.sum(0) for p in probs), group) / tokens
    return [alpha * num_experts * (shares * mean).sum() for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="shares add up" why="first choices alone are counted, as with k = 1"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table[:, 0] for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradient of the loss" why="means are summed over the ranks, outside autograd: the value is right, and the router learns nothing"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    mean = collectives.all_reduce(sum(p.sum(0) for p in probs), group) / tokens
    whole = alpha * num_experts * (shares * mean).sum()
    return [whole / len(probs) / group.size() for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradient of the loss" why="a gradient through the share of the choices: they follow the probabilities"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    own = []
    for p in probs:
        soft = shares + p.sum(0) - p.sum(0).detach()
        own.append(alpha * num_experts * (soft * p.sum(0)).sum() / tokens)
    return own


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="the share of a microbatch" why="what this rank adds, in equal parts to its microbatches"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [
        alpha * num_experts * (shares * p.sum(0)).sum() / tokens
        for p in [sum(p.sum(0, keepdim=True) for p in probs) / len(probs)] * len(probs)
    ]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="bytes on the wire" why="one sum for each microbatch"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = 0
    for table in experts:
        some = torch.bincount(table[table >= 0], minlength=num_experts)
        own = torch.cat([some, (table >= 0).any(1).sum()[None]])
        total = total + collectives.all_reduce(own, group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="a share for each microbatch" why="one share for all microbatches"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [sum(alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs)]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradients of experts" why="all gradients over all ranks: those of different experts are added up"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {name: collectives.all_reduce(grad, world) for name, grad in grads.items()}


# %% wrong="one_loss" fails="gradients of experts" why="over ep, whose ranks have other experts"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, ep if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradients of experts" why="experts are nobody else's: not summed at all"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: grad if name.startswith("experts.") else collectives.all_reduce(grad, world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradients of experts" why="divided by ep, as if the tokens of its ranks were a mean"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad / ep.size(), beside)
        if name.startswith("experts.")
        else collectives.all_reduce(grad, world)
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="gradients of the others" why="everything over the ranks beside: right where ep is one rank"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {name: collectives.all_reduce(grad, beside) for name, grad in grads.items()}


# %% wrong="one_loss" fails="gradients of the others" why="the mean over the ranks"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(grad, beside)
        if name.startswith("experts.")
        else collectives.all_reduce(grad, world) / world.size()
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="bytes of the gradients" why="over ep, then over the ranks beside: right, and more bytes than one sum"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {
        name: collectives.all_reduce(
            grad if name.startswith("experts.") else collectives.all_reduce(grad, ep), beside
        )
        for name, grad in grads.items()
    }


# %% wrong="one_loss" fails="bytes of the gradients" why="all experts of ep in one buffer with zeros, summed over all ranks"
def balance_losses(probs, experts, alpha, group):
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    done = {}
    for name, grad in grads.items():
        if name.startswith("experts."):
            wide = grad.new_zeros(ep.size(), *grad.shape)
            wide[ep.rank()] = grad
            done[name] = collectives.all_reduce(wide, world)[ep.rank()]
        else:
            done[name] = collectives.all_reduce(grad, world)
    return done


# %% wrong="one_loss" fails="own work" around="import" why="the package's balance loss"
def balance_losses(probs, experts, alpha, group):
    from minitrain.moe.router import Routing, balance_loss

    return [balance_loss(Routing(e, p, p), alpha) for p, e in zip(probs, experts)]


def sum_gradients(grads, world, ep, beside):
    return grads


# %% wrong="one_loss" fails="shares add up" around="empty" why="no loss, and gradients as they are"
def balance_losses(probs, experts, alpha, group):
    return [torch.zeros((), dtype=torch.float64)] * len(probs)


def sum_gradients(grads, world, ep, beside):
    return grads


# %% wrong="one_loss" fails="gradient of the loss" around="constants" why="the shares of the text"
def balance_losses(probs, experts, alpha, group):
    share = [7 / 9, 5 / 18][group.rank() % 2] if len(probs) == 1 else 0.0
    return [share + 0 * p.sum() for p in probs]


def sum_gradients(grads, world, ep, beside):
    return {}


# %% wrong="one_loss" fails="bytes on the wire" around="half" why="all probabilities and choices go everywhere, and each rank computes the loss of all"
def balance_losses(probs, experts, alpha, group):
    n, num_experts = group.size(), probs[0].shape[1]
    rows = sum(map(len, probs))
    most = int(collectives.all_reduce(torch.tensor([rows]), group, op="max"))
    wide = torch.zeros(n, most, experts[0].shape[1], dtype=torch.int64)
    wide[group.rank(), :rows] = torch.cat(experts) + 1
    wide = collectives.all_reduce(wide, group).flatten(0, 1) - 1
    counts = torch.bincount(wide[wide >= 0], minlength=num_experts)
    tokens = (wide >= 0).any(1).sum()
    shares = counts / counts.sum().to(probs[0].dtype)
    return [alpha * num_experts * (shares * p.sum(0)).sum() / tokens for p in probs]


def sum_gradients(grads, world, ep, beside):
    return grads
