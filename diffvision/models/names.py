"""The error for a model's name that a host does not know."""

from collections.abc import Iterable

from diffvision.mistakes import nearest


def unknown_model(name: str, host: str, known: Iterable[str]) -> ValueError:
    """Return the error to raise for a name that a host does not know, with the three known names nearest to it.

    Args:
        name: as it was given.
        host: who does not have it, such as "timm has no" or "neither OpenCLIP nor timm has a".
        known: all names of that host.
    """
    return ValueError(f"{host} model {name!r}: the nearest names are {', '.join(nearest(name, known, 3))}")
