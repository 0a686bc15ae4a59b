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
from minitrain.ranks.torch_private import (
    DEVICE_OF,
    FakeTensor,
    dispatch_keys,
    storage_id,
    tree_leaves,
    tree_map,
)

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


# What an operator gives: which argument; or shape, stride, dtype, device, offset, and on which one's memory.
Result = tuple[int | None, tuple | None, int | None]


def described(result, args: tuple, device: torch.device | None = None) -> Result | list[Result] | None:
    """None if there are tensors with marks, or numbers; on `device` if they do not say where they are."""
    on = {storage_id(x.untyped_storage()): i for i, x in enumerate(args) if isinstance(x, FakeTensor)}
    several, found = isinstance(result, tuple | list), []
    for one in result if several else [result]:
        if one is None:
            found.append((None, None, None))
            continue
        marked = not isinstance(one, Tensor) or one.is_conj() or one.is_neg()
        if marked or getattr(one, "constant", None) is not None:
            return None
        argument = next((i for i, x in enumerate(args) if x is one), None)
        layout = tuple(one.shape), one.stride(), one.dtype, device or one.device, one.storage_offset()
        found.append((argument, layout, on.get(storage_id(one.untyped_storage()))))
    return found if several else found[0]


class ShapesMode(private.FakeTensorMode):
    """torch's FakeTensorMode, in less time. An operator on plain dense tensors of one device runs
    its kernel for shapes, once for arguments like these in all dry runs; later its results get the attributes
    that torch's constructor gives. What is not plain, or wants numbers, goes torch's way: it asks 17
    properties of each argument, every time."""

    known: dict[tuple, Result | list[Result]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._attributes: dict[torch.device, dict] = {}  # of a fake tensor of this mode
        self._dense: dict[int, bool] = {}  # by a tensor's dispatch keys: strided, not quantized

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        kwargs = kwargs or {}
        key = self._key_of(func, args, kwargs)
        if (known := self.known.get(key)) is None:
            if not (known := key and self._of_kernel(func, args, kwargs)):
                result = self.dispatch(func, types, args, kwargs)
                if key and (found := described(result, args)):
                    self.known[key] = found
                return result
            self.known[key] = known
        if type(known) is tuple:
            return self._made(args, *known)
        return tuple(self._made(args, *one) for one in known)

    def _of_kernel(self, func, args, kwargs) -> Result | list[Result] | None:
        """None if there is no kernel for shapes, or not for these arguments."""
        if func not in private.VIEWS and any(rule(func) for rule, _ in private.op_implementations_checks):
            return None
        devices = {x.fake_device for x in tree_leaves(args) if isinstance(x, FakeTensor)}
        if len(devices) != 1 or any(isinstance(x, torch.device) for x in kwargs.values()):
            return None
        try:
            with private.in_kernel_invocation_manager(self):
                result = func(*args, **kwargs)
        except RuntimeError:  # it wants numbers
            return None
        return described(result, args, *devices)

    def _key_of(self, func, args, kwargs) -> tuple | None:
        """All that the results depend on; None if it is not plain, or more than results change."""
        changes = torch.Tag.inplace_view in func.tags or FakeTensor in map(type, kwargs.values())
        if changes or func.namespace != "aten" or torch.is_inference_mode_enabled():
            return None
        key = [func, torch.get_default_dtype(), private.default_device()]
        named = (*kwargs, *kwargs.values())
        return tuple(key) if self._describe(key, args) and self._describe(key, named) else None

    def _made(self, args: tuple, argument: int | None, layout: tuple | None, on: int | None):
        if argument is not None or layout is None:
            return layout and args[argument]
        shape, stride, dtype, device, offset = layout
        guard = private.no_dispatch()  # this mode may be on the stack; what follows is no operator of the run
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if on is not None:
            made.set_(args[on].untyped_storage(), offset, shape, stride)
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
