"""Signatures of functions, read from source without importing it; and private names that a package must have."""

import ast
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

_PLAIN = (bool, int, float, str, dict, list, tuple, Path, NoneType)
_TYPES = {kind.__name__: kind for kind in (*_PLAIN, Iterable, Mapping, Sequence)} | {
    name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional", "Tuple", "Union")
}


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters; not of its result, which type checkers alone may import."""
    hints = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=hints), getattr(function, "__globals__", None))


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
