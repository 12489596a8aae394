"""The packages that some formats need beyond diffvision's requirements."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "huggingface": ("hf", ("transformers",)),
    "onnx": ("export", ("onnx", "onnxscript")),
    "int8": ("export", ("torchao",)),
}
"""Format -> the extra of diffvision that installs what it needs, and the packages."""


def check_installed(name: str) -> None:
    """Raise a ValueError that names the packages to install if a format needs some that are missing."""
    extra, packages = EXTRAS.get(name, ("", ()))
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ValueError(f"{name} needs {' and '.join(missing)}: pip install 'diffvision[{extra}]'")
