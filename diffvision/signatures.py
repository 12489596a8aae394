"""Settings and their types, read from source without importing it; and private names that a package must have."""

import ast
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from diffvision.plugins import entry_points

_PLAIN = (bool, int, float, str, dict, list, tuple, Path, NoneType)
_TYPES = {kind.__name__: kind for kind in (*_PLAIN, Iterable, Mapping, Sequence)} | {
    name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional", "Tuple", "Union")
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters; not of its result, which type checkers alone may import."""
    hints = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=hints), getattr(function, "__globals__", None))


def list_choices(hint: Any) -> list[str]:
    """Return the values of a Literal, also of one that may be None."""
    parts = [hint, *get_args(hint)]
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]


def read_settings(path: str) -> dict[str, Any]:
    """Return the names of a class's settings with their types, and those of dataclasses in them, as in "optimizer.lr".

    Args:
        path: of the class, such as "diffvision.training.ContrastiveModule".

    Returns:
        name -> a type of plain values; Any where the source has another, or none. Empty if there is no such class.
    """
    module, _, name = path.rpartition(".")
    found = _find_definition(module, name)
    return {} if found is None else dict(_read_class(*found))


def read_names(module: str, table: str = "__all__") -> list[str]:
    """Return the strings in a list, or the keys of a dictionary or a `plugins.PluginTable`, that a module defines."""
    found = _find_definition(module, table)
    node = found[1] if found is not None else None
    if isinstance(node, ast.Call):
        group, rows, *_ = node.args
        return [*read_names(module, ast.unparse(rows)), *entry_points(ast.literal_eval(group))]
    keys = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def read_signature(path: str) -> tuple[inspect.Signature, str]:
    """Return the signature and the docstring of a function; all parameters but the first are keywords.

    Args:
        path: "module:name", as of an entry point. Defaults must be plain values or constants of its module.

    Raises:
        ValueError: there is no such function.
    """
    module, _, name = path.partition(":")
    found = _find_definition(module, name)
    if found is None or not isinstance(found[1], ast.FunctionDef):
        raise ValueError(f"there is no function {path}: correct the entry point, or install its package again")
    arguments = found[1].args
    every = [*arguments.args, *arguments.kwonlyargs]
    without = len(arguments.args) - len(arguments.defaults)
    defaults = [*[None] * without, *arguments.defaults, *arguments.kw_defaults]
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD, *[inspect.Parameter.KEYWORD_ONLY] * (len(every) - 1)]
    parameters = [
        inspect.Parameter(
            one.arg,
            kind,
            default=inspect.Parameter.empty if default is None else _read_literal(default, module),
            annotation=_read_annotation(one.annotation, module),
        )
        for one, kind, default in zip(every, kinds, defaults, strict=True)
    ]
    return inspect.Signature(parameters), ast.get_docstring(found[1]) or ""


def read_type(path: str) -> Any:
    """Return the type of that name, such as "diffvision.training.fault_tolerance.Resume", or Any."""
    module, _, name = path.rpartition(".")
    return _keep_plain(_Names(module)[name])


def _read_class(module: str, node: ast.ClassDef | ast.FunctionDef | ast.expr) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a class and their types, read from its source."""
    if not isinstance(node, ast.ClassDef):
        return
    for statement in node.body:
        if isinstance(statement, _FUNCTIONS) and statement.name == "__init__":
            arguments = statement.args
            annotated = [(one.arg, one.annotation) for one in [*arguments.args[1:], *arguments.kwonlyargs]]
            break
    else:
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        annotated = [(ast.unparse(one.target), one.annotation) for one in fields]
    for name, annotation in annotated:
        yield name, _read_annotation(annotation, module)
        nested = _find_definition(module, annotation.id) if isinstance(annotation, ast.Name) else None
        if nested is not None:
            yield from ((f"{name}.{inner}", kind) for inner, kind in _read_class(*nested))


def _read_literal(value: ast.expr, module: str) -> Any:
    """Return a plain value, which may be a constant of the module."""
    if isinstance(value, ast.Name) and (found := _find_definition(module, value.id)):
        value = cast(ast.expr, found[1])
    return ast.literal_eval(value)


def _read_annotation(annotation: ast.expr | None, module: str) -> Any:
    """Evaluate an annotation without importing heavy modules; what cannot be read is Any."""
    if annotation is None:
        return Any
    try:
        return _keep_plain(
            eval(compile(ast.Expression(annotation), module, "eval"), {"__builtins__": {}}, _Names(module))
        )
    except (AttributeError, TypeError):  # an attribute of a module, or a string, as a part of a type
        return Any


def _keep_plain(hint: Any) -> Any:
    """Return a type of plain values, and Any for another, whose values have to be left to its parser."""
    if isinstance(hint, str):
        return Any
    origin = get_origin(hint)
    if origin is Literal or hint in _PLAIN:
        return hint
    is_plain = origin is not None and all(part is Ellipsis or _keep_plain(part) is not Any for part in get_args(hint))
    return hint if is_plain else Any


class _Names(dict[str, Any]):
    """The types that a module's annotations name; Any for a class."""

    def __init__(self, module: str) -> None:
        super().__init__(_TYPES | {"None": None})
        self.module = module

    def __missing__(self, name: str) -> Any:
        found = _find_definition(self.module, name)
        return Any if found is None or not isinstance(found[1], ast.expr) else _read_annotation(found[1], found[0])


def _find_definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef | ast.expr] | None:
    """Return the module that defines a name, and its class, function or value; imports of its package are followed."""
    for node in _statements(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
            return module, node.value
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name) and node.module.split(".")[0] == module.split(".")[0]:
                    return _find_definition(node.module, alias.name)
    return None


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module's source, and those of its `if TYPE_CHECKING`; none where it has no file."""
    package, _, rest = module.partition(".")
    spec = find_spec(package) if package else None
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        return []
    if spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0], *rest.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    else:  # a module that is no package
        file = Path(spec.origin or "")
    if not file.is_file():
        return []
    body = ast.parse(file.read_bytes()).body
    return [inner for node in body for inner in ([node] if not isinstance(node, ast.If) else node.body)]


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
