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
