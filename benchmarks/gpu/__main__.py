"""`make gpu` or `python -m benchmarks.gpu`: what a GPU has to say, in at most 9 minutes; several: --node.

Each section is a process of its own with a time limit: what fails or hangs hides nothing. As it ends, its
verdict and seconds are printed; its output is in build/gpu/NAME.txt. Quick and telling ones come first, since
what is left when the time is up is not run. build/gpu.json has it all, and `--save build/gpu.json` puts its
figures into results.json. --only bf16,fp8 runs some; --tiny runs the same code on the CPU in small sizes, and
its figures are no measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "build" / "gpu"
FIGURES = "figures: "  # the line of a section's output that has its rows
AT_MOST_S = 530


@dataclass(frozen=True)
class Section:
    name: str
    limit_s: int
    command: Sequence[str]  # of python; {tiny} and {workers} are filled in
    needs: Sequence[str] = ()  # modules that a bare machine may not have


def measured(name: str, limit_s: int, module: str) -> Section:
    return Section(name, limit_s, ("-m", f"benchmarks.gpu.{module}", name, "{tiny}"))


def chapter(number: str) -> Section:
    command = "-m", "minitrain", "run", number, "--out", str(OUT / "chapters")
    return Section(f"chapter {number}", 200, command, ("nbclient", "ipykernel", "matplotlib", "pyseccomp"))


DOCTOR = Section("doctor", 60, ("-m", "minitrain", "doctor"))
TESTS = "-m", "pytest", "-vv", "-m", "cuda", "-p", "no:cacheprovider", "{workers}", "{tests}"
LAYOUTS = "-m", "tests.layouts", "--gpu", "--draws", "{draws}", "--seconds", "75", "--seed"
ONE = (
    DOCTOR,
    measured("attention", 60, "beside"),
    measured("bf16", 120, "steps"),
    Section("tests", 180, TESTS, ("pytest", "hypothesis")),
    measured("fp8", 180, "steps"),
    measured("offload", 90, "beside"),
    measured("checkpoint", 60, "beside"),
    chapter("00"),
    chapter("03"),
    Section("layouts", 110, (*LAYOUTS, "7")),
    chapter("08"),
    chapter("15"),
)
BOUND = "-m", "benchmarks.gpu.node", "bound"
NODE = (
    DOCTOR,
    Section(
        "bound", 60, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{gpus}", *BOUND)
    ),
    measured("ratios", 150, "node"),
    Section("tests", 240, TESTS, ("pytest", "hypothesis")),
    Section("layouts", 110, (*LAYOUTS, "8")),
)
SOME_TESTS = ("attention", "memory", "ranks")  # with --tiny


def filled(command: Sequence[str], tiny: bool, gpus: int) -> list[str]:
    """GPUs are shared by the workers of pytest, each with the ranks of its test."""
    workers = min(6, max(1, os.cpu_count() // 2)) * bool(importlib.util.find_spec("xdist"))
    marked = [path for path in sorted(ROOT.glob("tests/**/*.py")) if "mark.cuda" in path.read_text()]
    tests = [str(path) for path in marked if not tiny or path.relative_to(ROOT).parts[1] in SOME_TESTS]
    known = {
        "{tiny}": ["--tiny"] * tiny,
        "{draws}": ["2" if tiny else "10"],
        "{gpus}": [str(gpus)],
        "{workers}": [f"-n{workers}"] * (workers > 1 and not tiny),
        "{tests}": ["--rehearse"] * tiny + tests,
    }
    return [sys.executable, *(part for word in command for part in known.get(word, [word]))]


def run(section: Section, limit_s: float, tiny: bool, gpus: int) -> dict:
    """Its verdict, the last line it has said, seconds and rows. What hangs is killed, with its children."""
    missing = [module for module in section.needs if not importlib.util.find_spec(module)]
    if missing or limit_s < 5:
        why = f"{missing[0]} is not installed" if missing else "no time is left"
        return dict(name=section.name, verdict="not run", said=why, seconds=0.0, rows=[])
    path, started = OUT / f"{section.name.replace(' ', '-')}.txt", time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with open(path, "wb") as file:
        how = dict(cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        process = subprocess.Popen(filled(section.command, tiny, gpus), **how)
        try:
            verdict = "passed" if process.wait(limit_s) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            verdict = "TIME OUT"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    rows = [row for line in lines if line.startswith(FIGURES) for row in json.loads(line[len(FIGURES) :])]
    said = next((line for line in reversed(lines) if not line.startswith(FIGURES)), "")
    return dict(name=section.name, verdict=verdict, said=said, seconds=time.monotonic() - started, rows=rows)


def gpus_here() -> list[str]:
    """Name, driver and memory of each, or names alone: asked elsewhere, this process leaves CUDA alone."""
    names = "import torch; [print(torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]"
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    for ask in (smi, [sys.executable, "-c", names]):
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
            return said.stdout.splitlines()
    return []


def show(row: dict) -> str:
    what, sides = f"{row['name']:42} vs {row['peer']:32}", f"{row['ours']:10.4g} {row['theirs']:10.4g}"
    verdict = f"goal {row['goal']:.2f} {'met' if row['ratio'] <= row['goal'] else 'NOT MET'}"
    return f"    {what} {sides} {row['unit']:4} ratio {row['ratio']:5.2f}, {verdict}"


def save(path: Path) -> None:
    from benchmarks.measure import Row
    from benchmarks.measure import save as save_rows

    run = json.loads(path.read_text())
    if run["tiny"]:
        raise SystemExit(f"{path} is of a run with --tiny: no measurement")
    save_rows([Row(**row) for section in run["sections"] for row in section["rows"]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help="sections for two GPUs or more")
    parser.add_argument("--only", default="", help="names of sections, joined by commas")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in small sizes")
    parser.add_argument("--save", type=Path, help="put the figures of such a file into results.json")
    asked = parser.parse_args()
    if asked.save:
        save(asked.save)
        return 0
    sections, only = NODE if asked.node else ONE, [name for name in asked.only.split(",") if name]
    names = [section.name for section in sections]
    if unknown := [name for name in only if name not in names]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(names)}")
    gpus, least = [] if asked.tiny else gpus_here(), 1 + asked.node
    if len(gpus) < least and not asked.tiny:
        parser.error(f"{len(gpus)} GPUs here, at least {least} wanted; --tiny tries the code on the CPU")
    OUT.mkdir(parents=True, exist_ok=True)
    about = dict(gpus=gpus, torch=version("torch"), python=platform.python_version(), cores=os.cpu_count())
    about |= dict(tiny=asked.tiny, node=asked.node, at=time.strftime("%Y-%m-%d %H:%M:%S"))
    print(f"{'; '.join(gpus) or 'the CPU, tiny'}; torch {about['torch']}, {about['cores']} cores", flush=True)
    started, done = time.monotonic(), []
    for section in [section for section in sections if not only or section.name in only]:
        left = AT_MOST_S - (time.monotonic() - started)
        done.append(run(section, min(section.limit_s, left), asked.tiny, len(gpus) or 2))
        print("{name:12} {verdict:8} {seconds:6.1f} s   {said:.100}".format(**done[-1]), flush=True)
        for row in done[-1]["rows"]:
            print(show(row), flush=True)
        (OUT.parent / "gpu.json").write_text(json.dumps(about | {"sections": done}, indent=1) + "\n")
    bad = [one["name"] for one in done if one["verdict"] not in ("passed", "not run")]
    missed = [row["name"] for one in done for row in one["rows"] if row["ratio"] > row["goal"]]
    counts = {verdict: sum(one["verdict"] == verdict for one in done) for verdict in ("passed", "not run")}
    print(f"\n{counts['passed']} of {len(done)} sections passed, {counts['not run']} not run", end="")
    print(f", {len(missed)} goals missed, in {time.monotonic() - started:.0f} s; build/gpu.json, build/gpu/")
    if bad:
        print(f"failed: {', '.join(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
