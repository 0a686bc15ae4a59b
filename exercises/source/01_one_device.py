# %% [markdown]
# # Exercises 01: one device
#
# Four tasks, 10 points, about an hour. Read chapter 01 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 01
#
# The grader runs the same checks and hidden ones with other sizes. Three of the four answers are formulas: numbers in, one whole
# number out. The checks build the real thing and count. Sizes may also be larger than anything that can be built.
#
# - An answer cell stands alone. It may use the read-only cells, except those marked as being for the checks, and none of your
#   other cells.

# %% given="setup"
import torch

MASKED = -100  # a target that no loss counts


def cross_entropy_sum(logits, targets):
    """Summed over the targets that are not masked, without any division."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="sum"
    )


# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask, ask_each, expect, expect_equal
from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.gpt import GPT, Block, GPTConfig
from minitrain.model.layers import naive_attention
from minitrain.model.training.optim import AdamW

draw = Draw()  # hidden checks draw sizes and values

# %% [markdown]
# ## 1. Count a model you have not seen (3 points)
#
# The Qwen2.5 models are close to Llama, with one difference that the formulas of the chapter do not have. From their
# description: a token table of `vocab` rows; `layers` blocks; a last norm; an output table of the same shape as the token table,
# or *tied*: the token table itself. A block is
#
# - RMSNorm, a vector of `width` weights, before attention and before the MLP;
# - queries for `heads` heads and keys and values for `kv_heads` heads, each head `head_dim` wide, all three **with a bias**;
# - the projection of the heads back to the width, without a bias;
# - a gated MLP: gate and up from `width` to `d_ff`, their product down to `width`, without biases.
#
# > **API** a function of seven whole numbers and a bool (`tied`); return an int. `heads` is a multiple of `kv_heads`;
# > `heads * head_dim` need not be `width`. `layers` may be 10**12, so count by formula.


# %% answer="count_parameters"
def count_parameters(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    """The number of parameters, as an int."""
    ### BEGIN SOLUTION
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = 2 * width * queries + 2 * width * keys + queries + 2 * keys
    block = attention + 3 * width * d_ff + 2 * width
    return vocab * width * (1 if tied else 2) + layers * block + width
    ### END SOLUTION


# %% judge="built"
def built(vocab, width, layers, heads, kv_heads, head_dim, d_ff, tied):
    """Counted on the real tensors: our GPT without biases, and the biases; one layer, and each further one like the second."""
    sizes = dict(vocab_size=vocab, d_model=width, num_heads=heads, num_kv_heads=kv_heads)
    sizes |= dict(head_dim=head_dim, d_ff=d_ff, tied=tied)
    counts = []
    for n in (1, 2):
        kinds = dict(activation="swiglu", norm="rms", positions="rope")
        gpt = GPT(GPTConfig(**sizes, **kinds, num_layers=n), device="meta")
        biases = [torch.empty(k * head_dim, device="meta") for k in (heads, kv_heads, kv_heads)] * n
        counts.append(sum(x.numel() for x in (*gpt.parameters(), *biases)))
    return counts[0] + (layers - 1) * (counts[1] - counts[0])


def expect_built(cases, property, hint):
    expect_equal(
        ask_each(count_parameters, cases), [built(*case) for case in cases], property, hint
    )


# %% check="count_parameters-published" points=2
# The published count of Qwen2.5-0.5B comes out, and that of other sizes, tied or not.
expect_equal(
    ask(count_parameters, 151_936, 896, 24, 14, 2, 64, 4864, True),
    494_032_768,
    "number of parameters",
    "go through the description line by line: which tensors are there, and of what shape? once, or in every layer?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for tied, many in zip((True, False), draw.several([1, 10**12], 2)):
    kv_heads, head_dim = draw.choice([1, 2, 3]), draw.choice([8, 16, 32])
    heads = kv_heads * draw.integer(2, 4)
    layers = draw.integer(2, 6) * many
    sizes = (heads * head_dim, layers, heads, kv_heads, head_dim, draw.integer(100, 900))
    cases.append((draw.integer(50, 500), *sizes, tied))
expect_built(cases, "number of parameters", "for any size, and with the output table tied or not")
### END HIDDEN TESTS

# %% check="count_parameters-heads" points=1
# Heads need not fill the width: heads x head_dim may be larger or smaller than it.
wide, narrow = ask_each(
    count_parameters, [(100, 64, 2, 4, 2, head_dim, 128, False) for head_dim in (32, 16)]
)
expect(
    wide > narrow,
    "head size",
    "head_dim is a size of its own: twice as wide heads have more parameters at the same width",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for width in (draw.integer(30, 60), draw.integer(300, 600)):
    heads = (6, draw.choice([1, 2, 3, 6]), draw.choice([16, 24]))
    cases.append((97, width, 3, *heads, draw.integer(50, 300), draw.choice([True, False])))
expect_built(
    cases, "head size", "which shapes follow from heads and head_dim, and which from the width?"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Bytes that stay (2 points)
#
# Weights, gradients and the state of AdamW. Two ways to train:
#
# - `mixed=True`: weights and gradients in bfloat16; AdamW keeps a float32 master copy and two float32 averages.
# - `mixed=False`: everything in float32, and no second copy of the weights.
#
# Of `parameters` only `trained` are trained. The others are frozen: they are there, and nothing else is kept for them (as in
# fine-tuning with adapters).
#
# > **API** a function of two whole numbers and a bool; return an int. `parameters` counts all, the trained ones included.
# > A bfloat16 number has 2 bytes, a float32 number 4.


# %% answer="state_bytes"
def state_bytes(parameters, trained, mixed):
    """Bytes of weights, gradients and optimizer state after a step, as an int."""
    ### BEGIN SOLUTION
    weight, rest = (2, 2 + 12) if mixed else (4, 4 + 8)
    return weight * parameters + rest * trained
    ### END SOLUTION


# %% judge="held"
def held(trained, frozen, mixed):
    """Bytes of real tensors after a real step."""
    dtype = torch.bfloat16 if mixed else torch.float32
    params = [
        torch.nn.Parameter(torch.ones(n, dtype=dtype), requires_grad=grad)
        for n, grad in ((trained, True), (frozen, False))
        if n
    ]
    optimizer = AdamW(params, master_dtype=torch.float32)
    params[0].sum().backward()
    optimizer.step()
    state = [x for kept in optimizer.state.values() for x in kept.values()]
    gradients = [param.grad for param in params if param.grad is not None]
    return sum(x.nbytes for x in (*params, *gradients, *state) if isinstance(x, torch.Tensor))


def expect_held(cases, property, hint):
    """Cases are (trained, frozen, scale), once mixed and once not; what is held grows with the scale."""
    cases = [(*case, mixed) for case in cases for mixed in (True, False)]
    said = ask_each(
        state_bytes,
        [((own + frozen) * scale, own * scale, mixed) for own, frozen, scale, mixed in cases],
    )
    wanted = [held(own, frozen, mixed) * scale for own, frozen, scale, mixed in cases]
    expect_equal(said, wanted, property, hint)


# %% check="state_bytes-all" points=1
# Nothing frozen: both ways of training, bytes of real tensors.
expect_held(
    [(1000, 0, 1)],
    "bytes of the states",
    "how many tensors are there for each parameter, and how many bytes has a number in each?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_held(
    [(draw.integer(10, 5000), 0, scale) for scale in (1, 10**9)],
    "bytes of the states",
    "for any number of parameters",
)
### END HIDDEN TESTS

# %% check="state_bytes-frozen" points=1
# Some are frozen.
expect_held([(10, 990, 1)], "frozen parameters", "what does a weight need that nobody updates?")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_held(
    [(draw.integer(10, 500), draw.integer(1, 5000), scale) for scale in (1, 10**6)],
    "frozen parameters",
    "in both ways of training",
)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Bytes that come and go (2 points)
#
# The chapter counted what one block keeps for backward: $sbh(34 + 5as/h)$ bytes. That is for 16-bit numbers and an MLP four times
# as wide as the block. Write it for numbers of `size` bytes and an MLP `f` wide. The block is the same otherwise: LayerNorm, biases, GELU,
# attention that keeps its scores, dropout after the softmax and after both halves, with masks of one byte per element. Leave
# out the means and deviations of the norms.
#
# > **API** a function of six whole numbers; return an int. `size` is 2, 4 or 8 and holds for every number that is kept; a mask
# > has one byte per element whatever `size` is.


# %% answer="kept_bytes"
def kept_bytes(s, b, h, a, f, size):
    """Bytes kept by one block: s tokens, batch b, width h, a heads, MLP width f, `size` bytes per number. An int."""
    ### BEGIN SOLUTION
    inputs = 8 * s * b * h  # of norm1, QKV, out, norm2, up; and Q, K, V
    mlp = 2 * s * b * f  # inputs of GELU and of down
    scores = a * s * s * b  # softmax, its mask, and what is left after dropout
    return size * (inputs + mlp + 2 * scores) + 2 * s * b * h + scores
    ### END SOLUTION


# %% judge="kept"
def kept(s, b, h, a, f, size):
    """What autograd keeps of a real block; shapes are real, so is the list, only the numbers are missing (device "meta")."""
    place = dict(dtype={2: torch.float16, 4: torch.float32, 8: torch.float64}[size], device="meta")
    kinds = dict(norm="layer", positions="none", activation="gelu", bias=True, dropout=0.1)
    config = GPTConfig(d_model=h, num_heads=a, d_ff=f, **kinds)
    block = Block(config, "layers.1", attention=naive_attention, **place)
    with SavedTensors(block) as saved:
        block(torch.empty(b, s, h, requires_grad=True, **place), torch.arange(s, device="meta"))
    return sum(item.bytes for item in saved.saved if item.shape != (b, s, 1))


def drawn(size):
    a = draw.integer(2, 6)
    width = a * 8 * draw.integer(1, 4)
    return draw.integer(17, 300), draw.integer(2, 5), width, a, draw.integer(20, 700), size


def expect_kept(cases, property, hint):
    """A batch of many times as many sequences keeps as many times as much."""
    many = [(s, b * 10**15, *rest) for s, b, *rest in cases]
    wanted = [kept(*case) for case in cases]
    wanted += [bytes * 10**15 for bytes in wanted]
    expect_equal(ask_each(kept_bytes, [*cases, *many]), wanted, property, hint)


# %% check="kept_bytes-16" points=1
# Two bytes per number, as in the paper, and an MLP of any width.
expect_kept(
    [(32, 2, 64, 4, 256, 2), (16, 1, 32, 2, 128, 2), (32, 2, 64, 8, 256, 2)],
    "bytes kept",
    "which terms of 34 belong to the MLP, and which to the scores?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_kept([drawn(2), drawn(2)], "bytes kept", "for every size; f need not be 4h")
### END HIDDEN TESTS

# %% check="kept_bytes-any" points=1
# Numbers of any size.
expect_kept(
    [(32, 2, 64, 4, 256, 4)],
    "size of a number",
    "which of the tensors are numbers, and which are masks?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_kept(
    [drawn(4), drawn(8)], "size of a number", "masks stay one byte, whatever the numbers are"
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Accumulate a stream (3 points)
#
# Here the divisor is not known in advance. Microbatches come one by one from a loader and differ in their numbers of rows,
# lengths and masks. Leave in every `param.grad` the gradient of the batch's loss: the **mean over all
# tokens of the batch that are not masked**. Their number is known when the loader is exhausted.
#
# Three more things are graded. What was in `param.grad` before belongs to the last batch and must not count. The loader gives a
# microbatch only when the backward of the previous one is done. And no more than one microbatch's activations are alive at
# a time; that is what microbatches are for.
#
# > **API** `loader` is an iterator, to be read once: `for tokens, targets in loader`, both int64 [rows, length], masked targets
# > are `MASKED`. `model(tokens)` gives logits [rows, length, vocabulary].
# > `cross_entropy_sum(logits, targets)` is the *sum* over the targets that are not masked, a scalar tensor.
# > Return the loss of the batch, a scalar tensor without a graph. At least one token of a batch is not masked.


# %% answer="accumulate"
def accumulate(model, loader):
    """loader: an iterator of (tokens, targets). Leaves the gradient in every param.grad and returns the loss of the batch."""
    ### BEGIN SOLUTION
    model.zero_grad()
    num_valid, total = 0, 0.0
    for tokens, targets in loader:
        loss = cross_entropy_sum(model(tokens), targets)
        loss.backward()
        num_valid, total = num_valid + (targets != MASKED).sum(), total + loss.detach()
    for param in model.parameters():
        param.grad /= num_valid
    return total / num_valid
    ### END SOLUTION


# %% [markdown]
# The checks train nothing: they compare with one formula, every row on its own.


# %% driver="accumulate_on_a_rank"
def build(width=16):
    torch.manual_seed(0)
    tokens, inner, logits = (17, width), (width, 4 * width), (4 * width, 17)
    layers = (
        torch.nn.Embedding(*tokens),
        torch.nn.Linear(*inner),
        torch.nn.GELU(),
        torch.nn.Linear(*logits),
    )
    return torch.nn.Sequential(*layers).double()


def one_by_one(model, microbatches):
    """A loader: it gives a microbatch once the one before has been through backward."""
    weight, backwards = next(model.parameters()), []
    hook = weight.register_post_accumulate_grad_hook(backwards.append)
    expected = 0
    for tokens, targets in microbatches:
        if len(backwards) < expected:
            raise ValueError("the next microbatch comes after the backward of the one before")
        yield tokens, targets
        expected += bool((targets != MASKED).any())
    hook.remove()


def accumulate_on_a_rank(width, batches):
    """Several batches, one after the other, on one model: (loss, gradients) of the last."""
    model = build(width)
    for microbatches in batches:
        loss = accumulate(model, one_by_one(model, microbatches))
    return loss.detach(), [param.grad for param in model.parameters()]


# %% judge="expect_row_by_row"
def row_by_row(width, microbatches):
    """(loss, gradients) as they should be."""
    model, total = build(width), 0.0
    num_valid = sum(int((targets != MASKED).sum()) for _, targets in microbatches)
    for tokens, targets in microbatches:
        for row in range(len(tokens)):
            one = slice(row, row + 1)
            loss = cross_entropy_sum(model(tokens[one]), targets[one]) / num_valid
            loss.backward()
            total += loss.detach()
    return total, [param.grad for param in model.parameters()]


def microbatch(rows, length):
    """Random tokens; each row has some of its targets masked."""
    tokens = torch.tensor([[draw.integer(0, 16) for _ in range(length + 1)] for _ in range(rows)])
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~draw.mask(rows, length), MASKED)


def expect_row_by_row(batches, property, hint, width=16, **rules):
    loss, gradients = ask(accumulate_on_a_rank, width, batches, **rules)
    expected_loss, expected = row_by_row(width, batches[-1])
    expect_equal(loss, expected_loss, property, f"the loss: {hint}", atol=1e-12)
    expect_equal(gradients, expected, property, f"the gradients: {hint}", atol=1e-12)


def expect_in_memory(budget_bytes):
    """Four microbatches; one alone needs 155 MB, two at a time 220, all of them 380."""
    many = [microbatch(draw.integer(64, 66), 512) for _ in range(4)]
    hint = "first let it be right"
    expect_row_by_row([many], "equals the whole batch", hint, 32, budget_bytes=budget_bytes)


# %% check="accumulate-equal" points=2
# Loss and gradients are those of the whole batch, however it is cut and masked.
tokens = torch.arange(48).view(6, 8) % 17
targets = (tokens + 3) % 17
targets[:2, 1:] = MASKED
expect_row_by_row(
    [[(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]],
    "equals the whole batch",
    "by which count must the sum of the gradients be divided, and when is it known?",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(2):
    one = [microbatch(draw.integer(1, 3), draw.integer(3, 9)) for _ in range(draw.integer(2, 4))]
    expect_row_by_row(
        [one],
        "equals the whole batch",
        "microbatches have other numbers of rows, other lengths and other masks",
    )
two = [microbatch(2, 5), microbatch(1, 7)]
two[draw.integer(0, 1)][1].fill_(MASKED)
expect_row_by_row(
    [two],
    "a microbatch without tokens",
    "all its targets are masked; it adds nothing, and harms nothing",
)
expect_row_by_row(
    [one, [microbatch(2, 6), microbatch(1, 4)]],
    "a second step",
    "what was in param.grad belongs to the batch before",
)
expect_in_memory(300_000_000)  # not those of all microbatches
### END HIDDEN TESTS

# %% check="accumulate-memory" points=1
# One microbatch's activations are alive at a time.
expect_in_memory(188_000_000)
print("the visible checks pass")
