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
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group` last: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else. In this chapter `collectives` has `send`, `receive`, `barrier`,
#   `all_reduce`, `all_gather` and `all_to_all`.

# %% given="setup"
import torch

from minitrain import collectives

MASKED = -100  # a target that no loss counts


def cross_entropy_sum(logits, targets):
    """Summed over the targets that are not masked, without any division."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="sum"
    )


# %% judge="tools"
import math
from types import SimpleNamespace

from minitrain.course.grading.answer_checks import (
    Draw,
    Failure,
    ask,
    expect,
    expect_equal,
    run_on_ranks,
)
from minitrain.data_parallel import bucketed
from minitrain.systems.data_parallel import accumulation, parameter_server
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values
LISTED = "all_reduce all_gather all_to_all"

# %% [markdown]
# ## 1. The divisor (3 points)
#
# Four ranks, each with its own rows of a batch. Some targets are masked, as in padded or packed text, and not equally many
# on each rank. The result has to equal that of one process with the whole batch, `one_process` below.
#
# > **API** `model(tokens)`: tokens [rows, T] of this rank -> logits [rows, T, 17]; `cross_entropy_sum(logits, targets)` is a sum, not a
# > mean. `loss.backward()` fills `param.grad` of `model.parameters()`. Return the loss as a tensor without dimensions, detached.
# > `collectives.all_reduce(x, group)`: the sum over the ranks as a new tensor, or in place with `out=x`; x may be of any shape and
# > dtype. It works outside autograd. `all_gather(x, group)`: [d, ..] -> [n·d, ..]; `all_to_all(x, group)`: piece j goes to rank j.


# %% driver="on_a_rank"
def build(seed):
    torch.manual_seed(seed)
    tokens, inner, logits = (
        torch.nn.Embedding(17, 8),
        torch.nn.Linear(8, 16),
        torch.nn.Linear(16, 17),
    )
    return torch.nn.Sequential(tokens, inner, torch.nn.GELU(), logits).double()


def on_a_rank(seed, tokens, targets, group):
    model = build(seed)
    loss = batch_gradients(model, tokens, targets, group)
    return loss, [param.grad for param in model.parameters()]


# %% judge="one_process"
def one_process(seed, tokens, targets):
    """(loss, gradients) of the whole batch: the mean over all tokens whose target is not masked."""
    model = build(seed)
    loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
    loss.backward()
    return loss.detach(), [param.grad for param in model.parameters()]


# %% [markdown]
# On a rank, `model(tokens)` sees that rank's rows only. Every rank must end with the loss and the gradients of
# `one_process`, equal to 12 decimals.
#
# Graded too: what travels. The gradients cross the network once, as in an all-reduce, in which all ranks send equally much;
# rows of the batch stay where they are.


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


# %% judge="deal"
def random_batch(rows, length=40):
    """Rows of tokens and targets; each row has some of its targets masked."""
    tokens = torch.tensor([[draw.integer(0, 16) for _ in range(length + 1)] for _ in range(rows)])
    masks = torch.stack([draw.mask(length) for _ in range(rows)])
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~masks, MASKED)


def expect_one_process(tokens, targets, rows_of_ranks, property, hint):
    """Run batch_gradients with these numbers of rows on the ranks: all equal one process, and gradients travel once."""
    ranks, seed = len(rows_of_ranks), draw.integer(0, 99)
    parts = zip(tokens.split(rows_of_ranks), targets.split(rows_of_ranks))
    outcome = run_on_ranks(on_a_rank, [(seed, *part) for part in parts], collectives=LISTED)
    loss, gradients = one_process(seed, tokens, targets)
    for what, place, wanted in (("loss", 0, loss), ("gradients", 1, gradients)):
        found = [result[place] for result in outcome.results]
        expect_equal(found, [wanted] * ranks, property, f"the {what}: {hint}", atol=1e-12)
    size = sum(gradient.nbytes for gradient in gradients)
    more = sum(outcome.sent_bytes) - 2 * (ranks - 1) * size
    expect(
        more <= 64 * (ranks - 1),
        "bytes on the wire",
        "an all-reduce of the gradients is enough; what else do you send?",
    )
    expect(
        more >= 0,
        "bytes on the wire",
        "fewer bytes than the sum of gradients needs; do rows of the batch travel, and does every rank do everybody's work?",
    )
    return max(outcome.sent_bytes) - 2 * (ranks - 1) / ranks * size


# %% check="batch_gradients-equal" points=2
# Loss and gradients are those of one process, on every rank, and the gradients cross the network once.
tokens = torch.arange(48).view(6, 8) % 17
targets = (tokens + 3) % 17
targets[:3, 2:] = MASKED
expect_one_process(
    tokens,
    targets,
    [3, 3],
    "equals one process",
    "by which count must every rank divide, so that a sum over the ranks is right?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3, 4):
    rows_of_ranks = [draw.integer(2, 4) for _ in range(ranks)]
    expect_one_process(
        *random_batch(sum(rows_of_ranks)),
        rows_of_ranks,
        "equals one process",
        "ranks have different numbers of rows, and rows different numbers of tokens that count",
    )
tokens, targets = random_batch(7)
targets[2:4] = MASKED
expect_one_process(
    tokens,
    targets,
    [2, 2, 3],
    "a rank without tokens",
    "all targets of one rank are masked; it adds nothing, and harms nothing",
)
### END HIDDEN TESTS

# %% check="batch_gradients-bytes" points=1
# No rank sends more than another, as in an all-reduce.
tokens = torch.arange(32).view(4, 8) % 17
more = expect_one_process(
    tokens, (tokens + 3) % 17, [1] * 4, "equals one process", "let it be right, then count"
)
expect(
    more <= 64 * 4, "bytes of each rank", "one rank sends for all; who else could add up a part?"
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, draw.integer(4, 5)):
    more = expect_one_process(
        *random_batch(2 * ranks), [2] * ranks, "equals one process", "let it be right, then count"
    )
    expect(more <= 64 * ranks, "bytes of each rank", "for any number of ranks")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A reducer that does not wait (4 points)
#
# Write the main part of `torch.nn.parallel.DistributedDataParallel`. Gradients are collected in buckets; a bucket that is full starts its
# all-reduce at once, in the background, while backward computes the earlier layers. `finish()` waits for the remaining ones.
#
# The buckets are cut for you, from the last parameter to the first, which is the order in which backward usually gets to
# them. The order is not certain: a model with branches may finish its layers in another order on another rank. And the network adds up the
# first all-reduce of one rank with the *first* of the others, so all ranks must start the same buckets in the same order.
#
# > **API** `collectives.all_reduce(x, group, async_op=True)` returns a handle at once; `handle.wait()` waits and returns the sum as a
# > new tensor, and with `out=x` writes it into x as well. x must stay unchanged until then. Calls of one group run one after the other.
# > `buckets_of(params, bucket_bytes)` returns lists of parameters. `on_ready(param)` is called once per parameter and backward,
# > when `param.grad` is complete; `finish()` once after each backward. All gradients are float64. Methods of your own are allowed.


# %% given="buckets"
def buckets_of(params, bucket_bytes):
    """Lists of parameters, the last ones first; parameters that ask for no gradient are left out."""
    buckets = []
    for param in [param for param in params if param.requires_grad][::-1]:
        if not buckets or sum(other.nbytes for other in buckets[-1]) + param.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


# %% [markdown]
# Four properties are graded: the sums, in every step; one all-reduce per bucket; a full bucket starts before backward computes
# the next gradient; and backward does not wait.


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
# How is "before backward computes the next gradient" checked without a clock? Below is the backward that calls your
# reducer. A rank cannot know a layer's gradient in advance: the gradient is requested when backward reaches the layer, and the
# request is recorded among your messages. It is answered when no message is in flight, as if computing a layer took
# longer than the network needs for what was started before. Then the ranks run once more, one after the
# other: rank 1 begins its backward when rank 0 has ended its own.


# %% driver="train"
def weights_of(shapes, frozen):
    return [
        torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64), layer != frozen)
        for layer, shape in enumerate(shapes)
    ]


def train(shapes, frozen, order, bucket_bytes, steps, in_turn, group):
    """`steps` backward passes over layers that finish in the reverse of `order`; returns the gradients after each."""
    weights, results = weights_of(shapes, frozen), []
    reducer = GradReducer(weights, group, bucket_bytes)
    trainable = [weight for weight in weights if weight.requires_grad]

    def compute(layer):
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
        for turn in range(group.size() if in_turn else 1):
            if turn == group.rank() or not in_turn:
                x.backward()
            if in_turn:
                collectives.barrier(group)
        reducer.finish()
        results.append([weight.grad.clone() for weight in trainable])
    return results


# %% [markdown]
# `expect_starts_at_once` reads the trace: before each fetch a rank must have sent what the buckets need that were full by
# then on all ranks. For half of the points a bucket may start later, when the next one is full.


# %% judge="expect_reduced"
def expect_reduced(shapes, orders, bucket_bytes, property, hint, *, frozen=-1, steps=1, late=1):
    """Run `train` on ranks with gradients of their own, all at a time and in turn: sums, bytes and the trace are right."""
    ranks, weights = len(orders), weights_of(shapes, frozen)
    layers = [layer for layer, weight in enumerate(weights) if weight.requires_grad]
    place = {id(weight): layer for layer, weight in enumerate(weights)}
    buckets = [
        [place[id(param)] for param in bucket] for bucket in buckets_of(weights, bucket_bytes)
    ]
    gradients = [
        {f"{step}/{layer}": draw.exact(*shapes[layer]) for step in range(steps) for layer in layers}
        for _ in orders
    ]
    sums = [
        [sum(own[f"{step}/{layer}"] for own in gradients) for layer in layers]
        for step in range(steps)
    ]
    for in_turn in (False, True):
        inputs = [(shapes, frozen, order, bucket_bytes, steps, in_turn) for order in orders]
        try:
            outcome = run_on_ranks(train, inputs, collectives=LISTED, secrets=gradients)
        except Failure as failure:
            expect(
                failure.property != "no deadlock" or not in_turn,
                "backward waits for nobody",
                f"on_ready waits for a rank that has not begun its backward, which waits for this one to be done ({failure})",
            )
            raise
        first = [result[:1] for result in outcome.results]
        expect_equal(first, [sums[:1]] * ranks, property, hint)
        later = "the first step is right, a later one is not; what does finish() leave behind?"
        expect_equal(outcome.results, [sums] * ranks, "every step", later)
        expect(
            sum(outcome.sent_bytes)
            == sum(2 * (ranks - 1) * weights[layer].nbytes for layer in layers) * steps,
            "bytes on the wire",
            "each gradient travels once, as in an all-reduce",
        )
        expect(
            len(outcome.messages) <= 2 * (ranks - 1) * ranks * len(buckets) * steps,
            "one all-reduce a bucket",
            "do gradients travel alone, or in buckets?",
        )
        if not in_turn:
            expect_starts_at_once(outcome.events, shapes, orders, buckets, steps, late)


def expect_starts_at_once(events, shapes, orders, buckets, steps, late):
    """Before each fetch a rank has sent the buckets that were full on all ranks, but for the last `late` ones."""
    ranks, layers, needed = len(orders), sum(buckets, []), []
    sizes = [sum(math.prod(shapes[layer]) for layer in bucket) for bucket in buckets]
    costs = [8 * 2 * (size - -(-size // ranks)) for size in sizes]  # the least that a rank sends
    arrivals = [[layer for layer in order[::-1] if layer in layers] for order in orders]
    for step in range(steps):
        for count in range(len(layers)):
            full = [all(set(bucket) <= set(own[:count]) for own in arrivals) for bucket in buckets]
            started = max(0, [*full, False].index(False) - late)
            needed.append(step * sum(costs) + sum(costs[:started]))
    for rank in range(ranks):
        sent, fetches = 0, iter(needed)
        for event in events:
            if event.rank == rank and event.kind == "send":
                sent += event.bytes
            elif event.rank == rank and event.kind == "fetch":
                expect(
                    sent >= next(fetches, 0),
                    "starts at once",
                    "a bucket was full, and the next gradient was computed before it travelled",
                )


# %% check="GradReducer-sum" points=1
# After finish() every gradient is the sum over the ranks, in every step, and buckets travel meanwhile.
expect_reduced(
    [[4], [2, 3], [6], [4]],
    [[0, 1, 2, 3]] * 2,
    48,
    "sum over ranks",
    "each param.grad is the sum over the group, no mean",
    steps=2,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks, bucket_bytes in ((3, 1), (draw.integer(3, 4), draw.choice([100, 10_000]))):
    layers = draw.integer(4, 6)
    expect_reduced(
        [[draw.integer(1, 5), draw.integer(1, 5)] for _ in range(layers)],
        [list(range(layers))] * ranks,
        bucket_bytes,
        "sum over ranks",
        "for every number of ranks, every shape and every bucket size",
        frozen=draw.integer(0, layers - 1),
        steps=3,
    )
### END HIDDEN TESTS

# %% check="GradReducer-order" points=1
# Ranks finish their layers in different orders, and start the same buckets in the same order.
expect_reduced([[4]] * 6, [list(range(6))] * 2, 64, "sum over ranks", "first let the sums be right")
expect_reduced(
    [[4]] * 3,
    [[0, 1, 2], [2, 1, 0]],
    32,
    "same order on all ranks",
    "rank 1 finishes its layers the other way round; which bucket may start first?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks, shapes, layers = 3, [[6 * draw.integer(1, 5)]] * 6, list(range(6))
expect_reduced(
    shapes, [layers] * ranks, 16 * shapes[0][0], "sum over ranks", "first let the sums be right"
)
expect_reduced(
    shapes,
    [layers, draw.several(layers, 6), layers[::-1]],
    8 * shapes[0][0],
    "same order on all ranks",
    "ranks finish their layers in orders of their own",
)
### END HIDDEN TESTS

# %% check="GradReducer-overlap" points=2
# A full bucket travels before the next gradient is computed.
expect_reduced(
    [[40]] * 6, [list(range(6))] * 2, 640, "sum over ranks", "first let the sums be right", late=0
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
a, b = 3 * draw.integer(2, 30), 3 * draw.integer(2, 30)
shapes = [[numel] for numel in (a, b, a, b, a, b, a)]
for orders in (
    [list(range(7))] * 3,
    [[1, 0, 3, 2, 4, 6, 5], list(range(7)), [0, 1, 2, 3, 4, 6, 5]],
):
    expect_reduced(
        shapes, orders, 8 * (a + b), "sum over ranks", "first let the sums be right", late=0
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Accumulate, then talk (2 points)
#
# A batch that is too large for the memory comes in microbatches. Their gradients add up on the rank, and travel once.
#
# `gradients` gives one flat gradient for each microbatch. As with `param.grad`, it is always *the same memory*: the next
# microbatch overwrites it. Graded: the sum over all microbatches of all ranks, the bytes, and the memory, which holds a few
# gradients and not one per microbatch. Ranks may have different numbers of microbatches, at least one each.
#
# > **API** `gradients` is an iterator: `for gradient in gradients` or `next(gradients)`. Every item is the *same* float64 tensor [S],
# > with new values. `collectives.all_reduce(x, group)` returns the sum over the ranks as a new tensor; `out=x` works in place.
# > Return a tensor [S].


# %% driver="microbatches"
def microbatches(seeds, numel):
    """The gradient of one microbatch after the other, in one piece of memory."""
    gradient = torch.empty(numel, dtype=torch.float64)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        yield gradient.random_(-(2**45), 2**45, generator=generator).mul_(2.0**-42)


def accumulate_on_a_rank(seeds, numel, group):
    return accumulate(microbatches(seeds, numel), group)


# %% answer="accumulate"
def accumulate(gradients, group):
    """`gradients`, an iterator over tensors of one shape -> the sum over all microbatches and all ranks."""
    ### BEGIN SOLUTION
    total = next(gradients).clone()
    for gradient in gradients:
        total += gradient
    return collectives.all_reduce(total, group, out=total)
    ### END SOLUTION


# %% judge="expect_accumulated"
def expect_accumulated(counts, numel, hint, **rules):
    """Run accumulate with so many microbatches on each rank; the sum is right, and travels once."""
    seeds, ranks = [[draw.integer(0, 10**9) for _ in range(count)] for count in counts], len(counts)
    inputs = [(own, numel) for own in seeds]
    outcome = run_on_ranks(accumulate_on_a_rank, inputs, collectives=LISTED, **rules)
    total = sum(gradient for own in seeds for gradient in microbatches(own, numel))
    expect_equal(outcome.results, [total] * ranks, "one batch", hint)
    expect(
        sum(outcome.sent_bytes) == 2 * (ranks - 1) * 8 * numel,
        "bytes on the wire",
        "one all-reduce of one gradient, however many microbatches",
    )


# %% check="accumulate-once" points=1
# Many microbatches are one batch, and travel once.
expect_accumulated([3, 3], 100, "the sum over microbatches and ranks; whose memory do you add up?")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(3, 4)):
    expect_accumulated(
        [draw.integer(2, 6)] * ranks,
        draw.integer(100, 300),
        "the sum over microbatches and ranks; whose memory do you add up?",
    )
### END HIDDEN TESTS

# %% check="accumulate-memory" points=1
# The memory is that of a few gradients, and ranks may have different numbers of microbatches.
expect_accumulated([3, 1], 100, "rank 0 has three microbatches, rank 1 has one")
print("the visible checks pass")
expect_accumulated(
    [40, 40], 500_000, "first let it be right", budget_bytes=80_000_000
)  # forty gradients are 160 MB
### BEGIN HIDDEN TESTS
expect_accumulated(
    draw.several([1, 2, 3, 5], draw.integer(3, 4)),
    draw.integer(100, 300),
    "ranks have different numbers of microbatches",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Who carries how much? (1 point)
#
# Three ways to make one step of m microbatches, all with a flat gradient of `numel` float32 elements. Predict the bytes that
# each rank sends. Do not run anything: the check does that, with the course's own modules, in dry runs of each rank (so
# `numel` may be larger than any memory).
#
# > **API** A pure function of three ints; `ranks` divides `numel`. Return a dict of three lists, each with one int per rank; in "served"
# > rank 0 is the server. A float32 element has 4 bytes. Whole numbers only (`//`): floats are not exact at these sizes.


# %% judge="ways"
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
def counted(way, *sizes):
    with Ledger() as ledger:
        way(*sizes, torch.distributed.group.WORLD)
    return ledger.sent_bytes()


def expect_bytes(ranks, numel, m, hint):
    said = ask(sent_bytes, ranks, numel, m)
    expect(
        isinstance(said, dict) and sorted(said) == ["kept", "served", "sharded"],
        "bytes of each rank",
        "a dict of three lists is wanted",
    )
    for way in (kept, sharded, served):
        sent = [dryrun.run(counted, way, numel, m, rank=rank, ranks=ranks) for rank in range(ranks)]
        expect_equal(said[way.__name__], sent, "bytes of each rank", f"{way.__name__}: {hint}")


expect_bytes(2, 1000, 1, "how often does the gradient, or a part of it, leave each rank?")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for scale in (1, 10**9):
    ranks = draw.integer(3, 5)
    expect_bytes(
        ranks,
        ranks * draw.integer(20, 400) * scale,
        draw.integer(3, 5),
        "more ranks, more microbatches; who sends every time, and who to everybody?",
    )
### END HIDDEN TESTS
