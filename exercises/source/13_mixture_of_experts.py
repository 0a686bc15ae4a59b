# %% [markdown]
# # Exercises 13: mixture of experts
#
# Six tasks, 10 points, about three hours. Read chapter 13 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your answer is broken, never
# the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 13
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other routing tables. A result counts only if no more
# bytes are sent than the table asks for. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its group: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else: `collectives.send`, `collectives.receive`, and the collective that a task names.
#
# N tokens of width D, E experts, n ranks. Expert e lives on rank e // (E/n), so each rank has E/n experts in a row, its first one is rank·E/n. A
# *routing table* is a tensor of int64, [N, k]: the experts that each token visits, no expert twice, and -1 where a choice goes nowhere (the token is
# padding, or the choice was dropped). Every rank has tokens of its own, and not all ranks have as many.
#
# Task 1 is the router of Jiang et al. 2024 (Mixtral, arXiv:2401.04088, section 2.1) with the capacity of Lepikhin et al. 2020 (GShard,
# arXiv:2006.16668, section 2.2), tasks 2 to 4 its dispatch without padding (Gale et al. 2022, MegaBlocks, arXiv:2211.15841), task 5 DeepSeek-AI 2024
# (DeepSeek-V3, arXiv:2412.19437, section 3.2.2), task 6 Fedus et al. 2021 (Switch, arXiv:2101.03961, section 2.2) and Singh et al. 2023
# (DeepSpeed-TED, arXiv:2303.06318).

# %% given="setup"
import torch

from minitrain import collectives

# %% judge="tools"
import math
from collections import Counter

from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)
from minitrain.moe import router

draw = Draw()  # hidden checks draw sizes, numbers of ranks, tables and values
NEAR = 1e-10  # rounding takes a right answer some 1e-15 away, and float32 on the way 1e-7


def a_pair(said, hint):
    two = isinstance(said, (list, tuple)) and len(said) == 2
    expect(two and all(isinstance(x, torch.Tensor) for x in said), "two tensors", hint)
    return said


def drawn_table(tokens, k, experts, nowhere=0):
    """[tokens, k]: k of these experts for each token, as drawn; one token in `nowhere` is padding, one has lost a choice."""
    rows = [draw.several(experts, k) for _ in range(tokens)]
    for row in rows if nowhere else []:
        fate = draw.integer(1, nowhere)
        if fate == 1:
            row[:] = [-1] * k
        elif fate == 2:
            row[draw.integer(0, k - 1)] = -1
    return torch.tensor(rows, dtype=torch.int64).view(tokens, k)


def visitors(tables, num_experts):
    """[rank][expert of that rank] -> the choices (source rank, token, choice) that visit it, the last rank first, then by token."""
    found = [[] for _ in range(num_experts)]
    for source, table in reversed(list(enumerate(tables))):
        for token, row in enumerate(table.tolist()):
            for choice, expert in enumerate(row):
                if expert >= 0:
                    found[expert].append((source, token, choice))
    here = num_experts // len(tables)
    return [found[first : first + here] for first in range(0, num_experts, here)]


def run_cases(work, cases, late=None, **rules):
    """cases[i][member], tuples of arguments -> for each case its members' results, and the bytes that they sent by (source, destination).

    All cases run in one launch, one after the other, each on a group of the last ranks. `late[i][member]` is a secret, whose name is the last
    argument: then there are two counts of bytes, before it was fetched and after.
    """
    ranks, firsts = max(map(len, cases)), [max(map(len, cases)) - len(case) for case in cases]
    inputs, secrets = [[] for _ in range(ranks)], [{} for _ in range(ranks)]
    for number, (case, first) in enumerate(zip(cases, firsts)):
        for rank, arguments in enumerate(case, first):
            names = [f"case {number}", f"late {number}"][: 1 if late is None else 2]
            tensors = [torch.zeros(1), *(late[number][rank - first] for _ in names[1:])]
            secrets[rank] |= dict(zip(names, tensors))
            inputs[rank].append((names[0], list(range(first, ranks)), (*arguments, *names[1:])))
    outcome = run_on_ranks(
        work, inputs, secrets=secrets, collectives=rules.pop("collectives"), **rules
    )
    fetched, sent = [[] for _ in range(ranks)], [(Counter(), Counter()) for _ in cases]
    for event in outcome.events:
        if event.kind == "fetch":
            fetched[event.rank].append(event.name)
        elif event.kind == "send":
            stage, number = fetched[event.rank][-1].split()
            first = firsts[int(number)]
            sent[int(number)][stage == "late"][event.rank - first, event.peer - first] += (
                event.bytes
            )
    for said, given, names, wanted in zip(outcome.results, inputs, fetched, secrets, strict=True):
        whole = isinstance(said, list) and len(said) == len(given)
        expect(
            whole and names == [*wanted],
            "one case after the other",
            "a group is for sends, receives and the collective",
        )
    results = [[outcome.results[rank].pop(0) for rank in range(first, ranks)] for first in firsts]
    return list(zip(results, sent))


def stacked(rows, width):
    return torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.float64)


# %% [markdown]
# ## 1. The router, and experts with limited room (2 points)
#
# Each token goes to the k experts with the largest scores, best first; of equal scores the *higher* index wins. Its weights are the softmax over these k
# scores alone. A token where `mask` is False is padding: it goes nowhere (-1, weight 0), and takes no place.
#
# With a `capacity` no expert takes more tokens than that. Places are given out in this order: the first choices of all tokens, from the *last* token
# to the first, then the second choices of all tokens in the same order, and so on. (Both rules differ from the chapter's on purpose.) A choice that finds no place goes nowhere, and its weight is 0; the other weights of the token stay as
# they were. A choice that is dropped for one expert's lack of room is not offered to another expert.
#
# > **API** Tensors in, tensors out, no network. `scores` are float64, `mask` is None or a tensor of bool. Return a tuple: `experts` of
# > int64 and `weights` of float64, both [N, k]. `x.sort(descending=True, stable=True)` keeps equal numbers in order; `torch.topk` does
# > not promise it.
#
# Scores `[[3, 2, 0], [3, 0, 2], [0, 1, 1]]`, k = 2: the experts are `[[0, 1], [0, 2], [2, 1]]`. With capacity 1, expert 0 takes token 1 and has no
# place for token 0; expert 2 takes token 2, whose first choice it is, and so has none for token 1; of two second choices expert 1 takes token 2:
# `[[-1, -1], [0, -1], [2, 1]]`.


# %% answer="route"
def route(scores, k, capacity=None, mask=None):
    """scores [N, E], mask None or [N] of bool -> experts [N, k] of int64, weights [N, k]."""
    ### BEGIN SOLUTION
    order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    experts = scores.shape[1] - 1 - order[:, :k]
    weights = scores.gather(1, experts).softmax(1)
    goes = torch.ones_like(experts, dtype=torch.bool)
    if mask is not None:
        goes = goes & mask[:, None]
    if capacity is not None:
        wish = torch.nn.functional.one_hot(experts.T, scores.shape[1]) * goes.T[..., None]
        taken = wish.flip(1).flatten(0, 1).cumsum(0)  # up to here, this one included
        places = taken.view_as(wish).flip(1)
        goes = goes & (places.gather(2, experts.T[..., None])[..., 0].T <= capacity)
    return experts.masked_fill(~goes, -1), weights.masked_fill(~goes, 0)
    ### END SOLUTION


# %% judge="expect_routes"
HINTS = {
    "the k best": "which k scores of a token are the largest, and which of them comes first?",
    "ties": "some scores are equal; does the higher index come first for every width? Not every way of sorting keeps the order of equal ones",
    "nobody dropped": "there is room for all, or there is no capacity",
    "in the tokens' order": "an expert takes as many tokens as it has room for, those that come last; is the last place given away too?",
    "first choices first": "two tokens want the last place, one as its second choice, the other as its first; who stands where in the batch does not matter",
    "padding takes no place": "a token that goes nowhere leaves its places to others; when is the mask looked at?",
}


def routed_from_the_end(scores, k, capacity, mask):
    """The package's router on a batch turned round, experts and tokens."""
    routing = router.top_k(scores.flip(0, 1), k, None if mask is None else mask.flip(0))
    if capacity is not None:
        routing = routing.within(capacity)
    experts = routing.experts.flip(0)
    return experts.where(experts < 0, scores.shape[1] - 1 - experts), routing.weights.flip(0)


def expect_routes(*cases):
    """Cases (property, scores, k, capacity, mask), property being one of HINTS: what is wrong if experts differ."""
    for said, case in zip(ask_each(route, [case[1:] for case in cases]), cases, strict=True):
        property, scores, k, capacity, mask = case
        seen = f"(seen with {len(scores)} tokens, {scores.shape[1]} experts, k = {k}, capacity {capacity})"
        experts, weights = a_pair(said, "return experts and weights")
        wanted, heavy = routed_from_the_end(scores, k, capacity, mask)
        before, _ = routed_from_the_end(scores, k, None, mask)
        shaped = experts.shape == wanted.shape and experts.dtype == torch.int64
        expect(shaped, "a table", f"experts are [N, k] of int64 {seen}")
        expect(
            bool(((experts >= -1) & (experts < scores.shape[1])).all()),
            "a table",
            f"experts count from 0, and -1 is none {seen}",
        )
        expect(
            mask is None or bool((experts[~mask] == -1).all()),
            "padding goes nowhere",
            f"experts are -1 where the mask is False {seen}",
        )
        taken = torch.bincount(experts[experts >= 0], minlength=scores.shape[1])
        expect(
            capacity is None or int(taken.max()) <= capacity,
            "room",
            f"an expert takes more tokens than it has room for; do all choices share its places? {seen}",
        )
        expect_equal(experts, wanted, property, f"{HINTS[property]} {seen}")
        dropped = bool((wanted != before).any())
        expect_equal(
            weights,
            heavy,
            "weights of what was dropped" if dropped else "weights",
            f"what is left out has weight 0; does dropping change the other weights of a token? {seen}"
            if dropped
            else f"a softmax over the k chosen scores, and 0 for padding {seen}",
            atol=1e-12,
        )


def with_ties(tokens, experts):
    """Few different scores, many equal ones."""
    return draw.real(tokens, experts).round() + 0.0  # no -0.0


SMALL = torch.tensor([[3, 2, 0], [3, 0, 2], [0, 1, 1]]).double()  # the scores of the text


# %% check="route-choice" points=1
# The k best, of equal ones the higher first; a softmax over them; padding goes nowhere.
expect_routes(
    ("the k best", SMALL[:2], 2, None, None),
    ("ties", SMALL, 2, None, None),
    ("the k best", SMALL[:2], 1, None, torch.tensor([False, True])),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
wide, few, k = draw.integer(40, 70), draw.integer(4, 8), draw.integer(2, 4)
expect_routes(
    ("the k best", draw.real(draw.integer(3, 9), few), k, None, None),
    ("the k best", draw.real(5, few), few, None, None),
    ("the k best", draw.real(1, few), 1, None, None),
    ("ties", torch.full((3, wide), draw.integer(-3, 3)).double(), draw.integer(2, 9), None, None),
    ("ties", with_ties(draw.integer(6, 12), draw.integer(5, 9)), k, None, None),
    ("ties", with_ties(12, wide), 4, None, draw.mask(12)),
    ("the k best", draw.real(9, few), k, None, torch.arange(9) % 3 != draw.integer(0, 2)),
    ("the k best", draw.real(4, few), k, None, torch.zeros(4, dtype=torch.bool)),
)
### END HIDDEN TESTS

# %% check="route-capacity" points=1
# No expert takes more than its capacity; first choices before second ones, then from the last token to the first.
expect_routes(
    ("nobody dropped", SMALL, 2, 3, None),
    ("in the tokens' order", SMALL[:, :2], 1, 1, None),
    ("first choices first", SMALL, 2, 1, None),
    ("padding takes no place", SMALL, 2, 1, torch.tensor([False, True, True])),
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def crowded(tokens, experts, wanted):
    """Late tokens want an expert second, early ones first: exactly the early ones find room with capacity tokens // 2."""
    scores = draw.real(tokens, experts).clamp(-3, 3)
    scores[:, wanted] = 10.0
    scores[tokens // 2 :, (wanted + 1) % experts] = 20.0
    return scores


tokens, few, one = 2 * draw.integer(3, 5), draw.integer(4, 6), draw.integer(0, 3)
expect_routes(
    ("nobody dropped", draw.real(7, few), 2, 7, None),
    ("in the tokens' order", draw.real(11, 3), 1, draw.integer(1, 3), None),
    ("in the tokens' order", crowded(9, 4, 2)[:4], 1, draw.integer(1, 3), None),
    ("first choices first", crowded(tokens, few, one), 2, tokens // 2, None),
    ("first choices first", crowded(tokens, few, one), 3, draw.integer(1, 3), None),
    ("first choices first", with_ties(12, few), 3, draw.integer(2, 6), None),
    ("padding takes no place", crowded(9, few, 1), 2, 2, torch.arange(9) % 3 != 0),
    ("padding takes no place", with_ties(12, few), 2, draw.integer(1, 3), draw.mask(12)),
    ("padding takes no place", torch.ones(6, 3).double(), 1, 2, torch.arange(6) >= 3),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. What a routing table costs (1 point)
#
# The dispatch of tasks 3 and 4 sends four things. Every rank r has a table [N_r, k]; rows have D elements of `itemsize` bytes:
#
#     "counts"      how many rows it has for each expert, one int64 (8 bytes) per expert, to the rank of that expert
#     "there"       a row for each choice, to the rank of its expert
#     "back"        the results, to the ranks that the rows came from
#     "backward"    gradients: each of the two exchanges of rows once more, in the other direction. Counts have none
#
# > **API** A pure function, no network. `tables` is a list of n tensors of int64, with -1 for no choice; the other three are ints, and n
# > divides `num_experts`. Return a dict of four lists of n ints (`int(tensor)` makes one).
#
# Return how many bytes *leave* each rank. What stays on its own rank is not sent. Two experts of one token on one rank get a row each.
#
# Two ranks, E = 4, D = 3, 8 bytes per element; rank 0 has the table `[[0, 3], [2, 3]]`, rank 1 `[[1, -1]]`. Rank 0 sends 3 rows of 24 bytes, rank 1
# one: `{"counts": [16, 16], "there": [72, 24], "back": [24, 72], "backward": [96, 96]}`.


# %% answer="sent_bytes"
def sent_bytes(tables, num_experts, width, itemsize):
    """tables: one tensor [N_r, k] a rank -> {"counts": .., "there": .., "back": .., "backward": ..}, each a list of n ints."""
    ### BEGIN SOLUTION
    n, row = len(tables), width * itemsize
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
    ### END SOLUTION


# %% judge="expect_costs"
def expect_costs(*cases):
    """Cases (tables, num_experts, width, itemsize, wanted)."""
    for said, case in zip(ask_each(sent_bytes, [case[:-1] for case in cases]), cases, strict=True):
        tables, num_experts, width, itemsize, wanted = case
        seen = f"(seen with {len(tables)} ranks, {num_experts} experts, D = {width}, {itemsize} bytes per element)"
        expect(
            isinstance(said, dict)
            and set(said) == set(wanted)
            and all(isinstance(x, (list, tuple)) and len(x) == len(tables) for x in said.values())
            and all(type(x) is int for of_ranks in said.values() for x in of_ranks),
            "whole numbers",
            f"four lists in a dict, each with an int for every rank {seen}",
        )
        for name, hint in (
            ("counts", "a rank tells each other rank how much it has for the experts there"),
            ("there", "which choices go to another rank, and which go nowhere?"),
            ("back", "who asked the experts of this rank, and did as many rows leave it as come?"),
            ("backward", "whose gradient travels where, once for each exchange of rows?"),
        ):
            expect(list(said[name]) == wanted[name], f"bytes: {name}", f"{hint} {seen}")


# %% check="sent_bytes-all" points=1
# Counts, rows there, results back, and gradients, for each rank.
expect_costs(
    (
        [torch.tensor([[0, 3], [2, 3]]), torch.tensor([[1, -1]])],
        4,
        3,
        8,
        {"counts": [16, 16], "there": [72, 24], "back": [24, 72], "backward": [96, 96]},
    ),
    (
        [torch.tensor([[0, 1]]), torch.tensor([[0, 1], [1, 0]]), torch.tensor([[5, 2]])],
        6,
        2,
        4,
        {"counts": [32, 32, 32], "there": [0, 32, 8], "back": [32, 8, 0], "backward": [32, 40, 8]},
    ),
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def cost_case(tables, num_experts, width, itemsize):
    n = len(tables)
    pairs = Counter()
    for rank, experts in enumerate(visitors(tables, num_experts)):
        for source, _, _ in sum(experts, []):
            pairs[source, rank] += width * itemsize * (source != rank)
    there = [sum(pairs[r, other] for other in range(n)) for r in range(n)]
    back = [sum(pairs[other, r] for other in range(n)) for r in range(n)]
    counts = [num_experts * 8 - num_experts // n * 8] * n
    both = [one + other for one, other in zip(there, back)]
    wanted = {"counts": counts, "there": there, "back": back, "backward": both}
    return tables, num_experts, width, itemsize, wanted


cases = []
for ranks in (1, 2, 3, draw.integer(5, 8)):
    here, k = draw.integer(2, 4), draw.integer(1, 2)
    tokens = draw.several(range(0, 30), ranks)
    of = [drawn_table(size, k, range(ranks * here), nowhere=4) for size in tokens]
    cases.append(cost_case(of, ranks * here, draw.integer(3, 999), draw.choice([2, 4, 8])))
popular = [
    torch.full((size, 1), 2) for size in (4, 9, 0)
]  # all on one expert, a rank without tokens
nobody = [torch.full((5, 2), -1)] * 3
expect_costs(*cases, cost_case(popular, 3, 10**7, 2), cost_case(nobody, 6, 64, 2))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Tokens to their experts (1 point)
#
# Each choice of each token becomes a row and goes to the rank of its expert. There they lie expert by expert, for each expert by the rank they come
# from, the *last* rank first (unlike the chapter's page), and for each rank in the order of its tokens; so an expert can take its rows in one piece. The function returns these rows, and for each
# expert of the rank how many there are.
#
# A rank cannot know how many rows will come to it. So counts travel first, then exactly the rows that are wanted: nothing is padded, a choice of -1
# is no row, and what stays on its rank is not sent. To each other rank there may go D elements per row, and 8 bytes per expert there.
#
# > **API** `collectives.all_to_all(x, group, send_sizes=.., receive_sizes=..)` cuts x [rows, ..] into pieces of `send_sizes[j]` rows, sends
# > piece j to rank j, and returns a new tensor of the pieces that come, in rank order, of `receive_sizes[j]` rows each. Sizes are lists of
# > ints (`tensor.tolist()`) and may hold 0; without sizes all pieces are equal. x may be of any dtype; nothing else comes with it.
# > x [N, D] is float64, `experts` [N, k] int64. Return a tuple: rows [R, D], counts [E/n] of int64.
#
# Two ranks, E = 4: rank 0 has tokens a and b with the table `[[2, 0], [3, 2]]`, rank 1 has c with `[[2, 1]]`. Rank 0 gets a, c and the counts `[1,
# 1]`, rank 1 gets c, a, b, b and the counts `[3, 1]`.


# %% answer="there"
def there(x, experts, num_experts, group):
    """This rank's tokens x [N, D] and their table [N, k] -> rows [R, D] of this rank's experts, counts [E/n] of int64."""
    ### BEGIN SOLUTION
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
    place = torch.arange(num_experts // n) * n + torch.arange(n).flip(0)[:, None]
    which = place.flatten().repeat_interleave(arriving.flatten())
    return rows[which.argsort(stable=True)], arriving.sum(0)
    ### END SOLUTION


# %% driver="cases"
import torch.distributed as dist


def in_turn(work, cases, group):
    """What `work` returns in each case that this rank is in. Nothing of a case is sent before it has begun."""
    said = []
    for begins, members, arguments in cases:
        group.fetch(begins, torch.zeros(1))
        said.append(work(*arguments, dist.new_group(members, use_local_synchronization=True)))
    return said


def there_in_turn(cases, group):
    return in_turn(there, cases, group)


# %% judge="expect_there"
def expect_there(*cases):
    """Cases (tables, num_experts, width), each on len(tables) ranks: rows and counts are right, and no more travels than the table says."""
    xs = [[draw.exact(len(table), width) for table in tables] for tables, _, width in cases]
    inputs = [
        [(x, table, num_experts) for x, table in zip(own, tables)]
        for own, (tables, num_experts, _) in zip(xs, cases)
    ]
    for case, own, outcome in zip(
        cases, xs, run_cases(there_in_turn, inputs, collectives="all_to_all")
    ):
        expect_rows(*case, own, *outcome)


def expect_rows(tables, num_experts, width, xs, results, sent):
    ranks, most = len(tables), Counter()
    for rank, experts in enumerate(visitors(tables, num_experts)):
        seen = f"(seen at rank {rank} of {ranks})"
        rows, counts = a_pair(results[rank], "return rows and counts")
        expect_equal(
            counts,
            torch.tensor([len(found) for found in experts]),
            "counts",
            f"how many rows has each expert of this rank, those of its own tokens included, and those of no other rank's experts? {seen}",
        )
        wanted = stacked([xs[s][token] for found in experts for s, token, _ in found], width)
        same_kind = rows.shape == wanted.shape and rows.dtype == wanted.dtype
        expect(
            same_kind and torch.equal(*(x[x[:, 0].argsort()] for x in (rows, wanted))),
            "rows of its experts",
            f"some row is missing, doubled or not as it was; which choices visit this rank? {seen}",
        )
        expect(
            torch.equal(rows, wanted),
            "order of the rows",
            f"these rows are right, but must lie by expert, then by rank, the last one first, then by token; how do they lie when they have come? {seen}",
        )
        for source, _, _ in sum(experts, []):
            most[source, rank] += width * 8
    for pair, size in sent[0].items():
        expect(
            size <= most[pair] + 8 * num_experts // ranks,
            "bytes on the wire",
            f"more goes from rank {pair[0]} to rank {pair[1]} of {ranks} than its rows and counts; who needs the rest?",
        )


# %% check="there-rows" points=1
# Rows by expert, rank and token, from tables of any shape, and nothing else travels.
expect_there(
    ([torch.tensor([[2, 0], [3, 2]]), torch.tensor([[2, 1]])], 4, 5),
    ([torch.tensor([[1], [0], [0]]), torch.tensor([[1], [-1]])], 2, 6),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for ranks in (1, 2, 3, 4):
    here, k = draw.integer(2, 3), draw.integer(1, 2)
    sizes = draw.several(range(3, 11), ranks)
    drawn = [drawn_table(size, k, range(ranks * here), nowhere=5) for size in sizes]
    cases.append((drawn, ranks * here, draw.integer(4, 9)))
lonely = draw.integer(0, 5)  # an expert that nobody visits, and a rank without tokens
others = [expert for expert in range(6) if expert != lonely]
cases.append(([drawn_table(size, 2, others) for size in (draw.integer(4, 7), 0, 3)], 6, 5))
popular = draw.integer(0, 7)  # all on one expert, but for padding
cases.append(([drawn_table(draw.integer(3, 6), 1, [popular], nowhere=4) for _ in range(4)], 8, 5))
expect_there(*cases, ([torch.full((3, 2), -1) for _ in range(3)], 3, 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The way back, forward and backward (2 points)
#
# The experts have worked: rank r has results y [R, D], in the order in which its rows lay (by expert, then by rank, the last one first, then by token).
# Each goes home to the rank of its token, and there
#
#     out_t = Σ_j weights[t, j] · y(t, j)         y(t, j) the result of choice j of token t; a choice of -1 adds nothing
#
# `back` returns out and what it wants to keep for backward, a list of tensors. `back_backward` gets the gradient dout and what was kept, and returns
#
#     dy [R, D]            of this rank's results: dout of the token, times the weight, sent where the result came from
#     dweights [N, k]      of this rank's weights: the sum over D of dout · y(t, j), and 0 for a choice of -1
#
# Write both passes by hand, without autograd. Counts need not travel again: `arriving` [n, E/n] says how many rows rank s had for each expert of this
# rank. Forward sends D elements for each result that goes to another rank, backward D for each gradient, and neither sends anything else: weights
# stay at home, and so do their gradients. A rank may have no tokens (N = 0) or no rows (R = 0); a -1 in a shape is then ambiguous, and raises.
#
# > **API** `collectives.all_to_all(x, group, send_sizes=.., receive_sizes=..)`, as in task 3. `y`, `weights` and `dout` are float64, `experts`
# > and `arriving` int64. `back` returns (out [N, D], kept), with `kept` a list of tensors of any dtype, which `back_backward` gets as it
# > is; it returns (dy [R, D], dweights [N, k]). Autograd is switched off. `tensor.tolist()` makes the sizes.
#
# Two ranks, E = 2, D = 1: rank 0 has one token with experts `[[1, 0]]` and weights `[[0.5, 2]]`, rank 1 one with `[[1, -1]]` and `[[3, 0]]`. With y =
# `[[10]]` on rank 0 and `[[5], [4]]` on rank 1, out is `[[22]]` and `[[15]]`. With dout = 1 on both ranks dy is `[[2]]` and `[[3], [0.5]]`, dweights
# `[[4, 10]]` and `[[5, 0]]`.


# %% answer="back"
def back(y, experts, weights, arriving, group):
    """y [R, D] of this rank's experts; experts and weights [N, k] of its tokens; arriving [n, E/n] -> out [N, D], kept."""
    ### BEGIN SOLUTION
    n, here = arriving.shape
    place = torch.arange(here) * n + torch.arange(n).flip(0)[:, None]
    which = place.flatten().repeat_interleave(arriving.flatten())
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
    ### END SOLUTION


def back_backward(dout, kept, experts, weights, arriving, group):
    """dout [N, D] of this rank's tokens -> dy [R, D] of this rank's experts, dweights [N, k]."""
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% driver="there_and_back"
def forward_alone(*arguments):
    return back(*arguments)[0]


def both_passes(y, experts, weights, arriving, gradient, group):
    """Forward, then the gradient arrives, then backward."""
    out, kept = back(y, experts, weights, arriving, group)
    out = out.clone()
    dout = group.fetch(gradient, torch.empty_like(out))
    dy, dweights = back_backward(dout, kept, experts, weights, arriving, group)
    return {"out": out, "dy": dy, "dweights": dweights}


def back_in_turn(cases, group):
    return in_turn(forward_alone, cases, group)


def both_in_turn(cases, group):
    return in_turn(both_passes, cases, group)


# %% judge="expect_back"
def expect_back(*cases, backward=False):
    """Cases (tables, num_experts, width); run forward, or both passes: results equal one process, and only rows of D elements travel."""
    knowns = [back_known(*case) for case in cases]
    inputs, rules = (
        [known["inputs"] for known in knowns],
        {"collectives": "all_to_all", "autograd": False},
    )
    if backward:
        outcomes = run_cases(both_in_turn, inputs, [known["douts"] for known in knowns], **rules)
    else:
        outcomes = run_cases(back_in_turn, inputs, **rules)
    for known, outcome in zip(knowns, outcomes):
        expect_passes(known, backward, *outcome)


def back_known(tables, num_experts, width):
    """Inputs and gradients of the ranks, and what one process makes of them."""
    ranks, visits = len(tables), visitors(tables, num_experts)
    ys = [draw.real(sum(map(len, experts)), width) for experts in visits]
    weights = [draw.real(*table.shape).abs() * (table >= 0) for table in tables]
    douts = [draw.real(len(table), width) for table in tables]
    outs, dweights = [torch.zeros_like(d) for d in douts], [torch.zeros_like(w) for w in weights]
    dys, most = [torch.zeros_like(y) for y in ys], Counter()
    arriving = [torch.zeros(ranks, num_experts // ranks, dtype=torch.int64) for _ in tables]
    for rank, experts in enumerate(visits):
        of_rank = [(place, *choice) for place, found in enumerate(experts) for choice in found]
        for row, (place, source, token, choice) in enumerate(of_rank):
            weight, dout = weights[source][token, choice], douts[source][token]
            outs[source][token] += weight * ys[rank][row]
            dys[rank][row] = weight * dout
            dweights[source][token, choice] = dout @ ys[rank][row]
            arriving[rank][source, place] += 1
            most[rank, source] += 8 * width * (rank != source)
    inputs = list(zip(ys, tables, weights, arriving))
    found = {"inputs": inputs, "douts": douts, "outs": outs, "dys": dys, "dweights": dweights}
    return found | {"most": most}


def expect_passes(known, backward, results, sent):
    ranks, most = len(results), known["most"]
    expect_equal(
        [result["out"] for result in results] if backward else results,
        known["outs"],
        "the output",
        f"whose result is this, which token is it for, and how often does its weight count? How did the rows lie before they were sorted by expert? ({ranks} ranks)",
        atol=NEAR,
    )
    expect(
        all(size <= most[pair] for pair, size in sent[0].items()),
        "bytes of forward",
        "a result travels once, to the rank of its token; who needs more, and are counts or weights sent that everyone who needs them has?",
    )
    if not backward:
        return
    for name, wanted, property, hint in (
        (
            "dy",
            known["dys"],
            "gradient of the results",
            "dout of the token, times the weight of the choice, in the order of this rank's results",
        ),
        (
            "dweights",
            known["dweights"],
            "gradient of the weights",
            "dout and the result of the same choice, multiplied and summed over D; a choice that goes nowhere has 0",
        ),
    ):
        found = [result[name] for result in results]
        expect_equal(found, wanted, property, f"{hint} ({ranks} ranks)", atol=NEAR)
    expect(
        all(size <= most[pair[::-1]] for pair, size in sent[1].items()),
        "bytes of backward",
        "a gradient travels once, to the rank whose expert made the result; what else is sent that could have been kept?",
    )


def tables_of(ranks, k, here, nowhere):
    sizes = draw.several(range(2, 9), ranks)
    return [drawn_table(size, k, range(ranks * here), nowhere) for size in sizes], ranks * here


# %% check="back-forward" points=1
# Every token has the weighted sum of its results, and only results travel.
expect_back(
    ([torch.tensor([[1, 0]]), torch.tensor([[1, -1]])], 2, 1),
    ([torch.tensor([[2, 0], [3, 2]]), torch.tensor([[2, 1]])], 4, 3),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (*tables_of(ranks, draw.integer(1, 3), 3, 5), draw.integer(3, 7)) for ranks in (1, 2, 3, 4)
]
popular = draw.integer(0, 2)  # all on one expert, two without tokens
lonely = [drawn_table(size, 1, [popular]) for size in draw.several([0, 3, 5], 3)]
expect_back(*cases, (lonely, 3, 4))
### END HIDDEN TESTS

# %% check="back-backward" points=1
# Gradients of results and weights, and only gradients of results travel.
expect_back(
    ([torch.tensor([[1, 0]]), torch.tensor([[1, -1]])], 2, 1),
    ([torch.tensor([[2, 0], [3, 2]]), torch.tensor([[2, 1]])], 4, 3),
    backward=True,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (*tables_of(ranks, draw.integer(2, 3), draw.integer(3, 4), 5), draw.integer(3, 7))
    for ranks in (1, 2, 3, 4)
]
popular = draw.integer(0, 2)
lonely = [drawn_table(size, 1, [popular], nowhere=3) for size in draw.several([0, 3, 5], 3)]
expect_back(*cases, (lonely, 3, 4), backward=True)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. One copy for each node (2 points)
#
# Now the ranks stand on nodes: n = nodes·g, rank = node·g + place. Links inside a node are fast, links between nodes are slow. A token with three
# experts on another node crosses three times in task 3, though one copy would do. So:
#
# 1. **across**: one copy for each node that a token visits, to the rank of the sender's own place there (the group `across` has the ranks of one place,
#    `across.rank()` is the node), together with the k numbers of its table row;
# 2. **inside**: a rank that has received copies sends each to the experts of this node that the token wants, as in task 3 (the group `inside` has the ranks of one
#    node, `inside.rank()` is the place).
#
# A token with experts on its own node goes through step 2 alone. The rows of an expert may lie in any order. What may be sent:
#
#     between nodes     to its own place in each other node: D + k elements of 8 bytes for each token that visits the node, and 8 bytes for their number
#     inside            to each other place: D elements for each choice, among the copies that this rank has, and 8 bytes for each expert there
#
# On the way back each copy's results are weighed and summed inside the node, and one row crosses; it is the same road in the other direction, and not
# part of this task.
#
# > **API** `collectives.all_to_all(x, across, send_sizes=.., receive_sizes=..)`, and the same with `inside`: as in task 3, for x of any dtype.
# > `across.rank()`, `across.size()`, `inside.rank()`, `inside.size()`. x [N, D] is float64, `experts` [N, k] int64. Return a tuple:
# > rows [R, D] and counts [E/n] of int64.
#
# Two nodes of one rank each, E = 4, rank 0 has one token with the table `[[2, 3, 0]]`, D = 6. To rank 1 go 6 + 3 elements and the number 1, 80 bytes,
# and rank 1 makes two rows of one copy. Sent as in task 3 it would be two rows and two counts, 112 bytes.


# %% answer="two_level"
def two_level(x, experts, num_experts, across, inside):
    """This rank's tokens x [N, D] and table [N, k] -> rows [R, D] of this rank's experts, one expert after the other, and counts [E/n]."""
    ### BEGIN SOLUTION
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
    return rows[which.argsort(stable=True)], arriving.sum(0)
    ### END SOLUTION


# %% driver="nodes"
def groups_of(group, of_members):
    """One for each list of its members."""
    ranks = dist.get_process_group_ranks(group)
    return [
        dist.new_group([ranks[m] for m in own], use_local_synchronization=True)
        for own in of_members
    ]


def on_two_levels(x, experts, num_experts, per_node, group):
    """The ranks of `group` fill nodes of `per_node`."""
    node, place = divmod(group.rank(), per_node)
    across = [other * per_node + place for other in range(group.size() // per_node)]
    inside = [node * per_node + other for other in range(per_node)]
    return two_level(x, experts, num_experts, *groups_of(group, (across, inside)))


def two_level_in_turn(cases, group):
    return in_turn(on_two_levels, cases, group)


# %% judge="expect_two_levels"
def expect_two_levels(*cases, inside=False):
    """Cases (tables, num_experts, per_node, width): rows are right, one copy for each node crosses; and `inside` a node only what its experts want."""
    xs = [[draw.exact(len(table), case[-1]) for table in case[0]] for case in cases]
    inputs = [
        [(x, table, num_experts, per_node) for x, table in zip(own, tables)]
        for own, (tables, num_experts, per_node, _) in zip(xs, cases)
    ]
    outcomes = run_cases(two_level_in_turn, inputs, collectives="all_to_all")
    for case, own, outcome in zip(cases, xs, outcomes):
        expect_copies(*case, own, inside, *outcome)


def expect_copies(tables, num_experts, per_node, width, xs, inside, results, sent):
    ranks, k, here = len(tables), tables[0].shape[1], num_experts // len(tables)
    visits = visitors(tables, num_experts)
    for rank, experts in enumerate(visits):
        seen = f"(seen at rank {rank} of {ranks}, {per_node} a node)"
        rows, counts = a_pair(results[rank], "return rows and counts")
        expect_equal(
            counts,
            torch.tensor([len(found) for found in experts]),
            "counts",
            f"how many rows has each expert of this rank? {seen}",
        )
        wanted = [[xs[s][token] for s, token, _ in found] for found in experts]
        same_kind = rows.shape == (sum(map(len, wanted)), width) and rows.dtype == torch.float64
        pieces = rows.split([len(found) for found in experts]) if same_kind else []
        expect(
            same_kind
            and all(
                torch.equal(*(x[x[:, 0].argsort()] for x in (piece, stacked(found, width))))
                for piece, found in zip(pieces, wanted)
            ),
            "rows of each expert",
            f"an expert gets the tokens that want it, from all nodes, each once, and its rows lie together {seen}",
        )
    crosses, stays = Counter(), Counter()
    for rank, experts in enumerate(visits):
        for source, _, _ in sum(experts, []):
            entry = rank // per_node * per_node + source % per_node
            stays[entry, rank] += 8 * width
    for source, table in enumerate(tables):
        for node in range(ranks // per_node):
            copies = int((table.div(per_node * here, rounding_mode="floor") == node).any(1).sum())
            if node != source // per_node:
                crosses[source, node * per_node + source % per_node] = 8 + copies * 8 * (width + k)
    for pair, size in sent[0].items():
        one, other = (rank // per_node for rank in pair)
        if one != other:
            expect(
                size <= crosses[pair],
                "bytes between nodes",
                f"more goes from rank {pair[0]} to rank {pair[1]} ({per_node} a node) than a copy for each token that visits the node; how often does a token cross that has two experts there?",
            )
        elif inside:
            expect(
                size <= stays[pair] + 8 * here,
                "bytes inside the node",
                f"more goes from rank {pair[0]} to rank {pair[1]} ({per_node} a node) than its experts want; whose copies does this rank have, and which places want them?",
            )


def scattered(nodes, per_node, here, nowhere=0, most=5):
    """Tables of 3 choices for all ranks. The first token of each rank has all its experts on the next node."""
    ranks, on_node, tables = nodes * per_node, per_node * here, []
    for rank in range(ranks):
        first = (rank // per_node + 1) % nodes * on_node
        head = drawn_table(1, 3, range(first, first + on_node))
        tail = drawn_table(draw.integer(1, most - 1), 3, range(ranks * here), nowhere)
        tables.append(torch.cat([head, tail]))
    return tables, ranks * here, per_node


# %% check="two_level-across" points=1
# Every expert has its rows, and a token crosses once for each node it visits.
expect_two_levels(([torch.tensor([[2, 3, 0]]), torch.tensor([[1, 2, -1], [0, 1, 3]])], 4, 1, 20))
expect_two_levels((*scattered(2, 2, 2), 20))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for nodes, per_node in ((2, 2), (draw.integer(2, 4), 1), (1, draw.integer(2, 4)), (3, 2)):
    here = draw.integer(3 if per_node == 1 else 2, 4)
    cases.append((*scattered(nodes, per_node, here, nowhere=5), draw.integer(16, 24)))
expect_two_levels(*cases)
### END HIDDEN TESTS

# %% check="two_level-inside" points=1
# Inside a node too, only what its experts want is sent, from tables of any shape.
expect_two_levels((*scattered(2, 2, 2), 20), inside=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    (*scattered(nodes, per_node, draw.integer(2, 3), nowhere=5), draw.integer(16, 24))
    for nodes, per_node in ((2, 3), (3, 2), (1, 3))
]
popular = draw.integer(0, 7)  # all on one expert, and ranks without tokens
sizes = draw.several([0, 0, 3, 4], 4)
alone = [drawn_table(size, 1, [popular], nowhere=4) for size in sizes]
tables, *rest = scattered(2, 2, 2)
nobody = [torch.full((3, 3), -1), *tables[1:]]
expect_two_levels(*cases, (alone, 8, 2, 16), (nobody, *rest, 16), inside=True)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. One loss, and sums over the right ranks (2 points)
#
# The batch is the tokens of all ranks and of all their microbatches. A balance loss like that of Switch, but 0 when all experts are equally busy,
#
#     loss = α · Σ_e (E f_e - 1) · P_e    f_e  the share of expert e in all choices of the batch, a number: no gradient flows through it
#                                         P_e  the mean of the probability of e over the tokens of the batch; the router learns through it
#
# is not a sum over microbatches: f_e needs all of them. But once all ranks know f_e and the number of tokens, each microbatch has a share in the
# loss, what its own tokens add to it, and these shares add up. `balance_losses` returns them, one per microbatch of this rank: the sum over
# microbatches and ranks is the loss of one process, and its gradient too. Microbatches and ranks have different numbers of tokens. Padding has
# experts of -1 and probabilities of 0, and is no token. One sum of E + 1 numbers over the ranks is enough, however many microbatches there are.
#
# After backward, gradients are summed. Ranks stand in a grid: `ep` are the ranks that share out the experts, `beside` are the ranks that hold the
# same experts as this one, `world` are all of them. The ranks of ep sent their tokens to each other's experts, and gradients came back the same way.
# `sum_gradients` gets a dict by name, where names that begin with `experts.` belong to this rank's experts, and all others to parameters that every
# rank has. Losses were divided by the tokens of the whole batch, so all of these are sums. A gradient is sent once, in one all-reduce.
#
# > **API** `collectives.all_reduce(x, group)`: the sum over the group as a new tensor, or in place with `out=x`; any shape and dtype, outside
# > autograd. `probs` are float64 and may need a gradient, `experts` int64. Return a list of tensors without dimensions, one per
# > microbatch, with their graph. `sum_gradients` gets a dict of tensors and three groups; what it leaves is said in its docstring.
#
# E = 2, α = 1, two ranks with one microbatch each. Rank 0 has two tokens, both with expert 0 and probabilities (¾, ¼); rank 1 has one, with expert 1
# and (¼, ¾). f is (⅔, ⅓), there are 3 tokens. The shares are (⅓·3/2 - ⅓·1/2)/3 = 1/9 and (⅓·¼ - ⅓·¾)/3 = -1/18. Their sum is 1/18; each rank's
# own loss is 1/2, and so is the mean of the two.


# %% answer="one_loss"
def balance_losses(probs, experts, alpha, group):
    """probs[m] [N_m, E] and experts[m] [N_m, k], lists over this rank's microbatches -> a list of shares, tensors without dimensions."""
    ### BEGIN SOLUTION
    num_experts, chosen = probs[0].shape[1], torch.cat([table.flatten() for table in experts])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    tokens = sum((table >= 0).any(1).sum() for table in experts)
    total = collectives.all_reduce(torch.cat([counts, tokens[None]]), group)
    counts, tokens = total[:-1], total[-1]
    excess = num_experts * counts / counts.sum().to(probs[0].dtype) - 1
    return [alpha * (excess * p.sum(0)).sum() / tokens for p in probs]
    ### END SOLUTION


def sum_gradients(grads, world, ep, beside):
    """{name: this rank's gradient} -> {name: the gradient of the whole batch}."""
    ### BEGIN SOLUTION
    return {
        name: collectives.all_reduce(grad, beside if name.startswith("experts.") else world)
        for name, grad in grads.items()
    }
    ### END SOLUTION


# %% driver="grid"
def losses_on_a_rank(probs, experts, alpha, group):
    """The shares, and the gradient of their sum: what training adds to its loss, microbatch by microbatch."""
    leaves = [p.clone().requires_grad_() for p in probs]
    shares = list(balance_losses(leaves, list(experts), alpha, group))
    total = sum(shares)
    if torch.is_tensor(total) and total.requires_grad:
        total.backward()
    grads = [torch.empty(0) if leaf.grad is None else leaf.grad for leaf in leaves]
    return {"shares": [torch.as_tensor(share).detach().clone() for share in shares], "grads": grads}


def gradients_on_a_rank(grads, ep_size, group):
    """Ranks of ep follow one another."""
    row, column = divmod(group.rank(), ep_size)
    ep = [row * ep_size + other for other in range(ep_size)]
    beside = [other * ep_size + column for other in range(group.size() // ep_size)]
    return sum_gradients(dict(grads), group, *groups_of(group, (ep, beside)))


def losses_in_turn(cases, group):
    return in_turn(losses_on_a_rank, cases, group)


def gradients_in_turn(cases, group):
    return in_turn(gradients_on_a_rank, cases, group)


# %% judge="expect_sums"
def all_reduce_bytes(numel, ranks):
    """What a rank sends at most in one all-reduce of so many numbers of 8 bytes, pieces rounded up."""
    return 2 * (ranks - 1) * math.ceil(numel / ranks) * 8


def routed(tokens, k, num_experts, mask=None):
    """(probs, experts) of a microbatch."""
    routing = router.top_k(draw.real(tokens, num_experts) * 2, k, mask)
    return routing.probs, routing.experts


def sent_by(sent, rank):
    return sum(size for (source, _), size in sent[0].items() if source == rank)


def expect_losses(*cases, near=1e-12):
    """Cases (batch, alpha), batch[rank][microbatch] = (probs, experts): shares add up to the loss of one process, and so do gradients."""
    inputs = [
        [([p for p, _ in own], [e for _, e in own], alpha) for own in batch]
        for batch, alpha in cases
    ]
    for case, outcome in zip(cases, run_cases(losses_in_turn, inputs, collectives="all_reduce")):
        expect_shares(*case, near, *outcome)


def expect_shares(batch, alpha, near, results, sent):
    ranks, num_experts = len(batch), batch[0][0][0].shape[1]
    leaves = [[probs.clone().requires_grad_() for probs, _ in own] for own in batch]
    probs, experts = torch.cat(sum(leaves, [])), torch.cat([e for own in batch for _, e in own])
    whole = router.balance_loss(router.Routing(experts, torch.zeros(()), probs), alpha)
    whole = whole - alpha * probs.sum() / (experts >= 0).any(1).sum()
    whole.backward()
    said = [result["shares"] for result in results]
    expect(
        all(
            len(shares) == len(own) and all(share.shape == () for share in shares)
            for shares, own in zip(said, batch, strict=True)
        ),
        "a share for each microbatch",
        "a list with a tensor without dimensions for each microbatch of this rank",
    )
    expect_equal(
        torch.stack(sum(said, [])).sum(),
        whole.detach(),
        "shares add up",
        f"the shares of all microbatches and ranks do not add up to the loss of one process; over which tokens is each mean, and what is divided by what? (seen with {ranks} ranks, {len(batch[0])} microbatches)",
        atol=near,
    )
    for rank, own in enumerate(leaves):
        expect_equal(
            results[rank]["grads"],
            [leaf.grad for leaf in own],
            "gradient of the loss",
            "the value is right, but not what the router learns: does each token's probability reach the loss of its own rank through autograd, once?",
            atol=near,
        )
        expect_equal(
            said[rank],
            [(leaf.detach() * leaf.grad).sum() for leaf in own],
            "the share of a microbatch",
            "all shares add up, but each should be what the tokens of its own microbatch add",
            atol=near,
        )
    expect(
        max(sent_by(sent, rank) for rank in range(ranks))
        <= all_reduce_bytes(num_experts + ranks, ranks),
        "bytes on the wire",
        "one sum of E + 1 numbers is enough, for all microbatches together; what else is sent?",
    )


def expect_gradients(*cases):
    """Cases (replicas, ep_size, width): gradients on a grid of `replicas` times ep_size ranks."""
    grads = [drawn_gradients(replicas * ep_size, width) for replicas, ep_size, width in cases]
    inputs = [[(own, ep_size) for own in of_case] for of_case, (_, ep_size, _) in zip(grads, cases)]
    outcomes = run_cases(gradients_in_turn, inputs, collectives="all_reduce")
    for (replicas, ep_size, _), own, outcome in zip(cases, grads, outcomes):
        expect_grid(replicas, ep_size, own, *outcome)


def drawn_gradients(ranks, width):
    shapes = {"router": [7, width], "experts.up": [2, width, 5]}
    shapes |= {"attention": [3, 5, width], "experts.down": [2, 5, width], "norm": [11]}
    names = draw.several(shapes, len(shapes))
    return [{name: draw.exact(*shapes[name]) for name in names} for _ in range(ranks)]


def expect_grid(replicas, ep_size, grads, results, sent):
    ranks, names = replicas * ep_size, list(grads[0])
    for said in results:
        expect(
            isinstance(said, dict) and set(said) == set(names), "names", "a dict, names as given"
        )
    for name in names:
        alone = name.startswith("experts.")
        summed = [
            [other for other in range(ranks) if not alone or other % ep_size == rank % ep_size]
            for rank in range(ranks)
        ]
        expect_equal(
            [said[name] for said in results],
            [sum(grads[other][name] for other in over) for over in summed],
            "gradients of experts" if alone else "gradients of the others",
            f"an expert has seen the tokens of all ranks of its ep; who else has this expert, and did its rank see the same tokens? (seen with {replicas} times {ep_size} ranks)"
            if alone
            else f"every rank has this parameter, and tokens of its own; whose tokens are missing, or is it a mean? (seen with {replicas} times {ep_size} ranks)",
        )
    most = sum(
        all_reduce_bytes(grad.numel(), replicas if name.startswith("experts.") else ranks)
        for name, grad in grads[0].items()
    )
    expect(
        max(sent_by(sent, rank) for rank in range(ranks)) <= most,
        "bytes of the gradients",
        "one all-reduce for each gradient, over those that have terms of it; who else is spoken to?",
    )


# %% check="one_loss-loss" points=1
# Shares of all microbatches and ranks add up to the loss of one process, and so do their gradients.
of_the_text = [
    [(torch.tensor([[0.75, 0.25]] * 2).double(), torch.tensor([[0], [0]]))],
    [(torch.tensor([[0.25, 0.75]]).double(), torch.tensor([[1]]))],
]
two_each = [[routed(3, 2, 4), routed(5, 2, 4)], [routed(2, 2, 4), routed(1, 2, 4)]]
expect_losses((of_the_text, 1.0), (two_each, 0.5))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for ranks in (1, 3, 4):
    micro, experts = draw.integer(2, 4), draw.integer(3, 9)
    k = draw.integer(2, 3)
    sizes = [draw.several(range(2, 12), micro) for _ in range(ranks)]
    batch = [[routed(size, k, experts, draw.mask(size)) for size in own] for own in sizes]
    batch[-1][0] = routed(4, k, experts, torch.zeros(4, dtype=torch.bool))  # nothing but padding
    cases.append((batch, draw.integer(1, 50) / 64))
sizes = draw.several(range(1, 9), 4)
expect_losses(*cases, ([[routed(size, 1, 5) for size in sizes[r : r + 2]] for r in (0, 2)], 2.0))
### END HIDDEN TESTS

# %% check="one_loss-gradients" points=1
# Experts are summed over the ranks that hold them too, everything else over all ranks.
expect_gradients((2, 2, 3))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
grids = (3, 2), (2, 3), (1, draw.integer(2, 4)), (draw.integer(2, 4), 1)
expect_gradients(*((*grid, draw.integer(2, 6)) for grid in grids))
### END HIDDEN TESTS
