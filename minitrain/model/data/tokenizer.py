"""From text to tokens and back: bytes, or a tokenizer.json by Hugging Face's library. No download."""

from collections.abc import Sequence
from pathlib import Path


class Tokenizer:
    """`Tokenizer()`: a token a byte, vocabulary 256. `Tokenizer("tokenizer.json")`: as the file says, but
    that it adds no token which the text does not have."""

    def __init__(self, path: str | Path | None = None):
        self.inner, self.vocab_size = None, 256
        if path is None:
            return
        try:
            import tokenizers

            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except ImportError:
            raise ValueError(f"{path} needs a library: pip install 'minitrain[tokenizer]'") from None
        except Exception as error:  # it raises nothing narrower
            raise ValueError(f"{path} is no tokenizer.json: {error}") from None
        self.vocab_size = 1 + max(self.inner.get_vocab().values(), default=0)  # ids may have holes

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self.inner is None:
            return [list(text.encode()) for text in texts]
        return [one.ids for one in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        if self.inner is None:
            return bytes(min(token, 255) for token in tokens).decode(errors="replace")
        return self.inner.decode(list(tokens), skip_special_tokens=False)

    def id_of(self, token: str) -> int:
        found = self.inner and self.inner.token_to_id(token)
        if found is None:
            special = self.inner.get_added_tokens_decoder().values() if self.inner else ()
            there = ", ".join(added.content for added in special) or "no special token"
            raise ValueError(f"{token!r} is no token of this tokenizer; it has {there}")
        return found
