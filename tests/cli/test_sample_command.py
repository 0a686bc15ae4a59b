"""`minitrain sample` and `train --start`: weights alone of a checkpoint, in any layout, refused in one line."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minitrain import launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store
from minitrain.cli import main
from minitrain.cli.checkpoint_command import config_in
from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import Text
from minitrain.model.gpt import GPT, cross_entropy_sum, generate
from minitrain.plan.strategy import Strategy
from minitrain.systems.checkpoint.hugging_face import Weights

TEXT = b"It is not enough to have a good mind; the main thing is to use it well. " * 40
SIZES = "--width 16 --heads 4 --kv-heads 2 --layers 2 --length 16 --max-positions 24 --batch 4 --lr 0.02 --steps 8"
TRAIN = f"train {SIZES} --every 4 --report-every 4 --sample 3 --text text.txt --checkpoint saved"
TRAIN += " --precision float64 --tp 2 --zero 1 --dp 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        Path("text.txt").write_bytes(TEXT)
        assert minitrain(TRAIN)[0] == 0
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def minitrain(line: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    done = CliRunner().invoke(main.app, shlex.split(line))
    return done.exit_code, str(done.exception) if isinstance(done.exception, ValueError) else done.output


def model_of(name: str, step: int) -> GPT:
    manifest, files = Store(name).open(step)
    weights = Weights(Saved(files), config_in(manifest))
    model = GPT(config_in(manifest), dtype=torch.float64)
    model.load_state_dict({name: weights[name] for name in weights.entries})
    return model


def test_any_layout_writes_the_text_of_the_weights():
    """Past the end of the model's 24 positions, too."""
    prompt = torch.tensor([list(b"It is not")])
    texts = {}
    for step in (4, 8):
        tokens = generate(model_of("saved", step), prompt, 20, temperature=0.5, seed=3)
        texts[step] = bytes(tokens[0].tolist()).decode(errors="replace") + "\n"
    words = "sample saved --prompt 'It is not' --tokens 20 --temperature 0.5 --seed 3"
    for layout in ("", "--tp 2 --sequence-parallel", "--pp 2 --microbatches 2", "--cp 2", "--dp 2 --zero 3"):
        assert minitrain(f"{words} {layout}") == (0, texts[8]), layout
    assert minitrain(f"{words} --step 4") == (0, texts[4]) and texts[4] != texts[8]
    likeliest = minitrain(f"{words} --temperature 0")[1]
    assert minitrain(f"{words} --top-k 1")[1] == likeliest != texts[8]
    assert minitrain(f"{words} --top-k 256")[1] == texts[8]
    assert minitrain(f"{words} --precision float32")[0] == 0  # converted


def test_nothing_of_the_optimizer_is_read():
    """On two ranks half of the weights each, but for what tp does not cut."""

    def rank():
        manifest, files = Store("saved").open(8)
        run = parallelize(config_in(manifest), Strategy(tp=2, precision="float64"))
        saved = Saved(files, weights=True)
        run.load_pieces(saved)
        return saved.read_bytes, sum(param.nbytes for param in run.model.parameters())

    for read, needed in launch.run(rank, ranks=2):
        assert needed == read


@pytest.mark.parametrize(
    "words, said",
    [
        ("nowhere", "nowhere has no checkpoints: give the folder of --checkpoint"),
        ("saved --step 5", "no checkpoint of step 5 in saved; there are 4, 8"),
        ("saved --tokens -1", "tokens=-1"),
        ("saved --top-k -1", "top_k=-1"),
        ("saved --temperature -1", "temperature=-1.0"),
        ("saved --temperature nan", "temperature=nan"),
        ("saved --tp 3", "tp=3 does not divide num_heads=4"),
        ("saved --core nope", "core='nope'"),
        (f"saved --prompt {'x' * 25}", "a prompt of 25 tokens; this model reads 1 to 24 (max_positions)"),
        ("saved --prompt=", "a prompt of 0 tokens"),
    ],
)
def test_bad_input_is_one_line(words, said, monkeypatch):
    monkeypatch.setattr("minitrain.ranks.launch.run", lambda *_, **__: pytest.fail("a rank was started"))
    code, out = minitrain(f"sample {words}")
    assert code == 1 and said in out and "\n" not in out


# ---- weights to begin with -------------------------------------------------------------------------------


def test_training_starts_from_converted_weights():
    """With a rate of zero the held-out loss is that of the converted model, in any layout; then from a trained
    checkpoint, whose moments stay there. Once there are checkpoints, --resume goes on from these."""
    for words in ("saved model", "model imported"):
        assert minitrain(f"checkpoint convert {words}")[0] == 0
    model, (_, held_out) = model_of("imported", 0), Text(TEXT).split()
    batches = [held_out.batch(step, 0, 1, 4, 16) for step in range(2)]
    with torch.no_grad():
        losses = [cross_entropy_sum(model(tokens), targets) / targets.numel() for tokens, targets in batches]
    base = (
        "train --text text.txt --start imported --length 16 --batch 4 --steps 2 --report-every 2 --sample 3"
    )
    exact = "--precision float64"
    kinds = f"{exact} --dp 2 --tp 2 --zero 3 --offload optimizer", f"{exact} --pp 2", "--precision float32"
    for number, layout in enumerate(kinds):
        code, out = minitrain(f"{base} --lr 0 --out out{number} {layout}")
        assert code == 0 and " weights of imported/step-00000000\n" in out
        (record,) = map(json.loads, Path(f"out{number}/log.jsonl").read_text().splitlines())
        assert abs(record["held_out"] - sum(losses) / 2) < (1e-12 if exact in layout else 1e-4)
    words = f"{base} --start saved --checkpoint goes_on --dropout 0.1"
    assert minitrain(words)[0] == 0
    _, (file,) = Store("goes_on").open(2)
    assert {numbers["step"] for numbers in file.plain["numbers"].values()} == {2}
    code, out = minitrain(f"{words} --steps 4 --resume")
    assert code == 0 and " resumed at step 2; steps 2 -> 4\n" in out and "weights of" not in out
    for more, said in (
        ("--layers 3", "num_layers=3 beside --start: imported has num_layers=2; leave it out"),
        ("--preset small", "--start beside --preset: each says which model; leave one out"),
        ("--top-k 2", "top_k=2, but imported has no experts"),
        ("--length 32", "sequence 32 > max_positions 24"),
        ("--checkpoint imported --resume", "imported/step-00000000 has weights alone, of no run: begin with"),
    ):
        code, out = minitrain(f"{base} {more}")
        assert code == 1 and said in out and "\n" not in out
