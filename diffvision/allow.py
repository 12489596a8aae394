"""What a configuration may name: a class_path outside of an allow-list is refused before anything is imported.

To import a module is to run it, so a YAML from a stranger is a program. jsonargparse asks its own list before each
import that a value leads to (class paths in files, sub-configurations and flags, callables, `--model.help NAME`): here
that list is set for the time of one command, and what it refuses becomes one line that says where and what to do.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import (
    ArgumentParser,
    _common,
    _loaders_dumpers,
    _optionals,
    get_loader,
    set_loader,
    set_parsing_settings,
)

from diffvision.mistakes import in_short, see_help

# No prefix wider than is needed: torch.hub, torch.utils.cpp_extension and LambdaCallback run what they are given.
ALLOWED = (
    "diffvision",
    "lightning.Callback",  # jsonargparse tries it where a setting is of none of the callbacks, and then says so
    *(f"lightning.fabric.{part}" for part in ("accelerators", "plugins", "strategies")),
    *(
        f"lightning.pytorch.{part}"
        for part in ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies")
    ),
    "torch.distributed.fsdp",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
)
# jsonargparse tries these where settings are given and the class is not: what is missing, and an example.
NAMELESS = {
    "lightning.LightningModule": ("model", "ContrastiveModule"),
    "lightning.LightningDataModule": ("data", "ImageTextData"),
}
REFUSED = (
    "diffvision.__main__",  # to import it is to run it
    "lightning.pytorch.callbacks.LambdaCallback",
    "lightning.pytorch.callbacks.lambda_function",
)
FLAG = "--allow"

_DENIED = re.compile(r"Importing '([^']+)' is not allowed")
_FILE = re.compile(r"[^\s'\"=,:\[\]{}]+\.(?:ya?ml|json)\b")
_MAX_FILE = 1 << 20  # characters of a configuration that are searched
_MAX_LEVELS = 100
_MAX_VALUES = 100_000  # of one YAML text, with its aliases written out


class _Refused(ValueError):
    """jsonargparse's message of an import that is not allowed, wherever in it."""


class Refusing:
    """Put before a parser's class: what is wrong with the arguments is said in one line, not in a page of usage; an
    import that is refused is a separate error."""

    prog: str
    exit_on_error: bool

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if _DENIED.search(message):
            raise _Refused(message) from ex
        if not self.exit_on_error:
            super().error(message, ex)  # type: ignore[misc]
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        print(f"diffvision: error: {see_help(in_short(message, parser, self.classes), program)}", file=sys.stderr)
        raise SystemExit(2)

    def classes(self, setting: str) -> Iterable[str]:
        """Names of the classes that a setting takes, for a message to name the nearest."""
        return ()


class Parser(Refusing, ArgumentParser):
    """For commands that are functions."""


@contextmanager
def limited_imports(args: Sequence[str]) -> Iterator[list[str]]:
    """Within it, values of configurations and arguments may name what is in `ALLOWED` or what `--allow PREFIX` adds.

    Args:
        args: the command line; parsers of it must be `Refusing`.

    Returns:
        The arguments without `--allow`, to be parsed.

    Raises:
        ValueError: something else was named, and where; a prefix that is none.
    """
    rest, allowed = _split(args)
    # The settings are the process's, which may have parsers of its own: they are put back. Nothing public reads them.
    before, modes, load = dict(_common.parsing_settings), _optionals._get_config_read_mode(), get_loader("yaml")
    set_parsing_settings(
        import_path_denylist=["*", *REFUSED],
        import_path_allowlist=[*ALLOWED, *allowed],
        instantiate_subclass_spec_in_any=False,  # else any allowed class is built where a setting takes anything
        config_read_mode_fsspec_enabled=False,  # Lightning turns it on, and --config then fetches any URL
    )
    set_loader("yaml", _bounded(load), exceptions=(yaml.YAMLError,))
    yaml_loaders: Any = _loaders_dumpers
    plain = yaml_loaders.get_yaml_default_loader()
    yaml_loaders.yaml_default_loader = _with_none(plain)
    try:
        yield rest
    except (_Refused, _common.ImportDenied) as error:
        if (denied := _DENIED.search(str(error))) is None:
            raise
        raise _located(denied[1], rest) from error
    finally:
        set_loader("yaml", load, exceptions=(yaml.YAMLError,))
        yaml_loaders.yaml_default_loader = plain
        _common.parsing_settings.update(before)
        _optionals._set_config_read_mode(urls_enabled="u" in modes, fsspec_enabled="s" in modes)


def _with_none(loader: type[Any]) -> type[Any]:
    """A loader that reads None as null: jsonargparse hands a part of a setting on as Python writes it, so that
    `--model.optimizer.clip_norm null` would arrive as the text None, and be refused."""
    with_none: type[Any] = type("Loader", (loader,), {})
    with_none.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])
    return with_none


def _bounded(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same loader, but for aliases of aliases, which can stand for more values than fit into memory, and for deep
    nesting, at which libyaml's composer overflows the stack and ends the process."""

    def bounded(text: str) -> Any:
        if len(text) > _MAX_LEVELS and _levels(text) > _MAX_LEVELS:
            raise yaml.YAMLError(f"it is nested too deeply, in more than {_MAX_LEVELS} levels: write it with fewer")
        value = load(text)
        if _size(value, {}) > _MAX_VALUES:
            raise yaml.YAMLError(f"it stands for more than {_MAX_VALUES:,} values: write it with fewer aliases")
        return value

    return bounded


def _levels(text: str) -> int:
    """How deeply lists and mappings are nested, up to one above the limit; events are read without recursion."""
    level = deepest = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        deepest = max(deepest, level)
        if deepest > _MAX_LEVELS:
            break
    return deepest


def _size(value: Any, known: dict[int, float]) -> float:
    """Values in a value, each alias counted as what it stands for."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # should it come again below: an alias of what holds it
        known[id(value)] = 1 + sum(
            _size(part, known) for part in (value.values() if isinstance(value, dict) else value)
        )
    return known[id(value)]


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--allow`, and its prefixes: of the command line alone, for a file could allow itself."""
    rest: list[str] = []
    allowed: list[str] = []
    words = iter(args)
    for word in words:
        flag, given, value = word.partition("=")
        if flag == FLAG:
            allowed.append((value if given else next(words, "")).rstrip("."))
        else:
            rest.append(word)
    for prefix in allowed:
        if not all(part.isidentifier() for part in prefix.split(".")) or prefix.partition(".")[0] == "jsonargparse":
            raise ValueError(f"{FLAG} is {prefix!r}: give a package or module to trust, such as mypackage.models")
    return rest, allowed


def _located(path: str, args: Sequence[str]) -> ValueError:
    if path in NAMELESS and not any(path in text for text in (*args, *map(_text, _files(args)))):
        setting, example = NAMELESS[path]
        return ValueError(f"settings of {setting} are given, and not its class: name it, such as --{setting} {example}")
    where = next((f"in {file}" for file in _files(args) if path in _text(file)), "")
    where = where or ("on the command line" if any(path in word for word in args) else "in the configuration")
    return ValueError(
        f"class_path {path!r} {where} was not imported, for that runs its code: allowed are {', '.join(ALLOWED)}; "
        f"if you trust it, add {FLAG} {path.rpartition('.')[0] or path} to the command line"
    )


def _files(args: Sequence[str]) -> list[Path]:
    """Configuration files that the arguments name, and those that these name in turn."""
    found: list[Path] = []
    names = [Path(name) for word in args for name in _FILE.findall(word)]
    while names:
        path = names.pop(0)
        if path.is_file() and path not in found:
            found.append(path)
            names += [path.parent / name for name in _FILE.findall(_text(path))]
    return found


def _text(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_FILE)
