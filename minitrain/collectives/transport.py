"""Moving bytes between the ranks of one group: our own algorithms on gloo, the backend's on NCCL, nothing in a dry run.

A tensor is cut into one chunk per rank; when n does not divide its size, the first chunks are one element longer.

    all-to-all      in round s = 1 .. n-1: piece rank+s to its rank, a piece from rank-s     sends x but the own piece
    reduce-scatter  the same with chunks, then the n terms are added in rank order           sends x but the own chunk
    all-gather      a ring: n-1 times pass on to rank+1 what came from rank-1                sends n-1 chunks
    all-reduce      reduce-scatter, then all-gather                                          2(n-1)/n of x
    broadcast       a binomial tree: who has the tensor passes it on, log2(n) rounds         n-1 tensors over all ranks

Each chunk is added up by one rank, in rank order; bf16 and fp16 are added in float32 and rounded once. So all ranks get
the same bits, run after run. (NCCL adds along rings and trees, rounding to the tensor's dtype at each hop.)
Every call has message tags of its own, so that calls of one group can overlap. Bytes are counted where a buffer is
handed to the network (`post_send`); where the backend moves the data itself, on NCCL and in a dry run, `planned_bytes`
charges the same cuts. In a dry run nothing is cut: a call costs the same Python in a world of 4 and of 131,072.

Why not gloo's own: its reduce-scatter puts an all-reduce on the wire. Why rounds and a ring, not everything at once: a
connection that is written while data arrives on it makes gloo's event loop spin. Medians, 4 ranks on 2 busy cores,
256 KB: reduce-scatter 1.9 ms in rounds, 4.1 all at once, gloo's own 5.3; all-gather 1.6 in a ring, 5.5, gloo's own 2.9.
Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH", section 4: these are
its algorithms for long messages, pairwise exchange and ring. Differs: here they serve every size.
"""

from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.collectives import call_log, checked
from minitrain.collectives.call_log import Call
from minitrain.collectives.channel import Channel
from minitrain.torch_private import num_modes, outside_modes


@dataclass(slots=True)
class Job:
    """One collective on this rank with all the memory it needs: flat contiguous tensors, ready to move."""

    call: Call
    src: Tensor
    dst: Tensor
    received: Tensor | None = None  # room for the n-1 chunks to add, or more
    wide: Tensor | None = (
        None  # room for a float32 chunk, or more, to add bf16 and fp16 in (a maximum rounds nothing)
    )
    send_sizes: list[int] | None = None  # elements for each rank; None: the plan's chunks
    receive_sizes: list[int] | None = None
    source: int = 0  # of a broadcast


# ---- the chunk plan --------------------------------------------------------------------------------------------------


def chunk_size(total: int, n: int, index: int) -> int:
    """Elements of chunk `index` of n: total // n, the first total % n chunks one more, as torch.tensor_split cuts."""
    return total // n + (index < total % n)


def pieces(flat: Tensor, n: int, sizes: list[int] | None = None) -> list[Tensor]:
    """The n parts of a flat tensor, views: of the sizes given, else the plan's chunks."""
    return list(flat.tensor_split(n) if sizes is None else flat.split(sizes))


def tree_children(rank: int, n: int, source: int) -> list[int]:
    """To whom `rank` passes a broadcast on: a binomial tree rooted at `source`, largest subtree first."""
    position, children, step = (rank - source) % n, [], 1
    while step < n and not position & step:
        if position + step < n:
            children.append((position + step + source) % n)
        step *= 2
    return children[::-1]


def tree_parent(rank: int, n: int, source: int) -> int:
    position = (rank - source) % n
    return ((position & (position - 1)) + source) % n


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


# ---- gloo: our algorithms over send and receive ----------------------------------------------------------------------


def post_send(ch: Channel, call: Call | None, tensor: Tensor, to: int, tag: int):
    """Hand `tensor` to the network and count it in `call`: the only place where gloo is given bytes to send."""
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


def in_rounds(
    ch: Channel, call: Call | None, outgoing: list[Tensor], incoming: list[Tensor], tag: int
) -> None:
    """In round s send outgoing[rank + s] to that rank, and wait for incoming[rank - s] from that one."""
    arrivals = [post_receive(ch, incoming[p], p, tag) for p in ch.before]
    sends = []
    for to, arrival in zip(ch.after, arrivals):
        sends.append(post_send(ch, call, outgoing[to], to, tag))
        wait_all([arrival])
    wait_all(sends)


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


def post_ring(ch: Channel, chunks: list[Tensor], tag: int) -> list:
    """The receives of a ring all-gather: all from the rank before, first its own chunk."""
    return [post_receive(ch, chunks[p], ch.before[0], tag) for p in ch.before]


def pass_around(ch: Channel, call: Call, chunks: list[Tensor], arrivals: list, tag: int) -> None:
    """Send the own chunk to the next rank, then each chunk as it arrives from the one before."""
    sends = []
    for owner, arrival in zip([ch.rank, *ch.before], arrivals):
        sends.append(post_send(ch, call, chunks[owner], ch.after[0], tag))
        wait_all([arrival])
    wait_all(sends)


def all_reduce(ch: Channel, job: Job, tag: int) -> None:
    # The receives of the second half are posted first, to be there when its data comes. In place (dst is src) this is
    # safe: rank p sends chunk p only when it has all terms, so what arrives never overwrites what is still to be sent.
    chunks = pieces(job.dst, ch.size)
    arrivals = post_ring(ch, chunks, tag + 1)
    outgoing = chunks if job.src is job.dst else pieces(job.src, ch.size)
    reduce_pieces(ch, job, outgoing, chunks[ch.rank], tag)
    pass_around(ch, job.call, chunks, arrivals, tag + 1)


def broadcast(ch: Channel, job: Job, tag: int) -> None:
    if ch.rank == job.source:
        job.dst.copy_(job.src)
    else:
        wait_all([post_receive(ch, job.dst, tree_parent(ch.rank, ch.size, job.source), tag)])
    children = tree_children(ch.rank, ch.size, job.source)
    wait_all([post_send(ch, job.call, job.dst, child, tag) for child in children])


def barrier(ch: Channel, job: Job, tag: int) -> None:
    ch.group.barrier().wait()


def swap_headers(ch: Channel, job: Job, tag: int) -> None:
    """Checked mode: compare with the other members what is called; raises CollectiveMismatch."""
    ours = checked.headers_of(job.call, job.send_sizes)
    theirs = torch.stack(ours)
    in_rounds(ch, None, ours, list(theirs), tag)
    checked.compare(job.call, theirs, job.receive_sizes)


MOVES = {
    move.__name__: move for move in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier)
}


def move(ch: Channel, job: Job) -> None:
    """Run one collective on gloo to its end, unseen by dispatch modes: its additions are communication, not work."""
    if num_modes():
        with outside_modes():
            return move(ch, job)
    tag = (
        job.call.seq % 2**27 * 4
    )  # of the headers; the next two are for the data of the first and of the second half
    if checked.enabled:
        swap_headers(ch, job, tag)
    MOVES[job.call.op](ch, job, tag + 1)
    call_log.finished(job.call)


def start(ch: Channel, group: dist.ProcessGroup, job: Job, in_background: bool) -> tuple[Callable, Callable]:
    """Set a collective in motion on any backend; returns (what waits for it, what asks whether it is done)."""
    if ch.backend == "gloo" and in_background:
        task = ch.lane(job.call).submit(lambda: move(ch, job))
        return task.wait, task.done
    if ch.backend == "gloo":
        move(ch, job)
    elif ch.backend == "nccl":
        work = start_on_nccl(ch, group, job)
        return lambda: (work.wait(), call_log.finished(job.call)), work.is_completed
    return lambda: call_log.finished(job.call), lambda: True


# ---- NCCL: the backend's collectives ---------------------------------------------------------------------------------


def renamed(new: str, old: str) -> Callable:
    """torch 2.13 renamed two collectives and warns at the old names; 2.11 has only the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)


def start_on_nccl(ch: Channel, group: dist.ProcessGroup, job: Job):
    """Start the backend's own collective and return its work handle."""
    op, src, dst = job.call.op, job.src, job.dst
    if op == "all_reduce":
        if dst.data_ptr() != src.data_ptr():
            dst.copy_(src)
        reduction = dist.ReduceOp.MAX if job.call.reduction == "max" else dist.ReduceOp.SUM
        return dist.all_reduce(dst, reduction, group=group, async_op=True)
    if op == "all_gather":
        return renamed("all_gather_single", "all_gather_into_tensor")(dst, src, group=group, async_op=True)
    if op == "reduce_scatter":
        return renamed("reduce_scatter_single", "reduce_scatter_tensor")(dst, src, group=group, async_op=True)
    if op == "all_to_all":
        return dist.all_to_all_single(dst, src, job.receive_sizes, job.send_sizes, group=group, async_op=True)
    if op == "broadcast":
        if ch.rank == job.source:
            dst.copy_(src)
        return dist.broadcast(dst, group_src=job.source, group=group, async_op=True)
    return dist.barrier(group=group, async_op=True)


# ---- messages from one rank to another -------------------------------------------------------------------------------


def post_messages(ch: Channel, group: dist.ProcessGroup, sends: list, receives: list) -> Callable[[], None]:
    """Post receives and sends of (call, tensor, peer) on any backend; returns what waits for them."""
    check = []
    if ch.backend == "gloo":
        if num_modes():
            with outside_modes():
                return post_messages(ch, group, sends, receives)
        check, works = post_on_gloo(ch, sends, receives)
    elif (
        ch.backend == "nccl" and len(sends) + len(receives) == 1
    ):  # on the pair's own stream: waits for no other peer
        works = [dist.isend(tensor, group=group, group_dst=peer) for _, tensor, peer in sends]
        works += [dist.irecv(tensor, group=group, group_src=peer) for _, tensor, peer in receives]
    elif ch.backend == "nccl":  # together, else two ranks that send to each other could block
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for _, tensor, peer in sends]
            + [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for _, tensor, peer in receives]
        )
    else:
        works = []

    def settle() -> None:
        for call, header, arrival in check:
            arrival.wait()
            checked.compare_message(call, header)
        wait_all(works)
        for call, _, _ in receives + sends:
            call_log.finished(call)

    return settle


def post_on_gloo(ch: Channel, sends: list, receives: list) -> tuple[list, list]:
    """Returns (headers to compare when they arrive, works to wait for)."""
    headers, works = [], []
    for call, tensor, peer in receives:
        header_tag, tag = message_tags(call)
        if checked.enabled:
            header = torch.empty(checked.HEADER_BYTES, dtype=torch.uint8)
            headers.append((call, header, ch.group.recv([header], peer, header_tag)))
        works.append(post_receive(ch, tensor, peer, tag))
    for call, tensor, peer in sends:
        header_tag, tag = message_tags(call)
        if checked.enabled:
            works.append(post_send(ch, None, checked.message_header(call), peer, header_tag))
        works.append(post_send(ch, call, tensor, peer, tag))
    return headers, works


def message_tags(call: Call) -> tuple[int, int]:
    """Tags of a message's header and data. In checked mode dtype and shape are part of the second: see checked.py."""
    tag = 2**30 + call.seq % 2**12 * 2**17
    return tag + 2**16, tag + (checked.fingerprint(call) if checked.enabled else 0)
