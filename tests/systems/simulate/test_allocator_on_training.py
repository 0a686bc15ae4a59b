"""The simulated allocators on what training really asks for: steps of a GPT as the ledger writes them down."""

from functools import cache, partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.memory_layout import annealed, height
from minitrain.systems.simulate.allocator import CachingAllocator, StitchingAllocator
from minitrain.systems.simulate.device_memory import MiB, lifetimes, live_bytes, replay, with_region

CONFIG = GPTConfig(
    vocab_size=512, d_model=128, num_layers=3, num_heads=4, activation="gelu", positions="none"
)
LARGE = GPTConfig(
    vocab_size=32000, d_model=1024, num_layers=4, num_heads=16, activation="gelu", positions="none"
)
UNSPLIT = "max_split_size_mb:21"
EXPANDABLE = "expandable_segments:True"


def training(config, lengths, rows=4, recompute=False, warm=False):
    """Steps with texts of these lengths; -> the trace, the kinds of its blocks, its length after each step, the
    peak. `warm`: the optimizer's state is there before the first."""

    def step(T):
        tokens, positions = torch.zeros(rows, T, dtype=torch.long), torch.arange(T)
        x = tokens
        for layer in model.layers:
            again = recompute and x.is_floating_point()
            x = checkpoint(layer, x, positions, use_reentrant=False) if again else layer(x, positions)
        cross_entropy_sum(x, tokens).backward()
        del x
        optimizer.step()
        optimizer.zero_grad()

    with Ledger() as ledger:
        model = GPT(config)
        optimizer = AdamW(model.parameters())
        if warm:
            step(lengths[0])
        marks = [len(ledger.memory_trace())]
        for T in lengths:
            step(T)
            marks.append(len(ledger.memory_trace()))
    return ledger.memory_trace(), ledger.block_kinds, marks, ledger.peak_bytes


@cache
def trained():
    return training(CONFIG, [128] * 2, 8)


@cache
def dry(lengths, **options):
    return dryrun.run(partial(training, LARGE, lengths, **options), ranks=1)


def of(settings, capacity=2**35):
    return StitchingAllocator(capacity) if settings == "stitching" else CachingAllocator(capacity, settings)


def test_a_trace_is_the_ledgers_account():
    """Its peak is the ledger's, a dry run's trace is the real one's, and every block has a kind."""
    trace, kinds, marks, peak = trained()
    assert max(live_bytes(trace)) == peak
    assert dryrun.run(training, CONFIG, [128] * 2, 8, ranks=1) == trained()
    largest = {kind: max(size for _, block, size in trace if kinds[block] == kind) for kind in set(kinds)}
    assert largest["parameters"] == largest["gradients"] == 4 * 512 * 128
    assert largest["activations"] == 4 * 8 * 128 * 512  # logits
    assert marks == sorted(marks) and marks[-1] == len(trace)


def test_older_blocks_come_first_and_a_block_resized_is_freed_and_allocated():
    old = torch.zeros(8)
    with Ledger() as ledger:
        new = old + 1
        new.untyped_storage().resize_(64)
        new.add_(1)
        del new
    assert ledger.memory_trace() == [
        ("alloc", 0, 32), ("alloc", 1, 32), ("free", 1, 32), ("alloc", 1, 64), ("free", 1, 64),
    ]  # fmt: skip


@pytest.mark.parametrize("settings", ["", EXPANDABLE, "stitching"])
@pytest.mark.parametrize("recompute", [False, True])
def test_tensor_defrag(settings, recompute):
    """Once the optimizer has its state, the first step gets all memory from the device: later ones reach it with
    no request at all. Best fit, splits and joins serve them from what is cached; without the cache every step
    would wait for the device some hundred times."""
    trace, _, (start, first, *_, end), _ = dry((1024, 1024, 1024), recompute=recompute, warm=True)
    done = replay(trace, of(settings))
    assert done.died is None and done.events == end and not done.return_calls
    assert any(event < first for event in done.backing_calls)
    assert [event for event in done.backing_calls if event >= first] == []
    assert all(a <= b <= c for a, b, c in zip(done.requested, done.allocated, done.reserved))
    whole, cold = (replay(trace, one) for one in (CachingAllocator(2**35, UNSPLIT), NoCache(2**35)))
    assert max(done.reserved) < max(whole.reserved), "splits save nothing"
    assert sum(event >= first for event in cold.backing_calls) > 200


class NoCache(CachingAllocator):
    """Gives back to the device whatever is free."""

    def free(self, block):
        super().free(block)
        self.empty_cache()


def test_texts_of_growing_length_fragment_memory_and_pages_do_not():
    """A third of what is reserved is never in use at once; with pages, or stitches, next to nothing."""
    trace = dry((1024, 512, 640, 768, 896))[0]
    done = {settings: replay(trace, of(settings)) for settings in ("", EXPANDABLE, "stitching")}
    assert done[""].fragmentation > 0.3
    assert done[EXPANDABLE].fragmentation < 0.02 and done["stitching"].fragmentation < 0.001
    assert done[""].reserved_peak > 1.4 * done[EXPANDABLE].reserved_peak
    between = (done[EXPANDABLE].reserved_peak + done[""].reserved_peak) // 2
    least = int(1.02 * max(live_bytes(trace)))
    assert replay(trace, of(EXPANDABLE, least)).died is None
    given_back = replay(trace, of("", between))  # survives, for the price of waiting for the device
    assert given_back.died is None and given_back.return_calls
    assert replay(trace, of("", least)).died.free_bytes > 0


def test_zero_r_defragmentation():
    """MD: with checkpoints and gradients in a region of their own less of what is reserved lies idle. The price:
    the region is there also where it is not full, so more is requested."""
    for lengths in ((1024,) * 2, (1024, 512, 640, 768, 896)):
        trace, kinds, marks, _ = dry(lengths, recompute=True)
        gradients = {block for block, kind in enumerate(kinds) if kind == "gradients"}
        step = marks[2] - marks[1]
        checkpoints = {
            life.block
            for life in lifetimes(trace)
            if kinds[life.block] == "activations"
            and life.bytes > 2 * MiB
            and life.dies - life.born > step / 5
        }
        assert len(checkpoints) == (LARGE.num_layers + 1) * len(lengths)  # of blocks and the head
        apart = with_region(trace, gradients | checkpoints)
        assert live_bytes(apart)[-1] - live_bytes(trace)[-1] == apart[0][2]
        inside = [life for life in lifetimes(trace) if life.block in gradients | checkpoints]
        if len(lengths) == 2:  # they have room there, without a hole
            assert height(inside, annealed(inside)) == apart[0][2]
        plain, md = replay(trace, of("")), replay(apart, of(""))
        assert md.fragmentation < 0.85 * plain.fragmentation and md.reserved_peak < plain.reserved_peak
        assert md.requested_peak > plain.requested_peak
