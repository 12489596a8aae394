"""What a configuration may name: a class_path outside of an allow-list is refused before anything is imported.

To import a module is to run it, so a YAML from a stranger is a program. jsonargparse asks its own list before each
import that a value leads to (class paths in files, sub-configurations and flags, callables, `--model.help NAME`): here
that list is set for the time of one command, and what it refuses becomes one line that says where and what to do.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from jsonargparse import _common, _optionals, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

# No prefix wider than is needed: torch.hub, torch.utils.cpp_extension and LambdaCallback run what they are given.
ALLOWED = (
    "diffvision",
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
REFUSED = (
    "diffvision.__main__",  # to import it is to run it
    "lightning.pytorch.callbacks.LambdaCallback",
    "lightning.pytorch.callbacks.lambda_function",
)
FLAG = "--allow"

_DENIED = re.compile(r"Importing '([^']+)' is not allowed")
_FILE = re.compile(r"[^\s'\"=,:\[\]{}]+\.(?:ya?ml|json)\b")
_MAX_FILE = 1 << 20  # characters of a configuration that are searched


class ImportRefused(ValueError):
    """A configuration names what is not on the list.

    Attributes:
        path: what it names.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} may not be imported by a configuration")
        self.path = path


class Parser(LightningArgumentParser):
    """Lightning's parser, from which a refused import comes as `ImportRefused` rather than a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if (denied := _DENIED.search(message)) is not None:
            raise ImportRefused(denied[1]) from ex
        super().error(message, ex)


def split_allowed(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--allow PREFIX` and `--allow=PREFIX`, and the prefixes.

    They are taken from the command line alone: a file could otherwise allow itself.

    Raises:
        ValueError: a prefix that is no dotted name.
    """
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


@contextmanager
def imports_limited_to(allowed: Sequence[str]) -> Iterator[None]:
    """Within it, values of configurations may name what is in `ALLOWED` or under one of these prefixes, only."""
    # The settings are the process's, which may have parsers of its own: they are put back. Nothing public reads them.
    before, modes = dict(_common.parsing_settings), _optionals._get_config_read_mode()
    set_parsing_settings(
        import_path_denylist=["*", *REFUSED],
        import_path_allowlist=[*ALLOWED, *allowed],
        instantiate_subclass_spec_in_any=False,  # else any allowed class is built where a setting takes anything
        config_read_mode_fsspec_enabled=False,  # Lightning turns it on, and --config then fetches any URL
    )
    try:
        yield
    finally:
        _common.parsing_settings.update(before)
        _optionals._set_config_read_mode(urls_enabled="u" in modes, fsspec_enabled="s" in modes)


def refusal(path: str, args: Sequence[str]) -> ValueError:
    """The error to show for a refused import: what, where, which are allowed, how to allow it."""
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
