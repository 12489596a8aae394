"""`diffvision data check`: every shard of a dataset, opened and decoded as in training, and the table of the results.

The commands are in `make`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from PIL.Image import Image
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffvision.data.conversations import conversation_key, read_row
from diffvision.data.images.decode import check_processed, decode_image
from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.images.samples import (
    IMAGE_KEYS,
    CaptionMember,
    ImageLabel,
    ImageMember,
    ImageText,
    caption_key,
    find_caption_key,
    find_label_key,
    label_key,
)
from diffvision.data.shards.index import MEMBER_TYPES, ShardIndex, scan
from diffvision.data.shards.remote import Shard
from diffvision.data.shards.sample import BadSample, Members
from diffvision.data.shards.sources import (
    MANIFEST,
    find_shards,
    is_shard,
    natural,
    read_counts,
    read_small_file,
    uncompressed,
)
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import check_document
from diffvision.data.text.tokens import IDS, TOKENS, TokenFiles
from diffvision.files import sha256
from diffvision.progress import track

Source = str | Path | Sequence[str]
_PACKED_FIRST = (".zip", ".csv", ".tsv", ".jsonl", ".json", ".parquet")  # of pictures that are not in shards


@dataclass
class ShardCheck:
    """The result of checking one shard: its samples, how many of them can be used, and all problems."""

    location: str
    problems: list[str] = field(default_factory=list)  # of the shard as a whole
    read: str = ""  # the setting by which samples were read
    samples: int = 0
    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # of samples, by reason
    examples: dict[str, str] = field(default_factory=dict)  # reason -> key of the first

    @property
    def path(self) -> Path:
        """The location as a path."""
        return Path(self.location)

    @property
    def ok(self) -> bool:
        """Whether there are no problems and no bad samples."""
        return not self.problems and not self.bad


_Reading = tuple[str, Callable[[Members], Any]]
"""How the samples of a directory are read: as the tables have it, and what raises BadSample for one."""


def _check_conversation(members: Members) -> None:
    """Read a conversation and its images, without the tokens of any model."""
    for data in read_row(members)[1]:
        check_processed(decode_image(data).size, pads=True)  # as our models' processor does


def _check_documents(members: Members) -> None:
    """Check all members of a sample that can be read, of a language corpus."""
    texts = {name: data for name, data in members.items() if name.rpartition(".")[2] in MEMBER_TYPES}
    if not texts:
        raise BadSample("missing text")
    for name, data in texts.items():
        check_document(data, name)


def _find_reading(shards: Sequence[Shard], directory: Path, image: ImageMember) -> _Reading:
    """Return how to read the shards of one directory, by the first of them that has samples."""
    for shard in filter(is_file, shards):
        with suppress(OSError, ValueError):
            index, samples = open_shard(shard)
            if len(index):
                return _reading_of(index, samples, directory, image)
    return _read_by(image, "txt")


def _reading_of(index: ShardIndex, samples: ShardSet, directory: Path, image: ImageMember) -> _Reading:
    """Return what to read of a shard: what its index or its folder says it is, and what its first sample has."""
    if index.types and {name.rpartition(".")[2] for name in index.types} <= {"txt", "json", "jsonl"}:
        return "text", _check_documents
    with suppress(ValueError, OSError):  # no evaluation folder, of which the directory may be a split
        folder = EvaluationFolder(directory.parent)
        if directory.name in folder.splits:
            return folder.task, folder.kind(_no_tensor).decode
    first = samples.first()
    if any(map(conversation_key, first)):
        return "conversations", _check_conversation
    if any(map(label_key, first)) and not any(map(caption_key, first)):
        return _read_by(image, label=find_label_key(samples))
    return _read_by(image, find_caption_key(samples))


def _read_by(image: ImageMember, caption: str | None = None, label: str | None = None) -> _Reading:
    """Return how training reads images with captions or class numbers, by its settings caption_key and label_key."""
    if label is not None:
        return f"label_key {label}", ImageLabel(image, label).decode
    key = caption or "txt"
    return f"caption_key {key}", ImageText(image, CaptionMember(key), _no_tokens).decode


class _Calls(Dataset):
    """The number of a check -> its result."""

    def __init__(self, calls: list[Callable[[], ShardCheck]]) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, number: int) -> ShardCheck:
        return self.calls[number]()


def check_shards(
    source: Source,
    num_workers: int = 2,
    *,
    image_key: str | Sequence[str] = IMAGE_KEYS,
    caption_key: str | None = None,
    label_key: str | None = None,
) -> list[ShardCheck]:
    """Check every shard: manifest, size and sha256, tar structure, index; and decode each sample as training does.

    Where training starts, the good samples and the bad ones by reason are those that it counts in an epoch.

    Args:
        source: as training takes it (`sources.find_shards`), or a directory with directories of shards at any depth.
        num_workers: processes.
        image_key: as in training.
        caption_key, label_key: as in training; by default what the samples of each directory have.

    Raises:
        ValueError: both keys, or one of a type that is not read.
    """
    if caption_key and label_key:
        raise ValueError("caption_key and label_key belong to different trainings: give one of them")
    image = ImageMember(_no_tensor, image_key)
    chosen = _read_by(image, caption_key, label_key) if caption_key or label_key else None
    calls: list[Callable[[], ShardCheck]] = []
    for directory, shards in list_directories(source).items():
        if (directory / TOKENS).is_file():
            calls.append(partial(_check_tokens, directory))
            continue
        reading = chosen or _find_reading(shards, directory, image)
        listed = read_counts(directory) if directory.is_dir() else {}
        for shard in shards:
            problems = ["not in the manifest"] if listed and shard.name not in listed else []
            calls.append(partial(_check_shard, shard, reading, problems))
        if _is_directory(source):
            calls += [partial(ShardCheck, *absent) for absent in _list_absent(directory, listed, shards)]
    workers = min(num_workers, len(calls))
    loader: Any = DataLoader(
        _Calls(calls), batch_size=None, num_workers=workers if workers > 1 else 0, generator=torch.Generator()
    )
    return list(track(loader, "checking", total=len(calls)))


def _is_directory(source: Source) -> bool:
    return isinstance(source, (str, Path)) and Path(source).is_dir()


def list_directories(source: Source) -> dict[Path, list[Shard]]:
    """Return the shards that exist, by directory; a directory of token files has none.

    Raises:
        ValueError: a table or an archive of pictures, or there are no shards, or a compressed one.
    """
    if not _is_directory(source):
        shards = find_shards(source)
        if other := [shard.location for shard in shards if Path(shard.location).suffix in _PACKED_FIRST]:
            raise ValueError(f"data check must have shards, got {other[0]}: pack it by `diffvision data make folder`")
        folders = [Path(shard.location).parent for shard in shards]
        return {
            folder: [shard for shard, of in zip(shards, folders, strict=True) if of == folder] for folder in folders
        }
    found: dict[Path, list[str]] = {}
    for path in sorted(Path(cast(str, source)).rglob("*"), key=lambda path: natural(path.name)):
        is_listed = is_shard(uncompressed(str(path))) or path.name in (MANIFEST, TOKENS)
        if is_listed and not path.parent.name.startswith("."):
            found.setdefault(path.parent, []).extend([path.name] * is_shard(path.name))
    if not found:
        raise ValueError(f"{source} must have shards (.tar): write them by `diffvision data make folder`")
    counts = {directory: read_counts(directory) for directory in found}
    return {
        directory: [Shard(str(directory / name), **counts[directory].get(name, {})) for name in found[directory]]
        for directory in sorted(found)
    }


def is_file(shard: Shard) -> bool:
    """Return whether a shard can be opened without waiting: it is no pipe."""
    return shard.remote or Path(shard.location).is_file()


def _list_absent(directory: Path, listed: dict, shards: list[Shard]) -> Iterator[tuple[str, list[str]]]:
    """Yield what the manifest or nshards.txt has and the directory lacks, each with the problem."""
    for name in sorted(listed.keys() - {shard.name for shard in shards}, key=natural):
        yield str(directory / name), ["in the manifest, but not there"]
    number = read_small_file(directory, "nshards.txt")
    if number is not None and number.strip() != str(len(shards)):
        yield str(directory / "nshards.txt"), [f"says {number.strip()[:40]!r}, but there are {len(shards)} shards"]


def open_shard(shard: Shard) -> tuple[ShardIndex, ShardSet]:
    """Return a shard's index, read from its headers; and its samples as training reads them.

    Raises:
        OSError: it cannot be read, fetched or unpacked.
    """
    samples = ShardSet([replace(shard, samples=shard.samples or 0)])  # not counted here: it may be damaged
    with samples.reader(0).hold() as path:
        index = scan(path)
    if shard.samples is None:
        samples = ShardSet([replace(samples.shards[0], samples=len(index))], samples.cache)
    return index, samples


def _check_tokens(folder: Path) -> ShardCheck:
    """Check the token files of a folder; its samples are the documents."""
    result = ShardCheck(str(folder / IDS), read="tokens")
    try:
        files = TokenFiles(folder)
        files.check()
        result.samples = result.good = files.account.documents
    except (OSError, ValueError) as error:
        result.problems.append(str(error))
    return result


def _check_shard(shard: Shard, reading: _Reading, problems: list[str]) -> ShardCheck:
    """Open a shard, compare it with its manifest, and read every sample as training does."""
    if not is_file(shard):
        return ShardCheck(shard.location, [*problems, "not a file"])
    result = ShardCheck(shard.location, problems, reading[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same is reported as problems
            index, samples = open_shard(shard)
            result.problems += _problems(shard, index)
            result.samples = len(samples)
            for row in range(len(samples)):
                try:
                    reading[1](samples.reader(0).read(row))
                    result.good += 1
                except BadSample as reason:
                    result.bad[str(reason)] += 1
                    result.examples.setdefault(str(reason), index.key(row) if row < len(index) else f"sample {row}")
    except ValueError as error:  # training would stop
        result.problems.append(str(error))
    except OSError as error:
        result.problems.append(f"cannot be read: {error}")
        if shard.samples:
            result.samples, result.bad["unreadable shard"] = shard.samples, shard.samples
            result.examples["unreadable shard"] = "all"
    return result


def _problems(shard: Shard, index: ShardIndex) -> list[str]:
    """Return what is wrong with a shard as a whole."""
    problems = [f"tar is damaged: {index.damage}"] if index.damage else []
    if shard.samples not in (None, len(index)):
        problems.append(f"{len(index)} samples, the manifest says {shard.samples}")
    if not shard.remote:  # a remote one was compared when it was fetched
        path = Path(shard.location)
        if shard.bytes not in (None, size := path.stat().st_size):
            problems.append(f"{size:,} bytes, the manifest says {shard.bytes:,}")
        elif shard.sha256 is not None and sha256(path) != shard.sha256:
            problems.append("sha256 is not the manifest's")
    keys = Counter(index.key(row) for row in range(len(index)))
    if repeated := [key for key, count in keys.items() if count > 1]:
        problems.append(f"{len(repeated)} keys come more than once, first {repeated[0]!r}: members apart?")
    return problems


def _no_tensor(image: Image) -> Tensor:
    """Stand in for a model's transform: it is enough that there is an image."""
    return torch.empty(0)


def _no_tokens(captions: list[str]) -> Tensor:
    return torch.empty(0)


def check_tables(results: list[ShardCheck], source: Source) -> Group:
    """Return the counts, a line for each directory with the setting by which samples were read; and the problems."""
    name = partial(name_shard, source)
    totals = Table(title=f"{source}")
    for column in ("directory", "read", "shards", "samples", "good", "bad"):
        totals.add_column(column, justify="left" if column in ("directory", "read") else "right")
    for part in sorted({result.path.parent for result in results}):
        shards = [result for result in results if result.path.parent == part]
        sums = (sum(r.samples for r in shards), sum(r.good for r in shards), sum(r.bad.total() for r in shards))
        read = ", ".join(dict.fromkeys(r.read for r in shards if r.read))
        totals.add_row(name(part), read, str(len(shards)), *(f"{value:,}" for value in sums))
    problems = Table("shard", "problem", "samples", "first", title="problems")
    for result in results:
        for problem in result.problems:
            problems.add_row(name(result.path), problem, "", "")
        for reason, count in result.bad.most_common():
            problems.add_row(name(result.path), reason, f"{count:,}", result.examples[reason])
    return Group(totals, problems) if problems.row_count else Group(totals)


def name_shard(source: Source, path: Path) -> str:
    if not _is_directory(source):
        return str(path)
    return str(path.relative_to(cast(str, source))) if path != Path(cast(str, source)) else path.name
