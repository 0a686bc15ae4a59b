"""Hybrid sharding and ZeRO++: ten words equal one process and send what choices.py says; a quarter."""

import math

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel.hybrid import PARO_SHARDINGS, Hybrid
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, accumulate, train_step
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.data_parallel.zeropp import ZeroPlusPlus
from minitrain.systems.plan import sharding_choices as choices
from tests.parallel import TOLERANCE, Problem, Traffic, difference, one_process, train_parallel, train_sharded

EVEN = GPTConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, max_positions=16, tied=False)


def problems():
    return [Problem(batch_sizes=(12, 11)), Problem(batch_sizes=(12, 13), microbatches=2)]


@pytest.fixture(scope="module")
def references():
    return [one_process(problem) for problem in problems()]


def hybrid(mesh, word):
    return lambda model, group, make: Hybrid(model, mesh.group("intra"), mesh.group("inter"), make, word)


@pytest.mark.parametrize("nodes, places", [(2, 2), (2, 1), (1, 2)])
def test_every_word_equals_one_process(nodes, places, references):
    def rank():
        mesh = Mesh(inter=nodes, intra=places)
        return [train_sharded(problems()[1], hybrid(mesh, word)) for word in words]

    # where one of the two axes has one rank each takes half of the words
    words = PARO_SHARDINGS if nodes == places else PARO_SHARDINGS[nodes - 1 :: 2]
    for outcomes in launch.run(rank, ranks=nodes * places, timeout_s=120):
        for word, outcome in zip(words, outcomes, strict=True):
            assert difference(outcome, references[1]) < TOLERANCE, word


class OneHop(Hybrid):
    """The control: what nodes have added up inside is never added up between them."""

    def complete(self, flat):
        return flat.sum


def test_without_the_second_hop_nodes_train_apart(references):
    def rank():
        mesh = Mesh(inter=2, intra=1)
        groups = mesh.group("intra"), mesh.group("inter")
        return train_sharded(problems()[0], lambda model, group, make: OneHop(model, *groups, make))

    for outcome in launch.run(rank, ranks=2):
        assert difference(outcome, references[0]) > 1e-4


def account(make, microbatches=1, config=EVEN, mesh=None):
    """One step in bf16: (Ψ with padding, bytes by axis, live bytes by kind after it, all-reduces, elements of
    each buffer, all bytes)."""
    group = collectives.world()
    mesh = mesh or Mesh(inter=2, intra=group.size() // 2)
    model = GPT(config, dtype=torch.bfloat16)
    zero = make(model, mesh, lambda shards: AdamW(shards, lr=1e-2, master_dtype=torch.float32))
    tokens = torch.zeros(microbatches, 8, dtype=torch.long)
    step = accumulate(model, cross_entropy_sum, microbatches, zero)
    batch = Batch(tokens, tokens, torch.tensor(tokens.numel() * group.size()))
    with Ledger() as ledger:
        train_step(step, batch, zero, zero)
    numels = [flat.numel for flat in zero.shards]
    sent = {axis: ledger.sent_bytes(axis=axis) for axis in ("intra", "inter")}
    calls = ledger.num_calls("all_reduce", "inter")
    return sum(numels), sent, ledger.live_by_kind, calls, numels, ledger.sent_bytes()


def in_words(word):
    return lambda model, mesh, make: Hybrid(model, mesh.group("intra"), mesh.group("inter"), make, word)


def test_bytes_and_memory_of_every_word_are_the_formulas():
    """By axis and by kind, for 1 and 2 microbatches, on 2 nodes of 2."""

    def rank():
        mesh = Mesh(inter=2, intra=2)
        return {(word, m): account(in_words(word), m, mesh=mesh) for word, m in cases}

    cases = [
        (word, m) for n, word in enumerate(PARO_SHARDINGS) for m in (1, 2)[n % 2 :]
    ]  # 1: of every second
    cluster = choices.Cluster(ranks=4, per_node=2)
    for runs in launch.run(rank, ranks=4, timeout_s=120):
        for (word, m), (count, sent, live, *_) in runs.items():
            choice = choices.paro(word, cluster)
            expected = choices.traffic(choice, count, cluster, m)
            assert (sent["intra"], sent["inter"]) == (expected.intra_bytes, expected.inter_bytes), (word, m)
            memory = choices.memory_bytes(choice, count)
            for kind in ("parameters", "optimizer state"):
                assert live[kind] == memory[kind], word
            if word[1] == word[2]:  # else the gradient that is left is as finely cut as the optimizer state
                assert live["gradients"] == memory["gradients"], word


def test_a_dry_run_of_64_ranks_gives_the_formula_too():
    for word in ("NNN", "III", "GGG"):
        count, sent, *_ = dryrun.run(account, in_words(word), rank=37, ranks=64)
        cluster = choices.Cluster(64, 32)
        expected = choices.traffic(choices.paro(word, cluster), count, cluster)
        assert (sent["intra"], sent["inter"]) == (expected.intra_bytes, expected.inter_bytes)


def test_a_step_brings_nobody_what_did_not_change():
    """Frozen layers are gathered after a load, not after an update: (bytes of `step`, of `publish_all`)."""
    M = 64 * 64 * 8

    def rank(word):
        mesh = Mesh(inter=2, intra=2)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.float64) for _ in range(5)))
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(False)
        make = lambda shards: torch.optim.SGD(shards, lr=0.1)  # noqa: E731
        zero = Hybrid(model, mesh.group("intra"), mesh.group("inter"), make, word)
        model(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
        zero.finish()
        with Traffic() as update:
            zero.step()
        with Traffic() as all_of_it:
            zero.publish(frozen=True)
        return update.sent_bytes("all_gather"), all_of_it.sent_bytes("all_gather")

    # N -> G: from a quarter to a half across nodes, from a half to all inside; N -> I, I -> G: one of the two.
    for word, share in {"NNG": 3 / 4, "NII": 1 / 2, "IIG": 1 / 4, "GGG": 0}.items():
        assert dryrun.run(rank, word, ranks=4) == (3 * M * share, 5 * M * share)


def test_the_sharding_factor_trades_memory_for_bytes():
    """F = 1, 2, 4 on 4 ranks: parameter bytes are P/F exactly, bytes sent grow with F."""

    def rank():
        return [account(in_words(word)) for word in ("NNN", "III", "GGG")]

    for runs in launch.run(rank, ranks=4):
        held = [live["parameters"] for _, _, live, *_ in runs]
        assert held == [2 * runs[0][0] // factor for factor in (1, 2, 4)]
        M, totals = 2 * runs[0][0], [sum(sent.values()) for _, sent, *_ in runs]
        # 2M(W-1)/W; two gathers and a scatter in the node, 3M/2, and an all-reduce of M/2 across; 3M(W-1)/W
        assert totals == [2 * M * 3 // 4, 3 * M // 2 + M // 2, 3 * M * 3 // 4]
        across = [sent["inter"] for _, sent, *_ in runs]
        assert across[0] == across[1] < across[2]  # across nodes both add up shards


def test_mics():
    """Eight ranks on four nodes of two, two nodes to a copy (p = 4, k = 2): equal to one process; a node sends
    (p-k)/p of the whole to the other one in a gather, and across groups shards go once a step."""
    problem = Problem(batch_sizes=(16, 16), microbatches=2)
    reference = one_process(problem)

    def rank():
        outcome = train_parallel(problem, Strategy(dp=8, zero="III", node=2, nodes=2))
        steps = []
        for m in (1, 2):
            strategy = Strategy(dp=8, zero="III", node=2, nodes=2, microbatches=m, precision="bfloat16")
            run = parallelize(EVEN, strategy, lambda params: AdamW(params, lr=1e-2))
            with Ledger() as ledger:
                tokens = torch.zeros(m, 8, dtype=torch.long)
                run.step(Batch(tokens, tokens, torch.tensor(8 * 8 * m)))
            axes = ("node", "nodes", "inter")
            sent = {(op, axis): ledger.sent_bytes(op, axis) for op in OPS for axis in axes}
            numels = [flat.numel for flat in run.sync.shards]
            steps.append((sent, ledger.num_calls("all_reduce", "inter"), numels, ledger.live_by_kind))
        return difference(outcome, reference), steps

    p, k, W = 4, 2, 8
    cluster, choice = choices.Cluster(W, k), choices.Choice(p, p, p)
    for apart, steps in launch.run(rank, ranks=W):
        assert apart < TOLERANCE
        for m, (sent, reductions, numels, live) in zip((1, 2), steps):
            M = 2 * sum(numels)
            gathers = 2 * m  # for forward and for backward
            assert k * sent["all_gather", "nodes"] == gathers * M * (p - k) // p  # both ranks of a node
            assert k * sent["reduce_scatter", "nodes"] == m * M * (p - k) // p
            assert sent["all_gather", "node"] == gathers * M * (k - 1) // k
            assert sent["all_reduce", "inter"] == M // p and reductions == len(numels)  # whatever m is
            traffic = choices.traffic(choice, M // 2, cluster, m)
            totals = [sum(sent[op, axis] for op in OPS) for axis in ("node", "nodes", "inter")]
            assert (totals[0], totals[1] + totals[2]) == (traffic.intra_bytes, traffic.inter_bytes)
            assert live["parameters"] == M // p


OPS = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.slow
def test_words_with_nodes_that_share_a_copy_equal_one_process(references):
    """One copy on all four ranks, two nodes of two: every gather, scatter and update inside goes node by node."""

    def rank():
        strategies = [Strategy(dp=4, zero=word, node=2, nodes=2) for word in PARO_SHARDINGS]
        return [train_parallel(problems()[0], strategy) for strategy in strategies]

    for outcomes in launch.run(rank, ranks=4, timeout_s=120):
        for word, outcome in zip(PARO_SHARDINGS, outcomes, strict=True):
            assert difference(outcome, references[0]) < TOLERANCE, word


def test_hybrid_sharding_crosses_hosts_with_less_than_the_paper_says():
    """FSDP section 3.2.2, ranks W, G of them a host: a rank sends 2M(W-1)/W replicated, 3M(W-1)/W fully sharded,
    and with hybrid sharding 2M(W-1)/(GW) across hosts.

    The first two as they stand, over one ring of all ranks. The third is a ring through all W ranks too, of
    which ours takes the hops between hosts only: 2M(W-G)/(GW)."""

    def flat(technique):
        return lambda model, mesh, make: technique(model, collectives.world(), make)

    def rank():
        ways = (flat(Zero1), flat(Zero3), in_words("III"), in_words("NNN"), in_words("GGG"))
        return [account(way) for way in ways]

    for replicated, sharded, hybrid_of, *two_levels in launch.run(rank, ranks=4):
        M, W, G = 2 * hybrid_of[0], 4, 2
        assert replicated[5] == 2 * M * (W - 1) // W and sharded[5] == 3 * M * (W - 1) // W
        across = 2 * M * (W - G) // (G * W)
        assert hybrid_of[1]["inter"] == across and across * (W - 1) == 2 * M * (W - 1) // (G * W) * (W - G)
        assert [run[1]["inter"] for run in two_levels] == [across, across * 3 // 2]  # levels save as much


# ---- ZeRO++ ----------------------------------------------------------------------------------------------


def plus_plus(**settings):
    def make_zero(model, mesh, make):
        groups = collectives.world(), mesh.group("intra"), mesh.group("inter")
        return ZeroPlusPlus(model, *groups, make, **({"block": 16} | settings))

    return make_zero


def test_without_quantisation_it_is_zero_3(references):
    def rank():
        mesh = Mesh(inter=2, intra=collectives.world().size() // 2)

        def make(secondary):
            way = plus_plus(weight_bits=None, gradient_bits=None, secondary=secondary)
            return lambda model, group, optimizer: way(model, mesh, optimizer)

        return [train_sharded(problem, make(copy)) for copy, problem in zip((False, True), problems())]

    for ranks in (2, 4):
        for outcomes in launch.run(rank, ranks=ranks):
            for outcome, reference in zip(outcomes, references, strict=True):
                assert difference(outcome, reference) < TOLERANCE


def test_zero_plus_plus_sends_a_quarter_between_nodes():
    """3M -> 0.5M + 0 + 0.25M times (N-1)/N a node, and scales of 4 bytes a block, both ways."""

    ways = {
        "zero 3": in_words("GGG"),
        "all": plus_plus(),
        "qwZ": plus_plus(gradient_bits=None, secondary=False),
        "hpZ": plus_plus(weight_bits=None, gradient_bits=None),
        "plain": plus_plus(weight_bits=None, gradient_bits=None, secondary=False),
        "qgZ": plus_plus(weight_bits=None, secondary=False),
    }
    results = launch.run(lambda: {name: account(make) for name, make in ways.items()}, ranks=4)
    node = {name: sum(results[r][name][1]["inter"] for r in (0, 1)) for name in ways}  # ranks of node 0
    count, _, _, _, numels, _ = results[0]["all"]
    M = 2 * count
    scales = sum(4 * 4 * math.ceil(numel / 4 / 16) for numel in numels)  # of 4 slices, in blocks of 16
    half = lambda bytes_: bytes_ * (2 - 1) // 2  # noqa: E731  (N-1)/N
    assert node["zero 3"] == half(3 * M)
    assert node["hpZ"] == half(2 * M)  # the backward gather is gone
    more = [sum(results[0][name][2].values()) for name in ("hpZ", "plain")]
    assert more[0] - more[1] == 2 * count // 2  # for 2/k bytes a parameter, k ranks a node
    assert node["qwZ"] == half(2 * (M // 2 + scales) + M) and node["qgZ"] == half(2 * M + M // 4 + scales)
    assert node["all"] == half(M // 2 + M // 4 + 2 * scales)
    assert (node["all"] - half(2 * scales)) / node["zero 3"] == 0.25


def losses(make, steps=12):
    group = collectives.world()
    mesh = Mesh(inter=2, intra=2)
    model = GPT(EVEN, dtype=torch.float32)
    zero = make(model, mesh, lambda shards: AdamW(shards, lr=1e-2))
    tokens = (torch.arange(33) * 7 % 61).repeat(4, 1)[:, :17] + group.rank()
    tokens = tokens % 64
    step = accumulate(model, cross_entropy_sum, 1, zero)
    batch = Batch(tokens[:, :16], tokens[:, 1:], torch.tensor(64 * group.size()))
    found = (train_step(step, batch, zero, zero, 1.0).loss for _ in range(steps))
    return [collectives.all_reduce(loss, group).item() for loss in found]


def test_zero_plus_plus_trains_like_zero_3():
    def rank():
        return losses(lambda model, mesh, make: Zero3(model, collectives.world(), make)), losses(plus_plus())

    for exact, quantised in launch.run(rank, ranks=4):
        assert exact[-1] < 0.5 * exact[0] and quantised[-1] < 0.5 * quantised[0]
        assert max(abs(a - b) for a, b in zip(exact, quantised)) < 0.1 * exact[0]
        assert exact != quantised  # the control: something was quantised


# ---- what is refused -------------------------------------------------------------------------------------


def test_bad_input_gets_one_line():
    def rank():
        mesh, world = Mesh(inter=2, intra=1), collectives.world()
        intra, inter, model = mesh.group("intra"), mesh.group("inter"), nn.Sequential(nn.Linear(4, 4))
        sgd = lambda shards: torch.optim.SGD(shards, lr=0.1)  # noqa: E731
        for text, make in (
            ("sharding='GIN' is none of NNN, NNI, NNG", lambda: Hybrid(model, intra, inter, sgd, "GIN")),
            ("block=256 of shards", lambda: ZeroPlusPlus(model, world, intra, inter, sgd)),
            ("use Mesh", lambda: ZeroPlusPlus(model, intra, inter, world, sgd)),
            ("by_node is 2 x 2", lambda: Hybrid(model, intra, inter, sgd, by_node=(world, world))),
        ):
            with pytest.raises(ValueError, match=text):
                make()

    launch.run(rank, ranks=2)
