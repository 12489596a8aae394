"""Tokenizers of text: Hugging Face `tokenizers` files, and byte-level BPE trained on the user's text.

A special token's name in a document is encoded as its characters, so no document can end itself. The end of a document
is an id that only the data pipeline adds. Captions of images are tokenised by the model's tokenizer.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from diffvision.files import replacing
from diffvision.tokenizer_settings import CONFIG, USUAL_ENDS, find_end, read_config, read_special_token

END = "<|endoftext|>"
"""The end of a document in tokenizers trained here and in GPT-2's."""

FILE = "tokenizer.json"
_LEAST = 257  # tokens: the bytes and the end


class BadText(ValueError):
    """A text that cannot be tokenised; `reason` is what such texts of a corpus are counted under."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(f"{reason}: {details}")
        self.reason = reason


def check_text(text: str) -> None:
    """Check that a text can be written in UTF-8.

    Raises:
        BadText: it has half of a surrogate pair, which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadText("text not UTF-8", f"character {error.start + 1} is half of a surrogate pair") from None


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: of the `tokenizers` library; it is changed, so that it neither pads nor truncates, nor takes text for
            special tokens.
        eos: the token that ends a document; None takes one with a usual name.
        bos: the token that begins a text where its model was trained so, or None.

    Attributes:
        vocab_size: the bound of the ids: all are smaller.
        eos_id: the id that ends a document. No text is ever encoded to it.
        start_id: the id of `bos`, or None. `encode` does not add it; evaluations and `diffvision generate` do.
        source: the file that it was loaded from, or None.

    Raises:
        ValueError: the vocabulary has no such token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos: str | None = None, bos: str | None = None) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        eos = find_end(vocabulary, {}) if eos is None else eos
        if eos not in vocabulary:
            usual = ", ".join(USUAL_ENDS)
            raise ValueError(f"eos of the tokenizer must be a token of it, such as {usual}, got {eos!r}")
        if bos is not None and bos not in vocabulary:
            raise ValueError(f"bos of the tokenizer must be a token of it, got {bos!r}")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend, self.eos, self.bos = backend, eos, bos
        self.source: Path | None = None
        self.eos_id: int = vocabulary[eos]
        self.start_id: int | None = None if bos is None else vocabulary[bos]
        self.vocab_size: int = max(vocabulary.values()) + 1  # not the number of tokens: ids may leave gaps

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._backend.to_str(), self.eos, self.bos)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any added before or after.

        Raises:
            BadText: the text has half of a surrogate pair, or the tokenizer would end a document with it.
        """
        check_text(text)
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self._encode_eos_name(text) if self.eos_id in ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 are decoded as U+FFFD, special tokens as their names.

        Raises:
            ValueError: an id is outside of the vocabulary.
        """
        ids = [int(number) for number in ids]
        if wrong := [number for number in ids if not 0 <= number < self.vocab_size]:
            raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}, got {wrong[0]}")
        return self._backend.decode(ids, skip_special_tokens=False)

    def special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Return the special tokens by their ids, the end of a document among them; only chat templates write them."""
        added = self._backend.get_added_tokens_decoder()
        end = {self.eos_id: tokenizers.AddedToken(self.eos, special=True)}
        return end | {number: token for number, token in added.items() if token.special}

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def settings(self) -> dict[str, Any]:
        """Return the content of tokenizer.json."""
        return json.loads(self._backend.to_str())

    @property
    def identity(self) -> tuple[int, int, str]:
        """What token files note of their tokenizer: the bound of the ids, the end's id, and the fingerprint."""
        return self.vocab_size, self.eos_id, self.fingerprint

    @property
    def fingerprint(self) -> str:
        """A digest of what the tokenizer does, wherever its file lies."""
        canonical = json.dumps(self.settings(), sort_keys=True)
        return hashlib.sha256(f"{canonical} {self.eos}".encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike) -> None:
        """Write tokenizer.json: at this path, or in it if it is a directory."""
        path = Path(path, FILE) if Path(path).is_dir() else Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_json(path, self.settings())
        begins = {} if self.bos is None else {"bos_token": self.bos, "add_bos_token": True}
        if begins or find_end(self.vocabulary(), {}) != self.eos:
            _write_json(path.with_name(CONFIG), {"eos_token": self.eos, **begins})

    def _encode_eos_name(self, text: str) -> list[int]:
        """Encode a text that has the name of the end token in it, as characters.

        Some tokenizers make the end token of this name in spite of `encode_special_tokens`, so the first character of
        the name is encoded apart from the rest.
        """
        first, *others = text.split(self.eos)
        parts = [first] + [part for other in others for part in (self.eos[:1], self.eos[1:], other)]
        ids = [number for part in parts for number in self._backend.encode(part, add_special_tokens=False).ids]
        if self.eos_id in ids:
            raise BadText("text that its tokenizer takes for the end of a document", f"leave {self.eos!r} out")
        return ids


def _unpickle(content: str, eos: str, bos: str | None) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(content), eos, bos)


def _write_json(path: Path, content: Any) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")


def load_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """Load a tokenizer.json, or that of a directory.

    Raises:
        ValueError: the file does not exist, or it is not a tokenizer.
    """
    path = Path(source, FILE) if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {source}: give a tokenizer.json or a directory with one; `diffvision data tokenizer` "
            "trains one"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} is not a file of the tokenizers library: {error}") from None
    config = read_config(path.parent)
    eos, bos = (read_special_token(config, name) for name in ("eos_token", "bos_token"))
    adds = config.get("add_bos_token")
    if adds is None and bos is not None:  # then the tokenizer adds it to every text, or does not
        adds = backend.encode("").tokens[:1] == [bos]
    tokenizer = Tokenizer(backend, eos, bos if adds is True else None)
    tokenizer.source = path
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, pattern: str | None = None) -> Tokenizer:
    r"""Train byte-level byte-pair encoding (Sennrich et al. 2016, as in GPT-2); the same texts give the same tokenizer.

    Any text can be encoded, because every byte is a token. The end of a document is id 0. A small corpus may have fewer
    pairs to merge than requested: see `vocab_size` of the result.

    Args:
        texts: to train on.
        vocab_size: the most tokens.
        pattern: a regular expression; what it matches is split from the text around it before pairs are merged, such
            as r"\d" for tokens that have one digit each.

    Raises:
        ValueError: a vocabulary too small for the bytes and the end of a document; no text; one that is not UTF-8.
    """
    if vocab_size < _LEAST:
        raise ValueError(f"vocab_size must be at least {_LEAST} (all bytes and {END}), got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    others = filter(None, texts)
    first = next(others, None)
    if first is None:
        raise ValueError("no text to train a tokenizer on: the source has no documents, or empty ones")

    def checked() -> Iterator[str]:
        for text in chain([first], others):
            check_text(text)
            yield text

    backend.train_from_iterator(checked(), trainer)
    return Tokenizer(backend, END)
