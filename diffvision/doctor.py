"""The check of an installation: versions, devices, and the attention backend of the usual shapes.

PyTorch, timm and the like are imported inside its functions, so versions are reported even if one of them is missing.
"""

import importlib.metadata
import importlib.util
import platform
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from diffvision.tables import show

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

DEVELOPMENT = ("dev", "docs")  # extras of contributors
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"  # of a clone


class Need(NamedTuple):
    """A package that diffvision needs, or that one of its extras does."""

    requirement: Requirement
    extra: str | None = None

    @property
    def versions(self) -> str:
        """The versions that are needed, as pip takes them."""
        return str(self.requirement.specifier)


class Finding(NamedTuple):
    """One finding of the doctor; `broken` means that diffvision itself does not work with it."""

    broken: bool
    text: str


class Attention(NamedTuple):
    """What PyTorch says: devices, models registered by host, and the backend for each usual shape."""

    devices: list[str]
    backends: list[dict[str, str]]
    models: dict[str, int]

    @classmethod
    def measure(cls) -> "Attention":
        """Return what holds on this machine."""
        from diffvision.models import clip, vit

        rows = [dict(zip(("attention", "on", "backend", "why"), row, strict=True)) for row in list_backends()]
        return cls(list_devices(), rows, {"timm": len(vit.model_names()), "OpenCLIP": len(clip.model_names())})


def read_requirements() -> dict[str, Need]:
    """Return the packages that diffvision needs by name: those of a clone's pyproject.toml, or of installed metadata.

    The metadata of an editable installation are as old as the installation, and the clone may have been updated since.

    Raises:
        PackageNotFoundError: diffvision itself is not installed, only its files are here.
    """
    importlib.metadata.version("diffvision")
    packages: dict[str, Need] = {}
    for extra, texts in _read_declared().items():
        for requirement in map(Requirement, texts):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if applies and extra not in DEVELOPMENT and requirement.name not in packages:
                packages[requirement.name] = Need(requirement, extra or None)
    return packages


def _read_declared() -> dict[str, list[str]]:
    """Return the requirements of each extra, and under "" those of all installations."""
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "diffvision":
            return {"": project["dependencies"], **project["optional-dependencies"]}
    requirements = importlib.metadata.requires("diffvision") or []
    provided = importlib.metadata.metadata("diffvision").get_all("Provides-Extra") or []
    return dict.fromkeys(("", *provided), requirements)


def find_versions(packages: Mapping[str, Need]) -> dict[str, str | None]:
    """Return package -> installed version, None if it is not installed."""
    installed: dict[str, str | None] = {}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def processor() -> str:
    """Return what the maker calls the processor."""
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def list_devices() -> list[str]:
    """Return a line for each device."""
    import torch

    lines = [f"cpu: {processor()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        lines.append(
            f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {capability}"
        )
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    return lines


def check_flash() -> list[Finding]:
    """Return a finding where there is a GPU and no library of flash attention that suits it."""
    import torch

    from diffvision.ops.attention.flash import find_libraries

    if not torch.cuda.is_available() or not isinstance(reason := find_libraries(), str):
        return []
    return [Finding(False, f"backend flash cannot be used here, and need not be: {reason}")]


def list_backends() -> list[tuple[str, str, str, str]]:
    """Return (shape, device and dtype, chosen backend, why) of usual trainings on the devices of this machine."""
    import torch

    from diffvision.ops.attention import Problem
    from diffvision.ops.attention.choice import choose

    usual = {
        "ViT-B/16 at 224, V1": Problem(1, 6, 6, 197, 197, 64, 128),
        "ViT-B/16 at 224, V2": Problem(1, 12, 12, 197, 197, 64, 64),
        "CLIP's text, V1": Problem(1, 4, 4, 77, 77, 64, 128, causal=True),
        "language, 1024 tokens, V1": Problem(1, 6, 6, 1024, 1024, 64, 128, causal=True),
        "packed, 1024 tokens, V1": Problem(1, 6, 6, 1024, 1024, 64, 128, causal=True, packed=True),
        "decoding at 1024 tokens, V1": Problem(1, 6, 6, 1, 1024, 64, 128, grad=False),
    }
    kinds = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])
    return [
        (
            name,
            f"{device}, {str(dtype).removeprefix('torch.')}",
            *choose("auto", problem._replace(device=device, dtype=dtype)),
        )
        for device, dtype in kinds
        for name, problem in usual.items()
    ]


def check_versions(packages: Mapping[str, Need], installed: Mapping[str, str | None]) -> list[Finding]:
    """Return a finding for each needed package that is missing or installed in another version."""
    findings = []
    for name, need in packages.items():
        version = installed.get(name)
        remedy = f"pip install '{name}{need.versions}'"
        if version is None and need.extra is None:
            findings.append(Finding(True, f"{name} is not installed: {remedy}"))
        elif version is not None and not need.requirement.specifier.contains(version, prereleases=True):
            of_extra = f" of diffvision[{need.extra}]" if need.extra else ""
            findings.append(
                Finding(need.extra is None, f"{name} {version} is not the needed {need.versions}{of_extra}: {remedy}")
            )
    return findings


def check_private_names() -> list[Finding]:
    """Return a finding if the installed Lightning lacks private names that `fit` needs."""
    try:
        from diffvision.training.fault_tolerance import lightning_internals
    except ImportError:
        return []  # it is not installed, which `check_versions` reports
    if not (lacking := lightning_internals.missing()):
        return []
    remedy = f"`diffvision fit` refuses; install lightning{lightning_internals.TESTED}"
    return [Finding(True, f"lightning lacks {', '.join(lacking)}: {remedy}")]


def doctor() -> int:
    """Print installed and needed versions, devices and backends.

    Returns:
        1 if diffvision cannot work, else 0.
    """
    try:
        packages = read_requirements()
    except importlib.metadata.PackageNotFoundError:
        packages = {}
    installed = find_versions(packages)
    findings = check_versions(packages, installed) + check_private_names()
    if not packages:
        findings = [Finding(True, "diffvision is not installed, only its files are here: pip install -e .")]
    attention = Attention([], [], {})
    if packages and not any(installed[name] is None for name, need in packages.items() if need.extra is None):
        try:
            attention = Attention.measure()
            findings += check_flash()
        except Exception as error:  # whatever a broken package raises when it is imported
            findings.append(Finding(True, f"a package is installed and cannot be imported: {error!r}"))
    broken = any(finding.broken for finding in findings)
    data = {
        "python": platform.python_version(),
        "packages": {
            name: {"installed": installed[name], "needed": need.versions, "extra": need.extra}
            for name, need in packages.items()
        },
        **attention._asdict(),
        "findings": [finding._asdict() for finding in findings],
        "ready": not broken,
    }
    show(*_tables(packages, installed, attention, findings), data=data)
    return int(broken)


def _tables(
    packages: Mapping[str, Need], installed: Mapping[str, str | None], attention: "Attention", findings: list[Finding]
) -> "Iterator[Table | Text]":
    from rich.table import Table
    from rich.text import Text

    if packages:
        table = Table(
            "package", "installed", "needed", title=f"Python {platform.python_version()} on {platform.system()}"
        )
        for name, need in packages.items():
            missing = "[red]missing[/]" if need.extra is None else "-"
            wanted = f"{need.versions or 'any'}{f' for diffvision[{need.extra}]' if need.extra else ''}"
            table.add_row(name, installed[name] or missing, Text(wanted))
        yield table
    yield from map(Text, attention.devices)
    if attention.backends:
        yield Text("registered: " + ", ".join(f"{count} models in {host}" for host, count in attention.models.items()))
        table = Table("attention of", "on", "backend", "why", title='What backend="auto" chooses')
        for row in attention.backends:
            table.add_row(*row.values())
        yield table
    for finding in findings:
        kind = ("broken: ", "red") if finding.broken else ("note: ", "yellow")
        yield Text.assemble(kind, finding.text)
    yield Text("not ready", "red") if any(finding.broken for finding in findings) else Text("ready", "green")
