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
from typing import Any, NamedTuple

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


class Result(NamedTuple):
    """What an operator gives, as torch remembers it: an argument, a value, or a tensor, on its own memory or
    an argument's."""

    argument: int | None
    value: object
    layout: tuple | None  # shape, stride, dtype, device, offset
    on: int | None  # the argument whose memory it shares


def result_of(known) -> Result | list[Result] | None:
    """From torch's memory, if all results are values, or tensors without marks."""
    results = []
    for one in getattr(known, "output_infos", (None,)):
        meta = one and one.metadata
        if one is None or meta is not None and (meta.is_conj or meta.is_neg or meta.requires_grad):
            return None
        layout = meta and (meta.shape, meta.stride, meta.dtype, meta.device, meta.storage_offset)
        results.append(Result(one.inplace_idx, one.constant_value, layout, one.view_idx))
    return results if known.is_output_tuple else results[0]


class ShapesMode(private.FakeTensorMode):
    """torch's FakeTensorMode, in half of its time. It remembers what an operator gives for arguments of these
    shapes, and takes some 60 us to look it up: it describes each by 17 properties, and builds results by a
    constructor for any caller. Here a plain dense tensor is described by what can differ between two of them,
    and a result has the attributes that torch's constructor gives; what is not plain goes torch's way."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[tuple, Result | list[Result]] = {}
        self._attributes: dict[torch.device, dict] = {}  # of a fake tensor of this mode
        self._dense: dict[int, bool] = {}  # by a tensor's dispatch keys: strided, not quantized

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        key = self._key_of(func, args, kwargs or {})
        known = self._results.get(key) or self._remember(key)  # torch's memory is that of all dry runs
        if type(known) is Result:
            return self._made(known, args)
        if known:
            return tuple(self._made(one, args) for one in known)
        result = self.dispatch(func, types, args, kwargs or {})
        if key and func is private.UNSAFE_VIEW:  # torch does not remember it; it stands in every product
            layout = tuple(result.shape), result.stride(), result.dtype, result.fake_device
            self._results[key] = Result(None, None, (*layout, result.storage_offset()), 0)
        return result

    def _remember(self, key: tuple | None) -> Result | list[Result] | None:
        known = result_of(self.cache.get(key)) if key else None
        if known:
            self._results[key] = known
        return known

    def _cache_key(self, state, func, args, kwargs):
        """What torch remembers this call by, too."""
        return self._key_of(func, args, kwargs) or super()._cache_key(state, func, args, kwargs)

    def _key_of(self, func, args, kwargs) -> tuple | None:
        """All that the results depend on; None if it is not plain."""
        key = [func, torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()]
        if self._describe(key, args) and (not kwargs or self._describe(key, (*kwargs, *kwargs.values()))):
            return tuple(key)
        return None

    def _made(self, one: Result, args: tuple):
        if one.argument is not None or one.layout is None:
            return one.value if one.argument is None else args[one.argument]
        shape, stride, dtype, device, offset = one.layout
        guard = private.no_dispatch()  # this mode may be on the stack; what follows is no operator of the run
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if one.on is not None:
            made.set_(args[one.on].untyped_storage(), offset, shape, stride)
        if device not in self._attributes:
            del guard
            made = FakeTensor(self, made, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = private.make_subclass(FakeTensor, made, dispatch_device=True, device_for_backend_keys=device)
        private.throw_on_data_ptr(made)
        vars(made).update(self._attributes[device])
        del guard
        return made

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
