"""A device that is not there, "gpu:0": its tensors have shapes and a place, and no numbers.

Functions run in a process of their own: a device's name is given once in a process, and on a machine with
GPUs this one would stand before them.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from minitrain.ranks import torch_private

PRETENDED = "gpu:0"
needs_pretended = pytest.mark.skipif(
    torch_private.python_backend is None, reason=f"torch {torch.__version__} cannot pretend a device"
)


def begin() -> None:
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # backward in this thread: an error of it is not lost
    torch_private.python_backend(PRETENDED.split(":")[0])


@cache
def helper() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=begin)


def pretended(fn: Callable, *args) -> Any:
    """fn(*args), of a module and with plain results, where there is such a device."""
    return helper().submit(fn, *args).result()
