"""The differentiable pairs: each backward is the adjoint of its forward, by inner products and by finite
differences.

A tensor over the ranks is either "same" (one value, a copy on every rank: counted once) or "own" (every rank
its part).
"""

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch

N, COLUMNS = 8, 3  # a whole tensor is [8, 3]; a shard along dim 0 is [8/n, 3]


def swap_uneven(x, group):
    n, rank = group.size(), group.rank()
    sends = [[0, 2, 1, 5], [3, 3, 2, 0], [1, 1, 6, 0], [0, 0, 0, 8]] if n == 4 else [[1, 7], [6, 2]]
    receives = [row[rank] for row in sends]
    return collectives.all_to_all(x, group, send_sizes=sends[rank], receive_sizes=receives)


PAIRS = {  # name: (function of x and group, kind of x, x is a shard, kind of y)
    "copy_to": (collectives.copy_to, "same", False, "own"),
    "reduce_from": (collectives.reduce_from, "own", False, "same"),
    "gather_from": (collectives.gather_from, "own", True, "same"),
    "gather_to": (collectives.gather_to, "own", True, "own"),
    "scatter_to": (collectives.scatter_to, "same", False, "own"),
    "reduce_scatter_to": (collectives.reduce_scatter_to, "own", False, "own"),
    "all_to_all": (collectives.all_to_all, "own", False, "own"),
    "all_to_all uneven": (swap_uneven, "own", False, "own"),
    "gather_to, dim 1": (lambda x, group: collectives.gather_to(x, group, dim=1), "own", True, "own"),
    "reduce_scatter_to, dim -1": (
        lambda x, group: collectives.reduce_scatter_to(x.repeat(1, 4), group, dim=-1), "own", False, "own"
    ),
}  # fmt: skip
both_sum = lambda x, group: collectives.reduce_from(collectives.copy_to(x, group), group)
WRONG = {  # plausible mistakes, as a control: each must fail
    "all-reduce in both directions": (both_sum, "own", False, "same"),
    "no sum in backward": (lambda x, group: x * 1, "same", False, "own"),
    "gather that only slices": (collectives.gather_from, "own", True, "own"),
    "gather that sums too": (collectives.gather_to, "own", True, "same"),
}


def values(kind, shape, seed):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(seed + (1000 * group.rank() if kind == "own" else 0))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(launch.device())


def shape_of_x(sharded):
    return (N // dist.get_world_size() if sharded else N, COLUMNS)


def inner(a, b, kind):
    """<a, b> over the ranks: a "same" pair counts once."""
    product = (a.detach() * b.detach()).sum()
    return (product if kind == "same" else collectives.all_reduce(product, dist.group.WORLD)).item()


def adjoint_error(pair):
    """|<f(x), y> - <x, f*(y)>|, which is zero for every x and y only if f* is the adjoint of f."""
    f, kind_x, sharded, kind_y = pair
    x = values(kind_x, shape_of_x(sharded), seed=1).requires_grad_()
    out = f(x, dist.group.WORLD)
    y = values(kind_y, out.shape, seed=2)
    out.backward(y)
    return abs(inner(out, y, kind_y) - inner(x, x.grad, kind_x))


@pytest.mark.parametrize("ranks", [1, 4])
def test_backward_is_the_adjoint_of_forward(ranks):
    pairs = {name: pair for name, pair in PAIRS.items() if ranks > 1 or pair[0] is not swap_uneven}
    measure = lambda: {name: adjoint_error(pair) for name, pair in pairs.items()}
    for errors in launch.run(measure, ranks=ranks):
        assert max(errors.values()) < 1e-12, errors


def test_plausible_mistakes_are_no_adjoints():
    """The control: the measure sees each of them."""
    measured = launch.run(lambda: {name: adjoint_error(pair) for name, pair in WRONG.items()}, ranks=4)
    assert all(max(errors[name] for errors in measured) > 1e-3 for name in WRONG)


def who_calls():
    group, device = dist.group.WORLD, launch.device()
    x = torch.ones(8, 3, device=device, requires_grad=True)
    y = collectives.gather_to(collectives.scatter_to(x, group), group)
    before = len(collectives.last_calls())
    y.sum().backward()
    calls = collectives.last_calls()[before - 1 :]
    return [(call.op, call.site.split(":")[1], call.sent_bytes) for call in calls]


def test_a_backward_call_is_logged_at_the_line_of_its_forward():
    line, size = who_calls.__code__.co_firstlineno + 3, 8 * 3 * 4
    assert launch.run(who_calls, ranks=2)[0] == [
        ("all_gather", str(line), size // 2),
        ("reduce_scatter", f"{line} backward", size // 2),
        ("all_gather", f"{line} backward", size // 2),
    ]


def frozen():
    """Nothing to differentiate: no graph, and a blocking all_to_all of a plain tensor is the collective."""
    group = dist.group.WORLD
    x = torch.ones(8, 3, device=launch.device())
    with torch.no_grad():
        weight = torch.nn.Parameter(x)
        assert not collectives.all_to_all(weight, group).requires_grad
        assert not collectives.reduce_from(weight, group).requires_grad
    assert collectives.all_to_all(weight, group).requires_grad
    assert not collectives.all_to_all(weight, group, async_op=True).wait().requires_grad
    assert not collectives.all_to_all(x, group).requires_grad


def test_nothing_is_recorded_where_nothing_needs_a_gradient():
    launch.run(frozen, ranks=2)
