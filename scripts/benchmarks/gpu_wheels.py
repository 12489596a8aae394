"""Lists the packages that a bare GPU machine lacks, and downloads their wheels: a lent machine may have no network.

    python scripts/benchmarks/gpu_wheels.py [--flash] [FOLDER]
    WHEELS=FOLDER scripts/gpu_check.sh tests OUT

A bare machine has torch, Triton, torchvision, timm, Lightning and transformers with what they need. The versions are
those of the environment that runs this, the wheels for Python 3.12 on Linux. `--flash` adds FlashAttention-4, the only
flash-attn that has a wheel (flash-attn 2 and 3 are built by nvcc): 102 MB, most of it the compiler that it calls.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NEEDED = ("diffvision", "pytest")
PRESENT = ("torch", "torchvision", "timm", "lightning", "transformers", "pytest", "scikit-learn", "matplotlib")
OLD = ("timm", "lightning", "pillow", "pytest")  # older on the machine than pyproject.toml allows
# FlashAttention-4 and what it needs beside torch; its compiler is the build for CUDA 13.
FLASH = (
    "flash-attn-4==4.0.0b36",
    "quack-kernels==0.6.5",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
    "einops==0.8.2",
    "protobuf==7.35.1",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
EXTRAS = {"jsonargparse": ("signatures",), "fsspec": ("http",)}  # that are required of a package
TARGET = ["--python-version", "3.12", "--implementation", "cp"]


def closure(names: Iterable[str]) -> set[str]:
    """Return installed packages and all that they require."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS.get(name, ()))
            ):
                todo.append(requirement.name)
    return found


def lacking() -> list[str]:
    """Return what to bring along, as NAME==VERSION."""
    names = closure(NEEDED) - closure(PRESENT) - {"diffvision"} | set(OLD)
    return sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash", action="store_true", help="and FlashAttention-4")
    parser.add_argument("folder", type=Path, nargs="?", help="download the wheels to it")
    args = parser.parse_args(given)
    wanted = [*lacking(), *(FLASH if args.flash else ())]
    print("\n".join(wanted))
    if args.folder is None:
        return 0
    for_machine = [*TARGET, *(word for name in PLATFORMS for word in ("--platform", name))]
    options = ["-q", "--no-deps", "--only-binary=:all:", *for_machine, "-d", str(args.folder)]
    code = subprocess.run([sys.executable, "-m", "pip", "download", *options, *wanted], check=False).returncode
    size = sum(file.stat().st_size for file in args.folder.glob("*.whl"))
    print(f"{args.folder}: {size / 1e6:.0f} MB")
    return code


if __name__ == "__main__":
    sys.exit(main())
