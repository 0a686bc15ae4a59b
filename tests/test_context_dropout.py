"""Dropout over a cut sequence: a mask by position, equal to one process in every layout, ring, factorization and mesh; its statistics."""
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.context.blocks import FUSED, plain_backward
from minitrain.context.burst import burst_attention
from minitrain.context.dropout import drop_tokens, seeded
from minitrain.context.flash import flash_2, flash_attention
from minitrain.context.hybrid import dealt, double_ring_attention, usp_attention
from minitrain.context.layout import Tile, each_document, split, striped, tiles, zigzag
from minitrain.context.packed import packed_attention
from minitrain.context.placed import Placed, placed
from minitrain.context.ring import ring_attention, ring_backward, ring_forward
from minitrain.context.ring_self_attention import ring_self_attention
from minitrain.context.sparing import Sparing
from minitrain.context.ulysses import ulysses_attention
from minitrain.context.wallfacer import wallfacer_attention
from minitrain.dropout import GAMMA, DropMask, keep, mix
from minitrain.data import MASKED
from minitrain.layers import Dropout, causal_attention, naive_attention
from minitrain.ledger import Ledger
from minitrain.mesh import Mesh
from minitrain.model import GPT, Stages, cross_entropy_sum
from minitrain.parallelize import parallelize
from minitrain.pipeline.one_direction import one_f_one_b
from tests.context_cores import CORES, HEADS, LAYOUTS, MASK, in_one_process
from tests.context_runs import B, T, furthest, inputs, over
from tests.parallel import TOLERANCE, Outcome, Problem, check_refusals, difference, small, train_parallel


# ---- the generator ---------------------------------------------------------------------------------------------------

def grid(p=0.5, seed=7, rows=2, heads=4, queries=360, keys=360):
    return keep(p, seed, *(torch.arange(count) for count in (rows, heads, queries, keys)))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for(p):
    """1,036,800 draws: the mean, and that of every row and column, within a few standard deviations."""
    kept = grid(p).double()
    for mean, count in ((kept.mean(), kept.numel()), (kept.mean((0, 1, 2)), 2880), (kept.mean((0, 1, 3)), 2880), (kept.mean((2, 3)), 129600)):
        assert ((mean - (1 - p)).abs().max() / math.sqrt(p * (1 - p) / count)).item() < 5


def test_neighbours_know_nothing_of_each_other():
    """Correlation of a mask with its neighbours in every coordinate and with those of other seeds, in standard deviations."""
    kept = grid()

    def apart(one, other):
        one, other = 2 * one.double() - 1, 2 * other.double() - 1
        return abs((one * other).mean().item()) * math.sqrt(one.numel())

    for dim in range(4):
        for step in (1, 64) if kept.size(dim) > 64 else (1,):
            assert apart(kept.narrow(dim, 0, kept.size(dim) - step), kept.narrow(dim, step, kept.size(dim) - step)) < 4.5, (dim, step)
    assert apart(kept, kept.transpose(2, 3)) / math.sqrt(2) < 4.5                       # query and key are not the same to it
    for seed in (8, -7, 7 + 2**32, GAMMA + 7, torch.tensor(2**62)):
        assert apart(kept, grid(seed=seed)) < 4.5


def test_every_bit_of_the_hash_depends_on_every_bit():
    """Avalanche: one bit of the input turned over, each bit of the result turns over in half of the cases."""
    numbers = torch.arange(4000)
    bits = 1 << torch.arange(64)
    before = mix(numbers.clone())
    for bit in (0, 1, 31, 62):
        turned = ((before ^ mix(numbers ^ (1 << bit))).unsqueeze(-1) & bits) != 0
        assert (turned.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert mix(torch.tensor([GAMMA])).item() == 0xE220A8397B1DCDAF - 2**64        # splitmix64's first number for seed 0


def test_the_mask_is_a_function_of_the_place():
    kept, some = grid(), torch.tensor([5, 0, 359, 17])
    assert torch.equal(keep(0.5, 7, torch.tensor([1]), torch.tensor([3, 1]), some, some + 0), kept[1:, [3, 1]][:, :, some][..., some])
    assert not (grid(0.6) & ~kept).any() and not torch.equal(kept, grid(seed=8))        # a larger p drops more, and what was dropped
    assert torch.equal(kept, grid(seed=torch.tensor(7))) and grid(0.0).all()
    with Ledger() as ledger:
        grid()
    assert 16 <= ledger.peak_bytes / kept.numel() < 16.2                                # two numbers of 8 bytes a score while it is made


# ---- cores -----------------------------------------------------------------------------------------------------------

def packed_in_one_row():
    """Documents in a row over the ranks, and one by one in one process: furthest from a mask of -inf between them."""
    group, offsets = collectives.world(), [0, 8, 24, T]
    document = torch.bucketize(torch.arange(T), torch.tensor(offsets), right=True)
    expected = in_one_process(mask=MASK, bias=torch.where(document[:, None] == document, 0.0, -math.inf).double())
    found = {}
    for layout in LAYOUTS:
        packed = each_document(layout, offsets)
        found[layout.__name__] = furthest(over(partial(ring_attention, group=group, layout=packed, dropout=MASK), group, packed, HEADS)[0], expected)
    *qkv, _ = (x[:1] for x in inputs(HEADS))
    found["one by one"] = (packed_attention(*qkv, cu_seqlens=offsets, dropout=MASK) - expected[0][:1]).abs().max().item()
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_core_drops_what_one_process_drops(ranks):
    """Output and all gradients. The reference makes the whole mask and keeps it; here each tile makes its own, twice."""
    def rank():
        group, expected = collectives.world(), in_one_process(mask=MASK)
        found = {name: furthest(over(partial(core, dropout=MASK), group, layout, HEADS)[0], expected)
                 for name, (core, layout) in CORES[ranks]().items()}
        return found | ({} if ranks == 8 else packed_in_one_row())

    for found in launch.run(rank, ranks=ranks):
        assert max(found.values()) < TOLERANCE, found


def test_one_device_and_without_a_causal_mask():
    """A tile of a whole sequence; the reference is written out here, with nothing of the module but `keep`."""
    q, k, v, dout = (x.requires_grad_() for x in inputs(HEADS))
    for causal in (True, False):
        kept = keep(0.3, 11, torch.arange(2, 2 + B), torch.arange(5, 13), torch.arange(T), torch.arange(T))
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.size(-1))
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf) if causal else scores
        expected = scores.softmax(-1).masked_fill(~kept, 0) / 0.7 @ v.repeat_interleave(2, 1)
        ours = flash_attention(q, k, v, causal=causal, dropout=MASK)
        theirs, mine = (torch.autograd.grad(out, (q, k, v), dout.detach()) for out in (expected, ours))
        assert furthest([ours, *mine], [expected, *theirs]) < TOLERANCE


def test_without_it_it_does_not():
    """Controls: a seed for each rank, positions on the rank in the place of those in the sequence, a backward that forgets the mask."""
    def rank():
        group, expected, found = collectives.world(), in_one_process(mask=MASK), {}

        def distance(mask=MASK):
            core = partial(ring_attention, group=group, layout=zigzag, dropout=mask)
            return furthest(over(core, group, zigzag, HEADS)[0], expected)

        found["right"] = distance()
        found["a seed for each rank"] = distance(MASK._replace(seed=11 + group.rank()))
        there, at = Tile.positions, Placed.at
        Tile.positions = lambda tile, device=None: (torch.arange(T)[tile.queries], torch.arange(T)[tile.keys])
        found["local positions"] = distance()
        Tile.positions = there
        Placed.at = lambda self, positions: at(self, positions)._replace(backward=plain_backward)
        found["no mask in backward"] = distance()
        Placed.at = at
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE
        assert len(found) == 3 and min(found.values()) > 1e-2, found


def test_sends_what_it_sent_and_keeps_no_mask():
    """The same bytes, forward and backward; q, k, v, out and lse are kept, as without dropout, and p = 0 takes the old way to the bit."""
    def rank():
        group, core = collectives.world(), partial(ring_attention, group=collectives.world(), layout=zigzag)
        plain, kept = over(core, group, zigzag, HEADS), []
        for mask in (0.0, MASK):
            qkv = [split(x, zigzag, group, 2).requires_grad_() for x in inputs(HEADS)[:3]]
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept[-1].append(tuple(x.shape)) or x, lambda x: x):
                kept.append([])
                core(*qkv, dropout=mask)
        nothing, dropped = (over(partial(core, dropout=mask), group, zigzag, HEADS) for mask in (0.0, MASK))
        with Ledger() as ledger:
            agree = partial(collectives.broadcast, source=0, group=group)
            seeded(core, agree)(*qkv, dropout=0.0)
            ring_alone = ledger.sent_bytes()
            seeded(core, agree)(*qkv, dropout=0.1)
        return (all(map(torch.equal, plain[0], nothing[0])), plain[1] == nothing[1] == dropped[1], kept[0] == kept[1] and len(kept[0]) == 5,
                ledger.sent_bytes() - 2 * ring_alone)

    seeds = [(True, True, True, 8 * (rank == 0)) for rank in range(2)]
    assert launch.run(rank, ranks=2) == seeds
    assert placed(FUSED) is FUSED and all(FUSED.on(tile) is FUSED for tile in tiles([range(4)], [range(4)], True))


def test_a_layer_that_is_computed_again_drops_the_same():
    """torch's checkpoint around the core restores the generator, hence the seed; with and without Sparing. Two calls differ."""
    def rank():
        group, results = collectives.world(), {}
        torch.manual_seed(50 + group.rank())
        way = dict(group=group, layout=zigzag, causal=True, blocks=FUSED)
        spared = Sparing(partial(ring_forward, **way), partial(ring_backward, **way))
        *qkv, dout = (split(x, zigzag, group, 2) for x in inputs(HEADS))
        state = torch.get_rng_state()
        for name, core, settings in (("kept", spared, None), ("ring", partial(ring_attention, group=group, layout=zigzag), {}),
                                     ("spared", spared, dict(context_fn=spared.contexts))):
            torch.set_rng_state(state)
            layer = partial(seeded(core, partial(collectives.broadcast, source=0, group=group)), dropout=0.3)
            ours = [x.clone().requires_grad_() for x in qkv]
            outs = [layer(*ours) if settings is None else checkpoint(layer, *ours, use_reentrant=False, **settings) for _ in range(2)]
            torch.rand(3)                                                                # others draw, too
            sum((out * dout).sum() for out in outs).backward()
            results[name] = [*outs, *(x.grad for x in ours)]
        expected = results.pop("kept")
        return torch.equal(*expected[:2]), max((a - b).abs().max().item() for found in results.values() for a, b in zip(found, expected))

    for same, error in launch.run(rank, ranks=2):
        assert not same and error < TOLERANCE


# ---- the whole model -------------------------------------------------------------------------------------------------

PROBLEM = Problem(config=small(vocab_size=32, dropout=0.2))


def by_position(model, first_row=0):
    """Dropout of a model in one process: masks of natural positions, seeds from torch's generator."""
    for layer in model.layers:
        if hasattr(layer, "attention"):
            layer.attention.core = seeded(naive_attention, first_row=first_row)
        for module in layer.modules():
            if isinstance(module, Dropout):
                drop = seeded(partial(drop_tokens, positions=lambda x: torch.arange(x.size(1))), first_row=first_row)
                module.forward = partial(drop, dropout=module.p)


def one_process(problem, seeds=(1000,)):
    """As tests.parallel.one_process, with dropout; a seed for each rank of dp, whose rows come one after the other."""
    model, losses = problem.model(), []
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=problem.lr)
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    for step in range(len(problem.batch_sizes)):
        optimizer.zero_grad()
        parts = [problem.batch(step, number, len(seeds)) for number in range(len(seeds))]
        valid, losses = sum((targets != MASKED).sum() for _, targets in parts), [*losses, 0.0]
        for number, (tokens, targets) in enumerate(parts):
            torch.set_rng_state(states[number])
            by_position(model, first_row=number << 32)
            loss = cross_entropy_sum(model(tokens), targets) / valid
            loss.backward()
            losses[-1] += loss.item()
            states[number] = torch.get_rng_state()
        torch.nn.utils.clip_grad_norm_(trainable, problem.clip)
        optimizer.step()
    return Outcome(losses, {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
                   {name: param.detach() for name, param in model.named_parameters()})


def usp_core(q, k, v, *, group, layout, **more):
    mesh = Mesh(ring=2, ulysses=2)
    return usp_attention(q, k, v, ring=mesh.group("ring"), ulysses=mesh.group("ulysses"), **more)


ULYSSES = partial(ulysses_attention, core=flash_attention)
MODELS = {
    "cp2": (dict(dp=1, cp=2), (1000,), [dict(layout=striped), dict(core=ring_self_attention), dict(zero=3)]),
    "cp4": (dict(dp=1, cp=4), (1000,), [{}, dict(core=usp_core, layout=dealt(zigzag, 2))]),
    "dp2 cp2": (dict(dp=2, cp=2), (1000, 1002), [{}]),
    "cp2 tp2": (dict(dp=1, cp=2, tp=2), (1000,), [{}, dict(sequence_parallel=True, overlap=True), dict(core=ULYSSES)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_process(name):
    """Three steps with dropout of scores and of activations, ranks seeded apart: loss, gradients, parameters."""
    shape, seeds, ways = MODELS[name]
    expected = one_process(PROBLEM, seeds)
    for outcomes in launch.run(lambda: [train_parallel(PROBLEM, shape, **settings) for settings in ways], ranks=math.prod(shape.values())):
        for settings, outcome in zip(ways, outcomes):
            assert difference(outcome, expected) < TOLERANCE, settings


def test_a_model_without_it_does_not():
    """Controls: a seed for each rank; heads counted from each rank's first; the model's dropout as it was."""
    def rank():
        from minitrain import parallelize as module
        seeds, all_heads, found = module.seeded, dict(dp=1, cp=2, tp=1), {}
        heads_cut = dict(dp=1, cp=1, tp=2)
        found["right"] = train_parallel(PROBLEM, all_heads), train_parallel(PROBLEM, heads_cut)
        module.seeded = lambda core, agree, **more: seeds(core, **more)
        found["seeds apart"] = train_parallel(PROBLEM, all_heads)
        module.seeded = lambda core, agree, first_row, part=0: seeds(core, agree, first_row)
        found["first heads"] = train_parallel(PROBLEM, heads_cut)
        module.seeded = seeds
        return found

    expected = one_process(PROBLEM)
    assert difference(one_process(PROBLEM, [1001]), expected) > 1e-4                       # the seed matters
    for found in launch.run(rank, ranks=2):
        assert max(difference(outcome, expected) for outcome in found.pop("right")) < TOLERANCE
        assert min(difference(outcome, expected) for outcome in found.values()) > 1e-4


def test_tokens_of_different_ranks_and_rows_of_different_ranks_have_different_masks():
    """What one rank drops of its activations says nothing about another's, though all generators are seeded alike."""
    def rank():
        mesh = Mesh(dp=2, cp=2)
        torch.manual_seed(0)
        model = GPT(small(vocab_size=32, dropout=0.5))
        parallelize(model, mesh)
        dropped = [model.layers[0].dropout(torch.ones(1, 4, 256)) == 0 for _ in range(2)]
        model.eval()
        return *dropped, bool((model.layers[0].dropout(torch.ones(1, 4, 256)) == 1).all())

    found = launch.run(rank, ranks=4)
    masks = [mask for *drawn, whole in found for mask in drawn if whole]
    assert len(masks) == 8
    for number, one in enumerate(masks):
        for other in masks[:number]:
            assert abs((one ^ other).double().mean() - 0.5) < 0.08                         # 5 standard deviations of 1,024 tosses


def test_refusals_are_one_line_on_every_rank():
    def call(what, *axes, **settings):
        def run():
            mesh, q = Mesh(a=2, b=1), torch.ones(1, 2, 8, 4)
            what(q, q, q, **dict(zip(axes, (mesh.group("a"), mesh.group("b")))), **settings)
        return run

    def sliced_pipeline():
        model = Stages(small(vocab_size=32, dropout=0.1), {0: range(4)})
        parallelize(model, Mesh(dp=1, pp=1, cp=2), schedule=replace(one_f_one_b(1, 2), slices=2))

    tiled = dict(dropout=MASK, blocks=flash_2())
    refused = {
        "ring_attention: dropout=0.1 is a rate without a seed, and each rank would draw its own mask; give a DropMask":
            call(ring_attention, "group", dropout=0.1),
        "ring_attention: dropout p=1.0; must be in [0, 1)": call(ring_attention, "group", dropout=DropMask(1.0, 0)),
        "dropout needs blocks that make scores": call(ring_attention, "group", **tiled),
        "use FUSED or PLAIN of blocks.py": call(usp_attention, "ring", "ulysses", **tiled),
        "ulysses_attention: dropout=0.1": call(ulysses_attention, "group", dropout=0.1, core=causal_attention),
        "double_ring_attention: dropout=0.1": call(double_ring_attention, "outer", "inner", dropout=0.1),
        "wallfacer_attention: dropout=0.1": call(wallfacer_attention, "ring", "team", dropout=0.1),
        "burst_attention: dropout=0.1": call(burst_attention, "across", "inside", dropout=0.1),
        "flash_attention: dropout=0.2": call(flash_attention, dropout=0.2),
        "dropout=0.1 under cp with 2 slices of a sequence in the pipeline": sliced_pipeline,
        "packed_attention: dropout=0.3": call(packed_attention, cu_seqlens=[0, 8], dropout=0.3),
    }
    check_refusals(refused, ranks=2)
