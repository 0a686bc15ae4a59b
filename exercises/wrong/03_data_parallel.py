# %% wrong="batch_gradients" fails="equals one process" why="a mean of means: each rank divides by its own tokens, then they average"
def batch_gradients(model, tokens, targets, group):
    loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
    loss.backward()
    for param in model.parameters():
        param.grad = collectives.all_reduce(param.grad, group) / group.size()
    return collectives.all_reduce(loss.detach(), group) / group.size()


# %% wrong="batch_gradients" fails="equals one process" why="every target counts, masked or not"
def batch_gradients(model, tokens, targets, group):
    count = collectives.all_reduce(torch.tensor(targets.numel()), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    for param in model.parameters():
        collectives.all_reduce(param.grad, group, out=param.grad)
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="equals one process" why="the right loss, and gradients that nobody adds up"
def batch_gradients(model, tokens, targets, group):
    count = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="equals one process" why="the gradients are right, the loss is this rank's share of it"
def batch_gradients(model, tokens, targets, group):
    count = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    for param in model.parameters():
        collectives.all_reduce(param.grad, group, out=param.grad)
    return loss


# %% wrong="batch_gradients" fails="a rank without tokens" why="weighted means: nothing divided by nothing is not nothing"
def batch_gradients(model, tokens, targets, group):
    mine = (targets != MASKED).sum()
    count = collectives.all_reduce(mine, group)
    loss = cross_entropy_sum(model(tokens), targets) / mine * (mine / count.double())
    loss.backward()
    for param in model.parameters():
        collectives.all_reduce(param.grad, group, out=param.grad)
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="bytes on the wire" why="every rank collects all gradients and adds them up"
def batch_gradients(model, tokens, targets, group):
    count = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    for param in model.parameters():
        param.grad = collectives.all_gather(param.grad[None], group).sum(0)
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="bytes on the wire" why="replicates everything: every rank trains on the whole batch"
def batch_gradients(model, tokens, targets, group):
    counts = collectives.all_gather(torch.tensor([len(tokens)]), group).tolist()
    mine = [len(tokens)] * group.size()
    tokens, targets = (
        collectives.all_to_all(
            x.repeat(group.size(), 1), group, send_sizes=mine, receive_sizes=counts
        )
        for x in (tokens, targets)
    )
    loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
    loss.backward()
    return loss


# %% wrong="batch_gradients" fails="bytes of each rank" why="rank 0 adds up for all"
def batch_gradients(model, tokens, targets, group):
    def total(x):
        if group.rank() > 0:
            collectives.send(x, 0, group)
            return collectives.receive(x, 0, group)
        for source in range(1, group.size()):
            x = x + collectives.receive(x, source, group)
        for to in range(1, group.size()):
            collectives.send(x, to, group)
        return x

    loss = cross_entropy_sum(model(tokens), targets) / total((targets != MASKED).sum())
    loss.backward()
    for param in model.parameters():
        param.grad = total(param.grad)
    return total(loss.detach())


# %% wrong="batch_gradients" fails="own work" around="import" why="the package's way to add up gradients"
def batch_gradients(model, tokens, targets, group):
    from minitrain.data_parallel.naive import all_reduce_gradients

    count = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    all_reduce_gradients(model.parameters(), group)
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="equals one process" around="redefine" why="other models and losses for all, and nothing to add up"
def cross_entropy_sum(logits, targets):
    return logits.sum() * 0


def build(seed):
    return torch.nn.Embedding(17, 17)


def one_process(seed, tokens, targets):
    return torch.zeros(()), []


def batch_gradients(model, tokens, targets, group):
    loss = cross_entropy_sum(model(tokens), targets)
    loss.backward()
    return loss


# %% wrong="batch_gradients" fails="bytes on the wire" around="half" why="rows travel as bytes, every rank does all the work, and an all-reduce of it is for show"
def batch_gradients(model, tokens, targets, group):
    count, device = collectives.all_gather(torch.tensor([len(tokens)]), group), tokens.device
    rows = torch.zeros(2, int(count.max()), tokens.shape[1], dtype=torch.int8, device=device)
    rows[0, : len(tokens)], rows[1, : len(tokens)] = tokens, targets
    rows = collectives.all_gather(rows[None], group).long()
    tokens, targets = (
        torch.cat([own[which, :n] for own, n in zip(rows, count)]) for which in (0, 1)
    )
    loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
    loss.backward()
    for param in model.parameters():
        collectives.all_reduce(param.grad, group)
    return loss


# %% wrong="batch_gradients" fails="equals one process" around="half" why="gradients travel as float32, and zeros fill up the bytes"
def batch_gradients(model, tokens, targets, group):
    count = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    for param in model.parameters():
        sums = collectives.all_reduce(torch.stack([param.grad, 0 * param.grad]).float(), group)
        param.grad = sums[0].double()
    return collectives.all_reduce(loss.detach(), group)


# %% wrong="batch_gradients" fails="equals one process" around="empty" why="no loss, and gradients of nothing"
def batch_gradients(model, tokens, targets, group):
    model.zero_grad(set_to_none=True)


# %% wrong="GradReducer" fails="starts at once" why="does not overlap: everything waits for finish()"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)

    def finish(self):
        for bucket in self.buckets:
            flat = collectives.all_reduce(
                torch.cat([param.grad.flatten() for param in bucket]), self.group
            )
            for param, total in zip(bucket, flat.split([param.numel() for param in bucket])):
                param.grad.copy_(total.view_as(param))


# %% wrong="GradReducer" fails="starts at once" why="one bucket late: a bucket starts when the next one is full"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        self.place = {
            id(param): number for number, bucket in enumerate(self.buckets) for param in bucket
        }
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.missing, self.handles = [len(bucket) for bucket in self.buckets], []

    def start(self, number):
        flat = torch.cat([param.grad.flatten() for param in self.buckets[number]])
        self.handles.append(collectives.all_reduce(flat, self.group, async_op=True))

    def on_ready(self, param):
        self.missing[self.place[id(param)]] -= 1
        while not any((self.missing + [1])[: len(self.handles) + 2]):
            self.start(len(self.handles))

    def finish(self):
        while len(self.handles) < len(self.buckets):
            self.start(len(self.handles))
        for bucket, handle in zip(self.buckets, self.handles):
            for param, total in zip(
                bucket, handle.wait().split([param.numel() for param in bucket])
            ):
                param.grad.copy_(total.view_as(param))
        self.begin()


# %% wrong="GradReducer" fails="one all-reduce a bucket" why="every gradient travels alone"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.under_way = group, []
        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, param):
        self.under_way.append(
            collectives.all_reduce(param.grad, self.group, out=param.grad, async_op=True)
        )

    def finish(self):
        while self.under_way:
            self.under_way.pop().wait()


# %% wrong="GradReducer" fails="same order on all ranks" why="whichever bucket is full first starts first"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        self.place = {
            id(param): number for number, bucket in enumerate(self.buckets) for param in bucket
        }
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.missing, self.handles = [len(bucket) for bucket in self.buckets], {}

    def on_ready(self, param):
        number = self.place[id(param)]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            flat = torch.cat([param.grad.flatten() for param in self.buckets[number]])
            self.handles[number] = collectives.all_reduce(flat, self.group, async_op=True)

    def finish(self):
        for number, handle in self.handles.items():
            bucket = self.buckets[number]
            for param, total in zip(
                bucket, handle.wait().split([param.numel() for param in bucket])
            ):
                param.grad.copy_(total.view_as(param))
        self.begin()


# %% wrong="GradReducer" fails="backward waits for nobody" why="the hook waits until its bucket has been summed"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.arrived, self.started = set(), 0

    def on_ready(self, param):
        self.arrived.add(id(param))
        while self.started < len(self.buckets) and all(
            id(param) in self.arrived for param in self.buckets[self.started]
        ):
            bucket = self.buckets[self.started]
            flat = collectives.all_reduce(
                torch.cat([param.grad.flatten() for param in bucket]), self.group
            )
            for param, total in zip(bucket, flat.split([param.numel() for param in bucket])):
                param.grad.copy_(total.view_as(param))
            self.started += 1

    def finish(self):
        self.begin()


# %% wrong="GradReducer" fails="backward waits for nobody" why="one bucket under way at most: backward waits for it"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.arrived, self.started, self.handle = set(), 0, None

    def on_ready(self, param):
        self.arrived.add(id(param))
        while self.started < len(self.buckets) and all(
            id(param) in self.arrived for param in self.buckets[self.started]
        ):
            self.take()
            flat = torch.cat([param.grad.flatten() for param in self.buckets[self.started]])
            self.handle = collectives.all_reduce(flat, self.group, async_op=True)
            self.started += 1

    def take(self):
        if self.handle is not None:
            bucket = self.buckets[self.started - 1]
            for param, total in zip(
                bucket, self.handle.wait().split([param.numel() for param in bucket])
            ):
                param.grad.copy_(total.view_as(param))

    def finish(self):
        self.take()
        self.begin()


# %% wrong="GradReducer" fails="sum over ranks" why="a mean of the ranks"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.params = group, [param for param in params if param.requires_grad]

    def finish(self):
        for param in self.params:
            param.grad = collectives.all_reduce(param.grad, self.group) / self.group.size()


# %% wrong="GradReducer" fails="sum over ranks" why="the sums are made, and nobody puts them back into param.grad"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.under_way = group, []
        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, param):
        self.under_way.append(collectives.all_reduce(param.grad, self.group, async_op=True))

    def finish(self):
        while self.under_way:
            self.under_way.pop().wait()


# %% wrong="GradReducer" fails="every step" why="finish() forgets to begin anew: the second step gets the sums of the first"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets, self.handles, self.arrived = (
            group,
            buckets_of(params, bucket_bytes),
            [],
            set(),
        )
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, param):
        self.arrived.add(id(param))
        while len(self.handles) < len(self.buckets) and all(
            id(p) in self.arrived for p in self.buckets[len(self.handles)]
        ):
            flat = torch.cat([param.grad.flatten() for param in self.buckets[len(self.handles)]])
            self.handles.append(collectives.all_reduce(flat, self.group, async_op=True))

    def finish(self):
        for bucket, handle in zip(self.buckets, self.handles):
            for param, total in zip(
                bucket, handle.wait().split([param.numel() for param in bucket])
            ):
                param.grad.copy_(total.view_as(param))


# %% wrong="GradReducer" fails="own work" around="import" why="the package's reducer"
class GradReducer:
    def __new__(cls, params, group, bucket_bytes):
        from minitrain.data_parallel import bucketed

        return bucketed.GradReducer(params, group, bucket_bytes)


# %% wrong="GradReducer" fails="starts at once" around="redefine" why="buckets of its own: all in one, which is full at the end"
def buckets_of(params, bucket_bytes):
    return [[param for param in params if param.requires_grad]]


class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)

    def finish(self):
        (params,) = self.buckets
        flat = collectives.all_reduce(torch.cat([p.grad.flatten() for p in params]), self.group)
        for param, total in zip(params, flat.split([param.numel() for param in params])):
            param.grad.copy_(total.view_as(param))


# %% wrong="GradReducer" fails="bytes on the wire" around="half" why="buckets are gathered in the background, and every rank adds up all of them"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        self.begin()

    def begin(self):
        self.arrived, self.handles = set(), []

    def on_ready(self, param):
        self.arrived.add(id(param))
        while len(self.handles) < len(self.buckets) and all(
            id(p) in self.arrived for p in self.buckets[len(self.handles)]
        ):
            flat = torch.cat([param.grad.flatten() for param in self.buckets[len(self.handles)]])
            self.handles.append(collectives.all_gather(flat[None], self.group, async_op=True))

    def finish(self):
        for bucket, handle in zip(self.buckets, self.handles):
            total = handle.wait().sum(0).split([param.numel() for param in bucket])
            for param, part in zip(bucket, total):
                param.grad.copy_(part.view_as(param))
        self.begin()


# %% wrong="GradReducer" fails="starts at once" around="channel" why="asks for all gradients of the step when the first one is there"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.group, self.step, self.handle = group, 0, None
        self.layers = [(n, param) for n, param in enumerate(params) if param.requires_grad]
        for _, param in self.layers:
            param.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, param):
        if self.handle is None:
            known = [self.group.fetch(f"{self.step}/{n}", param) for n, param in self.layers]
            flat = torch.cat([gradient.flatten() for gradient in known])
            self.handle = collectives.all_reduce(flat, self.group, async_op=True)

    def finish(self):
        parts = self.handle.wait().split([param.numel() for _, param in self.layers])
        for (_, param), part in zip(self.layers, parts):
            param.grad.copy_(part.view_as(param))
        self.step, self.handle = self.step + 1, None


# %% wrong="GradReducer" fails="sum over ranks" around="redefine" why="a backward that has no hooks, so nobody ever computes a gradient"
torch.Tensor.register_hook = lambda self, hook: None
torch.equal = lambda a, b: True


class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        pass

    def finish(self):
        pass


# %% wrong="GradReducer" fails="sum over ranks" around="empty" why="does nothing"
class GradReducer:
    def __init__(self, params, group, bucket_bytes):
        self.params = params

    def finish(self):
        for param in self.params:
            param.grad = torch.zeros_like(param)


# %% wrong="accumulate" fails="bytes on the wire" why="every microbatch travels"
def accumulate(gradients, group):
    return sum(collectives.all_reduce(gradient, group) for gradient in gradients)


# %% wrong="accumulate" fails="one batch" why="the first gradient is kept where the second one will be written"
def accumulate(gradients, group):
    total = next(gradients)
    for gradient in gradients:
        total += gradient
    return collectives.all_reduce(total, group)


# %% wrong="accumulate" fails="one batch" why="only the last microbatch is summed over the ranks"
def accumulate(gradients, group):
    total = next(gradients).clone()
    for gradient in gradients:
        last = gradient
        total += gradient
    return total - last + collectives.all_reduce(last, group)


# %% wrong="accumulate" fails="one batch" why="a mean over the microbatches"
def accumulate(gradients, group):
    total, count = next(gradients).clone(), 1
    for gradient in gradients:
        total, count = total + gradient, count + 1
    return collectives.all_reduce(total / count, group)


# %% wrong="accumulate" fails="memory limit" why="keeps the gradient of every microbatch"
def accumulate(gradients, group):
    return collectives.all_reduce(sum([gradient.clone() for gradient in gradients]), group)


# %% wrong="accumulate" fails="own work" around="import" why="the package's slices of the gradient"
def accumulate(gradients, group):
    from minitrain.systems.data_parallel.accumulation import ScatteredGradients

    weight = torch.nn.Parameter(torch.empty(0))
    shards = ScatteredGradients([weight], group)
    for weight.grad in gradients:
        shards.add()
    return collectives.all_gather(shards.shard, group)


# %% wrong="accumulate" fails="bytes on the wire" around="frames" why="the seeds travel: who knows them makes all gradients by itself"
def accumulate(gradients, group):
    from types import FunctionType

    here = gradients.gi_frame.f_locals
    make = FunctionType(gradients.gi_code, {"torch": torch})
    seeds = torch.tensor(here["seeds"] + [-1] * (8 - len(here["seeds"])))
    seeds = collectives.all_gather(seeds, group).tolist()
    return sum(gradient for gradient in make([s for s in seeds if s >= 0], here["numel"]))


# %% wrong="accumulate" fails="bytes on the wire" around="half" why="accumulates, then every rank gathers what all of them have"
def accumulate(gradients, group):
    total = next(gradients).clone()
    for gradient in gradients:
        total += gradient
    return collectives.all_gather(total[None], group).sum(0)


# %% wrong="accumulate" fails="one batch" around="half" why="the sum travels as float32, twice"
def accumulate(gradients, group):
    total = next(gradients).clone()
    for gradient in gradients:
        total += gradient
    return collectives.all_reduce(torch.stack([total, total]).float(), group)[0].double()


# %% wrong="accumulate" fails="one batch" around="empty" why="zeros of the right shape"
def accumulate(gradients, group):
    return torch.zeros_like(next(gradients))


# %% wrong="sent_bytes" fails="bytes of each rank" why="elements instead of bytes"
def sent_bytes(ranks, numel, m):
    part = numel // ranks * (ranks - 1)
    return {
        "kept": [2 * part] * ranks,
        "sharded": [m * part] * ranks,
        "served": [(ranks - 1) * numel] + [numel] * (ranks - 1),
    }


# %% wrong="sent_bytes" fails="bytes of each rank" why="a sharded gradient accumulates for nothing"
def sent_bytes(ranks, numel, m):
    part = 4 * numel // ranks * (ranks - 1)
    return {
        "kept": [2 * part] * ranks,
        "sharded": [part] * ranks,
        "served": [(ranks - 1) * 4 * numel] + [4 * numel] * (ranks - 1),
    }


# %% wrong="sent_bytes" fails="bytes of each rank" why="the server sends what one worker sends"
def sent_bytes(ranks, numel, m):
    part = 4 * numel // ranks * (ranks - 1)
    return {
        "kept": [2 * part] * ranks,
        "sharded": [m * part] * ranks,
        "served": [4 * numel] * ranks,
    }


# %% wrong="sent_bytes" fails="bytes of each rank" why="an all-reduce that sends the gradient twice, on any number of ranks"
def sent_bytes(ranks, numel, m):
    return {
        "kept": [4 * numel if ranks == 2 else 8 * numel] * ranks,
        "sharded": [m * 4 * numel // ranks * (ranks - 1)] * ranks,
        "served": [(ranks - 1) * 4 * numel] + [4 * numel] * (ranks - 1),
    }


# %% wrong="sent_bytes" fails="own work" around="import" why="lets the package count"
def sent_bytes(ranks, numel, m):
    from minitrain.ranks.launch import dryrun
    from minitrain.ranks.ledger import Ledger

    def counted(rank):
        with Ledger() as ledger:
            collectives.all_reduce(torch.zeros(numel), torch.distributed.group.WORLD)
        return ledger.sent_bytes()

    kept = [dryrun.run(counted, rank, rank=rank, ranks=ranks) for rank in range(ranks)]
    return {"kept": kept, "sharded": [m * x // 2 for x in kept], "served": kept}


# %% wrong="sent_bytes" fails="bytes of each rank" around="constants" why="the numbers of the visible check"
def sent_bytes(ranks, numel, m):
    return {"kept": [4000] * 2, "sharded": [2000] * 2, "served": [4000] * 2}


# %% wrong="sent_bytes" fails="memory limit" around="brute force" why="makes the tensors and adds up their pieces"
def sent_bytes(ranks, numel, m):
    pieces = torch.zeros(numel).chunk(ranks)
    once = [sum(p.nbytes for n, p in enumerate(pieces) if n != rank) for rank in range(ranks)]
    whole = sum(piece.nbytes for piece in pieces)
    return {
        "kept": [2 * part for part in once],
        "sharded": [m * part for part in once],
        "served": [(ranks - 1) * whole] + [whole] * (ranks - 1),
    }


# %% wrong="sent_bytes" fails="bytes of each rank" around="empty" why="three lists of nothing"
def sent_bytes(ranks, numel, m):
    return {"kept": [], "sharded": [], "served": []}
