# %% wrong="count_parameters" fails="number of parameters" why="Llama's: no biases"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    queries, keys = heads * head_dim, kv_heads * head_dim
    block = 2 * width * queries + 2 * width * keys + 3 * width * d_ff + 2 * width
    return vocab * width * (1 if tied else 2) + layers * block + width


# %% wrong="count_parameters" fails="number of parameters" why="the last norm is forgotten"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    queries, keys = heads * head_dim, kv_heads * head_dim
    block = (
        2 * width * queries + 2 * width * keys + queries + 2 * keys + 3 * width * d_ff + 2 * width
    )
    return vocab * width * (1 if tied else 2) + layers * block


# %% wrong="count_parameters" fails="number of parameters" why="a tied table is counted twice"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    queries, keys = heads * head_dim, kv_heads * head_dim
    block = (
        2 * width * queries + 2 * width * keys + queries + 2 * keys + 3 * width * d_ff + 2 * width
    )
    return 2 * vocab * width + layers * block + width


# %% wrong="count_parameters" fails="number of parameters" why="as many keys and values as queries"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    queries = heads * head_dim
    block = 4 * width * queries + 3 * queries + 3 * width * d_ff + 2 * width
    return vocab * width * (1 if tied else 2) + layers * block + width


# %% wrong="count_parameters" fails="number of parameters" why="the number of the visible check"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    return 494_032_768


# %% wrong="count_parameters" fails="head size" why="takes the width for the width of all heads"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    keys = width // heads * kv_heads
    block = 2 * width * width + 2 * width * keys + width + 2 * keys + 3 * width * d_ff + 2 * width
    return vocab * width * (1 if tied else 2) + layers * block + width


# %% wrong="state_bytes" fails="bytes of the states" why="the averages are held to be bfloat16"
def state_bytes(parameters, trained, mixed):
    return 2 * parameters + (2 + 4 + 2 + 2 if mixed else 12) * trained


# %% wrong="state_bytes" fails="bytes of the states" why="no master copy"
def state_bytes(parameters, trained, mixed):
    return 2 * parameters + 10 * trained if mixed else 4 * parameters + 12 * trained


# %% wrong="state_bytes" fails="bytes of the states" why="a master copy in float32 training too"
def state_bytes(parameters, trained, mixed):
    return 2 * parameters + 14 * trained if mixed else 4 * parameters + 16 * trained


# %% wrong="state_bytes" fails="frozen parameters" why="16 bytes for everything"
def state_bytes(parameters, trained, mixed):
    return 16 * parameters


# %% wrong="state_bytes" fails="frozen parameters" why="frozen weights take no room at all"
def state_bytes(parameters, trained, mixed):
    return 16 * trained


# %% wrong="kept_bytes" fails="bytes kept" why="the paper's formula, which takes f for 4h"
def kept_bytes(s, b, h, a, f, size):
    return 34 * s * b * h + 5 * a * s * s * b


# %% wrong="kept_bytes" fails="bytes kept" why="the mask of the softmax is forgotten"
def kept_bytes(s, b, h, a, f, size):
    return size * (8 * s * b * h + 2 * s * b * f + 2 * a * s * s * b) + 2 * s * b * h


# %% wrong="kept_bytes" fails="bytes kept" why="scores without heads"
def kept_bytes(s, b, h, a, f, size):
    return size * (8 * s * b * h + 2 * s * b * f + 2 * s * s * b) + 2 * s * b * h + s * s * b


# %% wrong="kept_bytes" fails="bytes kept" why="the output of the MLP in place of the input of GELU"
def kept_bytes(s, b, h, a, f, size):
    return size * (9 * s * b * h + s * b * f + 2 * a * s * s * b) + 2 * s * b * h + a * s * s * b


# %% wrong="kept_bytes" fails="size of a number" why="masks as wide as numbers"
def kept_bytes(s, b, h, a, f, size):
    return size * (9 * s * b * h + 2 * s * b * f) + 5 * size * a * s * s * b // 2


# %% wrong="accumulate" fails="equals the whole batch" why="a mean of means"
def accumulate(model, microbatches):
    model.zero_grad()
    total = 0.0
    for tokens, targets in microbatches:
        loss = (
            cross_entropy_sum(model(tokens), targets)
            / (targets != MASKED).sum()
            / len(microbatches)
        )
        loss.backward()
        total = total + loss.detach()
    return total


# %% wrong="accumulate" fails="equals the whole batch" why="divides by masked tokens too"
def accumulate(model, microbatches):
    model.zero_grad()
    count, total = sum(targets.numel() for _, targets in microbatches), 0.0
    for tokens, targets in microbatches:
        loss = cross_entropy_sum(model(tokens), targets) / count
        loss.backward()
        total = total + loss.detach()
    return total


# %% wrong="accumulate" fails="equals the whole batch" why="gradients are cleared for every microbatch, so the last one is left"
def accumulate(model, microbatches):
    count, total = sum((targets != MASKED).sum() for _, targets in microbatches), 0.0
    for tokens, targets in microbatches:
        model.zero_grad()
        loss = cross_entropy_sum(model(tokens), targets) / count
        loss.backward()
        total = total + loss.detach()
    return total


# %% wrong="accumulate" fails="a microbatch without tokens" why="weights means by their counts, and 0 times 0/0 is not 0"
def accumulate(model, microbatches):
    model.zero_grad()
    count, total = sum((targets != MASKED).sum() for _, targets in microbatches), 0.0
    for tokens, targets in microbatches:
        valid = (targets != MASKED).sum()
        loss = cross_entropy_sum(model(tokens), targets) / valid * (valid.double() / count)
        loss.backward()
        total = total + loss.detach()
    return total


# %% wrong="accumulate" fails="a second step" why="old gradients stay"
def accumulate(model, microbatches):
    count, total = sum((targets != MASKED).sum() for _, targets in microbatches), 0.0
    for tokens, targets in microbatches:
        loss = cross_entropy_sum(model(tokens), targets) / count
        loss.backward()
        total = total + loss.detach()
    return total


# %% wrong="accumulate" fails="memory limit" why="all forwards first, one backward at the end"
def accumulate(model, microbatches):
    model.zero_grad()
    count = sum((targets != MASKED).sum() for _, targets in microbatches)
    loss = (
        sum(cross_entropy_sum(model(tokens), targets) for tokens, targets in microbatches) / count
    )
    loss.backward()
    return loss.detach()
