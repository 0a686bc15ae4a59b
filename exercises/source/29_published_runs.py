# %% [markdown]
# # Exercises 29: published runs, and a run through chaos
#
# Six tasks, 10 points, about three hours: what a capstone asks for, as rules on plain values. Read chapter 29 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 29
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Tasks 2, 3, 5 and 6 follow what `minitrain train --survive` does (chapter 21), with simpler costs.

# %% given="setup"
import math
from fractions import Fraction
from itertools import product

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, wanted, property, hint):
    """wanted[i] of cases[i], exactly."""
    for said, case, right in zip(ask_each(answer, list(cases)), cases, wanted, strict=True):
        expect(type(said) is type(right), "kind of result", f"see the API (seen with {case})")
        expect(said == right, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Which number is wrong (2 points)
#
# A log prints whole numbers. Some of them are products of others: `["devices", ["tp", "dp"]]` says devices = tp · dp. At most one number was copied
# wrongly. Return the sorted names of the numbers of which each alone may be the wrong one: with another whole number, 1 or more, in its place all products
# hold. If all hold as it is, return the empty list.
#
# > **API** `suspects(printed, products)` gets a dict of positive `int`s up to 10**6 and a list of lists `[name, [factors]]`, and returns a list of names.
# > A factor stands once in a product; a name can be a product in one and a factor in another.


# %% answer="suspects"
def suspects(printed, products):
    """-> sorted names that alone may be wrong."""

    ### BEGIN SOLUTION
    def fit(numbers):
        return all(
            math.prod(numbers[part] for part in parts) == numbers[name] for name, parts in products
        )

    if fit(printed):
        return []
    found = []
    for name in printed:
        candidates = set()
        for whole, parts in products:
            if whole == name:
                candidates.add(math.prod(printed[part] for part in parts))
            elif name in parts:
                others = math.prod(printed[part] for part in parts if part != name)
                candidates.add(max(1, printed[whole] // others))
        found += [name] * any(fit(printed | {name: value}) for value in candidates)
    return sorted(found)
    ### END SOLUTION


# %% check="suspects-one" points=1
# One product: all of its factors for which a whole number fits, and the product.
LAYOUT = {"devices": 96, "dp": 13, "pp": 4, "tp": 2}
expect_each(
    suspects,
    [
        (LAYOUT, [["devices", ["dp", "pp", "tp"]]]),
        (LAYOUT | {"dp": 12}, [["devices", ["dp", "pp", "tp"]]]),
    ],
    [["devices", "dp"], []],
    "suspects of one product",
    "for which of them is there another whole number?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(40):
    a, b, c = draw.integer(2, 9), draw.integer(2, 9), draw.integer(2, 9)
    w = a * b * c + draw.integer(0, 2) * draw.choice([a, b, c, 1])
    cases.append(({"a": a, "b": b, "c": c, "w": w}, [["w", ["a", "b", "c"]]]))
    names = [n for n, o in (("a", b * c), ("b", a * c), ("c", a * b)) if w % o == 0]
    wanted.append([*names, "w"] if w != a * b * c else [])
expect_each(
    suspects, cases, wanted, "suspects of one product", "which could be another whole number?"
)
### END HIDDEN TESTS

# %% check="suspects-more" points=1
# Several products: only what mends all of them.
FACTS = [["devices", ["dp", "tp"]], ["batch", ["dp", "rows"]], ["tokens", ["batch", "length"]]]
RUN = {"devices": 8, "dp": 4, "tp": 2, "batch": 16, "rows": 4, "length": 10, "tokens": 160}
expect_each(
    suspects,
    [(RUN | {"dp": 5}, FACTS), (RUN | {"batch": 15}, FACTS), (RUN | {"tokens": 144}, FACTS)],
    [["dp"], ["batch"], ["length", "tokens"]],
    "suspects of all products",
    "with its new value, do the other products still hold?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(40):
    run = {name: draw.integer(2, 7) for name in ("dp", "tp", "rows", "length")}
    run |= {"devices": run["dp"] * run["tp"], "batch": run["dp"] * run["rows"]}
    run |= {"tokens": run["batch"] * run["length"]}
    name = draw.choice(sorted(run))
    run[name] += draw.integer(1, 6)
    right = []
    for other in sorted(run):
        for value in range(1, 1200):
            now = run | {other: value}
            if all(math.prod(now[p] for p in ps) == now[w] for w, ps in FACTS):
                right.append(other)
    cases.append((run, FACTS))
    wanted.append(right)
expect_each(suspects, cases, wanted, "suspects of all products", "does it mend every product?")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A layout for every generation (2 points)
#
# `ranks` replicas train a model of P parameters on a batch of `rows` rows; a rank has ⌈rows / ranks⌉ of them at most. ZeRO's stage says which states are
# shared out: of the optimizer's 12 bytes per parameter from stage 1 on, of the gradients' 2 from stage 2 on, of the weights' 2 from stage 3 on; a rank has
# ⌈P / ranks⌉ parameters' worth of what is shared out. Activations take `row_bytes` per row. In a step a rank sends 4·P·(n-1)/n bytes up to stage 2, and
# 6·P·(n-1)/n in stage 3. Return the smallest stage with which a rank holds at most `held_cap` and sends at most `sent_cap` bytes; `None` if no stage does.
#
# > **API** `layout(job, ranks)` gets a dict of `int`s with the keys `parameters`, `rows`, `row_bytes`, `held_cap`, `sent_cap`, and an `int` from 1 to 64;
# > it returns 0, 1, 2, 3 or `None`. It is called anew for each generation: four ranks, and when one has died, three.


# %% answer="layout"
def layout(job, ranks):
    """-> the smallest stage of ZeRO within both caps, or None."""
    ### BEGIN SOLUTION
    P, share = job["parameters"], -(-job["parameters"] // ranks)
    rows = -(-job["rows"] // ranks)
    for stage in range(4):
        held = rows * job["row_bytes"]
        for first, size in ((1, 12), (2, 2), (3, 2)):
            held += size * (share if stage >= first else P)
        sent = (6 if stage == 3 else 4) * P * (ranks - 1)
        if held <= job["held_cap"] and sent <= job["sent_cap"] * ranks:
            return stage
    return None
    ### END SOLUTION


# %% judge="expect_layouts"
JOB = {"parameters": 1000, "rows": 12, "row_bytes": 100, "held_cap": 7300, "sent_cap": 10**9}


def expect_layouts(cases, wanted, property):
    for said, case, right in zip(ask_each(layout, list(cases)), cases, wanted, strict=True):
        expect(
            said is None or type(said) is int,
            "kind of result",
            f"a stage or None (seen with {case})",
        )
        expect(said == right, property, f"what does a rank hold and send then? (seen with {case})")


# %% check="layout-held" points=1
# Bytes that a rank holds, with four ranks, three and two: the larger shards of fewer ranks, and their rows.
expect_layouts(
    [(JOB, 4), (JOB, 3), (JOB, 2), (JOB | {"held_cap": 17_200}, 1), (JOB, 1)],
    [1, 2, None, 0, None],
    "bytes held",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(25):
    n, P, rows = draw.integer(2, 9), draw.integer(100, 3000), draw.integer(5, 40)
    each = draw.integer(1, 400)
    part, acts = math.ceil(P / n), math.ceil(rows / n) * each
    need = [16 * P, 4 * P + 12 * part, 2 * P + 14 * part, 16 * part]
    stage = draw.integer(0, 4)
    cap = (need + [need[3] - 1])[stage] + acts
    job = {"parameters": P, "rows": rows, "row_bytes": each, "held_cap": cap, "sent_cap": 10**9}
    cases.append((job, n))
    wanted.append(next((s for s in range(4) if need[s] + acts <= cap), None))
expect_layouts(cases, wanted, "bytes held")
### END HIDDEN TESTS

# %% check="layout-sent" points=1
# Bytes that a rank sends, too.
TIGHT = JOB | {"held_cap": 5000, "sent_cap": 4500}
expect_layouts(
    [(TIGHT, 4), (TIGHT, 3), (JOB | {"sent_cap": 2999}, 4), (JOB | {"sent_cap": 3000}, 4)],
    [3, None, None, 1],
    "bytes sent",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(25):
    n = draw.integer(2, 9)
    P = n * draw.integer(20, 300)
    rows = n * draw.integer(1, 4)
    acts = rows // n * 50
    need = [16 * P, 4 * P + 12 * P // n, 2 * P + 14 * P // n, 16 * P // n]
    held = need[draw.integer(0, 3)] + acts
    sends = [4 * (P - P // n)] * 3 + [6 * (P - P // n)]
    sent = draw.choice(sends) - draw.integer(0, 1)
    job = {"parameters": P, "rows": rows, "row_bytes": 50, "held_cap": held, "sent_cap": sent}
    cases.append((job, n))
    good = [s for s in range(4) if need[s] + acts <= held and sends[s] <= sent]
    wanted.append(good[0] if good else None)
expect_layouts(cases, wanted, "bytes sent")
### END HIDDEN TESTS

# %% [markdown]
# ## 3. How often to copy, how often to save (1 point)
#
# Every `copies` steps each share goes to a neighbour, which takes `copy_s`; every `saves` steps all of it goes to a disk, which takes `save_s`; `saves` is a
# multiple of `copies`. A step takes `step_s`. Per step one rank dies with probability 1 / `alone`, and then finished steps since the last copy are made again;
# two neighbours die together with probability 1 / `together`, and then it is those since the last save. That is (interval - 1) / 2 steps on average,
# and interval - 1 at most, which may not be more than `redone_cap` after the death of one rank. Of all `copies` and `saves` from 1 to 60 return those with
# the least expected seconds per step beyond the step itself; of equals the smaller `copies`, then the smaller `saves`.
#
# > **API** `protect(job)` gets a dict of `int`s with the keys `copy_s`, `save_s`, `step_s`, `alone`, `together`, `redone_cap`; it returns `[copies, saves]`.


# %% answer="protect"
def protect(job):
    """-> [copies, saves] with the least expected seconds."""

    ### BEGIN SOLUTION
    def extra(pair):
        copies, saves = pair
        again = Fraction(copies - 1, 2 * job["alone"]) + Fraction(saves - 1, 2 * job["together"])
        return (
            Fraction(job["copy_s"], copies) + Fraction(job["save_s"], saves) + job["step_s"] * again
        )

    every = product(range(1, min(60, job["redone_cap"] + 1) + 1), range(1, 61))
    fair = [pair for pair in every if pair[1] % pair[0] == 0]
    return list(min(fair, key=lambda pair: (extra(pair), pair)))
    ### END SOLUTION


# %% check="protect-both" points=1
# The least seconds within the cap.
CALM = {"copy_s": 2, "save_s": 20, "step_s": 10, "alone": 50, "together": 500, "redone_cap": 99}
expect_each(
    protect,
    [(CALM,), (CALM | {"redone_cap": 1},), (CALM | {"alone": 2},), (CALM | {"together": 10},)],
    [[5, 45], [2, 44], [1, 45], [6, 6]],
    "least seconds",
    "what do intervals cost, and what is made again? Are all pairs looked at?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(30):
    job = {
        "copy_s": draw.integer(1, 9),
        "save_s": draw.integer(5, 60),
        "step_s": draw.integer(1, 20),
    }
    job |= {"alone": draw.integer(2, 90), "together": draw.integer(20, 900)}
    job |= {"redone_cap": draw.integer(0, 12)}
    best = None
    for k in range(1, 61):
        for j in range(k, 61, k):
            common = 2 * job["alone"] * job["together"] * k * j
            cost = common * job["copy_s"] // k + common * job["save_s"] // j
            cost = Fraction(cost, common) + Fraction(job["step_s"] * (k - 1), 2 * job["alone"])
            cost += Fraction(job["step_s"] * (j - 1), 2 * job["together"])
            if k - 1 <= job["redone_cap"] and (best is None or cost < best[0]):
                best = cost, [k, j]
    cases.append((job,))
    wanted.append(best[1])
expect_each(
    protect, cases, wanted, "least seconds", "what do intervals cost, and what is made again?"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The post-mortem (2 points)
#
# The log of a job in which some ranks went silent at once, all for the same reason. Lines are in order of time, as `[rank, word, number]`:
#
#     [2, "begin", 7]      rank 2 begins step 7           [2, "end", 7]      it has finished step 7
#     [2, "lost", 1]       rank 2's connection to rank 1 was closed        [2, "late", 1]     it waited for rank 1 too long, and gave up
#     [2, "from", 5]       rank 2 goes on from step 5     [2, "sent", 4096]  it sent so many bytes of state while ranks regrouped
#
# A rank that gives up closes its own connections, so its neighbours lose *it*: who is blamed first need not be who went silent. All who are left say
# from which step they go on, and nobody else does. Connections of a killed rank are closed; a stopped one closes nothing, so the first complaint of all is
# "lost" if ranks were killed and "late" if they were stopped. Nothing happens twice.
#
# > **API** `post_mortem(log)` returns `[silent, kind, step, redone, moved]`: the sorted silent ranks; "kill" or "stop"; the last step that any
# > of these began; how many steps that some rank had finished before are made again; all bytes of state sent. At least one rank goes on.


# %% answer="post_mortem"
def post_mortem(log):
    """-> [silent ranks, "kill" or "stop", step, redone, moved]."""
    ### BEGIN SOLUTION
    here = {rank for rank, word, _ in log if word == "from"}
    silent = sorted({rank for rank, *_ in log} - here)
    first = next(word for _, word, _ in log if word in ("lost", "late"))
    step = max(number for rank, word, number in log if word == "begin" and rank in silent)
    at = next(place for place, line in enumerate(log) if line[1] == "from")
    finished = max([-1] + [number for _, word, number in log[:at] if word == "end"])
    again = max(0, finished + 1 - log[at][2])
    moved = sum(number for _, word, number in log if word == "sent")
    return [silent, "kill" if first == "lost" else "stop", step, again, moved]
    ### END SOLUTION


# %% judge="expect_post_mortems"
def drawn_log():
    """A log by its rules, and what is true of it."""
    ranks, step = draw.integer(3, 6), draw.integer(3, 20)
    silent = sorted(draw.several(range(ranks), draw.integer(1, ranks - 2)))
    here, kind = [r for r in range(ranks) if r not in silent], draw.choice(["kill", "stop"])
    log = []
    for s in range(step + 1):
        order = draw.several(range(ranks), ranks)
        log += [[r, "begin", s] for r in order]
        log += [[r, "end", s] for r in order if s < step]
    if draw.random() < 0.5:  # one of those that are left had finished already
        log.append([here[0], "end", step])
        log.append([here[0], "begin", step + 1])
    done = step + (log[-1][2] == step + 1)
    word = "lost" if kind == "kill" else "late"
    seen = [[here[0], word, silent[-1]]]  # then innocent ones are lost to others, more often
    seen += [[r, "lost", here[0]] for r in here[1:]] + [[r, "lost", here[-1]] for r in here[:-1]]
    if draw.random() < 0.5 and len(here) > 1:  # an innocent is blamed first
        seen = [[here[-1], word, here[0]], *seen[0:]]
    back = draw.integer(0, 3)
    sizes = [draw.integer(0, 9) * 1000 for _ in here]
    log += seen + [[r, "sent", size] for r, size in zip(here, sizes)]
    log += [[r, "from", done - back] for r in here]
    for s in range(done - back, done + 2):
        log += [[r, word, s] for word in ("begin", "end") for r in here]
    return log, [silent, kind, step, back, sum(sizes)]


def expect_post_mortems(cases, wanted):
    for said, (log,), right in zip(ask_each(post_mortem, cases), cases, wanted, strict=True):
        formed = isinstance(said, list) and len(said) == 5 and isinstance(said[0], list)
        expect(formed, "five facts", f"see the API (seen with {log})")
        expect(said[0] == right[0], "who went silent", f"who does not go on? (seen with {log})")
        expect(said[1] == right[1], "what happened", f"what is heard first? (seen with {log})")
        expect(said[2] == right[2], "the step", f"whose step is asked for? (seen with {log})")
        expect(
            said[3] == right[3], "steps redone", f"what had any rank finished? (seen with {log})"
        )
        expect(said[4] == right[4], "bytes moved", f"of all who sent (seen with {log})")


# %% check="post_mortem-one" points=1
# One silent rank; the first complaint is about an innocent one.
LOG = [[r, word, 0] for word in ("begin", "end") for r in range(3)] + [
    [r, "begin", 1] for r in range(3)
]
KILLED = [
    [0, "lost", 2],
    [2, "lost", 1],
    [0, "sent", 100],
    [2, "sent", 20],
    [0, "from", 1],
    [2, "from", 1],
]
STOPPED = [
    [2, "late", 1],
    [0, "lost", 2],
    [0, "sent", 7],
    [0, "from", 0],
    [2, "from", 0],
    [0, "begin", 0],
]
expect_post_mortems(
    [(LOG + KILLED,), (LOG + STOPPED,)], [[[1], "kill", 1, 0, 120], [[1], "stop", 1, 1, 7]]
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
drawn = [drawn_log() for _ in range(40)]
expect_post_mortems([(log,) for log, _ in drawn], [right for _, right in drawn])
### END HIDDEN TESTS

# %% check="post_mortem-more" points=1
# Two at once; one of those that are left had finished the step.
LOG = [[r, word, 0] for word in ("begin", "end") for r in range(4)] + [
    [r, "begin", 1] for r in range(4)
]
LOG += [
    [3, "end", 1],
    [3, "begin", 2],
    [3, "lost", 0],
    [0, "lost", 1],
    [3, "from", 0],
    [0, "from", 0],
]
expect_post_mortems([(LOG,)], [[[1, 2], "kill", 1, 2, 0]])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
drawn = [drawn_log() for _ in range(40)]
expect_post_mortems([(log,) for log, _ in drawn], [right for _, right in drawn])
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Planned segments (2 points)
#
# Members 0 .. ranks-1 make `steps` steps. A fault `[step, members]` kills these members in that step, before it is finished, when the step is made for the
# first time; there is at most one fault per step. Members that are left, in order, are a ring. The state of each has a copy at the next member of
# the ring. The copy is of the newest step that is a multiple of `copies`, or of the step from which the present ring began, whichever is newer; all members
# copy at the same moment. If nobody died together with the next one of the ring, they go on from that copy. Else they go on from the newest multiple of
# `saves` (0 is one), or if that is newer than the copy, no matter. Return the segments, each `[first, members left]`: the
# steps from which rings of so many members began, and the number of finished steps that were made again, over all.
#
# > **API** `segments(ranks, steps, faults, copies, saves)` gets `int`s and a list sorted by step, and returns `[list of [first, left], redone]`. Steps count
# > from 0; somebody is always left. A ring of one is its own next one, and cannot die.


# %% answer="segments"
def segments(ranks, steps, faults, copies, saves):
    """-> [[[first, members left], ..], steps made again]."""
    ### BEGIN SOLUTION
    ring, began, found, again = list(range(ranks)), 0, [[0, ranks]], 0
    for step, members in faults:
        gone = [member in members for member in ring]
        together = any(one and gone[(place + 1) % len(gone)] for place, one in enumerate(gone))
        first = step // saves * saves if together else max(began, step // copies * copies)
        ring = [member for member in ring if member not in members]
        again, began = again + step - first, first
        found.append([first, len(ring)])
    return [found, again]
    ### END SOLUTION


# %% judge="expect_segments"
def expect_segments(cases, wanted):
    for said, case, right in zip(ask_each(segments, cases), cases, wanted, strict=True):
        formed = isinstance(said, list) and len(said) == 2 and isinstance(said[0], list)
        expect(formed, "segments and steps", f"see the API (seen with {case})")
        counts = [one[-1:] for one in said[0] if isinstance(one, list)]
        expect(counts == [one[-1:] for one in right[0]], "how many are left", f"seen with {case}")
        expect(
            said[0] == right[0], "where they go on", f"is each state somewhere? (seen with {case})"
        )
        expect(said[1] == right[1], "steps made again", f"of all faults (seen with {case})")


def drawn_faults(ranks, steps):
    """Some steps, and in each some of those that are left."""
    left, faults = list(range(ranks)), []
    for step in sorted(draw.several(range(1, steps), draw.integer(1, 4))):
        if len(left) > 1:
            gone = sorted(draw.several(left, draw.integer(1, max(1, len(left) // 2))))
            left = [member for member in left if member not in gone]
            faults.append([step, gone])
    return faults


def by_walking(ranks, steps, faults, copies, saves):
    """Step by step, with the copies that there are."""
    alive, at, last, again, out = set(range(ranks)), 0, 0, 0, [[0, ranks]]
    due = {step: set(gone) for step, gone in faults}
    while at < steps:
        if at % copies == 0:
            last = at
        if at in due:
            gone = due.pop(at)
            order = sorted(alive)
            pairs = zip(order, order[1:] + order[:1])
            lost = any(a in gone and b in gone for a, b in pairs)
            back = at - at % saves if lost else last
            alive -= gone
            again += at - back
            at = last = back
            out.append([at, len(alive)])
            continue
        at += 1
    return [out, again]


# %% check="segments-alone" points=1
# Deaths of one: from the last copy, or the beginning of the ring.
expect_segments(
    [
        (4, 12, [[5, [3]]], 1, 4),
        (4, 12, [[5, [3]], [7, [0]]], 4, 12),
        (4, 12, [[5, [1]], [6, [2]]], 3, 6),
    ],
    [[[[0, 4], [5, 3]], 0], [[[0, 4], [4, 3], [4, 2]], 4], [[[0, 4], [3, 3], [6, 2]], 2]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for _ in range(30):
    faults = [[s, g[:1]] for s, g in drawn_faults(9, 30)]
    cases.append((9, 30, faults, draw.integer(1, 7), draw.integer(1, 9)))
expect_segments(cases, [by_walking(*case) for case in cases])
### END HIDDEN TESTS

# %% check="segments-together" points=1
# Deaths of several: neighbours of the present ring take a copy with them.
expect_segments(
    [
        (4, 12, [[7, [1, 2]]], 1, 5),
        (4, 12, [[7, [1, 3]]], 1, 5),
        (4, 12, [[7, [3, 0]]], 1, 5),
        (5, 12, [[3, [2]], [8, [1, 3]]], 1, 6),
        (6, 20, [[7, [1, 2]], [8, [4]]], 5, 7),
    ],
    [
        [[[0, 4], [5, 2]], 2],
        [[[0, 4], [7, 2]], 0],
        [[[0, 4], [5, 2]], 2],
        [[[0, 5], [3, 4], [6, 2]], 2],
        [[[0, 6], [7, 4], [7, 3]], 1],
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for _ in range(40):
    ranks = draw.integer(4, 9)
    cases.append((ranks, 30, drawn_faults(ranks, 30), draw.integer(1, 7), draw.integer(1, 9)))
expect_segments(cases, [by_walking(*case) for case in cases])
### END HIDDEN TESTS

# %% [markdown]
# ## 6. Tokens per simulated second (1 point)
#
# The score of a run: the tokens of its steps, each counted once, over all the time that it took. Segments are those of task 5; `stops[i]` is the step in which
# segment i ended (it was not finished), the last one's is the number of steps. A step of a ring of n takes `step_s[n]` milliseconds, a regroup `regroup_s` milliseconds.
#
# > **API** `score(segments, stops, step_s, regroup_s, tokens)` gets the list of `[first, left]`, a list of `int`s as long, a list of `int`s whose entry n is for n members, two `int`s,
# > of which `tokens` are those of one step. Returns `[numerator, denominator]`: tokens per second as an exact fraction in lowest terms.


# %% answer="score"
def score(segments, stops, step_s, regroup_s, tokens):
    """-> [numerator, denominator] of tokens per second."""
    ### BEGIN SOLUTION
    spent = sum((stop - first) * step_s[left] for (first, left), stop in zip(segments, stops))
    spent += regroup_s * (len(segments) - 1)
    found = Fraction(1000 * tokens * stops[-1], spent)
    return [found.numerator, found.denominator]
    ### END SOLUTION


# %% check="score-exact" points=1
# Steps that are made again take time and train nothing.
expect_each(
    score,
    [
        ([[0, 4]], [10], [0, 9, 9, 30, 20], 300, 64),
        ([[0, 4], [4, 3]], [6, 10], [0, 9, 9, 30, 20], 100, 64),
    ],
    [[3200, 1], [1600, 1]],
    "tokens per second",
    "which steps took time, and which trained something new?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(30):
    first, left, walked, spans, stops = 0, draw.integer(4, 8), 0, [], []
    step_s = [draw.integer(10, 90) for _ in range(9)]
    pause = draw.integer(1, 500)
    for _ in range(draw.integer(1, 3)):
        stop = first + draw.integer(1, 9)
        spans.append([first, left])
        stops.append(stop)
        for _ in range(first, stop):
            walked += step_s[left]
        first, left = stop - draw.integer(0, stop - first), left - 1
    walked += pause * len(stops[1:])
    found = Fraction(1000 * 64 * stops[-1], walked)
    cases.append((spans, stops, step_s, pause, 64))
    wanted.append([found.numerator, found.denominator])
expect_each(score, cases, wanted, "tokens per second", "which steps took time, and which trained?")
### END HIDDEN TESTS
