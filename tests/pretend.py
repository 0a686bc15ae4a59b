"""A device that is not there, "gpu:0": its tensors have shapes and a place, and no numbers.

Functions run in a process of their own: a device's name is given once in a process, and on a machine with
GPUs this one would stand before them.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import pytest
import torch

from minitrain.ranks import torch_private
from minitrain.ranks.launch import dryrun

PRETENDED = "gpu:0"
needs_pretended = pytest.mark.skipif(
    torch_private.python_backend is None, reason=f"torch {torch.__version__} cannot pretend a device"
)


class Absent:
    """What torch asks of a device's module."""

    is_available = staticmethod(lambda: False)  # so torch makes no tensor there on its way to a fake one
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)


def begin() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if parent := parent_process():  # killed, it would leave this process behind
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # backward in this thread: an error of it is not lost
    torch_private.python_backend(PRETENDED.split(":")[0], Absent())


@cache
def helper() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=begin)


def pretended(fn: Callable, *args) -> Any:
    """fn(*args), of a module and with plain results, where there is such a device."""
    return helper().submit(fn, *args).result()


# ---- python -m tests.pretend 03 04: the dry runs of chapters, on that device -------------------------------


def in_a_chapter() -> None:
    """What a dry run of this process makes without a word is there; at the end, how many did, and what failed."""
    real, failed, ran = dryrun.run, [], []

    def run(fn: Callable, *args, **world):
        def there(*args):
            with torch.device(PRETENDED):
                return fn(*args)

        ran.append(fn)
        try:
            return real(there, *args, **world)
        except Exception as error:
            failed.append(str(error))
            raise

    begin()
    dryrun.run = run
    told = open(os.environ["TOLD"], "a")
    atexit.register(lambda: print(f"{len(ran)} dry runs", *failed, sep="\n    ", file=told, flush=True))


def main(numbers: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        startup, told = Path(folder, "profile_default", "startup", "0.py"), Path(folder, "told")
        startup.parent.mkdir(parents=True)
        startup.write_text("from tests.pretend import in_a_chapter; in_a_chapter()\n")
        environ = os.environ | {"IPYTHONDIR": folder, "TOLD": str(told), "PYTHONPATH": os.getcwd()}
        for number in numbers:
            command = [sys.executable, "-m", "minitrain", "run", number, "--out", folder]
            subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
            print(f"chapter {number}:", told.read_text().strip(), flush=True)
            told.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
