"""Documents that language models are evaluated on: read from files, folders and shards, and cut into rows of tokens.

Models and their tokenizers come from `diffvision.opening`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.data.shards.report import Limits
from diffvision.data.shards.sources import is_shard
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenize import check_limits, documents_of
from diffvision.data.text.tokenizers import BadText, check_text
from diffvision.data.text.tokens import TokenFiles, find_token_folders
from diffvision.evaluation.language.needle import start_tokens


@dataclass(frozen=True)
class Reading:
    """How text is read, and what became of it.

    Attributes:
        text_key: where a sample of shards has its text, as `TextMember` takes it; its FIELD is also that of
            .jsonl files.
        limits: of documents of shards that cannot be used.
        account: of the documents of shards.
    """

    text_key: str = "txt"
    limits: Limits = field(default_factory=Limits)
    account: DocumentAccount = field(default_factory=DocumentAccount)

    @property
    def json_field(self) -> str:
        """The field of a line of a .jsonl file."""
        return self.text_key.partition(":")[2] or "text"


def check_sources(sources: Sequence[str | Path]) -> None:
    """Raise what `read_documents` would for a source that is not there, before anything is read.

    Raises:
        OSError, ValueError: no such file, no shards there, or shards that are damaged or not answered for.
    """
    for source in sources:
        path = Path(source)
        if _token_folders(path):
            continue
        if _are_shards(path):
            ShardSet(str(source))  # asks a server for each
        else:
            path.stat()


def read_documents(
    sources: Sequence[str | Path], tokenizer: Any, reading: Reading | None = None
) -> Iterator[str | list[int]]:
    """Yield documents as `read_texts` does, and of token files (of `diffvision data tokenize`) each document's tokens.

    Raises:
        FileNotFoundError, ValueError, BadDataError: as `read_texts`. ValueError: tokens of another tokenizer.
    """
    reading = reading or Reading()
    for source in sources:
        if folders := _token_folders(Path(source)):
            for folder in folders:
                yield from _token_documents(folder, tokenizer, reading)
        else:
            yield from read_texts([source], reading)


def read_texts(sources: Sequence[str | Path], reading: Reading | None = None) -> Iterator[str]:
    """Yield the documents of files, folders and shards.

    Each .txt file is a document, and so is the field "text" of each line of a .jsonl file; of a folder all such files
    below it in the order of their names; of shards (a .tar, a folder of them, a pattern) each member .txt, or what
    `reading` names.

    Raises:
        FileNotFoundError: no such file. ValueError: nothing to read there, or a file with text that is not UTF-8.
        BadDataError: too many documents of shards cannot be used.
    """
    reading = reading or Reading()
    for source in sources:
        path = Path(source)
        if _are_shards(path):
            text = TextMember(reading.text_key)
            yield from documents_of(ShardSet(str(source)), text, limits=reading.limits, account=reading.account)
        elif path.is_dir():
            files = sorted(file for suffix in ("*.txt", "*.jsonl") for file in path.rglob(suffix))
            if not files:
                raise ValueError(f"no .txt, .jsonl or .tar in {path}: give files of text, or shards of them")
            yield from read_texts(files, reading)
        elif path.suffix == ".txt":
            yield _content(path)
        else:
            yield from (text for (text,) in json_lines(path, {reading.json_field: (str,)}, "has no document"))


def json_lines(path: Path, fields: Mapping[str, tuple[type, ...]], problem: str) -> Iterator[tuple[str, ...]]:
    """Yield the fields of each line's JSON object, as text.

    Args:
        fields: {name: types that it may have}.
        problem: the message for a line that lacks one of them.

    Raises:
        FileNotFoundError. ValueError: not UTF-8; a line without them, by its number.
    """
    # Lines end at \n alone: JSON may have U+2028 and others, at which str.splitlines would cut, in its strings.
    for number, line in enumerate(_content(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            values = [record[name] for name in fields]
            if strange := [value for value, kinds in zip(values, fields.values(), strict=True)
                           if not isinstance(value, kinds)]:  # fmt: skip
                raise TypeError(f"{strange[0]!r:.40} is not text: give a text file")
            texts = tuple(map(str, values))
            for text in texts:
                check_text(text)
        except BadText as error:
            raise ValueError(f"line {number} of {path}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            wanted = ", ".join(f'"{name}": ...' for name in fields)
            raise ValueError(f"line {number} of {path} {problem}: write {{{wanted}}} on each line ({error})") from error
        yield texts


def tokenised(texts: Iterable[str | list[int]], tokenizer: Any, at_most: int) -> tuple[list[Tensor], int]:
    """Return documents as tokens, each after a start token, and the bytes of UTF-8 in their text.

    Documents are texts, or tokens already. There are `at_most` tokens in all: the last document is cut.

    Raises:
        ValueError: no text has a token; one that is not UTF-8.
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


def rows_of(documents: Sequence[Tensor], length: int) -> Tensor:
    """Return the documents end to end, cut in rows of one length, int64 [S, length]; the rest is left out.

    Raises:
        ValueError: they are not even one row long.
    """
    stream = torch.cat(list(documents))
    count = len(stream) // length
    if not count:
        raise ValueError(
            f"the documents have {len(stream)} tokens, not one row of {length}: give more text or a smaller window"
        )
    return stream[: count * length].view(count, length)


def _are_shards(path: Path) -> bool:
    """Return whether a source is one of shards rather than files of text."""
    if path.is_dir():
        return any(is_shard(file.name) for file in path.iterdir())
    return path.suffix not in (".txt", ".jsonl")


def _token_folders(path: Path) -> list[Path]:
    """Return the folder of token files that a source is, of its validation split if it has splits; else none."""
    return find_token_folders(path, "test") if path.is_dir() else []


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): convert it") from error


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
