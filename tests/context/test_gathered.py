"""All keys gathered: equal to full attention in any layout, with the bytes, tiles and memory it says."""

from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.context import ring
from minitrain.context.layout import contiguous, striped, zigzag
from minitrain.context.ring import Rings, gathered_attention, ring_attention, seen_and_order
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from tests.context.runs import GQA, MHA, MQA, B, K, T, furthest, over, whole
from tests.parallel import TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_llama_3_gathers_keys(ranks):
    """Any layout and heads, kept or gathered again, causal or not; (n-1) shares of K and V each way."""

    def rank():
        group, found = collectives.world(), []
        cases = [(zigzag, GQA, True, True), (zigzag, MQA, True, False), (striped, GQA, True, True)]
        cases += [(contiguous, MHA, False, True), (contiguous, GQA, True, False)]
        for layout, heads, causal, keep in cases:
            core = partial(gathered_attention, group=group, layout=layout, causal=causal, keep=keep)
            ours, sent = over(core, group, layout, heads)
            found.append((furthest(ours, whole(heads, causal)), sent, heads[1], keep))
        return found

    for found in launch.run(rank, ranks=ranks):
        for apart, sent, kv_heads, keep in found:
            once = 2 * (ranks - 1) * B * kv_heads * T // ranks * K * 8
            assert apart < TOLERANCE and sent == (once, once if keep else 2 * once)


def test_few_tiles_of_even_work():
    """Keys in front of a run are one tile whoever held them: at most 4 with zig-zag halves, where a ring
    computes 2n + 1; and all have the same."""

    def rank(layout):
        group, x = collectives.world(), torch.empty(1, 1, T // 8, 1)
        seen, order = seen_and_order(x, x, group, layout, causal=True)
        assert (order is None) == (layout is not zigzag)
        in_ring = sum(map(len, Rings((group,), layout, True).plan(x, x).values()))
        return len(seen), sum(tile.entries for tile in seen), in_ring

    for layout, most in ((zigzag, 4), (contiguous, 2), (striped, 8)):
        tiles, entries, in_ring = zip(*(dryrun.run(rank, layout, rank=r, ranks=8) for r in range(8)))
        assert max(tiles) == most and sum(entries) == T * (T + 1) // 2
        assert layout is contiguous or max(entries) - min(entries) <= T
        assert all(here <= there for here, there in zip(tiles, in_ring))


def kept(ranks, keep, core):
    def rank():
        group = collectives.world()
        q, k, v = (torch.empty(1, 8, 4096 // ranks, 64, requires_grad=True) for _ in range(3))
        with Ledger() as ledger:
            out = core(q, k, v, group=group, layout=zigzag, **({} if keep is None else {"keep": keep}))
            between = ledger.live_bytes
            out.sum().backward()
        return between, ledger.num_calls(), ledger.sent_bytes()

    return dryrun.run(rank, ranks=ranks)


@pytest.mark.parametrize("ranks", [4, 8])
def test_memory_and_messages(ranks):
    """Kept, K and V of all tokens stay for backward; gathered again, a ring's memory, 8 bytes per token for
    their order, and bytes, in 3 calls."""
    stays, calls, sent = kept(ranks, True, gathered_attention)
    again, more_calls, more = kept(ranks, False, gathered_attention)
    ring, _, by_ring = kept(ranks, None, ring_attention)
    share = 8 * 4096 // ranks * 64 * 4  # of K or of V, float32
    assert stays - again == 2 * ranks * share and again == ring + 8 * 4096
    assert (calls, more_calls) == (2, 3) and sent == 2 * 2 * (ranks - 1) * share
    assert by_ring == more == 3 * 2 * (ranks - 1) * share


def test_controls():
    """Without putting keys in order, and without the sum over ranks, it is something else."""

    def rank():
        group, found = collectives.world(), {}
        core, expected = partial(gathered_attention, group=group, layout=zigzag), whole()
        found["right"] = furthest(over(core, group, zigzag)[0], expected)
        there = ring.seen_and_order
        ring.seen_and_order = lambda *how: (there(*how)[0], None)
        found["not in order"] = furthest(over(core, group, zigzag)[0], expected)
        ring.seen_and_order, scatter = there, ring.scatter
        ring.scatter = lambda dk, dv, group, order, dtype: tuple(
            (dx.total if order is None else dx.total.index_select(2, order.argsort()))
            .chunk(group.size(), 2)[group.rank()]
            .to(dtype)
            for dx in (dk, dv)
        )
        found["own share only"] = furthest(over(core, group, zigzag)[0], expected)
        ring.scatter = scatter
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE and len(found) == 2 and min(found.values()) > 1e-2, found
