"""The table of formats that a model can be written in; it needs no PyTorch. `export_commands` chooses among them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diffvision.opening import Library, Model

IMAGES: tuple[Library, ...] = ("open_clip", "timm")


@dataclass(frozen=True)
class Options:
    """Settings of an export; each format reads the ones it needs.

    Attributes:
        tokenizer: for a language model: tokenizer.json, or a directory that holds one.
        eos: for a language model: the token that ends a document.
        license: of the weights, for the model card, as the Hub names it.
    """

    tokenizer: str | None = None
    eos: str | None = None
    license: str | None = None


class Format(NamedTuple):
    """A row of the table below.

    Attributes:
        what: the format in words.
        writer: module and function in this package, (model, destination, options) -> None. The destination does not
            exist yet, and becomes a folder or a file. It may raise ValueError for models that the format does not
            support.
        libraries: of the models that the format supports.
        extra: the extra of diffvision that installs `packages`.
        packages: what the format needs beyond diffvision's requirements.
    """

    what: str
    writer: str
    libraries: tuple[Library, ...]
    extra: str = ""
    packages: tuple[str, ...] = ()

    def write(self, model: Model, destination: Path, options: Options) -> None:
        """Write the model."""
        module, _, function = self.writer.partition(".")
        getattr(importlib.import_module(f"diffvision.export.{module}"), function)(model, destination, options)


FORMATS: dict[str, Format] = {
    "openclip": Format(
        "a folder that open_clip loads as local-dir:...", "model_folders.write_open_clip", ("open_clip",)
    ),
    "timm": Format("a folder that timm loads as local-dir:...", "model_folders.write_timm", ("timm",)),
    "huggingface": Format(
        "a folder that transformers loads", "model_folders.write_hugging_face", ("language",), "hf", ("transformers",)
    ),
    "program": Format("a folder with a torch.export program for each graph", "program.write_programs", IMAGES),
    "onnx": Format(
        "a folder with an ONNX model for each graph", "onnx.write_onnx", IMAGES, "export", ("onnx", "onnxscript")
    ),
}
DEFAULTS: dict[Library, str] = {"open_clip": "openclip", "timm": "timm", "language": "huggingface"}


def check_installed(name: str) -> None:
    """Raise a ValueError that names the packages to install if a format needs some that are missing."""
    form = FORMATS[name]
    if missing := [package for package in form.packages if find_spec(package) is None]:
        raise ValueError(f"{name} needs {' and '.join(missing)}: pip install 'diffvision[{form.extra}]'")
