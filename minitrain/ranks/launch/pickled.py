"""What travels between processes as bytes: anything cloudpickle takes, and tensors of all dtypes.

A function travels by value, and with it all that stands in the reader's own files of one module: a test or a
helper beside a notebook, as they are loaded here. Plain pickle does not read back what torch writes of a
tensor in 8-bit floats or unsigned 16-bit integers (its storage has no class): they go as bytes and a dtype.
A tensor of a GPU arrives on the host: who reads it may have another GPU or none, and a context of CUDA on
somebody else's takes 0.5 GB of it.
"""

import copyreg
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

import cloudpickle
import torch
from torch import Tensor
from torch.nn import Parameter

from minitrain.ranks.launch import report

EIGHT_BITS = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
ON_HOST = ("cpu", "meta")
ODD = EIGHT_BITS | {torch.uint16, torch.uint32, torch.uint64}

# torch.backends and a few more are objects of classes of their own in place of modules; they travel by name.
for kind in {type(one) for one in sys.modules.values() if isinstance(one, ModuleType)} - {ModuleType}:
    copyreg.pickle(kind, lambda module: (importlib.import_module, (module.__name__,)))


class Pickler(cloudpickle.Pickler):
    def reducer_override(self, thing):
        how = _of_tensor(thing)
        return super().reducer_override(thing) if how is NotImplemented else how


class PlainPickler(pickle.Pickler):
    reducer_override = staticmethod(lambda thing: _of_tensor(thing))


def _of_tensor(thing):
    away = isinstance(thing, Tensor) and thing.device.type not in ON_HOST
    one = on_host(thing) if away else thing
    if type(one) is Tensor and one.dtype in ODD:
        data = one.detach().contiguous().view(-1).view(torch.uint8)
        return _of_bytes, (data, one.dtype, one.shape)
    return one.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if away else NotImplemented


def on_host(x: Tensor) -> Tensor:
    there = x.detach().cpu()
    if isinstance(x, Parameter):
        there = Parameter(there, x.requires_grad)
        vars(there).update(vars(x))
    return there.requires_grad_(x.requires_grad)


def _of_bytes(data: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return data.view(dtype).view(shape)


def dumps(thing, pickler=Pickler) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(thing)
    return file.getvalue()


def call(fn: Callable, args: tuple) -> bytes:
    for modules in (single_files(), []):  # by reference where by value fails, over a global lock for instance
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            return dumps((fn, args))
        except Exception as failure:
            error = failure
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
    cure = "make files, locks, groups and generators in fn"
    raise ValueError(f"fn and its arguments cannot be sent to the ranks: {error}; {cure}")


def result(thing, same_program: bool = False) -> bytes:
    try:
        if same_program:  # who reads it runs the same: with plain pickle classes keep their identity
            with suppress(Exception):
                return dumps(thing, PlainPickler)
        return dumps(thing)
    except Exception as error:
        said = f"fn returned a {type(thing).__name__}, which cannot be sent back"
        cure = "return tensors, numbers, text, or lists and dicts of them"
        raise TypeError(f"{said} ({report.message_of(error)}); {cure}") from None


def single_files() -> list[ModuleType]:
    by_value, found = {"__main__", *cloudpickle.list_registry_pickle_by_value()}, []
    for name, module in sys.modules.copy().items():
        file, known_as = getattr(module, "__file__", None), getattr(module, "__name__", "")
        alone = "." not in name and name == known_as and not hasattr(module, "__path__")
        if alone and name not in by_value and file and not file.startswith(report.LIBRARIES):
            found.append(module)
    return found
