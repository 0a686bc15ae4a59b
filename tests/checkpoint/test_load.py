"""What is read, by whom, what is refused, and that all ranks end alike."""

import json
import math
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

from minitrain import checkpoint as checkpoint_folder
from minitrain import collectives, launch
from minitrain.checkpoint.format import Damaged, File, write_file
from minitrain.checkpoint.load import Saved, agree, read, runs
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.pieces import Piece, overlap, whole_piece
from tests.saving import Checkpoint, Quick, differing, save, saved_in, state_of

BLOCK = 64
SIZES = dict(vocab_size=29, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=8)
CONFIG = GPTConfig(**SIZES, tied=True)
LAYOUTS = [
    dict(dp=4, zero=3), dict(dp=4), dict(dp=2, tp=2, zero=1), dict(pp=2, dp=2, microbatches=2),
    dict(pp=2, tp=2, schedule="dualpipe", microbatches=4),
]  # fmt: skip
ALIKE = [4, 4, 2, 2, 2]  # ranks that have the same, of most; the first cuts everything


def modules_with_blocks() -> list:
    modules = iter_modules(checkpoint_folder.__path__, "minitrain.checkpoint.")
    found = (import_module(info.name) for info in modules)
    return [module for module in found if hasattr(module, "BLOCK_BYTES")]


def small_blocks() -> None:
    """On a rank, for all it does from here on."""
    for module in modules_with_blocks():
        module.BLOCK_BYTES = BLOCK


@pytest.fixture(scope="module", autouse=True)
def small_blocks_here():
    """In this process, which reads what ranks have written."""
    before = [(module, module.BLOCK_BYTES) for module in modules_with_blocks()]
    small_blocks()
    yield
    for module, size in before:
        module.BLOCK_BYTES = size


def start(layout: dict, seed: int = 3, config: GPTConfig = CONFIG, precision: str = "float64"):
    strategy = Strategy(**layout, precision=precision, bucket_bytes=1500)
    return parallelize(config, strategy, lambda params: AdamW(params, lr=1e-2), seed=seed)


def step(run, number: int) -> float:
    def draw(_, rank, ranks):
        return random_tokens(number, rank, ranks, 8, 8, 29, seed=5)

    return run.total(run.step(run.batch(Rows(draw, 8, 8), number)).loss).item()


def save_all(folder: Path):
    small_blocks()
    found = []
    for number, layout in enumerate(LAYOUTS):
        run = start(layout)
        step(run, 0)
        found.append((save(run, folder / str(number)), state_of(run)))
    return found


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory) -> list[tuple[Checkpoint, dict]]:
    folder = tmp_path_factory.mktemp("load")
    by_rank = launch.run(save_all, folder, ranks=4)
    files = zip(*([written for written, _ in of_rank] for of_rank in by_rank))
    return [(Checkpoint(folder / str(i), f), by_rank[0][i][1]) for i, f in enumerate(files)]


def bytes_of_blocks(saved: Saved, piece: Piece) -> int:
    """What the blocks that a piece touches amount to, told from the place of each of its bytes."""
    total = 0
    for entry in saved.entries[piece.name]:
        common = overlap(entry.start, entry.shape, piece.start, piece.shape)
        if common is None:
            continue
        numbers = np.arange(math.prod(entry.shape)).reshape(entry.shape)
        inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(common[0], entry.start, common[1]))
        first = numbers[inside].reshape(-1) * entry.dtype.itemsize
        touched = {at // BLOCK for ends in (first, first + entry.dtype.itemsize - 1) for at in ends.tolist()}
        total += sum(min(BLOCK, entry.size - number * BLOCK) for number in touched)
    return total


# ---- how much is read ------------------------------------------------------------------------------------


def load_everywhere(checkpoints, states):
    """(from, to, broadcast): (wrong, read, needed in blocks, held)"""
    small_blocks()
    found = {}
    for to, layout in enumerate(LAYOUTS):
        run = start(layout, seed=4)
        for (number, checkpoint), broadcast in product(enumerate(checkpoints), (False, True)):
            if number not in (to, (to + 1) % len(LAYOUTS))[: 2 - broadcast]:
                continue
            saved = saved_in(checkpoint, broadcast)
            run.load_pieces(saved)
            pieces = run.pieces()
            needed = sum(bytes_of_blocks(saved, piece) for piece in pieces) if not broadcast else None
            held = sum(piece.values.nbytes for piece in pieces)
            found[number, to, broadcast] = differing(run, states[number]), saved.read_bytes, needed, held
    return found


@pytest.fixture(scope="module")
def loaded(saved_by) -> list[dict]:
    return launch.run(load_everywhere, *zip(*saved_by), ranks=4, timeout_s=120)


def test_a_rank_reads_its_own_bytes_or_the_blocks_around_them(loaded):
    for found in loaded:
        for (number, to, broadcast), (wrong, read_bytes, needed, held) in found.items():
            assert not wrong, (number, to, broadcast)
            if not broadcast:
                assert read_bytes == needed, (number, to)
                assert number != to or read_bytes == held, to


def test_one_reads_and_the_others_are_told(loaded, saved_by):
    """In the same layout the ranks together read each byte of the checkpoint once, instead of as often as it is
    held: by dp less. And every rank has what was saved."""
    for to, layout in enumerate(LAYOUTS):
        assert not any(found[to, to, True][0] for found in loaded)
        all_read, told = (sum(found[to, to, broadcast][1] for found in loaded) for broadcast in (False, True))
        saved = saved_in(saved_by[to][0])
        assert told == sum(entry.size for entries in saved.entries.values() for entry in entries)
        entries = (entry for file in saved.files for entry in file.entries)
        random = sum(entry.size for entry in entries if entry.name[:6] == "random")
        if layout == dict(dp=4):
            assert all_read - random == 4 * (told - random)
        if layout.get("zero") == 3:
            assert all_read == told
        if layout.get("pp") and layout.get("dp"):
            assert all_read - random == 2 * (told - random) + tied_table(saved_by[to][1], 2)


def tied_table(state: dict, dp: int) -> int:
    """Held by both ends: what one of the ends has more."""
    return dp * sum(x.nbytes for name, x in state.items() if "layers.0.tokens" in name and x.dim())


# ---- what cannot be loaded -------------------------------------------------------------------------------


def said(act) -> tuple[str, str]:
    try:
        act()
    except ValueError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def without(saved: Saved, *names: str) -> Saved:
    for name in names:
        del saved.entries[name]
    return saved


def refusals(checkpoint):
    small_blocks()
    """Each says why on all ranks, and leaves the run as it was."""
    weight, bias = "parameters/layers.1.attention.q.weight", "parameters/layers.1.attention.r.weight"
    moment = "optimizer/layers.2.mlp.up.weight/exp_avg"

    def missing(saved, *names):
        return without(saved, *names)

    def renamed(saved):
        saved.entries[bias] = saved.entries.pop(weight)
        return saved

    def on_one_rank(saved):
        if collectives.world().rank() == 2:
            del saved.entries[moment][1:]
        return saved

    deep = GPTConfig(**SIZES | dict(num_layers=4), tied=True)
    wide = GPTConfig(**SIZES | dict(d_ff=24), tied=True)
    more = GPTConfig(**SIZES, tied=True, bias=True)
    cases = [
        (dict(dp=4, zero=2), CONFIG, "float64", lambda saved: missing(saved, weight)),
        (dict(dp=4, zero=1), CONFIG, "float64", renamed),
        (dict(dp=4), CONFIG, "float64", on_one_rank),
        (dict(pp=2, dp=2), deep, "float64", lambda saved: saved),
        (dict(dp=4), wide, "float64", lambda saved: saved),
        (dict(tp=2, dp=2), more, "float64", lambda saved: saved),
        (dict(dp=4, zero=3), CONFIG, "bfloat16", lambda saved: saved),
    ]
    found = []
    for layout, config, precision, change in cases:
        run = start(layout, 4, config, precision)
        step(run, 3)
        before, saved = state_of(run), saved_in(checkpoint)
        found.append((*said(lambda: run.load_pieces(change(saved))), differing(run, before)))
    return found


REFUSALS = [
    "layers.1.attention.q.weight not at all, this model [16, 16]", "layers.1.attention.q.weight not at all",
    "elements of optimizer/layers.2.mlp.up.weight/exp_avg", "layers.3.attention.k.",
    "layers.1.mlp.down.weight [16, ", "layers.1.attention.k.bias not at all, this model [8]",
    "torch.float64 in the checkpoint, [29, 16] torch.bfloat16 in this run",
]  # fmt: skip


def test_another_model_is_refused_in_one_line_and_nothing_has_changed(saved_by):
    by_rank = launch.run(refusals, saved_by[0][0], ranks=4)
    for words, *told in zip(REFUSALS, *by_rank, strict=True):
        assert len({(kind, text) for kind, text, _ in told}) == 1, "other words on other ranks"
        kind, text, _ = told[0]
        assert kind == "ValueError" and words in text and "\n" not in text, text
        assert not any(changed for _, _, changed in told), text


def damaged(checkpoint, states):
    """One byte of the data of a file that some ranks read."""
    small_blocks()
    world, found = collectives.world(), []
    for layout, broadcast in product((LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]), (False, True)):
        run = start(layout, seed=4)
        saved = saved_in(checkpoint, broadcast)
        kind, text = said(lambda: run.load_pieces(saved))
        again = said(lambda: run.load_pieces(saved))
        found.append((kind, text, again == (kind, text), world.rank()))
    return found


def test_damage_that_one_rank_finds_ends_the_load_on_all(saved_by, tmp_path):
    """Also with one reader, and where the others would wait for what comes after."""
    (good, state), folder = saved_by[0], tmp_path / "damaged"
    folder.mkdir()
    for file in good.files:
        (folder / file.name).write_bytes((good.folder / file.name).read_bytes())
    path = folder / good.files[2].name
    file = File(path, good.files[2])
    entry = next(entry for entry in file.entries if entry.name.startswith("optimizer/"))
    at, name = entry.first_byte, entry.name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    by_rank = launch.run(damaged, Checkpoint(folder, good.files), state, ranks=4)
    for told in zip(*by_rank):
        assert len({(kind, text) for kind, text, _, _ in told}) == 1
        kind, text, again, _ = told[0]
        assert kind == "Damaged" and name in text and "rank-2" in text and "\n" not in text
        assert all(one[2] for one in told), "the second try says the same"


def test_agreement():
    """The first rank's error, on all, in its own words; what is on the disk as Damaged."""

    def rank():
        group, mine = collectives.world(), collectives.world().rank()

        def act(errors):
            if mine in errors:
                raise errors[mine]
            return 7 * mine

        cases = [
            {},
            {1: ValueError("second"), 2: Damaged("third")},
            {3: Damaged("über")},
            {0: OSError(5, "I/O error", "file"), 3: ValueError("x")},
        ]
        return [said(lambda: act({})) and act({})] + [
            said(lambda: agree(lambda: act(c), group)) for c in cases
        ]

    for number, found in enumerate(launch.run(rank, ranks=4)):
        assert found[0] == 7 * number and found[1] == ("nothing", "")
        assert found[2] == ("ValueError", "second") and found[3] == ("Damaged", "über")
        assert found[4][0] == "Damaged" and "I/O error" in found[4][1] and "file" in found[4][1]


# ---- one piece -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_any_rectangle_of_any_dtype(dtype, tmp_path, monkeypatch):
    """Of three dims, into memory that lies otherwise; and a number."""
    for module in modules_with_blocks():
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    whole = (torch.arange(5 * 6 * 7) % (2 if dtype is torch.bool else 100)).view(5, 6, 7)
    whole = whole.to(torch.float32).to(dtype)
    own = [whole_piece("W", whole), whole_piece("n", whole[1, 2, 3].clone())]
    saved = Saved([File(tmp_path / "file", write_file(Quick(), tmp_path / "file", own, {}))])
    for start_, shape in (
        ((0, 0, 0), (5, 6, 7)), ((1, 2, 3), (3, 2, 4)), ((4, 0, 0), (1, 6, 7)), ((0, 5, 6), (5, 1, 1)),
    ):  # fmt: skip
        expected = whole[tuple(slice(a, a + n) for a, n in zip(start_, shape))].float()
        cases = (torch.zeros(shape, dtype=dtype), torch.zeros(shape[::-1], dtype=dtype).permute(2, 1, 0))
        for values in cases:
            saved.fill(Piece("W", (5, 6, 7), start_, values))
            saved.finish()
            assert torch.equal(values.float(), expected)
    number = torch.zeros((), dtype=dtype)
    saved.fill(whole_piece("n", number))
    assert number.float() == whole[1, 2, 3].float()


def test_weights_come_in_another_dtype_and_codes_do_not(tmp_path):
    """Also one that is as wide."""
    pieces = (
        whole_piece("W", torch.arange(9.0).bfloat16()),
        whole_piece("C", torch.ones(3, dtype=torch.uint8)),
    )
    file = File(tmp_path / "file", write_file(Quick(), tmp_path / "file", pieces, {}))
    for dtype in (torch.float16, torch.float32, torch.float64):
        saved = Saved([file], weights=True)
        for name, numbers in (("W", torch.zeros(9, dtype=dtype)), ("C", torch.zeros(3, dtype=dtype))):
            saved.fill(whole_piece(name, numbers))
            assert name == "C" or torch.equal(numbers, torch.arange(9, dtype=dtype))
        with pytest.raises(ValueError, match="use the model and the precision it was saved in"):
            saved.finish()
    with pytest.raises(ValueError, match="use the model and the precision it was saved in"):
        Saved([file]).check(whole_piece("W", torch.zeros(9)))


def test_what_is_wrong_is_told_at_the_end(tmp_path):
    numbers = {"numbers": {"W": {"step": 1}}}
    written = write_file(Quick(), tmp_path / "file", [whole_piece("W", torch.ones(4))], numbers)
    saved = Saved([File(tmp_path / "file", written)])
    saved.fill(whole_piece("V", torch.ones(4)))
    values = torch.zeros(4)
    saved.fill(whole_piece("W", values))
    with pytest.raises(ValueError, match="no V"):
        saved.finish()
    saved.finish()
    assert values.sum() == 0 and saved.plain == {"numbers": {"W": {"step": 1}}} and "W" in saved


def test_plain_values_of_all_files_are_put_together(tmp_path):
    files = []
    for number in range(2):
        plain = {"numbers": {str(number): {"step": number}}, "loss_scale": {"factor": 2.0}, "more": [number]}
        files.append(File(tmp_path / str(number), write_file(Quick(), tmp_path / str(number), [], plain)))
    saved = Saved(files)
    expected = {"numbers": {"0": {"step": 0}, "1": {"step": 1}}, "loss_scale": {"factor": 2.0}, "more": [1]}
    assert saved.plain == expected == json.loads(json.dumps(saved.plain)) and callable(read)


def test_neighbouring_blocks_are_read_at_once_and_none_twice():
    """Of a rectangle whose rows lie apart: [rows, numbers of 4 bytes] from byte `corner` on of 8 blocks."""
    block, size = BLOCK, 8 * BLOCK
    assert runs(0, (4, 2), [16, 4], 4, size) == [(0, block)]  # all in one
    assert runs(0, (3, 1), [block, 4], 4, size) == [(0, 3 * block)]  # neighbours
    assert runs(0, (3, 1), [2 * block, 4], 4, size) == [(n * block, (n + 1) * block) for n in (0, 2, 4)]
    assert runs(block - 4, (2, 2), [block, 4], 4, size) == [(0, 3 * block)]  # rows across a border
    assert runs(7 * block, (1, 3), [12, 4], 4, size - 8) == [(7 * block, size - 8)]  # the last one is short
