"""Token files: a corpus as one array of token ids on disk, and the windows of any length that are read from it.

`diffvision data tokenize` writes a folder of them. `tokens.bin` holds the ids of all documents, each followed by its
tokenizer's end-of-document id, as little-endian uint16 or uint32 without a header: what nanoGPT and litgpt map into
memory. `tokens.json` says how many there are, of which dtype and tokenizer, and the sha256 of each file. Nothing in the
files depends on a window's length.

Window i of a block of 2^24 tokens is its tokens i*L .. i*L + L: consecutive windows share one token, so every token but
a block's first is predicted exactly once. Blocks are what `data.window` shuffles together, as it does shards.

Conversations (`chat`) have two files more: a byte for each token, 1 where it is learned (`learned.bin`), and the number
of tokens of each conversation, uint32 (`lengths.bin`). `packing` makes windows of whole conversations.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diffvision.data.batches import TokenBatch
from diffvision.data.shards.sample import BadSample, Members, SampleId, SampleSource
from diffvision.data.shards.sidecars import sha256_of, stamp
from diffvision.data.shards.sources import read_small_file
from diffvision.data.splits import named_splits
from diffvision.data.text.documents import DocumentAccount
from diffvision.files import sha256
from diffvision.progress import bar

TOKENS = "tokens.json"
TOKENS_FORMAT = "diffvision-tokens-2"
IDS, LEARNED, LENGTHS = "tokens.bin", "learned.bin", "lengths.bin"
MEMBER_DTYPE = np.dtype("<u4")  # of ids in samples, whatever that of their file is
BLOCK = 1 << 24  # tokens

_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_REMEDY = "run `diffvision data tokenize` again"
_PIECE = 1 << 20  # tokens at a time, where a file is read from end to end


@dataclass
class TokenAccount(DocumentAccount):
    """The content of a `tokens.json`: the tokenizer, and counts of the documents and tokens in the files next to it.

    Attributes:
        vocab_size, eos_id, fingerprint: of the tokenizer.
        dtype: "uint16" or "uint32".
        count: tokens.
        chat: the name of the chat template of conversations; None for text.
        learned: tokens of conversations that are learned.
        sha256: {file: digest}.
        others: as `DocumentAccount`, of the text.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    dtype: str = "uint16"
    count: int = 0
    chat: str | None = None
    learned: int = 0
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the little-endian numbers in each file."""
        ids = {IDS: _DTYPES[self.dtype]}
        return ids if self.chat is None else ids | {LEARNED: np.dtype(bool), LENGTHS: np.dtype("<u4")}

    @property
    def tokenizer(self) -> tuple[int, int, str]:
        """What is known of the tokenizer, as `Tokenizer.identity`."""
        return self.vocab_size, self.eos_id, self.fingerprint

    def text(self) -> str:
        """Return the content of tokens.json."""
        return json.dumps({"format": TOKENS_FORMAT, **self.__dict__}, indent=1) + "\n"

    def _used(self) -> str:
        if self.chat is not None:
            return f"{self.documents:,} conversations, {self.count:,} tokens, {self.learned:,} of them learned"
        return f"{self.documents:,} documents, {self.count:,} tokens"


def find_token_folders(source: Any, split: str = "train") -> list[Path]:
    """Return the folders of token files that a source names, or none if it is text.

    Args:
        source: a folder with a tokens.json, a folder with one such folder for each split, or a list of these.
        split: "train" or "test"; "validation" stands in for a missing "test".

    Raises:
        ValueError: a list mixes token files and text, or there is no such split.
    """
    if isinstance(source, (list, tuple)):
        parts = [find_token_folders(part, split) for part in source]
        if any(parts) and not all(parts):
            raise ValueError(f"train must be token files or text, got both: {source}")
        return [folder for folders in parts for folder in folders]
    path = Path(source)
    if (path / TOKENS).is_file():
        return [path]
    names = [p.name for p in sorted(path.iterdir()) if (p / TOKENS).is_file()] if path.is_dir() else []
    if not names:
        return []
    splits = named_splits(names, source)
    name = splits.get(split) or (splits.get("validation") if split == "test" else None)
    if name is None:
        raise ValueError(f"{source} has no token files of {split}: choose one of {', '.join(splits)}")
    return [path / name]


def read_account(folder: Path) -> TokenAccount:
    """Return the tokens.json of a folder.

    Raises:
        ValueError: there is none, or it is not of this format.
    """
    where, text = folder / TOKENS, read_small_file(folder, TOKENS)
    if text is None:
        raise ValueError(f"{folder} has no {TOKENS}: write token files with `diffvision data tokenize`")
    try:
        fields = json.loads(text)
        written = fields.pop("format")
        if written != TOKENS_FORMAT:
            raise ValueError(f"the format of {where} must be {TOKENS_FORMAT!r}, got {written!r:.40}: {_REMEDY}")
        account = TokenAccount(**fields)
        is_whole = account.sha256.keys() == account.dtypes.keys() and 0 <= account.eos_id < account.vocab_size
        if not (is_whole and account.count > 0 and account.seen >= account.documents > 0):
            raise KeyError
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{where} is damaged: {_REMEDY}") from None
    return account


class TokenFiles:
    """The token files of one folder, mapped into memory when they are first read.

    Each file's sha256 is verified here, and again when the file was changed since.

    Args:
        folder: holds tokens.json.

    Attributes:
        account: the content of tokens.json.

    Raises:
        ValueError: as `read_account`; a file is truncated, changed or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.account = folder, read_account(folder)
        self._paths = {name: os.path.join(folder, name) for name in self.account.dtypes}
        self._stamps = {name: self._verify(name, sha256_of) for name in self._paths}
        self._arrays: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}  # a memory map would be pickled with its content

    def array(self, name: str) -> np.ndarray:
        """Return the content of a file, read-only.

        Raises:
            OSError, ValueError: the file is gone, or was changed.
        """
        if stamp(self._paths[name]) != self._stamps[name]:  # a read beyond a truncated file's end kills the process
            self._stamps[name] = self._verify(name, sha256_of)
            self._arrays.pop(name, None)
        if name not in self._arrays:
            mapped = np.memmap(self._paths[name], self.account.dtypes[name], "r")
            self._arrays[name] = mapped.view(np.ndarray)  # slices cost less than a memmap's
        return self._arrays[name]

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document in order, without the end token; of a conversation all its tokens."""
        if self.account.chat is not None:
            yield from np.split(self.array(IDS), np.cumsum(self.array(LENGTHS), dtype=np.int64)[:-1])
            return
        begin = 0
        for start in range(0, self.account.count, _PIECE):
            ids = self.array(IDS)
            for end in (start + np.flatnonzero(ids[start : start + _PIECE] == self.account.eos_id)).tolist():
                yield ids[begin:end]
                begin = end + 1

    def check(self) -> None:
        """Read every file from end to end.

        Raises:
            ValueError: a file does not have its sha256, or a token is outside of the vocabulary.
        """
        for name in self.account.dtypes:
            self._verify(name, sha256)
        size = self.account.vocab_size
        for start in range(0, self.account.count, _PIECE):
            largest = int(self.array(IDS)[start : start + _PIECE].max())
            if largest >= size:
                raise ValueError(f"tokens in {self.folder / IDS} must be below {size:,}, got {largest:,}: {_REMEDY}")

    def _verify(self, name: str, digest_of: Callable[[Path, Callable], str]) -> str:
        """Return the stamp of a file; raise ValueError if it does not have the size and sha256 of tokens.json."""
        account, path = self.account, self.folder / name
        size = (account.documents if name == LENGTHS else account.count) * account.dtypes[name].itemsize
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise ValueError(f"{path} must have {size:,} bytes, got {found:,}: copy it again, or {_REMEDY}")
        since = stamp(path)
        with bar("verifying", size >> 20) as advance:
            digest = digest_of(path, lambda: advance(1))
        if digest != account.sha256[name]:
            raise ValueError(f"the sha256 of {path} must be that in {TOKENS}: copy it again, or {_REMEDY}")
        return since


class Block(NamedTuple):
    """A part of a file whose windows are shuffled together: from token (or conversation) `start` to `stop`."""

    file: TokenFiles
    number: int
    start: int
    stop: int


class TokenWindows(SampleSource):
    """Token files as samples of `length + 1` tokens; a sample is the number of a block and a window's number in it.

    Args:
        source: as `find_token_folders` takes it.
        length: tokens that a model reads of each window.
        block: tokens of a block.

    Attributes:
        account: of all the files together.

    Raises:
        ValueError: as `TokenFiles`; files of more than one tokenizer, or too few tokens.
    """

    def __init__(self, source: Any, length: int, *, block: int = BLOCK) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 token, got {length}")
        folders = find_token_folders(source)
        if not folders:
            raise ValueError(f"{source} has no {TOKENS}: write token files with `diffvision data tokenize`")
        self.length = length
        self.files = [TokenFiles(folder) for folder in folders]
        self.account = _join(self.files)
        self.counts = np.array(self._count_windows(block), dtype=np.int64)
        self.content = f"token files:{_digest([file.account.sha256 for file in self.files])}"

    def _count_windows(self, block: int) -> list[int]:
        """Return the number of windows of every block."""
        self._blocks = [
            Block(file, number, start, min(start + block, file.account.count))
            for file in self.files
            for number, start in enumerate(range(0, file.account.count, block))
        ]
        counts = [(block.stop - block.start - 1) // self.length for block in self._blocks]
        if not any(counts):
            raise ValueError(
                f"{_join_names(self.files)} must hold more than {self.length:,} tokens, one window of data.length, got "
                f"{self.account.count:,}: lower data.length"
            )
        return counts

    @property
    def fingerprint(self) -> str:
        """A digest of the windows in each block, of the length and of the tokenizer."""
        # By the names that blocks had as tar shards in earlier versions, so that their runs resume.
        names = [f"{block.number:06d}.tar" for block in self._blocks]
        windows = [[name, int(count)] for name, count in zip(names, self.counts, strict=True)]
        return f"{_digest(windows)}-{self.length}-{self.account.fingerprint}"

    @property
    def sample_settings(self) -> dict[str, Any]:
        """The length, by which tokens are cut into windows."""
        return {"length": self.length}

    @property
    def extra_counts(self) -> dict[str, int]:
        """Tokens after the last whole window of each block, and documents that are not in the files."""
        used = int((self.counts * self.length + (self.counts > 0)).sum())
        counts = {"tail_tokens": self.account.count - used}
        return counts | {"skipped_documents": self.account.bad, "empty_documents": self.account.empty}

    def members(self, sample: SampleId) -> Members:
        """Return one window as the member `tokens.bin`, in uint32.

        Raises:
            ValueError: the files were changed.
        """
        start = self._first_token(sample)
        ids = self._blocks[sample[0]].file.array(IDS)[start : start + self.length + 1]
        return {IDS: ids.astype(MEMBER_DTYPE).tobytes()}

    def describe(self, sample: SampleId) -> str:
        """Return "folder/tokens.bin: from token N" of a sample, for reports."""
        return f"{self._blocks[sample[0]].file.folder.name}/{IDS}: from token {self._first_token(sample):,}"

    def _first_token(self, sample: SampleId) -> int:
        return self._blocks[sample[0]].start + sample[1] * self.length


class TokenSequence:
    """`TokenBatch`: windows, and if asked the number of each token's document.

    Args:
        account: of the files that the windows come from.
        documents: whether to number the documents of each row.
    """

    def __init__(self, account: TokenAccount, *, documents: bool = False) -> None:
        self._vocab_size, self._eos_id, self._documents = account.vocab_size, account.eos_id, documents

    def decode(self, members: Members) -> Any:
        """Return tokens [L + 1], all of them in the vocabulary."""
        tokens = np.frombuffer(members[IDS], MEMBER_DTYPE)
        if int(tokens.max()) >= self._vocab_size:
            raise BadSample("token outside of the vocabulary")
        return tokens

    def collate(self, items: list[Any]) -> TokenBatch:
        """Join windows into a batch."""
        tokens = np.stack(items).astype(np.int64)
        batch: TokenBatch = {"tokens": torch.from_numpy(tokens)}
        if self._documents:
            ends = tokens == self._eos_id
            batch["documents"] = torch.from_numpy(np.cumsum(ends, axis=1) - ends)
        return batch


def _join(files: list[TokenFiles]) -> TokenAccount:
    """Return one account of all, which have one tokenizer and are all of text or all of conversations."""
    first = files[0].account
    joined = TokenAccount(first.vocab_size, first.eos_id, first.fingerprint, first.dtype, chat=first.chat)
    for account in (file.account for file in files):
        if (account.chat is None) != (first.chat is None):
            raise ValueError(f"{_join_names(files)} join text and conversations: train on either alone")
        if account.tokenizer != first.tokenizer:
            raise ValueError(f"{_join_names(files)} must have one tokenizer: tokenise the text again with one")
        joined.add(account)
        joined.count, joined.learned = joined.count + account.count, joined.learned + account.learned
    return joined


def _join_names(files: list[TokenFiles]) -> str:
    return " and ".join(str(file.folder) for file in files)


def _digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
