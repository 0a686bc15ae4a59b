"""The state of a run: in pieces for a checkpoint of any layout, or whole, by name, on every rank.

    parameters/layers.1.attention.q.weight      and biases of routers
    optimizer/layers.1.attention.q.weight/exp_avg
    amax/layers.1.attention.q                   history of the scale of products in few bits
    random/rank-3/cpu, random/rank-3/cuda       torch's generators
    plain_state()                               counts of steps, the scale of the loss

`pieces` sends nothing. `load_pieces` looks at names, shapes and dtypes before it writes anything, and all
ranks agree on that, and again at the end: 8 bytes each. Random states come back if as many ranks go on; the
masks of a GPT's dropout follow from the step and do not need them. `state_dict` gathers everything on every
rank, 16 bytes per parameter with Adam. Step, position in the data and rate are the caller's.
Lian et al. 2025, Universal Checkpointing, arXiv:2406.18820, section 3. Differs: loads without a conversion.
"""

from __future__ import annotations

import io
from collections import ChainMap, Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.checkpoint.load import agree
from minitrain.compose.passes import histories, load_histories, scales_of
from minitrain.data_parallel import states
from minitrain.memory.pools import is_fake
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT
from minitrain.model.mixture import mixtures
from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece, share_out, whole_piece
from minitrain.ranks.random_state import random_state, set_random_state
from minitrain.ranks.sharding import placement, whole_shape

Shapes = dict[str, tuple[int, ...]]


class RunStates:
    """Part of a Run, which is made by `parallelize`."""

    # ---- in pieces

    def pieces(self) -> list[Piece]:
        """Views of all tensors of this rank that a run needs to go on; of random states copies. Ranks that
        hold the same say so."""
        self.settle()
        pieces = [*states.pieces(self.sync, *self._same_params()), *self._more_pieces()]
        return pieces + ([] if is_fake(pieces[0].values) else self._random_pieces())

    def plain_state(self) -> dict[str, Any]:
        """What is no tensor: counts of steps, the scale of the loss."""
        self.settle()
        plain = {"numbers": states.numbers_of_states(self.sync)}
        return plain | ({"loss_scale": self.scale.state_dict()} if self.scale else {})

    def load_pieces(self, saved) -> list[str]:
        """Take a checkpoint's `Saved` (checkpoint/load.py); returns what could not be restored, a line each.
        ValueError, on all ranks: it is of another model, and nothing has changed; or it is Damaged, and this
        run is of no use until it has loaded another."""
        self.settle()
        world = collectives.world()
        agree(lambda: self._check(saved), world, self.device)
        return agree(lambda: self._load(saved), world, self.device)

    def _check(self, saved) -> None:
        own = {name: tuple(whole_shape(param)) for param, name in self.sync.names.items()}
        check_names(saved.shapes("parameters"), shapes_of(self.config) if self.config else own)
        for piece in (*states.pieces_to_load(self.sync, saved, *self._same_params()), *self._more_pieces()):
            if not begins_anew(piece, saved):
                saved.check(piece)

    def _load(self, saved) -> list[str]:
        if self.scale and "loss_scale" in saved.plain:
            self.scale.load_state_dict(saved.plain["loss_scale"])
        states.load_pieces(self.sync, saved, *self._same_params())
        left = 0
        for piece in self._more_pieces():
            if begins_anew(piece, saved):
                piece.values.zero_()
                left += 1
            else:
                saved.fill(piece)
        lost = [f"histories of {left} scales, which begin anew"] if left else []
        own, ranks = self._random_pieces(), collectives.world().size()
        before = len({name.split("/")[0] for name in saved.shapes("random")})
        kinds = all(piece.name in saved for piece in own)
        for piece in own if before == ranks and kinds else ():
            saved.fill(piece)
        saved.finish()
        if before != ranks:
            lost.append(f"random states of {before} ranks: this run has {ranks}, which draw on as they are")
        elif not kinds:
            lost.append(f"random states: none of a generator on {self.device.type} was saved")
        else:
            set_random_state(tuple(piece.values for piece in own), self.device)
        return lost

    def _same_params(self) -> list[ProcessGroup]:
        return [self.mesh.group("tp")] if self.strategy.tp > 1 else []

    def _more_pieces(self) -> list[Piece]:
        found = []
        for layer in self.model.layers if self.config else ():
            own = {f"parameters/{name}": x for name, x in saved_buffers([layer]).items()}
            own |= {f"amax/{name}": one.history for name, one in scales_of([layer]).items()}
            copies = placement(next(layer.parameters())).copies if own else None
            holders = (self.token_group, *self._same_params(), *([copies] if copies is not None else []))
            holders = tuple(group for group in holders if group.size() > 1)
            found += [whole_piece(name, x, holders) for name, x in own.items()]
        return sorted(found, key=lambda piece: piece.name)  # alike on ranks that have other layers as well

    def _random_pieces(self) -> list[Piece]:
        """Of this rank's generators; what they are filled with they have to be told."""
        name, states = f"random/rank-{collectives.world().rank()}", random_state(self.device)
        return [whole_piece(f"{name}/{kind}", state) for kind, state in zip(("cpu", "cuda"), states)]

    # ---- whole

    def state_dict(self) -> dict[str, Any]:
        """{"parameters": {name: whole}, "optimizer": {name: {..}}}, the same on every rank; "loss_scale",
        and "amax", the histories of delayed scaling."""
        self.settle()
        full, group = states.full_state_dict(self.sync), self.stage_group
        if self.config:
            kept = saved_buffers(self.model.layers)
            full["parameters"] |= {name: buffer.clone() for name, buffer in kept.items()}
            full["amax"] = histories(self.model.layers)
        if group is not None:
            stages = [_broadcast(full, rank, group, self.device) for rank in range(group.size())]
            full = {what: dict(ChainMap(*(stage[what] for stage in stages))) for what in full}
        return full | ({"loss_scale": self.scale.state_dict()} if self.scale else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave under any strategy."""
        self.settle()
        if self.scale and "loss_scale" in state:
            self.scale.load_state_dict(state["loss_scale"])
        if self.config:
            given = {name: tuple(x.shape) for name, x in state["parameters"].items()}
            check_names(given, shapes_of(self.config))
            for name, buffer in saved_buffers(self.model.layers).items():
                buffer.copy_(state["parameters"][name])
            load_histories(self.model.layers, state.get("amax", {}))
            ours, kinds = set(self.sync.names.values()), ("parameters", "optimizer")
            state = {what: {n: value for n, value in state[what].items() if n in ours} for what in kinds}
        states.load_full_state_dict(self.sync, state)


def make_states(run: RunStates) -> None:
    """In a dry run: the optimizer's states as its first step makes them, without that step's work."""
    for one in run.sync.shards:
        if states.is_updated(run.sync, one) and not states.state_of(run.sync, one):
            one.shard.grad = torch.zeros_like(one.shard, dtype=one.shard.grad_dtype)
    run.sync.optimizer.step()
    run.sync.zero_grad()


def bytes_to_save(run: RunStates) -> Counter[str]:
    """Bytes that this rank writes, by kind: {"parameters": .., "optimizer": ..}; in a dry run those after a
    step, even if none was made."""
    if is_fake(next(run.model.parameters())) and run.sync.optimizer:
        make_states(run)
    found: Counter[str] = Counter()
    for piece in share_out(run.pieces()):
        found[piece.name.partition("/")[0]] += piece.values.nbytes
    return found


def begins_anew(piece: Piece, saved) -> bool:
    """A history that was not saved, for those products were computed otherwise."""
    return piece.name.startswith("amax/") and piece.name not in saved


def shapes_of(config: GPTConfig) -> Shapes:
    model = GPT(config, device="meta")
    named = (*model.named_parameters(), *saved_buffers(model.layers).items())
    return {name: tuple(x.shape) for name, x in named}


def check_names(saved: Shapes, wanted: Shapes) -> None:
    """ValueError if what was saved is not of a model that wants these."""
    for name in sorted(wanted.keys() | saved.keys()):
        if wanted.get(name) != saved.get(name):
            here = list(saved[name]) if name in saved else "not at all"
            there = list(wanted[name]) if name in wanted else "has none"
            raise ValueError(f"the state has {name} {here}, this model {there}: it is of another model")


def saved_buffers(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    """What is part of a model's state and no parameter, by its name in the whole: biases of routers."""
    routed = {layer.name: layer.mlp.router for layer in layers if mixtures([layer])}
    return {f"{name}.mlp.router.{n}": x for name, router in routed.items() for n, x in router.named_buffers()}


def _broadcast(value: dict, source: int, group: ProcessGroup, device: torch.device) -> dict:
    """Nested dicts of tensors and numbers, from one rank to all."""
    data = io.BytesIO()
    if group.rank() == source:
        torch.save(value, data)
    size = collectives.broadcast(torch.tensor([len(data.getvalue())], device=device), source, group).item()
    sent = torch.frombuffer(bytearray(data.getvalue() or size), dtype=torch.uint8).to(device)
    data = io.BytesIO(collectives.broadcast(sent, source, group).cpu().numpy().tobytes())
    return torch.load(data, map_location=device, weights_only=True)
