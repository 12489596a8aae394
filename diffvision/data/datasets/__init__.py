"""The table of the datasets that `diffvision data make` writes, and a module for each; none downloads anything."""

import ast
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from diffvision.errors import did_you_mean, is_missing
from diffvision.plugins import entry_points

__all__ = ["DATASETS", "datasets", "missing_data"]

TABLE = "datasets"

DATASETS = {
    "digits": "diffvision.data.datasets.digits:make_digits",
    "fashion-scenes": "diffvision.data.datasets.fashion_scenes:make_fashion_scenes",
    "scenes-vqa": "diffvision.data.datasets.scenes_vqa:make_scenes_vqa",
    "arithmetic": "diffvision.data.datasets.arithmetic:make_arithmetic",
    "recall": "diffvision.data.datasets.recall:make_recall",
    "stdlib": "diffvision.data.datasets.stdlib:make_stdlib",
    "folder": "diffvision.data.images.pack_images:make_folder",
    "llava": "diffvision.data.llava_json:make_llava",
    "mmvp": "diffvision.data.datasets.mmvp:make_mmvp",
    "sugarcrepe": "diffvision.data.datasets.sugarcrepe:make_sugarcrepe",
    "winoground": "diffvision.data.datasets.winoground:make_winoground",
}
"""name -> module:function. The function takes the directory to write and the dataset's options, which are the options
of `diffvision data make NAME`, and returns what it wrote as a text or None. Its docstring is the help."""


def datasets() -> dict[str, str]:
    """Return `DATASETS`, followed by the datasets that other packages add (`diffvision.plugins`)."""
    return {**DATASETS, **{name: entry.value for name, entry in entry_points(TABLE).items() if name not in DATASETS}}


def find_dataset(name: str) -> str:
    """Return "module:function" of a dataset; raise ValueError where there is none of that name."""
    every = datasets()
    if name not in every:
        raise ValueError(f"no dataset is called {name!r}: choose one of {', '.join(every)}{did_you_mean(name, every)}")
    return every[name]


def read_interface(path: str) -> Callable[..., Any]:
    """Return a dataset's function without its body and result, for its help, which needs no import of its module.

    A module is imported nevertheless where the types or defaults of the function's parameters need it.

    Args:
        path: "module:function".
    """
    module, _, name = path.partition(":")
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin).read_bytes() if spec is not None and spec.origin is not None else b"")
    names: dict[str, Any] = {"Any": Any, "Literal": Literal, "Path": Path}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names |= {ast.unparse(target): node.value.value for target in node.targets}
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.body, node.decorator_list, node.returns = node.body[:1], [], None
            _make_options(node.args)
            try:
                exec(compile(ast.Module([node], []), module, "exec"), names)
            except NameError:  # of a type that the module imports
                return getattr(import_module(module), name)
            return names[name]
    raise ValueError(f"there is no function {path}: correct the entry point, or install its package again")


def _make_options(arguments: ast.arguments) -> None:
    """Make keywords of all parameters but the first."""
    rest, without = arguments.args[1:], len(arguments.args) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * (without - 1), *arguments.defaults]
    arguments.kwonlyargs, arguments.kw_defaults = [*rest, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults]
    arguments.args, arguments.defaults = arguments.args[:1], []


def check_paths(values: Mapping[str, Any]) -> None:
    """Raise `missing_data` for a value that can only be the path of a file or folder, and is not there."""
    for name, value in values.items():
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, str) and is_missing(path):
                raise missing_data(name, path)


def missing_data(name: str, path: str) -> FileNotFoundError:
    """Return the error for data that do not exist, with the command that makes those of a recipe."""
    folder, *inner = Path(path).parts
    remedy = ""
    if folder == "data" and inner and (function := datasets().get(inner[0])):
        _, *options = inspect.signature(read_interface(function)).parameters.values()
        if Path(folder, inner[0]).is_dir():
            remedy = ": the comment at the recipe's head has the commands that write it"
        elif all(option.default is not inspect.Parameter.empty for option in options):
            remedy = f": make it with diffvision data make {inner[0]} data/{inner[0]}"
    return FileNotFoundError(f"{name} must be a file or folder that exists, got {path!r}{remedy}")
