# %% [markdown]
# # Exercises 09: long sequences (zig-zag, two rings, Ulysses, gathered keys)
#
# Six tasks, 10 points, about two and a half hours. Read chapter 09 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 09
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Three rules:
#
# - An answer cell stands alone. It may use the read-only cells that are not marked as being for the checks, and none of your other cells.
# - A function that runs on ranks gets its `group`: `group.rank()` says who you are, `group.size()` how many ranks there are.
# - Between ranks there is a network and nothing else: `collectives.send`, `collectives.receive`, and the collectives that a task names.
#
# n is the number of ranks. A sequence has T tokens, and each rank holds T/n of them, of every tensor: queries, keys, values. All masks are
# causal: a query at position i sees the keys at positions j ≤ i. Tasks 2, 3 and 5 use the zig-zag layout of task 1 (Dubey et al. 2024,
# Llama 3, arXiv:2407.21783, section 3.3.2). Task 2 is the ring of queries of Yang et al. 2024 (pass-Q, arXiv:2411.01783), task 3 Liu et al.
# 2023 (Ring Attention, arXiv:2310.01889, section 3), task 4 Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv:2309.14509, section 3), task 5
# Llama 3 again; task 6 adds Korthikanti et al. 2022 (arXiv:2205.05198) and Fang and Zhao 2024 (USP, arXiv:2405.07719).

# %% given="setup"
import math

import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.context import layout
from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes, numbers of ranks and values
NEAR = 1e-10  # rounding takes a right answer some 1e-14 away, and float32 on the way 1e-7


def places(rank, ranks, length):
    """The positions of a rank's tokens in the zig-zag layout."""
    return [place for held in layout.zigzag(rank, ranks, length) for place in held]


def masks_of(ranks, length):
    """masks[rank][owner], booleans [T/n, T/n]: which keys of the owner do the rank's queries see?"""
    held = [torch.tensor(places(rank, ranks, length)) for rank in range(ranks)]
    return [[keys <= queries.unsqueeze(-1) for keys in held] for queries in held]


# %% [markdown]
# ## 1. Who holds which tokens, and what they see (1 point)
#
# Late queries see many keys, early ones few. The zig-zag layout cuts T tokens into 2n pieces of equal length, and rank r holds two of them:
# piece r, the *early* one, and piece 2n-1-r, the *late* one. `positions` returns the positions of its tokens, early piece first. A T that is no
# multiple of 2n is refused with a `ValueError` of one line: the pieces would not be equal.
#
# > **API** Plain Python, no tensors and no network. `positions(rank, ranks, length)` returns a list of `int` or raises `ValueError`;
# > `tiles(rank, owner)` returns two lists of two of the words `"full"`, `"triangle"`, `"nothing"`.
#
# Now the queries of one rank meet the keys of another, its `owner`. There are four tiles, each early or late queries with early or late keys.
# Under the causal mask a tile is `"full"` (every query sees every key), a `"triangle"` (the diagonal goes through it), or `"nothing"`.
# `tiles` returns them as two rows of two: a row for the early queries and one for the late ones, and in each row first the early keys.
#
# n = 4, T = 16: rank 1 holds pieces 1 and 6, which is `[2, 3, 12, 13]`. With its own keys it has `[["triangle", "nothing"], ["full", "triangle"]]`.
# With the keys of rank 3 (pieces 3 and 4) its early queries, 2 and 3, see nothing, and its late ones see all: `[["nothing", "nothing"],
# ["full", "full"]]`.


# %% answer="zigzag"
def positions(rank, ranks, length):
    """The positions that this rank of `ranks` holds of `length` tokens: a list of length / ranks ints, ascending."""
    ### BEGIN SOLUTION
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens cannot be cut into {2 * ranks} equal pieces")
    piece = length // (2 * ranks)
    return [
        number * piece + token for number in (rank, 2 * ranks - 1 - rank) for token in range(piece)
    ]
    ### END SOLUTION


def tiles(rank, owner):
    """Queries of `rank` with keys of `owner` -> [[early with early, early with late], [late with early, late with late]]."""
    ### BEGIN SOLUTION
    if rank == owner:
        return [["triangle", "nothing"], ["full", "triangle"]]
    if rank > owner:
        return [["full", "nothing"], ["full", "nothing"]]
    return [["nothing", "nothing"], ["full", "full"]]
    ### END SOLUTION


# %% driver="positions"
def positions_of_all(ranks, length):
    """What every rank says, or the message of a refusal."""
    try:
        return [positions(rank, ranks, length) for rank in range(ranks)]
    except ValueError as error:
        return str(error)


# %% judge="expect_zigzag"
def expect_positions(ranks, length):
    """Ask for the positions of all ranks, and look at them property by property."""
    said = ask(positions_of_all, ranks, length)
    expect(not isinstance(said, str), "no refusal without need", "a ValueError, but 2n divides T")
    expect(
        all(type(place) is int for of_rank in said for place in of_rank),
        "whole numbers",
        "a list of ints is wanted for each rank",
    )
    expect(
        all(len(of_rank) * ranks == length for of_rank in said),
        "T/n tokens",
        "each rank holds as many tokens as the others",
    )
    expect(
        sorted(place for of_rank in said for place in of_rank) == list(range(length)),
        "every token once",
        f"on {ranks} ranks some position is held twice, or by nobody; which 2n pieces are there, and who holds the last one?",
    )
    expect(
        all(of_rank == sorted(of_rank) for of_rank in said),
        "ascending",
        "the early piece comes first, and each piece from its first token on",
    )
    expect_equal(
        said,
        [places(rank, ranks, length) for rank in range(ranks)],
        "an early and a late piece",
        f"each token is held once, but not by the right rank of {ranks}; whose early piece is the very first, and what is its late one?",
    )


def expect_refused_length(ranks, length):
    said = ask(positions_of_all, ranks, length)
    expect(
        isinstance(said, str),
        "a refusal",
        "this T cannot be cut into 2n equal pieces: raise a ValueError",
    )
    expect(said.strip() and "\n" not in said, "a refusal", "say in one line what does not divide")


def expect_tiles(ranks):
    """Ask for the tiles of all pairs, and compare with the mask of one process."""
    pairs = [(rank, owner) for rank in range(ranks) for owner in range(ranks)]
    masks = masks_of(ranks, 4 * ranks)
    for (rank, owner), held in zip(pairs, ask_each(tiles, pairs)):
        expect(
            isinstance(held, (list, tuple))
            and [len(row) for row in held if isinstance(row, (list, tuple))] == [2, 2],
            "two by two",
            "a row for the early queries, a row for the late ones, and in each first the early keys",
        )
        seen = [tile for row in masks[rank][owner].chunk(2) for tile in row.chunk(2, -1)]
        wanted = ["full" if t.all() else "triangle" if t.any() else "nothing" for t in seen]
        whose = (
            "own keys"
            if rank == owner
            else f"keys of a {'lower' if owner < rank else 'higher'} rank"
        )
        expect(
            [word for row in held for word in row] == wanted,
            whose,
            f"write down the four pieces of ranks {rank} and {owner} of {ranks}; which begins first, which query sees which key?",
        )


# %% check="zigzag-places" points=1
# Every rank holds an early and a late piece, a length that does not fit is refused, and each pair of ranks has its four tiles.
expect_positions(4, 16)
expect_positions(2, 12)
expect_refused_length(2, 14)
expect_tiles(2)
expect_tiles(4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, draw.integer(5, 9)):
    expect_positions(ranks, 2 * ranks * draw.integer(1, 9))
    expect_tiles(ranks)
expect_refused_length(3, 3 * draw.choice([1, 3, 5]))
expect_refused_length(4, 8 * draw.integer(1, 9) + draw.integer(1, 7))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A ring of queries (2 points)
#
# In the chapter the queries stay and keys go round. Here it is the other way: every rank keeps its K and V, and blocks of *queries* go from rank r
# to rank r+1, cyclically. At step s a rank has Q of rank r-s, its *owner*, and computes a pair (out, lse) for them with its own keys: the output
# as if there were no other keys, and the logarithm of the sum that it was divided by. The pair goes straight home to the owner, who merges all
# n pairs of its queries. This pays when there are few queries and many keys, as in a prompt that continues a long cached one.
#
# > **API** `attend(owner, q, k, v, group)` returns the pair of the owner's q with these k, v: out `[H, T/n, K]`, and lse `[H, T/n]`, -inf where
# > nothing is seen. `merge(out, lse, other_out, other_lse)` returns the pair of both sets of keys. `collectives.rotate(x, group, shift=1,
# > async_op=False)` sends x to rank r+shift and returns what rank r-shift sends; x is a tensor or a *tuple* of tensors (no list), and so is what
# > comes back. With `async_op=True` it returns a handle at once, and `handle.wait()` returns the tensors. `send(x, to, group)` and
# > `receive(like, source, group)` are there too.
#
# Why does something come from outside? `attend` asks for the mask when it begins, and when it has computed it asks for a weight that scales this
# block's share of the softmax; which weight it is given depends on its result. Both moments are written down among your messages, and that is how the grader
# sees what travels while you compute. (All weights 1 would be plain attention.) Call `attend` once for each owner, also where nothing is seen.
#
# - The result: (out, lse) of this rank's own queries with all keys.
# - The bytes: Q makes n-1 hops, each to the next rank, and n-1 pairs leave each rank, each to its owner. A pair goes home before the next
#   but one is computed: nobody collects pairs, or blocks of queries.
# - The overlap: while a block is attended to, it is already on its way to the next rank, the pair of the step before is on its way home, and what
#   comes meanwhile is waited for afterwards.
#
# Three ranks, seen from rank 0. Step 0: its own Q is on its way to rank 1 while it attends to it. Step 1: it attends to Q of rank 2 while this
# goes on to rank 1. Step 2: it attends to Q of rank 1, while its pair for rank 2 goes home and rank 1's pair for rank 0 arrives.


# %% given="attend"
def attend(owner, q, k, v, group):
    """The owner's q and this rank's k, v, each [H, T/n, K] -> out [H, T/n, K] and lse [H, T/n] with these keys alone."""
    mask = group.fetch(f"queries of {owner}", q.new_empty(q.size(-2), k.size(-2)))
    scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
    lse = scores.logsumexp(-1)
    out = (scores - finite(lse).unsqueeze(-1)).exp() @ v
    return out, lse + group.fetch(f"weight of {owner}, {digit(out)}", q.new_empty(()))


def merge(out, lse, other_out, other_lse):
    """The pairs of two sets of keys -> out and lse of their union."""
    total = torch.logaddexp(lse, other_lse)
    return sum(
        one * (its - finite(total)).exp().unsqueeze(-1)
        for one, its in ((out, lse), (other_out, other_lse))
    ), total


def finite(lse):
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def digit(x):
    """A number from 0 to 15, which only those know who have computed x."""
    return int(x.sum().abs() * 1000) % 16


# %% answer="query_ring"
def query_ring(q, k, v, group):
    """q, k, v of this rank's tokens, each [H, T/n, K] -> out [H, T/n, K] and lse [H, T/n] of its queries with all keys."""
    ### BEGIN SOLUTION
    rank, ranks, returning = group.rank(), group.size(), None
    for step in range(ranks):
        arriving = collectives.rotate(q, group, async_op=True) if step < ranks - 1 else None
        pair = attend((rank - step) % ranks, q, k, v, group)
        if returning:
            own = merge(*own, *returning.wait())
        if step == 0:
            own = pair
        else:
            returning = collectives.rotate(pair, group, -step, async_op=True)
        q = arriving.wait() if arriving else q
    return merge(*own, *returning.wait()) if returning else own
    ### END SOLUTION


# %% judge="rings"
def drawn_tokens(ranks, heads, piece, width):
    """q, k, v and dout of every rank, each a list of [H, T/n, K] with T/n = 2·piece, and masks[r][owner] [T/n, T/n]."""
    tensors = [[draw.real(heads, 2 * piece, width) for _ in range(ranks)] for _ in range(4)]
    masks = [
        [torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf) for seen in own]
        for own in masks_of(ranks, 2 * piece * ranks)
    ]
    return *tensors, masks


def one_process(qs, ks, vs, masks):
    """[(out, lse)] of each rank's queries, from all keys at once; masks[r][owner of the keys]."""
    pairs, k, v = [], torch.cat(ks, -2), torch.cat(vs, -2)
    for q, own in zip(qs, masks):
        scores = q @ k.mT / math.sqrt(q.size(-1)) + torch.cat(own, -1)
        pairs.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    return pairs


def sixteen(name, right, value):
    """What is handed over for each digit: the value for the right one, others for the others."""
    return {f"{name}, {d}": value if d == right else draw.real() for d in range(16)}


def query_ring_of(ranks, heads, piece, width):
    """Run the ring of queries on drawn tokens; result, bytes and who was spoken to. (outcome, bytes of Q, bytes of a pair)"""
    qs, ks, vs, _, masks = drawn_tokens(ranks, heads, piece, width)
    weights, secrets = (
        draw.real(ranks, ranks),
        [{} for _ in range(ranks)],
    )  # [of the queries, of the keys]
    for r, (k, v) in enumerate(zip(ks, vs)):
        for owner, q in enumerate(qs):
            scores = q @ k.mT / math.sqrt(width) + masks[owner][r]
            alone = scores.softmax(-1).nan_to_num() @ v
            secrets[r][f"queries of {owner}"] = masks[owner][r]
            secrets[r] |= sixteen(f"weight of {owner}", digit(alone), weights[owner, r])
    weighted = [[m + w for m, w in zip(own, row)] for own, row in zip(masks, weights)]
    rules = {"collectives": "rotate", "secrets": secrets}
    outcome = run_on_ranks(query_ring, list(zip(qs, ks, vs)), **rules)
    for rank, (said, true) in enumerate(zip(outcome.results, one_process(qs, ks, vs, weighted))):
        seen = f"(seen at rank {rank} of {ranks})"
        expect(isinstance(said, (list, tuple)) and len(said) == 2, "a pair", "return out and lse")
        hint = f"whose queries are here at step s, who owns the pair, and how much does each count in the merge? {seen}"
        expect_equal(said[0], true[0], "the output", hint, atol=NEAR)
        hint = f"the output is right; lse is the logarithm of the sum over all keys {seen}"
        expect_equal(said[1], true[1], "log-sum-exp", hint, atol=NEAR)
    block, pair = qs[0].nbytes, qs[0].nbytes + qs[0].nbytes // width
    expect(
        outcome.sent_bytes == [(ranks - 1) * (block + pair)] * ranks,
        "bytes on the wire",
        "n-1 hops of Q and n-1 pairs leave each rank; what is sent beyond that, or travels further than it must?",
    )
    expect_paths(outcome, block, pair)
    for rank in range(ranks):
        for step, ((sent, come), _) in enumerate(moments(outcome, rank, ranks)):
            known = min(ranks - 1, step + 1) * block + max(0, step - 1) * pair
            expect_one_at_a_time(come, step * block, known)
            hint = (
                "a pair was still here two steps after it had been computed; what does it wait for?"
            )
            expect(sent >= step * block + max(0, step - 2) * pair, "no pairs kept", hint)
    return outcome, block, pair


def expect_paths(outcome, block, pair):
    """Queries to the next rank, and one pair to each of the others."""
    ranks, way = len(outcome.results), {}
    for message in outcome.messages:
        path = message.source, message.destination
        way[path] = way.get(path, 0) + message.bytes
    for source in range(ranks):
        for to in set(range(ranks)) - {source}:
            hops = (ranks - 1) * block if to == (source + 1) % ranks else 0
            hint = "queries go to the next rank, and each pair straight to the owner of its queries; who got something else?"
            expect(way.get((source, to), 0) == hops + pair, "who gets what", hint)


def moments(outcome, rank, ranks):
    """For each call of a rank, in the order of the ring: (sent, come), bytes, when it began and when it had computed."""
    sent, come, began, done = 0, 0, [], []
    for event in outcome.events:
        if event.rank == rank and event.kind == "send":
            sent += event.bytes
        elif event.rank == rank and event.kind == "receive":
            come += event.bytes
        elif event.rank == rank and event.kind == "fetch":
            owner = int(event.name.partition(" of ")[2].split(",")[0])
            (done if "," in event.name else began).append((owner, (sent, come)))
    in_turn = [(rank - step) % ranks for step in range(ranks)]
    hint = "call the read-only function once for every owner, in the order in which the blocks come"
    for found in (began, done):
        expect([owner for owner, _ in found] == in_turn, "each block once", hint)
    return [(before, after) for (_, before), (_, after) in zip(began, done)]


def expect_one_at_a_time(come, least, most):
    expect(
        least <= come <= most,
        "one block at a time",
        "a block was attended to before it had come, or when later ones were here too; who keeps them until then?",
    )


def expect_next_only(outcome):
    ranks = len(outcome.results)
    expect(
        all(message.destination == (message.source + 1) % ranks for message in outcome.messages),
        "next rank only",
        "in this ring everything goes to the next rank; who else was spoken to?",
    )


# %% check="query_ring-result" points=1
# Output and log-sum-exp with all keys, from n-1 hops of the queries and n-1 pairs that go straight home.
query_ring_of(2, 1, 1, 2)
query_ring_of(3, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 4, 5):
    query_ring_of(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS


# %% check="query_ring-overlap" points=1
# While a block is attended to, it is on its way to the next rank, the pair before it on its way home, and nothing is waited for.
def expect_overlap(ranks, heads, piece, width):
    outcome, block, pair = query_ring_of(ranks, heads, piece, width)
    for rank in range(ranks):
        for step, ((sent, _), (_, come)) in enumerate(moments(outcome, rank, ranks)):
            blocks, pairs = min(ranks - 1, step + 1), max(0, step - 1)
            expect(
                sent >= blocks * block + max(0, step - 2) * pair,
                "sent while computing",
                "a block was attended to that the next rank still waits for; does sending it need the result?",
            )
            expect(
                sent >= blocks * block + pairs * pair,
                "one step behind",
                "the pair of the step before was complete, and still here when the next block was attended to; what hides its way home?",
            )
            expect(
                come <= step * block + max(0, step - 2) * pair,
                "computing while it comes",
                "something was waited for before this block had been computed, and it was not needed for it; what could this rank do until it is here?",
            )


expect_overlap(4, 2, 1, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3):
    expect_overlap(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The ring, backward: gradients that travel (2 points)
#
# Now queries stay, and K and V go round as in the chapter: from rank r to rank r+1, cyclically, so that at step s a rank has K and V of
# rank r-s, their *owner*. With the final out and lse of its queries, a rank can compute for any block of keys its share of three gradients:
#
#     dq          the queries are here: the shares of all blocks are added up, and stay
#     dk, dv      the keys belong to their owner: every rank has a share in them, and the sum must come home
#
# So K, V of owner o make n-1 hops, and the sum of dK, dV travels one step behind them: it begins on rank o+1, when that rank has
# computed its share, goes to o+2, o+3, .. and each adds its own. From rank o-1 it takes one last hop, home. The owner's own share never
# travels; it is added at the end. That makes n-1 hops for K, V and n-1 for dK, dV.
#
# > **API** `attend_backward(owner, dout, q, k, v, out, lse, group)` returns this rank's shares (dq, dk, dv), each `[H, T/n, K]`, for the owner's
# > k and v. Call it once for each owner. `collectives.rotate(x, group, shift=1, async_op=False)` takes a tensor or a *tuple* of tensors (no
# > list), sends it to rank r+shift and returns what rank r-shift sends, as a tensor or a tuple; with `async_op=True` it returns a handle, and
# > `handle.wait()` returns the tensors.
#
# As in task 2, the mask comes from outside when `attend_backward` begins, and when it has computed comes a factor, by which the three shares
# are multiplied; which one depends on the result. So the grader sees when you compute. (All factors 1 would be the plain gradients.) Graded:
#
# - the gradients, with n-1 blocks and n-1 sums that leave each rank, all to the next one. Who collects blocks, or keeps shares for later, needs n times
#   the memory;
# - the overlap: while a block is attended to, it is on its way on, and so is the sum that this rank completed in the step before. What comes
#   meanwhile, the next block and the sum for this one, is waited for afterwards.
#
# Three ranks, the block of rank 0. Step 0: rank 0 keeps its share, K, V are on their way to rank 1. Step 1: rank 1 computes its share, K, V go on to
# rank 2. Step 2: rank 2 computes its share, meanwhile rank 1's share arrives; the two are added. Then they go home: rank 0 has all three.


# %% given="attend_backward"
def attend_backward(owner, dout, q, k, v, out, lse, group):
    """The owner's k, v; dout, q and the final out, lse of this rank -> its shares of dq, dk, dv, each [H, T/n, K]."""
    mask = group.fetch(f"keys of {owner}", q.new_empty(q.size(-2), k.size(-2)))
    p = (q @ k.mT / math.sqrt(q.size(-1)) + mask - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    dk = ds.mT @ q
    factor = group.fetch(f"factor of {owner}, {digit(dk)}", q.new_empty(()))
    return factor * (ds @ k), factor * dk, factor * (p.mT @ dout)


# %% answer="ring_backward"
def ring_backward(dout, q, k, v, out, lse, group):
    """Everything of this rank's tokens, lse [H, T/n], the others [H, T/n, K] -> (dq, dk, dv) of this rank's tokens."""
    ### BEGIN SOLUTION
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
    return dq, dk, dv
    ### END SOLUTION


# %% judge="rings_back"
def shares_of(q, ks, vs, masks, dout):
    """[(dq, dk, dv)] of one rank's queries, for each block of keys: autograd, with a leaf for each block."""
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for k, v in zip(ks, vs)]
    scores = [q @ k.mT / math.sqrt(q.size(-1)) + mask for (q, k, _), mask in zip(leaves, masks)]
    out = torch.cat(scores, -1).softmax(-1) @ torch.cat([v for *_, v in leaves], -2)
    out.backward(dout)
    return [[x.grad for x in of_block] for of_block in leaves]


def ring_back_of(ranks, heads, piece, width):
    """Run backward on drawn tokens: the gradients, and n-1 blocks and n-1 sums that travelled. (the outcome, bytes of K and V)"""
    qs, ks, vs, douts, masks = drawn_tokens(ranks, heads, piece, width)
    pairs, factors = one_process(qs, ks, vs, masks), draw.real(ranks, ranks)
    secrets, wanted = [{} for _ in range(ranks)], [[0.0, 0.0, 0.0] for _ in range(ranks)]
    for r, (q, dout) in enumerate(zip(qs, douts)):
        shares = shares_of(q, ks, vs, masks[r], dout)
        for owner, share in enumerate(shares):
            secrets[r][f"keys of {owner}"] = masks[r][owner]
            secrets[r] |= sixteen(f"factor of {owner}", digit(share[1]), factors[r, owner])
            for to, which in ((r, 0), (owner, 1), (owner, 2)):
                wanted[to][which] = wanted[to][which] + factors[r, owner] * share[which]
    given = [(dout, q, k, v, *pair) for dout, q, k, v, pair in zip(douts, qs, ks, vs, pairs)]
    rules = {"collectives": "rotate", "secrets": secrets}
    outcome = run_on_ranks(ring_backward, given, **rules)
    for rank, said in enumerate(outcome.results):
        seen = f"(seen at rank {rank} of {ranks})"
        three = isinstance(said, (list, tuple)) and len(said) == 3
        expect(three, "three gradients", "return dq, dk and dv")
        home = "your keys were on every rank: whose shares are missing, doubled, or those of another rank's keys?"
        away = "the queries stay here; whose keys do they meet at step s, and are the shares of all blocks added?"
        for name, gradient, true, hint in zip(
            ("dq", "dk", "dv"), said, wanted[rank], (away, home, home)
        ):
            expect_equal(gradient, true, name, f"{hint} {seen}", atol=NEAR)
    block = ks[0].nbytes + vs[0].nbytes
    expect(
        outcome.sent_bytes == [2 * (ranks - 1) * block] * ranks,
        "bytes on the wire",
        "n-1 hops for K, V, and n-1 for the sum of dK, dV; what makes one hop more, or travels for nothing?",
    )
    expect_next_only(outcome)
    for rank in range(ranks):
        for step, ((sent, come), _) in enumerate(moments(outcome, rank, ranks)):
            blocks, sums = min(ranks - 1, step + 1), max(0, step - 1)
            expect_one_at_a_time(come, step * block, (blocks + sums) * block)
            expect(
                sent >= (step + max(0, step - 2)) * block,
                "no shares kept",
                "a sum was still here two steps after this rank had added its share; who waits for it, and what does it wait for?",
            )
    return outcome, block


# %% check="ring_backward-gradients" points=1
# The gradients of this rank's queries, keys and values, from blocks and sums that go round.
ring_back_of(2, 1, 1, 2)
ring_back_of(4, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, 4, 5):
    ring_back_of(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS


# %% check="ring_backward-overlap" points=1
# Blocks and sums are on their way while the next share is computed.
def expect_overlap_back(ranks, heads, piece, width):
    outcome, block = ring_back_of(ranks, heads, piece, width)
    for rank in range(ranks):
        for step, ((sent, _), (_, come)) in enumerate(moments(outcome, rank, ranks)):
            blocks, sums = min(ranks - 1, step + 1), max(0, step - 1)
            expect(
                sent >= blocks * block,
                "sent while computing",
                "a block was attended to that the next rank still waits for; does sending it need the result?",
            )
            expect(
                sent >= (blocks + sums) * block,
                "one step behind",
                "the sum of the step before was complete, and still here when the next share was computed; what hides its hop?",
            )
            expect(
                come <= (step + max(0, step - 2)) * block,
                "computing while it comes",
                "the next block, or the sum that this share joins, was waited for before the share was computed; which of the two needs which?",
            )


expect_overlap_back(4, 2, 1, 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3):
    expect_overlap_back(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Ulysses: heads for tokens, and back (2 points)
#
# Attention of one head knows nothing of other heads. So before it every rank gives away heads and gets tokens, and afterwards the other way round.
# Here tokens come first in the shapes, as in Megatron-LM and DeepSpeed, and they are *striped*: rank r holds positions r, r+n, r+2n, ..
#
#     here          q [T/n, B, H, K]    k, v [T/n, B, H_kv, K]      all heads of this rank's tokens
#     all-to-all    q [T, B, H/n, K]    k, v [T, B, H_kv/n, K]      all tokens of this rank's heads, in the order of the sequence
#     core          o [T, B, H/n, K]
#     all-to-all    o [T/n, B, H, K]
#
# Rank r gets heads r·H/n to (r+1)·H/n - 1, and K/V heads likewise; as query head i uses K/V head i·H_kv // H, each rank then has the K/V heads
# that its queries use. The read-only `core` is an attention of one device that needs its tokens in order. (This one has no softmax.)
#
# > **API** `core(q, k, v)` takes `[T, B, H', K]` and twice `[T, B, H_kv', K]` and returns `[T, B, H', K]`.
# > `collectives.all_to_all(x, group)` cuts dim 0 of one tensor into n equal pieces, sends piece j to rank j, and returns what
# > arrives, of x's shape, piece j from rank j. Heads that n does not divide raise `ValueError`.
#
# Of every tensor a rank keeps 1/n and sends the rest, each piece to the one rank that needs it: (n-1)/n·(2H + 2H_kv)·B·T/n·K elements in all, or
# 4Nh/P in the papers' words. A message costs latency, however small it is, so q, k and v travel in *one* exchange and o in another: a rank
# sends each other rank two messages. Heads that n does not divide, of q or of k and v, are refused with a `ValueError` of one line before
# anything is sent.
#
# Two ranks, H = H_kv = 2, two tokens, B = K = 1. Rank 0 holds token 0 with heads `[1, 2]` of q, rank 1 token 1 with heads `[3, 4]`. In the core
# rank 0 has head 0 of both tokens, `[1, 3]`, and rank 1 head 1, `[2, 4]`.


# %% given="core"
def core(q, k, v):
    """q [T, B, H', K], k, v [T, B, H_kv', K] -> [T, B, H', K]: causal, and linear: scores are not exponentiated."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    return ((q @ k.mT).tril() @ v).permute(2, 0, 1, 3)


# %% answer="ulysses"
def ulysses(q, k, v, group):
    """q [T/n, B, H, K], k, v [T/n, B, H_kv, K], striped -> [T/n, B, H, K]; core sees all tokens of this rank's heads."""
    ### BEGIN SOLUTION
    ranks = group.size()
    for heads in (q.size(2), k.size(2)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")
    parts = [x.unflatten(2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]  # n × [T/n, B, heads, K]
    came = collectives.all_to_all(torch.cat(parts, 3), group)
    whole = came.transpose(0, 1).flatten(0, 1)  # token t of rank j stands at position t·n + j
    out = core(*whole.split([part.size(3) for part in parts], 2))
    home = collectives.all_to_all(out.unflatten(0, (-1, ranks)).transpose(0, 1), group)
    return home.movedim(0, 2).flatten(2, 3)
    ### END SOLUTION


# %% driver="ulysses_or_refusal"
def ulysses_or_refusal(q, k, v, group):
    try:
        return ulysses(q, k, v, group)
    except ValueError as error:
        return {"refused": str(error)}


# %% judge="expect_ulysses"
def ulysses_of(ranks, batch, heads, kv_heads, tokens, width):
    """Run the answer with so many tokens on each rank. Returns (the outcome, what one process computes, striped)."""
    q, k, v = (draw.real(ranks * tokens, batch, h, width) for h in (heads, kv_heads, kv_heads))
    cut = [[x[rank::ranks].contiguous() for rank in range(ranks)] for x in (q, k, v, core(q, k, v))]
    given = list(zip(*cut[:3]))
    return run_on_ranks(ulysses_or_refusal, given, collectives="all_to_all"), cut[3]


def expect_ulysses(ranks, batch, heads, kv_heads, tokens, width):
    outcome, wanted = ulysses_of(ranks, batch, heads, kv_heads, tokens, width)
    expect(
        not any(isinstance(said, dict) for said in outcome.results),
        "no refusal without need",
        "a ValueError, but n divides the heads",
    )
    expect_equal(
        outcome.results,
        wanted,
        "the output",
        f"who had these tokens, who had these heads, and in which order did the {ranks} pieces lie when they came?",
        atol=NEAR,
    )
    piece = (2 * heads + 2 * kv_heads) // ranks * batch * tokens * width * 8
    pairs = {(one, other): [] for one in range(ranks) for other in range(ranks) if one != other}
    for message in outcome.messages:
        pairs[message.source, message.destination].append(message.bytes)
    expect(
        all(sum(sizes) == piece for sizes in pairs.values()),
        "bytes on the wire",
        "of q, k, v and o every number is needed by one rank; who gets it beside that one, or are heads copied before they travel?",
    )
    expect(
        all(len(sizes) == 2 for sizes in pairs.values()),
        "two messages",
        "q, k and v have the same way at the same time; how do they share one message, though their heads differ in number?",
    )


def expect_refused_heads(ranks, heads, kv_heads):
    outcome, _ = ulysses_of(ranks, 1, heads, kv_heads, 2, 3)
    expect(
        all(isinstance(said, dict) for said in outcome.results),
        "a refusal",
        f"{heads} heads and {kv_heads} K/V heads do not divide over {ranks} ranks: raise a ValueError, on all of them",
    )
    expect(
        all(said["refused"].strip() and "\n" not in said["refused"] for said in outcome.results),
        "a refusal",
        "say in one line what does not divide",
    )
    expect(
        not outcome.messages,
        "refused before sending",
        "something was sent before the heads were looked at; k and v have heads too",
    )


# %% check="ulysses-output" points=1
# Every rank has the output of its tokens, all heads, from two messages to each other rank.
expect_ulysses(2, 1, 2, 2, 1, 1)
expect_ulysses(2, 2, 4, 4, 3, 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, 4):
    heads = ranks * draw.integer(1, 2)
    sizes = draw.integer(2, 4), draw.integer(2, 4)
    expect_ulysses(ranks, draw.integer(1, 3), heads, heads, *sizes)
### END HIDDEN TESTS

# %% check="ulysses-heads" points=1
# The same with fewer K/V heads, and heads that do not divide are refused before anything is sent.
expect_ulysses(2, 1, 4, 2, 3, 2)
expect_refused_heads(2, 3, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 3, 4):
    kv_heads = ranks * draw.integer(1, 2)
    sizes = draw.integer(2, 4), draw.integer(2, 4)
    expect_ulysses(ranks, draw.integer(1, 2), kv_heads * draw.integer(2, 3), kv_heads, *sizes)
expect_refused_heads(4, 2, draw.choice([1, 2]))
expect_refused_heads(4, 8, draw.choice([1, 2]))
expect_refused_heads(3, draw.choice([4, 8]), 4)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. All keys at once: gathered K and V, and the adjoint (2 points)
#
# Llama 3 does without a ring. Forward gathers K and V of all ranks and attends with its own queries. The adjoint of an all-gather is a
# reduce-scatter: every rank has a share in the gradients of *all* keys, and each owner needs the sum for its own. Tokens are zig-zag: rank r
# holds piece r and piece 2n-1-r of 2n equal pieces. The gathered keys lie in the order of the ranks, so a mask from 0, 1, 2, .. is wrong:
# build it from the positions of the keys and of the queries.
#
# > **API** `attend_where(q, k, v, seen)`: q `[H, T/n, K]`, k, v `[H_kv, T, K]` with the few heads that there are, seen `[T/n, T]` booleans (True: this
# > query sees this key) -> out `[H, T/n, K]`, lse `[H, T/n]`. `attend_where_backward(dout, q, k, v, out, lse, seen)` -> dq, dk, dv in the
# > shapes of q, k, v. `collectives.all_gather(x, group)`: `[d, ..]` of each rank -> `[n·d, ..]` in rank order, along dim 0.
# > `collectives.reduce_scatter(x, group)`: `[n·d, ..]` -> this rank's `[d, ..]` of the sum. Both return tensors.
#
# Backward gets what the ranks keep, their own tokens, and gathers K and V once more: if every layer kept K and V of all tokens until
# backward, much of the memory that context parallelism saves would be spent again. Graded:
#
# - forward: the result; each rank sends (n-1)·(K, V of its own tokens);
# - backward: the three gradients; twice that, K, V once more and the shares of dK, dV;
# - live memory, both ways: K and V of all tokens with their H_kv heads, and in backward their gradients. There is no room for a copy for every
#   query head, nor for the shares of all ranks at once.
#
# n = 2, T = 4: rank 0 holds positions 0 and 3, rank 1 holds 1 and 2. The gathered keys stand as 0, 3, 1, 2, so rank 1's `seen` is
# `[[True, False, True, False], [True, False, True, True]]`.


# %% given="attend_where"
def attend_where(q, k, v, seen):
    """q [H, T/n, K], k, v [H_kv, T, K], seen [T/n, T] -> out [H, T/n, K], lse [H, T/n]."""
    own = q.unflatten(0, (k.size(0), -1))  # [H_kv, H/H_kv, T/n, K]
    scores = (own @ k.mT.unsqueeze(1) / math.sqrt(q.size(-1))).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v.unsqueeze(1)).flatten(0, 1), scores.logsumexp(-1).flatten(0, 1)


def attend_where_backward(dout, q, k, v, out, lse, seen):
    """dout and out like q, lse [H, T/n] -> dq [H, T/n, K] and dk, dv [H_kv, T, K]: this rank's shares for all keys."""
    heads, scale = (k.size(0), -1), math.sqrt(q.size(-1))
    rows, own, grads = (
        (out * dout).sum(-1, keepdim=True),
        q.unflatten(0, heads),
        dout.unflatten(0, heads),
    )
    scores = (own @ k.mT.unsqueeze(1) / scale).masked_fill(~seen, -math.inf)
    p = (scores - lse.unsqueeze(-1).unflatten(0, heads)).exp()
    ds = p * (grads @ v.mT.unsqueeze(1) - rows.unflatten(0, heads)) / scale
    flat = (ds.flatten(1, 2).mT @ own.flatten(1, 2), p.flatten(1, 2).mT @ grads.flatten(1, 2))
    return (ds @ k.unsqueeze(1)).flatten(0, 1), *flat


# %% answer="gathered"
def gathered_forward(q, k, v, group):
    """q [H, T/n, K], k, v [H_kv, T/n, K] of this rank's tokens -> out [H, T/n, K], lse [H, T/n]."""
    ### BEGIN SOLUTION
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)  # [n, T/n]
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group)  # [T, H_kv, 2K]
    return attend_where(q, *both.transpose(0, 1).chunk(2, -1), seen)
    ### END SOLUTION


def gathered_backward(dout, q, k, v, out, lse, group):
    """Everything of this rank's tokens, lse [H, T/n], k and v [H_kv, T/n, K], the others [H, T/n, K] -> dq, dk, dv of its tokens."""
    ### BEGIN SOLUTION
    rank, ranks, piece = group.rank(), group.size(), q.size(1) // 2
    starts = torch.tensor([[r * piece, (2 * ranks - 1 - r) * piece] for r in range(ranks)])
    places = (starts.unsqueeze(-1) + torch.arange(piece)).flatten(1)
    seen = places.flatten() <= places[rank].unsqueeze(-1)
    both = collectives.all_gather(torch.cat((k, v), -1).transpose(0, 1), group).transpose(0, 1)
    dq, dk, dv = attend_where_backward(dout, q, *both.chunk(2, -1), out, lse, seen)
    del both
    shares = torch.cat((dk, dv), -1).transpose(0, 1)  # [T, H_kv, 2K]
    del dk, dv
    own = collectives.reduce_scatter(shares, group).transpose(0, 1)
    return dq, *own.chunk(2, -1)
    ### END SOLUTION


# %% driver="there_and_back"
def there_and_back(q, k, v, group):
    """Forward, then dout is asked for, then backward: what is sent before and after can be told apart."""
    out, lse = gathered_forward(q, k, v, group)
    dout = group.fetch("dout", torch.empty_like(q))
    return out, lse, *gathered_backward(dout, q, k, v, out, lse, group)


# %% judge="expect_gathered"
def gathered_tokens(ranks, heads, kv_heads, piece, width):
    """q, k, v, dout [heads, T, K] in the order of the sequence, and a function that cuts one for the ranks."""
    length = 2 * piece * ranks
    q, k, v, dout = (draw.real(h, length, width) for h in (heads, kv_heads, kv_heads, heads))
    return (q, k, v, dout), lambda x: [x[:, places(r, ranks, length)] for r in range(ranks)]


def whole_attention(q, k, v):
    """One process: causal attention of all tokens -> out, lse."""
    k, v = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    later = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def expect_results(outcome, names, wanted):
    for rank, said in enumerate(outcome.results):
        right = isinstance(said, (list, tuple)) and len(said) == len(names)
        expect(right, "what is returned", f"return {', '.join(names)}")
        for name, tensor, true in zip(names, said, wanted):
            hint = f"which positions do the gathered keys have, and whose shares does this rank return? (rank {rank} of {len(outcome.results)})"
            expect_equal(tensor, true[rank], name, hint, atol=NEAR)


def expect_gathered_forward(ranks, heads, kv_heads, piece, width, **rules):
    (q, k, v, _), cut = gathered_tokens(ranks, heads, kv_heads, piece, width)
    given = list(zip(cut(q), cut(k), cut(v)))
    outcome = run_on_ranks(
        gathered_forward, given, collectives="all_gather reduce_scatter", **rules
    )
    expect_results(outcome, ("out", "lse"), [cut(x) for x in whole_attention(q, k, v)])
    expect(
        outcome.sent_bytes == [(ranks - 1) * 2 * given[0][1].nbytes] * ranks,
        "bytes forward",
        "each rank sends its own K and V to the others, with the heads that there are; what else was sent?",
    )


def expect_gathered_backward(ranks, heads, kv_heads, piece, width, **rules):
    (*leaves, dout), cut = gathered_tokens(ranks, heads, kv_heads, piece, width)
    pair = whole_attention(*(x.requires_grad_() for x in leaves))
    pair[0].backward(dout)
    wanted = [cut(x.detach()) for x in pair] + [cut(x.grad) for x in leaves]
    given = list(zip(*(cut(x.detach()) for x in leaves)))
    secrets = [{"dout": x.contiguous()} for x in cut(dout)]
    rules |= {"collectives": "all_gather reduce_scatter", "secrets": secrets}
    outcome = run_on_ranks(there_and_back, given, **rules)
    expect_results(outcome, ("out", "lse", "dq", "dk", "dv"), wanted)
    sent, block = [[0, 0] for _ in range(ranks)], (ranks - 1) * 2 * given[0][1].nbytes
    asked = [False] * ranks
    for event in outcome.events:
        asked[event.rank] |= event.kind == "fetch"
        sent[event.rank][asked[event.rank]] += event.bytes if event.kind == "send" else 0
    expect(
        all(there == block for there, _ in sent),
        "bytes forward",
        "n-1 times its own K and V; what else was sent?",
    )
    expect(
        all(back == 2 * block for _, back in sent),
        "bytes backward",
        "K and V once more, and to each owner one sum for its keys; what was sent beyond that, or kept from forward?",
    )


WIDE = 3, 4, 1, 64, 4096  # K, V of all tokens: 25 MB, and a copy for every query head: 101 MB


# %% check="gathered-forward" points=1
# Output and log-sum-exp of zig-zag tokens, from one gather of K and V, which is all that there is room for.
expect_gathered_forward(2, 2, 2, 1, 2)
expect_gathered_forward(3, 4, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, draw.choice([4, 5])):
    kv_heads = draw.integer(1, 3)
    expect_gathered_forward(
        ranks, kv_heads * draw.integer(2, 3), kv_heads, draw.integer(1, 4), draw.integer(2, 5)
    )
expect_gathered_forward(*WIDE, budget_bytes=112 << 20)
### END HIDDEN TESTS

# %% check="gathered-gradients" points=1
# All three gradients, from K and V gathered again and one sum for each owner.
expect_gathered_backward(2, 2, 2, 1, 2)
expect_gathered_backward(3, 4, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, draw.choice([4, 5])):
    kv_heads = draw.integer(1, 3)
    expect_gathered_backward(
        ranks, kv_heads * draw.integer(2, 3), kv_heads, draw.integer(1, 4), draw.integer(2, 5)
    )
expect_gathered_backward(*WIDE, budget_bytes=244 << 20)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. What a layer sends (1 point)
#
# One layer of a Transformer, N tokens (all sequences of the batch together), heads of width K: H of them, so h = H·K, and H_kv of keys and values.
# P = u·r ranks share the N tokens. What does each rank send, in forward and in backward?
#
#     "ring"       K and V go round all P ranks; backward as in task 3
#     "ulysses"    the all-to-alls over all P: task 4. Backward sends what forward does: the adjoint of an all-to-all is an all-to-all
#     "megatron"   sequence parallelism over all P: all-gather of [N, h] before attention and MLP, reduce-scatter behind each; what was gathered is
#                  kept. Each of them has the other as its backward
#     "hybrid"     Ulysses over u ranks, and in its core a ring over r: after the all-to-all a rank has N/r tokens of H/u heads
#
# > **API** A pure function, no tensors and no network: `elements_sent(way, tokens, heads, kv_heads, width, u, r)`, a word and six `int`s,
# > returns `{"forward": int, "backward": int}` or raises `ValueError`.
#
# On a ring an all-gather into S elements and a reduce-scatter out of S send (P-1)/P·S from each rank. Whole numbers, exact for any size; P divides N.
# Where Ulysses has heads to deal that do not divide, H or H_kv, over P or over u, raise a `ValueError` of one line; the others do not mind.
#
# N = 16, H = H_kv = 4, K = 2 on u·r = 2·2 ranks: the ring sends 192 elements forward and 384 backward, Ulysses 96 and 96, Megatron 384 and 384, the
# hybrid 128 and 192.


# %% answer="elements_sent"
def elements_sent(way, tokens, heads, kv_heads, width, u, r):
    """{"forward": ..., "backward": ...}: elements each rank sends, as ints; way is one of the four words."""
    ### BEGIN SOLUTION
    ranks = u * r
    if way == "megatron":
        sent = 4 * (ranks - 1) * (tokens // ranks) * heads * width
        return {"forward": sent, "backward": sent}
    deal, turn = {"ring": (1, ranks), "ulysses": (ranks, 1), "hybrid": (u, r)}[way]
    if heads % deal or kv_heads % deal:
        raise ValueError(f"{heads} heads and {kv_heads} K/V heads cannot be dealt to {deal} ranks")
    exchanged = (deal - 1) * (2 * heads + 2 * kv_heads) // deal * (tokens // ranks) * width
    block = 2 * (tokens // ranks) * kv_heads * width  # u times as many tokens, u times fewer heads
    return {
        "forward": exchanged + (turn - 1) * block,
        "backward": exchanged + 2 * (turn - 1) * block,
    }
    ### END SOLUTION


# %% driver="elements_or_refusal"
def elements_or_refusal(*sizes):
    try:
        return elements_sent(*sizes)
    except ValueError as error:
        return str(error)


# %% judge="expect_elements"
WAYS = "ring", "ulysses", "megatron", "hybrid"


def expect_elements(sizes, wanted):
    """Ask for the elements of each way, where `wanted` has (forward, backward), or None for a refusal."""
    for way, said in zip(WAYS, ask_each(elements_or_refusal, [(way, *sizes) for way in WAYS])):
        if wanted[way] is None:
            expect(
                isinstance(said, str),
                f"a refusal, {way}",
                "there are heads that do not divide; over how many ranks does this way deal them?",
            )
            expect(
                said.strip() and "\n" not in said,
                f"a refusal, {way}",
                "say in one line what does not divide",
            )
            continue
        expect(
            not isinstance(said, str),
            f"no refusal without need, {way}",
            "a ValueError; does this way deal heads, and over how many ranks?",
        )
        expect(
            isinstance(said, dict)
            and set(said) == {"forward", "backward"}
            and all(type(n) is int for n in said.values()),
            "whole numbers",
            'return {"forward": ..., "backward": ...}, two ints, also where they are large',
        )
        forward, backward = wanted[way]
        expect(
            said["forward"] == forward,
            f"forward, {way}",
            "what is one piece or block, of which heads and how many tokens, and how often does a rank send one?",
        )
        expect(
            said["backward"] == backward,
            f"backward, {way}",
            "what goes round or across a second time, and do gradients travel too?",
        )


# %% check="elements_sent-all" points=1
# Forward and backward of all four ways, and a refusal where heads do not divide.
expect_elements(
    (16, 4, 4, 2, 2, 2),
    {"ring": (192, 384), "ulysses": (96, 96), "megatron": (384, 384), "hybrid": (128, 192)},
)
expect_elements(
    (16, 4, 2, 2, 2, 2),
    {"ring": (96, 192), "ulysses": None, "megatron": (384, 384), "hybrid": (80, 112)},
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for u, r, kv_heads, group_size in (
    (3, 1, 3, draw.integer(1, 4)),
    (1, 3, 5, 2),
    (2, 4, 8, draw.integer(1, 4)),
    (4, 2, 4, 2),
    (8, 1, 4, 4),
    (1, 1, 7, 1),
    (5, 7, 35 * draw.integer(10**4, 10**6), 10**4 + 1),
):
    p, own, width = u * r, draw.integer(1, 10**5), draw.integer(3, 999)
    q, kv = (
        own * kv_heads * group_size * width,
        own * kv_heads * width,
    )  # elements of a rank's queries, and of its keys
    dealt = {n: None if kv_heads % n else 2 * (q + kv) - 2 * (q + kv) // n for n in (u, p)}
    expect_elements(
        (p * own, kv_heads * group_size, kv_heads, width, u, r),
        {
            "ring": (2 * (p - 1) * kv, 4 * (p - 1) * kv),
            "megatron": (4 * (p - 1) * q, 4 * (p - 1) * q),
            "ulysses": None if dealt[p] is None else (dealt[p], dealt[p]),
            "hybrid": None
            if dealt[u] is None
            else (dealt[u] + 2 * (r - 1) * kv, dealt[u] + 4 * (r - 1) * kv),
        },
    )
### END HIDDEN TESTS
