"""`minitrain train`: any layout from flags, here and under torchrun; refused in one line before a rank
starts; the exit codes."""

import inspect
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from minitrain import launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store
from minitrain.cli import main, train_command
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import Text
from minitrain.model.training import flags
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.accounting import parameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.pieces import whole_piece
from tests import patience

TEXT = b"It is not enough to have a good mind; the main thing is to use it well. " * 40
SMALL = "--width 32 --heads 4 --layers 2 --length 16 --batch 4 --steps 4 --report-every 2 --sample 6".split()


@pytest.fixture
def minitrain(monkeypatch, tmp_path, capfd):
    """Runs the command line in this process, in an empty folder with text.txt: (exit code, stdout,
    stderr)."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["minitrain", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code or 0, *capfd.readouterr()

    return run


# ---- it trains -------------------------------------------------------------------------------------------


def test_any_layout_trains_and_goes_on_in_another(minitrain):
    """dp with tp and ZeRO, a pipeline, a cut sequence, hybrid sharding: each goes on where another one
    stopped."""
    forms = [
        "--dp 2 --tp 2 --zero 1",
        "--pp 2 --microbatches 4 --schedule 1f1b",
        "--cp 2 --layout zigzag",
        "--zero III --node 2 --dp 4",
    ]
    before = None
    for number, form in enumerate(forms):
        small = list(SMALL)
        code, out, err = minitrain(
            "train", *small, *form.split(), "--dropout", 0.1, "--frozen", "layers.1.*",
            *("--text", "text.txt", "--out", "run", "--checkpoint", "saved", "--every", 1, "--keep", 9),
            *(["--resume"] if before else []), *(["--async"] if number % 2 else []),
        )  # fmt: skip
        assert (code, err) == (0, ""), err
        assert "tokens/s, MFU" in out and "held out" in out
        assert "4 steps of 64 tokens; log in run; checkpoints in saved" in out
        strategy = re.search(r"parameters, (Strategy\(.*?\)), (\d) ranks on", out)
        assert int(strategy[2]) == (4, 2, 2, 4)[number]
        if before:
            assert f"resumed at step {number}; it was saved by {before}" in out
        before, store = strategy[1], Store("saved")
        manifest, files = store.open(4)
        assert [record["step"] for record in manifest["records"]] == [2, 4]
        assert manifest["strategy"]["precision"] == "float32"
        states = {entry.name for file in files for entry in file.entries}
        assert "optimizer/layers.1.norm1.weight/exp_avg" not in states
        assert "optimizer/layers.2.norm1.weight/exp_avg" in states
        for step in range(number + 2, 5):
            shutil.rmtree(store.path(step))  # as if it had stopped before


def test_ranks_that_are_left_go_on(minitrain):
    words = ["train", *SMALL, "--text", "text.txt", "--chaos", "kill 2 @1 backward", "--dp", 3]
    code, out, err = minitrain(*words, "--survive", "--zero", 1, "--checkpoint", "saved", "--every", 1)
    assert code == 0 and "step 2/4, 2 ranks" in out and "It writes" in out, err
    assert Store(Path("saved")).steps() == [3, 4]
    for more in (["--replace", 1], ["--restarts", 1]):
        assert minitrain(*words, *more)[0] == 2


def test_a_command_starts_again_from_its_checkpoint(minitrain, tmp_path):
    """Rank 1 is killed in step 3, when step 2 is saved; losses are a calm run's, to the bit."""
    words = ["train", *SMALL, "--steps", 6, "--report-every", 1, "--dp", 2, "--zero", 1, "--every", 2]
    words += ["--text", tmp_path / "text.txt"]
    fault = ["--chaos", "kill 1 @3 backward", "--checkpoint", "saved"]
    assert minitrain(*words, "--out", "calm")[0] == 0
    code, out, err = minitrain(*words, *fault, "--out", "ours", "--restarts", 1)
    assert code == 0 and "resumed at step 2" in out and "rank 1 died of SIGKILL" in err, err
    logs = ((tmp_path / of / "log.jsonl").read_text().splitlines() for of in ("calm", "ours"))
    calm, other = ({one["step"]: one["loss"] for one in map(json.loads, log)} for log in logs)
    assert other == calm and len(calm) == 6


def test_an_interrupted_command_goes_on(minitrain, tmp_path):
    """A process of its own; then in this one, which is interrupted once it has logged more."""
    files = {"text": "text.txt", "out": "run", "checkpoint": "saved"}
    paths = [part for flag, name in files.items() for part in (f"--{flag}", tmp_path / name)]
    more = "--every 5 --async --dp 2 --steps 9000 --report-every 5".split()
    words = (sys.executable, "-m", "minitrain", "train", *SMALL, *paths, *more)
    store, log = Store(tmp_path / "saved"), tmp_path / "run" / "log.jsonl"
    first = patience.start(words)
    patience.until(store.steps, first.pid)
    first.send_signal(signal.SIGINT)
    out, err = patience.output_of(first)
    assert first.returncode == 130, err
    assert "interrupted; the same command with --resume goes on from the last checkpoint" in out
    assert "Traceback" not in out + err
    step = store.steps()[-1]
    before, running = signal.signal(signal.SIGINT, signal.default_int_handler), [True]

    def interrupt():
        patience.until(lambda: not running or len(log.read_text().splitlines()) > step / 5 + 2)
        if running:
            os.kill(os.getpid(), signal.SIGINT)

    (watcher := threading.Thread(target=interrupt)).start()
    try:
        code, out, _ = minitrain(*words[3:], "--resume")
    finally:
        running.clear()
        watcher.join()
        signal.signal(signal.SIGINT, before)
    assert code == 130 and f"resumed at step {step}" in out
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(5, 5 * len(steps) + 1, 5))


def under_torchrun(folder, *words):
    here = dict(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(Path(main.__file__).parents[2]))
    # --standalone: it listens at a port that the system chooses
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher.append("--max-restarts=1")
    command = [*launcher, "-m", "minitrain", "train", *SMALL, "--text", "text.txt", *words]
    return patience.run(command, env=os.environ | here, cwd=folder)


def by_hand(folder):
    """What the job below should have come to: one process, one Trainer, settings written out. Not what the
    command makes of flags."""
    text, held_out = Text((folder / "text.txt").read_bytes()).split()
    config = GPTConfig(d_model=32, num_layers=2, num_heads=4, max_positions=256, dropout=0.1)
    hyper = Hyperparameters(steps=4, batch_size=4, length=16, lr=0.01, seed=3)
    run = parallelize(config, Strategy(precision="float64"), hyper.make_optimizer, seed=3)
    return list(Trainer(run, text, hyper, held_out=held_out, report_every=2).run()), run.state_dict()[
        "parameters"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback's name is Linux's")
def test_the_same_command_under_torchrun_and_resumed(tmp_path, minitrain):
    """The job trains to the numbers of one process though rank 1 is killed and torchrun starts it again, and goes
    on in another layout from the checkpoint of local ranks."""
    settings = ("--precision", "float64", "--seed", "3", "--dropout", "0.1", "--lr", "0.01", "--every", "2")
    settings = (*settings, "--checkpoint", "saved")
    ((records, weights),) = launch.run(by_hand, tmp_path, ranks=1)

    def check():
        manifest, files = Store("saved").open(4)
        saved = Saved(files)
        for one, other in zip(manifest["records"], records, strict=True):
            assert max(abs(one[name] - other[name]) for name in ("loss", "held_out", "norm")) < 1e-12
        for name, weight in weights.items():
            saved.fill(piece := whole_piece(f"parameters/{name}", torch.empty_like(weight)))
            assert (piece.values - weight).abs().max() < 1e-12

    done = under_torchrun(tmp_path, "--tp", "2", *settings, "--chaos", "kill 1 @3 backward", "--resume")
    said = "2 ranks on cpu" in done.stdout and "resumed at step 2" in done.stdout
    assert done.returncode == 0 and said and done.stdout.count("It writes:") == 1, done.stderr
    check()
    shutil.rmtree("saved")
    code, _, err = minitrain("train", *SMALL, "--text", "text.txt", "--pp", 2, *settings)
    assert code == 0, err
    check()
    shutil.rmtree(Store("saved").path(4))
    words = ("train", *SMALL, "--text", "text.txt", "--dp", 2, "--zero", 1, "--resume")
    code, out, err = minitrain(*words, *settings)
    said = "resumed at step 2; it was saved by Strategy(pp=2, precision='float64')"
    assert code == 0 and said in out, err


def test_a_job_of_another_size_is_refused_by_its_first_rank(minitrain, monkeypatch):
    for variable, value in dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("minitrain.ranks.launch.run", lambda *_, **__: pytest.fail("the job was joined"))
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        code, _, err = minitrain("train", "--dp", 3)
        assert code == 2
        assert (
            err.count("dp=3 · pp=1 · cp=1 · tp=1 are 3 ranks, but the job has 2") == err.count("\n") == lines
        )


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        ("--text /nowhere/at/all", "/nowhere/at/all does not exist"),
        ("--text empty", "empty is empty"),
        ("--length 10000000", "length=10000000 needs 10000001"),
        ("--batch 2 --dp 4", "a batch of 2 rows for dp=4 x microbatches=1; use at least 4 rows"),
        ("--dp 2 --microbatches 5", "a batch of 8 rows for dp=2 x microbatches=5; use at least 10 rows"),
        ("--steps 0", "steps=0: use a whole number from 1"),
        ("--lr -1", "lr=-1.0, min_lr=-0.1: need 0 <= min_lr <= lr"),
        ("--warmup 2000", "warmup=2000 of steps=1000"),
        ("--report-every 0", "report_every=0: use a whole number from 1"),
        ("--sample -1", "sample=-1: use a whole number from 0"),
        ("--dp 0", "dp=0: use a whole number from 1"),
        ("--heads 5", "num_heads 5"),
        ("--top-k 4", "top_k=4, but preset 'tiny' has no experts; add num_experts, or use another"),
        ("--preset tiny-moe --top-k 9", "top_k = 9 of 8 experts; shared ones"),
        ("--preset tiny-moe --dp 3 --ep 3 --batch 6", "ep=3 does not divide 8 experts; use ep 1"),
        ("--preset tiny-moe --ep 2", "ep=2 does not divide dp x cp=1; use ep 1"),
        ("--dp 2 --ep 2", "ep=2, but the model has no experts to share out; use ep=1"),
        (
            "--cp 2 --length 18",
            "T=18 is not a multiple of 4 pieces (cp=2, layout='zigzag'); pad the sequence to 20",
        ),
        ("--cp 2 --core rings", "core='rings'; use ring, ring_self_attention"),
        ("--pp 2 --schedule nonsense", "schedule='nonsense'; use gpipe, 1f1b"),
        ("--pp 2 --chunks 2", "chunks=2 with schedule='1f1b'; use chunks=1"),
        ("--pp 8", "layers"),
        ("--zero IV", "zero='IV'; use 0 (no sharding), a stage 1, 2 or 3, or hybrid sharding: NNN"),
        ("--zero 4", "zero=4; use 0"),
        ("--zero III --dp 3 --node 2", "node=2 does not divide dp=3"),
        ("--precision int8", "precision='int8'; use float32"),
        ("--max-positions 8 --length 16", "sequence 16 > max_positions 8"),
        ("--norm batch", "norm = 'batch'"),
        ("--dropout 1", "dropout = 1.0; must be in [0, 1)"),
        ("--frozen layers.77.*", "frozen='layers.77.*' matches no parameter; there are layers.0.tokens to"),
        ("--frozen *", "frozen=* leaves nothing to train"),
        ("--preset llama3.1-405b", "401,659,084,800 parameters need 6427 GB on 1 rank, "),
        ("--out text.txt", "text.txt"),
        ("--checkpoint text.txt", "text.txt"),
        ("--checkpoint saved", "saved has checkpoints up to step 7: add --resume to go on, or use another"),
        ("--checkpoint saved --every 0", "every=0: use a whole number from 1"),
        ("--checkpoint saved --keep 0", "keep=0: use a whole number from 1"),
        ("--resume", "--resume without a folder: add --checkpoint FOLDER"),
        ("--chaos nope", "fault 'nope': write KIND RANK @STEP POINT; KIND is one of kill, stop"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, minitrain, monkeypatch):
    Path("empty").touch()
    Path("saved/step-00000007").mkdir(parents=True)
    Path("saved/step-00000007/manifest.json").touch()
    monkeypatch.setattr("minitrain.ranks.launch.run", lambda *_, **__: pytest.fail("a rank was started"))
    code, out, err = minitrain("train", *words.split())
    assert code == 2 and said in err and err.startswith("minitrain: ") and err.count("\n") == 1 and not out, (
        err
    )


def test_a_checkpoint_of_another_recipe_is_bad_input_and_a_rank_that_fails_is_exit_code_1(minitrain):
    words = ("train", *SMALL, "--text", "text.txt")
    saving = ("--checkpoint", "saved")
    assert minitrain(*words, *saving, "--dp", 2)[0] == 0
    code, _, err = minitrain(*words, *saving, "--resume", "--seed", 5)
    assert (code, err.count("\n")) == (2, 1)
    assert "was made with seed=0, this run has seed=5: another run" in err
    code, _, err = minitrain(*words, "--lr", 1e30, "--dp", 2)
    assert (code, err.count("\n")) == (1, 1)
    assert re.match(r"minitrain: ranks? 0.* raised ValueError: loss .* lower lr=1e\+30", err)


def test_a_last_save_that_fails_is_exit_code_1(tmp_path):
    """A file system that takes files of 300 kB and no larger: said at each save, and at the end by the exit code."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    command = [
        sys.executable, "-m", "minitrain", "train", *SMALL, *"--text text.txt --checkpoint saved".split(),
    ]  # fmt: skip
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    done = subprocess.run(
        [*command, "--every", "2"], cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 1 and "File too large" in done.stderr, done.stderr
    assert done.stdout.count("File too large") == 2, done.stderr
    assert "4 steps of" in done.stdout
    assert not [*(tmp_path / "saved").glob("step-*[0-9]")]


def test_the_head_of_a_tied_model_can_be_frozen_by_its_name(minitrain):
    words = ("train", *SMALL, "--text", "text.txt", "--tied", "--frozen", "layers.3.out.weight")
    code, _, err = minitrain(*words)
    assert code == 0, err


# ---- flags -----------------------------------------------------------------------------------------------


def test_help_names_every_field():
    printed = CliRunner().invoke(main.app, ["train", "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, printed.splitlines())) <= 80 and "\nLayout over ranks" in printed
    for cls in (Strategy, Hyperparameters, GPTConfig, ExpertsConfig):
        for field in fields(cls):
            flag, is_one = f"--{field.name.replace('_', '-')}", field.name != "experts"
            assert (f"{flag} " in printed or f"{flag}," in printed) == is_one, flag
    more = "preset text out checkpoint async resume layers width heads batch"
    assert all(f"--{flag}" in printed for flag in more.split())
    assert str(Path.cwd()) not in printed  # no default that is a path of this machine


def test_every_flag_has_help():
    for cls in (Strategy, Hyperparameters, GPTConfig):
        assert all(flag.annotation.__metadata__[0].help for flag in flags.flags(cls)), cls


@dataclass(frozen=True)
class Settings:
    number: int = 3  # how many
    share: float | None = None  # of the rest
    word: int | str = 0  # or a number
    names: tuple[str, ...] = ()  # any
    is_on: bool = False  # or not


def test_a_field_is_a_flag():
    app, seen = Typer(add_completion=False), {}

    @app.command()
    @flags.options(flags.flags(Settings, short={"number": "-n"}))
    def command(first: str, **values):
        seen.update(first=first, **flags.chosen(Settings, values))

    assert CliRunner().invoke(app, ["a"]).exit_code == 0
    assert seen == dict(first="a", number=3, word="0", names=(), is_on=False)
    CliRunner().invoke(app, "a -n 4 --share 0.5 --word III --names x --names y --is-on".split())
    assert seen == dict(first="a", number=4, share=0.5, word="III", names=("x", "y"), is_on=True)
    assert [parameter.default for parameter in flags.flags(Settings, unset=True)] == [None] * 5
    left = [parameter.name for parameter in flags.flags(Settings, leave_out=("word",))]
    assert left == ["number", "share", "names", "is_on"]
    assert [*inspect.signature(command).parameters] == ["first", "number", "share", "word", "names", "is_on"]


def test_what_does_not_fit_says_how_much_is_free(monkeypatch):
    """The states once, of this machine's ranks alone."""
    config, strategy = presets["tiny"], Strategy(dp=2, precision="bfloat16")
    needed = 16 * parameters(config)
    free = lambda number: SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=number))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train_command, "psutil", free(needed))
    train_command.check_memory(config, strategy)
    monkeypatch.setattr(train_command, "psutil", free(needed - 1))
    with pytest.raises(ValueError) as error:
        train_command.check_memory(config, strategy)
    assert f"{parameters(config):,} parameters need 0 GB on 2 ranks, 0 GB are free: " in str(error.value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    train_command.check_memory(config, strategy)


def test_a_report_says_its_numbers():
    record = dict(loss=1.23456, held_out=None, tokens_per_s=12_345, mfu=0.345)
    assert train_command.describe(record) == "loss 1.235, 12.3k tokens/s, MFU 34%"
    assert train_command.describe(record | {"held_out": 2.0004}).startswith("loss 1.235 (held out 2.000), ")


def test_what_is_held_out_is_long_enough_for_a_window(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"abcde " * 50)
    _, held_out = train_command.open_data(4, file)
    size = len(held_out)
    assert train_command.open_data(size - 1, file)[1] is not None
    assert train_command.open_data(size, file)[1] is None, "a window is a token longer, for its last target"
