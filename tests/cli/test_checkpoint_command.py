"""`minitrain checkpoint`: what is there, is it whole, and to Hugging Face's names and back."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from minitrain import launch
from minitrain.checkpoint.format import Damaged, write_file
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store, file_name
from minitrain.cli import main
from minitrain.cli.checkpoint_command import config_in
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import Text
from minitrain.model.gpt import GPT
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.pieces import whole_piece
from minitrain.systems.checkpoint.hugging_face import (
    Tensors,
    Weights,
    config_of,
    family_of,
    incoming,
    settings_of,
    write_tensors,
)
from tests.saving import spoil

TRANSFORMERS = Path(__file__).parents[2] / "build" / "transformers"
TEXT = Text(b"It is not enough to have a good mind; the main thing is to use it well. " * 20, "Descartes")
SIZES = dict(d_model=16, num_layers=2, num_heads=4, max_positions=16)
GPT2 = dict(norm="layer", positions="learned", activation="gelu_tanh", bias=True, tied=True)
MODELS = {
    "Llama": GPTConfig(**SIZES, num_kv_heads=2),
    "GPT-2": GPTConfig(**SIZES, **GPT2),
    "Mixtral": GPTConfig(**SIZES, experts=ExpertsConfig(4, 2)),
}
HYPER = Hyperparameters(steps=4, batch_size=4, length=16)
STRATEGY = Strategy(dp=2, tp=2, zero=1, precision="float64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of checkpoints of steps 2 and 4, trained on four ranks, and their weights in the end."""
    root = tmp_path_factory.mktemp("saved")

    def rank():
        weights = {}
        for family, config in MODELS.items():
            run = parallelize(config, STRATEGY, HYPER.make_optimizer)
            trainer = Trainer(run, TEXT, HYPER, store=Store(root / family), save_every=2, report_every=2)
            for _ in trainer.run():
                pass
            weights[family] = run.state_dict()["parameters"]
        return weights

    return root, launch.run(rank, ranks=4)[0]


def named(weights, config):
    """A GPT's state_dict has a tied table under both names."""
    tied = {f"layers.{config.num_layers + 1}.out.weight": weights["layers.0.tokens"]} if config.tied else {}
    return weights | tied


def said(*words):
    done = CliRunner().invoke(main.app, ["checkpoint", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_what_is_there(saved, tmp_path):
    root, weights = saved
    (root / "Llama" / "step-00000006.writing").mkdir()
    code, out = said("ls", root / "Llama")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [
        "step-00000002",
        "step-00000004",
        "step-00000006.writing",
    ]
    assert out.count("4 files, by dp=2, tp=2, zero=1, precision=float64") == 2
    assert out.splitlines()[2].endswith("not complete")
    for line in out.splitlines()[:2]:
        files = (root / "Llama" / line.split()[0]).iterdir()
        assert f" {sum(file.stat().st_size for file in files) / 1e6:,.1f} MB   4 files" in line
    code, out = said("show", root / "Llama")
    assert '"step": 2' in said("show", root / "Llama", "--step", 2)[1], "the newest, unless told"
    assert '"step": 4' in out and f'"torch": "{torch.__version__}"' in out
    (line,) = (line for line in out.splitlines() if line.startswith("parameters/layers.0.tokens "))
    assert line.split()[1:4] == ["float64", "[256,", "16]"] and "pieces" in line
    assert out.count("\nparameters/") + out.startswith("parameters/") == len(weights["Llama"])
    for words, message in (
        (("ls", tmp_path), "has no checkpoints: give the folder of --checkpoint"),
        (("show", root / "Llama", "--step", 3), "no checkpoint of step 3 in .*; there are 2, 4"),
    ):
        with pytest.raises(ValueError, match=message):
            said(*words)


def test_a_manifest_of_ones_own_need_not_name_a_strategy(tmp_path):
    store = Store(tmp_path)
    file = write_file(store.disk, store.begin(3) / file_name(0), [whole_piece("w", torch.ones(2))], {})
    store.commit(3, [file], {})
    assert said("ls", tmp_path)[1].split()[-5:] == ["1", "files,", "by", "one", "rank"]
    assert "w " in said("show", tmp_path)[1]


def test_a_byte_that_has_changed_is_found(saved, tmp_path):
    root, _ = saved
    assert said("verify", root / "GPT-2") == (0, "step-00000002  whole\nstep-00000004  whole\n")
    file = root / "GPT-2" / "step-00000002" / "rank-00003.safetensors"
    spoil(file)
    data = bytearray(file.read_bytes())
    code, out = said("verify", root / "GPT-2")
    first, second = out.splitlines()
    assert code == 1 and second == "step-00000004  whole"
    assert first.startswith("step-00000002  DAMAGED") and "rank-00003" in first
    assert [said("verify", root / "GPT-2", "--step", step)[0] for step in (2, 4)] == [1, 0]
    with pytest.raises(ValueError, match="^no checkpoint of step 0 in .*; there are 2, 4$"):
        said("verify", root / "GPT-2", "--step", 0)
    header = int.from_bytes(data[:8], "little")
    data[8 + header :: 64] = bytes(byte ^ 4 for byte in data[8 + header :: 64])
    file.write_bytes(data)
    with pytest.raises(Damaged, match="rank-00003"):  # no weight is written that is not what was saved
        said("convert", root / "GPT-2", tmp_path, "--step", 2)


@pytest.mark.parametrize("family", MODELS)
def test_to_hugging_face_and_back(family, saved, tmp_path):
    root, weights = saved
    model, back, again = tmp_path / "model", tmp_path / "back", tmp_path / "again"
    code, out = said("convert", root / family, model)
    assert code == 0 and f"{(model / 'model.safetensors').stat().st_size:,} bytes" in out
    config = config_of(json.loads((model / "config.json").read_text()))
    assert asdict(config) == asdict(MODELS[family])
    theirs = load_file(model / "model.safetensors")  # by the library of others
    one, other = GPT(config, dtype=torch.float64), GPT(config, dtype=torch.float64)
    one.load_state_dict(dict(incoming(theirs, config)))
    other.load_state_dict(named(weights[family], config))
    tokens = torch.arange(12).view(1, 12) * 7
    assert torch.equal(one(tokens), other(tokens))

    assert said("convert", model, back)[0] == 0
    manifest, files = Store(back).open(0)
    found = Weights(Saved(files), MODELS[family])
    assert config_in(manifest) == MODELS[family] and len(files[0].entries) == len(weights[family])
    assert all(torch.equal(found[name], value) for name, value in weights[family].items())
    assert said("convert", back, again)[0] == 0
    assert (again / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        said("convert", root / family, model)


THEIRS = """
import sys; from pathlib import Path; sys.path.append(sys.argv[1])
import torch, transformers
from tests.systems.checkpoint.hugging_face_logits import exactly
how = dict(dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
for folder in map(Path, sys.argv[2:]):
    with exactly(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        logits = model(torch.arange(12).view(1, 12) * 7).logits
        model.save_pretrained(folder.parent / "theirs")
    torch.save(logits, folder.parent / "logits")
"""


@pytest.mark.skipif(not TRANSFORMERS.exists(), reason="transformers is no dependency: make transformers")
def test_transformers_loads_it_and_what_it_saves_comes_back(saved, tmp_path):
    """transformers computes norms and angles in float32 whatever the dtype; here that means float64."""
    root, weights = saved
    for family in MODELS:
        said("convert", root / family, tmp_path / family / "model")
    words = [TRANSFORMERS, *(tmp_path / family / "model" for family in MODELS)]
    command = [sys.executable, "-c", THEIRS, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TRANSFORMERS.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    for family, config in MODELS.items():
        folder, model = tmp_path / family, GPT(config, dtype=torch.float64)
        model.load_state_dict(named(weights[family], config))
        with torch.no_grad():
            ours = model(torch.arange(12).view(1, 12) * 7)
        assert (torch.load(folder / "logits") - ours).abs().max() < 1e-10
        assert said("convert", folder / "theirs", folder / "back")[0] == 0
        _, files = Store(folder / "back").open(0)
        found = Weights(Saved(files), config)
        assert all(torch.equal(found[name], value) for name, value in weights[family].items())


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="config.json of DeepSeek-V3 is not written here"):
        settings_of(presets["deepseek-v3"], family_of(presets["deepseek-v3"]))
    with pytest.raises(ValueError, match="the checkpoint is of Sequential, a module of somebody's own"):
        config_in({"identity": {"model": "Sequential"}})
    with pytest.raises(ValueError, match="does not exist: give a folder with model.safetensors"):
        Tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(Damaged, match="is no file of safetensors, or is damaged"):
        Tensors(tmp_path)


def test_several_files_and_their_index(tmp_path):
    x, y = torch.arange(6.0).view(2, 3), torch.arange(4)
    for name, value in (("x", x), ("y", y)):
        write_tensors(tmp_path / f"{name}.safetensors", {name: (value.dtype, value.shape)}, [(name, value)])
    index = {"weight_map": {"x": "x.safetensors", "y": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = Tensors(tmp_path)
    assert set(found) == {"x", "y"} and torch.equal(found["x"], x) and torch.equal(found["y"], y)
    (tmp_path / "y.safetensors").write_bytes((tmp_path / "y.safetensors").read_bytes()[:-1])
    with pytest.raises(Damaged, match="y.safetensors is no file of safetensors, or is damaged"):
        Tensors(tmp_path)
