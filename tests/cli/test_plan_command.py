"""`minitrain plan`: a table, reasons and memory; written for other systems and read back; trained from its file."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from minitrain.cli import main, plan_command
from minitrain.compose.dry_runs import work_of
from minitrain.model.config import presets
from minitrain.plan.planner import RECOMPUTE, Task
from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.systems.plan.emit import megatron, torchtitan, training_job

TASK = "--model small --machine a100 --ranks 2 --batch 4 --length 64".split()

PRECISION = dict(deepspeed="bfloat16")


def invoke(*words):
    return CliRunner().invoke(main.app, [*map(str, words)])


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
    assert 3 <= int(re.search(r"(\d+) layouts fit", said)[1])
    assert "Memory of 1 in GB" in said and "2 is " in said and "3 is " in said
    shares = re.findall(r"^[a-z].* (\d+\.\d)%$", said, re.M)
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("system", ["megatron", "deepspeed", "torchtitan", "minitrain"])
def test_the_best_that_can_be_said_is_written_and_read_back(system, tmp_path):
    """Whose time is then that of the one that was written: no other of the table is between."""
    file = tmp_path / ("plan.toml" if system == "torchtitan" else "plan.txt")
    words = ("--precision", PRECISION.get(system, "bfloat16_main_grads"))
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
    assert said.startswith(
        "small on 2 x A100 SXM 80GB, 4 x 64 tokens per step; stack overlapped (overlaps dp and pp; kernels fused)\n\n"
    )
    assert len(re.findall(r"^[1-9] +\d", said, re.M)) == 5, "five, unless told"
    assert "; room for 75 GB; 1: " in said and "2 is " in said and "3 is " not in said
    job = training_job.read(said[said.index("{") :])
    assert (job.rows, job.length, job.strategy.ranks) == (4, 64, 2)
    said = plan("--emit", "megatron")
    assert megatron.read(said[said.index("torchrun") :])[0].strategy.ranks == 2


SIXTEEN = "--model small --machine h100 --ranks 16 --batch 16 --length 256".split()


def test_flags_are_those_of_the_stack_and_what_else_is_needed_is_said(tmp_path):
    said = invoke("plan", *SIXTEEN, "--emit", "megatron", "--out", file := tmp_path / "run.sh").output
    said += file.read_text()
    assert "--overlap-grad-reduce" in said and "--train-iters" in said
    waits = invoke("plan", *SIXTEEN, "--emit", "megatron", "--stack", "megatron-2023").output
    assert "--overlap-grad-reduce" not in waits
    assert "With overlapped the fastest within 25% is another" in waits
    assert " tokens/s, " in waits and "days for 1e+12" in waits
    compared = invoke("plan", *SIXTEEN, "--compare", file).output
    assert re.search(r"not compared, .* --overlap-grad-reduce", compared), compared


def test_layouts_that_cannot_be_do_not_end_the_search():
    said = plan("--precision", "fp8_lm")
    assert set(re.findall(r"^\d(?: +\d+){5} +(\d)", said, re.M)) <= {"0", "1"}


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
    assert f"{training_job.read(file.read_text()).strategy}, 2 ranks" in printed
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
        (["--model", "llama3-7b"], r"no model is called 'llama3-7b'; did you mean 'llama3-\d+b"),
        (["--machine", "h10"], "machine='h10': use .*; did you mean h100"),
        (["--machine", "zzz"], "machine='zzz': use v100, "),
        (["--stack", "megatron"], "did you mean 'megatron-202"),
        (["--emit", "megatron-lm"], "no system is called 'megatron-lm'; did you mean 'megatron"),
        (["--ranks", "0"], "ranks=0"),
        (["--room", "1.5"], "room=1.5"),
        (["--length", "100000"], "max_positions"),
        (["--out", "nowhere/x"], "out=nowhere/x"),
        (["--out", "x"], "out=x without --emit"),
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


def test_the_launcher_is_for_the_nodes_of_the_machine(capsys):
    alone = replace(machine("a100"), devices_per_node=1)
    run = Task(presets["small"], alone, 2, 4, 64).run(Strategy(dp=2, precision="bfloat16"))
    plan_command.write([predict(run, work_of)], megatron, None)
    said = capsys.readouterr()
    assert said.out.startswith("torchrun --nnodes 2 --nproc-per-node 1 pretrain_gpt.py ")
    assert "start it on each of 2 nodes" in said.err


# ---- what is said of numbers that are known --------------------------------------------------------------


def told(step_s=2.0, strategy=Strategy(), **parts):
    """A prediction with these seconds by part, and 3 GB."""
    run = SimpleNamespace(strategy=strategy, microbatch=3)
    memory = {"parameters": 1.04e9, "gradients": 0, "activations": 1.96e9}
    return SimpleNamespace(run=run, step_s=step_s, mfu=0.456, memory=memory, parts=parts)


def test_the_table_says_every_number_of_a_layout():
    chunked = Strategy(
        dp=2, pp=4, tp=2, zero=1, schedule="interleaved", chunks=2, microbatches=8, recompute="full"
    )
    rows = [told(products=1.5, bubble=0.5), told(0.0123, chunked, products=0.003, bubble=0.009)]
    plain = replace(chunked, schedule="1f1b", chunks=1, zero=0)
    head, first, second, third = plan_command.table([*rows, told(strategy=plain, products=1)]).splitlines()
    said = "dp pp cp tp ep ZeRO schedule rows times recompute step MFU memory most time goes to"
    assert head.split() == said.split()
    assert first.split() == "1 1 1 1 1 1 0 - 3 1 none 2.00 s 45.6% 3.0 GB products 75%".split()
    assert second.split() == "2 2 4 1 2 1 1 interleaved x 2 3 8 full 12.3 ms 45.6% 3.0 GB bubble 73%".split()
    assert third.split()[6:8] == ["0", "1f1b"]


def test_reasons_come_largest_first():
    best = told(2.0, products=1.5, bubble=0.5, network=0.0)
    other = told(2.6, products=1.25, bubble=0.75, network=0.6)
    assert plan_command.reasons(best, other) == "network +600 ms, products -250 ms, bubble +250 ms"
    assert plan_command.reasons(best, best) == "they are equal"
    assert [plan_command.readable(s) for s in (1.0, 0.9996, 0.01234)] == ["1.00 s", "1e+03 ms", "12.3 ms"]


def test_the_first_that_can_be_written_is_and_it_is_said_how_much_slower_it_is(monkeypatch, capsys, tmp_path):
    def write(job):
        if job.strategy.dp < 3:
            raise ValueError(f"dp={job.strategy.dp} cannot be said")
        return "text\n", ["a note"], {}

    monkeypatch.setattr(torchtitan, "write", write)
    best = [told(s, Strategy(dp=dp)) for s, dp in ((2.0, 1), (2.1, 2), (2.5, 3), (2.6, 4))]
    for one in best:
        one.run.model, one.run.batch, one.run.length = presets["tiny"], 12, 8
    plan_command.write(best, torchtitan, tmp_path / "file")
    said = capsys.readouterr()
    notes = ["1: dp=1 cannot be said", "written is 3, 25.0% slower than 1", "a note"]
    assert said.err.splitlines() == notes and said.out == f"written to {tmp_path / 'file'}\n"
    assert (tmp_path / "file").read_text() == "text\n"
    plan_command.write(best[2:], torchtitan, None)
    said = capsys.readouterr()
    assert (said.err, said.out) == ("a note\n", "text\n")
    with pytest.raises(ValueError, match="^none of the 2 fastest can be written. 1: dp=1 cannot be said$"):
        plan_command.write(best[:2], torchtitan, None)
