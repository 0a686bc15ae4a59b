# %% [markdown]
# # Exercises 18: offload and fragmentation
#
# Four tasks, 10 points, about two and a half hours. Read chapter 18 first; for tasks 2 and 3 also *Chunks* and
# *A window of layers* in its appendix 18b. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 18
#
# The grader runs the same checks and hidden ones with other sizes and values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - In task 1 two ranks play a GPU and its host: `group.rank()` is 0 on the device and 1 on the host, and the network is the PCIe
#   link between them. `collectives` has `send`, `receive` and `barrier`.
# - The other tasks are functions of plain numbers.
#
# Sources: Ren et al. 2021 (ZeRO-Offload, arXiv:2101.06840, sections 4 and 5), Fang et al. 2021 (PatrickStar, arXiv:2108.05818), Sun et
# al. 2022 (STRONGHOLD, SC'22), the caching allocator of PyTorch. The rules here differ from theirs where a task says so.

# %% given="setup"
import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw sizes and values

# %% [markdown]
# ## 1. The optimizer of the host (4 points)
#
# The device has the weights in float32 and runs forward and backward. The host has the masters in float64 and the moments of Adam, and
# updates. Per parameter 4 bytes of gradient go down and 4 bytes of new weight come back in each step, and not one byte more.
#
# Backward finds the gradients layer by layer, the last layer first, and calls `ready(layer, grad)`. It waits for nothing there: the gradient
# starts on its way at once, and the host updates that layer while backward goes on with the next one. `finish()` is called when backward has
# ended, and returns the weights of the next forward.
#
# With `delayed=True` nobody waits for the update at all: `finish()` of step k returns the weights after the update of step k-1 (in step 0:
# those it began with), and the update of step k goes on beside forward and backward of step k+1. `settle()` is called once, behind the last
# step, and returns the newest weights; without a delay these are what `finish()` returned last.
#
# > **API** `collectives.send(x, rank, group, async_op=True)` and `collectives.receive(like, rank, group, async_op=True)` return a handle at
# > once. `handle.wait()` of a receive returns the tensor, with the shape and dtype of `like`; that of a send returns None, and every send has
# > to be waited for in the end. Messages between two ranks arrive in the order in which they were sent. `adam(master, grad, state)` updates
# > master and state in place; `new_state(master)` makes a state. `weights` is a list of float32 tensors; `grad` is float32, in a layer's shape.


# %% given="adam"
def adam(master, grad, state):
    """One step of Adam, in place: master and state = {"step": 0, "m": zeros, "v": zeros} in float64, grad in any dtype."""
    grad = grad.double()
    state["step"] += 1
    state["m"].mul_(0.9).add_(grad, alpha=0.1)
    state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
    m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
    master.sub_(0.05 * m / (v.sqrt() + 1e-3))


def new_state(master):
    return {"step": 0, "m": torch.zeros_like(master), "v": torch.zeros_like(master)}


# %% answer="offloaded"
class Device:
    """Rank 0. `weights`: a float32 tensor for each layer."""

    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        ### BEGIN SOLUTION
        self.sending, self.coming, self.last = [], [], []
        ### END SOLUTION

    def ready(self, layer, grad):
        """Backward has found the gradient of a layer, float32."""
        ### BEGIN SOLUTION
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))
        ### END SOLUTION

    def finish(self):
        """Behind a backward: the weights for the next forward, a list of new tensors."""
        ### BEGIN SOLUTION
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)
        ### END SOLUTION

    def settle(self):
        """Behind the last step: the newest weights."""
        ### BEGIN SOLUTION
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest
        ### END SOLUTION


def host(masters, steps, group):
    """Rank 1: so many steps. `masters`: a float64 tensor for each layer; returns them as they are in the end."""
    ### BEGIN SOLUTION
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters
    ### END SOLUTION


# %% [markdown]
# Below is the training that your two ranks meet. A gradient is fetched from outside, when backward has got to its layer: it is handed over when
# nothing else moves, as if computing it took longer than all that was started before. The moment is written down among your messages.


# %% driver="train"
def train(masters, steps, delayed, group):
    """The weights after each step and in the end on rank 0, the masters in the end on rank 1."""
    if group.rank() == 1:
        return host([master.clone() for master in masters], steps, group)
    device = Device([master.float() for master in masters], delayed, group)
    seen = []
    for step in range(steps):
        for layer in reversed(range(len(masters))):
            device.ready(layer, group.fetch(f"{step}/{layer}", masters[layer].float()))
        seen.append([weight.clone() for weight in device.finish()])
    return [*seen, [weight.clone() for weight in device.settle()]]


# %% [markdown]
# `expect_trained` reads the trace: what had been sent and received by rank 0 and by rank 1 before each gradient was there.


# %% judge="expect_trained"
def expect_trained(sizes, steps, delayed=False):
    """Weights of every step, masters, bytes; and what was on its way before each gradient."""
    masters = [draw.real(size) for size in sizes]
    layers = range(len(sizes))
    grads = {
        f"{step}/{layer}": draw.real(sizes[layer]).float()
        for step in range(steps)
        for layer in layers
    }
    outcome = run_on_ranks(train, [(masters, steps, delayed)] * 2, secrets=[grads, {}])

    wanted, states = (
        [master.clone() for master in masters],
        [new_state(master) for master in masters],
    )
    after = [[master.float() for master in masters]]
    for step in range(steps):
        for layer in layers:
            adam(wanted[layer], grads[f"{step}/{layer}"], states[layer])
        after.append([master.float() for master in wanted])
    seen = after[:-1] if delayed else after[1:]
    on_device, on_host = outcome.results
    expect_equal(
        on_host,
        wanted,
        "masters",
        "the host's own numbers are float64 from step to step",
        atol=1e-12,
    )
    hint = (
        "which update has the forward of the next step seen?"
        if delayed
        else "rank 0 returns the weights after each step"
    )
    expect_equal(on_device, [*seen, after[-1]], "weights", hint, atol=1e-6)
    each = 4 * sum(sizes) * steps
    expect(
        outcome.sent_bytes == [each, each],
        "bytes on the link",
        "4 bytes per parameter and step each way",
    )
    expect(
        len(outcome.messages) == 2 * len(sizes) * steps,
        "layer by layer",
        "one message per layer each way",
    )
    expect_beside(outcome.events, sizes, steps, delayed)


def expect_beside(events, sizes, steps, delayed):
    """Before each fetch all found gradients have left, all updates of them have come, and rank 0 waited for none."""
    sent, received, found = [0, 0], 0, 0
    order = [size for _ in range(steps) for size in reversed(sizes)]
    for event in events:
        if event.kind == "send":
            sent[event.rank] += event.bytes
        elif event.kind == "receive" and event.rank == 0:
            received += 1
        elif event.kind == "fetch":
            so_far, step = 4 * sum(order[:found]), found // len(sizes)
            expect(
                sent[0] >= so_far,
                "gradients leave at once",
                "a gradient was found, and stayed until a later one",
            )
            expect(
                sent[1] >= so_far,
                "the host updates meanwhile",
                "backward went on, and a layer that could be updated was not",
            )
            taken = len(sizes) * max(0, step - delayed)
            hint = (
                "step k+1 began when the update of step k was there"
                if delayed
                else "who waits in `ready`?"
            )
            expect(received <= taken, "backward waits for nobody", hint)
            found += 1


# %% check="offloaded-weights" points=1
# Weights after every step and masters are those of one process; 8 bytes per parameter and step pass the link.
expect_trained([4, 6], 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_trained([draw.integer(1, 9) for _ in range(draw.integer(3, 5))], 3)
expect_trained([draw.integer(2, 9)], 2)
### END HIDDEN TESTS

# %% check="offloaded-beside" points=2
# Gradients leave when they are found, layers are updated while backward goes on, and backward waits for nobody.
expect_trained([4, 6, 3], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_trained([draw.integer(1, 40) for _ in range(6)], 3)
### END HIDDEN TESTS

# %% check="offloaded-delayed" points=1
# One step late: the update of a step goes on beside the next one.
expect_trained([4, 6], 2, delayed=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_trained([draw.integer(1, 9) for _ in range(draw.integer(2, 4))], 4, delayed=True)
expect_trained([3, draw.integer(1, 9)], 1, delayed=True)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Which chunk leaves (2 points)
#
# A model in chunks of equal size, of which `room` fit on the device. The order in which a step uses them is known. A chunk that is used and not
# there is fetched; if the device is full, one of those there has to leave first (the one about to be used takes its place). Nothing leaves
# while there is room. At the start the device is empty.
#
# For each use return the chunk that leaves before it, or None. As few chunks as possible may be fetched over the whole order. Two chunks that
# are both never used again are equally good to leave.
#
# > **API** A pure function, no tensors and no network: `leaving(order, room)` takes a list of names and an `int`, and returns a list of the same
# > length, of names and `None`.
#
# The order a, b, c, a, b with room for 2: a and b are fetched, for c one of them has to leave, and the other is there when it is used again. Four
# fetches are enough, three are not.


# %% answer="leaving"
def leaving(order, room):
    """order: a list of chunk names, room >= 1 -> a list as long: a name or None."""
    ### BEGIN SOLUTION
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim)
    return gone
    ### END SOLUTION


# %% judge="expect_fetches"
def fetches(order, room, gone, seen):
    """How many chunks are fetched if these leave; that nothing impossible leaves, and nothing without need."""
    expect(
        isinstance(gone, list) and len(gone) == len(order),
        "one for each use",
        f"a name or None for each use {seen}",
    )
    here, count = set(), 0
    for chunk, victim in zip(order, gone):
        missing = chunk not in here
        if missing and len(here) == room:
            there = isinstance(victim, str) and victim in here
            expect(
                there,
                "what leaves was there",
                f"the device is full: one of the chunks there leaves {seen}",
            )
            here.remove(victim)
        else:
            expect(
                victim is None,
                "nothing leaves without need",
                f"the chunk is there, or there is room for it {seen}",
            )
        count += missing
        here.add(chunk)
    return count


def fewest(order, room):
    """By another way than keeping the next uses: at each miss, look forward for the chunk that is met last."""
    here, count = set(), 0
    for position, chunk in enumerate(order):
        if chunk not in here:
            count += 1
            if len(here) == room:
                left = set(here)
                for other in order[position:]:
                    if len(left) == 1:
                        break
                    left.discard(other)
                here.remove(left.pop())
            here.add(chunk)
    return count


def expect_fetches(*cases):
    for said, (order, room) in zip(ask_each(leaving, list(cases)), cases, strict=True):
        seen = f"(seen with {len(order)} uses and room for {room})"
        count = fetches(order, room, said, seen)
        hint = f"the order is known to its end; whose next use is farthest? {seen}"
        expect(count <= fewest(order, room), "the fewest fetches", hint)


def letters(text):
    return list(text)


def there_and_back(chunks, passes):
    """Forward and backward of some steps."""
    names = [f"chunk {number}" for number in range(chunks)]
    return (names + names[::-1]) * passes


# %% check="leaving-small" points=1
# Only what is there leaves, only when it has to, and as few chunks as possible are fetched.
expect_fetches((letters("abcab"), 2), (letters("abcabc"), 2), (there_and_back(5, 2), 3))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_fetches(
    (letters("abcabdcba"), 3),
    (letters("aaaa"), 1),
    (letters("abab"), 1),
    (letters("abc"), 5),
    *(([draw.choice("abcdefg") for _ in range(60)], draw.integer(2, 5)) for _ in range(12)),
)
### END HIDDEN TESTS

# %% check="leaving-large" points=1
# The same for a long order, within seconds.
expect_fetches((there_and_back(40, 3), 20))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
names = [f"c{number}" for number in range(60)]
long = [draw.choice(names) for _ in range(1500)]
popular = [names[min(draw.integer(0, 59), draw.integer(0, 59))] for _ in range(1500)]
expect_fetches(
    (long, draw.integer(10, 30)),
    (popular, 12),
    (there_and_back(draw.integer(50, 90), 4), 33),
    (long, 1),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The window (1 point)
#
# The device has places for m layers, and layer i takes `compute[i]` ms to run, `fetch[i]` ms to come from the host. Layers run in their order,
# one at a time. At the start the first m are there. The link brings the others in their order, one at a time: layer i may start on its way as soon as
# layer i-m has run, whose place it takes, and layer i-1 has come (if it had to come).
#
# `stall` is how long the device does nothing until the last layer has run. `window` is the smallest m without a stall. All times are
# whole numbers, and at least 1.
#
# > **API** Pure functions of `int`s and lists of `int`s. `stall(compute, fetch, m)` returns ms, `window(compute, fetch)` an m; both are `int`s.
#
# compute = `[2, 2, 2, 2]`, fetch = `[3, 3, 3, 3]`, m = 1: each later layer starts to come when the one before has run: 9 ms are lost. m = 2: layer 2
# comes from 2 to 5, and layer 1 has run by 4; layer 3 comes from 5 to 8, and layer 2 has run by 7: 1 + 1 ms are lost.


# %% answer="window"
def stall(compute, fetch, m):
    """Two lists of L whole numbers, 1 <= m <= L -> ms."""
    ### BEGIN SOLUTION
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)
    ### END SOLUTION


def window(compute, fetch):
    """-> the smallest m from 1 to L without a stall."""

    ### BEGIN SOLUTION
    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return low
    ### END SOLUTION


# %% judge="expect_windows"
def lost(compute, fetch, m):
    """Event by event: who can start, starts."""
    now, ran, came, fetching, running = 0, 0, m, None, None
    busy = 0
    while ran < len(compute):
        if running is None and ran < came:
            running = now + compute[ran]
        if fetching is None and came < len(compute) and came - m < ran:
            fetching = now + fetch[came]
        until = min(end for end in (running, fetching) if end is not None)
        busy += (until - now) * (running is not None)
        now = until
        if running == now:
            running, ran = None, ran + 1
        if fetching == now:
            fetching, came = None, came + 1
    return now - busy


def expect_windows(*cases):
    """Cases (compute, fetch)."""
    sized = [
        (*case, m) for case in cases for m in {1, 2, draw.integer(1, len(case[0])), len(case[0])}
    ]
    sized = [case for case in sized if case[2] <= len(case[0])]
    for said, case in zip(ask_each(stall, sized), sized, strict=True):
        seen = f"(seen with {len(case[0])} layers and m = {case[2]})"
        expect(type(said) is int, "whole ms", f"a stall is an int {seen}")
        hint = f"when is a place free, when is the link free, and which layers are there at the start? {seen}"
        expect(said == lost(*case), "the stall", hint)
    for said, case in zip(ask_each(window, list(cases)), cases, strict=True):
        wanted = next(m for m in range(1, len(case[0]) + 1) if lost(*case, m) == 0)
        hint = f"the smallest window without a stall, for these times (seen with {len(case[0])} layers)"
        expect(type(said) is int and said == wanted, "the window", hint)


# %% check="window-all" points=1
# The stall of a window, and the smallest window without one.
expect_windows(([2] * 4, [3] * 4), ([5, 1, 1, 5, 1, 1], [2] * 6), ([7], [9]))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
some = lambda most, layers: [draw.integer(1, most) for _ in range(layers)]
expect_windows(
    *((some(9, layers), some(9, layers)) for layers in (2, 3, 8, 15, 40)),
    (some(9, 30), some(3, 30)),
    ([1] * 20 + [50] * 20, [4] * 40),
    ([50] * 20 + [1] * 20, [4] * 40),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Free, and yet out of memory (3 points)
#
# An allocator like PyTorch's, with rules of its own. All numbers are KiB.
#
# 1. A request is rounded up to a multiple of 4.
# 2. It gets the smallest free block that is large enough; of equal ones the first (the lowest segment, then the lowest offset). The block is cut: the
#    request lies at its start, the rest stays free.
# 3. If no block is large enough, a new segment is reserved, of the request rounded up to a multiple of 64. Segments are numbered 0, 1, 2, ... in the order in
#    which they are reserved, and no number is used twice. Then as in 2.
# 4. If `capacity` does not allow a new segment, all segments that are free from end to end are given back first, and then it is tried once more. If it still
#    is not allowed, the program is out of memory, and what follows does not happen.
# 5. What is freed becomes one block with the free blocks beside it in its segment. Segments stay reserved.
#
# With `expandable=True` there is one segment only, number 0, which starts empty and grows at its end. Instead of 3: if its last block is free it is used
# too, and the segment grows by what is still missing, rounded up to a multiple of 64. Nothing is given back: 4 is only its last sentence.
#
# The trace has `("alloc", name, size)` and `("free", name)`. Return a dict: "places" `[segment, offset]` of each request that was met, in order; "reserved" the
# KiB after each event that happened; "died" the index of the event that was out of memory, or None. That event is not in "reserved".
#
# > **API** A pure function: `replay(trace, capacity, expandable)` takes a list of tuples, an `int` and a `bool`, and returns the dict with its three
# > keys, made of lists, `int`s and `None`.
#
# capacity 192: x of 40 lies in segment 0, y of 40 in segment 1 (a rest of 24 is too small), z of 40 in segment 2. When x and z are freed, 152 of
# 192 are free, but no free block is as large as a request of 100, and no new segment is allowed. So segments 0 and 2 are given back; 64
# stay reserved, and a new segment of 128 fits.


# %% answer="replay"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    ### BEGIN SOLUTION
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}
    ### END SOLUTION


# %% judge="expect_replays"
def up(size, unit):
    return size + -size % unit


def replayed(trace, capacity, expandable):
    """Another way: a segment is a list of its units of 4 KiB, each with the name that has it, or None."""
    memory, places, reserved, count = {0: []} if expandable else {}, [], [], 0

    def runs():
        for number, units in memory.items():
            start = None
            for at, owner in enumerate([*units, "end"]):
                if owner is None and start is None:
                    start = at
                elif owner is not None and start is not None:
                    yield at - start, number, start
                    start = None

    def held():
        return 4 * sum(map(len, memory.values()))

    for index, event in enumerate(trace):
        if event[0] == "free":
            for units in memory.values():
                units[:] = [None if owner == event[1] else owner for owner in units]
        else:
            wanted = up(event[2], 4) // 4
            fits = [run for run in runs() if run[0] >= wanted]
            if not fits:
                tail = 0
                while expandable and tail < len(memory[0]) and memory[0][-1 - tail] is None:
                    tail += 1
                more = up(4 * (wanted - tail), 64)
                if held() + more > capacity and not expandable:
                    for number in [n for n, units in memory.items() if not any(units)]:
                        del memory[number]
                if held() + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                if not expandable:
                    memory[count], count = [], count + 1
                memory[max(memory)] += [None] * (more // 4)
                fits = [run for run in runs() if run[0] >= wanted]
            _, number, at = min(fits)
            memory[number][at : at + wanted] = [event[1]] * wanted
            places.append([number, 4 * at])
        reserved.append(held())
    return {"places": places, "reserved": reserved, "died": None}


HINTS = {
    "places": "which free block is the smallest that will do, and of equal ones the first?",
    "reserved": "how much is reserved after each event that happened?",
    "died": "is it out of memory at that event, and at no other? What is given back before, and what not?",
}


def expect_replays(*cases):
    """Cases (trace, capacity, expandable). Lists are compared as far as both go, then where they end."""
    for said, case in zip(ask_each(replay, list(cases)), cases, strict=True):
        trace, capacity, expandable = case
        seen = f"(seen with {len(trace)} events, capacity {capacity}{', expandable' * expandable})"
        listed = isinstance(said, dict) and set(said) == set(HINTS)
        listed = listed and all(isinstance(said[name], list) for name in ("places", "reserved"))
        expect(listed, "a dict", f"with {', '.join(HINTS)}, two of them lists {seen}")
        wanted = replayed(*case)
        for name in ("places", "reserved"):
            common = min(len(said[name]), len(wanted[name]))
            hint = f"{HINTS[name]} {seen}"
            expect_equal(said[name][:common], wanted[name][:common], name, hint)
        alike = type(said["died"]) is type(wanted["died"]) and said["died"] == wanted["died"]
        alike = alike and all(
            len(said[name]) == len(wanted[name]) for name in ("places", "reserved")
        )
        expect(alike, "died", f"{HINTS['died']} {seen}")


def drawn_trace(events, most):
    """Some live, some die, in no order."""
    trace, alive = [], []
    for number in range(events):
        if alive and draw.random() < 0.45:
            trace.append(("free", alive.pop(draw.integer(0, len(alive) - 1))))
        else:
            alive.append(f"t{number}")
            trace.append(("alloc", alive[-1], draw.integer(1, most)))
    return trace


def growing(steps):
    """A sequence that gets longer: each tensor a little larger than the one before it, which dies then."""
    trace = []
    for number in range(steps):
        trace.append(("alloc", f"t{number}", 50 + 30 * number))
        if number:
            trace.append(("free", f"t{number - 1}"))
    return trace


HOLES = [("alloc", f"t{i}", 16) for i in range(8)] + [("free", f"t{i}") for i in (1, 0, 4, 6)]
HOLES += [
    ("alloc", "a", 10),
    ("free", "t5"),
    ("alloc", "b", 40),
    ("alloc", "c", 14),
    ("alloc", "d", 3),
    ("alloc", "e", 30),
]
XYZ = [("alloc", name, 40) for name in "xyz"] + [("free", "x"), ("free", "z"), ("alloc", "w", 100)]

# %% check="replay-best_fit" points=1
# Blocks are cut and put together again; the smallest that will do is taken.
expect_replays((HOLES, 1000, False), (XYZ[:5], 1000, False), (growing(4), 10_000, False))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
equal = (
    [("alloc", f"t{i}", 16) for i in range(9)]
    + [("free", f"t{i}") for i in (6, 1, 4)]
    + [("alloc", f"u{i}", 10) for i in range(4)]
)
expect_replays(
    (equal, 1000, False), *((drawn_trace(80, most), 10**6, False) for most in (20, 60, 200, 64))
)
### END HIDDEN TESTS

# %% check="replay-capacity" points=1
# What is free from end to end is given back before a request dies.
expect_replays((XYZ, 192, False), (XYZ, 191, False), (growing(9), 700, False))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_replays(
    *(
        (drawn_trace(120, most), draw.integer(6, 12) * most, False)
        for most in (30, 60, 64, 100, 150, 300)
    )
)
expect_replays(*((growing(draw.integer(8, 14)), 64 * draw.integer(8, 12), False) for _ in range(3)))
### END HIDDEN TESTS

# %% check="replay-expandable" points=1
# One segment that grows at its end.
expect_replays(
    (HOLES, 1000, True), (XYZ, 192, True), (growing(6), 10_000, True), (growing(9), 700, True)
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_replays(
    *((drawn_trace(120, most), draw.integer(6, 12) * most, True) for most in (30, 60, 64, 150, 300))
)
expect_replays(
    (growing(draw.integer(8, 14)), 64 * draw.integer(8, 30), True),
    (drawn_trace(60, 9), 10**6, True),
)
### END HIDDEN TESTS
