"""Public names: Python names, models, attention variants, backends, evaluations and datasets.

`assets/public_names.txt` lists them. After adding one, run

    python tests/test_public_names.py

which adds it to the list. To take a name away, delete its line, and say in CHANGELOG.md what to use instead.
"""

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

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
    "attention": [name for name, layer in ATTENTION.items() if layer.__module__.startswith("diffvision.")],
    "backend": BACKENDS,
    "dataset": datasets(),
    "evaluation": EVALUATIONS,
    "language evaluation": LANGUAGE_EVALUATIONS,
}
"""A kind of name -> the names that there are."""


def find_public_names() -> set[str]:
    """Return the public names of today, each as "kind: name"."""
    names = {f"{kind}: {name}" for kind, table in LISTS.items() for name in table}
    names |= {f"{library} model: {name}" for library, models in recorded().items() for name in models}
    return names | {f"python: {name}" for name in _python_names()}


def _python_names() -> Iterator[str]:
    """Yield the names in every `__all__`."""
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for name in _list(path):
            yield f"{module}.{name}"


def _list(path: Path) -> list[str]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


if __name__ == "__main__":
    old = set(NAMES.read_text(encoding="utf-8").splitlines()) if NAMES.exists() else set()
    NAMES.write_text("\n".join(sorted(old | find_public_names())) + "\n", encoding="utf-8")
    raise SystemExit


def test_every_public_name_is_in_the_list():
    new = find_public_names() - set(NAMES.read_text(encoding="utf-8").splitlines())
    assert not new, f"not in {NAMES.name}; to add them, run `python tests/test_public_names.py`: {sorted(new)}"


def test_every_name_in_the_list_is_there():
    listed = [line.split(": ", 1) for line in NAMES.read_text(encoding="utf-8").splitlines()]
    gone = {": ".join(line) for line in listed if line[0] != "python"} - find_public_names()
    assert not gone, f"these public names are gone: {sorted(gone)}"
    for name in (name for kind, name in listed if kind == "python"):
        pkgutil.resolve_name(name)
