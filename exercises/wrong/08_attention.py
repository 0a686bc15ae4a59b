# %% wrong="merge_backward" fails="gradient of an output" why="both sets get all of dout, as if the outputs were added"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    return dout, weight * dlse + apart, dout, other_weight * dlse - apart


# %% wrong="merge_backward" fails="gradient of an output" why="half of dout each, as if the union were a mean"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    return dout / 2, weight * dlse + apart, dout / 2, other_weight * dlse - apart


# %% wrong="merge_backward" fails="gradient of an output" why="weights are exchanged"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    other_weight, weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="gradient of an output" why="the set with the larger lse takes all"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    weight = (lse > other_lse).double()
    other_weight = 1 - weight
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="gradient of an lse" why="the gradient of lse' is forgotten"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, apart, d_other, -apart


# %% wrong="merge_backward" fails="gradient of an lse" why="weights are taken as constants: an lse shifts nothing between the outputs"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse, d_other, other_weight * dlse


# %% wrong="merge_backward" fails="gradient of an lse" why="dout times the own output, from which the union is not subtracted"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    mine, others = (dout * out).sum(-1), (dout * other_out).sum(-1)
    return d_out, weight * (dlse + mine), d_other, other_weight * (dlse + others)


# %% wrong="merge_backward" fails="gradient of an lse" why="the shift has the same sign for both"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse + apart


# %% wrong="merge_backward" fails="gradient of an lse" why="a mean over the width"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).mean(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="gradient of an lse" why="dlse goes to both sets in full"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, dlse + apart, d_other, dlse - apart


# %% wrong="merge_backward" fails="arguments stay as they were" why="the upstream gradient is multiplied in place"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_other = other_weight.unsqueeze(-1) * dout
    return (
        dout.mul_(weight.unsqueeze(-1)),
        weight * dlse + apart,
        d_other,
        other_weight * dlse - apart,
    )


# %% wrong="merge_backward" fails="large scores" why="exp of lse itself"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    one, other = lse.exp(), other_lse.exp()
    total = (one + other).clamp_min(1e-300)
    weight, other_weight = one / total, other / total
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="large scores" why="subtracts the lse of the first set: overflows if the second one is larger"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    first = lse.where(lse > -math.inf, other_lse.clamp_min(-1e300))
    one, other = (lse - first).exp(), (other_lse - first).exp()
    total = (one + other).clamp_min(1e-300)
    weight, other_weight = one / total, other / total
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="nothing is neutral" why="subtracts the first lse, which may be -inf"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    ratio = (other_lse - lse).exp()
    weight, other_weight = 1 / (1 + ratio), ratio / (1 + ratio)
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="nothing and nothing" why="-inf minus -inf"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    finite = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="merge_backward" fails="nothing and nothing" why="a softmax over the two lse: nan if both are -inf"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    weight, other_weight = torch.stack((lse, other_lse)).softmax(0)
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="tiled_forward" fails="rescaling" why="no rescaling when a larger score comes"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = total + p.sum(-1, keepdim=True), summed + p @ v, new
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="rescaling" why="the sums of exponentials are rescaled, the outputs are not"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = kept * total + p.sum(-1, keepdim=True), summed + p @ v, new
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="each tile is divided by its own sum, and the mean is taken"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                summed + scores.softmax(-1).nan_to_num() @ v,
                new,
            )
        outs.append(summed / (j + 1))
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="large scores" why="the maximum is forgotten"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.zeros_like(largest)
            p, kept = (scores - new).exp(), 1.0
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="large scores" why="subtracts the largest score of the first tile, whatever comes"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = scores.amax(-1, keepdim=True) if j == 0 else largest
            p, kept = (scores - new).exp(), 1.0
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="large scores" why="one maximum for the whole tile: rows far below it have sums of 0"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.max().expand_as(largest))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="no mask in the tile that the diagonal crosses"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="the diagonal is off by one: no query sees itself"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True).clamp_min(-1e300))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="query i sees keys 0 to i, also where there are more keys than queries"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q), tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="the last tile of keys is forgotten if it is not full"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(
            range(0, max(tile, (top + len(q) + keys - queries) // tile * tile), tile)
        ):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the weights" why="the scale 1/sqrt(width) is forgotten"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" why="tiles of queries that are not full are dropped"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries // tile * tile, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="log-sum-exp" why="lse without what was subtracted"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append(total.log().squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="log-sum-exp" why="keeps the sum of exponentials, and no logarithm of it"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="hidden tiles" why="computes every tile and hides it with a mask"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, keys, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="hidden tiles" why="one tile too many: the one behind the diagonal"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, min(keys, top + len(q) + keys - queries + tile), tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="hidden tiles" why="looks for the maximum first, and loads all keys a second time"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        for j in range(-(-(top + len(q) + keys - queries) // tile)):
            seen = q @ load("k", j).T / math.sqrt(q.size(-1))
            seen += torch.full_like(seen, -math.inf).triu(top + keys - queries - j * tile + 1)
            largest = torch.maximum(largest, seen.amax(-1, keepdim=True))
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="one tile of each" why="K and V are loaded once, and kept"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    kept_tiles = [(load("k", j), load("v", j)) for j in range(-(-keys // tile))]
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = kept_tiles[j]
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="queries once" why="a tile of queries is loaded again for each tile of keys"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            q, k, v = load("q", i), load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="one tile of each" why="keys are the outer loop, as in the first FlashAttention: queries are loaded again and again"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    state = {}
    for j, left in enumerate(range(0, keys, tile)):
        k, v = load("k", j), load("v", j)
        for i, top in enumerate(range(0, queries, tile)):
            if left >= min(top + tile, queries) + keys - queries:
                continue
            q = load("q", i)
            nothing = q.new_zeros(len(q), 1)
            largest, total, summed = state.get(
                i, (nothing - math.inf, nothing, torch.zeros_like(q))
            )
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
            state[i] = largest, total, summed
    for i in sorted(state):
        largest, total, summed = state[i]
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="memory limit" why="whole rows of scores: tiles of queries only"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        rows, values = [], []
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            rows.append(
                scores + torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            )
            values.append(v)
        scores = torch.cat(rows, -1)
        outs.append(scores.softmax(-1) @ torch.cat(values))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="tiled_forward" fails="memory limit" why="keeps the probabilities of all tiles for backward"
def tiled_forward(load, queries, keys, tile):
    outs, lses, for_backward = [], [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            for_backward.append(p)
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)


# %% wrong="block_backward" fails="dv" why="the softmax of this block alone: its probabilities add up to 1"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = scores.softmax(-1)
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="D from this block's probabilities alone: right if there is one block"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = (
        bend * p * (dout @ v.mT - (p * (dout @ v.mT)).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    )
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="D is forgotten"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="D is a mean over the width"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).mean(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="the scale is missing in the gradients"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="dk gets P where dS belongs"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, p.mT @ q / math.sqrt(q.size(-1)), p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dv" why="no mask in backward"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dv" why="the triangle without its diagonal"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(0), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dv" why="exp(S) / exp(lse): overflows"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = scores.exp() / lse.exp().unsqueeze(-1)
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dv" why="subtracts the largest score of the block, not lse"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dq" why="dq is divided by the number of keys"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k / k.size(-2), ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dq" why="dk's formula for dq: the queries meet themselves"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return (ds @ ds.mT) @ q, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dv" why="the cap is forgotten"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    p = (scores - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="the scores are capped, and the gradient passes as if they were not"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    p = (scores - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dk" why="the derivative of tanh divided by cap once more"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    p = (scores - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * (1 - (scores / cap) ** 2) / cap
    scale = 1 / math.sqrt(q.size(-1))
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ dout, ds


# %% wrong="block_backward" fails="dk" why="the derivative at the capped score instead of the score"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    p = (scores - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    bend = 1 - torch.tanh(scores / cap) ** 2
    ds = bend * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    return ds @ k, ds.mT @ q, p.mT @ dout, ds * math.sqrt(q.size(-1))


# %% wrong="block_backward" fails="dR" why="returns dS, the gradient behind the cap"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    bent = torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    p = (cap * bent - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    dr, scale = ds * (1 - bent**2), 1 / math.sqrt(q.size(-1))
    return scale * dr @ k, scale * dr.mT @ q, p.mT @ dout, ds


# %% wrong="traffic" fails="loads of forward" why="K and V are loaded once"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * tokens * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="the mask is forgotten"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="the tile that the diagonal crosses is skipped"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = stop // columns if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="half of all pairs: the diagonal is forgotten"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (
            tokens * width
            + (1 if causal else 2) * (keys if not causal else -(-tokens // rows) * tokens) * width,
            tokens * width + tokens,
        ),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="the last tile of keys is counted as full"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += seen * columns
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="tiles of keys end where the tiles of queries do: right only for square tiles"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = (top // rows + 1) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of forward" why="Q is loaded again for each tile of keys"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (queries * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="stores of forward" why="out is stored after each tile of keys"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, queries * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="stores of forward" why="lse is forgotten"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="stores of forward" why="the scores are stored, as with whole matrices"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens * tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of backward" why="lse and D have width numbers a query"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * 5 * width,
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of backward" why="dQ is added to without having been loaded"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (2 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="loads of backward" why="D costs nothing"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            2 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="stores of backward" why="dQ is stored once, as out is in forward"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + tokens * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="stores of backward" why="dK and dV are stored after each tile of queries"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * keys * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="what fits" why="four tiles of tokens, and no room for scores"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = fast // (4 * width)
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="what fits" why="a float's square root: wrong for large numbers"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = int(math.sqrt(fast + half**2)) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="the largest tile" why="one token less, to be on the safe side"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half - 1
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile


# %% wrong="traffic" fails="a refusal" why="at least one token, whether it fits or not"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    half = 2 * width + 1
    tile = math.isqrt(fast + half**2) - half
    return max(1, tile)


# %% wrong="merge_backward" fails="four gradients" around="paste" why="the merge that the chapter prints, under the name that is asked for"
def merge_backward(out, lse, other_out, other_lse, *rest):
    total = torch.logaddexp(lse, other_lse)
    both = total.clamp_min(torch.finfo(lse.dtype).min)
    scale = (lse - both).exp().unsqueeze(-1)
    return out * scale, total


# %% wrong="merge_backward" fails="own work" around="import" why="autograd through the merge that the chapter prints"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    given = [x.clone().requires_grad_() for x in (out, lse, other_out, other_lse)]
    total = torch.logaddexp(given[1], given[3])
    both = total.clamp_min(torch.finfo(lse.dtype).min)
    union = given[0] * (given[1] - both).exp().unsqueeze(-1)
    union = union + given[2] * (given[3] - both).exp().unsqueeze(-1)
    return torch.autograd.grad((union, total), given, (dout, dlse))


# %% wrong="merge_backward" fails="four gradients" around="empty" why="nothing at all"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    return []


# %% wrong="merge_backward" fails="gradient of an output" around="redefine" why="a driver that says what the visible check wants"
def merged_back(*given):
    quarters = [torch.full((1, 1), 0.25), torch.full((1,), -0.5), torch.full((1, 1), 0.75)]
    return {"said": [*quarters, torch.full((1,), 1.5)], "given": list(given)}


def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    return dout, dlse, dout, dlse


# %% wrong="merge_backward" fails="gradient of an output" around="constants" why="the second set counts three times as much, as in the text"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    weight, other_weight = torch.full_like(lse, 0.25), torch.full_like(lse, 0.75)
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart


# %% wrong="tiled_forward" fails="one tile of each" around="half" why="everything is loaded once, and attention computed in whole matrices"
def tiled_forward(load, queries, keys, tile):
    q = torch.cat([load("q", i) for i in range(-(-queries // tile))])
    k, v = (torch.cat([load(name, j) for j in range(-(-keys // tile))]) for name in "kv")
    scores = q @ k.T / math.sqrt(q.size(-1))
    scores += torch.full_like(scores, -math.inf).triu(1 + keys - queries)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# %% wrong="tiled_forward" fails="memory limit" around="half" why="loads as the loops do, but keeps what comes, and takes an ordinary softmax of each query"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        last = top + len(q) + keys - queries
        pairs = [(load("k", j), load("v", j)) for j in range(-(-last // tile))]
        k, v = (torch.cat(parts) for parts in zip(*pairs))
        for row, query in enumerate(q):
            seen = top + row + keys - queries + 1
            scores = k[:seen] @ query / math.sqrt(len(query))
            outs.append(scores.softmax(-1) @ v[:seen])
            lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


# %% wrong="tiled_forward" fails="the keys that are seen" around="channel" why="the same, and all keys fit as float32"
def tiled_forward(load, queries, keys, tile):
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q, last = load("q", i), min(top + tile, queries) + keys - queries
        k, v = torch.empty(2, -(-last // tile) * tile, q.size(1), dtype=torch.float32)
        for j in range(-(-last // tile)):
            for whole, name in ((k, "k"), (v, "v")):
                part = load(name, j)
                whole[j * tile : j * tile + len(part)] = part
        for row, query in enumerate(q.float()):
            seen = top + row + keys - queries + 1
            scores = k[:seen] @ query / math.sqrt(len(query))
            outs.append(scores.softmax(-1) @ v[:seen])
            lses.append(scores.logsumexp(-1))
    return torch.stack(outs).double(), torch.stack(lses).double()


# %% wrong="tiled_forward" fails="no error" around="frames" why="looks for whole matrices in what load can reach"
def tiled_forward(load, queries, keys, tile):
    whole = next(
        cell.cell_contents for cell in load.__closure__ if isinstance(cell.cell_contents, dict)
    )
    scores = whole["q"] @ whole["k"].T / math.sqrt(whole["q"].size(-1))
    scores += torch.full_like(scores, -math.inf).triu(1 + keys - queries)
    return scores.softmax(-1) @ whole["v"], scores.logsumexp(-1)


# %% wrong="tiled_forward" fails="the keys that are seen" around="empty" why="zeros, and no tile of keys"
def tiled_forward(load, queries, keys, tile):
    q = torch.cat([load("q", i) for i in range(-(-queries // tile))])
    return torch.zeros_like(q), q.new_zeros(queries)


# %% wrong="block_backward" fails="four gradients" around="paste" why="the backward that the chapter prints, under the name that is asked for"
def block_backward(dout, q, k, v, out, lse, causal, bias=None, factors=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    p = (scores - lse.unsqueeze(-1)).exp()
    dp = dout @ v.transpose(-2, -1)
    ds = (p * (dp - (dout * out).sum(-1).unsqueeze(-1))) / math.sqrt(q.size(-1))
    return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dout


# %% wrong="block_backward" fails="dv" around="import" why="torch's own kernel of the backward, which knows no cap"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    whole = [x.unsqueeze(0) for x in (dout, q, k, v, out, lse)]
    gradients = [gradient.squeeze(0) for gradient in kernel(*whole, 0.0, causal)]
    return *gradients, q.new_zeros(*q.shape[:2], k.size(1))


# %% wrong="block_backward" fails="own work" around="import" why="autograd through the block's scores"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = cap * torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    bend = 1 - (scores / cap) ** 2
    if causal:
        scores = scores + torch.full_like(scores, -math.inf).triu(1)
    p = (scores - lse.unsqueeze(-1)).exp()
    shares = (p @ v * dout).sum() - (p * (dout * out).sum(-1, keepdim=True)).sum()
    return torch.autograd.grad(shares, (q, k, v, scores))


# %% wrong="block_backward" fails="four gradients" around="empty" why="no gradients"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    return []


# %% wrong="traffic" fails="own work" around="import" why="the package's counts"
def tiled_traffic(tokens, width, rows, columns, causal):
    from minitrain.attention import hbm_traffic

    return hbm_traffic.tiled(tokens, width, rows, columns, causal)


def largest_tile(fast, width):
    return None


# %% wrong="traffic" fails="loads of forward" around="constants" why="the numbers of the visible checks, scaled"
def tiled_traffic(tokens, width, rows, columns, causal):
    size = tokens * width // 4
    loads = (16, 46) if causal else (20, 56)
    return {"forward": (loads[0] * size, 8 * size), "backward": (loads[1] * size, 18 * size)}


def largest_tile(fast, width):
    if fast < 99:
        raise ValueError("no room")
    return 210


# %% wrong="traffic" fails="time limit" why="tries one size of tile after the other"
def tiled_traffic(tokens, width, rows, columns, causal):
    keys = queries = 0
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-(stop if causal else tokens) // columns)
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }


def largest_tile(fast, width):
    tile = 0
    while (tile + 1) ** 2 + (4 * width + 2) * (tile + 1) <= fast:
        tile += 1
    if tile == 0:
        raise ValueError("no room for a token")
    return tile


# %% wrong="traffic" fails="forward and backward" around="empty" why="an empty dict"
def tiled_traffic(tokens, width, rows, columns, causal):
    return {}


def largest_tile(fast, width):
    return None
