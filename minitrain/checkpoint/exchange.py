"""Plain safetensors, as other programs read and write them: names and whole tensors, nothing else.

    Tensors(folder)["model.norm.weight"]                         read when it is asked for
    write_tensors(path, {"model.norm.weight": (dtype, shape)}, tensors)

A folder as on the hub: model.safetensors, or several files and model.safetensors.index.json. Read by their
library; written here, tensor by tensor, where it would want all at once. Raises Damaged for a file that is
none. Differs from format.py: no hashes, no cuts.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitrain.checkpoint.disk import Disk, new_file
from minitrain.checkpoint.format import DTYPES, Damaged, bytes_of, framed


class Tensors(Mapping):
    def __init__(self, path: Path):
        index, names = path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        self._file_of = {}
        for file in [path] if path.is_file() else [path / name for name in sorted(names)]:
            try:
                opened = safe_open(file, "pt")
            except FileNotFoundError:
                raise ValueError(f"{file} does not exist: give a folder with model.safetensors") from None
            except SafetensorError as error:
                raise Damaged(f"{file} is no file of safetensors, or is damaged: {error}") from None
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


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
