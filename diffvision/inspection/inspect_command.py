"""`diffvision inspect`: look inside one model or two. The steps are in `inspecting`."""

from pathlib import Path


def inspect(
    model: str,
    *,
    output: str,
    checkpoint: str | None = None,
    image: str | list[str] | None = None,
    text: str | list[str] | None = None,
    versus: str | None = None,
    mask: str | list[str] | None = None,
    answer: str | list[str] | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
) -> None:
    """Look inside a model, or two side by side: attention maps, patches relevant to a caption, numbers by layer.

    Writes index.html with all pictures inside, the pictures as PNG, and statistics.json.

    Args:
        model: the directory of a training run or a .ckpt of it, the folder of a model, or a name of OpenCLIP's or
            timm's, ours or with differential attention of timm's (`diffvision.open_model` lists all forms);
            LABEL= before it names it on the page.
        output: the folder to write; it must not exist yet.
        checkpoint: for a name without a second model: a file of weights.
        image: files (one, or a list in brackets); by default drawn digits.
        text: captions of an image-text model, shown on every image, or texts of a language model (one, or a list in
            brackets); by default those of the drawn images, or a number among words.
        versus: a second model of the same kind.
        mask: files of the images' sizes, white where the object is, for the share of attention outside of it.
        answer: for each text of a language model, the words in it that are the answer, for the share of attention on
            other words.
        tokenizer: for a language model, if there is none next to the weights.
        device: auto, cpu, cuda, cuda:1, ...

    Raises:
        ValueError, FileNotFoundError: an input cannot be read, inputs do not fit together, or a model has no attention
            to look at.
    """
    from diffvision.evaluation.distributed import resolve_device
    from diffvision.inspection.inputs import read_pictures
    from diffvision.inspection.inspecting import (
        as_list,
        check_counts,
        inspect_models,
        open_models,
        pictures_and_passages,
    )
    from diffvision.models.weight_files import check_free

    texts, images = as_list(text), as_list(image)
    answers, masks = as_list(answer), as_list(mask)
    check_free(Path(output))
    check_counts(images, texts)
    if masks and not images:
        raise ValueError("masks are given without images: give --image")
    pictures = read_pictures(images, masks)  # what cannot be read is reported before a model is loaded
    models = open_models(model, checkpoint, versus, tokenizer=tokenizer, device=resolve_device(device))
    inspect_models(models, *pictures_and_passages(models, pictures, texts, answers), output)
