"""What a GPT is, as plain values; and the published ones by name.

A `GPTConfig` says everything that fixes the parameters of a model and the arithmetic of one token, and
nothing about ranks, precision or training. It is frozen, needs no torch (planners read it too) and is checked
when it is made. `GPTConfig(experts=ExpertsConfig(8, 2))` is a mixture of experts.

    parameters of a block, MHA with biases, LayerNorm, F = 4D:   12·D² + 13·D
    (attention 4·D² + 4·D, MLP 8·D² + 5·D, two norms 4·D)

`presets` are models whose exact parameter counts were published (tested). Left out, as no size depends on it:
Llama 3.1's rescaled RoPE, GPT-3's alternating sparse attention, GLM's two-dimensional positions.
"""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from minitrain.ranks.checks import require_positive_ints

LARGEST = 1 << 30  # size of anything
CHOICES = {
    "norm": ("rms", "layer"),
    "positions": ("rope", "learned", "alibi", "none"),
    "activation": ("gelu", "gelu_tanh", "fastgelu", "swiglu", "geglu"),
    "residual": ("pre", "parallel", "post", "deepnorm"),
}
GATED = ("swiglu", "geglu")
ROUTERS = ("top_k", "switch", "gshard", "deepseek", "expert_choice", "balanced")
OF_DEEPSEEK = ("bias_speed", "route_nodes", "node_limit", "route_scale")
FIXED = {"switch": 1, "gshard": 2}  # routers that say themselves how many experts a token visits


class Settings:
    """A frozen dataclass of plain values: the base of GPTConfig and ExpertsConfig."""

    def check_fields(self, choices: Mapping[str, Collection[str]], *positive: str) -> None:
        """Every field has the type of its default, where None stands for a whole number that is derived, and
        is one of its choices or a finite number, at least 0, and 1 if it is `positive`."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            kind = int if field.default is None else type(field.default)
            if value is field.default or isinstance(value, Settings):
                continue
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name} = {value!r} is {type(value).__name__}; expected {kind.__name__}")
            if kind is str and value not in choices[name]:
                raise ValueError(f"{name} = {value!r}; {meant(value, choices[name])}")
            least = 1 if name in positive else 0
            if kind in (int, float) and not least <= value < math.inf:
                raise ValueError(f"{name} = {value}; use at least {least}")
            if kind is int and value > LARGEST:
                raise ValueError(f"{name} = {value}; use at most {LARGEST:,}")


def meant(given: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"


def divisors(n: int) -> list[int]:
    require_positive_ints(1 << 40, n=n)
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


@dataclass(frozen=True)
class ExpertsConfig(Settings):
    """Which MLPs of a model are experts, how a token finds them and what keeps them busy.

        ExpertsConfig(128, top_k=1, router="switch", expert_every=2, capacity_factor=1.25)
        ExpertsConfig(64, 1, "switch", shared_experts=1, pyramid_layers=2, pyramid_experts=128)

    The last is DeepSpeed's PR-MoE: residual (a shared MLP beside the one chosen) and a pyramid (more experts
    in the last layers). Capacity and the balance loss are per row (Switch Transformer: per batch of a device;
    GShard: per group), which no layout cuts; loss terms are means over all tokens, masked or not."""

    num_experts: int = 8  # E of a layer that has experts, shared ones not counted
    top_k: int = 2  # of these a token visits
    router: str = "top_k"  # or switch, gshard, deepseek, expert_choice, balanced (moe/router.py)
    expert_width: int | None = None  # F of one expert; None: d_ff
    shared_experts: int = 0  # visited by every token: one MLP that is so many experts wide
    expert_every: int = 1  # every how many-th block has experts; 2: the second, the fourth, ...
    dense_first: int = 0  # so many blocks before the first that may have experts
    pyramid_layers: int = 0  # of the layers with experts, how many last ones have pyramid_experts
    pyramid_experts: int = 0  # E of these
    capacity_factor: float = 0.0  # room of an expert in a row, in mean loads; 0: nobody is dropped
    balance_alpha: float = 0.0  # weight of the auxiliary loss for equal loads, per row
    z_alpha: float = 0.0  # weight of the z-loss, which keeps scores small
    bias_speed: float = 0.0  # of deepseek: how much a step moves the bias of an expert
    route_nodes: int = 1  # of deepseek: the groups in which the experts stand
    node_limit: int = 0  # of deepseek: the groups that a token visits at most; 0: all
    route_scale: float = 1.0  # of deepseek: factor of the weights

    def __post_init__(self):
        positive = ("num_experts", "top_k", "expert_every", "route_nodes", "expert_width")
        self.check_fields({"router": ROUTERS}, *positive)
        if bool(self.pyramid_layers) != bool(self.pyramid_experts):
            raise ValueError("pyramid_layers or pyramid_experts alone; a pyramid needs both")
        fewest = min(self.num_experts, self.pyramid_experts or self.num_experts)
        if self.top_k > fewest:
            raise ValueError(f"top_k = {self.top_k} of {fewest} experts; shared ones come on top")
        if self.top_k != (wanted := FIXED.get(self.router, self.top_k)):
            raise ValueError(f"top_k = {self.top_k}; router {self.router!r} is for top_k = {wanted}")
        for field in fields(self):
            given, is_set = getattr(self, field.name), getattr(self, field.name) != field.default
            if field.name in OF_DEEPSEEK and is_set and self.router != "deepseek":
                raise ValueError(f"{field.name} = {given} is for router 'deepseek', not {self.router!r}")
        nodes, limit = self.route_nodes, self.node_limit or self.route_nodes
        for experts in {self.num_experts, self.pyramid_experts or self.num_experts}:
            each = self.top_k // limit
            if limit > nodes or experts % nodes or self.top_k % limit or each > experts // nodes:
                sizes = f"{experts} experts, route_nodes {nodes}, node_limit {limit}, top_k {self.top_k}"
                rule = "nodes divide experts, a limit within them top_k, and top_k / limit stand on a node"
                raise ValueError(f"{sizes}: {rule}")

    def in_block(self, number: int, num_layers: int) -> int:
        """How many experts block `number` (from 1) of so many has; 0: its MLP is dense."""
        blocks = self.blocks(num_layers)
        if number not in blocks:
            return 0
        in_pyramid = number in blocks[len(blocks) - self.pyramid_layers :]
        return self.pyramid_experts if in_pyramid else self.num_experts

    def blocks(self, num_layers: int) -> list[int]:
        return list(range(self.dense_first + self.expert_every, num_layers + 1, self.expert_every))

    @property
    def whole_rows(self) -> bool:
        """Whether what happens to a token depends on the others of its row."""
        return bool(self.capacity_factor or self.balance_alpha) or self.router == "expert_choice"


@dataclass(frozen=True)
class GPTConfig(Settings):
    """Sizes and variants of one model. `None` is replaced by a number that is derived from the width."""

    vocab_size: int = 256  # V; bytes are 256
    d_model: int = 64  # the width D
    num_layers: int = 2  # blocks, between embedding and head
    num_heads: int = 4  # of attention
    num_kv_heads: int | None = None  # None: as many as heads (MHA); 1: MQA; between: GQA
    head_dim: int | None = None  # None: d_model / num_heads
    d_ff: int | None = None  # None: 4·d_model; for a gated MLP 8/3·d_model, up to a multiple of 64
    max_positions: int = 1024  # the longest sequence
    norm: str = "rms"  # or layer
    norm_eps: float = 1e-5  # added to a variance before its root
    positions: str = "rope"  # or learned, alibi, none
    rope_theta: float = 10_000.0  # base of the wavelengths
    rope_fraction: float = 1.0  # the part of each head that is rotated (GPT-NeoX: 1/4)
    activation: str = "swiglu"  # or geglu, gelu, gelu_tanh, fastgelu
    residual: str = "pre"  # or parallel, post, deepnorm: where norms and sums stand; see model.Block
    bias: bool = False  # in the linears and norms of the blocks; head, routers and experts never have one
    tied: bool = False  # the head uses the token table
    embedding_norm: bool = False  # BLOOM: a norm right after the token table
    dropout: float = 0.0  # on attention probabilities and on both outputs of a block
    kv_latent: int = 0  # > 0: multi-head latent attention with a key-value latent this wide
    query_latent: int = 0  # MLA: width of the query latent; 0: queries come straight from the input
    rope_head_dim: int = 0  # MLA: width of the rotated part of each head
    experts: ExpertsConfig | None = None  # mixture of experts in the place of MLPs; None: all are dense

    def __post_init__(self):
        if isinstance(self.experts, dict):  # as plain values travel
            object.__setattr__(self, "experts", ExpertsConfig(**self.experts))
        elif not isinstance(self.experts, ExpertsConfig | None):
            raise ValueError(f"experts = {self.experts!r}; use an ExpertsConfig, or None")
        derived = ("num_kv_heads", "head_dim", "d_ff")
        positive = ("vocab_size", "d_model", "num_layers", "num_heads", "max_positions")
        self.check_fields(CHOICES, *positive, *derived)
        width, heads = self.d_model, self.num_heads
        if _derived(self.head_dim) and width % heads:
            raise ValueError(f"d_model {width} is not divisible by num_heads {heads}: try {divisors(width)}")
        d_ff = -(-8 * width // (3 * 64)) * 64 if self.activation in GATED else 4 * width
        for name, value in zip(derived, (heads, width // heads, d_ff)):
            if _derived(getattr(self, name)):
                object.__setattr__(self, name, Derived(value))
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout}; must be in [0, 1)")
        if not (self.norm_eps and self.rope_theta):
            raise ValueError(f"norm_eps = {self.norm_eps} and rope_theta = {self.rope_theta} must be > 0")
        self._check_attention()
        blocks = self.experts.blocks(self.num_layers) if self.experts else ()
        if self.experts and len(blocks) < (least := max(1, self.experts.pyramid_layers)):
            cure = f"expert_every and dense_first must leave {least}"
            raise ValueError(f"{len(blocks)} of {self.num_layers} blocks have experts; {cure}")

    def _check_attention(self):
        heads, kv_heads, latent = self.num_heads, self.num_kv_heads, self.kv_latent
        if heads % kv_heads:
            raise ValueError(f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
        for name, wanted, fits in (
            ("positions", "'rope'", self.positions == "rope"),
            ("rope_head_dim", "at least 2", self.rope_head_dim >= 2),
            ("num_kv_heads", f"None or {heads}", kv_heads == heads),
        ):
            if latent and not fits:
                given = f"{name} = {getattr(self, name)!r}"
                raise ValueError(f"{given}; with kv_latent {latent} (MLA) use {wanted}")
        if not 0.0 < self.rope_fraction <= 1.0:
            raise ValueError(f"rope_fraction = {self.rope_fraction}; must be in (0, 1]")
        if self.positions == "rope" and self.rotated_dim % 2:
            raise ValueError(f"rotated head size {self.rotated_dim} is odd; RoPE turns pairs")

    def experts_in(self, block: int) -> int:
        """Of block 1 .. L; 0: its MLP is dense."""
        return self.experts.in_block(block, self.num_layers) if self.experts else 0

    @property
    def expert_width(self) -> int:
        return (self.experts and self.experts.expert_width) or self.d_ff

    @property
    def rotated_dim(self) -> int:
        """Width of the part of a head that RoPE turns."""
        return self.rope_head_dim if self.kv_latent else int(self.head_dim * self.rope_fraction)


def plain_values(config: GPTConfig) -> dict[str, object]:
    """All fields, those of the experts by their own names."""
    values = asdict(config)
    return values | (values.pop("experts") or {})


class Derived(int):
    """A width nobody chose: `dataclasses.replace(config, d_model=128)` derives it anew."""


def _derived(value: int | None) -> bool:
    return value is None or isinstance(value, Derived)


def _gpt2(width: int, num_layers: int, num_heads: int, **other) -> GPTConfig:
    """Radford et al. 2019, section 2.3: pre-norm, learned positions, GELU (by tanh, in their code and in what
    was trained after it: GPT-NeoX, BLOOM), biases everywhere, tied head."""
    style = dict(norm="layer", positions="learned", activation="gelu_tanh", bias=True, tied=True)
    style |= dict(vocab_size=50_257, max_positions=1024) | other
    return GPTConfig(d_model=width, num_layers=num_layers, num_heads=num_heads, **style)


def _llama(width: int, num_layers: int, num_heads: int, num_kv_heads: int, d_ff: int, **other) -> GPTConfig:
    """Touvron et al. 2023, section 2.2: RMSNorm, RoPE, SwiGLU, no biases, untied head."""
    heads = dict(num_heads=num_heads, num_kv_heads=num_kv_heads)
    return GPTConfig(d_model=width, num_layers=num_layers, d_ff=d_ff, **heads, **other)


_V3_EXPERTS = dict(expert_width=2048, shared_experts=1, dense_first=3, balance_alpha=1e-4, bias_speed=1e-3)
_V3_EXPERTS |= dict(route_nodes=8, node_limit=4, route_scale=2.5)
_DEEPSEEK_V3 = dict(kv_latent=512, query_latent=1536, rope_head_dim=64, head_dim=128, norm_eps=1e-6)
_DEEPSEEK_V3 |= dict(vocab_size=129_280, max_positions=4096)
_DEEPSEEK_V3 |= dict(experts=ExpertsConfig(256, 8, "deepseek", **_V3_EXPERTS))
_MIXTRAL = dict(vocab_size=32_000, max_positions=32_768, rope_theta=1e6, experts=ExpertsConfig(8, 2))
_TINY = dict(d_model=64, num_layers=2, num_heads=4, max_positions=256)
_LLAMA3 = dict(vocab_size=128_256, max_positions=8192, rope_theta=500_000.0)
_NEOX = dict(vocab_size=50_432, max_positions=2048, positions="rope", rope_fraction=0.25, tied=False)
_BLOOM = dict(vocab_size=250_880, max_positions=2048, positions="alibi", embedding_norm=True)
_GLM = dict(vocab_size=150_528, max_positions=2048, positions="rope", activation="geglu")

presets = {
    # For laptops: text as bytes, so 256 tokens.
    "tiny": GPTConfig(**_TINY),
    "small": GPTConfig(d_model=256, num_layers=6, num_heads=8, max_positions=512),
    "tiny-moe": GPTConfig(**_TINY, d_ff=96, experts=ExpertsConfig(8, 2, balance_alpha=0.01)),
    "medium": GPTConfig(d_model=1024, num_layers=8, num_heads=16, num_kv_heads=8, max_positions=1024),
    # Radford et al. 2019 (the repository's readme corrects the paper's 117M to 124M).
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # Brown et al. 2020, table 2.1.
    "gpt3-175b": _gpt2(12_288, 96, 96, max_positions=2048),
    # Black et al. 2022, section 2: attention and MLP side by side, RoPE on a quarter of each head, untied.
    "gpt-neox-20b": _gpt2(6144, 44, 64, residual="parallel", **_NEOX),
    # BigScience 2022, section 3.2: ALiBi, a norm after the embedding.
    "bloom-176b": _gpt2(14_336, 70, 112, **_BLOOM),
    # Zeng et al. 2022, section 2.1 and appendix B: DeepNorm, RoPE, GeGLU with F = 8/3 D.
    "glm-130b": _gpt2(12_288, 70, 96, residual="deepnorm", **_GLM),
    # Touvron et al. 2023b, appendix A.2.1; Jiang et al. 2023, table 1.
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, vocab_size=32_000, max_positions=4096),
    "mistral-7b": _llama(4096, 32, 32, 8, 14_336, vocab_size=32_000, max_positions=8192),
    # Llama team 2024, table 3.
    "llama3-8b": _llama(4096, 32, 32, 8, 14_336, **_LLAMA3),
    "llama3-70b": _llama(8192, 80, 64, 8, 28_672, **_LLAMA3),
    "llama3.1-405b": _llama(16_384, 126, 128, 8, 53_248, **(_LLAMA3 | dict(max_positions=131_072))),
    # Jiang et al. 2024, table 1: Mistral 7B's layers with 8 experts each.
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14_336, **_MIXTRAL),
    # DeepSeek-AI 2024, section 4.2, without the multi-token prediction module.
    "deepseek-v3": _llama(7168, 61, 128, 128, 18_432, **_DEEPSEEK_V3),
}
