"""The training step, and whole runs: equal in any layout, resumed to the bit, stopped in one line."""

import json
import math
import shutil
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store
from minitrain.compose import trainer
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import MASKED, Rows, Text, random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training import step as step_module
from minitrain.model.training.hyperparameters import Hyperparameters, decaying_matrices
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import (
    Batch,
    NoReducer,
    accumulate,
    measure_peak_flops,
    train_step,
    valid_tokens,
)
from minitrain.plan.strategy import Strategy
from minitrain.precision.mixed import keep_states
from minitrain.precision.policies import POLICIES
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from tests.parallel import TOLERANCE, Problem, difference, on_ranks, one_process

CONFIG = GPTConfig(d_model=16, num_layers=2, num_heads=2, max_positions=16, tied=True)
HYPER = Hyperparameters(steps=6, batch_size=7, length=16, lr=1e-2, warmup=2)
TEXT = Text(b"It is not enough to have a good mind; the main thing is to use it well. " * 40, "Descartes")


# ---- the step --------------------------------------------------------------------------------------------


class Diary(NoReducer):
    """A reducer that writes down what happens, and when it was enabled."""

    def __init__(self, params):
        self.happened = []
        for param in params:
            param.register_post_accumulate_grad_hook(
                lambda _: self.happened.append(f"backward {self.enabled}")
            )

    def finish(self):
        self.happened.append("finish")


def test_only_the_last_backward_is_reduced_and_the_step_comes_after():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, bias=False)
    diary = Diary(layer.parameters())
    optimizer = AdamW(layer.parameters())
    optimizer.register_step_post_hook(lambda *_: diary.happened.append("step"))
    batch = Batch(torch.randn(5, 3), torch.randn(5, 3), torch.tensor(5))
    squares = accumulate(layer, lambda out, target: ((out - target) ** 2).sum(), 3, diary)
    result = train_step(squares, batch, optimizer, diary, clip=1.0)
    assert diary.happened == ["backward False", "backward False", "backward True", "finish", "step"]
    assert result.loss.shape == result.norm.shape == () and not result.loss.requires_grad
    assert train_step(squares, batch, optimizer, diary).norm is None


def test_microbatches_add_up_to_the_batch():
    torch.manual_seed(0)
    tokens = torch.randint(256, (7, 16))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(7, 16) < 0.5, MASKED)
    grads = {}
    for num_microbatches in (1, 3, 7):
        model = GPT(CONFIG, dtype=torch.float64)
        run = accumulate(model, cross_entropy_sum, num_microbatches, NoReducer())
        loss = run(Batch(tokens, targets, valid_tokens(targets)))
        grads[num_microbatches] = [loss, *(param.grad for param in model.parameters())]
    for parts in (3, 7):
        assert max((a - b).abs().max() for a, b in zip(grads[1], grads[parts])) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_equals_one_process(ranks):
    """Two steps: accumulation, uneven batches and masks, clipping, a tied table, a frozen parameter."""
    problem = Problem(microbatches=2, batch_sizes=(9, 11))
    reference = one_process(problem)
    for outcome in on_ranks(problem, lambda params, group: GradReducer(params, group, 3000), ranks):
        assert difference(outcome, reference) < TOLERANCE


def gradient_with_divisor(of_all_ranks):
    problem, group = Problem(), collectives.world()
    model = problem.model()
    reducer = GradReducer(model.parameters(), group)
    tokens, targets = problem.batch(1, group.rank(), group.size())
    count = valid_tokens(targets, group) if of_all_ranks else valid_tokens(targets) * group.size()
    accumulate(model, cross_entropy_sum, 1, reducer)(Batch(tokens, targets, count))
    reducer.finish()
    return model.layers[1].mlp.up.weight.grad.clone()


def test_a_mean_of_means_is_another_gradient():
    """Control of the one divisor: dividing by local counts, then by ranks, is wrong when counts differ."""
    (whole,), right, wrong = (
        launch.run(gradient_with_divisor, flag, ranks=n) for flag, n in ((1, 1), (1, 4), (0, 4))
    )
    assert (right[0] - whole).abs().max() < TOLERANCE and (wrong[0] - whole).abs().max() > 1e-4


def account_of_a_step():
    ranks = collectives.world().size()
    shape = dict(batch_size=4 * ranks, length=16)
    run = parallelize(CONFIG, Strategy(dp=ranks, microbatches=2), AdamW)
    with Ledger() as ledger:
        run.step(run.batch(Rows(partial(random_tokens, **shape), **shape), step=0), clip=1.0)
    numel = sum(param.numel() for param in run.model.parameters())
    return ledger.sent_bytes(), ledger.flops, ledger.num_calls("all_reduce"), numel


def test_a_step_runs_dry_and_sends_the_count_and_the_gradients():
    for ranks in (2, 4):
        real = launch.run(account_of_a_step, ranks=ranks)
        assert real == [dryrun.run(account_of_a_step, rank=rank, ranks=ranks) for rank in range(ranks)]
        sent, _, calls, numel = map(sum, zip(*real))
        assert sent == 2 * (ranks - 1) * (4 * numel // ranks + 8) and calls == 2 * ranks
    assert dryrun.run(account_of_a_step, rank=5, ranks=4096)[1] == real[0][1]


def sampled(strategy, most):
    run = parallelize(replace(CONFIG, max_positions=most), strategy, seed=0)
    return run.sample(torch.zeros(1, 16, dtype=torch.int64), n=4).shape


@pytest.mark.parametrize(
    "strategy, most", [(Strategy(cp=2), 18), (Strategy(tp=2, sequence_parallel=True), 17)]
)
def test_a_text_may_grow_beyond_positions_that_pieces_do_not_divide(strategy, most):
    """The last 18 tokens of it are looked at, padded to 20, five for each piece; or 17, padded to 18."""
    assert launch.run(sampled, strategy, most, ranks=2) == [(1, 20)] * 2


def paced():
    here, _ = start(CONFIG, Strategy(), replace(HYPER, steps=4), report_every=1)
    clock, step = [0.0], here.train_one_step

    def train_one_step():
        clock[0] += 1
        return step()

    trainer.devices = SimpleNamespace(now=lambda device: clock[0])
    here.train_one_step = train_one_step
    for _ in here.run():
        clock[0] += 100
    return [record["tokens_per_s"] for record in here.records]


def test_who_looks_at_a_record_takes_no_time_of_the_next():
    assert launch.run(paced, ranks=1) == [[HYPER.batch_size * HYPER.length] * 4]


def test_measure_peak_flops(monkeypatch):
    """The best of 8 tries, of 4 s, 3 s, ..; and a real clock goes on."""
    times = iter([0, 4, 4, 7, 7, 9, 9, 10, 10, 30, 30, 31.5, 32, 34, 34, 36])
    assert measure_peak_flops(size=4) > 0
    monkeypatch.setattr(step_module, "now", lambda device: next(times))
    assert measure_peak_flops(size=10) == 2000


# ---- the loop --------------------------------------------------------------------------------------------


def start(config, strategy, hyper, out=None, text=TEXT, report_every=2, precision="float64"):
    """A Trainer on this rank, gone on from the checkpoint in `out` if there is one, and what it said."""
    train_text, held_out = text.split()
    run = parallelize(
        config, replace(strategy, precision=precision), hyper.make_optimizer, seed=hyper.seed,
        frozen=hyper.frozen,
    )  # fmt: skip
    settings = dict(out=out, store=Store(out) if out else None, report_every=report_every)
    here = Trainer(run, train_text, hyper, held_out=held_out, save_every=report_every, **settings)
    return here, here.resume()


def train(config, strategy, hyper, out=None, stop_after=None, **settings):
    """Records, whole weights and moments, and a sample, of a run or of its first reports."""
    here, _ = start(config, strategy, hyper, out, **settings)
    for _ in islice(here.run(), stop_after):
        pass
    here.finish()
    state = here.parallel.state_dict()
    moments = {
        f"{key} of {name}": state["optimizer"][name][key]
        for name in state["optimizer"]
        for key in ("exp_avg", "exp_avg_sq")
    }
    written = here.sample(n=3)
    assert all(module.training for module in here.parallel.model.modules())  # what was looked at goes on
    here.parallel.train(False)
    assert (
        here.held_out_loss() > 0 and not here.parallel.training
    )  # and so does what is no more to be trained
    return here.records, state["parameters"] | moments, written


def largest(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in b)


def curves(a, b):
    """How far two logs are apart; both lack the norm of a step that was left out."""
    assert [record["step"] for record in a] == [record["step"] for record in b]
    pairs = [(one[name], other[name]) for one, other in zip(a, b) for name in ("loss", "held_out", "norm")]
    assert all((one is None) == (other is None) for one, other in pairs)
    return max(abs(one - other) for one, other in pairs if one is not None)


def plain_loop(hyper, peaks):
    """The same run by torch's AdamW and clipping, rates written out: nothing of Trainer, Run or optim."""
    text, held_out = TEXT.split()
    model = GPT(CONFIG, seed=hyper.seed, dtype=torch.float64)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, records = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []

    def loss_of(text, step, seed):
        tokens, targets = text.batch(step, 0, 1, hyper.batch_size, hyper.length, seed)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    for step, lr in enumerate(peaks):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(text, step, hyper.seed)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, hyper.clip)
        optimizer.step()
        held_out_loss = sum(loss_of(held_out, number, 0).item() for number in range(2)) / 2
        records.append(
            {"step": step + 1, "loss": loss.item(), "norm": norm.item(), "held_out": held_out_loss}
        )
    return records, {name: param.detach() for name, param in model.named_parameters()}


def test_a_run_is_the_plain_loop():
    hyper = replace(HYPER, steps=5, seed=2, lr=1e-2, clip=0.7)
    rates = [
        0.005,
        0.01,
        *(0.001 + 0.009 * (1 + math.cos(math.pi * done / 3)) / 2 for done in range(3)),
    ]  # two up, three down to a tenth
    records, reference = plain_loop(hyper, rates)
    ((others, weights, _),) = launch.run(lambda: train(CONFIG, Strategy(), hyper, report_every=1), ranks=1)
    assert curves(others, records) < TOLERANCE
    assert max((weights[name] - reference[name]).abs().max() for name in reference) < TOLERANCE


LAYOUTS = {
    1: [Strategy(microbatches=3), Strategy(recompute="stage")],
    2: [
        Strategy(dp=2),
        Strategy(dp=2, zero=1),
        Strategy(dp=2, zero=2, microbatches=2),
        Strategy(dp=2, zero=3),
        Strategy(tp=2),
        Strategy(tp=2, sequence_parallel=True),
        Strategy(cp=2),
        Strategy(cp=2, core="ulysses", layout="contiguous"),
        Strategy(pp=2, microbatches=4),
        Strategy(pp=2, microbatches=2, schedule="zb_h1"),
    ],
    4: [
        Strategy(dp=2, tp=2, zero=1),
        Strategy(pp=2, tp=2, microbatches=2),
        Strategy(dp=4, zero="IIG", node=2),
        Strategy(dp=2, cp=2, zero=3),
    ],
}


@pytest.mark.slow
def test_a_whole_run_is_the_same_in_any_layout():
    """Losses, held-out ones, norms, weights, moments, files; dropout, rows do not divide, some weights frozen."""
    config = replace(CONFIG, dropout=0.2)
    hyper = replace(HYPER, steps=4, frozen=("layers.1.norm1.*", "layers.2.attention.k.*"))
    ((records, reference, sample),) = launch.run(train, config, Strategy(), hyper, ranks=1)
    assert [record["step"] for record in records] == [2, 4]
    for ranks, layouts in LAYOUTS.items():
        for outcomes in launch.run(
            lambda: [train(config, strategy, hyper) for strategy in layouts], ranks=ranks
        ):
            for strategy, (others, weights, written) in zip(layouts, outcomes):
                assert max(largest(weights, reference), curves(records, others)) < TOLERANCE, strategy
                assert written == sample, strategy
    others = dict(batch_size=8), dict(frozen=()), dict(seed=1), dict(weight_decay=0.5)
    controls = [replace(hyper, **one) for one in others]
    (found,) = launch.run(lambda: [train(config, Strategy(), control) for control in controls], ranks=1)
    assert all(curves(others, records) > 1e-6 for others, *_ in found)
    ((others, *_),) = launch.run(train, CONFIG, Strategy(), hyper, ranks=1)
    assert curves(others, records) > 1e-4


def test_a_run_resumed_in_its_own_layout_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    config, hyper = replace(CONFIG, dropout=0.2), replace(HYPER, steps=4)
    kinds = [
        (Strategy(tp=2, sequence_parallel=True), "float32"),
        (Strategy(dp=2, zero=0), "bfloat16"),
        (Strategy(dp=2, zero=3), "bfloat16_short_moments"),
        (Strategy(dp=2, zero=2), "bfloat16_stochastic_short"),
        (Strategy(pp=2, microbatches=2), "bfloat16_jit"),
        (Strategy(dp=2, zero=1), "fp8_lm"),
        (Strategy(dp=2, zero=1, loss_scale=2.0**30, loss_scale_window=1), "float16"),  # overflows every other step
    ]  # fmt: skip

    def rank():
        for number, (strategy, precision) in enumerate(kinds):
            out, settings = tmp_path / str(number), dict(precision=precision)
            whole, reference, sample = train(config, strategy, hyper, **settings)
            train(config, strategy, hyper, out, 1, **settings)
            here, said = start(config, strategy, hyper, out, **settings)
            assert said == "resumed at step 2"
            assert not here.parallel.scale or here.parallel.scale.factor < 2.0**30
            records, weights, again = train(config, strategy, hyper, out, **settings)
            assert all(torch.equal(weights[name], reference[name]) for name in reference), strategy
            assert curves(records, whole) == 0 and again == sample
            collectives.barrier(collectives.world())  # rank 0 has written
            logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
            assert logged == Store(out).manifest(hyper.steps)["records"]

    launch.run(rank, ranks=2, timeout_s=120)


def test_a_run_goes_on_in_another_layout(tmp_path):
    """Saved by dp with ZeRO, then as a pipeline, with matrices cut, by four ranks, at last by one."""
    config, hyper = replace(CONFIG, dropout=0.2), replace(HYPER, steps=10)
    ((records, whole, _),) = launch.run(train, config, Strategy(), hyper, ranks=1)

    def rank(layouts):
        said = []
        for strategy in layouts:
            here, line = start(config, strategy, hyper, tmp_path)
            said.append(line)
            next(here.run())
            here.finish()
        return said

    first = launch.run(
        rank, [Strategy(dp=2, zero=1), Strategy(pp=2, microbatches=2), Strategy(tp=2)], ranks=2
    )
    assert (
        first[0]
        == first[1]
        == [
            "",
            "resumed at step 2; it was saved by Strategy(dp=2, zero=1, precision='float64')",
            "resumed at step 4; it was saved by Strategy(pp=2, microbatches=2, precision='float64')",
        ]
    )
    launch.run(rank, [Strategy(dp=2, cp=2, zero=3)], ranks=4)
    ((others, weights, _),) = launch.run(train, config, Strategy(), hyper, tmp_path, ranks=1)
    assert max(largest(weights, whole), curves(others, records)) < TOLERANCE


def test_a_run_goes_on_longer_with_other_rates_and_batches(tmp_path):
    """Two batches of 7, two of 4, two of 9: the samples 0 to 39, each once, by the rates of the hyperparameters of
    the day. Twice the sizes change on ranks; beside it a loop draws samples by number."""
    plans = [replace(HYPER, steps=2), replace(HYPER, steps=4, batch_size=4, lr=0.02, warmup=0)]
    plans += [replace(HYPER, steps=6, batch_size=9, lr=0.001, warmup=0, weight_decay=0.5, clip=0.1)]

    def on_ranks():
        said = []
        for hyper in plans:
            here, line = start(CONFIG, Strategy(dp=2, zero=1), hyper, tmp_path)
            said.append(line)
            assert len(list(here.run())) == 1
        return said, here.parallel.state_dict()["parameters"]

    def alone():
        state, text, first, numbers = None, TEXT.split()[0], 0, []
        for number, hyper in enumerate(plans):
            run = parallelize(CONFIG, Strategy(precision="float64"), hyper.make_optimizer, seed=hyper.seed)
            if state:
                run.load_state_dict(state)
            for step in (2 * number, 2 * number + 1):
                for group in run.sync.param_groups:
                    group["lr"] = hyper.lr_at(step)
                samples, first = range(first, first + hyper.batch_size), first + hyper.batch_size
                numbers += samples
                at = [text.window(sample, 16, hyper.seed) * 16 for sample in samples]
                rows = torch.tensor([list(text.data[start : start + 17]) for start in at])
                batch = Rows(lambda *_: (rows[:, :-1], rows[:, 1:].clone()), len(rows), 16)
                run.step(run.batch(batch, step), hyper.clip)
            state = run.state_dict()
        return numbers, state["parameters"]

    (said, weights), _ = launch.run(on_ranks, ranks=2)
    ((numbers, wanted),) = launch.run(alone, ranks=1)
    assert numbers == list(range(40)) and largest(weights, wanted) < TOLERANCE
    assert said == [
        "",
        "resumed at step 2; steps 2 -> 4, batch_size 7 -> 4, lr 0.01 -> 0.02, warmup 2 -> 0",
        "resumed at step 4; steps 4 -> 6, batch_size 4 -> 9, lr 0.02 -> 0.001, weight_decay 0.1 -> 0.5, clip 1.0 -> 0.1",
    ]


class Lossy(Saved):
    """A checkpoint that lacks something."""

    lost = ""

    def fill(self, piece):
        super().fill(piece)
        if self.lost == "optimizer" and piece.name == "optimizer/layers.0.tokens/exp_avg":
            piece.values.zero_()
        if self.lost == "parameters" and piece.name == "parameters/layers.0.tokens":
            piece.values[65] += 1e-3
        if self.lost == "step of the optimizer":
            for numbers in self.plain["numbers"].values():
                numbers["step"] = 0


def test_a_checkpoint_that_lacks_something_goes_on_elsewhere(tmp_path, monkeypatch):
    """The control of the tests above: each part of the checkpoint matters."""

    def rank():
        _, whole, _ = train(CONFIG, Strategy(), HYPER)
        apart = {}
        for lost in ("optimizer", "step of the optimizer", "parameters", "position"):
            out = tmp_path / lost
            train(CONFIG, Strategy(), HYPER, out, 1)
            trainer.Saved = type("Lost", (Lossy,), dict(lost=lost))
            here, _ = start(CONFIG, Strategy(), HYPER, out)
            trainer.Saved = Saved
            if lost == "position":
                here.step, here.saver = here.step - 1, None
            if lost == "step of the optimizer":  # numbers are read before pieces
                for state in here.parallel.sync.optimizer.state.values():
                    state["step"] = 0
            for _ in here.run():
                pass
            state = here.parallel.state_dict()["parameters"]
            apart[lost] = max((state[name] - whole[name]).abs().max().item() for name in state)
        return apart

    (apart,) = launch.run(rank, ranks=1)
    assert min(apart.values()) > 1e-5, apart


def test_zero_trains_on_every_rank_and_keeps_a_share():
    """After 12 steps ranks agree to the bit in losses and weights; each has its share of the moments."""
    hyper = replace(HYPER, steps=12, lr=3e-2, batch_size=8, frozen=("layers.1.norm1.*",))
    layouts = [Strategy(dp=2), *(Strategy(dp=2, zero=zero) for zero in (1, 2, 3, "NNG", "GGG"))]

    def rank():
        found = []
        for strategy in layouts:
            here, _ = start(CONFIG, strategy, hyper, report_every=4)
            losses = [record["loss"] for record in here.run()]
            logits = here.parallel(torch.arange(12).view(1, 12))
            state = here.parallel.state_dict()["parameters"]
            kept = sum(value["exp_avg"].numel() for value in here.parallel.sync.optimizer.state.values())
            found.append(
                (
                    losses,
                    logits.sum().item(),
                    {name: weight.sum().item() for name, weight in state.items()},
                    kept,
                )
            )
        return found

    first, second = launch.run(rank, ranks=2)
    whole = first[0][-1]
    for strategy, ours, theirs in zip(layouts, first, second):
        assert ours[:3] == theirs[:3], strategy
        assert ours[0] == sorted(ours[0], reverse=True) and ours[0][-1] < 3.5, strategy
        assert max(abs(a - b) for a, b in zip(ours[0], first[0][0])) < TOLERANCE, strategy
        assert ours[-1] + theirs[-1] <= 1.1 * whole or strategy == Strategy(dp=2), strategy


def test_the_loss_of_real_text_falls():
    """Below the 5.5 of no idea at all at once, and below what knowing the frequency of each byte gives."""
    text = Text.builtin()
    share = torch.bincount(torch.tensor(list(text.data))) / len(text)
    frequencies = -(share * share.log2().nan_to_num(neginf=0)).sum() * math.log(2)
    hyper = Hyperparameters(steps=80, batch_size=8, length=64, warmup=5)
    settings = dict(text=text, report_every=20, precision="float32")
    ((records, *_),) = launch.run(
        lambda: train(GPTConfig(num_layers=2), Strategy(), hyper, **settings), ranks=1
    )
    losses = [record["loss"] for record in records]
    assert losses == sorted(losses, reverse=True) and records[-1]["held_out"] < frequencies < losses[0]


def said_by(call):
    """What ValueError a call raises on this rank."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_loss_that_is_no_number_stops_every_rank_before_it_is_saved(tmp_path):
    """Also on ranks that do not compute it, and if only the update was bad: without clipping the norm is
    measured all the same."""
    layouts = [Strategy(dp=2, zero=1), Strategy(pp=2, microbatches=2), Strategy(tp=2)]

    def go_on(strategy, out):
        here, _ = start(CONFIG, strategy, HYPER, out)
        with torch.no_grad():
            for piece in here.parallel.pieces():
                if piece.name == "parameters/layers.0.tokens":
                    piece.values.fill_(math.nan)
        here.parallel.sync.publish()
        for _ in here.run():
            pass

    def rank():
        said = []
        for number, strategy in enumerate(layouts):
            out = tmp_path / str(number)
            train(CONFIG, strategy, HYPER, out, 1)
            said.append(said_by(lambda: go_on(strategy, out)))
            assert Store(out).steps() == [2]
        wild = replace(HYPER, lr=1e200, clip=math.inf)
        said.append(said_by(lambda: train(CONFIG, Strategy(dp=2), wild, tmp_path / "wild")))
        assert not (tmp_path / "wild").exists()
        return said

    first, second = launch.run(rank, ranks=2)
    assert first == second
    for message in first[:-1]:
        assert message.startswith(
            "loss nan, gradient norm nan, held-out loss nan between steps 2 and 4: lower lr=0.01"
        ), message
    assert "between steps 0 and 2: lower lr=1e+200" in first[-1]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    other_text = Text(TEXT.data.upper(), "loud")

    def rank():
        train(CONFIG, Strategy(), HYPER, tmp_path, 1)
        said = [
            said_by(lambda: train(config, Strategy(), hyper, tmp_path, text=text, precision=precision))
            for config, hyper, text, precision in (
                (replace(CONFIG, num_layers=3), HYPER, TEXT, "float64"),
                (CONFIG, replace(HYPER, seed=1), TEXT, "float64"),
                (CONFIG, replace(HYPER, length=8), TEXT, "float64"),
                (CONFIG, replace(HYPER, steps=1, warmup=1), TEXT, "float64"),
                (CONFIG, replace(HYPER, frozen=("layers.1.*",)), TEXT, "float64"),
                (CONFIG, HYPER, TEXT, "float32"),
                (CONFIG, HYPER, other_text, "float64"),
            )
        ]
        manifest = Store(tmp_path).path(2) / "manifest.json"
        whole = manifest.read_bytes()
        for damaged in (whole[:1000], whole[:-100], b"", b"no checkpoint"):
            manifest.write_bytes(damaged)
            said.append(said_by(lambda: train(CONFIG, Strategy(), HYPER, tmp_path)))
            (tmp_path / "step-00000002.damaged").rename(manifest.parent)  # where it was set aside
        return said

    (said,) = launch.run(rank, ranks=1)
    for message, words in zip(
        said,
        (
            "num_layers=2, this run has num_layers=3",
            "seed=0, this run has seed=1: another run",
            "length=16, this run has length=8: another run",
            "has 2 steps behind it, and steps=1: ask for more",
            "frozen=[], this run has frozen=['layers.1.*']",
            "precision=float64, this run has precision=float32",
            "the saved position has text=",
            *["manifest.json is damaged; passed over. No checkpoint in "] * 4,
        ),
        strict=True,
    ):
        assert words in message and "\n" not in message


def test_ranks_that_do_not_see_one_folder_are_told_alike(tmp_path):
    def rank():
        mine = tmp_path / str(collectives.world().rank())
        train(CONFIG, Strategy(dp=2), HYPER, tmp_path / "0", 1)
        said = [said_by(lambda: start(CONFIG, Strategy(dp=2), HYPER, mine))]
        if collectives.world().rank() == 1:  # another checkpoint of the same step
            manifest = shutil.copytree(tmp_path / "0", mine) / "step-00000002" / "manifest.json"
            manifest.write_bytes(manifest.read_bytes() + b" ")
        return [*said, said_by(lambda: start(CONFIG, Strategy(dp=2), HYPER, mine))]

    first, second = launch.run(rank, ranks=2)
    for said in (*first, *second):
        assert said.startswith("rank 1 sees other checkpoints than rank 0")


def test_a_module_of_ones_own_is_trained_and_resumed(tmp_path):
    def rank(zero, out, stop_after):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)).double()
        run = parallelize(module, Strategy(dp=2, zero=zero), HYPER.make_optimizer)
        store = Store(out) if out else None
        here = Trainer(run, TEXT, HYPER, store=store, report_every=2, save_every=2, peak_flops=1e9)
        said = here.resume()
        for _ in islice(here.run(), stop_after):
            pass
        here.finish()
        assert "mfu" not in here.records[0] and here.records[0]["held_out"] is None
        return said, run.state_dict()["parameters"]

    whole = launch.run(rank, 0, None, None, ranks=2)
    launch.run(rank, 3, tmp_path, 1, ranks=2)
    for said, weights in launch.run(rank, 1, tmp_path, None, ranks=2):
        assert said == "resumed at step 2; it was saved by Strategy(dp=2, zero=3)"
        assert largest(weights, whole[0][1]) < TOLERANCE


# ---- hyperparameters -------------------------------------------------------------------------------------


def test_matrices_decay_and_masters_have_float32_at_least():
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    decays, does_not = decaying_matrices([vector, matrix], 0.3)
    assert decays == {"params": [matrix], "weight_decay": 0.3}
    assert does_not == {"params": [vector], "weight_decay": 0.0}
    assert decaying_matrices(iter([vector]), 0.3) == [does_not]
    for dtype, master in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        optimizer = replace(HYPER, weight_decay=0.3).make_optimizer(
            [nn.Parameter(torch.ones(2, 3, dtype=dtype))]
        )
        keep_states(optimizer, POLICIES[str(dtype).removeprefix("torch.")])
        assert optimizer.defaults["master_dtype"] == master
        assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_the_rate_of_a_recipe():
    hyper = Hyperparameters(steps=100, lr=1.0)
    assert [hyper.lr_at(step) for step in (0, 19, 20)] == [0.05, 1.0, 1.0]
    assert hyper.lr_at(100) == pytest.approx(0.1)
    short, down = Hyperparameters(steps=4, lr=1.0), Hyperparameters(steps=4, warmup=0, min_lr=0, lr=1.0)
    assert [short.lr_at(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0] and down.lr_at(4) == 0
    assert asdict(hyper)["warmup"] is None  # what was said, not what follows from it


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(lr=-1), "lr=-1, min_lr=-0.1: need 0 <= min_lr <= lr"),
        (dict(min_lr=1), "lr=0.003, min_lr=1: need"),
        (dict(steps=5, warmup=6), "warmup=6 of steps=5: lr is never reached; use 0 to 5"),
        (dict(clip=0), "clip=0: must be > 0"),
    ],
)
def test_bad_recipes_are_one_line(settings, words):
    with pytest.raises(ValueError, match=words):
        Hyperparameters(**settings)
