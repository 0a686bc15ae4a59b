"""What travels between processes as bytes: anything cloudpickle takes, and tensors of all dtypes.

Plain pickle does not read back what torch writes of a tensor in 8-bit floats or unsigned 16-bit integers (its
storage has no class of its own): these go as bytes and a dtype.
"""

import io

import cloudpickle
import torch
from torch import Tensor

EIGHT_BITS = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
ODD = EIGHT_BITS | {torch.uint16, torch.uint32, torch.uint64}


class Pickler(cloudpickle.Pickler):
    def reducer_override(self, thing):
        if type(thing) is Tensor and thing.dtype in ODD:
            data = thing.detach().contiguous().view(-1).view(torch.uint8)
            return _of_bytes, (data, thing.dtype, thing.shape)
        return super().reducer_override(thing)


def dumps(thing) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()


def _of_bytes(data: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return data.view(dtype).view(shape)
