"""Batches that are pure functions of (step, rank, size), on any text, and near-duplicates that are found."""

import random

import pytest
import torch
from torch._subclasses import FakeTensorMode

from minitrain.model.data.batches import MASKED, Text, permute, random_tokens
from minitrain.systems.data.deduplicate import jaccard, keep_first_of_each, minhash, shingles

TEXT = Text(bytes(random.Random(0).choices(range(1, 256), k=1009)), "noise")


def test_the_found_text_is_english_and_long_enough_to_train_on():
    text = Text.builtin()
    assert len(text) > 200_000
    words = text.data.decode().lower().split()
    assert words.count("the") / len(words) > 0.03  # about one word in twenty of any English prose
    paragraphs = text.data.split(b"\n\n")
    assert len(paragraphs) == len(set(paragraphs))  # no paragraph of the training part in the held-out part
    assert Text.builtin().digest == text.digest and "data" not in repr(text)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_global_batch_does_not_depend_on_the_ranks(size):
    for make in (TEXT.batch, random_tokens, lambda *args: random_tokens(*args, masked=True)):
        whole_tokens, whole_targets = make(3, 0, 1, 6, 10)
        parts = [make(3, rank, size, 6, 10) for rank in range(size)]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), whole_tokens)
        assert torch.equal(torch.cat([targets for _, targets in parts]), whole_targets)
        assert whole_tokens.shape == whole_targets.shape == (6, 10) and whole_tokens.dtype == torch.int64
        rows = [len(tokens) for tokens, _ in parts]
        assert max(rows) - min(rows) <= 1 and sum(rows) == 6
        assert not torch.equal(whole_tokens, make(4, 0, 1, 6, 10)[0])  # control: another step, another batch


def test_targets_are_the_next_tokens():
    tokens, targets = TEXT.batch(0, 0, 1, 4, 10)
    for row, (token, target) in enumerate(zip(tokens, targets)):
        start = TEXT.window(row, 10) * 10
        assert bytes(token.tolist()) == TEXT.data[start : start + 10]
        assert bytes(target.tolist()) == TEXT.data[start + 1 : start + 11]


@pytest.mark.parametrize("length", [1, 7, 100, 1008])
def test_an_epoch_reads_every_window_once(length):
    count = TEXT.num_windows(length)
    assert count == 1008 // length
    epochs = [[TEXT.window(epoch * count + i, length) for i in range(count)] for epoch in range(3)]
    assert all(set(epoch) == set(range(count)) for epoch in epochs)
    if count > 20:
        assert len({tuple(epoch) for epoch in epochs}) == 3  # and in another order each time
        assert [TEXT.window(i, length, seed=1) for i in range(count)] != epochs[0]


@pytest.mark.parametrize("size", [*range(1, 18), 1000, 4097])
def test_permute_is_a_permutation_that_shuffles(size):
    order = [permute(i, size, "key") for i in range(size)]
    assert sorted(order) == list(range(size))
    if size >= 1000:  # a shuffle leaves about one index in place and one neighbour beside its neighbour
        assert sum(i == j for i, j in enumerate(order)) < 8
        assert sum(abs(a - b) == 1 for a, b in zip(order, order[1:])) < 12


def test_a_batch_may_straddle_two_epochs():
    count = TEXT.num_windows(
        100
    )  # 10 windows; batches of 4: the third takes the last two and two of the next epoch
    seen = [TEXT.window(sample, 100) for sample in range(20)]
    drawn = torch.cat([TEXT.batch(step, 0, 1, 4, 100)[0] for step in range(5)])
    assert [bytes(row.tolist()) for row in drawn] == [TEXT.data[w * 100 : w * 100 + 100] for w in seen]
    assert sorted(seen) == sorted([*range(count)] * 2)


def test_masks_leave_every_rank_another_number_of_valid_tokens():
    counts = [int((random_tokens(0, rank, 4, 8, 16, masked=True)[1] != MASKED).sum()) for rank in range(4)]
    assert counts == [30, 22, 14, 6]  # 16 + 14, 12 + 10, 8 + 6, 4 + 2
    assert int((random_tokens(0, 0, 1, 8, 16)[1] == MASKED).sum()) == 0
    assert torch.equal(random_tokens(0, 0, 1, 8, 16, masked=True)[0], random_tokens(0, 0, 1, 8, 16)[0])


def test_random_tokens_are_the_same_on_every_machine():
    assert random_tokens(0, 0, 1, 1, 8)[0].tolist() == [[203, 127, 58, 202, 101, 30, 52, 125]]
    assert random_tokens(0, 0, 1, 100, 50, vocab=3)[0].unique().tolist() == [0, 1, 2]


def test_batches_are_made_in_a_dry_run_too():
    with FakeTensorMode():
        for make in (TEXT.batch, lambda *args: random_tokens(*args, masked=True)):
            tokens, targets = make(0, 1, 2, 7, 8)
            assert tokens.shape == targets.shape == (4, 8)


def test_position_is_saved_and_resumed_on_any_number_of_ranks():
    position = TEXT.position(7, batch_size=4, length=10, seed=2)
    assert all(isinstance(value, (int, str)) for value in position.values())
    assert TEXT.resume(position, 4, 10, 2) == 7
    longer = Text(TEXT.data + b"!", "noise and one byte more")
    for text, sizes, words in (
        (TEXT, (8, 10, 2), "batch_size=4"),
        (TEXT, (4, 5, 2), "length=10"),
        (TEXT, (4, 10, 3), "seed=2"),
        (longer, (4, 10, 2), "text="),
    ):
        with pytest.raises(ValueError, match=words):
            text.resume(position, *sizes)


def test_split_shares_no_byte():
    train, held_out = TEXT.split()
    assert train.data + held_out.data == TEXT.data and len(held_out) == 101
    assert train.digest != TEXT.digest


def test_open_reads_a_file_or_a_folder_in_order(tmp_path):
    for name, words in {
        "b.txt": "second",
        "a/z.md": "first",
        "c.py": "third",
        "d.bin": "\0",
        ".git/x.txt": "hidden",
        "empty.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(words)
    assert Text.open(tmp_path).data == b"first\n\nsecond\n\nthird"
    assert Text.open(str(tmp_path / "b.txt")).data == b"second"
    assert Text.open(tmp_path / ".git").data == b"hidden"  # who names it means it
    (tmp_path / ".git/below").mkdir()
    (tmp_path / ".git/below/y.txt").write_text("and what is below")
    assert Text.open(tmp_path / ".git/below").data == b"and what is below"


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "does not exist: give a text file"),
        (b"", "is empty: 0 bytes"),
        (b" \n", "is empty: 2 bytes"),
        (b"PK\0\3", "is binary"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content, words):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        Text.open(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: TEXT.batch(0, 0, 1, 2, 1009), "noise has 1009 tokens, length=1009 needs 1010"),
        (lambda: TEXT.batch(0, 0, 4, 3, 8), "batch_size=3 leaves some of 4 ranks"),
        (lambda: TEXT.batch(0, 4, 4, 8, 8), "rank=4 of size=4: ranks are 0 to size - 1"),
        (lambda: Text("abc"), "text is str, tokens are bytes"),
    ],
)
def test_bad_sizes_are_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_open_of_a_folder_without_text_says_what_it_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text: looked for \*.txt, "):
        Text.open(tmp_path)


def planted(rng, words, share):
    """A copy with a share of the words, in one block, replaced: J = (1 - share) / (1 + share), nearly."""
    block, start = round(share * len(words)), rng.randrange(len(words) // 2)
    return words[:start] + [f"new{rng.random()}" for _ in range(block)] + words[start + block :]


def test_wanjuan_cc():
    """Planted near-duplicates of real paragraphs go, the originals and distant relations stay, in order."""
    rng = random.Random(0)
    originals = [p.split() for p in Text.builtin().data.decode().split("\n\n") if len(p.split()) >= 60][:80]
    originals = [
        originals[i] for i in keep_first_of_each([" ".join(p) for p in originals])
    ]  # Python repeats itself
    assert len(originals) > 60
    near = [planted(rng, words, 0.05) for words in originals]  # J = 0.90, less what the block's edges cost
    far = [planted(rng, words, 0.5) for words in originals]  # J = 0.33
    documents, count = [" ".join(words) for words in originals + near + far], len(originals)
    assert all(jaccard(shingles(documents[i]), shingles(documents[count + i])) > 0.7 for i in range(count))
    assert keep_first_of_each(documents) == [*range(count), *range(2 * count, 3 * count)]
    assert keep_first_of_each(documents, threshold=1.0) == list(
        range(len(documents))
    )  # control: exact copies only
    assert keep_first_of_each(["One  two"] * 3 + ["one two"]) == [0]


def test_minhash_estimates_the_similarity_of_sets():
    a, b = set(map(str, range(300))), set(map(str, range(100, 400)))  # J = 200 / 400
    same = [x == y for x, y in zip(minhash(a, 256), minhash(b, 256))]
    assert sum(same) / 256 == pytest.approx(0.5, abs=0.12)  # four standard deviations


def test_what_was_not_kept_pushes_nothing_out():
    """The second is near the first and goes; the third is near the second only, and stays."""
    documents = [" ".join(map(str, range(first, first + 10))) for first in (0, 2, 4)]
    for share, kept in ((0.6, [0, 2]), (0.4, [0]), (0.7, [0, 1, 2])):  # 8 of 12 words in common, 6 of 14
        assert keep_first_of_each(documents, share, words=1, bands=64, rows=1) == kept


def test_a_document_that_is_just_as_near_as_the_threshold_goes():
    assert shingles("A b  c", 2) == {"a b", "b c"} and shingles("a b", 2) == {"a b"} == shingles("a b", 3)
    pair = ["a b c", "a b d"]  # 2 of 4 words in common
    kept = [keep_first_of_each(pair, share, words=1, bands=64, rows=1) for share in (0.5, 0.51)]
    assert kept == [[0], [0, 1]]
