"""What a configuration may name: a class_path outside of an allow-list is refused before anything is imported.

To import a module is to run it, so a YAML from a stranger is a program. jsonargparse asks its list before each import
that a value leads to (class paths in files, sub-configurations and flags, callables, `--model.help NAME`): here that
list is set for one command, and what it refuses becomes one line that says where and what to do. jsonargparse's private
names are in `jsonargparse_internals`; where they are missing the limit stays, and only `--allow` is refused.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings

from diffvision import jsonargparse_internals
from diffvision.mistakes import in_short, see_help

# No prefix wider than needed: torch.hub, torch.utils.cpp_extension and LambdaCallback run what they are given.
ALLOWED = (
    "diffvision",
    "lightning.Callback",  # jsonargparse tries it where a setting fits no callback, and then says so
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
# jsonargparse tries these where settings are given without a class: what is missing, and an example.
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
    """Put before a parser's class, so that a mistake is answered in one line, not in a page of usage.

    An import that is refused is a separate error.
    """

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
    """Let values of configurations and arguments name only what is in `ALLOWED`, or what `--allow PREFIX` adds.

    Args:
        args: the command line; parsers of it must be `Refusing`.

    Yields:
        The arguments without `--allow`, to be parsed.

    Raises:
        ValueError: something else was named, and where; a prefix that is none; or the limit cannot be set.
    """
    rest, allowed = _split(args)
    load = get_loader("yaml")
    with ExitStack() as changed:
        if not jsonargparse_internals.missing():
            changed.enter_context(jsonargparse_internals.kept_settings())
            changed.enter_context(jsonargparse_internals.none_as_null())
        elif allowed:  # it would hold for later commands of the process too
            jsonargparse_internals.require()
        _set_limit(allowed)
        set_loader("yaml", _bounded(load), exceptions=(yaml.YAMLError,))
        try:
            yield rest
        except (ValueError, ImportError) as error:
            if (denied := _DENIED.search(str(error))) is None:
                raise
            raise _located(denied[1], rest) from error
        finally:
            set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def _set_limit(allowed: Sequence[str]) -> None:
    """Set jsonargparse's list, and see that it holds: other versions may have another way to set it."""
    try:
        set_parsing_settings(
            import_path_denylist=["*", *REFUSED],
            import_path_allowlist=[*ALLOWED, *allowed],
            instantiate_subclass_spec_in_any=False,  # else any allowed class is built where a setting takes anything
            config_read_mode_fsspec_enabled=False,  # Lightning enables it, and --config then fetches any URL
        )
    except TypeError:
        holds = False
    else:
        holds = _is_denied("nobody.allows.this")
    if not holds:
        raise ValueError(
            f"jsonargparse {version('jsonargparse')} does not limit what a configuration may import: install "
            f"jsonargparse{jsonargparse_internals.TESTED}"
        )


def _is_denied(path: str) -> bool:
    """Return whether jsonargparse refuses to import what a value names."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--name", type=Callable)
    try:
        parser.parse_args([f"--name={path}"])
    except Exception as error:  # which one it is differs between versions: the message counts
        return _DENIED.search(str(error)) is not None
    return False


def _bounded(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader that refuses aliases of aliases, and deep nesting.

    The first can stand for more values than fit into memory; at the second libyaml's composer overflows the stack and
    ends the process.
    """

    def bounded(text: str) -> Any:
        if len(text) > _MAX_LEVELS and _levels(text) > _MAX_LEVELS:
            raise yaml.YAMLError(f"it is nested too deeply, in more than {_MAX_LEVELS} levels: write it with fewer")
        value = load(text)
        if _size(value, {}) > _MAX_VALUES:
            raise yaml.YAMLError(f"it stands for more than {_MAX_VALUES:,} values: write it with fewer aliases")
        return value

    return bounded


def _levels(text: str) -> int:
    """Return how deeply lists and mappings are nested, up to one above the limit; events are read without recursion."""
    level = deepest = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        deepest = max(deepest, level)
        if deepest > _MAX_LEVELS:
            break
    return deepest


def _size(value: Any, known: dict[int, float]) -> float:
    """Count the values in a value, each alias as what it stands for."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # if it comes again below, it is an alias of what contains it
        known[id(value)] = 1 + sum(
            _size(part, known) for part in (value.values() if isinstance(value, dict) else value)
        )
    return known[id(value)]


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without `--allow`, and its prefixes: never from a file, which could allow itself."""
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
    if _FILE.fullmatch(path) and not Path(path).exists():
        return ValueError(f"no configuration file {path}: give a file that exists")
    where = next((f"in {file}" for file in _files(args) if path in _text(file)), "")
    where = where or ("on the command line" if any(path in word for word in args) else "in the configuration")
    return ValueError(
        f"class_path {path!r} {where} was not imported, because that runs its code: allowed are {', '.join(ALLOWED)}; "
        f"if you trust it, add {FLAG} {path.rpartition('.')[0] or path} to the command line"
    )


def _files(args: Sequence[str]) -> list[Path]:
    """Return the configuration files that the arguments name, and those that these name in turn."""
    files: list[Path] = []
    names = [Path(name) for word in args for name in _FILE.findall(word)]
    while names:
        path = names.pop(0)
        if path.is_file() and path not in files:
            files.append(path)
            names += [path.parent / name for name in _FILE.findall(_text(path))]
    return files


def _text(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_FILE)
