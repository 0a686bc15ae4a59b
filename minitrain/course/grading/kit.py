"""The collectives of an exercise, over send and receive of its group: a rank gets those that a call lists.

The bytes are those of minitrain's collectives; with n ranks and S the whole tensor, all_reduce 2(n-1)/n S,
all_gather, reduce_scatter and all_to_all (n-1)/n S, broadcast (n-1) S from the source. Differs: pieces go
straight to whom they are for, and are cut along dim 0. With `async_op=True` a handle comes back, whose
`wait()` returns the result. Collectives of a group follow one another; messages and rotate start at once, so
none while an asynchronous collective of the same group is under way.
"""

import ast
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HEAD = "from concurrent.futures import ThreadPoolExecutor\n\nimport torch\n\n_lanes = {}\n\n\n"
ALWAYS = ("send", "receive", "barrier")


@functools.cache
def source(names: str = "") -> str:
    """The text of `names`, of `ALWAYS` and of what they call. Raises ValueError for one that is not here."""
    nodes = ast.parse(Path(__file__).read_text()).body
    functions = {node.name: node for node in nodes if hasattr(node, "name") and node.name != "source"}
    wanted, taken = [*ALWAYS, *names.split()], {}
    while wanted:
        name = wanted.pop()
        if name not in functions:
            known = ", ".join(name for name in functions if not name.startswith("_"))
            raise ValueError(f"the network of exercises has no {name}; there are {known}")
        if name not in taken:
            taken[name] = ast.unparse(functions[name])
            calls = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            wanted += calls & functions.keys()
    return HEAD + "\n\n\n".join(taken.values())


class _Handle:
    def __init__(self, moves, result):
        self.moves, self.result = moves, result

    def wait(self):
        for move in self.moves:
            move.wait()
        return self.result


def _given(handle, async_op):
    return handle if async_op else handle.wait()


def send(x, to, group, *, async_op=False):
    """Send x to rank `to` of the group; it is over when that rank has asked for it."""
    return _given(_Handle([group.send([x.detach().contiguous()], to)], None), async_op)


def receive(like, source, group, *, async_op=False):
    """The tensor that rank `source` sends, with the shape and dtype of `like`."""
    x = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _given(_Handle([group.recv([x], source)], x), async_op)


def rotate(x, group, shift=1, *, async_op=False):
    """x, a tensor or a tuple, goes to rank + shift of the ring; returns what rank - shift sends."""
    n, rank = group.size(), group.rank()
    given = tuple(part.detach().contiguous() for part in (x if isinstance(x, tuple) else (x,)))
    arrived, moves = tuple(map(torch.clone, given)), []
    if shift % n:
        moves += [group.send([part], (rank + shift) % n) for part in given]
        moves += [group.recv([part], (rank - shift) % n) for part in arrived]
    return _given(_Handle(moves, arrived if isinstance(x, tuple) else arrived[0]), async_op)


def barrier(group):
    """Return when every member has called it."""
    group.barrier().wait()


_lanes = {}


def _perform(act, group, async_op):
    """act() now, behind the calls that are under way, or in the background."""
    if async_op and group not in _lanes:
        _lanes[group] = ThreadPoolExecutor(1)
    if group not in _lanes:
        return act()
    future = _lanes[group].submit(act)
    future.wait = future.result
    return _given(future, async_op)


def _swap(leaving, arriving, group):
    """Piece j of `leaving` goes to rank j, piece j of `arriving` comes from there; a rank's own is copied."""
    rank = group.rank()
    arriving[rank].copy_(leaving[rank])
    moves = [group.send([x.contiguous()], to) for to, x in enumerate(leaving) if to != rank]
    moves += [group.recv([x], source) for source, x in enumerate(arriving) if source != rank]
    _Handle(moves, None).wait()


def _summed(pieces, group, op="sum"):
    """This rank's piece of everyone's: the sum in rank order, or the maximum."""
    terms = [torch.empty_like(pieces[group.rank()]) for _ in pieces]
    _swap(pieces, terms, group)
    for term in terms[1:]:
        (torch.maximum if op == "max" else torch.add)(terms[0], term, out=terms[0])
    return terms[0]


def all_reduce(x, group, *, op="sum", out=None, async_op=False):
    """The sum over the group, or with op="max" the maximum; `out=x` works in place."""
    n, src = group.size(), x.detach().contiguous()

    def act():
        own, result = _summed(src.view(-1).tensor_split(n), group, op), torch.empty_like(src)
        _swap([own] * n, result.view(-1).tensor_split(n), group)
        return result if out is None else out.detach().copy_(result)

    return _perform(act, group, async_op)


def all_gather(x, group, *, async_op=False):
    """Everyone's x [d, ..], concatenated in rank order: [n·d, ..]."""
    n, src = group.size(), x.detach().contiguous()

    def act():
        out = src.new_empty(n * src.shape[0], *src.shape[1:])
        _swap([src] * n, out.chunk(n), group)
        return out

    return _perform(act, group, async_op)


def reduce_scatter(x, group, *, async_op=False):
    """This rank's piece [d, ..] of the sum of everyone's x [n·d, ..]."""
    n, src = group.size(), x.detach().contiguous()
    if src.shape[0] % n:
        raise ValueError(f"reduce_scatter: {src.shape[0]} rows do not divide by {n} ranks; pad them")
    return _perform(lambda: _summed(src.chunk(n), group), group, async_op)


def all_to_all(x, group, *, send_sizes=None, receive_sizes=None, async_op=False):
    """Piece j of x goes to rank j, what arrives is concatenated in rank order; equal pieces, or sizes."""
    n, src = group.size(), x.detach().contiguous()
    leaving_rows = send_sizes or [src.shape[0] // n] * n
    arriving_rows = receive_sizes or leaving_rows
    if sum(leaving_rows) != src.shape[0]:
        raise ValueError(f"all_to_all: pieces of {leaving_rows} rows are not the {src.shape[0]} of x")

    def act():
        out = src.new_empty(sum(arriving_rows), *src.shape[1:])
        _swap(src.split(leaving_rows), out.split(arriving_rows), group)
        return out

    return _perform(act, group, async_op)


def broadcast(x, source, group, *, async_op=False):
    """The source's x, on every rank; elsewhere x only says shape and dtype."""
    others, src = [to for to in range(group.size()) if to != source], x.detach().contiguous()

    def act():
        if group.rank() != source:
            return receive(src, source, group)
        return _Handle([group.send([src], to) for to in others], src.clone()).wait()

    return _perform(act, group, async_op)
