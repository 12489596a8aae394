"""Text shards to token files: ahead of training by `diffvision data tokenize`, else once, into the user's cache.

Either way training reads token files (`tokens`): the order of an epoch is a function of seed and epoch, its length is
known, and a text is tokenised once.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from diffvision.data.shards.remote import identity
from diffvision.data.shards.report import BadDataError, Limits
from diffvision.data.shards.sample import BadSample, SampleId, SampleSource
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.chat import Chat
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenizers import BadText, Tokenizer
from diffvision.data.text.tokens import IDS, LEARNED, LENGTHS, TOKENS, TOKENS_FORMAT, TokenAccount, TokenFiles
from diffvision.files import locked, scratch, sweep, user_cache
from diffvision.progress import bar
from diffvision.tokenizer_settings import CHAT_TEMPLATE

_ROWS = 256  # samples in one piece of a worker's work; one where a sample has many documents

Part = tuple[DocumentAccount, dict[str, np.ndarray]]
"""What became of some documents, and their share of each token file."""


@dataclass
class _Parts(Dataset):
    """(shard, first row, the one after the last) -> `Part`."""

    source: SampleSource
    text: TextMember
    tokenizer: Tokenizer
    chat: Chat | None
    dtypes: dict[str, np.dtype]

    def __getitem__(self, part: tuple[int, int, int]) -> Part:
        number, first, stop = part
        account = DocumentAccount()
        arrays: dict[str, list] = {IDS: [], LEARNED: [], LENGTHS: []}
        for row in range(first, stop):
            for document in _read_sample(self.source, (number, row), self.text, account):
                if not document.strip():
                    continue
                try:
                    ids, learned = self._encode(document)
                except (BadSample, BadText) as reason:
                    account.skip(getattr(reason, "reason", str(reason)), self.source.describe((number, row)))
                    continue
                account.documents += 1
                arrays[IDS] += ids
                arrays[LEARNED] += learned
                arrays[LENGTHS].append(len(ids))
        return account, {name: np.array(arrays[name], dtype) for name, dtype in self.dtypes.items()}

    def _encode(self, document: str) -> tuple[list[int], list[bool]]:
        """Return a document's ids with the end after them; of a conversation, also which are learned."""
        if self.chat is not None:
            return self.chat.encode(document)
        return [*self.tokenizer.encode(document), self.tokenizer.eos_id], []


def tokenize_shards(
    source: SampleSource,
    directory: str | Path,
    tokenizer: Tokenizer,
    text: TextMember | None = None,
    *,
    chat: Chat | None = None,
    num_workers: int = 2,
    limits: Limits | None = None,
) -> TokenAccount:
    """Write the documents of text shards, in their order, as token files with tokens.json and tokenizer.json.

    With a chat, the documents are rows of conversations, and the files say which of their tokens are learned; its
    template is written next to the tokenizer.

    The directory appears once it is whole. The same source gives the same bytes, whatever the number of workers.

    Args:
        directory: the folder to write; it must not exist, or be empty.
        text: reads a sample's documents; by default its `txt` member.
        chat: makes tokens of rows, which `text` reads (`documents.RowMember`).
        num_workers: processes that tokenise; 0 does it in this one.
        limits: how many documents that cannot be used are an error.

    Raises:
        ValueError: the directory is not empty, or the source has no document.
        BadDataError: too many documents cannot be used; nothing is kept.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: remove what is in it, or choose another directory")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    account = TokenAccount(*tokenizer.identity, dtype, chat=None if chat is None else chat.name)
    parts = _Parts(source, text or TextMember(), tokenizer, chat, account.dtypes)
    with scratch(directory.parent, prefix := f".{directory.name}.") as folder:
        sweep(directory.parent, prefix)  # what a killed process left
        _write(parts, folder, account, num_workers, limits or Limits())
        tokenizer.save(folder)
        if chat is not None:
            (folder / CHAT_TEMPLATE).write_text(chat.template, encoding="utf-8")
        (folder / TOKENS).write_text(account.text(), encoding="utf-8")
        os.replace(folder, directory)
    return account


def cached_tokens(
    source: ShardSet,
    tokenizer: Tokenizer,
    text: TextMember | None = None,
    *,
    num_workers: int = 2,
    limits: Limits | None = None,
) -> Path:
    """Return the token files of text shards in the user's cache (`~/.cache/diffvision/tokens`), written if need be.

    They are identified by the text shards' locations and versions, the tokenizer and the text member; if any of these
    changes, or a file is damaged, they are written again. Any number of processes may ask at once; one writes them.

    Raises:
        BadDataError, ValueError: as `tokenize_shards`.
    """
    text, limits = text or TextMember(), limits or Limits()
    shards = [identity(shard) for shard in source.shards]
    identified = json.dumps([TOKENS_FORMAT, shards, tokenizer.fingerprint, text.key])
    root = user_cache("tokens")
    directory = root / hashlib.sha256(identified.encode()).hexdigest()[:24]
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{directory.name}.lock"):
        try:
            account = TokenFiles(directory).account
        except (OSError, ValueError):  # there are none, or they are damaged
            shutil.rmtree(directory, ignore_errors=True)
            account = tokenize_shards(source, directory, tokenizer, text, num_workers=num_workers, limits=limits)
    check_limits(account, limits)  # they may have been written with other limits
    return directory


def check_limits(account: DocumentAccount, limits: Limits, expected: int = 0) -> None:
    """Raise BadDataError, with a summary, if too many documents were skipped.

    Args:
        expected: an estimate of the number of all documents, where not all were seen yet.
    """
    total = max(expected, account.seen)
    if account.bad > limits.max_bad_fraction * total:
        limit = f"the limit is {limits.max_bad_fraction:.2%} of {total:,} (max_bad_fraction)"
        raise BadDataError(f"{account.bad} documents cannot be used: {limit}.\n{account.summary()}")


def documents_of(
    source: SampleSource,
    text: TextMember | None = None,
    *,
    limits: Limits | None = None,
    account: DocumentAccount | None = None,
) -> Iterator[str]:
    """Yield every document that can be read, in order, including empty ones.

    Args:
        text: reads a sample's documents; by default its `txt` member.
        limits: how many documents that cannot be used are an error.
        account: counts these documents, and those that cannot be used.

    Raises:
        BadDataError: too many documents cannot be used, of an estimate of their number.
    """
    text, limits = text or TextMember(), limits or Limits()
    account = DocumentAccount() if account is None else account
    before = account.seen
    samples = ((shard, row) for shard, count in enumerate(source.counts) for row in range(int(count)))
    for read, sample in enumerate(samples, start=1):
        for document in _read_sample(source, sample, text, account):
            account.documents += bool(document.strip())
            yield document
        # A sample may have one document or many, so their number is estimated from those read.
        check_limits(account, limits, expected=before + (account.seen - before) * len(source) // read)


def _read_sample(source: SampleSource, sample: SampleId, text: TextMember, account: DocumentAccount) -> Iterator[str]:
    """Yield the documents of a sample; unusable and empty ones are counted."""
    try:
        for document in text.documents(source.members(sample)):
            if isinstance(document, BadSample):
                account.skip(str(document), source.describe(sample))
            else:
                account.empty += not document.strip()
                yield document
    except BadSample as reason:
        account.skip(str(reason), source.describe(sample))


def _write(parts: _Parts, folder: Path, account: TokenAccount, num_workers: int, limits: Limits) -> None:
    """Tokenise a source, part by part, into the token files of a folder; fill in the account."""
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in account.dtypes}
        digests = {name: hashlib.sha256() for name in files}
        for read, (part, arrays) in _read(parts, num_workers):
            account.add(part)
            account.count += len(arrays[IDS])
            account.learned += int(arrays[LEARNED].sum()) if LEARNED in arrays else 0
            check_limits(account, limits, expected=account.seen * len(parts.source) // read)
            for name, array in arrays.items():
                digests[name].update(array.data)
                files[name].write(array.data)
    if not account.documents:
        raise ValueError(f"no documents to tokenise: {account.summary()}")
    account.sha256 = {name: digest.hexdigest() for name, digest in digests.items()}


def _read(parts: _Parts, num_workers: int) -> Iterator[tuple[int, Part]]:
    """Yield each part of a source in order, with the number of samples read so far, under a progress bar."""
    rows = 1 if parts.text.lines else _ROWS
    ranges = [
        (shard, first, min(first + rows, int(count)))
        for shard, count in enumerate(parts.source.counts)
        for first in range(0, int(count), rows)
    ]
    loader = DataLoader(
        parts,
        batch_size=None,
        sampler=ranges,
        num_workers=min(num_workers, len(ranges)),
        collate_fn=tuple,
        generator=torch.Generator(),  # else it would draw from the process's generator
    )
    read = 0
    with bar("tokenising", len(parts.source)) as advance:
        for (_, first, stop), part in zip(ranges, loader, strict=True):
            advance(stop - first)
            read += stop - first
            yield read, part
