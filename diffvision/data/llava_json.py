"""`llava`: LLaVA's JSON (github.com/haotian-liu/LLaVA, docs/Finetune_Custom_Data.md) and its images as shards."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.conversations import read_conversation
from diffvision.data.images.decode import MAX_JSON_BYTES
from diffvision.data.images.image_set import ImageFiles
from diffvision.data.images.image_tables import check_path
from diffvision.data.images.pack_images import image_suffix, pack_as
from diffvision.data.shards.sample import BadSample, BadSource
from diffvision.progress import track

_BETWEEN = re.compile(r"[\s,\[\]]*")  # records: in a list, or one a line


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
    return pack_as(
        records, Path(directory), "{:06d}.tar", per_shard, num_workers, shuffle=True, members=_Records.members
    ).summary()


class _Records:
    """The records of a file, of which only the text is in memory, and the images that they name."""

    def __init__(self, path: Path, root: Path) -> None:
        self.source, self.root = str(path), root.resolve()
        spans, end = [], 0
        try:
            self.text = path.read_text("utf-8-sig")
            while (start := _BETWEEN.match(self.text, end).end()) < len(self.text):  # type: ignore[union-attr]
                _, end = json.JSONDecoder().raw_decode(self.text, start)
                spans.append((start, end))
        except (ValueError, RecursionError) as error:
            raise BadSource(f"{path} is not JSON after {len(spans):,} rows ({error})") from None
        self.spans, self.names = np.array(spans).reshape(-1, 2), range(len(spans))

    def __len__(self) -> int:
        return len(self.spans)

    def _read(self, row: int) -> tuple[dict[str, Any], ImageFiles]:
        start, end = self.spans[row]
        record = json.loads(self.text[start:end])
        if not isinstance(record, dict) or end - start > MAX_JSON_BYTES:
            raise BadSample("row is not an object, or too large")
        names: Any = next((value for key in ("image", "images") if (value := record.get(key)) is not None), [])
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
