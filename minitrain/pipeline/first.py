"""Pipelines on a page: each rank has a stage of the model, and microbatches flow through.

    gpipe           F0 F1 F2 F3 B0 B1 B2 B3         each rank keeps the activations of all m microbatches
    one_f_one_b     F0 F1 B0 F2 B1 F3 B2 B3         rank r of p keeps those of p - r at most

A schedule is a list of (F, i) and (B, i) for each rank, and `run` carries out any. Both leave a rank idle for
(p-1)/(m+p-1) of the time: the pipeline fills and drains. A rank sends the activations at its end and the
gradients at its start, once a microbatch. Activations go up on one group and gradients down on another of
the same ranks: on NCCL the messages of a pair and group stand in one queue, where a send that waits for its
receiver would hold up the receive that this receiver waits for.
Huang et al. 2019, GPipe, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1F1B).
General: schedule (schedules/ has interleaved, zero bubble, both directions), lower and runtime.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

F, B = "F", "B"


def gpipe(rank: int, p: int, m: int) -> list[tuple[str, int]]:
    return [(F, i) for i in range(m)] + [(B, i) for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int) -> list[tuple[str, int]]:
    ahead = min(p - rank - 1, m)  # forwards before the first backward can be here
    steady = [action for i in range(m - ahead) for action in ((F, ahead + i), (B, i))]
    return [(F, i) for i in range(ahead)] + steady + [(B, i) for i in range(m - ahead, m)]


def run(stage: nn.Module, schedule: list, inputs, loss_fn, shape, up, down) -> Tensor:
    """Gradients in .grad, and on the last rank the sum of the losses. `inputs`: microbatches, of the first
    rank; `loss_fn(i, output)`: of the last; `shape`: of what travels; `up`, `down`: groups of all ranks."""
    rank, last, like = up.rank(), up.size() - 1, next(stage.parameters())
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of microbatches between F and B
    sending, total = [], torch.zeros((), dtype=like.dtype, device=like.device)

    def receive(group: dist.ProcessGroup, source: int) -> Tensor:
        dist.recv(room := like.new_empty(shape), group=group, group_src=source)
        return room

    def send(x: Tensor, group: dist.ProcessGroup, to: int) -> None:
        sending.append((dist.isend(x := x.contiguous(), group=group, group_dst=to), x))  # x lives till then

    for kind, i in schedule:
        if kind == F:
            x = inputs[i] if rank == 0 else receive(up, rank - 1).requires_grad_()
            y = loss_fn(i, stage(x)) if rank == last else stage(x)
            kept[i] = x, y
            if rank == last:
                total += y.detach()
            else:
                send(y.detach(), up, rank + 1)
        else:
            x, y = kept.pop(i)
            y.backward(None if rank == last else receive(down, rank + 1))
            if rank:
                send(x.grad, down, rank - 1)
    for work, _ in sending:
        work.wait()
    return total
