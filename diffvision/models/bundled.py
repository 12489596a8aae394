"""The small weights that come with the package, by model and tag. `scripts/pretrained/train_bundled.py` trains them."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).parents[1] / "weights"


def bundled(name: str) -> dict[str, Path]:
    """Return tag -> file (of a language model: folder) of a model's weights in the package, empty if there are none.

    They are named MODEL.TAG.safetensors, and MODEL.TAG for the folder of a language model.
    """
    found = {}
    for path in sorted(WEIGHTS.glob(f"{name}.*")):
        tag = path.name.removeprefix(f"{name}.").removesuffix(".safetensors")
        if "." not in tag and (path.is_dir() or path.suffix == ".safetensors"):
            found[tag] = path
    return found
