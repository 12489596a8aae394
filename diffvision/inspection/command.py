"""`diffvision inspect`: what the command takes. What it does is in `inspecting`."""


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
    """Look inside a model, or two side by side: attention maps, what answers a caption, and numbers by layer.

    Writes index.html with all pictures inside, the pictures as PNG, and statistics.json.

    Args:
        model: a .ckpt of a training run, the folder of a model, or a name of OpenCLIP's or timm's, ours or with
            differential attention of timm's (`diffvision.open_model` has the whole grammar); LABEL= before it names it
            on the page.
        output: folder for it: new, empty, or one of an earlier inspection, which is replaced.
        checkpoint: of a name, where no other model is given: a file of weights or a tag of pretrained ones.
        image: files (one, or a list in brackets); by default digits that are drawn here.
        text: captions of an image-text model, shown on every image, or texts of a language model (one, or a list in
            brackets); by default those of the drawn images, or a number among words.
        versus: a second model of the same kind.
        mask: files of the images' sizes, white where the object is, for the share of attention outside of it.
        answer: of each text of a language model, its words that answer it, for the share of attention on others.
        tokenizer: of a language model, where none lies next to the weights.
        device: auto, cpu, cuda, cuda:1, ...

    Raises:
        ValueError, FileNotFoundError: what cannot be read, does not fit together, or has no attention to look at.
    """
    from diffvision.inspection import inspecting

    inspecting.inspect(
        model,
        output=output,
        checkpoint=checkpoint,
        image=image,
        text=text,
        versus=versus,
        mask=mask,
        answer=answer,
        tokenizer=tokenizer,
        device=device,
    )
