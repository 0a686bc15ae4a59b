"""On real ranks: every algorithm equals torch's all-reduce and sends what it says."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from communication_runs import beside_torch, check_on_real_ranks, metered, own_tensor

from minitrain import launch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.communication import algorithms
from minitrain.systems.communication.chunk_schedule import Schedule, mirror
from minitrain.systems.communication.interpreter import bruck, pairwise, run_schedule

NUMELS = [840, 1001, 3, 0]  # divisible by 1..8, not divisible, less than one element a chunk, nothing


def flat_all_reduces(n: int) -> dict[str, Schedule]:
    return {
        "ring": algorithms.ring_all_reduce(n),
        "direct": algorithms.direct_all_reduce(n),
        "binomial": algorithms.binomial_all_reduce(n),
        "halving": algorithms.halving_doubling_all_reduce(n),
        "halving far first": algorithms.halving_doubling_all_reduce(n, near_first=False),
        "doubling": algorithms.doubling_all_reduce(n),
        "one tree": algorithms.tree_all_reduce(algorithms.binary_tree(n), pieces=2),
        "double tree": algorithms.double_tree_all_reduce(n, pieces=3),
    }


@pytest.mark.parametrize("n", [1, 3, 4])
def test_every_flat_all_reduce_equals_torch_and_sends_what_it_says(n):
    check_on_real_ranks(*flat_all_reduces(n).values(), numels=NUMELS)


def test_control_without_its_last_step_the_sum_is_wrong():
    whole = algorithms.ring_all_reduce(4)
    for outcome in launch.run(beside_torch, [Schedule(4, 4, whole.steps[:-1])], [840], ranks=4):
        assert outcome[0]["difference"] > 1e-2


def a_ring(numel: int) -> tuple:
    x = own_tensor(dist.get_rank(), numel).reshape(-1, 7)
    result, messages = metered(
        lambda: run_schedule(algorithms.ring_all_reduce(dist.get_world_size()), x, dist.group.WORLD)
    )
    dist.all_reduce(x)
    return (result - x).abs().max().item(), result.shape, messages


def test_ring_allreduce():
    for n in (2, 3, 4, 8):
        for rank, (difference, shape, messages) in enumerate(launch.run(a_ring, 840, ranks=n)):
            assert difference < 1e-12 and shape == (120, 7)
            assert len(messages) == 2 * (n - 1) and {peer for peer, _ in messages} == {(rank + 1) % n}
            assert sum(sent for _, sent in messages) == Fraction(2 * (n - 1), n) * 840 * 8


def every_primitive(n: int) -> dict:
    """Each collective from messages against torch's, with the bytes this rank sent."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x = own_tensor(rank, 24 * n)
    own, total = slice(24 * rank, 24 * (rank + 1)), x.clone()
    dist.all_reduce(total)
    everyone = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(everyone, x)
    differences, sent, messages = {}, {}, {}

    def compare(name, fn, expected, part=slice(None)):
        result, messages[name] = metered(fn)
        sent[name] = sum(sent_bytes for _, sent_bytes in messages[name])
        if expected is not None:
            differences[name] = (result[part] - expected).abs().max().item()
        return result

    scattered = compare(
        "reduce_scatter", lambda: run_schedule(algorithms.ring_reduce_scatter(n), x, group), total[own], own
    )
    compare("all_gather", lambda: run_schedule(algorithms.ring_all_gather(n), scattered, group), total)
    compare("all_reduce", lambda: run_schedule(algorithms.ring_all_reduce(n), x, group), total)
    compare(
        "reduce", lambda: run_schedule(algorithms.binomial_reduce(n), x, group), total if rank == 0 else None
    )
    compare("broadcast", lambda: run_schedule(mirror(algorithms.binomial_reduce(n)), x, group), everyone[0])
    pieces = torch.cat([each[own] for each in everyone])
    compare("all_to_all pairwise", lambda: pairwise(x, group), pieces)
    compare("all_to_all bruck", lambda: bruck(x, group), pieces)
    return {"differences": differences, "sent": sent, "messages": messages}


def test_collective_library():
    for n in (2, 3, 4, 8):
        size = 24 * n * 8
        seen = launch.run(every_primitive, n, ranks=n)
        for rank, each in enumerate(seen):
            differences, sent, messages = each["differences"], each["sent"], each["messages"]
            assert max(differences.values()) < 1e-12, differences
            whole = Fraction(2 * (n - 1), n) * size
            assert sent["all_reduce"] == sent["reduce_scatter"] + sent["all_gather"] == whole
            assert messages["all_reduce"] == messages["reduce_scatter"] + messages["all_gather"]
            assert sent["all_to_all pairwise"] == Fraction(n - 1, n) * size
            assert len(messages["all_to_all pairwise"]) == n - 1
            hops = sum(j.bit_count() for j in range(n))
            assert sent["all_to_all bruck"] == Fraction(hops, n) * size
            assert len(messages["all_to_all bruck"]) == (n - 1).bit_length()
            assert sent["reduce"] == (size if rank else 0)
        assert sum(each["sent"]["broadcast"] for each in seen) == (n - 1) * size
        assert seen[0]["sent"]["broadcast"] == (n - 1).bit_length() * size


def two_dtypes_and_a_strided_view(n: int) -> list[bool]:
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = torch.arange(60).reshape(6, 10) * (rank + 1)
    factor = n * (n + 1) // 2
    return [
        torch.equal(
            run_schedule(schedule, x, group), (torch.arange(60).reshape(6, 10) * factor).to(x.dtype)[:, ::3]
        )
        for schedule in flat_all_reduces(n).values()
        for x in (whole[:, ::3], whole.float()[:, ::3])
    ]


def test_whole_numbers_are_exact_and_views_are_fine():
    assert all(all(each) for each in launch.run(two_dtypes_and_a_strided_view, 4, ranks=4))


def test_a_step_posts_all_then_waits_for_all_and_only_then_adds():
    """Else what arrives could be written while a send still reads. Three messages each way in each of two steps."""

    def rank():
        with Ledger() as ledger:
            run_schedule(algorithms.direct_all_reduce(4), torch.ones(8), dist.group.WORLD)
        kinds = {"Issue": "i", "Wait": "w"}
        return "".join(kinds.get(type(event).__name__, "c") for event in ledger.events).strip("c")

    issued, rest = "i" * 6, "w" * 6
    assert dryrun.run(rank, ranks=4).rstrip("c") == issued + rest + "ccc" + issued + rest
