"""Lazy imports: names of a package that are imported when they are first used.

PyTorch, timm and the like take seconds to import, so packages that the command line imports use this.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str | None]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, which import a name when it is first used.

    Args:
        package: the package's `__name__`.
        modules: name -> the module inside the package that defines it; None where the name is a module itself.
    """

    def get(name: str) -> Any:
        """Import what a name stands for, and keep it in the package."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = modules[name]
        if module is None:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(f"{package}.{module}"), name)
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted(vars(sys.modules[package])["__all__"])
