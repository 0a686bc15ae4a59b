"""What every Sync promises: optimizers of any kind, stand-ins, states for any layout, bytes and memory."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.data_parallel.zero3 import ShardedParameter
from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from tests import parallel
from tests.parallel import TOLERANCE, Outcome, Problem, difference, rows_of_problem, small, train_parallel

PROBLEM = Problem(config=small(tied=False), clip=None)  # 29 words: padded under tp


# ---- optimizers ------------------------------------------------------------------------------------------

EARLY = {
    "dp2": [
        *(dict(dp=2, zero=zero) for zero in (1, 2, 3)), dict(dp=2, zero="III", node=2), dict(tp=2),
        dict(pp=2, zero=1),
    ],
    "dp2 tp2": [dict(dp=2, tp=2, zero=1), dict(dp=2, tp=2, zero=3, sequence_parallel=True)],
}  # fmt: skip


def adagrad(params):
    """torch's makes its sums of squares, which do not start at 0, when it is built."""
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1, eps=1e-3)


class Ramp(torch.optim.Optimizer):
    """The same rule, but sums start as a ramp over each whole parameter, and what gets lost stays lost."""

    def __init__(self, params):
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.linspace(0.1, 1, param.numel(), dtype=param.dtype).view(
                param.shape
            )

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            total = self.state[param]["sum"].addcmul_(param.grad, param.grad)
            param.addcdiv_(param.grad, total.sqrt() + 1e-3, value=-0.05)


def by_hand(make):
    """One process, nothing of minitrain's but the model."""
    model, losses = PROBLEM.model(), []
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = make(list(trainable.values()))
    for step in range(len(PROBLEM.batch_sizes)):
        tokens, targets = PROBLEM.batch(step)
        optimizer.zero_grad()
        loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    grads = {name: param.grad for name, param in trainable.items()}
    return Outcome(losses, grads, {name: param.detach() for name, param in model.named_parameters()})


@pytest.mark.parametrize("shape", EARLY)
def test_an_optimizer_that_has_states_when_it_is_built(shape):
    """By element: each rank takes its part of the first states, which were made of stand-ins."""

    def rank(make):
        return [train_parallel(PROBLEM, Strategy(**way), make_optimizer=make) for way in EARLY[shape]]

    for make in (adagrad, Ramp):
        reference = by_hand(make)
        for outcomes in launch.run(rank, make, ranks=Strategy(**EARLY[shape][0]).ranks):
            for way, outcome in zip(EARLY[shape], outcomes):
                assert difference(outcome, reference, part="pp" in way) < TOLERANCE, way


def test_without_an_optimizer_there_are_gradients_and_no_updates():
    """Of every kind; nothing is updated, and the state is of parameters alone."""

    def rank(way):
        run = parallelize(PROBLEM.config, replace(Strategy(**way), precision="float64"), seed=3)
        before = run.state_dict()
        run.step(run.batch(rows_of_problem(PROBLEM, 0), 0))
        for one, all_at_once in (
            (partial(states.full_grad, run.sync), states.full_grads(run.sync)),
            (partial(states.full_tensor, run.sync), states.full_tensors(run.sync)),
        ):
            assert all_at_once.keys() == set(run.sync.names.values())
            assert all(torch.equal(one(param), all_at_once[name]) for param, name in run.sync.names.items())
        grads = states.full_grads(run.sync)
        run.load_state_dict(after := run.state_dict())
        same = all(torch.equal(x, after["parameters"][name]) for name, x in before["parameters"].items())
        return grads, same and not after["optimizer"]

    ways = [*(dict(dp=2, zero=zero) for zero in range(4)), dict(dp=2, zero="IGG", node=2), dict(tp=2)]
    for found in launch.run(lambda: [rank(way) for way in ways], ranks=2):
        expected = found[0][0]
        for way, (grads, unchanged) in zip(ways, found):
            apart = max((grads[name] - grad).abs().max() for name, grad in expected.items())
            assert unchanged and apart < TOLERANCE, way


@pytest.mark.parametrize("zero", [0, 1, 2, 3, "IGG"])
def test_stand_ins_are_named_whole_and_weightless(zero):
    """Under tp and ZeRO an optimizer is asked about parameters as one process has them, and pays nothing."""
    whole = {name: list(param.shape) for name, param in GPT(PROBLEM.config, device="meta").named_parameters()}

    def rank():
        seen = {}

        def make(params):
            for x in params:
                seen[x.global_name] = list(x.shape), x.untyped_storage().nbytes(), x.requires_grad
            return AdamW(params)

        strategy = Strategy(dp=2, tp=2, zero=zero, node=2 if zero == "IGG" else 1)
        parallelize(PROBLEM.config, strategy, make, frozen=[PROBLEM.frozen])
        return seen

    del whole[PROBLEM.frozen]
    for seen in launch.run(rank, ranks=4):
        assert {name: shape for name, (shape, *_) in seen.items()} == whole
        assert all(held <= 8 and trainable for _, held, trainable in seen.values())


# ---- states ----------------------------------------------------------------------------------------------

LAYOUTS = [
    dict(dp=2, tp=2, zero=1), dict(tp=4), dict(dp=2, pp=2, zero=3), dict(dp=4, zero="III", node=2),
    dict(pp=2, tp=2), dict(dp=2, tp=2, zero=3, sequence_parallel=True),
]  # fmt: skip


def adamw(params):
    matrices, vectors = ([p for p in params if (p.dim() > 1) == wide] for wide in (True, False))
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=1e-2)


@pytest.mark.parametrize("words", [pytest.param(29, marks=pytest.mark.slow), 9])
def test_a_state_goes_from_any_layout_to_any_other(words):
    """A step in one layout, another in the next, and so on round: equal to one process throughout. 9 words
    over tp=4 leave a rank with none."""
    problem = Problem(config=small(vocab_size=words, tied=words == 9), batch_sizes=(8,) * len(LAYOUTS))

    def rank(layouts):
        saved = []
        for step, layout in enumerate(layouts):
            strategy = Strategy(**layout, precision="float64", bucket_bytes=3000)
            seed = 99 if saved else 3
            run = parallelize(problem.config, strategy, adamw, seed=seed, frozen=[problem.frozen])
            if saved:
                run.load_state_dict(saved[-1])
            run.step(run.batch(rows_of_problem(problem, step), step), problem.clip)
            saved.append(run.state_dict())
        return saved

    (whole,) = launch.run(rank, [{}] * len(LAYOUTS), ranks=1)
    for saved in launch.run(rank, LAYOUTS, ranks=4):
        for layout, ours, theirs in zip(LAYOUTS, saved, whole):
            for what in ("parameters", "optimizer"):
                assert ours[what].keys() == theirs[what].keys(), (layout, what)
            for name, param in theirs["parameters"].items():
                assert (ours["parameters"][name] - param).abs().max() < TOLERANCE, (layout, name)
            for name, state in theirs["optimizer"].items():
                assert state["step"] == ours["optimizer"][name]["step"]
                for key in ("exp_avg", "exp_avg_sq"):
                    assert (ours["optimizer"][name][key] - state[key]).abs().max() < TOLERANCE, (layout, name)


# ---- a pipeline ------------------------------------------------------------------------------------------

DEEP = Problem(config=small(tied=False, num_layers=4), batch_sizes=(16,), clip=None)
SHALLOW = replace(DEEP, config=small(tied=False))  # a layer a stage: a dry run costs by the operator


def one_step(zero, microbatches, schedule, dp, watch=None, problem=DEEP):
    """Over pp=2: bytes that this rank sends over dp as multiples of (dp-1)/dp of its stages' parameters."""
    how = dict(schedule=schedule, chunks=2 if schedule == "interleaved" else 1, bucket_bytes=3000)
    strategy = Strategy(dp=dp, pp=2, zero=zero, microbatches=microbatches, precision="float64", **how)
    run = parallelize(problem.config, strategy, AdamW)
    if watch:
        watch(run.sync)
    batch = run.batch(rows_of_problem(problem, 0), 0)
    with parallel.Traffic() as ledger:
        run.step(batch)
    once = 8 * sum(flat.numel for flat in run.sync.shards) * (dp - 1) // dp
    return run, {op: ledger.sent_bytes(op, axis="dp") / once for op in ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_zero_sends_in_a_pipeline(schedule):
    """Stage 1 sends gradients once a step, 2 and 3 after each backward: m times; stage 3 gathers for each
    forward and each backward (I and W together are one). The same on real ranks and in dry runs of more."""
    # (all_gather, reduce_scatter)
    sends = {1: lambda m: (1, 1), 2: lambda m: (1, m), 3: lambda m: (2 * m, m)}

    def rank():
        return [tuple(one_step(zero, m, schedule, 2)[1].values()) for zero in sends for m in (1, 2)]

    assert launch.run(rank, ranks=4) == [[times(m) for times in sends.values() for m in (1, 2)]] * 4
    for zero in sends:
        for place in (0, 7):
            step = partial(one_step, zero, 3, schedule, 4, problem=SHALLOW)
            found = dryrun.run(lambda: step()[1], rank=place, ranks=8)  # noqa: B023
            assert tuple(found.values()) == sends[zero](3)


def told_and_sent(zero, microbatches, schedule):
    """What a pipeline tells, of which stage, stages of the buckets sent then; and buckets of a stage."""
    log, buckets = [], {}

    def watch(sync):
        number = {param: n for n, part in enumerate(sync.parts) for param in part}

        def tell(what, told, params):
            params = list(params)
            log.append((what, number[params[0]], []))
            told(params)

        def send(sent, flat):
            log[-1][2].extend({number[param] for param in flat.params})
            return sent(flat)

        sync.on_microbatch_grads = partial(tell, "microbatch", sync.on_microbatch_grads)
        sync.on_step_grads = partial(tell, "step", sync.on_step_grads)
        if zero == 3:
            sync._send = partial(send, sync._send)
        else:
            sync.in_order.start = partial(send, sync._start)
        buckets.update(Counter(number[flat.params[0]] for flat in sync.shards))

    one_step(zero, microbatches, schedule, 2, watch)
    return log, buckets


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_when_a_pipeline_sends_gradients(schedule):
    """ZeRO 1 when the last microbatch of a stage is done, 2 and 3 after each backward; a bucket is of one stage."""
    m = 4
    for zero in (1, 2, 3):
        log, buckets = dryrun.run(told_and_sent, zero, m, schedule, ranks=4)
        assert len(buckets) == (2 if schedule == "interleaved" else 1)
        for stage, count in buckets.items():
            told = [(what, sent) for what, about, sent in log if about == stage]
            each, once = ([], [stage] * count) if zero == 1 else ([stage] * count, [])
            assert told == [("microbatch", each)] * m + [("step", once)], zero


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_zero3_in_a_pipeline_is_never_whole(schedule):
    """Two units of a stage at most, in use and on its way; none after a step, when parameters are NaN."""

    def rank(reshard=True):
        peak = 0

        def watch(sync):
            sync.reshard = reshard
            for flat in sync.shards:
                flat._resize = lambda numel, flat=flat, resize=flat._resize: (resize(numel), note(sync))

        def note(sync):
            nonlocal peak
            peak = max(peak, sum(flat.whole.untyped_storage().nbytes() for flat in sync.shards))

        run, _ = one_step(3, 4, schedule, 2, watch)
        sizes = sorted(8 * flat.numel for flat in run.sync.shards)
        left = [flat for flat in run.sync.shards if flat.whole.untyped_storage().size()]
        unread = all(isinstance(param, ShardedParameter) for param in run.model.parameters())
        return peak, sum(sizes[-2:]), sum(sizes), len(left), unread

    for peak, two, whole, left, unread in launch.run(rank, ranks=4):
        assert 0 < peak <= two < whole and left == 0 and unread
    for peak, two, *_ in launch.run(rank, False, ranks=4):  # control: kept from forward to backward
        assert peak > two
