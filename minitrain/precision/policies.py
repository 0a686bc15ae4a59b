"""Policies: which number has how many bits, as plain values by name (`Strategy.precision`).

                                  weights  gradients  master  moments   bytes per parameter
    float32                          4         4         -      4 + 4         16
    bfloat16, float16                2         2         4      4 + 4         16    float16 scales its loss
    bfloat16_main_grads              2         4         4      4 + 4         18    Megatron-LM's main_grad
    bfloat16_short_moments           2         4         4      2 + 2         14    DeepSeek-V3
    bfloat16_jit                     4         2         -      4 + 4         14    copied when it is used
    bfloat16_stochastic              2         2         -      4 + 4         12    rounded by chance
    bfloat16_stochastic_short_mean   2         2         -      2 + 4         10
    bfloat16_stochastic_short        2         2         -      2 + 2          8
    fp8_lm                           2         1         -      1 + 2          6    scales for tensors

Activations have the dtype of the weights, or of their copies; products, norms, softmax and the loss add up in
float32 at least, whatever the policy. `gradients` is what microbatches add up in and what travels. No torch:
planners and the command line read this. Micikevicius et al. 2018, arXiv:1710.03740, section 3; Kalamkar et
al. 2019 (bfloat16), arXiv:1905.12322; DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.3. Differs from
autocast: one dtype for all operators of a layer, chosen where the model is built.
"""

from dataclasses import dataclass, replace

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FIRST_SCALE = 2.0**16  # of a policy that scales its loss


@dataclass(frozen=True)
class Policy:
    weights: str  # of what is kept, and of activations where forward and backward read it as it is
    gradients: str  # of `.grad`
    master: str | None = None  # a copy that is updated; None: the weights are
    moments: tuple[str, str] = ("float32", "float32")  # of Adam: mean of gradients, of their squares
    scales: bool = False  # whether gradients would underflow without a factor on the loss
    by_chance: bool = False  # how bfloat16 weights without a master, and moments, are rounded
    scaled: bool = False  # whether tensors have a scale each, and weights and moments are codes (fp8_lm.py)
    copies: str | None = None  # what forward and backward read, if it is made just in time, and activations

    activations = property(lambda self: self.copies or self.weights)
    narrow = property(lambda self: BYTES[self.activations] < 4)  # forward and backward compute in 16 bits
    bytes_per_parameter = property(lambda self: sum(self.state_bytes))

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Per parameter: of weights, of gradients, of what the optimizer keeps."""
        kept = (*self.moments, *((self.master,) if self.master else ()))
        return BYTES[self.weights], BYTES[self.gradients], sum(BYTES[dtype] for dtype in kept)


_STOCHASTIC = Policy("bfloat16", "bfloat16", by_chance=True)
_FP8_LM = "float8_e4m3fn", None, ("float8_e4m3fn", "float16")
POLICIES = {
    "float32": Policy("float32", "float32"),
    "bfloat16": Policy("bfloat16", "bfloat16", "float32"),
    "float16": Policy("float16", "float16", "float32", scales=True),
    "float64": Policy("float64", "float64", moments=("float64", "float64")),
    "bfloat16_main_grads": Policy("bfloat16", "float32", "float32"),
    "bfloat16_short_moments": Policy("bfloat16", "float32", "float32", ("bfloat16", "bfloat16")),
    "bfloat16_jit": Policy("float32", "bfloat16", copies="bfloat16"),
    "fp8_lm": Policy("float16", *_FP8_LM, scaled=True, copies="bfloat16"),
    "bfloat16_stochastic": _STOCHASTIC,
    "bfloat16_stochastic_short_mean": replace(_STOCHASTIC, moments=("bfloat16", "float32")),
    "bfloat16_stochastic_short": replace(_STOCHASTIC, moments=("bfloat16", "bfloat16")),
}

# How the products of a block are computed (`Strategy.products`): attention's projections, MLPs, experts.
# Tables, norms, routers, attention itself and the head keep the precision of the policy.
PRODUCTS = {
    "plain": "in the dtype of the weights",
    "fp8_tensor": "E4M3, gradients E5M2, one scale for each tensor",
    "fp8_delayed": "the same, scaled by the largest number of 16 steps before",
    "fp8_e4m3": "E4M3 for gradients too, one scale for each tensor",
    "fp8_rows": "E4M3, one scale for each row of what is summed over",
    "fp8_tiles": "E4M3, 1x128 for activations and gradients, 128x128 for weights (DeepSeek-V3)",
    "fp8_tiles_14": "the same, sums of 128 products in 14 bits, as Hopper's tensor cores add: slow",
    "mxfp8": "E4M3 in blocks of 32 that share a power of two",
    "mxfp6": "E2M3 in blocks of 32 that share a power of two",
    "mxfp4": "E2M1 in blocks of 32 that share a power of two",
    "nvfp4": "E2M1 in blocks of 16 that share an E4M3 scale",
    "int8": "INT8 in blocks of 32x32 (Jetfire)",
    "fp8_wang": "E5M2 without scales, sums with 9 mantissa bits in chunks of 64: slow (Wang 2018)",
    "hfp8": "(1,4,3) forward, E5M2 backward, without scales (Sun 2019)",
    "bitnet": "weights of one bit, tokens of INT8, plain gradients (BitNet)",
    "bitnet_b158": "weights -1, 0 and 1, tokens of INT8, plain gradients (BitNet b1.58)",
    "int4": "INT4 after a Hadamard matrix; gradients split in two and sampled (Xi et al. 2023)",
}
