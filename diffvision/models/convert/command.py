"""The command `diffvision convert`; the conversions of files and folders are in `files`."""

from pathlib import Path
from typing import Literal, get_args

Layout = Literal["openclip", "diffvision", "language", "huggingface"]


def convert(
    source: str,
    destination: str,
    *,
    to: Layout,
    tower: str | None = None,
    lambda_init: float | Literal["depth"] = 0.8,
    tokenizer: str | None = None,
) -> None:
    """Write weights of one layout in another, and print the layout of the source. A failure leaves no file behind.

    Args:
        source: a file of weights, or a folder (OpenCLIP's, transformers', or a language model of ours), which may be on
            the Hugging Face Hub (hf:ID).
        destination: the path to write: a folder, or for diffvision a .safetensors or .pt file.
        to: the layout: openclip (of DiffCLIP's checkpoints), diffvision (of timm's and unilm's attention), language (of
            transformers' models) or huggingface (of ours).
        tower: for DiffCLIP: the timm model of the image tower, if no model of ours has its size.
        lambda_init: for DiffCLIP: 0.8, or "depth" for its variant with a schedule by depth.
        tokenizer: for language: the tokenizer.json to write, in place of the source's.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: the source's layout is unknown or cannot be converted to that layout, or the destination exists.
    """
    from diffvision.models.convert.files import CONVERSIONS, Options
    from diffvision.models.convert.layouts import LAYOUTS, recognise
    from diffvision.models.weight_files import check_free, check_weights_name, written_whole

    target = Path(destination)
    if to not in get_args(Layout):
        raise ValueError(f"to is {to!r}: choose one of {', '.join(get_args(Layout))}")
    check_free(target)
    if tokenizer is not None and (to != "language" or not Path(tokenizer).is_file()):
        raise ValueError(f"tokenizer is {tokenizer!r}: give a tokenizer.json that is there, and --to language")
    if to == "diffvision":
        check_weights_name(target)
    weights = recognise(source)
    if (weights.layout, to) not in CONVERSIONS:
        possible = [other for one, other in CONVERSIONS if one == weights.layout]
        raise ValueError(
            f"{source} is {weights.layout}, {LAYOUTS[weights.layout]}: to must be {' or '.join(possible) or 'left out'}"
        )
    with written_whole(target) as partial_target:
        CONVERSIONS[weights.layout, to](
            weights, partial_target, Options(tower, lambda_init, Path(tokenizer) if tokenizer else None)
        )
    print(f"{source} is {weights.layout}, {LAYOUTS[weights.layout]}: wrote {target} as {to}")
