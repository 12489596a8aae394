"""Documents that language models are evaluated on: read from files, folders and shards, and cut into rows of tokens.

Models and their tokenizers come from `diffvision.opening`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.data.rows import read_rows
from diffvision.data.shards.report import Limits
from diffvision.data.shards.sources import is_shard
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenize import check_limits, documents_of
from diffvision.data.text.tokenizers import check_text
from diffvision.data.text.tokens import TokenFiles, find_token_folders
from diffvision.evaluation.language.needle import start_tokens
from diffvision.files import decoded


@dataclass(frozen=True)
class Reading:
    """How text is read, and what became of it.

    Attributes:
        text_key: where a sample of shards has its text, as `TextMember` takes it; its FIELD is also that of
            .jsonl files.
        limits: how many documents of shards may be unusable.
        account: of the documents of shards.
    """

    text_key: str = "txt"
    limits: Limits = field(default_factory=Limits)
    account: DocumentAccount = field(default_factory=DocumentAccount)


def check_sources(sources: Sequence[str | Path]) -> None:
    """Raise what `read_documents` would for a missing source, before anything is read.

    Raises:
        OSError, ValueError: the file does not exist, or no shards, or shards are damaged or not served.
    """
    for source in sources:
        if find_token_folders(source, "test"):
            continue
        if _are_shards(Path(source)):
            ShardSet(str(source))  # asks a server for each
        else:
            Path(source).stat()


def read_documents(
    sources: Sequence[str | Path], tokenizer: Any, reading: Reading | None = None
) -> Iterator[str | list[int]]:
    """Yield the documents of files, folders, shards and token files; of token files each document's tokens.

    Each .txt file is a document, and so is the field "text" of each line of a .jsonl file; of a folder all such files
    below it in the order of their names; of shards (a .tar, a folder of them, a pattern) each member .txt, or what
    `reading` names; of token files (of `diffvision data tokenize`) the validation split if they have splits.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: there is nothing to read, or a file with text that is not UTF-8, or tokens of another tokenizer.
        BadDataError: too many documents of shards cannot be used.
    """
    reading = reading or Reading()
    for source in sources:
        path = Path(source)
        if folders := find_token_folders(path, "test"):
            for folder in folders:
                yield from _token_documents(folder, tokenizer, reading)
        elif _are_shards(path):
            text = TextMember(reading.text_key)
            yield from documents_of(ShardSet(str(source)), text, limits=reading.limits, account=reading.account)
        elif path.is_dir():
            files = sorted(file for suffix in ("*.txt", "*.jsonl") for file in path.rglob(suffix))
            if not files:
                raise ValueError(f"no .txt, .jsonl or .tar in {path}: give files of text, or shards of them")
            yield from read_documents(files, tokenizer, reading)
        elif path.suffix == ".txt":
            yield decoded(path.read_bytes(), path).replace("\r\n", "\n")
        else:
            yield from _texts_of_lines(path, reading.text_key.partition(":")[2] or "text")


def _texts_of_lines(path: Path, name: str) -> Iterator[str]:
    """Yield the field of each line's JSON object."""
    for number, row in read_rows(path):
        text = row.get(name) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'line {number} of {path} must be {{"{name}": TEXT}}, got {row!r:.40}')
        try:
            check_text(text)
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from None
        yield text


def _token_documents(folder: Path, tokenizer: Any, reading: Reading) -> Iterator[list[int]]:
    """Yield the documents of token files made with the model's tokenizer."""
    files = TokenFiles(folder)
    account, fingerprint = files.account, getattr(tokenizer, "fingerprint", None)
    if account.fingerprint != fingerprint:
        raise ValueError(
            f"{folder} is of a tokenizer of {account.vocab_size} tokens ({account.fingerprint}), the model's has "
            f"{tokenizer.vocab_size} ({fingerprint or 'of transformers'}): give the text itself, or tokenise it with "
            "the model's"
        )
    check_limits(account, reading.limits)
    yield from (document.tolist() for document in files.documents())


def tokenise(texts: Iterable[str | list[int]], tokenizer: Any, at_most: int) -> tuple[list[Tensor], int]:
    """Return documents as tokens, each after a start token, and the bytes of UTF-8 in their text.

    Documents are texts, or tokens already. There are `at_most` tokens in all: the last document is cut.

    Raises:
        ValueError: no text has a token.
    """
    documents: list[Tensor] = []
    num_bytes, left, start = 0, at_most, start_tokens(tokenizer)
    for text in texts:
        tokens = tokenizer.encode(text) if isinstance(text, str) else text
        if len(tokens) > left or not isinstance(text, str):
            tokens = tokens[:left]
            text = tokenizer.decode(tokens)
        if tokens:
            documents.append(torch.tensor([*start, *tokens]))
            num_bytes += len(text.encode())
            left -= len(tokens)
        if not left:
            break
    if not documents:
        raise ValueError("the texts have not a single token: give files with text in them")
    return documents, num_bytes


def cut_rows(documents: Sequence[Tensor], length: int) -> Tensor:
    """Return the documents end to end, cut in rows of one length, int64 [S, length]; the rest is left out.

    Raises:
        ValueError: they are shorter than one row.
    """
    stream = torch.cat(list(documents))
    count = len(stream) // length
    if not count:
        raise ValueError(
            f"the documents have {len(stream)} tokens, not one row of {length}: give more text or a smaller window"
        )
    return stream[: count * length].view(count, length)


def _are_shards(path: Path) -> bool:
    """Return whether a source is of shards rather than files of text."""
    if path.is_dir():
        return any(is_shard(file.name) for file in path.iterdir())
    return path.suffix not in (".txt", ".jsonl")
