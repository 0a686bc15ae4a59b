"""What a training step keeps in memory: model states and activations; and the checkpoint on disk.

    model states     2 + 2 + 12 = 16 bytes per parameter   fp16 weight, gradient; fp32 master, two moments
    ZeRO, n ranks    stage 1: 4 + 12/n       2: 2 + 14/n       3: 16/n
    checkpoint       14 bytes per parameter                 all but the gradient
    activations      s·b·h·(34 + 5·a·s/h) bytes per layer   sequence s, microbatch b, width h, heads a

Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, sections 3.1 and 5; 2021 (ZeRO-Infinity), arXiv:2104.07857,
section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4 and table 2; DeepSeek-AI 2024 (DeepSeek-V3),
arXiv:2412.19437, section 3.2.3. As there, mean and deviation of the norms (8 or 16 bytes per token) are left
out.
"""

from dataclasses import dataclass

from minitrain.model.config import GPTConfig
from minitrain.ranks.checks import require_nonnegative, require_positive_ints


def model_state_bytes(parameters: int, *, weight: int = 2, gradient: int = 2, optimizer: int = 12) -> int:
    """Bytes per rank without sharding. ZeRO-Infinity counts an fp32 gradient too: `gradient=6`, 20 in all."""
    require_nonnegative(parameters=parameters, weight=weight, gradient=gradient, optimizer=optimizer)
    return parameters * (weight + gradient + optimizer)


def zero_bytes(parameters: int, ranks: int, stage: int, *, weight=2, gradient=2, optimizer=12) -> float:
    """Bytes per rank: stage 1 shards the optimizer states, 2 gradients too, 3 weights too; 0 nothing."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage = {stage}; ZeRO has stages 1, 2 and 3 (0: nothing is sharded)")
    require_nonnegative(parameters=parameters, weight=weight, gradient=gradient, optimizer=optimizer)
    require_positive_ints(ranks=ranks)
    sharded = sum((optimizer, gradient, weight)[:stage])
    return parameters * (weight + gradient + optimizer - sharded + sharded / ranks)


def checkpoint_bytes(parameters: int, *, weight: int = 2, optimizer: int = 12) -> int:
    """What must be written to go on training: the next step computes its gradients itself."""
    require_nonnegative(parameters=parameters, weight=weight, optimizer=optimizer)
    return parameters * (weight + optimizer)


@dataclass(frozen=True)
class Term:
    """One tensor kept for backward: `sbh` and `ass` are its bytes in units of s·b·h and a·s²·b."""

    tensor: str
    place: str  # the module of model.Block that keeps it
    sbh: int = 0
    ass: int = 0
    core: bool = False  # inside the core of the attention: gone with selective recomputation
    cut: bool = True  # cut by tensor parallelism; the others only by its sequence parallelism

    def bytes(self, length: int, batch: int, width: int, heads: int) -> int:
        return self.sbh * length * batch * width + self.ass * heads * length**2 * batch


def activation_terms() -> list[Term]:
    """The layer of Korthikanti et al. 2022: LayerNorm, GELU, dropout in three places, fp16."""
    return [
        Term("input of the first norm", "norm1", sbh=2, cut=False),
        Term("input of the Q, K, V projections", "attention.q", sbh=2, cut=False),
        Term("Q", "attention", sbh=2),
        Term("K", "attention", sbh=2),
        Term("V", "attention", sbh=2),
        Term("output of the softmax", "attention", ass=2, core=True),
        Term("dropout mask of the softmax", "attention", ass=1, core=True),
        Term("probabilities after dropout", "attention", ass=2, core=True),
        Term("input of the output projection", "attention.out", sbh=2),
        Term("dropout mask after the projection", "dropout1", sbh=1, cut=False),
        Term("input of the second norm", "norm2", sbh=2, cut=False),
        Term("input of the up projection", "mlp.up", sbh=2, cut=False),
        Term("input of the GELU", "mlp", sbh=8),
        Term("input of the down projection", "mlp.down", sbh=8),
        Term("dropout mask after the MLP", "dropout2", sbh=1, cut=False),
    ]


def activation_bytes(
    length, batch, width, heads, *, tensor_parallel=1, sequence_parallel=False, recompute="none"
) -> float:
    """Bytes of one layer on one rank: all five rows of the paper's table 2.

    recompute "selective" drops the core of the attention, "full" everything but the layer's input."""
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute = {recompute!r}; use 'none', 'selective' or 'full'")
    sizes = dict(length=length, batch=batch, width=width, heads=heads, tensor_parallel=tensor_parallel)
    require_positive_ints(1 << 40, **sizes)
    if heads % tensor_parallel or width % heads:
        raise ValueError(
            f"width={width}, heads={heads}, tensor_parallel={tensor_parallel}: heads divide the width, "
            "and tensor_parallel the heads"
        )
    terms = activation_terms()[: 1 if recompute == "full" else None]
    return sum(
        term.bytes(length, batch, width, heads) / (tensor_parallel if term.cut or sequence_parallel else 1)
        for term in terms
        if not (term.core and recompute == "selective")
    )


def latent_attention_bytes_per_token(config: GPTConfig, *, recompute=False, element_bytes=2) -> int:
    """Kept per token by norm and latent attention of one layer, with a core that keeps its inputs only.

    DeepSeek-V3 runs norms and up-projections again in backward: not Q, K, V of 128 heads are kept but the
    latents they are made of, a quarter of the bytes. This helps it to train without tensor parallelism. Left
    out, below 1 %: angles of RoPE, one number per norm; and the log-sum-exp of a fused core, 4 bytes per
    head."""
    require_positive_ints(element_bytes=element_bytes)
    D, H, K, R = config.d_model, config.num_heads, config.head_dim, config.rope_head_dim
    outputs = D + config.query_latent + config.kv_latent  # of three norms: inputs of the projections
    inputs = outputs + R  # of the first norm and of the latents' norms
    wide = 2 * H * (K + R) + H * K  # Q, K and V
    return element_bytes * (inputs + H * K + (0 if recompute else outputs + wide))
