# %% [markdown]
# # Exercises 03: data parallelism
#
# Four tasks, 10 points, about an hour and a half. Read chapter 03 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 03
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Three rules:
#
# - An answer cell stands alone. It may use what read-only cells define, but not your other cells.
# - A function that runs on ranks gets its `group` last: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else; `minitrain.collectives` is the door to it.

# %% given="setup"
import time
from types import SimpleNamespace

import torch

from minitrain import collectives
from minitrain.collectives import channel_of
from minitrain.data_parallel import accumulation, bucketed, buckets, parameter_server
from minitrain.course.grading.checks import Draw, Failure, ask, expect, expect_equal, run_on_ranks
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values
MASKED = -100  # a target that no loss counts

# %% [markdown]
# ## 1. The divisor (3 points)
#
# Four ranks, each with its own rows of a batch. Some targets are masked, as in padded or packed text, and not equally many
# on each rank. What all of it has to equal is this, one process with the whole batch:


# %% given="one_process"
def build(seed):
    config = GPTConfig(vocab_size=17, d_model=8, num_layers=1, num_heads=2, max_positions=16)
    return GPT(config, seed=seed, dtype=torch.float64)


def one_process(seed, tokens, targets):
    """(loss, gradients) of the whole batch: the mean over all tokens whose target is not masked."""
    model = build(seed)
    loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
    loss.backward()
    return loss.detach(), [param.grad for param in model.parameters()]


# %% [markdown]
# `cross_entropy_sum` is a sum over the tokens that count, without any division. On a rank, `model(tokens)` sees that rank's
# rows only. Let every rank end with the loss and the gradients of `one_process`, equal to 12 decimals.
#
# Graded too: what travels. The gradients cross the network once, as in an all-reduce; rows of the batch stay where they are.


# %% answer="batch_gradients"
def batch_gradients(model, tokens, targets, group):
    """Leave the gradient of the whole batch's loss in each param.grad, on every rank; return that loss."""
    ### BEGIN SOLUTION
    num_valid = collectives.all_reduce((targets != MASKED).sum(), group)
    loss = cross_entropy_sum(model(tokens), targets) / num_valid
    loss.backward()
    for param in model.parameters():
        collectives.all_reduce(param.grad, group, out=param.grad)
    return collectives.all_reduce(loss.detach(), group)
    ### END SOLUTION


# %% [markdown]
# The checks deal out a batch by rows, one rank after the other, and compare.


# %% given="deal"
def on_a_rank(seed, tokens, targets, group):
    model = build(seed)
    loss = batch_gradients(model, tokens, targets, group)
    return loss, [param.grad for param in model.parameters()]


def random_batch(draw, rows, length=8):
    """Rows of tokens and targets; each row has some of its targets masked."""
    tokens = torch.tensor([[draw.integer(0, 16) for _ in range(length + 1)] for _ in range(rows)])
    masks = torch.stack([draw.mask(length) for _ in range(rows)])
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~masks, MASKED)


def expect_one_process(seed, tokens, targets, rows_of_ranks, property, hint):
    """Run batch_gradients with these numbers of rows on the ranks; all of them equal one process."""
    parts = zip(tokens.split(rows_of_ranks), targets.split(rows_of_ranks))
    outcome = run_on_ranks(on_a_rank, [(seed, *part) for part in parts])
    loss, gradients = one_process(seed, tokens, targets)
    for rank, result in enumerate(outcome.results):
        expect_equal(result[0], loss, property, f"the loss on rank {rank}: {hint}", atol=1e-12)
        expect_equal(
            result[1],
            gradients,
            property,
            f"the gradients on rank {rank}: {hint} (rank {rank} does not)",
            atol=1e-12,
        )
    return outcome, sum(gradient.nbytes for gradient in gradients)


# %% check="batch_gradients-equal" points=2
# Loss and gradients are those of one process, on every rank.
tokens = torch.arange(48).view(6, 8) % 17
targets = (tokens + 3) % 17
targets[:3, 2:] = MASKED
expect_one_process(
    0,
    tokens,
    targets,
    [3, 3],
    "equals one process",
    "by which count must every rank divide, so that a sum over the ranks is right?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(3, 4)):
    rows_of_ranks = [draw.integer(1, 3) for _ in range(ranks)]
    tokens, targets = random_batch(draw, sum(rows_of_ranks))
    expect_one_process(
        draw.integer(0, 99),
        tokens,
        targets,
        rows_of_ranks,
        "equals one process",
        "ranks have different numbers of rows, and rows different numbers of tokens that count",
    )
rows_of_ranks = [2, 1, 2]
tokens, targets = random_batch(draw, 5)
targets[2] = MASKED
expect_one_process(
    draw.integer(0, 99),
    tokens,
    targets,
    rows_of_ranks,
    "a rank without tokens",
    "all targets of one rank are masked; it adds nothing, and harms nothing",
)
### END HIDDEN TESTS

# %% check="batch_gradients-bytes" points=1
# The gradients cross the network once, and nothing else that is large does.
tokens = torch.arange(32).view(4, 8) % 17
outcome, gradient_bytes = expect_one_process(
    0, tokens, (tokens + 3) % 17, [1] * 4, "equals one process", "let it be right, then count"
)
expect(
    sum(outcome.sent_bytes) <= 2 * 3 * gradient_bytes + 1000,
    "bytes on the wire",
    "an all-reduce of the gradients is enough; what else do you send?",
)
expect(
    sum(outcome.sent_bytes) >= 2 * 3 * gradient_bytes,
    "bytes on the wire",
    "fewer bytes than the sum of gradients needs; "
    "do rows of the batch travel instead, and does every rank do everybody's work?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks = draw.integer(2, 3)
tokens, targets = random_batch(draw, 2 * ranks)
outcome, gradient_bytes = expect_one_process(
    1, tokens, targets, [2] * ranks, "equals one process", "let it be right, then count"
)
least = 2 * (ranks - 1) * gradient_bytes
expect(
    least <= sum(outcome.sent_bytes) <= least + 1000,
    "bytes on the wire",
    "gradients travel once, as in an all-reduce, for any number of ranks",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A reducer that does not wait (4 points)
#
# Write the heart of PyTorch's `DistributedDataParallel`. Gradients are collected in buckets; a bucket that is full starts its
# all-reduce at once, in the background, while backward computes the earlier layers. `finish()` waits for what is left.
#
# The buckets are cut for you, from the last parameter to the first, which is the order in which backward usually gets to
# them. Usually: a model with branches may finish its layers in another order on another rank. The network adds up the
# first all-reduce of one rank with the *first* of the others, so all ranks must start the same buckets in the same order.


# %% given="buckets"
def buckets_of(params, bucket_bytes):
    """Lists of parameters, the last ones first; parameters that ask for no gradient are left out."""
    return buckets.pack([param for param in params if param.requires_grad][::-1], bucket_bytes)


# %% [markdown]
# Four properties are graded: the sums, in every step; one all-reduce for each bucket; a full bucket starts before backward computes
# the next gradient; and backward waits for nobody. You will want `collectives.all_reduce(x, group, async_op=True)`, which
# returns a handle at once; `handle.wait()` returns the sum.


# %% answer="GradReducer"
class GradReducer:
    """Sums gradients over the group, bucket by bucket, while backward goes on: make it once, call finish() after each backward."""

    def __init__(self, params, group, bucket_bytes):
        self.group, self.buckets = group, buckets_of(params, bucket_bytes)
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_ready)
        ### BEGIN SOLUTION
        self.bucket_of = {
            id(param): number for number, bucket in enumerate(self.buckets) for param in bucket
        }
        self.begin()
        ### END SOLUTION

    def on_ready(self, param):
        """Called during backward when param.grad is complete: start what can start, wait for nothing."""
        ### BEGIN SOLUTION
        self.missing[self.bucket_of[id(param)]] -= 1
        while len(self.handles) < len(self.buckets) and self.missing[len(self.handles)] == 0:
            flat = torch.cat([param.grad.flatten() for param in self.buckets[len(self.handles)]])
            self.handles.append(collectives.all_reduce(flat, self.group, out=flat, async_op=True))
        ### END SOLUTION

    def finish(self):
        """Return when every param.grad is the sum over the group; the reducer is then ready for the next step."""
        ### BEGIN SOLUTION
        for bucket, handle in zip(self.buckets, self.handles):
            for param, total in zip(
                bucket, handle.wait().split([param.numel() for param in bucket])
            ):
                param.grad.copy_(total.view_as(param))
        self.begin()

    def begin(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.handles = []
        ### END SOLUTION


# %% [markdown]
# How is "before backward computes the next gradient" checked, without a clock? Below is the backward that your reducer
# meets. A rank cannot know a layer's gradient before that layer's turn comes: only then it is fetched, from outside, and the
# moment is written down among your messages. Computing a layer takes as long as the network needs for what was started
# before; so a bucket that was started in time is through when the next gradient is fetched. On every machine.


# %% given="backward"
def train(shapes, frozen, order, bucket_bytes, steps, pace, group):
    """`steps` backward passes over layers that finish in the reverse of `order`; returns the gradients after each."""
    weights = [
        torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64), layer != frozen)
        for layer, shape in enumerate(shapes)
    ]
    reducer, trainable = (
        GradReducer(weights, group, bucket_bytes),
        [weight for weight in weights if weight.requires_grad],
    )
    results = []

    def compute(layer):
        if pace == "slow layers":
            let_the_network_work(group)
        return group.fetch(f"{len(results)}/{layer}", weights[layer])

    for layer, weight in enumerate(weights):
        if weight.requires_grad:
            weight.register_hook(lambda _, layer=layer: compute(layer))
    for _ in range(steps):
        for weight in trainable:
            weight.grad = None
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        for layer in order:
            x = x + weights[layer].sum()
        if pace == "one rank after the other" and group.rank() > 0:
            collectives.receive(torch.empty(1), group.rank() - 1, group)
        x.backward()
        if pace == "one rank after the other" and group.rank() < group.size() - 1:
            collectives.send(torch.zeros(1), group.rank() + 1, group)
        reducer.finish()
        results.append([weight.grad.clone() for weight in trainable])
    return results


def let_the_network_work(group):
    """Until all that was started in the background is done; ten seconds at most."""
    for last in [lane.submit(lambda: None) for lane in channel_of(group).lanes]:
        for _ in range(10_000):
            if not last.done():
                time.sleep(0.001)


def meet(draw, ranks, shapes, bucket_bytes, *, orders=None, frozen=-1, steps=1, pace=""):
    """Run `train` on ranks with gradients of their own. Returns (outcome, the sums after each step)."""
    trainable, orders = (
        [layer for layer in range(len(shapes)) if layer != frozen],
        orders or [list(range(len(shapes)))] * ranks,
    )
    gradients = [
        {
            f"{step}/{layer}": draw.exact(*shapes[layer])
            for step in range(steps)
            for layer in trainable
        }
        for _ in range(ranks)
    ]
    inputs = [(shapes, frozen, order, bucket_bytes, steps, pace) for order in orders]
    sums = [
        [sum(of_rank[f"{step}/{layer}"] for of_rank in gradients) for layer in trainable]
        for step in range(steps)
    ]
    return run_on_ranks(train, inputs, secrets=gradients), sums


def expect_sums(results, sums, property, hint):
    for rank, steps in enumerate(results):
        expect_equal(steps, sums, property, f"{hint} (rank {rank} does not)")


# %% check="GradReducer-sum" points=1
# After finish() every gradient is the sum over the ranks, in every step.
outcome, sums = meet(draw, 2, [[4], [2, 3], [6]], 80, steps=2)
expect_sums(
    [steps[:1] for steps in outcome.results],
    sums[:1],
    "sum over ranks",
    "each param.grad is the sum over the group, no mean",
)
expect_sums(
    outcome.results,
    sums,
    "every step",
    "the first step is right, a later one is not; what does finish() leave behind?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, layers = draw.integer(3, 4), draw.integer(4, 6)
shapes = [[draw.integer(1, 5), draw.integer(1, 5)] for _ in range(layers)]
outcome, sums = meet(
    draw, ranks, shapes, draw.choice([1, 100, 10_000]), frozen=draw.integer(0, layers - 1), steps=3
)
expect_sums(
    [steps[:1] for steps in outcome.results],
    sums[:1],
    "sum over ranks",
    "for every number of ranks, every shape and every bucket size",
)
expect_sums(
    outcome.results,
    sums,
    "every step",
    "the first step is right, a later one is not; what does finish() leave behind?",
)
### END HIDDEN TESTS

# %% check="GradReducer-order" points=1
# One all-reduce for each bucket, and on all ranks in the same order.
outcome, sums = meet(draw, 2, [[4]] * 6, 64)
expect_sums(outcome.results, sums, "sum over ranks", "first let the sums be right")
expect(
    len(outcome.messages) <= 3 * 2 * 2,
    "one all-reduce a bucket",
    "six gradients in three buckets are three all-reduces",
)
outcome, sums = meet(draw, 2, [[4]] * 3, 32, orders=[[0, 1, 2], [2, 1, 0]])
expect_sums(
    outcome.results,
    sums,
    "same order on all ranks",
    "rank 1 finishes its layers the other way round; which bucket may start first?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, width, layers = draw.integer(2, 3), 6 * draw.integer(1, 5), draw.integer(4, 6)
outcome, sums = meet(draw, ranks, [[width]] * layers, 8 * width * 2)
expect(
    len(outcome.messages) <= -(-layers // 2) * ranks * 2 * (ranks - 1),
    "one all-reduce a bucket",
    "gradients travel in buckets",
)
expect(
    sum(outcome.sent_bytes) == 2 * (ranks - 1) * layers * width * 8,
    "bytes on the wire",
    "each gradient travels once, as in an all-reduce",
)
orders = [
    list(range(layers)),
    *(draw.several(range(layers), layers) for _ in range(ranks - 2)),
    list(reversed(range(layers))),
]
outcome, sums = meet(draw, ranks, [[width]] * layers, 8 * width, orders=orders)
expect_sums(
    outcome.results,
    sums,
    "same order on all ranks",
    "ranks finish their layers in orders of their own",
)
### END HIDDEN TESTS

# %% [markdown]
# The last check reads the trace. `expect_starts_at_once` adds up what a rank had sent before each fetch: it is what the buckets
# that were full by then need. Then ranks go one after the other: rank 1 begins its backward when rank 0 has ended its own.


# %% given="trace"
def expect_starts_at_once(outcome, numels, buckets, ranks):
    """Layers of `numels` float64 elements finish from the last to the first; `buckets` lists how many of them each bucket has."""
    full = {}  # layer to be fetched -> bytes of the buckets that are full by then
    for number in range(1, len(buckets)):
        size = sum(numels[len(numels) - sum(buckets[:number]) :]) * 8
        full[len(numels) - 1 - sum(buckets[:number])] = 2 * (ranks - 1) * size // ranks
    for rank in range(ranks):
        sent = 0
        for event in outcome.events:
            if event.rank == rank and event.kind == "send":
                sent += event.bytes
            elif event.rank == rank and event.kind == "fetch":
                needed = full.get(int(event.name.split("/")[1]), 0)
                expect(
                    sent >= needed,
                    "starts at once",
                    "a bucket was full, and the next gradient was computed before it travelled",
                )


def expect_no_waiting(draw, *meeting, **rules):
    try:
        return meet(draw, *meeting, pace="one rank after the other", **rules)
    except Failure as failure:
        expect(
            failure.property != "no deadlock",
            "backward waits for nobody",
            f"on_ready waits for a rank that has not begun its backward, which waits for this one to be done ({failure})",
        )
        raise


# %% check="GradReducer-overlap" points=2
# Full buckets travel while backward goes on, and backward waits for nobody.
outcome, sums = meet(draw, 2, [[40]] * 6, 640, pace="slow layers")
expect_sums(outcome.results, sums, "sum over ranks", "first let the sums be right")
expect_starts_at_once(outcome, [40] * 6, [2, 2, 2], 2)
outcome, sums = expect_no_waiting(draw, 2, [[40]] * 6, 640)
expect_sums(
    outcome.results,
    sums,
    "sum over ranks",
    "one rank is later than the other, the sums are the same",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, a, b = 3, 3 * draw.integer(2, 30), 3 * draw.integer(2, 30)
numels, bucket = [a, b, a, b, a, b, a], 8 * (a + b)
outcome, sums = meet(draw, ranks, [[numel] for numel in numels], bucket, pace="slow layers")
expect_sums(outcome.results, sums, "sum over ranks", "first let the sums be right")
expect_starts_at_once(outcome, numels, [2, 2, 2, 1], ranks)
outcome, sums = expect_no_waiting(draw, ranks, [[numel] for numel in numels], bucket)
expect_sums(
    outcome.results,
    sums,
    "sum over ranks",
    "one rank is later than the other, the sums are the same",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Accumulate, then talk (2 points)
#
# A batch that is too large for the memory comes in microbatches. Their gradients add up on the rank, and travel once.
#
# `gradients` gives one flat gradient for each microbatch. As with `param.grad`, it is always *the same memory*: the next
# microbatch overwrites it. Graded: the sum over all microbatches of all ranks, the bytes, and the memory, which holds a few
# gradients and not one for each microbatch. Ranks may have different numbers of microbatches.


# %% given="microbatches"
def microbatches(seeds, numel):
    """The gradient of one microbatch after the other, in one piece of memory."""
    gradient = torch.empty(numel, dtype=torch.float64)
    for seed in seeds:
        yield gradient.random_(-1023, 1024, generator=torch.Generator().manual_seed(seed)).div_(16)


def accumulate_on_a_rank(seeds, numel, group):
    return accumulate(microbatches(seeds, numel), group)[:100]


def sum_of(seeds_of_ranks, numel):
    return sum(gradient for seeds in seeds_of_ranks for gradient in microbatches(seeds, numel))[
        :100
    ]


# %% answer="accumulate"
def accumulate(gradients, group):
    """`gradients`, an iterator over tensors of one shape -> the sum over all microbatches and all ranks."""
    ### BEGIN SOLUTION
    total = next(gradients).clone()
    for gradient in gradients:
        total += gradient
    return collectives.all_reduce(total, group, out=total)
    ### END SOLUTION


# %% check="accumulate-once" points=1
# Many microbatches are one batch, and travel once.
seeds = [[1, 2, 3], [4, 5, 6]]
outcome = run_on_ranks(accumulate_on_a_rank, [(of_rank, 100) for of_rank in seeds])
expect_equal(
    outcome.results,
    [sum_of(seeds, 100)] * 2,
    "one batch",
    "the sum over microbatches and ranks; whose memory do you add up?",
)
expect(
    sum(outcome.sent_bytes) <= 2 * 800,
    "bytes on the wire",
    "one all-reduce, however many microbatches",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, numel, count = draw.integer(2, 4), draw.integer(100, 300), draw.integer(2, 6)
seeds = [[draw.integer(0, 10**9) for _ in range(count)] for _ in range(ranks)]
outcome = run_on_ranks(accumulate_on_a_rank, [(of_rank, numel) for of_rank in seeds])
expect_equal(
    outcome.results,
    [sum_of(seeds, numel)] * ranks,
    "one batch",
    "the sum over microbatches and ranks; whose memory do you add up?",
)
expect(
    sum(outcome.sent_bytes) <= 2 * (ranks - 1) * 8 * numel,
    "bytes on the wire",
    "one all-reduce, however many microbatches",
)
### END HIDDEN TESTS

# %% check="accumulate-memory" points=1
# The memory is that of a few gradients, and ranks may have different numbers of microbatches.
seeds = [[1, 2, 3], [4]]
outcome = run_on_ranks(accumulate_on_a_rank, [(of_rank, 100) for of_rank in seeds])
expect_equal(
    outcome.results,
    [sum_of(seeds, 100)] * 2,
    "one batch",
    "rank 0 has three microbatches, rank 1 has one",
)
seeds = [list(range(40)), list(range(40))]  # forty gradients are 160 MB
outcome = run_on_ranks(
    accumulate_on_a_rank, [(of_rank, 500_000) for of_rank in seeds], budget_bytes=80_000_000
)
expect_equal(outcome.results, [sum_of(seeds, 500_000)] * 2, "one batch", "first let it be right")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, numel = draw.integer(3, 4), draw.integer(100, 300)
seeds = [
    [draw.integer(0, 10**9) for _ in range(count)] for count in draw.several([1, 2, 3, 5], ranks)
]
outcome = run_on_ranks(accumulate_on_a_rank, [(of_rank, numel) for of_rank in seeds])
expect_equal(
    outcome.results,
    [sum_of(seeds, numel)] * ranks,
    "one batch",
    "ranks have different numbers of microbatches",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Who carries how much? (1 point)
#
# Three ways to make one step of m microbatches, all with a flat gradient of `numel` float32 elements. Predict the bytes that
# each rank sends. Nothing of it may be run: that is what the check does, with the course's own modules.


# %% given="ways"
def kept(numel, m, group):
    """Data parallel: the whole gradient is kept and summed once."""
    weight = torch.nn.Parameter(torch.zeros(numel))
    reducer = bucketed.GradReducer([weight], group)
    for number in range(1, m + 1):
        reducer.enabled = number == m
        weight.sum().backward()
    reducer.finish()


def sharded(numel, m, group):
    """Each rank keeps a slice of the gradient only: a reduce-scatter after each microbatch."""
    weight = torch.nn.Parameter(torch.zeros(numel))
    mine = accumulation.ScatteredGradients([weight], group)
    for _ in range(m):
        weight.sum().backward()
        mine.add()


def served(numel, m, group):
    """Rank 0 is a parameter server; the others add up their microbatches, push the gradient and pull the weights."""
    weight = torch.nn.Parameter(torch.zeros(numel))
    if group.rank() == 0:
        optimizer = SimpleNamespace(step=lambda: None)  # for the bytes it is all the same which one
        parameter_server.serve([weight], lambda params: optimizer, 1, group)
        return
    for _ in range(m):
        weight.sum().backward()
    parameter_server.Worker([weight], group).push_pull()


# %% answer="sent_bytes"
def sent_bytes(ranks, numel, m):
    """{"kept": [...], "sharded": [...], "served": [...]}: the bytes each rank sends; `ranks` divides `numel`."""
    ### BEGIN SOLUTION
    size = 4 * numel
    part = size // ranks * (ranks - 1)
    return {
        "kept": [2 * part] * ranks,
        "sharded": [m * part] * ranks,
        "served": [(ranks - 1) * size] + [size] * (ranks - 1),
    }
    ### END SOLUTION


# %% check="sent_bytes-all" points=1
# The bytes of the three ways.
def expect_bytes(ranks, numel, m, hint):
    said = ask(sent_bytes, ranks, numel, m)
    expect(
        isinstance(said, dict) and sorted(said) == ["kept", "served", "sharded"],
        "bytes of each rank",
        "a dict of three lists is wanted",
    )
    for way in (kept, sharded, served):
        expect_equal(
            said[way.__name__],
            run_on_ranks(way, [(numel, m)] * ranks).sent_bytes,
            "bytes of each rank",
            f"{way.__name__}: {hint}",
        )


expect_bytes(2, 1000, 1, "how often does the gradient, or a part of it, leave each rank?")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks = draw.integer(3, 5)
expect_bytes(
    ranks,
    ranks * draw.integer(20, 400),
    draw.integer(2, 4),
    "more ranks, more microbatches; who sends every time, and who to everybody?",
)
### END HIDDEN TESTS
