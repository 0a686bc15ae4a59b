# %% wrong="held_slices" fails="inside the node first" why="G is cut in rank order, as in one flat group"
def held_slices(rank, per_node, nodes, word, size):
    place, part, piece = rank % per_node, size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (rank * piece, (rank + 1) * piece),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="inside the node" why="node and place are exchanged: neighbours are counted across nodes"
def held_slices(rank, per_node, nodes, word, size):
    place, node = divmod(rank, nodes)
    part, piece = size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (place * part + node * piece, place * part + (node + 1) * piece),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="size of a slice" why="cut across nodes first: I is over the nodes"
def held_slices(rank, per_node, nodes, word, size):
    node, place = divmod(rank, per_node)
    part, piece = size // nodes, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (node * part, (node + 1) * part),
        "G": (node * part + place * piece, node * part + (place + 1) * piece),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="size of a slice" why="the word is read from its end: the optimizer state first"
def held_slices(rank, per_node, nodes, word, size):
    node, place = divmod(rank, per_node)
    part, piece = size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (place * part + node * piece, place * part + (node + 1) * piece),
    }
    return [slices[letter] for letter in reversed(word)]


# %% wrong="held_slices" fails="size of a slice" why="off by one: stop is the last element"
def held_slices(rank, per_node, nodes, word, size):
    node, place = divmod(rank, per_node)
    part, piece = size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size - 1),
        "I": (place * part, (place + 1) * part - 1),
        "G": (place * part + node * piece, place * part + (node + 1) * piece - 1),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="every element once" why="the second cut is by place again: every node holds the same"
def held_slices(rank, per_node, nodes, word, size):
    place, part, piece = rank % per_node, size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (place * part, place * part + piece),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="then across nodes" why="the last node holds the front of the place's part"
def held_slices(rank, per_node, nodes, word, size):
    node, place = divmod(rank, per_node)
    part, piece = size // per_node, size // (per_node * nodes)
    start = place * part + (nodes - 1 - node) * piece
    slices = {"N": (0, size), "I": (place * part, (place + 1) * part), "G": (start, start + piece)}
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="every element once" why="pieces of G overlap: the next node begins one element later"
def held_slices(rank, per_node, nodes, word, size):
    node, place = divmod(rank, per_node)
    part, piece = size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (place * part + node, place * part + node + piece),
    }
    return [slices[letter] for letter in word]


# %% wrong="held_slices" fails="own work" around="import" why="the choices of the package"
from minitrain.data_parallel.choices import Cluster, paro


def held_slices(rank, per_node, nodes, word, size):
    pieces = paro(word, Cluster(per_node * nodes, per_node)).factors
    return [(rank % n * size // n, (rank % n + 1) * size // n) for n in pieces]


# %% wrong="held_slices" fails="three slices" around="empty" why="nobody holds anything"
def held_slices(rank, per_node, nodes, word, size):
    return []


# %% wrong="held_slices" fails="size of a slice" around="constants" why="two ranks a node, three nodes, 24 elements"
def held_slices(rank, per_node, nodes, word, size):
    first = rank % 2 * 12 + rank // 2 * 4
    slices = {"N": (0, 24), "I": (rank % 2 * 12, rank % 2 * 12 + 12), "G": (first, first + 4)}
    return [slices[letter] for letter in word]


# %% wrong="hybrid_gradient" fails="bytes between nodes" around="half" why="the hops are exchanged: the whole flat gradient crosses nodes"
def hybrid_gradient(flat, intra, inter):
    return collectives.reduce_scatter(collectives.all_reduce(flat, inter), intra)


# %% wrong="hybrid_gradient" fails="bytes between nodes" around="half" why="an all-reduce over all ranks, and then a slice"
def hybrid_gradient(flat, intra, inter):
    return (
        collectives.all_reduce(flat, torch.distributed.group.WORLD)
        .chunk(intra.size())[intra.rank()]
        .clone()
    )


# %% wrong="hybrid_gradient" fails="bytes between nodes" why="only right on two nodes: shards of all nodes are gathered and added up"
def hybrid_gradient(flat, intra, inter):
    shard = collectives.reduce_scatter(flat, intra)
    return collectives.all_gather(shard[None], inter).sum(0)


# %% wrong="hybrid_gradient" fails="bytes between nodes" why="the first rank of a node speaks for all: its links carry the whole node"
def hybrid_gradient(flat, intra, inter):
    shards = collectives.all_gather(collectives.reduce_scatter(flat, intra), intra)
    if intra.rank() == 0:
        shards = collectives.all_reduce(shards, inter)
    return collectives.broadcast(shards, 0, intra).chunk(intra.size())[intra.rank()].clone()


# %% wrong="hybrid_gradient" fails="bytes inside the node" why="an all-reduce inside the node, of which each rank uses a part"
def hybrid_gradient(flat, intra, inter):
    shard = collectives.all_reduce(flat, intra).chunk(intra.size())[intra.rank()]
    return collectives.all_reduce(shard, inter)


# %% wrong="hybrid_gradient" fails="shard of the sum" why="only inside the node: the replicas drift apart"
def hybrid_gradient(flat, intra, inter):
    return collectives.reduce_scatter(flat, intra)


# %% wrong="hybrid_gradient" fails="shard of the sum" why="a mean over the nodes"
def hybrid_gradient(flat, intra, inter):
    return collectives.all_reduce(collectives.reduce_scatter(flat, intra), inter) / inter.size()


# %% wrong="hybrid_gradient" fails="shard of the sum" why="the groups are exchanged: cut across nodes, added up inside"
def hybrid_gradient(flat, intra, inter):
    return collectives.all_reduce(collectives.reduce_scatter(flat, inter), intra)


# %% wrong="hybrid_gradient" fails="shard of the sum" why="cut over all ranks: ZeRO-3's shard"
def hybrid_gradient(flat, intra, inter):
    return collectives.reduce_scatter(collectives.reduce_scatter(flat, intra), inter)


# %% wrong="hybrid_gradient" fails="bytes inside the node" around="half" why="the node gathers all its gradients, and everyone adds up"
def hybrid_gradient(flat, intra, inter):
    total = collectives.all_gather(flat[None], intra).sum(0)
    return collectives.all_reduce(total.chunk(intra.size())[intra.rank()], inter)


# %% wrong="hybrid_gradient" fails="shard of the sum" around="half" why="shards cross nodes in float32"
def hybrid_gradient(flat, intra, inter):
    return collectives.all_reduce(collectives.reduce_scatter(flat, intra).float(), inter).to(flat)


# %% wrong="hybrid_gradient" fails="bytes between nodes" around="half" why="rank 0 adds up for everybody"
def hybrid_gradient(flat, intra, inter):
    world = torch.distributed.group.WORLD
    if world.rank() > 0:
        collectives.send(flat, 0, world)
    total = flat.clone()
    for source in range(1, world.size()) if world.rank() == 0 else ():
        total += collectives.receive(flat, source, world)
    return collectives.broadcast(total, 0, world).chunk(intra.size())[intra.rank()].clone()


# %% wrong="hybrid_gradient" fails="shard of the sum" around="redefine" why="all ranks are one node, says the answer"
def hybrid_gradient(flat, intra, inter):
    return collectives.reduce_scatter(flat, intra)


def levels(per_node, group):
    return [group, group]


def sent_inside_and_across(outcome, per_node):
    return [[0] * 16, [0] * 16]


# %% wrong="hybrid_gradient" fails="own work" around="import" why="the two hops of the package"
def hybrid_gradient(flat, intra, inter):
    from minitrain.data_parallel.hybrid import HybridBuffer

    return HybridBuffer([flat], intra, inter).reduce()


# %% wrong="hybrid_gradient" fails="shard of the sum" around="empty" why="zeros of the right shape"
def hybrid_gradient(flat, intra, inter):
    return flat.new_zeros(flat.numel() // intra.size())


# %% wrong="hierarchical_all_gather" fails="rank order" why="no third step: the pieces lie place by place"
def hierarchical_all_gather(shard, intra, inter):
    return collectives.all_gather(collectives.all_gather(shard, inter), intra)


# %% wrong="hierarchical_all_gather" fails="rank order" why="reordered as if nodes were places: right on two nodes of two, not on three"
def hierarchical_all_gather(shard, intra, inter):
    pieces = collectives.all_gather(collectives.all_gather(shard, inter), intra).view(
        inter.size(), intra.size(), *shard.shape
    )
    return pieces.transpose(0, 1).reshape(-1, *shard.shape[1:])


# %% wrong="hierarchical_all_gather" fails="bytes between nodes" around="half" why="inside first: no reordering, but every rank brings the whole node across"
def hierarchical_all_gather(shard, intra, inter):
    return collectives.all_gather(collectives.all_gather(shard, intra), inter)


# %% wrong="hierarchical_all_gather" fails="bytes between nodes" around="half" why="one flat all-gather over all ranks"
def hierarchical_all_gather(shard, intra, inter):
    return collectives.all_gather(shard, torch.distributed.group.WORLD)


# %% wrong="hierarchical_all_gather" fails="bytes between nodes" why="a flat ring in rank order: the last rank of a node sends p-1 shards"
def hierarchical_all_gather(shard, intra, inter):
    group = torch.distributed.group.WORLD
    n, rank = group.size(), group.rank()
    pieces = {rank: shard}
    for step in range(n - 1):
        sending = collectives.send(pieces[(rank - step) % n], (rank + 1) % n, group, async_op=True)
        pieces[(rank - step - 1) % n] = collectives.receive(
            torch.empty_like(shard), (rank - 1) % n, group
        )
        sending.wait()
    return torch.cat([pieces[other] for other in range(n)])


# %% wrong="hierarchical_all_gather" fails="all ranks send across" why="the first rank of a node goes across for all"
def hierarchical_all_gather(shard, intra, inter):
    whole = collectives.all_gather(shard, intra)
    rows = [whole.shape[0] * inter.size(), *shard.shape[1:]]
    whole = collectives.all_gather(whole, inter) if intra.rank() == 0 else shard.new_empty(rows)
    return collectives.broadcast(whole, 0, intra)


# %% wrong="hierarchical_all_gather" fails="bytes inside the node" why="inside the node an all-reduce of pieces between zeros"
def hierarchical_all_gather(shard, intra, inter):
    of_the_place = collectives.all_gather(shard, inter).view(inter.size(), *shard.shape)
    whole = of_the_place.new_zeros(inter.size(), intra.size(), *shard.shape)
    whole[:, intra.rank()] = of_the_place
    return collectives.all_reduce(whole, intra).view(-1, *shard.shape[1:])


# %% wrong="hierarchical_all_gather" fails="all shards" why="across only: the neighbours are forgotten"
def hierarchical_all_gather(shard, intra, inter):
    return collectives.all_gather(shard, inter)


# %% wrong="hierarchical_all_gather" fails="own work" around="import" why="the gather of the package"
from minitrain.data_parallel.hierarchical_gather import hierarchical_all_gather


# %% wrong="hierarchical_all_gather" fails="all shards" around="half" why="shards cross nodes in float32"
def hierarchical_all_gather(shard, intra, inter):
    of_the_place = collectives.all_gather(shard.float(), inter).to(shard)
    pieces = collectives.all_gather(of_the_place, intra)
    pieces = pieces.view(intra.size(), inter.size(), *shard.shape)
    return pieces.transpose(0, 1).reshape(-1, *shard.shape[1:])


# %% wrong="hierarchical_all_gather" fails="all shards" around="constants" why="the shards of the visible checks"
def hierarchical_all_gather(shard, intra, inter):
    ranks = torch.arange(intra.size() * inter.size()).to(shard)
    return torch.cat([torch.full_like(shard, rank) for rank in ranks])


# %% wrong="hierarchical_all_gather" fails="all shards" around="empty" why="no shards at all"
def hierarchical_all_gather(shard, intra, inter):
    return shard.new_empty(0, *shard.shape[1:])


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
