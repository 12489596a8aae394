"""`diffvision.evaluate`: the `evaluate` command for scripts and notebooks. What it runs is in `evaluate_command`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffvision.evaluation.options import Options, Precision
    from diffvision.opening import Model


def evaluate(
    model: str | Path | Model | Sequence[str | Path | Model],
    data: str | Path | Sequence[str | Path],
    *,
    checkpoint: str | Path | None = None,
    tasks: str | Sequence[str] | None = None,
    classnames: str | Path | Sequence[str] | None = None,
    templates: str | Path | Sequence[str] | None = None,
    output: str | Path | None = None,
    cache: str | Path | None = None,
    batch_size: int = 64,
    num_workers: int = 2,
    device: str | None = None,
    precision: Precision = "fp32",
    preprocess: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """Evaluate image models as `diffvision evaluate` does: print a table, and return the metrics.

        metrics = diffvision.evaluate("runs/clip_debug/version_0/checkpoints/best.ckpt", "data/digits")
        metrics["zero_shot/digits/acc1"]

    Args:
        model: a name, a path or another spec of `diffvision.open_model`, or a model that it has opened; a list of
            several. A module that was built elsewhere is given with what belongs to it:
            diffvision.Model(name="mine", host="open_clip", module=module, transform=transform, tokenizer=tokenizer).
        data: evaluation folders, folders that hold some, shards, or images, read in place.
        checkpoint: of a name: a file of weights, or a tag of pretrained ones.
        tasks: names of evaluations, as a list or separated by commas; by default zero_shot, retrieval, composition,
            pairs and objects.
        classnames: names of the classes in prompts, instead of the data's: "imagenet", a file with a name per line, or
            a list. Folders named by ImageNet's wnids have its names without it.
        templates: of prompts, instead of the data's: one with {c} where the class name belongs, "imagenet" for its 80,
            a file with one per line, or a list.
        output: a file ending in .json, or a folder, for records as CLIP_benchmark has them.
        cache: folder that features are kept in, from which an evaluation that was ended resumes.
        batch_size: images a batch.
        num_workers: processes that read and decode images.
        device: auto, cpu, cuda, cuda:1, ...; by default where an opened model is, and auto for the others.
        precision: fp32, bf16 or fp16.
        preprocess: mean, std, interpolation, resize_mode where they differ from the model's.
        options: settings of the evaluations, diffvision.evaluation.Options(...).

    Returns:
        {metric: value}; of a list of models {label: {metric: value}}.

    Raises:
        FileNotFoundError, ValueError: there is no such model or data, or they do not fit together.
        TypeError: the model is of another kind.
    """
    from diffvision.evaluation.evaluate_command import run
    from diffvision.evaluation.options import Options
    from diffvision.opening import Model
    from diffvision.opening.specs import as_text

    several: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in several:
        if not isinstance(one, str | Path | Model):
            raise TypeError(
                f"model is an object of {type(one).__name__}: give a name, a path, or diffvision.Model(name=..., "
                "host=..., module=..., transform=...)"
            )
    opened = [one for one in several if isinstance(one, Model)]
    given = [name for name, value in (("checkpoint", checkpoint), ("preprocess", preprocess)) if value is not None]
    if opened and given:
        raise ValueError(f"{opened[0].name} is open already: give {' and '.join(given)} to open_model")
    if opened and device is None:
        device = str(opened[0].device)
    specs: list[Any] = [one if isinstance(one, Model) else as_text(one) for one in several]
    return run(
        specs if isinstance(model, list | tuple) else specs[0],
        data=data,  # type: ignore[arg-type]
        checkpoint=None if checkpoint is None else as_text(checkpoint),
        tasks=_texts(tasks),
        classnames=_texts(classnames),
        templates=_texts(templates),
        output=None if output is None else str(output),
        cache=None if cache is None else str(cache),
        batch_size=batch_size,
        num_workers=num_workers,
        device=device or "auto",
        precision=precision,
        preprocess=None if preprocess is None else dict(preprocess),
        options=options or Options(),
    )


def _texts(given: str | Path | Sequence[str] | None) -> str | list[str] | None:
    return str(given) if isinstance(given, str | Path) else None if given is None else list(given)
