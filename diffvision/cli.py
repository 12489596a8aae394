"""The command line. The arguments, types and help of a command come from the signature of its function.

The modules of `COMMANDS` import PyTorch, timm and the like inside their functions, so that help is answered at once.
`fit` and `validate` are LightningCLI's, in `diffvision.training.fit`.
"""

import errno
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints


class Command(NamedTuple):
    """A row of `COMMANDS`: "module:function" in this package, and the line in `diffvision --help`."""

    function: str
    summary: str


COMMANDS = {
    "demo": Command("demo:demo", "train two small models and compare them, in minutes"),
    "evaluate": Command(
        "evaluation.evaluate_command:evaluate", "zero-shot, retrieval, probes and composition of a model"
    ),
    "compare": Command(
        "comparison.compare_command:compare", "several models or seeds: metrics, intervals, cost, curves"
    ),
    "models": Command("models.parameters:models", "list our models with their parameters"),
    "doctor": Command("doctor:doctor", "check the installation"),
    "data make": Command("data.make:make", "write a dataset as WebDataset shards"),
    "data check": Command("data.make:check", "verify shards, and decode every sample"),
    "evaluate-language": Command(
        "evaluation.language.evaluate_language_command:run", "perplexity, needles and more of language models"
    ),
    "evaluate-vlm": Command(
        "evaluation.vision_language.evaluate_vlm_command:run",
        "POPE, CHAIR and short answers of vision-language models",
    ),
    "generate": Command("generate:generate_text", "continue a text with a language model"),
    "export": Command("export.export_commands:export", "save for timm, OpenCLIP, transformers, ONNX, torch.export"),
    "inspect": Command("inspection.inspect_command:inspect", "attention maps and their statistics of a model, or two"),
    "adapt": Command(
        "export.export_commands:adapt_to_folder", "make a pretrained model differential, to continue training"
    ),
    "interpolate": Command(
        "export.export_commands:interpolate", "the weights between a pretrained and a fine-tuned model"
    ),
    "convert": Command("models.convert.command:convert", "write weights of one layout as another"),
    "data tokenizer": Command("data.make:tokenizer", "train a byte-level BPE tokenizer on text shards"),
    "data tokenize": Command("data.make:tokenize", "tokenise text shards or conversations"),
}

TABLES = ("models", "doctor", "evaluate", "compare", "evaluate-language", "evaluate-vlm", "data check")
"""Commands whose tables `--json` replaces; each calls `diffvision.tables.show` once."""

GROUPS = ("data",)  # first words of commands of two
SEVERAL = ("model", "models", "runs")  # names of first arguments that may be several
PATHS = ("data", "runs", "source", "images", "image", "demonstrations", "queries", "prompts")
"""Arguments that take files or folders."""
LEAST = {
    **dict.fromkeys(
        ("batch_size", "copies", "documents", "evaluated", "max_tokens", "per_shard", "steps", "tokens"), 1
    ),
    **dict.fromkeys(("num_workers", "rounds", "seed"), 0),
}
"""An argument -> its least value."""
MAKE = "data make"
JSON = "--json"
TRAINER_COMMANDS = {
    "fit": "train: diffvision fit --config clip/debug.yaml",
    "validate": "run a configuration's evaluations",
    "study": "train models by one recipe with several seeds, compare them",
}
RUN = "another program with our models: run PROGRAM ..."


def main(argv: list[str] | None = None) -> int:
    """Run `diffvision` or `python -m diffvision`, and return the exit status; an error is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"] and argv[1:]:
        from diffvision import run

        if argv[1] in ("-h", "--help"):
            print(run.__doc__)
        else:
            run.run(argv[1:])  # errors are the program's
        return 0
    from diffvision.data.shards.report import BadDataError, WorkerError
    from diffvision.errors import Mistake

    try:
        result = _choose(argv)
    except (ValueError, OSError, BadDataError, WorkerError, FloatingPointError, RecursionError) as error:
        print(f"diffvision: error: {_sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    except KeyboardInterrupt as stop:
        print(f"diffvision: {stop!s:.500}" if stop.args else "diffvision: interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _choose(argv: list[str]) -> Any:
    """Run the command that the first words name, and return its result."""
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        return print(_help())
    if first in ("-V", "--version"):
        from diffvision import __version__

        return print(f"diffvision {__version__}")
    if first == "study":
        from diffvision.study import study_command

        return study_command.main(argv[1:])
    if first in TRAINER_COMMANDS:
        return _train(argv)
    if first == "run":
        raise _mistake("run needs a program: a module or a .py file", "diffvision")
    words = 2 if first in GROUPS else 1
    name = " ".join(argv[:words])
    if name == MAKE and not argv[2:]:
        raise _mistake(f"{MAKE} needs a dataset", f"diffvision {MAKE}")
    if name == MAKE and argv[2] in ("-h", "--help"):
        return print(_help_of_datasets())
    if name == MAKE:
        return _command(f"{MAKE} {argv[2]}", argv[3:])
    if name in COMMANDS:
        return _command(name, argv[words:])
    if first in GROUPS and argv[1:2] in (["-h"], ["--help"]):
        return print("\n".join([f"usage: diffvision {first} COMMAND [arguments]", "", *map(_line, _inside(first))]))
    raise _no_command(name)


def _train(argv: list[str]) -> None:
    from diffvision.errors import Mistake
    from diffvision.training.recipes import resolve_recipes

    if len(argv) == 1:
        text = f"{argv[0]} needs a recipe, such as --config clip/debug.yaml, or a class, as --model ContrastiveModule"
        raise _mistake(text, f"diffvision {argv[0]}")
    try:
        argv = resolve_recipes(argv)
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from error
    from diffvision.training.fit import fit  # which imports Lightning

    fit(argv)


def _mistake(text: str, program: str) -> ValueError:
    from diffvision.errors import Mistake, see_help

    return Mistake(see_help(text, program))


def _no_command(name: str) -> ValueError:
    from diffvision.errors import did_you_mean

    if name in GROUPS:
        return _mistake(f"{name} needs a command: {', '.join(one.split()[1] for one in _inside(name))}", "diffvision")
    every = [*TRAINER_COMMANDS, *COMMANDS, "run"]
    near = "; did you mean fit?" if name == "train" else did_you_mean(name, every)
    return _mistake(f"no command {name!r}{near}", "diffvision")


def _inside(group: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


def _command(name: str, args: list[str]) -> Any:
    """Parse the arguments by the signature of a command's function, and call it."""
    from jsonargparse import auto_cli

    from diffvision.allowlist import limit_imports
    from diffvision.parsers import Parser
    from diffvision.tables import as_json

    command = function_of(name)
    checked = with_checks(command)
    is_json = name in TABLES and JSON in args
    required = [one for one in inspect.signature(checked).parameters.values() if one.default is one.empty]
    words = [
        f"--{one.name} {one.name.upper()}" if one.kind is one.KEYWORD_ONLY else one.name.upper() for one in required
    ]
    about: dict[str, Any] = {
        "prog": f"diffvision {name}",
        "usage": " ".join(["diffvision", name, *words, "[options]"]),
        "epilog": f"With {JSON}: the results as JSON, and nothing else on standard output." * (name in TABLES),
        "parser_class": Parser,
    }
    args = _as_yaml(command, _models_first(name, command, [arg for arg in args if not is_json or arg != JSON]))
    with as_json() if is_json else nullcontext(), limit_imports(args) as limited:
        return auto_cli(checked, args=limited, as_positional=True, **about)


def command_names() -> list[str]:
    """Return the names of all commands, `data make` once for each dataset."""
    from diffvision.data.datasets import datasets

    made = [f"{MAKE} {name}" for name in datasets()]
    return [one for name in COMMANDS for one in (made if name == MAKE else [name])]


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command; for `data make NAME`, the dataset's function."""
    if name.startswith(f"{MAKE} "):
        from diffvision.data.make import make_command

        return make_command(name.removeprefix(f"{MAKE} "))
    module, _, function = COMMANDS[name].function.partition(":")
    return getattr(importlib.import_module(f"diffvision.{module}"), function)


def with_checks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command's function that checks paths and numbers first, with the signature that jsonargparse reads.

    From the function itself jsonargparse would read the type of the result too, and import PyTorch for it.
    """

    def checked(**values: Any) -> Any:
        from diffvision.data.datasets import check_paths

        for name in LEAST.keys() & values.keys():
            if values[name] is not None and values[name] < LEAST[name]:
                raise ValueError(f"{name} must be at least {LEAST[name]}, got {values[name]}")
        check_paths({name: values[name] for name in PATHS if name in values})
        return command(**values)

    signature = inspect.signature(command)
    given = signature.parameters.values()
    hints = {one.name: Any if one.annotation is one.empty else one.annotation for one in given}
    types = get_type_hints(SimpleNamespace(__annotations__=hints), getattr(command, "__globals__", None))
    parameters = [one.replace(annotation=types[one.name]) for one in given]
    if parameters and _takes_several(parameters[0]):  # models come first, then options alone
        parameters[1:] = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters[1:]]
    checked.__doc__, checked.__annotations__ = command.__doc__, types
    vars(checked)["__signature__"] = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return checked


def _takes_several(first: inspect.Parameter) -> bool:
    return first.name in SEVERAL and "list[str]" in str(first.annotation)


def _models_first(name: str, command: Callable[..., Any], args: list[str]) -> list[str]:
    """Join several leading models into one argument, a list; name a leading argument that may be left out.

    Raises:
        Mistake: a model is given after `--model`, as OpenCLIP's programs take it.
    """
    parameters = [*inspect.signature(command).parameters.values()]
    count = next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return args
    first = parameters[0]
    if any(arg.partition("=")[0] == "--model" for arg in args) and first.name in SEVERAL:
        raise _mistake(f"the model must come first, without --model: diffvision {name} MODEL", f"diffvision {name}")
    leading = [json.dumps(args[:count])] if count > 1 and _takes_several(first) else args[:count]
    option = [f"--{first.name}"] if leading and first.default is not first.empty else []
    return [*option, *leading, *args[count:]]


def _as_yaml(command: Callable[..., Any], args: list[str]) -> list[str]:
    """Return arguments as jsonargparse reads them, which is as YAML: a switch `--NAME` as `--NAME true`.

    In YAML `# 3` and `null` are empty and `- a cat` is a list: such a text becomes a list of one.
    """
    kinds = {f"--{one.name}": str(one.annotation) for one in inspect.signature(command).parameters.values()}
    words: list[str] = []
    for index, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        before = words[-1] if words else ""
        if equals and "str | list[str]" in kinds.get(option, ""):
            words.append(f"{option}={_one_text(value)}")
        elif "str | list[str]" in kinds.get(before, "") and not arg.startswith("--"):
            words.append(_one_text(arg))
        else:
            is_switch = kinds.get(arg) in ("bool", str(bool)) and args[index + 1 :][:1] not in (["true"], ["false"])
            words += [arg, "true"] if is_switch else [arg]
    return words


def _one_text(value: str) -> str:
    is_other_yaml = value.startswith(("-", "#")) or value.strip().lower() in ("", "null", "~")
    return json.dumps([value]) if is_other_yaml else value


def _sentence(error: Exception) -> str:
    """Return an error's message; for an operating system's error, the file and the reason."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a disk that is written to'}: no space left: make room, then give the command again"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _help() -> str:
    usage = "usage: diffvision COMMAND [arguments]   (diffvision COMMAND --help explains one)"
    allow = "With --allow PREFIX, configurations may name classes of that package too."
    return "\n".join([usage, "", *map(_line, [*TRAINER_COMMANDS, *COMMANDS, "run"]), "", allow])


def _help_of_datasets() -> str:
    from textwrap import fill

    from diffvision.data.datasets import datasets, read_interface

    lines = [f"usage: diffvision {MAKE} DATASET DIRECTORY [options]\n"]
    for name, function in datasets().items():
        summary, *_ = (inspect.getdoc(read_interface(function)) or "").splitlines() or [""]
        lines.append(fill(f"  {name:<15} {summary}", 80, subsequent_indent=" " * 18))
    return "\n".join(lines)


def _line(name: str) -> str:
    return f"  {name:<18} {summary_of(name)}"


def summary_of(name: str) -> str:
    """Return what a command does, in a line."""
    return {**TRAINER_COMMANDS, "run": RUN}.get(name) or COMMANDS[name].summary


if __name__ == "__main__":
    sys.exit(main())
