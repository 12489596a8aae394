"""Recipes by name, and what is wrong with a configuration file before anything heavy is imported.

A recipe is a file of configs/, which lies next to the package in a clone and inside it in a wheel.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from diffvision.bounded_yaml import MAX_LEVELS
from diffvision.mistakes import nearest

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
    raise FileNotFoundError(f"no configuration file {name}: {known}")


def recipes() -> list[str]:
    """Return the names of all recipes."""
    folder = _folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.yaml"))


def with_recipes(args: Sequence[str]) -> list[str]:
    """Return a command line with the path of each recipe instead of its name. A file of that path comes first.

    Raises:
        FileNotFoundError: a configuration file that is neither a file nor a recipe.
        ValueError: a configuration file that is not YAML, or not a mapping.
    """
    paths: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        if paths and paths[-1] in _FLAGS:
            paths.append(_configuration(arg))
        else:
            paths.append(f"{flag}={_configuration(value)}" if equals and flag in _FLAGS else arg)
    return paths


def _configuration(value: str) -> str:
    """Return the path of a configuration; what does not look like a file's name, such as YAML itself, stays."""
    if "\n" in value or (Path(value).suffix not in (".yaml", ".yml", ".json") and not _is_file(value)):
        return value
    path = Path(value) if Path(value).is_file() else recipe(value)
    _check_mapping(path)
    return str(path)


def _is_file(value: str) -> bool:
    """Return whether a value is the path of a file; YAML itself may be too long for a path."""
    try:
        return Path(value).is_file()
    except (OSError, ValueError):
        return False


def _check_mapping(path: Path) -> None:
    """Raise a ValueError with the file and the line, which a parser's message lacks.

    It reads without recursion, and only as deep as `bounded_yaml`, which refuses deeper ones: the time that PyYAML
    takes grows with the square of the depth.
    """
    content: list[type] = []
    level = 0
    try:
        for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MAX_LEVELS:
                break
            if not isinstance(event, yaml.StreamStartEvent | yaml.DocumentStartEvent):
                content.append(type(event))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}{line} is not YAML: {error.problem or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        is_checkpoint = path.suffix in (".ckpt", ".pt", ".pth", ".safetensors")
        remedy = ": --config takes YAML, and --ckpt_path a checkpoint" if is_checkpoint else ""
        raise ValueError(f"{path} is not YAML{remedy or f': {str(error).splitlines()[0]}'}") from None
    if content[0] is yaml.StreamEndEvent:
        raise ValueError(f"{path} is empty: a configuration has lines such as 'model: ...'")
    if content[0] in (yaml.SequenceStartEvent, yaml.ScalarEvent):
        raise ValueError(
            f"{path} is not a configuration: it must have lines such as 'model: ...', and is a list or a text"
        )


def _folder() -> Path:
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
