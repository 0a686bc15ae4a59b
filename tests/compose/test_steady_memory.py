"""Memory in the steady state: a step of training leaves what the step before it left, and needs what that
needed, by the ledger, whatever the strategy; and nothing is left in flight.

All steps are of one batch, at a rate of 0, so their accounts are the same if nothing leaks: bytes by kind and
number of blocks alive after steps 2 and 3, the peaks of steps 2 and 3, the objects of torch and minitrain.
The garbage collector is off: what only it would free is a leak until it comes.
"""

import gc
from collections import Counter
from functools import partial
from itertools import count

import pytest
import torch

from minitrain import collectives, launch
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.context.core_names import CORES
from minitrain.data_parallel import states
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.config import ExpertsConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT, Block, Stages, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, accumulate, train_step, valid_tokens
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules_by_name import CHUNKED, NAMES, SLICED
from minitrain.plan.strategy import PARO_SHARDINGS, Strategy
from minitrain.precision.policies import POLICIES, PRODUCTS
from minitrain.ranks.collectives.channel import Handle
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.process import PROCESS
from minitrain.systems.data_parallel.negotiated import NegotiatedReducer
from minitrain.systems.data_parallel.zeropp import ZeroPlusPlus
from minitrain.systems.pipeline.asynchronous import AsynchronousRunner, per_microbatch, sgd
from minitrain.systems.pipeline.sliced_attention import SliceMemory
from minitrain.systems.tensor_parallel import optimus
from minitrain.systems.tensor_parallel.rotated import rotate_linears
from tests.parallel import small

STEPS, ROWS, LENGTH = 3, 8, 8
OF_THE_ACCOUNT = ("minitrain.ranks.ledger", "minitrain.ranks.events", "minitrain.ranks.collectives.call_log")


# ---- one strategy on one rank ----------------------------------------------------------------------------


def training(config, strategy):
    """A step, and what is left behind the last, of which there must be nothing."""
    run = parallelize(config, strategy, lambda params: AdamW(params, lr=0.0), seed=3)

    def draw(step, rank, ranks):
        return random_tokens(0, rank, ranks, ROWS, LENGTH, config.vocab_size, seed=5)

    def step():
        run.total(run.step(run.batch(Rows(draw, ROWS, LENGTH), 0), 1.0).loss)

    if strategy.post_validation:
        step()  # the next ones confirm the one before

    def left():
        run.settle()
        if run.runner is None:
            return []
        memories = [hook for hook in run.runner.hooks if isinstance(hook, SliceMemory)]
        cores = [core for memory in memories for some in memory.cores.values() for core in some]
        return [*run.runner.in_flight, *run.runner.boundary, *(u for core in cores for u in core.slices)]

    return step, left, run


def what_differs(make):
    """Between steps, or is left behind the last, in words."""
    with Ledger() as ledger:
        step, left, *_ = make()
        gc.freeze()  # of objects only what steps make is looked at
        meter, at, objects = ledger._memory, [], []
        for _ in range(STEPS):
            at.append(len(meter._changes) // 3)
            step()
            objects.append(things())
        at.append(len(meter._changes) // 3)
        wrong = [f"left: {found}"] if (found := left()) else []
        wrong += in_flight()
    live = [meter.by_kind(after) | {"host": meter.by_kind(after, host=True)} for after in at]
    blocks = [alive(meter._changes, after) for after in at]
    kinds = dict(live_bytes=live[2:], blocks=blocks[2:], objects=objects[1:])
    for pool in ("device", "host"):
        totals = meter.totals(host=pool == "host")
        kinds[f"peak of the {pool}"] = [max(totals[a : b + 1]) for a, b in zip(at, at[1:])][1:]
    return wrong + [f"{what}: {v}" for what, v in kinds.items() if any(one != v[0] for one in v)]


def alive(changes, after):
    """How many blocks have memory after so many changes."""
    sizes = Counter()
    for number, size in zip(changes[1 : 3 * after : 3], changes[2 : 3 * after : 3]):
        sizes[number] += size
    return sum(size != 0 for size in sizes.values())


def things():
    """How many objects of torch and of minitrain there are, by type, but for those of the account itself, which
    grows. The last task of a thread may still be in its hands."""
    count = Counter(map(type, gc.get_objects()))
    modules = {kind: kind.__module__ for kind in count if kind.__name__ != "Task"}
    ours = [kind for kind, module in modules.items() if module.startswith(("torch", "minitrain"))]
    return {kind.__name__: count[kind] for kind in ours if not modules[kind].startswith(OF_THE_ACCOUNT)}


def in_flight():
    """Calls that nobody has waited for, and scratch memory that is still held for some."""
    handles = [thing for thing in gc.get_objects() if type(thing) is Handle and not thing._waited]
    left = [f"{len(handles)} handles that nobody has waited for"] if handles else []
    for channel in PROCESS.channels.values():
        left += [f"messages on {channel.axis}"] if channel.unwaited else []
        left += [f"scratch on {channel.axis}" for lane in channel.lanes if len(lane._scratch)]
    return left


def all_of(cases):
    """On one rank: {name of a case: what differs}, for {name: makes a step, and what is left behind it}."""
    gc.disable()  # this process is the launch's own
    return {name: wrong for name, make in cases.items() if (wrong := what_differs(make))}


def check(ranks, cases):
    assert launch.run(all_of, cases, ranks=ranks, timeout_s=300) == [{}] * ranks


# ---- every strategy --------------------------------------------------------------------------------------

PLAIN = dict(norm="layer", positions="learned", activation="gelu", num_kv_heads=4, vocab_size=32, d_ff=16)
DENSE, TIED = small(tied=False, **PLAIN), small(num_layers=2, **PLAIN)
MIXED = small(experts=ExpertsConfig(num_experts=4, top_k=2, router="balanced", expert_width=12), **PLAIN)
FP8 = dict(precision="bfloat16", products="fp8_tiles")


def of(config, *settings):
    """{the strategy's words: makes a run of it}."""
    plain = dict(precision="float64", bucket_bytes=3000)
    strategies = [Strategy(**(plain | one)) for one in settings]
    return {str(strategy): partial(training, config, strategy) for strategy in strategies}


def test_rows_are_shared_out():
    zero = [dict(dp=2, zero=zero, microbatches=2) for zero in (0, 1, 2, 3)]
    words = [dict(dp=2, node=2 - number % 2, zero=word) for number, word in enumerate(PARO_SHARDINGS)]
    check(2, of(DENSE, *zero, *words))


def test_numbers_are_narrow():
    """Precisions and products have one step's memory each; some with a rank's part of the states."""
    narrow = [dict(zero=zero_of(name), precision=name) for name in POLICIES if name != "float64"]
    products = [dict(precision="bfloat16", products=name) for name in PRODUCTS if name != "plain"]
    check(1, of(small(num_layers=1, tied=False, **PLAIN), *narrow, *products))


def zero_of(precision):
    return 1 if precision == "fp8_lm" else 3 if "stochastic" in precision or "jit" in precision else 2


def test_memory_is_saved(tmp_path):
    """What the host keeps, and what is computed again."""
    host = [
        dict(zero=1, offload="optimizer", delayed_update=True),
        dict(zero=2, offload="optimizer+activations"),
        dict(zero=3, offload="optimizer+parameters+activations", recompute="full"),
        dict(zero=3, offload="optimizer+parameters", delayed_update=True, microbatches=2),
    ]
    words = ["selective", "keep:core+qkv", "drop:act+norm1", "every:2", "sqrt", "revolve:1", "full,none"]
    again = [dict(recompute=word, zero=number % 4) for number, word in enumerate(words)]
    cases = of(DENSE, *(dict(dp=2) | one for one in (*host, *again)))
    check(2, cases | {f"saved: {way}": partial(saved, tmp_path / way, way) for way in ("sync", "lightcheck")})


def test_matrices_and_tokens_are_cut():
    tp = [
        dict(overlap=True),
        dict(sequence_parallel=True),
        dict(sequence_parallel=True, overlap=True, zero=0, recompute="selective"),
        dict(recompute="full", recompute_partition=True),
        dict(FP8, sequence_parallel=True),
    ]
    cp = [dict(cp=2, core=core, layout=CORES[core].layouts[-1], **inside(core)) for core in CORES]
    check(
        2, of(DENSE, *(dict(tp=2) | one for one in tp), *cp, dict(cp=2, core="ring", recompute="keep:core"))
    )


def inside(core):
    return dict(ulysses=2) if core == "usp" else dict(inner=2) if core in ("burst", "double_ring") else {}


ALIKE = (
    "gpipe greedy zb_h2 v_min v_half breadth_first zb_interleaved dualpipe seq1f1b".split()
)  # as their neighbours are played


@pytest.mark.slow
def test_layers_are_cut_by_other_lists():
    check(2, of(TIED, *(dict(pp=2, microbatches=4, schedule=name, **parts(name)) for name in ALIKE)))


def test_layers_are_cut():
    pp = [dict(schedule=name, **parts(name)) for name in NAMES if name not in ALIKE]
    more = [
        dict(recompute="stage"),
        dict(schedule="zb_h1", recompute="full"),
        dict(post_validation=True),
        dict(offload="activations"),
    ]
    check(2, of(TIED, *(dict(pp=2, microbatches=4) | one for one in (*pp, *more))))


def parts(name):
    return (
        dict(chunks=2) if name in CHUNKED and name != "hanayo" else dict(slices=2) if name in SLICED else {}
    )


def test_experts_are_spread():
    ways = [
        dict(zero=1), dict(zero=3, recompute="full"), dict(ep_chunks=2, zero=2), dict(ep_travel="experts"),
        dict(ep_travel="cheaper"), dict(ep_shadow=4), FP8,
    ]  # fmt: skip
    check(2, of(MIXED, *(dict(dp=2, ep=2) | one for one in ways)))


@pytest.mark.slow
def test_on_four_ranks():
    pairs = [dict(dp=2, pp=2, microbatches=4, schedule=name) for name in ("dualpipe", "dualpipe_v")]
    ep = [pairs[1] | dict(ep=2), dict(dp=4, ep=4, ep_node=2), dict(dp=2, tp=2, ep=2, zero=3)]
    cuts = [
        pairs[0] | dict(zero=2),
        dict(dp=2, pp=2, microbatches=2, schedule="zb_h1", zero=3),
        dict(cp=4, core="loongtrain", inner=2, ulysses=2),
        dict(cp=4, core="wallfacer", inner=2),
        dict(pp=2, cp=2, microbatches=2, schedule="terapipe", slices=2),
        dict(dp=2, tp=2, zero=3, sequence_parallel=True),
        dict(dp=4, node=2, zero="IGG"),
    ]
    on_a_grid = {"optimus": partial(cut_up, optimus.cut_block, "column", "row")}
    check(4, of(TIED, *cuts) | of(MIXED, *ep) | on_a_grid)


def saved(folder, way):
    """A checkpoint behind each step, and a step beside its copy."""
    one_step, _, run = training(DENSE, Strategy(dp=2, zero=2, precision="float64"))
    saver, numbers = Saver(Store(folder), policy=way), count()
    run.attach(saver)

    def step():
        saver.save(
            next(numbers), [*states.pieces(run.sync)], {}, {}
        )  # all but random states, which accounts omit
        one_step()
        saver.after_step()
        saver.finish()
        saver.waits.clear()

    return step, saver.close


# ---- techniques that no strategy names -------------------------------------------------------------------


def adamw(params):
    return AdamW(params, lr=0.0)


def reduced(make_reducer):
    """A replica on each rank, and what sums gradients over them."""
    model = GPT(DENSE, seed=3, dtype=torch.float64)
    return by_hand(model, adamw(model.parameters()), make_reducer(model.parameters(), collectives.world()))


def sharded(make_sync):
    model = GPT(DENSE, seed=3, dtype=torch.float64)
    sync = make_sync(model, collectives.world(), adamw)
    return by_hand(model, sync, sync)


def by_hand(model, optimizer, reducer):
    group = collectives.world()
    forward_backward = accumulate(model, cross_entropy_sum, 2, reducer)
    tokens, targets = random_tokens(0, group.rank(), group.size(), ROWS, LENGTH, 32, seed=5)

    def step():
        batch = Batch(tokens, targets, valid_tokens(targets, group))
        train_step(forward_backward, batch, optimizer, reducer, 1.0)

    return step, lambda: getattr(reducer, "_in_flight", None)


def plus_plus(model, group, make_optimizer):
    mesh = Mesh(inter=2, intra=1)
    return ZeroPlusPlus(model, group, mesh.group("intra"), mesh.group("inter"), make_optimizer, block=8)


def cut_up(cut, *names):
    """A layer that `cut` spreads over axes of the mesh, forward and backward."""
    mesh = Mesh(**dict.fromkeys(names, 2))
    layer = Block(TIED, "layers.1", dtype=torch.float64)
    cut(layer, *(mesh.group(name) for name in names))
    width = TIED.d_model // 2 ** (len(names) - 1)

    def step():
        layer.zero_grad()
        layer(torch.ones(2, LENGTH, width, dtype=torch.float64), torch.arange(LENGTH)).sum().backward()

    return step, list


def asynchronous():
    rank, schedule = collectives.world().rank(), one_f_one_b(2, 4)
    stages = Stages(DENSE, {rank: even(DENSE.num_layers, 2)[rank]}, seed=3, dtype=torch.float64)
    stages, policy = dict(stages.items()), per_microbatch()
    given = stages, schedule, collectives.world(), cross_entropy_sum, policy, sgd(0.0)
    run = AsynchronousRunner(*given, width=DENSE.d_model)
    tokens, targets = random_tokens(0, 0, 1, 4, LENGTH, 32, seed=5)
    return lambda: run(Batch(tokens, targets, torch.tensor(8))), lambda: [
        *run.in_flight,
        *run.boundary,
        *run.used,
    ]


def test_by_hand():
    zero3 = dict(later=dict(reshard=False), alone=dict(prefetch=False))
    cases = {f"zero3 {name}": partial(sharded, partial(Zero3, **how)) for name, how in zero3.items()}
    cases |= {"zero2": partial(sharded, partial(Zero2, bucket_bytes=3000))}
    cases |= {"zero++": partial(sharded, plus_plus), "asynchronous": asynchronous}
    cases |= {"bucketed": partial(reduced, partial(GradReducer, bucket_bytes=3000))}
    cases |= {"negotiated": partial(reduced, partial(NegotiatedReducer, fusion_bytes=3000))}
    cases |= {
        f"rotated {way}": partial(cut_up, partial(rotate_linears, in_place=way), "tp")
        for way in (False, True)
    }
    check(2, cases)


# ---- the control -----------------------------------------------------------------------------------------


def leaking(how):
    """A step that is not like the one before."""
    group, kept, number = collectives.world(), [], count(1)

    def step():
        x = torch.ones(next(number) if how == "peak" else 3)
        if how == "live":
            kept.append(x + 1)
        elif how == "a circle":
            x.itself = [x + 1, x]
        elif how == "objects":
            kept.append(torch.nn.Identity())
        elif how == "in flight":
            collectives.send(x, 1 - group.rank(), group, async_op=True)
            collectives.receive(x, 1 - group.rank(), group)
            collectives.all_reduce(x, group, async_op=True)

    return step, list


def test_control_what_leaks_is_found():
    signs = dict(live="live_bytes", peak="peak of the device", objects="objects")
    signs |= {"a circle": "blocks", "in flight": "handles"}

    def rank():
        gc.disable()
        return {how: " ".join(what_differs(partial(leaking, how))) for how in signs}

    for found in launch.run(rank, ranks=2):
        assert {how for how in signs if signs[how] in found[how]} == signs.keys()
