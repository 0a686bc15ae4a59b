"""Files of tokens: Megatron-LM's, read and written by hand here; epochs, packing and mixtures as properties; from texts
to a run that goes on."""

import io
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from minitrain import launch
from minitrain.cli import main
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import MASKED
from minitrain.model.data.token_files import read_tokens, write_pair
from minitrain.model.data.tokenizer import Tokenizer
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.systems.data.corpus import BLOCK, Mixture, Source, open_folder

DOCUMENTS = [[3, 1, 4], [1], [5, 9, 2, 6], [], [5, 3, 5]]
HEAD, LETTERS = b"MMIDIDX\x00\x00", {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 7: "f", 8: "H"}


def by_hand(path, sequences=DOCUMENTS, marks=None, code=8, head=HEAD, version=1, shift=0, cut=None, ids=None):
    """The format of the docstring, byte by byte."""
    marks, size = range(len(sequences) + 1) if marks is None else marks, struct.calcsize(LETTERS[code])
    ids = sum(sequences, []) if ids is None else ids
    offsets = [shift + size * sum(map(len, sequences[:n])) for n in range(len(sequences))]
    path.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}{LETTERS[code]}", *ids))
    index = head + struct.pack("<QBQQ", version, code, len(sequences), len(marks))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    index += b"".join(struct.pack("<q", number) for number in [*offsets, *marks])
    path.with_suffix(".idx").write_bytes(index[:cut])
    return path.with_suffix(".bin")


def source(*lengths, first=0):
    """Documents of tokens that say where they stand in the files: two, if there are two documents."""
    ids, cut = np.arange(first, first + sum(lengths)), lengths[0] if len(lengths) > 1 else sum(lengths)
    return Source([part for part in (ids[:cut], ids[cut:]) if len(part)], np.array(lengths))


# ---- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_a_pair_of_megatron_is_read(tmp_path, code):
    """Documents of one sequence, of none and of two; an empty one is no document."""
    tokens, lengths = read_tokens(by_hand(tmp_path / "a", marks=[0, 1, 3, 3, 5], code=code))
    assert tokens.tolist() == sum(DOCUMENTS, []) and lengths.tolist() == [3, 5, 3]
    assert isinstance(tokens, np.memmap)


@pytest.mark.parametrize("vocab_size, code", [(10, 8), (65_499, 8), (65_500, 4)])
def test_a_pair_is_written_to_the_byte(tmp_path, vocab_size, code):
    assert write_pair(tmp_path / "ours.bin", iter(DOCUMENTS), vocab_size) == (5, 11)
    by_hand(tmp_path / "theirs", code=code)
    for kind in (".bin", ".idx"):
        assert (tmp_path / f"ours{kind}").read_bytes() == (tmp_path / f"theirs{kind}").read_bytes()


def array(values) -> bytes:
    np.save(file := io.BytesIO(), values)
    return file.getvalue()


def test_documents_of_an_array_end_with_a_token(tmp_path):
    (path := tmp_path / "a.npy").write_bytes(array(np.array([1, 2, 0, 0, 3], np.uint32)))
    assert [read_tokens(path, end)[1].tolist() for end in (None, 0, 3)] == [[5], [3, 1, 1], [5]]


WRONG = [
    ("begins with b'MMIDIDY", dict(head=b"MMIDIDY\0\0")), ("begins with b'MM ", dict(cut=2)),
    ("version 2", dict(version=2)), ("ids of type 7", dict(code=7)),
    ("documents that do not go from sequence 0 to 5", dict(marks=[0, 4])),
    ("documents that do not go", dict(marks=[0, 3, 2, 5])), ("documents that do not go", dict(marks=[])),
    ("a.bin has 20 bytes, and its index says 22: it is truncated", dict(ids=[1] * 10)),
    ("a.bin has 24 bytes, and its index says 22: it is of other", dict(ids=[1] * 12)),
    ("a.idx has 141 bytes, and its index says 142: it is truncated", dict(cut=-1)),
    ("do not lie end to end", dict(shift=2)), ("is empty: it has no token", dict(sequences=[[]])),
    ("has id 256, the vocabulary is 256", dict(sequences=[[1] * 99 + [256]])),
    ("has id -1, the vocabulary is 256", dict(sequences=[[1] * 99 + [-1]], code=3)),
    ("b.npy is no whole array", {"b.npy": b"\x93NUMPY"}),
    ("b.npy is no whole array", {"b.npy": array(np.ones(9, int))[:-1]}),
    ("b.npy is float64 [2]; tokens are integers", {"b.npy": array(np.ones(2))}),
    ("b.npy is int64 [2, 2]; tokens", {"b.npy": array(np.ones((2, 2), int))}),
    ("weights.json must give a weight to each of a, and no others", {"weights.json": b'{"b": 1}'}),
    ("weights[0]=0: use a finite number above 0", {"weights.json": b'{"a": 0}'}),
    ("tokenizer.json is no tokenizer.json", {"tokenizer.json": b"{}"}),
]  # fmt: skip


@pytest.mark.parametrize("said, wrong", WRONG)
def test_a_wrong_file_is_one_line(tmp_path, said, wrong):
    files = {name: content for name, content in wrong.items() if "." in name}
    by_hand(tmp_path / "a", **{} if files else wrong)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_folder(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---- samples ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 2))
def test_an_epoch_is_the_documents_end_to_end_and_each_token_an_input_once(lengths, length, epoch):
    data, total = source(*lengths), sum(lengths)
    count = (total - 1) // length
    if not count:
        return
    drawn = [data.window(epoch * count + i, length) for i in range(count)]
    windows = {pieces[0][0]: np.concatenate(pieces).tolist() for pieces in drawn}
    inputs = [token for window in windows.values() for token in window[:-1]]
    assert len(set(inputs)) == count * length and 0 < total - len(inputs) <= length
    (first,) = windows.keys() - {window[-1] for window in windows.values()}
    stream = [first]
    while stream[-1] in windows:  # the last token of a window is the first of the next
        stream += windows[stream[-1]][1:]
    assert len(stream) == count * length + 1
    documents = [[*range(end - n, end)] for n, end in zip(lengths, np.cumsum(lengths))]
    assert all((np.diff(piece) == 1).all() for pieces in drawn for piece in pieces)
    while stream:
        (whole,) = (document for document in documents if document[0] == stream[0])
        assert stream[: len(whole)] == whole[: len(stream)]
        stream = stream[len(whole) :]


def test_each_epoch_has_its_order_and_windows_are_shuffled():
    data, whole = source(*[5] * 40), source(200)
    orders = [[int(data.window(i, 10)[0][0]) for i in range(19 * n, 19 * n + 19)] for n in range(3)]
    assert len({tuple(order) for order in orders}) == 3 == len({tuple(sorted(order)) for order in orders})
    assert [data.window(i, 10, seed=1)[0][0] for i in range(19)] != orders[0]
    of_one_document = [int(whole.window(i, 10)[0][0]) for i in range(19)]
    assert sorted(of_one_document) == [*range(0, 190, 10)] != of_one_document and len(data.orders) == 2


def test_rows_are_packed_and_do_not_depend_on_the_ranks():
    data = Mixture([source(3, 7, 1, 1, 30, 5), source(50, 2, first=100)], [1, 2], vocab_size=200)
    ends = {2, 9, 10, 11, 41, 46, 149, 151}  # the last tokens of documents
    rows, plain = data.rows(6, 8, seed=4), replace(data, packed=False).rows(6, 8, seed=4)
    for step in range(6):
        tokens, targets = rows.draw(step, 0, 1)
        documents = rows.documents(step, 0, 1)
        for ranks in (2, 3):
            parts = [rows.draw(step, rank, ranks)[0] for rank in range(ranks)]
            assert torch.equal(torch.cat(parts), tokens) and tokens.dtype == targets.dtype == torch.int64
            assert sum((rows.documents(step, rank, ranks) for rank in range(ranks)), []) == documents
        for row, goal, lengths in zip(tokens.tolist(), targets.tolist(), documents, strict=True):
            assert goal == [MASKED if token in ends else token + 1 for token in row]
            last = [at for at, token in enumerate(row) if token in ends or at == 7]
            assert np.cumsum(lengths).tolist() == [at + 1 for at in last]
        assert torch.equal(plain.draw(step, 0, 1)[0], tokens)
        assert torch.equal(plain.draw(step, 0, 1)[1][:, :-1], tokens[:, 1:])
    assert plain.documents is None


def test_rows_counted_from_a_sample_are_those_of_the_batches():
    """Of packed rows with their documents: batches of 4 from sample 8 on are those from the third on."""
    data = Mixture([source(3, 7, 1, 1, 30, 5), source(50, 2, first=100)], [1, 2], vocab_size=200)
    rows, later = data.rows(4, 5, seed=2), data.rows(4, 5, seed=2, first=8)
    for rank, ranks in ((0, 1), (1, 3)):
        assert all(map(torch.equal, later.draw(0, rank, ranks), rows.draw(2, rank, ranks)))
        assert later.documents(1, rank, ranks) == rows.documents(3, rank, ranks)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.02, 1), min_size=1, max_size=5), st.integers(0, 3))
def test_a_block_has_the_shares_of_the_weights_and_sources_go_through_their_samples(weights, seed):
    data = Mixture([source(5)] * len(weights), weights)
    places = [data.place(i, seed) for i in range(2 * BLOCK)]
    for block in (places[:BLOCK], places[BLOCK:]):
        for number, weight in enumerate(weights):
            wanted = BLOCK * weight / sum(weights)
            assert abs(sum(place[0] == number for place in block) - wanted) < 1
    for number in range(len(weights)):
        samples = [sample for one, sample in places if one == number]
        assert samples == [*range(len(samples))]
    assert Mixture([source(5)] * 2, [2, 1]).shares.tolist() == [667, 333]
    assert len(weights) < 2 or [one for one, _ in places[:BLOCK]] != [one for one, _ in places[BLOCK:]]


def test_the_held_out_tenth_shares_no_token_and_its_documents_are_cut(tmp_path):
    by_hand(tmp_path / "a", [[*range(30)], [*range(30, 100)]])
    by_hand(tmp_path / "b", [[*range(100, 190)], [*range(190, 200)]])
    train, test = open_folder(tmp_path)
    assert [part.tolist() for part in train.sources[0].files] == [[*range(90)], [*range(100, 190)]]
    assert train.sources[0].lengths.tolist() == [30, 60, 90] and test.sources[0].lengths.tolist() == [10, 10]
    assert [part.tolist() for part in test.sources[0].files] == [[*range(90, 100)], [*range(190, 200)]]
    digests = {train.digest, test.digest}
    Path(tmp_path / "weights.json").write_text('{"a": 1, "b": 3}')
    weighed, _ = open_folder(tmp_path)
    assert [len(source) for source in weighed.sources] == [90, 90] and weighed.shares.tolist() == [250, 750]
    by_hand(tmp_path / "b", [[*range(100, 189)], [*range(189, 200)]])  # the same tokens
    digests |= {weighed.digest, open_folder(tmp_path)[0].digest}
    assert len(digests) == 3


def test_an_id_between_those_looked_at_is_refused_when_it_is_drawn():
    with pytest.raises(ValueError, match="tokens, in step 0, has id 9, the vocabulary is 9"):
        Mixture([source(10)], vocab_size=9).batch(0, 0, 1, 1, 9)


# ---- from texts to a run that goes on --------------------------------------------------------------------


def command(words):
    done = CliRunner().invoke(main.app, words.split())
    return str(done.exception) if isinstance(done.exception, ValueError) else done.output


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two sources, by a tokenizer of words that is made here: 90 documents, and all of them as one."""
    monkeypatch.chdir(tmp_path)
    words = "the cat sat on a mat and saw the dog run".split()
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>", "<end>"])
    model.train_from_iterator([" ".join(words)], trainer)
    begins = tokenizers.processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    model.post_processor = begins  # which documents are not given
    model.save("tokenizer.json")
    texts = [" ".join(words[n % 7 :]) for n in range(90)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in [*texts, ""]))
    Path("b.txt").write_text(" ".join(texts))
    for name in ("a.jsonl", "b.txt"):
        more = "--tokenizer tokenizer.json --end <end> --out data --name"
        assert "documents, " in command(f"tokenize {name} {more} {name[0]}")


def test_texts_become_tokens_that_end(folder):
    tokens, lengths = read_tokens(Path("data/a.bin"))
    assert lengths.tolist() == [12 - n % 7 for n in range(90)]
    ids = tokens[12:23].tolist()
    assert Tokenizer("tokenizer.json").decode(ids) == "cat sat on a mat and saw the dog run <end>"
    assert Tokenizer().decode(Tokenizer().encode(["né"])[0]) == "né"
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("c.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    for words, said in {
        "a.jsonl --out data --name a": "a.idx is there: give another",
        "a.jsonl --out data": "data has tokens of another tokenizer",
        "a.jsonl --out new --tokenizer nowhere.json": "nowhere.json is no tokenizer.json: No such file",
        "b.txt --out new --tokenizer tokenizer.json --end </s>": "'</s>' is no token of this tokenizer; it has <unk>, <end>",
        "nowhere.txt --out new": "nowhere.txt is no file",
        "latin.txt --out new": "latin.txt is no text: UnicodeDecodeError",
        "c.jsonl --out new": "c.jsonl, line 2, is no text: KeyError, 'text'",
    }.items():
        assert said in command(f"tokenize {words}")


def losses(strategy, packed):
    """Of a few steps on the folder."""
    data, _ = open_folder("data", packed=packed)
    config = GPTConfig(d_model=16, num_layers=2, num_heads=2, vocab_size=data.vocab_size)
    run, rows = parallelize(config, strategy, AdamW), data.rows(4, 16)
    return [run.total(run.step(run.batch(rows, step)).loss).item() for step in range(3)]


def test_every_layout_trains_on_the_same_packed_rows(folder):
    def far(packed, ranks=1, **axes):
        found = launch.run(losses, Strategy(precision="float64", **axes), packed, ranks=ranks)
        return max(abs(a - b) for each in found for a, b in zip(each, expected))

    (expected,) = launch.run(losses, Strategy(precision="float64"), True, ranks=1)
    assert far(True, 2, dp=2) < 1e-12 and far(True, 2, cp=2) < 1e-12 < 1e-3 < far(False)


def test_a_run_on_a_folder_goes_on_and_no_other_data_pass(folder):
    small = (
        "train --width 16 --heads 2 --layers 2 --length 16 --batch 4 --report-every 2 --sample 4 --steps 2"
    )
    words = f"{small} --checkpoint saved --data data"
    said = command(words)
    assert "It writes:\n" in said and "1,384 tokens of data" in said, said
    assert len(said.split("It writes:\n")[1].split()) >= 4
    assert "resumed at step 2" in command(f"{words} --resume")
    assert "packed=True, this run packed=False" in command(f"{words} --resume --no-packed")
    Path("data/weights.json").write_text('{"a": 1, "b": 3}')
    for line, told in {
        f"{words} --resume": "the saved position has data=",
        f"{words} --text b.txt": "train on one of them",
        f"{words} --vocab-size 5": "vocab_size=5: use a whole number from 12",
        f"{words} --end x": "'x' is no token of this tokenizer",
        f"{small} --vocab-size 5": "vocab_size=5 is of files of tokens: add --data FOLDER",
    }.items():
        assert told in command(line)
