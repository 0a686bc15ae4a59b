"""The same code as one rank of a world of any size, in this process: shapes are computed, numbers are not.

    ledger = dryrun.run(train, rank=17, ranks=1024)         as launch.run(train, ranks=1024)[17], without data

torch's FakeTensorMode gives tensors a shape, a dtype and a device but no memory; its "fake" backend gives one
process a group of any size. The same operators and collectives happen in the same order, so FLOPs, bytes sent
and peak bytes equal those of a real run to the last digit (on a CPU, batch norm and LSTM differ in one).

Without numbers nothing can be decided: `.item()`, `if loss > 3` and `x[mask]` end the dry run and name the
line that asked. Tensors are made inside the function or are its arguments (passed without data). After
torch.distributed._tools, which estimates memory with fake tensors. Differs: communication is counted.
"""

import copy
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from minitrain.ranks import collectives
from minitrain.ranks import torch_private as private
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.ranks.launch.local import notebook_cells
from minitrain.ranks.launch.report import spot
from minitrain.ranks.process import PROCESS
from minitrain.ranks.torch_private import DEVICE_OF, FakeTensor, default_device, dispatch_keys, tree_map

LEDGER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "ledger") + os.sep
NOT_THE_READERS = (os.path.dirname(torch.__file__), copy.__file__, __file__, LEDGER)
# What torch says where it meets a fake tensor and wanted numbers, or a real one among fake ones.
NUMBERS_WANTED = ("string passed to FakeTensor", ".numpy() is not supported for tensor subclasses")
FROM_OUTSIDE = "convert all Tensors to FakeTensors"
# Arguments that say all by type and value: True, 1 and 1.0 are equal, and their types differ.
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def run(fn: Callable, *args, rank: int = 0, ranks: int = 4096) -> Any:
    """What fn(*args) returns as rank `rank` of `ranks`; tensors in it are fake: shapes without numbers."""
    require_positive_ints(ranks=ranks)
    require_ints(0, ranks - 1, rank=rank)
    if dist.is_initialized():
        cure = "a dry run makes a world of its own: call it outside of launch.run, and not inside another"
        raise ValueError(f"rank {dist.get_rank()} of {dist.get_world_size()} calls dryrun.run; {cure}")
    cells = notebook_cells()
    for file in cells:
        collectives.name_file(file, "cell")  # as the ranks of a launch do, so that call sites are equal
    PROCESS.recent.clear()  # of another world
    on_crash = sys.excepthook  # torch puts one in its place that prints "[rank17]: " before every line
    dist.init_process_group("fake", store=private.FakeStore(), rank=rank, world_size=ranks)
    try:
        mode, memo = ShapesMode(), {}
        with private.FakeCopyMode(mode):  # fake copies; what arguments share, the copies share
            args = tree_map(lambda x: copy.deepcopy(x, memo) if isinstance(x, (Tensor, Module)) else x, args)
        with mode:
            return fn(*args)
    except Exception as error:
        causes = [error]  # and those that it was raised from: who runs the reader's code may raise his own
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        for cause in reversed(causes):
            if complaint := _complaint(cause):
                raise ValueError(f"{_line_of(cause, cells)} {complaint}") from None
        raise
    finally:
        dist.destroy_process_group()
        sys.excepthook = on_crash


def _complaint(error: BaseException) -> str | None:
    """What a beginner has to know about an error of torch's; None if it does not come from the dry run."""
    if FROM_OUTSIDE in str(error):
        return "uses a tensor from outside the dry run; make it inside by torch.tensor, or pass it"
    undecided = private.DataDependentOutputException, private.DynamicOutputShapeException
    if isinstance(error, undecided) or any(text in str(error) for text in NUMBERS_WANTED):
        return "asks for the numbers in a tensor, and a dry run has shapes only; leave this to real runs"
    return None


def _line_of(error: BaseException, cells: dict[str, str]) -> str:
    """The innermost line that is the reader's, as "train.py:41 `loss.item()`"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(NOT_THE_READERS):
            return f"{spot((frame.filename, frame.lineno), cells)} `{frame.line}`"
    return "an argument"


class ShapesMode(private.FakeTensorMode):
    """torch's FakeTensorMode, in three quarters of its time. It remembers what an operator gives for
    arguments of these shapes, and takes some 60 us to look it up: it describes each by 17 properties, through
    a dataclass. Here a plain dense tensor is described by what can differ between two of them; what is not
    plain goes torch's way."""

    def __init__(self) -> None:
        super().__init__()
        self._dense: dict[int, bool] = {}  # by a tensor's dispatch keys: strided, not quantized

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state, func, args, kwargs):
        """What torch remembers this call by: all that the results depend on."""
        key = [func, torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()]
        if self._describe(key, args) and (not kwargs or self._describe(key, (*kwargs, *kwargs.values()))):
            return tuple(key)
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, key: list, values) -> bool:
        """Add to the key all that a result can depend on; False if a value is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                keys = dispatch_keys(value).raw_repr()  # conjugated, negated, of inference, sparse, quantized
                if keys not in self._dense:
                    self._dense[keys] = value.layout is torch.strided and not value.is_quantized
                if value.fake_mode is not self or value.constant is not None or not self._dense[keys]:
                    return False
                key += (value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset())
                key += (value.untyped_storage().nbytes(), value.requires_grad, keys)
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is torch.Generator:
                key.append(kind)  # no number is drawn
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True
