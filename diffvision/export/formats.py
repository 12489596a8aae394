"""The table of formats that a model can be written in. `command` chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diffvision.export import folders, int8, onnx, program
from diffvision.export.options import Options
from diffvision.opening import Host, Model

HOSTS: tuple[Host, ...] = ("open_clip", "timm", "language")


class Format(NamedTuple):
    """A row of the table below.

    Attributes:
        what: the format in words.
        write: (model, destination, options) -> None; the destination does not exist yet, and becomes a folder or a
            file. It may raise ValueError for models that the format does not support.
        hosts: hosts of the models that the format supports.
    """

    what: str
    write: Callable[[Model, Path, Options], None]
    hosts: tuple[Host, ...]


FORMATS: dict[str, Format] = {
    "openclip": Format("a folder that open_clip loads as local-dir:...", folders.write_open_clip, ("open_clip",)),
    "timm": Format("a folder that timm loads as local-dir:...", folders.write_timm, ("timm",)),
    "huggingface": Format("a folder that transformers loads", folders.write_hugging_face, ("language",)),
    "program": Format("a folder with a torch.export program for each graph", program.write_programs, HOSTS),
    "onnx": Format("a folder with an ONNX model for each graph", onnx.write_onnx, HOSTS),
    "int8": Format("weights in eight bits: a .safetensors file, of text a folder", int8.write_int8, HOSTS),
}
DEFAULTS: dict[Host, str] = {"open_clip": "openclip", "timm": "timm", "language": "huggingface"}
