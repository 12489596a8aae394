"""Eight bits: a quantised model as a file, which `diffvision evaluate` and `language.load` take like any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from diffvision.evaluation.loading import PREPROCESS
from diffvision.models import int8, language
from diffvision.models.architecture import metadata

if TYPE_CHECKING:
    from diffvision.export.command import Options
    from diffvision.export.source import Source


def write_int8(source: Source, destination: Path, options: Options) -> None:
    """The format "int8": a .safetensors file to be loaded as the checkpoint of the model's name; of text, a folder.

    Raises:
        ValueError: torchao is not installed; a destination of another name.
    """
    if source.host == "language":
        model: Any = int8.quantise(source.model)
        language.save(model, destination, options.tokenizer or language.find_tokenizer(source.path))
        return
    if destination.suffix != ".safetensors":
        raise ValueError(f"destination {destination.name} is to be one file: let its name end in .safetensors")
    state = int8.split(int8.quantise(source.model).state_dict())
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    model_cfg = source.config if source.host == "open_clip" else None
    save_file(plain, destination, metadata=metadata(source.model, model_cfg, _about(source)))


def _about(source: Source) -> dict[str, Any]:
    """What `load` wants of a file: as a training run writes it down."""
    about: dict[str, Any] = {} if source.path.is_dir() else {"model": source.name}  # a folder's model goes by its path
    if source.host == "timm":
        return about | {"preprocess": source.preprocess, "model_args": source.config}
    return about | {"preprocess": {key: source.preprocess[key] for key in PREPROCESS if key in source.preprocess}}
