"""The commands `export`, `adapt` and `interpolate`; formats are written in `formats`, `adapted_folder` and others."""

from pathlib import Path
from typing import Any, Literal

from diffvision.models.names import Method

To = Literal["openclip", "timm", "huggingface", "program", "onnx"]


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
    """Write a trained model in a format that other programs load. A failure leaves no file behind.

    Args:
        model: the directory of a run of `diffvision fit` or a .ckpt of it, the folder of an OpenCLIP, timm or language
            model, another file of weights that records its model, or a name with `checkpoint`. transformers' Llama,
            in a folder or on the Hub (hf:ID), is written as a language model of ours.
        destination: the folder or file to write; it must not exist yet.
        to: the format; by default the folder of the model's library: openclip, timm or (text) huggingface. Of
            images: program (torch.export) or onnx.
        checkpoint: if model is a name without a tag: a file of weights.
        tokenizer: for a language model: tokenizer.json or its directory; by default that of the checkpoint or its run.
        eos: for a language model: the token that ends a document; by default the one that its tokenizer names.
        license: of the weights, for the model card (apache-2.0, mit, cc-by-4.0, ...).

    Raises:
        FileNotFoundError, ValueError: the model does not exist, is damaged or of an unknown kind, its weights are
            randomly initialised or not finite, the format does not support it, or the destination exists.
    """
    from diffvision.export.finite_weights import open_for_export
    from diffvision.export.formats import DEFAULTS, FORMATS, Options, check_installed
    from diffvision.models.weight_files import check_free, written_whole
    from diffvision.opening.vlm import find_trained

    target = Path(destination)
    if to is not None and to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    check_free(target)
    if to is not None:
        check_installed(to)  # before the model is loaded
    if tokenizer is not None and not Path(tokenizer).exists():
        raise FileNotFoundError(f"no tokenizer {tokenizer}: give a tokenizer.json, or a directory that holds one")
    if (file := find_trained(model)) is not None:
        return _export_vision_language(file, target, to)
    opened = open_for_export(model, checkpoint)
    name = to or DEFAULTS[opened.library]
    check_installed(name)
    form = FORMATS[name]
    if opened.library not in form.libraries:
        possible = ", ".join(other for other, row in FORMATS.items() if opened.library in row.libraries)
        raise ValueError(f"{model} is a model of {opened.library}, and {name} is not for it: choose one of {possible}")
    options = Options(tokenizer=tokenizer, eos=eos, license=license)
    with written_whole(target) as made:
        form.write(opened, made, options)
    print(f"{model} is {opened.name}{opened.average_note}: wrote {target}, {form.what}")


def _export_vision_language(file: Path, target: Path, to: To | None) -> None:
    """Write a checkpoint of our vision-language training as a folder with its processor, LoRA's adapters merged."""
    from diffvision.models.checkpoint import check_finite
    from diffvision.models.weight_files import written_whole
    from diffvision.opening.vlm import open_vlm

    if to not in (None, "huggingface"):
        raise ValueError(f"to is {to!r}, and {file} is a vision-language model: leave it out, or set it to huggingface")
    opened = open_vlm(file)
    module: Any = opened.module
    check_finite(module.state_dict(), str(file))
    with written_whole(target) as made:
        module.save_pretrained(made)
        opened.processor.save_pretrained(made)
    print(f"{file} is {opened.name}: wrote {target}, a folder that transformers loads")


def adapt_to_folder(
    model: str,
    destination: str,
    *,
    method: Method = "v2",
    checkpoint: str | None = None,
    heads: str = "all",
) -> None:
    """Make a pretrained model differential, compare outputs, and write it as a folder for further training.

    Args:
        model: NAME.TAG of timm's or OpenCLIP's, or NAME with `checkpoint`, a folder, a .ckpt of a training run, or a
            model on the Hugging Face Hub (hf-hub:ID); of text: ours, or transformers' Llama (a folder, or hf:ID).
        destination: the folder to write; it must not exist yet.
        method: v2 or dex, whose outputs are the same before training; v1, whose outputs differ.
        checkpoint: if model is a name without a tag: a file of weights.
        heads: for dex: all, or numbers for every layer, as 0,3,5. The paper's choice, by entropy, is
            `diffvision.analysis.heads.highest_entropy` in Python.

    Raises:
        FileNotFoundError, ValueError: the model does not exist, has no weights or no standard attention, settings do
            not fit together, the outputs differ from the pretrained model's, or the destination exists.
    """
    from diffvision.export import adapted_folder as adapted

    adapted.write_adapted(model, destination, method=method, checkpoint=checkpoint, heads=heads)


def interpolate(pretrained: str, finetuned: str, destination: str, *, alpha: float = 0.5) -> None:
    """Write the weights between a pretrained and a fine-tuned model (WiSE-FT) as a folder of their library.

    Args:
        pretrained: the model before fine-tuning: timm's or OpenCLIP's NAME.TAG, a folder, or any other of `export`.
        finetuned: the same model after it, as the directory of its run; averaged weights (EMA) are taken.
        destination: the folder to write; it must not exist yet.
        alpha: the share of the fine-tuned weights: 0 is the pretrained model, 1 the fine-tuned one.

    Raises:
        FileNotFoundError, ValueError: a model does not exist or is a language model, the two differ in architecture or
            preprocessing, or the destination exists.
    """
    from diffvision.export.interpolated import write_interpolated

    write_interpolated(pretrained, finetuned, destination, alpha)
