"""Dropout by place: every layout, core, axis and schedule drops what one process drops; its statistics."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations, count

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.attention.flash import flash_attention
from minitrain.attention.kernel import FUSED, plain_backward
from minitrain.attention.placed import GAMMA, DropMask, Placed, Places, drop_scores, keep, mix, placed
from minitrain.context.layout import Tile, split, zigzag
from minitrain.context.ring import ring_attention
from minitrain.model.layers import naive_attention
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.attention.packed import packed_attention
from tests.context.cores import CORES, HEADS, MASK, in_one_process
from tests.context.runs import B, T, furthest, inputs, over
from tests.parallel import TOLERANCE, Problem, Traffic, difference, one_process, small, train_parallel

# ---- the generator ----------------------------------------------------------------------------------------


def grid(p=0.5, seed=7, rows=2, heads=4, queries=360, keys=360):
    return keep(p, seed, *(torch.arange(count) for count in (rows, heads, queries, keys)))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for(p):
    """1,036,800 draws: the mean, and that of every row and column, within a few standard deviations."""
    kept = grid(p).double()
    means = kept.mean(), kept.mean((0, 1, 2)), kept.mean((0, 1, 3)), kept.mean((2, 3))
    for mean, draws in zip(means, (kept.numel(), 2880, 2880, 129600)):
        assert ((mean - (1 - p)).abs().max() / math.sqrt(p * (1 - p) / draws)).item() < 5


def test_neighbours_know_nothing_of_each_other():
    """Correlation of a mask with its neighbours in every coordinate and with other seeds', in deviations."""
    kept = grid()

    def apart(one, other):
        one, other = 2 * one.double() - 1, 2 * other.double() - 1
        return abs((one * other).mean().item()) * math.sqrt(one.numel())

    for dim in range(4):
        for step in (1, 64) if kept.size(dim) > 64 else (1,):
            one, other = (kept.narrow(dim, first, kept.size(dim) - step) for first in (0, step))
            assert apart(one, other) < 4.5, (dim, step)
    assert apart(kept, kept.transpose(2, 3)) / math.sqrt(2) < 4.5  # query and key are not the same to it
    for seed in (8, -7, 7 + 2**32, GAMMA + 7, torch.tensor(2**62)):
        assert apart(kept, grid(seed=seed)) < 4.5


def test_every_bit_of_the_hash_depends_on_every_bit():
    """Avalanche: one bit of the input turned over, each bit of the result turns over in half of the cases."""
    numbers, bits = torch.arange(4000), 1 << torch.arange(64)
    before = mix(numbers.clone())
    for bit in (0, 1, 31, 62):
        turned = ((before ^ mix(numbers ^ (1 << bit))).unsqueeze(-1) & bits) != 0
        assert (turned.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4000)
    first_of_seed_0 = 0xE220A8397B1DCDAF - 2**64  # splitmix64's
    assert mix(torch.tensor([GAMMA])).item() == first_of_seed_0


def test_of_dropped_scores_autograd_keeps_a_byte_each():
    scores, kept = torch.rand(1, 2, 4, 4, dtype=torch.float64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        DropMask(0.5, seed=1)(scores)
    assert sum(x.nbytes for x in kept) == scores.numel()


def test_the_mask_is_a_function_of_the_place():
    kept, some = grid(), torch.tensor([5, 0, 359, 17])
    part = keep(0.5, 7, torch.tensor([1]), torch.tensor([3, 1]), some, some + 0)
    assert torch.equal(part, kept[1:, [3, 1]][:, :, some][..., some])
    assert not (grid(0.6) & ~kept).any(), "a larger p drops more, and what was dropped"
    assert torch.equal(kept, grid(seed=torch.tensor(7))) and grid(0.0).all()
    with Ledger() as ledger:
        grid()
    assert 16 <= ledger.peak_bytes / kept.numel() < 16.2  # two numbers of 8 bytes a score while it is made


# ---- cores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_core_drops_what_one_process_drops(ranks):
    """Output and all gradients. The reference keeps the whole mask; here each tile makes its own, twice."""
    expected = in_one_process(mask=MASK)

    def rank():
        group = collectives.world()
        return {
            name: furthest(over(partial(core, dropout=MASK), group, layout, HEADS)[0], expected)
            for name, (core, layout) in CORES[ranks]().items()
        }

    for found in launch.run(rank, ranks=ranks):
        assert max(found.values()) < TOLERANCE, found


def test_packed_sequences_drop_what_one_row_drops():
    offsets = [0, 8, 24, T]
    document = torch.bucketize(torch.arange(T), torch.tensor(offsets), right=True)
    apart = torch.where(document[:, None] == document, 0.0, -math.inf).double()
    *qkv, _ = (x[:1] for x in inputs(HEADS))
    out = packed_attention(*qkv, cu_seqlens=offsets, dropout=MASK)
    assert furthest([out], [in_one_process(mask=MASK, bias=apart)[0][:1]]) < TOLERANCE


def test_one_device_and_without_a_causal_mask():
    """A tile of a whole sequence; the reference uses nothing of the module but `keep`."""
    q, k, v, dout = (x.requires_grad_() for x in inputs(HEADS))
    for causal in (True, False):
        kept = keep(0.3, 11, torch.arange(2, 2 + B), torch.arange(5, 13), torch.arange(T), torch.arange(T))
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.size(-1))
        if causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        expected = scores.softmax(-1).masked_fill(~kept, 0) / 0.7 @ v.repeat_interleave(2, 1)
        ours = flash_attention(q, k, v, causal=causal, dropout=MASK)
        theirs, mine = (torch.autograd.grad(out, (q, k, v), dout.detach()) for out in (expected, ours))
        assert furthest([ours, *mine], [expected, *theirs]) < TOLERANCE


def test_without_it_it_does_not():
    """Controls: a seed for each rank, positions on the rank, not in the sequence, a backward that forgets."""

    def rank():
        group, expected, found = collectives.world(), in_one_process(mask=MASK), {}

        def distance(mask=MASK):
            core = partial(ring_attention, group=group, layout=zigzag, dropout=mask)
            return furthest(over(core, group, zigzag, HEADS)[0], expected)

        found["right"] = distance()
        found["a seed for each rank"] = distance(MASK._replace(seed=11 + group.rank()))
        there, at = Tile.places, Placed.at
        Tile.places = property(lambda tile: ([range(T)[tile.queries]], [range(T)[tile.keys]]))
        found["local positions"] = distance()
        Tile.places = there
        Placed.at = lambda self, positions: at(self, positions)._replace(backward=plain_backward)
        found["no mask in backward"] = distance()
        Placed.at = at
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE
        assert len(found) == 3 and min(found.values()) > 1e-2, found


def test_sends_what_it_sent_and_keeps_no_mask():
    """The same bytes; q, k, v, out and lse are kept as without dropout; p = 0 is the old way to the bit."""

    def rank():
        group, core = collectives.world(), partial(ring_attention, group=collectives.world(), layout=zigzag)
        plain, kept = over(core, group, zigzag, HEADS), []
        for mask in (0.0, MASK):
            qkv = [split(x, zigzag, group, 2).requires_grad_() for x in inputs(HEADS)[:3]]
            kept.append([])
            note = lambda x: kept[-1].append(tuple(x.shape)) or x
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                core(*qkv, dropout=mask)
        nothing, dropped = (over(partial(core, dropout=mask), group, zigzag, HEADS) for mask in (0.0, MASK))
        with Traffic() as ledger:
            placed_core = drop_scores(core, Places(5), "layers.1.scores")
            placed_core(*qkv, dropout=0.0)
            ring_alone = ledger.sent_bytes()
            placed_core(*qkv, dropout=0.1)
        alike = (plain[1] == nothing[1] == dropped[1]) and kept[0] == kept[1] and len(kept[0]) == 5
        return all(map(torch.equal, plain[0], nothing[0])), alike, ledger.sent_bytes() - 2 * ring_alone

    assert launch.run(rank, ranks=2) == [(True, True, 0)] * 2  # nobody has to agree on a seed
    assert placed(FUSED) is FUSED


def test_a_layer_that_is_computed_again_drops_the_same():
    """torch's checkpoint around the core, whatever others draw; two layers differ, and so do two steps and
    rows. torch's generator is left alone."""

    def rank():
        group, results = collectives.world(), {}
        torch.manual_seed(50 + group.rank())
        core = partial(ring_attention, group=group, layout=zigzag)
        *qkv, dout = (split(x, zigzag, group, 2) for x in inputs(HEADS))
        places = Places(3)
        sites = "layers.1.scores", "layers.2.scores"
        layers = [partial(drop_scores(core, places, site), dropout=0.3) for site in sites]
        for name in ("kept", "again"):
            ours, before = [x.clone().requires_grad_() for x in qkv], torch.get_rng_state()
            again = (
                partial(checkpoint, use_reentrant=False) if name == "again" else lambda layer, *x: layer(*x)
            )
            outs = [again(layer, *ours) for layer in layers]
            untouched = torch.equal(before, torch.get_rng_state())
            torch.rand(3)  # others draw, too
            sum((out * dout).sum() for out in outs).backward()
            results[name] = [*outs, *(x.grad for x in ours)]
        others = []
        for place in ((1, 0), (0, 2)):
            places.at(*place)
            others.append(layers[0](*qkv))
        expected = results["kept"]
        apart = [torch.equal(one, other) for one, other in combinations((*expected[:2], *others), 2)]
        return (any(apart), untouched, furthest(results["again"], expected))

    for same, untouched, error in launch.run(rank, ranks=2):
        assert not same and untouched and error < TOLERANCE


# ---- the whole model -------------------------------------------------------------------------------------

PROBLEM, SEED = Problem(config=small(dropout=0.2)), 3  # train_parallel's seed


def by_place(model, step, seed, p):
    """Dropout of a model in one process: nothing of the module but `keep` and the seed of a site."""
    places = Places(seed)
    places.at(step, 0)

    def masked(x, site, heads):
        sizes = x.size(0), heads, x.size(-2), x.size(-1)
        return x * keep(p, places.seed_of(site), *map(torch.arange, sizes)).view_as(x) / (1 - p)

    def activations(x, positions, site):
        return masked(x, site, 1)

    def scores(q, k, v, site, dropout, bias=None):
        return naive_attention(q, k, v, bias=bias, dropout=lambda weights: masked(weights, site, q.size(1)))

    for layer in model.layers:
        if hasattr(layer, "attention"):
            layer.attention.core = partial(scores, site=f"{layer.name}.scores")
        for name in ("dropout", "dropout1", "dropout2"):
            if hasattr(layer, name):
                getattr(layer, name).forward = partial(activations, site=f"{layer.name}.{name}")


def dropped_in_one_process(seed=SEED, problem=PROBLEM):
    class Dropped(Problem):
        def model(self):
            model, steps = super().model(), count()
            model.register_forward_pre_hook(
                lambda *_: by_place(model, next(steps), seed, self.config.dropout)
            )
            return model

    return one_process(Dropped(**vars(problem)))


PIPELINES = [({}, 4), (dict(recompute="stage"), 3), (dict(schedule="interleaved", chunks=2), 2)]
PIPELINES += [(dict(schedule="chimera"), 2), (dict(schedule="seq1f1b", slices=2), 2)]
CORES_OF_2 = [(dict(layout="striped"), 1), (dict(core="ring_self_attention"), 2), (dict(core="ulysses"), 1)]
MODELS = {  # shape: ways, each with the microbatches of a rank; more shapes in tests/layouts.py
    "dp2": (dict(dp=2), [({}, 3), (dict(zero=3), 2), (dict(zero="IGG", node=2), 1)]),
    "tp2": (dict(tp=2), [({}, 1), (dict(sequence_parallel=True, overlap=True), 1)]),
    "pp2": (dict(pp=2), PIPELINES),
    "cp2": (dict(cp=2), [*CORES_OF_2, (dict(zero=3), 1)]),
    "cp4": (dict(cp=4), [({}, 1), (dict(core="usp", ulysses=2), 1)]),
    "cp2 tp2": (dict(cp=2, tp=2), [(dict(sequence_parallel=True), 1), (dict(core="ulysses"), 1)]),
    "pp2 cp2": (dict(pp=2, cp=2), [({}, 2), (dict(schedule="terapipe", slices=2), 2)]),
}


@pytest.fixture(scope="module")
def expected():
    return dropped_in_one_process()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_process(name, expected):
    """Two steps with dropout of scores and of activations, ranks seeded apart: loss, gradients, parameters,
    the same under every axis, layout, schedule and number of microbatches."""
    shape, ways = MODELS[name]

    def rank():
        problems = [replace(PROBLEM, microbatches=m) for _, m in ways]
        strategies = [Strategy(**shape, **how, microbatches=m) for how, m in ways]
        return [train_parallel(*both) for both in zip(problems, strategies)]

    for outcomes in launch.run(rank, ranks=math.prod(shape.values())):
        for way, outcome in zip(ways, outcomes):
            assert difference(outcome, expected, part="pp" in shape) < TOLERANCE, way


def test_a_model_without_it_does_not(expected):
    """Controls: a seed for each rank; heads, rows, tokens from each rank's first; one mask for every step."""

    def rank():
        from minitrain.attention import placed
        from minitrain.compose import parallelize as module

        number = collectives.world().rank()
        shapes = dict(cp=Strategy(cp=2), tp=Strategy(tp=2), dp=Strategy(dp=2))
        found = {"right": [train_parallel(PROBLEM, strategy) for strategy in shapes.values()]}
        seed_of, at, drop = Places.seed_of, Places.at, placed.drop_by_place
        Places.seed_of = lambda self, site: seed_of(self, site) + number
        found["seeds apart"] = train_parallel(PROBLEM, shapes["cp"])
        Places.seed_of = seed_of
        Places.at = lambda self, step, first_row, _=None: at(self, step, 0)
        found["first rows"] = train_parallel(PROBLEM, shapes["dp"])
        found["first rows of microbatches"] = train_parallel(replace(PROBLEM, microbatches=2), shapes["cp"])
        Places.at = lambda self, step, first_row, _=None: at(self, 0, first_row)
        found["one step's masks"] = train_parallel(PROBLEM, shapes["tp"])
        Places.at = at
        module.drop_by_place = lambda layers, places, part=0: drop(layers, places)
        found["first heads"] = train_parallel(PROBLEM, shapes["tp"])
        local = lambda positions: torch.arange(len(positions))
        module.drop_by_place = lambda layers, places: drop(layers, places, local_positions=local)
        found["first tokens"] = train_parallel(PROBLEM, shapes["cp"])
        return found

    assert difference(dropped_in_one_process(seed=4), expected) > 1e-4  # the seed matters
    for found in launch.run(rank, ranks=2):
        assert max(difference(outcome, expected) for outcome in found.pop("right")) < TOLERANCE
        assert len(found) == 6 and min(difference(outcome, expected) for outcome in found.values()) > 1e-4
