"""The check of an installation: versions, devices, the attention backend of the usual shapes, known conflicts."""

import importlib.metadata
import importlib.util
import platform
from typing import NamedTuple

import torch
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffvision.models import clip, vision
from diffvision.ops.attention import Problem, supported_backends

# package -> the oldest version that is tested to work (the same floors as pyproject.toml)
FLOORS = {
    "torch": "2.10",
    "torchvision": None,
    "timm": "1.0.26",
    "open_clip_torch": "3.3",
    "lightning": "2.6.5",
    "webdataset": "1.0.2",
    "jsonargparse": "4.39",
    "pillow": "12.3",
    "numpy": None,
    "scikit-learn": None,
}
MALICIOUS_LIGHTNING = ("2.6.2", "2.6.3")

# name -> (heads, kv heads, tokens, D, V, shared keys, causal); heads are differential ones
USUAL_SHAPES = {
    "ViT-B/16 at 224, V1": (6, 6, 197, 64, 128, False, False),
    "ViT-B/16 at 384, V1": (6, 6, 577, 64, 128, False, False),
    "ViT-B/16 at 224, V2": (12, 12, 197, 64, 64, True, False),
    "CLIP text, V1": (4, 4, 77, 64, 128, False, True),
    "language model, 4096 tokens, V1": (12, 12, 4096, 128, 256, False, True),
}


class Finding(NamedTuple):
    """One thing the doctor has to say; `broken` means that diffvision itself does not work with it."""

    broken: bool
    text: str


def versions() -> dict[str, str | None]:
    """Package -> installed version, None if it is not installed."""
    found: dict[str, str | None] = {}
    for name in FLOORS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[str]:
    """A line a device."""
    lines = [f"cpu: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        lines.append(
            f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {capability}"
        )
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    return lines


def backends() -> list[tuple[str, str, str, str]]:
    """(shape, device and dtype, chosen backend, why) of the usual shapes on the devices that are here."""
    here = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])
    rows = []
    for device, dtype in here:
        for name, (heads, kv_heads, tokens, head_dim, value_dim, shared, causal) in USUAL_SHAPES.items():
            problem = Problem(
                batch=32,
                heads=heads,
                kv_heads=kv_heads,
                queries=tokens,
                keys=tokens,
                head_dim=head_dim,
                value_dim=value_dim,
                shared_keys=shared,
                causal=causal,
                dtype=dtype,
                device=device,
            )
            chosen, why = next(iter(supported_backends(problem).items()))
            rows.append((name, f"{device}, {str(dtype).removeprefix('torch.')}", chosen, why.removeprefix("chosen: ")))
    return rows


def conflicts(installed: dict[str, str | None]) -> list[Finding]:
    """What is known not to go together, of these installed versions (package -> version, as `versions()` gives)."""
    found = []
    for name, floor in FLOORS.items():
        version = installed.get(name)
        if version is None:
            found.append(Finding(True, f"{name} is not installed: pip install {name}"))
        elif floor and Version(version) < Version(floor):
            found.append(
                Finding(True, f"{name} {version} is older than {floor}: pip install --upgrade '{name}>={floor}'")
            )
    if installed.get("lightning") in MALICIOUS_LIGHTNING:
        found.append(
            Finding(
                True, f"lightning {installed['lightning']} was a malicious release: remove it, and rotate your secrets"
            )
        )
    if _at_least(installed, "webdataset", "0.2.87"):
        found.append(
            Finding(
                False,
                "open_clip_train 3.3 fails with webdataset above 0.2.86 (KeyError): use `diffvision fit`, or run "
                "it in an environment of its own; do not install open_clip_torch[training] here, which pins webdataset",
            )
        )
    if _at_least(installed, "numpy", "2.4"):
        found.append(
            Finding(
                False,
                "CLIP_benchmark 1.6 and open_clip_train's zero-shot fail with numpy 2.4 (TypeError: only 0-dimensional "
                "arrays): use `diffvision evaluate`, or numpy below 2.4 in an environment of their own",
            )
        )
    spec = importlib.util.find_spec("flash_attn")
    if spec is not None and spec.origin is None:
        found.append(
            Finding(
                False,
                "flash_attn is a namespace without flash_attn_func (flash-attn-4 makes one): no FlashAttention 2 here",
            )
        )
    return found


def private_names() -> list[Finding]:
    """Return what the installed Lightning and jsonargparse lack of their private names that `fit` needs."""
    try:
        from diffvision import jsonargparse_internals
        from diffvision.training.durable import lightning_internals
    except ImportError:
        return []  # one of them is not installed, which `conflicts` reports
    return [
        Finding(True, f"{name} lacks {', '.join(lacking)}: `diffvision fit` refuses; install {name}{internals.TESTED}")
        for name, internals in (("lightning", lightning_internals), ("jsonargparse", jsonargparse_internals))
        if (lacking := internals.missing())
    ]


def doctor() -> int:
    """Prints the report. Returns 1 if something that diffvision needs is broken, else 0."""
    console = Console()
    installed = versions()
    table = Table("package", "installed", "needed", title=f"Python {platform.python_version()} on {platform.system()}")
    for name, version in installed.items():
        table.add_row(name, version or "[red]missing[/]", f">={FLOORS[name]}" if FLOORS[name] else "any")
    console.print(table)
    for line in devices():
        console.print(line, highlight=False)
    console.print(f"registered: {len(vision.model_names())} models in timm, {len(clip.model_names())} in OpenCLIP")
    table = Table("attention of", "on", "backend", "why", title='What backend="auto" chooses')
    for row in backends():
        table.add_row(*row)
    console.print(table)
    findings = conflicts(installed) + private_names()
    for finding in findings:
        kind = "[red]broken:[/]" if finding.broken else "[yellow]note:[/]"
        console.print(kind, escape(finding.text), highlight=False)
    broken = any(finding.broken for finding in findings)
    console.print("[red]not ready[/]" if broken else "[green]ready[/]")
    return int(broken)


def _at_least(installed: dict[str, str | None], name: str, floor: str) -> bool:
    version = installed.get(name)
    return version is not None and Version(version) >= Version(floor)
