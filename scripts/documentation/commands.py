"""The page of all commands and their options, made from the parsers when the site is built (a hook of mkdocs).

python scripts/documentation/commands.py    # prints the page
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser
from typing import Any

from jsonargparse import auto_cli, capture_parser

from diffvision.cli import (
    COMMANDS,
    MAKE,
    RUN,
    TABLES,
    TRAINER_COMMANDS,
    command_names,
    function_of,
    summary_of,
    with_checks,
)
from diffvision.parsers import Parser
from diffvision.study import study_command
from diffvision.training.fit import FitCLI

PAGE = "reference/commands.md"
HEAD = """# Commands and options

`diffvision --help` lists the commands and `diffvision COMMAND --help` explains one. This page is made from the same
parsers when the site is built. Every command also takes `--config FILE` (its options from a YAML file),
`--print_config`, and `--allow PREFIX`
([which classes a configuration may name](../guides/untrusted.md#your-own-classes)).
Of those that print a table (TABLES), `--json` prints the numbers instead.
"""
MAKE_HEAD = f"""## {MAKE}

Each dataset has its own options. `diffvision {MAKE} --help` lists all datasets, with those of installed packages.
"""
LEFT_OUT = {"help", "config", "print_config"}


class _ParserMade(Exception):
    """Carry LightningCLI's parser out of its constructor."""


class _ParserOnly(FitCLI):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _ParserMade(parser)


def fit_parser() -> ArgumentParser:
    """Return the parser of `diffvision fit`, without reading a command line."""
    try:
        _ParserOnly(["fit"])
    except _ParserMade as made:
        (subcommands,) = (action for action in made.args[0]._actions if isinstance(action.choices, dict))
        return subcommands.choices["fit"]
    raise AssertionError("LightningCLI made no parser")


def command_parser(name: str) -> ArgumentParser:
    """Return the parser of one of the other commands."""
    function = with_checks(function_of(name))
    make = lambda: auto_cli(function, args=[], as_positional=True, parser_class=Parser)  # noqa: E731
    return capture_parser(make)


def page() -> str:
    """Return the whole page as Markdown."""
    fit = fit_parser()  # before the others, whose capture replaces jsonargparse's parsing
    parts = [HEAD.replace("TABLES", ", ".join(f"`{name}`" for name in TABLES)), _summary()]
    parts += [_command("fit", TRAINER_COMMANDS["fit"], fit, FIT)]
    parts.append(f"## validate\n\nThe options of [`fit`](#fit), to {TRAINER_COMMANDS['validate']}.\n")
    parts.append(_command("study", TRAINER_COMMANDS["study"], study_command.parser()))
    for name in command_names():
        if name.startswith(f"{MAKE} ") and MAKE_HEAD not in parts:
            parts.append(MAKE_HEAD)
        parts.append(_command(name, "", command_parser(name)))
    parts.append(f"## run\n\n{_sentence(RUN)} See [other people's programs](../guides/programs.md).\n")
    return "\n".join(parts)


FIT = """
`fit` is [LightningCLI](https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html). `--model` and `--data` take
the name of a class and then its arguments, `--model ContrastiveModule --model.model DiffCLIP-debug`; their arguments
are those of the classes in [Training](training.md) and [Data](data.md). `trainer.*` are the arguments of
[Lightning's Trainer](https://lightning.ai/docs/pytorch/stable/common/trainer.html).
"""


def _summary() -> str:
    summaries = {name: summary_of(name) for name in [*TRAINER_COMMANDS, *COMMANDS, "run"]}
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_inline(text)} |" for name, text in summaries.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, ""])


def _command(name: str, summary: str, parser: ArgumentParser, more: str = "") -> str:
    actions = [action for action in parser._actions if _shown(action)]
    positional = [action for action in actions if not action.option_strings]
    usage = " ".join(["diffvision", name, *(action.dest.upper() for action in positional), "[options]"])
    description = _inline(parser.description or "") if name != "fit" else _sentence(summary)
    head = f"## {name}\n\n{description}\n{more}\n```text\n{usage}\n```\n"
    return "\n".join([head, *map(_option, actions)])


def _shown(action: Action) -> bool:
    strings = action.option_strings or [action.dest]
    internal = action.dest in LEFT_OUT or type(action).__name__ == "_ActionConfigLoad"
    return not internal and action.help != SUPPRESS and not strings[0].endswith(".help")


def _option(action: Action) -> str:
    name = next((text for text in action.option_strings if text.startswith("--")), action.dest.upper())
    kind = _kind(getattr(action, "_typehint", None) or action.type or bool)
    required = action.required or not action.option_strings
    default = "" if action.default in (None, SUPPRESS) else f", default `{_value(action.default)}`"
    return f"`{name}` *{kind}*{', required' if required else default}\n:   {_inline(action.help or '')}\n"


def _kind(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and "[" not in str(hint) else str(hint)
    text = re.sub(r"\b[\w.]+\.(?=\w)", "", text)
    text = re.sub(r"Optional\[(.*)\]$", r"\1 | None", text).replace("NoneType", "None")
    text = re.sub(r"^Union\[(.*)\]$", lambda match: " | ".join(_split(match[1])), text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), text)
    return text.replace("|", "\\|").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_")


def _split(arguments: str) -> list[str]:
    """Split at the commas that are outside of all brackets."""
    return re.split(r", (?![^\[]*\])", arguments)


def _value(default: Any) -> str:
    if hasattr(default, "class_path"):
        return str(default.class_path).rsplit(".", 1)[-1]
    return str(default)


def _inline(text: str) -> str:
    """Return a help text as one line of Markdown: single backquotes, nothing that would be taken for HTML."""
    text = re.sub(r":\w+:`~?\.?([^`<]*)(<[^`]*>)?`", r"`\1`", text)
    text = re.sub(r"\s*Default: ``.*?``\.?", "", " ".join(text.split()), flags=re.DOTALL)
    return _sentence(text.replace("``", "`").replace("<", "&lt;").replace("|", "\\|"))


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ")", "`", "...")) else ".") if text else ""


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


if __name__ == "__main__":
    print(page())
