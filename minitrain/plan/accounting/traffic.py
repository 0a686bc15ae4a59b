"""How many bytes: of text; and on the wire, when layers are gathered (ZeRO-3) or cut (tensor parallelism).

    ZeRO-3    3 · 2·P · (n-1)/n              per device and step: gather twice, reduce-scatter once
    TP        8·(t-1)/t · tokens·h · 2 · L   per device and step: four all-reduces per layer

ZeRO-3's bytes do not depend on the batch, TP's do: beyond `crossover_tokens` per step, ZeRO-3 sends less. (It
then needs that batch on every device, and overlap, or a link fast enough for all of it.) Rajbhandari et al.
2020 (ZeRO), arXiv:1910.02054, section 7.2; Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
Differs: ring volumes with their (n-1)/n, which ZeRO's 3·P drops.
"""

from minitrain.ranks.checks import require_nonnegative, require_positive, require_positive_ints


def token_bytes(vocab: int) -> int:
    """Whole bytes that hold any token id: 2 up to a vocabulary of 65,536, 3 beyond."""
    require_positive_ints(1 << 62, vocab=vocab)
    return max(1, -(-(vocab - 1).bit_length() // 8))


def text_bytes(tokens: float, bytes_per_token: int) -> float:
    """Bytes of a tokenised text."""
    require_nonnegative(tokens=tokens, bytes_per_token=bytes_per_token)
    return tokens * bytes_per_token


def zero3_bytes_per_step(parameters: float, devices: int, element_bytes: int = 2) -> float:
    """Bytes each device sends: 3 times the parameters, whatever the batch."""
    require_nonnegative(parameters=parameters, element_bytes=element_bytes)
    require_positive_ints(devices=devices)
    return 3 * element_bytes * parameters * (devices - 1) / devices


def tensor_parallel_bytes_per_step(tokens, width, num_layers, tensor_parallel, element_bytes=2) -> float:
    """Bytes each device sends: 4 all-reduces of tokens·h per layer, each 2·(t-1)/t of that."""
    require_nonnegative(tokens=tokens, width=width, num_layers=num_layers, element_bytes=element_bytes)
    require_positive_ints(tensor_parallel=tensor_parallel)
    return 8 * (tensor_parallel - 1) / tensor_parallel * tokens * width * element_bytes * num_layers


def crossover_tokens(parameters, width: int, num_layers: int, tensor_parallel: int, devices: int) -> float:
    """Tokens per step at which both send the same: 3·P·(n-1)/n / (8·(t-1)/t · h · L)."""
    require_positive(parameters=parameters)
    require_positive_ints(width=width, num_layers=num_layers, devices=devices)
    if not isinstance(tensor_parallel, int) or tensor_parallel < 2:
        raise ValueError(f"tensor_parallel={tensor_parallel}: one rank sends nothing; use 2 or more")
    per_token = 8 * (tensor_parallel - 1) / tensor_parallel * width * num_layers
    return 3 * parameters * (devices - 1) / devices / per_token
