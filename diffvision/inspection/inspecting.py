"""The steps of `diffvision inspect`: open models, read inputs, check both, measure, and write the folder.

Measuring is in `measurements`, drawing in `inspection_page`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffvision.analysis.capture import check_attention
from diffvision.analysis.html_page import html_page
from diffvision.analysis.maps import image_trunk
from diffvision.evaluation.output_files import write_bytes, write_json
from diffvision.inspection import inputs
from diffvision.inspection.inspection_page import draw
from diffvision.inspection.mean_numbers import as_json
from diffvision.inspection.measurements import Measurement, measure_image, measure_text
from diffvision.models.weight_files import check_free, written_whole
from diffvision.opening import Model, open_model, split_label
from diffvision.opening.model import KINDS
from diffvision.progress import bar

MOST = 8  # pictures, and captions or texts


def inspect_models(
    models: Sequence[Model],
    pictures: Sequence[inputs.Picture],
    passages: Sequence[inputs.Passage],
    output: str | Path,
) -> None:
    """Look inside models that are open already, such as adapted ones, as `inspect` does.

    Args:
        models: one or two of one kind, with different names.
        pictures: for models of images; each with its captions, or with all passages where it has none.
        passages: captions or texts, from `inputs.read_captions` or `inputs.read_passages` with the first's tokenizer.
        output: as `inspect`.

    Raises:
        ValueError: models without attention that can be captured; a folder that exists.
    """
    folder = Path(output)
    check_free(folder)
    for model in models:
        check_model(model)
    transformed = {
        one.name: {picture.name: inputs.transform_picture(picture, one.transform) for picture in pictures}
        for one in models
        if one.transform is not None
    }
    by_title = {passage.name: passage for passage in passages}
    measurements = {one.name: _measure(one, pictures, by_title, transformed.get(one.name, {})) for one in models}
    sections, files = draw(measurements, transformed, by_title)
    title = " and ".join(one.name for one in models)
    page = html_page(f"Inside of {title}", _lead(models), sections, "Written by `diffvision inspect`.")
    with written_whole(folder) as made:
        for name, content in {**files, "index.html": page.encode()}.items():
            write_bytes(made / name, content)
        names = sorted([*files, "index.html"])
        write_json(made / "statistics.json", {"files": names, "models": as_json(measurements)})
    print(f"{folder / 'index.html'}: {title}; {len(files)} pictures and statistics.json next to it")


def _measure(
    model: Model,
    pictures: Sequence[inputs.Picture],
    passages: Mapping[str, inputs.Passage],
    transformed: Mapping[str, inputs.TransformedPicture],
) -> list[Measurement]:
    """Measure one model on every image and passage."""
    measurements = []
    with bar(f"inspecting {model.name}", len(pictures) + len(passages)) as advance:
        for picture in pictures:
            captions = [passages[name] for name in picture.captions or passages] if model.tokenizer is not None else []
            measurements.append(measure_image(model.module, transformed[picture.name], picture.name, captions))
            advance(1)
        for passage in passages.values():
            measurements.append(measure_text(model.module, passage, "text" if model.is_language else "caption"))
            advance(1)
    return measurements


def _lead(models: Sequence[Model]) -> str:
    kinds = [
        f"{one.name} is {KINDS[one.library]} of {sum(p.numel() for p in one.module.parameters()):,} parameters"
        f"{one.average_note}"
        for one in models
    ]
    return "; ".join(kinds) + "."


# ---- the models ----------------------------------------------------------------------------------------------------


def open_models(
    model: str, checkpoint: str | None = None, versus: str | None = None, *, tokenizer: str | None, device: str
) -> list[Model]:
    """Open one model, or two of one kind, with different names.

    Raises:
        FileNotFoundError, ValueError: as `open_model`.
        ValueError: a checkpoint with two models, models of two kinds, or a model twice.
    """
    if versus is not None and checkpoint is not None:
        raise ValueError(f"checkpoint is {checkpoint!r}, and two models are given: name each by its file")
    if versus == model:
        raise ValueError(f"versus is the model itself, {model}: give another, or another checkpoint")
    models = [_open(spec, checkpoint, tokenizer, device) for spec in (model, versus) if spec is not None]
    if len({one.name for one in models}) < len(models):
        models = [
            dataclasses.replace(one, name=f"{one.name} {letter}") for one, letter in zip(models, "AB", strict=True)
        ]
    if len({KINDS[one.library] for one in models}) > 1:
        kinds = " and ".join(f"{one.name} is {KINDS[one.library]}" for one in models)
        raise ValueError(f"{kinds}: compare models of one kind")
    return models


def _open(spec: str, checkpoint: str | None, tokenizer: str | None, device: str) -> Model:
    """Open a model with its label and the tokenizer that reads its text."""
    label, rest = split_label(spec)
    opened = open_model(rest, checkpoint, tokenizer=tokenizer, device=device)
    if opened.is_language:
        if opened.for_text().tokenizer is None:
            raise ValueError(f"{spec} came without a tokenizer, which reads the text: give --tokenizer")
        return dataclasses.replace(opened, name=label)
    return dataclasses.replace(opened, name=label if rest != spec else opened.name.rpartition("/")[2])


def check_model(model: Model) -> None:
    """Raise a ValueError, before any work, if there is no attention in a model to look at."""
    try:
        check_attention(model.module)
    except ValueError as error:
        raise ValueError(f"{model.name}: {error}") from None
    if model.transform is not None:
        image_trunk(model.module)


# ---- inputs --------------------------------------------------------------------------------------------------------


def as_list(given: str | list[str] | None) -> list[str]:
    """Return an argument as a list: of none, one or several values."""
    return [] if given is None else [given] if isinstance(given, str) else given


def check_counts(pictures: Sequence[str], texts: Sequence[str]) -> None:
    """Raise a ValueError for more images or texts than a page shows, or for one given twice."""
    for what, many in (("images", pictures), ("texts", texts)):
        if len(many) > MOST or len(set(many)) < len(many):
            raise ValueError(f"{what} must be at most {MOST} different ones, got {len(many)}")


def pictures_and_passages(
    models: Sequence[Model],
    pictures: list[inputs.Picture],
    texts: list[str],
    answers: list[str],
) -> tuple[list[inputs.Picture], list[inputs.Passage]]:
    """Return the inputs that fit the models, as given or made here; ValueError if those given do not fit."""
    first = models[0]
    if first.transform is None:
        if pictures:
            raise ValueError(f"images are given, and {first.name} is a language model: give texts")
        if answers and not texts:
            raise ValueError("answers are given without texts: give --text")
        if not texts:
            return [], _same_for_all([inputs.sample_passage(one.tokenizer, one.max_length)] for one in models)
        return [], _same_for_all(inputs.read_passages(texts, answers, one.tokenizer, one.max_length) for one in models)
    if answers:
        raise ValueError(
            f"answers need texts of a language model, and {first.name} is {KINDS[first.library]}: leave them out"
        )
    if first.tokenizer is None and texts:
        raise ValueError(f"texts are given, and {first.name} is an image model, which reads none: give images alone")
    is_sample = not pictures
    pictures = pictures or inputs.sample_pictures(None if texts else first.tokenizer)
    if first.tokenizer is None:
        return pictures, []
    captions = [caption for picture in pictures for caption in picture.captions]
    texts = texts or captions
    if not is_sample or texts != captions:
        pictures = [inputs.Picture(one.name, one.image, one.region) for one in pictures]
    return pictures, _same_for_all(inputs.read_captions(texts, one.tokenizer) for one in models)


def _same_for_all(passages: Any) -> list[inputs.Passage]:
    """Return the first model's passages; ValueError if another model has different tokens for a text."""
    first, *others = passages
    for other in others:
        if any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(first, other, strict=True)):
            raise ValueError("the two models have different tokens for the text: compare models of one tokenizer")
    return first
