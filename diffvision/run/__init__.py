"""Runs another program, unmodified, with our models registered in timm, OpenCLIP and, if installed, transformers.

    python -m diffvision.run open_clip_train.main --model DiffCLIP-ViT-B-16 ...
    python -m diffvision.run clip_benchmark.cli eval --model DiffCLIP-ViT-B-16 ...
    python -m diffvision.run path/to/train.py --model diff_vit_base ...
    python -m diffvision.run lm_eval --model hf --model_args pretrained=FOLDER ...    (of `diffvision export`)
    torchrun --nproc-per-node 8 -m diffvision.run open_clip_train.main ...

These libraries have no plugin discovery: a program that never imports diffvision does not know its names. Python
processes that the program starts register the models too, through PYTHONPATH (`children/sitecustomize.py`).
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from diffvision.registration import register

__all__ = ["main", "run"]


def run(argv: Sequence[str]) -> None:
    """Run `argv[0]`, a path ending in .py or a module's dotted name, as `__main__` with `argv` as its `sys.argv`.

    Raises:
        SystemExit: no such file or module, or a package that the program needs is not installed.
    """
    register("transformers")  # timm and OpenCLIP are registered by `import diffvision`
    target = argv[0]
    is_file = target.endswith(".py")
    # As `python FILE` and `python -m MODULE` do: the program's folder, or the current one, comes first.
    sys.path.insert(0, os.path.dirname(os.path.abspath(target)) if is_file else os.getcwd())
    if not (os.path.isfile(target) if is_file else _has_module(target)):
        sys.exit(
            f"diffvision: error: no program {target!r}: give a .py file's path, or the name of an installed module"
        )
    sys.argv = list(argv)
    children = os.path.join(os.path.dirname(os.path.abspath(__file__)), "children")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (children, os.environ.get("PYTHONPATH"))))
    try:
        if is_file:
            runpy.run_path(target, run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name is None or _has_module(error.name.partition(".")[0]):
            raise
        sys.exit(
            f"diffvision: error: {target} needs {error.name}, which is not installed: install its requirements in "
            f"an environment of its own, as docs/guides/programs.md says ({error})"
        )


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def main() -> None:
    """Run `python -m diffvision.run`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    run(sys.argv[1:])
