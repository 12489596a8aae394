"""Is a data set whole, and what is in it? Functions that return data, and the tables to print of it."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.progress import track
from rich.table import Table

from diffvision.data.decode import MAX_IMAGE_BYTES, BadSample, decode_image, decode_label, decode_text, open_image
from diffvision.data.documents import check_document
from diffvision.data.index import ShardIndex, correct_sidecars, scan, sha256
from diffvision.data.samples import IMAGE_KEYS, CaptionMember
from diffvision.data.sources import PLAIN, natural, read_beside, read_counts
from diffvision.data.tokens import MEMBER, check_tokens


@dataclass
class ShardCheck:
    """One shard: how many samples it has, how many can be used, and what is wrong with it and with the others."""

    path: Path
    samples: int = 0
    good: int = 0
    problems: list[str] = field(default_factory=list)  # of the shard as a whole
    bad: Counter[str] = field(default_factory=Counter)  # of samples, by reason
    examples: dict[str, str] = field(default_factory=dict)  # reason -> key of the first

    @property
    def ok(self) -> bool:
        return not self.problems and not self.bad


@dataclass
class ShardStats:
    """Samples, bytes and the distributions of one shard, to be added up."""

    samples: int = 0
    bytes: int = 0
    members: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)
    modes: Counter[str] = field(default_factory=Counter)  # "PNG RGB"
    caption_lengths: list[int] = field(default_factory=list)  # characters
    labels: Counter[int] = field(default_factory=Counter)
    texts: list[int] = field(default_factory=list)  # characters of each text of a language corpus
    tokens: list[int] = field(default_factory=list)  # of each token shard
    damaged: int = 0  # shards of which only what lies before the damage is counted

    def __add__(self, other: "ShardStats") -> "ShardStats":
        return ShardStats(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def shard_directories(directory: str | Path) -> list[Path]:
    """The directory and those under it that hold .tar files.

    Raises:
        ValueError: none does.
    """
    root = Path(directory)
    found = sorted({p.parent for p in root.rglob(f"*{PLAIN[0]}") if not p.parent.name.startswith(".")})
    found += [p.parent for p in root.rglob("manifest.json") if p.parent not in found]
    if not found:
        raise ValueError(f"no .tar files in or under {directory}")
    return found


def check_shards(directory: str | Path, num_workers: int = 2) -> list[ShardCheck]:
    """Check every shard under a directory: manifest, size and sha256, tar structure, and each sample decoded."""
    jobs = [job for part in shard_directories(directory) for job in _jobs(part)]
    return list(_in_parallel(_check, jobs, num_workers, "checking"))


def shard_stats(directory: str | Path, num_workers: int = 2) -> dict[Path, ShardStats]:
    """Count and measure every directory of shards under a directory; images are opened, not decoded."""
    total = {part: ShardStats() for part in shard_directories(directory)}
    paths = [path for part in total for path in sorted(part.glob(f"*{PLAIN[0]}")) if path.is_file()]
    for path, stats in zip(paths, _in_parallel(_measure, paths, num_workers, "measuring"), strict=True):
        total[path.parent] += stats
    return total


def _in_parallel(function, jobs: list, num_workers: int, label: str) -> Iterator:
    workers = min(num_workers, len(jobs))
    if workers < 2:
        yield from track(map(function, jobs), label, total=len(jobs), transient=True)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from track(pool.map(function, jobs), label, total=len(jobs), transient=True)


def _jobs(directory: Path) -> list[tuple[Path, dict | None, str]]:
    """(shard, what the manifest says of it, what is wrong with its being there)"""
    told = read_counts(directory)
    present = sorted((p.name for p in directory.glob(f"*{PLAIN[0]}")), key=natural)
    jobs = [(directory / n, told.get(n), "not in the manifest" if told and n not in told else "") for n in present]
    jobs += [(directory / n, None, "in the manifest, but not there") for n in told if n not in present]
    listed = directory / "nshards.txt"
    said = (read_beside(directory, listed.name) or "").strip()
    if listed.is_file() and said != str(len(present)):
        jobs.append((listed, None, f"says {said[:40]!r}, but there are {len(present)} shards"))
    return jobs


def _check(job: tuple[Path, dict | None, str]) -> ShardCheck:
    path, told, problem = job
    result = ShardCheck(path, problems=[problem] if problem else [])
    if path.suffix != ".tar" or not path.exists():
        return result
    if not path.is_file():  # a pipe would be waited for
        result.problems.append("not a file")
        return result
    try:
        index = scan(path)
        result.problems += correct_sidecars(path, index)
        _compare(result, index, told or {})
        with open(path, "rb") as file:
            for row in range(len(index)):
                try:
                    _decode(_Row(file.fileno(), index, row), index, row, path)
                    result.good += 1
                except BadSample as reason:
                    result.bad[str(reason)] += 1
                    result.examples.setdefault(str(reason), index.key(row))
    except OSError as error:
        result.problems.append(f"cannot be read: {error}")
    return result


def _compare(result: ShardCheck, index: ShardIndex, told: dict) -> None:
    result.samples = len(index)
    if index.damage:
        result.problems.append(f"tar is damaged: {index.damage}")
    if told.get("samples", len(index)) != len(index):
        result.problems.append(f"{len(index)} samples, the manifest says {told['samples']}")
    size = result.path.stat().st_size
    if told.get("bytes", size) != size:
        result.problems.append(f"{size:,} bytes, the manifest says {told['bytes']:,}")
    elif "sha256" in told and sha256(result.path) != told["sha256"]:
        result.problems.append("sha256 is not the manifest's")
    keys = Counter(index.key(row) for row in range(len(index)))
    if repeated := [key for key, count in keys.items() if count > 1]:
        result.problems.append(f"{len(repeated)} keys come more than once, first {repeated[0]!r}: members apart?")


class _Row:
    """The members of one sample in an open file."""

    def __init__(self, file: int, index: ShardIndex, row: int) -> None:
        self._file, self._index, self._row = file, index, row

    def size(self, member_type: str) -> int | None:
        place = self._index.place(self._row, member_type)
        return None if place is None else place[1]

    def read(self, member_type: str, at_most: int) -> bytes:
        offset, size = self._index.place(self._row, member_type) or (0, 0)
        size = min(size, at_most)
        if offset + size > os.fstat(self._file).st_size:
            raise BadSample("truncated shard")
        return os.pread(self._file, size, offset)


def _language(index: ShardIndex) -> str:
    """What a shard of a language corpus holds, "text" or "tokens"; nothing where it is none."""
    kinds = {name.rpartition(".")[2] for name in index.types}
    if kinds == {MEMBER}:
        return "tokens"
    return "text" if kinds and kinds <= {"txt", "json", "jsonl"} else ""


def _decode(members: "_Row", index: ShardIndex, row: int, path: Path) -> None:
    """Whatever the sample has must be readable; an image it must have, and with it a caption, label or JSON; unless no
    sample of the shard has one: then it is of a language corpus."""
    types = index.members(row)
    if kind := _language(index):
        _read_language(members, types, kind, path)
        return
    images = [name for name in types if name.rpartition(".")[2] in IMAGE_KEYS]
    texts = [name for name in types if name not in images]
    if not images:
        raise BadSample("missing image")
    if not texts:
        raise BadSample("missing caption or label")
    for name in texts:
        if name.endswith("cls"):
            decode_label(members.read(name, 64))
        elif name.endswith("txt"):
            CaptionMember(name).all(members)
        else:
            decode_text(members.read(name, 1 << 20), cut=True)
    for name in images:
        if (members.size(name) or 0) > MAX_IMAGE_BYTES:
            raise BadSample("image too large")
        decode_image(members.read(name, MAX_IMAGE_BYTES))


def _read_language(members: "_Row", types: list[str], kind: str, path: Path) -> list[int]:
    """Characters of each text member, or tokens of the array."""
    if not types:
        raise BadSample(f"missing {kind}")
    if kind == "tokens":
        return [check_tokens(members.read(MEMBER, members.size(MEMBER) or 0), path)]
    return [check_document(members, name) for name in types]


def _measure(path: Path) -> ShardStats:
    index = scan(path)
    stats = ShardStats(samples=len(index), bytes=path.stat().st_size, damaged=int(bool(index.damage)))
    with open(path, "rb") as file:
        for row in range(len(index)):
            members = _Row(file.fileno(), index, row)
            for name in index.members(row):
                stats.members[name] += 1
                try:
                    if kind := _language(index):
                        (stats.tokens if kind == "tokens" else stats.texts).extend(
                            _read_language(members, [name], kind, path)
                        )
                        continue
                    _measure_member(stats, members, name)
                except BadSample:
                    stats.members[f"{name} (unreadable)"] += 1
    return stats


def _measure_member(stats: ShardStats, members: _Row, name: str) -> None:
    kind = name.rpartition(".")[2]
    if kind in IMAGE_KEYS:
        image = open_image(members.read(name, MAX_IMAGE_BYTES))
        stats.sizes[image.size] += 1
        stats.modes[f"{image.format} {image.mode}"] += 1
    elif kind == "txt":
        stats.caption_lengths += [len(line) for line in CaptionMember(name, max_chars=1 << 20).all(members)]
    elif kind == "cls":
        stats.labels[decode_label(members.read(name, 64))] += 1


def check_tables(results: list[ShardCheck], directory: str | Path) -> Group:
    """What was found, a line a directory, and a line a problem."""
    name = partial(_relative, Path(directory))
    totals = Table(title=f"{directory}")
    for column in ("directory", "shards", "samples", "good", "bad"):
        totals.add_column(column, justify="left" if column == "directory" else "right")
    for part in sorted({result.path.parent for result in results}):
        own = [result for result in results if result.path.parent == part]
        sums = (sum(r.samples for r in own), sum(r.good for r in own), sum(r.bad.total() for r in own))
        totals.add_row(name(part), str(len(own)), *(f"{value:,}" for value in sums))
    problems = Table("shard", "problem", "samples", "first", title="problems")
    for result in results:
        for problem in result.problems:
            problems.add_row(name(result.path), problem, "", "")
        for reason, count in result.bad.most_common():
            problems.add_row(name(result.path), reason, f"{count:,}", result.examples[reason])
    return Group(totals, problems) if problems.row_count else Group(totals)


def stats_table(stats: dict[Path, ShardStats], directory: str | Path) -> Table:
    """A column a directory; a row that none of them fills is left out."""
    table = Table("", title=f"{directory}")
    rows: dict[str, list[str]] = {}
    for part, own in stats.items():
        table.add_column(_relative(Path(directory), part), justify="right")
        for label, value in _described(own).items():
            rows.setdefault(label, []).append(value)
    for label, values in rows.items():
        if any(values):
            table.add_row(label, *values)
    return table


def _described(stats: ShardStats) -> dict[str, str]:
    widths, heights = (sorted(Counter(size[i] for size in stats.sizes.elements()).elements()) for i in (0, 1))
    quartiles, of_texts = (
        ", ".join(f"{q:.0f}" for q in np.quantile(values or [0], [0, 0.25, 0.5, 0.75, 1]))
        for values in (stats.caption_lengths, stats.texts)
    )
    return {
        "samples": f"{stats.samples:,}",
        "damaged shards": f"{stats.damaged:,}, counted up to their damage" if stats.damaged else "",
        "bytes": f"{stats.bytes:,}",
        "bytes a sample": f"{stats.bytes / max(1, stats.samples):,.0f}",
        "members": ", ".join(f"{name} {count:,}" for name, count in stats.members.most_common(6)),
        "images": ", ".join(f"{mode} {count:,}" for mode, count in stats.modes.most_common(6)),
        "width": f"{widths[0]} to {widths[-1]}" if widths else "",
        "height": f"{heights[0]} to {heights[-1]}" if heights else "",
        "captions": f"{len(stats.caption_lengths):,}",
        "caption characters (quartiles)": quartiles if stats.caption_lengths else "",
        "classes": f"{len(stats.labels):,}" if stats.labels else "",
        "texts": f"{len(stats.texts):,}, {sum(stats.texts):,} characters" if stats.texts else "",
        "text characters (quartiles)": of_texts if stats.texts else "",
        "tokens": f"{sum(stats.tokens):,}" if stats.tokens else "",
    }


def _relative(root: Path, path: Path) -> str:
    return str(path.relative_to(root)) if path != root else path.name
