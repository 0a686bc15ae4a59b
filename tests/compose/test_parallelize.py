"""Axes together: rows over dp, tokens over cp, matrices over tp, states by ZeRO; the same training step
equals one process.
"""

import json
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import Rows
from minitrain.model.gpt import cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.sharding import place, placement
from tests.parallel import TOLERANCE, Problem, check_refusals, difference, one_process, small, train_parallel

CONFIGS = {
    "tied, RoPE, SwiGLU, 2 K/V heads": small(vocab_size=32),
    "GPT-2: biases, learned positions": small(
        vocab_size=32, tied=False, norm="layer", positions="learned", activation="gelu", bias=True, num_kv_heads=4
    ),
}  # fmt: skip
ULYSSES, SEQUENCE = dict(core="ulysses", layout="contiguous"), dict(sequence_parallel=True)
CASES = [
    (dict(cp=2), [{}, dict(layout="striped"), ULYSSES, dict(zero=1), dict(zero=3)]),
    (dict(cp=4), [{}, dict(layout="striped"), ULYSSES]),
    (dict(dp=2, cp=2), [{}, dict(zero=2), dict(zero=3), dict(zero="IGG", node=2)]),
    (dict(cp=2, tp=2), [{}, SEQUENCE, dict(SEQUENCE, overlap=True), ULYSSES]),
    (dict(dp=2, tp=2), [SEQUENCE, dict(zero=1), dict(zero=2, overlap=True), dict(SEQUENCE, zero=3)]),
    (dict(dp=2, pp=2), [dict(zero=1), dict(zero=2), dict(zero=3), dict(zero=3, schedule="zb_v")]),
]


def problems():
    found = {name: Problem(config=config) for name, config in CONFIGS.items()}
    return found | {
        "3 microbatches": Problem(config=small(vocab_size=32), batch_sizes=(6, 7), microbatches=3)
    }


@pytest.fixture(scope="module")
def references():
    return {name: one_process(problem) for name, problem in problems().items()}


@pytest.mark.parametrize(
    "shape, ways",
    CASES,
    ids=[" ".join(f"{axis}{size}" for axis, size in shape.items()) for shape, _ in CASES],
)
def test_equals_one_process(shape, ways, references):
    """Loss, gradients and parameters after two steps; RoPE, learned positions and masks are right under
    every layout.
    """

    def which(number, settings):  # problems: in turn, or where sums change the one in microbatches
        return (2,) if "zero" in settings else (0, 2) if shape == settings | dict(cp=2) else (number % 2,)

    def rank():
        return [
            (name, train_parallel(problem, Strategy(**shape, **settings)))
            for number, settings in enumerate(ways)
            for place, (name, problem) in enumerate(problems().items())
            if place in which(number, settings)
        ]

    for outcomes in launch.run(rank, ranks=Strategy(**shape).ranks):
        for name, outcome in outcomes:
            assert difference(outcome, references[name], "pp" in shape) < TOLERANCE, name


@pytest.mark.parametrize("broken", ["positions", "sum over cp"])
def test_without_it_it_does_not(broken, references):
    def rank():
        from minitrain.compose import parallelize as module
        from minitrain.context import layout

        if broken == "positions":
            layout.positions = lambda layout, group, length, device=None: torch.arange(length // group.size())
        else:
            module.place_gradients = lambda build: [
                place(param, summed_over=(build.mesh.group("dp"),)) for param in build.module.parameters()
            ]
        return train_parallel(problem, Strategy(cp=2))

    name, problem = next(iter(problems().items()))
    assert max(difference(outcome, references[name]) for outcome in launch.run(rank, ranks=2)) > 1e-4


def rows(batch_size=4, length=8):
    zeros = torch.zeros(batch_size, length, dtype=torch.long)
    return Rows(lambda step, rank, ranks: (zeros, zeros), batch_size, length)


def test_refusals_are_one_line_on_every_rank():
    """Before any rank waits: by the strategy itself, by what it is asked to train, by the batch."""
    config = small()

    def built(**settings):
        return parallelize(config, Strategy(**settings))

    refused = {
        "T=6 is not a multiple of 4 pieces (cp=2, layout='zigzag'); pad the sequence to 8": lambda: built(
            cp=2
        ).batch(rows(length=6), 0),
        "sequence 16 > max_positions 8": lambda: built(cp=2).batch(rows(length=16), 0),
        "a batch of 1 rows for dp=2 x microbatches=1": lambda: built(dp=2).batch(rows(1), 0),
        "ep=2, but the model has no experts": lambda: built(dp=2, ep=2),
        "dp=1 · pp=1 · cp=1 · tp=1 are 1 ranks, but the job has 2; dp=2 would fit": lambda: built(),
        "dp=1 · pp=1 · cp=1 · tp=3 are 3 ranks, but the job has 2; choose sizes whose product is 2": lambda: (
            built(tp=3)
        ),
        "zero=4; use 0 (no sharding)": lambda: built(dp=2, zero=4),
        "zero='XYZ'; use 0": lambda: built(dp=2, zero="XYZ"),
        "node=2 with zero=0": lambda: built(dp=2, node=2),
        "sequence_parallel=True with tp=1: it is about the ranks of tp": lambda: built(
            dp=2, sequence_parallel=True
        ),
        "schedule='2f2b'; use gpipe": lambda: built(pp=2, schedule="2f2b"),
        "chunks=2 with schedule='1f1b'": lambda: built(pp=2, chunks=2),
        "chunks=2 with pp=1: it is for a pipeline": lambda: built(dp=2, chunks=2),
        "6 stages of a model of 4 layers": lambda: parallelize(
            config, Strategy(pp=2, schedule="interleaved", chunks=3, microbatches=2)
        ),
        "dp='two': use a whole number": lambda: built(dp="two"),
        "dp=[2]: use one whole number": lambda: built(dp=[2]),
        "core='rings'; use ring": lambda: built(cp=2, core="rings"),
        "make_optimizer left out layers.0.tokens": lambda: parallelize(
            config, Strategy(dp=2), lambda params: AdamW(params[1:])
        ),
        "of the tensors it was given; use just these": lambda: parallelize(
            config, Strategy(dp=2), lambda params: AdamW([nn.Parameter(torch.ones(1))])
        ),
        "AdamW was built before sharding": lambda: parallelize(
            config, Strategy(dp=2, zero=1), AdamW([nn.Parameter(torch.ones(1))])
        ),
        "1F1B, p=2, m=3 is for pp=2, microbatches=3": lambda: parallelize(
            config, Strategy(pp=2, microbatches=2), schedule=one_f_one_b(2, 3)
        ),
        "1 cuts for the 2 stages": lambda: parallelize(config, Strategy(pp=2), cuts=[range(4)]),
        "Linear with Strategy(tp=2): a module of your own": lambda: parallelize(
            nn.Linear(2, 2), Strategy(tp=2)
        ),
    }
    check_refusals(refused, ranks=2)


def test_refusals_of_matrices_say_what_heads_and_hidden_units_allow():
    config = small(num_heads=6, d_model=24, num_kv_heads=2, d_ff=40)
    for tp in (3, 4, 6):
        with pytest.raises(
            ValueError, match=f"^tp={tp} does not divide num_heads=6, .* d_ff=40 \\(gated\\); use tp 1 or 2$"
        ):
            Strategy(tp=tp).check(config, tp)
    with pytest.raises(ValueError, match="tp=3 does not divide .* use tp 1 or 2 or 6$"):  # 3 share a key head
        Strategy(tp=3).check(small(num_heads=6, d_model=24, num_kv_heads=2, d_ff=48), 3)
    with pytest.raises(ValueError, match="tp=2 does not cut latent attention"):
        Strategy(tp=2).check(small(num_kv_heads=4, kv_latent=8, rope_head_dim=2), 2)


def test_a_strategy_prints_and_travels():
    strategy = Strategy(dp=2, tp=2, zero="III", node=2, sequence_parallel=True)
    assert eval(str(strategy)) == strategy and str(Strategy()) == "Strategy()"
    assert Strategy(**json.loads(json.dumps(asdict(strategy)))) == strategy and Strategy(zero="1").zero == 1
    assert list(strategy.axes) == ["inter", "intra", "pp", "tp"] and strategy.ranks == 4
    with pytest.raises(FrozenInstanceError):
        strategy.dp = 4


@pytest.mark.parametrize("zero", [0, 1, 2, 3, "NGG"])
def test_a_module_of_the_readers_own(zero):
    """Plain torch.nn: data parallelism and every stage of ZeRO equal one process; decay by group; the loss is
    the reader's.
    """

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = (
                nn.Embedding(29, 8),
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
                nn.Linear(8, 29),
            )

        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    def batches(step, rank, ranks):
        tokens = torch.randint(29, (6, 5), generator=torch.Generator().manual_seed(step))
        return tuple(x.chunk(ranks)[rank] for x in (tokens, tokens.roll(-1, 1)))

    def decaying(params):
        matrices, vectors = ([p for p in params if (p.dim() > 1) == wide] for wide in (True, False))
        return torch.optim.SGD([{"params": matrices, "weight_decay": 0.3}, {"params": vectors}], lr=0.5)

    def trained(strategy):
        torch.manual_seed(0)
        run = parallelize(Own().double(), strategy, decaying)
        losses = [run.total(run.step(run.batch(Rows(batches, 6, 5), i), 0.2).loss).item() for i in range(3)]
        return losses, run.evaluate(run.batch(Rows(batches, 6, 5), 5)).item(), run.state_dict()["parameters"]

    ((losses, loss, params),) = launch.run(trained, Strategy(), ranks=1)
    torch.manual_seed(0)
    model = Own().double()
    optimizer = decaying(list(model.parameters()))
    for step in range(3):
        tokens, targets = batches(step, 0, 1)
        optimizer.zero_grad()
        (cross_entropy_sum(model(tokens), targets) / targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    reference = dict(model.named_parameters())
    strategy = Strategy(dp=2, zero=zero, node=2 if isinstance(zero, str) else 1)
    for ours in ((losses, loss, params), *launch.run(trained, strategy, ranks=2)):
        assert max(abs(a - b) for a, b in zip((*ours[0], ours[1]), (*losses, loss))) < TOLERANCE
        assert max((ours[2][name] - param).abs().max() for name, param in reference.items()) < TOLERANCE


FROZEN = {
    "the table by its first name": ("layers.0.tokens",),
    "the table by its last name": ("layers.5.out.weight",),
    "a whole stage": ("layers.0.*", "layers.1.*", "layers.2.*"),
    "the last stage": ("layers.3.*", "layers.4.*", "layers.5.*"),
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_tables_and_stages_in_a_pipeline(what):
    """A tied table that is frozen stays so at both ends; a stage may have nothing to train. Whole and split
    backward, V shapes too.
    """
    problem = Problem(config=small(num_layers=4), frozen="")
    ways = [
        Strategy(pp=2, schedule=name, zero=zero)
        for name, zero in (("1f1b", 0), ("v_half", 0), ("zb_h1", 1), ("1f1b", 3))
    ]

    def rank(ways):
        return [train_parallel(problem, way, frozen=FROZEN[what]) for way in ways]

    (reference,) = launch.run(rank, [Strategy()], ranks=1)[0]
    found = launch.run(rank, ways, ranks=2)
    for number, way in enumerate(ways):
        grads = {name: grad for outcomes in found for name, grad in outcomes[number].grads.items()}
        frozen = FROZEN[what][0].rstrip("*").replace("layers.5.out.weight", "layers.0.tokens")
        assert grads.keys() == reference.grads.keys() and not any(name.startswith(frozen) for name in grads)
        for outcomes in found:
            assert difference(outcomes[number], reference, part=True) < TOLERANCE, way


@pytest.mark.parametrize(
    "way",
    [
        Strategy(pp=3, tp=2, sequence_parallel=True),
        Strategy(dp=2, pp=3, tp=2, zero=3, sequence_parallel=True),
        Strategy(dp=2, pp=2, cp=4, core="usp", ulysses=2, schedule="zb_v", microbatches=4),
    ],
    ids=str,
)
def test_every_rank_makes_as_many_groups(way):
    """Else the next one has another name on each, and all wait. With norms behind, the last stage of three
    has none that sees slices.
    """
    config = small(vocab_size=32, residual="post")
    made = [
        dryrun.run(lambda: len(parallelize(config, way).mesh._groups), rank=rank, ranks=way.ranks)
        for rank in range(way.ranks)
    ]
    assert len(set(made)) == 1, made


def test_sums_begin_inside_a_node_and_a_pipeline_has_a_group_for_each_direction():
    def rank():
        run = parallelize(small(), Strategy(dp=4, zero="IIG", node=2))
        over = placement(next(run.model.parameters())).summed_over
        runner = parallelize(small(), Strategy(pp=4)).runner
        apart = runner.down is not runner.group and runner.down.rank() == runner.group.rank()
        return [collectives.axis_of(group) for group in over], apart

    assert dryrun.run(rank, rank=3, ranks=4) == (["intra", "inter"], True)


def test_decay_by_group_means_the_same_whatever_is_cut():
    """`p.dim() >= 2` sees whole matrices under ZeRO and tensor parallelism; without decay the parameters are
    others.
    """
    problem = Problem()

    def rank(strategies, decay):
        def make(params):
            assert all(hasattr(param, "global_name") for param in params)
            matrices, vectors = ([p for p in params if (p.dim() >= 2) == wide] for wide in (True, False))
            return AdamW([{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)  # fmt: skip

        return [train_parallel(problem, strategy, make_optimizer=make) for strategy in strategies]

    ((reference,),) = launch.run(rank, [Strategy()], 0.5, ranks=1)
    ((other,),) = launch.run(rank, [Strategy()], 0.0, ranks=1)
    assert difference(other, reference) > 1e-3
    ways = [*(Strategy(dp=2, zero=z) for z in (1, 2, 3)), Strategy(tp=2), Strategy(dp=2, node=2, zero="III")]
    for outcomes in launch.run(rank, ways, 0.5, ranks=2):
        assert max(difference(outcome, reference) for outcome in outcomes) < TOLERANCE
