"""`diffvision compare`: compare models. The steps are in `comparing`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from diffvision.evaluation.options import Options, Precision

if TYPE_CHECKING:
    from diffvision.comparison.result import Comparison

ENDINGS = (".html", ".json")  # of the files that are written


def compare(
    models: str | list[str],
    *,
    data: str | list[str] | None = None,
    tasks: str | list[str] | None = None,
    output: str | list[str] | None = None,
    cache: str | None = None,
    rounds: int = 5,
    batch_size: int = 64,
    num_workers: int = 2,
    device: str = "auto",
    precision: Precision = "fp32",
    options: Options = Options(),  # noqa: B008  frozen
) -> Comparison:
    """Compare two or more models of one kind: metrics with intervals of their differences, cost, curves and lambda.

    Prints tables. Differences are from the first model. Runs that differ only in their seeds are one model, with mean
    and standard deviation.

    Args:
        models: directories of training runs (their best checkpoint, or the last), checkpoints, folders of models and
            names, one after the other, as `diffvision.open_model` takes them; LABEL= before one names it in tables.
        data: evaluation folders, or folders that hold some (a list, or separated by commas); text for language models.
            By default what the runs were evaluated on.
        tasks: zero_shot, retrieval, composition, classification and the other evaluations of `diffvision evaluate`;
            by default those that fit. Language models are compared by perplexity.
        output: files to write: .html for a page with figures, .json (a list, or separated by commas).
        cache: folder that stores features, as for `diffvision evaluate`.
        rounds: how often each model's speed is measured; 0 for no speed.
        batch_size: images per batch.
        num_workers: processes that read and decode images.
        device: auto, cpu, cuda, cuda:1, ...
        precision: fp32, bf16 or fp16.
        options: the evaluations' settings.

    Raises:
        ValueError, FileNotFoundError: one model only; models of several kinds, or with one label; no data; an output
            of another ending.
    """
    from diffvision.comparison.comparing import compare_models
    from diffvision.comparison.comparison_page import write
    from diffvision.evaluation.distributed import resolve_device
    from diffvision.evaluation.options import InferenceSettings
    from diffvision.evaluation.output_files import bar, check_folder, split_names
    from diffvision.opening.specs import as_text
    from diffvision.tables import show

    outputs = _outputs(output, ENDINGS)
    if cache is not None:
        check_folder(cache, "cache")
    if rounds < 0:
        raise ValueError(f"rounds must be 0 for no speed, or how often it is measured, got {rounds}")
    device = resolve_device(device)
    comparison = compare_models(
        [models] if isinstance(models, str) else [as_text(model) for model in models],
        None if data is None else split_names(data),
        None if tasks is None else split_names(tasks),
        InferenceSettings(batch_size, num_workers, device, precision, bar, cache),
        options,
        rounds,
    )
    show(comparison.show, data=comparison.to_dict())
    for name in outputs:
        write(comparison, name)
        print(f"written: {name}")
    return comparison


def _outputs(output: str | list[str] | None, endings: Iterable[str]) -> list[str]:
    """Return the files to write; raise a ValueError, before any work, for one that cannot be written."""
    from diffvision.evaluation.output_files import check_file, split_names

    names = [] if output is None else split_names(output)
    for name in names:
        if Path(name).suffix not in endings:
            raise ValueError(f"output must end in {', '.join(endings)}, which decides what is written, got {name}")
        check_file(name)
    return names
