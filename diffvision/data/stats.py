"""`diffvision data stats`: what the shards of a directory contain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from diffvision.data.check import (
    Source,
    find_folder,
    find_language,
    is_file,
    list_directories,
    name_shard,
    open_shard,
    read_language,
    run_in_parallel,
)
from diffvision.data.images.decode import MAX_IMAGE_BYTES, decode_label, open_image
from diffvision.data.images.samples import IMAGE_KEYS, CaptionMember
from diffvision.data.shards.downloads import Downloads, read_downloads
from diffvision.data.shards.index import count_with_webdataset
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import Shard


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
    damaged: int = 0  # shards that are counted up to their damage
    downloads: Downloads = field(default_factory=Downloads)  # img2dataset's notes

    def __add__(self, other: ShardStats) -> ShardStats:
        return ShardStats(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def shard_stats(source: Source, num_workers: int = 2) -> dict[Path, ShardStats]:
    """Count and measure the shards of each directory of a source; images are opened, not decoded."""
    directories = list_directories(source)
    totals = {directory: ShardStats() for directory in directories}
    shards = [shard for in_directory in directories.values() for shard in filter(is_file, in_directory)]
    for shard, stats in zip(shards, run_in_parallel(_measure, shards, num_workers, "measuring"), strict=True):
        totals[find_folder(shard)] += stats
    return totals


def _measure(shard: Shard) -> ShardStats:
    """Count the samples, members, image sizes, caption lengths and labels of one shard."""
    index, _, samples = open_shard(Shard(shard.location))  # up to its damage, whatever a manifest says
    stats = ShardStats(samples=len(index), damaged=int(bool(index.damage or index.dotted)))
    stats.downloads = read_downloads(shard) or stats.downloads
    with samples.reader(0).hold() as path:
        stats.bytes = (path if shard.remote else Path(shard.location)).stat().st_size
        if index.damage and not len(index):
            stats.samples, stats.members = count_with_webdataset(path)
    for row in range(0 if index.dotted else len(index)):
        reader = samples.reader(0)
        stats.members.update(index.other_names(row))
        for name in index.members(row):
            stats.members[name] += 1
            try:
                if kind := find_language(index):
                    (stats.tokens if kind == "tokens" else stats.texts).extend(read_language(reader, row, [name], kind))
                    continue
                _measure_member(stats, name, reader.read_member(row, name, MAX_IMAGE_BYTES))
            except BadSample:
                stats.members[f"{name} (unreadable)"] += 1
    return stats


def _measure_member(stats: ShardStats, name: str, data: bytes) -> None:
    kind = name.rpartition(".")[2]
    if kind in IMAGE_KEYS:
        image = open_image(data)
        stats.sizes[image.size] += 1
        stats.modes[f"{image.format} {image.mode}"] += 1
    elif kind == "txt":
        stats.caption_lengths += [len(line) for line in CaptionMember(name, max_chars=1 << 20).all({name: data})]
    elif kind == "cls":
        stats.labels[decode_label(data[:64])] += 1


def stats_data(stats: dict[Path, ShardStats]) -> dict[str, dict[str, Any]]:
    """Return the counts of each directory, and minimum, quartiles and maximum of the distributions, as plain values."""

    def quartiles(values: list[int]) -> list[float]:
        return np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist() if values else []

    return {
        str(directory): {
            "samples": one.samples,
            "damaged_shards": one.damaged,
            "bytes": one.bytes,
            "members": one.members,
            "images": one.modes,
            "width": quartiles([size[0] for size in one.sizes.elements()]),
            "height": quartiles([size[1] for size in one.sizes.elements()]),
            "captions": len(one.caption_lengths),
            "caption_characters": quartiles(one.caption_lengths),
            "labels": dict(sorted(one.labels.items())),
            "texts": len(one.texts),
            "text_characters": quartiles(one.texts),
            "tokens": sum(one.tokens),
            "urls": one.downloads.urls,
            "failed_urls": one.downloads.failed,
        }
        for directory, one in stats.items()
    }


def stats_table(stats: dict[Path, ShardStats], source: Source) -> Table:
    """Return a table of `stats_data` with a column for each directory; rows without values are left out."""
    table = Table("", title=f"{source}")
    for directory in stats:
        table.add_column(name_shard(source, directory), justify="right")
    columns = list(stats_data(stats).values())
    for name in columns[0]:
        cells = [_describe_value(name, column[name]) for column in columns]
        if any(cells):
            table.add_row(name.replace("_", " "), *cells)
    return table


def _describe_value(name: str, value: Any) -> str:
    """Return a number, a distribution or the commonest of some names as text; an empty one where there is nothing."""
    if not value:
        return ""
    if isinstance(value, list):
        return ", ".join(f"{quantile:.0f}" for quantile in value)
    if name == "labels":
        return f"{len(value):,} classes"
    if isinstance(value, dict):
        return escape(", ".join(f"{key} {count:,}" for key, count in Counter(value).most_common(6)))
    return f"{value:,}"
