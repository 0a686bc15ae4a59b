"""Packed documents over a cut sequence: none sees another in any core, layout and slice; FLOPs are theirs."""

import math
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.flash import flash_1, flash_2, flash_attention
from minitrain.attention.kernel import FUSED, PLAIN
from minitrain.attention.placed import Documents, Placed
from minitrain.compose.parallelize import parallelize
from minitrain.context.layout import Tile, zigzag
from minitrain.context.ring import last_attention, ring_attention
from minitrain.model.layers import causal_attention
from minitrain.model.training.step import Batch
from minitrain.plan.accounting import forward_flops_per_token
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.attention.packed import document_lengths
from minitrain.systems.pipeline.sliced_attention import attend
from tests.context.cores import CORES, HEADS, LAYOUTS, MASK, in_one_process
from tests.context.runs import K, T, furthest, inputs, over
from tests.context.test_context_alibi import BY_HAND, over_ranks
from tests.parallel import TOLERANCE, small

LENGTHS = (5, 11, 16), (20, 1, 11)  # of two rows of T = 32
DOCUMENTS = Documents(LENGTHS)
NUMBERS = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
APART = torch.where(NUMBERS[:, None, :, None] == NUMBERS[:, None, None, :], 0.0, -math.inf).double()


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_core_stays_within_documents(ranks):
    """Output and all gradients, other documents in each row, alone and with ALiBi and dropout; the reference
    is a mask over a whole matrix. Bytes are those of one document."""
    plain, all_three = in_one_process(bias=APART), in_one_process(bias=APART + BY_HAND, mask=MASK)

    def rank():
        group, found, bytes_differ = collectives.world(), {}, []
        for name, (core, layout) in CORES[ranks]().items():
            packed = partial(core, documents=DOCUMENTS)
            ours, sent = over(packed, group, layout, HEADS)
            found[name] = furthest(ours, plain)
            found[name, "ALiBi"] = furthest(over_ranks(packed, group, layout, MASK)[0], all_three)
            if sent != over(core, group, layout, HEADS)[1]:
                bytes_differ.append(name)
        return found, bytes_differ

    for found, bytes_differ in launch.run(rank, ranks=ranks):
        assert max(found.values()) < TOLERANCE, {name: far for name, far in found.items() if far > TOLERANCE}
        assert bytes_differ == []


def test_cores_of_one_device_and_the_last_queries():
    q, k, v, dout = (x.requires_grad_() for x in inputs(HEADS))
    theirs = in_one_process(bias=APART)
    kernels = [partial(flash_attention, kernel=one) for one in (FUSED, PLAIN, flash_1(64), flash_2(64))]
    for core in (causal_attention, *kernels, last_attention, attend):
        out = core(q, k, v, documents=DOCUMENTS)
        grads = torch.autograd.grad(out, (q, k, v), dout.detach())
        assert furthest([out.detach(), *grads], theirs) < TOLERANCE
        if core not in (causal_attention, *kernels[:1]):
            out = core(q[..., 9:, :], k, v, documents=DOCUMENTS)
            assert furthest([out.detach()], [theirs[0][..., 9:, :]]) < TOLERANCE


def test_flops_are_those_of_what_is_seen():
    """Two documents of 20 and 12 tokens on two ranks of 16: rank 0 has a triangle of 16, rank 1 has 4 · 16
    scores with the first rank's keys, then triangles of 4 and 12."""

    def rank(lengths):
        core = partial(ring_attention, group=collectives.world())
        q, k, v, _ = (x[:, :, :16] for x in inputs((4, 4)))
        with Ledger() as ledger:
            core(q, k, v, **({"documents": Documents([lengths] * 2)} if lengths else {}))
        return ledger.flops // (2 * 4 * 4 * K)  # rows, heads, two products of 2 FLOPs each

    assert launch.run(rank, (20, 12), ranks=2) == [136, 4 * 16 + 10 + 78]
    assert launch.run(rank, (32,), ranks=2) == launch.run(rank, None, ranks=2) == [136, 136 + 16 * 16]
    q, k, v, _ = inputs((4, 4))
    with Ledger() as ledger:
        causal_attention(q, k, v, documents=DOCUMENTS)
    assert ledger.flops == sum(length * (length + 1) // 2 for row in LENGTHS for length in row) * 4 * 4 * K


def test_without_it_it_does_not():
    """Controls: no documents, those of the first row in both, places on the rank, a backward over all."""

    def rank():
        group, expected, found = collectives.world(), in_one_process(bias=APART), {}

        def distance(documents=DOCUMENTS):
            core = partial(ring_attention, group=group, layout=zigzag, documents=documents)
            return furthest(over(core, group, zigzag, HEADS)[0], expected)

        found["right"] = distance()
        found["none"] = distance(None)
        found["the first row's"] = distance(Documents([LENGTHS[0]] * 2))
        places, by_document = Tile.places, Placed.by_document
        Tile.places = property(lambda tile: ([range(T)[tile.queries]], [range(T)[tile.keys]]))
        found["places on the rank"] = distance()
        Tile.places = places
        Placed.by_document = lambda self, *runs: by_document(self, *runs)._replace(backward=FUSED.backward)
        found["all in backward"] = distance()
        Placed.by_document = by_document
        return found

    for found in launch.run(rank, ranks=2):
        assert found.pop("right") < TOLERANCE
        assert len(found) == 4 and min(found.values()) > 1e-2, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_of_tiles_are_the_scores_that_are_seen(layout):
    """By drawing each of them: every visible score within a document is in one piece, and no other is."""
    from minitrain.context.layout import tiles

    ranks = 4
    for mine in range(ranks):
        for theirs in range(ranks):
            queries, keys = layout(mine, ranks, T), layout(theirs, ranks, T)
            seen = torch.zeros(2, T, T, dtype=torch.int)
            for tile in tiles(queries, keys, True):
                q_at, k_at = ([place for run in runs for place in run] for runs in tile.places)
                for row, q, k in DOCUMENTS.cut(*tile.places, tile.causal):
                    for i, query in enumerate(q_at[q]):
                        shift = (k.stop - k.start) - (q.stop - q.start)
                        for j, key in enumerate(k_at[k]):
                            seen[row, query, key] += not tile.causal or j <= i + shift
            held = torch.zeros(T, T, dtype=torch.bool)
            held[
                torch.tensor([p for run in queries for p in run]).unsqueeze(1),
                [p for run in keys for p in run],
            ] = True
            wanted = held & torch.ones(T, T, dtype=torch.bool).tril() & (APART[:, 0] == 0)
            assert torch.equal(seen, wanted.int())


def test_wrong_documents_are_refused():
    q, k, v, _ = inputs(HEADS)
    with pytest.raises(ValueError, match="documents of 1 rows for 2; give the lengths in each row"):
        causal_attention(q, k, v, documents=Documents(LENGTHS[:1]))
    with pytest.raises(ValueError, match="position 31 is in no document: their lengths must add up"):
        causal_attention(q, k, v, documents=Documents([(5, 11), (20, 12)]))

    def rank():
        run, says = parallelize(small(), Strategy(dp=1)), []
        tokens = torch.zeros(2, 8, dtype=torch.long)
        for documents in ([(4, 4)], [(4, 4), (4, 5)], [(4, 4), (8, 0)], [(4, 4), (3, 5)]):
            batch = Batch(tokens, tokens, torch.tensor(16), documents=documents)
            try:
                run.step(batch)
                says.append("")
            except ValueError as error:
                says.append(str(error))
        own = parallelize(torch.nn.Embedding(29, 29), Strategy(dp=1))
        with pytest.raises(ValueError, match="documents= is for a GPT; mask them inside of your Embedding"):
            own.step(batch)
        return says

    few, long, empty, right = launch.run(rank, ranks=1)[0]
    segments = (torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]) == 0).cumsum(-1)
    assert document_lengths(segments) == [[3, 1], [1, 3]]
    assert few == "documents of 1 rows for the 2 of this rank; give the lengths in each row"
    assert long.startswith("documents of 9 tokens in row 1, which has 8; give the lengths")
    assert "1 or more each" in empty and right == ""


def test_a_model_sees_each_document_as_if_it_were_alone():
    """Learned and rotary positions, evaluated and trained on: the loss of the documents one by one."""

    def rank(positions):
        config = small(positions=positions, max_positions=T)
        run = parallelize(config, Strategy(precision="float64"), seed=3)
        tokens = torch.randint(config.vocab_size, (2, T), generator=torch.Generator().manual_seed(1))
        targets = tokens.roll(-1, 1)
        with Ledger() as ledger:
            packed = run.evaluate(Batch(tokens, targets, torch.tensor(1), documents=LENGTHS))
        wanted = sum(n * forward_flops_per_token(config, n) for lengths in LENGTHS for n in lengths)
        assert ledger.flops == wanted
        trained = run.step(Batch(tokens, targets, torch.tensor(1), step=0, documents=LENGTHS)).loss
        alone, whole = 0.0, run.evaluate(Batch(tokens, targets, torch.tensor(1)))
        run.step(Batch(tokens, targets, torch.tensor(1), step=1, documents=LENGTHS))
        assert torch.equal(run.model(tokens), run(tokens)), "documents are those of a batch, not of the run"
        for row, lengths in enumerate(LENGTHS):
            parts = zip(tokens[row].split(lengths), targets[row].split(lengths))
            alone += sum(run.evaluate(Batch(a[None], b[None], torch.tensor(1))) for a, b in parts)
        return [(loss - alone).abs().item() for loss in (packed, trained, whole)]

    for positions in ("learned", "rope"):
        packed, trained, whole = launch.run(rank, positions, ranks=1)[0]
        assert max(packed, trained) < 1e-10 < 1e-4 < whole
