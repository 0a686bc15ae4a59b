"""Jetfire: INT8 in blocks of 32 x 32, each with a scale of its own: products, and blocks of a model.

    y[i, j] = Σ_k  s_x[i, k] s_w[j, k] · (x[i, k] · w[j, k]ᵀ)        i, j, k count blocks of 32

A product of two blocks adds up 32 products of 7-bit numbers to less than 2^19: an exact integer, in INT32 on
a tensor core, here in float32. It is multiplied by its two scales once and added up in float32 or wider, k in
order. A block is as wide as high, so the codes of x, W and dy are those of xᵀ, Wᵀ and dyᵀ: nothing is
quantised twice. An outlier costs the resolution of 1,024 numbers, not of its token or of all. x [.., T, K] is
cut into blocks of tokens of one sequence, W [N, K], dy [.., T, N]; short last blocks are filled up with
zeros. Saved for backward: codes of x, 1 + 4/1024 bytes per number (1/2 + 1/512 of FP16). Sends nothing: cuts
at multiples of 32 change no code; gathers are in the dtype of activations. With `through_int8` all that a
block's operators hand to each other is INT8, forward and backward. Xi et al. 2024 (Jetfire),
arXiv:2403.12422, sections 3 to 6. Differs: emulated, one block after the other; gradients round to nearest,
where theirs draw; the core reads and writes INT8 too, and the residual sum, which they keep in 16 bits.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from minitrain.precision.blocks import RECIPES, Quantized, dequantize, quantize
from minitrain.precision.products import Grads, Products, Scales, split_tensors
from minitrain.ranks.autograd import custom_vjp

TILE = 32


class BlockProducts(Products):
    def forward(self, x: Quantized, weight: Tensor, scales: Scales) -> Tensor:
        y = block_product(rows(x), rows(scales.quantized("weight", weight, self.weight, "NK")), weight.dtype)
        return without_filling(y, x.shape[:-1], len(weight))

    def backward(self, dy, x: Quantized, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        along_n = rows(dy if isinstance(dy, Quantized) else self.enter_grad(dy, scales))
        dx = dweight = None
        if wanted[0]:
            w = turned(rows(scales.quantized("weight", weight, self.weight, "NK")))
            dx = without_filling(block_product(along_n, w, weight.dtype), x.shape[:-1], weight.shape[1])
        if wanted[1]:
            dweight = block_product(turned(along_n), turned(rows(x)), weight.dtype)
            dweight = dweight[: weight.shape[0], : weight.shape[1]]
        return dx, dweight


def rows(q: Quantized) -> tuple[Tensor, Tensor]:
    """[.., R, C] as whole blocks below each other: codes [R', C'] float32, steps [R'/32, C'/32]."""
    missing = [(0, -length % TILE) for length in reversed(q.shape[-2:])]
    codes = torch.nn.functional.pad(q.codes.float(), sum(missing, ()))
    return codes.flatten(0, -2), q.multipliers.flatten(0, -2)


def turned(matrix: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, steps = matrix
    return codes.mT, steps.mT


def block_product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a [M, K], b [N, K], codes and steps -> a · bᵀ [M, N] in `dtype`."""
    (x, x_steps), (w, w_steps) = a, b
    total = x.new_zeros(len(x), len(w), dtype=torch.promote_types(dtype, torch.float32))
    blocks = zip(x.split(TILE, 1), w.split(TILE, 1), x_steps.unbind(1), w_steps.unbind(1))
    for x_codes, w_codes, x_step, w_step in blocks:
        whole = (x_codes @ w_codes.mT).to(total.dtype)
        total += whole.mul_(x_step.repeat_interleave(TILE)[:, None]).mul_(w_step.repeat_interleave(TILE))
    return total.to(dtype)


def without_filling(y: Tensor, leading: tuple[int, ...], width: int) -> Tensor:
    """[M', N'] -> [.., T, N]."""
    filled = leading[-1] + -leading[-1] % TILE
    return y.view(*leading[:-1], filled, y.shape[1])[..., : leading[-1], :width]


PRODUCTS = {"int8": BlockProducts(RECIPES["int8_32x32"], RECIPES["int8_32x32"], RECIPES["int8_32x32"])}


# ---- a Transformer block: operators read INT8, compute in float32, write INT8 ----------------------------

INT8, ALONE = PRODUCTS["int8"], Scales()
BlockGrads = tuple[Quantized, dict[Tensor, Tensor]]  # of the input, and of parameters
read = dequantize  # to float32


def write(x: Tensor) -> Quantized:
    return quantize(x, INT8.x, fill=True)


def forward(f: Callable, *xs: Quantized) -> Quantized:
    return write(f(*map(read, xs)))


def backward(f: Callable, dy: Quantized, *xs: Quantized) -> tuple[list[Quantized], dict[Tensor, Tensor]]:
    """-> the gradients of what `f` has read, and of its parameters, if it is a module."""
    params = [param for param in f.parameters() if param.requires_grad] if isinstance(f, nn.Module) else []
    with torch.enable_grad():
        leaves = [read(x).requires_grad_() for x in xs]
        grads = torch.autograd.grad(f(*leaves), (*leaves, *params), read(dy))
    return [write(grad) for grad in grads[: len(xs)]], dict(zip(params, grads[len(xs) :]))


def linear(x: Quantized, layers: Sequence[nn.Linear]) -> list[Quantized]:
    """One input, several matrices."""
    ys = [INT8.forward(x, layer.weight, ALONE) for layer in layers]
    return [write(y if layer.bias is None else y + layer.bias) for y, layer in zip(ys, layers)]


def linear_backward(dys: Sequence[Quantized], x: Quantized, layers: Sequence[nn.Linear]) -> BlockGrads:
    """Their gradients of x are summed before they are written."""
    total, grads = 0, {}
    for dy, layer in zip(dys, layers):
        dx, grads[layer.weight] = INT8.backward(dy, x, layer.weight, (True, True), ALONE)
        total = total + dx
        if layer.bias is not None:
            grads[layer.bias] = read(dy).flatten(0, -2).sum(0)
    return write(total), grads


def attend(attention: nn.Module, positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (rearrange(y, "b t (h k) -> b h t k", k=attention.config.head_dim) for y in (q, k, v))
    if attention.config.positions == "rope":
        q, k = attention.rotated(q, positions), attention.rotated(k, positions)
    out = attention.core(q, k, v, **attention._extras(positions))
    return rearrange(out, "b h t k -> b t (h k)")


def parts(block: nn.Module, positions: Tensor, act: Callable) -> tuple:
    attention, mlp = block.attention, block.mlp
    gated = hasattr(mlp, "gate")
    inwards, core = (mlp.gate, mlp.up) if gated else (mlp.up,), partial(attend, attention, positions)
    between = (lambda gate, up: act(gate) * up) if gated else act
    return (attention.q, attention.k, attention.v), core, (attention.out,), inwards, between


def block_forward(block, x: Quantized, positions: Tensor, act: Callable) -> tuple[Quantized, tuple]:
    """-> y, and what the operators have read."""
    projections, core, out, inwards, between = parts(block, positions, act)
    a = forward(block.norm1, x)
    qkv = linear(a, projections)
    o = forward(core, *qkv)
    h = forward(torch.add, x, *linear(o, out))
    b = forward(block.norm2, h)
    made = linear(b, inwards)
    z = forward(between, *made)
    y = forward(torch.add, h, *linear(z, (block.mlp.down,)))
    return y, (x, a, *qkv, o, h, b, *made, z)


def block_backward(block, dy: Quantized, saved: tuple, positions: Tensor, act: Callable) -> BlockGrads:
    """-> dx and the gradients of the parameters. A sum passes dy to both of its terms."""
    projections, core, out, inwards, between = parts(block, positions, act)
    x, a, q, k, v, o, h, b, *made, z = saved
    dz, of_down = linear_backward((dy,), z, (block.mlp.down,))
    dmade, _ = backward(between, dz, *made)
    db, of_inwards = linear_backward(dmade, b, inwards)
    (dh,), of_norm2 = backward(block.norm2, db, h)
    dh = forward(torch.add, dy, dh)
    do, of_out = linear_backward((dh,), o, out)
    dqkv, _ = backward(core, do, q, k, v)
    da, of_projections = linear_backward(dqkv, a, projections)
    (dx,), of_norm1 = backward(block.norm1, da, x)
    dx = forward(torch.add, dh, dx)
    return dx, of_down | of_inwards | of_norm2 | of_out | of_projections | of_norm1


def through_int8(block: nn.Module, act: Callable) -> None:
    """From now on `block`, whose MLP has the activation `act`, and all of its model compute through INT8.

        x -> norm -> Q, K, V -> core -> out -> + x = h -> norm -> up, gate -> act -> down -> + h

    Backward computes each operator again from the codes it has read. Kept of a block: 8 D + 3 F numbers per
    token (2 F without a gate; GQA has fewer). Weights have float32 gradients. Between blocks tensors are
    multiples of INT8 steps: quantised again they are the same codes. FLOPs: norms, core, activation twice."""
    config, attention, mlp = block.config, block.attention, block.mlp
    linears = [getattr(attention, name, None) for name in ("q", "k", "v", "out")]
    linears += [getattr(mlp, name, None) for name in ("up", "down")]
    whole = all(isinstance(linear, nn.Linear) for linear in linears)
    narrow = any(param.dtype != torch.float32 for param in block.parameters())
    if not whole or narrow or config.residual != "pre" or config.dropout:
        given = f"{type(attention).__name__} and {type(mlp).__name__}, {config.residual=}, {config.dropout=}"
        needed = "float32, nn.Linear layers that are not cut, residual 'pre', no experts, no dropout"
        raise ValueError(f"through_int8: {block.name} has {given}; it is written for {needed}")
    block.hooks.block = partial(int8_block, act)


def int8_block(act: Callable, block: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    params = tuple(block.parameters())
    with torch.no_grad():
        y, have_read = block_forward(block, write(x), positions, act)
    tensors, rebuild = split_tensors(have_read)

    def backward(dys: Sequence[Tensor], saved: Sequence[Tensor], _) -> tuple:
        dx, grads = block_backward(block, write(*dys), rebuild(saved), positions, act)
        return read(dx), *map(grads.get, params)

    return custom_vjp(lambda *_: (read(y), tensors), backward, x, *params)
