"""The check of an installation: versions, devices, and the attention backend of the usual shapes.

PyTorch, timm and the like are imported inside its functions, so versions are reported even if one of them is missing.
"""

import platform
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from diffvision.tables import show

DEVELOPMENT = ("dev", "docs")  # extras of contributors


def doctor() -> int:
    """Print installed and needed versions, devices and backends.

    Returns:
        1 if diffvision cannot work, else 0.
    """
    packages = read_packages()
    findings = check_versions(packages)
    attention: dict[str, Any] = {"devices": [], "backends": [], "models": {}}
    if not findings or not any(finding["broken"] for finding in findings):
        try:
            attention = measure_attention()
        except Exception as error:  # whatever a broken package raises when it is imported
            findings.append(_finding(True, f"a package is installed and cannot be imported: {error!r}"))
    is_ready = not any(finding["broken"] for finding in findings)
    data = {"python": platform.python_version(), "packages": packages, **attention, "findings": findings}
    show(*_tables(data, is_ready), data=data | {"ready": is_ready})
    return int(not is_ready)


def read_packages() -> dict[str, dict[str, str | None]]:
    """Return package -> its installed and needed version, and the extra that needs it; none if we are not installed."""
    try:
        requirements = list(map(Requirement, metadata.requires("diffvision") or []))
        extras = metadata.metadata("diffvision").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    packages: dict[str, dict[str, str | None]] = {}
    for extra in ["", *(extra for extra in extras if extra not in DEVELOPMENT)]:
        for one in requirements:
            if (one.marker is None or one.marker.evaluate({"extra": extra})) and one.name not in packages:
                needed = {"needed": str(one.specifier), "extra": extra or None}
                packages[one.name] = {"installed": _version(one.name), **needed}
    return packages


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _finding(broken: bool, text: str) -> dict[str, Any]:
    return {"broken": broken, "text": text}


def check_versions(packages: dict[str, dict[str, str | None]]) -> list[dict[str, Any]]:
    """Return a finding for each needed package that is missing or installed in another version."""
    if not packages:
        return [_finding(True, "diffvision is not installed, only its files are here: pip install -e .")]
    findings = []
    for name, package in packages.items():
        installed, needed, extra = package["installed"], package["needed"], package["extra"]
        remedy = f"pip install '{name}{needed}'"
        if installed is None and extra is None:
            findings.append(_finding(True, f"{name} is not installed: {remedy}"))
        elif installed and not Requirement(f"{name}{needed}").specifier.contains(installed, prereleases=True):
            owner = f" of diffvision[{extra}]" if extra else ""
            findings.append(_finding(extra is None, f"{name} must be {needed}{owner}, got {installed}: {remedy}"))
    return findings


def measure_attention() -> dict[str, Any]:
    """Return what PyTorch says: devices, the backend for each usual shape, and models registered by library."""
    import torch

    from diffvision.models import clip, vit
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
    rows = []
    for device, dtype in kinds:
        on = f"{device}, {str(dtype).removeprefix('torch.')}"
        for name, problem in usual.items():
            backend, why = choose("auto", problem._replace(device=device, dtype=dtype))
            rows.append({"attention": name, "on": on, "backend": backend, "why": why})
    models = {"timm": len(vit.model_names()), "OpenCLIP": len(clip.model_names())}
    return {"devices": list_devices(), "backends": rows, "models": models}


def list_devices() -> list[str]:
    """Return a line for each device."""
    import torch

    lines = [f"cpu: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"{about.major}.{about.minor}"
        lines.append(f"cuda:{index}: {about.name}, {about.total_memory / 2**30:.0f} GiB, capability {capability}")
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    return lines


def _tables(data: dict[str, Any], is_ready: bool) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    versions = Table("package", "installed", "needed", title=f"Python {data['python']} on {platform.system()}")
    for name, package in data["packages"].items():
        extra = f" for diffvision[{package['extra']}]" if package["extra"] else ""
        missing = "-" if package["extra"] else "[red]missing[/]"
        versions.add_row(name, package["installed"] or missing, Text(f"{package['needed'] or 'any'}{extra}"))
    parts = [versions, *map(Text, data["devices"])]
    if data["backends"]:
        registered = ", ".join(f"{count} models in {library}" for library, count in data["models"].items())
        backends = Table("attention of", "on", "backend", "why", title='What backend="auto" chooses')
        for row in data["backends"]:
            backends.add_row(*row.values())
        parts += [Text(f"registered: {registered}"), backends]
    for finding in data["findings"]:
        kind = ("broken: ", "red") if finding["broken"] else ("note: ", "yellow")
        parts.append(Text.assemble(kind, finding["text"]))
    return [*parts, Text("ready", "green") if is_ready else Text("not ready", "red")]
