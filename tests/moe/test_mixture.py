"""A layer of experts in a model: what it computes, what it sends, what a step makes of its router, what it refuses."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.compose.run import saved_buffers
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT
from minitrain.model.mixture import MixtureOfExperts, RouterLosses, mixtures, move_biases
from minitrain.model.training.optim import AdamW
from minitrain.moe import experts, router
from minitrain.moe.dispatch import AllToAll, CutExperts, Tokens, place_experts
from minitrain.plan.accounting import active_parameters, forward_flops_per_token, parameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from tests.parallel import Traffic

SHAPE = dict(vocab_size=29, d_model=16, num_layers=2, num_heads=4, d_ff=24, max_positions=32)


def config(**experts) -> GPTConfig:
    return GPTConfig(**SHAPE, experts=ExpertsConfig(**(dict(num_experts=4, top_k=2) | experts)))


def layer(c: GPTConfig, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    mixture = MixtureOfExperts(c, c.experts.num_experts, dtype=torch.float64)
    for param in mixture.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return mixture


def over_ep(mixture: MixtureOfExperts, group) -> None:
    """Only this rank's experts stay."""
    for name, param in list(mixture.experts.named_parameters()):
        part = param.detach().chunk(group.size())[group.rank()].clone()
        setattr(mixture.experts, name, torch.nn.Parameter(part))
    place_experts(mixture.experts, group)
    mixture.hooks.experts = AllToAll(group)


def drawn(rows=3, length=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, SHAPE["d_model"], dtype=torch.float64, generator=generator)


# ---- what it computes ------------------------------------------------------------------------------------


def by_hand(mixture, x, choose):
    """Token by token. `choose(probs, logits)` -> {expert: weight}, in the order of its choices."""
    c, experts, out = mixture.config, mixture.experts, torch.zeros_like(x)
    room = math.inf
    if c.capacity_factor:
        room = math.ceil(c.top_k * x.shape[1] / c.num_experts * c.capacity_factor)
    for b, row in enumerate(x):
        chosen = [choose(F.linear(token, mixture.router.weight)) for token in row]
        held = dict.fromkeys(range(c.num_experts), 0)
        for turn in range(c.top_k):  # all first choices before all second ones
            for t, choices in enumerate(chosen):
                expert, weight = list(choices.items())[turn]
                held[expert] += bool(weight > 0)  # a second choice that is not visited takes no room
                if held[expert] <= room:
                    hidden = F.silu(row[t] @ experts.gate[expert]) * (row[t] @ experts.up[expert])
                    out[b, t] += weight * (hidden @ experts.down[expert])
    if mixture.shared is not None:
        shared = mixture.shared
        out = out + shared.down(F.silu(shared.gate(x)) * shared.up(x))
    return out


def mixtral(scores):
    best = scores.topk(2)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1)))


def switch(scores):
    return {int(scores.argmax()): scores.softmax(-1).max()}


def gshard(scores, draw=0.6):
    (first, weight), (second, other) = mixtral(scores).items()
    return {first: weight, second: other * (2 * other > draw)}


NARROW = dict(capacity_factor=0.75, shared_experts=2, expert_width=5)
ONE = dict(router="switch", top_k=1, capacity_factor=1.0)


@pytest.mark.parametrize("choose, experts", [(mixtral, {}), (mixtral, NARROW), (switch, ONE)])
def test_a_layer_is_what_a_loop_over_tokens_says(choose, experts):
    mixture, x = layer(config(**experts)), drawn()
    assert torch.allclose(mixture(x, torch.arange(8)), by_hand(mixture, x, choose), atol=1e-12, rtol=0)


def test_in_evaluation_nobody_is_dropped_and_nothing_is_counted():
    roomy, narrow = layer(config()), layer(config(capacity_factor=0.25))
    x, at = drawn(), torch.arange(8)
    assert not torch.equal(narrow(x, at), roomy(x, at))
    narrow.router.load = 0
    assert torch.equal(narrow.eval()(x, at), roomy.eval()(x, at)) and narrow.router.load == 0
    with torch.no_grad():  # a forward that will be done again with gradients
        assert not torch.equal(narrow.train()(x, at), roomy(x, at)) and narrow.router.load == 0


def test_a_token_at_a_negative_position_visits_nobody_and_changes_nobody():
    c = config(capacity_factor=0.5, balance_alpha=0.1, z_alpha=0.1)
    mixture, x = layer(c), drawn()
    at = torch.arange(8).repeat(3, 1)
    at[:, 5:] = -1
    y, noted = mixture(x, at), mixture.losses
    assert torch.equal(y[:, 5:], torch.zeros_like(y[:, 5:]))
    other = x.clone()
    other[:, 5:] = drawn(seed=2)[:, 5:]
    assert torch.equal(mixture(other, at)[:, :5], y[:, :5]) and torch.equal(mixture.losses, noted)


def test_what_the_settings_ask_of_a_router():
    x, at = drawn(), torch.arange(8)
    limited = config(router="deepseek", num_experts=8, top_k=4, route_nodes=4, node_limit=2)
    routing = layer(limited).route(x, at, False, 8)
    assert {len(set(row)) for row in (routing.experts // 2).tolist()} == {2}
    free = layer(config(router="deepseek", num_experts=8, top_k=4, route_nodes=4)).route(x, at, False, 8)
    assert max(len(set(row)) for row in (free.experts // 2).tolist()) > 2
    second = layer(config(router="gshard"))
    second.router.draws = torch.ones_like  # no weight of a second choice is above a half
    assert (second.route(x, at, False, 8).experts[:, 1] == -1).all()
    assert (second.eval().route(x, at, False, 8).experts >= 0).all(), "nothing is left to chance"
    half = MixtureOfExperts(limited, 8, dtype=torch.bfloat16)
    for param in half.parameters():
        torch.nn.init.normal_(param)
    assert half.router.bias.dtype == torch.float32 and half(x.bfloat16(), at).dtype == torch.bfloat16


@pytest.mark.parametrize("factor, room", [(0.0, 4), (0.5, 2), (9.0, 8)])
def test_experts_choose_within_a_row(factor, room):
    mixture, x = layer(config(router="expert_choice", capacity_factor=factor)), drawn()
    routing = mixture.route(x, torch.arange(8), False, 8)
    for row, chosen in zip(x, routing.experts.view(3, 8, -1)):
        alone = router.expert_choice(mixture.router.scores(row), room).experts
        width = alone.shape[1]
        assert torch.equal(chosen[:, :width], alone) and (chosen[:, width:] == -1).all()
    assert routing.counts.tolist() == [3 * room] * 4


def test_room_is_given_out_by_position_where_ranks_share_rows():
    """Two ranks with the tokens 0, 1, 6, 7 and 2, 3, 4, 5 of each row: who is dropped is as on one, and so is the loss."""

    def rank():
        mixture, group = layer(config(capacity_factor=0.5, balance_alpha=0.1)), collectives.world()
        x = drawn()
        at = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][group.rank()])
        y, loss = mixture(x, torch.arange(8))[:, at], mixture.losses
        mixture.hooks.tokens = Tokens(row_group=group, row_ranks=2)
        own = mixture(x[:, at], at.expand(3, 4))
        return (own - y).abs().max().item(), mixture.losses.item(), loss.item(), mixture.config.whole_rows

    (apart, one, whole, _), (other_apart, two, *_, wanted) = launch.run(rank, ranks=2)
    assert max(apart, other_apart) < 1e-12 and one + two == pytest.approx(whole, rel=1e-12) and wanted


def test_losses_are_sums_over_tokens_of_rows():
    c = config(balance_alpha=0.3, z_alpha=0.7)
    mixture, x = layer(c), drawn()
    mixture(x, torch.arange(8))
    wanted = 0.0
    for row in x:
        routing = router.top_k(mixture.router.scores(row), 2)
        wanted += 8 * router.balance_loss(routing, 0.3)
        wanted += 8 * router.z_loss(mixture.router.scores(row), 0.7)
    assert torch.allclose(mixture.losses, wanted, atol=1e-12, rtol=0)
    model = GPT(c, dtype=torch.float64)
    losses = RouterLosses({0: model.layers})
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert losses.collect() > 0 and losses.collect() is None, "taken once"


def test_the_bias_goes_up_where_few_came_and_is_trained_by_nobody():
    c = config(router="deepseek", bias_speed=0.5, num_experts=4, top_k=1)
    model = GPT(c, dtype=torch.float64)
    (first, second) = mixtures(model.layers)
    model(torch.zeros(2, 8, dtype=torch.int64) + torch.arange(8))
    load = first.router.load
    assert load.sum() == 16 and "bias" not in dict(first.router.named_parameters())
    move_biases(model.layers, lambda layer: ())
    assert torch.equal(first.router.bias, 0.5 * torch.sign(4.0 - load)) and first.router.load == 0
    names = [f"layers.{n}.mlp.router.bias" for n in (1, 2)]
    assert list(saved_buffers(model.layers)) == names and second.router.bias.dtype == torch.float64
    model(torch.zeros(2, 8, dtype=torch.int64))
    RouterLosses({0: model.layers}).forget()
    assert first.router.load == second.router.load == 0 and first.losses is None, "done again, counted again"
    router_of_half = GPT(c, dtype=torch.bfloat16).layers[1].mlp.router
    assert router_of_half.bias.dtype == torch.float32, "steps of 0.001 would be lost"
    x = torch.randn(9, c.d_model, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    exact = x.float() @ router_of_half.weight.float().T
    assert torch.equal(router_of_half.scores(x), exact), "a few bits decide where a token goes"


def test_which_blocks_have_experts():
    def counts(layers=8, **values):
        experts = ExpertsConfig(**(dict(num_experts=4) | values))
        model = GPT(GPTConfig(**(SHAPE | dict(num_layers=layers)), experts=experts), device="meta")
        return [len(block.mlp.experts.up) if mixtures([block]) else 0 for block in model.layers[1:-1]]

    assert counts() == [4] * 8 and counts(expert_every=2) == [0, 4] * 4
    assert counts(dense_first=3) == [0, 0, 0, 4, 4, 4, 4, 4]
    assert counts(expert_every=2, pyramid_layers=2, pyramid_experts=16) == [0, 4, 0, 4, 0, 16, 0, 16]


def test_an_expert_has_the_same_weights_on_any_number_of_ranks():
    whole = GPT(config(), seed=3)
    for parts in (2, 4):
        for part in range(parts):
            ours = GPT(config(), seed=3, expert_part=(part, parts)).layers[1].mlp.experts
            size = 4 // parts
            for name, param in ours.named_parameters():
                theirs = whole.layers[1].mlp.experts.get_parameter(name)
                assert torch.equal(param, theirs[part * size : (part + 1) * size])
    up = whole.layers[1].mlp.experts.up
    assert not torch.equal(up[0], up[1]), "each has a seed of its own"


# ---- systems ---------------------------------------------------------------------------------------------


def test_moe_concept():
    """Parameters grow with E, arithmetic with k, Mixtral's are those published; dispatched, a token is what the dense
    loop over tokens above makes of it."""
    few, many = config(num_experts=4, router="balanced"), config(num_experts=8, router="balanced")
    tokens, flops = torch.zeros(1, 16, dtype=torch.int64), []
    for c in (few, many):
        with Ledger() as ledger:
            GPT(c)(tokens)
        flops.append(ledger.flops - 2 * 16 * 2 * SHAPE["d_model"] * c.experts.num_experts)  # without routers
    assert flops[0] == flops[1]
    expert = 3 * SHAPE["d_model"] * SHAPE["d_ff"]
    assert parameters(many) - parameters(few) == 2 * 4 * (expert + SHAPE["d_model"])
    assert active_parameters(many) - active_parameters(few) == 2 * 4 * SHAPE["d_model"], "of routers"
    published = presets["mixtral-8x7b"]
    assert (parameters(published), active_parameters(published)) == (46_702_792_704, 12_879_925_248)
    mixture, x = layer(config()), drawn()
    assert torch.allclose(mixture(x, torch.arange(8)), by_hand(mixture, x, mixtral), atol=1e-12, rtol=0)


def test_switch_transformer():
    """The loss is alpha where loads are even and alpha·E where one expert has all, and going down it evens loads out; a
    layer is a loop over tokens, from which those without room come back as zeros."""
    flat, E = torch.zeros(64, 8, dtype=torch.float64), 8
    even = router.balanced(flat, 1, torch.arange(64)[None])
    assert router.balance_loss(even, 0.01).item() == pytest.approx(0.01, abs=1e-15)
    one = router.switch(flat + 60.0 * F.one_hot(torch.tensor(3), E))
    assert router.balance_loss(one, 0.01).item() == pytest.approx(0.01 * E, rel=1e-12)
    assert router.capacity_of(100, 8, 1, 1.25) == math.ceil(100 / 8 * 1.25) == 16
    scores = (flat + torch.eye(8).repeat(8, 1) + torch.arange(8) / 5).requires_grad_()  # the last are busy
    (slope,) = torch.autograd.grad(router.balance_loss(router.switch(scores), 1.0), scores)
    assert slope.sum(0)[-1] > 0 > slope.sum(0)[0], "down for the busiest, up for who has least"
    mixture, x = layer(config(router="switch", top_k=1, capacity_factor=0.5)), drawn(rows=4)
    y = mixture(x, torch.arange(8))  # an expert takes one token of a row
    assert torch.allclose(y, by_hand(mixture, x, switch), atol=1e-12, rtol=0)
    assert (y == 0).all(-1).sum() >= 4 * (8 - 4), "only the residual is left"


def test_token_drop_pad():
    """A buffer of equal room, filled by hand: what overflows is dropped, what stays empty is multiplied all the same; and
    what comes out are the products of the tokens that the router keeps."""
    E, T, C, D = 8, 64, 10, 12
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores, x, up, down = draw(T, E) - torch.arange(E) * 0.5, draw(T, D), draw(E, D, 4), draw(E, 4, D)
    kept, room, buffer = router.switch(scores).within(C), [[] for _ in range(E)], x.new_zeros(E, C, D)
    for token, expert in enumerate(scores.argmax(1).tolist()):
        if len(room[expert]) < C:
            buffer[expert, len(room[expert])] = x[token]
            room[expert].append(token)
    tokens = sum(room, [])
    wanted = torch.cat([y[: len(those)] for y, those in zip(F.gelu(buffer @ up) @ down, room)])
    with Ledger() as ledger:
        ours = experts.padded(x[tokens], kept.counts, up, down, room=C)
    assert torch.allclose(ours, wanted, atol=1e-12, rtol=0) and ledger.flops == 4 * E * C * up[0].numel()
    assert (
        sorted(tokens) == (kept.experts[:, 0] != router.NOWHERE).nonzero()[:, 0].tolist() and len(tokens) < T
    )
    assert int((buffer == 0).all(-1).sum()) == E * C - int(kept.counts.sum()) > 0


def test_gshard():
    """8 experts on 4 ranks are a loop over tokens, with a second choice where a draw is below twice its weight and no
    more room than 3/4 of the mean; of what nothing is dropped two all-to-alls in each pass send k·T·h·(n-1)/n."""

    def rank():
        group, found = collectives.world(), []
        for kind, factor in (("gshard", 0.75), ("balanced", 4.0)):
            c = config(router=kind, num_experts=8, capacity_factor=factor)
            whole, ours, x = layer(c), layer(c), drawn(rows=2, length=16, seed=group.rank())
            ours.router.draws = partial(torch.full_like, fill_value=0.6, dtype=torch.float64)
            over_ep(ours, group)
            x, alone = (x.clone().requires_grad_() for _ in range(2))
            wanted = by_hand(whole, alone, gshard) if kind == "gshard" else whole(alone, torch.arange(16))
            wanted.sum().backward()
            with Traffic() as ledger:
                y = ours(x, torch.arange(16))
                forward = ledger.num_calls("all_to_all"), ledger.sent_bytes("all_to_all")
                y.sum().backward()
            both = ledger.num_calls("all_to_all"), ledger.sent_bytes("all_to_all")
            ends = (wanted, alone.grad, whole.router.weight.grad), (y, x.grad, ours.router.weight.grad)
            found.append((max((a - b).abs().max().item() for a, b in zip(*ends)), forward, both))
        return found

    counts = 8 * 8 * 3 // 4  # 8 bytes per expert, once
    moved = 2 * 32 * SHAPE["d_model"] * 8 * 3 // 4
    for (two_best, *_), (balanced, forward, both) in launch.run(rank, ranks=4):
        assert max(two_best, balanced) < 1e-12
        assert forward == (3, counts + 2 * moved) and both == (5, counts + 4 * moved)
    assert router.capacity_of(32, 8, 2, 1.0) == 2 * 32 // 8


# ---- what it sends ---------------------------------------------------------------------------------------


@cache
def sent():
    """Of every rank of dp 2 x tp 2 with 2 ranks of ep: bytes over ep and tp of a layer, forward and both, with
    duplicates dropped and without; and the routing table."""

    def rank():
        mesh, c = Mesh(dp=2, tp=2), config()
        ep, tp, found = mesh.group("dp"), mesh.group("tp"), {}

        def made(drops, **cut):
            mixture = layer(c)
            over_ep(mixture, ep)
            if drops:
                mixture.experts = CutExperts(mixture.experts, tp)
                mixture.hooks.tokens = Tokens(tp, **cut)
            return mixture

        # tokens that stand cut over tp already: theirs are the positions that count, padding at the end included
        x, at, part = drawn(rows=2, length=8, seed=ep.rank()), torch.arange(8).repeat(2, 1), 4 * tp.rank()
        at[:, 5:] = -1
        sliced = made(True, sequence_parallel=True)(x[:, part : part + 4], at)
        assert (sliced - made(False)(x, at)[:, part : part + 4]).abs().max() < 1e-12
        for drops in (True, False):
            mixture = made(drops)
            x = drawn(rows=2, length=9, seed=ep.rank()).requires_grad_()
            with Traffic() as ledger:
                y = mixture(x, torch.arange(9))
                forward = ledger.sent_bytes("all_to_all", "dp")
                y.square().sum().backward()
            both = ledger.sent_bytes("all_to_all", "dp"), ledger.sent_bytes("all_to_all", "tp")
            found[drops] = (y.detach(), x.grad, forward, *both)
        table = router.top_k(layer(c).router.scores(x.flatten(0, 1)), 2).experts.view(2, 9, 2)
        return found, table

    return launch.run(rank, ranks=4)


def test_deepspeed_ted():
    """Duplicates are dropped under tp: the same output, exactly 1/tp of the bytes over ep. Forward, a rank sends its tokens' choices that are elsewhere, and back what others chose here."""
    D, counts_bytes = SHAPE["d_model"], 2 * 8
    results, slices = sent(), (slice(0, 5), slice(5, 9))  # 9 tokens on 2 ranks of tp
    for number, (found, table) in enumerate(results):
        data, tensor = divmod(number, 2)
        (y, dx, *_), (twice, dx_twice, *_) = found[True], found[False]
        assert torch.allclose(y, twice, atol=1e-12) and torch.allclose(dx, dx_twice, atol=1e-12)
        away, here = table // 2 != data, results[2 * (1 - data)][1] // 2 == data
        assert found[False][2] == int(away.sum() + here.sum()) * D * 8 + counts_bytes
        part = slices[tensor]
        assert found[True][2] == int(away[:, part].sum() + here[:, part].sum()) * D * 8 + counts_bytes
        assert all(found[drops][3] - counts_bytes == 2 * (found[drops][2] - counts_bytes) for drops in found)
    # over the ranks of tp, dropping leaves exactly one of t
    rows = {drops: sum(found[drops][3] - counts_bytes for found, _ in results) for drops in (True, False)}
    assert rows[False] == 2 * rows[True] > 0


def test_rows_are_gathered_over_tp_and_their_sums_scattered():
    D, results = SHAPE["d_model"], sent()
    for number, (found, _) in enumerate(results):
        data, tensor = divmod(number, 2)

        def rows_at(part):
            """At this rank of ep, from the tokens of one rank of tp: of both ranks of ep."""
            tables = [results[2 * source][1].split((5, 4), 1)[part] for source in (0, 1)]
            return sum(int((table // 2 == data).sum()) for table in tables)

        mine, theirs = rows_at(tensor), rows_at(1 - tensor)
        assert found[True][4] == 2 * (mine + theirs) * D * 8, "in and out, forward and backward"


# ---- in a run --------------------------------------------------------------------------------------------


def test_a_state_goes_from_any_layout_to_any_other_with_the_biases_of_its_routers():
    c = config(router="deepseek", bias_speed=0.01, shared_experts=1)
    first, then = Strategy(dp=2, tp=2, ep=2, zero=1), Strategy(dp=2, pp=2, ep=2, zero=3, schedule="zb_h1")

    def rank(strategy, state=None):
        strategy = replace(strategy, precision="float64")
        run = parallelize(c, strategy, partial(AdamW, lr=1e-2), seed=4)
        rows = Rows(lambda step, r, n: random_tokens(step, r, n, 4, 8, 29, seed=5), 4, 8)
        if state is not None:
            run.load_state_dict(state)
        losses = [run.total(run.step(run.batch(rows, step)).loss).item() for step in range(2)]
        return losses, run.state_dict()

    one, after = launch.run(rank, Strategy(), ranks=1)[0]
    results = launch.run(rank, first, ranks=4)
    assert all(abs(a - b) < 1e-12 for losses, _ in results for a, b in zip(losses, one))
    name = "layers.2.mlp.router.bias"
    assert after["parameters"][name].any()
    for _, state in results:
        torch.testing.assert_close(state["parameters"], after["parameters"], rtol=0, atol=1e-12)
    wanted, _ = launch.run(rank, Strategy(), after, ranks=1)[0]
    resumed = launch.run(rank, then, results[3][1], ranks=4)
    assert all(abs(a - b) < 1e-12 for losses, _ in resumed for a, b in zip(losses, wanted))


PUBLISHED = [("deepseek-v3", 64, 671_026_404_352, 36_625_603_584)]
PUBLISHED += [("mixtral-8x7b", 8, 46_702_792_704, 12_748_853_248)]


@pytest.mark.parametrize("preset, ranks, total, active", PUBLISHED)
def test_presets_dry_run_on_ranks_that_share_out_their_experts(preset, ranks, total, active):
    """Parameters of all experts, FLOPs of the active ones (on meta unfused), bytes of k choices a token."""
    c, length = presets[preset], 32  # of which every expert gets as many choices

    def rank():
        run = parallelize(c, Strategy(dp=ranks, ep=ranks, precision="bfloat16"), device="meta")
        tokens = lambda s, r, n: random_tokens(s, r, n, ranks, length, c.vocab_size, seed=0)
        batch = run.batch(Rows(tokens, ranks, length), 0)
        with Ledger() as ledger:
            run.evaluate(batch)
        routed = mixtures(run.model.layers)
        spread = sum(param.numel() for layer in routed for param in layer.experts.parameters())
        counts = len(routed) * c.experts.num_experts * 8 * (ranks - 1) // ranks
        rows = ledger.sent_bytes("all_to_all", "ep") - counts
        return sum(p.numel() for p in run.model.parameters()), spread, ledger.flops, rows, len(routed)

    here, spread, flops, rows, layers = dryrun.run(rank, rank=ranks // 3, ranks=ranks)
    assert here + (ranks - 1) * spread == parameters(c) == total
    assert active_parameters(c, token_table=False) == active
    assert flops == length * forward_flops_per_token(c, length, causal="square")
    away = length * c.experts.top_k * (ranks - 1) // ranks
    assert rows == layers * 2 * away * c.d_model * 2, "there and back"


# ---- bad input -------------------------------------------------------------------------------------------

MOE, CHOOSING = config(), config(router="expert_choice")
PYRAMID = config(pyramid_layers=1, pyramid_experts=8)
EP2, SLICES = dict(dp=2, ep=2), Strategy(pp=2, slices=2, schedule="terapipe")
REFUSED = {
    "top_k = 3 of 2 experts": lambda: config(top_k=3, pyramid_layers=1, pyramid_experts=2),
    "router 'switch' is for top_k = 1": lambda: config(router="switch"),
    "4 experts, route_nodes 3": lambda: config(router="deepseek", route_nodes=3),
    "bias_speed = 0.1 is for router 'deepseek', not 'top_k'": lambda: config(bias_speed=0.1),
    "a pyramid needs both": lambda: config(pyramid_layers=1),
    "0 of 2 blocks have experts": lambda: config(dense_first=2),
    "ep=3 does not divide dp x cp=4; use ep 1 or 2 or 4": lambda: Strategy(dp=2, cp=2, ep=3),
    "ep=8 does not divide 4 experts; use ep 1 or 2 or 4": lambda: Strategy(dp=8, ep=8).check(MOE, 8),
    "ep=8 does not divide 4 and 8 experts; use ep 1": lambda: Strategy(dp=8, ep=8).check(PYRAMID, 8),
    "ep=2, but the model has no experts": lambda: Strategy(dp=2, ep=2).check(GPTConfig(**SHAPE), 2),
    "ep_chunks=2 with ep=1, ep_travel='tokens': chunks are of rows": lambda: Strategy(ep_chunks=2),
    "ep_chunks=2 with ep=2, .*: chunks are": lambda: Strategy(ep_chunks=2, ep_travel="experts", **EP2),
    "ep_travel='cheaper' with ep_node=2: it": lambda: Strategy(dp=4, ep=4, ep_node=2, ep_travel="cheaper"),
    "ep_shadow=2 with ep=1, ep_travel='tokens': a shadow": lambda: Strategy(dp=2, ep_shadow=2),
    "ep_shadow=2 with ep=2, .*: a shadow": lambda: Strategy(ep_shadow=2, ep_travel="cheaper", **EP2),
    "ep_shadow=5 of 4 experts; use at most 4": lambda: Strategy(dp=2, ep=2, ep_shadow=5).check(MOE, 2),
    "ep_node=3 does not divide ep=4": lambda: Strategy(dp=4, ep=4, ep_node=3),
    "ep=3 with nodes of 2 dp x cp ranks": lambda: Strategy(dp=6, ep=3, zero="III", node=2),
    "tp=4 does not divide expert_width=6": lambda: Strategy(tp=4).check(config(expert_width=6), 4),
    "experts choose among all tokens of a row": lambda: Strategy(cp=2).check(CHOOSING, 2),
    "balance_alpha counts the tokens of whole rows": lambda: SLICES.check(config(balance_alpha=0.1), 2),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_one_line(said):
    with pytest.raises(ValueError, match=said) as error:
        REFUSED[said]()
    assert "\n" not in str(error.value)


def test_scores_without_a_number_end_the_launch_and_name_the_token():
    def rank():
        run = parallelize(MOE, Strategy(dp=2, ep=2))
        if collectives.world().rank() == 1:
            with torch.no_grad():
                run.model.layers[1].mlp.router.weight.fill_(math.nan)
        rows = Rows(lambda step, r, n: random_tokens(step, r, n, 2, 8, 29, seed=0), 2, 8)
        run.step(run.batch(rows, 0))

    with pytest.raises(launch.RankError, match="rank 1 raised ValueError: scores of token 0 are not finite"):
        launch.run(rank, ranks=2, timeout_s=30)
