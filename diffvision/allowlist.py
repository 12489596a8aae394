"""The allow-list of configurations: a class_path outside of it is refused before anything is imported.

Importing a module runs it, so an untrusted YAML file is a program. jsonargparse checks its list before each import that
a value leads to (class paths in files, sub-configurations and flags, callables, `--model.help NAME`). This module sets
that list, and turns a refusal into a one-line error that names the setting and the remedy. The list stays for the
parsers of the process; a prefix of `--allow` holds for its own command alone.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from diffvision.errors import Mistake, one_line, see_help

# No prefix wider than needed: torch.hub, torch.utils.cpp_extension and LambdaCallback run what they are given.
ALLOWED = (
    "diffvision",
    "lightning.Callback",  # jsonargparse tries it for a setting that fits no callback, and then reports that
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
# jsonargparse tries these classes for settings without a class_path -> the setting, and an example of its class.
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


class _Refused(ValueError):
    """An error whose message contains jsonargparse's report of an import that is not allowed."""


class Formatter(DefaultHelpFormatter):
    """Formatter whose usage has only what must be given, since the options follow, each in at most 80 columns."""

    def _format_usage(self, usage: Any, actions: Iterable[Any], groups: Any, prefix: str | None) -> str:
        needed = [action for action in actions if action.required]
        text = super()._format_usage(usage, needed, groups, prefix).replace(" [options]", "")  # those of parents
        return f"{text.rstrip()} [options]\n\n"

    def _metavar_formatter(self, action: Any, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if len(str(action.metavar)) > 40:  # choices, which the help has too
            return lambda count: (default_metavar,) * count
        return super()._metavar_formatter(action, default_metavar)


class Refusing:
    """Mixin for parsers that raise a `Mistake` of one line, instead of printing a page of usage and exiting.

    A refused import is raised as an error of another class.
    """

    prog: str
    exit_on_error: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `_Refused` if an import was refused, else a `Mistake` with a short message and the nearest name."""
        if _DENIED.search(message):
            raise _Refused(message) from ex
        if not self.exit_on_error:
            super().error(message, ex)  # type: ignore[misc]
        cause: BaseException | None = ex
        while cause is not None:  # a file's, which the option that names it reports
            if isinstance(cause, Mistake):
                raise cause
            cause = cause.__cause__
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        raise Mistake(see_help(self.shorten(message, parser.options), program)) from ex

    def shorten(self, message: str, options: Callable[[], Iterable[str]]) -> str:
        """Return a message as one line; `options` returns those of the parser that raised it."""
        return one_line(message, options, self.classes)

    def options(self: Any) -> list[str]:
        """Return the options of the parser; the message for a mistyped one names the nearest."""
        return [f"--{name}" for name in self.get_defaults().keys()]  # noqa: SIM118

    def classes(self, setting: str) -> Iterable[str]:
        """Return the names of the classes that a setting takes; the message for a mistyped one names the nearest."""
        return ()


class Parser(Refusing, ArgumentParser):
    """Parser of the commands that are plain functions."""


@contextmanager
def limit_imports(args: Sequence[str]) -> Iterator[list[str]]:
    """Let values of configurations and arguments name only what is in `ALLOWED`, or what `--allow PREFIX` adds.

    Args:
        args: the command line; its parsers must be `Refusing`.

    Yields:
        The arguments without `--allow`, to be parsed.

    Raises:
        ValueError: a value names something else (the message says where), or a prefix is not a module's name.
    """
    rest, allowed = _split_allowed(args)
    allowed = [prefix for prefix in allowed if _is_within(prefix, REFUSED) or not _is_within(prefix, ALLOWED)]
    set_parsing_settings(
        import_path_denylist=["*", *REFUSED],
        import_path_allowlist=[*ALLOWED, *allowed],
        instantiate_subclass_spec_in_any=False,  # otherwise a setting of type Any builds any allowed class
        config_read_mode_fsspec_enabled=False,  # Lightning enables it, and --config then fetches any URL
    )
    try:
        yield rest
    except (ValueError, ImportError) as error:
        if (denied := _DENIED.search(str(error))) is None:
            raise
        raise _locate_refusal(denied[1], rest) from error
    finally:
        set_parsing_settings(import_path_denylist=allowed)


def _is_within(path: str, prefixes: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{prefix}.") for prefix in prefixes)


def _split_allowed(args: Sequence[str]) -> tuple[list[str], list[str]]:
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
            raise ValueError(f"{FLAG} must be a package or module to trust, such as mypackage.models, got {prefix!r}")
    return rest, allowed


def _locate_refusal(path: str, args: Sequence[str]) -> ValueError:
    """Return the error for a class path that is not allowed, with the place where it was given."""
    if path in NAMELESS and not any(path in text for text in (*args, *map(_read_start, _find_files(args)))):
        setting, example = NAMELESS[path]
        return ValueError(f"settings of {setting} are given without its class: name it, such as --{setting} {example}")
    if _FILE.fullmatch(path) and not Path(path).exists():
        return ValueError(f"no configuration file {path}: give a file that exists")
    where = next((f"in {file}" for file in _find_files(args) if path in _read_start(file)), "")
    where = where or ("on the command line" if any(path in word for word in args) else "in the configuration")
    prefix = path if path in REFUSED else path.rpartition(".")[0] or path
    return ValueError(
        f"add {FLAG} {prefix} if you trust class_path {path!r} {where}: it was not imported, as that runs it"
    )


def _find_files(args: Sequence[str]) -> list[Path]:
    """Return the configuration files that the arguments name, and those that these name in turn."""
    files: list[Path] = []
    names = [Path(name) for word in args for name in _FILE.findall(word)]
    while names:
        path = names.pop(0)
        if path.is_file() and path not in files:
            files.append(path)
            names += [path.parent / name for name in _FILE.findall(_read_start(path))]
    return files


def _read_start(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_FILE)
