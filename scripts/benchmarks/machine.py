"""The machine, the versions and the command of a measurement, for whoever reads its numbers later."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
PACKAGES = ("torch", "triton", "timm", "open_clip_torch", "transformers", *FLASH, "numpy")


def environment(device: str) -> dict[str, Any]:
    """Return date, command, hardware and versions."""
    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "hardware": hardware(device),
        "versions": {
            "python": platform.python_version(),
            **versions(),
            "torch": torch.__version__,
            "diffvision": commit(),
        },
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def versions() -> dict[str, str | None]:
    """Return the version of each package, None where it is not installed."""
    installed: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def command(given: list[str]) -> str:
    """Return the command to repeat a run, without the folder that it wrote to."""
    words = iter(given[1:])
    kept = [word for word in words if not (word == "--output" and next(words, None)) and "--output=" not in word]
    return shlex.join(["python", f"scripts/benchmarks/{Path(given[0]).name}", *kept])


def processor() -> str:
    """Return what the maker calls the processor."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def hardware(device: str) -> dict[str, Any]:
    import torch

    machine: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return machine


def commit() -> str:
    """Return git's commit of the code, and "+ changes" where files differ from it.

    Where a copy of the code has no git folder, it is the environment variable DIFFVISION_COMMIT.
    """
    folder = str(Path(__file__).resolve().parent)
    head = output("git", "-C", folder, "rev-parse", "HEAD")
    if head is None:
        return os.environ.get("DIFFVISION_COMMIT", "unknown")
    changed = output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head} + changes" if changed else head


def output(*words: str) -> str | None:
    """Return what a command prints, or None where it fails or is not installed."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_in_words(report: dict[str, Any]) -> str:
    machine = report["hardware"]
    return machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread(s)"


def describe_machine(report: dict[str, Any]) -> str:
    """Return the paragraph of a page that says on what, with which versions, when and how a report was made."""
    machine, installed = report["hardware"], report["versions"]
    driver = f", driver {machine['driver']}" if "gpu" in machine else ""
    packages = ", ".join(f"{name} {installed[name]}" for name in ("torch", "triton", "timm") if installed[name])
    when = f"diffvision {installed['diffvision']}; {report['date'][:10]}"
    return f"{device_in_words(report)}{driver}; {packages}; {when}\n\n`{report['command']}`"
