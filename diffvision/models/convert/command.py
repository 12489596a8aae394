"""The command `diffvision convert`; the conversions of files and folders are in `files`."""

from pathlib import Path
from typing import Literal

SOURCES = {"openclip": ("diffclip",), "diffvision": ("timm", "unilm-v1", "unilm-v2"), "language": ("huggingface",)}
"""Layout to write -> the layouts that are converted to it."""


def convert(
    source: str,
    destination: str,
    *,
    to: Literal["openclip", "diffvision", "language"],
    tower: str | None = None,
    lambda_init: float | Literal["depth"] = 0.8,
) -> None:
    """Write weights of one layout in another, and print the layout of the source. A failure leaves no file behind.

    Args:
        source: a file of weights, or a folder of timm or transformers, which may be on the Hugging Face Hub (hf:ID).
        destination: the path to write: a folder, or for diffvision a .safetensors or .pt file.
        to: the layout: openclip (of DiffCLIP's checkpoints), diffvision (of timm's and unilm's attention) or language
            (of transformers' models). `diffvision export` writes language models of ours for transformers.
        tower: for DiffCLIP: the timm model of the image tower, if no model of ours has its size.
        lambda_init: for DiffCLIP: 0.8, or "depth" for its variant with a schedule by depth.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: the source's layout is unknown or cannot be converted to that layout, or the destination exists.
    """
    from diffvision.models.convert import files
    from diffvision.models.convert.layouts import LAYOUTS, recognise
    from diffvision.models.weight_files import check_free, written_whole

    target = Path(destination)
    if to not in SOURCES:
        raise ValueError(f"to must be one of {', '.join(SOURCES)}, got {to!r}")
    check_free(target)
    if to == "diffvision" and target.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"destination must end in .safetensors or .pt, got {target.name}")
    weights = recognise(source)
    if weights.layout not in SOURCES[to]:
        (possible,) = (layout for layout, sources in SOURCES.items() if weights.layout in sources)
        raise ValueError(f"{source} is {weights.layout}, {LAYOUTS[weights.layout]}: to must be {possible}")
    with written_whole(target) as made:
        if to == "openclip":
            files.write_openclip(weights, made, tower=tower, lambda_init=lambda_init)
        elif to == "diffvision":
            files.write_layers(weights, made)
        else:
            files.write_language(weights.path, made)
    print(f"{source} is {weights.layout}, {LAYOUTS[weights.layout]}: wrote {target} as {to}")
