"""The export of a model with eight-bit weights, which `diffvision evaluate` and `language.load` open like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from diffvision.export.formats import Options
from diffvision.models import int8, language
from diffvision.models.architecture import metadata
from diffvision.opening import Model
from diffvision.opening.weights import PREPROCESS


def write_int8(model: Model, destination: Path, options: Options) -> None:
    """Write the format "int8": a .safetensors file that records its model; for a language model, a folder.

    Raises:
        ValueError: torchao is not installed, or the destination of an image model does not end in .safetensors.
    """
    if model.host == "language":
        quantised: Any = int8.quantise(model.module)
        language.save(quantised, destination, options.tokenizer or language.find_tokenizer(str(model.weights)))
        return
    if destination.suffix != ".safetensors":
        raise ValueError(f"destination {destination.name} must be a file: give a name that ends in .safetensors")
    state = int8.split(int8.quantise(model.module).state_dict())
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    model_cfg = model.config if model.host == "open_clip" else None
    save_file(plain, destination, metadata=metadata(model.module, model_cfg, _about(model)))


def _about(model: Model) -> dict[str, Any]:
    """Return what `open_model` reads in a file, as a training run records it. A folder's model goes by its path."""
    about: dict[str, Any] = {} if model.path is not None and model.path.is_dir() else {"model": model.name}
    if model.host == "timm":
        return about | {"preprocess": model.preprocess, "model_args": model.config}
    return about | {"preprocess": {key: model.preprocess[key] for key in PREPROCESS if key in model.preprocess}}
