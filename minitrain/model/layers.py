"""The parts of a Transformer block: rotary positions, attention cores, attention (MHA, GQA, MQA, MLA), MLP.

    attention     Y[B, T, D] = concat_h softmax(Q_h K_hᵀ / sqrt(K)) V_h · W_out        causal
    MLP           Y[B, T, D] = act(X · W_up) · W_down          gated:  (act(X · W_gate) * (X · W_up)) · W_down

No layer stores how many heads it has: it counts them in the width it finds, so one that was cut to H/tp heads
is still the same layer. The *core* of the attention is an argument, `core(q, k, v)` with q `[B, H, T, K]` and
k, v `[B, H_kv, T, K]`; a model with ALiBi gives it `bias=`, one with dropout `dropout=`, packed rows give it
`documents=`. Linear layers are swapped as modules. `positions` `[T]` or `[B, T]` come with the tokens; what
techniques put between layers stands in `Hooks`, wrapped by compose/ alone.

Vaswani et al. 2017, arXiv:1706.03762, section 3; Zhang and Sennrich 2019 (RMSNorm), arXiv:1910.07467; Su et
al. 2021 (RoPE), arXiv:2104.09864, section 3.2.2; Shazeer 2019 (MQA), arXiv:1911.02150; Ainslie et al. 2023
(GQA), arXiv:2305.13245; DeepSeek-AI 2024 (MLA), arXiv:2405.04434, section 2.1; Shazeer 2020 (gated units),
arXiv:2002.05202. Differs: RoPE turns the pairs (i, i + K/2), as GPT-NeoX does, and not (2i, 2i + 1).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from minitrain.attention.flash import flash_attention
from minitrain.attention.kernel import fused_backward, fused_forward, recomputed
from minitrain.attention.placed import Alibi, alibi_slopes
from minitrain.model.config import GATED, GPTConfig
from minitrain.moe.dispatch import AllToAll, Tokens
from minitrain.ranks.autograd import custom_vjp


def call(name: str, compute: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    return compute(*inputs)


def lookup(table: Tensor, ids: Tensor, what: str, limit: str) -> Tensor:
    """Rows `ids` of the table. An error names a wrong id where torch notices it (on a CPU): to look first
    costs an operator, and a synchronisation on a GPU."""
    try:
        return F.embedding(ids, table)
    except IndexError:
        size, place = table.size(0), ((ids < 0) | (ids >= table.size(0))).nonzero()[0].tolist()
        wrong = ids[tuple(place)].item()
        raise ValueError(f"{what} {wrong} at {place}; {limit} is {size} (0..{size - 1})") from None


@dataclass(eq=False)
class Hooks:
    """What may be put into layers: one object, given when a model is built, that all of its layers ask."""

    # y = result("act", compute, gate, up): compute(gate, up), under a name. Recomputation keeps some results,
    # computes others again. All tensors with gradients that compute reads are its inputs, or parameters
    result: Callable = call
    token_rows: Callable = lookup  # of a table that may be cut over ranks (tensor_parallel/vocabulary.py)
    position_rows: Callable = lookup
    in_document: Callable = lambda positions: positions  # from positions in a row to those in its documents
    padding: int = 0  # so many last tokens of a row are there to be cut evenly: nobody reads what they give
    experts: Callable = field(default_factory=AllToAll)  # x [N, D] to its experts and back (moe/dispatch.py)
    tokens: Tokens = field(default_factory=Tokens)  # those that this rank routes to experts (moe/dispatch.py)
    absorb: bool = False  # latent attention computes as it is served: of keys a cache needs the latents alone
    block: Callable | None = None  # (layer, x, positions) -> x: how blocks compute, if not as written here


class Linear(nn.Linear):
    """torch's, without its random start: the model fills every parameter from its global name."""

    def reset_parameters(self):
        pass


class Dropout(nn.Dropout):
    """torch's, with a mask of one byte per element on every device (on a CPU torch's is as wide as x)."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # by place: attention/placed.py
        return drop(x, self.p if self.training else 0.0)


def drop(x: Tensor, p: float | Callable) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1/(1-p); draws from torch's global
    generator. A mask that is known already is a function of x in the place of p."""
    if callable(p):
        return p(x)
    return torch.native_dropout(x, p, True)[0] if p else x


def norm(config: GPTConfig, width: int | None = None, **place) -> nn.Module:
    """RMSNorm x / rms(x) · w, or LayerNorm (x - mean) / std · w + b."""
    width = width or config.d_model
    if config.norm == "rms":
        return RMSNorm(width, config.norm_eps, **place)
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias, **place)


class RMSNorm(nn.RMSNorm):
    """torch's, but it saves only x for backward on every device, as torch's kernel does on CUDA; elsewhere
    torch builds the norm from parts that save two copies of x, in float32 even if x is bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return super().forward(x)
        return custom_vjp(partial(rms_norm_forward, eps=self.eps), rms_norm_backward, x, self.weight)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x `[..., D]` -> y = x · scale · weight, and x, weight, scale = 1/rms(x) `[..., 1]` for backward."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square() / x.size(-1) + eps).rsqrt()
    return (exact * scale).mul_(weight).to(x.dtype), (x, weight, scale)


def rms_norm_backward(dys: tuple[Tensor], saved: tuple[Tensor, ...], _) -> tuple[Tensor, Tensor]:
    """With n = x · scale and g = dy · weight: dx = scale · (g - n · mean(g · n)), dweight = Σ dy · n."""
    (dy,), (x, weight, scale) = dys, saved
    normed = x * scale
    dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
    g = dy * weight.to(normed.dtype)
    mean = (g * normed).mean(-1, keepdim=True)
    return g.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), dweight


def project(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """One x, several matrices. Modules that gather or quantise x once for all have `together(x, linears)`."""
    together = getattr(linears[0], "together", None)
    return together(x, linears) if together else tuple(linear(x) for linear in linears)


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    return rearrange(x, "b t (h k) -> b h t k", k=head_dim)


def rotate(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """RoPE: turns the pair (x_i, x_{i+R/2}) of a head by the angle position · theta^(-2i/R).

    x `[B, H, T, R]`; positions `[T]` or `[B, T]`. The product of a rotated query and a rotated key depends on
    their distance only."""
    exact = torch.promote_types(x.dtype, torch.float32)  # angles in bf16 would be wrong from position 256 on
    exponents = torch.arange(0, x.size(-1), 2, device=x.device, dtype=exact) / x.size(-1)
    angles = (positions.to(exact).unsqueeze(-1) * theta**-exponents).unsqueeze(-3)  # [(B,) 1, T, R/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_attention(
    q, k, v, *, bias: Tensor | Alibi | None = None, dropout: float | Callable = 0.0, documents=None
):
    """torch's fused attention: q `[B, H, T, K]`, k and v `[B, H_kv, T, K]` -> `[B, H, T, K]`. A bias is added
    to the scores: numbers that fit `[B, H, T, T]`, or ALiBi's, of the positions of these tokens.

    Values `[.., W]` narrower than keys (MLA): on a CPU torch would keep scores. Its flash kernel, called
    here, pads values with zeros: FLOPs are 2K for K + W, in backward 5K for 3K + 2W."""
    if (queries := q.size(-2)) != (keys := k.size(-2)):
        raise ValueError(f"causal_attention: {queries} queries, {keys} keys; it is for as many of both")
    if documents:
        return flash_attention(q, k, v, bias=bias, dropout=dropout, documents=documents)
    if callable(dropout):  # the fused one takes no mask that it has not drawn
        return naive_attention(q, k, v, bias=bias, dropout=dropout)
    if v.size(-1) < q.size(-1) and bias is None and not dropout and q.device.type == "cpu":
        return recomputed(fused_forward, fused_backward, q, k, v, True)
    if bias is not None:
        bias = bias.full(q) if isinstance(bias, Alibi) else bias
        bias = bias + future(q.size(-2), bias)
    settings = dict(is_causal=bias is None, enable_gqa=q.size(1) != k.size(1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, **settings)


def naive_attention(q, k, v, *, bias: Tensor | Alibi | None = None, dropout: float | Callable = 0.0):
    """The same in five lines: each FLOP and each saved tensor can be seen. Keeps `[B, H, T, T]` scores."""
    bias = bias.full(q) if isinstance(bias, Alibi) else bias
    if (shared := q.size(1) // k.size(1)) > 1:
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + future(q.size(-2), q)
    probabilities = F.softmax(scores if bias is None else scores + bias, dim=-1)
    return drop(probabilities, dropout) @ v


def future(length: int, like: Tensor) -> Tensor:
    """`[T, T]`: -inf where the key comes after the query, else 0. Added, for a sum saves nothing."""
    return like.new_full((length, length), -math.inf).triu(1)


class Attention(nn.Module):
    """Multi-head attention whose keys and values may be shared by groups of heads (GQA; one group: MQA)."""

    project = staticmethod(project)

    def __init__(self, config: GPTConfig, core: Callable = causal_attention, hooks=None, **place):
        super().__init__()
        self.config, self.core, self.hooks = config, core, hooks or Hooks()
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(config.d_model, heads, bias=config.bias, **place)
        self.k = Linear(config.d_model, kv_heads, bias=config.bias, **place)
        self.v = Linear(config.d_model, kv_heads, bias=config.bias, **place)
        self.out = Linear(heads, config.d_model, bias=config.bias, **place)
        if config.positions == "alibi":  # a buffer with a head per row: who cuts the heads cuts it too
            slopes = torch.tensor(alibi_slopes(config.num_heads), **place)
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.hooks.result("qkv", partial(self.queries_keys_values, positions=positions), x)
        return self.attend(q, k, v, positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        out = self.hooks.result("core", partial(self.core, **self._extras(positions)), q, k, v)
        return self.hooks.result("out", self.out, rearrange(out, "b h t k -> b t (h k)"))

    def queries_keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """As the core takes them: q `[B, H, T, K]`, k and v `[B, H_kv, T, K]`."""
        projected = self.project(x, (self.q, self.k, self.v))
        q, k, v = (heads_of(y, self.config.head_dim) for y in projected)
        if self.config.positions == "rope":
            q, k = self.rotated(q, positions), self.rotated(k, positions)
        return q, k, v

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys `[B, H, T, K]` with RoPE, on as much of a head as the model turns."""
        width, theta = self.config.rotated_dim, self.config.rope_theta
        if width == x.size(-1):
            return rotate(x, positions, theta)
        return torch.cat((rotate(x[..., :width], positions, theta), x[..., width:]), dim=-1)

    def _extras(self, positions: Tensor) -> dict:
        """What few models need: a core without ALiBi or dropout stays core(q, k, v)."""
        extras = {}
        if self.config.positions == "alibi":
            extras["bias"] = Alibi(self.slopes, positions)
        if self.config.dropout and self.training:
            extras["dropout"] = self.config.dropout
        return extras


class LatentAttention(Attention):
    """Multi-head latent attention: a cache holds a latent c and a rotated key r per token, for all heads.

    [c, r] = x · W_kv_down        k_h = [c · W_k_up,h, rope(r)]        v_h = c · W_v_up,h
                                  q_h = [plain_h, rope(turned_h)]      from x, or from a query latent"""

    def __init__(self, config: GPTConfig, core: Callable = causal_attention, hooks=None, **place):
        nn.Module.__init__(self)
        self.config, self.core, self.hooks = config, core, hooks or Hooks()
        plain, turned, heads = config.head_dim, config.rope_head_dim, config.num_heads
        if config.query_latent:
            self.q_down = Linear(config.d_model, config.query_latent, bias=config.bias, **place)
            self.q_norm = norm(config, config.query_latent, **place)
        query_width = config.query_latent or config.d_model
        self.q_up = Linear(query_width, heads * (plain + turned), bias=False, **place)
        self.kv_down = Linear(config.d_model, config.kv_latent + turned, bias=config.bias, **place)
        self.kv_norm = norm(config, config.kv_latent, **place)
        self.k_up = Linear(config.kv_latent, heads * plain, bias=False, **place)
        self.v_up = Linear(config.kv_latent, heads * plain, bias=False, **place)
        self.out = Linear(heads * plain, config.d_model, bias=config.bias, **place)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """As it is trained: keys and values of every head are written out, then attention as always."""
        if self.hooks.absorb:
            return self.absorbed(x, positions)
        latents = self.hooks.result("latents", self.compress, x)
        q, k, v = self.hooks.result("qkv", partial(self.expand, positions=positions), *latents)
        return self.attend(q, k, v, positions)

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, D]` -> query latent `[B, T, query_latent]`, and [c, r] `[B, T, kv_latent + R]`."""
        return self.q_down(x) if self.config.query_latent else x, self.kv_down(x)

    def expand(self, query_latent: Tensor, kv_latent: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The wide part in front of the core: norms and up-projections -> `[B, H, T, K]` each."""
        plain, turned, latent, shared_key = self._parts(query_latent, kv_latent, positions)
        k, v = (heads_of(up(latent), self.config.head_dim) for up in (self.k_up, self.v_up))
        k = torch.cat((k, shared_key.expand(-1, k.size(1), -1, -1)), dim=-1)
        return torch.cat((plain, turned), dim=-1), k, v

    def absorbed(self, x: Tensor, positions: Tensor) -> Tensor:
        """As it is served, and equal to forward: W_k_up moves to the queries, W_v_up behind the core. With
        q · (c · W)ᵀ = (q · Wᵀ) · cᵀ it is MQA: one key [c, rope(r)] and one value c for every head."""
        plain, turned, latent, shared_key = self._parts(*self.compress(x), positions)
        weights, width = (self.k_up.weight, self.v_up.weight), self.config.head_dim
        k_up, v_up = (rearrange(weight, "(h k) c -> h k c", k=width) for weight in weights)
        q = torch.cat((torch.einsum("bhtk,hkc->bhtc", plain, k_up), turned), dim=-1)
        k = torch.cat((latent.unsqueeze(1), shared_key), dim=-1)
        # The core will divide by the root of a larger width.
        q = q * math.sqrt(q.size(-1) / (plain.size(-1) + turned.size(-1)))
        out = torch.einsum("bhtc,hkc->bhtk", self.core(q, k, latent.unsqueeze(1)), v_up)
        return self.out(rearrange(out, "b h t k -> b t (h k)"))

    def _parts(self, query_latent: Tensor, kv_latent: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """q: plain `[B, H, T, K]`, turned `[B, H, T, R]`; c `[B, T, kv_latent]`; rope(r) `[B, 1, T, R]`."""
        config, width = self.config, self.config.rope_head_dim
        q = self.q_up(self.q_norm(query_latent) if config.query_latent else query_latent)
        plain, turned = heads_of(q, config.head_dim + width).split((config.head_dim, width), dim=-1)
        latent, shared_key = kv_latent.split((config.kv_latent, width), dim=-1)
        turned = rotate(turned, positions, config.rope_theta)
        shared_key = rotate(shared_key.unsqueeze(1), positions, config.rope_theta)
        return plain, turned, self.kv_norm(latent), shared_key


class MLP(nn.Module):
    """Two matrices of width F = 4·D, or with a gate three of width 8/3·D: 8·D² parameters either way."""

    project = staticmethod(project)

    def __init__(self, config: GPTConfig, width: int | None = None, hooks=None, **place):
        super().__init__()
        self.activation, self.hooks = config.activation, hooks or Hooks()
        width = width or config.d_ff
        self.up = Linear(config.d_model, width, bias=config.bias, **place)
        if config.activation in GATED:
            self.gate = Linear(config.d_model, width, bias=config.bias, **place)
        self.down = Linear(width, config.d_model, bias=config.bias, **place)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # of experts in its place
        act = ACTIVATIONS[self.activation]
        if self.activation in GATED:
            gate, up = self.hooks.result("up", lambda x: self.project(x, (self.gate, self.up)), x)
            hidden = self.hooks.result("act", lambda gate, up: act(gate) * up, gate, up)
        else:
            (up,) = self.hooks.result("up", lambda x: self.project(x, (self.up,)), x)
            hidden = self.hooks.result("act", act, up)
        return self.hooks.result("down", self.down, hidden)


def fast_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x), at most 0.0203 away from GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = dict(gelu=F.gelu, fastgelu=fast_gelu, gelu_tanh=partial(F.gelu, approximate="tanh"))
ACTIVATIONS |= dict(swiglu=F.silu, geglu=F.gelu)  # gated
