"""The network of an exercise: a torch process group whose every message passes through the judge.

A rank has no other way to reach another one, so what the judge counts is what was sent. The group knows send,
receive and barrier; kit.py builds collectives from these, and `torch.distributed.all_reduce` says so.

    send      is complete when the other side has asked for it, as on gloo
    receive   the data arrives when the rank waits for it, not before: what a rank can know when is known
    neither   has a tag, and an empty tensor is no message: both sides know that it is empty
"""

import os
import threading

import torch
import torch.distributed as dist

from .frames import Line, name_of, tensor_bytes, tensor_from

BACKEND = "judge"


class Wire:
    """This process's line to the judge. Any thread may post and wait; one that waits reads for all."""

    def __init__(self, line: Line) -> None:
        self.line, self.next_op = line, 0
        self.turn, self.reading = threading.Condition(), False
        self.answers: dict[int, bytes] = {}

    def ask(self, question: dict, payload: bytes = b"") -> int:
        with self.turn:
            self.next_op += 1
            self.line.send({**question, "op": self.next_op}, payload)
            return self.next_op

    def wait(self, op: int) -> bytes:
        """Block until the judge has answered question `op`."""
        with self.turn:
            self.line.send({"is": "wait", "op": op, "alone": threading.active_count() == 1})
            while op not in self.answers:
                if self.reading:
                    self.turn.wait()
                    continue
                self.reading = True
                self.turn.release()
                try:
                    frame = self.line.receive()
                finally:
                    self.turn.acquire()
                    self.reading = False
                    self.turn.notify_all()
                if frame is None:
                    os._exit(0)  # the judge has ended this run
                self.answers[frame[0]["op"]] = frame[1]
            return self.answers.pop(op)


class Operation:
    """What `isend` and `irecv` return: a question to the judge, or None where there was nothing to send."""

    def __init__(self, wire: Wire, question: dict | None, payload: bytes = b"", into=None) -> None:
        self.wire, self.into, self.done = wire, into, question is None
        self.op = wire.ask(question, payload) if question else 0

    def wait(self, timeout=None) -> bool:
        if not self.done:
            data, self.done = self.wire.wait(self.op), True
            if self.into is not None:
                with torch.no_grad():
                    self.into.copy_(tensor_from(data, name_of(self.into.dtype), list(self.into.shape)))
        return True


class WireGroup(dist.ProcessGroup):
    """A process group of `members` (global ranks) on the judge's network."""

    group_name = group_desc = ""  # torch keeps these in its C++ object, which only a C++ backend can fill

    def __init__(self, wire: Wire, rank: int, members: list[int], name: str) -> None:
        super().__init__(rank, len(members))
        self.wire, self.members, self.group_name, self.group_desc = wire, members, name, "default_pg"

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Operation:
        return self._post("send", tensors[0], to, tag, tensor_bytes(tensors[0]))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Operation:
        return self._post("receive", tensors[0], source, tag, into=tensors[0])

    def _post(self, kind: str, tensor: torch.Tensor, peer: int, tag: int, *carried, **into) -> Operation:
        if tag:
            raise ValueError("messages have no tags here: they arrive in the order in which they are sent")
        where = {"is": kind, "peer": self.members[peer], "members": self.members}
        message = {**where, "dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}
        return Operation(self.wire, message if tensor.numel() else None, *carried, **into)

    def barrier(self, options=None) -> Operation:
        return Operation(self.wire, {"is": "barrier", "members": self.members})

    def fetch(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The secret input `name` of this rank: the judge keeps it until this call, and notes the moment."""
        received = torch.empty_like(like)
        Operation(self.wire, {"is": "fetch", "name": name}, into=received).wait()
        return received

    def _not_here(self, *args, **kwargs):
        raise RuntimeError("this network only sends and receives; build collectives from these, or use ours")

    allreduce = reduce = broadcast = reduce_scatter = _reduce_scatter_base = _not_here
    allgather = _allgather_base = alltoall = alltoall_base = gather = scatter = _not_here

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def getBackendName(self) -> str:
        return BACKEND


def join(line: Line, rank: int, ranks: int) -> WireGroup:
    """Make the judge's network the default process group of this process."""
    wire = Wire(line)

    def create(options, _):
        members = options.global_ranks_in_group or list(range(ranks))
        return WireGroup(wire, options.group_rank, members, options.group_id)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=ranks)
    return dist.group.WORLD
