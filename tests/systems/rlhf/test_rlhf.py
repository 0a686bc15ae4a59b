"""Losses beside sums written out, learning on ranks, the hybrid engine; orders and plans of calls; adapters."""

import itertools
import math
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.rlhf import run_of, trained
from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.course import sums
from minitrain.model.data.batches import MASKED, Rows, random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum, generate
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision.blocks import dequantize, quantize
from minitrain.ranks.sharding import full_tensor, placement
from minitrain.systems.rlhf import policy
from minitrain.systems.rlhf.adapters import NF4, LowRank, add_adapters, merge, values_of
from minitrain.systems.rlhf.model_placements import Call, device_bytes, puzzle, realhf, tasks_of
from minitrain.systems.simulate.links import play
from minitrain.tensor_parallel.model import cut_layers
from tests.parallel import Traffic, small

TINY = small(vocab_size=12, num_kv_heads=4, tied=False)
NUMBERS = sum(p.numel() for p in GPT(TINY).parameters())
WIDE = small(d_model=64, num_kv_heads=4, tied=False)
JUDGED = dict(score="reward", refer="reference", value="critic")
CALLS = [Call("generate", "actor", 6), *(Call(*one, 1, ("generate",)) for one in JUDGED.items())]
CALLS += [Call(f"train_{model}", model, 2, tuple(JUDGED), True) for model in ("actor", "critic")]
draw = partial(random_tokens, batch_size=8, length=8, vocab=WIDE.vocab_size, masked=True)


def test_losses():
    """GAE as its double sum, the loss token by token, in microbatches; pairs."""
    r, v = (torch.rand(5, generator=torch.Generator().manual_seed(i)).tolist() for i in (0, 1))
    found, returns = policy.gae(torch.tensor([r]), torch.tensor([v]), 0.9, 0.8)
    error = [r[t] + 0.9 * (v[t + 1] if t < 4 else 0) - v[t] for t in range(5)]
    wanted = [sum(0.72**k * error[t + k] for k in range(5 - t)) for t in range(5)]
    assert found[0].tolist() == pytest.approx(wanted) and (returns - found)[0].tolist() == pytest.approx(v)
    found = policy.group_advantages(torch.tensor([1.0, 0, 0, 1, 1] + [1] * 5), 5).tolist()
    assert found == pytest.approx([(x - 0.6) / 0.24**0.5 for x in (1, 0, 0, 1, 1)] + [0] * 5, abs=1e-5)
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 5, dtype=torch.float64)
    targets = torch.randint(0, 5, (4, 3)).index_fill(1, torch.tensor(0), MASKED)
    old, reference, gains = (torch.randn(4, 3, dtype=torch.float64) - shift for shift in (1.6, 1.6, 0))
    loss, wanted = policy.PolicyLoss(clip=0.2, kl=0.1), 0.0
    loss.give(old, reference, gains)
    for row, t in itertools.product(range(4), (1, 2)):
        scores = logits[row, t].tolist()
        now = scores[targets[row, t]] - math.log(sum(map(math.exp, scores)))
        ratio, gain, more = math.exp(now - old[row, t]), gains[row, t].item(), reference[row, t].item() - now
        wanted += 0.1 * (math.exp(more) - 1 - more) - min(ratio * gain, min(max(ratio, 0.8), 1.2) * gain)
    assert (loss(logits[:2], targets[:2]) + loss(logits[2:], targets[2:])).item() == pytest.approx(wanted)
    rows = sums.preference_batch(50, 3, 0).tokens.tolist()
    assert [int(a + b == 10 * x + y) for a, _, b, _, x, y in rows] == [1, 0] * 50
    assert policy.PreferenceLoss()(torch.tensor([[[2.0]], [[0.0]]]), None).item() == pytest.approx(0.12692801)


@pytest.mark.parametrize("method, steps, demonstrations", [("grpo", 12, 60), ("ppo", 16, 80)])
def test_rlhf_ppo(method, steps, demonstrations):
    """One seed, a short run: the mean reward rises, and the policy stays near its reference."""
    told, _ = launch.run(trained, method, steps, 0, demonstrations, 100, ranks=2, timeout_s=300)[0]
    right, kl = zip(*told)
    assert sum(right[-4:]) / 4 > sum(right[:4]) / 4 + 0.05 and max(kl) < 1 and abs(kl[0]) < 1e-5


def iterations(placed: bool) -> tuple:
    """Three of PPO with tiny models: Runs in float64, or each on one rank; and the bytes of those that are here."""
    world, given, told = collectives.world(), (policy.PolicyLoss(), policy.ValueLoss()), []
    n, each = world.size(), enumerate((*given, policy.PolicyLoss(), policy.PreferenceLoss()))
    run = partial(run_of, config=TINY, dp=n, precision="float64")
    make = lambda i, loss: policy.Placed(TINY, loss, i % n, world, 1e-2, i) if placed else run(loss, i, 1e-2)
    models = [make(*one) for one in each]
    rank, ranks, groups = (0, 1, ()) if placed else (world.rank(), n, (world,))
    for step in range(3):
        tokens = models[0].sample(sums.prompts(8, step), 2, seed=step)[rank::ranks]
        batch = sums.answer_batch(tokens, step, *groups)
        told += sums.share_right(tokens, *groups), policy.ppo_step(*models, given, batch, *groups)
    here = [(m, p) for m in models if placed and m.model for p in m.model.parameters()]
    tensors = [x for m, p in here for x in (p, p.grad, *m.optimizer.state[p].values())]
    return told, sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def test_openrlhf():
    """Data parallel as on one rank; each model on a rank alone, to the bit, where a rank holds one model at most."""
    one, two = (launch.run(iterations, False, ranks=n)[0][0] for n in (1, 2))
    assert two == pytest.approx(one, abs=1e-9) and abs(one[-1]) > 1e-3
    ((together, whole),) = launch.run(iterations, True, ranks=1)
    told, sizes = zip(*launch.run(iterations, True, ranks=4))
    assert all(x == together for x in told) and whole == 40 * NUMBERS  # in float32
    assert sizes == (16 * NUMBERS, 16 * NUMBERS, 4 * NUMBERS, 4 * NUMBERS)
    models = dict.fromkeys(("actor", "critic", "reference", "reward"), 7)  # billions
    assert device_bytes(models, dict.fromkeys(models, "all")) == {"all": 252}
    assert max(device_bytes(models, {model: model for model in models}).values()) == 112
    ends = [play(tasks_of(CALLS, {c.name: lane or c.model for c in CALLS})).end_s for lane in ("all", "")]
    assert ends == [6 + 3 * 1 + 2 * 2, 6 + 1 + 2]


def handed_over(tp: int) -> tuple:
    """From ZeRO-3 to whole parameters, or tp: bytes sent, how far logits are, whether a cache writes what none does."""
    world, tokens = collectives.world(), sums.answered(sums.prompts(8, 1))
    actor = run_of(policy.PolicyLoss(), 0, 1e-2, TINY, dp=4, zero=3, precision="bfloat16")
    actor.step(sums.answer_batch(tokens[world.rank() * 2 :][:2], 0, world), 1.0)
    target = run_of(policy.PolicyLoss(), 5, None, TINY, dp=4 // tp, tp=tp, precision="bfloat16")
    with Traffic() as ledger:
        policy.hand_over(actor, target, world)
    same = torch.equal(target.sample(tokens[:, :4], 2, 0), generate(target, tokens[:, :4], 2, 0))
    return ledger.sent_bytes("all_to_all"), (actor(tokens) - target(tokens)).abs().max().item(), same


def test_deepspeed_chat():
    for tp in (1, 2, 4):
        sent, apart, same = zip(*launch.run(handed_over, tp, ranks=4))
        assert all(same) and max(apart) <= (1e-2 if tp > 1 else 0)
        moved = sum(sent) / (3 * 2 * NUMBERS)  # of all ranks; each (n-1)/n of 2 bytes a parameter
        assert moved == 1 if tp == 1 else moved < 1.1 / tp


@pytest.mark.parametrize("generate, train, transfer", [(5, 3, 0.5), (4, 4, 1), (3, 5, 0.25), (4, 3, 2)])
def test_app_placement(generate, train, transfer):
    """Flat: the sum. Apart: a recurrence; a batch each max(t_gen, t_train), or its share of a round trip."""
    calls = [Call("generate", "actor", generate), Call("train", "actor", train, ("generate",), True)]
    assert play(tasks_of(calls, dict(generate="a", train="a"), 9)).end_s == 9 * (generate + train)
    for stale in (0, 1, 2):
        lanes = dict(generate="a", train="b")
        ends = [play(tasks_of(calls, lanes, n, stale, transfer)).end_s for n in (40, 60)]
        made, done = [0], [0] * (1 + stale)
        for batch in range(60):
            weights = done[batch] + transfer if batch > stale else 0
            made.append(max(weights, made[-1]) + generate)
            done.append(max(made[-1] + transfer, done[-1]) + train)
        assert ends == pytest.approx([done[40 + stale], done[60 + stale]])
        trip = (generate + train + 2 * transfer) / (1 + stale)
        assert (ends[1] - ends[0]) / 20 == pytest.approx(max(generate, train, trip))


def test_puzzle():
    """Not after the order given, not before the longest path; sooner now and then."""
    gains, draw = 0, random.Random(1)
    for _ in range(20):
        calls = [c._replace(seconds=draw.randint(1, 9)) for c in CALLS]
        calls[4:] = [calls[4]._replace(after=("score", "refer")), calls[5]._replace(after=("value",))]
        tasks, s = tasks_of(calls, {c.name: draw.choice("ab") for c in calls}), [c.seconds for c in calls]
        longest = s[0] + max(s[1] + s[4], s[2] + s[4], s[3] + s[5])
        assert longest <= puzzle(tasks).end_s <= play(tasks).end_s
        gains += puzzle(tasks).end_s < play(tasks).end_s
    assert gains


def test_realhf():
    """The walk ends where the best of all 64 choices is, on each of 20 instances."""
    for number in range(20):
        draw = random.Random(number)
        s = [[draw.uniform(1, 10) for _ in range(4)] for _ in range(3)]
        m = [[0 if a == b else draw.uniform(0.5, 4) for b in range(4)] for a in range(4)]
        cost = lambda a, b, c: s[0][a] + s[1][b] + s[2][c] + m[a][b] + m[b][c] + m[c][a]
        every = itertools.product(range(4), repeat=3)
        assert tuple(realhf(s, m, seed=number)) == min(every, key=lambda plans: cost(*plans))


def adapted(nf4: bool, tp=None) -> tuple:
    """A model, its adapters by name, its loss."""
    model, sizes = GPT(WIDE, seed=3, dtype=torch.float64), (WIDE.head_dim, WIDE.vocab_size)
    loss_fn = cross_entropy_sum if tp is None else cut_layers(model.layers, *sizes, tp)
    add_adapters(model.layers, 3, alpha=6.0, nf4=nf4)
    return model, {n: m for n, m in model.named_modules() if isinstance(m, LowRank)}, loss_fn


def losses_of(model, loss_fn) -> list[float]:
    found, optimizer = [], torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for tokens, targets in (draw(step, 0, 1) for step in range(3)):
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), targets) / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def one_process(nf4: bool, bases: dict | None = None) -> list[float]:
    model, adapters, loss_fn = adapted(nf4)  # the products on whole matrices, written out
    for name, module in adapters.items():
        base = (bases or {}).get(name, values_of(module.base.weight))
        module.forward = lambda x, m=module, w=base: F.linear(x, w + 2.0 * m.b @ m.a)
    return losses_of(model, loss_fn)


def test_trl_peft():
    """r (d_in + d_out) numbers of a matrix train; merged is unmerged; 0.127 bits of constants a weight."""
    tokens = draw(0, 0, 1)[0]
    for nf4 in (False, True):
        model, adapters, _ = adapted(nf4)
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert len(adapters) == 14 and numbers == 3 * (8 * (64 + 64) + 6 * (64 + WIDE.d_ff))
        for m in adapters.values():
            torch.nn.init.ones_(m.b)
        apart = model(tokens).detach()
        merge(model.layers)
        assert type(model.layers[1].mlp.up) is not LowRank
        assert torch.allclose(model(tokens), apart, atol=1e-12)
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    q, once = NF4(x), dequantize(quantize(x, "nf4"))
    assert 8 * q.scales.nbytes / x.numel() == 0.126953125
    assert 8 * q.nbytes / x.numel() == pytest.approx(4.127, abs=1e-4)
    assert 0 < (q.values() - once).abs().max() < 0.04 * once.abs().max()  # what 8 bits of a scale lose


def with_zero(nf4: bool, stage: int) -> tuple:
    strategy = Strategy(dp=2, zero=stage, precision="float64")
    run = parallelize(adapted(nf4)[0], strategy, partial(AdamW, lr=1e-2))
    return [run.total(run.step(run.batch(Rows(draw, 8, 8), s)).loss).item() for s in range(3)], None


def with_tp(nf4: bool) -> tuple:
    model, adapters, loss_fn = adapted(nf4, collectives.world())
    whole = lambda w: full_tensor(values_of(w), placement(w).shards)
    bases = {name: whole(m.base.weight) for name, m in adapters.items()}
    return losses_of(model, loss_fn), bases  # each rank has quantised its part


def test_adapters_on_ranks():
    """ZeRO 1 and 3, which cuts codes too, and tp: losses of three steps are one process's."""
    ways = (with_zero, 1), (with_zero, 3), (with_tp,)
    for nf4, (make, *more) in itertools.product((False, True), ways):
        found, bases = launch.run(make, nf4, *more, ranks=2)[0]
        assert found == pytest.approx(one_process(nf4, bases), abs=1e-12)
