"""`diffvision.evaluate`: the `evaluate` command for scripts and notebooks. What it runs is in `command`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffvision.opening import Model


def evaluate(
    model: str | Path | Model | Sequence[str | Path | Model],
    data: str | Path | Sequence[str | Path],
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate image models as `diffvision evaluate` does: print a table, and return the metrics.

        metrics = diffvision.evaluate("runs/clip_debug/version_0/checkpoints/best.ckpt", "data/digits")
        metrics["zero_shot/digits/acc1"]

    Args:
        model: a name, a path or another spec of `diffvision.open_model`, or a model that it has opened; a list of
            several. A module that was built elsewhere is given with what belongs to it:
            diffvision.Model(name="mine", host="open_clip", module=module, transform=transform, tokenizer=tokenizer).
        data: evaluation folders, or folders that hold some, or images as they lie on the disk.
        **settings: the options of the command: tasks="linear_probe,few_shot", checkpoint, output, cache, blind (a spec,
            or a model that is open), batch_size=64, num_workers=2, device="auto", precision="fp32", preprocess,
            options=diffvision.evaluation.Options(...).

    Returns:
        {metric: value}; of a list of models {label: {metric: value}}.

    Raises:
        FileNotFoundError, ValueError: there is no such model or data, or they do not fit together.
        TypeError: the model is of another kind, or a setting is unknown.
    """
    from diffvision.evaluation.command import run
    from diffvision.opening import Model

    several = list(model) if isinstance(model, list | tuple) else [model]
    for one in several:
        if not isinstance(one, str | Path | Model):
            raise TypeError(
                f"model is an object of {type(one).__name__}: give a name or a path, or the module with its transform "
                "as diffvision.Model(name=..., host=..., module=..., transform=..., tokenizer=...)"
            )
    opened = [one for one in several if isinstance(one, Model)]
    if opened and (given := {"checkpoint", "preprocess"} & settings.keys()):
        raise ValueError(f"{opened[0].name} is open already: give {' and '.join(sorted(given))} to open_model")
    if opened:  # where it is
        settings = {"device": str(next(opened[0].module.parameters()).device)} | settings
    specs: list[Any] = [one if isinstance(one, Model) else _spec(one) for one in several]
    return run(specs if isinstance(model, list | tuple) else specs[0], data=data, **settings)  # type: ignore[arg-type]


def _spec(model: Any) -> str:
    """Return what `open_model` takes; a Path is a path, even if a model has its name."""
    is_bare = isinstance(model, Path) and len(model.parts) == 1
    return f"./{model}" if is_bare else str(model)
