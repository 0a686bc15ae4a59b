# %% [markdown]
# # Exercises 09: long sequences (zig-zag, ring attention, Ulysses)
#
# Five tasks, 10 points, about two hours. Read chapter 09 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 09
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group`: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else: `collectives.send`, `collectives.receive`, and the collective that a task names.
#
# n is the number of ranks. A sequence has T tokens, each rank holds T/n of them, of every tensor: queries, keys, values. All masks are causal: a
# query at position i sees the keys at positions j ≤ i. Tasks 2 and 3 are Liu et al. 2023 (Ring Attention, arXiv:2310.01889, section 3) in the
# zig-zag layout of task 1 (Dubey et al. 2024, Llama 3, arXiv:2407.21783, section 3.3.2), task 4 is Jacobs et al. 2023 (DeepSpeed-Ulysses,
# arXiv:2309.14509, section 3), task 5 adds Korthikanti et al. 2022 (arXiv:2205.05198) and Fang and Zhao 2024 (USP, arXiv:2405.07719).

# %% given="setup"
import math

import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.context import layout
from minitrain.course.grading.checks import Draw, ask, ask_each, expect, expect_equal, run_on_ranks

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
# ## 1. Who holds which tokens, and what they see (2 points)
#
# Late queries see many keys, early ones few. The zig-zag layout cuts T tokens into 2n pieces of equal length, and rank r holds two of them:
# piece r, the *early* one, and piece 2n-1-r, the *late* one. `positions` returns the positions of its tokens, early piece first. A T that is no
# multiple of 2n is refused with a `ValueError` of one line: nobody's mask would be a triangle any more.
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


# %% check="zigzag-positions" points=1
# Every rank holds an early and a late piece, and a length that does not fit is refused.
expect_positions(4, 16)
expect_positions(2, 12)
expect_refused_length(2, 14)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, draw.integer(5, 9)):
    expect_positions(ranks, 2 * ranks * draw.integer(1, 9))
expect_refused_length(3, 3 * draw.choice([1, 3, 5]))
expect_refused_length(4, 8 * draw.integer(1, 9) + draw.integer(1, 7))
### END HIDDEN TESTS

# %% check="zigzag-tiles" points=1
# Full, triangle or nothing, for every pair of ranks.
expect_tiles(2)
expect_tiles(4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, draw.integer(5, 8)):
    expect_tiles(ranks)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The ring, forward (3 points)
#
# Every rank keeps its queries, and blocks of keys and values go round: from rank r to rank r+1, cyclically. At step s a rank has K and V of
# rank r-s; after n steps its queries have met all keys. What it knows by then is a pair (out, lse) for each query: the output as if there were no
# other keys, and the logarithm of the sum that it was divided by.
#
# Two functions are read-only. `attend` gives the pair for the keys of one owner. Queries that see none of these keys get out = 0 and
# lse = -inf. `merge` makes the pair of two sets of keys from their pairs. Beside `send` and `receive` there is `collectives.rotate`.
#
# The mask of the zig-zag layout, and a number for all scores with that owner's keys, come from outside when `attend` asks for them, and the
# moment is written down among your messages. Call it once for each owner, also where nothing is seen. Graded:
#
# - the result, (out, lse) of this rank's queries with all keys;
# - the ring: n-1 blocks of K and V leave each rank, all to the next one, and when a block is attended to, it and the next one may have come, and
#   no other. Who gathers K and V first sends as little, and needs n times the memory; nobody has room for the scores with all keys;
# - the overlap: while a block is attended to, it is already on its way to the next rank (`async_op=True`), and the next one is on its way here. You
#   wait for that one only when you have attended to this one. The last block is not sent on.
#
# Two ranks: rank 0 sends K, V to rank 1 and attends to its own at the same time; then what came from rank 1; and merges. Nothing more is sent.


# %% given="attend"
def attend(owner, q, k, v, group):
    """This rank's q and the owner's k, v, each [H, T/n, K] -> out [H, T/n, K] and lse [H, T/n] of this block of keys alone."""
    mask = group.fetch(f"keys of {owner}", q.new_empty(q.size(-2), k.size(-2)))
    scores = q @ k.mT / math.sqrt(q.size(-1)) + mask
    lse = scores.logsumexp(-1)
    return (scores - finite(lse).unsqueeze(-1)).exp() @ v, lse


def merge(out, lse, other_out, other_lse):
    """The pairs of two sets of keys -> out and lse of their union."""
    total = torch.logaddexp(lse, other_lse)
    return sum(
        one * (its - finite(total)).exp().unsqueeze(-1)
        for one, its in ((out, lse), (other_out, other_lse))
    ), total


def finite(lse):
    return lse.clamp_min(torch.finfo(lse.dtype).min)


# %% answer="ring_forward"
def ring_forward(q, k, v, group):
    """q, k, v of this rank's tokens, each [H, T/n, K] -> out [H, T/n, K] and lse [H, T/n] with all keys."""
    ### BEGIN SOLUTION
    rank, ranks = group.rank(), group.size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(ranks):
        arriving = collectives.rotate((k, v), group, async_op=True) if step < ranks - 1 else None
        out, lse = merge(out, lse, *attend((rank - step) % ranks, q, k, v, group))
        k, v = arriving.wait() if arriving else (k, v)
    return out, lse
    ### END SOLUTION


# %% judge="rings"
def drawn_tokens(ranks, heads, piece, width):
    """q, k, v and dout of every rank, each a list of [H, T/n, K] with T/n = 2·piece, and masks[r][owner] [T/n, T/n]."""
    tensors = [[draw.real(heads, 2 * piece, width) for _ in range(ranks)] for _ in range(4)]
    masks = [
        [torch.where(seen, number, -math.inf) for seen, number in zip(own, draw.real(ranks))]
        for own in masks_of(ranks, 2 * piece * ranks)
    ]
    return *tensors, masks


def named(masks):
    return [{f"keys of {owner}": mask for owner, mask in enumerate(own)} for own in masks]


def one_process(qs, ks, vs, masks):
    """[(out, lse)] of each rank, from all keys at once."""
    pairs, k, v = [], torch.cat(ks, -2), torch.cat(vs, -2)
    for q, own in zip(qs, masks):
        scores = q @ k.mT / math.sqrt(q.size(-1)) + torch.cat(own, -1)
        pairs.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    return pairs


def ring_of(ranks, heads, piece, width, **rules):
    """Run the ring on drawn tokens: the result, and n-1 blocks that came one at a time. (the outcome, bytes of K and V)"""
    qs, ks, vs, _, masks = drawn_tokens(ranks, heads, piece, width)
    given, rules = list(zip(qs, ks, vs)), {"secrets": named(masks), **rules}
    outcome = run_on_ranks(ring_forward, given, collectives="rotate", **rules)
    for rank, (said, true) in enumerate(zip(outcome.results, one_process(qs, ks, vs, masks))):
        seen = f"(seen at rank {rank} of {ranks})"
        expect(isinstance(said, (list, tuple)) and len(said) == 2, "a pair", "return out and lse")
        expect_equal(
            said[0],
            true[0],
            "the output",
            f"whose keys are here at step s, and how much does each block count in the merge? {seen}",
            atol=NEAR,
        )
        expect_equal(
            said[1],
            true[1],
            "log-sum-exp",
            f"the output is right; lse is the logarithm of the sum over all keys {seen}",
            atol=NEAR,
        )
    block = ks[0].nbytes + vs[0].nbytes
    expect(
        outcome.sent_bytes == [(ranks - 1) * block] * ranks,
        "bytes on the wire",
        "n-1 hops take a block to all other ranks; what is sent beyond that, and who still needs it?",
    )
    expect_next_only(outcome)
    for rank in range(ranks):
        found = blocks_attended(outcome, rank, ranks)
        for step, (_, come) in enumerate(found):
            expect_one_at_a_time(come, step * block, min(ranks - 1, step + 1) * block)
    return outcome, block


def ring_with_room_for_few():
    """The scores of a block have 2 MB on eight ranks, and nobody has room for those of all blocks."""
    ring_of(8, 1, 256, 4, budget_bytes=44 << 20)


def blocks_attended(outcome, rank, ranks):
    """For each call of a rank, in the order of the ring: (bytes that the rank has sent by then, bytes that have come)."""
    sent, come, found, owners = 0, 0, [], []
    for event in outcome.events:
        if event.rank == rank and event.kind == "send":
            sent += event.bytes
        elif event.rank == rank and event.kind == "receive":
            come += event.bytes
        elif event.rank == rank and event.kind == "fetch":
            owners.append(int(event.name.split()[-1]))
            found.append((sent, come))
    hint = "call it for the keys of every rank, once, in the order in which they come"
    in_turn = [(rank - step) % ranks for step in range(ranks)]
    expect(owners == in_turn, "each block once", hint)
    return found


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
        "in a ring everything goes to the next rank; who else was spoken to?",
    )


# %% check="ring_forward-result" points=1
# Output and log-sum-exp with all keys, from n-1 blocks of the rank before, one at a time.
ring_of(2, 1, 1, 2)
ring_of(3, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ring_with_room_for_few()
for ranks in (2, 3):
    ring_of(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS

# %% check="ring_forward-ring" points=1
# The same on any number of ranks, also on one.
ring_of(4, 2, 1, 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ring_with_room_for_few()
for ranks in (1, 5):
    ring_of(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS


# %% check="ring_forward-overlap" points=1
# While a block is attended to, it is on its way to the next rank, and the next one is on its way here.
def expect_overlap(ranks, heads, piece, width):
    outcome, block = ring_of(ranks, heads, piece, width)
    for rank in range(ranks):
        for step, (sent, come) in enumerate(blocks_attended(outcome, rank, ranks)):
            expect(
                sent >= min(ranks - 1, step + 1) * block,
                "sent while computing",
                "a block was attended to that the next rank still waits for; does sending it need the result, and what is the network doing meanwhile?",
            )
            expect(
                come <= step * block,
                "computing while it comes",
                "the next block was waited for before this one was attended to; what could this rank do until it is here?",
            )


expect_overlap(2, 1, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
ring_with_room_for_few()
for ranks in (3, 4):
    expect_overlap(ranks, draw.integer(1, 3), draw.integer(1, 4), draw.integer(2, 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The ring, backward: gradients that travel (2 points)
#
# Backward goes round again. With the final out and lse of its queries, a rank can compute for any block of keys its share of three gradients:
#
#     dq          the queries are here: the shares of all blocks are added up, and stay
#     dk, dv      the keys belong to their owner: every rank has a share in them, and the sum must come home
#
# So K, V of owner o make n-1 hops as before, and the sum of dK, dV travels one step behind them: it begins on rank o+1, when that rank has
# computed its share, goes to o+2, o+3, .. and each adds its own. From rank o-1 it takes one last hop, home. The owner's own share never
# travels; it is added at the end. That makes n-1 hops for K, V and n-1 for dK, dV.
#
# The read-only `attend_backward` returns the three shares. Like `attend` it asks for the mask; call it once for each owner. Again there is
# `collectives.rotate`. Graded:
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
    return ds @ k, ds.mT @ q, p.mT @ dout


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
def ring_back_of(ranks, heads, piece, width):
    """Run backward on drawn tokens: the gradients, and n-1 blocks and n-1 sums that travelled. (the outcome, bytes of K and V)"""
    qs, ks, vs, douts, masks = drawn_tokens(ranks, heads, piece, width)
    leaves = [[x.clone().requires_grad_() for x in xs] for xs in (qs, ks, vs)]
    pairs = one_process(*leaves, masks)
    sum((out * dout).sum() for (out, _), dout in zip(pairs, douts)).backward()
    kept = [(out.detach(), lse.detach()) for out, lse in pairs]
    given = [(dout, q, k, v, *pair) for dout, q, k, v, pair in zip(douts, qs, ks, vs, kept)]
    rules = {"collectives": "rotate", "secrets": named(masks)}
    outcome = run_on_ranks(ring_backward, given, **rules)
    for rank, said in enumerate(outcome.results):
        seen = f"(seen at rank {rank} of {ranks})"
        three = isinstance(said, (list, tuple)) and len(said) == 3
        expect(three, "three gradients", "return dq, dk and dv")
        home = "your keys were on every rank: whose shares are missing, doubled, or those of another rank's keys?"
        away = "the queries stay here; whose keys do they meet at step s, and are the shares of all blocks added?"
        for name, gradient, xs, hint in zip(("dq", "dk", "dv"), said, leaves, (away, home, home)):
            expect_equal(gradient, xs[rank].grad, name, f"{hint} {seen}", atol=NEAR)
    block = ks[0].nbytes + vs[0].nbytes
    expect(
        outcome.sent_bytes == [2 * (ranks - 1) * block] * ranks,
        "bytes on the wire",
        "n-1 hops for K, V, and n-1 for the sum of dK, dV; what makes one hop more, or travels for nothing?",
    )
    expect_next_only(outcome)
    for rank in range(ranks):
        for step, (sent, come) in enumerate(blocks_attended(outcome, rank, ranks)):
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
        for step, (sent, come) in enumerate(blocks_attended(outcome, rank, ranks)):
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
# Attention of one head knows nothing of other heads. So before it every rank gives away heads and gets tokens, and afterwards the other way round:
#
#     here          q [B, H, T/n, K]    k, v [B, H_kv, T/n, K]      all heads of this rank's tokens
#     all-to-all    q [B, H/n, T, K]    k, v [B, H_kv/n, T, K]      all tokens of this rank's heads, in their order
#     core          o [B, H/n, T, K]
#     all-to-all    o [B, H, T/n, K]
#
# Tokens lie contiguously here: rank r holds positions r·T/n to (r+1)·T/n - 1. Rank r gets heads r·H/n to (r+1)·H/n - 1, and K/V heads likewise; as
# query head i uses K/V head i·H_kv // H, each rank then has the K/V heads that its queries use. The read-only `core` is any attention of one device.
# (This one has no softmax.) Beside `send` and `receive` there is `collectives.all_to_all`.
#
# Of every tensor a rank keeps 1/n and sends the rest, each piece to the one rank that needs it: (n-1)/n·(2H + 2H_kv)·B·T/n·K elements in all, or
# 4Nh/P in the papers' words. Heads that n does not divide, of q or of k and v, are refused with a `ValueError` of one line, before anything is sent.
#
# Two ranks, H = H_kv = 2, one token each, K = 1. Rank 0 has q = `[[[1]], [[2]]]`, rank 1 `[[[3]], [[4]]]` (without B). In the core rank 0 has head 0,
# `[[[1], [3]]]`, and rank 1 head 1, `[[[2], [4]]]`.


# %% given="core"
def core(q, k, v):
    """q [B, H', T, K], k, v [B, H_kv', T, K] -> [B, H', T, K]: causal, and linear: scores are not exponentiated."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    return (q @ k.mT).tril() @ v


# %% answer="ulysses"
def ulysses(q, k, v, group):
    """q [B, H, T/n, K], k, v [B, H_kv, T/n, K] of this rank's tokens -> [B, H, T/n, K]; core sees all tokens of this rank's heads."""
    ### BEGIN SOLUTION
    ranks = group.size()
    for heads in (q.size(1), k.size(1)):
        if heads % ranks:
            raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks")

    def to_heads(x):
        pieces = x.unflatten(1, (ranks, -1)).movedim(
            1, 0
        )  # n × [B, H/n, T/n, K], piece j for rank j
        return collectives.all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)

    out = core(to_heads(q), to_heads(k), to_heads(v))
    pieces = out.unflatten(2, (ranks, -1)).movedim(2, 0)  # n × [B, H/n, T/n, K], once more
    return collectives.all_to_all(pieces, group).movedim(0, 1).flatten(1, 2)
    ### END SOLUTION


# %% driver="ulysses_or_refusal"
def ulysses_or_refusal(q, k, v, group):
    try:
        return ulysses(q, k, v, group)
    except ValueError as error:
        return {"refused": str(error)}


# %% judge="expect_ulysses"
def ulysses_of(ranks, batch, heads, kv_heads, tokens, width):
    """Run the answer with so many tokens on each rank. Returns (the outcome, what one process computes, cut)."""
    q, k, v = (draw.real(batch, h, ranks * tokens, width) for h in (heads, kv_heads, kv_heads))
    cut = [[part.contiguous() for part in x.chunk(ranks, 2)] for x in (q, k, v, core(q, k, v))]
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
    pairs = {(one, other): 0 for one in range(ranks) for other in range(ranks) if one != other}
    for message in outcome.messages:
        pairs[message.source, message.destination] += message.bytes
    expect(
        set(pairs.values()) <= {piece},
        "bytes on the wire",
        "of q, k, v and o every number is needed by one rank; who gets it beside that one, or are heads copied before they travel?",
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
# Every rank has the output of its tokens, all heads, and sent only what another rank needs.
expect_ulysses(2, 1, 2, 2, 1, 1)
expect_ulysses(2, 2, 4, 4, 3, 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (1, 3, 4):
    heads = ranks * draw.integer(1, 2)
    sizes = draw.integer(1, 4), draw.integer(2, 4)
    expect_ulysses(ranks, draw.integer(1, 3), heads, heads, *sizes)
### END HIDDEN TESTS

# %% check="ulysses-bytes" points=1
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
# ## 5. What a layer sends (1 point)
#
# One layer of a Transformer, N tokens (all sequences of the batch together), heads of width K: H of them, so h = H·K, and H_kv of keys and values.
# P = u·r ranks share the N tokens. What does each rank send, in forward and in backward?
#
#     "ring"       the ring over all P: tasks 2 and 3
#     "ulysses"    the all-to-alls over all P: task 4. Backward sends what forward does: the adjoint of an all-to-all is an all-to-all
#     "megatron"   sequence parallelism over all P: all-gather of [N, h] before attention and MLP, reduce-scatter behind each; what was gathered is
#                  kept. Each of them has the other as its backward
#     "hybrid"     Ulysses over u ranks, and in its core a ring over r: after the all-to-all a rank has N/r tokens of H/u heads
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
