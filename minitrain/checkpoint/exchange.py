"""Plain safetensors, as other programs read and write them: names and whole tensors, nothing else.

    with Tensors(folder) as theirs: theirs["model.norm.weight"]      read when it is asked for
    write_tensors(path, {"model.norm.weight": x, ..})                one at a time

A folder as on the hub: model.safetensors, or several files and model.safetensors.index.json. Tensors come one
by one: memory holds one. Raises Damaged for a file that is none. Differs from format.py: no hashes, no cuts.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minitrain.checkpoint.disk import Disk, new_file
from minitrain.checkpoint.format import DTYPE_OF, DTYPES, MOST_HEADER_BYTES, Damaged, bytes_of, framed


class Tensors(Mapping):
    def __init__(self, path: Path):
        index, names = path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        files = [path] if path.is_file() else [path / name for name in sorted(names)]
        self._at: dict[str, tuple[Path, torch.dtype, list[int], int]] = {}
        for file in files:
            self._at |= {name: (file, *where) for name, where in _header_of(file).items()}

    def __getitem__(self, name: str) -> Tensor:
        path, dtype, shape, first = self._at[name]
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        with open(path, "rb") as file:
            file.seek(first)
            if file.readinto(data.numpy()) < data.numel():
                raise Damaged(f"{path} ends within {name}")
        return data.view(dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _header_of(path: Path) -> dict[str, tuple[torch.dtype, list[int], int]]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size - 8):
                raise ValueError
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, value in header.items():
            first = 8 + length + value["data_offsets"][0]
            found[name] = DTYPE_OF[value["dtype"]], value["shape"], first
        return found
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give a folder with model.safetensors") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise Damaged(f"{path} is no file of safetensors, or is damaged") from None


def write_tensors(path: Path, shapes: Mapping[str, tuple], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """`shapes`: {name: (dtype, shape)}, of all that `tensors` will be. Returns the bytes of the file."""
    header, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=DTYPES[dtype], shape=list(shape), data_offsets=[offset, offset + size])
        offset += size
    text, disk = framed({"format": "pt"}, header), Disk()
    with new_file(disk, path) as file:
        disk.write(file, 0, text)
        for name, value in tensors:
            disk.write(file, len(text) + header[name]["data_offsets"][0], bytes_of(value))
    return len(text) + offset
