"""The yardstick of the chapter on long sequences: it passes what is right, and fails what is not."""

from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.context.layout import zigzag
from minitrain.context.ring import ring_attention
from minitrain.course import sequences
from minitrain.model.layers import causal_attention
from minitrain.ranks.collectives import world
from minitrain.ranks.events import Compute
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger


def right_and_wrong():
    group = world()
    ring = partial(ring_attention, group=group, layout=zigzag)
    found = [sequences.is_equal(core, zigzag, group, 4, 2) for core in (ring, causal_attention)]
    return found, sequences.core_traffic(ring, zigzag, group, 4, 2)


def test_a_ring_is_equal_and_each_rank_by_itself_is_not():
    found, traffic = zip(*launch.run(right_and_wrong, ranks=2))
    assert found == ([True, False],) * 2
    block = 2 * 2 * 2 * 8 * 4 * 8  # K and V, B = 2, 2 heads, 8 tokens of 16, width 4, float64
    assert traffic == ((block, 2 * block),) * 2


def test_whole_attention_is_softmax_over_earlier_keys():
    q, k, v, _ = sequences.example(heads=4, kv_heads=2)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=True)
    assert sequences.equal(sequences.whole_attention(q, k, v), theirs)
    assert not sequences.equal(sequences.whole_attention(q, k, v, causal=False), theirs)


def events_of(c):
    q, k, v = (torch.zeros(1, 2, c, 64) for _ in range(3))
    with Ledger() as ledger:
        ring_attention(q, k, v, group=world(), layout=zigzag, causal=False)
    return ledger.events


def test_events_of_a_longer_sequence_are_those_of_a_dry_run_of_it():
    short, long = (dryrun.run(events_of, c, ranks=4) for c in (256, 1024))
    assert sequences.apart(sequences.longer(short, 4), long) == (0, True)
    assert sequences.apart(sequences.longer(short, 2), long)[1] is False
    assert sum(event.flops for event in short if isinstance(event, Compute))


@pytest.mark.parametrize("devices, blocks", [(4, 0), (2, 3), (1, 3)])
def test_what_leaves_a_node(devices, blocks):
    events = dryrun.run(events_of, 256, rank=1, ranks=4)
    block = 2 * 2 * 256 * 64 * 4
    assert sequences.leaves_node(events, 1, devices) == blocks * block
    assert sum(sequences.by_axis(events).values()) == 3 * block
