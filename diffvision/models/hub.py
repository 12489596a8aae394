"""Models on the Hugging Face Hub as folders: huggingface_hub downloads what is read of them to its cache.

Neither pickles nor code are downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffvision.models.weight_files import FOLDER

HUGGING_FACE = "hf:"
"""The prefix of a model in transformers' layout: a folder, or an id on the Hugging Face Hub."""

HUB = "hf-hub:"
"""The prefix of the id of an OpenCLIP or timm model on the Hugging Face Hub."""

_FILES = (
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "model*.safetensors",
    "open_clip_model.safetensors",
    "*/model.safetensors",
)


def local(spec: str | Path) -> Path:
    """Return the file or folder that a model's string stands for: `hf:ID` and `hf-hub:ID` are downloaded.

    Args:
        spec: a path, with or without `local-dir:` or `hf:` before it, or an id on the Hub after `hf:` or `hf-hub:`.

    Raises:
        FileNotFoundError: there is no such folder, and the Hub has no such model or cannot be reached.
    """
    text = str(spec)
    name = text.removeprefix(HUGGING_FACE).removeprefix(HUB).removeprefix(FOLDER)
    if text.startswith((HUGGING_FACE, HUB)) and not Path(name).exists():
        return snapshot(name)
    return Path(name)


def snapshot(repository: str, files: Sequence[str] = _FILES) -> Path:
    """Return the folder with the files of a repository on the Hub, in huggingface_hub's cache.

    Args:
        repository: OWNER/NAME.
        files: names or patterns of the files that are downloaded.

    Raises:
        FileNotFoundError: there is no such repository, or the Hub cannot be reached and it is not in the cache.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(files)))
    except Exception as error:  # raised by huggingface_hub, its HTTP client or the operating system
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"no folder {repository}, and no such model on the Hub ({first}): correct the id, run `hf auth login`, "
            "or give a folder"
        ) from error
