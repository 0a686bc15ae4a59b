"""Tensor parallelism in one dimension: equal to one process, bytes, activations, dropout, refusals."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.attention.placed import DropMask, Places, drop_by_place
from minitrain.compose.parallelize import parallelize
from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.layers import naive_attention
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch
from minitrain.plan.accounting import activation_bytes
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.collectives import world
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, placement, shard
from minitrain.systems.simulate.replay import replay
from minitrain.systems.tensor_parallel import random as tensor_random
from minitrain.systems.tensor_parallel.random import RandomStates
from minitrain.tensor_parallel import linear, sequence, vocabulary
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear
from minitrain.tensor_parallel.model import cut_attention, cut_layers, cut_mlp
from tests import parallel
from tests.parallel import TOLERANCE, Problem, check_refusals, difference, one_process, small, train_parallel

LIKE_GPT2 = dict(tied=False, norm="layer", positions="learned", activation="gelu", bias=True, num_kv_heads=4)
PARALLEL = dict(positions="alibi", residual="parallel", embedding_norm=True)
CONFIGS = {
    "tied, RoPE, SwiGLU, 2 K/V heads": small(vocab_size=32),
    "GPT-2: biases, learned positions": small(vocab_size=32, **LIKE_GPT2),
    "ALiBi, parallel residual, norm behind the table": small(vocab_size=32, **PARALLEL),
}
WAYS = {
    "plain": {}, "sequence": dict(sequence_parallel=True), "plain, overlap": dict(overlap=True),
    "sequence, overlap": dict(sequence_parallel=True, overlap=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def references():
    return {name: one_process(problem) for name, problem in problems().items()}


def problems():
    found = {name: Problem(config=config) for name, config in CONFIGS.items()}
    frozen = Problem(config=CONFIGS["GPT-2: biases, learned positions"], frozen="layers.1.mlp.up.weight")
    several = Problem(config=small(vocab_size=32), batch_sizes=(6, 7), microbatches=3)
    return found | {"a cut matrix is frozen": frozen, "3 microbatches": several}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(ranks, references):
    """Loss, every gradient, every parameter after two steps; tied, frozen, masked, clipped, uneven."""
    ways = WAYS if ranks == 2 else {way: WAYS[way] for way in ("plain", "sequence, overlap")}

    def rank():
        return {
            (way, name): train_parallel(problem, Strategy(tp=ranks, **settings))
            for number, (way, settings) in enumerate(ways.items())
            for place, (name, problem) in enumerate(problems().items())
            if (place + number + number // 2) % 2 == 0  # each in half of the ways
        }

    for outcomes in launch.run(rank, ranks=ranks):
        for (way, name), outcome in outcomes.items():
            assert difference(outcome, references[name]) < TOLERANCE, (way, name)


@pytest.mark.parametrize("broken", ["f", "g", "slices"])
def test_without_its_collective_it_fails(broken, references):
    def rank():
        if broken == "f":
            collectives.copy_to = lambda x, group: x
        elif broken == "g":
            collectives.reduce_from = lambda x, group: x
        else:  # norms that saw half of the tokens are not summed over tp
            fewer = lambda axes: [axis for axis in axes if axis != "tp" or len(axes) == 1]
            Mesh.group = lambda self, *axes, group=Mesh.group: group(self, *fewer(axes))
        return train_parallel(problem, Strategy(tp=2, sequence_parallel=broken == "slices"))

    name, problem = next(iter(problems().items()))
    assert max(difference(outcome, references[name]) for outcome in launch.run(rank, ranks=2)) > 1e-4


# ---- bytes -----------------------------------------------------------------------------------------------

B, T, D = 2, 16, 32
PLAIN = GPTConfig(vocab_size=64, d_model=D, num_layers=1, num_heads=4, max_positions=T)


LAYER_WAYS = {
    "plain": (linear.column, linear.row),
    "keeping": (sequence.column_keeping, sequence.row),
    "sequence": (sequence.column, sequence.row),
}


def layer_of(config, group, ways, core=naive_attention, dtype=torch.float64):
    """One block of a model, cut over the group."""
    column, row = ways
    block = GPT(config, dtype=dtype, layers=[1], attention=core).layers[0]
    cut_attention(block.attention, config.head_dim, group, column, row)
    cut_mlp(block.mlp, group, column, row)
    return block


def one_layer(way):
    """A layer forward and backward: (calls, bytes) by operation; what it gave; how much of it is here."""
    group = world()
    block = layer_of(PLAIN, group, LAYER_WAYS[way])
    x = torch.linspace(-1, 1, B * T * D, dtype=torch.float64).view(B, T, D)
    x = x if way == "plain" else x.chunk(group.size(), 1)[group.rank()]
    x = x.clone().requires_grad_()
    with Ledger() as ledger:
        y = block(x, torch.arange(T))
        y.square().sum().backward()
    calls = [event.op for event in ledger.events if isinstance(event, Issue)]
    ops = "all_reduce", "all_gather", "reduce_scatter"
    sent = {op: (calls.count(op), ledger.sent_bytes(op)) for op in ops}
    up, cut = block.mlp.up.weight, [param for param in block.parameters() if placement(param).shards]
    grad = full_tensor(up.grad, up.placement.shards)
    return sent, (y, x.grad, grad), sum(param.numel() for param in cut)


def whole_layer():
    block = GPT(PLAIN, dtype=torch.float64, layers=[1], attention=naive_attention).layers[0]
    x = torch.linspace(-1, 1, B * T * D, dtype=torch.float64).view(B, T, D).requires_grad_()
    y = block(x, torch.arange(T))
    y.square().sum().backward()
    matrices = sum(param.numel() for param in block.parameters() if param.dim() == 2)
    return (y, x.grad, block.mlp.up.weight.grad), matrices


@pytest.mark.parametrize("ranks", [2, 4])
def test_megatron_tp_1d(ranks):
    """A layer and its gradients as unsplit; four all-reduces of b·s·h, 8(t-1)/t·bsh elements; 1/t."""
    expected, numel = whole_layer()
    for sent, found, cut in launch.run(one_layer, "plain", ranks=ranks):
        assert all((ours - theirs).abs().max() < TOLERANCE for ours, theirs in zip(found, expected))
        once = 8 * 8 * (ranks - 1) // ranks * B * T * D
        assert sent == {"all_reduce": (4, once), "all_gather": (0, 0), "reduce_scatter": (0, 0)}
        assert cut * ranks == numel


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_layer_cut_along_the_sequence(ranks):
    """The same bytes, split into halves; and two gathers more where only the slice is kept."""
    expected, _ = whole_layer()
    unit = 8 * B * T * D * (ranks - 1) // ranks
    for way, gathers in (("keeping", 4), ("sequence", 6)):
        runs = launch.run(one_layer, way, ranks=ranks)
        for sent, found, _ in runs:
            gathered, scattered = (gathers, gathers * unit), (4, 4 * unit)
            assert sent == dict(all_reduce=(0, 0), all_gather=gathered, reduce_scatter=scattered)
            assert (found[2] - expected[2]).abs().max() < TOLERANCE
        for place in (0, 1):
            together = torch.cat([found[place] for _, found, _ in runs], 1)
            assert (together - expected[place]).abs().max() < TOLERANCE
        assert dryrun.run(one_layer, way, rank=1, ranks=ranks)[0] == runs[1][0]


def test_norms_may_all_be_frozen():
    def rank():
        strategy = Strategy(tp=2, sequence_parallel=True, precision="float64")
        run = parallelize(PLAIN, strategy, frozen=["*norm*"])
        tokens = torch.zeros(B, T, dtype=torch.long)
        run.forward_backward(Batch(tokens, tokens, torch.tensor(B * T)))
        run.sync.finish()
        learn = [param.requires_grad for param in run.model.parameters()]
        return learn.count(False) == 3 and learn == [p.grad is not None for p in run.model.parameters()]

    assert launch.run(rank, ranks=2) == [True, True]


# ---- activations -----------------------------------------------------------------------------------------

PAPER = dict(norm="layer", positions="learned", activation="gelu", bias=True, dropout=0.1)
GPT3 = GPTConfig(vocab_size=64, d_model=12288, num_layers=1, num_heads=96, max_positions=2048, **PAPER)


def kept(config, length, batch, way):
    """Bytes that a layer keeps for backward in bfloat16, without mean and deviation of its two norms; and
    bytes that this forward and its backward send."""
    group = world()
    block = layer_of(config, group, LAYER_WAYS[way], dtype=torch.bfloat16)
    tokens = length if way == "plain" else length // group.size()
    x = torch.zeros(batch, tokens, config.d_model, dtype=torch.bfloat16, requires_grad=True)
    with parallel.Traffic() as ledger:
        with SavedTensors(block) as saved:
            y = block(x, torch.arange(length))
        y.sum().backward()
    norms = sum(item.bytes for item in saved.saved if item.shape == (batch, tokens, 1))
    return saved.bytes - norms, ledger.sent_bytes()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_megatron_sp(ranks):
    """Activations, counted in what autograd saved, and bytes sent, both of one run of each path.

    sbh(10 + 24/t + 5as/ht) in plain tensor parallelism, sbh/t(34 + 5as/h) where slices are kept: that path
    gathers twice more in backward, 10/8 of the bytes. With the same bytes two whole inputs are kept."""
    config = GPTConfig(vocab_size=64, d_model=32, num_layers=1, num_heads=4, max_positions=16, **PAPER)
    s, b, h = 16, 3, 32
    plain = activation_bytes(s, b, h, 4, tensor_parallel=ranks, sequence_parallel=False)
    sliced = activation_bytes(s, b, h, 4, tensor_parallel=ranks, sequence_parallel=True)
    unit = 2 * s * b * h * (ranks - 1) // ranks  # of a gather or a scatter
    keeping = sliced + 2 * unit, 8 * unit
    expected = {"plain": (plain, 8 * unit), "keeping": keeping, "sequence": (sliced, 10 * unit)}
    for found in launch.run(lambda: {way: kept(config, s, b, way) for way in LAYER_WAYS}, ranks=ranks):
        assert found == expected


def test_activations_of_gpt3():
    """114 sbh on one device; at t = 8 it is 23, with sequence parallelism 14.25."""
    sbh = 2048 * 12288
    assert dryrun.run(kept, GPT3, 2048, 1, "plain", ranks=1)[0] == 114 * sbh
    assert dryrun.run(kept, GPT3, 2048, 1, "plain", ranks=8)[0] == 23 * sbh
    assert dryrun.run(kept, GPT3, 2048, 1, "sequence", ranks=8)[0] == 14.25 * sbh


# ---- the vocabulary --------------------------------------------------------------------------------------


def test_vocab_parallel():
    """Equal to the dense loss, gradient included; 3·b·s elements are summed and nothing of size V. Also where
    words are left over, and where the last of 4 ranks has none at all (9 words: 3, 3, 3, 0)."""

    def rank(words):
        torch.manual_seed(0)
        logits = 30 * torch.randn(B, T, words, dtype=torch.float64)
        targets = torch.randint(words, (B, T)).masked_fill(torch.rand(B, T) < 0.3, -100)
        dense, own = logits.clone().requires_grad_(), shard(logits, 2, world(), pad=True)
        cut, garbage = placement(own).shards, torch.full_like(own, 7.0)  # what padding says must not matter
        here = max(0, min(words - world().rank() * own.size(-1), own.size(-1)))
        own = torch.cat((own[..., :here], garbage[..., here:]), -1).requires_grad_()
        cross_entropy_sum(dense, targets).mul(0.25).backward()
        with Ledger() as ledger:
            loss = vocabulary.cross_entropy_sum(own, targets, world(), words)
            loss.mul(0.25).backward()
        nothing = vocabulary.cross_entropy_sum(own, torch.full((B, T), -100), world(), words)
        nothing.backward()
        low = vocabulary.cross_entropy_sum(own.detach().bfloat16(), targets, world(), words)
        apart = loss - cross_entropy_sum(logits, targets), full_tensor(own.grad, cut) - dense.grad
        low_apart = low - cross_entropy_sum(logits.bfloat16(), targets)
        assert nothing == 0 and not own.grad[..., here:].any() and low.dtype == torch.float32
        far = [x.abs().max().item() for x in (*apart, low_apart)]
        return far, ledger.payload_bytes(), ledger.sent_bytes()

    for ranks in (2, 4):
        for found in launch.run(lambda: [rank(words) for words in (40, 37, 9)], ranks=ranks):
            for (loss, grad, low), payload, sent in found:
                assert loss < 1e-9 and grad < TOLERANCE and low < 1e-2
                assert payload == 8 * 3 * B * T and sent == 2 * (ranks - 1) / ranks * 8 * 3 * B * T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_keeps_a_part_of_the_softmax(dtype):
    """[B, T, V/t] in float32 or more, and of each token where its target is (1 + 8 bytes), if it counts (1)."""

    def rank():
        logits, targets = torch.zeros(B, T, 1024, dtype=dtype).requires_grad_(), torch.zeros(B, T).long()
        with Ledger() as ledger:
            logits.sum(), targets.sum()
            before = ledger.live_bytes
            loss = vocabulary.cross_entropy_sum(logits, targets, world(), 4096)
            kept, peak = ledger.live_bytes - before, ledger.peak_bytes - before
        return loss.nbytes, kept, peak

    wide = torch.promote_types(dtype, torch.float32).itemsize
    loss, kept, peak = dryrun.run(rank, ranks=4)
    assert kept == B * T * (1024 * wide + 1 + 8 + 1) + loss and peak < 2.1 * B * T * 1024 * wide


def test_the_table_finds_its_rows():
    """Of a vocabulary that divides, of one with padding, of one that leaves the last rank without a word."""

    def rank(words):
        table = torch.arange(2 * words, dtype=torch.float64).view(words, 2)
        own = shard(nn.Parameter(table), 0, world(), pad=True)
        ids = torch.tensor([[0, 5, words - 1], [6, 6, 3]])
        rows = vocabulary.lookup(own, ids, "token", "vocab_size", group=world(), vocab_size=words)
        rows.sum().backward()
        counts = torch.bincount(ids.flatten(), minlength=words).double().unsqueeze(-1).expand(words, 2)
        grad = full_tensor(own.grad, own.placement.shards)
        return torch.equal(rows, table[ids]) and torch.equal(grad, counts) and own.size(0) == 3

    for words in (12, 11, 9):
        assert launch.run(rank, words, ranks=4) == [True] * 4


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_vocabulary_that_does_not_divide_trains_as_on_one_process(ranks):
    """63 words, and 9 (on 4 ranks the last has none): tied or not, plain and along the sequence. Padding is 0
    and stays 0 through AdamW's steps with decay."""
    ways = [Problem(config=small(vocab_size=words, tied=tied)) for words in (63, 9) for tied in (True, False)]

    def rank():
        cuts = (ranks == 2, ranks == 4) * 2  # the other way round on as many again
        strategies = [Strategy(tp=ranks, sequence_parallel=cut) for cut in cuts]
        found = [train_parallel(problem, strategy) for problem, strategy in zip(ways, strategies)]
        decaying = lambda params: AdamW(params, lr=1e-2, weight_decay=0.1)
        run = parallelize(ways[-1].config, Strategy(tp=ranks, precision="float64"), decaying)
        tokens = torch.arange(8).view(1, 8)
        run.step(Batch(tokens, tokens, torch.tensor(8)))
        tables = run.model.layers[0].tokens, run.model.layers[-1].out.weight
        here = max(0, min(9 - world().rank() * len(tables[0]), len(tables[0])))
        return found, [table[here:].abs().sum().item() for table in tables], here

    references = [one_process(problem) for problem in ways]
    results = launch.run(rank, ranks=ranks)
    for found, padding, _ in results:
        assert padding == [0.0, 0.0] and max(map(difference, found, references)) < TOLERANCE
    assert [here for *_, here in results] == {2: [5, 4], 4: [3, 3, 3, 0]}[ranks]


def test_padding_that_takes_part_in_the_softmax_is_found():
    """Control: as if the padded words were words."""
    problem = Problem(config=small(vocab_size=63))

    def rank():
        right = vocabulary.cross_entropy_forward
        vocabulary.cross_entropy_forward = lambda logits, targets, group, _: right(logits, targets, group, 64)
        return train_parallel(problem, Strategy(tp=2))

    reference = one_process(problem)
    assert min(difference(outcome, reference) for outcome in launch.run(rank, ranks=2)) > 1e-4


# ---- dropout ---------------------------------------------------------------------------------------------

DROPPED = small(vocab_size=32, **LIKE_GPT2, dropout=0.3)


def dropped_model(settings):
    """Loss and a gradient of a model with dropout, and its masks, in one process or of a rank of tp=2."""
    drawn, make = [], DropMask.keep

    def keep(mask, *args):
        drawn.append(make(mask, *args))
        return drawn[-1]

    DropMask.keep = keep
    tokens = torch.arange(16).view(2, 8)
    torch.manual_seed(world().rank())
    if settings is None:
        model, loss_fn = GPT(DROPPED, dtype=torch.float64), cross_entropy_sum
        drop_by_place(model.layers, Places(0))
    else:
        run = parallelize(DROPPED, Strategy(tp=2, precision="float64", **settings))
        model, loss_fn = run.model, run.loss_fn
    loss = loss_fn(model(tokens), tokens)
    forward = list(drawn)
    loss.backward()
    weight = model.layers[1].mlp.up.weight
    return loss.item(), full_tensor(weight.grad, placement(weight).shards), forward


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_that_of_one_process(sequence_parallel):
    """Masks agree where ranks hold the same and differ where they do not: put together as activations are
    cut, they are those of one process, which computes the very same."""

    def rank():
        return dropped_model(dict(sequence_parallel=sequence_parallel))

    (loss, grad, first), (_, _, second) = launch.run(rank, ranks=2)
    ((expected, expected_grad, masks),) = launch.run(dropped_model, None, ranks=1)
    assert len(first) == len(second) == len(masks) == 1 + 3 * DROPPED.num_layers
    for number, (one, other, whole) in enumerate(zip(first, second, masks)):
        # table; scores, dropout1, dropout2 of each block. Cut are heads of [B, H, T, T], tokens of [B, 1, T, D]
        cut = 1 if number % 3 == 1 else 2 if sequence_parallel else None
        assert torch.equal(one, other) == (cut is None)
        assert torch.equal(whole, one if cut is None else torch.cat((one, other), cut))
    assert abs(loss - expected) < 1e-9 and (grad - expected_grad).abs().max() < TOLERANCE


def test_streams_go_on_and_take_one_number_a_call_from_torchs():
    def rank():
        mesh = Mesh(dp=2, tp=2)
        states = RandomStates(7 * 2 + mesh.rank("dp"), mesh.group("tp"))
        torch.manual_seed(3)
        same, different = states.same(torch.rand), states.different(torch.rand)
        drawn = [same(4), different(4), same(4), different(4)]
        left = torch.rand(1).item()
        torch.manual_seed(3)
        for _ in drawn:
            torch.randint(2**62, ())
        return [draw.tolist() for draw in drawn], left == torch.rand(1).item()

    runs = [drawn for drawn, untouched in launch.run(rank, ranks=4) if untouched]
    assert len(runs) == 4
    for place in (0, 2):  # same: within tp, not across dp, and not over time
        assert runs[0][place] == runs[1][place] != runs[2][place] == runs[3][place]
    assert runs[0][0] != runs[0][2]
    assert len({tuple(draw) for drawn in runs for draw in (drawn[1], drawn[3])}) == 8


def test_a_call_is_known_again_until_enough_others_came():
    """What torch's generator gave is forgotten in the order in which it came."""

    def rank():
        tensor_random.REMEMBERED = 3  # this process is the launch's own
        states = RandomStates(7, world())
        draw = states.same(torch.rand)
        first = [(torch.manual_seed(seed), draw(2))[1].tolist() for seed in range(4)]
        again = [(torch.manual_seed(seed), draw(2))[1].tolist() for seed in (3, 2, 1, 0)]
        return len(states.numbers), [a == b for a, b in zip(first[::-1], again)]

    assert launch.run(rank, ranks=1) == [(3, [True, True, True, False])]


def test_recomputation_draws_the_same_masks():
    """torch's checkpoint around a cut block with streams: gradients as without."""

    def rank():
        grads, group = [], world()
        x = torch.randn(2, 8, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for again in (False, True):
            model = GPT(replace(PLAIN, dropout=0.5), dtype=torch.float64, layers=[1])
            cut_layers(model.layers, PLAIN.head_dim, PLAIN.vocab_size, group)
            block, own = model.layers[0], x.clone().requires_grad_()
            states = RandomStates(7, group)
            block.attention.core = states.different(block.attention.core)
            for module in (block.dropout1, block.dropout2):
                module.forward = states.same(module.forward)
            torch.manual_seed(5 + group.rank())
            positions = torch.arange(8)
            y = checkpoint(block, own, positions, use_reentrant=False) if again else block(own, positions)
            y.square().sum().backward()
            grads.append((y.detach(), own.grad))
        return all(map(torch.equal, *grads)), grads[0][0]

    (one, first), (other, second) = launch.run(rank, ranks=2)
    assert one and other and torch.equal(first, second)  # the ranks, seeded apart, go on holding the same


# ---- what is refused -------------------------------------------------------------------------------------


def cut(strategy=Strategy(tp=2), **settings):
    """A model over tp=2, with settings of its config."""
    return parallelize(replace(PLAIN, **settings), strategy)


def latent_layers():
    """By the pass itself; the strategy refuses them before it."""
    config = replace(PLAIN, kv_latent=8, rope_head_dim=4)
    cut_layers(GPT(config).layers, config.head_dim, config.vocab_size, world())


def heads(num_heads, num_kv_heads):
    config = replace(PLAIN, d_model=8 * num_heads, num_heads=num_heads, num_kv_heads=num_kv_heads)
    cut_layers(GPT(config).layers, config.head_dim, config.vocab_size, Mesh(tp=2).group("tp"))


def of_ids(ids, **settings):
    cut(**settings).model(ids)


def column(linear):
    return ColumnLinear(linear, world())


def row(linear):
    return RowLinear(linear, world())


def bias_cut_twice():
    layer = nn.Linear(32, 32)
    layer.bias = column(nn.Linear(8, 32)).bias
    row(layer)


LONG = torch.zeros(1, 7, dtype=torch.long)
SLICED = Strategy(tp=2, sequence_parallel=True)
REFUSED = {
    "ColumnLinear: out_features = 33 is not a multiple of the 2": lambda: column(nn.Linear(8, 33)),
    "RowLinear: in_features = 33 is not a multiple of the 2 ranks": lambda: row(nn.Linear(33, 8)),
    "query heads = 3 is not a multiple of the 2 ranks of tp; take 1": lambda: heads(3, 3),
    "3 K/V heads over 2 ranks of tp: neither divides the other; take 1 or 3": lambda: heads(6, 3),
    "T=7 tokens are not a multiple of tp=2; pad the sequence": lambda: of_ids(LONG, strategy=SLICED),
    "weight [16, 8] is cut already, along dim 0": lambda: column(column(nn.Linear(8, 32))),
    "bias [16] is cut already": bias_cut_twice,
    "token 64; vocab_size is 64 (0..63)": lambda: of_ids(torch.full((1, 4), 64)),
    "token 63; vocab_size is 63": lambda: of_ids(torch.full((1, 4), 63), vocab_size=63),  # a row of padding
    "target 64; the vocabulary is 64 (0..63)": lambda: vocabulary.cross_entropy_sum(
        torch.zeros(1, 4, 32), torch.full((1, 4), 64), world(), 64
    ),
    "tensor parallelism does not cut latent attention (kv_latent)": latent_layers,
}


def test_refusals_are_one_line_on_every_rank():
    check_refusals(REFUSED, ranks=2)


# ---- on machines -----------------------------------------------------------------------------------------


def test_tensor_parallelism_stays_inside_the_node():
    """A layer of GPT-3 on H100: what a rank does per second falls with t, most beyond its node of 8."""

    def rank():
        block = layer_of(GPT3, world(), (linear.column, linear.row), dtype=torch.bfloat16)
        x = torch.zeros(1, 2048, 12288, dtype=torch.bfloat16, requires_grad=True)
        with Ledger() as ledger:
            block(x, torch.arange(2048)).sum().backward()
        return ledger.events

    events = {ranks: dryrun.run(rank, ranks=ranks) for ranks in (1, 2, 4, 8, 16)}
    for name in ("h100", "h800"):
        step = {ranks: replay({0: events[ranks]}, machine(name)).step_s for ranks in events}
        efficiency = [step[1] / step[ranks] / ranks for ranks in events]
        falls = [before - after for before, after in zip(efficiency, efficiency[1:])]
        assert falls == sorted(falls) and efficiency[3] > 0.6 > 0.51 > efficiency[4]
