"""`diffvision interpolate`: WiSE-FT, the weights between those of a pretrained and of a fine-tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffvision.export.finite_weights import open_for_export
from diffvision.export.model_folders import save_folder
from diffvision.models.architecture import architecture, difference
from diffvision.models.checkpoint import differences, few
from diffvision.models.weight_files import check_free
from diffvision.opening import Model
from diffvision.opening.image_models import PREPROCESS


def write_interpolated(pretrained: str, finetuned: str, destination: str, alpha: float) -> None:
    """Write the folder of a model, as `diffvision.export.export_commands.interpolate` describes."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 (the pretrained weights) to 1 (the fine-tuned ones), got {alpha}")
    check_free(target := Path(destination))
    first, second = (open_for_export(spec).for_images() for spec in (pretrained, finetuned))
    states = first.module.state_dict(), second.module.state_dict()
    built, images = zip(*(_described(model) for model in (first, second)), strict=True)
    if unequal := few(differences(*states)) or difference(*built) or difference(*images):
        raise ValueError(f"{finetuned} is not {pretrained} after fine-tuning, with {unequal}: give one model's weights")
    with torch.no_grad():
        for name, end in states[1].items():
            end.copy_(torch.lerp(states[0][name].double(), end.double(), alpha))  # exact at 0 and 1
    origin = {"interpolated": {"pretrained": pretrained, "finetuned": finetuned, "alpha": alpha}}
    save_folder(
        second.module,
        target,
        config=second.config,
        preprocess=second.preprocess,
        tokenizer=second.tokenizer,
        more=origin,
    )
    print(f"wrote {target}: {1 - alpha:.3g} of {pretrained} and {alpha:.3g} of {finetuned}")


def _described(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a model computes beyond its weights: its architecture, and how its images are normalised."""
    images = {name: model.preprocess.get(name) for name in PREPROCESS}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in images.items()}
    return architecture(model.module), {"config": {"preprocess": plain}}
