"""Public names: Python names, models, attention variants, backends, evaluations and datasets.

`assets/public_names.txt` lists them. After adding one, run

    python tests/test_public_names.py

which adds it to the list. To take a name away, delete its line, and say in CHANGELOG.md what to use instead.
"""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import open_clip
import timm

import diffvision
from diffvision.data.datasets import datasets
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS
from diffvision.evaluation.suite import EVALUATIONS
from diffvision.models.names import recorded
from diffvision.nn import ATTENTION
from diffvision.ops.attention import BACKENDS

PACKAGE = Path(diffvision.__file__).parent
NAMES = Path(__file__).parent / "assets" / "public_names.txt"
LISTS = {
    "attention": [
        name for name, layer in ATTENTION.items() if layer.__module__.startswith("diffvision.")
    ],  # not studies'
    "backend": BACKENDS,
    "dataset": datasets(),
    "evaluation": EVALUATIONS,
    "language evaluation": LANGUAGE_EVALUATIONS,
}
"""A kind of name -> the names that there are."""


def find_public_names() -> set[str]:
    """Return the public names of today, each as "kind: name"."""
    names = {f"{kind}: {name}" for kind, table in LISTS.items() for name in table}
    names |= {f"{host} model: {name}" for host, models in recorded().items() for name in models}
    return names | {f"python: {name}" for name in _python_names()}


def _python_names() -> Iterator[str]:
    """Yield the names in every `__all__`, and those in docs/reference."""
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for name in _list(path):
            yield f"{module}.{name}"
    for page in (PACKAGE.parent / "docs" / "reference").glob("*.md"):
        yield from re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)


def _list(path: Path) -> list[str]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


def _fails(kind: str, name: str) -> str:
    """Return why a public name does not work; "" if it does."""
    if kind in LISTS:
        works = name in LISTS[kind]
    elif kind == "timm model":
        works = timm.is_model(name)
    elif kind == "OpenCLIP model":
        works = name in open_clip.list_models()
    elif kind in ("text model", "image and text model"):
        works = name in recorded()[kind.removesuffix(" model")]
    else:
        return _import_fails(name)
    return "" if works else f"{kind}: {name}"


def _import_fails(path: str) -> str:
    try:
        _import(path)
    except (ImportError, AttributeError) as error:
        return f"python: {path} ({error})"
    return ""


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        if find_spec(path) is None:
            raise
        return import_module(path)


if __name__ == "__main__":
    old = set(NAMES.read_text(encoding="utf-8").splitlines()) if NAMES.exists() else set()
    NAMES.write_text("\n".join(sorted(old | find_public_names())) + "\n", encoding="utf-8")
    raise SystemExit


def test_every_public_name_is_in_the_list():
    new = find_public_names() - set(NAMES.read_text(encoding="utf-8").splitlines())
    assert not new, f"not in {NAMES.name}; to add them, run `python tests/test_public_names.py`: {sorted(new)}"


def test_every_name_in_the_list_works():
    names = [line.split(": ", 1) for line in NAMES.read_text(encoding="utf-8").splitlines()]
    failed = [reason for kind, name in names if (reason := _fails(kind, name))]
    assert not failed, f"these public names are gone: {failed}"
