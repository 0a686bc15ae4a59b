"""Pipelines over slices of a sequence whose tokens are cut over ranks: Runner on pp x cp real ranks against
one process."""

from functools import cache

import torch

from minitrain import launch
from minitrain.attention.dropout import Places, drop_scores
from minitrain.compose.attention_cores import core_of_slices, data_layout
from minitrain.context.layout import positions, split
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.layers import Dropout, naive_attention
from minitrain.model.training.step import Batch
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedules.slices import on_each_rank, seq1f1b, terapipe
from minitrain.pipeline.sliced_attention import SlicedAttention, look_back
from minitrain.ranks.mesh import Mesh
from tests.parallel import TOLERANCE, small

LENGTH, ROWS, MICROBATCHES, VALID = 16, 4, 2, 42
CONFIGS = {
    "rope": {},
    "alibi": dict(positions="alibi"),
    "learned": dict(positions="learned", num_kv_heads=4),
    "dropout": dict(dropout=0.2),
    "alibi and dropout": dict(positions="alibi", dropout=0.2),
    "latent": dict(kv_latent=8, rope_head_dim=2, num_kv_heads=4),
}


def config_of(kind):
    return small(num_layers=2, max_positions=LENGTH, tied=False, **CONFIGS[kind])


def data():
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(29, (2, ROWS, LENGTH), generator=generator)
    targets[0, 3:], targets[2, :9] = -100, -100  # uneven over ranks and slices
    return tokens, targets


def dropping_scores_only(model, kind):
    """The cores drop by place; rows of every microbatch are counted from 0, and activations are left
    alone."""
    places = Places(seed=4)
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, Dropout):
                module.p = 0.0
        if hasattr(layer, "attention") and CONFIGS[kind].get("dropout"):
            layer.attention.core = drop_scores(layer.attention.core, places, layer.name)


@cache
def one_process(kind):
    tokens, targets = data()
    model = GPT(config_of(kind), seed=3, dtype=torch.float64, attention=naive_attention)
    dropping_scores_only(model, kind)
    assert (targets != -100).sum() == VALID
    microbatches = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES))
    loss = sum(cross_entropy_sum(model(x), y) for x, y in microbatches) / VALID
    loss.backward()
    return {"loss": loss.detach()} | {name: param.grad for name, param in model.named_parameters()}


def in_slices(kind, schedule, name, sizes, layout, pp):
    """Loss, and the gradients of this rank's stages, summed over cp."""
    mesh = Mesh(pp=pp, **sizes)
    cp = mesh.group(*sizes)
    cuts, own = even(2, schedule.stages), schedule.stages_of(mesh.rank("pp"))
    model = Stages(config_of(kind), {stage: cuts[stage] for stage in own}, seed=3, dtype=torch.float64)
    stages, slices = dict(model.items()), schedule.lengths or schedule.slices
    groups = {axis: mesh.group(axis) for axis in sizes}
    memory = look_back(stages, schedule, core_of_slices(name, groups, layout, slices))
    dropping_scores_only(model, kind)
    reducer = GradReducer(model.parameters(), cp)
    schedule = on_each_rank(schedule, cp.size())
    run = Runner(stages, schedule, mesh.group("pp"), cross_entropy_sum, reducer, width=16, hooks=[memory])
    whole = data_layout(name, sizes, layout, slices)
    tokens, targets = (split(x, whole, cp) for x in data())
    batch = Batch(tokens, targets, torch.tensor(VALID), positions(whole, cp, LENGTH))
    loss = run(batch)
    reducer.finish()
    return {"loss": loss} | {name: param.grad for name, param in model.global_parameters().items()}


def furthest(found, kind):
    """Of what all ranks have; their losses are parts of it."""
    expected = one_process(kind)
    assert set().union(*found) == set(expected)
    apart = [abs(sum(part.pop("loss") for part in found) - expected["loss"])]
    apart += [(grad - expected[name]).abs().max() for part in found for name, grad in part.items()]
    return max(apart).item()


RING, ULYSSES = ("ring", dict(ring=2)), ("ulysses", dict(ulysses=2))
WAYS = [
    ("rope", seq1f1b(2, 2, 2), *RING, "zigzag"),
    ("rope", terapipe(2, 2, 4), *RING, "striped"),
    ("latent", seq1f1b(2, 2, 2), *RING, "zigzag"),
    ("learned", terapipe(2, 2, 3, (8, 4, 4)), *RING, "zigzag"),
    ("alibi", seq1f1b(2, 2, 3, (8, 4, 4)), *ULYSSES, "zigzag"),
    ("dropout", seq1f1b(2, 2, 3, (8, 6, 2)), *RING, "contiguous"),
    ("alibi and dropout", terapipe(2, 2, 2), *RING, "zigzag"),
    ("alibi and dropout", seq1f1b(2, 2, 2), *ULYSSES, "striped"),
]


def test_pipelines_on_pp2_cp2():
    """Both schedules, even and uneven slices, every kind of positions, masks of dropout by place, latent
    attention."""
    found = launch.run(lambda: [in_slices(*way, pp=2) for way in WAYS], ranks=4)
    for number, way in enumerate(WAYS):
        assert furthest([ranks[number] for ranks in found], way[0]) < TOLERANCE, way


def test_usp_on_cp4_and_no_context_parallelism():
    """Ring and Ulysses together; and groups of one, which are one device: slices with dropout and ALiBi
    without cp."""
    ways = [("alibi and dropout", seq1f1b(1, 2, 2), "usp", dict(ring=2, ulysses=2), "zigzag")]
    found = launch.run(lambda: [in_slices(*way, pp=1) for way in ways], ranks=4)
    assert furthest([ranks[0] for ranks in found], "alibi and dropout") < TOLERANCE
    alone = [(kind, terapipe(1, 2, 3, (7, 5, 4)), "ring", dict(ring=1), "contiguous") for kind in CONFIGS]
    (outcomes,) = launch.run(lambda: [in_slices(*way, pp=1) for way in alone], ranks=1)
    for (kind, *_), outcome in zip(alone, outcomes):
        assert furthest([outcome], kind) < TOLERANCE, kind


def test_without_it_it_does_not():
    """Controls: gradients to earlier keys that are left out; places of the own slice in the mask."""

    def rank():
        ends, call, found = SlicedAttention.roots, SlicedAttention.__call__, {}
        way = ("dropout", seq1f1b(2, 2, 2), *RING, "zigzag")
        found["right"] = in_slices(*way, pp=2)
        SlicedAttention.roots = lambda self, unit: self.slices.pop(unit) and []
        found["gradients"] = in_slices(*way, pp=2)
        SlicedAttention.roots = ends
        moved = lambda self, dropout: dropout._replace(first_token=self.now % 2)
        SlicedAttention.__call__ = lambda self, *qkv, dropout: call(self, *qkv, dropout=moved(self, dropout))
        found["places"] = in_slices(*way, pp=2)
        SlicedAttention.__call__ = call
        return found

    found = launch.run(rank, ranks=4)
    assert furthest([ranks["right"] for ranks in found], "dropout") < TOLERANCE
    for wrong in ("gradients", "places"):
        assert furthest([ranks[wrong] for ranks in found], "dropout") > 1e-6
