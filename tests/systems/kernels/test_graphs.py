"""One pass over memory for six tensors, and the graphs that torch.compile takes of our model."""

import torch
import torch.nn.functional as F

from minitrain.attention.flash import Traffic
from minitrain.attention.placed import DropMask
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT
from minitrain.ranks.events import Compute
from minitrain.ranks.ledger import Ledger
from minitrain.systems.kernels import fusion


def dropped(x, rows: slice):
    mask = DropMask(0.1, 7)
    kept = mask.keep(1, 1, torch.arange(rows.start, rows.stop), torch.arange(x.size(-1)))[0, 0]
    return torch.where(kept, x / 0.9, 0.0)


EPILOGUE = [
    fusion.Step("h", "pointwise", torch.add, ("x", "bias")),
    fusion.Step("g", "pointwise", F.gelu, ("h",)),
    fusion.Step("y", "pointwise", dropped, ("g",), by_place=True),
]


def test_rule_fusion():
    """Bias, GELU and dropout: 6.25 tensors in torch's own count, 2 in one pass, the same numbers; products and
    second readers end a group."""
    x, bias = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), torch.arange(96.0) / 96
    with Ledger() as ledger:
        torch.native_dropout(F.gelu(x + bias), 0.1, True)
    compute = [event for event in ledger.events if isinstance(event, Compute)]
    assert sum(event.bytes for event in compute) == 6.25 * x.nbytes + bias.nbytes
    alone, groups = [[step] for step in EPILOGUE], fusion.fuse(EPILOGUE)
    assert groups == [EPILOGUE]
    results, moved = [], []
    for each, tile in ((alone, 64), (groups, 8), (groups, 7)):
        memory = Traffic()
        results.append(fusion.run(each, {"x": x, "bias": bias}, memory, tile))
        moved.append(memory.elements - bias.numel())
    assert moved == [6 * x.numel(), 2 * x.numel(), 2 * x.numel()]
    whole = F.gelu(x + bias)
    assert all(torch.equal(result, dropped(whole, slice(0, 64))) for result in results)

    step = fusion.Step
    block = [
        step("n", "reduction", lambda x: F.layer_norm(x, x.shape[-1:]), ("x",)),
        step("u", "product", torch.matmul, ("n", "up")),
        step("g", "pointwise", F.gelu, ("u",)),
        step("d", "product", torch.matmul, ("g", "down")),
        step("r", "pointwise", torch.add, ("d", "x")),
        step("s", "reduction", lambda x: x.softmax(-1), ("r",)),
        step("t", "pointwise", torch.neg, ("s",)),
        step("v", "pointwise", torch.exp, ("t",)),
        step("z", "pointwise", torch.sub, ("v", "t")),
    ]
    groups = fusion.fuse(block)
    named = ["".join(one.output for one in group) for group in groups]
    assert named == ["n", "ug", "dr", "st", "vz"]  # t has two readers
    inputs = {"x": x, "up": torch.randn(96, 128) / 10, "down": torch.randn(128, 96) / 10}
    fused, unfused = (fusion.run(each, inputs) for each in (groups, [[one] for one in block]))
    t = -(F.gelu(F.layer_norm(x, (96,)) @ inputs["up"]) @ inputs["down"] + x).softmax(-1)
    assert torch.equal(fused, unfused) and torch.equal(fused, t.exp() - t)


def test_pytorch2_compile():
    """Our GPT is one graph, bit-equal compiled, gradients too; a branch on a number breaks it once."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, d_model=16, num_layers=1, num_heads=2, max_positions=16))
    tokens = torch.randint(0, 64, (2, 8))
    found = fusion.captured(model, tokens)
    assert len(found.graphs) == 1 and torch.equal(found.result, model(tokens))
    assert found.graphs[0].count("linear") == 4 + 3 + 1  # attention, MLP, head

    def branching(tokens):
        logits = model(tokens)
        return logits * 2 if logits.sum() > 0 else logits - 1

    broken = fusion.captured(branching, tokens)
    assert len(broken.graphs) == 2 and torch.equal(broken.result, branching(tokens))
    assert len(broken.graphs[1]) == 1 and len(broken.graphs[0]) == len(found.graphs[0]) + 2  # sum, gt
    plain = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")(tokens)
    assert torch.equal(compiled, model(tokens))
    taken = torch.autograd.grad(compiled.square().sum(), list(model.parameters()))
    assert all(map(torch.equal, plain, taken))
    torch.compiler.reset()
