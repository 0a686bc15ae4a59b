"""Offload on a page: the host has the optimizer's states and updates; the device has weights alone.

    backward    a gradient is final -> copied to the host             while backward goes on
    step()      the host updates a tensor -> copied to the device     while it updates the next

Of Psi parameters in bfloat16 the device keeps 2 Psi bytes and the gradients under way, not 16 Psi; over the
link go 2 Psi to the host and 2 Psi back per step. On a GPU copies run on a stream of their own, from pinned
memory, and events order them: an update waits for its gradient, the next forward for all weights. Without a
GPU both memories are the same, and copies are plain. Ren et al. 2021, arXiv:2101.06840, section 4.
General: host_optimizer.py (updates begin in backward, delayed by a step, over ZeRO's shards), pools.py.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn


class HostOptimizer:
    """Each step: one backward, step(). `make`: an optimizer of a list of parameters, made on the host."""

    def __init__(self, params: list[nn.Parameter], make):
        self.params, self.gpu = params, params[0].is_cuda
        self.side = torch.cuda.Stream() if self.gpu else None
        self.grads = [self.room(param) for param in params]  # what arrives, in the weights' dtype
        self.twins = [nn.Parameter(param.detach().float().cpu()) for param in params]
        self.results = [self.room(param) for param in params]
        self.arrived: dict[nn.Parameter, object] = {}  # when the copy of a gradient is complete
        self.optimizers = [make([twin]) for twin in self.twins]  # one each, so that they are stepped in turn
        for param, room in zip(params, self.grads):
            param.register_post_accumulate_grad_hook(lambda param, room=room: self.to_host(param, room))

    def room(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.gpu, device="cpu")

    def copying(self):
        """Copies in here come after all that was computed so far, and beside what is computed later."""
        if not self.gpu:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.side)

    def to_host(self, param: nn.Parameter, room: Tensor) -> None:
        with self.copying():
            room.copy_(param.grad, non_blocking=True)
            self.arrived[param] = self.side.record_event() if self.gpu else None
        if self.gpu:
            param.grad.record_stream(self.side)  # its memory may be used again when the copy is over
        param.grad = None

    def step(self) -> None:
        every = zip(self.params, self.twins, self.grads, self.results, self.optimizers)
        for param, twin, grad, result, optimizer in every:
            if param not in self.arrived:
                continue  # no gradient in this step
            if self.gpu:
                self.arrived[param].synchronize()  # of the host, which computes now
            twin.grad = grad.float() if grad.dtype != twin.dtype else grad
            optimizer.step()
            result.copy_(twin.detach())  # rounded
            with self.copying():
                param.data.copy_(result, non_blocking=True)
        self.arrived.clear()
        if self.gpu:
            torch.cuda.current_stream().wait_stream(self.side)  # the next forward reads what has come
