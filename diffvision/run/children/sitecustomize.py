"""Registers our models in the Python processes that a program under `diffvision run` starts.

Python imports a module of this name when it starts. `diffvision.run` puts this folder on PYTHONPATH, which child
processes inherit. Nothing is imported here: the first import of timm, OpenCLIP or transformers is followed by ours.
"""

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec

REGISTERS = {"timm": "diffvision", "open_clip": "diffvision", "transformers": "diffvision.models.language.transformers"}


class AfterHosts:
    """Finds a host as Python would, and imports our side once the host, and any host that imports it, is complete."""

    def __init__(self) -> None:
        self.waiting = dict(REGISTERS)
        self.importing = 0
        self.due: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.due.append(self.waiting.pop(name))
        spec = find_spec(name)  # this finder no longer answers to the name
        if spec is not None and spec.loader is not None:
            complete = spec.loader.exec_module

            def exec_module(module: object) -> None:
                self.importing += 1
                try:
                    complete(module)  # type: ignore[arg-type]
                finally:
                    self.importing -= 1
                if not self.importing:
                    self.register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        while self.due:
            with contextlib.suppress(ImportError):  # another Python, without diffvision, or an old transformers
                __import__(self.due.pop())


def next_sitecustomize() -> None:
    """Runs the sitecustomize.py that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, AfterHosts())
next_sitecustomize()
