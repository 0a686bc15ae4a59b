"""Recomputation on ranks: the gradients of no recomputation bit by bit in every layout, and what is sent again."""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.placed import Places
from minitrain.compose.parallelize import parallelize
from minitrain.compose.passes import in_parts, recompute_in
from minitrain.course.saved_tensors import SavedTensors
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.gpt import GPT
from minitrain.model.layers import naive_attention
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.pipeline.sliced_attention import SliceMemory
from minitrain.tensor_parallel.model import cut_layers
from tests.parallel import Problem, Traffic, rows_of_problem, small

FIRST = "full,keep:core,drop:act+norm1+core,selective"  # blocks that differ: one training tries four words
OTHERS = "keep:qkv+out+up+experts,drop:act+norm1+core,keep:act,full", "every:2", "revolve:1"  # in turn
EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, router="gshard", balance_alpha=0.05, z_alpha=0.01, capacity_factor=1.5,
    shared_experts=1,
)  # fmt: skip
LAYOUTS = {
    "tp2 overlap": dict(tp=2, microbatches=2, overlap=True),
    "tp2 sequence overlap": dict(tp=2, sequence_parallel=True, overlap=True),
    "dp2 zero3": dict(dp=2, zero=3, microbatches=2), "dp4 hybrid": dict(dp=4, zero="III", node=2),
    "cp2 ring": dict(cp=2), "cp4 usp": dict(cp=4, core="usp", ulysses=2),
    "pp2 late": dict(pp=2, microbatches=4, post_validation=True),
    "pp2 slices": dict(pp=2, microbatches=2, schedule="seq1f1b", slices=2),
    "pp2 dualpipe": dict(pp=2, microbatches=4, schedule="dualpipe"),
    "pp2 tp2": dict(pp=2, tp=2, microbatches=2, schedule="zb_h1"),
    "dp2 ep2 chunks": dict(dp=2, ep=2, ep_chunks=3),
    "dp2 ep2 experts": dict(dp=2, ep=2, ep_travel="experts"),
    "dp2 pp2 ep2 pairs": dict(dp=2, pp=2, ep=2, microbatches=4, schedule="dualpipe"),
    "dp2 tp2 ep2": dict(dp=2, tp=2, ep=2, zero=1),
    "bfloat16 copies": dict(dp=2, zero=3, precision="bfloat16_jit"),
    "fp8 delayed": dict(tp=2, products="fp8_delayed", precision="bfloat16"),
    "fp8 tiles": dict(tp=2, products="fp8_tiles", sequence_parallel=True),
    "loss scale": dict(dp=2, precision="float16", loss_scale=2.0**12),
}  # fmt: skip


def trained(config: GPTConfig, strategy: Strategy) -> tuple:
    """A step that is not the first: losses, gradients, parameters. With a history of scales, or an update that
    the next step confirms, one before it."""
    problem = Problem(config=config, batch_sizes=(8, 9), microbatches=strategy.microbatches)
    torch.manual_seed(1000 + collectives.world().rank())
    make = partial(AdamW, lr=1e-2)
    run = parallelize(config, strategy, make, seed=3, frozen=["layers.1.norm1.weight"])
    steps = (0, 1) if strategy.products == "fp8_delayed" or strategy.post_validation else (1,)
    batches = [run.batch(rows_of_problem(problem, step), step) for step in steps]
    losses = [run.total(run.step(batch, 0.5).loss).item() for batch in batches]
    for memory in run.runner.hooks if run.runner else ():
        for cores in memory.cores.values() if isinstance(memory, SliceMemory) else ():
            assert not any(core.slices for core in cores)  # a second pass keeps no slice for anybody
    return losses, states.full_grads(run.sync), run.state_dict()["parameters"]


def differing(config: GPTConfig, base: dict, words) -> list[str]:
    """The words that change a bit."""
    base = dict(precision="float64", bucket_bytes=3000) | base
    losses, grads, params = trained(config, Strategy(**base))
    wrong = []
    for word in words:
        if base["precision"] == "bfloat16_jit":
            word = word.replace("act+norm1+core", "act+core")
        shares = base.get("tp", 1) > 1 and not base.get("sequence_parallel") and word in (FIRST, "every:2")
        more = dict(recompute=word, recompute_partition=shares)
        found = trained(config, Strategy(**(base | more)))
        same = found[0] == losses
        for ours, theirs in zip(found[1:], (grads, params)):
            same &= ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)
        wrong += [] if same else [word]
    return wrong


LARGE = ("dp2 pp2 ep2 pairs", "dp2 tp2 ep2", "pp2 tp2", "fp8 tiles")
NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in LAYOUTS]


@pytest.mark.parametrize("layout", NAMES)
def test_gradients_are_those_of_no_recomputation_bit_by_bit(layout):
    """A step with dropout, a frozen parameter, clipping, uneven batches and a tied table."""
    number = list(LAYOUTS).index(layout)
    words = (
        FIRST,
        *OTHERS[number % 3 : number % 3 + number % 2],
    )  # every second layout tries one of these, too
    experts = dict(experts=EXPERTS) if "ep" in LAYOUTS[layout] else {}
    config = small(num_layers=4, num_kv_heads=4 if "cp" in layout else 2, dropout=0.1, **experts)
    ranks = Strategy(**LAYOUTS[layout]).ranks
    for wrong in launch.run(differing, config, LAYOUTS[layout], words, ranks=ranks):
        assert not wrong, wrong


def test_with_other_masks_gradients_differ():
    """The control: the second pass of a rank that does not know step and rows drops others."""

    def rank():
        places = Places.again
        Places.again = lambda self: partial(self.during, 7, 3)
        try:
            return differing(small(num_layers=2, dropout=0.1), dict(tp=2), ("full", "drop:core"))
        finally:
            Places.again = places

    assert launch.run(rank, ranks=2) == [["full", "drop:core"]] * 2


# ---- what is sent again ----------------------------------------------------------------------------------


def calls_of(config: GPTConfig, base: dict, words, op: str, axis: str) -> dict:
    """word -> (calls, bytes) of a step's forward and backward; of several operations, {op: that}."""
    found = {}
    for word in words:
        more = dict(recompute=word.removesuffix(" in parts"), recompute_partition=word.endswith(" in parts"))
        run = parallelize(config, Strategy(**(dict(precision="float64") | base | more)), seed=3)
        problem = Problem(config=config, batch_sizes=(4,))
        batch = run.batch(rows_of_problem(problem, 0), 0)
        with Traffic() as ledger:
            run.forward_backward(batch)
        count = lambda op, ledger=ledger: (ledger.num_calls(op, axis), ledger.sent_bytes(op, axis))
        found[word] = {one: count(one) for one in op} if isinstance(op, tuple) else count(op)
    return found


def test_all_reduces_of_tensor_parallelism():
    """A block has two sums in forward and two in backward. Of the forward's, a second pass makes again the one
    behind attention; the one behind the MLP only where it does not stop before."""
    layers, rows, t, width, bytes_ = 3, 4, 8, 16, 8
    words = "none", "full", "keep:core", "keep:out", "selective", "drop:core+act+norm1"
    config = small(num_layers=layers, norm="layer")
    each = rows * t * width * bytes_  # 2(t-1)/t of it for two ranks
    for found in launch.run(calls_of, config, dict(tp=2), words, "all_reduce", "tp", ranks=2):
        calls, bytes_sent = found["none"]
        more = {word: (count - calls, sent - bytes_sent) for word, (count, sent) in found.items()}
        again = dict.fromkeys(words, 0) | {"full": 1, "keep:core": 1}
        assert more == {word: (layers * again[word], layers * again[word] * each) for word in words}


def test_gathers_of_sequence_parallelism():
    """In backward the layer gathers its inputs once more anyway; a second pass gathers them for its forward,
    and scatters attention's output. Gathers that end in a kept result are not made again."""
    layers, words = 3, ("none", "full", "keep:qkv", "keep:qkv+up", "keep:qkv+up+out", "drop:up")
    config, base = small(num_layers=layers, norm="layer"), dict(tp=2, sequence_parallel=True)
    again = {
        "all_gather": {"full": 2 * layers, "keep:qkv": layers, "drop:up": layers},
        "reduce_scatter": {"full": layers, "keep:qkv": layers, "keep:qkv+up": layers},
    }
    for found in launch.run(calls_of, config, base, words, tuple(again), "tp", ranks=2):
        for op, more in again.items():
            calls = {word: of[op][0] - found["none"][op][0] for word, of in found.items()}
            assert calls == dict.fromkeys(words, 0) | more


@pytest.mark.parametrize("core", ["ring", "ulysses"])
def test_selective_ckpt_pp(core):
    """LoongTrain's Selective Checkpoint++: of a layer the input, the core's output and lse are kept, and K and V
    (ring) or heads (Ulysses) do not travel again; with full they do, as often as in forward."""
    forward = {"ring": 4, "ulysses": 2}[core]  # calls a layer: two sends and receives; there and back
    layout = dict(ring="zigzag", ulysses="contiguous")[core]
    layers, rows, t, width, heads, bytes_ = 3, 4, 8, 16, 4, 8
    config = small(num_layers=layers, num_kv_heads=heads)
    words = ("none", "full", "keep:core", "selective")

    def rank():
        base = dict(cp=2, core=core, layout=layout)
        sent = calls_of(config, base, words, None, "cp")
        return sent, kept(config, core, layout), differing(config, base, ("keep:core",))

    for found, bytes_kept, wrong in launch.run(rank, ranks=2):
        assert not wrong
        assert found["keep:core"] == found["none"]
        once = (found["full"][0] - found["none"][0]), (found["full"][1] - found["none"][1])
        sent = layers * rows * t * width * bytes_ // 2 * {"ring": 2, "ulysses": 2}[core]
        assert once == (layers * forward, sent)
        if core == "ulysses":  # selective stops where the core's inside is found: its result stays at home
            assert found["selective"] == (found["full"][0] - layers, found["full"][1] - sent // 4)
        else:
            assert found["selective"] == found["full"]
        if core == "ring":
            own = rows * t // 2  # tokens of this rank
            assert bytes_kept["full"] == layers * own * width * 2
            assert bytes_kept["keep:core"] - bytes_kept["full"] == layers * own * (2 * width + 4 * heads)


def kept(config: GPTConfig, core: str, layout: str) -> dict:
    """word -> bytes that blocks keep, in bfloat16."""
    found = {}
    for word in ("full", "keep:core"):
        strategy = Strategy(cp=2, core=core, layout=layout, precision="bfloat16", recompute=word)
        run = parallelize(config, strategy, seed=3)
        batch = run.batch(rows_of_problem(Problem(config=config, batch_sizes=(4,)), 0), 0)
        blocks = torch.nn.ModuleList(run.model.layers[1:-1])
        x = torch.randn(*batch.tokens.shape, config.d_model, dtype=torch.bfloat16, requires_grad=True)
        with SavedTensors(blocks) as saved:
            plan = run.model.run_layers.args[0]
            plan[:] = [entry for entry in plan if entry[1] is not None]
            run.model(x, batch.positions)
        found[word] = saved.bytes
    return found


def test_rows_of_kept_experts_do_not_travel_again():
    """Forward: counts, rows there, rows back. With keep:experts none is sent twice."""
    words = ("none", "full", "keep:experts", "selective", "drop:experts")
    config = small(num_layers=2, experts=replace(EXPERTS, router="top_k", capacity_factor=0.0))
    for found in launch.run(calls_of, config, dict(dp=2, ep=2), words, "all_to_all", "ep", ranks=2):
        calls = {word: count - found["none"][0] for word, (count, _) in found.items()}
        assert calls == {"none": 0, "full": 6, "keep:experts": 0, "selective": 0, "drop:experts": 6}
        assert found["keep:experts"] == found["none"] and found["full"] == found["drop:experts"]


def test_second_passes_gather_no_parameters():
    """ZeRO-3 has the weights of a block whole while it is differentiated; of a segment of several blocks
    those in front are gathered for the second pass, and not again."""
    config, words = small(num_layers=4), ("none", "full", "keep:core", "drop:up+act", "every:2", "sqrt")
    for found in launch.run(calls_of, config, dict(dp=2, zero=3), words, "all_gather", "dp", ranks=2):
        assert len(set(found.values())) == 1, found


# ---- bytes -----------------------------------------------------------------------------------------------

PAPER = dict(norm="layer", activation="gelu", positions="learned", bias=True, dropout=0.1)


def kept_on_a_rank(s, b, h, a, words, sequence_parallel=False) -> dict:
    """Bytes in fp16 of one block cut over tp, means and deviations of norms left out."""
    mesh, found = Mesh(tp=collectives.world().size()), {}
    config = GPTConfig(d_model=h, num_heads=a, num_layers=1, **PAPER)
    for word in words:
        part = word.removesuffix(" in parts")
        model = GPT(config, layers=[1], attention=naive_attention, dtype=torch.float16)
        cut_layers(model.layers, h // a, 8, mesh.group("tp"), sequence_parallel=sequence_parallel)
        strategy = Strategy(tp=2, recompute=part, recompute_partition=part != word)
        recompute_in(model, strategy, mesh, Places())
        tokens = s // 2 if sequence_parallel else s
        x = torch.zeros(b, tokens, h, dtype=torch.float16, requires_grad=True)
        with SavedTensors(model) as saved:
            model(x, torch.arange(s))
        found[word] = saved.bytes - sum(item.bytes for item in saved.saved if item.shape[2:] == (1,))
    return found


def test_activation_bytes_under_tensor_parallelism(s=32, b=2, h=64, a=4):
    """Korthikanti's table 2 with t = 2, tensor by tensor: sbh(10 + 24/t), 34sbh/t, and 2sbh kept in t parts."""
    words, t, sbh = ("none", "selective", "full"), 2, s * b * h
    for found in launch.run(kept_on_a_rank, s, b, h, a, (*words, "full in parts"), ranks=2):
        core = 5 * a * s * s * b // t
        assert found["selective"] == 10 * sbh + 24 * sbh // t and found["none"] == found["selective"] + core
        assert (found["full"], found["full in parts"]) == (2 * sbh, 2 * sbh // t)
    for found in launch.run(kept_on_a_rank, s, b, h, a, words, True, ranks=2):
        assert found == {"none": 34 * sbh // t + core, "selective": 34 * sbh // t, "full": 2 * sbh // t}


def test_zero_r():
    """Pa: of the inputs that are kept each of t ranks has 1/t, for one more all-gather of B·T·D a block; Pa+cpu: and 1/t
    goes to its host. CB: what fuses gradients is as large for 8 layers as for 2."""
    for t, heads in ((2, 4), (4, 4)):
        layers, rows, length, bytes_ = 3, 4, 8, 8
        config = small(num_layers=layers, num_kv_heads=heads, norm="layer")

        def rank(t=t, config=config):
            found = calls_of(config, dict(tp=t), ("full", "full in parts"), "all_gather", "tp")
            kept, how = [], dict(tp=t, precision="float64", recompute="full")
            for parts, offload in product((False, True), ("none", "activations")):
                strategy = Strategy(recompute_partition=parts, offload=offload, **how)
                run = parallelize(config, strategy, seed=3)
                batch = run.batch(rows_of_problem(Problem(config=config, batch_sizes=(4,)), 0), 0)
                with Ledger() as ledger:
                    loss = run.loss_fn(run.model(batch.tokens), batch.targets)
                    kept.append((ledger.live_by_kind["activations"], ledger.copied_bytes()))
                del loss
            return found, kept[0][0] - kept[2][0], kept[1][1] - kept[3][1]

        whole = rows * length * config.d_model * bytes_
        for found, less, away in launch.run(rank, ranks=t):
            assert less == away == layers * (whole - whole // t)
            calls, sent = (b - a for a, b in zip(found["full"], found["full in parts"]))
            assert (calls, sent) == (layers, layers * whole * (t - 1) // t)
        assert launch.run(differing, config, dict(tp=t, offload="activations"), (FIRST,), ranks=t) == [[]] * t

    def fused(layers, bucket_bytes):
        strategy = Strategy(dp=2, zero=2, precision="float64", bucket_bytes=bucket_bytes)
        run = parallelize(small(num_layers=layers), strategy, lambda params: AdamW(params, lr=1e-2), seed=3)
        batch = run.batch(rows_of_problem(Problem(config=run.config, batch_sizes=(4,)), 0), 0)
        with Ledger() as ledger:
            run.forward_backward(batch)
            run.sync.finish()
        return max(call.payload_bytes for call in ledger._matching(None, "dp"))

    for bucket_bytes, constant in ((9_000, True), (25_000_000, False)):
        two, eight = (launch.run(fused, layers, bucket_bytes, ranks=2)[0] for layers in (2, 8))
        assert (two == eight <= bucket_bytes) == constant and eight > 8_000, (two, eight)


def test_parts_of_a_tensor_whose_size_no_rank_divides():
    def rank():
        x = torch.arange(35.0).view(5, 7)
        part, whole = in_parts(collectives.world())(x)
        return part.numel(), torch.equal(whole(part), x)

    assert launch.run(rank, ranks=4) == [(9, True)] * 4


def test_a_dry_run_is_the_real_run():
    """FLOPs, bytes and the peak by kind of a step."""

    def accounts():
        layouts = {"keep:core": dict(tp=2), "revolve:2": dict(cp=2), "drop:act+core": dict(dp=2, zero=3)}
        found = []
        for word, layout in layouts.items():
            with Ledger() as ledger:
                strategy = Strategy(precision="float64", recompute=word, **layout)
                run = parallelize(small(num_layers=3), strategy, partial(AdamW, lr=1e-2), seed=3)
                run.step(run.batch(rows_of_problem(Problem(), 0), 0), 0.5)
            found.append((ledger.flops, ledger.sent_bytes(), ledger.peak_by_kind))
            del run
            gc.collect()  # the next finds nothing of it
        return found

    assert launch.run(accounts, ranks=2)[1] == dryrun.run(accounts, rank=1, ranks=2)


def sums_of_a_block(word: str, early_stop: bool) -> tuple:
    """All-reduces of a block over tp, and gradients; the embedding's and the loss's are there without a block."""
    found = []
    for layers in (1, 2):
        run = parallelize(small(num_layers=layers, tied=False), Strategy(tp=2, precision="float64"))
        recompute_in(run.model, Strategy(recompute=word), None, run.places, early_stop=early_stop)
        with Traffic() as ledger:
            run.forward_backward(run.batch(rows_of_problem(Problem(), 0), 0))
        found.append(ledger.num_calls("all_reduce", "tp"))
    run.sync.finish()
    return found[1] - found[0], states.full_grads(run.sync)


def test_oases():
    """Sums of a block over tp: four without recomputation, six if all of it runs again, five if it stops before
    its last product; where what runs again ends before the sum, whose result is kept, four."""
    cases = ("none", True), ("full", False), ("full", True), ("keep:out", True)
    for (plain, grads), *others in launch.run(lambda: [sums_of_a_block(*case) for case in cases], ranks=2):
        assert [plain, *(number for number, _ in others)] == [4, 6, 5, 4]
        assert all(torch.equal(grads[name], again[name]) for _, again in others for name in grads)
