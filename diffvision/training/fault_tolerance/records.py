"""The record next to each checkpoint, by which a damaged or cut file is recognised.

Checkpoints themselves are written in `checkpoints` and opened in `content`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from diffvision.training.fault_tolerance.files import sync_directory, write_file
from diffvision.training.fault_tolerance.layout import RUN_KEY, find_misfit

SCHEMA = 1
SUFFIX, RECORD = ".ckpt", ".json"
TEMPORARY = ".saving-{}.tmp"


class DamagedCheckpoint(ValueError):
    """A checkpoint's bytes are not those that were saved, or no record says which were; the message is the reason."""


@dataclass(frozen=True)
class Record:
    """What is written next to a checkpoint.

    Attributes:
        bytes: length of the checkpoint.
        sha256: of these bytes.
        step: optimizer steps that it has made.
        resumable: it holds the optimizers' states, and was taken between two steps; one of weights alone does not.
        saved: seconds since 1970.
    """

    bytes: int
    sha256: str
    step: int
    resumable: bool
    saved: float


def record_path(path: str | Path) -> Path:
    """Return where the record of a checkpoint lies."""
    path = Path(path)
    return path.with_name(path.name + RECORD)


def describe(checkpoint: dict[str, Any], size: int, digest: str) -> Record:
    """Return the record of a checkpoint that is being saved."""
    return Record(
        bytes=size,
        sha256=digest,
        step=checkpoint.get("global_step", 0),
        resumable="optimizer_states" in checkpoint and not checkpoint.get(RUN_KEY, {}).get("unfinished"),
        saved=time.time(),
    )


def write_records(path: Path, records: list[Record]) -> None:
    """Replace the records of a checkpoint: several while it is being replaced itself, the newest first."""
    temporary = path.parent / TEMPORARY.format(f"{os.getpid()}-record")
    text = json.dumps({"schema": SCHEMA, "records": [asdict(record) for record in records]}, indent=1)
    try:
        write_file(temporary, lambda file: file.write(text.encode()))
        os.replace(temporary, record_path(path))
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_records(path: Path) -> list[Record]:
    """Read the records of a checkpoint.

    Raises:
        DamagedCheckpoint: there are none, or they cannot be read.
    """
    name = record_path(path).name
    try:
        content = json.loads(record_path(path).read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"has no record {name} next to it") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpoint(f"has an unreadable record {name} next to it") from error
    if isinstance(content, dict) and (schema := content.get("schema", SCHEMA)) != SCHEMA:
        raise DamagedCheckpoint(
            f"has a record of schema {str(schema)[:20]}, not {SCHEMA}: use its version of diffvision"
        )
    layout = {"schema": int, "records": [get_type_hints(Record)]}
    if fault := find_misfit(content, layout) or ("" if content["records"] else "records in it is empty"):
        raise DamagedCheckpoint(f"has an unreadable record {name} next to it: {fault}")
    fields = Record.__dataclass_fields__
    return [Record(**{name: record[name] for name in fields}) for record in content["records"]]


def readable_records(path: Path) -> list[Record]:
    """Read the records of a checkpoint; return an empty list where they cannot be read."""
    try:
        return read_records(path)
    except DamagedCheckpoint:
        return []
