"""The record next to each checkpoint, by which a damaged or cut file is recognised.

Checkpoints themselves are written in `checkpoints` and opened in `content`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from diffvision.training.fault_tolerance.files import sync_directory, write_file
from diffvision.training.fault_tolerance.layout import RUN_KEY, misfit

SCHEMA = 1
SUFFIX, RECORD = ".ckpt", ".json"
TEMPORARY = ".saving-{}.tmp"


class DamagedCheckpoint(ValueError):
    """A checkpoint's bytes are not those that were saved, or no record says which were; the message is the reason."""


@dataclass(frozen=True)
class Record:
    """What is written next to a checkpoint.

    Attributes:
        file: name of the checkpoint.
        bytes: its length.
        sha256: of these bytes.
        step: optimizer steps that it has made.
        epoch: index of its epoch.
        resumable: it holds the optimizers' states, and was taken between two steps; one of weights alone does not.
        world_size: processes that trained; None where the trainer did not say.
        model: name of the model, where its module says one.
        optimizers: names of their classes.
        keys_sha256: digest of the names and shapes of the state_dict.
        saved: seconds since 1970.
    """

    file: str
    bytes: int
    sha256: str
    step: int
    epoch: int
    resumable: bool
    world_size: int | None
    model: str | None
    optimizers: list[str]
    keys_sha256: str
    saved: float


def record_path(path: str | Path) -> Path:
    """Return where the record of a checkpoint lies."""
    path = Path(path)
    return path.with_name(path.name + RECORD)


def describe(checkpoint: dict[str, Any], path: Path, size: int, digest: str) -> Record:
    """Return the record of a checkpoint that is being saved."""
    run, described = checkpoint.get(RUN_KEY, {}), checkpoint.get("diffvision")
    return Record(
        file=path.name,
        bytes=size,
        sha256=digest,
        step=checkpoint.get("global_step", 0),
        epoch=checkpoint.get("epoch", 0),
        resumable="optimizer_states" in checkpoint and not run.get("unfinished"),
        world_size=run.get("world_size"),
        model=described.get("model") if isinstance(described, dict) else None,
        optimizers=run.get("optimizers", []),
        keys_sha256=keys_digest(checkpoint.get("state_dict", {})),
        saved=time.time(),
    )


def keys_digest(state: dict[str, Any]) -> str:
    """Return a digest of the names and shapes of a state_dict."""
    lines = sorted(f"{name} {list(getattr(value, 'shape', []))}" for name, value in state.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


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
    layout = {"schema": int, "records": [get_type_hints(Record) | {"optimizers": [str]}]}
    if fault := misfit(content, layout) or ("" if content["records"] else "records in it is empty"):
        raise DamagedCheckpoint(f"has an unreadable record {name} next to it: {fault}")
    fields = Record.__dataclass_fields__
    return [Record(**{name: record[name] for name in fields}) for record in content["records"]]


def readable_records(path: Path) -> list[Record]:
    """Read the records of a checkpoint; return an empty list where they cannot be read."""
    try:
        return read_records(path)
    except DamagedCheckpoint:
        return []
