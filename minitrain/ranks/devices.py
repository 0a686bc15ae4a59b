"""A device: what it can do, and when it has done what it was told, for it computes behind the host's back.

started = now(x.device)
y = x @ x
elapsed_s = now(x.device) - started        on a GPU without this: the time to start a kernel
"""

import time

import torch


def now(device: torch.device | str = "cpu") -> float:
    """Seconds since some moment, once all work of this process on `device` is done. Not for a capture."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """(8, 0): Ampere, (9, 0): Hopper, as which a dry run takes a GPU that this machine has not."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)
