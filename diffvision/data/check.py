"""`diffvision data check`: every shard of a dataset, opened and decoded as in training, and the table of the results.

The commands are in `make`.
"""

import multiprocessing
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
from diffvision.data.shards.index import ShardIndex, scan
from diffvision.data.shards.reader import ShardReader
from diffvision.data.shards.remote import Shard
from diffvision.data.shards.sample import BadSample, Members, SampleKind
from diffvision.data.shards.sources import find_shards, is_shard, natural, read_counts, read_small_file
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import TextMember, check_document
from diffvision.data.text.tokens import IDS, TOKENS, TokenFiles
from diffvision.files import sha256
from diffvision.progress import track

Source = str | Path | Sequence[str]
_TEXT = "text"  # what is read of a directory of text where no key is given
_PACKED_FIRST = (".zip", ".csv", ".tsv", ".jsonl", ".json", ".parquet")  # of pictures that are not in shards


@dataclass
class ShardCheck:
    """The result of checking one shard: its samples, how many of them can be used, and all problems."""

    location: str
    read: str = ""  # the setting by which samples were read
    samples: int = 0
    good: int = 0
    problems: list[str] = field(default_factory=list)  # of the shard as a whole
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


@dataclass(frozen=True)
class Keys:
    """What is read of each sample, by the settings of training; None for what the samples of a directory have.

    Raises:
        ValueError: more than one of caption, label and text, or a key of a type that is not read.
    """

    image_key: str | Sequence[str] = IMAGE_KEYS
    caption_key: str | None = None
    label_key: str | None = None
    text_key: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("caption_key", "label_key", "text_key") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} belong to different trainings: give one of them")
        self._reading()

    def resolved(self, shards: Sequence[Shard], directory: Path) -> "_Reading":
        """Return how to read the shards of one directory: by the keys, else by the first shard that has samples."""
        if self.caption_key or self.label_key or self.text_key:
            return self._reading()
        for shard in filter(is_file, shards):
            with suppress(OSError, ValueError):
                index, samples = open_shard(shard)
                if len(index):
                    return self._reading_of(index, samples, directory)
        return self._reading()

    def _reading_of(self, index: ShardIndex, samples: ShardSet, directory: Path) -> "_Reading":
        """Return what to read of a shard: what its index or its folder says it is, and what its first sample has."""
        if holds_text(index):
            return _Reading(_TEXT)
        if (folder := _evaluation(directory)) is not None:
            return _Reading(folder.task, folder.kind(_no_tensor))
        first = samples.first()
        if any(map(conversation_key, first)):
            return _Reading("conversations", cast(Any, _Conversations()))
        if any(map(label_key, first)) and not any(map(caption_key, first)):
            return replace(self, label_key=find_label_key(samples))._reading()
        return replace(self, caption_key=find_caption_key(samples))._reading()

    def _reading(self) -> "_Reading":
        image = ImageMember(_no_tensor, self.image_key)
        if self.text_key is not None:
            return _Reading(f"text_key {self.text_key}", text=TextMember(self.text_key))
        if self.label_key is not None:
            return _Reading(f"label_key {self.label_key}", ImageLabel(image, self.label_key))
        key = self.caption_key or "txt"
        return _Reading(f"caption_key {key}", ImageText(image, CaptionMember(key), _no_tokens))


@dataclass(frozen=True)
class _Reading:
    """How the samples of a directory are read: `name` as the tables have it, `kind` as training makes them."""

    name: str
    kind: SampleKind | None = None
    text: TextMember | None = None  # of a language corpus, by its key; without one, every member is text

    def check(self, reader: ShardReader, row: int) -> None:
        """Raise BadSample where a sample cannot be used."""
        if self.kind is not None:
            self.kind.decode(reader.read(row))
        elif self.text is None:
            _check_text(reader, row)
        else:
            for document in self.text.documents(reader.read(row)):
                if isinstance(document, BadSample):
                    raise document


class _Conversations:
    """Reads conversations and their images, without the tokens of any model."""

    def decode(self, members: Members) -> list[Image]:
        images = [decode_image(data) for data in read_row(members)[1]]
        for image in images:
            check_processed(image.size, pads=True)  # as our models' processor does
        return images


@dataclass(frozen=True)
class _Job:
    """A shard to check and what is known before it is read; `reading` is None where it cannot be read."""

    shard: Shard
    problem: str = ""
    reading: _Reading | None = None


def shard_directories(directory: str | Path) -> list[Path]:
    """Return the directory and those under it that hold shards or token files.

    Raises:
        ValueError: none does.
    """
    root = Path(directory)
    directories = sorted({p.parent for p in root.rglob("*") if is_shard(p.name) and not p.parent.name.startswith(".")})
    for name in ("manifest.json", TOKENS):
        directories += [p.parent for p in root.rglob(name) if p.parent not in directories]
    if not directories:
        raise ValueError(
            f"no shards (.tar) in or under {directory}: pack images first with `diffvision data make folder`"
        )
    return directories


def check_shards(source: Source, num_workers: int = 2, keys: Keys | None = None) -> list[ShardCheck]:
    """Check every shard: manifest, size and sha256, tar structure, index; and decode each sample as training does.

    Where training starts, the good samples and the bad ones by reason are those that it counts in an epoch.

    Args:
        source: as training takes it (`sources.find_shards`), or a directory with directories of shards at any depth.
        num_workers: processes.
        keys: what is read of each sample; by default what the samples of each directory have.
    """
    keys, jobs = keys or Keys(), []
    for directory, shards in list_directories(source).items():
        if (directory / TOKENS).is_file():
            jobs.append(_Job(Shard(str(directory / IDS))))
            continue
        reading = keys.resolved(shards, directory)
        listed = read_counts(directory) if directory.is_dir() else {}
        for shard in shards:
            jobs.append(_Job(shard, "not in the manifest" if listed and shard.name not in listed else "", reading))
        jobs += _list_absent(directory, listed, shards) if _is_directory(source) else []
    return list(run_in_parallel(_check, jobs, num_workers, "checking"))


def run_in_parallel(function, jobs: list, num_workers: int, label: str) -> Iterator:
    workers = min(num_workers, len(jobs))
    if workers < 2:
        yield from track(map(function, jobs), label, total=len(jobs))
        return
    with ProcessPoolExecutor(workers, initializer=_end_with_parent) as pool:
        yield from track(pool.map(function, jobs), label, total=len(jobs))


def _end_with_parent() -> None:
    """End this worker when its parent is killed: it would wait for work for ever."""
    parent = cast(Any, multiprocessing.parent_process())
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _is_directory(source: Source) -> bool:
    return isinstance(source, (str, Path)) and Path(source).is_dir()


def list_directories(source: Source) -> dict[Path, list[Shard]]:
    """Return the shards that exist, by directory.

    Raises:
        ValueError: a table or an archive of pictures, or there are no shards.
    """
    if not _is_directory(source):
        shards = find_shards(source)
        if other := [shard.location for shard in shards if Path(shard.location).suffix in _PACKED_FIRST]:
            raise ValueError(f"data check must have shards, got {other[0]}: pack it by `diffvision data make folder`")
        return {part: [shard for shard in shards if find_folder(shard) == part] for part in map(find_folder, shards)}
    directories = {}
    for directory in shard_directories(cast(str, source)):
        listed = read_counts(directory)
        names = sorted((p.name for p in directory.iterdir() if is_shard(p.name)), key=natural)
        directories[directory] = [Shard(str(directory / name), **listed.get(name, {})) for name in names]
    return directories


def is_file(shard: Shard) -> bool:
    """Return whether a shard can be opened without waiting: it is no pipe."""
    return shard.remote or Path(shard.location).is_file()


def find_folder(shard: Shard) -> Path:
    return Path(shard.location).parent


def _list_absent(directory: Path, listed: dict, shards: list[Shard]) -> list[_Job]:
    """Return a job with a problem for each shard that the manifest or nshards.txt has and the directory lacks."""
    names = {shard.name for shard in shards}
    absent = [Shard(str(directory / name)) for name in listed if name not in names]
    jobs = [_Job(shard, "in the manifest, but not there") for shard in absent]
    count = directory / "nshards.txt"
    number = (read_small_file(directory, count.name) or "").strip()
    if count.is_file() and number != str(len(shards)):
        jobs.append(_Job(Shard(str(count)), f"says {number[:40]!r}, but there are {len(shards)} shards"))
    return jobs


def _evaluation(directory: Path) -> EvaluationFolder | None:
    """Return the evaluation folder of which a directory is a split, or None."""
    try:
        folder = EvaluationFolder(directory.parent)
    except (ValueError, OSError):
        return None
    return folder if directory.name in folder.splits else None


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


def _check(job: _Job) -> ShardCheck:
    """Check one shard: open it, compare it with its manifest, and decode every sample."""
    shard = job.shard
    if shard.name == IDS:
        return _check_tokens(Path(shard.location).parent)
    result = ShardCheck(shard.location)
    if job.reading is not None:
        if is_file(shard):
            result = _read_shard(shard, job.reading)
        else:
            result.problems.append("not a file")
    result.problems[:0] = [job.problem] if job.problem else []
    return result


def _check_tokens(folder: Path) -> ShardCheck:
    """Check the token files of a folder; its samples are the documents."""
    result = ShardCheck(str(folder / IDS), "tokens")
    try:
        files = TokenFiles(folder)
        files.check()
        result.samples = result.good = files.account.documents
    except (OSError, ValueError) as error:
        result.problems.append(str(error))
    return result


def _read_shard(shard: Shard, reading: _Reading) -> ShardCheck:
    result = ShardCheck(shard.location, reading.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same is reported as problems
            index, samples = open_shard(shard)
            result.problems += _problems(shard, index)
            _decode(result, reading, index, samples)
    except ValueError as error:  # training would stop
        result.problems.append(str(error))
    except OSError as error:
        result.problems.append(f"cannot be read: {error}")
        if shard.samples:
            result.samples, result.bad["unreadable shard"] = shard.samples, shard.samples
            result.examples["unreadable shard"] = "all"
    return result


def _decode(result: ShardCheck, reading: _Reading, index: ShardIndex, samples: ShardSet) -> None:
    """Read every sample as training does, and count the good and, by reason, the bad."""
    result.samples = len(samples)
    for row in range(len(samples)):
        try:
            reading.check(samples.reader(0), row)
            result.good += 1
        except BadSample as reason:
            result.bad[str(reason)] += 1
            result.examples.setdefault(str(reason), index.key(row) if row < len(index) else f"sample {row}")


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


def holds_text(index: ShardIndex) -> bool:
    """Return whether a shard is of a language corpus."""
    kinds = {name.rpartition(".")[2] for name in index.types}
    return bool(kinds) and kinds <= {"txt", "json", "jsonl"}


def _check_text(reader: ShardReader, row: int) -> None:
    """Raise BadSample where a text member cannot be used, or there is none."""
    names = reader.index.members(row)
    if not names:
        raise BadSample("missing text")
    members = reader.read(row)
    for name in names:
        check_document(members[name], name)


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
