"""What one rank did, in order: the four events which the ledger writes and the replay and the pictures read.

One rank runs one stream of computation. A collective is handed to the network (`Issue`) and later waited for
(`Wait`); what stands between the two can overlap with it. A `Copy` between the memories of a device, its host
and its disk is waited for likewise. Events hold counts, never times: they are equal in a real and a dry run.

To a cost model a `Compute` is attention (a `shape`, and "attention" in the name), a product (another `shape`)
or a pass over memory (no `shape`: bytes are all it costs, but for convolutions, which have `flops`). Several
passes in a row, fused, save the bytes that one writes (`written`) and the next would read.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator: a matrix product, an addition, a fill. Views, which move nothing, are not events."""

    name: str  # torch's name of the operator: "mm", "add", "_softmax_backward_data"
    flops: int  # 2 per multiply-add of a contraction (matrix product, convolution, attention), else 0
    bytes: int  # bytes of the input tensors read plus the output tensors written, each tensor once
    phase: str = ""  # the text given to `ledger.phase(...)`
    dtype: str = ""  # of the first floating-point output ("bfloat16"): decides the peak rate
    shape: tuple[int, ...] = ()  # a product's (batch, m, n, k), attention's (B·H, Tq, Tk, head dim)
    written: int = 0  # of `bytes`; the rest is read

    read = property(lambda self: self.bytes - self.written)


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective, or one message, handed to the network."""

    id: int  # 0, 1, 2, ... in the order of issue on this rank
    op: str  # "all_reduce", ...; a message from one rank to another is "send" or "receive"
    axis: str  # the mesh axis of the group: "dp", "dp_cp", "world"
    members: tuple[int, ...]  # global ranks that take part; for "send" and "receive": (source, destination)
    payload_bytes: int  # the size S of the paper's formulas
    sent_bytes: int  # what this rank put on the wire
    seq: int  # counted per group (messages: per peer and direction): the same on all members
    site: str  # "file.py:41", the line that made the call
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream of computation stops here until the collective or the copy `id` is complete."""

    id: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes that leave one memory of this rank for another; ids are counted with those of `Issue`."""

    id: int
    direction: str  # "to_host", "to_device"; "to_disk", "from_disk"
    bytes: int
    phase: str = ""

    # what those who read an Issue ask for
    op = property(lambda self: self.direction)
    axis = property(lambda self: "disk" if self.direction.endswith("disk") else "host")
    payload_bytes = sent_bytes = property(lambda self: self.bytes)


DIRECTIONS = ("to_host", "to_device", "to_disk", "from_disk")
Event = Compute | Issue | Wait | Copy
