"""The kernel's count of bytes beside the ledger's, and the finding that made minitrain write its own
collectives.
"""

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.course import loopback
from minitrain.ranks.ledger import Ledger

NUMEL, RANKS = 1_000_000, 4
SIZE = 4 * NUMEL


def tensor() -> torch.Tensor:
    return torch.ones(NUMEL)


def our_reduce_scatter():
    return collectives.reduce_scatter(tensor(), dist.group.WORLD)


def our_all_gather():
    return collectives.all_gather(tensor()[: NUMEL // RANKS], dist.group.WORLD)


def our_all_reduce():
    return collectives.all_reduce(tensor(), dist.group.WORLD)


def stock_reduce_scatter():
    dist.reduce_scatter_tensor(torch.empty(NUMEL // RANKS), tensor())


def by_ledger(*fns) -> list[int]:
    sent = []
    for fn in fns:
        with Ledger() as ledger:
            fn()
        sent.append(ledger.sent_bytes())
    return sent


@pytest.mark.skipif(not loopback.has_private_network(), reason="this system gives no network namespace")
def test_the_kernel_counts_what_the_ledger_counts_and_stock_gloo_sends_twice():
    ours = (our_reduce_scatter, our_all_gather, our_all_reduce)
    *counted, stock = loopback.bytes_on_the_wire(*ours, stock_reduce_scatter, ranks=RANKS)
    said = launch.run(by_ledger, *ours, ranks=RANKS)
    for fn, on_the_wire, handed_over in zip(ours, counted, map(sum, zip(*said))):
        assert handed_over == (6 if fn is our_all_reduce else 3) * SIZE
        assert 1 < on_the_wire / handed_over < 1.02, fn.__name__  # above 1: the headers of TCP and IP
    assert 1.9 < stock / counted[0] < 2.1


def test_a_failure_is_one_line():
    with pytest.raises(
        RuntimeError, match="^the measurement failed: ValueError: ranks=0: use a whole number"
    ):
        loopback.bytes_on_the_wire(our_all_reduce, ranks=0)
