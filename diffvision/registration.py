"""Registration of our models with timm, OpenCLIP and transformers, once they are imported.

None of them has plugins, and all of them take seconds to import. The modules in `MODULES` register the models when they
are imported.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "timm": ("diffvision.models.vit", "diffvision.models.adapted"),
    "open_clip": ("diffvision.models.clip",),
    "transformers": ("diffvision.models.language.modeling_diffllama_v2",),
    "transformers.models.auto.configuration_auto": ("diffvision.models.transformers_names",),
}
"""host -> our modules that register models with it; they import that host and `diffvision.nn`, and no other host."""


def register(host: str) -> None:
    """Register our models with a host: at once if the host is imported, else right after its first import.

    A second call has no effect.

    Args:
        host: a key of `MODULES`.
    """
    if sys.modules.get(host) is not None:
        _import_ours(host)
    elif not any(isinstance(finder, AfterHost) and finder.host == host for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterHost(host))


def _import_ours(host: str) -> None:
    for name in MODULES[host]:
        import_module(name)


class AfterHost(MetaPathFinder):
    """Import hook that registers our models with a host right after the host's first import.

    Searching for the host without importing it, as `importlib.util.find_spec` does, has no effect.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._state = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the host's module as usual, and register our models once it is imported."""
        if fullname != self.host or getattr(self._state, "searching", False):
            return None
        self._state.searching = True
        try:
            spec = _find(fullname, path, target)
        finally:
            self._state.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = RegisteringLoader(spec.loader, self._register)
        return spec

    def _register(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            _import_ours(self.host)
        except ImportError as error:  # the host is too old for us: its import must still succeed
            warnings.warn(f"diffvision's models are not registered with {self.host}: {error}", stacklevel=2)


def _find(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return the spec that Python's finders give."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None


class RegisteringLoader(Loader):
    """A host's loader, followed by a call. The host sees its usual loader."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()
