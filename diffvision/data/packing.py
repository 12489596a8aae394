"""Writing shards: ordinary WebDataset tars with their manifest, from any samples or from a folder of images."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import webdataset
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffvision.data.decode import MAX_IMAGE_BYTES, BadSample, clean_caption, decode_image, decode_text, open_image
from diffvision.data.index import scan, sha256
from diffvision.data.sources import MANIFEST, MANIFEST_FORMAT, PLAIN, SIZES, natural

Sample = Mapping[str, str | bytes]
"""{"__key__": key, member type: content}"""

_IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "file", "path")
_CAPTION_COLUMNS = ("caption", "text", "title")
_MAX_CELL = 1 << 24  # characters; the csv module's own limit of 128 Ki refuses what `clean_caption` would cut
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
    if directory.is_dir() and any(p.suffix == ".tar" for p in directory.iterdir()):
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
        ValueError: a shard is damaged; nothing is written.
    """
    directory = Path(directory)
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
    """What became of the images of a folder."""

    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one path


def pack_folder(
    source: str | Path,
    directory: str | Path,
    captions: str | Path | None = None,
    *,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> Packed:
    """Pack images and captions into shards, in parallel, with a progress bar. Image files are copied as they are.

    Args:
        source: the folder of images, JPEG, PNG or WebP.
        captions: a .csv or .tsv with a header; its columns for paths (relative to `source`) and captions are known by
            name (image, filepath, file_name, ...; caption, text, title). Without it, `x.txt` beside `x.jpg` is taken.

    Images that cannot be decoded, and missing or empty captions, are left out and counted by reason.
    """
    source, directory = Path(source), Path(directory)
    refuse_existing(directory)
    _check_per_shard(per_shard)
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder of images")
    pairs = list(_listed(source, Path(captions)) if captions else _beside(source))
    if not pairs:
        raise ValueError(f"no images in {source}")
    begin_manifest(directory)
    chunks = [pairs[start : start + per_shard] for start in range(0, len(pairs), per_shard)]
    targets = [directory / f"{number:06d}.tar" for number in range(len(chunks))]
    firsts = range(0, len(pairs), per_shard)
    total = Packed()
    with packing_progress() as progress, ProcessPoolExecutor(max(1, min(num_workers, len(chunks)))) as pool:
        task = progress.add_task(f"packing {directory.name}", total=len(pairs))
        for chunk, packed in zip(chunks, pool.map(_pack, targets, chunks, firsts), strict=True):
            total.samples += packed.samples
            total.skipped += packed.skipped
            total.examples = packed.examples | total.examples
            progress.advance(task, len(chunk))
    for target in targets:
        if target.stat().st_size and not len(scan(target)):
            target.unlink()  # every image of it was left out
    if not total.samples:
        (directory / MANIFEST).unlink()
        raise ValueError(f"none of the {len(pairs)} images of {source} can be used: {dict(total.skipped)}")
    write_manifest(directory)
    return total


def packing_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, transient=True)


def _listed(source: Path, captions: Path) -> Iterator[tuple[Path, str | None]]:
    root = source.resolve()
    for line, image, caption in _rows(captions):
        yield _inside(root, image, f"{captions}, line {line}"), caption


def _rows(captions: Path) -> Iterator[tuple[int, str, str]]:
    """(line, image, caption) of each row; a missing cell is an empty one."""
    # In a .tsv one line is one row and a quote is a quote; in a .csv a quote that never ends must not eat the rest.
    tabs = captions.suffix.lower() == ".tsv"
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
    line = 0
    try:
        with open(captions, newline="", encoding="utf-8-sig") as file:
            if tabs:
                reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.DictReader(file, strict=True)
            header = list(reader.fieldnames or [])
            image, caption = _column(header, _IMAGE_COLUMNS, captions), _column(header, _CAPTION_COLUMNS, captions)
            line = reader.line_num
            for row in reader:
                line = reader.line_num
                yield line, row[image] or "", row[caption] or ""
    except csv.Error as error:
        remedy = "" if tabs else " (a quote inside a quoted cell is written twice)"
        raise ValueError(f"{captions}, after line {line}: {error}: mend the row{remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{captions}, line {_undecodable(captions)}, is not UTF-8: save the file as UTF-8") from None


def _undecodable(path: Path) -> int:
    """The first line that is not UTF-8; the reader, which reads ahead, cannot tell."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def _inside(root: Path, image: str, where: str) -> Path:
    """The file a row names: a table, which may come from elsewhere, cannot put files from outside into the shards."""
    path = root / image
    try:
        inside = path.resolve().is_relative_to(root)
    except (OSError, ValueError, RuntimeError):  # a null character, a circle of links
        inside = False
    if not inside:
        raise ValueError(
            f"{where}: {image!r} is not a path inside {root}: mend the row, copy what is linked, or choose another "
            "source"
        )
    return path


def _column(header: list[str], known: tuple[str, ...], captions: Path) -> str:
    for name in header:
        if name.strip().lower() in known:
            return name
    raise ValueError(f"{captions} has columns {header}: none of them is called {' or '.join(known)}")


def _beside(source: Path) -> Iterator[tuple[Path, str | None]]:
    """Every file but the captions: one that is no image is counted as such."""
    root = source.resolve()
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix.lower() not in (".txt", ".csv", ".tsv", ".json"):
            for own in (path, path.with_suffix(".txt")):
                if own.is_symlink():
                    _inside(root, str(own.relative_to(source)), f"{own}, a link")
            yield path, None


def _pack(target: Path, pairs: list[tuple[Path, str | None]], first: int) -> Packed:
    packed = Packed()
    write_tar(target, _samples(pairs, first, packed))
    return packed


def _samples(pairs: list[tuple[Path, str | None]], first: int, packed: Packed) -> Iterator[Sample]:
    for number, (path, caption) in enumerate(pairs, start=first):
        try:
            if caption is None:
                caption = _text_beside(path)
            image = _read(path)
            decode_image(image)  # what cannot be trained on is not packed
            ending = _ENDINGS[open_image(image).format or ""]
            text = caption.strip()
            clean_caption(text)
        except BadSample as reason:
            packed.skipped[str(reason)] += 1
            packed.examples.setdefault(str(reason), str(path))
            continue
        packed.samples += 1
        # Numbered keys: a path may hold dots, which would end the key, and names that are not UTF-8.
        yield {"__key__": f"{number:09d}", ending: image, "txt": text}


def _text_beside(path: Path) -> str:
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        raise BadSample("missing caption")
    return decode_text(beside.read_bytes())


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise BadSample("image too large")
        return path.read_bytes()
    except OSError:
        raise BadSample("missing image") from None
