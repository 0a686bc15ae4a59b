"""ZeRO-Offload: the host keeps the optimizer's states and updates; the device keeps parameters alone.

    backward    gradient final -> to_host            bucket by bucket, and its update on the host begins,
                                                     while backward goes on
    step        what is left                         -> to_device, while the next tensor is updated
    device      2Ψ bytes and the gradients under way     host  2Ψ parameters, 2Ψ gradients, 12Ψ states

for Ψ parameters in bfloat16 with float32 masters; all on the device are 16Ψ. Sent over the link in a step: 2Ψ
each way, once however many microbatches there are. It listens to a Sync (data_parallel/sync.py), which calls
`on_grad_final` with every sum over ranks. Clipping and a scaled loss need the norm of all gradients before
the first update: then `early` is False. With `early` a step that fails in backward is lost.

    delayed     the update of step k runs beside step k + 1, which computes with the weights before it; but
                for the first `warmup_steps` updates

Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840, sections 3, 4.2 and 5.2 (delayed update after 40 steps).
Differs: any elementwise optimizer; its kernel is torch's fused one where it has one.
"""

from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitrain.memory import pools
from minitrain.memory.pools import Transfer, new_host, on_host, to_device, to_host
from minitrain.ranks import collectives
from minitrain.ranks.checks import MOST, require_ints
from minitrain.ranks.torch_private import fused_adamw_, in_backward


class HostOptimizer(torch.optim.Optimizer):
    """Takes over `optimizer`, whose parameters become copies on the host; those it had are the device's. Of
    torch's class are the groups, so that schedulers of learning rates take it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, delayed: bool = False, warmup_steps: int = 40):
        require_ints(0, MOST, warmup_steps=warmup_steps)
        self.inner, self.delayed, self.warmup_steps = optimizer, delayed, warmup_steps
        self.param_groups = optimizer.param_groups  # settings, and parameters on the host
        self.defaults, self.state = optimizer.defaults, optimizer.state
        self.twin_of: dict[Tensor, nn.Parameter] = {}  # parameter of the device -> the host's
        self.updates = 0  # begun so far
        self.early = False  # updates may begin before `step`: nothing of all gradients has to be known
        self.before_update = None  # if set, called with a parameter of the device before its update begins
        self.exposed_elements = 0  # whose update in the last step did not begin inside of a backward
        self._coming: dict[Tensor, Transfer] = {}  # gradients on their way, of this step
        self._there: dict[Tensor, Transfer] = {}  # those that the device need not keep, perhaps still on it,
        self._begun: set[Tensor] = set()  # and the parameters whose update in this step has begun
        self._spare: dict[tuple[Tensor, int], Tensor] = {}  # memory for gradients: two if updates are delayed
        self._pending: list[tuple[Tensor, Future]] = []
        states = dict(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [self._twin(param) for param in group["params"]]
        for param, state in states.items():
            self.set_state(param, state)

    def _twin(self, param: nn.Parameter) -> nn.Parameter:
        twin = param
        if not on_host(param):
            data = new_host(param.shape, param.dtype, pinned=param.is_cuda, kind="parameters")
            twin = nn.Parameter(to_host(param, out=data).wait())
            twin.grad_dtype = param.grad_dtype
            vars(twin).update(vars(param) | vars(twin))  # how it is cut and rounded; fake ones' own device
        self.twin_of[param] = twin
        return twin

    def zero_grad(self) -> None:
        self.on_finish()
        self._there.clear()
        self._begun.clear()
        self.exposed_elements = 0
        for twin in self.twin_of.values():
            twin.grad = None

    def on_grad_final(self, param: nn.Parameter, grad: Tensor) -> None:
        """The gradient of a parameter is final: off to the host. One more may be on its way."""
        for before in list(self._coming)[:-1]:
            self._arrive(before)
        number = self.updates % 2 if self.delayed else 0  # a delayed update still reads the other one
        if (param, number) not in self._spare:
            self._spare[param, number] = new_host(grad.shape, grad.dtype, grad.is_cuda, "gradients")
        self._coming[param] = to_host(collectives.announce("gradient", grad), out=self._spare[param, number])
        param.grad = None

    def _arrive(self, param: Tensor) -> None:
        """No host waits for it here: the work that reads the gradient does."""
        self._there[param] = transfer = self._coming.pop(param)
        self.twin_of[param].grad = transfer.release()
        if self.early and not self._delays:
            self._begin(param)

    def on_finish(self) -> None:  # of a backward
        for param in list(self._coming):
            self._arrive(param)
        for transfer in () if self.early else self._there.values():
            transfer.wait()  # the host asks for their norm

    def grad_of(self, param: Tensor) -> Tensor | None:
        """The gradient of a parameter of the device, here or there."""
        if param in self._coming:
            self._arrive(param)
        return self._there[param].wait() if param in self._there else param.grad

    def step(self) -> None:
        """Begin the update of all gradients; wait for it, or delayed for the one before."""
        delays = self._delays
        if delays:
            self.settle()
        self.on_finish()
        for param in [param for param in self.twin_of if param in self._there.keys() - self._begun]:
            self._begin(param)
        self.updates += 1
        if not delays:
            self.settle()

    _delays = property(lambda self: self.delayed and self.updates >= self.warmup_steps)

    def _begin(self, param: Tensor) -> None:
        if self.before_update:
            self.before_update(param)
        self._begun.add(param)
        if not (self._delays or in_backward()):
            self.exposed_elements += param.numel()
        twin = self.twin_of[param]
        group = next(group for group in self.inner.param_groups if any(twin is p for p in group["params"]))
        alone = nn.Parameter(twin.detach())  # with the gradient that it has now
        alone.grad_dtype, alone.grad = twin.grad_dtype, twin.grad
        vars(alone).update(vars(twin))
        one = of_one(self.inner, group, alone, self.inner.state.get(twin, {}))
        self._pending.append((param, pools.work(partial(updated, one), twin, after=self._there[param])))

    def settle(self) -> bool:
        """Bring the weights of an update under way to the device; False if there is none."""
        pending, self._pending, coming = self._pending, [], []
        for param, update in pending:
            twin = self.twin_of[param]
            self.inner.state[twin] = update.result()
            for value in self.inner.state[twin].values():
                if isinstance(value, Tensor):
                    collectives.announce_host(value, "optimizer state")
            if twin is not param:
                coming.append(to_device(twin, out=param))
        for transfer in coming:
            transfer.wait()
        return bool(pending)

    def get_state(self, param: Tensor) -> dict[str, Any]:
        """No copy; an update under way must have been settled."""
        return self.inner.state.get(self.twin_of[param], {})

    def set_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """A copy of it; {} takes it away."""
        twin = self.twin_of[param]
        self.inner.state.pop(twin, None)
        for name, value in state.items():
            if isinstance(value, Tensor):
                value = to_host(value, out=new_host(value.shape, value.dtype, kind="optimizer state")).wait()
            self.inner.state[twin][name] = value

    def refresh(self) -> None:
        """Copy the parameters from the device, where they and states were written."""
        self.updates = max((int(state.get("step", 0)) for state in self.inner.state.values()), default=0)
        for param, twin in self.twin_of.items():
            if twin is not param:
                to_host(param, out=twin).wait()


def of_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, state: dict[str, Any]):
    """A copy of `optimizer` that has this parameter alone, with the settings of now: for another thread, or a
    piece of a tensor."""
    one = object.__new__(type(optimizer))  # copy.copy keeps only what torch's __getstate__ names
    groups = [dict(group, params=[param])]
    vars(one).update(vars(optimizer), param_groups=groups, state=defaultdict(dict, {param: state}))
    return one


def updated(one: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of its only parameter after a step. No hook of an optimizer's steps sees it."""
    type(one).step.__wrapped__(one)
    return one.state[one.param_groups[0]["params"][0]]


def fused_adamw(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of AdamW of one tensor by torch's fused kernel; arguments as optim.py's update."""
    names = ("exp_avg", "exp_avg_sq")
    moments = [state[name].to(weight.dtype) for name in names]
    step = torch.tensor(float(state["step"]))
    (beta1, beta2), settings = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
    settings |= dict(beta1=beta1, beta2=beta2, amsgrad=False, maximize=False)
    fused_adamw_([weight], [grad], *([moment] for moment in moments), [], [step], **settings)
    for name, moment in zip(names, moments):
        if moment is not state[name]:  # kept in fewer bits
            state[name].copy_(moment)
