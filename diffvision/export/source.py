"""What is to be written: a model, loaded once, and all that is known of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from diffvision.evaluation.loading import load, read_checkpoint
from diffvision.models import int8, language
from diffvision.models.files import FOLDER, read_json, refuse_urls

Host = Literal["open_clip", "timm", "language"]


@dataclass(frozen=True)
class Source:
    """A model in evaluation mode and what belongs to it.

    Attributes:
        path: what it was read from.
        host: whose model it is: OpenCLIP's, timm's, or ours for text.
        name: of the model at its host.
        config: what the host builds it of: OpenCLIP's model_cfg, timm's model_args, `LanguageConfig`'s fields.
        preprocess: of images, as the host keeps it; empty for text.
        transform: PIL image -> tensor [3, h, w]; None for text.
        tokenizer: captions -> int64 [B, L] of an OpenCLIP model; else None.
        run: directory of the training run, with its config.yaml and metrics.csv, if the model is of one.
    """

    path: Path
    host: Host
    name: str
    model: nn.Module
    config: dict[str, Any]
    preprocess: dict[str, Any] = field(default_factory=dict)
    transform: Callable[..., Any] | None = None
    tokenizer: Callable[..., Any] | None = None
    run: Path | None = None


def read_source(path: str | Path, model: str | None = None) -> Source:
    """The model of a training checkpoint, of a folder, or of a plain file of weights with the model's name.

    Raises:
        FileNotFoundError: nothing there. ValueError: a folder without a configuration, a file that does not say what
            it is of, weights that do not fit or are not finite, a pickle with more than tensors and plain values.
    """
    path = str(path).removeprefix(FOLDER)  # as the hosts call a folder
    refuse_urls(path, "source")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}: give a training checkpoint, or the folder of a model")
    found = _folder(path, model) if path.is_dir() else _file(path, model)
    int8.refuse(found.model.state_dict(), str(path))
    refuse_not_finite(found.model, str(path))
    return found


def refuse_not_finite(model: nn.Module, what: str) -> None:
    """ValueError for weights that are NaN or infinite, as half precision makes of what is above 65,504."""
    wrong = {
        name: value
        for name, value in model.state_dict().items()
        if value.is_floating_point() and not torch.isfinite(value).all()
    }
    if wrong:
        name, value = next(iter(wrong.items()))
        raise ValueError(
            f"{len(wrong)} tensors of {what} are not finite, the first {name} ({value.dtype}): a run that diverged, or "
            "values above half precision's 65,504; take an earlier checkpoint, or save the weights in float32"
        )


def _folder(path: Path, model: str | None) -> Source:
    if model is not None:
        raise ValueError(f"model is {model!r}, but {path} is a folder, which says its own: leave model out")
    if (path / "checkpoints").is_dir():
        there = ", ".join(sorted(file.name for file in (path / "checkpoints").glob("*.ckpt"))) or "none"
        raise ValueError(f"{path} is the directory of a run: give one of the files in its checkpoints/ ({there})")
    config = _config(path)
    if config.get("diffvision") == "language":
        return _language(path)
    if config.get("model_type") == "diff_transformer":
        return _hugging_face(path)
    return _loaded(path, f"{FOLDER}{path}", None)


def _file(path: Path, model: str | None) -> Source:
    name = model or read_checkpoint(path).about.get("model")
    if not isinstance(name, str):
        raise ValueError(f"{path} holds weights, and does not say of which model: name it with --model")
    return _language(path, name) if name in language.model_names() else _loaded(path, name, path)


def _loaded(path: Path, name: str, checkpoint: Path | None) -> Source:
    """Of OpenCLIP or timm."""
    found = load(name, checkpoint)
    pretrained_cfg: Any = getattr(found.model, "pretrained_cfg", None)
    host: Host = "open_clip" if pretrained_cfg is None else "timm"
    own = Path(name).name if name.startswith(FOLDER) else name
    return Source(
        path=path,
        host=host,
        name=own if pretrained_cfg is None else pretrained_cfg["architecture"],
        model=found.model,
        config=found.config,
        preprocess=found.preprocess,
        transform=found.transform,
        tokenizer=found.tokenizer,
        run=_run(path),
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def _language(path: Path, name: str | None = None) -> Source:
    return _text(path, language.load(path), name, None if path.is_dir() else _run(path))


def _hugging_face(path: Path) -> Source:
    """A language model of ours as transformers' folder."""
    transformers = hugging_face_classes()
    return _text(
        path, transformers.DiffTransformerForCausalLM.from_pretrained(path, local_files_only=True).to_diffvision()
    )


def hugging_face_classes() -> Any:
    """The module `diffvision.models.language.transformers`; ValueError without the packages that it needs."""
    try:
        return importlib.import_module("diffvision.models.language.transformers")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("diffvision"):
            raise
        raise ValueError(f"huggingface needs {error.name}: pip install 'diffvision[hf]'") from None


def _text(path: Path, model: Any, name: str | None = None, run: Path | None = None) -> Source:
    own = {"vocab_size": model.config.vocab_size, "max_length": model.config.max_length}
    known = (known for known in language.model_names() if language.config(known, **own) == model.config)
    return Source(path, "language", name or next(known, path.name), model, dataclasses.asdict(model.config), run=run)


def _run(path: Path) -> Path | None:
    """The directory of the run that a checkpoint lies in: its own, or the one above, where Lightning writes it."""
    above = path.resolve().parents[:2] if path.is_file() else ()
    return next((folder for folder in above if (folder / "config.yaml").is_file()), None)
