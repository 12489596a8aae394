"""Text shards to token shards: ahead of training by `diffvision data tokenize`, else once, into the user's cache.

Either way training reads token shards (`tokens`), so that the order of an epoch is the same function of seed and epoch,
its length is true, and a text is not tokenised again every epoch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from diffvision.data.shards.cache import identity
from diffvision.data.shards.report import BadDataError, Limits
from diffvision.data.shards.sample import BadSample, SampleId
from diffvision.data.shards.sources import find_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.data.text.chat import CHAT_TEMPLATE, Chat
from diffvision.data.text.documents import DocumentAccount, JsonLines, TextMember
from diffvision.data.text.tokenizers import BadText, Tokenizer
from diffvision.data.text.tokens import (
    LEARNED,
    LENGTH_DTYPE,
    LENGTHS,
    MEMBER,
    TOKENS,
    TOKENS_FORMAT,
    TokenAccount,
    read_accounts,
    token_dtype,
)
from diffvision.files import locked, scratch, sweep, user_cache
from diffvision.progress import bar

_ROWS = 256  # samples in one piece of a worker's work
TOKENS_PER_SHARD = 1 << 24


@dataclass
class _Part:
    """What became of a few samples; of conversations also the bits of their tokens, and their lengths."""

    samples: int
    tokens: np.ndarray
    learned: np.ndarray
    lengths: np.ndarray
    documents: int = 0
    empty: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (reason, "shard: key")


class _Parts(Dataset):
    """(shard, first row) -> _Part."""

    def __init__(
        self, shards: ShardSet | JsonLines, tokenizer: Tokenizer, text: TextMember, chat: Chat | None = None
    ) -> None:
        self.shards, self.tokenizer, self.text, self.chat = shards, tokenizer, text, chat
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __getitem__(self, first_sample: SampleId) -> _Part:
        number, first = first_sample
        rows = range(first, min(first + _ROWS, int(self.shards.counts[number])))
        tokens, learned = [np.array([], dtype=self.dtype)], [np.array([], dtype=bool)]
        skipped, empty = [], 0
        for row in rows:
            for document in _read_sample(self.shards, (number, row), self.text):
                encoded = self._encoded(document)
                if isinstance(encoded, BadSample):
                    skipped.append((str(encoded), self.shards.describe((number, row))))
                elif len(encoded[0]) == 0:
                    empty += 1
                else:
                    tokens.append(encoded[0])
                    learned.append(encoded[1])
        lengths = np.array([len(ids) for ids in tokens[1:]], dtype=LENGTH_DTYPE)
        return _Part(len(rows), np.concatenate(tokens), np.concatenate(learned), lengths, len(lengths), empty, skipped)

    def _encoded(self, document: str | BadSample) -> tuple[np.ndarray, np.ndarray] | BadSample:
        """Return a document's ids with the end after them, none of an empty one; and which are learned, of a row."""
        if isinstance(document, BadSample):
            return document
        ids, learned = list[int](), list[bool]()
        try:
            if not document.strip():
                pass
            elif self.chat is None:
                ids = [*self.tokenizer.encode(document), self.tokenizer.eos_id]
            else:
                ids, learned = self.chat.encode(document)
        except BadSample as reason:
            return reason
        except BadText as error:
            return BadSample(error.reason)
        return np.array(ids, dtype=self.dtype), np.array(learned, dtype=bool)


def tokenize_shards(
    source: ShardSet | JsonLines,
    directory: str | Path,
    tokenizer: Tokenizer,
    text: TextMember | None = None,
    *,
    chat: Chat | None = None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    num_workers: int = 2,
    limits: Limits | None = None,
) -> TokenAccount:
    """Write the documents of text shards, in their order, as token shards with tokens.json and tokenizer.json.

    With a chat, the documents are rows of conversations, and shards say which of their tokens are learned; its
    template is written next to the tokenizer.

    The directory appears once it is whole. The same source gives the same bytes, whatever the number of workers.

    Args:
        directory: the folder to write; it must not exist, or be empty.
        text: reads a sample's documents; by default its `txt` member.
        chat: makes tokens of rows, which `text` reads (`documents.RowMember`).
        tokens_per_shard: the tokens of each shard but the last; documents may be cut. Of conversations, which are not,
            about as many.
        num_workers: processes that tokenise; 0 does it in this one.
        limits: how many documents that cannot be used are an error.

    Raises:
        ValueError: the directory is not empty, or the source has no document.
        BadDataError: too many documents cannot be used; nothing is kept.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty: remove what is in it, or choose another directory")
    if tokens_per_shard < 2:
        raise ValueError(f"tokens_per_shard is {tokens_per_shard}: it must be at least 2")
    with scratch(directory.parent, prefix := f".{directory.name}.") as folder:
        sweep(directory.parent, prefix)  # what a killed process left
        parts = _Parts(source, tokenizer, text or TextMember(), chat)
        account = _write(source, folder, parts, tokens_per_shard, num_workers, limits or Limits())
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
    """Return the token shards of text shards in the user's cache (`~/.cache/diffvision/tokens`), made if need be.

    They are identified by the text shards' locations and versions, the tokenizer and the text member; a change of any
    of these makes new ones, and so does damage. Any number of processes may ask at once; one makes them.

    Raises:
        BadDataError, ValueError: as `tokenize_shards`.
    """
    text, limits = text or TextMember(), limits or Limits()
    identities = [identity(shard) for shard in source.shards]
    identity_of_all = json.dumps([TOKENS_FORMAT, identities, tokenizer.fingerprint, text.key])
    root = user_cache("tokens")
    directory = root / hashlib.sha256(identity_of_all.encode()).hexdigest()[:24]
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{directory.name}.lock"):
        if not _is_whole(directory):
            if directory.is_dir():
                shutil.rmtree(directory)
            directory.unlink(missing_ok=True)
            tokenize_shards(source, directory, tokenizer, text, num_workers=num_workers, limits=limits)
    for account in read_accounts(ShardSet(directory).shards).values():
        assert account is not None
        check_limits(account, limits)  # the shards may have been made with other limits
    return directory


def _is_whole(directory: Path) -> bool:
    """Return whether a folder holds the token shards that its manifest lists, none of them cut."""
    try:
        shards = find_shards(directory)
        sizes = [os.path.getsize(shard.location) for shard in shards]
        return sizes == [shard.bytes for shard in shards] and None not in read_accounts(shards).values()
    except (OSError, ValueError):
        return False


def check_limits(account: DocumentAccount, limits: Limits, expected: int = 0) -> None:
    """Check that not too many documents were skipped, of those seen or of as many as are expected.

    Raises:
        BadDataError: too many were; the message has a summary.
    """
    total = max(expected, account.seen)
    if account.bad > limits.max_bad_fraction * total:
        limit = f"the limit is {limits.max_bad_fraction:.2%} of {total:,} (max_bad_fraction)"
        raise BadDataError(f"{account.bad} documents cannot be used: {limit}.\n{account.summary()}")


def documents_of(
    source: ShardSet | JsonLines,
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
    before, read = account.seen, 0
    for number, count in enumerate(source.counts):
        for row in range(int(count)):
            for document in _read_sample(source, (number, row), text):
                if isinstance(document, BadSample):
                    account.skip(str(document), source.describe((number, row)))
                    continue
                account.documents += bool(document.strip())
                account.empty += not document.strip()
                yield document
            read += 1
            # A sample may have one document or many, so their number is estimated from those read.
            expected = (account.seen - before) * len(source) // read
            check_limits(account, limits, expected=before + expected)


def _read_sample(source: ShardSet | JsonLines, sample: SampleId, text: TextMember) -> Iterator[str | BadSample]:
    """Yield the documents of a sample, or why one of them, or the sample, cannot be used."""
    try:
        yield from text.documents(source.members(sample))
    except BadSample as reason:
        yield reason


def _write(
    source: ShardSet | JsonLines,
    directory: Path,
    parts: _Parts,
    tokens_per_shard: int,
    num_workers: int,
    limits: Limits,
) -> TokenAccount:
    """Tokenize a source, write its shards, and return the account of what was read."""
    tokenizer, chat = parts.tokenizer, parts.chat
    account = TokenAccount(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.fingerprint)
    account.chat = None if chat is None else chat.name
    pieces = _read(source, parts, num_workers, account, limits)
    shards = _cut_texts(pieces, tokens_per_shard) if chat is None else _join_conversations(pieces, tokens_per_shard)
    for number, arrays in enumerate(shards):
        name = f"{number:06d}"
        members = {member: _npy(array) for member, array in arrays.items()}
        write_tar(directory / f"{name}.tar", [{"__key__": name, **members}])
        account.shards[f"{name}.tar"] = len(arrays[MEMBER])
    check_limits(account, limits)
    if not account.documents:
        raise ValueError(f"no documents to tokenise: {account.summary()}")
    write_manifest(directory)
    tokenizer.save(directory)
    if chat is not None:
        (directory / CHAT_TEMPLATE).write_text(chat.template, encoding="utf-8")
    (directory / TOKENS).write_text(account.text(), encoding="utf-8")
    return account


def _read(
    source: ShardSet | JsonLines, parts: _Parts, num_workers: int, account: TokenAccount, limits: Limits
) -> Iterator[_Part]:
    """Yield each part in order; what became of its documents is added to the account."""
    firsts = [(n, first) for n, count in enumerate(source.counts) for first in range(0, int(count), _ROWS)]
    loader: Iterable[_Part] = DataLoader(
        parts,
        batch_size=None,
        sampler=firsts,
        num_workers=min(num_workers, len(firsts)),
        generator=torch.Generator(),  # else it would draw from the process's generator
    )
    with bar("tokenising", len(source)) as advance:
        for part in loader:
            account.documents += part.documents
            account.empty += part.empty
            account.learned += int(part.learned.sum())
            for reason, where in part.skipped:
                account.skip(reason, where)
            check_limits(account, limits, expected=len(source))
            advance(part.samples)
            yield part


def _cut_texts(parts: Iterable[_Part], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield shards of text, of `size` tokens each but the last."""
    yield from ({MEMBER: tokens} for tokens in _cut((part.tokens for part in parts), size))


def _join_conversations(parts: Iterable[_Part], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield shards of whole parts, of no less than `size` tokens each but the last."""
    pending: list[_Part] = []
    for part in chain(parts, [None]):
        pending += [part] if part is not None else []
        tokens = sum(len(one.tokens) for one in pending)
        if tokens >= size or (part is None and tokens):
            yield {
                MEMBER: np.concatenate([one.tokens for one in pending]),
                LEARNED: np.concatenate([one.learned for one in pending]),
                LENGTHS: np.concatenate([one.lengths for one in pending]),
            }
            pending = []


def _cut(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the tokens of the pieces in arrays of `size`; the last may be smaller."""
    pending: list[np.ndarray] = []
    pending_tokens = 0
    for piece in pieces:
        pending.append(piece)
        pending_tokens += len(piece)
        if pending_tokens >= size:
            tokens = np.concatenate(pending)
            stop = pending_tokens - pending_tokens % size
            yield from np.split(tokens[:stop], range(size, stop, size))
            pending, pending_tokens = [tokens[stop:]], pending_tokens - stop
    if pending_tokens:
        yield np.concatenate(pending)


def _npy(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()
