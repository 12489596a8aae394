"""Text shards to token shards: ahead of training by `diffvision data tokenize`, else once, into the user's cache.

Either way training reads token shards (`tokens`), so that the order of an epoch is the same function of seed and epoch,
its length is true, and a text is not tokenised again every epoch.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from diffvision.data.shards.batch_reader import identity_collate
from diffvision.data.shards.cache import identity
from diffvision.data.shards.locks import locked, scratch, sweep
from diffvision.data.shards.report import BadDataError, Limits
from diffvision.data.shards.sample import BadSample, SampleId
from diffvision.data.shards.sidecars import user_cache
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenizers import BadText, Tokenizer
from diffvision.data.text.tokens import MEMBER, TOKENS, TOKENS_FORMAT, TokenAccount, find_accounts, token_dtype
from diffvision.progress import bar

_ROWS = 256  # samples in one piece of a worker's work
TOKENS_PER_SHARD = 1 << 24


@dataclass
class _Part:
    """What became of a few samples."""

    samples: int
    tokens: np.ndarray
    documents: int = 0
    empty: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (reason, "shard: key")


class _Parts(Dataset):
    """(shard, first row) -> _Part."""

    def __init__(self, shards: ShardSet, tokenizer: Tokenizer, text: TextMember) -> None:
        self.shards, self.tokenizer, self.text = shards, tokenizer, text
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __getitem__(self, first_sample: SampleId) -> _Part:
        number, first = first_sample
        rows = range(first, min(first + _ROWS, int(self.shards.counts[number])))
        part, documents = _Part(len(rows), np.array([], dtype=self.dtype)), [np.array([], dtype=self.dtype)]
        for row in rows:
            for document in self._documents((number, row)):
                ids = self._ids(document)
                if isinstance(ids, BadSample):
                    part.skipped.append((str(ids), self.shards.describe((number, row))))
                elif len(ids) == 0:
                    part.empty += 1
                else:
                    part.documents += 1
                    documents.append(ids)
        part.tokens = np.concatenate(documents)
        return part

    def _documents(self, sample: SampleId) -> Iterator[str | BadSample]:
        try:
            yield from self.text.documents(self.shards.members(sample))
        except BadSample as reason:
            yield reason

    def _ids(self, document: str | BadSample) -> np.ndarray | BadSample:
        """Return a document's ids with the end after them; none of an empty one."""
        if isinstance(document, BadSample):
            return document
        if not document.strip():
            return np.array([], dtype=self.dtype)
        try:
            return np.array([*self.tokenizer.encode(document), self.tokenizer.eos_id], dtype=self.dtype)
        except BadText as error:
            return BadSample(error.reason)


def tokenize_shards(
    source: ShardSet,
    directory: str | Path,
    tokenizer: Tokenizer,
    text: TextMember | None = None,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    num_workers: int = 2,
    limits: Limits | None = None,
) -> TokenAccount:
    """Write the documents of text shards, in their order, as token shards with tokens.json and tokenizer.json.

    The directory appears once it is whole. The same source gives the same bytes, whatever the number of workers.

    Args:
        directory: the folder to write; it must not exist, or be empty.
        text: reads a sample's documents; by default its `txt` member.
        tokens_per_shard: the tokens of each shard but the last; documents may be cut.
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
        parts = _Parts(source, tokenizer, text or TextMember())
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
    of these makes new ones. Any number of processes may ask at once; one makes them. They are never removed.

    Raises:
        BadDataError, ValueError: as `tokenize_shards`.
    """
    text, limits = text or TextMember(), limits or Limits()
    identities = [identity(shard) for shard in source.shards]
    identity_of_all = json.dumps([TOKENS_FORMAT, identities, tokenizer.fingerprint, text.key])
    root = user_cache() / "tokens"
    directory = root / hashlib.sha256(identity_of_all.encode()).hexdigest()[:24]
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{directory.name}.lock"):
        if not (directory / TOKENS).is_file():
            tokenize_shards(source, directory, tokenizer, text, num_workers=num_workers, limits=limits)
    for account in find_accounts(ShardSet(directory).shards).values():
        assert account is not None
        check_limits(account, limits)  # the shards may have been made with other limits
    return directory


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
    source: ShardSet,
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
            yield from _usable(source, (number, row), text, account)
            read += 1
            # A sample may have one document or many, so their number is estimated from those read.
            expected = (account.seen - before) * len(source) // read
            check_limits(account, limits, expected=before + expected)


def _usable(source: ShardSet, sample: SampleId, text: TextMember, account: DocumentAccount) -> Iterator[str]:
    """Yield the documents of a sample, and count all of them."""
    try:
        documents = list(text.documents(source.members(sample)))
    except BadSample as reason:
        documents = [reason]
    for document in documents:
        if isinstance(document, BadSample):
            account.skip(str(document), source.describe(sample))
        else:
            account.documents += bool(document.strip())
            account.empty += not document.strip()
            yield document


def _write(
    source: ShardSet, directory: Path, parts: _Parts, tokens_per_shard: int, num_workers: int, limits: Limits
) -> TokenAccount:
    tokenizer = parts.tokenizer
    account = TokenAccount(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.fingerprint)
    for number, tokens in enumerate(_cut(_read(source, parts, num_workers, account, limits), tokens_per_shard)):
        name = f"{number:06d}"
        write_tar(directory / f"{name}.tar", [{"__key__": name, MEMBER: _npy(tokens)}])
        account.shards[f"{name}.tar"] = len(tokens)
    check_limits(account, limits)
    if not account.documents:
        raise ValueError(f"no documents to tokenise: {account.summary()}")
    write_manifest(directory)
    tokenizer.save(directory)
    (directory / TOKENS).write_text(account.text(), encoding="utf-8")
    return account


def _read(
    source: ShardSet, parts: _Parts, num_workers: int, account: TokenAccount, limits: Limits
) -> Iterator[np.ndarray]:
    """Yield the tokens of each part in order; what became of its documents is added to the account."""
    firsts = [(n, first) for n, count in enumerate(source.counts) for first in range(0, int(count), _ROWS)]
    loader: Iterable[_Part] = DataLoader(
        parts,
        batch_size=None,
        sampler=firsts,
        num_workers=min(num_workers, len(firsts)),
        collate_fn=identity_collate,
        generator=torch.Generator(),  # else it would draw from the process's generator
    )
    with bar("tokenising", len(source)) as advance:
        for part in loader:
            account.documents += part.documents
            account.empty += part.empty
            for reason, where in part.skipped:
                account.skip(reason, where)
            check_limits(account, limits, expected=len(source))
            advance(part.samples)
            yield part.tokens


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


def _npy(tokens: np.ndarray) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, tokens, version=(1, 0), allow_pickle=False)
    return file.getvalue()
