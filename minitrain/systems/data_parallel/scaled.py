"""Data parallelism for tensors with scales: gradients travel in 8 bits, and whole tensors are dealt out.

    backward of a tensor      its bfloat16 gradient becomes E4M3 with a scale, and is gone
    finish       all-reduce   A = max over ranks of each tensor's largest value, and 1/μ    8 bytes per tensor
                 all-to-all   codes in units of A / μ, to who adds them up, in float32
                 all-gather   codes of the sums, cut off at the largest number; with `deal` nothing
    publish      with `deal`  weights of who updated them, FP16, to all

Without `deal` flat buckets are cut evenly: a rank sends 2(n-1)/n bytes per parameter, half of
bfloat16's all-reduce. With it (ZeRO 1) a scale must not be cut from its tensor, so tensors go whole to the
rank that has least, the largest first: gradients send (n-1)/n bytes per parameter on average, weights
2(n-1)/n, and a rank holds 2 + 1 bytes per parameter and about 3/n of states.
Codes of one scale can be added, so a sum is of codes, and rounded once. Microbatches add up in E4M3 too, each
sum with a new scale. Peng et al. 2023, FP8-LM, arXiv:2310.18313, sections 2.1 and 2.2. Differs: pieces go
straight to who adds them up, a ring would round n-1 times; a sum starts when backward is done.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, flatten, pack, views
from minitrain.data_parallel.states import PlainValues
from minitrain.data_parallel.sync import Sync
from minitrain.precision.formats import E4M3
from minitrain.precision.fp8_lm import narrow, next_mu, wide
from minitrain.precision.rounding import encode
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import all_gather, all_reduce, all_to_all, broadcast
from minitrain.ranks.sharding import place, placement

FP8 = torch.float8_e4m3fn


class Scaled(Sync):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, sync, sync)."""

    def __init__(self, model: nn.Module, group, make_optimizer, bucket_bytes=25_000_000, deal=False):
        super().__init__(model, (group,), make_optimizer)
        self.group, self.values = group, ScaledValues(self)
        self.grad_dtypes = {param: param.grad_dtype for param in self.trainable}
        self.set_shards(Flat([param]) for param in self.names)
        self.buckets = pack(reversed(self.trainable), bucket_bytes, lambda param: param.device)
        self.mu = {param: torch.ones((), device=param.device) for param in self.trainable}
        self.grads: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # (codes, largest) until they are summed
        self.owner: dict[nn.Parameter, int] = {}
        self.sizes = [0] * group.size()  # elements that each rank owns
        if deal:
            self.owner = deal_out({param: param.numel() for param in self.trainable}, group.size())
            for param, owner in self.owner.items():
                place(param, inside=(group,))
                self.sizes[owner] += param.numel()
        for param in self.trainable:
            param.register_post_accumulate_grad_hook(self._on_grad)

    def updates(self, param: nn.Parameter) -> bool:
        return self.owner.get(param, self.group.rank()) == self.group.rank()

    def zero_grad(self) -> None:
        self.grads.clear()
        for param, dtype in self.grad_dtypes.items():
            param.grad = None
            param.grad_dtype = dtype

    def _on_grad(self, param: nn.Parameter) -> None:
        if param.grad is not None:  # else a pipeline's W makes it
            grad, param.grad = param.grad.float(), None
            if param in self.grads:
                grad += wide(*self.grads[param])
            self.grads[param] = narrow(grad, FP8)

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self._on_grad(param)

    def finish(self) -> None:
        self.on_microbatch_grads(self.trainable)
        if missing := [param for param in self.trainable if param not in self.grads]:
            raise self.missing_gradients(missing)
        if self.trainable:
            self._agree(self.trainable, self.group, self.mu)
        if self.owner:
            receive_sizes = [self.sizes[self.group.rank()]] * self.group.size()
            sizes = dict(send_sizes=self.sizes, receive_sizes=receive_sizes)
            codes = all_to_all(self._codes(self.owner), self.group, **sizes)
            self._set_codes(filter(self.updates, self.owner), _added(codes, self.group))
        else:
            for bucket in self.buckets:
                self._sum(bucket, self.group)
        for param in filter(self.updates, self.trainable):
            self.mu[param] = next_mu(self.mu[param], self.grads[param][0], self.group.size())
            copies = placement(param).copies
            if copies is not None:
                self._agree([param], copies, {param: torch.tensor(1 / copies.size(), device=param.device)})
                self._sum([param], copies)
            param.grad_dtype = FP8
            param.grad, param.grad_largest = self.grads[param]
        self.grads.clear()
        self.on_finish()

    def _agree(self, params: list[nn.Parameter], group: ProcessGroup, mu: dict) -> None:
        """One scale for each tensor: its units are A / μ of who has it."""
        told = torch.stack([self.grads[param][1] for param in params])
        inverse = [1 / mu[param] if self.updates(param) else torch.zeros_like(mu[param]) for param in params]
        told, inverse = all_reduce(torch.stack((told, torch.stack(inverse))), group, op="max")
        for param, amax in zip(params, torch.where((told > 0) & told.isfinite(), told * inverse, 1.0)):
            self.grads[param] = narrow(wide(*self.grads[param]), FP8, amax.clone())

    def _sum(self, params: list[nn.Parameter], group: ProcessGroup) -> None:
        """Of codes, by slices: to who adds them up, and back to all."""
        flat = self._codes(params)
        flat = torch.cat((flat, flat.new_zeros(-len(flat) % group.size())))
        self._set_codes(params, all_gather(_added(all_to_all(flat, group), group), group))

    def _codes(self, params: Iterable[nn.Parameter]) -> Tensor:
        return flatten([self.grads[param][0].view(torch.uint8) for param in params])

    def _set_codes(self, params: Iterable[nn.Parameter], codes: Tensor) -> None:
        params = list(params)
        for param, part in zip(params, views(codes.view(FP8), params)):
            self.grads[param] = part, self.grads[param][1]

    @torch.no_grad()
    def publish(self, frozen: bool = False) -> None:
        """With `deal`: everyone has what its owner updated."""
        if self.owner:
            ranks, params = self.group.size(), list(self.owner)
            mine = flatten([params[0].new_empty(0, dtype=torch.float16), *filter(self.updates, params)])
            sends = [len(mine)] * ranks
            whole = all_to_all(mine.repeat(ranks), self.group, send_sizes=sends, receive_sizes=self.sizes)
            amax = [p.largest if self.updates(p) else torch.zeros_like(p.largest) for p in params]
            amax = all_reduce(torch.stack(amax), self.group, op="max")
            for param, part, largest in zip(params, views(whole, params), amax):
                param.copy_(part)
                param.largest = largest.clone()


class ScaledValues(PlainValues):
    """Codes, and "largest/NAME": what the largest of them stands for. With `deal` states are the owner's."""

    def __init__(self, sync: Scaled):
        self.sync = sync

    def decode(self, one: Flat, local: Tensor | None) -> Tensor:
        param, sync = one.shard, self.sync
        if local is param:
            return wide(param, param.largest)
        if local is not param.grad:
            return local
        grad = wide(local, param.grad_largest) if sync.updates(param) else torch.empty_like(param).float()
        return broadcast(grad, sync.owner[param], sync.group) if sync.owner else grad

    def encode(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        codes, largest = narrow(whole, torch.float16)
        return {f"parameters/{name}": codes, f"largest/{name}": largest}

    def extra_tensors(self, one: Flat) -> dict[str, Tensor]:
        return {"largest": one.shard.largest}

    def is_updated(self, one: Flat) -> bool:
        return super().is_updated(one) and self.sync.updates(one.shard)

    def state_holders(self, holders: tuple[ProcessGroup, ...]) -> tuple[ProcessGroup, ...]:
        return tuple(group for group in holders if not self.sync.owner or group is not self.sync.group)

    def read_state(self, one: Flat, state: dict) -> dict[str, Any]:
        return state | {"mu": self.sync.mu[one.shard]} if state else {}

    def written_state(self, one: Flat, state: dict) -> dict[str, Any]:
        if state and (dtype := state["exp_avg"].dtype) != FP8:
            raise ValueError(f"moments are {dtype}, here {FP8}; go on with the precision it was saved in")
        self.sync.mu[one.shard] = state.pop("mu", torch.ones((), device=one.shard.device))
        return state

    def everywhere(self, one: Flat, state: dict) -> dict[str, Any]:
        param, group, owner = one.shard, self.sync.group, self.sync.owner.get(one.shard)
        if owner is None:
            return state
        step = broadcast(torch.tensor(state.get("step", 0), device=param.device), owner, group).item()
        if not step:
            return {}
        if not state:
            for name, dtype in (("exp_avg", FP8), ("exp_avg_sq", param.dtype)):
                state[name] = torch.empty_like(param, dtype=dtype)
            for name in ("exp_avg_largest", "exp_avg_sq_largest", "mu"):
                state[name] = torch.empty((), device=param.device)
        tensors = sorted(name for name in state if name != "step")
        return {name: broadcast(state[name], owner, group) for name in tensors} | {"step": step}


def _added(codes: Tensor, group: ProcessGroup) -> Tensor:
    """uint8 [n·d], of everyone with one scale -> [d], their sum in that scale, cut off."""
    total = codes.view(group.size(), -1).view(FP8).float().sum(0)
    return encode(total, E4M3, overflow="saturate")


def deal_out(sizes: dict, ranks: int) -> dict:
    """Who has what, in the order of ranks: the largest first, each to the rank that has least."""
    require_positive_ints(ranks=ranks)
    loads, owner = [0] * ranks, {}
    for item in sorted(sizes, key=sizes.get, reverse=True):
        owner[item] = loads.index(min(loads))
        loads[owner[item]] += sizes[item]
    return dict(sorted(owner.items(), key=lambda pair: pair[1]))
