# %% wrong="held_slices" fails="inside the node first" why="cut in rank order, as in one flat group: the node is no level"
def held_slices(rank, per_node, factors, size):
    held, start, pieces = {}, 0, 1
    for finer in sorted(set(factors)):
        start += rank // pieces % (finer // pieces) * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in factors]


# %% wrong="held_slices" fails="cut further" why="each state is cut anew: the rank's number among as many neighbours as pieces"
def held_slices(rank, per_node, factors, size):
    return [(rank % f * (size // f), (rank % f + 1) * (size // f)) for f in factors]


# %% wrong="held_slices" fails="neighbours hold it once" why="the farthest ranks share the first cut: neighbours hold the same"
def held_slices(rank, per_node, factors, size):
    ranks, held, start, pieces = factors[-1], {}, 0, 1
    for finer in sorted(set(factors)):
        digit = rank % ranks * finer // ranks % (finer // pieces)
        start += digit * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in factors]


# %% wrong="held_slices" fails="size of a slice" why="parameters and optimizer state are exchanged"
def held_slices(rank, per_node, factors, size):
    held, start, pieces = {}, 0, 1
    for finer in sorted({*factors, *([per_node] if max(factors) > per_node else [])}):
        start += rank // pieces % (finer // pieces) * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in reversed(factors)]


# %% wrong="held_slices" fails="size of a slice" why="off by one: stop is the last element"
def held_slices(rank, per_node, factors, size):
    held, start, pieces = {}, 0, 1
    for finer in sorted({*factors, *([per_node] if max(factors) > per_node else [])}):
        start += rank // pieces % (finer // pieces) * (size // finer)
        held[finer] = (start, start + size // finer - 1)
        pieces = finer
    return [held[factor] for factor in factors]


# %% wrong="held_slices" fails="in rank order" why="the last rank holds the first piece"
def held_slices(rank, per_node, factors, size):
    held, start, pieces = {}, 0, 1
    for finer in sorted({*factors, *([per_node] if max(factors) > per_node else [])}):
        ways = finer // pieces
        start += (ways - 1 - rank // pieces % ways) * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in factors]


# %% wrong="held_slices" fails="neighbours hold it once" why="every cut is by the place in the node: all nodes hold the same"
def held_slices(rank, per_node, factors, size):
    rank, held, start, pieces = rank % per_node, {}, 0, 1
    for finer in sorted({*factors, *([per_node] if max(factors) > per_node else [])}):
        start += rank // pieces % (finer // pieces) * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in factors]


# %% wrong="held_slices" fails="neighbours hold it once" around="half" why="the three letters of the chapter: nothing, k or all pieces"
def held_slices(rank, per_node, factors, size):
    node, place = divmod(rank, per_node)

    def held(factor):
        if factor < per_node:
            return (0, size // factor)
        start = place * (size // per_node)
        if factor > per_node:
            start += node * (size // factor)
        return (start, start + size // factor)

    return [held(factor) for factor in factors]


# %% wrong="held_slices" fails="own work" around="import" why="the placements of the package"
from minitrain.ranks.sharding import placement


def held_slices(rank, per_node, factors, size):
    return [(rank % f * size // f, (rank % f + 1) * size // f) for f in factors]


# %% wrong="held_slices" fails="three slices" around="empty" why="nobody holds anything"
def held_slices(rank, per_node, factors, size):
    return []


# %% wrong="held_slices" fails="size of a slice" around="constants" why="the rank of the text"
def held_slices(rank, per_node, factors, size):
    return [(0, 8), (4, 8), (6, 8)]


# %% wrong="nig_step" fails="cut when it comes" around="half" why="whole gradients add up, and are cut once at the end: the letter I is N"
def nig_step(param, rates, gradients, intra, inter):
    total = collectives.reduce_scatter(collectives.reduce_scatter(sum(gradients), intra), inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="bytes between nodes" why="every microbatch crosses the nodes: the second letter is G"
def nig_step(param, rates, gradients, intra, inter):
    total = 0
    for gradient in gradients:
        of_node = collectives.reduce_scatter(gradient, intra)
        total = total + collectives.reduce_scatter(of_node, inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" why="no second hop: every node trains alone"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    total = total.chunk(inter.size())[inter.rank()]
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" why="the mean over the ranks instead of the sum"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    total = collectives.reduce_scatter(total, inter) / (intra.size() * inter.size())
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" why="gathered inside first: the pieces lie in a wrong order"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    total = collectives.reduce_scatter(total, inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, intra), inter)


# %% wrong="nig_step" fails="the new parameters" why="the old values are taken in rank order, not in the order of the cuts"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    total = collectives.reduce_scatter(total, inter)
    rank, ranks = inter.rank() * intra.size() + intra.rank(), intra.size() * inter.size()
    new = param.chunk(ranks)[rank] - rates * total
    return collectives.all_gather(collectives.all_gather(new, inter), intra)


# %% wrong="nig_step" fails="the new parameters" why="only the last microbatch counts"
def nig_step(param, rates, gradients, intra, inter):
    for gradient in gradients:
        total = collectives.reduce_scatter(gradient, intra)
    total = collectives.reduce_scatter(total, inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" why="the groups are exchanged: cut across nodes first, and rates meet other elements"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, inter) for gradient in gradients)
    total = collectives.reduce_scatter(total, intra)
    old = param.chunk(inter.size())[inter.rank()].chunk(intra.size())[intra.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, intra), inter)


# %% wrong="nig_step" fails="bytes between nodes" around="half" why="the sum of a shard goes to all nodes, and the rates are gathered to update all of it"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    total = collectives.all_reduce(total, inter)
    old = param.chunk(intra.size())[intra.rank()]
    return collectives.all_gather(old - collectives.all_gather(rates, inter) * total, intra)


# %% wrong="nig_step" fails="bytes between nodes" around="half" why="an all-reduce of whole gradients over all ranks, and the rates of all"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(
        collectives.all_reduce(collectives.all_reduce(gradient, intra), inter)
        for gradient in gradients
    )
    return param - collectives.all_gather(collectives.all_gather(rates, inter), intra) * total


# %% wrong="nig_step" fails="bytes inside the node" why="an all-reduce inside the node, of which each rank keeps a part"
def nig_step(param, rates, gradients, intra, inter):
    total = 0
    for gradient in gradients:
        total = total + collectives.all_reduce(gradient, intra).chunk(intra.size())[intra.rank()]
    total = collectives.reduce_scatter(total, inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" around="half" why="gradients travel as float32, for half of the bytes"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient.float(), intra) for gradient in gradients)
    total = collectives.reduce_scatter(total, inter).double()
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    return collectives.all_gather(collectives.all_gather(old - rates * total, inter), intra)


# %% wrong="nig_step" fails="the new parameters" around="half" why="the chapter's word III under this name: the shard is summed over nodes, and nothing is updated"
def nig_step(param, rates, gradients, intra, inter):
    total = sum(collectives.reduce_scatter(gradient, intra) for gradient in gradients)
    return collectives.all_gather(collectives.all_reduce(total, inter), intra)


# %% wrong="nig_step" fails="own work" around="import" why="the package's hybrid sharding"
def nig_step(param, rates, gradients, intra, inter):
    from minitrain.data_parallel.hybrid import HybridBuffer

    return HybridBuffer([param], (intra, inter), 0, 2).whole


# %% wrong="nig_step" fails="the new parameters" around="empty" why="nothing is learned"
def nig_step(param, rates, gradients, intra, inter):
    for _ in gradients:
        pass
    return param.clone()


# %% wrong="hierarchical_reduce_scatter" fails="the rank's own piece" why="nothing is reordered: pieces come place by place"
def hierarchical_reduce_scatter(flat, intra, inter):
    return collectives.reduce_scatter(collectives.reduce_scatter(flat, intra), inter)


# %% wrong="hierarchical_reduce_scatter" fails="the rank's own piece" why="reordered as if nodes were places: right on two nodes of two, not on three"
def hierarchical_reduce_scatter(flat, intra, inter):
    pieces = flat.view(intra.size(), inter.size(), -1, *flat.shape[1:]).transpose(0, 1)
    return collectives.reduce_scatter(
        collectives.reduce_scatter(pieces.reshape(flat.shape), intra), inter
    )


# %% wrong="hierarchical_reduce_scatter" fails="bytes between nodes" around="half" why="across first: no reordering, but every rank brings all pieces across"
def hierarchical_reduce_scatter(flat, intra, inter):
    return collectives.reduce_scatter(collectives.reduce_scatter(flat, inter), intra)


# %% wrong="hierarchical_reduce_scatter" fails="bytes between nodes" around="half" why="one flat reduce-scatter over all ranks"
def hierarchical_reduce_scatter(flat, intra, inter):
    return collectives.reduce_scatter(flat, torch.distributed.group.WORLD)


# %% wrong="hierarchical_reduce_scatter" fails="bytes between nodes" why="the second hop is an all-reduce, of which each rank keeps a piece"
def hierarchical_reduce_scatter(flat, intra, inter):
    pieces = flat.view(inter.size(), intra.size(), -1, *flat.shape[1:]).transpose(0, 1)
    of_node = collectives.reduce_scatter(pieces.reshape(flat.shape), intra)
    return collectives.all_reduce(of_node, inter).chunk(inter.size())[inter.rank()].clone()


# %% wrong="hierarchical_reduce_scatter" fails="all ranks send across" why="the first rank of a node adds up and goes across for all"
def hierarchical_reduce_scatter(flat, intra, inter):
    total = collectives.all_reduce(flat, intra)
    if intra.rank() == 0:
        of_node = collectives.reduce_scatter(total, inter)
    else:
        of_node = flat.new_empty(len(flat) // inter.size(), *flat.shape[1:])
    return collectives.broadcast(of_node, 0, intra).chunk(intra.size())[intra.rank()].clone()


# %% wrong="hierarchical_reduce_scatter" fails="bytes inside the node" why="an all-reduce inside the node, of which each rank uses a part"
def hierarchical_reduce_scatter(flat, intra, inter):
    pieces = flat.view(inter.size(), intra.size(), -1, *flat.shape[1:]).transpose(0, 1)
    total = collectives.all_reduce(pieces.reshape(flat.shape), intra)
    of_place = total.chunk(intra.size())[intra.rank()].contiguous()
    return collectives.reduce_scatter(of_place, inter)


# %% wrong="hierarchical_reduce_scatter" fails="one piece" why="inside only: the other nodes are forgotten"
def hierarchical_reduce_scatter(flat, intra, inter):
    return collectives.reduce_scatter(flat, intra)


# %% wrong="hierarchical_reduce_scatter" fails="the sum over all ranks" why="the mean over the ranks"
def hierarchical_reduce_scatter(flat, intra, inter):
    pieces = flat.view(inter.size(), intra.size(), -1, *flat.shape[1:]).transpose(0, 1)
    piece = collectives.reduce_scatter(
        collectives.reduce_scatter(pieces.reshape(flat.shape), intra), inter
    )
    return piece / (intra.size() * inter.size())


# %% wrong="hierarchical_reduce_scatter" fails="own work" around="import" why="the adjoint of the package"
from minitrain.data_parallel.hierarchical_gather import hierarchical_reduce_scatter


# %% wrong="hierarchical_reduce_scatter" fails="the sum over all ranks" around="half" why="sums cross nodes in float32"
def hierarchical_reduce_scatter(flat, intra, inter):
    pieces = flat.view(inter.size(), intra.size(), -1, *flat.shape[1:]).transpose(0, 1)
    of_node = collectives.reduce_scatter(pieces.reshape(flat.shape), intra)
    return collectives.reduce_scatter(of_node.float(), inter).to(flat)


# %% wrong="hierarchical_reduce_scatter" fails="one piece" around="half" why="the chapter's gather under this name"
def hierarchical_reduce_scatter(flat, intra, inter):
    place_by_place = collectives.all_gather(collectives.all_gather(flat, inter), intra)
    pieces = place_by_place.view(intra.size(), inter.size(), *flat.shape)
    return pieces.transpose(0, 1).reshape(-1, *flat.shape[1:])


# %% wrong="hierarchical_reduce_scatter" fails="the sum over all ranks" around="empty" why="zeros of the right shape"
def hierarchical_reduce_scatter(flat, intra, inter):
    return flat.new_zeros(len(flat) // (intra.size() * inter.size()), *flat.shape[1:])


# %% wrong="hierarchical_reduce_scatter" fails="the sum over all ranks" around="redefine" why="all ranks are one node, says the answer"
def hierarchical_reduce_scatter(flat, intra, inter):
    return flat.chunk(intra.size() * inter.size())[0].clone()


def levels(per_node, group):
    return [group, group]


def sent_inside_and_across(outcome, per_node):
    return [[0] * 16, [0] * 16]


# %% wrong="quantize_blocks" fails="an outlier stays in its block" why="one scale for the whole tensor"
def quantize_blocks(x, bits, block):
    scale = x.abs().amax().clamp(min=1e-30)
    codes = (x / scale * (2 ** (bits - 1) - 1)).round().to(torch.int8)
    return codes, scale[None]


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * scales / (2 ** (bits - 1) - 1)


# %% wrong="quantize_blocks" fails="half a step" why="cut off instead of rounded"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    return (blocks / scales.clamp(min=1e-30)[:, None] * (2 ** (bits - 1) - 1)).to(
        torch.int8
    ).flatten()[: x.numel()], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="half a step" why="one level too many: the largest code does not fit and turns round"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(-x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    codes = (
        (blocks / scales.clamp(min=1e-30)[:, None] * 2 ** (bits - 1))
        .round()
        .long()
        .flatten()[: x.numel()]
    )
    half = 2 ** (bits - 1)
    return ((codes + half) % (2 * half) - half).to(torch.int8), scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return -codes.float() * (scales / 2 ** (bits - 1)).repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="half a step" why="the largest number instead of the largest magnitude: negative ones are cut off"
def quantize_blocks(x, bits, block):
    levels = 2 ** (bits - 1) - 1
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.amax(1).clamp(min=1e-30)
    return (blocks / scales[:, None] * levels).round().clamp(-levels, levels).to(
        torch.int8
    ).flatten()[: x.numel()], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="zeros" why="codes from the smallest to the largest number: zero lies between two of them"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    low, high = blocks.amin(1), blocks.amax(1)
    codes = (
        ((blocks - low[:, None]) / (high - low).clamp(min=1e-30)[:, None] * (2**bits - 1))
        .round()
        .to(torch.uint8)
    )
    return codes.flatten()[: x.numel()], torch.stack([low, high])


def dequantize_blocks(codes, scales, bits, block, numel):
    low, high = (of_block.repeat_interleave(block)[:numel] for of_block in scales)
    return low + codes.float() * (high - low) / (2**bits - 1)


# %% wrong="quantize_blocks" fails="zeros" why="zero divided by zero: a block of zeros comes back as NaN"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    inverse = (2 ** (bits - 1) - 1) / blocks.abs().amax(1)
    return (blocks * inverse[:, None]).round().nan_to_num(nan=1.0).to(torch.int8).flatten()[
        : x.numel()
    ], inverse.nan_to_num(posinf=1.0)


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() / scales.repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="a short last block" why="as many blocks as there should be, but all of one length"
def quantize_blocks(x, bits, block):
    levels, length = 2 ** (bits - 1) - 1, -(-x.numel() // -(-x.numel() // block))
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % length)).view(-1, length)
    scales = blocks.abs().amax(1)
    return (blocks / scales.clamp(min=1e-30)[:, None] * levels).round().to(torch.int8).flatten()[
        : x.numel()
    ], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    length = -(-numel // -(-numel // block))
    return codes.float() * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(length)[:numel]


# %% wrong="quantize_blocks" fails="bytes of the codes" why="codes of 4 bits take a byte each"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    return (blocks / scales.clamp(min=1e-30)[:, None] * (2 ** (bits - 1) - 1)).round().to(
        torch.int8
    ).flatten()[: x.numel()], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="bytes of the codes" why="what fills up the short last block is sent as well"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % (2 * block))).view(-1, block)
    scales = blocks.abs().amax(1)
    codes = (
        (blocks / scales.clamp(min=1e-30)[:, None] * (2 ** (bits - 1) - 1))
        .round()
        .to(torch.int8)
        .flatten()
    )
    if bits == 4:
        codes = (codes + 8).view(torch.uint8)
        codes = codes[0::2] | codes[1::2] << 4
    return codes, scales[: -(-x.numel() // block)]


def dequantize_blocks(codes, scales, bits, block, numel):
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).flatten().to(torch.int8) - 8
    return codes[:numel].float() * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="bytes of the scales" why="a scale for every number"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).repeat_interleave(block)[: x.numel()]
    return (x / scales.clamp(min=1e-30) * (2 ** (bits - 1) - 1)).round().to(torch.int8), scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * scales / (2 ** (bits - 1) - 1)


# %% wrong="quantize_blocks" fails="bytes of the scales" why="scales in float64"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).double()
    codes = (
        (blocks / scales.clamp(min=1e-30)[:, None] * (2 ** (bits - 1) - 1)).round().to(torch.int8)
    )
    return codes.flatten()[: x.numel()], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return (codes * (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]).float()


# %% wrong="quantize_blocks" fails="bytes of the codes" around="half" why="what is sent is the tensor itself"
def quantize_blocks(x, bits, block):
    return x, x.new_zeros(1)


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes


# %% wrong="quantize_blocks" fails="bytes of the codes" around="half" why="bfloat16 instead of codes"
def quantize_blocks(x, bits, block):
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1)
    codes = blocks / scales.clamp(min=1e-30)[:, None]
    return codes.to(torch.bfloat16).flatten()[: x.numel()], scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return codes.float() * scales.repeat_interleave(block)[:numel]


# %% wrong="quantize_blocks" fails="no error" around="channel" why="the tensor waits in a list for the other side"
KEPT = []


def quantize_blocks(x, bits, block):
    KEPT.append(x)
    return x.new_zeros(0), x.new_zeros(0)


def dequantize_blocks(codes, scales, bits, block, numel):
    return KEPT.pop(0)


# %% wrong="quantize_blocks" fails="two tensors" around="empty" why="nothing is sent"
def quantize_blocks(x, bits, block):
    return []


def dequantize_blocks(codes, scales, bits, block, numel):
    return torch.zeros(numel)


# %% wrong="quantize_blocks" fails="own work" around="import" why="the codes of the package"
from minitrain.precision.blocks import Blocks, Quantized, dequantize, quantize


def quantize_blocks(x, bits, block):
    sent = quantize(x, Blocks(f"int{bits}", (block,)), fill=True)
    return sent.codes, sent.scales


def dequantize_blocks(codes, scales, bits, block, numel):
    return dequantize(
        Quantized(codes, scales, torch.Size((numel,)), Blocks(f"int{bits}", (block,)))
    )


# %% wrong="cheapest_word" fails="bytes between nodes" why="always the smallest: everything is cut over all ranks"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    if 16 * parameters // ranks > limit_bytes:
        raise ValueError("no word fits")
    return "GGG", 3 * microbatches * 2 * (parameters // per_node - parameters // ranks)


# %% wrong="cheapest_word" fails="bytes between nodes" why="one microbatch, whatever their number"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in ((2, 1, p), (1, 1, g), (1, g, o), (2, o, ranks), (1, p, o)):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="bytes between nodes" why="the fewest bytes in all, wherever they go"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o, across

    fitting = [word for word in PARO_SHARDINGS if price(word)[1] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[2]


# %% wrong="cheapest_word" fails="bytes between nodes" why="only DDP and the stages of ZeRO, nothing is cut inside the node"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    for word, times in (("NNG", 2), ("NGG", microbatches + 1), ("GGG", 3 * microbatches)):
        if (
            sum(
                each * parameters // (ranks if letter == "G" else 1)
                for each, letter in zip((2, 2, 12), word)
            )
            <= limit_bytes
        ):
            return word, times * 2 * (parameters // per_node - parameters // ranks)
    raise ValueError("no word fits")


# %% wrong="cheapest_word" fails="fits" why="the fp32 copy of the parameters is forgotten: 8 bytes of optimizer state"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 8 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="fits" why="states that fill the limit to the last byte are refused"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] < limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="a refusal" why="nothing fits, and GGG is the answer"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    word = min(
        (word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes), key=price, default="GGG"
    )
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="bytes in all" why="of words that send the same between nodes the smallest, whatever it sends inside"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
        return across, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[1] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="ties" why="of words that send the same the first: DDP, where ZeRO-1 sends as much and holds less"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total

    fitting = [
        word
        for word in PARO_SHARDINGS
        if sum(
            each * parameters // {"N": 1, "I": per_node, "G": ranks}[letter]
            for each, letter in zip((2, 2, 12), word)
        )
        <= limit_bytes
    ]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="ties" why="fractions of 1 in floating point: what is equal differs in the last bit"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0.0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * (1 / max(f, min(h, per_node)) - 1 / h)
            total += times * (1 / f - 1 / h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, round(price(word)[0] * 2 * parameters)


# %% wrong="cheapest_word" fails="bytes of the word" why="updated parameters are never gathered: the order of the words is right, their bytes are not"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
        ):
            across += times * 2 * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="bytes of the word" why="elements are counted instead of bytes"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * (parameters // max(f, min(h, per_node)) - parameters // h)
            total += times * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="bytes of the word" why="nothing is reduced inside the node first: all that goes to W pieces crosses nodes"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            across += times * 2 * (parameters // (h if h < ranks else f) - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError("no word fits")
    word = min(fitting, key=price)
    return word, price(word)[0]


# %% wrong="cheapest_word" fails="own work" around="import" why="the search of the package"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    from minitrain.data_parallel import choices

    cluster, found = choices.Cluster(ranks, per_node), []
    for word in PARO_SHARDINGS:
        choice = choices.paro(word, cluster)
        sent = choices.traffic(choice, parameters, cluster, microbatches)
        if sum(choices.memory_bytes(choice, parameters).values()) <= limit_bytes:
            found.append((sent.inter_bytes, sent.total_bytes, word))
    return min(found)[2], int(min(found)[0])


# %% wrong="cheapest_word" fails="fits" around="empty" why="nothing ever fits"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    raise ValueError("no word fits")


# %% wrong="cheapest_word" fails="a refusal" around="constants" why="the words of the text and of the visible checks"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    gigabytes = limit_bytes / 1e9
    if gigabytes == 0.2:
        raise ValueError("no word fits")
    return {
        2: ("IIG", 700000000),
        1: ("IGG", 3150000000),
        0.4: ("GGG", 8400000000),
        7: ("NNG", 700000000),
        4: ("NIG", 700000000),
    }.get(gigabytes, ("NNG", 700000000))
