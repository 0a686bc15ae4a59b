"""What moves the data of a group, an object each: gloo (our algorithms), NCCL, or nothing (a dry run).

    start(ch, job, in_background)   sets a collective in motion; returns wait
    post(ch, sends, receives)       sets messages (call, tensor, peer) in motion; returns wait

Where the backend moves the data itself, on NCCL and in a dry run, `transport.planned_bytes` charges the same
cuts. In a dry run nothing is cut: a call costs the same Python in a world of 4 and of 131,072.
"""

from contextlib import nullcontext
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import call_log, checked
from minitrain.ranks.collectives.call_log import Call
from minitrain.ranks.collectives.channel import Channel, apart
from minitrain.ranks.collectives.transport import Job, move, post_receive, post_send, wait_all
from minitrain.ranks.process import PROCESS
from minitrain.ranks.torch_private import num_modes, outside_modes


class Backend:
    counts = False  # are bytes counted where a buffer is handed to the network?
    adds = True  # are sums taken here, in memory of ours?

    def check(self, op: str, x: Tensor) -> None:
        """ValueError for a tensor that the backend cannot reach."""

    def device(self, x: Tensor) -> torch.device:
        """Where the network reads and writes a message that is x."""
        return x.device

    def stage(self, job: Job) -> Callable[[], None] | None:
        """Put the job on memory that the network reaches; returns what brings the result back, if needed."""


class Gloo(Backend):
    """Our algorithms over messages between host memories."""

    counts = True

    def check(self, op: str, x: Tensor) -> None:
        if not x.is_cpu and not x.is_cuda:
            raise ValueError(
                f"{op}: x is on {x.device}, but gloo moves memory of the CPU and of CUDA only; use x.cpu()"
            )

    def device(self, x: Tensor) -> torch.device:
        return torch.device("cpu")

    def stage(self, job: Job) -> Callable[[], None] | None:
        if not job.dst.is_cuda:
            return None
        target, job.src = job.dst, call_log.announce("buffer", job.src.cpu())
        job.dst = call_log.announce("buffer", torch.empty_like(target, device="cpu"))
        return lambda: target.copy_(job.dst)

    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        def drive() -> None:
            try:
                unseen(move, ch, job)
            finally:  # a call that is refused, or whose peer is gone, is over as well
                call_log.finished(job.call)

        if in_background:
            return ch.lane(job.call).submit(drive)
        apart(drive)
        return lambda: None

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        arrivals, works = unseen(self._post, ch, sends, receives)

        def wait() -> None:
            for call, header, header_work, data_work in arrivals:
                wait_all([header_work])
                if header is not None:
                    checked.compare_message(call, bytes(header.tolist()))
                wait_all([data_work])
            wait_all(works)

        return lambda: apart(wait)

    def _post(self, ch: Channel, sends: list, receives: list) -> tuple[list, list]:
        """Returns (what will arrive: call, header if it has one, works of both; works of what is sent)."""
        arrivals, works = [], []
        for call, tensor, peer in receives:
            header, header_work, (header_tag, tag) = None, None, message_tags(call)
            if PROCESS.checked:
                header = torch.empty(checked.HEADER_BYTES, dtype=torch.uint8)
                header_work = post_receive(ch, header, peer, header_tag)
            arrivals.append((call, header, header_work, post_receive(ch, tensor, peer, tag)))
        for call, tensor, peer in sends:
            header_tag, tag = message_tags(call)
            if PROCESS.checked:
                header = checked.as_tensor(checked.message_header(call))
                works.append(post_send(ch, None, header, peer, header_tag))
            works.append(post_send(ch, call, tensor, peer, tag))
        return arrivals, works


def message_tags(call: Call) -> tuple[int, int]:
    """Tags of a message's header and data, which in checked mode has dtype and shape in it (checked.py)."""
    tag = 2**30 + call.seq % 2**12 * 2**17
    return tag + 2**16, tag + (checked.fingerprint(call) if PROCESS.checked else 0)


def unseen(work: Callable, *args):
    """work(*args) unseen by dispatch modes: an algorithm's additions are communication, not FLOPs."""
    with outside_modes() if num_modes() else nullcontext():
        return work(*args)


class Dry(Backend):
    """Nothing moves; results have shapes and no values."""

    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        return lambda: call_log.finished(job.call)

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        return lambda: None


def renamed(new: str, old: str) -> Callable:
    """torch 2.13 renamed two collectives and warns at the old names; 2.11 has only the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)


class NCCL(Backend):
    """NCCL's own collectives and messages between GPUs."""

    adds = False

    def check(self, op: str, x: Tensor) -> None:
        if not x.is_cuda:
            raise ValueError(
                f"{op}: x is on {x.device}, but NCCL moves GPU memory only; use x.cuda(), or a group on gloo"
            )

    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        op, src, dst, given = job.call.op, job.src, job.dst, dict(group=ch.group, async_op=True)
        if op == "all_reduce":
            if dst.data_ptr() != src.data_ptr():
                dst.copy_(src)
            reduction = dist.ReduceOp.MAX if job.call.reduction == "max" else dist.ReduceOp.SUM
            work = dist.all_reduce(dst, reduction, **given)
        elif op == "all_gather":
            work = renamed("all_gather_single", "all_gather_into_tensor")(dst, src, **given)
        elif op == "reduce_scatter":
            work = renamed("reduce_scatter_single", "reduce_scatter_tensor")(dst, src, **given)
        elif op == "all_to_all":
            work = dist.all_to_all_single(dst, src, job.receive_sizes, job.send_sizes, **given)
        elif op == "broadcast":
            if ch.rank == job.source:
                dst.copy_(src)
            work = dist.broadcast(dst, group_src=job.source, **given)
        else:
            work = dist.barrier(**given)
        return lambda: (work.wait(), call_log.finished(job.call))

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        group = ch.group
        if len(sends) + len(receives) == 1:  # on the pair's own stream: waits for no other peer
            works = [dist.isend(tensor, group=group, group_dst=peer) for _, tensor, peer in sends]
            works += [dist.irecv(tensor, group=group, group_src=peer) for _, tensor, peer in receives]
        else:  # together, else two ranks that send to each other could block
            both = [(dist.isend, *send) for send in sends] + [(dist.irecv, *receive) for receive in receives]
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, x, group=group, group_peer=peer) for op, _, x, peer in both]
            )
        return lambda: wait_all(works)


BACKENDS = {"nccl": NCCL(), "gloo": Gloo(), "fake": Dry()}


def backend_of(group: ProcessGroup) -> Gloo | NCCL | Dry:
    name = dist.get_backend(group)
    for known, backend in BACKENDS.items():
        if known in name:
            return backend
    raise ValueError(
        f"backend {name!r}; minitrain's collectives run on gloo and nccl, and on fake in a dry run"
    )
