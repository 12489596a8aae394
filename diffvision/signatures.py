"""Private names that the installed version of a package must have."""

import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any


def missing_names(names: Iterable[str], objects: Mapping[str, Any]) -> list[str]:
    """Return which private names the installed version of a package lacks.

    Args:
        names: such as "trainer.fit_loop._data_fetcher", or with the parameters of a function "saver._save(trainer)".
        objects: by the first part of the names.
    """
    return [name for name in names if not _has(objects, name)]


def _has(objects: Mapping[str, Any], name: str) -> bool:
    """Return whether an object like `Owner.method(arguments)` exists as written."""
    path, is_function, parameters = name.partition("(")
    owner, *members = path.split(".")
    value = objects[owner]
    for member in members:
        if not hasattr(value, member):
            return False
        value = getattr(value, member)
    return not is_function or ", ".join(inspect.signature(value).parameters) == parameters.removesuffix(")")


def require_names(package: str, tested: str, missing: list[str], purpose: str) -> None:
    """Raise ValueError if the installed version of a package lacks names; `tested` are the versions that have them."""
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{package} {version(package)} lacks what {purpose}: install {package}{tested} "
            f"({', '.join(missing[:3])}{more})"
        )
