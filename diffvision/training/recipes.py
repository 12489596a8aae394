"""Recipes by name, and what is wrong with a configuration file before anything heavy is imported.

A recipe is a file of configs/, which lies next to the package in a clone and inside it in a wheel.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffvision.errors import nearest

_PACKAGE = Path(__file__).parent.parent
_FLAGS = ("--config", "-c")  # of Lightning's command line


def recipe(name: str) -> Path:
    """Return the file of a recipe such as "clip/debug.yaml"; "configs/clip/debug.yaml" names the same.

    Raises:
        FileNotFoundError: no recipe has the name; the message lists the nearest ones.
    """
    folder, bare, names = _folder(), name.removeprefix("configs/"), recipes()
    if bare in names:
        return folder / bare
    stems = [name.removesuffix(".yaml") for name in names]
    near = [f"{stem}.yaml" for stem in nearest(bare.rpartition(".")[0], stems, 3, min_ratio=0.6)]
    known = f"the nearest recipes are {', '.join(near)}" if near else "give a path, or a recipe such as clip/debug.yaml"
    raise FileNotFoundError(f"no configuration file {name or repr(name)}: {known}")


def recipes() -> list[str]:
    """Return the names of all recipes."""
    folder = _folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.yaml"))


def resolve_recipes(args: Sequence[str]) -> list[str]:
    """Return a command line with the path of each recipe instead of its name. A file of that name takes precedence.

    Raises:
        FileNotFoundError: a configuration file that is neither a file nor a recipe.
        ValueError: a configuration file that is not YAML, or not a mapping.
    """
    resolved: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        if resolved and resolved[-1] in _FLAGS:
            resolved.append(_configuration(arg))
        else:
            resolved.append(f"{flag}={_configuration(value)}" if equals and flag in _FLAGS else arg)
    return resolved


def _configuration(value: str) -> str:
    """Return the path of a configuration, or the YAML that a pipe holds, as of `<(...)`; YAML itself stays.

    A pipe can be read only once, and a configuration is read more often. The new line before its YAML tells it from a
    path and from a flag.
    """
    if "\n" in value:
        return value
    if _is(Path.is_fifo, value):
        return f"\n{read_mapping(Path(value))[0]}"
    is_file = _is(Path.is_file, value)
    is_yaml = value == "null" or re.search("[:{]", value)
    if not is_file and is_yaml and Path(value).suffix not in (".yaml", ".yml", ".json"):
        return value
    path = Path(value) if is_file else recipe(value)
    read_mapping(path)
    return str(path)


def _is(kind: Callable[[Path], bool], value: str) -> bool:
    """Return whether a value is the path of something of a kind; YAML itself may be too long for a path."""
    try:
        return kind(Path(value))
    except (OSError, ValueError):
        return False


def read_mapping(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a YAML file and its content; an error names the file and the line, as a parser's does not."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}{line} is not YAML: {error.problem or error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: use fewer levels") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if path.suffix in (".ckpt", ".pt", ".pth", ".safetensors"):
            raise ValueError(f"--config must be a YAML file, got {path}: give a checkpoint as --ckpt_path") from None
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        kind = "an empty file" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path} must be a configuration with lines such as 'model: ...', got {kind}")
    return text, content


def _folder() -> Path:
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
