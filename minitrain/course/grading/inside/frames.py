"""What the judge and an answer's process say to each other: JSON and raw bytes, never pickle.

    frame    sizes of both parts (4 and 8 bytes) | a JSON object with "is" | raw bytes
    value    None, bool, int, float, str, lists, tuples and dicts with text keys as JSON; a tensor as
             {"tensor": [dtype, shape]} in the JSON and its memory, little endian, in the raw bytes

Reading a frame runs no code of the sender. One that breaks a rule raises `BadFrame`: the judge ends the run.
"""

import json
import math
import socket
import struct
from collections.abc import Iterator
from typing import Any

import torch

SIZES = struct.Struct("<IQ")  # of header and payload
HEADER_LIMIT_BYTES, PAYLOAD_LIMIT_BYTES = 1 << 20, 1 << 26  # of what a rank sends to the judge
_DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
DTYPES = {name: getattr(torch, name) for name in _DTYPES.split()}


class BadFrame(ValueError):
    """The bytes are not a frame: the sender is broken or hostile."""


class NotData(TypeError):
    """A value that is neither a tensor nor plain data."""


class Line:
    """One end of a stream socket that carries frames; one that announces more than `most` bytes is broken."""

    def __init__(self, sock: socket.socket, most: int = 1 << 40) -> None:
        self.sock, self.most, self._buffer = sock, most, bytearray()

    def send(self, header: dict, payload: bytes = b"") -> None:
        text = json.dumps(header).encode()
        self.sock.sendall(SIZES.pack(len(text), len(payload)) + text)
        self.sock.sendall(payload)

    def receive(self) -> tuple[dict, bytes] | None:
        """Wait for the next frame; None if the other side has closed the line."""
        while (frame := self._take()) is None:
            if not self._read():
                return None
        return frame

    def incoming(self) -> Iterator[tuple[dict, bytes]]:
        """The frames that are complete after reading once. Raises ConnectionError at the end of the line."""
        if not self._read():
            raise ConnectionResetError
        while (frame := self._take()) is not None:
            yield frame

    def _read(self) -> bool:
        data = self.sock.recv(1 << 20)
        self._buffer += data
        return bool(data)

    def _take(self) -> tuple[dict, bytes] | None:
        if len(self._buffer) < SIZES.size:
            return None
        length, size = SIZES.unpack_from(self._buffer)
        if length > HEADER_LIMIT_BYTES or size > self.most:
            raise BadFrame("the header or the payload is too long")
        start, end = SIZES.size + length, SIZES.size + length + size
        if len(self._buffer) < end:
            return None
        text, payload = self._buffer[SIZES.size : start], bytes(self._buffer[start:end])
        del self._buffer[:end]
        try:
            header = json.loads(text)
            header["is"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadFrame("the header is not a JSON object with 'is'") from None
        return header, payload


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_from(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """A tensor in memory of its own. Raises BadFrame if the sizes disagree."""
    if tensor_size(dtype, shape) != len(data):
        raise BadFrame("a tensor's shape and bytes disagree")
    if not data:
        try:
            return torch.empty(shape, dtype=DTYPES[dtype])
        except RuntimeError:
            raise BadFrame("an empty tensor of an absurd shape") from None
    if dtype == "bool":  # a byte that is neither 0 nor 1 would be a boolean that equals nothing
        return (torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(shape)


def tensor_size(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor somebody announced. Raises BadFrame if no tensor is like that."""
    known = type(dtype) is str and dtype in DTYPES and type(shape) is list and len(shape) <= 16
    if not known or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise BadFrame("not a tensor's dtype and shape")
    return math.prod(shape) * DTYPES[dtype].itemsize


def pack(value: Any) -> tuple[Any, bytes]:
    """A value as (JSON tree, raw bytes). Raises NotData naming the type that is no data."""
    payload: list[bytes] = []

    def walk(node):
        kind = type(node)  # not isinstance, which believes what an object says of itself
        if issubclass(kind, torch.Tensor):
            dtype = name_of(node.dtype)
            if dtype not in DTYPES:
                raise NotData(f"a {node.dtype} tensor")
            payload.append(tensor_bytes(node))
            return {"tensor": [dtype, list(node.shape)]}
        if issubclass(kind, (type(None), bool, int, float, str)):
            return {"value": node}
        if issubclass(kind, (list, tuple)):
            return {"list" if issubclass(kind, list) else "tuple": [walk(item) for item in node]}
        if issubclass(kind, dict):
            return {"dict": {str(key): walk(item) for key, item in node.items()}}
        raise NotData(f"a {kind.__name__}")

    return walk(value), b"".join(payload)


def unpack(tree: Any, payload: bytes) -> Any:
    """The value that `pack` was given. Raises BadFrame on anything `pack` does not write."""
    position = 0

    def walk(node):
        nonlocal position
        match node if type(node) is dict and len(node) == 1 else None:
            case {"value": None | bool() | int() | float() | str() as plain}:
                return plain
            case {"list": list(items)}:
                return [walk(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(map(walk, items))
            case {"dict": dict(items)}:
                return {key: walk(item) for key, item in items.items()}
            case {"tensor": [dtype, shape]}:
                start, position = position, position + tensor_size(dtype, shape)
                return tensor_from(payload[start:position], dtype, shape)
        raise BadFrame("not a packed value")

    try:
        value = walk(tree)
    except RecursionError:
        raise BadFrame("a value nested too deeply") from None
    if position != len(payload):
        raise BadFrame("bytes are left over")
    return value
