"""Programs without tensors, for the evictors: replay a recorded one, or make a chain of layers.

    trace = evictor.trace                         of a run without a limit, real tensors (dtr.py)
    simulate(trace, Evictor(limit_bytes=..)).recomputed_cost            what it would be under this limit
    simulate(chain(16), Evictor(limit_bytes=8))   a forward and a backward of 16 layers, one byte a result

A trace is what the program did, in order, whatever was evicted meanwhile: see `Evictor`. So one trace serves
all limits and rules, and if the real program is run under one of them its counts are the simulator's.
"""

from itertools import count

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.simulate.eviction import Block, Evictor


def simulate(trace: list[tuple], evictor: Evictor) -> Evictor:
    """Replays what a program did under another limit or rule; -> the evictor, for its counts."""
    named: dict[int, Block] = {}
    for kind, *event in trace:
        if kind == "constant":
            named[event[0]] = evictor.constant(event[1])
        elif kind == "run":
            name, inputs, outputs, cost = event
            blocks = evictor.run(name, [named[i] for i in inputs], [size for _, size in outputs], cost)
            named.update(zip((number for number, _ in outputs), blocks))
        elif kind == "release":
            evictor.release(named.pop(event[0]))
        else:
            named[event[1]] = evictor.pin(named[event[0]])
    return evictor


def chain(layers: int, bytes: int = 1, cost: int = 1, every: int = 0) -> list[tuple]:
    """The trace of x_i = f(x_{i-1}) and g_{i-1} = b(x_{i-1}, g_i); a result is kept until its backward.

    With `every`, a static plan: of the forward only x_0, x_every, .. are kept, and the results between two of
    them are made once more, all at once, when the backward comes there."""
    if layers < 1 or every < 0:
        cure = "use at least 1 layer, and 0 (keep all) or more"
        raise ValueError(f"layers = {layers}, every = {every}; {cure}")
    require_positive_ints(layers=layers)
    require_ints(bytes=bytes, cost=cost)
    trace: list[tuple] = [("constant", 0, bytes)]
    numbers = count(1)

    def run(name: str, *inputs: int) -> int:
        number = next(numbers)
        trace.append(("run", name, inputs, ((number, bytes),), cost))
        return number

    x = {0: 0}
    for i in range(layers):
        x[i + 1] = run(f"forward {i}", x[i])
        if every and i % every:
            trace.append(("release", x.pop(i)))
    gradient = x.pop(layers)
    for i in reversed(range(layers)):
        if i not in x:
            for j in range(i - i % every, i):
                x[j + 1] = run(f"forward {j}", x[j])
        above, gradient = gradient, run(f"backward {i}", x[i], gradient)
        trace.append(("release", above))
        if i:
            trace.append(("release", x.pop(i)))
    return trace


def graph(trace: list[tuple]) -> tuple[list[tuple], int]:
    """A trace of operators with one result each as a graph for planners: [(cost, bytes, inputs)], and the
    bytes of its constants, which are none of its nodes."""
    nodes, numbers, constants = [], {}, 0
    for kind, *event in trace:
        if kind == "constant":
            constants += event[1]
        elif kind == "run":
            _, inputs, ((number, size),), cost = event
            nodes.append((cost, size, tuple(numbers[i] for i in inputs if i in numbers)))
            numbers[number] = len(numbers)
    return nodes, constants
