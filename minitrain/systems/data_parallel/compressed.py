"""Compressed sums: gradients travel in few bytes, and what a message leaves out is added to the next one.

    total, own = compressor(x, group, step)    x float32 of any shape; own: what the others have learnt of x
    Feedback     x = gradient + residual       total = sum over ranks of own       residual = x - own

                 of N numbers on n ranks travel                                 a rank sends, in bytes
    topk:s       the k = s N largest, with their places                         8 k (n-1)
    randomk:s    k places drawn alike on all ranks: sums, without places        4 k · 2 (n-1)/n
    cocktail:s   of m = sqrt(2 s) N drawn places the k largest, in 4 bits       (k/2 + 2 k + 4) (n-1)
    int8         blocks of 256 to who adds them up, the sums back as such       (N + 4 N/256) · 2 (n-1)/n
    thc:b        codes of b bits on one grid: the sum of codes is the code      (b/8 N + N) (n-1)/n + 4 (n-1)
                 of the sum, in 1 byte while n (2^b - 1) < 256
    powersgd:r   P and Q of r columns, P Qᵀ near a matrix [R, C]                4 r (R + C) · 2 (n-1)/n

Codes with a scale on each rank are gathered, and added by everyone; what is linear is summed on the way. k is
1 or more; a place takes 4 bytes where m > 65,536. Seide et al. 2014, 1-bit SGD (feedback); Wang et al. 2023,
CocktailSGD, ICML; Li et al. 2024, THC, NSDI, arXiv:2302.08545; Vogels et al. 2019, PowerSGD,
arXiv:1905.13727, section 3. Differs: CocktailSGD's shares are sqrt(2 s) and sqrt(s/2), no step late; THC's
grid is even, its step a power of two: decoding rounds nothing; PowerSGD draws Q anew in each step.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from minitrain.attention.placed import hashed, shifted
from minitrain.data_parallel.buckets import Flat, views
from minitrain.data_parallel.hybrid import Chain
from minitrain.data_parallel.states import holders_of
from minitrain.data_parallel.sync import Sync
from minitrain.plan.strategy import parse_compress
from minitrain.precision.blocks import Blocks, dequantize, from_bytes, pack, quantize, to_bytes, unpack
from minitrain.precision.formats import INT4, INT8
from minitrain.precision.mixed import LossScale
from minitrain.ranks.checks import require_fractions, require_one_of
from minitrain.ranks.collectives import all_gather, all_reduce, all_to_all, announce
from minitrain.ranks.pieces import Piece, pieces_of, whole_piece
from minitrain.systems.attention.flash_3 import hadamard

Compressor = Callable[[Tensor, ProcessGroup, int], tuple[Tensor, Tensor]]
SUMS = (torch.uint8, torch.int16, torch.int32)


def compressor_of(text: str) -> Compressor:
    """`text` as Strategy.compress has it."""
    name, number = parse_compress(text)
    return COMPRESSORS[name] if number is None else partial(COMPRESSORS[name], number)


def dense(x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    """Nothing is left out."""
    return all_reduce(x, group), x


def top_k(share: float, x: Tensor, group, step: int, among=1.0, blocks=None) -> tuple[Tensor, Tensor]:
    """Of a share of drawn places; values as they are, or as codes. Messages add up in the order of ranks."""
    few, k = drawn(x, max(share, among), step), count(share, x)
    values = x.flatten()[few]
    at = values.abs().topk(k).indices
    wide = torch.int32 if blocks is None or len(few) > 1 << 16 else torch.uint16
    sent = coded(values[at], blocks), at.to(wide).view(torch.uint8)
    every = (all_gather(part, group).view(group.size(), -1) for part in sent)
    whole = lambda codes, at: placed(decoded(codes, k, blocks), few[at.view(wide).long()], x)
    return sum(map(whole, *every)), whole(*sent)


def cocktail(share: float, x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    return top_k(share, x, group, step, min(1.0, math.sqrt(2 * share)), Blocks(INT4, (0,)))


def random_k(share: float, x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    places = drawn(x, share, step)
    values = x.flatten()[places]
    return placed(all_reduce(values, group), places, x), placed(values, places, x)


def int8(x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    """Who adds up a slice of the sum rounds it once more, and has what is left of it in its own residual."""
    blocks = Blocks(INT8, (256,))
    slices = pad(x.flatten(), (0, -x.numel() % group.size())).view(group.size(), -1)
    wide = lambda message: decoded(message, slices.shape[1], blocks)
    message = coded(slices, blocks)
    exact, own = wide(all_to_all(message, group)).sum(0, keepdim=True), wide(message)
    message = coded(exact, blocks)
    own[group.rank()] += (wide(message) - exact)[0]
    total = wide(all_gather(message, group))
    return tuple(y.flatten()[: x.numel()].view_as(x) for y in (total, own))


def thc(bits: int, x: Tensor, group: ProcessGroup, step: int, rotate=True) -> tuple[Tensor, Tensor]:
    """Ranks agree on the largest number; each number goes to one of its two neighbours on the grid by chance,
    right on average. Turned by random signs and a Hadamard matrix, large numbers are rare."""
    ranks, top, width = group.size(), (1 << bits) - 1, min(1024, 1 << (x.numel() - 1).bit_length())
    y = pad(x.flatten(), (0, -x.numel() % width))
    places, seed = torch.arange(len(y), device=x.device), step * (ranks + 1)
    signs = 1 - 2 * (hashed(seed, places) & 1)
    turned = lambda y: hadamard(y.view(-1, width)).flatten() if rotate else y
    y = turned(y * signs)
    unit = (all_gather(y.abs().max().view(1), group).max() * 2 / top).clamp(min=1e-30)
    unit = unit / torch.frexp(unit).mantissa  # the next power of two
    chance = shifted(hashed(seed + 1 + group.rank(), places), 11).double() * 2.0**-53
    codes = (y / unit + top / 2 + chance).floor().clamp(0, top).to(torch.uint8)
    slices = pad(codes, (0, -len(y) % ranks)).view(ranks, -1)
    arrived = unpack(all_to_all(pack(slices, bits), group), bits, slices.shape[1])
    sums = arrived.sum(0, dtype=next(kind for kind in SUMS if ranks * top <= torch.iinfo(kind).max))
    numbers = lambda codes, n: turned((codes[: len(y)].float() - n * top / 2) * unit) * signs
    both = numbers(all_gather(sums, group), ranks), numbers(codes, 1)
    return tuple(y[: x.numel()].view_as(x) for y in both)


def power_sgd(rank: int, x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    """Vectors travel as they are."""
    if x.dim() < 2:
        return dense(x, group, step)
    matrix = x.flatten(1)
    q = torch.arange(matrix.shape[1] * min(rank, *matrix.shape), device=x.device)
    q = hashed(step, q).view(matrix.shape[1], -1).float() * 2.0**-63
    p = torch.linalg.qr(all_reduce(matrix @ q, group)).Q
    own = matrix.T @ p
    return tuple((p @ q.T).view_as(x) for q in (all_reduce(own, group), own))


def dropping(share: float, by: str, x: Tensor, group: ProcessGroup, step: int) -> tuple[Tensor, Tensor]:
    """A share of the numbers is lost on the way, the smallest, by "size", or any, by "chance", and nothing is
    added later (Wang et al. 2024, MLT, NSDI)."""
    require_fractions(share=share)
    require_one_of(("size", "chance"), by=by)
    largest = x.flatten().abs().topk(count(1 - share, x)).indices
    places = largest if by == "size" else drawn(x, 1 - share, step * group.size() + group.rank())
    return all_reduce(placed(x.flatten()[places], places, x), group), x


@torch.no_grad()
def gradient_by_factors(dy: Tensor, x: Tensor, group: ProcessGroup) -> Tensor:
    """dy `[K, M]`, x `[K, N]`, this rank's rows of a linear layer -> dW `[M, N]`, summed over the group. Rows
    travel in its place, (n-1) K (M + N) numbers of each rank, which holds and multiplies n K of them (Xie et
    al. 2016, UAI; Poseidon's choice is systems/plan/communication_order.py:sends_factors). Differs: on a
    ring, not peer to peer."""
    pairs = all_gather(torch.cat([dy, x], 1), group)
    return pairs[:, : dy.size(1)].T @ pairs[:, dy.size(1) :]


COMPRESSORS = dict(none=dense, topk=top_k, randomk=random_k, cocktail=cocktail)
COMPRESSORS |= dict(int8=int8, thc=thc, powersgd=power_sgd)


def count(share: float, x: Tensor) -> int:
    return max(1, int(share * x.numel()))


def drawn(x: Tensor, share: float, step: int) -> Tensor:
    """So many different places of x, alike on all ranks that ask for the same step; all of them in order."""
    places, k = torch.arange(x.numel(), device=x.device), count(share, x)
    return places if k == x.numel() else hashed(step, places).topk(k).indices


def placed(values: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """As x, with these values at these places, and 0 elsewhere."""
    return torch.zeros_like(x).flatten().index_copy_(0, places, values).view_as(x)


def coded(x: Tensor, blocks: Blocks | None) -> Tensor:
    return x if blocks is None else to_bytes(quantize(x, blocks, fill=True))


def decoded(message: Tensor, length: int, blocks: Blocks | None) -> Tensor:
    return message if blocks is None else dequantize(from_bytes(message, length, blocks))


class Feedback:
    """Sums of one tensor's gradients, step after step; without `on` what is left out is lost."""

    def __init__(self, compressor: Compressor, on: bool = True):
        self.compressor, self.on, self.steps = compressor, on, 0
        self.residual: Tensor | None = None  # of all steps that count
        self.left: Tensor | None = None  # with the one under way, which `settle` ends

    def __call__(self, gradient: Tensor, group: ProcessGroup) -> Tensor:
        x = gradient.float() if self.residual is None else gradient.float() + self.residual
        alone = group.size() == 1  # nobody to send to
        total, own = (x, x) if alone else self.compressor(x, group, self.steps)
        self.left = announce("buffer", x - own)
        return total

    def settle(self, updated: bool = True) -> None:
        """The step has made its update; or it is left out, and leaves nothing."""
        if updated:
            self.residual, self.steps = self.left if self.on else None, self.steps + 1
        self.left = None


class Compression:
    """In the place of a Sync's sums, a parameter at a time: ranks that hold the same one choose alike, and
    stages of ZeRO and buckets change nothing. Backward stands still until each message is there: nothing of
    it is hidden. Memory: residuals, without a loss's scale, 4 bytes per parameter on every rank in every
    stage, 4 more from the sum to the end of the step."""

    def __init__(self, sync: Sync, text: str, scale: LossScale | None):
        compressor = compressor_of(text)
        self.sync, self.scale = sync, scale
        self.feedback = {param: Feedback(compressor) for param in sync.trainable if param.numel()}
        for param, feedback in self.feedback.items():
            feedback.residual = announce("buffer", torch.zeros(param.shape, device=param.device))
        for one in getattr(sync, "reducers", ()):
            one.all_reduce = lambda bucket, by=one.group: Chain(self.sum(bucket.params, bucket.grads, by))
        sync.scatter = self.scatter

    def scatter(self, flat: Flat, grads: Tensor, out: Tensor | None = None) -> Chain:
        piece = flat.local_shard(self.sum(flat.params, grads, flat.groups[0]))
        return Chain(piece.clone() if out is None else piece)

    def sum(self, params: list[nn.Parameter], grads: Tensor, group) -> Tensor:
        """In place. A gradient that has overflowed is NaN, all of it, and so is every rank's sum."""
        factor = self.scale.factor if self.scale else 1.0
        for param, grad in zip(params, views(grads, params)):
            if param in self.feedback:
                exact = grad.to(torch.promote_types(grad.dtype, torch.float32)) / factor
                if self.scale:
                    exact = torch.where(exact.isfinite().all(), exact, math.nan)
                grad.copy_(self.feedback[param](exact, group).to(exact.dtype) * factor)
        return grads

    def settle(self, updated: bool) -> None:
        for feedback in self.feedback.values():
            feedback.settle(updated)

    # ---- as states of a run: residual/2/W is that of the third of the ranks whose gradients of W add up

    steps = property(lambda self: max((one.steps for one in self.feedback.values()), default=0))

    def pieces(self, same, saved=None) -> list[Piece]:
        """This rank's; or those it asks `saved` for."""
        return [piece for *_, pieces in self._parts(same, saved) for piece in pieces]

    def load(self, saved, same) -> list[str]:
        """And say what is lost."""
        self.begin(saved.plain.get("compressed_steps", 0))
        for feedback, part, pieces in self._parts(same, saved):
            for piece in pieces:
                saved.fill(piece)
            feedback.residual += part
        return [] if saved.shapes("residual") else ["residuals of compressed gradients, which begin anew"]

    def begin(self, steps: int = 0) -> None:
        for feedback in self.feedback.values():
            feedback.residual.zero_()
            feedback.steps = steps

    def _parts(self, same, saved) -> Iterator[tuple[Feedback, Tensor, list[Piece]]]:
        """Only the sum over ranks matters: rank r of m takes what ranks r, r + m, .. had, and adds it up."""
        flat_of = {param: one for one in self.sync.shards for param in one.params}
        for param in sorted(self.feedback, key=self.sync.names.get):
            name, key, feedback = self.sync.names[param], self.sync.key_of[param], self.feedback[param]
            adding = tuple(group for group in (key.copies, *key.groups) if group is not None)
            alike = tuple(x for x in holders_of(self.sync, flat_of[param], same) if x not in adding)
            mine = whole_piece(name, feedback.residual, adding)  # its replicas: ranks that add up
            number, ranks, had = mine.replica, mine.replicas, mine.replica + 1
            if saved:
                had = sum(key.partition("/")[2] == name for key in saved.shapes("residual"))
            for seat in range(number, had, ranks):
                values = torch.empty_like(mine.values) if saved else mine.values
                pieces = pieces_of(f"residual/{seat}/{name}", values, param, 0, param.numel(), alike)
                yield feedback, values, [*pieces]
