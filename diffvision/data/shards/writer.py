"""Writing shards: ordinary WebDataset tars with their manifest, from any samples.

`images.pack_images` makes samples of image files, `text.tokenize` of documents.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import webdataset

from diffvision.data.shards.index import scan
from diffvision.data.shards.sample import BadSource
from diffvision.data.shards.sources import MANIFEST, MANIFEST_FORMAT, SIZES, is_shard, natural, uncompressed
from diffvision.files import replacing, sha256

Sample = Mapping[str, str | bytes]
"""{"__key__": key, member type: content}"""


def write_shards(directory: str | Path, samples: Iterable[Sample], per_shard: int = 1000) -> int:
    """Write samples as 000000.tar, 000001.tar, ... with their manifest; return how many there were."""
    return _write(Path(directory), samples, per_shard, "{:06d}.tar")


def write_evaluation_split(
    directory: str | Path,
    samples: Iterable[Sample],
    per_shard: int = 10_000,
    *,
    dataset_type: Iterable[str] = (),
    classnames: Iterable[str] = (),
    templates: Iterable[str] = (),
) -> int:
    """Write samples as 0.tar, 1.tar, ... with nshards.txt, as CLIP_benchmark wants a split; return how many there were.

    Args:
        directory: of the split, in the folder of the dataset.
        samples: to write.
        per_shard: samples in each shard.
        dataset_type: what the samples are for, where it is not classification.
        classnames: by class number.
        templates: prompts, with {c} where the class name belongs.
    """
    split = Path(directory)
    written = _write(split, samples, per_shard, "{}.tar")
    write_lines(split / "nshards.txt", [str(len(list(split.glob("*.tar"))))])
    texts = {
        "dataset_type.txt": dataset_type,
        "classnames.txt": classnames,
        "zeroshot_classification_templates.txt": templates,
    }
    for name, lines in texts.items():
        if lines:
            write_lines(split.parent / name, lines)
    return written


def _write(directory: Path, samples: Iterable[Sample], per_shard: int, pattern: str) -> int:
    """Write samples to shards with a manifest, and return how many."""
    refuse_existing(directory)
    check_per_shard(per_shard)
    begin_manifest(directory)
    remaining, written, shard = iter(samples), 0, 0
    while chunk := list(islice(remaining, per_shard)):
        write_tar(directory / pattern.format(shard), chunk)
        written, shard = written + len(chunk), shard + 1
    if not written:
        (directory / MANIFEST).unlink()
        raise BadSource(f"no samples to write to {directory}")
    write_manifest(directory)
    return written


def refuse_existing(directory: Path) -> None:
    """Raise ValueError if a directory has shards already, or some of them: its manifest lists none until all are."""
    if directory.is_dir() and any(is_shard(uncompressed(str(p))) for p in directory.iterdir()):
        raise ValueError(f"{directory} has shards already, or some of them: remove them, or choose another directory")


def check_per_shard(per_shard: int) -> None:
    """Raise ValueError if shards would hold no sample."""
    if per_shard < 1:
        raise ValueError(f"per_shard must be at least 1, got {per_shard}")


def write_tar(path: Path, samples: Iterable[Sample]) -> None:
    """Write one shard, which has its name only once it is whole; the same samples give the same bytes."""
    with replacing(path) as file, webdataset.TarWriter(file, encoder=False, mtime=0) as writer:
        for sample in samples:
            writer.write({k: v.encode() if isinstance(v, str) and k[0] != "_" else v for k, v in sample.items()})


def begin_manifest(directory: Path) -> None:
    """Make a directory whose manifest lists no shards yet, so that one whose writing is cut short is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / MANIFEST, {"format": MANIFEST_FORMAT, "shards": []})


def write_manifest(directory: str | Path) -> None:
    """Count and hash every .tar of a directory, and write manifest.json and sizes.json next to them.

    Raises:
        ValueError: a shard is damaged, or is compressed; nothing is written.
    """
    directory = Path(directory)
    shards = []
    paths = [path for path in directory.glob("*") if is_shard(uncompressed(str(path)))]
    for path in sorted(paths, key=lambda path: natural(path.name)):
        if (index := scan(path)).damage:
            raise ValueError(
                f"shard {path} is damaged after {len(index)} samples ({index.damage}): fetch it again, or remove it "
                "(join tars by `tar --concatenate`)"
            )
        size, digest = path.stat().st_size, sha256(path)
        shards.append({"name": path.name, "samples": len(index), "bytes": size, "sha256": digest})
    if not shards:
        raise ValueError(f"no .tar files in {directory}: give the directory of the shards")
    _replace(directory / MANIFEST, {"format": MANIFEST_FORMAT, "shards": shards})
    _replace(directory / SIZES, {shard["name"]: shard["samples"] for shard in shards})


def _replace(path: Path, value: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def write_about(directory: str | Path, source: str, licence: str, **facts: object) -> None:
    """Write about.json: where a dataset comes from, its licence, and what else there is to say, such as counts."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    _replace(Path(directory) / "about.json", {"source": source, "licence": licence, **facts})


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file of one line each, in UTF-8."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
