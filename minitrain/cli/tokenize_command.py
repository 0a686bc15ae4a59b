"""`minitrain tokenize`: texts to a folder of tokens that `minitrain train --data` reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo


def tokenize(
    files: Annotated[list[Path], Argument(help="a document each; of a .jsonl each line, its 'text'")],
    out: Annotated[Path, Option(help="folder for NAME.bin, NAME.idx and the tokenizer")],
    tokenizer: Annotated[Path | None, Option(help="a tokenizer.json; else a token is a byte")] = None,
    end: Annotated[str | None, Option(help="token that ends a document, as '<|endoftext|>'")] = None,
    name: Annotated[str, Option(help="of the pair of files")] = "tokens",
) -> None:
    """Write texts as tokens to a folder, in the format of Megatron-LM, for minitrain train --data.

    \b
    minitrain tokenize a.txt b.txt --out data
    minitrain tokenize wiki.jsonl --tokenizer tokenizer.json --end '</s>' --out data"""
    from minitrain.model.data.token_files import require, write_pair
    from minitrain.model.data.tokenizer import Tokenizer

    encoder, copy = Tokenizer(tokenizer), out / "tokenizer.json"
    ending = [] if end is None else [encoder.id_of(end)]
    for path in files:
        require(path.is_file(), path, "is no file: give texts, or .jsonl with a text a line")
    require(not (out / f"{name}.idx").exists(), out / f"{name}.idx", "is there: give another --name or --out")
    there, wanted = (path.read_bytes() if path and path.exists() else b"" for path in (copy, tokenizer))
    new = not there and not list(out.glob("*.idx"))
    require(new or there == wanted, out, "has tokens of another tokenizer: write to another folder")
    out.mkdir(parents=True, exist_ok=True)
    if wanted and new:
        shutil.copyfile(tokenizer, copy)

    def documents() -> Iterator[list[int]]:
        texts = (text for path in files for text in texts_of(path) if text)
        while some := list(islice(texts, 1000)):  # the library shares them out over the cores
            yield from ([*ids, *ending] for ids in encoder.encode(some))

    count, tokens = write_pair(out / f"{name}.bin", documents(), encoder.vocab_size)
    echo(f"{count:,} documents, {tokens:,} tokens in {out}/{name}.bin; minitrain train --data {out}")


def texts_of(path: Path) -> Iterator[str]:
    lines = path.suffix == ".jsonl"
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file if lines else [file.read()], 1):
                text = json.loads(line)["text"] if lines else line
                if not isinstance(text, str):
                    raise TypeError("'text' is no string")
                yield text
        except (ValueError, KeyError, TypeError) as error:
            where = f"{path}, line {number}," if lines else path
            raise ValueError(f"{where} is no text: {type(error).__name__}, {error}") from None
