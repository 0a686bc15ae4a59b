"""A Transformer block between whose operators everything is INT8: activations forward, gradients backward.

    operator       reads INT8 blocks of 32 x 32, computes in float32, writes INT8 blocks
    linear         products of systems/precision/int8.py, plus the bias
    others         norm, attention's core, activation, residual sum: any function of tensors

    x -> norm -> Q, K, V -> core -> out -> + x = h -> norm -> up, gate -> act -> down -> + h

What an operator has read is what backward needs: it computes its operator again from these codes, so nothing
else is kept, and dy comes and dx goes as INT8 too. Gradients of weights are float32. Kept of a block: 8 D +
3 F numbers per token (2 F without a gate; GQA has fewer) of 1 + 4/1024 bytes: 1/2 + 1/512 of FP16, or, with
2-byte scales, 1/2 + 1/1024. Between blocks tensors are floats that are multiples of INT8 steps: quantised
again they are the same codes, so what the next block reads is what this one wrote.

`through_int8(block, act)` makes the blocks of a model compute so, through their hook `block`; parameters and
their names stay, and dp, ZeRO, pp and microbatches do what they did. Raises ValueError for a block that it is
not written for.
Sends nothing. FLOPs: those of the block, and norms, core and activation a second time.
Xi et al. 2024 (Jetfire), arXiv:2403.12422, sections 3 and 6. Differs: the core reads and writes INT8 as well;
so does the residual sum, whose stream the authors' code keeps in 16 bits; nearest rounding, no fused kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from minitrain.precision.blocks import Quantized, dequantize, quantize
from minitrain.precision.products import Scales
from minitrain.precision.quantized_linear import split_tensors
from minitrain.systems.precision.int8 import PRODUCTS

INT8, ALONE = PRODUCTS["int8"], Scales()
Grads = tuple[Quantized, dict[Tensor, Tensor]]  # of the input, and of parameters


read = dequantize  # to float32


def write(x: Tensor) -> Quantized:
    return quantize(x, INT8.x, fill=True)


# ---- operators: INT8 -> INT8, and back ---------------------------------------------------------------------


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


def linear_backward(dys: Sequence[Quantized], x: Quantized, layers: Sequence[nn.Linear]) -> Grads:
    """Their gradients of x are summed before they are written."""
    total, grads = 0, {}
    for dy, layer in zip(dys, layers):
        dx, grads[layer.weight] = INT8.backward(dy, x, layer.weight, (True, True), ALONE)
        total = total + dx
        if layer.bias is not None:
            grads[layer.bias] = read(dy).flatten(0, -2).sum(0)
    return write(total), grads


# ---- the block ---------------------------------------------------------------------------------------------


def attend(attention: nn.Module, positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What attention does between its projections."""
    q, k, v = (rearrange(y, "b t (h k) -> b h t k", k=attention.config.head_dim) for y in (q, k, v))
    if attention.config.positions == "rope":
        q, k = attention.rotated(q, positions), attention.rotated(k, positions)
    out = attention.core(q, k, v, **attention._extras(positions))
    return rearrange(out, "b h t k -> b t (h k)")


def hidden(act: Callable, *made: Tensor) -> Tensor:
    """gate and up, or up alone."""
    return act(made[0]) * made[1] if len(made) > 1 else act(made[0])


def parts(block: nn.Module, positions: Tensor, act: Callable) -> tuple:
    attention, mlp = block.attention, block.mlp
    inwards = (mlp.gate, mlp.up) if hasattr(mlp, "gate") else (mlp.up,)
    core = partial(attend, attention, positions)
    return (attention.q, attention.k, attention.v), core, (attention.out,), inwards, partial(hidden, act)


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


def block_backward(block, dy: Quantized, saved: tuple, positions: Tensor, act: Callable) -> Grads:
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
    """From now on `block`, whose MLP has the activation `act`, and all of its model compute through INT8."""
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
    """As the hook `block` of model/hooks.py."""
    return _Int8Block.apply(x, positions, block, act, *block.parameters())


class _Int8Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, block, act, *params):
        y, saved = block_forward(block, write(x), positions, act)
        tensors, ctx.rebuild = split_tensors(saved)
        ctx.save_for_backward(*tensors)
        ctx.rest = block, positions, act, params
        return read(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        block, positions, act, params = ctx.rest
        dx, grads = block_backward(block, write(dy), ctx.rebuild(ctx.saved_tensors), positions, act)
        return read(dx), None, None, None, *(grads.get(param) for param in params)
