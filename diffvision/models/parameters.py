"""`diffvision models`: our models' names and parameters, read from parameters.json so that nothing is built.

After a model is added or changed, write the table again: `python -m diffvision.models.parameters`.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from diffvision.models.names import TABLE, recorded


def models(filter: str = "*") -> None:
    """Print our models, for timm, OpenCLIP, text, and image and text, with their parameters.

    Args:
        filter: shell pattern, e.g. "diff_vit_base*", "DiffCLIP*" or "*-3b".
    """
    from rich.table import Table

    from diffvision.errors import nearest
    from diffvision.tables import show

    counts = recorded()
    rows = [
        (name, library, counts[library][name])
        for library in counts
        for name in counts[library]
        if fnmatch(name, filter)
    ]
    if not rows:
        near = nearest(filter.strip("*"), [name for library in counts for name in counts[library]], 3, min_ratio=0.5)
        remedy = f"the nearest names are {', '.join(near)}" if near else "leave the pattern out to see all"
        raise ValueError(f"none of our models matches {filter!r}: {remedy}")
    table = Table("model", "library", "parameters")
    for name, library, parameters in rows:
        table.add_row(name, library, f"{parameters:,}")
    show(table, data=[dict(zip(("model", "library", "parameters"), row, strict=True)) for row in rows])


def names() -> dict[str, list[str]]:
    """Return library -> the names of our models."""
    from diffvision.models import clip, language, vision_language, vit

    images = {"timm": vit.model_names(), "OpenCLIP": clip.model_names()}
    return {**images, "text": language.model_names(), "image and text": list(vision_language.NAMES)}


def build_on_meta(library: str, name: str) -> Any:
    """Build a model of the table on the meta device, where it takes no memory."""
    import open_clip
    import timm
    import torch

    from diffvision.models import language

    with torch.device("meta"), _quiet():
        if library == "timm":
            return timm.create_model(name)
        if library == "image and text":
            from diffvision.models import vision_language

            return vision_language.create(name)
        if library == "OpenCLIP":
            return open_clip.create_model(name, device="meta")
        return language.create(name)


def count_parameters(library: str, name: str) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in build_on_meta(library, name).parameters())


def write() -> None:
    """Count the parameters of all models, and write the table."""
    counts = {
        library: {name: count_parameters(library, name) for name in listed} for library, listed in names().items()
    }
    TABLE.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence, within the context, OpenCLIP's warning that a model is built without weights."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    write()
