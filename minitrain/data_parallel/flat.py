"""Parameters in flat buffers that divide by the ranks of a group: what all stages of ZeRO stand on.

    W1[F, D]  b1[F]  W2[D, F]   ->   whole[P] = W1 | b1 | W2 | padding            P = the next multiple of n
                                     shard[P/n] = whole[rank P/n : (rank+1) P/n]

A shard is cut wherever n says, in the middle of a matrix if it must: an optimizer works on elements. A buffer
holds parameters with one `sync.BufferKey`, in the order given. A shard is an ordinary nn.Parameter with a
placement. `Shards` adds to Sync this rank's own state, for the same stage, cut and world size, without any
communication.
Sends nothing, but for `publish`: (n-1)/n of the parameters. Padding costs at most n-1 elements per buffer.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277,
section 3.2.3. FSDP2 cuts every parameter along its dim 0 instead, and copies into and out of the buffer.
"""

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import InOrder, flatten, pack, views
from minitrain.data_parallel.states import copied
from minitrain.data_parallel.sync import MakeOptimizer, Sync
from minitrain.ranks.collectives import all_gather
from minitrain.ranks.sharding import Placement, Shard, full_tensor, placement


class Flat:
    """The layout of parameters in one padded buffer, cut over groups, one inside the other."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        self.params, self.groups = params, groups
        *starts, numel = accumulate((param.numel() for param in params), initial=0)
        self.start_of = dict(zip(params, starts))
        self.padding = -numel % math.prod(group.size() for group in groups)
        self.numel = numel + self.padding
        self.shard: nn.Parameter | None = None

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """A new flat buffer [P] with copies of tensors shaped like the parameters."""
        return flatten([*tensors, tensors[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a flat buffer, in their shapes."""
        return views(flat, self.params)

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """One parameter's place in a flat buffer, in its shape."""
        return flat.narrow(0, self.start_of[param], param.numel()).view(param.shape)

    def own(self, flat: Tensor, cuts: slice = slice(None)) -> Tensor:
        """This rank's slice of a flat buffer: [P/n] if all groups cut it, or those in `cuts` only."""
        for group in self.groups[cuts]:
            size = flat.numel() // group.size()
            flat = flat.narrow(0, group.rank() * size, size)
        return flat

    def cut(self, own: Tensor, cuts: slice = slice(None)) -> None:
        """Make this rank's slice the shard."""
        at, shards = placement(self.params[0]), tuple(Shard(0, group) for group in self.groups[cuts])
        self.shard = nn.Parameter(own.detach(), requires_grad=self.params[0].requires_grad)
        self.shard.grad_dtype = self.params[0].grad_dtype
        self.shard.placement = Placement(shards, at.summed_over, at.copies, at.cut_over)

    def unfold(self, kept: Tensor) -> list[Tensor]:
        """What all ranks keep, gathered, in the shapes of the parameters."""
        return self.views(full_tensor(kept, self.shard.placement.shards))

    def pieces(self) -> list[tuple[nn.Parameter, int, int]]:
        """Elements first .. last of which parameters the shard has, in its order; then comes padding."""
        begin, size, found = 0, self.numel, []
        for cut in self.shard.placement.shards:
            size //= cut.group.size()
            begin += cut.group.rank() * size
        for param, start in self.start_of.items():
            first, last = (min(max(end - start, 0), param.numel()) for end in (begin, begin + size))
            if first < last:
                found.append((param, first, last))
        return found


class Shards(Sync):
    """Parameters that are kept, or updated, in shards."""

    stage: int | str

    def __init__(self, model: nn.Module, groups: tuple, make_optimizer: MakeOptimizer):
        super().__init__(model, groups, make_optimizer)
        if not self.trainable and not hasattr(model, "parts"):  # a stage of a pipeline may be frozen
            raise ValueError("no parameter asks for a gradient; set requires_grad=True somewhere")

    @property
    def flats(self) -> list[Flat]:
        return self.held

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's shards and optimizer state, for the same stage and world size."""
        self.settle()
        shards = [flat.shard.detach().clone() for flat in self.flats]
        return {**self._layout(), "shards": shards, "optimizer": copied(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave on the same rank."""
        self.settle()
        for what, mine in self._layout().items():
            if state.get(what) != mine:
                theirs = f"the state is of {what} {state.get(what)}"
                raise ValueError(f"{theirs}, this is {what} {mine}: save with full_state_dict()")
        sizes = [flat.shard.numel() for flat in self.flats]
        saved = [shard.numel() for shard in state["shards"]]
        if sizes != saved:
            found = f"the state has shards of {saved[:3]} elements, this model of {sizes[:3]}"
            raise ValueError(f"{found}: another model or other buffers; use full_state_dict()")
        with torch.no_grad():
            for flat, shard in zip(self.flats, state["shards"]):
                flat.shard.copy_(shard)
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.publish()

    def _layout(self) -> dict[str, Any]:
        """What must be equal for a rank's shards to fit."""
        groups = self.flats[0].groups
        ranks, rank = [group.size() for group in groups], [group.rank() for group in groups]
        if len(groups) == 1:
            (ranks,), (rank,) = ranks, rank
        return {"stage": self.stage, "ranks": ranks, "rank": rank}


class WholeParameters(Shards):
    """Stages 1 and 2: parameters live whole in flat buffers; a rank updates a slice of each, its shard."""

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer, bucket_bytes=25_000_000):
        super().__init__(model, (group,), make_optimizer)
        packed = pack(reversed(self.trainable), bucket_bytes, self.key_of.get)  # as backward fills them
        flats = [Flat(params, *self.key_of[params[0]].groups) for params in packed]
        self.weights: dict[Flat, Tensor] = {}  # the whole parameters
        for flat in flats:
            self.weights[flat] = flat.pack(flat.params)
            for param, view in zip(flat.params, flat.views(self.weights[flat])):
                param.data = view
                param.register_post_accumulate_grad_hook(self._on_grad)
            flat.cut(flat.own(self.weights[flat]))
        self.hold(flats)
        self.in_order = InOrder(flats, self._send)

    def publish(self) -> None:
        """Gather the updated parameters."""
        handles = []
        for flat, whole in self.weights.items():
            handles.append(all_gather(flat.shard.detach(), flat.groups[0], out=whole, async_op=True))
        for handle in handles:
            handle.wait()
