"""Silent corruption: a number is wrong and nothing fails. Three checks, and what each cannot see.

                        a flip of          weight    gradient,       gradient,    moment    activation
                                                     before its sum  its sum
    replayed            the step again     in step   seen            seen         in step   seen
    odd_replicas        8 bytes a tensor   seen      -               seen         seen      -
    ProductCheck        y = x Wᵀ           seen      -               -            -         seen (of y)

A replay begins with what is there: what was wrong before stays so, and so does a core that errs each time
alike. Replicas agree on a wrong sum. Of products low bits are rounding; their inputs, backward and what is no
nn.Linear are not checked. Dixit et al. 2021, Silent Data Corruptions at Scale, arXiv:2102.11245; Huang and
Abraham 1984, Algorithm-Based Fault Tolerance for Matrix Operations, IEEE Trans. Computers C-33. Differs: sums
beside the matrix, not rows of it; errors are found, and not mended.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.checkpoint.format import bytes_of
from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece
from minitrain.systems.checkpoint.in_memory import gather_plain
from minitrain.systems.faults.live import Live, lasting


def digest(x: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(x.cpu())) - 2**63


def odd_replicas(pieces: Iterable[Piece]) -> list[tuple[int, str]]:
    """Of `run.pieces()`, (global rank, name) of what differs from most replicas; of two that differ, both.
    Sends 8 bytes per piece and group that holds it; a rank hears of the groups that it is in."""
    by_group: dict[ProcessGroup, dict[str, int]] = defaultdict(dict)
    for piece in pieces:
        for group in piece.holders:
            by_group[group][f"{piece.name} {piece.start}"] = digest(piece.values)
    found = set()
    for group, own in by_group.items():
        everyone = collectives.all_gather(torch.tensor([[*own.values()]]), group)
        for name, said in zip(own, everyone.T.tolist()):
            odd = (r for r, one in enumerate(said) if 2 * said.count(one) <= len(said))
            found |= {(collectives.members(group)[r], name.rpartition(" (")[0]) for r in odd}
    return sorted(found)


def replayed(run, batch, clip: float | None = None) -> tuple:
    """`run.step(batch, clip)` twice from the same state: its result, and (global rank, name) where a gradient
    before its sum came out otherwise, or if none did, what the step left: the first in the order of backward.
    Takes two steps and a copy of the state, and sends of each piece some 100 bytes of text to all more."""
    saved = [replace(piece, values=piece.values.clone()) for piece in run.pieces()]
    before, seen = Live([(saved, run.plain_state())], collectives.world()), []
    for attempt in range(2):
        if attempt:
            run.load_pieces(before)  # from itself
            collectives.announce("update", batch)  # the weights are others again
        grads: Counter[str] = Counter()  # sums over microbatches, in the order of backward
        with ExitStack() as hooks:
            for param, name in run.sync.names.items():
                if param.requires_grad:
                    add = lambda grad, name=name: grads.update({f"gradient of {name}": digest(grad)})
                    hooks.callback(param.register_hook(add).remove)
            result = run.step(batch, clip)
        seen.append(grads | {f"{p.name} {p.start}": digest(p.values) for p in lasting(run.pieces())})
    other = next((name for name, value in seen[0].items() if seen[1][name] != value), "")
    told = enumerate(gather_plain(other.partition(" (")[0], collectives.world()))
    found = [(rank, name) for rank, name in told if name]
    return result, [one for one in found if one[1].startswith("gradient")] or found


class ProductCheck(ExitStack):
    """`with ProductCheck(run.model) as check`: outputs of an nn.Linear add up to x times the columns' sums of
    W, taken when W was written (at "update", or by `written()`). `wrong()`: the layers where they have not,
    by 8 times the rounding, since it was asked last. Sends nothing; reads x, y and W once or twice.
    ValueError: a weight that is not whole here, as in ZeRO-3."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}

    def __enter__(self) -> "ProductCheck":
        self.sums: dict[str, tuple] = {}
        self.worst: dict[str, Tensor] = {}
        self.enter_context(collectives.observe(lambda kind, _: kind == "update" and self.written()))
        for name, layer in self.layers.items():
            self.callback(layer.register_forward_hook(partial(self._check, name)).remove)
        self.written()
        return self

    @torch.no_grad()
    def written(self) -> None:
        for name, layer in self.layers.items():
            weight = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32))
            total = weight.sum(0)
            self.sums[name] = total, weight.norm() + total.norm()

    @torch.no_grad()
    def _check(self, name: str, layer: nn.Linear, args: tuple, y: Tensor) -> None:
        (total, size), x = self.sums[name], args[0].detach()
        wanted = x.to(total.dtype) @ total + (0 if layer.bias is None else layer.bias.sum())
        rounding = torch.finfo(y.dtype).eps * size * torch.linalg.vector_norm(x, dim=-1, dtype=total.dtype)
        away = (y.sum(-1, dtype=total.dtype) - wanted).abs() / rounding.clamp(min=1e-30)
        worst = away.nan_to_num(torch.inf).max()
        self.worst[name] = torch.maximum(self.worst.get(name, worst), worst)

    def wrong(self) -> list[str]:
        worst, self.worst = self.worst, {}
        return [name for name, away in worst.items() if away.item() > 8]
