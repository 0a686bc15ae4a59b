"""ZeRO-Offload: the host's update is the device's; bytes on both sides and over the link; updates a step late."""

import copy
import threading
from dataclasses import replace

import pytest
import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.memory import host_optimizer, pools
from minitrain.memory.host_optimizer import HostOptimizer, fused_adamw
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW, adamw_update
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.precision.chance import Chance
from minitrain.ranks.events import Compute, Copy, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger

VOCABULARY, LENGTH = 29, 12
SIZES = dict(d_model=24, num_layers=2, num_heads=6, num_kv_heads=2, max_positions=16)
CONFIG = GPTConfig(vocab_size=VOCABULARY, **SIZES)
PARAMETERS = sum(param.numel() for param in GPT(CONFIG, device="meta").parameters())


def rows(size=6, length=LENGTH, vocabulary=VOCABULARY):
    def draw(step, rank, ranks):
        return random_tokens(step, rank, ranks, size, length, vocabulary, seed=5)

    return Rows(draw, size, length)


def adamw(params, **settings):
    return AdamW(params, lr=1e-2, eps=1e-3, **settings)


def start(strategy, make=adamw, warmup_steps=None, config=CONFIG):
    run = parallelize(config, strategy, make, seed=3)
    if warmup_steps is not None:
        run.sync.optimizer.warmup_steps = warmup_steps
    return run


def steps(run, numbers, clip=None):
    return [run.total(run.step(run.batch(rows(), number), clip).loss).item() for number in numbers]


def train(strategy, clip=None, make=adamw, count=2):
    run = start(strategy, make)
    losses = steps(run, range(count), clip)
    return losses, run.state_dict()


def exact(**values):
    return Strategy(**(dict(precision="float64", bucket_bytes=3000) | values))


def apart(ours, theirs):
    """The largest difference of two (losses, state)."""
    differences = [abs(a - b) for a, b in zip(ours[0], theirs[0], strict=True)]
    ours, theirs = ours[1], theirs[1]
    assert ours["parameters"].keys() == theirs["parameters"].keys()
    differences += [(ours["parameters"][n] - x).abs().max().item() for n, x in theirs["parameters"].items()]
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, state in theirs["optimizer"].items():
        assert state.keys() == ours["optimizer"][name].keys()
        for key, value in state.items():
            mine = ours["optimizer"][name][key]
            differences.append(abs(torch.as_tensor(mine - value)).max().item())
    return max(differences)


# ---- the same training ------------------------------------------------------------------------------------
LAYOUTS = {
    "one": dict(), "microbatches": dict(microbatches=3, zero=2), "dp": dict(dp=2),
    "zero2": dict(dp=2, zero=2, microbatches=2), "zero3": dict(dp=2, zero=3, microbatches=2),
    "hybrid": dict(dp=4, zero="IIG", node=2),
    "pp, zero2": dict(pp=2, dp=2, zero=2, microbatches=2, schedule="zb_h1"),
    "tp": dict(tp=2, sequence_parallel=True), "cp": dict(cp=2, zero=1),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("one", "zero2")])
def test_updates_on_the_host_are_those_on_the_device(name):
    """With clipping, which needs all gradients first, and without."""
    here, there = exact(**LAYOUTS[name]), exact(**LAYOUTS[name], offload="optimizer")

    def both():
        return [apart(train(there, clip), train(here, clip)) for clip in (None, 0.3)]

    for found in launch.run(both, ranks=here.ranks):
        assert max(found) < 1e-12


def test_a_table_of_both_ends_is_taken_when_both_have_added_their_terms():
    def both():
        found = []
        for offload in ("none", "optimizer"):
            strategy = exact(pp=2, microbatches=2, zero=1, offload=offload)
            run = start(strategy, config=replace(CONFIG, tied=True))
            found.append((steps(run, range(2)), run.state_dict()))
        return apart(*found)

    assert max(launch.run(both, ranks=2)) < 1e-12


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def not_fused(params):
    optimizer = adamw(params)
    optimizer.__class__ = type("Plain", (AdamW,), {})  # the pass gives its kernel to AdamW itself only
    return optimizer


@pytest.mark.parametrize("make", [sgd, not_fused])
def test_where_the_arithmetic_is_the_same_so_is_every_bit(make):
    both = [exact(dp=2, zero=2, offload=where) for where in ("none", "optimizer")]
    assert launch.run(lambda: apart(*(train(one, 0.3, make) for one in both)), ranks=2) == [0, 0]


@pytest.mark.parametrize("moments", [None, (torch.bfloat16, torch.float32)])
def test_the_fused_kernel_is_our_adamw(moments):
    torch.manual_seed(0)
    group = dict(lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    dtypes = moments or (torch.float64, torch.float64)
    exact_dtype = torch.float32 if moments else torch.float64
    ours, theirs = torch.randn(2, 37, dtype=exact_dtype)
    theirs.copy_(ours)
    zeros = lambda: (torch.zeros(37, dtype=dtype) for dtype in dtypes)  # noqa: E731
    states = [dict(zip(("step", "exp_avg", "exp_avg_sq"), (0, *zeros()))) for _ in range(2)]
    for _ in range(5):
        grad = torch.randn(37, dtype=exact_dtype)
        for update, weight, state in ((adamw_update, ours, states[0]), (fused_adamw, theirs, states[1])):
            state["step"] += 1
            update(weight, grad, state, group)
    tolerance = 1e-4 if moments else 1e-14
    assert (ours - theirs).abs().max() < tolerance and not torch.equal(ours, torch.zeros(37))
    assert states[1]["exp_avg"].dtype == dtypes[0] and states[1]["exp_avg"].abs().max() > 0


# ---- bytes ------------------------------------------------------------------------------------------------
BUCKET = 4_000


def accounts(strategy, config=CONFIG, size=6, length=LENGTH, count=2):
    """-> ledgers of two steps: states are there in the second."""
    run, found = start(strategy, config=config), []
    for number in range(count):
        batch = run.batch(rows(size, length, config.vocab_size), number)
        with Ledger() as ledger:
            run.step(batch)
        found.append(ledger)
    return found


def most(ledger, kind):
    return max(live[kind] for _, live in ledger.timeline())


def model_states(ledger):
    return {kind: most(ledger, kind) for kind in ("parameters", "gradients", "optimizer state")}


def test_zero_offload():
    """The check of the atlas's row. 70 billion parameters on 16 devices are cut by tensor parallelism here."""
    device_states_fall_from_16_to_2_bytes_and_4_cross_the_link()
    for name in PAPERS:
        the_papers_models_fit_a_v100(name)
    test_updates_on_the_host_are_those_on_the_device("one")
    assert launch.run(late_to_the_bit, True, ranks=1) == launch.run(late_to_the_bit, False, ranks=1)


def device_states_fall_from_16_to_2_bytes_and_4_cross_the_link():
    """Ren et al., section 3: 2Ψ down, 2Ψ up, once a step; the device keeps 2Ψ and gradients under way."""
    P, largest = PARAMETERS, 2 * max(p.numel() for p in GPT(CONFIG, device="meta").parameters())
    everything = Strategy(precision="bfloat16", zero=2, bucket_bytes=BUCKET)
    _, ledger = launch.run(accounts, everything, ranks=1)[0]
    assert ledger.live_by_kind | dict(activations=0, buffers=0) == {
        "parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P, "activations": 0, "buffers": 0,
    }  # fmt: skip
    away = Strategy(precision="bfloat16", zero=2, bucket_bytes=BUCKET, offload="optimizer")
    for ledgers in (launch.run(accounts, away, ranks=1)[0], dryrun.run(accounts, away, ranks=1)):
        for ledger in ledgers:
            states = model_states(ledger)
            assert states["parameters"] == 2 * P and states["optimizer state"] == 0
            assert 0 < states["gradients"] <= 4 * max(BUCKET, largest)  # full, summed, and two leaving
            assert ledger.live_by_kind["gradients"] == 0
            assert (ledger.copied_bytes("to_host"), ledger.copied_bytes("to_device")) == (2 * P, 2 * P)
        assert ledger.host_by_kind == {
            "parameters": 2 * P, "gradients": 2 * P, "optimizer state": 12 * P, "activations": 0, "buffers": 0,
        }  # fmt: skip


def test_bytes_over_the_link_are_a_ranks_share_whatever_the_microbatches():
    strategy = exact(dp=2, zero=2, microbatches=3, offload="optimizer", bucket_bytes=25_000_000)
    for first, second in launch.run(accounts, strategy, ranks=2):
        for ledger in (first, second):
            padded = 8 * -(-PARAMETERS // 2)
            assert ledger.copied_bytes("to_host") == ledger.copied_bytes("to_device") == padded


BIG = dict(max_positions=64, activation="gelu", vocab_size=50_257, bias=True)
BIG |= dict(positions="learned", norm="layer")
PAPERS = {
    "13B": (GPTConfig(num_layers=12, d_model=9216, num_heads=64, d_ff=36864, **BIG | dict(head_dim=144)), 1),
    "70B": (GPTConfig(num_layers=21, d_model=16384, num_heads=128, d_ff=65536, **BIG), 16),
}


def the_papers_models_fit_a_v100(name):
    """13 billion parameters on one V100 of 32 GB, 70 billion on 16 with tensor parallelism (Ren et al., section
    6.2.1, whose models have more and narrower layers); with all states on the device neither fits."""
    config, tp = PAPERS[name]
    memory, billions = machine("v100").device.memory_bytes, float(name[:-1])
    parameters = sum(param.numel() for param in GPT(config, device="meta").parameters())
    assert abs(parameters / 1e9 - billions) < 0.05 * billions
    strategy = Strategy(precision="bfloat16", tp=tp, zero=2, offload="optimizer")
    (ledger,) = dryrun.run(accounts, strategy, config, 1, 64, 1, ranks=tp)
    assert 2 * parameters / tp < ledger.peak_bytes < memory < 16 * parameters / tp
    assert ledger.host_by_kind["optimizer state"] >= 12 * parameters / tp


def test_gradients_leave_while_backward_goes_on_and_weights_come_while_the_host_updates():
    ledger, _ = launch.run(accounts, exact(zero=2, offload="optimizer"), ranks=1)[0]
    moves = [(i, event.direction) for i, event in enumerate(ledger.events) if type(event) is Copy]
    copies, back = ([i for i, way in moves if way == one] for one in ("to_host", "to_device"))
    products = [i for i, event in enumerate(ledger.events) if type(event) is Compute and event.flops]
    between = sum(copies[0] < i for i in products)
    assert len(copies) > 5 and between > len(products) // 3
    assert sum(i < products[-1] for i in copies) >= len(copies) - 4
    waited = {event.id: i for i, event in enumerate(ledger.events) if type(event) is Wait}
    ended = [waited[ledger.events[i].id] for i in copies[:-1]]
    assert all(end > after for end, after in zip(ended, copies[1:])), "one more may be on its way"
    assert len(back) > 5 and max(back) < min(waited[ledger.events[i].id] for i in back), "all at once"


# ---- one step late ----------------------------------------------------------------------------------------


def late_by_hand(count, warmup_steps):
    """One process, torch's AdamW: gradients of weights that lack the last update, once warm."""
    model = GPT(CONFIG, seed=3, dtype=torch.float64)
    ahead = copy.deepcopy(model)  # has all updates
    optimizer = torch.optim.AdamW(ahead.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(count):
        tokens, targets = rows().draw(step, 0, 1)
        loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        before = [param.detach().clone() for param in ahead.parameters()]
        for param, grad in zip(ahead.parameters(), grads):
            param.grad = grad
        optimizer.step()
        with torch.no_grad():
            for param, new, old in zip(model.parameters(), ahead.parameters(), before):
                param.copy_(new if step < warmup_steps else old)
    return losses, dict(ahead.named_parameters())


def late(strategy, count, warmup_steps):
    run = start(strategy, warmup_steps=warmup_steps)
    losses = steps(run, range(count))
    return losses, run.state_dict()["parameters"]


@pytest.fixture(scope="module")
def by_hand():
    return {warmup_steps: late_by_hand(4, warmup_steps) for warmup_steps in (0, 2, 9)}


@pytest.mark.parametrize("layout", [dict(zero=2, dp=2), dict(zero=3, dp=2, microbatches=2), dict(pp=2)])
def test_delayed_updates_are_training_one_step_late(layout, by_hand):
    strategy = exact(**layout, offload="optimizer", delayed_update=True)
    for found in launch.run(lambda: [late(strategy, 4, warm) for warm in by_hand], ranks=strategy.ranks):
        for (ours, state), (losses, params) in zip(found, by_hand.values(), strict=True):
            assert max(abs(a - b) for a, b in zip(ours, losses)) < 1e-12
            assert max((state[name] - params[name]).abs().max().item() for name in params) < 1e-12
    for warmup_steps in (0, 2):  # control: it is not the training without delay
        assert max(abs(a - b) for a, b in zip(by_hand[warmup_steps][0], by_hand[9][0])) > 1e-4


def late_to_the_bit(delayed):
    """The same machinery without delay, its weights on the device put back by one update after each step."""
    run = start(exact(zero=2, offload="optimizer", delayed_update=delayed), warmup_steps=1)
    losses = []
    for number in range(5):
        before = [run.sync.optimizer.twin_of[kept.shard].detach().clone() for kept in run.sync.shards]
        losses += steps(run, [number])
        if not delayed and number >= 1:
            for kept, old in zip(run.sync.shards, before):
                kept.shard.data.copy_(old)
            run.sync.publish()
    return losses


def exposed(delayed, clip):
    run = start(exact(zero=2, dp=2, offload="optimizer", delayed_update=delayed), warmup_steps=1)
    found = []
    for number in range(3):
        steps(run, [number], clip)
        found.append((run.sync.optimizer.exposed_elements, bool(run.sync.optimizer._pending)))
    return found


def test_what_is_updated_behind_backward():
    """All if the norm must be known first, else the last two buckets, and delayed nothing."""
    mine = -(-PARAMETERS // 2)
    for found in launch.run(exposed, False, 1.0, ranks=2):
        assert all(mine <= elements < mine + 40 and not pending for elements, pending in found)
    for found in launch.run(exposed, False, None, ranks=2):
        assert all(0 < elements < mine / 2 and not pending for elements, pending in found)
    for found in launch.run(exposed, True, 1.0, ranks=2):
        assert found[0][0] >= mine and found[1:] == [(0, True), (0, True)]


def test_a_step_knows_nothing_of_the_one_before():
    """A parameter without a gradient is not updated, nor counted; one on the host is its own twin, not copied."""
    here = torch.nn.Parameter(torch.zeros(4))
    there = torch.nn.Parameter(pools.new_host((3,), torch.float32, kind="parameters").zero_())
    host = HostOptimizer(torch.optim.SGD([here, there], lr=1.0, momentum=0.5))
    found = []
    for params in ([here, there], [there], []):
        with Ledger() as ledger:
            host.zero_grad()
            for param in params:
                param.grad = torch.ones_like(param)
                host.on_grad_final(param, param.grad)
                assert param.grad is None
            host.step()
            assert not host.settle(), "nothing is under way"
        there_or_not = [host.grad_of(param) is not None for param in (here, there)]
        copied = ledger.copied_bytes("to_host"), ledger.copied_bytes("to_device")
        found.append((there_or_not, host.exposed_elements, copied))
    assert found == [([True, True], 7, (28, 16)), ([False, True], 3, (12, 0)), ([False, False], 0, (0, 0))]
    assert here.tolist() == [-1] * 4 and there.tolist() == [-2.5] * 3 and host.updates == 3
    here.grad = torch.ones(4)
    assert host.grad_of(here) is here.grad, "it is on the device yet"
    with Ledger() as ledger:
        host.refresh()
    assert ledger.copied_bytes() == 16
    assert host.get_state(there)["momentum_buffer"] is host.inner.state[there]["momentum_buffer"], "no copy"


def test_gradients_on_their_way_are_forgotten_too():
    param = torch.nn.Parameter(torch.zeros(4))
    host = HostOptimizer(torch.optim.SGD([param], lr=1.0))
    host.on_grad_final(param, torch.ones(4))
    host.zero_grad()
    assert host.grad_of(param) is None
    host.step()
    assert param.tolist() == [0] * 4


def test_a_taken_over_optimizer_keeps_its_states_and_the_device_keeps_none():
    param = torch.nn.Parameter(torch.zeros(4))
    plain = torch.optim.SGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones(4)
    plain.step()
    before = plain.state[param]["momentum_buffer"]
    host = HostOptimizer(plain)
    moved = host.get_state(param)["momentum_buffer"]
    assert torch.equal(moved, before) and moved is not before and pools.on_host(moved)
    assert param not in plain.state
    host.set_state(param, {})
    assert host.get_state(param) == {}
    given = torch.full((4,), 2.0)
    host.set_state(param, {"momentum_buffer": given})
    given.zero_()
    assert host.get_state(param)["momentum_buffer"].tolist() == [2.0] * 4, "what is written is a copy"


@pytest.mark.parametrize("kind", ["gradients in float32", "rounded by chance"])
def test_what_a_parameter_has_about_it_goes_along(kind):
    """To the host, and into each update: the dtype of its gradients, the numbers by which it is rounded."""
    start, found = torch.linspace(-1, 1, 40).bfloat16(), []
    for away in (False, True):
        param, settings = torch.nn.Parameter(start.clone()), dict(master_dtype=torch.float32)
        if kind == "rounded by chance":
            param.chance, settings = Chance([("w", lambda device: torch.arange(40))], 3), dict(by_chance=True)
        else:
            param.grad_dtype = torch.float32
        optimizer = AdamW([param], lr=1e-3, **settings)
        host = HostOptimizer(optimizer) if away else None
        for step in range(3):
            grad = torch.linspace(1, 2 + step, 40).to(param.grad_dtype)
            if away:
                host.zero_grad()
                host.on_grad_final(param, grad)
                assert host.grad_of(param).dtype == grad.dtype
                host.step()
            else:
                param.grad = grad
                optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found) and not torch.equal(found[0], start)


def test_what_an_update_or_a_state_makes_is_the_hosts():
    param = torch.nn.Parameter(torch.zeros(4))
    host = HostOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.5))
    host.on_grad_final(param, torch.ones(4))
    host.step()
    own = host.get_state(param)["momentum_buffer"]
    assert pools.on_host(own) and own.untyped_storage().on_host == "optimizer state"
    assert host.twin_of[param].untyped_storage().on_host == "parameters"
    assert host.grad_of(param).untyped_storage().on_host == "gradients"
    host.set_state(param, {"momentum_buffer": torch.ones(4)})
    assert host.get_state(param)["momentum_buffer"].untyped_storage().on_host == "optimizer state"


# ---- states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [dict(dp=2, zero=2), dict(dp=2, zero=3), dict(pp=2)])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(layout):
    def again():
        found = []
        for delayed in (False, True):
            strategy = exact(**layout, offload="optimizer", delayed_update=delayed)
            runs = [start(strategy, warmup_steps=1) for _ in range(2)]
            steps(runs[0], range(2), 0.3)
            runs[1].load_state_dict(runs[0].state_dict())
            found.append(apart(*((steps(run, range(2, 4), 0.3), run.state_dict()) for run in runs)))
        return found

    for found in launch.run(again, ranks=exact(**layout).ranks):
        assert found == [0, 0]


def stale_twins(refresh):
    first = parallelize(CONFIG, exact(), adamw, seed=8)  # other weights
    state = first.state_dict() | {"optimizer": {}}  # and no states, which would bring them
    if not refresh:
        HostOptimizer.refresh = lambda self: None
    run = start(exact(offload="optimizer"))
    run.load_state_dict(state)
    steps(run, [0])
    steps(first, [0])
    ours, theirs = (r.state_dict()["parameters"] for r in (run, first))
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def test_parameters_that_were_loaded_are_what_the_host_updates():
    """And a control: without the refresh it would update those it was made with."""
    assert (
        launch.run(stale_twins, True, ranks=1)[0] < 1e-12 < 1e-3 < launch.run(stale_twins, False, ranks=1)[0]
    )


# ---- controls and refusals --------------------------------------------------------------------------------


def test_the_comparison_would_notice():
    def rank():
        away, to_host = exact(zero=2, offload="optimizer"), host_optimizer.to_host
        found = [train(one)[0] for one in (exact(), away)]
        host_optimizer.to_host = lambda x, out: pools.to_host(torch.zeros_like(x), out=out)
        found.append(train(away)[0])
        host_optimizer.to_host = to_host
        host_optimizer.to_device = lambda x, out: pools.to_device(x, out=torch.empty_like(x))
        return *found, train(away)[0]

    plain, *found = launch.run(rank, ranks=1)[0]
    far = [max(abs(a - b) for a, b in zip(losses, plain, strict=True)) for losses in found]
    assert far[0] < 1e-12 and min(far[1:]) > 1e-5  # gradients do not arrive, weights do not come back


class Fails(AdamW):
    def _new_state(self, param, group):
        raise ArithmeticError("the host is on fire")


def test_an_error_of_the_update_reaches_the_step():
    with pytest.raises(Exception, match="the host is on fire"):
        launch.run(train, exact(offload="optimizer"), None, Fails, ranks=1)


@pytest.mark.parametrize(
    "values, said",
    [
        (dict(offload="everything"), "use none, or once each of optimizer, parameters, activations"),
        (dict(delayed_update=True), "what is delayed is an update on the host; add optimizer"),
        (dict(offload="parameters+optimizer", zero=1), "use zero=3"),
        (dict(offload="parameters", zero=3), "use zero=3 and offload='parameters\\+optimizer'"),
        (dict(offload="optimizer", pp=2, post_validation=True), "may be taken back"),
        (dict(offload="optimizer", precision="fp8_lm"), "codes with a scale"),
        (dict(offload="activations", pp=2, schedule="bpipe"), "activations leave already"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(values, said):
    with pytest.raises(ValueError, match=said) as refused:
        Strategy(**values)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("delayed, places", [(False, 1), (True, 2)])
def test_the_host_has_a_place_for_each_gradient_that_may_be_read(delayed, places):
    """Two if updates are delayed."""
    param, found = torch.nn.Parameter(torch.zeros(4)), set()
    host = HostOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.5), delayed=delayed, warmup_steps=2)
    for _ in range(4):
        host.zero_grad()
        host.on_grad_final(param, torch.ones(4))
        host.on_finish()
        found.add(host.grad_of(param).data_ptr())
        host.step()
    assert len(found) == places


def test_a_state_written_for_a_parameter_counts_its_updates():
    """The most of all parameters: one of them may have had no gradient for a while."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    host = HostOptimizer(adamw(params))
    for param, step, updates in ((params[0], 5, 5), (params[1], 3, 5), (params[1], 7, 7)):
        host.set_state(param, {"step": step})
        host.refresh()
        assert host.updates == updates


def test_a_delayed_update_reads_the_gradients_of_its_own_step():
    """Also if the next ones arrive before it begins."""
    param, gate = torch.nn.Parameter(torch.zeros(4)), threading.Event()
    host = HostOptimizer(torch.optim.SGD([param], lr=1.0), delayed=True, warmup_steps=0)
    pools._worker("work").submit(gate.wait)
    try:
        host.on_grad_final(param, torch.ones(4))
        host.step()
        host.zero_grad()
        host.on_grad_final(param, torch.full((4,), 5.0))
        host.on_finish()
        assert torch.equal(param.detach(), torch.zeros(4))  # late
    finally:
        gate.set()
    assert host.settle() and torch.equal(param.detach(), -torch.ones(4))
    host.step()
    assert host.settle() and torch.equal(param.detach(), torch.full((4,), -6.0)) and not host.settle()
