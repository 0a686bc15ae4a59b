"""Install minitrain: first the right build of PyTorch, then the tested versions of all else.

    python3 minitrain/course/install.py .venv     into an environment that is made here (what `make` does)
    python3 minitrain/course/install.py           into the environment of this python (conda's, a container's)

A torch of a supported version that is there already stays. Else Linux without an NVIDIA GPU gets PyTorch's
CPU build, if its index answers within seconds, and every other machine the default build; TORCH=cpu or
TORCH=cuda decides instead. It runs before anything is installed, so it needs the standard library alone.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0"  # the tested version; constraints.txt has those of all else
CPU_INDEX = os.environ.get("MINITRAIN_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
WAIT_S = 4.0  # for that index
GPU_SIGNS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
FIND_TORCH = "import importlib.metadata as m; print(*(d.version for d in m.distributions(name='torch')))"


@dataclass(frozen=True)
class Choice:
    """What is said of torch, and what pip is told; nothing if there is one that stays."""

    said: str
    arguments: tuple[str, ...] = ()


def main(folder: str = "") -> None:
    """Install into the environment in `folder`, or into this one; exits with a line if pip fails."""
    if sys.version_info < (3, 11):
        here = "Python %d.%d found" % sys.version_info[:2]
        sys.exit(f"{here}; minitrain needs 3.11 or newer: make PYTHON=python3.12")
    python = environment(Path(folder)) if folder else sys.executable
    gpu = any(map(os.path.exists, GPU_SIGNS))
    try:
        torch = choose(torch_of(python), os.environ.get("TORCH", ""), sys.platform, gpu, trouble_with_index)
    except ValueError as error:
        sys.exit(f"install: {error}")
    print(f"PyTorch: {torch.said}", flush=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--root-user-action", "ignore"]
    if torch.arguments and subprocess.call([*pip, *torch.arguments]):  # pip draws a bar for each download
        sys.exit("install: PyTorch was not installed; TORCH=cpu or TORCH=cuda asks for one of its two builds")
    print("The rest, up to 150 MB:", flush=True)
    if code := with_progress([*pip, *CONSTRAINTS, "-e", f"{ROOT}[course,test]"]):
        sys.exit(code)


def choose(installed: str, wish: str, system: str, gpu: bool, trouble: Callable[[], str]) -> Choice:
    """The build of torch. `installed`: a version or ""; `trouble()`: why not from the CPU index, or ""."""
    if wish not in ("", "cpu", "cuda"):
        raise ValueError(f"TORCH={wish}: use cpu or cuda, or leave it out")
    build = "cpu" if installed.endswith("+cpu") else "cuda"
    if is_supported(installed) and wish in ("", build):
        return Choice(f"{installed} is installed already")
    again = ("--force-reinstall",) if is_supported(installed) else ()  # the other build of the same version
    cpu = (*again, "--no-deps", "--index-url", CPU_INDEX, f"torch=={TORCH}")
    default = (*again, *CONSTRAINTS, f"torch=={TORCH}")
    if system != "linux":
        return Choice(f"{TORCH}, about 100 MB", default)
    why = "as TORCH asks" if wish else "for there is an NVIDIA GPU" if gpu else ""
    if not why and (problem := trouble()):
        why = f"for the index of CPU builds {problem} (there is no NVIDIA GPU)"
    if wish == "cuda" or (why and wish != "cpu"):
        return Choice(f"the default build of {TORCH}, with CUDA about 3 GB, {why}", default)
    why = why or "for there is no NVIDIA GPU (TORCH=cuda takes the other)"
    return Choice(f"the CPU build of {TORCH}, about 200 MB, {why}", cpu)


def is_supported(version: str) -> bool:
    """In the range that pyproject.toml names for torch; a pre-release of its floor is not."""
    floor, ceiling = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()
    release, later = re.match(r"([\d.]*)(.*)", version).groups()
    numbers, least, most = (tuple(map(int, filter(None, v.split(".")))) for v in (release, floor, ceiling))
    early = re.match(r"(a|b|rc|\.?dev)\d", later) and numbers[: len(least)] == least
    return least <= numbers < most and not early


def torch_of(python: str) -> str:
    """The version of torch that this python finds, "" if none."""
    found = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True, check=True, cwd="/")
    return found.stdout.partition(" ")[0].strip()


def environment(folder: Path) -> str:
    """The python of the environment in `folder`; made, if need be, so that a fitting torch is seen."""
    python = folder.absolute() / "bin" / "python"
    if python.exists():
        if subprocess.call([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL):
            subprocess.check_call([python, "-m", "ensurepip"])  # not all tools that make one put pip into it
        return str(python)
    print(f"Making {folder} with Python {platform.python_version()}", flush=True)
    fits, inside_one = is_supported(torch_of(sys.executable)), sys.prefix != sys.base_prefix
    see = ["--system-site-packages"] if fits and not inside_one else []
    if subprocess.call([sys.executable, "-m", "venv", "--clear", *see, str(folder)]):
        sys.exit(f"install: {folder} could not be made; is Python's venv module installed (python3-venv)?")
    if fits and inside_one:  # an environment made from another sees its base alone
        ours = sysconfig.get_path("purelib", vars={"base": str(folder.absolute())})
        Path(ours, "packages_below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def trouble_with_index(wait_s: float = WAIT_S) -> str:
    """Why the index of CPU builds is of no use: no answer in time, or no wheel for this Python."""
    pages, LATE, ABSENT = [], object(), object()

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=wait_s) as reply:
                pages.append(reply.read().decode(errors="replace"))
        except (OSError, ValueError) as error:  # its own clock may ring before ours does
            late = isinstance(getattr(error, "reason", error), TimeoutError)
            pages.append(LATE if late else ABSENT)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name heeds no time limit
    asking.start()
    asking.join(wait_s)
    page = pages[0] if pages else LATE
    if page is LATE:
        return f"did not answer within {wait_s:g} s"
    if page is ABSENT:
        return "cannot be reached"
    python = "cp%d%d" % sys.version_info[:2]
    wheel = rf"torch-{re.escape(TORCH)}(\+|%2B)cpu-{python}-{python}-\w*linux\w*_{platform.machine()}\.whl"
    return "" if re.search(wheel, page) else f"has no torch {TORCH} for {python} on {platform.machine()}"


def with_progress(command: list[str]) -> int:
    """Run pip; in a terminal one line says what it is at, and what went wrong is said anywhere."""
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
        for line in pip.stdout:
            seen += line.startswith("Collecting ")
            words = line.split()
            if sys.stdout.isatty() and words[:1] in (["Collecting"], ["Installing"], ["Building"]):
                print(f"\r\033[K  {seen or '':3}  {' '.join(words)[:50]}", end="", flush=True)
    done = "pip failed" if pip.returncode else "installed"
    print("\r\033[K" * sys.stdout.isatty() + done, flush=True)
    return pip.returncode


if __name__ == "__main__":
    main(*sys.argv[1:2])
