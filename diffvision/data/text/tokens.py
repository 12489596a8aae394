"""Token shards: a corpus as one long run of token ids, and the sequences of any length that are read from it.

A token shard is a WebDataset tar of one sample, an array of uint16 or uint32 (`000000.npy`): documents one after
another, each followed by its tokenizer's end-of-document id. `tokens.json` next to the shards names the tokenizer,
whose file lies there too. Sequence i of a shard is its tokens i*L .. i*L + L, so that consecutive ones
share one token and every token but a shard's first is predicted exactly once. Nothing in the files depends on L. What
is left at a shard's end is shorter than a sequence; it is counted.

Shards of conversations (`chat`) have two arrays more: whether each token is learned (`000000.learned.npy`), and how
many tokens each conversation has (`000000.lengths.npy`). They are not cut; `packing` makes sequences of them.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffvision.data.batches import TokenBatch
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.sample import BadSample, Members, SampleId
from diffvision.data.shards.sources import Shard, find_shards, read_small_file
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import DocumentAccount

TOKENS = "tokens.json"
TOKENS_FORMAT = "diffvision-tokens-1"
MEMBER = "npy"
LEARNED = "learned.npy"
LENGTHS = "lengths.npy"
LENGTH_DTYPE = np.dtype("<u4")
_HEADER_BYTES = 4096  # numpy's is 128 for an array of one axis
_READ_TOKENS = 1 << 16  # at a time, where documents are read one after another


@dataclass
class TokenAccount(DocumentAccount):
    """The content of a `tokens.json`: the tokenizer, and counts of documents and tokens, of the shards next to it.

    Attributes:
        vocab_size, eos_id: of the tokenizer.
        fingerprint: of the tokenizer.
        shards: {name: tokens}.
        chat: the name of the template of conversations; None for text.
        learned: tokens of conversations that are learned.
        others: as `DocumentAccount`, of the text.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    shards: dict[str, int] = field(default_factory=dict)
    chat: str | None = None
    learned: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of all shards."""
        return sum(self.shards.values())

    @property
    def dtype(self) -> np.dtype:
        """The integers that the shards hold."""
        return token_dtype(self.vocab_size)

    def _used(self) -> str:
        if self.chat is not None:
            return f"{self.documents:,} conversations, {self.tokens:,} tokens, {self.learned:,} of them learned"
        return f"{self.documents:,} documents, {self.tokens:,} tokens"

    def text(self) -> str:
        """Return the content of tokens.json."""
        fields = {k: v for k, v in self.__dict__.items() if self.chat is not None or k not in ("chat", "learned")}
        return json.dumps({"format": TOKENS_FORMAT, **fields}, indent=1) + "\n"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return little-endian unsigned integers, of 2 bytes where that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_accounts(shards: Iterable[Shard]) -> dict[str, TokenAccount | None]:
    """Return the tokens.json of each directory of shards, or None where there is none.

    Raises:
        ValueError: a file of another format.
    """
    accounts: dict[str, TokenAccount | None] = {}
    for shard in shards:
        parent = _parent_of(shard)
        if parent not in accounts:
            text = read_small_file(parent if shard.remote else Path(parent), TOKENS)
            accounts[parent] = None if text is None else _parse(text, f"{parent}/{TOKENS}")
    return accounts


def are_tokens(source: Any) -> bool:
    """Return whether shards hold tokens rather than text.

    Raises:
        ValueError: some do and others do not.
    """
    accounts = read_accounts(find_shards(source))
    without = [parent for parent, account in accounts.items() if account is None]
    if without and len(without) < len(accounts):
        raise ValueError(f"{source} joins token shards and {without[0]}, which has no {TOKENS}: give either kind alone")
    return not without


def are_conversations(source: Any) -> bool:
    """Return whether token shards hold conversations, some of whose tokens are learned; of mixed ones, if any does."""
    return any(
        account is not None and account.chat is not None for account in read_accounts(find_shards(source)).values()
    )


def _parent_of(shard: Shard) -> str:
    return shard.location.rpartition("/")[0] or "."


def _parse(text: str, where: str) -> TokenAccount:
    try:
        fields = json.loads(text)
        if fields.pop("format", None) != TOKENS_FORMAT:
            raise ValueError
        account = TokenAccount(**fields)
        numbers = [account.vocab_size, account.documents, account.empty, account.learned, *account.shards.values()]
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or not 0 <= account.eos_id < account.vocab_size:
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{where} is not of the format {TOKENS_FORMAT!r}: write the token shards again") from None
    return account


def check_tokens(data: bytes, shard: Shard) -> int:
    """Check that the array of a token shard is as its tokens.json says; return how many tokens it has.

    Raises:
        BadSample: it is not, or there is no tokens.json.
        ValueError: tokens.json is of another format.
    """
    account = read_accounts([shard])[_parent_of(shard)]
    if account is None:
        raise BadSample(f"token array without a {TOKENS}")
    try:
        tokens = np.load(BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError):  # the last: a header may claim any size
        raise BadSample("damaged token array") from None
    if tokens.dtype != account.dtype or tokens.shape != (account.shards.get(shard.name),):
        raise BadSample(f"token array not as {TOKENS} says")
    if len(tokens) and int(tokens.max()) >= account.vocab_size:
        raise BadSample("token outside of the vocabulary")
    return len(tokens)


class TokenShards(ShardSet):
    """Token shards as samples of `length + 1` tokens; a sample's row is the number of the sequence in its shard.

    Args:
        source: as `ShardSet`'s.
        length: tokens that a model reads of each sequence.

    Attributes:
        account: of all the shards together.

    Raises:
        ValueError: as `ShardSet`; shards without a tokens.json, of more than one tokenizer, or too short.
    """

    def __init__(self, source: Any, length: int, cache: ShardCache | None = None) -> None:
        if length < 1:
            raise ValueError(f"length is {length} tokens: it must be at least 1")
        super().__init__(source, cache)
        self.length = length
        accounts = read_accounts(self.shards)
        self.account = _join(accounts, str(source))
        self._tokens = np.array([_count_listed(s, accounts[_parent_of(s)]) for s in self.shards], dtype=np.int64)
        self._starts: dict[tuple[int, str], int] = {}  # shard, member -> byte in the tar at which its numbers begin
        self.counts = self._counted_sequences(source)

    def _counted_sequences(self, source: Any) -> np.ndarray:
        counts = np.maximum(0, self._tokens - 1) // self.length
        if not counts.any():
            raise ValueError(
                f"{source} holds {self._tokens.sum():,} tokens in {len(self.shards)} shard(s): too few for one "
                f"sequence of length {self.length} and the token after it; take a smaller length"
            )
        return counts

    @property
    def fingerprint(self) -> str:
        """A digest of names and counts, of the length and of the tokenizer."""
        return f"{super().fingerprint}-{self.length}-{self.account.fingerprint}"

    @property
    def sample_settings(self) -> dict[str, Any]:
        """The length, by which tokens are cut into sequences."""
        return {"length": self.length}

    @property
    def extra_counts(self) -> dict[str, int]:
        """Tokens after the last whole sequence of each shard, and documents that are not in the shards."""
        used = self.counts * self.length + (self.counts > 0)
        counts = {"tail_tokens": int((self._tokens - used).sum())}
        return counts | {"skipped_documents": self.account.bad, "empty_documents": self.account.empty}

    def members(self, sample: SampleId) -> Members:
        """Return one sequence as the member `npy`; raise as `ShardSet.members`."""
        number, row = sample
        return {MEMBER: self.read_tokens(number, row * self.length, (row + 1) * self.length + 1)}

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document in order, without the end token; documents that shards cut are joined.

        A conversation is a document with all its tokens.

        Raises:
            ValueError: a shard is damaged.
        """
        if self.account.chat is not None:
            for number in range(len(self.shards)):
                stops = np.cumsum(self.lengths(number), dtype=np.int64)
                for start, stop in zip((stops - self.lengths(number)).tolist(), stops.tolist(), strict=True):
                    yield np.frombuffer(self.read_tokens(number, start, stop), self.account.dtype)
            return
        pending: list[np.ndarray] = []
        for number, shard in enumerate(self.shards):
            for start in range(0, int(self._tokens[number]), _READ_TOKENS):
                stop = min(start + _READ_TOKENS, int(self._tokens[number]))
                try:
                    piece = np.frombuffer(self.read_tokens(number, start, stop), self.account.dtype)
                except BadSample as reason:
                    raise ValueError(f"{shard.location}: {reason}; write the token shards again") from reason
                if int(piece.max()) >= self.account.vocab_size:
                    raise ValueError(f"{shard.location}: token outside of the vocabulary; write the token shards again")
                *complete, rest = np.split(piece, np.flatnonzero(piece == self.account.eos_id) + 1)
                for part in complete:
                    yield np.concatenate([*pending, part[:-1]])
                    pending = []
                pending.append(rest)
        if any(map(len, pending)):
            yield np.concatenate(pending)

    def describe(self, sample: SampleId) -> str:
        """Return "shard: sequence N" of a sample, for reports."""
        return f"{self.shards[sample[0]].name}: sequence {sample[1]}"

    def read_tokens(self, number: int, start: int, stop: int) -> bytes:
        """Return the bytes of tokens start..stop-1 of a shard.

        Raises:
            BadSample: the shard is cut short, or does not hold what tokens.json says.
        """
        return self._read(number, MEMBER, self.account.dtype, start, stop)

    def read_learned(self, number: int, start: int, stop: int) -> bytes:
        """Return a byte for each of the tokens start..stop-1 of a shard of conversations: 1 if it is learned."""
        return self._read(number, LEARNED, np.dtype(bool), start, stop)

    def lengths(self, number: int) -> np.ndarray:
        """Return how many tokens each conversation of a shard has.

        Raises:
            ValueError: the shard is damaged.
        """
        location = self.shards[number].location
        try:
            data = self.reader(number).read_member(0, LENGTHS, sys.maxsize)
            lengths = np.load(BytesIO(data), allow_pickle=False)
        except (BadSample, KeyError, ValueError, EOFError, OSError, MemoryError) as reason:
            raise ValueError(f"{location}: damaged lengths ({reason}); write the token shards again") from reason
        if lengths.dtype != LENGTH_DTYPE or lengths.ndim != 1 or int(lengths.sum()) != self._tokens[number]:
            raise ValueError(f"{location}: the lengths of its conversations are not as {TOKENS} says; make it anew")
        return lengths.astype(np.int64)

    def _read(self, number: int, member: str, dtype: np.dtype, start: int, stop: int) -> bytes:
        if (number, member) not in self._starts:
            self._starts[number, member] = self._start(number, member, dtype)
        first = self._starts[number, member] + start * dtype.itemsize
        return self.reader(number).read_bytes(first, (stop - start) * dtype.itemsize)

    def _start(self, number: int, member: str, dtype: np.dtype) -> int:
        """Return the byte of a shard at which the numbers of a member, one a token, begin."""
        reader = self.reader(number)
        extent = reader.index.extent(0, member) if len(reader.index) else None
        if extent is None:
            raise BadSample("shard without tokens")
        offset, size = extent
        file = BytesIO(reader.read_member(0, member, _HEADER_BYTES))
        try:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError
            shape, _, read = np.lib.format.read_array_header_1_0(file)
        except ValueError:
            raise BadSample("damaged token array") from None
        tokens, header = int(self._tokens[number]), file.tell()
        if shape != (tokens,) or read != dtype or size != header + tokens * dtype.itemsize:
            raise BadSample(f"token array not as {TOKENS} says")
        return offset + header


class TokenSequence:
    """`TokenBatch`: sequences, and if asked the number of each token's document.

    Args:
        account: of the shards that the sequences come from.
        documents: whether to number the documents of each row.
    """

    def __init__(self, account: TokenAccount, *, documents: bool = False) -> None:
        self._dtype, self._vocab_size, self._eos_id = account.dtype, account.vocab_size, account.eos_id
        self._documents = documents

    def decode(self, members: Members) -> np.ndarray:
        """Return tokens [L + 1], all of them in the vocabulary."""
        tokens = np.frombuffer(members[MEMBER], self._dtype)
        if int(tokens.max()) >= self._vocab_size:
            raise BadSample("token outside of the vocabulary")
        return tokens

    def collate(self, items: list[np.ndarray]) -> TokenBatch:
        """Join sequences into a batch."""
        tokens = np.stack(items).astype(np.int64)
        batch: TokenBatch = {"tokens": torch.from_numpy(tokens)}
        if self._documents:
            ends = tokens == self._eos_id
            batch["documents"] = torch.from_numpy(np.cumsum(ends, axis=1) - ends)
        return batch


def _join(accounts: dict[str, TokenAccount | None], source: str) -> TokenAccount:
    joined: TokenAccount | None = None
    for parent, account in accounts.items():
        if account is None:
            raise ValueError(f"{parent} has no {TOKENS}, so no token shards: make them with `diffvision data tokenize`")
        if joined is None:
            joined = TokenAccount(account.vocab_size, account.eos_id, account.fingerprint, chat=account.chat)
        if (account.chat is None) != (joined.chat is None):
            raise ValueError(
                f"{source} joins token shards of text and of conversations ({parent} is of the other kind): "
                "train on either alone"
            )
        if (account.vocab_size, account.eos_id, account.fingerprint) != (
            joined.vocab_size,
            joined.eos_id,
            joined.fingerprint,
        ):
            raise ValueError(
                f"the token shards of {source} have different tokenizers ({joined.vocab_size}, {joined.fingerprint}; "
                f"in {parent} {account.vocab_size}, {account.fingerprint}): tokenise them again with one"
            )
        joined.documents, joined.empty = joined.documents + account.documents, joined.empty + account.empty
        joined.learned += account.learned
        for reason, count in account.skipped.items():
            joined.skipped[reason] = joined.skipped.get(reason, 0) + count
            joined.examples.setdefault(reason, account.examples.get(reason, []))
    assert joined is not None  # a ShardSet has shards
    return joined


def _count_listed(shard: Shard, account: TokenAccount | None) -> int:
    if account is None or shard.name not in account.shards:
        raise ValueError(f"{_parent_of(shard)}/{TOKENS} does not list {shard.name}: write the token shards again")
    return account.shards[shard.name]
