"""Our own algorithms over gloo's messages, and the chunk plan that they and dry runs share.

A tensor is cut into one chunk per rank; the first ones are an element longer if n does not divide its size.

    all-to-all      round s = 1 .. n-1: a piece to rank+s, a piece from rank-s       sends x but the own piece
    reduce-scatter  the same with chunks, then n terms are added in rank order       sends x but the own chunk
    all-gather      a ring: n-1 times pass on to rank+1 what came from rank-1        sends n-1 chunks
    all-reduce      reduce-scatter, then all-gather                                  2(n-1)/n of x
    broadcast       a binomial tree: who has x passes it on, log2(n) rounds          n-1 tensors, all ranks

Each chunk is added by one rank, in rank order; bf16 and fp16 in float32, rounded once. So all ranks get the
same bits, run after run. (NCCL rounds at each hop.) Every call has its tags: calls overlap. Why not gloo's
own: its reduce-scatter puts an all-reduce on the wire. Why rounds and a ring: a connection written to while
data arrives makes gloo's event loop spin (256 KB on 4 ranks: 1.9 ms against 4.1). Thakur, Rabenseifner, Gropp
2005, section 4, algorithms for long messages. Differs: here they serve every size.
"""

import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.call_log import Call, signature
from minitrain.ranks.collectives.channel import LOOK_S, Channel, apart, check_patience
from minitrain.ranks.process import PROCESS
from minitrain.ranks.torch_private import num_modes, outside_modes

Tensors = list[Tensor]


@dataclass(slots=True)
class Job:
    """One collective on this rank with all the memory it needs: flat contiguous tensors, ready to move."""

    call: Call
    src: Tensor
    dst: Tensor
    received: Tensor | None = None  # room for the n-1 chunks to add, or more
    wide: Tensor | None = None  # room for a float32 chunk to add bf16 and fp16 in (a maximum rounds nothing)
    send_sizes: list[int] | None = None  # elements for each rank; None: the plan's chunks
    receive_sizes: list[int] | None = None
    source: int = 0  # of a broadcast


# ---- the chunk plan --------------------------------------------------------------------------------------


def chunk_size(total: int, n: int, index: int) -> int:
    """Elements of chunk `index` of n: total // n, the first total % n chunks one more."""
    return total // n + (index < total % n)


def pieces(flat: Tensor, n: int, sizes: list[int] | None = None) -> list[Tensor]:
    return list(flat.tensor_split(n) if sizes is None else flat.split(sizes))


def tree_children(rank: int, n: int, source: int) -> list[int]:
    """To whom `rank` passes a broadcast on: a binomial tree rooted at `source`, largest subtree first."""
    position, children, step = (rank - source) % n, [], 1
    while step < n and not position & step:
        if position + step < n:
            children.append((position + step + source) % n)
        step *= 2
    return children[::-1]


def planned_bytes(ch: Channel, job: Job) -> int:
    """What the algorithms below would hand to the network on this rank, from the cuts alone."""
    n, rank, op, total = ch.size, ch.rank, job.call.op, job.src.numel()
    if op == "all_reduce":  # all chunks but the own, then all but the next rank's
        elements = 2 * total - chunk_size(total, n, rank) - chunk_size(total, n, (rank + 1) % n)
    elif op == "all_gather":
        elements = (n - 1) * total
    elif op == "reduce_scatter":
        elements = total - job.dst.numel()
    elif op == "all_to_all":
        elements = total - (total // n if job.send_sizes is None else job.send_sizes[rank])
    elif op == "broadcast":
        elements = len(tree_children(rank, n, job.source)) * job.dst.numel()
    else:
        elements = 0  # a barrier
    return elements * job.src.element_size()


def post_send(ch: Channel, call: Call | None, tensor: Tensor, to: int, tag: int):
    """Hand `tensor` to the network and count it in `call`: the only place where gloo is given bytes."""
    if tensor.numel() == 0:
        return None
    if call is not None:
        call.sent_bytes += tensor.numel() * tensor.element_size()
    return ch.group.send([tensor], to, tag)


def post_receive(ch: Channel, tensor: Tensor, source: int, tag: int):
    return ch.group.recv([tensor], source, tag) if tensor.numel() else None


def wait_all(works: list) -> None:
    for work in works:
        if work is not None:
            work.wait()


def in_rounds(ch: Channel, call: Call | None, outgoing: Tensors, incoming: Tensors, tag: int) -> None:
    """In round s send outgoing[rank + s] to that rank, and wait for incoming[rank - s] from that one."""
    arrivals = [post_receive(ch, incoming[p], p, tag) for p in ch.before]
    sends = []
    for to, arrival in zip(ch.after, arrivals):
        sends.append(post_send(ch, call, outgoing[to], to, tag))
        wait_all([arrival])
    wait_all(sends)


def post_ring(ch: Channel, chunks: Tensors, tag: int) -> list:
    return [post_receive(ch, chunks[p], ch.before[0], tag) for p in ch.before]


def pass_around(ch: Channel, call: Call, chunks: list[Tensor], arrivals: list, tag: int) -> None:
    """Send the own chunk to the next rank, then each chunk as it arrives from the one before."""
    sends = []
    for owner, arrival in zip([ch.rank, *ch.before], arrivals):
        sends.append(post_send(ch, call, chunks[owner], ch.after[0], tag))
        wait_all([arrival])
    wait_all(sends)


# ---- the algorithms --------------------------------------------------------------------------------------


def all_to_all(ch: Channel, job: Job, tag: int) -> None:
    outgoing, incoming = pieces(job.src, ch.size, job.send_sizes), pieces(job.dst, ch.size, job.receive_sizes)
    incoming[ch.rank].copy_(outgoing[ch.rank])
    in_rounds(ch, job.call, outgoing, incoming, tag)


def reduce_scatter(ch: Channel, job: Job, tag: int) -> None:
    reduce_pieces(ch, job, pieces(job.src, ch.size), job.dst, tag)


def reduce_pieces(ch: Channel, job: Job, outgoing: list[Tensor], dst: Tensor, tag: int) -> None:
    """dst = the sum (or the maximum), over the ranks in order, of the pieces meant for this one."""
    combine = torch.maximum if job.call.reduction == "max" else torch.add
    own = dst.numel()
    terms = [job.received[i * own : (i + 1) * own] for i in range(ch.size - 1)]
    terms.insert(ch.rank, outgoing[ch.rank])
    in_rounds(ch, job.call, outgoing, terms, tag)
    if len(terms) == 1:
        dst.copy_(terms[0])
    elif job.wide is not None:
        wide = job.wide[:own].copy_(terms[0])
        for term in terms[1:]:
            wide.add_(term)
        dst.copy_(wide)
    else:  # dst may be the memory of the own term: nothing is read after it has been written
        partial, spare = terms[0], job.received[:own]  # the lowest received chunk is the first to be read
        for term in terms[1:-1]:
            partial = combine(partial, term, out=spare)
        combine(partial, terms[-1], out=dst)


def all_gather(ch: Channel, job: Job, tag: int) -> None:
    chunks = pieces(job.dst, ch.size)
    arrivals = post_ring(ch, chunks, tag)
    chunks[ch.rank].copy_(job.src)
    pass_around(ch, job.call, chunks, arrivals, tag)


def all_reduce(ch: Channel, job: Job, tag: int) -> None:
    # The receives of the second half are posted first, to be there when its data comes. In place this is
    # safe: rank p sends chunk p only when it has all terms, so nothing that is still to send is overwritten.
    chunks = pieces(job.dst, ch.size)
    arrivals = post_ring(ch, chunks, tag + 1)
    outgoing = chunks if job.src is job.dst else pieces(job.src, ch.size)
    reduce_pieces(ch, job, outgoing, chunks[ch.rank], tag)
    pass_around(ch, job.call, chunks, arrivals, tag + 1)


def broadcast(ch: Channel, job: Job, tag: int) -> None:
    if ch.rank == job.source:
        job.dst.copy_(job.src)
    else:
        position = (ch.rank - job.source) % ch.size
        parent = ((position & (position - 1)) + job.source) % ch.size
        wait_all([post_receive(ch, job.dst, parent, tag)])
    children = tree_children(ch.rank, ch.size, job.source)
    wait_all([post_send(ch, job.call, job.dst, child, tag) for child in children])


def barrier(ch: Channel, job: Job, tag: int) -> None:
    how = dist.BarrierOptions()
    how.device = torch.device("cpu")  # else a group that has NCCL, too, takes that
    ch.group.barrier(how).wait()


ALGORITHMS = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier)}


def move(ch: Channel, job: Job) -> None:
    if PROCESS.checked and ch.size > 1:
        compare_headers(ch, job)
    ALGORITHMS[job.call.op](ch, job, tag_of(job.call) + 1)


def tag_of(call: Call) -> int:
    """For headers; the next two are for the data of the first and second half of an all-reduce."""
    return call.seq % 2**27 * 4


def compare_headers(ch: Channel, job: Job) -> None:
    what = call_log.describe(job.call), job.call.name or "", job.call.site
    counts = job.send_sizes or [""] * ch.size  # elements that go there, where sizes may differ
    outgoing = [call_log.pack(*what, str(count)) for count in counts]
    incoming = [header.clone() for header in outgoing]
    in_rounds(ch, None, outgoing, incoming, tag_of(job.call))
    call_log.compare(job.call, incoming, job.receive_sizes)


# ---- backends: gloo, NCCL, or nothing (a dry run) --------------------------------------------------------
#
# start(ch, job, in_background)   sets a collective in motion; returns wait
# post(ch, sends, receives)       sets messages (call, tensor, peer) in motion; returns wait
#
# Both mark their calls as finished. A group may have two backends: the tensor's device says which moves it.
# Where the backend moves the data itself, on NCCL and in a dry run, `planned_bytes` charges the same cuts. In
# a dry run nothing is cut: a call costs the same Python in a world of 4 and of 131,072.


class Backend:
    counts = False  # are bytes counted where a buffer is handed to the network?
    adds = True  # are sums taken here, in memory of ours?
    on_host = False  # does the network read and write memory of the host alone?
    in_queues = False  # do messages of a pair of ranks wait for each other, whichever way they go?


class Gloo(Backend):
    counts = on_host = True

    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        def drive() -> None:
            try:
                with unseen():
                    move(ch, job)
            finally:  # a call that is refused, or whose peer is gone, is over as well
                call_log.finished(job.call)

        if in_background:
            return ch.lane(job.call).submit(drive)
        apart(drive)
        return lambda: None

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        arrivals, works = [], []
        with unseen():
            for call, tensor, peer in receives:
                header, header_work, (header_tag, tag) = None, None, message_tags(call)
                if PROCESS.checked:
                    header = torch.empty(call_log.HEADER_BYTES, dtype=torch.uint8)
                    header_work = post_receive(ch, header, peer, header_tag)
                arrivals.append((call, header, header_work, post_receive(ch, tensor, peer, tag)))
            for call, tensor, peer in sends:
                header_tag, tag = message_tags(call)
                if PROCESS.checked:
                    header = call_log.pack(signature(call.shape, call.dtype), "", call.site)
                    works.append(post_send(ch, None, header, peer, header_tag))
                works.append(post_send(ch, call, tensor, peer, tag))

        def wait() -> None:
            for call, header, header_work, data_work in arrivals:
                wait_all([header_work])
                if header is not None:
                    call_log.compare_message(call, header)
                wait_all([data_work])
            wait_all(works)
            for call, *_ in (*sends, *receives):
                call_log.finished(call)

        return lambda: apart(wait)


def message_tags(call: Call) -> tuple[int, int]:
    """Tags of a message's header and data, which in checked mode has dtype and shape in it (call_log.py)."""
    tag = 2**30 + call.seq % 2**12 * 2**17
    form = zlib.crc32(signature(call.shape, call.dtype).encode()) & 0xFFFF
    return tag + 2**16, tag + form * PROCESS.checked


def unseen():
    """A context that dispatch modes do not see: an algorithm's additions are communication, not FLOPs."""
    return outside_modes() if num_modes() else nullcontext()


class Dry(Backend):  # nothing moves; results have shapes and no values
    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        return lambda: call_log.finished(job.call)

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        calls = [call for call, *_ in (*sends, *receives)]
        return lambda: [call_log.finished(call) for call in calls]


def renamed(new: str, old: str) -> Callable:
    """torch 2.13 renamed two collectives and warns at the old names; 2.11 has only the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)


class NCCL(Backend):
    """The host tells a stream what to do and goes on; `wait` makes the computing stream wait, and no error
    ends it. Where others may outlive a dead rank (`grace_s`) the host waits, for as long as they may; in
    checked mode, for the headers of a collective, which go by gloo."""

    adds, in_queues = False, True

    def start(self, ch: Channel, job: Job, in_background: bool) -> Callable[[], object]:
        op, src, dst, given = job.call.op, job.src, job.dst, dict(group=ch.group, async_op=True)
        compared = None
        if PROCESS.checked and ch.size > 1 and "cpu" in ch.doors:
            compared = ch.lane(job.call).submit(partial(compare_headers, ch, job))
            if not in_background:
                compared()
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
        told = self.told([work], [job.call])
        return told if compared is None else lambda: (compared(), told())

    def post(self, ch: Channel, sends: list, receives: list) -> Callable[[], None]:
        group = ch.group
        if len(sends) + len(receives) == 1:  # on the pair's own stream: waits for no other peer
            works = [dist.isend(tensor, group=group, group_dst=peer) for _, tensor, peer in sends]
            works += [dist.irecv(tensor, group=group, group_src=peer) for _, tensor, peer in receives]
        else:  # together, else two ranks that send to each other could block
            both = [(dist.isend, *send) for send in sends] + [(dist.irecv, *receive) for receive in receives]
            ops = [dist.P2POp(op, x, group=group, group_peer=peer) for op, _, x, peer in both]
            works = dist.batch_isend_irecv(ops)
        return self.told(works, [call for call, *_ in (*sends, *receives)])

    def told(self, works: list, calls: list[Call]) -> Callable[[], None]:
        for call in calls:
            call_log.queued(call)
        watch(works, calls)

        def wait() -> None:
            started = time.monotonic()
            while PROCESS.patience_s is not None and not all(work.is_completed() for work in works):
                check_patience(started)
                time.sleep(0.001)
            wait_all(works)

        return wait


def watch(works: list, calls: list[Call]) -> None:
    """Marks the calls as finished soon after their stream has done them."""

    def look() -> None:
        while True:
            for one in list(PROCESS.on_streams):
                if all(work.is_completed() for work in one[0]):
                    for call in one[1]:
                        call_log.finished(call)
                    PROCESS.on_streams.remove(one)
            time.sleep(LOOK_S)

    PROCESS.on_streams.append((works, calls))
    if PROCESS.watcher is None:
        PROCESS.watcher = Thread(target=look, daemon=True)
        PROCESS.watcher.start()


BACKENDS = {"nccl": NCCL(), "gloo": Gloo(), "gloo_apart": Gloo(), "fake": Dry()}  # launch/team.py


def doors_of(group: ProcessGroup) -> dict[str, Backend]:
    """By kind of device, what moves its tensors in this group; in a dry run "any" kind."""
    try:
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    except (TypeError, AssertionError, ValueError):  # torch does not know it any more
        raise ValueError("this group was destroyed, with its generation: use world() or a new mesh") from None
    doors = dict(pair.split(":") for pair in config.split(","))
    if unknown := set(doors.values()) - BACKENDS.keys():
        said = f"backend {config!r} has {', '.join(sorted(unknown))}"
        raise ValueError(f"{said}; collectives run on gloo and nccl, and on fake in a dry run")
    if "fake" in doors.values():
        doors["any"] = "fake"
    return {kind: BACKENDS[name] for kind, name in doors.items()}
