"""Rows from files of tokens: documents shuffled each epoch, cut into windows, packed, mixed by weights.

    documents of a source in the order of epoch e   | 7 .. | 2 ....... | 9 . | 4 ......   N tokens, end to end
    windows of T + 1 tokens, each sharing one       |--------|--------|--------|          W = (N - 1) // T

Sample j of a source is a window of its epoch j // W; the cipher of batches.py shuffles windows as well. Of
BLOCK samples of a mixture each source has its share, weight · BLOCK to one sample, shuffled, and goes through
its own epochs. So a batch is a function of (seed, step), for any number of ranks. `packed`: a row says the
lengths of its documents, and the last token of a document has no target. A sample costs a search among
documents. Holds 48 bytes a document, 16 of them for each of two epochs, made by a sort. Sends nothing.
Megatron-LM, core/datasets/{gpt,blended}_dataset.py. Differs: no order in files, and each epoch has its own.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitrain.model.data.batches import MASKED, Data, Rows, Text, hashed, permute, rows_of
from minitrain.model.data.token_files import CHUNK, read_tokens, require, require_ids
from minitrain.model.data.tokenizer import Tokenizer
from minitrain.ranks.checks import require_ints, require_positive, require_text

BLOCK = 1000  # samples of a mixture
EDGE = 1 << 14  # so many first and last tokens tell a file from others


@dataclass(frozen=True, eq=False)
class Source:
    """Documents that are shuffled together, end to end in files of tokens."""

    files: Sequence[np.ndarray]
    lengths: np.ndarray  # of the documents, 1 or more each
    name: str = "tokens"
    orders: dict = field(default_factory=dict, repr=False)  # of the last two epochs

    def __post_init__(self):
        right = (np.asarray(self.lengths) > 0).all() and sum(map(len, self.files)) == np.sum(self.lengths)
        require(right, self.name, "must have documents of 1 token or more each, as many as there are in all")

    @cached_property
    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Where documents and files begin, and the last file ends, in all tokens."""
        return np.cumsum(self.lengths) - self.lengths, np.cumsum([0, *map(len, self.files)])

    def __len__(self) -> int:
        return int(self.starts[1][-1])

    num_windows = Text.num_windows

    def order(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch, and where each ends."""
        if (seed, epoch) not in self.orders:
            for old in sorted(self.orders)[:-1]:
                del self.orders[old]
            order = shuffled(len(self.lengths), f"{seed}/{epoch}")
            self.orders[seed, epoch] = order, np.cumsum(self.lengths[order])
        return self.orders[seed, epoch]

    def window(self, sample: int, length: int, seed: int = 0) -> list[np.ndarray]:
        """The T + 1 tokens of a sample, in the documents or parts of documents that they are."""
        epoch, index = divmod(sample, self.num_windows(length))
        first = permute(index, self.num_windows(length), f"{seed}/{epoch}") * length
        (order, ends), (starts, files) = self.order(seed, epoch), self.starts
        last, at, pieces = first + length + 1, np.searchsorted(ends, first, "right"), []
        while first < last:
            size, document = min(ends[at], last) - first, order[at]
            start = starts[document] + self.lengths[document] - (ends[at] - first)
            file = np.searchsorted(files, start, "right") - 1
            pieces.append(self.files[file][start - files[file] :][:size])
            first, at = first + size, at + 1
        return pieces


@dataclass(frozen=True, eq=False)
class Mixture(Data):
    """Samples of several sources, in proportion to their weights."""

    sources: Sequence[Source]
    weights: Sequence[float] = (1.0,)
    vocab_size: int = 256
    packed: bool = True
    tokenizer: Tokenizer | None = None
    name: str = "tokens"
    digest: str = ""

    def __post_init__(self):
        require_positive(weights=self.weights)
        each = len(self.weights) == len(self.sources) and min(self.weights) / sum(self.weights) >= 1 / BLOCK
        require(each, self.name, f"must have a weight for each source, 1/{BLOCK} of all or more")

    @property
    def identity(self) -> dict[str, str | bool]:
        return {"data": self.digest, "packed": self.packed}

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def num_windows(self, length: int) -> int:
        return sum(source.num_windows(length) for source in self.sources)

    @cached_property
    def shares(self) -> np.ndarray:
        """Of a block: rounded down, and those with the largest remainders up."""
        wanted = np.array(self.weights) / sum(self.weights) * BLOCK
        shares = wanted.astype(int)
        shares[np.argsort(shares - wanted)[: BLOCK - shares.sum()]] += 1
        return shares

    def place(self, sample: int, seed: int = 0) -> tuple[int, int]:
        """The source of sample 0, 1, 2, ... of a run, and which of that source's samples it is."""
        block, at = divmod(sample, BLOCK)
        dealt = np.repeat(range(len(self.shares)), self.shares)[shuffled(BLOCK, f"{seed}/block {block}")]
        return dealt[at], int(block * self.shares[dealt[at]] + (dealt[:at] == dealt[at]).sum())

    def windows(self, step, rank, size, batch_size, length, seed=0, first=0) -> Iterator[list[np.ndarray]]:
        for row in rows_of(rank, size, batch_size):
            source, sample = self.place(first + step * batch_size + row, seed)
            yield self.sources[source].window(sample, length, seed)

    def batch(self, step: int, *place, **sizes) -> tuple[Tensor, Tensor]:
        drawn = list(self.windows(step, *place, **sizes))
        rows = np.stack([np.concatenate(pieces).astype(np.int64) for pieces in drawn])
        require_ids(rows, self.vocab_size, f"{self.name}, in step {step},")
        targets = rows[:, 1:].copy()
        for target, pieces in zip(targets, drawn if self.packed else ()):
            target[np.cumsum([len(piece) for piece in pieces])[:-1] - 1] = MASKED
        return torch.tensor(rows[:, :-1]), torch.tensor(targets)

    def documents(self, *place, **sizes) -> list[list[int]]:
        """Of each of this rank's rows the lengths of its documents, or parts of documents: T in all."""
        lengths = ([len(piece) for piece in pieces] for pieces in self.windows(*place, **sizes))
        return [[*before, last - 1] if last > 1 else before for *before, last in lengths]

    def rows(self, *sizes, **more) -> Rows:
        rows = super().rows(*sizes, **more)
        return replace(rows, documents=partial(self.documents, **rows.draw.keywords)) if self.packed else rows


def shuffled(size: int, key: str) -> np.ndarray:
    """A permutation of range(size), by numbers of a generator that are the same in every numpy."""
    return np.argsort(np.random.Philox(key=hashed(key)).random_raw(size), kind="stable")


def open_folder(folder: Path, vocab_size: int | None = None, packed=True, end="") -> list[Mixture]:
    """The tokens to train on and, the last tenth of each file, those to test on, of a folder with

        wiki.bin, wiki.idx, code.npy    files of tokens, and without weights one source
        tokenizer.json                  if there is none, ids are bytes, or as many as `vocab_size`
        weights.json                    of a mixture: {"wiki": 3, "code": 1}

    `end`: the token, or its id, that ends documents of a .npy."""
    require_text(end=end)
    folder = Path(folder).expanduser()
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".bin", ".npy"))
    require(paths, folder, "has no file of tokens: looked for *.bin with *.idx, and *.npy")
    there = (file := folder / "tokenizer.json").exists()
    tokenizer = Tokenizer(file if there else None)
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    require_ints(tokenizer.vocab_size if there else 1, 1 << 31, vocab_size=size)
    end = int(end) if end.isdecimal() else tokenizer.id_of(end) if end else None
    weights = read_weights(folder / "weights.json", [path.stem for path in paths])
    digest, halves = hashlib.sha256(repr(weights).encode()), []
    for path in paths:
        tokens, lengths = read_tokens(path, end)
        for some in (tokens[:CHUNK], tokens[-CHUNK:]):  # a batch looks at all others
            require_ids(some, size, path)
        for told in (np.array([len(tokens), len(lengths)]), lengths, tokens[:EDGE], tokens[-EDGE:]):
            digest.update(told.tobytes())
        halves.append(split(tokens, lengths, str(path)))
    more = dict(vocab_size=size, packed=packed, digest=digest.hexdigest()[:16], name=str(folder))
    more |= dict(tokenizer=tokenizer if there or size == tokenizer.vocab_size else None)
    parts = zip(*halves)  # of all files
    return [Mixture(part, weights, **more) if weights else Mixture([join(part)], **more) for part in parts]


def read_weights(path: Path, names: list[str]) -> list[float]:
    """In the order of the names; none, if there is no such file."""
    if not path.exists():
        return []
    try:
        weights = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    right = isinstance(weights, dict) and sorted(weights) == sorted(names)
    require(right, path, f"must give a weight to each of {', '.join(names)}, and no others")
    return [weights[name] for name in names]


def split(tokens: np.ndarray, lengths: np.ndarray, name: str) -> tuple[Source, Source]:
    """All but the last tenth of the tokens, and that; a document that the cut goes through becomes two."""
    cut, ends = len(tokens) - round(len(tokens) / 10), np.cumsum(lengths)
    edges = np.unique(np.append(ends, [0, cut]))
    first, last = np.diff(edges[edges <= cut]), np.diff(edges[edges >= cut])
    train = Source([tokens[:cut]], first, f"{name}, training part")
    return train, Source([tokens[cut:]], last, f"{name}, held-out part")


def join(sources: Sequence[Source]) -> Source:
    lengths = np.concatenate([source.lengths for source in sources])
    return Source([tokens for source in sources for tokens in source.files], lengths, sources[0].name)
