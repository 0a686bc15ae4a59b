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
Codes of one scale can be added, so a sum is of codes, and rounded once. Microbatches add up in E4M3 too: the
sum so far and the next gradient, rounded again with the scale that they need together.
Peng et al. 2023, FP8-LM, arXiv:2310.18313, sections 2.1 and 2.2. Differs: pieces go straight to who adds them
up, a ring would round n-1 times; a sum starts when backward is done.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, pack
from minitrain.data_parallel.states import Whole, WholeParameter
from minitrain.data_parallel.sync import Sync
from minitrain.precision.formats import E4M3
from minitrain.precision.fp8_lm import narrow, next_mu, wide
from minitrain.precision.rounding import encode
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import all_gather, all_reduce, all_to_all, broadcast
from minitrain.ranks.pieces import Piece, whole_piece
from minitrain.ranks.sharding import place, placement

FP8 = torch.float8_e4m3fn


class ScaledParameter(WholeParameter):
    """Its values are told in float32."""

    def unfold(self, kept: Tensor) -> list[Tensor]:
        if kept is self.shard:
            return [wide(kept, kept.largest)]
        return [wide(kept, self.shard.grad_largest) if kept is self.shard.grad else kept.detach().clone()]


class Scaled(Sync):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, sync, sync)."""

    def __init__(
        self, model: nn.Module, group: ProcessGroup, make_optimizer, bucket_bytes=25_000_000, deal=False
    ):
        super().__init__(model, (group,), make_optimizer)
        self.group, self.arriving = group, {param: param.grad_dtype for param in self.trainable}
        self.hold(ScaledParameter(param) for param in self.names)
        self.buckets = pack(reversed(self.trainable), bucket_bytes, lambda param: param.device)
        self.mu = {param: torch.ones((), device=param.device) for param in self.trainable}
        self.found: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # gradients until they are summed
        self.owner: dict[nn.Parameter, int] = {}
        if deal:
            self.owner = deal_out({param: param.numel() for param in self.trainable}, group.size())
            for param in self.trainable:
                place(param, inside=(group,))
        for param in self.trainable:
            param.register_post_accumulate_grad_hook(self._take)

    def has(self, param: nn.Parameter) -> bool:
        """Whether this rank updates it."""
        return self.owner.get(param, self.group.rank()) == self.group.rank()

    # ---- gradients

    def zero_grad(self) -> None:
        self.found.clear()
        for param, dtype in self.arriving.items():
            param.grad = None
            param.grad_dtype = dtype

    def _take(self, param: nn.Parameter) -> None:
        """A backward is done with this one."""
        if param.grad is not None:  # else a pipeline's W makes it
            grad, param.grad = param.grad.float(), None
            if param in self.found:
                grad += wide(*self.found[param])
            self.found[param] = narrow(grad, FP8)

    def arrived(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self._take(param)

    ready = arrived

    def finish(self) -> None:
        self.arrived(self.trainable)
        if missing := [param for param in self.trainable if param not in self.found]:
            raise self.no_gradient(missing)
        if self.trainable:
            self._agree(self.trainable, self.group, self.mu)
        if self.owner:
            self._deal()
        else:
            for bucket in self.buckets:
                self._sum(bucket, self.group)
        for param in filter(self.has, self.trainable):
            self.mu[param] = next_mu(self.mu[param], self.found[param][0], self.group.size())
            copies = placement(param).copies
            if copies is not None:
                self._agree([param], copies, {param: torch.tensor(1 / copies.size(), device=param.device)})
                self._sum([param], copies)
            param.grad_dtype = FP8
            param.grad, param.grad_largest = self.found[param]
        self.found.clear()

    def _agree(self, params: list[nn.Parameter], group: ProcessGroup, mu: dict) -> None:
        """One scale for each tensor: its units are A / μ of who has it."""
        told = torch.stack([self.found[param][1] for param in params])
        inverse = torch.stack(
            [1 / mu[param] if self.has(param) else torch.zeros_like(mu[param]) for param in params]
        )
        told, inverse = all_reduce(torch.stack((told, inverse)), group, op="max")
        for param, amax in zip(params, torch.where((told > 0) & told.isfinite(), told * inverse, 1.0)):
            self.found[param] = narrow(wide(*self.found[param]), FP8, amax.clone())

    def _sum(self, params: list[nn.Parameter], group: ProcessGroup) -> None:
        """Of codes, by slices: to who adds them up, and back to all."""
        flat = flatten([self.found[param][0].view(torch.uint8) for param in params])
        numel = len(flat)
        flat = torch.cat((flat, flat.new_zeros(-numel % group.size())))
        sums = all_gather(_added(all_to_all(flat, group), group), group)[:numel]
        for param, part in zip(params, sums.split([param.numel() for param in params])):
            self.found[param] = part.view(FP8).view(param.shape), self.found[param][1]

    def _deal(self) -> None:
        """Of codes: every tensor to its owner."""
        mine, sizes = self._order(), self._sizes()
        flat = flatten([self.found[param][0].view(torch.uint8) for param in self.owner])
        own = sizes[self.group.rank()]
        got = all_to_all(flat, self.group, send_sizes=sizes, receive_sizes=[own] * len(sizes))
        for param, part in zip(mine, _added(got, self.group).split([param.numel() for param in mine])):
            self.found[param] = part.view(FP8).view(param.shape), self.found[param][1]

    def _order(self) -> list[nn.Parameter]:
        return [param for param in self.owner if self.has(param)]

    def _sizes(self) -> list[int]:
        ranks = range(self.group.size())
        return [sum(p.numel() for p, owner in self.owner.items() if owner == rank) for rank in ranks]

    def full_grad(self, param: nn.Parameter) -> Tensor:
        grad = (
            wide(param.grad, param.grad_largest)
            if self.has(param)
            else torch.empty(param.shape, device=param.device)
        )
        return broadcast(grad, self.owner[param], self.group) if self.owner else grad

    def full_grads(self) -> dict[str, Tensor]:
        return {self.names[param]: self.full_grad(param) for param in self.trainable}

    # ---- weights

    @torch.no_grad()
    def publish(self) -> None:
        """With `deal`: everyone has what its owner updated."""
        if self.owner:
            ranks, sizes = self.group.size(), self._sizes()
            mine = flatten(
                [torch.empty(0, dtype=torch.float16, device=next(iter(self.owner)).device), *self._order()]
            )
            sends = [len(mine)] * ranks
            whole = all_to_all(mine.repeat(ranks), self.group, send_sizes=sends, receive_sizes=sizes)
            amax = torch.stack(
                [p.largest if self.has(p) else torch.zeros_like(p.largest) for p in self.owner]
            )
            amax = all_reduce(amax, self.group, op="max")
            for param, part, largest in zip(self.owner, whole.split([p.numel() for p in self.owner]), amax):
                param.copy_(part.view(param.shape))
                param.largest = largest.clone()

    # ---- states

    def full_state_dict(self) -> dict[str, Any]:
        """An owner's states, by all."""
        full = super().full_state_dict()
        for param, mu in self.mu.items() if self.optimizer else ():
            state = full["optimizer"].get(self.names[param])
            state = state and state | {"mu": mu.clone()}
            if param in self.owner:
                state = from_owner(state, self.owner[param], self.group, param)
            full["optimizer"] |= {self.names[param]: state} if state else {}
        return full

    def whole_of(self, full: dict[str, Any]) -> Whole:
        """Values become codes again."""
        params, scales = {}, {}
        for param, name in self.names.items():
            params[name], scales[f"largest/{name}"] = narrow(full["parameters"][name], param.dtype)
        return Whole(params, full["optimizer"], **scales)

    def pieces_of_parameters(self, kept: ScaledParameter, beside: tuple = ()) -> Iterator[Piece]:
        """Codes, and "largest/NAME": what the largest of them stands for."""
        yield from super().pieces_of_parameters(kept, beside)
        holders = self.holders(kept, beside)
        yield whole_piece(f"largest/{self.names[kept.shard]}", kept.shard.largest, holders)

    def pieces_of_states(self, kept: ScaledParameter, state: dict, beside: tuple = ()) -> Iterator[Piece]:
        """With `deal` an owner's, which no other data rank has."""
        for piece in super().pieces_of_states(kept, state, beside):
            dealt = self.group if kept.shard in self.owner else None
            yield replace(piece, holders=tuple(group for group in piece.holders if group is not dealt))

    def new_state(self, kept: ScaledParameter, saved, device=None) -> dict[str, Any]:
        if not self.has(kept.shard):
            return {}
        state = super().new_state(kept, saved, device)
        if state and (dtype := state["exp_avg"].dtype) != FP8:
            found = f"the state of {self.names[kept.shard]} has moments in {dtype}"
            raise ValueError(f"{found}, this precision in {FP8}; go on with the precision it was saved in")
        return state

    def state_of(self, kept: ScaledParameter) -> dict[str, Any]:
        state = super().state_of(kept)
        return state | {"mu": self.mu[kept.shard]} if state else {}

    def put_state(self, kept: ScaledParameter, state: dict[str, Any]) -> None:
        self.mu[kept.shard] = state.pop("mu", torch.ones((), device=kept.shard.device))
        super().put_state(kept, state)


def from_owner(state: dict | None, owner: int, group: ProcessGroup, param: nn.Parameter) -> dict | None:
    """The state that the owner has, by all; None if there is none yet."""
    step = torch.tensor(state["step"] if state else 0, device=param.device)
    if not (step := broadcast(step, owner, group).item()):
        return None
    whole = {"exp_avg": FP8, "exp_avg_sq": param.dtype}
    empty = {name: torch.empty_like(param, dtype=dtype) for name, dtype in whole.items()}
    empty |= {
        name: torch.empty((), device=param.device) for name in ("exp_avg_largest", "exp_avg_sq_largest", "mu")
    }
    return {name: broadcast((state or empty)[name], owner, group) for name in empty} | {"step": step}


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
