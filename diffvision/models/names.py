"""The error for names of models that a host does not know."""

from collections.abc import Iterable

from diffvision.mistakes import nearest


def unknown_model(name: str, host: str, known: Iterable[str]) -> ValueError:
    """Return the error for a name that a host does not know, with the three nearest names that it knows.

    Args:
        name: the unknown name.
        host: the beginning of the message, such as "timm has no" or "neither OpenCLIP nor timm has a".
        known: all names of that host.
    """
    return ValueError(f"{host} model {name!r}: the nearest names are {', '.join(nearest(name, known, 3))}")
