"""`diffvision evaluate`: one or several models on any number of folders. What is measured is in `suite`."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffvision.evaluation.options import Options, Precision

if TYPE_CHECKING:
    from diffvision.opening import Model

    OneModel = str | Path | Model
    Models = OneModel | Sequence[OneModel]
    Texts = str | Path | Sequence[str | Path]
else:  # what a command line can give
    Models = Texts = str | list[str]


def evaluate(
    model: Models,
    data: Texts,
    *,
    checkpoint: str | None = None,
    tasks: Texts | None = None,
    classnames: Texts | None = None,
    templates: Texts | None = None,
    output: str | None = None,
    cache: str | None = None,
    batch_size: int = 64,
    num_workers: int = 2,
    device: str = "auto",
    precision: Precision = "fp32",
    preprocess: dict[str, Any] | None = None,
    options: Options = Options(),  # noqa: B008  frozen
) -> dict[str, Any]:
    """Evaluate a model on folders, print a table and write records as CLIP_benchmark does.

    Several models have a column each; `diffvision compare` adds intervals of their differences. Under torchrun the
    images are shared among the processes.

        metrics = diffvision.evaluate("runs/CLIP-debug/version_0/checkpoints/best.ckpt", "data/digits")
        metrics["zero_shot/digits/acc1"]

    Args:
        model: the directory of a training run or a .ckpt of it, the folder of a model, or a name of OpenCLIP's or
            timm's, ours or any other (`diffvision.open_model` lists all forms). timm's models are for
            classification and the probes.
            Several models may be given, each with an optional LABEL= before it. In Python also an opened
            diffvision.Model, such as Model("mine", "open_clip", module, transform=..., tokenizer=...).
        data: evaluation folders, folders that hold some, shards, or images (a list, or separated by commas).
        checkpoint: a file of weights (OpenCLIP's, timm's or a training run's), for a name without a tag.
        tasks: zero_shot, retrieval, composition, pairs, objects, classification (by its classifier), linear_probe,
            few_shot (fewshot_k and fewshot_episodes), as a list or separated by commas; each runs on the folders that
            it fits. By default the first five.
        classnames: names of the classes in prompts, instead of the data's: imagenet, or a file with a name per line.
            Classes named by numbers are sorted by number. Folders named by ImageNet's wnids have its names without it.
        templates: of prompts, instead of the data's: one with {c} where the class name belongs, imagenet for its 80, a
            file with one per line, or a list.
        output: a file ending in .json for all records in a list; otherwise a folder, with one file per record named as
            CLIP_benchmark names them.
        cache: folder that stores the features of each split, of unlimited size; later evaluations of the same model
            and images read them.
        batch_size: images per batch.
        num_workers: processes that read and decode images.
        device: auto, cpu, cuda, cuda:1, ...; auto is the device of an opened model.
        precision: fp32, bf16 or fp16.
        preprocess: mean, std, interpolation, resize_mode where they differ from the model's.
        options: the evaluations' settings.

    Returns:
        {metric: value} of one model; {label: {metric: value}} of a list of models.

    Raises:
        FileNotFoundError, ValueError: the model or data do not exist or do not fit together; two models have one
            label.
        TypeError: the model is of another kind.
    """
    from diffvision.evaluation.distributed import process_group, rank_and_world
    from diffvision.evaluation.features import Features
    from diffvision.evaluation.options import InferenceSettings
    from diffvision.evaluation.output_files import bar, check_folder, split_names
    from diffvision.evaluation.per_sample import means
    from diffvision.evaluation.prompts import check_prompts
    from diffvision.evaluation.suite import check_output, measure, plan_data, report
    from diffvision.models.threads import limit_threads
    from diffvision.opening import Model, check_spec, open_model
    from diffvision.opening.specs import as_text

    if output is not None:
        check_output(output)
    if cache is not None:
        check_folder(cache, "cache")
    checkpoint = None if checkpoint is None else as_text(checkpoint)
    several: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    specs = [_label_model(one) for one in several]
    opened = [spec for _, spec in specs if isinstance(spec, Model)]
    if opened and (checkpoint is not None or preprocess is not None):
        raise ValueError(f"{opened[0].name} is open already: give checkpoint and preprocess to open_model")
    if opened and device == "auto":
        device = str(opened[0].device)
    for _, spec in specs[1:]:
        if isinstance(spec, str):
            check_spec(spec)  # before the first is evaluated
    _check_models([label for label, _ in specs], checkpoint)
    options = replace(
        options,
        classnames=_as_texts(classnames) or options.classnames,
        templates=_as_texts(templates) or options.templates,
    )
    planned = plan_data(split_names(data), None if tasks is None else split_names(tasks), options)
    prompts = check_prompts(planned, options)
    results: dict[str, dict[str, float]] = {}
    described: dict[str, tuple[str, str, str]] = {}
    with process_group(device) as device:
        if rank_and_world()[0] == 0:
            for line in (*_sources(planned, options.split), *prompts):
                print(line, flush=True)
        settings = InferenceSettings(batch_size, num_workers, device, precision, bar, cache)
        for label, spec in specs:
            if isinstance(spec, Model):
                one, spec = spec.for_images(), str(spec.path or spec.name)
                weights = None if one.path else one.weights
            else:
                weights = checkpoint
                one = open_model(spec, checkpoint, preprocess=preprocess, device=device).for_images()
            results[label] = {}
            _warn_of_training(one, planned, options.split)
            with limit_threads(device, one.module):
                for folder, names in planned:
                    features = Features(one.module, one.transform, one.tokenizer, settings)
                    results[label] |= means(measure(features, folder, names, options))
            described[label] = _describe(one, spec, weights)
        if rank_and_world()[0] == 0:
            report(results, described, output)
    return results if isinstance(model, list | tuple) else next(iter(results.values()))


def _label_model(model: Any) -> tuple[str, Any]:
    """Return the label of a model, and the model: a spec, or opened already."""
    from diffvision.opening import Model, split_label
    from diffvision.opening.specs import as_text

    if isinstance(model, Model):
        return model.name, model
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a name, a path or a diffvision.Model, got an object of {type(model).__name__}")
    return split_label(as_text(model))


def _as_texts(given: Any) -> str | list[str] | None:
    return str(given) if isinstance(given, str | Path) else given and list(given)


def _describe(model: Any, spec: str, checkpoint: str | None) -> tuple[str, str, str]:
    """Return the names of a model and its weights for records, and both in words.

    A file of weights, or a tag, is recorded as the checkpoint of its model's name.
    """
    name, weights = spec, checkpoint or ""
    is_file = model.path is not None and model.path.is_file()
    if checkpoint is None and (is_file or spec == f"{model.name}.{model.weights}"):
        name, weights = model.name, model.weights
    words = weights or ("untrained weights" if model.weights is None else "the model's weights")
    return name, weights, f"{name}, {words}{model.average_note}"


def _sources(planned: Any, split: str) -> list[str]:
    """Return one line for each folder of images or shards that is read in place: which images are evaluated."""
    from diffvision.data.images.folders import ImageEvaluationFolder

    folders = [folder for folder, _ in planned if isinstance(folder, ImageEvaluationFolder)]
    return [f"evaluating on {images.source}: {len(images):,} images" for images in (f.images(split) for f in folders)]


def _warn_of_training(model: Any, planned: Any, split: str) -> None:
    """Warn where a folder is, by the configuration of the model's run, what the model was trained on."""
    from diffvision.data.images.folders import ImageEvaluationFolder
    from diffvision.opening.run_folders import run_config, setting

    train = setting(run_config(model.run), "data.init_args.train")
    trained = {os.path.realpath(path) for path in (train if isinstance(train, list) else [train]) if path}
    for folder, _ in planned:
        may_be_divided = isinstance(folder, ImageEvaluationFolder)
        # Of images that are divided, training reads the part for it.
        measured = folder.path if may_be_divided else folder.files(split)[0]
        is_divided = may_be_divided and split != "train" and "train" in folder.splits
        if os.path.realpath(measured) in trained and not is_divided:
            warnings.warn(
                f"{measured} is what {model.name} was trained on: its metrics say nothing about other pictures",
                stacklevel=3,
            )


def _check_models(labels: list[str], checkpoint: str | None) -> None:
    if checkpoint is not None and len(labels) > 1:
        raise ValueError(f"checkpoint is {checkpoint!r}, and {len(labels)} models are given: name each by its file")
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"two models are named {label!r}: write LABEL=MODEL to distinguish them")
