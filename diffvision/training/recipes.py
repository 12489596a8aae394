"""Recipes by name, and checks of configuration files before anything slow is imported.

A recipe is a file of configs/, which lies next to the package in a clone and inside it in a wheel.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from diffvision.errors import nearest

_PACKAGE = Path(__file__).parent.parent
_FLAGS = ("--config", "-c")  # of Lightning's command line


def find_recipe(name: str) -> Path:
    """Return the file of a recipe such as "clip/debug.yaml"; "configs/clip/debug.yaml" names the same.

    Raises:
        FileNotFoundError: no recipe has the name; the message lists the nearest ones.
    """
    folder, bare, names = _folder(), name.removeprefix("configs/"), list_recipes()
    if bare in names:
        return folder / bare
    stems = [name.removesuffix(".yaml") for name in names]
    near = [f"{stem}.yaml" for stem in nearest(bare.rpartition(".")[0], stems, 3, min_ratio=0.6)]
    known = f"the nearest recipes are {', '.join(near)}" if near else "give a path, or a recipe such as clip/debug.yaml"
    raise FileNotFoundError(f"no configuration file {name or repr(name)}: {known}")


def list_recipes() -> list[str]:
    """Return the names of all recipes."""
    folder = _folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.yaml"))


def resolve_recipes(args: Sequence[str]) -> list[str]:
    """Replace the names of recipes in a command line by their paths. A file of the same name takes precedence.

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
    """Return the path of a configuration after checking that it can be read; inline YAML is returned as it is."""
    is_yaml = re.search("[:{]", value) and not value.endswith((".yaml", ".yml", ".json"))
    if "\n" in value or value == "null" or is_yaml:
        return value
    path = find_configuration(value)
    read_mapping(path)
    return str(path)


def find_configuration(value: str | Path) -> Path:
    """Return the path of a configuration, given as a path or as the name of a recipe."""
    return Path(value) if Path(value).is_file() else find_recipe(str(value))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ValueError: it is not YAML, or not a mapping; the message names the file and line.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}{line} is not YAML: {error.problem or error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: use fewer levels") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"--config must be a YAML file, got {path}: give a checkpoint as --ckpt_path") from None
    if not isinstance(content, dict):
        kind = "an empty file" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path} must be a configuration with lines such as 'model: ...', got {kind}")
    return content


def _folder() -> Path:
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
