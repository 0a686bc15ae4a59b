"""A clock for devices that compute behind the host's back: it waits until they have done what they were told.

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
