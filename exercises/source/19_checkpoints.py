# %% [markdown]
# # Exercises 19: checkpoints
#
# Five tasks, 10 points, about three hours. Read chapter 19 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 19
#
# The grader runs the same checks and hidden ones with other sizes and values. Two rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - All tasks are functions of plain values: numbers, text, lists, dicts and tensors. No rank is started but in task 3, which has one.
#
# Sources: Pillai et al. 2014 (All File Systems Are Not Created Equal, OSDI, for task 1), Mohan et al. 2021 (CheckFreq, FAST, task 3), Wang et al.
# 2024 (REFT, arXiv:2310.12670, task 4), Young 1974 and Daly 2006 (task 5). The rules here differ from theirs where a task says so.

# %% given="setup"
import hashlib
import json
import math

import torch

# %% judge="tools"
from itertools import compress, product

from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes and values

# %% [markdown]
# ## 1. A checkpoint that survives a power cut (3 points)
#
# A folder holds text files, a dict from name to text. Training has saved checkpoint `number - 1` there with your `saving`; now it saves checkpoint
# `number`: some parts, a dict from part to text. `saving` does not touch the folder. It returns the calls, in order:
#
#     ("write", name, text)       the file has this text, whatever it had before (its name is new if there was none)
#     ("sync", name)              the file's text is on the disk
#     ("rename", name, to)        the file has another name; a file that had that one is gone
#     ("remove", name)
#     ("sync folder",)            the names in the folder are on the disk
#
# When the power fails, the calls so far have happened, the last ones perhaps not. Of what was not synced anything may be on the disk:
#
# - a text that was written and not synced may be whole, or what the file had before, or cut off anywhere, and then nothing follows, or zeros (`"\0"`) up
#   to its length;
# - of the names that were made, changed or removed since the folder was last synced, *any* of the changes may be on the disk and the others not, a
#   later one without an earlier one too; a rename is one change. A name that is there points to what was written to it, as far as that is on the disk.
#
# `loaded` gets the folder as it is found: a dict from name to text. It returns `[number, parts]` of the newest checkpoint that is complete, and
# `None` if there is none. Whatever the moment of the cut it has to be the old checkpoint or the new one, to the letter; and when all calls have been
# made, the new one, and nothing of the old one is left in the folder.
#
# Disks make errors, too: a letter of a file may have become another one. Then `loaded` may find the other checkpoint, or none, but never
# give back what nobody saved.
#
# > **API** Plain Python, and `hashlib`, `json`, `math`; no real files. `saving(folder, number, parts)` returns a list of the tuples above, and
# > `loaded(folder)` returns `[number, {part: text}]` or `None`. Both get plain dicts of text.
#
# Names and texts are up to you. Parts are named by letters; their texts can hold anything but `"\0"`.


# %% answer="atomic"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    ### BEGIN SOLUTION
    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if name not in keep and name != "new"]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]
    ### END SOLUTION


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    ### BEGIN SOLUTION
    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found
    ### END SOLUTION


# %% [markdown]
# The model of a disk that your calls meet: what may be found after a cut behind each of them.


# %% judge="expect_survives"
KINDS = {"write": 3, "sync": 2, "rename": 3, "remove": 2, "sync folder": 1}


class Disk:
    """Files by number; names that are on the disk, and changes of names since."""

    def __init__(self, folder):
        self.texts = dict(enumerate(folder.values()))  # file -> its text
        self.safe = dict(self.texts)  # what is on the disk for certain; None: nothing is
        self.names = {name: number for number, name in enumerate(folder)}
        self.changes = []  # (name, file or None) lists, one a call, since the folder was synced

    def now(self):
        names = dict(self.names)
        for change in self.changes:
            self._apply(names, change)
        return names

    @staticmethod
    def _apply(names, change):
        for name, file in change:
            names.pop(name, None) if file is None else names.update({name: file})

    def call(self, call):
        kind, *rest = call
        names = self.now()
        if kind != "write" and kind != "sync folder":
            expect(rest[0] in names, "calls that work", f"{kind!r} of a file that is not there")
        if kind == "write":
            name, text = rest
            if name not in names:
                self.changes.append([(name, len(self.texts))])
                self.safe[len(self.texts)] = None
                self.texts[len(self.texts)] = text
            else:
                self.texts[names[name]] = text
        elif kind == "sync":
            self.safe[names[rest[0]]] = self.texts[names[rest[0]]]
        elif kind == "rename":
            self.changes.append([(rest[0], None), (rest[1], names[rest[0]])])
        elif kind == "remove":
            self.changes.append([(rest[0], None)])
        else:
            self.names, self.changes = names, []

    def after_a_cut(self, most=400):
        """The folders that may be found: all of them if they are few, else each change and each text torn in turn."""
        picks = list(product((False, True), repeat=min(8, len(self.changes))))
        happened = [
            [*pick, *([pick[-1]] * (len(self.changes) - 8))] if pick else [] for pick in picks
        ]
        for pick in happened:
            names = dict(self.names)
            for change in compress(self.changes, pick):
                self._apply(names, change)
            choices = [self._texts_of(file) for file in names.values()]
            for texts in self._together(choices, most):
                yield dict(zip(names, texts))

    @staticmethod
    def _together(choices, most):
        if math.prod(map(len, choices)) <= most:
            return list(product(*choices))
        found = []
        for one, texts in enumerate(
            choices
        ):  # each way to tear this one, the others whole, and torn
            for text, others in product(texts, (0, -1)):
                found.append([text if n == one else of[others] for n, of in enumerate(choices)])
        return found

    def _texts_of(self, file):
        text, before = self.texts[file], self.safe[file]
        if before == text:
            return [text]
        half = text[: len(text) // 2]
        cut = [text[:-1], half, "", half + "\0" * (len(text) - len(half)), "\0" * len(text)]
        return list(dict.fromkeys([text, *([before] if before is not None else []), *cut]))


def calls_of(folder, number, parts):
    """What `saving` says, in form."""
    calls = ask_each(saving, [(folder, number, parts)])[0]
    formed = isinstance(calls, list) and all(
        isinstance(call, (list, tuple))
        and len(call) > 0
        and KINDS.get(call[0]) == len(call)
        and all(isinstance(word, str) for word in call)
        for call in calls
    )
    expect(formed, "a list of calls", "each is one of the five, with names and texts")
    return calls


def drawn_parts(sizes):
    letters = "abcdef {}[],:\"'"
    return {
        "abcdefgh"[n]: "".join(draw.choice(letters) for _ in range(size))
        for n, size in enumerate(sizes)
    }


def saved(folder, number, parts):
    """The folder when all calls have been made, and those that may be found after each of them."""
    disk, found = Disk(folder), []
    for call in calls_of(folder, number, parts):
        disk.call(call)
        found.append(list(disk.after_a_cut()))
    return {name: disk.texts[file] for name, file in disk.now().items()}, found


def unique(folders):
    return [dict(items) for items in dict.fromkeys(tuple(folder.items()) for folder in folders)]


def expect_round_trip(*sizes):
    """Several checkpoints, one behind the other."""
    folder, last = {}, None
    expect(
        ask_each(loaded, [({},)])[0] is None, "nothing saved", "an empty folder has no checkpoint"
    )
    for number, each in enumerate(sizes):
        parts = drawn_parts(each)
        folder, found = saved(folder, number, parts)
        expect_equal(
            ask_each(loaded, [(folder,)])[0],
            [number, parts],
            "what was saved is loaded",
            "after all calls it is the new checkpoint",
        )
        ends = found[-1]
        expect_all(
            ends, [[number, parts]], "the new one for good", "is all on the disk at the end?"
        )
        size, room = sum(map(len, folder.values())), sum(map(len, parts.values()))
        expect(
            size <= room + 200 * (len(parts) + 2),
            "the old one is removed",
            "the folder holds one checkpoint at the end, and little else",
        )
        last = parts
    return folder, last


def expect_all(folders, allowed, property, hint):
    for got in ask_each(loaded, [(folder,) for folder in unique(folders)]):
        expect(any(got == one for one in allowed), property, hint)


def expect_survives(*sizes):
    folder, last = expect_round_trip(*sizes[:-1])
    parts, number = drawn_parts(sizes[-1]), len(sizes) - 1
    _, found = saved(folder, number, parts)
    allowed = [[number - 1, last], [number, parts]]
    hint = "which call makes the new one count, and what is on the disk by then?"
    expect_all([one for states in found for one in states], allowed, "old or new", hint)


def expect_flips_found(*sizes):
    """Letters become others in a folder with the old and the new checkpoint, and with one alone."""
    folder, last = expect_round_trip(*sizes[:-1])
    parts, number = drawn_parts(sizes[-1]), len(sizes) - 1
    after, found = saved(folder, number, parts)
    both = max(
        (one for states in found for one in states), key=lambda one: sum(map(len, one.values()))
    )
    flipped = []
    for here in (after, both):
        for name, text in here.items():
            places = {0, len(text) - 1, *(draw.integer(0, max(0, len(text) - 1)) for _ in range(8))}
            for place in places if text else ():
                other = "x" if text[place] != "x" else "y"
                flipped.append(here | {name: text[:place] + other + text[place + 1 :]})
    allowed = [None, [number - 1, last], [number, parts]]
    expect_all(flipped, allowed, "no false data", "who would notice that a letter is another one?")


# %% check="atomic-round" points=1
# One small part. What was saved is loaded, for good when all calls have been made; the old one is gone then, and not before.
expect_survives([3], [5], [4])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_round_trip([], [7], [draw.integer(0, 20)], [])
expect_survives([draw.integer(1, 9)], [draw.integer(2, 9)])
### END HIDDEN TESTS

# %% check="atomic-cut" points=1
# Several parts, more and fewer than before. Whatever the moment of the cut, the old checkpoint or the new one is there.
expect_survives([6], [6, 3])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survives([4, 4], [draw.integer(2, 9) for _ in range(3)])
expect_survives([5], [5], [draw.integer(2, 9)])
### END HIDDEN TESTS

# %% check="atomic-flips" points=1
# A letter that has become another one is noticed.
expect_flips_found([6], [6, 3])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_survives([3], [8])
expect_flips_found([4, 9], [draw.integer(2, 9) for _ in range(3)])
### END HIDDEN TESTS

# %% [markdown]
# ## 2. From tp × dp to any number of ranks (2 points)
#
# A matrix `[F, D]` was saved by tp × dp ranks. Tensor parallelism cut it along `dim` (0 or 1) into tp equal slices. Each slice, flattened row by row, was dealt
# out over the dp ranks of ZeRO-1: padded with zeros at its end to a multiple of dp, and cut into dp equal parts. So the file of rank (t, d)
# holds F·D / tp / dp elements, or a few more.
#
# Now n ranks load it, with ZeRO alone: the whole matrix, flattened row by row, padded to a multiple of n, cut into n equal parts. Say what rank r reads: a list of
# `[t, d, first, last]`, elements first .. last - 1 of the file of rank (t, d), in such an order that one behind the other they are its part,
# without the padding at the end of the whole.
#
# > **API** A pure function of `int`s: `reads(shape, dim, tp, dp, n, r)` gets shape as a list of two and returns a list of lists of four `int`s,
# > which may be empty.
#
# As few reads as possible, none empty: what is contiguous in a file and in the part is one read. No element of padding is read. F · D is up
# to 10^12: there is no room for a list of the elements.


# %% answer="reads"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    ### BEGIN SOLUTION
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if found and found[-1][:2] == [t, d] and found[-1][3] == first:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found
    ### END SOLUTION


# %% judge="expect_reads"
def files_of(matrix, dim, tp, dp):
    files = {}
    for t, part in enumerate(matrix.chunk(tp, dim)):
        flat = part.reshape(-1)
        flat = torch.cat((flat, flat.new_full((-flat.numel() % dp,), -1)))
        for d, piece in enumerate(flat.chunk(dp)):
            files[t, d] = piece.tolist()
    return files


def expect_large_reads(cases, wanted):
    for said, case, right in zip(ask_each(reads, cases), cases, wanted, strict=True):
        hint = f"the rank's part of the whole, row by row, in few reads (seen with {case})"
        formed = isinstance(said, list) and all(
            isinstance(one, (list, tuple)) and len(one) == 4 for one in said
        )
        expect(formed, "a list of reads", f"[t, d, first, last] each (seen with {case})")
        joined = []
        for one in said:
            if joined and joined[-1][:2] == list(one[:2]) and joined[-1][3] == one[2]:
                joined[-1][3] = one[3]
            else:
                joined.append(list(one))
        expect(joined == right, "a large matrix", hint)
        expect(len(said) == len(right), "as few reads as possible", hint)


def expect_reads(*cases):
    asked = [(*case, r) for case in cases for r in range(case[-1])]
    for said, (shape, dim, tp, dp, n, r) in zip(ask_each(reads, asked), asked, strict=True):
        seen = f"(seen with {shape}, dim={dim}, tp={tp}, dp={dp}, n={n}, r={r})"
        rows, columns = shape
        matrix = torch.arange(rows * columns).view(rows, columns)
        files, size = files_of(matrix, dim, tp, dp), -(-rows * columns // n)
        formed = isinstance(said, list) and all(
            isinstance(one, (list, tuple))
            and len(one) == 4
            and all(type(number) is int for number in one)
            and tuple(one[:2]) in files
            and 0 <= one[2] <= one[3] <= len(files[tuple(one[:2])])
            for one in said
        )
        expect(formed, "a list of reads", f"[t, d, first, last] within that file {seen}")
        got = [x for t, d, first, last in said for x in files[t, d][first:last]]
        wanted = list(range(rows * columns))[r * size : (r + 1) * size]
        expect(
            -1 not in got, "no padding is read", f"where does a slice end in its last file? {seen}"
        )
        expect_equal(got, wanted, "the part", f"the rank's part of the whole, row by row {seen}")
        places = {x: (key, i) for key, file in files.items() for i, x in enumerate(file)}
        runs = sum(
            i == 0 or places[x] != (places[wanted[i - 1]][0], places[wanted[i - 1]][1] + 1)
            for i, x in enumerate(wanted)
        )
        hint = f"what is contiguous in a file is one read {seen}"
        expect(len(said) == runs, "as few reads as possible", hint)


# %% check="reads-rows" points=1
# Cut by rows.
expect_reads(([4, 6], 0, 2, 2, 4), ([2, 5], 0, 2, 2, 3), ([4, 3], 0, 1, 4, 2))
expect_large_reads(
    [([8, 125 * 10**9], 0, 2, 3, 4, 1)],
    [[[0, 1, 83333333333, 166666666667], [0, 2, 0, 166666666666]]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_segments(shape, dim, tp, dp, n, r):
    """What is in one piece in the whole and in a slice, cut where a file or the part ends."""
    rows, columns = shape
    size, part = -(-rows * columns // n), -(-rows * columns // tp // dp)
    if dim == 0:
        long = rows // tp * columns
        segments = [(t * long, t, 0, long) for t in range(tp)]
    else:
        wide = columns // tp
        places = [(row, t) for row in range(rows) for t in range(tp)]
        segments = [(row * columns + t * wide, t, row * wide, wide) for row, t in places]
    found = []
    for begin, t, inside, long in segments:
        for d in range(dp):
            low = max(begin, begin + d * part - inside, r * size)
            high = min(begin + long, begin + (d + 1) * part - inside, (r + 1) * size)
            if low < high:
                first = low - begin + inside - d * part
                if found and found[-1][:2] == [t, d] and found[-1][3] == first:
                    found[-1][3] += high - low
                else:
                    found.append([t, d, first, first + high - low])
    return found


cases = [
    (
        [tp * draw.integer(2, 9), draw.integer(10**9, 10**10)],
        0,
        tp,
        draw.integer(2, 9),
        n,
        draw.integer(0, n - 1),
    )
    for tp, n in ((2, 3), (4, 5), (1, 4))
]
expect_large_reads(cases, [by_segments(*case) for case in cases])
expect_reads(
    *(
        (
            [tp * draw.integer(1, 4), draw.integer(1, 9)],
            0,
            tp,
            draw.integer(1, 5),
            draw.integer(1, 7),
        )
        for tp in (1, 2, 3, 4, 2, 3)
    )
)
### END HIDDEN TESTS

# %% check="reads-columns" points=1
# Cut by columns.
expect_reads(([4, 6], 1, 2, 2, 4), ([3, 4], 1, 2, 4, 3), ([2, 6], 1, 3, 1, 1))
expect_large_reads(
    [([3, 10**11], 1, 2, 1, 2, 1)],
    [
        [
            [1, 0, 50000000000, 100000000000],
            [0, 0, 100000000000, 150000000000],
            [1, 0, 100000000000, 150000000000],
        ]
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_segments(shape, dim, tp, dp, n, r):
    """What is in one piece in the whole and in a slice, cut where a file or the part ends."""
    rows, columns = shape
    size, part = -(-rows * columns // n), -(-rows * columns // tp // dp)
    if dim == 0:
        long = rows // tp * columns
        segments = [(t * long, t, 0, long) for t in range(tp)]
    else:
        wide = columns // tp
        places = [(row, t) for row in range(rows) for t in range(tp)]
        segments = [(row * columns + t * wide, t, row * wide, wide) for row, t in places]
    found = []
    for begin, t, inside, long in segments:
        for d in range(dp):
            low = max(begin, begin + d * part - inside, r * size)
            high = min(begin + long, begin + (d + 1) * part - inside, (r + 1) * size)
            if low < high:
                first = low - begin + inside - d * part
                if found and found[-1][:2] == [t, d] and found[-1][3] == first:
                    found[-1][3] += high - low
                else:
                    found.append([t, d, first, first + high - low])
    return found


cases = [
    (
        [draw.integer(2, 9), tp * draw.integer(10**9, 10**10)],
        1,
        tp,
        draw.integer(1, 9),
        n,
        draw.integer(0, n - 1),
    )
    for tp, n in ((2, 3), (4, 5), (3, 2))
]
expect_large_reads(cases, [by_segments(*case) for case in cases])
expect_reads(
    *(
        (
            [draw.integer(1, 9), tp * draw.integer(1, 4)],
            dim,
            tp,
            draw.integer(1, 5),
            draw.integer(1, 7),
        )
        for tp in (1, 2, 3, 4, 2, 3)
        for dim in (1, 1, 0)
        if dim or tp == 1
    )
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A snapshot during training (2 points)
#
# Forward and backward change no parameter, so a snapshot can be copied meanwhile, a few elements at a time. Only the update must
# not overtake it.
#
# - `begin()` says: the state of now is wanted. It copies nothing.
# - `copy(most)` copies as many elements as are left, at most `most`, tensor by tensor in the order of the list, and says how many that were.
# - `before_update(i)` comes before tensor i changes. What is not yet copied of that tensor is copied now, and nothing of any other: training waits.
#   It returns how many elements that were.
# - `taken()` comes when all tensors have been updated, or copied: a list of tensors, the state at `begin()`.
#
# > **API** A class whose `__init__(tensors)` gets the list of float64 tensors that training changes in place. `copy` and `before_update`
# > return an `int`, `taken` a list of tensors of the same shapes, `begin` nothing. No network, no threads.
#
# Then comes the next `begin()`. All memory is taken in `__init__`, twice: a snapshot of before must not change while the next one is made
# (someone writes it to a disk). The one before that may.


# %% answer="snapshot"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        ### BEGIN SOLUTION
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(2)]
        self.number, self.done = 0, [x.numel() for x in self.tensors]
        ### END SOLUTION

    def begin(self):
        ### BEGIN SOLUTION
        self.number = 1 - self.number
        self.done = [0] * len(self.tensors)
        ### END SOLUTION

    def copy(self, most):
        ### BEGIN SOLUTION
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return count

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.tensors[i][first:last]
        self.done[i] = last
        return last - first
        ### END SOLUTION

    def before_update(self, i):
        ### BEGIN SOLUTION
        return self.take(i, self.tensors[i].numel())
        ### END SOLUTION

    def taken(self):
        ### BEGIN SOLUTION
        buffers = self.buffers[self.number]
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]
        ### END SOLUTION


# %% [markdown]
# Training as your snapshot meets it. A plan is a list of `["begin"]`, `["copy", most]`, `["update", i]`, `["taken"]`, and of one thing that real training
# never does: `["spoil"]` changes all tensors behind the snapshot's back, so that it shows what had been copied by then.


# %% driver="live"
def live(tensors, plan, group):
    """What `copy` and `before_update` said, what `taken` gave, at once and at the end, and where it lay."""
    snapshot, said, kept, places = Snapshot(tensors), [], [], []
    for number, (what, *more) in enumerate(plan):
        if what == "begin":
            snapshot.begin()
        elif what == "copy":
            said.append(snapshot.copy(*more))
        elif what == "update":
            said.append(snapshot.before_update(*more))
            tensors[more[0]].copy_(group.fetch(f"{number}", tensors[more[0]]))
        elif what == "spoil":
            for i, tensor in enumerate(tensors):
                tensor.copy_(group.fetch(f"{number}/{i}", tensor))
        else:
            given = snapshot.taken()
            kept.append((given, [tensor.clone() for tensor in given]))
            places.append([tensor.data_ptr() for tensor in given])
    before = [[tensor.clone() for tensor in given] for given, _ in kept[-2:]]
    return {
        "said": said,
        "at once": [copy for _, copy in kept],
        "in the end": before,
        "places": places,
    }


# %% judge="expect_snapshots"
def expect_snapshots(shapes, plan):
    """Every snapshot is the state at its begin; told and shown, element by element, what was copied when."""
    tensors = [draw.real(*shape) for shape in shapes]
    secrets, now, said, taken = {}, [tensor.clone() for tensor in tensors], [], []
    wanted, done = None, None
    for number, (what, *more) in enumerate(plan):
        if what == "begin":
            wanted, done = [tensor.clone() for tensor in now], [0] * len(now)
        elif what == "copy":
            left = more[0]
            for i, tensor in enumerate(now):
                step = min(left, tensor.numel() - done[i])
                done[i], left = done[i] + step, left - step
            said.append(more[0] - left)
        elif what == "update":
            (i,) = more
            said.append(now[i].numel() - done[i])
            done[i] = now[i].numel()
            secrets[f"{number}"] = draw.real(*shapes[i])
            now[i] = secrets[f"{number}"].clone()
        elif what == "spoil":
            for i, shape in enumerate(shapes):
                secrets[f"{number}/{i}"] = draw.real(*shape)
                now[i] = secrets[f"{number}/{i}"].clone()
                wanted[i].view(-1)[done[i] :] = now[i].view(-1)[done[i] :]
        else:
            taken.append([tensor.clone() for tensor in wanted])
    outcome = run_on_ranks(live, [(tensors, plan)], secrets=[secrets])
    result = outcome.results[0]
    keyed = isinstance(result, dict) and set(result) == {"said", "at once", "in the end", "places"}
    expect(
        keyed and len(result["at once"]) == len(taken),
        "a snapshot",
        "`taken` returns a list of tensors",
    )
    spoiled = ["spoil"] in plan
    property = "copied when it is told" if spoiled else "the state at begin"
    hint = (
        "the elements that were there by then, in order"
        if spoiled
        else "no update overtakes the copy"
    )
    expect_equal(result["at once"], taken, property, hint)
    expect_equal(
        result["said"], said, "how many", "elements that were copied in that call, and no others"
    )
    expect_equal(
        result["in the end"], taken[-2:], "the one before", "it stays while the next is made"
    )
    places = result["places"]
    same = all(places[k] == places[k - 2] for k in range(2, len(places)))
    expect(same, "memory taken once", "two snapshots' memory serves all of them")


def steps(shapes, copies, count, spoil=False):
    """Each step: a begin, some copies, then updates in any order."""
    plan = []
    for _ in range(count):
        plan.append(["begin"])
        plan += [["copy", most] for most in copies]
        order = draw.several(range(len(shapes)), len(shapes))
        if spoil:
            plan += [["update", i] for i in order[: len(order) // 2]]
            plan += [["spoil"]]
            plan += [["copy", sum(math.prod(shape) for shape in shapes)]]
        else:
            plan += [["update", i] for i in order]
        plan += [["taken"]]
    return plan


# %% check="snapshot-state" points=1
# Snapshots are the state at their begin, one after the other, copied bit by bit into memory that is taken once.
expect_snapshots([[3], [2, 2]], steps([[3], [2, 2]], [2, 3], 3))
expect_snapshots([[3], [2, 2]], steps([[3], [2, 2]], [2], 1, spoil=True))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
shapes = [[draw.integer(1, 4), draw.integer(1, 5)] for _ in range(5)]
expect_snapshots(shapes, steps(shapes, [draw.integer(0, 20) for _ in range(3)], 5))
expect_snapshots(shapes, steps(shapes, [], 4))
expect_snapshots(shapes, steps(shapes, [1000], 4))
### END HIDDEN TESTS

# %% check="snapshot-wait" points=1
# Nothing is copied but what is asked for: training waits for what its next update touches, and for nothing else.
expect_snapshots([[3], [2, 2], [4]], steps([[3], [2, 2], [4]], [2, 3], 2, spoil=True))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
shapes = [[draw.integer(1, 4), draw.integer(1, 5)] for _ in range(6)]
expect_snapshots(shapes, steps(shapes, [draw.integer(0, 20) for _ in range(3)], 3))
expect_snapshots(shapes, steps(shapes, [draw.integer(0, 12), draw.integer(0, 12)], 4, spoil=True))
expect_snapshots(shapes, steps(shapes, [], 2, spoil=True))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Parity instead of a copy (2 points)
#
# n machines, n ≥ 3, each with a shard in memory: a tensor of bytes (uint8), not all of one length. When a machine is lost, its shard is to be rebuilt from what the others
# have in memory. A copy on a neighbour costs as much memory as the shard. With L the length of the longest shard, you may use ⌈L / (n - 1)⌉ bytes on each machine.
#
# - `parities(shards)` returns a tensor of bytes for each machine, at most so long. Parity r is lost with machine r.
# - `rebuilt(lost, shards, parities, length)` gets both lists with `None` in the place of the lost machine, and the length of its shard: it returns that shard.
#
# > **API** Pure functions of lists of one-dimensional `torch.uint8` tensors: `parities(shards)` returns a list of n of them,
# > `rebuilt(lost, shards, parities, length)` one tensor of `length` bytes; `lost` is an `int`.
#
# `a ^ b` of two tensors is their bitwise exclusive or; x ^ a ^ b ^ a ^ b = x.


# %% answer="parity"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    ### BEGIN SOLUTION
    n = len(shards)
    size = -(-max(map(len, shards)) // (n - 1))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + 1 + number) % n] ^= stripe  # on every machine but r
    return found
    ### END SOLUTION


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    ### BEGIN SOLUTION
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r - 1) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] ^= part
        found.append(stripe)
    return torch.cat(found)[:length]
    ### END SOLUTION


# %% judge="expect_rebuilt"
def drawn_bytes(length):
    return torch.tensor([draw.integer(0, 255) for _ in range(length)], dtype=torch.uint8)


def expect_rebuilt(*cases):
    """Cases are lists of lengths. Each machine is lost in turn."""
    shards = [[drawn_bytes(length) for length in lengths] for lengths in cases]
    all_said = ask_each(parities, [(own,) for own in shards])
    asked, wanted = [], []
    for lengths, own, said in zip(cases, shards, all_said, strict=True):
        n = len(lengths)
        seen = f"(seen with {n} machines, shards of {lengths} bytes)"
        formed = (
            isinstance(said, list)
            and len(said) == n
            and all(torch.is_tensor(x) and x.dtype == torch.uint8 and x.dim() == 1 for x in said)
        )
        expect(formed, "a parity each", f"a tensor [..] of uint8 for each machine {seen}")
        most = -(-max(lengths) // (n - 1))
        hint = f"no more than the longest shard / (n - 1), rounded up {seen}"
        expect(all(len(parity) <= most for parity in said), "memory", hint)
        for lost in range(n):
            there = [None if r == lost else shard for r, shard in enumerate(own)]
            parity = [None if r == lost else x for r, x in enumerate(said)]
            asked.append((lost, there, parity, lengths[lost]))
            wanted.append((own[lost], seen))
    for got, (shard, seen) in zip(ask_each(rebuilt, asked), wanted, strict=True):
        hint = f"which stripes went into a parity, and which of them are still there? {seen}"
        expect_equal(got, shard, "the lost shard", hint)


# %% check="parity-equal" points=1
# Shards of one length that n - 1 divides.
expect_rebuilt([4, 4, 4], [6, 6, 6, 6])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_rebuilt(*([(n - 1) * draw.integer(1, 9)] * n for n in (3, 4, 5, 6, 7)))
### END HIDDEN TESTS

# %% check="parity-any" points=1
# Any lengths.
expect_rebuilt([4, 3, 4], [5, 6, 1, 6], [7, 7, 7])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_rebuilt(*([draw.integer(1, 40) for _ in range(n)] for n in (3, 4, 5, 6, 8)), [0, 5, 2, 3])
### END HIDDEN TESTS

# %% [markdown]
# ## 5. How often (1 point)
#
# A job takes `steps` steps of `step_s` seconds. Behind every k steps, and behind the last one, it saves, which takes `save_s` seconds in which nothing else happens. Failures come
# at random, one in `mtbf_s` seconds on average, at the same rate whatever is done, repairs and restarts included (exponential). After a failure the job
# restarts, `restart_s` seconds, from the newest complete save, or from the beginning.
#
# Return the k from 1 to `steps` with the smallest expected time until the end. Saves can take nearly as long as failures are apart, so Young's √(2·C·M) is
# not always near enough.
#
# > **API** A pure function: `best_interval(steps, step_s, save_s, restart_s, mtbf_s)`, an `int` and four numbers in seconds, returns an `int` from
# > 1 to `steps`. `math` is there; nothing random.
#
# It is enough to think of one piece: until w seconds without a failure have passed, restarts included. Its expected time has a closed
# form. If k does not divide the number of steps, the last piece is shorter.


# %% answer="interval"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    """-> k, a whole number of steps."""

    ### BEGIN SOLUTION
    def expected(work_s):
        """A failure comes within w with probability 1 - e^-w/M; then a restart that can fail, and again."""
        return (mtbf_s * math.exp(restart_s / mtbf_s)) * math.expm1(work_s / mtbf_s)

    def total(k):
        pieces, rest = divmod(steps, k)
        time_s = pieces * expected(k * step_s + save_s)
        return time_s + (expected(rest * step_s + save_s) if rest else 0)

    return min(range(1, steps + 1), key=total)
    ### END SOLUTION


# %% judge="expect_interval"
def expect_interval(cases, best):
    """best: for each case the numbers of steps that are good enough."""
    for said, case, good in zip(ask_each(best_interval, cases), cases, best, strict=True):
        steps, step_s, save_s, restart_s, mtbf_s = case
        seen = f"(seen with {steps} steps of {step_s} s, a save of {save_s} s, a failure in {mtbf_s} s)"
        formed = type(said) is int and 1 <= said <= steps
        expect(formed, "a number of steps", f"from 1 to {steps} {seen}")
        hint = f"is another k not better? What does a lost piece cost, and the last one? {seen}"
        expect(said in good, "the smallest expected time", hint)


# %% check="interval-best" points=1
# Often or seldom, saves short or long, and the last piece counted.
expect_interval(
    [(1000, 1.0, 2.0, 10.0, 300.0), (100, 1.0, 40.0, 5.0, 60.0), (50, 2.0, 0.1, 0.0, 1e6)],
    [[36], [50], [50]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def expected_time(k, steps, step_s, save_s, restart_s, mtbf_s):
    """By first steps: before the piece is done either w passes, or a failure comes and a restart has to be survived."""
    rate = 1 / mtbf_s

    def piece(work_s):
        lives = math.exp(-rate * work_s)
        until_failure = mtbf_s - work_s * lives / (1 - lives)  # if it comes within w
        survives = math.exp(-rate * restart_s)
        failed_restart = mtbf_s - restart_s * survives / (1 - survives) if restart_s else 0.0
        restart = restart_s + (1 - survives) / survives * failed_restart
        return work_s + (1 - lives) / lives * (until_failure + restart)

    pieces = [k] * (steps // k) + ([steps % k] if steps % k else [])
    return sum(piece(count * step_s + save_s) for count in pieces)


def good(case):
    times = {k: expected_time(k, *case) for k in range(1, case[0] + 1)}
    return [k for k, time in times.items() if time <= min(times.values()) * (1 + 1e-9)]


cases = [
    (
        draw.integer(40, 400),
        draw.choice([0.5, 1.0, 3.0]),
        draw.choice([0.2, 2.0, 30.0, 80.0]),
        draw.choice([0.0, 5.0, 50.0]),
        draw.choice([40.0, 100.0, 1000.0]),
    )
    for _ in range(12)
]
expect_interval(cases, [good(case) for case in cases])
### END HIDDEN TESTS
