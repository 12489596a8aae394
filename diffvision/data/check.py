"""`diffvision data check`: every shard of a dataset, opened and decoded as in training, and the table of the results.

The commands are in `make`.
"""

import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

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
from diffvision.data.shards.reader import ShardReader
from diffvision.data.shards.remote import Shard, ShardCache
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
        ValueError: both keys, or one of a type that is not read; no shards, or compressed ones.
    """
    if caption_key and label_key:
        raise ValueError("caption_key and label_key belong to different trainings: give one of them")
    image = ImageMember(_no_tensor, image_key)
    chosen = _read_by(image, caption_key, label_key) if caption_key or label_key else None
    checks: list[Callable[[], ShardCheck]] = []
    for directory, shards in _list_directories(source).items():
        if (directory / TOKENS).is_file():
            checks.append(partial(_check_tokens, directory))
            continue
        reading = chosen or _find_reading(shards, directory, image)
        listed = read_counts(directory) if directory.is_dir() else {}
        for shard in shards:
            problems = ["not in the manifest"] if listed and shard.name not in listed else []
            checks.append(partial(_check_shard, shard, reading, problems))
        if _is_directory(source) and (number := read_small_file(directory, "nshards.txt")) is not None:
            there = sum(Path(shard.location).exists() for shard in shards)
            if number.strip() != str(there):
                problem = f"says {number.strip()[:40]!r}, but there are {there} shards"
                checks.append(partial(ShardCheck, str(directory / "nshards.txt"), [problem]))
    workers = min(num_workers, len(checks))
    loader: Any = DataLoader(
        checks,  # type: ignore[arg-type]  # a list will do
        batch_size=None,
        collate_fn=_call,
        num_workers=workers if workers > 1 else 0,
        generator=torch.Generator(),
    )
    return list(track(loader, "checking", total=len(checks)))


def _call(check: Any) -> ShardCheck:
    return check()


def _is_directory(source: Source) -> bool:
    return isinstance(source, (str, Path)) and Path(source).is_dir()


def _list_directories(source: Source) -> dict[Path, list[Shard]]:
    """Return the shards by directory, also those that a manifest lists and are missing; token files are no shards."""
    if not _is_directory(source):
        shards: dict[Path, list[Shard]] = {}
        for shard in find_shards(source):
            shards.setdefault(Path(shard.location).parent, []).append(shard)
        return shards
    names: dict[Path, set[str]] = {}
    for path in Path(str(source)).rglob("*"):
        of_shard = is_shard(uncompressed(str(path)))
        if (of_shard or path.name in (MANIFEST, TOKENS)) and not path.parent.name.startswith("."):
            names.setdefault(path.parent, set()).update([path.name] if of_shard else [])
    if not names:
        raise ValueError(f"{source} must have shards (.tar): write them by `diffvision data make folder`")
    shards = {}
    for directory in sorted(names):
        listed = read_counts(directory)
        every = sorted(names[directory] | listed.keys(), key=natural)
        shards[directory] = [Shard(str(directory / name), **listed.get(name, {})) for name in every]
    return shards


def _is_file(shard: Shard) -> bool:
    return shard.remote or Path(shard.location).is_file()  # to open a pipe would wait


def _find_reading(shards: Sequence[Shard], directory: Path, image: ImageMember) -> _Reading:
    """Return how to read the shards of one directory, by the first of them that has samples."""
    for shard in filter(_is_file, shards):
        with suppress(BadSample, OSError, ValueError):
            samples = ShardSet([shard])
            if len(index := samples.reader(0).index):
                return _reading_of(index, samples, directory, image)
    return _read_by(image)


def _reading_of(index: ShardIndex, samples: ShardSet, directory: Path, image: ImageMember) -> _Reading:
    """Return what to read of a shard: what its index or its folder says it is, and what its first samples have."""
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


def _no_tensor(image: Image) -> Tensor:
    """Stand in for a model's transform: it is enough that there is an image."""
    return torch.empty(0)


def _no_tokens(captions: list[str]) -> Tensor:
    return torch.empty(0)


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
    if not _is_file(shard):
        return ShardCheck(shard.location, [*problems, "not a file" if Path(shard.location).exists() else "missing"])
    read, decode = reading
    result = ShardCheck(shard.location, problems, read)
    try:
        cache = ShardCache()
        reader = ShardReader(cache.pin([shard])[0], cache)
        with reader.hold() as path:
            index = scan(path)
            result.problems += [] if index.damage else _find_links(path)
        result.problems += _problems(shard, index)
        result.samples = len(index) if shard.samples is None else shard.samples
        for row in range(result.samples):
            try:
                decode(reader.read(row))
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


def _find_links(path: Path) -> list[str]:
    """Return what is wrong with a whole tar that has links or other members without content of their own."""
    with tarfile.open(path, "r:") as tar:
        links = [m.name for m in tar if m.issparse() or not (m.isreg() or m.isdir())]
    return [f"{len(links)} members are links or no files, which are not read, first {links[0]!r}"] if links else []


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


def check_tables(results: list[ShardCheck], source: Source) -> Group:
    """Return the counts, a line for each directory with the setting by which samples were read; and the problems."""

    def name(path: Path) -> str:
        return str(path.relative_to(str(source)) if _is_directory(source) else path)

    totals = Table(title=f"{source}")
    for column in ("directory", "read", "shards", "samples", "good", "bad"):
        totals.add_column(column, justify="left" if column in ("directory", "read") else "right")
    for directory in sorted({result.path.parent for result in results}):
        shards = [result for result in results if result.path.parent == directory]
        sums = (sum(r.samples for r in shards), sum(r.good for r in shards), sum(r.bad.total() for r in shards))
        read = ", ".join(dict.fromkeys(r.read for r in shards if r.read))
        totals.add_row(name(directory), read, str(len(shards)), *(f"{value:,}" for value in sums))
    problems = Table("shard", "problem", "samples", "first", title="problems")
    for result in results:
        for problem in result.problems:
            problems.add_row(name(result.path), problem, "", "")
        for reason, count in result.bad.most_common():
            problems.add_row(name(result.path), reason, f"{count:,}", result.examples[reason])
    return Group(totals, problems) if problems.row_count else Group(totals)
