"""What every Sync promises: optimizers of any kind, stand-ins for them, states for any layout, bytes and memory in a pipeline."""

import pytest
import torch

from minitrain import dryrun, launch
from minitrain.ledger import Ledger
from minitrain.model import GPT
from minitrain.optim import AdamW
from minitrain.parallelize import parallelize
from minitrain.strategy import Strategy
from tests.parallel import TOLERANCE, Problem, difference, rows_of_problem, small, train_parallel

PROBLEM = Problem(config=small(tied=False), clip=None)      # 29 words: padded under tp


# ---- optimizers ----------------------------------------------------------------------------------------------------------

EARLY = {"dp2": [dict(dp=2, zero=1), dict(dp=2, zero=2), dict(dp=2, zero=3), dict(dp=2, zero="III", node=2), dict(tp=2), dict(pp=2, zero=1)],
         "dp2 tp2": [dict(dp=2, tp=2, zero=1), dict(dp=2, tp=2, zero=3, sequence_parallel=True)]}


def adagrad(params):
    """Its sums of squares are there as soon as it is built, and not 0."""
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1, eps=1e-3)


@pytest.mark.parametrize("shape", EARLY)
def test_an_optimizer_that_has_states_when_it_is_built(shape):
    """Equal to one process, whose optimizer was built over whole parameters; without its first states the result is another."""
    def rank(ways, make=adagrad):
        return [train_parallel(PROBLEM, Strategy(**way), make_optimizer=make) for way in ways]

    ((reference,),), ((other,),) = (launch.run(rank, [{}], make, ranks=1) for make in (plain_adagrad, adagrad_from_nothing))
    assert difference(other, reference) > 1e-4
    for outcomes in launch.run(rank, EARLY[shape], ranks=Strategy(**EARLY[shape][0]).ranks):
        for way, outcome in zip(EARLY[shape], outcomes):
            assert difference(outcome, reference, part="pp" in way) < TOLERANCE, way


def plain_adagrad(params):
    """The same rule written out, with states made at the first step: no state of a stand-in is used."""
    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state.setdefault("sum", torch.full_like(param, 0.1)).addcmul_(param.grad, param.grad)
                param.addcdiv_(param.grad, state["sum"].sqrt() + 1e-3, value=-0.05)

    return Plain(params, {})


def adagrad_from_nothing(params):
    return torch.optim.Adagrad(params, lr=0.05, eps=1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3, "IGG"])
def test_stand_ins_are_named_whole_and_weightless(zero):
    """Under tp and ZeRO an optimizer is asked about parameters as one process has them, and pays nothing for it."""
    whole = {name: list(param.shape) for name, param in GPT(PROBLEM.config, device="meta").named_parameters()}

    def rank():
        seen = {}

        def make(params):
            for param in params:
                seen[param.global_name] = list(param.shape), param.untyped_storage().nbytes(), param.requires_grad
            return AdamW(params)

        parallelize(PROBLEM.config, Strategy(dp=2, tp=2, zero=zero, node=2 if zero == "IGG" else 1), make, frozen=[PROBLEM.frozen])
        return seen

    for seen in launch.run(rank, ranks=4):
        assert {name: shape for name, (shape, *_) in seen.items()} == {name: shape for name, shape in whole.items() if name != PROBLEM.frozen}
        assert all(held <= 8 and trainable for _, held, trainable in seen.values())


# ---- states --------------------------------------------------------------------------------------------------------------

LAYOUTS = [dict(dp=2, tp=2, zero=1), dict(tp=4), dict(dp=2, pp=2, zero=3), dict(dp=4, zero="III", node=2), dict(pp=2, tp=2),
           dict(dp=2, tp=2, zero=3, sequence_parallel=True)]


def adamw(params):
    return AdamW([{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in params if p.dim() == 1]}], lr=1e-2)


@pytest.mark.parametrize("words", [29, 9])
def test_a_state_goes_from_any_layout_to_any_other(words):
    """Two steps in one layout, two in the next, and so on round: equal to one process throughout. 9 words over tp=4 leave a rank with none."""
    problem = Problem(config=small(vocab_size=words, tied=words == 9), batch_sizes=(8,) * (2 * len(LAYOUTS)))

    def rank(layouts):
        states = []
        for number, layout in enumerate(layouts):
            run = parallelize(problem.config, Strategy(**layout, precision="float64", bucket_bytes=3000), adamw, seed=3 if not states else 99,
                              frozen=[problem.frozen])
            if states:
                run.load_state_dict(states[-1])
            for step in (2 * number, 2 * number + 1):
                run.step(run.batch(rows_of_problem(problem, step), step), problem.clip)
            states.append(run.state_dict())
        return states

    (whole,) = launch.run(rank, [{}] * len(LAYOUTS), ranks=1)
    for states in launch.run(rank, LAYOUTS, ranks=4):
        for layout, ours, theirs in zip(LAYOUTS, states, whole):
            for what in ("parameters", "optimizer"):
                assert ours[what].keys() == theirs[what].keys(), (layout, what)
            for name, param in theirs["parameters"].items():
                assert (ours["parameters"][name] - param).abs().max() < TOLERANCE, (layout, name)
            for name, state in theirs["optimizer"].items():
                assert state["step"] == ours["optimizer"][name]["step"]
                assert all((ours["optimizer"][name][key] - state[key]).abs().max() < TOLERANCE for key in ("exp_avg", "exp_avg_sq")), (layout, name)


# ---- a pipeline ------------------------------------------------------------------------------------------------------------

DEEP = Problem(config=small(tied=False, num_layers=8), batch_sizes=(24,), clip=None)


def one_step(zero, microbatches, schedule, dp, watch=None):
    """Over pp=2: bytes that this rank sends over dp as multiples of (dp-1)/dp of its stages' parameters."""
    run = parallelize(DEEP.config, Strategy(dp=dp, pp=2, zero=zero, microbatches=microbatches, schedule=schedule, precision="float64", bucket_bytes=3000), AdamW)
    if watch:
        watch(run.sync)
    batch = run.batch(rows_of_problem(DEEP, 0), 0)
    with Ledger() as ledger:
        run.step(batch)
    once = 8 * sum(flat.numel for flat in run.sync.flats) * (dp - 1) // dp
    return run, {op: ledger.sent_bytes(op, axis="dp") / once for op in ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_zero_sends_in_a_pipeline(schedule):
    """Stage 1 sends gradients once a step, 2 and 3 after each backward: m times; stage 3 gathers for each forward and each backward (I and
    W together are one). The same on real ranks and in dry runs of more."""
    sends = {1: lambda m: (1, 1), 2: lambda m: (1, m), 3: lambda m: (2 * m, m)}             # (all_gather, reduce_scatter)

    def rank():
        return [tuple(one_step(zero, m, schedule, 2)[1].values()) for zero in sends for m in (1, 3)]

    expected = [times(m) for times in sends.values() for m in (1, 3)]
    assert launch.run(rank, ranks=4) == [expected] * 4
    for zero in sends:
        for place in (0, 7):
            found = dryrun.run(lambda: one_step(zero, 3, schedule, 4)[1], rank=place, ranks=8)
            assert tuple(found.values()) == sends[zero](3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_zero3_in_a_pipeline_is_never_whole(schedule):
    """At any moment two units of a stage at most, one in use and one on its way; none after a step, when parameters read as NaN."""
    def rank(reshard=True):
        peak = 0

        def watch(sync):
            sync.reshard = reshard
            for flat in sync.flats:
                flat._resize = lambda numel, flat=flat, resize=flat._resize: (resize(numel), note(sync))

        def note(sync):
            nonlocal peak
            peak = max(peak, sum(flat.whole.untyped_storage().nbytes() for flat in sync.flats))

        run, _ = one_step(3, 4, schedule, 2, watch)
        sizes = sorted(8 * flat.numel for flat in run.sync.flats)
        left = [flat for flat in run.sync.flats if flat.is_whole]
        unread = all(param.isnan().all() for param in run.model.parameters())
        return peak, sum(sizes[-2:]), sum(sizes), len(left), unread

    for peak, two, whole, left, unread in launch.run(rank, ranks=4):
        assert 0 < peak <= two < whole and left == 0 and unread
    assert all(peak > two for peak, two, *_ in launch.run(rank, False, ranks=4))            # control: kept from forward to backward
