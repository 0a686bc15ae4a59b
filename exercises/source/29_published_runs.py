# %% [markdown]
# # Exercises 29: published runs, and a run through chaos
#
# Seven tasks, 10 points, about four hours: six rules on plain values, then the capstone, in which your answers train a model on four real
# ranks of which some die, hang, pause or err. Read chapter 29 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 29
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells.
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
# ## 1. Which number is wrong (1 point)
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
# One product, and several: only what mends all of them.
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
    a, b, c = draw.integer(2, 9), draw.integer(2, 9), draw.integer(2, 9)
    w = a * b * c + draw.integer(0, 2) * draw.choice([a, b, c, 1])
    cases.append(({"a": a, "b": b, "c": c, "w": w}, [["w", ["a", "b", "c"]]]))
    names = [n for n, o in (("a", b * c), ("b", a * c), ("c", a * b)) if w % o == 0]
    wanted.append([*names, "w"] if w != a * b * c else [])
expect_each(
    suspects, cases, wanted, "suspects of one product", "which could be another whole number?"
)
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
# ## 2. A layout for every generation (1 point)
#
# `ranks` replicas train a model of P parameters on a batch of `rows` rows; a rank has ⌈rows / ranks⌉ of them at most. ZeRO's stage says which states are
# shared out: of the optimizer's 12 bytes per parameter from stage 1 on, of the gradients' 2 from stage 2 on, of the weights' 2 from stage 3 on; a rank has
# ⌈P / ranks⌉ parameters' worth of what is shared out. Activations take `row_bytes` per row. In a step a rank sends 4·P·(n-1)/n bytes up to stage 2, and
# 6·P·(n-1)/n in stage 3. Return the smallest stage with which a rank holds at most `held_cap` and sends at most `sent_cap` bytes; `None` if no stage does.
#
# > **API** `stage_for(job, ranks)` gets a dict of `int`s with the keys `parameters`, `rows`, `row_bytes`, `held_cap`, `sent_cap`, and an `int` from 1 to 64;
# > it returns 0, 1, 2, 3 or `None`. It is called anew for each generation: four ranks, and when one has died, three.


# %% answer="stage_for"
def stage_for(job, ranks):
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
    for said, case, right in zip(ask_each(stage_for, list(cases)), cases, wanted, strict=True):
        expect(
            said is None or type(said) is int,
            "kind of result",
            f"a stage or None (seen with {case})",
        )
        expect(said == right, property, f"what does a rank hold and send then? (seen with {case})")


# %% check="stage-held" points=1
# Bytes that a rank holds, with four ranks, three and two, and bytes that it sends.
expect_layouts(
    [(JOB, 4), (JOB, 3), (JOB, 2), (JOB | {"held_cap": 17_200}, 1), (JOB, 1)],
    [1, 2, None, 0, None],
    "bytes held",
)
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
# > **API** `intervals(job)` gets a dict of `int`s with the keys `copy_s`, `save_s`, `step_s`, `alone`, `together`, `redone_cap`; it returns `[copies, saves]`.


# %% answer="intervals"
def intervals(job):
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


# %% check="intervals-both" points=1
# The least seconds within the cap.
CALM = {"copy_s": 2, "save_s": 20, "step_s": 10, "alone": 50, "together": 500, "redone_cap": 99}
expect_each(
    intervals,
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
    intervals, cases, wanted, "least seconds", "what do intervals cost, and what is made again?"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The post-mortem (1 point)
#
# The log of a job in which some members fell silent, all for one reason, and the rest regrouped and went on. Lines in order of time, `[member, word, number]`:
#
#     [2, "begin", 7]      member 2 begins step 7           [2, "end", 7]        it has finished step 7
#     [2, "gave up", 1]    it gives up a collective; in the ring it receives from member 1, which need not be to blame
#     [-1, "hung", 3]      the launcher has ended member 3, which did not get on any more
#     [2, "odd", 3]        when weights were compared, those of member 3 were others: it ends itself
#     [2, "sent", 4096]    bytes of state that it sent while members regrouped       [2, "from", 5]       it goes on from step 5
#
# A rank that gives up closes its connections, so its neighbours give up, too: who is named first need not be who is gone. All who are left say from
# where they go on, and nobody else does; a member may fall silent while the others regroup. Where nobody says so, nothing has happened.
#
# > **API** `silent_ranks(log)` returns `[silent, kind, step, redone, moved]`: the sorted silent members; "flip" if one was odd, "stop" if one was hung, else
# > "kill"; the last step that any of these began; how many steps that some member had finished are made again; all bytes of state sent.
# > Where nothing has happened: `[[], "none", -1, 0, 0]`.


# %% answer="silent_ranks"
def silent_ranks(log):
    """-> [silent members, "kill", "stop", "flip" or "none", step, redone, moved]."""
    ### BEGIN SOLUTION
    on = {member for member, word, _ in log if word == "from"}
    if not on:
        return [[], "none", -1, 0, 0]
    silent = sorted({member for member, *_ in log} - on - {-1})
    words = {word for _, word, _ in log}
    kind = "flip" if "odd" in words else "stop" if "hung" in words else "kill"
    step = max(number for member, word, number in log if word == "begin" and member in silent)
    at = next(place for place, line in enumerate(log) if line[1] == "from")
    finished = max([-1] + [number for _, word, number in log[:at] if word == "end"])
    again = max(0, finished + 1 - log[at][2])
    moved = sum(number for _, word, number in log if word == "sent")
    return [silent, kind, step, again, moved]
    ### END SOLUTION


# %% judge="expect_post_mortems"
def drawn_log():
    """A log by its rules, and what is true of it."""
    ranks, step = draw.integer(3, 6), draw.integer(3, 20)
    silent = sorted(draw.several(range(ranks), draw.integer(1, ranks - 2)))
    here, kind = [r for r in range(ranks) if r not in silent], draw.choice(["kill", "stop", "flip"])
    log = []
    for s in range(step + 1):
        order = draw.several(range(ranks), ranks)
        log += [[r, "begin", s] for r in order]
        log += [[r, "end", s] for r in order if s < step]
    if draw.random() < 0.5:  # one of those that are left had finished already
        log += [[here[0], "end", step], [here[0], "begin", step + 1]]
    done = step + (log[-1][2] == step + 1)
    log += [[-1, "hung", r] for r in silent[:1] if kind == "stop"]
    log += [[r, "odd", silent[0]] for r in here if kind == "flip"]
    gave = [[r, "gave up", (r - 1) % ranks] for r in draw.several(range(ranks), ranks)]
    log += [line for line in gave if line[0] in here or draw.random() < 0.3]
    back = draw.integer(0, 3)
    sizes = [draw.integer(0, 9) * 1000 for _ in here]
    log += [[r, "sent", size] for r, size in zip(here, sizes)]
    log += [[r, "from", done - back] for r in here]
    for s in range(done - back, done + 2):
        log += [[r, word, s] for word in ("begin", "end") for r in here]
    return log, [silent, kind, step, back, sum(sizes)]


def expect_post_mortems(answer, cases, wanted):
    for said, (log,), right in zip(ask_each(answer, cases), cases, wanted, strict=True):
        formed = isinstance(said, list) and len(said) == 5 and isinstance(said[0], list)
        expect(formed, "five facts", f"see the API (seen with {log})")
        expect(said[0] == right[0], "who went silent", f"who does not go on? (seen with {log})")
        expect(said[1] == right[1], "what happened", f"what do others say of it? (seen with {log})")
        expect(said[2] == right[2], "the step", f"whose step is asked for? (seen with {log})")
        redone = f"what had any member finished? (seen with {log})"
        expect(said[3] == right[3], "steps redone", redone)
        expect(said[4] == right[4], "bytes moved", f"of all who sent (seen with {log})")


# %% check="silent-one" points=1
# Who fell silent, of one and of two; the first to be named is innocent.
LOG = [[r, word, 0] for word in ("begin", "end") for r in range(4)] + [
    [r, "begin", 1] for r in range(4)
]
KILLED = [[3, "gave up", 2], [2, "gave up", 1], [0, "gave up", 3], [2, "sent", 100]]
KILLED += [[3, "sent", 20], [2, "from", 1], [0, "from", 1], [3, "from", 1]]
HUNG = [[-1, "hung", 1], [2, "gave up", 1], [0, "gave up", 3], [3, "gave up", 2]]
HUNG += [[r, "from", 0] for r in (0, 2, 3)] + [[0, "begin", 0]]
TWO = [[3, "end", 1], [3, "begin", 2], [3, "gave up", 2], [0, "gave up", 3]]
TWO += [[3, "from", 0], [0, "from", 0]]
expect_post_mortems(
    silent_ranks,
    [(LOG + KILLED,), (LOG + HUNG,), (LOG + TWO,), (LOG,)],
    [
        [[1], "kill", 1, 0, 120],
        [[1], "stop", 1, 1, 0],
        [[1, 2], "kill", 1, 2, 0],
        [[], "none", -1, 0, 0],
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
drawn = [drawn_log() for _ in range(60)]
expect_post_mortems(silent_ranks, [(log,) for log, _ in drawn], [right for _, right in drawn])
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Planned segments (1 point)
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
# Deaths of one, and of several: neighbours of the present ring take a copy with them.
expect_segments(
    [
        (4, 12, [[5, [3]]], 1, 4),
        (4, 12, [[5, [3]], [7, [0]]], 4, 12),
        (4, 12, [[5, [1]], [6, [2]]], 3, 6),
    ],
    [[[[0, 4], [5, 3]], 0], [[[0, 4], [4, 3], [4, 2]], 4], [[[0, 4], [3, 3], [6, 2]], 2]],
)
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
for _ in range(30):
    faults = [[s, g[:1]] for s, g in drawn_faults(9, 30)]
    cases.append((9, 30, faults, draw.integer(1, 7), draw.integer(1, 9)))
expect_segments(cases, [by_walking(*case) for case in cases])
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

# %% [markdown]
# ## 7. The capstone (4 points)
#
# Four members train a small model for 9 steps, once for each of six kinds of chaos: one is killed; one hangs; one pauses but works; a bit of one member's
# weights flips; two neighbours of the ring die at once; one dies, and another while the rest regroup. Your answers say how: the layout of every generation,
# the protection, and afterwards what happened. Points for losses equal to one process, budgets kept *in every generation*, few steps made again and
# an exact post-mortem. Each state has a copy at the next member; weights that all members have whole are compared before each step, and
# an odd member ends itself.
#
# Beside the points `board` keeps a list by tokens per simulated second. It has no ceiling: your layouts may use any field of `Strategy`
# (chapter 22; `capstone.account(build, layout, ranks)` counts it), and the reference, a careful engineer in a hurry, can be beaten.
#
# > **API** `layout(job, ranks)` returns a dict of fields of `Strategy`, such as `{"zero": 1, "microbatches": 2}`; `ranks` is 4, 3 or 2. `protect(job)` returns `[copies, saves,
# > hung_s]`: steps between copies, steps between saves, seconds without progress after which a member is ended. `post_mortem(log)` is `silent_ranks` of task 4.
# > `job`: `ranks`, `steps`; `accounts`, lists `[layout, ranks, held, sent, step_us]` of dry runs; `held_cap`, `sent_cap`: bytes of a member, and of it in a step;
# > `redone_cap` and `lost_cap`: finished steps made again at most after one death, and after that of neighbours; `copy_us`, `save_us`: what one takes, `protect_us`: what both
# > may cost per step on average; `pause_s`: how long a working member may pause, `hung_cap_s`: when a hang must have been noticed.


# %% answer="capstone-answers"
def layout(job, ranks):
    """-> a dict of fields of Strategy for so many members."""
    ### BEGIN SOLUTION
    fit = [
        (step_us, held, one)
        for one, size, held, sent, step_us in job["accounts"]
        if size == ranks and held <= job["held_cap"] and sent <= job["sent_cap"]
    ]
    return min(fit, key=lambda row: row[:2])[2]
    ### END SOLUTION


def protect(job):
    """-> [steps between copies, steps between saves, seconds]."""
    ### BEGIN SOLUTION
    hung_s = (job["pause_s"] + job["hung_cap_s"]) / 2
    return [job["redone_cap"] + 1, job["lost_cap"] + 1, hung_s]
    ### END SOLUTION


def post_mortem(log):
    """-> [silent members, kind, step, redone, moved]."""
    ### BEGIN SOLUTION
    on = {member for member, word, _ in log if word == "from"}
    if not on:
        return [[], "none", -1, 0, 0]
    silent = sorted({member for member, *_ in log} - on - {-1})
    words = {word for _, word, _ in log}
    kind = "flip" if "odd" in words else "stop" if "hung" in words else "kill"
    step = max(number for member, word, number in log if word == "begin" and member in silent)
    at = next(place for place, line in enumerate(log) if line[1] == "from")
    finished = max([-1] + [number for _, word, number in log[:at] if word == "end"])
    moved = sum(number for _, word, number in log if word == "sent")
    return [silent, kind, step, max(0, finished + 1 - log[at][2]), moved]
    ### END SOLUTION


# %% judge="expect_survived"
import os
from functools import partial

from minitrain.compose.parallelize import parallelize
from minitrain.course import capstone
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy


def build(ranks, layout):
    """A Run of the capstone's model; a layout that cannot be is a ValueError or a TypeError."""
    strategy = Strategy(**{"precision": "float64", "dp": ranks, **layout})
    strategy.check(capstone.MODEL, ranks)
    return parallelize(capstone.MODEL, strategy, partial(AdamW, lr=1e-2), seed=3)


def expect_prepared(kind, seed):
    """Layouts and protection, before any member runs."""
    scenario = capstone.drawn(kind, seed)
    job, seen = scenario.job, f"(seen with kind {kind}, seed {seed})"
    layouts = dict(zip((4, 3, 2), ask_each(layout, [(job, n) for n in (4, 3, 2)])))
    for n, asked in layouts.items():
        try:
            held, sent, _ = capstone.counted(build, asked, n)
        except (TypeError, ValueError) as error:
            expect(False, "a layout of every generation", f"{n} members: {error} {seen}")
        expect(held <= job["held_cap"], "bytes held", f"by one of {n} members {seen}")
        expect(sent <= job["sent_cap"], "bytes sent", f"by one of {n} members {seen}")
    said = ask_each(protect, [(job,)])[0]
    formed = isinstance(said, list) and [type(one) for one in said[:2]] == [int, int]
    formed = formed and len(said) == 3 and type(said[2]) in (int, float) and min(said) > 0
    expect(formed, "a protection", f"see the API {seen}")
    copies, saves, hung_s = said
    expect(copies - 1 <= job["redone_cap"], "steps made again", f"after one death {seen}")
    expect(saves - 1 <= job["lost_cap"], "steps made again", f"when neighbours die {seen}")
    cost = job["copy_us"] / copies + job["save_us"] / saves
    expect(cost <= job["protect_us"], "cost of protection", f"what does a step pay? {seen}")
    expect(hung_s > job["pause_s"], "who pauses is not hung", f"what if it works? {seen}")
    expect(hung_s <= job["hung_cap_s"], "a hang is noticed", f"when at the latest? {seen}")
    return scenario, layouts, said, seen


def expect_survived(kind, seed):
    scenario, layouts, said, seen = expect_prepared(kind, seed)
    played = capstone.play(build, scenario, layouts, said)
    planned = capstone.planned(scenario, said)
    expect(played.segments == planned, "segments", f"who went on from where? {seen}")
    pairs = zip(played.losses, capstone.wanted(build), strict=True)
    equal = all(abs(one - other) < 1e-12 for one, other in pairs)
    expect(equal, "losses of one process", f"was a wrong weight noticed? {seen}")
    what = kind if kind in ("stop", "flip") else "kill"
    redone = scenario.step - played.segments[-1][0]
    facts = [[*scenario.silent], what, scenario.step, redone, played.moved_bytes]
    facts = facts if scenario.silent else [[], "none", -1, 0, 0]
    expect_post_mortems(post_mortem, [(played.log,)], [facts])


def board(name=None, path="leaderboard.tsv"):
    """Tokens per simulated second over all kinds; a name enters your answers into the list."""

    def total(layout, protect):
        scores = []
        for kind in capstone.KINDS:
            scenario = capstone.drawn(kind, 0)
            job, layouts = scenario.job, {n: layout(scenario.job, n) for n in (4, 3, 2)}
            counts = [capstone.counted(build, one, n) for n, one in layouts.items()]
            within = all(h <= job["held_cap"] and s <= job["sent_cap"] for h, s, _ in counts)
            scores.append(capstone.score(build, scenario, layouts, protect(job)) if within else 0.0)
        return sum(scores) / len(scores)

    def hurried(job, n):
        rows = [row for row in job["accounts"] if row[1] == n and row[3] <= job["sent_cap"]]
        return min(rows, key=lambda row: row[2])[0]  # whatever holds least

    reference = total(hurried, lambda job: [1, job["lost_cap"] + 1, 1.0])
    lines = {f"{reference:.0f}\treference", f"{total(layout, protect):.0f}\t{name or 'you'}"}
    if os.path.exists(path):
        lines |= set(open(path).read().splitlines())
    best = sorted(lines, key=lambda line: -int(line.split("\t")[0]))
    if name:
        open(path, "w").write("\n".join(best) + "\n")
    return "\n".join(best)


# %%
try:
    print(board())  # with your name, board("Ada"), you are entered
except Exception as error:
    print("no score yet:", error)

# %% check="chaos-killed" points=1
# One is killed; one pauses.
expect_survived("kill", 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survived("kill", draw.integer(2, 10**6))
expect_survived("slow", draw.integer(2, 10**6))
### END HIDDEN TESTS

# %% check="chaos-wrong" points=1
# One hangs; a bit flips. (expect_survived("flip", 1) plays one of them here.)
expect_prepared("flip", 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survived("stop", draw.integer(2, 10**6))
expect_survived("flip", draw.integer(2, 10**6))
### END HIDDEN TESTS

# %% check="chaos-neighbours" points=1
# Two neighbours at once.
expect_prepared("neighbours", 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survived("neighbours", draw.integer(2, 10**6))
### END HIDDEN TESTS

# %% check="chaos-within" points=1
# One dies while the rest regroup.
expect_prepared("within", 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survived("within", draw.integer(2, 10**6))
### END HIDDEN TESTS
