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
from importlib.util import find_spec
from types import ModuleType

MODULES = {
    "timm": ("diffvision.models.vit", "diffvision.models.adapted"),
    "open_clip": ("diffvision.models.clip",),
    "transformers": ("diffvision.models.language.modeling_diffllama_v2",),
    "transformers.models.auto.configuration_auto": ("diffvision.models.transformers_names",),
}
"""library -> our modules that register models with it; they import no other library."""


def register(library: str) -> None:
    """Register our models with a library: at once if the library is imported, else right after its first import.

    A second call has no effect.

    Args:
        library: a key of `MODULES`.
    """
    if sys.modules.get(library) is not None:
        _import_ours(library)
    elif not any(isinstance(finder, RegisterAfterImport) and finder.library == library for finder in sys.meta_path):
        sys.meta_path.insert(0, RegisterAfterImport(library))


def _import_ours(library: str) -> None:
    for name in MODULES[library]:
        import_module(name)


class RegisterAfterImport(MetaPathFinder):
    """Import hook that registers our models with a library right after the library's first import.

    Searching for the library without importing it, as `importlib.util.find_spec` does, has no effect.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        self._state = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the library's module as usual, and register our models once it is imported."""
        if fullname != self.library or getattr(self._state, "searching", False):
            return None
        self._state.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._state.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = RegisteringLoader(spec.loader, self._register)
        return spec

    def _register(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            _import_ours(self.library)
        except ImportError as error:  # the library is too old for us: its import must still succeed
            warnings.warn(f"diffvision's models are not registered with {self.library}: {error}", stacklevel=2)


class RegisteringLoader(Loader):
    """A library's loader, followed by a call. The library sees its usual loader."""

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
