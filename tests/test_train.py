"""The training step, and whole runs: equal on any number of ranks, resumed bit for bit, stopped with one line."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from minitrain import collectives, dryrun, launch, train_command
from minitrain.data import MASKED, Text
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.ledger import Ledger
from minitrain.mesh import Mesh
from minitrain.model import GPT, GPTConfig, cross_entropy_sum
from minitrain.optim import AdamW
from minitrain.parallelize import parallelize
from minitrain.train import Batch, NoReducer, accumulate, measure_peak_flops, train_step, valid_tokens
from minitrain.trainer import Recipe, Trainer, replace_file
from tests.parallel import TOLERANCE, Problem, difference, on_ranks, one_process

CONFIG = GPTConfig(d_model=32, num_layers=2, num_heads=2, max_positions=32)
RECIPE = Recipe(steps=12, batch_size=7, length=16, num_microbatches=1, lr=1e-2, warmup_steps=3, min_lr=1e-3)
TEXT = Text(b"It is not enough to have a good mind; the main thing is to use it well. " * 40, "Descartes")


# ---- the step ----


class Diary(NoReducer):
    """A reducer that writes down what happens, and when it was enabled."""

    def __init__(self, params):
        self.happened = []
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _: self.happened.append(f"backward {self.enabled}"))

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
    """Three steps with accumulation, uneven batches, unequal masks, clipping, a tied table and a frozen parameter."""
    problem = Problem(microbatches=2, batch_sizes=(12, 9, 11))
    reference = one_process(problem)
    for outcome in on_ranks(problem, lambda params, group: GradReducer(params, group, 3000), ranks):
        assert difference(outcome, reference) < TOLERANCE


def gradient_with_divisor(of_all_ranks):
    problem, group = Problem(), collectives.world()
    model = problem.model()
    reducer = GradReducer(model.parameters(), group)
    tokens, targets = problem.batch(2, group.rank(), group.size())
    count = valid_tokens(targets, group) if of_all_ranks else valid_tokens(targets) * group.size()
    accumulate(model, cross_entropy_sum, 1, reducer)(Batch(tokens, targets, count))
    reducer.finish()
    return model.layers[1].mlp.up.weight.grad.clone()


def test_a_mean_of_means_is_another_gradient():
    """The control of the one divisor: dividing by local counts, then by the ranks, is wrong when the counts differ."""
    (whole,), right, wrong = (launch.run(gradient_with_divisor, flag, ranks=n) for flag, n in ((1, 1), (1, 4), (0, 4)))
    assert (right[0] - whole).abs().max() < TOLERANCE
    assert (wrong[0] - whole).abs().max() > 1e-4


def test_bad_microbatches_are_one_line():
    with pytest.raises(ValueError, match="num_microbatches=0: use at least 1"):
        accumulate(nn.Identity(), cross_entropy_sum, 0, NoReducer())
    batch = Batch(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor(8))
    with pytest.raises(ValueError, match="num_microbatches=3, but this rank has 2 rows: use at most 2"):
        accumulate(nn.Identity(), cross_entropy_sum, 3, NoReducer())(batch)


def account_of_a_step():
    mesh = Mesh(dp=collectives.world().size())
    parallel = parallelize(GPT(CONFIG), mesh)
    optimizer = AdamW(parallel.model.parameters())
    run = accumulate(parallel.model, cross_entropy_sum, 2, parallel.reducer)
    with Ledger() as ledger:
        targets = torch.zeros(4, 16, dtype=torch.int64)
        batch = Batch(targets, targets, valid_tokens(targets, parallel.data_group))
        train_step(run, batch, optimizer, parallel.reducer, clip=1.0)
    numel = sum(param.numel() for param in parallel.model.parameters())
    return ledger.sent_bytes(), ledger.flops, ledger.num_calls("all_reduce"), numel


def test_a_step_runs_dry_and_sends_the_count_and_the_gradients():
    for ranks in (2, 4):
        real = launch.run(account_of_a_step, ranks=ranks)
        assert real == [dryrun.run(account_of_a_step, rank=rank, ranks=ranks) for rank in range(ranks)]
        sent, _, calls, numel = map(sum, zip(*real))
        assert sent == 2 * (ranks - 1) * (4 * numel // ranks + 8) and calls == 2 * ranks
    assert dryrun.run(account_of_a_step, rank=5, ranks=4096)[1] == real[0][1]


def test_measure_peak_flops():
    assert 1e8 < measure_peak_flops(size=256) < 1e16


# ---- the loop ----


def train(config, recipe, out=None, stop_after=None, dtype=torch.float64, text=TEXT, report_every=4):
    """Records and weights of a run, or of its first reports; goes on from the checkpoint in `out` if there is one."""
    parallel = parallelize(GPT(config, seed=recipe.seed, dtype=dtype), Mesh(dp=collectives.world().size()))
    train_text, held_out = text.split()
    run = Trainer(parallel, train_text, recipe, held_out=held_out, out=out, report_every=report_every)
    run.resume()
    for _ in islice(run.run(), stop_after):
        pass
    return run.records, {name: param.detach().clone() for name, param in run.model.named_parameters()}


def largest(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in b)


def test_a_whole_run_is_the_same_on_any_number_of_ranks():
    ((records, reference),) = launch.run(train, CONFIG, RECIPE, ranks=1)
    assert [record["step"] for record in records] == [4, 8, 12]
    for ranks in (2, 4):
        for others, weights in launch.run(train, CONFIG, RECIPE, ranks=ranks):
            assert largest(weights, reference) < TOLERANCE
            for name in ("loss", "held_out", "norm"):
                assert all(abs(a[name] - b[name]) < TOLERANCE for a, b in zip(records, others, strict=True))
    ((_, control),) = launch.run(train, CONFIG, replace(RECIPE, batch_size=8), ranks=1)
    assert largest(control, reference) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, dtype):
    config = replace(CONFIG, dropout=0.2)
    whole = launch.run(train, config, RECIPE, None, None, dtype, ranks=2)
    launch.run(train, config, RECIPE, tmp_path, 1, dtype, ranks=2)  # stops after the report of step 4
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    resumed = launch.run(train, config, RECIPE, tmp_path, None, dtype, ranks=2)
    for (records, weights), (all_records, reference) in zip(resumed, whole):
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
        assert [r["loss"] for r in records] == [r["loss"] for r in all_records]
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == resumed[0][0]


@pytest.mark.parametrize("lost", ["optimizer", "model", "step"])
def test_a_checkpoint_that_lacks_something_goes_on_elsewhere(tmp_path, lost):
    """The control of the test above: each part of the checkpoint matters."""
    ((_, whole),) = launch.run(train, CONFIG, RECIPE, ranks=1)
    launch.run(train, CONFIG, RECIPE, tmp_path, 1, ranks=1)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    if lost == "optimizer":
        saved["optimizer"]["state"][0]["exp_avg"].zero_()
    elif lost == "model":
        saved["model"]["layers.0.tokens"][65] += 1e-3
    else:
        saved["position"]["step"] -= 1
    torch.save(saved, tmp_path / "checkpoint.pt")
    ((_, resumed),) = launch.run(train, CONFIG, RECIPE, tmp_path, ranks=1)
    assert largest(resumed, whole) > 1e-5


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    ((_, whole),) = launch.run(train, CONFIG, RECIPE, ranks=1)
    launch.run(train, CONFIG, RECIPE, tmp_path, 2, ranks=4)
    for _, weights in launch.run(train, CONFIG, RECIPE, tmp_path, ranks=2):
        assert largest(weights, whole) < TOLERANCE


def test_the_loss_of_real_text_falls():
    """Below the 5.5 of no idea at all at once, and below what knowing the frequency of each byte gives."""
    text = Text.found()
    share = torch.bincount(torch.tensor(list(text.data))) / len(text)
    frequencies = -(share * share.log2().nan_to_num(neginf=0)).sum() * math.log(2)
    recipe = Recipe(steps=80, batch_size=8, length=64, warmup_steps=5)
    ((records, _),) = launch.run(train, GPTConfig(num_layers=2), recipe, None, None, torch.float32, text, 20, ranks=1)
    losses = [record["loss"] for record in records]
    assert losses == sorted(losses, reverse=True)
    assert records[-1]["held_out"] < frequencies < losses[0]


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(tmp_path):
    launch.run(train, CONFIG, RECIPE, tmp_path, 1, ranks=2)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    saved["model"]["layers.0.tokens"][65:] = math.nan
    torch.save(saved, tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(launch.RankError, match="loss nan, gradient norm nan between steps 4 and 8: lower lr=0.01"):
        launch.run(train, CONFIG, RECIPE, tmp_path, ranks=2)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    launch.run(train, CONFIG, RECIPE, tmp_path, 1, ranks=1)
    other_text = Text(TEXT.data.upper(), "loud")
    for config, recipe, text, words in (
        (replace(CONFIG, num_layers=3), RECIPE, TEXT, "num_layers=2, this run has num_layers=3"),
        (CONFIG, replace(RECIPE, lr=0.02), TEXT, "lr=0.01, this run has lr=0.02"),
        (CONFIG, RECIPE, other_text, "the saved position has text="),
    ):
        with pytest.raises(launch.RankError, match=words):
            launch.run(train, config, recipe, tmp_path, None, torch.float64, text, ranks=1)
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:1000])
    with pytest.raises(launch.RankError, match="checkpoint.pt is damaged .* delete it to start anew"):
        launch.run(train, CONFIG, RECIPE, tmp_path, ranks=1)


def train_with_a_folder_each(out):
    return train(CONFIG, RECIPE, out / str(collectives.world().rank()))


def test_ranks_that_do_not_see_one_folder_are_told(tmp_path):
    launch.run(train, CONFIG, RECIPE, tmp_path / "0", 1, ranks=1)
    with pytest.raises(launch.RankError, match="this rank is at step 4 and others are not: .* must be a folder that all"):
        launch.run(train_with_a_folder_each, tmp_path, ranks=2)


def test_a_file_is_replaced_in_one_piece_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    replace_file(path, lambda file: file.write(b"old"))

    def die_half_way(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError):
        replace_file(path, die_half_way)
    assert path.read_bytes() == b"old"
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- the command ----


def command(*arguments, **settings):
    """Listens to interrupts even if these tests run in the background of a shell, which has them ignored."""
    return subprocess.Popen([sys.executable, "-m", "minitrain.train", *map(str, arguments)], text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


SMALL = ("--width", 32, "--heads", 2, "--layers", 1, "--length", 16, "--batch", 4)


def test_the_command_trains_is_interrupted_and_goes_on(tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT.data)
    arguments = (*SMALL, "--text", tmp_path / "text.txt", "--out", tmp_path / "run", "--ranks", 2, "--steps", 4000)
    first = command(*arguments)
    log, patience = tmp_path / "run" / "log.jsonl", time.monotonic() + 120
    while not log.exists() and time.monotonic() < patience:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "the same command goes on from the last report" in out and "Traceback" not in out + err
    step = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["position"]["step"]
    second = command(*arguments)
    while len(log.read_text().splitlines()) <= step / 25 + 3 and time.monotonic() < patience + 60:
        time.sleep(0.05)
    second.send_signal(signal.SIGINT)
    out, _ = second.communicate(timeout=60)
    assert f"resumed at step {step}\n" in out and "tokens/s, MFU" in out and "held out" in out
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(25, 25 * len(steps) + 1, 25))


@pytest.mark.parametrize("arguments, words", [
    (("--preset", "tinny"), "unknown preset 'tinny'; there are tiny, small"),
    (("--text", "/nowhere/at/all"), "/nowhere/at/all does not exist"),
    (("--text", "EMPTY"), "is empty"),
    (("--length", 10**7), "use a longer text or length <="),
    (("--batch", 2, "--ranks", 4), "batch_size=2 for 4 ranks"),
    (("--microbatches", 5), "microbatches=5, but a rank has 4 of 8 rows"),
    (("--steps", 0), "steps=0: use at least 1"),
    (("--lr", -1), "peak_lr=-1"),
    (("--ranks", 0), "rank=0 of size=0"),
    (("--heads", 5), "num_heads 5"),
    (("--preset", "llama3.1-405b"), "401,659,084,800 parameters need"),
])
def test_bad_input_of_the_command_is_one_line(arguments, words, monkeypatch, tmp_path):
    (tmp_path / "EMPTY").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minitrain.train", "--ranks", "2", *map(str, arguments)])
    with pytest.raises(SystemExit, match=words) as error:
        train_command.main()
    assert "\n" not in str(error.value)


def test_help_names_every_option():
    out = CliRunner().invoke(train_command.app, ["--help"]).output
    for option in ("--preset", "--text", "--steps", "--ranks", "--batch", "--length", "--lr", "--out", "--seed"):
        assert option in out
    assert str(Path.cwd()) not in out  # no default that is a path of this machine
