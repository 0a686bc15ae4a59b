"""Pipelines over slices of a sequence whose tokens are cut over ranks: pp x cp real ranks against one process."""

from functools import cache

from minitrain import launch
from minitrain.pipeline.schedules.one_direction import seq1f1b, terapipe
from minitrain.systems.pipeline.sliced_attention import SlicedAttention
from tests.context.test_context_dropout import dropped_in_one_process
from tests.parallel import TOLERANCE, Problem, difference, one_process, small, together, train_pipeline

KINDS = {
    "rope": {}, "alibi": dict(positions="alibi"), "learned": dict(positions="learned", num_kv_heads=4),
    "dropout": dict(dropout=0.2), "alibi and dropout": dict(positions="alibi", dropout=0.2),
    "latent": dict(kv_latent=8, rope_head_dim=2, num_kv_heads=4),
}  # fmt: skip
ULYSSES = dict(core="ulysses")
WAYS = [
    ("rope", seq1f1b(2, 2, 2), dict(layout="zigzag")),
    ("rope", terapipe(2, 2, 4), dict(layout="striped")),
    ("latent", seq1f1b(2, 2, 2), dict(layout="zigzag")),
    ("learned", terapipe(2, 2, 3, (24, 16, 8)), dict(layout="zigzag")),
    ("alibi", seq1f1b(2, 2, 3, (24, 16, 8)), dict(layout="zigzag", **ULYSSES)),
    ("dropout", seq1f1b(2, 2, 3, (24, 20, 4)), dict(layout="contiguous")),
    ("alibi and dropout", terapipe(2, 2, 2), dict(layout="zigzag")),
    ("alibi and dropout", seq1f1b(2, 2, 2), dict(layout="striped", **ULYSSES)),
]


def problem(kind):
    config = small(num_layers=2, max_positions=48, tied=False, **KINDS[kind])
    return Problem(config=config, length=48, batch_sizes=(4,))


@cache
def expected(kind):
    return (dropped_in_one_process if "dropout" in kind else one_process)(problem=problem(kind))


def in_slices(ways, **shape):
    return [train_pipeline(problem(kind), shape, schedule, **how) for kind, schedule, how in ways]


def apart(ways, **shape):
    """How far each is from one process."""
    found = zip(*launch.run(lambda: in_slices(ways, **shape), ranks=shape["pp"] * shape["cp"]))
    return [difference(together(ranks), expected(kind)) for (kind, *_), ranks in zip(ways, found)]


def test_pipelines_on_pp2_cp2():
    """Both schedules, even and uneven slices, all kinds of positions, dropout by place, latent attention."""
    assert max(apart(WAYS, pp=2, cp=2)) < TOLERANCE


def test_usp_on_cp4_and_no_context_parallelism():
    """Ring and Ulysses together; and one device: slices with dropout and ALiBi without cp."""
    usp = ("alibi and dropout", seq1f1b(1, 2, 2), dict(core="usp", ulysses=2, layout="zigzag"))
    alone = [(kind, terapipe(1, 2, 3, (21, 15, 12)), {}) for kind in KINDS]
    assert max(apart([usp], pp=1, cp=4) + apart(alone, pp=1, cp=1)) < TOLERANCE


def test_without_it_it_does_not():
    """Controls: gradients to earlier keys that are left out; places of the own slice in the mask."""
    way = [("dropout", seq1f1b(2, 2, 2), dict(layout="zigzag"))]
    assert apart(way, pp=2, cp=2) < [TOLERANCE]

    def rank(wrong):
        call = SlicedAttention.__call__
        if wrong == "gradients":
            SlicedAttention.roots = lambda self, unit: self.slices.pop(unit) and []
        else:
            moved = lambda self, mask: mask._replace(first_token=self.now % 2)
            SlicedAttention.__call__ = lambda self, *qkv, dropout: call(
                self, *qkv, dropout=moved(self, dropout)
            )
        return in_slices(way, pp=2, cp=2)[0]

    for wrong in ("gradients", "places"):
        assert difference(together(launch.run(rank, wrong, ranks=4)), expected("dropout")) > 1e-6
