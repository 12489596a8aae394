"""The settings of `fit`, `validate` and `test`: their help, and what can be checked before Lightning is imported.

They are read from the sources of the classes. What is not understood here is left to Lightning's parser, in `fit`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import Namespace, get_loader

from diffvision.allow import Parser, limit_imports, without_class
from diffvision.data.datasets import missing_data
from diffvision.jsonargparse_internals import check_import, require
from diffvision.mistakes import Mistake, did_you_mean, is_missing, see_help
from diffvision.models.names import host_names, unknown_model
from diffvision.signatures import read_names, read_settings, read_type

CLASSES = {
    "model": {
        name: f"diffvision.training.{name}"
        for name in ("ContrastiveModule", "ClassificationModule", "LanguageModule", "VisionLanguageModule")
    },
    "data": {
        name: f"diffvision.data.{name}"
        for name in ("ImageTextData", "ImageLabelData", "TextData", "VisionLanguageData")
    },
}
"""A setting that takes a class -> our classes for it, by their short names."""
LISTED = {
    "trainer.callbacks": lambda: [
        *read_names("lightning.pytorch.callbacks"),
        *read_names("diffvision.training"),
        "RunSummary",
    ],
    "trainer.logger": lambda: read_names("lightning.pytorch.loggers"),
}
"""A setting that takes classes by their short names -> these names."""
HOSTS = {
    "diffvision.training.ContrastiveModule": ("open_clip", "OpenCLIP has no"),
    "diffvision.training.ClassificationModule": ("timm", "timm has no"),
    "diffvision.training.LanguageModule": ("language", "diffvision.models.language has no"),
}
"""A module -> the host of its models, and how the error for an unknown one begins."""
_INIT = "init_args."
_GROUPS = ("", "trainer", "model", "model.init_args", "model.init_args.optimizer", "data", "data.init_args")
_PATHS = ("data.train", "data.evaluations", "data.evaluation")
_OTHERS = ("print_config", "verbose")


class Given(NamedTuple):
    """A setting of a file or the command line: `is_text` if its value still has to be read as YAML."""

    name: str
    value: Any
    is_text: bool


def read_known() -> dict[str, Any]:
    """Return the settings outside of the model's and the data's classes, each with its type."""
    trainer = {f"trainer.{name}": kind for name, kind in read_settings("lightning.pytorch.Trainer").items()}
    return {
        "seed_everything": bool | int,
        "ckpt_path": str | None,
        "weights_only": bool | None,
        "resume": read_type("diffvision.training.fault_tolerance.Resume"),
        "resume_ranks": read_type("diffvision.training.fault_tolerance.Ranks"),
        **dict.fromkeys(("trainer", *CLASSES), Any),
        **trainer,
    }


def check(args: Sequence[str]) -> None:
    """Check a command line and its configuration files as far as that takes no import of Lightning.

    Args:
        args: from the subcommand on, with the paths of recipes.

    Raises:
        Mistake: an unknown setting or class, or a value of another type.
        ValueError: a value of the right type that cannot be, such as the name of a model that does not exist.
    """
    command, *words = args
    if any(word.partition("=")[0].endswith(".help") for word in words):
        return  # the help of a class is printed, and nothing else done
    program = f"diffvision {command}"
    require()
    with limit_imports(words) as rest:
        flags = list(_flags(rest, program))
        parts = [list(_flat("", _load(one.value, program))) for one in flags if one.name == "config"]
        parts.append([one for one in flags if one.name != "config"])
        is_closed = rest == words  # what --allow adds may define classes, and register models
        classes: dict[str, str] = {}
        for part in parts:
            for owner in CLASSES:
                classes |= _class(owner, part, is_closed, program)
            _check_types(part, read_known() | _of_classes(classes), classes, program)
        if any(path and not read_settings(path) for path in classes.values()):
            return  # a class of ours that was moved
        given = [one for part in parts for one in part]
        for setting, path in _class_paths(given):
            if "." in path:
                check_import(path)
            elif is_closed and setting in LISTED and path not in (every := LISTED[setting]()):
                near = did_you_mean(path, every)
                raise Mistake(see_help(f"{setting} is {path!r}: it takes the name of a class, null{near}", program))
        if not any(one.name.startswith(("model", "print_config")) for one in given):
            Parser(prog=program).error(f"the following arguments are required: {command}.model")
        for owner in CLASSES:
            if owner not in classes and any(one.name.startswith(f"{owner}.") for one in given):
                raise without_class(owner)
        final = {one.name.replace(f".{_INIT}", ".", 1): _value(one) for one in given}
        if is_closed:
            _check_model(classes.get("model", ""), final.get("model.model"))
        if command == "fit" and "print_config" not in final and classes.get("data"):
            _check_data(final)


def _value(given: Given) -> Any:
    """Return a setting's value, from YAML where it is a text that can be read as such."""
    try:
        return get_loader("yaml")(given.value) if given.is_text else given.value
    except yaml.YAMLError:
        return given.value


def _class_paths(given: Sequence[Given]) -> Iterator[tuple[str, str]]:
    """Yield the class paths and names in the settings that take a class."""
    for one in given:
        owner = one.name.removesuffix("+").removesuffix(".class_path")
        if owner in (*CLASSES, *LISTED):
            value = _value(one)
            for entry in value if isinstance(value, list) else [value]:
                path = entry.get("class_path") if isinstance(entry, Mapping) else entry
                is_file = str(path).endswith((".yaml", ".yml", ".json"))  # of settings, next to the one that names it
                if isinstance(path, str) and not is_file and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path):
                    yield owner, path


def _check_data(final: Mapping[str, Any]) -> None:
    """Raise a FileNotFoundError for data that are not there, if they are given as the path of a file or folder."""
    for name in _PATHS:
        value = final.get(name)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and is_missing(path):
                raise missing_data(name, path)


def _flags(words: Sequence[str], program: str) -> Iterator[Given]:
    """Yield the settings that the command line gives."""
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("-"):
            raise Mistake(see_help(f"unrecognized arguments: {word}", program))
        if not equals and flag != "--print_config":
            try:
                value = next(rest)
            except StopIteration:
                raise Mistake(see_help(f"{flag} needs a value", program)) from None
        yield Given("config" if flag == "-c" else flag.removeprefix("--"), value, True)


def _load(value: str, program: str) -> Any:
    """Return the content of a configuration: a file, or YAML itself."""
    is_file = "\n" not in value and Path(value).is_file()
    try:
        return get_loader("yaml")(Path(value).read_text(encoding="utf-8") if is_file else value)
    except yaml.YAMLError as error:
        raise Mistake(
            see_help(f"{value if is_file else '--config'}: {' '.join(str(error).split())}", program)
        ) from None


def _flat(name: str, content: Any) -> Iterator[Given]:
    if name in _GROUPS and isinstance(content, Mapping):
        for inner, value in content.items():
            yield from _flat(f"{name}.{inner}".removeprefix("."), value)
    elif name:
        yield Given(name, content, False)


def _class(owner: str, part: Sequence[Given], is_closed: bool, program: str) -> dict[str, str]:
    """Return the path of the class that a part gives for the model or the data, "" for one that is not ours.

    Args:
        owner: the setting.
        part: of a file or the command line.
        is_closed: whether an unknown name can be refused.
        program: of the command, for the message.
    """
    given = [one for one in part if one.name in (owner, f"{owner}.class_path")]
    if not given:
        return {}
    name = str(given[-1].value)
    is_path = "." in name or isinstance(_value(given[-1]), Mapping)
    if is_closed and not is_path and name not in CLASSES[owner]:
        near = did_you_mean(name, CLASSES[owner])
        if owner == "data" and Path(name).exists():
            near = f"; for files write --data.train {name}"
        raise Mistake(see_help(f"{owner} is {name!r}: it takes the name of a class, null{near}", program))
    return {owner: CLASSES[owner].get(name, name if name.startswith("diffvision.") else "")}


def _of_classes(classes: Mapping[str, str]) -> dict[str, Any]:
    return {
        f"{owner}.{name}": kind for owner, path in classes.items() if path for name, kind in read_settings(path).items()
    }


def _check_types(part: Sequence[Given], kinds: Mapping[str, Any], classes: Mapping[str, str], program: str) -> None:
    """Parse every setting as its annotated type, without importing its class."""
    parser, values = Parser(prog=program), Namespace()
    texts: list[str] = []
    for one in part:
        name = one.name.removesuffix("+")
        kind = kinds.get(plain := name.replace(f".{_INIT}", ".", 1))
        if kind is None:
            _check_known(plain, one.value, kinds, classes, program)
        if kind in (None, Any) or name != one.name:
            continue
        if f"--{name}" not in parser._option_string_actions:
            parser.add_argument(f"--{name}", type=kind)
        if one.is_text:
            texts.append(f"--{name}={one.value}")
        else:
            values[name] = one.value
    parser.parse_object(values.as_dict())
    parser.parse_args(texts)


def _check_known(name: str, value: Any, kinds: Mapping[str, Any], classes: Mapping[str, str], program: str) -> None:
    """Raise a Mistake for a name that is neither a setting, nor the beginning of one or of its own settings."""
    owner, _, inner = name.partition(".")
    parents = [name[:index] for index, letter in enumerate(name) if letter == "."]
    is_inside = any(parent in kinds and parent not in _GROUPS for parent in parents)
    if is_inside or name in _OTHERS or any(kind.startswith(name) for kind in kinds):
        return
    if owner not in CLASSES:
        parser = Parser(prog=program)
        for known_name in ("config", *kinds):
            parser.add_argument(f"--{known_name}")
        parser.error(f"unrecognized arguments: --{name} {value}")
    if (path := classes.get(owner)) and inner not in ("class_path", "init_args", "dict_kwargs"):
        cls, known_names = path.rpartition(".")[2], read_settings(path)
        raise Mistake(see_help(f"{owner}: {cls} takes no {inner}{did_you_mean(inner, known_names)}", program))


def _check_model(path: str, name: Any) -> None:
    """Refuse a model name that its host does not know."""
    if path in HOSTS and isinstance(name, str) and ":" not in name:
        host, text = HOSTS[path]
        every = host_names()[host]
        spellings = {name, name.replace("/", "-"), name.lower(), name.removeprefix("timm/").partition(".")[0]}
        if spellings.isdisjoint(every):
            raise unknown_model(name, text, every)
