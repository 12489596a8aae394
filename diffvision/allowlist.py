"""The allow-list of configurations: a class_path outside of it is refused before anything is imported.

Importing a module runs it, so an untrusted YAML file is a program. jsonargparse checks its list before each import that
a value leads to (class paths in files, sub-configurations and flags, callables, `--model.help NAME`). The list stays
for the parsers of the process; a prefix of `--allow` holds for its own command alone.
"""

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from jsonargparse import set_parsing_settings

from diffvision.errors import Mistake

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
# jsonargparse tries these classes for settings without a class_path -> how to name the class.
NAMELESS = {
    "lightning.LightningModule": "--model ContrastiveModule",
    "lightning.LightningDataModule": "--data ImageTextData",
}
REFUSED = (
    "diffvision.__main__",  # to import it is to run it
    "lightning.pytorch.callbacks.LambdaCallback",
    "lightning.pytorch.callbacks.lambda_function",
)
FLAG = "--allow"

_DENIED = re.compile(r"Importing '([^']+)' is not allowed")


@contextmanager
def limit_imports(args: Sequence[str]) -> Iterator[list[str]]:
    """Let values of configurations and arguments name only what is in `ALLOWED`, or what `--allow PREFIX` adds.

    Yields:
        The arguments without `--allow`, to be parsed.

    Raises:
        Mistake: a value names something else, or a prefix is not a module's name.
    """
    rest, prefixes = _split_allowed(args)
    added = [prefix for prefix in prefixes if _is_within(prefix, REFUSED) or not _is_within(prefix, ALLOWED)]
    set_parsing_settings(
        import_path_denylist=["*", *REFUSED],
        import_path_allowlist=[*ALLOWED, *added],
        instantiate_subclass_spec_in_any=False,  # otherwise a setting of type Any builds any allowed class
        config_read_mode_fsspec_enabled=False,  # Lightning enables it, and --config then fetches any URL
    )
    try:
        yield rest
    except (ValueError, ImportError) as error:
        if text := refusal(str(error)):
            raise Mistake(text) from error
        raise
    finally:
        set_parsing_settings(import_path_denylist=added)


def refusal(message: str) -> str:
    """Return the error for an import that jsonargparse's message says is not allowed, else ""."""
    if (denied := _DENIED.search(message)) is None:
        return ""
    if denied[1] in NAMELESS:
        return f"settings must come with their class, such as {NAMELESS[denied[1]]}"
    if denied[1].endswith((".yaml", ".yml", ".json")):
        return f"no configuration file {denied[1]}: give a file that exists"
    prefix = denied[1] if denied[1] in REFUSED else denied[1].rpartition(".")[0] or denied[1]
    return f"class_path {denied[1]!r} was not imported, since importing runs code: if you trust it, add {FLAG} {prefix}"


def _is_within(path: str, prefixes: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{prefix}.") for prefix in prefixes)


def _split_allowed(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without `--allow`, and its prefixes: never from a file, which could allow itself."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(FLAG, action="append", nargs="?", const="", default=[])
    known, rest = parser.parse_known_args(args)
    prefixes = [prefix.rstrip(".") for prefix in known.allow]
    for prefix in prefixes:
        if not all(part.isidentifier() for part in prefix.split(".")) or prefix.partition(".")[0] == "jsonargparse":
            raise Mistake(f"{FLAG} must be a package or module to trust, such as mypackage.models, got {prefix!r}")
    return rest, prefixes
