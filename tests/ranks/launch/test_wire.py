"""The kernel's count of bytes beside the ledger's: why minitrain writes its own collectives."""

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


# what all ranks together send, in tensors, and the call
OURS = {
    "reduce_scatter": (3, lambda group: collectives.reduce_scatter(tensor(), group)),
    "all_gather": (3, lambda group: collectives.all_gather(tensor()[: NUMEL // RANKS], group)),
    "all_reduce": (6, lambda group: collectives.all_reduce(tensor(), group)),
    "in the background": (6, lambda group: collectives.all_reduce(tensor(), group, async_op=True).wait()),
    "all_to_all": (3, lambda group: collectives.all_to_all(tensor(), group)),
    "broadcast": (3, lambda group: collectives.broadcast(tensor(), 1, group)),
    "rotate": (4, lambda group: collectives.rotate(tensor(), group)),
}


def stock_reduce_scatter():
    dist.reduce_scatter_tensor(torch.empty(NUMEL // RANKS), tensor())


def by_ledger(calls) -> list[int]:
    sent = []
    for call in calls:
        with Ledger() as ledger:
            call(collectives.world())
        sent.append(ledger.sent_bytes())
    return sent


@pytest.mark.skipif(not loopback.has_private_network(), reason="this system gives no network namespace")
def test_the_kernel_counts_what_the_ledger_counts_and_stock_gloo_sends_twice():
    calls = [call for _, call in OURS.values()]
    fns = [lambda call=call: call(collectives.world()) for call in calls]
    *counted, stock = loopback.bytes_on_the_wire(*fns, stock_reduce_scatter, ranks=RANKS)
    told = map(sum, zip(*launch.run(by_ledger, calls, ranks=RANKS)))
    for (name, (tensors, _)), on_the_wire, handed_over in zip(OURS.items(), counted, told, strict=True):
        assert handed_over == tensors * SIZE, name
        assert 1 < on_the_wire / handed_over < 1.02, name  # above 1: the headers of TCP and IP
    assert 1.9 < stock / counted[0] < 2.1
