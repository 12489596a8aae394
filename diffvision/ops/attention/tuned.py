"""What `diffvision tune` measured on this machine, as `backend="auto"` reads it: once a process, of each device.

The file has an entry for each machine, that is a device with the versions of torch, Triton and this package: choices
hold for nothing else. `diffvision.tuning` writes it.
"""

import importlib.metadata
import json
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import platformdirs
import torch

from diffvision.ops.attention.problem import Problem

VARIABLE = "DIFFVISION_TUNING"
DEVICES = ("cpu", "cuda")  # those with several backends


class Kind(NamedTuple):
    """The calls that one measured choice is for: equal in what kernels differ by, near in their sizes."""

    dtype: str
    head_dim: int  # up to this multiple of 16, as the value's
    value_dim: int
    shared_keys: bool
    grouped: bool
    causal: bool
    masked: bool
    packed: bool
    grad: bool
    compiled: bool
    queries: int  # up to this power of two, and above half of it; keys alike
    keys: int
    rows: int  # batch x heads: up to this power of four, and above a quarter of it


class Choice(NamedTuple):
    """The backend for calls of a kind.

    Attributes:
        backend: its name.
        than: the backend that is taken without measurements.
        faster: how many times as fast as that, 1 where it is the same.
        milliseconds: of each backend that was timed, the median.
        peak_bytes: of each, beyond its inputs.
    """

    backend: str
    than: str
    faster: float
    milliseconds: dict[str, float]
    peak_bytes: dict[str, int]


@dataclass(frozen=True)
class Tuning:
    """The measured choices of a machine.

    Attributes:
        machine: what they hold for (`machine_of`).
        date: of the last measurement, as YYYY-MM-DD.
        choices: of each kind of call.
        excluded: backend -> why it is never chosen: it crashed, failed or was wrong.
    """

    machine: dict[str, str]
    date: str
    choices: dict[Kind, Choice] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        choices = [{"calls": kind._asdict(), **choice._asdict()} for kind, choice in self.choices.items()]
        return {"machine": self.machine, "date": self.date, "excluded": self.excluded, "choices": choices}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return what `to_json` gave; a KeyError, TypeError, ValueError or AttributeError says that it was not that."""
        choices = {}
        for row in data["choices"]:
            choice = Choice(**{name: row[name] for name in Choice._fields})
            choices[Kind(**row["calls"])] = choice._replace(faster=float(choice.faster))
        excluded = {str(name): str(reason) for name, reason in data["excluded"].items()}
        return cls(dict(data["machine"]), str(data["date"]), choices, excluded)


def kind_of(problem: Problem, *, compiled: bool) -> Kind:
    """Return the kind of a call.

    Args:
        problem: the call; it draws no dropout.
        compiled: whether torch.compile traces it.
    """
    return Kind(
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=_multiple(problem.head_dim, 16),
        value_dim=_multiple(problem.value_dim, 16),
        shared_keys=_decided(problem.shared_keys),
        grouped=_decided(problem.heads != problem.kv_heads),
        causal=_decided(problem.causal and problem.queries != 1),  # the last query sees every key
        masked=problem.masked,
        packed=problem.packed,
        grad=problem.grad,
        compiled=compiled,
        queries=_power(problem.queries, 2),
        keys=_power(problem.keys, 2),
        rows=_power(problem.batch * problem.heads, 4),
    )


# By decisions, which torch.compile can guard where a size is a symbol.


def _decided(condition: bool) -> bool:
    if condition:  # noqa: SIM103
        return True
    return False


def _power(size: int, base: int) -> int:
    """Return the least power of a base that is not below a size."""
    power = 1
    while power < size:
        power *= base
    return power


def _multiple(size: int, base: int) -> int:
    """Return the least multiple of a base that is not below a size."""
    multiple = base
    while multiple < size:
        multiple += base
    return multiple


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine_of(device: str) -> dict[str, str]:
    """Return what measurements on a device, "cpu" or "cuda", hold for: hardware and versions, as text."""
    threads = {"threads": str(torch.get_num_threads())} if device == "cpu" else {}
    versions = {name: _version(name) for name in ("torch", "triton", "diffvision")}
    return {"device": device, "name": device_name(device), "capability": _capability(device), **threads, **versions}


def device_name(device: str) -> str:
    """Return what the maker calls a device."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _capability(device: str) -> str:
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{major}.{minor}"
    return torch.backends.cpu.get_cpu_capability()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# ---- the file ------------------------------------------------------------------------------------------------------


def tuning_file() -> Path | None:
    """Return the file of measurements: DIFFVISION_TUNING, or one in the user's cache folder; None if that is "off"."""
    setting = os.environ.get(VARIABLE, "")
    if setting == "off":
        return None
    return Path(setting) if setting else Path(platformdirs.user_cache_dir("diffvision"), "tuning.json")


def read(file: Path) -> list[Tuning]:
    """Return what a file holds, of all machines.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or is not one of ours.
    """
    try:
        return [Tuning.from_json(entry) for entry in json.loads(file.read_text(encoding="utf-8"))["machines"]]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no file of `diffvision tune` ({type(error).__name__}: {error})") from error


_used: dict[str, Tuning | None] = {}  # by device, what this process has read, or was given


def tuning_of(device: str) -> Tuning | None:
    """Return the measurements that this process uses on a device; None where there are none."""
    if device not in _used:
        _used[device] = _read(device)
    return _used[device]


@torch.compiler.assume_constant_result  # it may read a file, which torch.compile cannot trace
def measured(device: str, usual: str, *kind: Any) -> str:
    """Return the name of the backend that was measured to be the fastest on a device.

    Args:
        device: "cpu" or "cuda".
        usual: the backend to return where nothing was measured.
        kind: of the call, a `Kind`.
    """
    tuning = tuning_of(device)
    if tuning is None:
        return usual
    choice = tuning.choices.get(Kind(*kind))
    if choice is not None and choice.backend not in tuning.excluded:
        return choice.backend
    return "eager" if usual in tuning.excluded else usual


def use(device: str, tuning: Tuning | None) -> None:
    """Let this process use these measurements on a device, whatever the file says.

    Graphs that torch.compile has made keep the backends that they were made with.
    """
    _used[device] = tuning


@contextmanager
def kept() -> Iterator[None]:
    """Put back, at the end of the context, the measurements that the process used before it."""
    before = dict(_used)
    try:
        yield
    finally:
        _used.clear()
        _used.update(before)


def forget() -> None:
    """Read the file anew at the next call."""
    _used.clear()


def _read(device: str) -> Tuning | None:
    if device not in DEVICES or (file := tuning_file()) is None:
        return None
    try:
        entries = read(file)
    except FileNotFoundError as error:
        if os.environ.get(VARIABLE):
            warnings.warn(f"{VARIABLE}: {error}; backends are chosen as without measurements", stacklevel=2)
        return None
    except ValueError as error:
        warnings.warn(f"{error}: backends are chosen as without it; remove it, and tune again", stacklevel=2)
        return None
    here = machine_of(device)
    for entry in entries:
        if entry.machine == here:
            return entry
    # Of this device with other versions, or in a file that was named: the user counts on it.
    near = [entry for entry in entries if entry.machine.get("name") == here["name"]]
    if near or (os.environ.get(VARIABLE) and all(entry.machine.get("device") != device for entry in entries)):
        others = near or entries
        differs = _difference(others[-1].machine, here) if others else "it is empty"
        warnings.warn(
            f"{file} has no measurements for this machine ({differs}): backends are chosen as without it; "
            f"`diffvision tune --device {device}` measures them",
            stacklevel=2,
        )
    return None


def _difference(theirs: dict[str, str], here: dict[str, str]) -> str:
    names = [name for name in here if theirs.get(name) != here[name]]
    return "; ".join(f"{name} {here[name]}, measured with {theirs.get(name, 'none')}" for name in names)
