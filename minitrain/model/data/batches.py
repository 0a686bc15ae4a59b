"""Real text as tokens, and a batch that is a pure function of (step, rank, size).

Bytes are the tokens (vocabulary 256): `Text.builtin()` reads the documentation inside every CPython,
`Text.open(path)` any file or folder of yours. N tokens hold W = (N - 1) // T windows. Sample i of a run is a
window of epoch i // W, shuffled anew each epoch, and a step of global batch size B is samples step·B to
step·B + B - 1, shared out by rows:

    Global[B, T] = rank 0's rows, rank 1's rows, ...        rank r of n holds rows B·r//n to B·(r+1)//n - 1

So the global batch does not depend on the number of ranks, and the state of the loader is the number of the
step. If n does not divide B, parts differ by one row: divide a loss by its global number of valid tokens.
Sends nothing; holds N bytes. The shuffle computes any one index by itself: Black and Rogaway 2002, "Ciphers
with arbitrary finite domains". Differs from Megatron-LM, which writes the order to files.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitrain.model.data.tokenizer import Tokenizer
from minitrain.ranks.checks import require_ints, require_positive_ints

VOCAB = 256
MASKED = -100  # torch's default ignore_index: a target that no loss counts
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py")


@dataclass(frozen=True)
class Rows:
    """Global batches by number: `draw(step, rank, ranks)` gives tokens and targets of `rows_of`. Where rows
    are packed, `documents(step, rank, ranks)` gives for each the lengths of its documents, T in all."""

    draw: Callable[[int, int, int], tuple[Tensor, Tensor]]
    batch_size: int
    length: int
    documents: Callable[[int, int, int], Sequence[Sequence[int]]] | None = None


class Data:
    """What a Trainer asks of its tokens: a Text, or a Mixture of files (corpus.py). Each has a name, a
    vocab_size, a tokenizer or None, a length, an `identity` of plain values, `num_windows(length)`, and
    `batch`: this rank's tokens and targets (each the next token), int64 [rows, T]."""

    def rows(self, batch_size: int, length: int, seed: int = 0, first: int = 0) -> Rows:
        """Batches from sample `first` on."""
        sizes = dict(batch_size=batch_size, length=length, seed=seed, first=first)
        return Rows(partial(self.batch, **sizes), batch_size, length)

    def position(self, step: int, batch_size: int, length: int, seed: int = 0) -> dict:
        """All there is to save: plain numbers, and what tells these data from others."""
        return {"step": step, "batch_size": batch_size, "length": length, "seed": seed, **self.identity}

    def resume(self, position: dict, batch_size: int, length: int, seed: int = 0) -> int:
        """The step to go on with, on any number of ranks; a position in other data or batches is refused."""
        for name, now in self.position(0, batch_size, length, seed).items():
            if name != "step" and position.get(name) != now:
                raise ValueError(f"the saved position has {name}={position.get(name)}, this run {name}={now}")
        return position["step"]


@dataclass(frozen=True)
class Text(Data):
    """A text in memory, one token per byte, and the batches that can be cut from it."""

    data: bytes = field(repr=False)
    name: str = "text"
    vocab_size, tokenizer = VOCAB, Tokenizer()

    def __post_init__(self):
        if not isinstance(self.data, bytes):
            raise ValueError(f"{self.name} is {type(self.data).__name__}, tokens are bytes: text.encode()")
        if not self.data.strip():
            raise ValueError(f"{self.name} is empty: {len(self.data)} bytes, nothing but white space")
        if b"\0" in self.data:
            raise ValueError(f"{self.name} is binary: it holds zero bytes; give plain text, unpacked")

    @classmethod
    def builtin(cls) -> "Text":
        """English that is on this machine already: the language reference that `help()` shows, about 350 KB.
        It differs a little from one Python version to the next, so nothing exact may depend on it."""
        from pydoc_data.topics import topics

        paragraphs = (p for name in sorted(topics) for p in re.split("\n\n+", topics[name].strip("\n")))
        # Topics repeat one another: each paragraph once, or the held-out text would hold what was trained on.
        prose = [p for p in dict.fromkeys(paragraphs) if not p.lstrip().startswith(("+-", "|"))]
        return cls("\n\n".join(prose).encode(), "Python's own documentation")

    @classmethod
    def open(cls, path: str | Path) -> "Text":
        """A file, or every text file of a folder and its subfolders, by name (hidden ones left out)."""
        path = Path(path).expanduser()
        if path.is_file():
            return cls(path.read_bytes(), str(path))
        if not path.is_dir():
            raise ValueError(f"{path} does not exist: give a text file or a folder of text files")
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        shown = [file for file in files if not re.search(r"(^|/)\.", file.relative_to(path).as_posix())]
        texts = [cls(data, str(file)) for file in shown if (data := file.read_bytes()).strip()]
        if not texts:
            raise ValueError(f"{path} holds no text: looked for *{', *'.join(TEXT_SUFFIXES)}")
        return cls(b"\n\n".join(text.data for text in texts), str(path))

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, str]:
        return {"text": self.digest}

    def split(self) -> tuple["Text", "Text"]:
        """The text to train on and, its last tenth, the text to test on: they share no byte."""
        cut = len(self) - round(len(self) / 10)
        if cut == len(self):
            raise ValueError(f"{self.name} has {len(self)} tokens, and no tenth: give a longer text")
        first, last = self.data[:cut], self.data[cut:]
        return Text(first, f"{self.name}, training part"), Text(last, f"{self.name}, held-out part")

    def num_windows(self, length: int) -> int:
        """Samples in an epoch. One token more than T is needed: the last target."""
        require_positive_ints(1 << 40, length=length)
        if len(self) <= length:
            raise ValueError(f"{self.name} has {len(self)} tokens, length={length} needs {length + 1}")
        return (len(self) - 1) // length

    def window(self, sample: int, length: int, seed: int = 0) -> int:
        """Which window is sample 0, 1, 2, ... of an endless run: each epoch permutes all windows."""
        epoch, index = divmod(sample, self.num_windows(length))
        return permute(index, self.num_windows(length), f"{seed}/{epoch}")

    def batch(self, step: int, rank: int, size: int, batch_size: int, length: int, seed=0, first=0) -> tuple:
        """This rank's rows of the global batch: tokens and targets (each the next token), int64 [rows, T]."""
        samples = (first + step * batch_size + row for row in rows_of(rank, size, batch_size))
        starts = np.array([self.window(sample, length, seed) * length for sample in samples])
        windows = np.frombuffer(self.data, np.uint8)[starts[:, None] + np.arange(length + 1)].astype(np.int64)
        return torch.tensor(windows[:, :-1]), torch.tensor(windows[:, 1:])  # copies; work under fake tensors


def rows_of(rank: int, size: int, batch_size: int) -> range:
    """The rows of a global batch that rank `rank` of `size` holds. Parts differ by one row at most."""
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} of size={size}: ranks are 0 to size - 1, and size is at least 1")
    if batch_size < size:
        raise ValueError(f"batch_size={batch_size} leaves some of {size} ranks without a row; use >= {size}")
    return range(batch_size * rank // size, batch_size * (rank + 1) // size)


def permute(index: int, size: int, key: str) -> int:
    """Where a keyed shuffle of range(size) sends `index`, in O(1) memory: a Feistel network permutes the
    2^(2·half) >= size numbers whatever its hash, since a round (left, right) -> (right, left ^ hash) can be
    undone. Repeated until the result is below `size`, four times at most on average, it permutes range."""
    require_positive_ints(1 << 62, size=size)
    require_ints(0, size - 1, index=index)
    half = ((size - 1).bit_length() + 1) // 2
    while True:
        left, right = index >> half, index & (1 << half) - 1
        for round_number in range(4):
            left, right = right, left ^ hashed(f"{key}/{round_number}/{right}") & (1 << half) - 1
        index = left << half | right
        if index < size:
            return index


def random_tokens(
    step: int, rank: int, size: int, batch_size: int, length: int, vocab=VOCAB, seed=0, masked=False
) -> tuple[Tensor, Tensor]:
    """Seeded noise in the form of `Text.batch`, the same on every machine. `masked` hides the last
    length·row // batch_size targets of each row, so that ranks count different numbers of valid tokens."""
    require_positive_ints(batch_size=batch_size, length=length, vocab=vocab)
    rows = rows_of(rank, size, batch_size)
    # Each row has a seed of its own, so a rank makes only the rows it holds.
    seeds = [torch.Generator().manual_seed(hashed(f"{seed}/{step}/{row}")) for row in rows]
    windows = torch.stack([torch.randint(vocab, (length + 1,), generator=generator) for generator in seeds])
    # Copies: views would share what is masked below.
    tokens, targets = windows[:, :-1].clone(), windows[:, 1:].clone()
    if masked:
        for target, row in zip(targets, rows):
            target[length - length * row // batch_size :] = MASKED
    return tokens, targets


def hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest)  # 56 bits: fits every seed type
