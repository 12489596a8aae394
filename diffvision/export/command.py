"""`diffvision export`: a trained model -> what other programs load. `FORMATS` is the table of what can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from diffvision.export import folders, int8, onnx, program
from diffvision.export.finite import open_finite
from diffvision.export.options import Options
from diffvision.models.files import check_free, written_whole
from diffvision.opening import Host, Model

HOSTS: tuple[Host, ...] = ("open_clip", "timm", "language")
To = Literal["openclip", "timm", "huggingface", "program", "onnx", "int8"]


class Format(NamedTuple):
    """A row of the table below.

    Attributes:
        what: it is.
        write: (model, destination, options) -> None; the destination is not there yet, and is a folder or a file as
            the format is. It may raise ValueError for models that it is not for.
        hosts: whose models it is for.
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


def export(
    model: str,
    destination: str,
    to: To | None = None,
    *,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    eos: str | None = None,
    license: str | None = None,
) -> None:
    """Write a trained model as what other programs load. A failure leaves nothing behind.

    Args:
        model: a .ckpt of `diffvision fit`, the folder of an OpenCLIP, timm or language model, another file of weights
            that records its model, or a name with `checkpoint`.
        destination: what to write; it must not be there yet.
        to: the format; by default the folder of the model's own host: openclip, timm or (text) huggingface. Of any
            model: program (torch.export), onnx, or int8 (weights in eight bits).
        checkpoint: of a name: a file of weights, or a tag of pretrained ones.
        tokenizer: of a language model: tokenizer.json or its directory; by default that of the checkpoint or its run.
        eos: of a language model: the token that ends a document; by default what its tokenizer says.
        license: of the weights, for the model card (apache-2.0, mit, cc-by-4.0, ...).

    Raises:
        FileNotFoundError, ValueError: no such model, or one that is damaged or does not say what it is; weights that
            are new or not finite; a format that is not for this model; a destination that exists.
    """
    target = Path(destination)
    if to is not None and to not in FORMATS:
        raise ValueError(f"to is {to!r}: choose one of {', '.join(FORMATS)}")
    check_free(target)
    opened = open_finite(model, checkpoint)
    if opened.host not in DEFAULTS:
        raise ValueError(
            f"{model} is a model of {opened.host} already: to write it otherwise, make it ours first with "
            "`diffvision convert --to language`"
        )
    name = to or DEFAULTS[opened.host]
    form = FORMATS[name]
    if opened.host not in form.hosts:
        possible = ", ".join(other for other, row in FORMATS.items() if opened.host in row.hosts)
        raise ValueError(f"{model} is a model of {opened.host}, and {name} is not for it: choose one of {possible}")
    options = Options(tokenizer=tokenizer, eos=eos, license=license)
    with written_whole(target) as made:
        form.write(opened, made, options)
    print(f"{model} is {opened.name}: wrote {target}, {form.what}")
