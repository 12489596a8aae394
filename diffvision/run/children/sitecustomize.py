"""Registers our models in the Python processes that a program under `diffvision run` starts.

Python imports a module of this name when it starts. `diffvision.run` puts this folder on PYTHONPATH, which child
processes inherit. It imports no library of models: ours are registered when the process imports one.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def run_next_sitecustomize() -> None:
    """Run the sitecustomize.py that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


with contextlib.suppress(ImportError, SyntaxError):  # another Python: without diffvision, or too old for it
    from diffvision.registration import register

    register("transformers")
run_next_sitecustomize()
