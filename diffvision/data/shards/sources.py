"""The shards of a dataset as users name it: a directory, tar files, patterns, URLs, or a list of these.

Counts come from `manifest.json` next to the shards ({format, shards: [{name, samples, bytes, sha256}]}), else from
`sizes.json` as OpenCLIP reads it ({name: samples}), else from the headers of the shards.
"""

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from diffvision.data.shards import remote
from diffvision.data.shards.remote import REMOTE_SCHEMES, TAR, Shard, is_remote, without_secrets
from diffvision.data.splits import by_split, named_splits, splits_in
from diffvision.files import decoded

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "diffvision-shards-1"
SIZES = "sizes.json"

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_REMEDY = "write it again with diffvision.data.write_manifest"


def find_shards(source: str | Path | Shard | Sequence[str | Path | Shard]) -> list[Shard]:
    """Return the shards of a source, in a fixed order.

    Args:
        source: a directory; a tar; a pattern of local ones with `*`, `?` and `**` (folders at any depth), or with
            braces (`expand_braces`), or with both; a URL; or a list of these. A `Shard` is taken as it is.

    Raises:
        ValueError: a command or unknown URL, no shards, a compressed one, or a manifest that does not fit.
    """
    if isinstance(source, Shard):
        return [source]
    if not isinstance(source, (str, Path)):
        shards = [shard for part in source for shard in find_shards(part)]
    elif is_remote(location := checked_location(str(source))):
        shards = _with_counts(expand_braces(location)) if is_shard(location) else _remote(location)
    else:
        is_folder = Path(location).is_dir()
        names = [] if is_folder else [path for name in expand_braces(location) for path in _matching(name)]
        shards = _directory(Path(location)) if is_folder else _with_counts(names)
        for path in (shard.location for shard in shards):
            if not is_shard(path) or not Path(path).is_file():  # to open a pipe would wait for ever
                remedy = (
                    "`diffvision data make folder` packs others" if Path(path).exists() else "no such file or folder"
                )
                raise ValueError(f"shards must be {TAR} files, got {path}: {remedy}")
    if not shards:
        raise ValueError(f"no shards in {source}: expected .tar files, not compressed")
    return shards


def split_shards(source: Any, split: str) -> Any:
    """Return the shards of a split of a directory that has several; else the source as it is.

    Raises:
        ValueError: it has no such split, or it is not clear of which split a shard is.
    """
    splits = list_splits(source)
    if not splits:
        return source
    if split == "test" and "test" not in splits:
        split = "validation"
    if split not in splits:
        raise ValueError(f"{source} has no shards of {split}: choose one of {', '.join(splits)}")
    return splits[split]


def list_splits(source: Any) -> dict[str, list[Shard]]:
    """Return the shards of each split of a directory, by their names or those of its folders; {} if it has no splits.

    Raises:
        ValueError: it is not clear of which split a shard is.
    """
    location = str(source)
    is_directory = isinstance(source, str | Path) and Path(source).is_dir()
    if is_directory and (folders := _split_folders(Path(source))):
        return {split: find_shards(Path(source, name)) for split, name in named_splits(folders, source).items()}
    if is_directory or (isinstance(source, str) and is_remote(location) and not is_shard(location)):
        shards = {shard.name: shard for shard in find_shards(source)}
        if len(splits_in(*(name.removesuffix(TAR) for name in shards))) > 1:
            splits = by_split(shards, source)
            return {split: [shards[name] for name in sorted(splits[split], key=natural)] for split in splits}
    return {}


def has_shards(path: Path) -> bool:
    """Return whether a directory has shards, or a folder of them for each of its splits."""
    return _holds_shards(path) or bool(_split_folders(path))


def _holds_shards(path: Path) -> bool:
    return any(is_shard(p.name) or p.name in (MANIFEST, SIZES) for p in path.iterdir())


def _split_folders(path: Path) -> list[str]:
    """Return the folders of shards in a directory without shards of its own, if one is named as a split."""
    if _holds_shards(path):
        return []
    folders = [p for p in sorted(path.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    if not any(splits_in(folder.name) for folder in folders):
        return []
    names = [folder.name for folder in folders if _holds_shards(folder)]
    if not any(map(splits_in, names)):
        return []
    for path in (path for folder in folders if splits_in(folder.name) for path in folder.iterdir()):
        uncompressed(str(path))  # else a split would be missing
    return names


def _matching(pattern: str) -> list[str]:
    """Return the shards that a local pattern matches, in natural order; a name without wildcards as it is."""
    if not glob.has_magic(pattern) or Path(pattern).exists():
        return [pattern]
    return sorted(filter(is_shard, map(uncompressed, glob.glob(pattern, recursive=True))), key=natural)


def is_shard(name: str) -> bool:
    """Return whether a file's name is that of a shard."""
    return name.endswith(TAR)


def uncompressed(name: str) -> str:
    """Return the name of a file as it is; raise ValueError for that of a compressed tar."""
    if name.endswith(_COMPRESSED):
        raise ValueError(f"shards must be {TAR}, got {without_secrets(name)}: unpack it")
    return name


def checked_location(location: str) -> str:
    """Return the location if it is a path or a URL of an allowed scheme, never a command; raise ValueError else."""
    is_url = is_remote(location) or not _SCHEME.match(location)
    if not is_url or "::" in location or "\0" in location or location.startswith("-") or not location.strip():
        schemes = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
        raise ValueError(f"shards must be at a path or a URL starting with {schemes}, got {location!r}")
    return location


def expand_braces(pattern: str) -> list[str]:
    """Return the locations that a pattern with `{000000..000123}` or `{train,val}` stands for; leading zeros stay.

    Raises:
        ValueError: a brace is not closed, or `checked_location` refuses a location.
    """
    return [checked_location(location) for location in braceexpand(pattern, escape=False)]


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key under which 2.tar comes before 10.tar."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _directory(directory: Path) -> list[Shard]:
    """List the shards of a directory: those of its manifest or nshards.txt, else all tar files."""
    present = {p.name for p in directory.iterdir() if is_shard(uncompressed(str(p)))}
    if counts := read_counts(directory):
        if counts.keys() != present:
            name = min(counts.keys() ^ present)
            raise ValueError(
                f"the manifest of {directory} must list what is there, got {name} "
                f"{'missing' if name in counts else 'not listed'}: correct the directory, or {_REMEDY}"
            )
        return [Shard(str(directory / name), **fields) for name, fields in counts.items()]
    names = sorted(present, key=natural)
    if (text := read_small_file(directory, "nshards.txt")) is not None:  # CLIP_benchmark's layout
        if not text.strip().isdecimal():
            raise ValueError(f"{directory}/nshards.txt must be a number of shards, got {text[:40]!r}")
        names = [f"{number}.tar" for number in range(int(text))]
        if missing := [name for name in names if name not in present]:
            raise ValueError(f"{directory}/nshards.txt says {len(names)} shards, but {missing[0]} is missing: copy it")
    return [Shard(str(directory / name)) for name in names]


def _remote(directory: str) -> list[Shard]:
    """Return the shards that the manifest at a URL lists, because the files there cannot be listed."""
    directory = uncompressed(directory.rstrip("/"))
    counts = read_counts(directory)
    if not counts:
        raise ValueError(f"{directory} has no {MANIFEST} or {SIZES}: name the shards, such as {directory}/{{0..9}}.tar")
    return [Shard(f"{directory}/{uncompressed(name)}", **fields) for name, fields in counts.items()]


def _with_counts(locations: list[str]) -> list[Shard]:
    """Return the shards with the sample counts, sizes and digests of their directories' manifests."""
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    shards = []
    for location in locations:
        parent, _, name = uncompressed(location).rpartition("/")
        if parent not in counts:
            counts[parent] = read_counts(parent if is_remote(location) else Path(parent or "."))
        shards.append(Shard(location, **counts[parent].get(name, {})))
    return shards


def read_counts(directory: str | Path) -> dict[str, dict[str, Any]]:
    """Return {shard name: {samples, bytes?, sha256?}} from the manifest, else from sizes.json, else {}.

    Raises:
        ValueError: the file is damaged, or says what cannot be.
    """
    for name, parse in ((MANIFEST, _parse_manifest), (SIZES, _parse_sizes)):
        if (text := read_small_file(directory, name)) is not None:
            try:
                return parse(json.loads(text))
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
                reason = f"({type(error).__name__}: {error!s:.100})"
                raise ValueError(f"{directory}/{name} cannot be used {reason}: {_REMEDY}") from None
    return {}


def _parse_manifest(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if manifest["format"] != MANIFEST_FORMAT:
        raise ValueError(f"format must be {MANIFEST_FORMAT}")
    counts = {
        _file_name(shard["name"]): {
            "samples": _count(shard["samples"]),
            "bytes": _count(shard["bytes"]),
            "sha256": shard["sha256"].lower(),
        }
        for shard in manifest["shards"]
    }
    if not counts or len(counts) < len(manifest["shards"]):
        raise ValueError("a shard is listed more than once" if counts else "no shards, because writing was cut short")
    return counts


def _parse_sizes(sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {_file_name(name): {"samples": _count(sizes[name])} for name in sorted(sizes.keys(), key=natural)}


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in ("", ".", "..") or name.startswith("-"):
        raise ValueError(f"names must be those of files in its folder, got {name!r}")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"counts must be whole numbers, got {value!r}")
    return value


def read_small_file(directory: str | Path, name: str) -> str | None:
    """Return a small text file of a local directory (a Path) or of one at a URL (a str), or None.

    Raises:
        ValueError: it is not UTF-8.
    """
    if isinstance(directory, Path):
        data = path.read_bytes() if (path := directory / name).is_file() else None
    else:
        data = remote.read(f"{directory}/{name}")
    return None if data is None else decoded(data, f"{directory}/{name}")
