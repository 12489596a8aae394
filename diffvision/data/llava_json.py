"""`llava`: LLaVA's JSON (github.com/haotian-liu/LLaVA, docs/Finetune_Custom_Data.md) and its images as shards."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from diffvision.data.conversations import read_conversation
from diffvision.data.images.image_set import ImageFiles
from diffvision.data.images.image_tables import check_path
from diffvision.data.images.pack_images import image_suffix, pack
from diffvision.data.rows import read_rows
from diffvision.data.shards.sample import BadSample, BadSource
from diffvision.progress import track


def make_llava(
    directory: str | Path,
    source: str | Path,
    images: str | Path | None = None,
    max_bad_fraction: float = 0.01,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> str:
    """Write LLaVA's conversations about images as training shards, in random order.

    Args:
        directory: the folder to write; it must have no shards yet.
        source: the .json or .jsonl file: records with `image` (a path, a list of them, or none for text alone) and
            `conversations`, or `messages`, or nanoVLM's `texts`.
        images: the folder that the paths are relative to; by default that of the source.
        max_bad_fraction: rows that cannot be used, and those without their images, are left out and counted; a larger
            share of them is an error, before anything is written.
        per_shard: samples per shard.
        num_workers: processes.

    Raises:
        OSError: no such file.
        ValueError: not JSON, too many bad rows, or the directory has shards.
    """
    records = _Records(Path(source), Path(images or Path(source).parent))
    faults = Counter(fault for row in track(range(len(records)), "checking rows") if (fault := records.fault(row)))
    if faults.total() > max_bad_fraction * len(records):
        listed = ", ".join(f"{count:,} x {fault}" for fault, count in faults.most_common())
        raise BadSource(
            f"{faults.total():,} of {len(records):,} rows of {source} cannot be used: give the folder of its images as "
            f"images, or a larger max_bad_fraction than {max_bad_fraction}\n{listed}"
        )
    return pack(
        records, directory, shuffle=True, per_shard=per_shard, num_workers=num_workers, read_members=_Records.members
    ).summary()


class _Records:
    """The records of a file, and the images that they name."""

    classnames: tuple[str, ...] = ()

    def __init__(self, path: Path, root: Path) -> None:
        self.source, self.root = str(path), root.resolve()
        self.rows = [row for _, row in read_rows(path)]
        self.names = range(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def _read(self, row: int) -> tuple[dict[str, Any], ImageFiles]:
        record = self.rows[row]
        if not isinstance(record, dict):
            raise BadSample("row is not an object")
        names: Any = next((record[key] for key in ("image", "images") if record.get(key) is not None), [])
        names = names if isinstance(names, list) else [names]
        names = [check_path(self.root, name, f"{self.source}, row {row}") for name in names]
        read_conversation(record, len(names))
        return record, ImageFiles(self.root, names)

    def fault(self, row: int) -> str:
        """Return why a row cannot be used; "" where it can, as far as is known without decoding its images."""
        try:
            files = self._read(row)[1]
        except BadSample as reason:
            return str(reason)
        return "" if all((self.root / name).is_file() for name in files.names) else "missing image"

    def members(self, row: int) -> dict[str, bytes]:
        """Return the images of a row and its JSON; raise BadSample where it cannot be used."""
        record, files = self._read(row)
        images = [files(number) for number in range(len(files.names))]
        numbers = [""] if len(images) == 1 else [f"{number}." for number in range(len(images))]
        named = {f"{number}{image_suffix(data)}": data for number, data in zip(numbers, images, strict=True)}
        return {**named, "json": json.dumps(record).encode()}
