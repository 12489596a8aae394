"""One-line messages for mistyped commands, options and names, with the nearest known name ("did you mean ...?").

The messages of argparse and jsonargparse, which are long and do not suggest names, are shortened here. Errors that a
command itself raises, such as a missing folder, have their own messages.
"""

import dataclasses
import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from heapq import nlargest
from pathlib import Path
from typing import Any, get_type_hints

_MIN_RATIO = 0.6  # default of difflib.get_close_matches: less similar names are not suggested
_PATH = re.compile(r"[\w./][\w./ -]*")  # neither a URL, a pattern, NAME=PATH nor a list
_LITERAL = "typing.Literal["
_PROBLEM = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)", re.DOTALL)


class Mistake(ValueError):
    """The command line itself is wrong: an unknown option, or a value of another type. The exit status is 2."""


def nearest(name: str, known: Iterable[str], count: int = 1, min_ratio: float = 0.0) -> list[str]:
    """Return the known names that are most similar to a name, the most similar first.

    Args:
        name: the unknown name.
        known: all known names.
        count: the largest number of names to return.
        min_ratio: leave out names that are less similar, from 0 (nothing in common) to 1 (equal up to case).
    """
    matcher = SequenceMatcher(b=name.lower())

    def likeness(other: str) -> float:
        matcher.set_seq1(other.lower())
        return matcher.ratio()

    return [other for other in nlargest(count, known, likeness) if likeness(other) >= min_ratio]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for a name that ends alike, such as model.optimizer.lr for lr, or the nearest one.

    It is "" if none is similar.
    """
    every = list(known)
    names = [other for other in every if _last_part(other) == _last_part(name)]
    names = names or nearest(name, every, min_ratio=_MIN_RATIO)
    return f"; did you mean {names[0]}?" if names else ""


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("--")


def see_help(text: str, program: str) -> str:
    """Return a message followed by the command that prints help."""
    return f"{text}{' See' if text.endswith('?') else '; see'} {program} --help"


def is_missing(path: str) -> bool:
    """Return whether a text can only be the path of a file or folder, and nothing is there."""
    return _PATH.fullmatch(path) is not None and not Path(path).exists()


def shorten_message(
    message: str, parser: ArgumentParser, classes: Callable[[str], Iterable[str]] = lambda _: ()
) -> str:
    """Return a parser's message as one line: the innermost setting of a nested message, and its fault.

    Args:
        message: of argparse or jsonargparse.
        parser: the parser that raised it, for its options.
        classes: returns the names of the classes that a setting takes.
    """
    settings = re.findall(r'Parser key "([^"]+)":', message)
    if not settings:
        return _shorten_options(" ".join(message.split()), parser)
    name, inner = ".".join(settings), message.rpartition('Parser key "')[2].partition(":")[2]
    if match := re.match(r"\s*Expected an? (.+)\. Got value: (.*)", inner):
        return _describe_expected(name, match[2], [match[1]], classes)
    tried, _, given = inner.partition("Given value type: ")
    missing = re.search(r"Expected a dot import path string: (\w+)\s", tried)
    if missing and "Not a valid subclass of" in tried:  # a short name in a file
        return f"{name}: there is no class {missing[1]}{did_you_mean(missing[1], classes(name))}"
    faults = [" ".join(fault.split()) for fault in re.split(r"^\s*- ", tried, flags=re.MULTILINE)[1:]]
    other = [fault for fault in faults if not fault.startswith(("Expected ", "Does not validate against "))]
    value = re.search("Given value: (.*)", given)
    if other or value is None or not faults:
        return f"{name}: {'; '.join(dict.fromkeys(_shorten_classes(other or [' '.join(inner.split())])))}"
    kinds = re.findall(r"Expected an? (?!path but)(.+?)(?:\. Got value: .*)?$", tried, re.MULTILINE)
    return _describe_expected(name, value[1], kinds, classes)


def _describe_expected(name: str, value: str, kinds: list[str], classes: Callable[[str], Iterable[str]]) -> str:
    choices = dict.fromkeys(choice for kind in kinds for choice in _list_choices(kind))
    literals = [choice for kind in kinds if kind.startswith(_LITERAL) for choice in _list_choices(kind)]
    near = did_you_mean(value.rpartition(".")[2], [*classes(name), *literals])
    return f"{name} is {value!r}: it takes {', '.join(choices)}{near}"


def _list_choices(expected: str) -> list[str]:
    """Return the values that a type takes, as a user writes them."""
    if expected.startswith(_LITERAL):
        return expected.removeprefix(_LITERAL).removesuffix("]").replace("'", "").split(", ")
    if expected.startswith("dot import path"):
        return ["the name of a class"]
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", expected)
    words = {"NoneType": "null", "dict": "{name: value}", "bool": "true, false", "Sequence": "[value, ...]"}
    return [words.get(name, name)]


# ---- options of a parser -------------------------------------------------------------------------------------------


def _shorten_options(message: str, parser: ArgumentParser) -> str:
    """Return a message, followed by the known option that is nearest to its first unknown option."""
    if match := re.fullmatch(r"the following arguments are required: (\w+)\.model", message):  # of LightningCLI
        return f"{match[1]} needs a model: give a recipe, such as --config clip/debug.yaml, or a class, as --model NAME"
    if match := re.fullmatch(r"Subcommand '\w+' does not accept option '(.*)'", message):
        near = _nearest_option(f"--{match[1]}", parser).replace(" --", " ")
        return f"{parser.prog.split()[-1]} takes no {match[1]}{near}"
    if match := re.fullmatch(r"the following arguments are required: (.*)", message):
        strings = {action.dest: action.option_strings[:1] for action in parser._actions}
        names = ["".join(strings.get(name) or [name]) for name in match[1].split(", ")]
        return f"the following arguments are required: {', '.join(names)}"
    unknown, _, rest = message.partition("unrecognized arguments: ")
    if unknown or not rest:
        return message
    flags = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
    return message + (_nearest_option(flags[0], parser) if flags else "")


def _nearest_option(flag: str, parser: ArgumentParser) -> str:
    """Return the end of an error message that names the option nearest to a mistyped flag; empty if none is near."""
    positionals = [action.dest for action in parser._get_positional_actions()]
    if (name := flag.removeprefix("--")) in positionals:
        return f": {name} is given without a flag, in the order {' '.join(positionals)}"
    options = [option for option in parser._option_string_actions if option.startswith("--") and option != "--help"]
    options += getattr(parser, "settings", list)()
    head, dot, rest = flag.partition(".")
    heads = {option.partition(".")[0] for option in options}
    if not dot or head in heads or _last_part(flag) in map(_last_part, options):
        return did_you_mean(flag, options)
    near = nearest(head, heads, min_ratio=_MIN_RATIO)  # settings of a class are no options of the parser: --modle.lr
    return f"; did you mean {near[0]}.{rest}?" if near else ""


# ---- settings of a class -------------------------------------------------------------------------------------------


def _shorten_classes(faults: list[str]) -> list[str]:
    """Return the faults of the classes that were tried, each with the nearest name; only the named class's if any."""
    problems = [(fault, match) for fault in faults if (match := _PROBLEM.match(fault))]
    if not problems:
        return faults
    # Lightning's base class is tried after the class that was named, and knows none of its settings.
    named = [(fault, match) for fault, match in problems if match[1] != "lightning.Callback"] or problems
    return [_shorten_class(match[1], match[2]) for _, match in named]


def _shorten_class(path: str, fault: str) -> str:
    module, _, name = path.rpartition(".")
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", fault):
        known = getattr(sys.modules.get(match[1]), "__all__", None) or dir(sys.modules.get(match[1]))
        if name in known:  # a class that was moved to another module, and that the package still offers
            return f"there is no {path}; did you mean {match[1]}.{name}?"
        if moved := _find_modules(name):
            return f"there is no {path}; did you mean {moved[0]}.{name}?"
        return f"there is no {path}{did_you_mean(match[2], known)}"
    cls = getattr(sys.modules.get(module), name, None)
    if isinstance(cls, type) and (
        match := re.match(r"Option '([^']+)' is not accepted|unrecognized arguments: (.*)", fault)
    ):
        unknown = match[1] or match[2].split()[0].partition("=")[0].removeprefix("--")
        return f"{name} takes no {unknown}{did_you_mean(unknown, _list_settings(cls))}"
    return f"{name}: {fault}"


def _find_modules(name: str) -> list[str]:
    """Return the imported modules of this package that define a class of that name."""
    package = __name__.partition(".")[0]
    ours = [module for module in sys.modules if module.startswith(f"{package}.")]
    return [module for module in ours if getattr(vars(sys.modules[module]).get(name), "__module__", None) == module]


def _list_settings(cls: type[Any]) -> Iterator[str]:
    """Yield the parameters of a class's constructor, and the fields of dataclasses among them, as in `optimizer.lr`."""
    constructors = [vars(owner)["__init__"] for owner in cls.__mro__[:-1] if "__init__" in vars(owner)]
    for constructor in constructors:
        hints = get_type_hints(constructor)
        for name in list(inspect.signature(constructor).parameters)[1:]:
            yield name
            if dataclasses.is_dataclass(record := hints.get(name)):
                yield from (f"{name}.{field.name}" for field in dataclasses.fields(record))
