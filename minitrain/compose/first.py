"""Five on one page: a GPT in data, tensor, pipeline and context parallelism with ZeRO. Read it after nanoGPT.

    torchrun --nproc-per-node 8 first.py --pp 2 --cp 2 --tp 2 --zero 1 --file README.md     dp is what is left

    rank = ((dp_rank · pp + pp_rank) · cp + cp_rank) · tp + tp_rank       neighbours share a layer's matrices
    tp   matrices cut by heads and by hidden units, the vocabulary's by words; two sums a layer each way
    cp   tokens of a row cut in zig-zag; keys and values go round a ring
    pp   the layers cut into stages; microbatches flow through them, one forward, one backward (1F1B)
    dp   rows of the batch; with cp it is who sums gradients, and over both ZeRO cuts what a rank keeps

The parts are the pages of the techniques, pasted (first.py in their folders explain them), but that `Shared`
adds up microbatches. What is new is who
needs which group, and one divisor: a loss is summed over tokens and divided by all tokens of the batch, so
gradients are sums wherever they are added. Parameters are drawn by name: a layout changes none of them.
"""

import argparse
import math
import os
import zlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

# ---- groups: one for each axis -----------------------------------------------------------------------------


def make_groups(**axes: int) -> dict[str, dist.ProcessGroup]:
    """This rank's group for each axis, the last innermost. "data": dp and cp; "down": pp, the other way."""
    numbers, groups, names = torch.arange(math.prod(axes.values())).view(*axes.values()), {}, list(axes)
    wanted = {name: [name] for name in names} | {"data": ["dp", "cp"], "down": ["pp"]}
    for name, over in wanted.items():  # all ranks make all groups, in one order
        dims = [names.index(axis) for axis in over]
        moved = numbers.movedim(dims, list(range(-len(dims), 0)))
        for row in moved.reshape(-1, math.prod(axes[axis] for axis in over)).tolist():
            group = dist.new_group(row)
            if dist.get_rank() in row:
                groups[name] = group
    return groups


# ---- tensor parallelism ------------------------------------------------------------------------------------


def all_reduce(x: Tensor, group: dist.ProcessGroup, op=dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), op, group)
    return x


class Copy(torch.autograd.Function):
    """Megatron's f: x enters matrices cut by columns."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy, ctx.group), None


class Reduce(torch.autograd.Function):
    """Megatron's g: the products of matrices cut by rows are added."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class VocabularyLoss(torch.autograd.Function):
    """logits [N, V/t] of this rank's words, targets [N] -> the sum of -log p(target)."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        shifted = logits - all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX).unsqueeze(-1)
        place = targets - group.rank() * logits.size(-1)
        ctx.onehot = torch.zeros_like(logits)
        mine = ((place >= 0) & (place < logits.size(-1))).nonzero().squeeze(-1)
        ctx.onehot[mine, place[mine]] = 1
        total, hit = all_reduce(torch.stack([shifted.exp().sum(-1), (shifted * ctx.onehot).sum(-1)]), group)
        ctx.softmax = shifted.exp() / total.unsqueeze(-1)
        return (total.log() - hit).sum()

    @staticmethod
    def backward(ctx, dloss):
        return (ctx.softmax - ctx.onehot) * dloss, None, None


# ---- context parallelism -----------------------------------------------------------------------------------


zigzag = lambda rank, n: [rank, 2 * n - 1 - rank]  # which of 2n chunks a rank has: one early, one late


def rotate(tensors, group):
    room, n = [torch.empty_like(x) for x in tensors], group.size()
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(group.rank() + 1) % n) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(group.rank() - 1) % n) for x in room]
    works = dist.batch_isend_irecv(sends + receives) if n > 1 else []
    return (room if n > 1 else tensors), lambda: [work.wait() for work in works]


def around(block, tokens, group):
    """Every rank's keys and values, the own first, with what queries see of them: rows, columns, diagonal?"""
    (rank, n), mine = (group.rank(), group.size()), zigzag(group.rank(), group.size())
    chunks = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
    for step in range(n):
        arriving, wait = rotate(block, group) if step < n - 1 else (None, list)
        pairs = [(a, b) for a in zip(chunks, mine) for b in zip(chunks, zigzag((rank - step) % n, n))]
        yield block, [(rows, columns, i == j) for (rows, i), (columns, j) in pairs if j <= i]
        wait()
        block = arriving


def scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    s = q @ k.mT / math.sqrt(q.size(-1))
    return s + s.new_full(s.shape[-2:], -math.inf).triu(1) if diagonal else s


class Ring(torch.autograd.Function):
    """Causal attention of q, k, v [B, H, T/n, K], of this rank's two chunks."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf).unsqueeze(-1)
        for (keys, values), seen in around([k.contiguous(), v.contiguous()], q.size(-2), group):
            for rows, columns, diagonal in seen:
                s = scores(q[..., rows, :], keys[..., columns, :], diagonal)
                new = torch.logaddexp(lse[..., rows, :], s.logsumexp(-1, keepdim=True))
                out[..., rows, :] *= (lse[..., rows, :] - new).exp()
                out[..., rows, :] += (s - new).exp() @ values[..., columns, :]
                lse[..., rows, :] = new
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, sums, delta = torch.zeros_like(q), [q.new_zeros(q.shape)] * 2, (dout * out).sum(-1, keepdim=True)
        for (keys, values), seen in around([k.contiguous(), v.contiguous()], q.size(-2), ctx.group):
            dk, dv = sums[0].clone(), sums[1].clone()
            for rows, columns, diagonal in seen:
                mine, here, do = q[..., rows, :], keys[..., columns, :], dout[..., rows, :]
                p = (scores(mine, here, diagonal) - lse[..., rows, :]).exp()
                ds = p * (do @ values[..., columns, :].mT - delta[..., rows, :]) / math.sqrt(q.size(-1))
                dq[..., rows, :] += ds @ here
                dk[..., columns, :] += ds.mT @ mine
                dv[..., columns, :] += p.mT @ do
            sums, wait = rotate([dk, dv], ctx.group)
            wait()
        return dq, *sums, None


# ---- the model: a stage of layers, with this rank's part of every matrix -----------------------------------


class Layer(nn.Module):
    def draw(self, name: str, shape: tuple[int, ...], cut: int | None = None, group=None) -> nn.Parameter:
        """The whole tensor, drawn from its name, and of it this rank's part along `cut`."""
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        normal = torch.randn(shape, generator=chance, device="cpu")
        whole = 0.02 * normal if len(shape) > 1 else torch.ones_like(normal)
        part = whole if cut is None else whole.chunk(group.size(), cut)[group.rank()].clone()
        return nn.Parameter(part.to(torch.get_default_dtype()).to(torch.get_default_device()))


class Embedding(Layer):
    def __init__(self, name: str, vocabulary: int, width: int):
        super().__init__()
        self.tokens = self.draw(f"{name}.tokens", (vocabulary, width))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return F.embedding(ids, self.tokens)


class Block(Layer):
    def __init__(self, name: str, width: int, heads: int, tp: dist.ProcessGroup, cp: dist.ProcessGroup):
        super().__init__()
        self.head_dim, self.tp, self.cp = width // heads, tp, cp
        columns = lambda part, size: self.draw(f"{name}.{part}.weight", (size, width), 0, tp)
        rows = lambda part, size: self.draw(f"{name}.{part}.weight", (width, size), 1, tp)
        self.norm1, self.norm2 = (self.draw(f"{name}.{norm}.weight", (width,)) for norm in ("norm1", "norm2"))
        self.q, self.k, self.v = (columns(f"attention.{one}", width) for one in "qkv")
        self.out, self.down = rows("attention.out", width), rows("mlp.down", 4 * width)
        self.gate, self.up = columns("mlp.gate", 4 * width), columns("mlp.up", 4 * width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T/c, D], of this rank's rows and positions; whole on every rank of tp."""
        h = Copy.apply(F.rms_norm(x, x.shape[-1:], self.norm1, 1e-5), self.tp)
        by_head = lambda weight: F.linear(h, weight).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = map(by_head, (self.q, self.k, self.v))
        mixed = Ring.apply(turned(q, positions), turned(k, positions), v, self.cp)
        x = x + Reduce.apply(F.linear(mixed.transpose(1, 2).flatten(2), self.out), self.tp)
        h = Copy.apply(F.rms_norm(x, x.shape[-1:], self.norm2, 1e-5), self.tp)
        inner = F.silu(F.linear(h, self.gate)) * F.linear(h, self.up)
        return x + Reduce.apply(F.linear(inner, self.down), self.tp)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE: pairs of a head's numbers, turned by position times a frequency."""
    exponents = torch.arange(0, x.size(-1), 2, dtype=x.dtype) / x.size(-1)
    angles = positions.to(x.dtype).unsqueeze(-1) * 10_000.0**-exponents
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
    )


class Head(Layer):
    def __init__(self, name: str, vocabulary: int, width: int, tp: dist.ProcessGroup):
        super().__init__()
        self.tp, self.norm = tp, self.draw(f"{name}.norm.weight", (width,))
        self.out = self.draw(f"{name}.out.weight", (vocabulary, width), 0, tp)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """This rank's logits [B, T, V/t]."""
        return F.linear(Copy.apply(F.rms_norm(x, x.shape[-1:], self.norm, 1e-5), self.tp), self.out)


def make_stage(vocabulary: int, width: int, heads: int, depth: int, groups: dict) -> list[Layer]:
    """This rank's layers of an embedding, `depth` blocks and a head, as evenly as can be."""
    block = partial(Block, width=width, heads=heads, tp=groups["tp"], cp=groups["cp"])
    makers = [partial(Embedding, vocabulary=vocabulary, width=width), *[block] * depth]
    makers.append(partial(Head, vocabulary=vocabulary, width=width, tp=groups["tp"]))
    mine = torch.arange(depth + 2).tensor_split(groups["pp"].size())[groups["pp"].rank()]
    return [makers[i](f"layers.{i}") for i in mine.tolist()]


# ---- ZeRO --------------------------------------------------------------------------------------------------


class Shared:
    """A layer of which each rank of the group updates a piece. Stage 0: every rank updates all."""

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, stage: int):
        self.group, self.stage, self.params = group, stage, list(layer.parameters())
        flat = torch.cat([param.detach().flatten() for param in self.params])
        self.padding = -len(flat) % group.size()
        self.flat = F.pad(flat, (0, self.padding))
        self.pieces, self.bytes = list(self.flat.chunk(group.size())), self.flat.nbytes
        self.shard = nn.Parameter(self.flat if stage == 0 else self.pieces[group.rank()].clone())
        parts = self.flat.split([*(param.numel() for param in self.params), self.padding])
        for param, part in zip(self.params, parts):
            param.data = part.view_as(param)
            param.register_post_accumulate_grad_hook(self.on_gradient)
        if stage == 3:
            self.flat.untyped_storage().resize_(0)
            layer.register_forward_pre_hook(lambda *_: self.gather())
            layer.register_forward_hook(self.after_forward)

    def gather(self) -> None:
        self.flat.untyped_storage().resize_(self.bytes)
        dist.all_gather(self.pieces, self.shard.detach(), group=self.group)

    def after_forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.flat.untyped_storage().resize_(0)
        if output.requires_grad:
            output.register_hook(lambda _: self.gather())

    def on_gradient(self, _: nn.Parameter) -> None:
        if self.stage > 1 and all(param.grad is not None for param in self.params):
            self.reduce()  # of one microbatch
            if self.stage == 3:
                self.flat.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Adds the sum over ranks to the shard's gradient, and lets go of the others."""
        if self.params[0].grad is None:
            return
        flat = F.pad(torch.cat([param.grad.flatten() for param in self.params]), (0, self.padding))
        if self.stage == 0:
            dist.all_reduce(flat, group=self.group)
            self.shard.grad = flat
        else:
            mine = torch.empty_like(self.shard)
            dist.reduce_scatter(mine, list(flat.chunk(self.group.size())), group=self.group)
            self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for param in self.params:
            param.grad = None

    def updated(self) -> None:
        if self.stage in (1, 2):
            self.gather()


# ---- the pipeline ------------------------------------------------------------------------------------------


def one_f_one_b(rank: int, p: int, m: int) -> list[tuple[str, int]]:
    ahead = min(p - rank - 1, m)
    steady = [action for i in range(m - ahead) for action in (("F", ahead + i), ("B", i))]
    return [("F", i) for i in range(ahead)] + steady + [("B", i) for i in range(m - ahead, m)]


def run(stage, inputs: list[Tensor], loss_fn, shape, like: Tensor, up, down) -> Tensor:
    """Gradients in .grad, and on the last stage the sum of the losses. Each pair has a queue each way."""
    rank, last = up.rank(), up.size() - 1
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    sending, total = [], torch.zeros((), dtype=like.dtype, device=like.device)

    def receive(group: dist.ProcessGroup, source: int) -> Tensor:
        dist.recv(room := like.new_empty(shape), group=group, group_src=source)
        return room

    def send(x: Tensor, group: dist.ProcessGroup, to: int) -> None:
        sending.append((dist.isend(x := x.contiguous(), group=group, group_dst=to), x))

    for kind, i in one_f_one_b(rank, up.size(), len(inputs)):
        if kind == "F":
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


# ---- training ----------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, groups: dict, model: dict, length: int, microbatches: int, zero: int, lr: float):
        self.groups, self.length, self.microbatches, self.width = groups, length, microbatches, model["width"]
        self.layers = make_stage(**model, groups=groups)
        self.shared = [Shared(layer, groups["data"], zero) for layer in self.layers]
        self.optimizer = torch.optim.AdamW([one.shard for one in self.shared], lr=lr, betas=(0.9, 0.95))
        chunks = torch.arange(length).chunk(2 * groups["cp"].size())
        self.positions = torch.cat([chunks[i] for i in zigzag(groups["cp"].rank(), groups["cp"].size())])

    def stage(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.positions)
        return x

    def step(self, rows: Tensor) -> Tensor:
        """rows [B, T + 1] of the whole batch, the same on all ranks -> its mean loss."""
        groups, tp, m = self.groups, self.groups["tp"], self.microbatches
        mine = rows.chunk(groups["dp"].size())[groups["dp"].rank()]
        inputs, targets = (mine[:, shift:][:, self.positions].chunk(m) for shift in (0, 1))
        count = rows.size(0) * self.length  # the one divisor
        loss_fn = lambda i, y: VocabularyLoss.apply(y.flatten(0, 1), targets[i].flatten(), tp) / count
        shape = (len(mine) // m, len(self.positions), self.width)
        self.optimizer.zero_grad()
        loss = run(self.stage, inputs, loss_fn, shape, self.shared[0].shard, groups["pp"], groups["down"])
        for one in self.shared:
            one.reduce()
        self.optimizer.step()
        for one in self.shared:
            one.updated()
        return all_reduce(all_reduce(loss, groups["data"]), groups["pp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(tp=1, pp=1, cp=1, zero=1, microbatches=4, rows=16, length=64, steps=50).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--file", default=__file__, help="a text to learn, byte by byte")
    parser.add_argument("--lr", type=float, default=1e-2)
    asked, gpu = parser.parse_args(), torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dp, rest = divmod(dist.get_world_size(), asked.tp * asked.pp * asked.cp)
    assert not rest and not asked.rows % (dp * asked.microbatches) and not asked.length % (2 * asked.cp)
    groups = make_groups(dp=dp, pp=asked.pp, cp=asked.cp, tp=asked.tp)
    model = dict(vocabulary=256, width=64, heads=4, depth=4)
    trainer = Trainer(groups, model, asked.length, asked.microbatches, asked.zero, asked.lr)
    with open(asked.file, "rb") as file:
        text = torch.tensor(list(file.read()))
    chance = torch.Generator(text.device).manual_seed(0)
    for step in range(asked.steps):
        starts = torch.randint(len(text) - asked.length, (asked.rows, 1), generator=chance)
        loss = trainer.step(text[starts + torch.arange(asked.length + 1)])
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
