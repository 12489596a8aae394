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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, get_origin

import torch

from diffvision.files import user_cache
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
        faster: how many times as fast as that; 1 where it is the same, or that has no memory or was excluded.
        date: of the measurement, as YYYY-MM-DD.
        milliseconds: of each backend that was timed, the median.
        peak_bytes: of each, beyond its inputs.
    """

    backend: str
    than: str
    faster: float
    date: str
    milliseconds: dict[str, float]
    peak_bytes: dict[str, int]


@dataclass(frozen=True)
class Tuning:
    """The measured choices of a machine.

    Attributes:
        machine: what they hold for (`machine_of`).
        choices: of each kind of call.
        excluded: backend -> when and why it was excluded: it crashed, failed or was wrong, and is never chosen.
    """

    machine: dict[str, str]
    choices: dict[Kind, Choice] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The day of the last measurement; "" where there is none."""
        return max((choice.date for choice in self.choices.values()), default="")

    @cached_property
    def passes(self) -> frozenset[bool]:
        """Whether choices are for graphs of torch.compile, for calls outside, or both."""
        return frozenset(kind.compiled for kind in self.choices)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        choices = [{"calls": kind._asdict(), **choice._asdict()} for kind, choice in self.choices.items()]
        return {"machine": self.machine, "excluded": self.excluded, "choices": choices}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return what `to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            rows = {_of(Kind, row["calls"]): _of(Choice, {**row, "calls": None}) for row in data["choices"]}
            texts = [*data["machine"].items(), *data["excluded"].items()]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no measurements: {error!r:.100}") from error
        if not all(isinstance(text, str) for pair in texts for text in pair):
            raise ValueError("a machine and reasons are texts")
        return cls(dict(data["machine"]), rows, dict(data["excluded"]))


Row = TypeVar("Row", Kind, Choice)


def _of(cls: type[Row], values: dict[str, Any]) -> Row:
    """Return a row of plain values; raise a TypeError where one is missing or of another type."""
    row = cls(**{name: values[name] for name in cls._fields})
    for name, value in row._asdict().items():
        expected = get_origin(cls.__annotations__[name]) or cls.__annotations__[name]
        if type(value) is not expected:
            raise TypeError(f"{name} is {value!r:.40}")
    return row


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
    packages = (
        "torch",
        "triton",
        "diffvision",
        *(("flash-attn", "flash-attn-3", "flash-attn-4") if device == "cuda" else ()),
    )
    versions = {name: _version(name) for name in packages}
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
    if setting.lower() == "off":
        return None
    return Path(os.path.expanduser(setting)) if setting else user_cache("tuning.json")


def entries_of(file: Path) -> list[dict[str, Any]]:
    """Return what a file holds, an entry for each machine as `Tuning.from_json` takes it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or is not one of ours.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("not a file")  # a pipe would be waited for
        entries = json.loads(file.read_text(encoding="utf-8"))["machines"]
        machines = [dict(entry["machine"]) for entry in entries]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no file of `diffvision tune` ({error!r:.100})") from error
    return [{**entry, "machine": machine} for entry, machine in zip(entries, machines, strict=True)]


_used: dict[str, Tuning | None] = {}  # by device, what this process has read, or was given
generation = 0  # counts the changes of `_used` that were asked for: what was chosen before no longer holds


def load() -> None:
    """Read the measurements of this machine's devices, once per process: the first attention layer calls it.

    A GPU is left out until it is in use, because its name cannot be read without starting CUDA.
    """
    for device in DEVICES:
        if device == "cpu" or torch.cuda.is_initialized():
            tuning_of(device)


def tuning_of(device: str) -> Tuning | None:
    """Return the measurements that this process uses on a device; None where there are none."""
    if device not in _used:
        _used[device] = _read(device)
    return _used[device]


# What torch.compile takes as constants of a graph: they may read a file, which it cannot trace.


@torch.compiler.assume_constant_result
def is_measured(device: str) -> bool:
    """Return whether there are measurements of a device."""
    if device not in _used:
        tuning_of(device)
    return _used[device] is not None


@torch.compiler.assume_constant_result
def has_choices(device: str, compiled: bool) -> bool:
    """Return whether anything was measured on a device, within torch.compile or outside."""
    tuning = tuning_of(device)
    return tuning is not None and compiled in tuning.passes


@torch.compiler.assume_constant_result
def measured_backend(device: str, *kind: Any) -> str:
    """Return the backend that was measured to be faster than the rule's for a `Kind` of call; "" where none was.

    The rule decides within a kind too, by the exact sizes.
    """
    tuning = tuning_of(device)
    choice = None if tuning is None else tuning.choices.get(Kind(*kind))
    if tuning is None or choice is None or choice.backend in (choice.than, *tuning.excluded):
        return ""
    return choice.backend


@torch.compiler.assume_constant_result
def is_excluded(device: str, backend: str) -> bool:
    """Return whether a backend was excluded on a device."""
    tuning = tuning_of(device)
    return tuning is not None and backend in tuning.excluded


def use(device: str, tuning: Tuning | None) -> None:
    """Let this process use these measurements on a device, whatever the file says.

    Graphs that torch.compile has made keep the backends that they were made with.
    """
    _replace_used({**_used, device: tuning})


@contextmanager
def restore_at_end() -> Iterator[None]:
    """Restore the measurements that the process used before, at the end of the context."""
    before = dict(_used)
    try:
        yield
    finally:
        _replace_used(before)


def forget() -> None:
    """Read the file again at the next call."""
    _replace_used({})


def _replace_used(tunings: dict[str, Tuning | None]) -> None:
    global _used, generation
    _used, generation = tunings, generation + 1


def _read(device: str) -> Tuning | None:
    """Read this machine's measurements; None, with a warning where they exist and do not apply."""
    if device not in DEVICES or (device == "cuda" and not torch.cuda.is_available()):
        return None
    if (file := tuning_file()) is None:
        return None
    is_named = bool(os.environ.get(VARIABLE))
    try:
        entries = entries_of(file)
        here = machine_of(device)
        mine = next((entry for entry in entries if entry["machine"] == here), None)
        if mine is not None:
            return Tuning.from_json(mine)
    except FileNotFoundError as error:
        if is_named:
            _warn(f"{VARIABLE}: {error}")
        return None
    except ValueError as error:
        _warn(f"{error}: remove {file}, and tune again")
        return None
    # Of this device with other versions, or in a file that was named: the user counts on it.
    machines = [entry["machine"] for entry in entries]
    near = [machine for machine in machines if machine.get("name") == here["name"]]
    if near or (is_named and all(machine.get("device") != device for machine in machines)):
        differs = _difference((near or machines)[-1], here) if machines else "it is empty"
        _warn(f"{file} has none for this machine ({differs}): `diffvision tune --device {device}` measures them")
    return None


def _warn(text: str) -> None:
    warnings.warn(f"measurements of attention backends are not used: {text}", stacklevel=4)


def _difference(theirs: dict[str, Any], here: dict[str, str]) -> str:
    names = [name for name in here if theirs.get(name) != here[name]]
    return "; ".join(f"{name} {here[name]}, measured with {theirs.get(name, 'an unknown one')}" for name in names)
