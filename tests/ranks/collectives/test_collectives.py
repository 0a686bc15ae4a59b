"""Collectives against numpy's definition: values, dtypes, layouts, order, bytes, overlap.

The same checks run wherever ranks find themselves: gloo on a laptop, NCCL where each rank has a GPU, gloo
over shared GPUs.
"""

import math
import random

import numpy
import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.collectives import transport
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh

WORLD = [1, 2, 3, 4, 8]


# ---- meaning: eight operations against numpy ----------------------------------------------------------


def define(op: str, xs: list[numpy.ndarray]) -> list[numpy.ndarray]:
    """What every rank has after `op`, written down from the inputs of all ranks."""
    n = len(xs)
    if op == "all_reduce":
        return [sum(xs)] * n
    if op == "all_gather":
        return [numpy.concatenate(xs)] * n
    if op == "reduce_scatter":
        return numpy.split(sum(xs), n)
    if op == "all_to_all":
        return [numpy.concatenate([numpy.split(x, n)[r] for x in xs]) for r in range(n)]
    if op == "all_to_all uneven":
        cuts = [numpy.split(x, numpy.cumsum(uneven(r, n))[:-1]) for r, x in enumerate(xs)]
        return [numpy.concatenate([cut[r] for cut in cuts]) for r in range(n)]
    if op == "broadcast":
        return [xs[n - 1]] * n
    if op == "exchange":
        return [xs[partner(r, n)] for r in range(n)]
    if op == "rotate":
        return [xs[(r - 1) % n] for r in range(n)]
    raise AssertionError(op)


OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all uneven"]
OPERATIONS += ["broadcast", "exchange", "rotate"]
DTYPES = "float64 float32 bfloat16 float16 int64 int32 int8 uint8 complex64 complex128 bool float8_e4m3fn"


def uneven(rank: int, n: int) -> list[int]:
    """Rows that `rank` sends to each rank: they differ, some are 0, and they add up to 2n."""
    sizes = [(rank + to) % 3 for to in range(n - 1)]
    return [*sizes, 2 * n - sum(sizes)]


def partner(rank: int, n: int) -> int:
    return rank ^ 1 if rank ^ 1 < n else rank


def ours(op: str, x: torch.Tensor, group) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    if op == "all_to_all uneven":
        return collectives.all_to_all(
            x, group, send_sizes=uneven(rank, n), receive_sizes=[uneven(r, n)[rank] for r in range(n)]
        )
    if op == "broadcast":
        return collectives.broadcast(x, n - 1, group)
    if op == "exchange":
        return collectives.exchange(x, partner(rank, n), partner(rank, n), group)
    return getattr(collectives, op)(x, group)


def inputs(rank: int, n: int) -> numpy.ndarray:
    return numpy.random.default_rng(rank).integers(-99, 99, (2 * n, 3)).astype(numpy.float64)


def all_eight(ops):
    group = dist.group.WORLD
    x = torch.from_numpy(inputs(group.rank(), group.size())).to(launch.device())
    results = {op: ours(op, x, group).cpu().numpy() for op in ops}
    # an input was written to
    assert torch.equal(x.cpu(), torch.from_numpy(inputs(group.rank(), group.size())))
    return results


@pytest.mark.parametrize("ranks", WORLD)
def test_eight_operations_mean_what_numpy_says(ranks):
    xs = [inputs(rank, ranks) for rank in range(ranks)]
    results = launch.run(all_eight, OPERATIONS, ranks=ranks)
    for op in OPERATIONS:
        for rank, expected in enumerate(define(op, xs)):
            assert numpy.array_equal(results[rank][op], expected), f"{op} on rank {rank} of {ranks}"
    if ranks > 1:  # control: the definitions tell the operations apart
        assert not numpy.array_equal(define("all_to_all", xs)[0], define("rotate", xs)[0])
        assert not numpy.array_equal(define("all_to_all", xs)[0], define("all_to_all uneven", xs)[0])


# ---- dims, layouts, dtypes, sizes ------------------------------------------------------------------------


def other_dims():
    group, device = dist.group.WORLD, launch.device()
    n, rank = group.size(), group.rank()
    everyone = [torch.arange(2.0 * n * 3 * n).view(2, n, 3 * n).to(device) * (r + 1) for r in range(n)]
    total, x = sum(everyone), everyone[rank]
    for dim in (0, 1, 2, -1, -3):
        for layout in (x, x.transpose(0, 2).contiguous().transpose(0, 2), torch.stack([x, x], -1)[..., 1]):
            whole = torch.cat(everyone, dim)
            assert torch.equal(collectives.all_gather(layout, group, dim), whole)
            out = torch.full_like(whole, math.nan)
            assert collectives.all_gather(layout, group, dim, out=out) is out and torch.equal(out, whole)
            if x.shape[dim] % n == 0:
                own = total.chunk(n, dim)[rank]
                assert torch.equal(collectives.reduce_scatter(layout, group, dim), own)
                out = torch.full_like(own, math.nan, memory_format=torch.contiguous_format)
                assert collectives.reduce_scatter(layout, group, dim, out=out, async_op=True).wait() is out
                assert torch.equal(out, own)
                swapped = torch.cat([e.chunk(n, dim)[rank] for e in everyone], dim)
                received = collectives.all_to_all(layout, group, dim)
                assert torch.equal(received, swapped) and received.is_contiguous()
            assert torch.equal(collectives.all_reduce(layout, group), total)
            assert torch.equal(collectives.broadcast(layout, 0, group), everyone[0])
            assert torch.equal(collectives.rotate(layout, group), everyone[rank - 1])


def results():
    """Of each operation: is the result new memory, contiguous and outside autograd?"""
    group, x = dist.group.WORLD, torch.ones(4, 8).T.requires_grad_()
    n, rank, found = group.size(), group.rank(), {}
    calls = {
        "all_reduce": lambda x, **how: collectives.all_reduce(x, group, **how),
        "all_gather": lambda x, **how: collectives.all_gather(x, group, **how),
        "reduce_scatter": lambda x, **how: collectives.reduce_scatter(x, group, 1, **how),
        "all_to_all": lambda x, **how: collectives.all_to_all(x.detach(), group, 1, **how),
        "broadcast": lambda x, **how: collectives.broadcast(x, 0, group, **how),
        "exchange": lambda x, **how: collectives.exchange(x, (rank + 1) % n, (rank - 1) % n, group, **how),
        "rotate": lambda x, **how: collectives.rotate(x, group, **how),
    }
    for op, call in calls.items():
        for given in (x, x.contiguous()):
            for y in (call(given), call(given, async_op=True).wait()):
                apart = y.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                found.setdefault(op, set()).add((apart, y.is_contiguous(), y.requires_grad))
    whole = torch.ones(4, 8)
    for dim in range(2):
        part = collectives.scatter_to(whole, group, dim)
        apart = part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        found.setdefault("scatter_to", set()).add((apart, part.is_contiguous(), part.requires_grad))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_result_is_new_contiguous_and_outside_autograd(ranks):
    for found in launch.run(results, ranks=ranks):
        assert set(map(frozenset, found.values())) == {frozenset({(True, True, False)})}, found


def dtypes_and_sizes():
    group, device = dist.group.WORLD, launch.device()
    n, rank = group.size(), group.rank()
    for dtype in (getattr(torch, name) for name in DTYPES.split()):
        for numel in (0, 1, n - 1, n, 5 * n + 1):
            x = torch.arange(numel, device=device).remainder(2).to(dtype)
            assert torch.equal(collectives.all_gather(x, group).float(), torch.cat([x] * n).float())
            assert torch.equal(collectives.broadcast(x, 0, group).float(), x.float())
            assert torch.equal(collectives.rotate(x, group).float(), x.float())
            if dtype not in (torch.bool, torch.float8_e4m3fn):
                assert torch.equal(collectives.all_reduce(x, group), x * n)
                assert torch.equal(collectives.reduce_scatter(torch.cat([x] * n), group), x * n)
    scalar = torch.tensor(rank + 1.0, device=device)
    assert collectives.all_reduce(scalar, group).item() == n * (n + 1) / 2
    assert collectives.rotate(scalar, group).item() == (rank - 1) % n + 1
    ours, theirs = collectives.rotate((scalar, scalar.long()), group)
    assert ours.dtype == torch.float32 and theirs.dtype == torch.int64 and ours.item() == theirs.item()
    weight = torch.nn.Parameter(torch.ones(n, device=device))
    assert (
        type(collectives.all_reduce(weight, group)) is type(collectives.rotate(weight, group)) is torch.Tensor
    )


@pytest.mark.parametrize("ranks", [3])
def test_any_dim_any_layout(ranks):
    launch.run(other_dims, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_dtype_and_size(ranks):
    launch.run(dtypes_and_sizes, ranks=ranks)


# ---- the order of a sum ----------------------------------------------------------------------------------


def awkward(rank: int, dtype=torch.float32) -> torch.Tensor:
    """Numbers whose float sum depends on the order of the terms."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(1001, generator=generator, dtype=torch.float64) * 10 ** (rank % 4)).to(dtype)


def sums(dtype):
    group = dist.group.WORLD
    x = awkward(group.rank(), dtype).to(launch.device())
    padded = torch.cat([x, x.new_zeros(-len(x) % group.size())])
    blocking = collectives.all_reduce(x, group)
    again, in_place = collectives.all_reduce(x, group, async_op=True).wait(), x.clone()
    assert collectives.all_reduce(in_place, group, out=in_place) is in_place
    shards = collectives.all_gather(collectives.reduce_scatter(padded, group), group)[: len(x)]
    assert torch.equal(blocking, again) and torch.equal(blocking, in_place) and torch.equal(blocking, shards)
    return blocking.cpu()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL adds in an order of its own")
def test_sums_are_taken_in_rank_order_and_equal_to_the_last_bit(ranks):
    results, expected = launch.run(sums, torch.float32, ranks=ranks), awkward(0)
    for rank in range(1, ranks):
        expected = expected + awkward(rank)
    assert all(torch.equal(result, expected) for result in results)
    if ranks > 2:  # control: another order gives other bits
        backwards = awkward(ranks - 1)
        for rank in range(ranks - 2, -1, -1):
            backwards = backwards + awkward(rank)
        assert not torch.equal(backwards, expected)


def cuts(dtype):
    """The same numbers as one tensor, in pieces, and as a scattered bucket whose buffer is overwritten."""
    group = dist.group.WORLD
    n, rank = group.size(), group.rank()
    x = torch.cat([awkward(rank, dtype)] * 8 * n)[: 1000 * 8 * n]
    whole = collectives.all_reduce(x, group)
    for sizes in ([len(x) - 1, 1], [7, len(x) // 2, len(x) - 7 - len(x) // 2], [1000] * 8 * n):
        handles = [
            collectives.all_reduce(piece, group, name=f"{len(sizes)} pieces, {i}", async_op=True)
            for i, piece in enumerate(x.split(sizes))
        ]
        assert torch.equal(torch.cat([handle.wait() for handle in handles]), whole)
    shard = whole.chunk(n)[rank]
    assert torch.equal(collectives.reduce_scatter(x, group), shard)
    for _ in range(5):
        buffer = x.clone()
        assert torch.equal(collectives.reduce_scatter(buffer, group, out=buffer.chunk(n)[rank]), shard)
        buffer.fill_(math.nan)  # a call that returns has sent all it had to
    collectives.barrier(group)
    return whole


@pytest.mark.parametrize("ranks, dtype", [(3, torch.float32), (4, torch.bfloat16)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL adds in an order of its own")
def test_the_bits_of_a_sum_do_not_depend_on_how_a_tensor_is_cut(ranks, dtype):
    """Plain, bucketed and sharded gradients are the same numbers in other cuts; a ring has other bits."""
    first, *others = launch.run(cuts, dtype, ranks=ranks)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL rounds at every hop")
def test_low_precision_is_added_in_float32_and_rounded_once(dtype):
    results = launch.run(sums, dtype, ranks=4)
    wide, narrow = awkward(0, dtype).float(), awkward(0, dtype)
    for rank in range(1, 4):
        wide, narrow = wide + awkward(rank, dtype).float(), narrow + awkward(rank, dtype)
    assert all(torch.equal(result, wide.to(dtype)) for result in results)
    assert not torch.equal(narrow, wide.to(dtype))  # control: rounding at every step is something else


# ---- the maximum -----------------------------------------------------------------------------------------

MAX_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


def ascending(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of both signs, each rank's the largest somewhere; in a float one rank has a NaN."""
    x = torch.randn(1001, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 100
    if dtype.is_floating_point:
        x[3], x[500 + rank], x[9] = -math.inf, math.nan, math.inf if rank == 1 else 0
    return x > 150 if dtype == torch.bool else x.to(dtype)


def maxima():
    group, results = dist.group.WORLD, []
    for dtype in MAX_DTYPES:
        x = ascending(group.rank(), dtype).to(launch.device())
        blocking = collectives.all_reduce(x, group, op="max")
        sent = collectives.last_calls()[-1].sent_bytes
        again = collectives.all_reduce(x, group, op="max", async_op=True).wait()
        in_place = x.clone()
        assert collectives.all_reduce(in_place, group, op="max", out=in_place) is in_place
        # an input was written to
        assert torch.equal(x.cpu().nan_to_num(), ascending(group.rank(), dtype).nan_to_num())
        results.append([value.cpu() for value in (blocking, again, in_place)] + [sent])
    scalar = collectives.all_reduce(
        torch.tensor(-1.0 - group.rank(), device=launch.device()), group, op="max"
    )
    return results, scalar.item()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_maximum_of_each_element(ranks):
    everyone = launch.run(maxima, ranks=ranks)
    for i, dtype in enumerate(MAX_DTYPES):
        expected = ascending(0, dtype)
        for rank in range(1, ranks):
            expected = torch.maximum(expected, ascending(rank, dtype))
        for results, scalar in everyone:
            for value in results[i][:-1]:
                if dtype.is_floating_point and torch.cuda.is_available():
                    value[500 : 500 + ranks] = math.nan  # NCCL has rules of its own for a NaN
                torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
            assert scalar == -1
        sent, size = [results[i][-1] for results, _ in everyone], 1001 * dtype.itemsize
        assert sum(sent) == 2 * (ranks - 1) * size and max(sent) - min(sent) <= 2 * dtype.itemsize
        assert not dtype.is_floating_point or expected.isnan().sum() == ranks  # control: NaNs do propagate


# ---- bytes -----------------------------------------------------------------------------------------------


def volumes(elements):
    """(payload, sent) of every operation on `elements` float32 per rank, and who sent what in a broadcast."""
    group, device = dist.group.WORLD, launch.device()
    n, x = group.size(), torch.ones(elements, device=device)
    collectives.all_reduce(x, group)
    if elements % n == 0:
        collectives.reduce_scatter(x, group)
        collectives.all_to_all(x, group)
    collectives.all_gather(x, group, async_op=True).wait()
    collectives.broadcast(x, 0, group)
    collectives.rotate(x, group)
    collectives.barrier(group)
    return {call.op: (call.payload_bytes, call.sent_bytes) for call in collectives.last_calls()}


@pytest.mark.parametrize("ranks", WORLD)
def test_every_rank_sends_what_the_formulas_say(ranks):
    size, sent = 4 * 24 * ranks, launch.run(volumes, 24 * ranks, ranks=ranks)
    for calls in sent:
        assert calls["all_reduce"] == (size, 2 * (ranks - 1) * size // ranks)
        assert calls["reduce_scatter"] == (size, (ranks - 1) * size // ranks)
        assert calls["all_gather"] == (ranks * size, (ranks - 1) * size)
        assert calls["all_to_all"] == (size, (ranks - 1) * size // ranks)
        assert calls.get("send", (size, size)) == (size, size)
        assert calls.get("receive", (size, 0)) == (size, 0) and calls["barrier"] == (0, 0)
    assert sum(calls["broadcast"][1] for calls in sent) == (ranks - 1) * size
    assert sent[0]["broadcast"][1] == math.ceil(math.log2(ranks)) * size  # the root of a binomial tree


@pytest.mark.parametrize("ranks", [3, 4])
def test_nothing_is_lost_when_the_size_does_not_divide(ranks):
    for elements in (1, ranks + 1, 8 * ranks - 1):
        accounts = launch.run(volumes, elements, ranks=ranks)
        assert accounts == [dryrun.run(volumes, elements, rank=rank, ranks=ranks) for rank in range(ranks)]
        sent = [calls["all_reduce"][1] for calls in accounts]
        assert sum(sent) == 2 * (ranks - 1) * 4 * elements and max(sent) - min(sent) <= 2 * 4


# ---- overlap ---------------------------------------------------------------------------------------------


def random_calls(seed, steps):
    """Random collectives on four groups, blocking or not, waited for in any order, each by its definition."""
    mesh = Mesh(dp=2, tp=2)
    groups = [mesh.group("tp"), mesh.group("dp"), mesh.group("dp", "tp"), dist.group.WORLD]
    plan, pending, me = random.Random(seed), [], dist.get_rank()  # the plan is the same on every rank
    checked = 0

    def check(result, expected):
        nonlocal checked
        result = result.wait() if isinstance(result, collectives.Handle) else result
        assert torch.equal(result.cpu(), expected), (result, expected)
        checked += 1

    for step in range(steps):
        op = plan.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "rotate"])
        group, rows, background = plan.choice(groups), plan.choice([1, 3, 5000]), plan.random() < 0.6
        members = dist.get_process_group_ranks(group)
        n, rank = len(members), group.rank()
        xs = [torch.arange(n * rows) + 1000 * member + step for member in members]
        arguments = {"source": n - 1} if op == "broadcast" else {}
        x = xs[rank].to(launch.device())
        result = getattr(collectives, op)(x, group=group, async_op=background, **arguments)
        expected = {
            "all_reduce": lambda: sum(xs),
            "all_gather": lambda: torch.cat(xs),
            "reduce_scatter": lambda: sum(xs).chunk(n)[rank],
            "all_to_all": lambda: torch.cat([y.chunk(n)[rank] for y in xs]),
            "broadcast": lambda: xs[-1],
            "rotate": lambda: xs[rank - 1],
        }[op]()
        pending.append((result, expected))
        while pending and plan.random() < 0.4:
            check(*pending.pop(plan.randrange(len(pending))))
    for result, expected in pending:
        check(result, expected)
    return checked, me


@pytest.mark.parametrize("checked", [False, True])
def test_two_hundred_calls_in_any_order_of_waiting(checked):
    assert launch.run(random_calls, 7, 200, checked=checked, ranks=4) == [(200, rank) for rank in range(4)]


def progress_without_waiting():
    """Rank 0 does not wait until all others have told it, by a message, that they have the sum already."""
    group, x = dist.group.WORLD, torch.ones(100_000, device=launch.device())
    handle = collectives.all_reduce(x, group, async_op=True)
    if group.rank() == 0:
        for source in range(1, group.size()):
            collectives.receive(torch.empty(1, device=x.device), source, group)
    else:
        assert handle.wait().eq(group.size()).all()
        collectives.send(torch.ones(1, device=x.device), 0, group)
    first, second = handle.wait(), handle.wait()
    return first is second and first.eq(group.size()).all().item()


@pytest.mark.parametrize("ranks", [4])
def test_an_asynchronous_call_makes_progress_by_itself(ranks):
    assert launch.run(progress_without_waiting, ranks=ranks) == [True] * ranks


def messages():
    """More messages in flight than anybody waits for in order, with a handle that its owner forgets."""
    group, device = dist.group.WORLD, launch.device()
    n, rank = group.size(), group.rank()
    to, source = (rank + 1) % n, (rank - 1) % n
    receives = [
        collectives.receive(None, source, group, shape=(i,), dtype=torch.int32, device=device, async_op=True)
        for i in range(20)
    ]
    for i in range(20):
        collectives.send(
            torch.full((i,), 100 * rank + i, dtype=torch.int32, device=device), to, group, async_op=True
        )
    for i in random.Random(rank).sample(range(20), 20):
        assert receives[i].wait().tolist() == [100 * source + i] * i
    x = torch.full((3,), rank, device=device)
    if rank % 2 == 0 and rank + 1 < n:
        assert collectives.send(x, rank + 1, group) is None
        assert collectives.receive(x, rank + 1, group).tolist() == [rank + 1] * 3
    elif rank % 2:
        assert collectives.receive(x, rank - 1, group).tolist() == [rank - 1] * 3
        collectives.send(x, rank - 1, group)
    wide = collectives.exchange(x, to, source, group, like=torch.empty(3, dtype=x.dtype, device=device))
    assert wide.tolist() == [source] * 3 and x.tolist() == [rank] * 3
    return collectives.rotate(x, group, shift=-2).tolist()


@pytest.mark.parametrize("ranks", [3])
def test_messages_arrive_in_order_whatever_is_waited_for_first(ranks):
    for checked in (False, True):
        turned = [[(rank + 2) % ranks] * 3 for rank in range(ranks)]
        assert launch.run(messages, checked=checked, ranks=ranks) == turned


@pytest.mark.parametrize(
    "rank, ranks, source, children", [(0, 8, 0, [4, 2, 1]), (3, 7, 3, [0, 5, 4]), (6, 8, 2, [0, 7])]
)
def test_a_broadcast_goes_to_the_largest_subtree_first(rank, ranks, source, children):
    assert transport.tree_children(rank, ranks, source) == children
