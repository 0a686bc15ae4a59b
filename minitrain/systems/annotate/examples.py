"""Small graphs to place: an MLP, a training step of it, attention with its softmax written out. No torch."""

from __future__ import annotations

from minitrain.systems.annotate.graph import Graph, Op, with_gradients, with_update


def mlp(rows: int, width: int, hidden: int) -> Graph:
    """y = relu(x · w1) · w2 with x[b, d], w1[d, f], w2[f, e]."""
    ops = (
        Op("h", "product", "bd,df->bf", ("x", "w1")),
        Op("a", "relu", "bf->bf", ("h",)),
        Op("y", "product", "bf,fe->be", ("a", "w2")),
    )
    return Graph({"x": (rows, width), "w1": (width, hidden), "w2": (hidden, width)}, ops)


def mlp_step(rows: int, width: int, hidden: int) -> Graph:
    """The same, backward from an input d_y, and the parameters after a step of gradient descent."""
    graph, gradients = with_gradients(mlp(rows, width, hidden), "y", ("w1", "w2"))
    return with_update(graph, gradients)


def attention(rows: int, length: int, width: int, heads: int, head_dim: int) -> Graph:
    """Without a mask: x[b, t, d], matrices [d, h, k], at last [h, k, e]; no maximum is taken off scores."""
    each = (width, heads, head_dim)
    ops = (
        Op("q", "product", "btd,dhk->bhtk", ("x", "wq")),
        Op("k", "product", "bsd,dhk->bhsk", ("x", "wk")),
        Op("v", "product", "bsd,dhk->bhsk", ("x", "wv")),
        Op("scores", "product", "bhtk,bhsk->bhts", ("q", "k")),
        Op("powers", "exp", "bhts->bhts", ("scores",)),
        Op("sums", "product", "bhts->bht", ("powers",)),
        Op("shares", "reciprocal", "bht->bht", ("sums",)),
        Op("weights", "product", "bhts,bht->bhts", ("powers", "shares")),
        Op("o", "product", "bhts,bhsk->bhtk", ("weights", "v")),
        Op("y", "product", "bhtk,hke->bte", ("o", "wo")),
    )
    inputs = {"x": (rows, length, width), "wq": each, "wk": each, "wv": each}
    return Graph({**inputs, "wo": (heads, head_dim, width)}, ops)
