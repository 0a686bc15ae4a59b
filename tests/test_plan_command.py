"""`minitrain plan`: a table, reasons and memory; written for other systems and read back; trained from its file."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from minitrain import cli, plan_command
from minitrain.measured_work import work_of
from minitrain.model.config import presets
from minitrain.plan.emit import megatron, plan_file
from minitrain.plan.planner import RECOMPUTE, Task
from minitrain.plan.predict.step import predict
from minitrain.simulate.machines import machine
from minitrain.strategy import Strategy

TASK = "--model small --machine a100 --ranks 2 --batch 4 --length 64".split()

MODELS = dict.fromkeys(("megatron", "deepspeed", "torchtitan", "minitrain"), "small")
PRECISION = dict(deepspeed="bfloat16")


def invoke(*words):
    return CliRunner().invoke(cli.app, [*map(str, words)])


def plan(*words):
    done = invoke("plan", *TASK, *words)
    assert done.exit_code == 0, done.output
    return done.output


def test_it_says_what_is_best_why_and_with_how_much_memory():
    said = plan("--explain", "--top", "3")
    rows = [line.split() for line in said.splitlines() if re.match(r"[123] ", line)]
    assert [row[0] for row in rows[:3]] == ["1", "2", "3"]
    for row in rows[:3]:
        dp, pp, cp, tp = map(int, row[1:5])
        assert dp * pp * cp * tp == 2 and row[10] in RECOMPUTE
    layouts, simulated = re.search(r"(\d+) layouts, (\d+) with their schedules", said).groups()
    assert 3 <= int(simulated) < int(layouts)
    assert "Memory of 1 in GB" in said and "2 is " in said and "3 is " in said
    shares = re.findall(r"^[a-z].* (\d+\.\d)%$", said, re.M)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("system", ["megatron", "deepspeed", "torchtitan", "minitrain"])
def test_the_best_that_can_be_said_is_written_and_read_back(system, tmp_path):
    """Whose time is then that of the one that was written: no other of the table is between."""
    file = tmp_path / ("plan.toml" if system == "torchtitan" else "plan.txt")
    words = ("--model", MODELS[system], "--precision", PRECISION.get(system, "bfloat16_main_grads"))
    said = plan(*words, "--emit", system, "--out", file)
    assert f"written to {file}" in said
    slower = re.search(r"written is \d+, (\S+)% slower than 1", said)
    compared = re.search(r"^\+(\S+)% of 1: ", plan(*words, "--compare", file), re.M)
    assert compared[1] == (slower[1] if slower else "0.0")


def test_what_no_layout_can_say_is_one_line():
    error = invoke("plan", *TASK, "--emit", "megatron", "--precision", "bfloat16_jit").exception
    assert isinstance(error, ValueError) and "fastest can be written" in str(error)


def test_without_a_file_the_text_is_printed():
    said = plan("--emit", "minitrain")
    job = plan_file.read(said[said.index("{") :])
    assert (job.rows, job.length, job.strategy.ranks) == (4, 64, 2)
    said = plan("--emit", "megatron")
    assert megatron.read(said[said.index("torchrun") :])[0].strategy.ranks == 2


def test_a_plan_is_trained(tmp_path, capfd):
    file = tmp_path / "plan.json"
    plan("--emit", "minitrain", "--out", file)
    tree = json.loads(file.read_text())
    tree["model"] |= dict(d_model=16, num_layers=2, num_heads=2)
    file.write_text(json.dumps(tree))
    text = tmp_path / "text.txt"
    text.write_bytes(b"what a plan says is what is trained. " * 200)
    done = invoke("train", "--plan", file, "--steps", 2, "--text", text, "--sample", 0)
    printed = done.output + capfd.readouterr().out
    assert done.exit_code == 0, printed
    assert f"{plan_file.read(file.read_text()).strategy}, 2 ranks" in printed
    assert "2 steps of 256 tokens" in printed


@pytest.mark.parametrize(
    "words, said",
    [
        (["--dp", "2"], "dp beside --plan"),
        (["--preset", "small"], "preset beside --plan"),
        (["--width", "32"], "d_model beside --plan"),
        (["--batch", "2"], "batch_size beside --plan"),
    ],
)
def test_flags_may_not_contradict_a_plan(words, said, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('{"format": 1, "strategy": {"dp": 2}, "model": {}, "rows": 4, "length": 64}')
    error = invoke("train", "--plan", file, *words).exception
    assert isinstance(error, ValueError) and said in str(error)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--model", "llama3-7b"], r"no model is called 'llama3-7b'; did you mean llama3-\d+b"),
        (["--machine", "h10"], "no machine is called 'h10'; did you mean h100"),
        (["--machine", "zzz"], "choose from v100"),
        (["--stack", "megatron"], "did you mean megatron-202"),
        (["--emit", "megatron-lm"], "no system is called 'megatron-lm'; did you mean megatron"),
        (["--ranks", "0"], "ranks=0"),
        (["--room", "1.5"], "room=1.5"),
        (["--length", "100000"], "max_positions"),
        (["--out", "nowhere/x"], "out=nowhere/x"),
        (["--compare", "nowhere"], "compare=nowhere: no such file"),
        (["--precision", "bf16"], "precision='bf16'"),
        (["--top", "0"], "top=0"),
    ],
)
def test_what_cannot_be_is_one_line(words, said):
    error = invoke("plan", *TASK, *words).exception
    assert isinstance(error, ValueError) and re.search(said, str(error)) and "\n" not in str(error)


def test_a_file_for_another_task_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('{"format": 1, "strategy": {"dp": 4}, "model": {}, "rows": 4, "length": 64}')
    error = invoke("plan", *TASK, "--compare", file).exception
    assert isinstance(error, ValueError) and "4 ranks, 4 rows of 64 tokens" in str(error)


def test_no_torch_before_names_are_known(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom minitrain import cli\n"
        "r = CliRunner().invoke(cli.app, ['plan', '--model', 'nope'])\nprint('torch' in sys.modules, r.exception)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("False no model is called 'nope'"), done


def test_the_launcher_is_for_the_nodes_of_the_machine(capsys):
    alone = replace(machine("a100"), devices_per_node=1)
    run = Task(presets["small"], alone, 2, 4, 64).run(Strategy(dp=2, precision="bfloat16"))
    plan_command.write([predict(run, work_of)], megatron, None)
    said = capsys.readouterr()
    assert said.out.startswith("torchrun --nnodes 2 --nproc-per-node 1 pretrain_gpt.py ")
    assert "start it on each of 2 nodes" in said.err
