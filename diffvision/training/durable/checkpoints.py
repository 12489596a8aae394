"""Checkpoints on disk: written whole or not at all, with a record beside each that tells a damaged one.

A save of `last.ckpt` writes a temporary file in the same directory and syncs it; writes `last.ckpt.json`, the record,
which while a file is replaced tells of both the new bytes and the old; then renames the temporary. Whenever the process
is killed, `last.ckpt` is the old file or the new one, and its record knows which.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_type_hints

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from diffvision.training.durable.layout import EXACT, LIGHTNING, OPTIONAL, RUN, RUN_KEY, STATES, misfit

if TYPE_CHECKING:
    from diffvision.training.durable.rotation import Rotation

SCHEMA = 1
SUFFIX, RECORD = ".ckpt", ".json"
TEMPORARY = ".saving-{}.tmp"


class DamagedCheckpoint(ValueError):
    """A checkpoint's bytes are not those that were saved, or nothing says which were; the message is the reason."""


@dataclass(frozen=True)
class Record:
    """What is written beside a checkpoint.

    Attributes:
        sha256: of the file, whose length is `bytes`.
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


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin that saves, loads and removes checkpoints; this one never leaves half of a file.

    Directories of sharded checkpoints (save_distributed_checkpoint: true) are not written through it, and remote ones
    are left to fsspec, whose stores replace an object at once; neither has records.

    Attributes:
        rotation: what stays of replaced and removed checkpoints until the next step; None: nothing.
    """

    rotation: Rotation | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint and its record.

        Raises:
            OSError: it cannot be written; a file that was there before is as it was.
            ValueError: it holds objects that cannot be loaded with weights_only=True.
            FloatingPointError: it holds weights that are NaN or infinite; likewise.
        """
        if bad := weights_not_finite(checkpoint):
            raise FloatingPointError(
                f"no checkpoint is written to {path}: {bad} would hold NaN or infinity. Checkpoints saved before "
                "are untouched: go on from one with a lower optimizer.lr"
            )
        if is_remote(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, but a local file takes none: leave it out")
        path = Path(path)
        temporary = path.parent / TEMPORARY.format(os.getpid())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size, digest = _write(temporary, lambda file: torch.save(checkpoint, file))
            _refuse_objects(temporary, path)
            replaced = _records(path) if path.is_file() else []
            record = _record(checkpoint, path, size, digest)
            if self.rotation is not None and path.is_file():
                self.rotation.before_replacing(path)
            _write_records(path, [record, *replaced])
            os.replace(temporary, path)
            sync_directory(path.parent)
            if self.rotation is not None:
                self.rotation.saved(path)
            if replaced:
                _write_records(path, [record])
        except OSError as error:
            raise unwritable(error, path, needed=tensor_bytes(checkpoint)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; only tensors and plain values, unless weights_only=False is asked for by name.

        Raises:
            ValueError: it lies behind a URL of the web.
        """
        if str(path).startswith(("http://", "https://")):
            raise ValueError(
                f"{path} is a URL: download it, compare its sha256 with the publisher's, and give the file"
            )
        return super().load_checkpoint(path, map_location, weights_only is None or weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if is_remote(path):
            super().remove_checkpoint(path)
        elif self.rotation is None or not self.rotation.removing(Path(path)):
            super().remove_checkpoint(path)
            record_path(path).unlink(missing_ok=True)  # after it, so that none is ever without

    def teardown(self) -> None:
        super().teardown()
        if self.rotation is not None and not self.rotation.skipping:
            self.rotation.step_finite()
            self.rotation = None


# --- finding and checking ---


def record_path(path: str | Path) -> Path:
    path = Path(path)
    return path.with_name(path.name + RECORD)


def verify(path: str | Path) -> Record:
    """The record of a checkpoint whose bytes are as they were saved.

    Raises:
        DamagedCheckpoint: they are not; the message says how.
    """
    path, reason = Path(path), ""
    for record in _read_records(path):
        if not (reason := _fault(path, record)):
            return record
    raise DamagedCheckpoint(reason)


def newest_valid(directories: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint of the highest step that can be resumed from.

    Returns:
        It, if there is one; and those that were passed over, with the reason.
    """
    faults: dict[Path, str] = {}
    candidates: list[tuple[int, float, Path, Record]] = []
    for path in (path for directory in directories for path in checkpoints_in(directory)):
        try:
            candidates += [(record.step, record.saved, path, record) for record in _read_records(path)]
        except DamagedCheckpoint as error:
            faults[path] = str(error)
    for _, _, path, record in sorted(candidates, key=lambda c: c[:2], reverse=True):
        unusable = "" if record.resumable else "holds weights alone, or was not taken between two steps"
        reason = _fault(path, record) or unusable or _fault_inside(path, record)
        if not reason:
            faults.pop(path, None)  # killed while it was replaced: the file is the one before, and whole
            return path, faults
        faults.setdefault(path, reason)
    return None, faults


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints of a directory, by name; no symbolic links (save_last="link"), whose targets are among them."""
    return sorted(p for p in directory.glob(f"*{SUFFIX}") if not p.is_symlink())


def clean(directory: Path) -> list[Path]:
    """Remove what killed runs left: temporary files, and records whose checkpoint was never finished or is gone."""
    orphans = [*directory.glob(TEMPORARY.format("*") + "*")]
    records = directory.glob(f"*{SUFFIX}{RECORD}")
    orphans += [record for record in records if not record.with_suffix("").exists()]
    for orphan in orphans:
        orphan.unlink(missing_ok=True)
    return orphans


def _fault(path: Path, record: Record) -> str:
    """What is wrong with a file, going by a record of it; empty for nothing."""
    if not path.is_file():
        return (
            "is a directory: sharded checkpoints have no sha256; give it with --ckpt_path"
            if path.is_dir()
            else "is gone"
        )
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return "is empty" if not size else f"has {size:,} bytes of the {record.bytes:,} that were saved"
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except OSError as error:  # a bad block, or no permission: what was saved before it may be well
        return f"cannot be read ({error.strerror or error})"
    return "" if same else "has other bytes than were saved (sha256)"


def _fault_inside(path: Path, record: Record) -> str:
    """What is wrong with a file whose bytes are as they were saved."""
    try:
        content = opened(path)
    except DamagedCheckpoint as error:
        return str(error)
    if fault := malformed(content):
        return fault
    if (step := content["global_step"]) != record.step:
        return f"is of step {step}, and its record of step {record.step}"
    return f"holds NaN or infinity in {bad}" if (bad := states_not_finite(content)) else ""


def opened(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, of which tensors are read only when they are used.

    Raises:
        DamagedCheckpoint: it is no checkpoint, or holds objects.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint("holds more than tensors and plain values, or is none") from error
    except Exception as error:  # a file that is no checkpoint can fail torch's reader in any way
        raise DamagedCheckpoint("is damaged or no checkpoint") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"holds a {type(content).__name__}, not a checkpoint's dictionary")
    return content


def malformed(content: dict[str, Any]) -> str:
    """Why a checkpoint's content cannot be read as what Lightning and `RunState` write; empty where it can.

    Whether its states fit a model and its optimizers shows when they are loaded.
    """
    run = content.get(RUN_KEY, {})
    weights = {name: content[name] for name in ("state_dict", "current_model_state") if name in content}
    optional = {name: dict for name in OPTIONAL if name in content}
    faults = [misfit(content, LIGHTNING | optional), misfit(run, {}, RUN_KEY)]
    if not any(faults):
        expected = {name: kind for name, kind in RUN.items() if name in run} | (EXACT if "place" in run else {})
        faults = [misfit(run, expected, RUN_KEY), *(_unusual(state, name) for name, state in weights.items())]
    if not any(faults):
        faults = [_unusual(state, "optimizer_states") for state in _moments(content)]
        faults += [
            f"{states} in its content has {len(content[states])} states for the {len(run[names])} {names} of its run"
            for names, states in STATES.items()
            if names in run and len(run[names]) != len(content[states])
        ]
        if run.get("random") == []:
            faults.append(f"random in {RUN_KEY} is empty")
    return next((f"is malformed: {fault}" for fault in faults if fault), "")


def _unusual(state: dict[Any, Any], name: str) -> str:
    """What in a state_dict is no name, or a tensor without values or sparse, in words; empty where nothing is."""
    for key, value in state.items():
        if not isinstance(key, str):
            return f"a key of {name} is of type {type(key).__name__}, not str"
        if isinstance(value, Tensor) and value.is_meta:
            return f"{key} in {name} is a tensor without values"
        if isinstance(value, Tensor) and value.layout != torch.strided:
            return f"{key} in {name} is a tensor of layout {value.layout}, not torch.strided"
    return ""


def _moments(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state of each parameter in each optimizer, its tensors by names such as "exp_avg of parameter 0"."""
    for optimizer in content["optimizer_states"]:
        for index, state in optimizer["state"].items():
            if isinstance(state, dict):
                yield {f"{name} of parameter {index}": value for name, value in state.items()}


def states_not_finite(content: dict[str, Any]) -> str:
    """`not_finite` of a checkpoint's weights and optimizers, whose layout `malformed` has checked."""
    return weights_not_finite(content) or next(filter(None, map(not_finite, _moments(content))), "")


def weights_not_finite(checkpoint: dict[str, Any]) -> str:
    """`not_finite` of a checkpoint's weights; with EMA there are two sets of them."""
    return not_finite(checkpoint.get("state_dict", {})) or not_finite(checkpoint.get("current_model_state", {}))


def not_finite(weights: dict[str, Any], few: int = 3) -> str:
    """The first few names of a state_dict's tensors that hold NaN or infinity, in words; empty where all are finite.

    A mask of zeros and -inf, which some models keep among their buffers, is as it should be.
    """
    names = [name for name, value in weights.items() if isinstance(value, Tensor) and not _finite(value)]
    return ", ".join(names[:few]) + (f" and {len(names) - few} more" if len(names) > few else "")


def _finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.half()  # of float8 there is no least or most
    least, most = tensor.aminmax()  # one pass without a temporary, which NaN comes through
    return bool((least.isfinite() & most.isfinite()) or ((tensor == 0) | (tensor == -torch.inf)).all())


def keys_digest(state: dict[str, Any]) -> str:
    """A digest of the names and shapes of a state_dict."""
    lines = sorted(f"{name} {list(getattr(value, 'shape', []))}" for name, value in state.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# --- records ---


def _record(checkpoint: dict[str, Any], path: Path, size: int, digest: str) -> Record:
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


def _write_records(path: Path, records: list[Record]) -> None:
    """Replace what is beside a checkpoint; several while it is being replaced itself, the newest first."""
    temporary = path.parent / TEMPORARY.format(f"{os.getpid()}-record")
    text = json.dumps({"schema": SCHEMA, "records": [asdict(record) for record in records]}, indent=1)
    try:
        _write(temporary, lambda file: file.write(text.encode()))
        os.replace(temporary, record_path(path))
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _read_records(path: Path) -> list[Record]:
    """What is beside a checkpoint; raises DamagedCheckpoint where that is nothing, or not to be understood."""
    beside = record_path(path)
    try:
        content = json.loads(beside.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"has no record {beside.name} beside it") from error
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpoint(f"has an unreadable record {beside.name} beside it") from error
    if isinstance(content, dict) and (schema := content.get("schema", SCHEMA)) != SCHEMA:
        raise DamagedCheckpoint(
            f"has a record of schema {str(schema)[:20]}, not {SCHEMA}: use its version of diffvision"
        )
    layout = {"schema": int, "records": [get_type_hints(Record) | {"optimizers": [str]}]}
    if fault := misfit(content, layout) or ("" if content["records"] else "records in it is empty"):
        raise DamagedCheckpoint(f"has an unreadable record {beside.name} beside it: {fault}")
    fields = Record.__dataclass_fields__
    return [Record(**{name: record[name] for name in fields}) for record in content["records"]]


def _records(path: Path) -> list[Record]:
    try:
        return _read_records(path)
    except DamagedCheckpoint:
        return []


# --- bytes ---


class _Hashing:
    """A file that is written to from its beginning to its end, and hashed on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error  # torch tells of it as "unexpected pos"
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _write(path: Path, content: Callable[[Any], Any]) -> tuple[int, str]:
    """Write a new file and have it on the disk before returning its bytes and their sha256."""
    path.unlink(missing_ok=True)  # left by a killed run, or a link that came with the directory
    with path.open("xb") as file:
        hashing = _Hashing(file)
        try:
            content(hashing)
        except RuntimeError as error:
            raise hashing.error or error from error
        file.flush()
        os.fsync(file.fileno())
    return hashing.size, hashing.digest.hexdigest()


def descriptor(path: Path, flags: int) -> int:
    """Open a file of ours, which is made if need be, for writing.

    Raises:
        OSError: it cannot be written, is no regular file, or is a link: then another file would be written to.
    """
    refuse_link(path)
    if path.exists() and not path.is_file():  # of a FIFO, opening may wait for ever
        raise OSError(errno.EINVAL, f"{path} is no regular file (a directory, FIFO or device): remove it")
    opened = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if os.fstat(opened).st_nlink > 1:
        os.close(opened)
        raise OSError(errno.EMLINK, f"{path} has another name too (a hard link), and would be written to: remove it")
    return opened


def refuse_link(path: Path) -> None:
    """OSError if a name that is written to is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link to {os.readlink(path)}, which would be written to: remove it")


def sync_directory(directory: Path) -> None:
    """Have a rename on the disk: without, a power failure may undo it."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _refuse_objects(written: Path, path: Path) -> None:
    if unsafe := sorted(get_unsafe_globals_in_checkpoint(written)):
        raise ValueError(
            f"{path} would hold objects of {', '.join(unsafe[:3])}, which could not be loaded with weights_only=True: "
            "keep tensors and plain values only in what a module, callback or data module saves of itself"
        )


def unwritable(error: OSError, path: Path, *, needed: int) -> OSError:
    """The error to raise where a checkpoint cannot be written: which, why, what it takes and what to do."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} are free"
    except OSError:
        free = "its directory cannot be looked at"
    return OSError(
        error.errno,
        f"no checkpoint can be written to {path}: {error.strerror or error}. It takes {needed:,} bytes and {free}: "
        "make room, or set another directory (ModelCheckpoint's dirpath). Checkpoints saved before are untouched",
    )


def tensor_bytes(content: Any) -> int:
    """Bytes of all tensors in nested containers, about what a checkpoint of them takes."""
    if isinstance(content, Tensor):
        return content.nbytes
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return sum(map(tensor_bytes, values))


def module_bytes(module: nn.Module) -> int:
    """The least that a checkpoint of a module takes: its weights."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def is_remote(path: str | Path) -> bool:
    return "://" in str(path)
