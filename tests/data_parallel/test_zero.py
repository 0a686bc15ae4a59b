"""ZeRO 1, 2, 3: equal to one process, bytes and memory as the paper says."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.buckets import Flat, views
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import ShardedParameter, Zero3
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, accumulate, train_step
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import DispatchMode
from tests import parallel

WAYS = {
    "stage 1": (Zero1, dict(bucket_bytes=3000)), "stage 2": (Zero2, dict(bucket_bytes=3000)),
    "stage 2, keep": (Zero2, dict(bucket_bytes=3000, accumulate="keep")), "stage 3": (Zero3, {}),
    "stage 3, keep": (Zero3, dict(accumulate="keep")),
    "stage 3, no reshard, no prefetch": (Zero3, dict(reshard=False, prefetch=False)),
}  # fmt: skip
BATCHES = (12, 11)  # 11 sequences fall unevenly on 2 and on 4 ranks


def made(way):
    stage, settings = WAYS[way]
    return lambda model, group, make_optimizer: stage(model, group, make_optimizer, **settings)


def problems():
    """Tied, frozen, masked, clipped, uneven; with 1 and with 3 microbatches (fewest rows of a rank: 2)."""
    return [parallel.Problem(batch_sizes=BATCHES), parallel.Problem(batch_sizes=(12, 13), microbatches=3)]


@pytest.fixture(scope="module")
def references():
    return [parallel.one_process(problem) for problem in problems()]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equals_one_process(ranks, references):
    def rank():
        return [parallel.train_sharded(problems()[number], made(way)) for way, number in cases]

    cases = [(way, n) for place, way in enumerate(WAYS) for n in (0, 1) if ranks == 2 or n == place % 2]
    for outcomes in launch.run(rank, ranks=ranks, timeout_s=120):
        for (way, number), outcome in zip(cases, outcomes, strict=True):
            assert parallel.difference(outcome, references[number]) < parallel.TOLERANCE, way


class Deaf1(Zero1):
    """Controls: each leaves one collective out."""

    def publish(self, frozen=False):
        pass


class Deaf2(Zero2):
    def _on_sum(self, flat, grad):
        ones = flat.pack([torch.ones_like(param) for param in flat.params])
        flat.shard.grad = flat.local_shard(ones).clone()


class Deaf3(Zero3):
    def scatter(self, flat, grads):
        return collectives.all_reduce(flat.local_shard(grads).clone() * 0, self.group, async_op=True)


@pytest.mark.parametrize("deaf", [Deaf1, Deaf2, Deaf3])
def test_without_its_collective_it_does_not(deaf, references):
    def rank():
        return parallel.train_sharded(problems()[0], lambda model, group, make: deaf(model, group, make))

    for outcome in launch.run(rank, ranks=2):
        assert parallel.difference(outcome, references[0]) > 1e-4


def test_mixed_precision_gives_the_bits_of_data_parallelism():
    """bf16 parameters and gradients, float32 master: every sum is rounded once, so cutting changes no bit."""

    def rank():
        group = collectives.world()
        tokens = torch.arange(16).view(2, 8) % 29 + group.rank()
        batch = Batch(tokens, tokens, torch.tensor(16 * group.size()))
        results = []
        for way in ("stage 1", "stage 2", "stage 3", None):
            model = GPT(parallel.small(), dtype=torch.bfloat16)
            make = partial(AdamW, lr=1e-2, master_dtype=torch.float32)
            if way:
                reducer = optimizer = made(way)(model, group, make)
            else:
                reducer, optimizer = GradReducer(model.parameters(), group), make(model.parameters())
            step = accumulate(model, cross_entropy_sum, 1, reducer)
            for _ in range(3):
                train_step(step, batch, optimizer, reducer)
            results.append(
                [states.full_tensor(optimizer, p) if way else p.detach() for p in model.parameters()]
            )
        return all(all(map(torch.equal, ours, results[-1])) for ours in results)

    assert launch.run(rank, ranks=4) == [True] * 4


# ---- bytes on the wire -----------------------------------------------------------------------------------


def untied(**changes):
    return parallel.Problem(config=parallel.small(tied=False), batch_sizes=(12,), clip=None, **changes)


def traffic(way, problem):
    """(bytes gathered, bytes reduce-scattered, number of these, bytes of all whole buffers) of one step."""
    group = collectives.world()
    model = problem.model()
    for param in model.parameters():
        param.requires_grad_(True)
    zero = made(way)(model, group, lambda shards: AdamW(shards, lr=1e-2))
    with parallel.Traffic() as ledger:
        parallel.run_steps(problem, model, group, zero, zero)
    whole = sum(flat.numel for flat in zero.shards) * 8
    gathered, scattered = (ledger.sent_bytes(op) for op in ("all_gather", "reduce_scatter"))
    return gathered, scattered, ledger.num_calls("reduce_scatter"), whole


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_bytes_sent_equal_the_formulas(ranks):
    def rank():
        return {way: [traffic(way, untied(microbatches=m)) for m in (1, 3)] for way in WAYS}

    gathers = {"stage 3": 2, "stage 3, keep": 2}  # a microbatch; every other way once
    for ways in launch.run(rank, ranks=ranks):
        for way, runs in ways.items():
            for m, (gathered, scattered, calls, whole) in zip((1, 3), runs):
                share = whole * (ranks - 1) // ranks
                sends = 1 if way == "stage 1" or "keep" in way else m
                passes = m if way.startswith("stage 3") else 1
                assert scattered == sends * share and gathered == gathers.get(way, 1) * passes * share
        calls = {way: [calls for _, _, calls, _ in runs] for way, runs in ways.items()}
        assert calls["stage 2"][1] == 3 * calls["stage 2"][0]  # every microbatch; else once per bucket
        assert calls["stage 1"][1] == calls["stage 1"][0] == calls["stage 2, keep"][1]


def test_zero1_pp_tp():
    """dp 2 x pp 2 x tp 2 on eight ranks, three microbatches: equal to one process, and the bytes of each axis.

    Stage 1 pays (RS + AG) once, stage 2 m RS + AG; gradients are 1/(pp tp) of the model's before either."""
    m, ranks = 3, 2
    problem = untied(microbatches=m)
    reference = parallel.one_process(problem)
    rows = problem.batch_sizes[0] // (2 * m)
    activation, tokens = rows * problem.length * problem.config.d_model * 8, rows * problem.length * 8

    def under(zero):
        how = dict(microbatches=m, precision="float64", bucket_bytes=3000)
        strategy = Strategy(dp=2, pp=2, tp=2, zero=zero, **how)
        make = lambda params: AdamW(params, lr=problem.lr)  # noqa: E731
        run = parallelize(problem.config, strategy, make, seed=3, frozen=(problem.frozen,))
        batch = run.batch(parallel.rows_of_problem(problem, 0), 0)
        with Ledger() as ledger:
            loss = run.total(run.step(batch).loss).item()
        outcome = parallel.Outcome([loss], states.full_grads(run.sync), states.full_tensors(run.sync))
        sent = {op: ledger.sent_bytes(op, "dp") for op in ("reduce_scatter", "all_gather")}
        sent |= {axis: ledger.sent_bytes(axis=axis) for axis in ("pp", "tp")}
        whole = sum(flat.numel for flat in run.sync.shards) * 8
        held = ledger.live_by_kind
        return run.mesh.rank("pp"), parallel.difference(outcome, reference, part=True), sent, whole, held

    model_bytes = 8 * sum(param.numel() for param in reference.params.values())
    for found in launch.run(lambda: [under(1), under(2)], ranks=8):
        for zero, sends, (stage, apart, sent, whole, held) in zip((1, 2), (1, m), found):
            assert apart < parallel.TOLERANCE
            assert sent["reduce_scatter"] == sends * whole * (ranks - 1) // ranks
            assert sent["all_gather"] == whole * (ranks - 1) // ranks
            assert sent["pp"] == m * activation  # forward from one stage, backward from the other
            loss = 3 * tokens if stage else 0  # of the cut vocabulary: three numbers per token
            assert sent["tp"] == m * (5 * activation + loss)  # a block's four, and the table's or the head's
            assert held["gradients"] == (whole if zero == 1 else whole // ranks)
            assert held["optimizer state"] == 2 * whole // ranks
            assert 0.23 < whole / model_bytes < 0.27  # 1/(pp tp): a stage has its table or its head


class Arithmetic(DispatchMode):
    """Counts the additions, products, quotients and roots of element-wise operators."""

    per_element = {"mul_": 1, "sqrt": 1, "div_": 1, "add_": 1, "lerp_": 3, "addcmul_": 3, "addcdiv_": 3}
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if cost := self.per_element.get(func.overloadpacket.__name__):
            self.count += cost * result.numel()
        return result


def test_weight_update_sharding():
    """Xu et al.: an all-reduce's bytes, 1/n of the update's arithmetic on each rank, the same weights."""

    def rank():
        group, problem = collectives.world(), untied()
        model, plain = problem.model(), problem.model()
        zero = Zero1(model, group, lambda shards: AdamW(shards, lr=1e-2))
        reducer = GradReducer(plain.parameters(), group)
        whole = AdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
        sent, spent = [], []
        ways = (model, zero, zero.optimizer, zero), (plain, whole, whole, reducer)
        for network, optimizer, update, sums in ways:
            with parallel.Traffic() as ledger:
                parallel.run_steps(problem, network, group, optimizer, sums)
            with Arithmetic() as work:
                update.step()
            sent.append(ledger.sent_bytes())
            spent.append(work.count)
        weights = torch.cat([param.detach().reshape(-1) for param in plain.parameters()])
        trained = sum(param.numel() for param in plain.parameters() if param.requires_grad)
        zero.publish()
        ours = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        spread = collectives.all_gather(ours.unsqueeze(0), group).sub(weights).abs().max().item()
        return sent, spent, trained, sum(flat.padding for flat in zero.shards), spread

    for (mine, replicated), (work, whole), trained, padding, spread in launch.run(rank, ranks=4):
        assert mine == replicated and padding == 0
        assert whole == 14 * trained and work == 14 * trained // 4  # AdamW: 14 operations per parameter
        assert spread < parallel.TOLERANCE


# ---- memory ----------------------------------------------------------------------------------------------


def memory_of(way, config):
    """(parameters Ψ, live bytes by kind after a step) in bfloat16."""
    group, make = collectives.world(), partial(AdamW, lr=1e-2, master_dtype=torch.float32)
    model = GPT(config, dtype=torch.bfloat16)
    count = sum(param.numel() for param in model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    if way == "data parallel":
        reducer, optimizer = GradReducer(model.parameters(), group), make(model.parameters())
    else:
        reducer = optimizer = made(way)(model, group, make)
    step, batch = accumulate(model, cross_entropy_sum, 1, reducer), Batch(tokens, tokens, torch.tensor(8))
    with Ledger() as ledger:
        for _ in range(2):
            train_step(step, batch, optimizer, reducer)
    return count, ledger.live_by_kind


FORMULAS = {
    "data parallel": lambda n: (2, 2, 12), "stage 1": lambda n: (2, 2, 12 / n),
    "stage 2": lambda n: (2, 2 / n, 12 / n), "stage 3": lambda n: (2 / n, 2 / n, 12 / n),
}  # fmt: skip
EVEN = GPTConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, max_positions=16, tied=False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_1_2_3_states_take_what_the_paper_says(ranks):
    """16Ψ, (4 + 12/N)Ψ, (2 + 14/N)Ψ, 16Ψ/N, kind by kind, on every rank; sizes divide, so to the byte."""

    def rank():
        return {way: memory_of(way, EVEN) for way in FORMULAS}

    for ways in launch.run(rank, ranks=ranks):
        for way, (count, live) in ways.items():
            expected = [round(share * count) for share in FORMULAS[way](ranks)]
            assert [live["parameters"], live["gradients"], live["optimizer state"]] == expected, way


def test_fsdp_peak_is_the_shards_and_the_largest_units():
    """Zhao et al.: sharded bytes plus the largest unit whole, plus its neighbour with prefetch; in forward and in
    backward, where the unit's gradient is whole as well, and its neighbour's is under way."""

    def one_way(prefetch, reshard):
        group = collectives.world()
        two = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        widths = nn.Sequential(*two)  # a unit of two matrices
        model = nn.Sequential(nn.Linear(64, 64, bias=False), widths, nn.Linear(64, 64, bias=False))
        sizes = [sum(param.numel() for param in unit.parameters()) * 4 for unit in model]
        make = lambda shards: torch.optim.SGD(shards, lr=0.1)  # noqa: E731
        zero = Zero3(model, group, make, prefetch=prefetch, reshard=reshard)
        with Ledger() as forward:
            loss = model(torch.zeros(1, 64)).sum()
        with Ledger() as backward:
            loss.backward()
            zero.finish()
        lives = [[live for _, live in ledger.timeline(gathered=True)] for ledger in (forward, backward)]
        kinds = ("gathered parameters", "buffers")
        peaks = [max(live[kind] for live in timeline) for timeline in lives for kind in kinds]
        both = max(live["buffers"] for _, live in backward.timeline())
        sent = [ledger.sent_bytes() for ledger in (forward, backward)]
        shards, left = sum(flat.shard.numel() * 4 for flat in zero.shards), backward.live_by_kind["buffers"]
        return sizes, peaks, both, sent, shards, left

    ways = [(prefetch, reshard) for prefetch in (False, True) for reshard in (False, True)]
    for found in launch.run(lambda: [one_way(*way) for way in ways], ranks=2):
        for (prefetch, reshard), (sizes, peaks, both, sent, shards, left) in zip(ways, found):
            pairs = max(a + b for a, b in zip(sizes, sizes[1:]))
            gathered = sum(sizes) if not reshard else pairs if prefetch else max(sizes)
            in_forward, others_in_forward, in_backward, _ = peaks
            assert in_forward == in_backward == gathered and others_in_forward == 0
            if reshard:  # the largest unit's gradient, and the next one's with the half that comes back
                assert both == gathered + sizes[1] + sizes[2] + sizes[2] // 2
            assert sent == [sum(sizes) // 2, sum(sizes) // 2 * (2 if reshard else 1)]  # 3, or 2, transfers
            assert left == 0 and shards == sum(sizes) // 2


def test_fsdp_trains_as_torchs_fully_shard():
    """The same model under torch's own ZeRO-3 on gloo: equal parameters after three steps."""

    def rank():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        group, x = collectives.world(), torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8)
        x = x + collectives.world().rank()
        ours, theirs = Nested(), Nested()
        zero = Zero3(ours, group, lambda shards: torch.optim.SGD(shards, lr=0.01))
        for layer in theirs.outer:
            fully_shard(layer, mesh=init_device_mesh("cpu", (group.size(),)))
        fully_shard(theirs, mesh=init_device_mesh("cpu", (group.size(),)))
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
        for _ in range(3):
            zero.zero_grad()
            ours(x).square().sum().backward()
            zero.finish()
            zero.step()
            optimizer.zero_grad()
            (theirs(x).square().sum() * group.size()).backward()  # theirs divides by the ranks
            optimizer.step()
        pairs = zip(ours.parameters(), theirs.parameters())
        return max((states.full_tensor(zero, a) - b.full_tensor()).abs().max().item() for a, b in pairs)

    assert max(launch.run(rank, ranks=2, checked=False)) < parallel.TOLERANCE


def test_zero_2_frees_what_it_has_sent():
    """Gradients alive at any moment of backward: the shards, a bucket filling up, and one under way."""

    def rank(stage, bucket_bytes):
        group = collectives.world()
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
        zero = stage(model, group, lambda shards: torch.optim.SGD(shards, lr=0.1), bucket_bytes)
        with Ledger() as ledger:
            model(torch.ones(1, 64)).sum().backward()
            zero.finish()
            zero.step()
        most = max(kinds["gradients"] for _, kinds in ledger.timeline())
        return most, ledger.live_by_kind["gradients"]

    matrix, n = 64 * 64 * 4, 4
    for most, left in launch.run(rank, Zero2, 2 * matrix, ranks=n):
        assert left == 16 * matrix // n and most <= left + 3 * matrix
    for most, left in launch.run(rank, Zero1, 2 * matrix, ranks=n):
        assert left == 16 * matrix


# Few and wide layers: bytes per parameter are the same however deep a model is.
WIDE = dict(vocab_size=50_176, d_model=11_520, num_layers=4, num_heads=90, max_positions=1024)
CONFIG_7B = GPTConfig(**WIDE, norm="layer", activation="gelu", positions="learned")


def test_zero_table_1_from_a_dry_run():
    """7.5B, 128B and 1T: bytes per parameter are counted on one rank of N, for 7.5 billion in bf16."""
    per_parameter = {}
    for n, ways in ((64, ("stage 1", "stage 2", "stage 3")), (1024, ("stage 3",))):
        for way in ways:
            count, live = dryrun.run(memory_of, way, CONFIG_7B, rank=n - 1, ranks=n)
            held = sum(live[kind] for kind in ("parameters", "gradients", "optimizer state"))
            per_parameter[way, n] = held / count
    assert abs(count / 7.5e9 - 1) < 0.02
    of_64 = [per_parameter[way, 64] for way in ("stage 1", "stage 2", "stage 3")]
    assert [round(7.5 * held, 1) for held in of_64] == [31.4, 16.6, 1.9]
    assert [round(128 * held, 1) for held in of_64] == [536.0, 284.0, 32.0]
    assert round(1000 * per_parameter["stage 3", 1024], 1) == 15.6


# ---- modules, recomputation, evaluation ------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        linear = lambda: nn.Linear(8, 8, dtype=torch.float64)  # noqa: E731
        layers = (nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh())) for _ in range(3))
        self.outer = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))  # belongs to no unit but the model
        self.recompute = recompute
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        for layer in self.outer:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x * self.scale


def test_nested_units_and_recomputation():
    """A unit inside a unit keeps its parameters; recomputation gathers nothing more; equal gradients."""

    def rank(recompute, nested):
        group = collectives.world()
        model, plain = Nested(recompute), Nested()
        frozen = model.outer[1][0].weight
        frozen.requires_grad_(False)
        units = [*model.outer, *(layer[1] for layer in model.outer)] if nested else None
        zero = Zero3(model, group, lambda shards: torch.optim.SGD(shards, lr=0.1), units)
        x = torch.ones(2, 8, dtype=torch.float64) * (group.rank() + 1)
        with Ledger() as ledger:
            model(x).square().sum().backward()
            zero.finish()
        wrong = isinstance(model.scale, ShardedParameter)
        for other in range(group.size()):
            plain(torch.ones(2, 8, dtype=torch.float64) * (other + 1)).square().sum().backward()
        worst = max(
            (states.full_grad(zero, ours) - theirs.grad).abs().max().item()
            for ours, theirs in zip(model.parameters(), plain.parameters())
            if ours is not frozen
        )
        whole = sum(flat.numel for flat in zero.shards) * 8
        return worst, ledger.sent_bytes("all_gather") / whole, wrong, ledger.live_by_kind["buffers"]

    for recompute in (False, True):
        for nested in (False, True):
            for worst, gathered, unreadable, left in launch.run(rank, recompute, nested, ranks=2):
                assert worst < parallel.TOLERANCE and gathered == 2 * (2 - 1) / 2 and unreadable and left == 0


def test_evaluation_gathers_once_and_leaves_nothing_whole():
    def rank():
        model = Nested()
        zero = Zero3(model, collectives.world(), lambda shards: torch.optim.SGD(shards, lr=0.1))
        x = torch.ones(2, 8, dtype=torch.float64)
        with Ledger() as ledger, torch.no_grad():
            y = model(x)
        with zero.whole():
            reading = torch.isfinite(model.scale).all().item()
        far, left = (y - Nested()(x)).abs().max().item(), ledger.live_by_kind["buffers"]
        return far, left, reading, isinstance(model.scale, ShardedParameter)

    for worst, left, readable_inside, unreadable_after in launch.run(rank, ranks=2):
        assert worst < parallel.TOLERANCE and left == 0 and readable_inside and unreadable_after


def test_flat_buffers_hold_every_element_once_and_pad_at_the_end():
    def rank():
        params = [nn.Parameter(torch.full((count,), float(count))) for count in (3, 1, 7)]
        flat = Flat(params, collectives.world())
        packed = flat.pack(params)
        return packed.tolist(), flat.local_shard(packed).tolist(), [x.tolist() for x in views(packed, params)]

    results = launch.run(rank, ranks=4)
    whole = [3.0] * 3 + [1.0] + [7.0] * 7 + [0.0]
    assert all(packed == whole and views == [[3.0] * 3, [1.0], [7.0] * 7] for packed, _, views in results)
    assert sum((own for _, own, _ in results), []) == whole


def test_zero_3_is_data_parallelism_after_20_steps_of_adam():
    def rank():
        problem = parallel.Problem(batch_sizes=(8,) * 20)
        ours = parallel.train_sharded(problem, made("stage 3"))
        theirs = parallel.train_on_rank(problem, lambda params, group: GradReducer(params, group, 3000))
        return parallel.difference(ours, theirs), math.isfinite(sum(ours.losses))

    for apart, finite in launch.run(rank, ranks=2):
        assert apart < parallel.TOLERANCE and finite


def test_nan_in_a_gradient_reaches_the_norm_of_every_rank():
    def rank():
        model = nn.Linear(4, 4)
        zero = Zero2(model, collectives.world(), lambda shards: AdamW(shards, lr=1e-2))

        def forward_backward(batch):
            loss = model(torch.full((1, 4), math.nan if collectives.world().rank() == 1 else 1.0)).sum()
            loss.backward()
            return loss.detach()

        return train_step(forward_backward, None, zero, zero, clip=1.0).norm.item()

    assert all(math.isnan(norm) for norm in launch.run(rank, ranks=2))


def test_what_cannot_be_is_refused():
    def load_another():
        zero = Zero1(nn.Linear(4, 4), collectives.world(), None)
        full = states.full_state_dict(zero)
        full["parameters"]["stranger"] = full["parameters"].pop("weight")
        states.load_full_state_dict(zero, full)

    refused = {
        "lacks ['weight'] and has ['stranger'] too many: it is of another model": load_another,
        "zero='GIG'; use 0": lambda: Strategy(dp=2, zero="GIG"),
        "zero=True; use 0": lambda: Strategy(dp=2, zero=True),
        "nodes=3 does not divide the nodes of dp=4": lambda: Strategy(dp=8, node=2, nodes=3, zero="III"),
        "nodes=2 with zero=1: nodes matter to hybrid sharding": lambda: Strategy(dp=4, nodes=2, zero=1),
        "dp=4, but the job has 2": lambda: parallelize(nn.Linear(4, 4), Strategy(dp=4), AdamW),
    }
    parallel.check_refusals(refused, ranks=2)
