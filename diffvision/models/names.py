"""Names of models, found before anything heavy is imported, and the error for an unknown one."""

import json
import re
import sys
from collections.abc import Container, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from diffvision.errors import nearest

TABLE = Path(__file__).with_name("parameters.json")

Method = Literal["v2", "dex", "v1"]
"""How a pretrained model is changed: see `adapt`."""


def unknown_model(name: str, beginning: str, known: Iterable[str]) -> ValueError:
    """Return the error for a name that a library does not know, with the three nearest names.

    Args:
        name: the unknown name.
        beginning: the beginning of the message, such as "timm has no" or "neither OpenCLIP nor timm has a".
        known: all names of that library.
    """
    return ValueError(f"{beginning} model {name!r}: the nearest names are {', '.join(nearest(name, known, 3))}")


def is_tag(weights: str | Path, tags: Container[str]) -> bool:
    """Return whether weights are one of a model's tags.

    A tag wins over a file or folder of the same spelling; `./` before it, or a `Path`, makes it a path.
    """
    return isinstance(weights, str) and weights in tags


def names_by_library() -> dict[str, list[str]]:
    """Return open_clip, timm and language, each with the names of its models, ours included.

    An imported library lists them itself, with those that its user has registered. Otherwise its files are read.
    """
    names, ours = {}, recorded()
    names["open_clip"] = _list_registered("open_clip") or [*_files("open_clip"), *ours["OpenCLIP"]]
    names["timm"] = _list_registered("timm") or [*_files("timm"), *ours["timm"], "adapted_vit"]
    return names | {"language": list(ours["text"])}


def _list_registered(library: str) -> list[str]:
    module = sys.modules.get(library)
    return [] if module is None else list(module.list_models())


def recorded() -> dict[str, dict[str, int]]:
    """Return library -> name -> parameters, as recorded in the table."""
    counts: dict[str, dict[str, int]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return counts


@cache
def _files(library: str) -> list[str]:
    """Return the model names that a library's source files define, without importing it."""
    spec = find_spec(library)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()
    if library == "open_clip":
        return [path.stem for path in folder.glob("model_configs/*.json")]
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("models/*.py"))]
    return [name for source in sources for name in re.findall(r"^@register_model\s+def (\w+)\(", source, re.MULTILINE)]


_VIT = re.compile(r"(?!plain|gda)[a-z0-9]+_vit_(.+)")  # the grouped models are smaller than plain ones
_CLIP = re.compile(r"\w+CLIP-(?!GDA)(?:[A-Z0-9]+-)?((?:ViT|debug|nano).*?)(?:-dynamic|-vision|-0\.2)?")


def plain_twin(name: str) -> str:
    """Return the name of the plain model with as many parameters as one of ours.

    Raises:
        ValueError: the model has no plain twin, or is plain itself.
    """
    from diffvision.models.vit import ALIASES

    known, ours = names_by_library(), recorded()
    candidates: list[str] = []
    if name in ours["timm"] and (match := _VIT.fullmatch(ALIASES.get(name, name))):
        shape = match[1].replace("_dynamic", "").replace("_lambda02", "")
        candidates = [f"plain_vit_{shape}", f"vit_{shape}"]
    elif name in ours["OpenCLIP"] and (match := _CLIP.fullmatch(name)):
        candidates = [f"CLIP-{match[1]}"]
    elif name in ours["text"]:
        candidates = [f"transformer-{name.partition('-')[2]}"]
    twin = next((one for one in candidates if any(one in names for names in known.values())), name)
    if twin == name:
        raise ValueError(f"{name} has no plain twin: name the models to compare without --twin")
    return twin


DIFFCLIP_PREPROCESS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "interpolation": "bicubic"}
"""How DiffCLIP's images are preprocessed: normalised by ImageNet's mean and standard deviation."""
