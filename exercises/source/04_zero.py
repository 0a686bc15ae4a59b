# %% [markdown]
# # Exercises 04: sharded data parallelism (ZeRO, FSDP)
#
# Six tasks, 10 points, about two hours. Read chapter 04 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 04
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. A result counts only together
# with what makes it ZeRO: the bytes on the network, and what each rank holds. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group`: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else. Here `collectives` has `send`, `receive`, `barrier`, `all_reduce`, `all_gather` and
#   `reduce_scatter`; `async_op=True` returns a handle, whose `wait()` returns the result.
#
# N is the number of ranks in the group, Ψ the number of parameters, as in Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5).
# What FSDP adds to it (flat parameters, gather and free, hybrid sharding) is in Zhao et al. 2023 (arXiv:2304.11277, section 3).

# %% given="setup"
import math

import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask, expect, expect_equal, run_on_ranks

COLLECTIVES = "all_reduce all_gather reduce_scatter"  # what the ranks of this chapter have
draw = Draw()  # hidden checks draw sizes, numbers of ranks and values

# %% [markdown]
# ## 1. Cut the flat buffer (1 point)
#
# All parameters are laid one after the other into one flat buffer, which is padded at its end to P elements, the next multiple of N.
# Rank r holds the shard of elements r·P/N to (r+1)·P/N. Cuts ignore where parameters end, so a parameter may straddle ranks.
#
# Say for each rank which pieces of which parameters its shard holds. A piece `(i, start, stop)` is elements start to stop-1 of the
# flattened parameter i. Pieces are in the order of the buffer; none is empty, and padding is not a piece.
#
# > **API** A pure function of a list of ints and an int. Return a tuple: P, an int, and a list of N lists, one per rank in rank order, of
# > tuples of three ints (i, start, stop). A rank that has only padding has an empty list.
#
# Sizes 5 and 3 on three ranks: P = 9, and the shards are `[(0, 0, 3)]`, `[(0, 3, 5), (1, 0, 1)]` and `[(1, 1, 3)]`, then one element
# of padding.


# %% answer="partition"
def partition(numels, ranks):
    """Sizes of the parameters -> (padded size P, for each rank the list of its pieces (i, start, stop))."""
    ### BEGIN SOLUTION
    size = -(-sum(numels) // ranks)
    shards, first = [[] for _ in range(ranks)], 0
    for i, numel in enumerate(numels):
        for rank, shard in enumerate(shards):
            start, stop = max(first, rank * size), min(first + numel, (rank + 1) * size)
            if start < stop:
                shard.append((i, start - first, stop - first))
        first += numel
    return size * ranks, shards
    ### END SOLUTION


# %% judge="expect_partition"
def expect_partition(numels, ranks):
    """Ask for the partition, and look at it property by property."""
    said, total = ask(partition, numels, ranks), sum(numels)
    expect(
        isinstance(said, (list, tuple)) and len(said) == 2,
        "padded size",
        "return two things: the padded size and the shards",
    )
    padded, shards = said
    expect(
        type(padded) is int and padded % ranks == 0 and total <= padded < total + ranks,
        "padded size",
        "the smallest multiple of the ranks in which everything has room",
    )
    expect(
        len(shards) == ranks,
        "one shard per rank",
        "a list of pieces for every rank, empty where there is only padding",
    )
    pieces = [tuple(piece) for shard in shards for piece in shard]
    expect(
        all(len(piece) == 3 and all(type(number) is int for number in piece) for piece in pieces),
        "pieces",
        "a piece is three whole numbers: parameter, start, stop",
    )
    expect(
        all(0 <= i < len(numels) and 0 <= start < stop <= numels[i] for i, start, stop in pieces),
        "pieces",
        "start and stop count inside the flattened parameter, not in the buffer; a piece is never empty, and padding is none",
    )
    elements = [(i, element) for i, start, stop in pieces for element in range(start, stop)]
    expect(
        len(elements) == len(set(elements)) == total,
        "every element once",
        "each element of each parameter lies in exactly one shard; what happens to one that straddles two ranks, or more?",
    )
    expect(
        elements == sorted(elements),
        "order of the buffer",
        "rank after rank and piece after piece, the buffer from left to right",
    )
    held = [sum(stop - start for _, start, stop in shard) for shard in shards]
    room = [min(padded // ranks, max(0, total - rank * (padded // ranks))) for rank in range(ranks)]
    expect(
        held == room,
        "equal shards",
        "every rank has P/N elements of the buffer, and only its end is padding",
    )
    expect(
        all(len({piece[0] for piece in shard}) == len(shard) for shard in shards),
        "pieces",
        "what a shard holds of one parameter is one piece",
    )


# %% check="partition-all" points=1
# Every element is in exactly one shard, shards are equal, and padding is at the end.
expect_partition([4, 2], 2)
expect_partition([5, 3], 3)
expect_partition([1], 4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(4):
    expect_partition([draw.integer(1, 40) for _ in range(draw.integer(1, 9))], draw.integer(2, 7))
expect_partition([draw.integer(1, 3), draw.integer(50, 90), draw.integer(1, 3)], draw.integer(4, 7))
expect_partition([draw.integer(1, 9) for _ in range(3)], 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The shard of the summed gradient (2 points)
#
# Every rank has gradients of the same shapes and of its own values. Rank r needs its shard of their sum and nothing else: elements r·P/N to
# (r+1)·P/N of the flat, padded buffer of task 1. Padding is zero. Every rank may send (N-1)/N of the padded buffer, half of
# an all-reduce.
#
# > **API** `collectives.reduce_scatter(x, group)`: x [n·d] -> [d], this rank's piece of the sum over the group, a new tensor of x's dtype
# > (float32 or float64); n must divide the length. `all_reduce(x, group)`: the whole sum; `all_gather(x, group)`: [d] -> [n·d], in rank
# > order. `torch.cat` and `torch.nn.functional.pad(x, (0, more))` make the buffer. Leave the gradients as they are.
#
# Two ranks with gradients of shapes [2] and [1]: `[1, 2], [3]` and `[10, 20], [30]`. P = 4; rank 0 returns `[11, 22]`, rank 1 `[33, 0]`.


# %% answer="reduce_scatter_gradients"
def reduce_scatter_gradients(grads, group):
    """A list of tensors of any shapes, on each rank -> [P/N], this rank's shard of the flat gradient summed over the group."""
    ### BEGIN SOLUTION
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % group.size()))
    return collectives.reduce_scatter(flat, group)
    ### END SOLUTION


# %% judge="expect_shards"
def gradients_of(ranks, shapes):
    """Gradients of these shapes, other values on each rank."""
    return [[draw.exact(*shape) for shape in shapes] for _ in range(ranks)]


def expect_shards(grads, property, hint):
    """Run the answer; rank r returns shard r of the sum, and no more than N-1 shards leave a rank."""
    outcome, ranks = (
        run_on_ranks(
            reduce_scatter_gradients, [(of_rank,) for of_rank in grads], collectives=COLLECTIVES
        ),
        len(grads),
    )
    total = torch.cat([sum(same).flatten() for same in zip(*grads)])
    padded = total.new_zeros(math.ceil(total.numel() / ranks) * ranks)
    padded[: total.numel()] = total
    shards = list(padded.chunk(ranks))
    expect_equal(outcome.results, shards, property, hint)
    expect(
        max(outcome.sent_bytes) <= (ranks - 1) * shards[0].nbytes,
        "bytes on the wire",
        "only the part of another rank has to leave this one; who needs the rest of the sum?",
    )


# %% check="reduce_scatter_gradients-sum" points=1
# Rank r returns shard r of the sum, for half the bytes of an all-reduce.
grads = [
    [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])],
    [torch.tensor([10.0, 20.0]), torch.tensor([[30.0, 40.0]])],
]
expect_shards(
    grads, "shard of the sum", "rank r returns the r-th part of the flat sum; a sum, no mean"
)
expect_shards(gradients_of(4, [[20, 10], [8]]), "shard of the sum", "the same on four ranks")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3, draw.integer(4, 5)):
    shapes = [[draw.integer(1, 5), draw.integer(1, 6)], [draw.integer(1, 9)], [2, 1, 3]]
    shapes += [[ranks - sum(map(math.prod, shapes)) % ranks]]
    expect_shards(
        gradients_of(ranks, shapes),
        "shard of the sum",
        "for every number of ranks; a parameter may straddle ranks",
    )
### END HIDDEN TESTS

# %% check="reduce_scatter_gradients-padding" points=1
# The same where sizes do not divide.
expect_shards(
    [
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0])],
        [torch.tensor([10.0, 20.0]), torch.tensor([30.0])],
    ],
    "sizes that do not divide",
    "three elements on two ranks: where does the padding go?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3, draw.integer(4, 5)):
    shapes = [[draw.integer(1, 9), draw.integer(1, 9)], [draw.integer(1, 9)], [1]]
    shapes += [[ranks - sum(map(math.prod, shapes)) % ranks + draw.integer(1, ranks - 1)]]
    expect_shards(
        gradients_of(ranks, shapes),
        "sizes that do not divide",
        "one flat buffer, padded once, at its end, with zeros",
    )
expect_shards(
    gradients_of(5, [[1], [draw.integer(1, 2)]]),
    "sizes that do not divide",
    "there may be fewer elements than ranks",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A step of ZeRO-1 (3 points)
#
# Every rank holds all parameters, but only 1/N of the optimizer state. A step is: reduce-scatter the gradients, update the own shard of
# the parameters, all-gather the parameters. The optimizer is SGD with momentum, for every element
#
#     m ← MOMENTUM·m + g        θ ← θ - lr·m        g the sum of the gradients over the group, m = 0 at first
#
# `state` is a dict, empty before the first step. What you put into it comes back at the next step, and nothing else does: the next step runs
# in another process. Let it hold `state["momentum"]` of shape [P/N] and nothing more. Update the tensors of `params` in place.
#
# Graded, all three together: all ranks end with the parameters of one process, in every step; the state is 1/N; each rank sends at most
# 2·Ψ·(N-1)/N elements, with P in place of Ψ where padding is needed. That is what an all-reduce sends: the memory is saved at no extra traffic.
#
# > **API** `params` and `grads` are lists of tensors of equal shapes, float64; write with `param.copy_(values)`. `state.get("momentum")` is
# > None in the first step. `collectives.reduce_scatter(x, group)`: [n·d] -> [d], this rank's piece of the sum;
# > `all_gather(x, group)`: [d] -> [n·d], in rank order; both return new tensors. `lr` is a float. Return nothing.
#
# One parameter of two elements, `[1, 1]`, two ranks, lr = 0.25, gradients `[1, 2]` and `[3, 2]`: rank 0 keeps m = `[4]`, rank 1 m = `[4]`,
# both end with θ = `[0, 0]`.

# %% given="momentum"
MOMENTUM = 0.5


# %% answer="zero1_step"
def zero1_step(params, grads, state, group, lr):
    """One step: update the tensors of the list `params` in place, from the list `grads` of this rank; keep the shard's momentum in `state`."""

    ### BEGIN SOLUTION
    def flat(tensors):
        one = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(one, (0, -one.numel() % group.size()))

    grad = collectives.reduce_scatter(flat(grads), group)
    state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(grad)) + grad
    mine = flat(params).chunk(group.size())[group.rank()] - lr * state["momentum"]
    whole = collectives.all_gather(mine, group)[: sum(param.numel() for param in params)]
    for param, values in zip(params, whole.split([param.numel() for param in params])):
        param.copy_(values.view_as(param))
    ### END SOLUTION


# %% driver="step_on_a_rank"
def step_on_a_rank(params, grads, state, lr, group):
    zero1_step(list(params), grads, state, group, lr)
    return params, state  # the tensors of before


# %% judge="expect_steps"
def expect_steps(ranks, shapes, steps, lr=0.25):
    """Steps in new processes each: the parameters of one process, a shard of the state, the bytes of an all-reduce."""
    params = [draw.exact(*shape) for shape in shapes]
    momenta = [torch.zeros_like(param) for param in params]
    shard = math.ceil(sum(map(math.prod, shapes)) / ranks)
    held = [(params, {})] * ranks
    for step in range(steps):
        grads = gradients_of(ranks, shapes)
        inputs = [(params_, grads[rank], state, lr) for rank, (params_, state) in enumerate(held)]
        outcome = run_on_ranks(step_on_a_rank, inputs, collectives=COLLECTIVES)
        for i, same in enumerate(zip(*grads)):  # what one process does with the gradients of all
            momenta[i] = MOMENTUM * momenta[i] + sum(same)
            params[i] = params[i] - lr * momenta[i]
        held = outcome.results
        for rank, (params_, state) in enumerate(held):
            property, hint = (
                ("every step", "the first step is right, a later one is not; what must live on?")
                if step
                else ("equals one process", "who updates which part, and who gets it?")
            )
            where = f"{hint} (seen at rank {rank})"
            expect_equal(params_, params, property, where, atol=1e-12)  # numbers below 256
            expect(
                isinstance(state, dict) and list(state) == ["momentum"],
                "state is a shard",
                'state["momentum"] and nothing else is kept',
            )
            expect_equal(
                torch.zeros_like(state["momentum"]),
                torch.zeros(shard, dtype=params[0].dtype),
                "state is a shard",
                "the momentum of this rank's shard, flat; which elements does this rank update?",
            )
        expect(
            max(outcome.sent_bytes) <= 2 * (ranks - 1) * shard * 8,
            "bytes on the wire",
            "each part of the gradient goes to the one rank that needs it, "
            "each part of the parameters comes from the rank that has it",
        )


# %% check="zero1_step-two" points=1
# Two ranks: the parameters of one process, half of the state, the bytes of an all-reduce.
expect_steps(2, [[2, 3], [4]], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_steps(2, [[draw.integer(1, 6), 2], [draw.integer(1, 7), 2, 1]], 2)
### END HIDDEN TESTS

# %% check="zero1_step-any" points=1
# The same on any number of ranks, in every step.
expect_steps(3, [[4, 3], [6]], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks = draw.integer(3, 5)
expect_steps(ranks, [[draw.integer(1, 5), ranks], [1], [draw.integer(1, 7) * ranks - 1]], 3)
### END HIDDEN TESTS

# %% check="zero1_step-padding" points=1
# The same where sizes do not divide.
expect_steps(2, [[2, 2], [3]], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(3, 4)):
    shapes = [[draw.integer(1, 5), draw.integer(1, 5)], [draw.integer(1, 7)], [1]]
    more = ranks - sum(map(math.prod, shapes)) % ranks + draw.integer(1, ranks - 1)
    expect_steps(ranks, [*shapes, [more]], 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Gather, compute, free (2 points)
#
# ZeRO-3 shards the parameters too. Each layer's weight is a flat buffer of its own, padded to a multiple of N; rank r has shard r of each. In
# the forward a layer is gathered when its turn comes, used, and freed. The bytes are those of one all-gather per layer.
#
# A layer is computed by `compute(layer, weight, x, group)`, with the whole `weight` of shape [F, D] and x of shape [B, D]. It returns
# [B, F]. Call it once for each layer, in order, and return what the last one returns.
#
# At no time may more than two whole weights be alive: the one in use, and one more if you gather the next layer while this one
# computes (`async_op=True`). Two things show it. `compute` fetches a bias from outside, and the moment is written down among your messages:
# by then your shards of layers 0 to `layer` have left your rank, that of `layer + 1` may have, and no other. And in the last check there are
# many layers, and the memory is limited: keep none of them.
#
# > **API** `collectives.all_gather(shard, group)`: [d] -> [n·d], in rank order, a new tensor; with `async_op=True` a handle at once, whose
# > `wait()` returns that tensor. `compute(layer, weight, x, group)` returns a new tensor. `shapes[layer]` is a list [F, D]; the padding at
# > the end of a gathered weight may hold anything. All tensors are float64. `del whole` lets go of a tensor.
#
# Eight layers of 100 MB on four ranks: a rank holds 200 MB of shards and at most 100 MB of gathered weight, or 200 MB with prefetch, not 800.


# %% given="compute"
def compute(layer, weight, x, group):
    """x [B, D], weight [F, D] -> [B, F]. The bias comes from outside, when this layer's turn has come."""
    bias = group.fetch(f"layer {layer}", x.new_empty(weight.shape[0]))
    return torch.relu(x @ weight.T + bias)


# %% answer="gathered_forward"
def gathered_forward(x, shards, shapes, group):
    """x [B, D] of this rank, shards[layer] a flat tensor, shapes[layer] the [F, D] of the whole weight -> output of the last layer."""
    ### BEGIN SOLUTION
    for layer, (shard, shape) in enumerate(zip(shards, shapes)):
        whole = collectives.all_gather(shard, group)
        x = compute(layer, whole[: math.prod(shape)].view(shape), x, group)
        del whole
    return x
    ### END SOLUTION


# %% judge="expect_forward"
def expect_in_turn(outcome, shard_bytes):
    """When a layer is computed, this rank's shards up to it have left, the next one may have, no other."""
    for rank in range(len(outcome.results)):
        sent, layers = 0, []
        most = [
            (len(outcome.results) - 1) * sum(shard_bytes[:n]) for n in range(len(shard_bytes) + 2)
        ]
        expect(
            outcome.sent_bytes[rank] <= most[-1],
            "bytes on the wire",
            "each rank sends its shard of a layer to each other rank once; "
            "nothing is added up, and nothing is gathered twice",
        )
        for event in outcome.events:
            if event.rank == rank and event.kind == "send":
                sent += event.bytes
            elif event.rank == rank and event.kind == "fetch":
                layers.append(int(event.name.split()[1]))
                expect(
                    sent <= most[layers[-1] + 2],
                    "one layer at a time",
                    "a layer was computed when more had been gathered than it and the next one; "
                    "who needs them so early?",
                )
                expect(
                    sent >= most[layers[-1] + 1],
                    "one layer at a time",
                    "a layer was computed before the other ranks had this rank's shard of it",
                )
        expect(
            layers == list(range(len(shard_bytes))),
            "one layer at a time",
            "compute is called once for each layer, in order",
        )


def expect_forward(ranks, widths):
    """Layers from each width to the next, other rows on each rank: the output of one process, gathered in turn."""
    shapes = [[wide, narrow] for narrow, wide in zip(widths, widths[1:])]
    weights = [draw.real(*shape).abs() / shape[1] for shape in shapes]  # no relu hides a mistake
    biases = [draw.real(wide).abs() for wide in widths[1:]]
    shards = []
    for weight in weights:
        padded = weight.new_full(
            (math.ceil(weight.numel() / ranks) * ranks,), 7.0
        )  # may be anything
        padded[: weight.numel()] = weight.flatten()
        shards.append(padded.chunk(ranks))
    rows = [draw.real(draw.integer(1, 3), widths[0]).abs() for _ in range(ranks)]
    outcome = run_on_ranks(
        gathered_forward,
        [(rows[rank], [of_layer[rank] for of_layer in shards], shapes) for rank in range(ranks)],
        secrets=[{f"layer {layer}": bias for layer, bias in enumerate(biases)}] * ranks,
        collectives=COLLECTIVES,
    )
    for weight, bias in zip(weights, biases):
        rows = [torch.relu(x @ weight.T + bias) for x in rows]
    expect_equal(
        outcome.results,
        rows,
        "equals one process",
        "is the weight whole, in its shape, without padding?",
        atol=1e-12,
    )
    expect_in_turn(outcome, [of_layer[0].nbytes for of_layer in shards])


# %% check="gathered_forward-result" points=1
# The output is right, for one all-gather per layer, when its turn comes.
expect_forward(2, [3, 5, 3])
expect_forward(2, [3, 4, 3, 4, 3])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, draw.integer(3, 4)):
    expect_forward(ranks, [draw.integer(2, 7) for _ in range(draw.integer(4, 6))])
### END HIDDEN TESTS

# %% [markdown]
# The many layers of the next check are made on the ranks, so that they need not travel. The elements of a shard are equal.


# %% driver="forward_of_many_layers"
def forward_of_many_layers(values, width, group):
    """Layer i is [width, width]; every element of this rank's shard of its weight is values[i] / width."""
    numel = width * width // group.size()
    shards = [torch.full((numel,), value / width, dtype=torch.float64) for value in values]
    x = torch.ones(1, width, dtype=torch.float64)
    return gathered_forward(x, shards, [[width, width]] * len(values), group)


# %% check="gathered_forward-live" points=1
# At most one whole weight is alive, two with prefetch.
# 48 layers of 2.1 MB on two ranks; beside its shards a rank may take 60 MB.
layers, width = 48, 512
scales, x = [draw.choice([0.5, 1.0, 2.0]) for _ in range(layers)], torch.ones(1, width).double()
for scale in scales:  # a layer's rows are 0.5 scale / width on rank 0, 1.5 scale / width on rank 1
    x = x.mean() * scale * torch.tensor([[0.5, 1.5]]).double().repeat_interleave(width // 2, 1)
outcome = run_on_ranks(
    forward_of_many_layers,
    [([half * scale for scale in scales], width) for half in (0.5, 1.5)],
    secrets=[{f"layer {layer}": torch.zeros(width).double() for layer in range(layers)}] * 2,
    budget_bytes=layers * width**2 * 8 // 2 + 60_000_000,
    collectives=COLLECTIVES,
)
expect_equal(outcome.results, [x] * 2, "equals one process", "first let the output be right")
expect_in_turn(outcome, [width**2 * 8 // 2] * layers)
print("the visible checks pass")

# %% [markdown]
# ## 5. Bytes of the model states, cut by rows (1 point)
#
# The chapter cuts one flat buffer. FSDP2 cuts every parameter by itself, along its dimension 0, as `torch.chunk` does: of a
# parameter with d rows each rank gets ⌈d/N⌉, in rank order; the last rank that gets some may get fewer, and those after it get
# none. (FSDP2 pads its buffers to equal sizes; that padding is not counted here.) And gradients add up in float32, as they do by
# default in Megatron-LM.
#
# So an element has 2 bytes for the parameter, 4 for its gradient and 12 for the optimizer state. Stage 1 shards the optimizer
# state, stage 2 the gradients too, stage 3 the parameters too; what is not sharded is whole on every rank. How many bytes of each kind
# does rank `rank` hold?
#
# Shapes [5, 2] and [3] on two ranks: rank 0 has 3 and 2 rows, which are 8 elements, rank 1 has 2 rows and 1, which are 5.
#
# > **API** A pure function, no tensors and no network. `shapes` is a list of lists of ints, at least one int each (the rows); `ranks`,
# > `rank` (from 0) and `stage` (0 to 3) are ints. Return a dict with the keys "parameters", "gradients" and "optimizer state", all ints.
# > Numbers may have 60 bits and more: `//` and `-(-a // b)` are exact, `/` and `math.ceil(a / b)` are not.


# %% answer="state_bytes_by_rows"
def state_bytes_by_rows(shapes, ranks, rank, stage):
    """{"parameters": ..., "gradients": ..., "optimizer state": ...}: bytes that this rank holds, as ints."""
    ### BEGIN SOLUTION
    here = 0
    for rows, *others in shapes:
        most = -(-rows // ranks)
        here += min(most, max(0, rows - rank * most)) * math.prod(others)
    everything = sum(map(math.prod, shapes))
    each = {"parameters": (2, 3), "gradients": (4, 2), "optimizer state": (12, 1)}
    return {
        kind: size * (here if stage >= first else everything)
        for kind, (size, first) in each.items()
    }
    ### END SOLUTION


# %% judge="expect_states"
KINDS = ["parameters", "gradients", "optimizer state"]


def expect_states(shapes, ranks, rank, elements, property, hint):
    """Ask for all stages; `elements` are what the rank holds of whatever is sharded."""
    whole = sum(map(math.prod, shapes))
    for stage in range(4):
        said = ask(state_bytes_by_rows, shapes, ranks, rank, stage)
        expect(
            isinstance(said, dict) and sorted(said) == sorted(KINDS),
            "bytes of each kind",
            "a dict with the three kinds is wanted",
        )
        expect(
            all(type(said[kind]) is int for kind in KINDS),
            "whole numbers",
            "bytes are ints; which division gives an int?",
        )
        cut = [elements if stage >= first else whole for first in (3, 2, 1)]
        wanted = [size * numel for size, numel in zip((2, 4, 12), cut)]
        expect_equal([said[kind] for kind in KINDS], wanted, property, f"stage {stage}: {hint}")


# %% check="state_bytes_by_rows-all" points=1
# The bytes of each kind in all four stages, to the byte, where rows divide and where they do not.
which = "which kinds are sharded, and how many bytes has an element of each?"
expect_states([[4, 3], [2]], 2, 1, 7, "bytes of each kind", which)
rows = "every parameter is cut by itself, by rows; how many of them does this rank get?"
expect_states([[5, 2], [3]], 2, 0, 8, "rows that do not divide", rows)
expect_states([[5, 2], [3]], 2, 1, 5, "rows that do not divide", rows)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ranks = draw.integer(3, 9)
shapes = [[ranks * draw.integer(1, 9), *more] for more in ([draw.integer(2, 9)], [], [3, 5])]
share = sum(map(math.prod, shapes)) // ranks
expect_states(shapes, ranks, draw.integer(0, ranks - 1), share, "bytes of each kind", which)
for ranks, shapes in (
    (4, [[5, draw.integer(2, 9)]]),
    (draw.integer(4, 8), [[draw.integer(1, 40), draw.integer(1, 9)] for _ in range(4)]),
    (8, [[draw.integer(1, 7)], [draw.integer(9, 15), 2, draw.integer(1, 5)], [1]]),
):
    chunks = [[len(part) for part in torch.arange(shape[0]).chunk(ranks)] for shape in shapes]
    for rank in range(ranks):
        got = [part[rank] if rank < len(part) else 0 for part in chunks]
        held = sum(rows * math.prod(shape[1:]) for rows, shape in zip(got, shapes))
        hint = "the last ranks get what is left, which may be nothing"
        expect_states(shapes, ranks, rank, held, "rows that do not divide", hint)
large = 16 * draw.integer(10**16, 10**16 + 10**6) + 7
hint = "a float has 53 bits; does every number here fit?"
expect_states([[large * 5 + 1, 3]], 5, 0, 3 * (large + 1), "exact", hint)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. How far to shard (1 point)
#
# Hybrid sharding (Zhao et al. 2023, section 3.2) cuts all model states by a factor F: groups of F consecutive ranks hold one copy together, and
# there are ranks/F copies. The larger F, the less memory, and the more ranks take part in each all-gather. A rank holds
# 16·⌈Ψ/F⌉ bytes, F divides `ranks`, and `per_node` divides `ranks`.
#
# A group stays inside a node exactly if F divides `per_node`. Choose the smallest such F whose states fit into `limit_bytes`. If none of them
# fits, choose the smallest F of all that fits. If none fits at all, raise a ValueError that says so in one line.
#
# > **API** A pure function of four ints. Return an int, or raise a ValueError whose message is one line. Whole numbers only: ⌈a/b⌉ is
# > `-(-a // b)`.
#
# Ψ = 3e9 on 24 ranks, 8 in a node, 16e9 bytes: F = 3 would fit, but its groups straddle nodes (ranks 6, 7 and 8), so F is 4. With 5e9
# bytes no factor of 8 fits, and F is 12.


# %% answer="choose_shard_factor"
def choose_shard_factor(parameters, ranks, per_node, limit_bytes):
    """The sharding factor F, an int. Raises ValueError if the states do not fit with any."""
    ### BEGIN SOLUTION
    fitting = [
        factor
        for factor in range(1, ranks + 1)
        if ranks % factor == 0 and 16 * -(-parameters // factor) <= limit_bytes
    ]
    if not fitting:
        raise ValueError(
            f"{parameters} parameters do not fit into {limit_bytes} bytes on each of {ranks} ranks; take more ranks"
        )
    return min(fitting, key=lambda factor: (per_node % factor != 0, factor))
    ### END SOLUTION


# %% driver="refusal"
def refusal(*arguments):
    """The message of the ValueError that choose_shard_factor raises, None if it raises none."""
    try:
        choose_shard_factor(*arguments)
    except ValueError as error:
        return str(error)


# %% judge="expect_refusal"
def expect_refusal(*arguments):
    said = ask(refusal, *arguments)
    expect(
        said is not None,
        "a refusal",
        "no factor fits, and none may be returned: raise a ValueError",
    )
    expect(said.strip() and "\n" not in said, "a refusal", "say in one line what does not fit")


# %% check="choose_shard_factor-all" points=1
# The smallest factor that fits, inside a node where one does.
expect_equal(
    ask(choose_shard_factor, 7_500_000_000, 64, 8, 80_000_000_000),
    2,
    "smallest factor",
    "which factors divide the ranks, and which of them fit?",
)
expect_equal(
    ask(choose_shard_factor, 3_000_000_000, 24, 8, 16_000_000_000),
    4,
    "inside a node",
    "which groups straddle nodes?",
)
expect_equal(
    ask(choose_shard_factor, 3_000_000_000, 24, 8, 5_000_000_000),
    12,
    "across nodes",
    "nothing that stays inside a node fits",
)
expect_refusal(3_000_000_000, 24, 8, 1_000_000_000)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
numel = draw.integer(10**6, 10**9)
per_node, nodes = draw.choice([4, 8]), draw.choice([2, 4])
ranks = per_node * nodes
for power in range(int(math.log2(ranks)) + 1):
    factor = 2**power
    expect_equal(
        ask(choose_shard_factor, numel * ranks, ranks, per_node, 16 * numel * ranks // factor),
        factor,
        "smallest factor",
        "states that fill the limit to the last byte do fit; each factor that divides the ranks may be the right one",
    )
for per_node, nodes, straddling, inside in (
    (8, 3, 3, 4),
    (4, 3, 3, 4),
    (6, 4, 4, 6),
    (8, 9, 6, 8),
    (10, 3, 6, 10),
):
    expect_equal(
        ask(
            choose_shard_factor,
            numel * 360,
            per_node * nodes,
            per_node,
            16 * numel * 360 // straddling,
        ),
        inside,
        "inside a node",
        "a smaller factor fits, but its groups straddle nodes; a larger one stays inside, though",
    )
for per_node, nodes, wanted in ((8, 3, 12), (4, 3, 6), (6, 4, 8), (8, 9, 9), (10, 3, 15)):
    expect_equal(
        ask(
            choose_shard_factor, numel * 360, per_node * nodes, per_node, 16 * numel * 360 // wanted
        ),
        wanted,
        "across nodes",
        "nothing that stays inside a node fits; then the smallest of all that fit",
    )
per_node = draw.choice([2, 4, 8])
expect_equal(
    ask(choose_shard_factor, numel * 2 + 1, 8, per_node, 16 * numel + 8),
    4,
    "padding",
    "states that do not divide are padded: the rank with the padding must fit too",
)
expect_refusal(numel * 12 + 1, 12, 4, 16 * numel + 8)
expect_refusal(numel * 12, 12, 4, 16 * numel - 1)
### END HIDDEN TESTS
