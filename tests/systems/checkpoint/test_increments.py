"""Increments of tables: bytes are touched rows, restored is what was there, to the bit or to half a step."""

from dataclasses import replace

import pytest
import torch

from minitrain import launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.ranks.pieces import Piece, part_of, whole_piece
from minitrain.systems.checkpoint.increments import Increments, Restored, decoded, encoded, full_is_cheaper
from tests.checkpoint.saver_runs import rows, run_of, train
from tests.parallel import small

TABLE = "layers.0.tokens"


def adagrad(params):
    return torch.optim.Adagrad(params, lr=0.1)


def size_of(pieces):
    return sum(p.values.numel() * p.values.element_size() for p in pieces)


def opened(folder, step):
    return Saved(Store(folder).open(step)[1])


def trained(folder, bits, layout, other):
    """Full after step 1, an increment after step 3, both read into another layout."""
    config = small(tied=False, positions="rope")
    run = run_of(adagrad, config, **layout)
    of_table = [p for p in run.pieces() if p.name == f"parameters/{TABLE}"]
    width = of_table[0].whole[1]
    increments = Increments({TABLE: of_table[0].whole[0]}, bits)
    sizes, sent = {}, {}
    stores = {what: Store(f"{folder}/{what}") for what in ("full", "increment")}
    for step in range(4):
        batch = run.batch(rows(), step)
        if step > 1:
            batch = batch._replace(tokens=batch.tokens % 6 + 5 * run.data_group.rank())
        increments.touch(TABLE, batch.tokens, step)
        run.step(batch)
        if step not in (1, 3):
            continue
        what, since = ("full", None) if step == 1 else ("increment", 1)
        increments.agree(run.token_group)
        pieces, plain = increments.pieces(run.pieces(), since)
        with Saver(stores[what], policy="snapshot") as saver:
            saver.save(step, pieces, plain | run.plain_state(), {"since": since})
            assert [wait.why for wait in saver.waits] == ["copy"], "the stall is the snapshot"
        sizes[what] = size_of([p for p in pieces if p.name.startswith("rows/")])
        sent[what] = sorted(p.name.split("/")[-1] for p in pieces if p.name.startswith("rows/"))
    wanted = run.state_dict()
    reader = run_of(adagrad, config, **other)
    saved = Restored(opened(f"{folder}/full", 1), opened(f"{folder}/increment", 3))
    reader.load_pieces(saved)
    got = reader.state_dict()
    touched = (increments.touched[TABLE] > 1).sum().item()
    losses = train(run, 4), train(reader, 4)
    return wanted, got, sizes, sent, touched, width, saved.read_bytes, losses


def compared(wanted, got):
    """The largest difference of each tensor, by kind and name."""
    found = {
        ("parameters", n): (x - got["parameters"][n]).abs().max() for n, x in wanted["parameters"].items()
    }
    for name, state in wanted["optimizer"].items():
        found["optimizer", name] = (state["sum"] - got["optimizer"][name]["sum"]).abs().max()
    return found


def test_check_n_run(tmp_path):
    """Written are the touched rows, of the table and of its optimizer's state; restored is all, to the bit.
    In 8 bits no element is off by more than half a step. How many times less is written and kept than in full, for
    lookups that follow Zipf's law, as many between saves as there are rows (the paper's: 6 to 17, 2.5 to 8)."""
    layout = dict(dp=2)
    for wanted, got, sizes, sent, touched, width, read, losses in launch.run(
        trained, str(tmp_path), None, layout, dict(dp=2, zero=1), ranks=2
    ):
        assert max(compared(wanted, got).values()) == 0 and losses[0] == pytest.approx(losses[1], abs=1e-12)
        assert touched == 11 and sizes == {"full": 0, "increment": 2 * touched * (4 + 8 * width)}
        assert sent["increment"] == ["index", "index", "values", "values"] and read > 0
    test_in_few_bits_no_element_is_off_by_more_than_half_a_step(tmp_path / "bits", 8)
    factors = {bits: savings(bits) for bits in (8, 4, 3, 2)}
    assert factors == {8: (6.7, 2.3), 4: (11.7, 4.1), 3: (14.5, 5.1), 2: (18.9, 6.7)}


def savings(bits, rows=1_000_000, width=64, saves=12):
    """How many times less is written, and stored at most, than full float32 tables at each save. A lookup finds row
    i with a probability like 1/i, so m of them touch a row whose chance is p with probability 1 - (1-p)^m."""
    chance = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    chance /= chance.sum()
    full = (width * bits / 8 + 8) / (4 * width)
    written = stored = full
    since = []  # shares of rows in the increments since the last full one
    for _ in range(saves - 1):
        if full_is_cheaper(since):
            written, since = written + full, []
            continue
        since.append(-torch.expm1((len(since) + 1) * rows * torch.log1p(-chance)).mean().item())
        size = since[-1] * (full + 1 / width)
        written, stored = written + size, max(stored, full + size)
    return round(saves / written, 1), round(1 / stored, 1)


def test_in_few_bits_no_element_is_off_by_more_than_half_a_step(tmp_path, bits=5):
    """The full checkpoint is in few bits too; it is read into shards that cut rows."""
    for wanted, got, sizes, _, touched, width, _, _ in launch.run(
        trained, str(tmp_path), bits, dict(dp=2, zero=0), dict(dp=2, zero=3), ranks=2
    ):
        row = 4 + -(-width * bits // 8) + 2 * 8
        assert sizes == {"full": 2 * 29 * row, "increment": 2 * touched * row}
        for (kind, name), difference in compared(wanted, got).items():
            x = wanted["parameters"][name] if kind == "parameters" else wanted["optimizer"][name]["sum"]
            step = (x.amax(-1) - x.amin(-1)).max() / (2**bits - 1)
            assert difference <= step / 2 * (1 + 1e-9) if name == TABLE else difference == 0
            assert difference > 0 or name != TABLE


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_the_bound_holds_in_each_row_and_is_reached(bits):
    torch.manual_seed(0)
    x = torch.randn(50, 33, dtype=torch.float64) * torch.logspace(-6, 6, 50, dtype=torch.float64)[:, None]
    x[7] = 3.25  # a row of one number
    parts = encoded(x, bits)
    back = decoded(parts, bits, 33)
    step = (x.amax(1) - x.amin(1)) / (2**bits - 1)
    error = (back - x).abs().amax(1)
    assert (error <= step / 2 * (1 + 1e-9)).all() and error[7] == 0
    assert (error > 0.4 * step)[:7].all()  # a better bound would not hold
    assert parts["codes"].shape == (50, -(-33 * bits // 8)) and torch.equal(parts["offset"], x.amin(1))
    assert encoded(x[:0], bits)["codes"].numel() == 0 and torch.equal(decoded(encoded(x, None), None, 33), x)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_range_is_searched_from_both_ends(bits):
    """Number by number: a 25th of the row's range off the end where that costs less, twelve times."""

    def cost(row, low, high):
        scale = (high - low) / (2**bits - 1)
        nearest = [low + scale * min(max(round((x - low) / scale), 0), 2**bits - 1) for x in row]
        return sum((x - y) ** 2 for x, y in zip(row, nearest))

    rows = torch.randn(20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    back, gained = decoded(encoded(rows, bits), bits, 16), []
    for row, restored in zip(rows.tolist(), back.tolist()):
        low, high = ends = min(row), max(row)
        met, step = [cost(row, *ends)], (high - low) / 25
        for _ in range(12):
            low, high = min((low + step, high), (low, high - step), key=lambda both: cost(row, *both))
            met.append(cost(row, low, high))
        assert sum((x - y) ** 2 for x, y in zip(row, restored)) == pytest.approx(min(met))
        gained.append(min(met) < 0.9 * met[0])
    assert sum(gained) >= 5


def test_pieces_that_cut_rows_and_columns_are_put_together():
    """A table in two rectangles of columns, read in two of rows."""
    table = torch.arange(48.0).view(8, 6)
    before = torch.zeros(8, 6)
    increments = Increments({"t": 8})
    increments.touch("t", torch.tensor([[1, 6], [3, 1]]), step=5)
    increments.touch("t", torch.tensor([0]), step=4)
    whole = whole_piece("parameters/t", table)
    halves = [replace(whole, start=(0, n), values=table[:, n : n + 3]) for n in (0, 3)]
    kept, plain = increments.pieces([*halves, whole_piece("parameters/other", torch.ones(8, 2))], since=4)
    assert [p.name for p in kept if not p.name.startswith("rows/")] == ["parameters/other"]

    class InMemory:
        """As a Saved."""

        def __init__(self, pieces, plain):
            self.held, self.plain = {p.name: p for p in pieces}, plain
            of = {p.name: [type("Entry", (), dict(whole=p.whole, dtype=p.values.dtype))] for p in pieces}
            self.entries = of

        def __contains__(self, name):
            return name in self.held

        def finish(self):
            pass

        def fill(self, piece):
            values = self.held[piece.name]
            piece.values.copy_(part_of(values, piece.start, piece.shape))

    restored = Restored(InMemory([whole_piece("parameters/t", before)], {}), InMemory(kept, plain))
    for first, last in ((0, 3), (3, 8)):
        got = Piece("parameters/t", (8, 6), (first, 0), torch.full((last - first, 6), -1.0))
        restored.fill(got)
        wanted = before.clone()
        wanted[[1, 3, 6]] = table[[1, 3, 6]]
        assert torch.equal(got.values, wanted[first:last])


def test_rows_touched_before_the_full_checkpoint_or_never_are_not_saved():
    increments = Increments({"t": 4})
    increments.touch("t", torch.tensor([0]), step=2)
    increments.touch("t", torch.tensor([1]), step=3)
    piece = whole_piece("parameters/t", torch.rand(4, 2))
    kept, plain = increments.pieces([piece], since=2)
    assert [p.values.tolist() for p in kept if p.name.endswith("index")] == [[1]]
    kept, plain = increments.pieces([piece], since=3)
    assert kept == [] and len(plain["tables"]) == 1  # nothing new: what is full counts
    assert increments.pieces([piece], since=None) == ([piece], {"tables": {}})


def test_when_a_full_checkpoint_costs_less():
    """If increments grow as they did: 1 + 0.1 + 0.2 > 3 · 0.2, but 1 + .. + 0.5 <= 6 · 0.5."""
    assert not full_is_cheaper([]) and not full_is_cheaper([0.1, 0.2])
    assert full_is_cheaper([0.1, 0.2, 0.3, 0.4, 0.5]) and full_is_cheaper([1.0])
    assert not full_is_cheaper([0.4, 0.4, 0.4])  # if they do not grow, go on
