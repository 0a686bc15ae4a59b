"""Sync: what sums gradients over ranks and owns the optimizer; every stage of sharding is one of these.

    forward_backward   ->   finish()       ->   clip           ->   step()                   ->   forward
    hooks see gradients     all are sums        over the shards     optimizer, then publish()     new weights

`shards` are records with `params`, parameters of the model, and `shard`, what this rank updates of them. A
gradient is complete when autograd's hook says so while `enabled`; a pipeline, with an order of its own, sets
`driven`, and calls `on_microbatch_grads(params)` after each backward, `on_step_grads(params)` after the last.
`make_optimizer(params)` is called once, with stand-ins of each parameter's `.global_name` and whole shape: so
groups by name or shape mean the same whatever is cut. Checkpoints are functions of a Sync: states.py.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitrain.ranks import collectives
from minitrain.ranks.sharding import MakeOptimizer, build_optimizer, check_parts, local_shard, placement


class BufferKey(NamedTuple):
    """Parameters with equal keys may share a buffer: complete, summed, cut and updated alike."""

    part: int  # of a pipeline: the stage
    groups: tuple  # over whose ranks the gradient is a sum
    copies: object  # the group of stages that have the same parameters
    cut_over: tuple
    dtype: torch.dtype
    settings: int | None  # the optimizer's group


class Sync:
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, sync, sync). A stage of
    sharding adds how gradients and parameters travel: `finish`, `publish`, and its hooks."""

    enabled = True  # hooks count: this backward is the last of the step
    driven = False  # hooks do not count: `on_microbatch_grads` and `on_step_grads` are called
    finished = False  # gradients are sums, since `zero_grad`
    listener = None  # an optimizer of the host: on_grad_final(shard, grad) has the gradient from then on
    commit = staticmethod(lambda update: update())  # calls it when all ranks may: systems/faults/survive.py

    def __init__(self, model: nn.Module, groups: tuple, make_optimizer: MakeOptimizer | None):
        """`groups`: over whose ranks gradients are sums, where a parameter's placement names no others."""
        parts = getattr(model, "parts", lambda: [{param: name for name, param in model.named_parameters()}])
        self.parts = parts()  # of a pipeline: stages
        self.names = {param: name for part in self.parts for param, name in part.items()}
        self.trainable = [param for param in self.names if param.requires_grad]
        for param, name in self.names.items():
            param.global_name = name
        self.optimizer, self._first_states, group_of = build_optimizer(make_optimizer, self.names)
        self.key_of: dict[nn.Parameter, BufferKey] = {}
        for number, part in enumerate(self.parts):
            for param in part:
                at, over = placement(param), placement(param).summed_over or groups
                key = BufferKey(number, over, at.copies, at.cut_over, param.dtype, group_of.get(param))
                self.key_of[param] = key

    def set_shards(self, shards: Iterable) -> None:
        """From now on these are updated."""
        self.shards, self.finalized = list(shards), set()
        updated = {one: self.key_of[one.params[0]].settings for one in self.shards if one.shard.requires_grad}
        in_parts = [one for one in updated if one.cuts or one.params[1:] or placement(one.params[0]).cut_over]
        for number, one in {updated[one]: one for one in in_parts if self.optimizer}.items():
            check_parts(self.optimizer, number, one.params[0], self._first_states)
        for one, number in updated.items():
            if self.optimizer:
                self.optimizer.param_groups[number]["params"].append(one.shard)
                states = [self._first_states.pop(param, {}) for param in one.params]
                for key, value in states[0].items():
                    if key != "step" and isinstance(value, Tensor):
                        flat = one.pack([local_shard(state[key], p) for state, p in zip(states, one.params)])
                        value = one.local_shard(flat, slice(len(one.cuts))).view_as(one.shard).clone()
                    self.optimizer.state[one.shard][key] = value

    param_groups = property(lambda self: self.optimizer.param_groups if self.optimizer else [])

    def zero_grad(self) -> None:
        self.finished = False
        trained = set(self.trainable)
        if other := [name for x, name in self.names.items() if x.requires_grad != (x in trained)]:
            raise ValueError(f"{other[0]}.requires_grad has changed since this Sync was made: make another")
        for one in self.shards:
            for param in (one.shard, *one.params):
                param.grad = None
        if self.optimizer:
            self.optimizer.zero_grad()

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None:
        """A microbatch has added its gradients to these."""

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete for this step."""

    def gathered_buffers(self) -> list[Tensor]:
        """Memory that parameters are views of while a layer needs them."""
        return []

    def finish(self) -> None:
        """Every gradient that the optimizer will see is the sum over all ranks and microbatches."""

    def finalize(self, one, grad: Tensor) -> None:
        """The sum over data ranks is there; other stages that have these parameters add their terms."""
        copies = placement(one.params[0]).copies
        if copies is not None:
            collectives.all_reduce(grad, copies, out=grad)
        self.on_grad_final(one, grad)

    def on_grad_final(self, one, grad: Tensor) -> None:
        self.finalized.add(one)
        if self.listener:
            self.listener.on_grad_final(one.shard, grad)
        else:
            one.shard.grad = grad

    def finalizes_early(self, one) -> bool:
        """Whether somebody waits for this gradient, and nothing is added to it in `finish`."""
        return self.listener is not None and placement(one.params[0]).copies is None

    def on_finish(self) -> None:
        self.finalized.clear()
        self.finished = True
        if self.listener:
            self.listener.on_finish()

    def step(self) -> None:
        if not self.finished:
            raise ValueError("step() before finish(): gradients are not sums over ranks; call finish()")
        self.commit(self.update)
        self.publish()

    def update(self) -> None:
        if self.optimizer:
            if not hasattr(self.optimizer, "before_update"):  # else it says which parameter is next
                self.before_update()
            self.optimizer.step()

    def before_update(self, shard: Tensor | None = None) -> None:
        """This shard and its states are about to change; None: all of them."""

    def publish(self, frozen: bool = False) -> None:
        """Bring the model up to date with its shards; with `frozen` those too that are not updated."""

    def missing_gradients(self, params: Iterable[nn.Parameter]) -> ValueError:
        names = [self.names[param] for param in params if param.grad is None]
        cure = "use all on every rank (in ZeRO-2 and 3 in each microbatch), or freeze them"
        return ValueError(f"no gradient for {', '.join(names[:3])}; {cure}")
