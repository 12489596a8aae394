"""Writing shards: ordinary WebDataset tars with their manifest, from any samples or from pictures."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import webdataset
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffvision.data.images.decode import BadSample, clean_caption, decode_image, decode_text, open_image
from diffvision.data.images.folders import PictureFolder
from diffvision.data.images.picture_set import Pictures
from diffvision.data.shards.index import scan, sha256
from diffvision.data.shards.sources import COMPRESSED, MANIFEST, MANIFEST_FORMAT, PLAIN, SIZES, is_shard, natural
from diffvision.data.shards.storage import RENAME

Sample = Mapping[str, str | bytes]
"""{"__key__": key, member type: content}"""

_ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


def write_shards(directory: str | Path, samples: Iterable[Sample], per_shard: int = 1000) -> int:
    """Write samples as 000000.tar, 000001.tar, ... with their manifest; returns how many there were."""
    return _write(Path(directory), samples, per_shard, "{:06d}.tar")


def write_evaluation_split(directory: str | Path, samples: Iterable[Sample], per_shard: int = 10_000) -> int:
    """Write samples as 0.tar, 1.tar, ... with nshards.txt, as CLIP_benchmark wants a split."""
    directory = Path(directory)
    written = _write(directory, samples, per_shard, "{}.tar")
    shards = len(list(directory.glob("*.tar")))
    (directory / "nshards.txt").write_text(f"{shards}\n")
    return written


def _write(directory: Path, samples: Iterable[Sample], per_shard: int, pattern: str) -> int:
    refuse_existing(directory)
    _check_per_shard(per_shard)
    begin_manifest(directory)
    remaining, written, shard = iter(samples), 0, 0
    while chunk := list(islice(remaining, per_shard)):
        write_tar(directory / pattern.format(shard), chunk)
        written, shard = written + len(chunk), shard + 1
    if not written:
        (directory / MANIFEST).unlink()
        raise ValueError(f"no samples to write to {directory}")
    write_manifest(directory)
    return written


def refuse_existing(directory: Path) -> None:
    if directory.is_dir() and any(is_shard(p.name) for p in directory.iterdir()):
        raise ValueError(f"{directory} has shards already: remove them, or choose another directory")


def _check_per_shard(per_shard: int) -> None:
    if per_shard < 1:
        raise ValueError(f"per_shard is {per_shard}: it must be at least 1, for a shard to hold anything")


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """One shard; the same samples give the same bytes. It has its name only once it is whole."""
    part = _new_part(path)
    with open(part, "xb") as file, webdataset.TarWriter(file, encoder=False, mtime=0) as writer:
        for sample in samples:
            writer.write({k: v.encode() if isinstance(v, str) and k[0] != "_" else v for k, v in sample.items()})
    os.replace(part, path)


def begin_manifest(directory: Path) -> None:
    """Make a directory whose manifest lists nothing yet: were its writing cut short, what is there is not all."""
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / MANIFEST, {"format": MANIFEST_FORMAT, "shards": []})


def write_manifest(directory: str | Path) -> None:
    """Count and hash every .tar of a directory, and write manifest.json and sizes.json beside them.

    Raises:
        ValueError: a shard is damaged, or is compressed; nothing is written.
    """
    directory = Path(directory)
    if packed := sorted(path for path in directory.glob("*") if path.name.endswith(COMPRESSED)):
        raise ValueError(
            f"{directory} has {len(packed)} compressed shard(s), first {packed[0]}: a manifest lists all shards of a "
            "directory, and only .tar files can be counted; unpack them to .tar, or move them elsewhere"
        )
    shards = [_described(path) for path in sorted(directory.glob(f"*{PLAIN[0]}"), key=lambda p: natural(p.name))]
    if not shards:
        raise ValueError(f"no .tar files in {directory}")
    _replace(directory / MANIFEST, {"format": MANIFEST_FORMAT, "shards": shards})
    _replace(directory / SIZES, {shard["name"]: shard["samples"] for shard in shards})


def _described(path: Path) -> dict:
    index = scan(path)
    if index.damage:
        raise ValueError(
            f"shard {path} is damaged after {len(index)} samples: {index.damage}; fetch or write it again, or remove "
            "it (tars are joined with `tar --concatenate`, not with cat)"
        )
    if index.dotted:
        raise ValueError(f"shard {path} has keys with dots: {index.dotted}; {RENAME}")
    return {"name": path.name, "samples": len(index), "bytes": path.stat().st_size, "sha256": sha256(path)}


def _replace(path: Path, value: object) -> None:
    part = _new_part(path)
    with open(part, "x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def _new_part(path: Path) -> Path:
    """The name under which a file is written. What has it, perhaps a link that came with the folder, is removed."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    return part


@dataclass
class Packed:
    """What became of the pictures of a source."""

    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one picture

    def summary(self) -> str:
        """A line of the counts, and one for each reason."""
        lines = [f"{self.samples:,} samples, left out {self.skipped.total():,}"]
        lines += [
            f"  {count:,} x {reason}, first {self.examples[reason]}" for reason, count in self.skipped.most_common()
        ]
        return "\n".join(lines)


def pack(
    pictures: Pictures,
    directory: str | Path,
    *,
    per_shard: int = 10_000,
    num_workers: int = 2,
    shuffle: bool = False,
) -> Packed:
    """Pack pictures into shards, in parallel, with a progress bar. Image files are copied as they are.

    Pictures that cannot be decoded, and missing or empty captions, are left out and counted by reason. A sample has
    its image, and what its source says of it: `txt` (one caption a line), `json` (several captions, of which training
    draws one), `cls` (the class number). `classnames.txt` has the classes, one a line, where the source names them.

    Args:
        directory: where; it must have no shards yet.
        per_shard: samples a shard.
        num_workers: processes.
        shuffle: in an order drawn once. Training mixes a few shards at a time, so those of a folder for each class
            should not hold one class each.

    Raises:
        ValueError: no pictures, or none that can be used; the directory has shards.
    """
    directory = Path(directory)
    total = _pack_as(pictures, directory, "{:06d}.tar", per_shard, num_workers, shuffle)
    if pictures.classnames:
        write_lines(directory / "classnames.txt", pictures.classnames)
    return total


def pack_evaluation(
    folder: PictureFolder,
    directory: str | Path,
    templates: Sequence[str] | None = None,
    *,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> dict[str, Packed]:
    """Pack pictures as an evaluation folder in CLIP_benchmark's layout, each of their splits.

    Args:
        folder: of zero-shot classification or of retrieval.
        directory: the evaluation folder to write; its name is the data set's in metrics.
        templates: of zero-shot prompts, with {c} where the class name belongs; by default "a photo of a {c}.".

    Returns:
        What became of the pictures of each split.

    Raises:
        ValueError: a template without {c}; classes without names; as `pack`.
    """
    directory = Path(directory)
    templates = list(templates or folder.templates)
    if wrong := [template for template in templates if "{c}" not in template]:
        raise ValueError(f"template {wrong[0]!r} has no {{c}}, which is where the class name belongs: write it in")
    if folder.task == "zero_shot" and not folder.classnames:
        raise ValueError(
            f"{folder.path} numbers its classes and does not name them: use names as labels, for zero-shot "
            "classification is by the names"
        )
    packed = {}
    for split in folder.splits:
        target = directory / split
        packed[split] = _pack_as(folder.pictures(split), target, "{}.tar", per_shard, num_workers, shuffle=False)
        write_lines(target / "nshards.txt", [str(len(list(target.glob("*.tar"))))])
    if folder.task == "zero_shot":
        write_lines(directory / "classnames.txt", folder.classnames)
        write_lines(directory / "zeroshot_classification_templates.txt", templates)
    else:
        write_lines(directory / "dataset_type.txt", ["retrieval"])
    return packed


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _pack_as(
    pictures: Pictures, directory: Path, pattern: str, per_shard: int, num_workers: int, shuffle: bool
) -> Packed:
    refuse_existing(directory)
    _check_per_shard(per_shard)
    if not len(pictures):
        raise ValueError(f"no images in {pictures.source}")
    begin_manifest(directory)
    rows = np.random.default_rng(0).permutation(len(pictures)) if shuffle else np.arange(len(pictures))
    chunks = [rows[start : start + per_shard].tolist() for start in range(0, len(rows), per_shard)]
    targets = [directory / pattern.format(number) for number in range(len(chunks))]
    firsts = range(0, len(rows), per_shard)
    total = Packed()
    workers = max(1, min(num_workers, len(chunks)))
    with packing_progress() as progress, ProcessPoolExecutor(workers, initializer=_share, initargs=(pictures,)) as pool:
        task = progress.add_task(f"packing {directory.name}", total=len(rows))
        for chunk, packed in zip(chunks, pool.map(_pack, targets, chunks, firsts), strict=True):
            total.samples += packed.samples
            total.skipped += packed.skipped
            total.examples = packed.examples | total.examples
            progress.advance(task, len(chunk))
    if not total.samples:
        for target in (*targets, directory / MANIFEST):
            target.unlink()
        raise ValueError(f"none of the {len(rows)} images of {pictures.source} can be used: {dict(total.skipped)}")
    whole = [target for target in targets if len(scan(target))]
    for target in set(targets) - set(whole):
        target.unlink()  # every picture of it was left out
    for number, target in enumerate(whole):
        target.rename(directory / pattern.format(number))
    write_manifest(directory)
    return total


def packing_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, transient=True)


_shared: Pictures  # in a worker: what it packs, sent once


def _share(pictures: Pictures) -> None:
    global _shared
    _shared = pictures


def _pack(target: Path, rows: Sequence[int], first: int) -> Packed:
    packed = Packed()
    write_tar(target, _samples(_shared, rows, first, packed))
    return packed


def _samples(pictures: Pictures, rows: Sequence[int], first: int, packed: Packed) -> Iterator[Sample]:
    for number, row in enumerate(rows, start=first):
        try:
            texts = pictures.texts(row)
            if pictures.captions is not None:
                _check_captions(texts)
            image = pictures.read(row)
            ending = _ENDINGS[open_image(image).format or ""]
            decode_image(image)  # whole, as training does: a truncated file opens
        except BadSample as reason:
            packed.skipped[str(reason)] += 1
            packed.examples.setdefault(str(reason), f"{pictures.source}: {pictures.names[row]}")
            continue
        packed.samples += 1
        # Numbered keys: a path may hold dots, which would end the key, and names that are not UTF-8.
        yield {"__key__": f"{number:09d}", ending: image, **texts}


def _check_captions(texts: Mapping[str, bytes]) -> None:
    """What cannot be trained on is not packed."""
    if "txt" not in texts:
        raise BadSample("missing caption")
    for line in decode_text(texts["txt"]).split("\n") if "json" in texts else [decode_text(texts["txt"])]:
        clean_caption(line)
