"""The command line. The arguments, types and help of a command come from the signature of its function.

The modules of `COMMANDS` import PyTorch, timm and the like inside their functions, so that help is answered at once.
`fit`, `validate` and `test` are LightningCLI's, in `diffvision.training.fit`.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints


class Command(NamedTuple):
    """A row of `COMMANDS`: the module and name of a command's function, and its line in `diffvision --help`.

    A command without its own line is described by the first sentence of its function.
    """

    module: str
    function: str
    summary: str


COMMANDS = {
    "demo": Command("diffvision.demo", "demo", "train two small models and compare them, in minutes"),
    "evaluate": Command(
        "diffvision.evaluation.evaluate_command", "evaluate", "zero-shot, retrieval, probes and composition of a model"
    ),
    "compare": Command(
        "diffvision.comparison.compare_command",
        "compare",
        "several models or seeds: metrics, intervals, cost, curves",
    ),
    "models": Command("diffvision.models.parameters", "models", "list our models with their parameters"),
    "doctor": Command("diffvision.doctor", "doctor", "check the installation"),
    "data make": Command("diffvision.data.make", "make", "write a dataset as WebDataset shards"),
    "data check": Command("diffvision.data.make", "check", "verify shards, and decode every sample"),
    "evaluate-language": Command(
        "diffvision.evaluation.language.evaluate_language_command",
        "run",
        "perplexity, needles and more of language models",
    ),
    "evaluate-vlm": Command(
        "diffvision.evaluation.vision_language.evaluate_vlm_command",
        "run",
        "POPE, CHAIR and short answers of vision-language models",
    ),
    "generate": Command("diffvision.generate", "generate_text", "continue a text with a language model"),
    "export": Command(
        "diffvision.export.export_commands", "export", "a model as its host's folder, torch.export or ONNX"
    ),
    "inspect": Command(
        "diffvision.inspection.inspect_command", "inspect", "attention maps and their statistics of a model, or two"
    ),
    "adapt": Command(
        "diffvision.export.export_commands",
        "adapt_to_folder",
        "make a pretrained model differential, to continue training",
    ),
    "interpolate": Command(
        "diffvision.export.export_commands", "interpolate", "the weights between a pretrained and a fine-tuned model"
    ),
    "convert": Command("diffvision.models.convert.command", "convert", "write weights of one layout as another"),
    "data tokenizer": Command("diffvision.data.make", "tokenizer", "train a byte-level BPE tokenizer on text shards"),
    "data tokenize": Command("diffvision.data.make", "tokenize", "tokenise text shards or conversations"),
}

TABLES = (
    "models",
    "doctor",
    "evaluate",
    "compare",
    "evaluate-language",
    "evaluate-vlm",
    "data check",
)
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
    "test": "run a configuration's test loop",
}
RUN = "another program with our models: run PROGRAM ..."


def main(argv: list[str] | None = None) -> int:
    """Run `diffvision` or `python -m diffvision`, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from diffvision import __version__

        print(f"diffvision {__version__}")
        return 0
    if argv[0] in TRAINER_COMMANDS:
        return _train(argv)
    if argv[0] == "run":
        return _run(argv[1:])
    words = 2 if argv[0] in GROUPS else 1
    name = " ".join(argv[:words])
    if name not in COMMANDS:
        return _no_command(name)
    if name == MAKE:
        return _make(argv[words:])
    return _run_and_report(lambda: _command(name, argv[words:]))


def _make(argv: list[str]) -> int:
    from textwrap import fill

    from diffvision.data.datasets import datasets, read_interface
    from diffvision.errors import see_help

    if argv and argv[0] not in ("-h", "--help"):
        return _run_and_report(lambda: _command(f"{MAKE} {argv[0]}", argv[1:]))
    if argv:
        print(f"usage: diffvision {MAKE} DATASET DIRECTORY [options]\n")
        for name, function in datasets().items():
            summary, *_ = (inspect.getdoc(read_interface(function)) or "").splitlines() or [""]
            print(fill(f"  {name:<15} {summary}", 80, subsequent_indent=" " * 18))
        return 0
    print(f"diffvision: error: {see_help(f'{MAKE} needs a dataset', f'diffvision {MAKE}')}", file=sys.stderr)
    return 2


def _train(argv: list[str]) -> int:
    from diffvision.errors import see_help
    from diffvision.training.recipes import resolve_recipes

    if len(argv) == 1:
        text = f"{argv[0]} needs a recipe, such as --config clip/debug.yaml, or a class, as --model ContrastiveModule"
        print(f"diffvision: error: {see_help(text, f'diffvision {argv[0]}')}", file=sys.stderr)
        return 2
    try:
        argv = resolve_recipes(argv)
    except (ValueError, OSError) as error:
        print(f"diffvision: error: {error}", file=sys.stderr)
        return 2

    def fit() -> None:
        from diffvision.training.fit import fit  # which imports Lightning

        fit(argv)

    return _run_and_report(fit)


def _run(argv: list[str]) -> int:
    from diffvision.run import run

    if not argv:
        print("diffvision run: name a module or a .py file to run", file=sys.stderr)
        return 2
    run(argv)  # errors are the program's
    return 0


def _no_command(name: str) -> int:
    from diffvision.errors import did_you_mean, see_help

    group, _, word = name.partition(" ")
    inside = [other for other in COMMANDS if other.startswith(f"{group} ")]
    if inside and word in ("-h", "--help"):
        print("\n".join([f"usage: diffvision {group} COMMAND [arguments]", "", *map(_line, inside)]))
        return 0
    if inside and not word:
        text = f"{group} needs a command: {', '.join(other.partition(' ')[2] for other in inside)}"
    elif name == "train":
        text = "no command 'train'; did you mean fit?"
    else:
        text = f"no command {name!r}{did_you_mean(name, [*TRAINER_COMMANDS, *COMMANDS, 'run'])}"
    print(f"diffvision: error: {see_help(text, 'diffvision')}", file=sys.stderr)
    return 2


def _command(name: str, args: list[str]) -> Any:
    """Parse the arguments by the signature of a command's function, and call it."""
    from jsonargparse import auto_cli

    from diffvision.allowlist import Parser, limit_imports
    from diffvision.tables import as_json

    command = function_of(name)
    epilog = f"With {JSON}: the results as JSON, and nothing else on standard output." if name in TABLES else None
    output: AbstractContextManager[None] = nullcontext()
    if name in TABLES and JSON in args:
        args, output = [arg for arg in args if arg != JSON], as_json()
    args = _models_first(name, command, args)
    about: dict[str, Any] = {"prog": f"diffvision {name}", "epilog": epilog, "parser_class": Parser}
    with output, limit_imports(_with_texts(command, _with_switches(command, args))) as limited:
        return auto_cli(_checked(command), args=limited, as_positional=True, **about)


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
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(module), function)


def _checked(command: Callable[..., Any]) -> Callable[..., Any]:
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
    several = parameters and parameters[0].name in SEVERAL and "list[str]" in str(parameters[0].annotation)
    if several:  # models come first, then options alone
        parameters[1:] = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters[1:]]
    checked.__doc__, checked.__annotations__ = command.__doc__, types
    vars(checked)["__signature__"] = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return checked


def _models_first(name: str, command: Callable[..., Any], args: list[str]) -> list[str]:
    """Join several leading models into one argument, a list; raise a ValueError for a model after `--model`."""
    first = next(iter(inspect.signature(command).parameters.values()), None)
    if first is not None and first.name in SEVERAL and first.kind is not first.KEYWORD_ONLY:
        if any(arg.partition("=")[0] in ("--model", "--models") for arg in args):
            raise ValueError(f"give the model first, without --model: diffvision {name} MODEL ...")
        count = next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))
        leading = [json.dumps(args[:count])] if count > 1 and "list[str]" in str(first.annotation) else args[:count]
        # One that may be left out is an option.
        option = [f"--{first.name}"] if leading and first.default is not first.empty else []
        return [*option, *leading, *args[count:]]
    return args


def _with_switches(command: Callable[..., Any], args: list[str]) -> list[str]:
    """Add a value to each switch without one: `--json` becomes `--json true`."""
    parameters = inspect.signature(command).parameters.values()
    switches = {f"--{parameter.name}" for parameter in parameters if parameter.annotation in (bool, "bool")}
    valued: list[str] = []
    for index, arg in enumerate(args):
        alone = arg in switches and args[index + 1 : index + 2] not in (["true"], ["false"])
        valued += [arg, "true"] if alone else [arg]
    return valued


def _with_texts(command: Callable[..., Any], args: list[str]) -> list[str]:
    """Quote the arguments of `str | list[str]` parameters that YAML would read as something else than their text.

    In YAML `# 3` and `null` are empty and `- a cat` is a list: such a text becomes a list of one. A text that begins
    with `[` is a list of texts.
    """
    texts = {
        f"--{parameter.name}"
        for parameter in inspect.signature(command).parameters.values()
        if "str | list[str]" in str(parameter.annotation)
    }
    quoted: list[str] = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if quoted and quoted[-1] in texts and not arg.startswith("--"):
            quoted.append(_one_text(arg))
        else:
            quoted.append(f"{name}={_one_text(value)}" if equals and name in texts else arg)
    return quoted


def _one_text(value: str) -> str:
    is_other_yaml = value.startswith(("-", "#")) or value.strip().lower() in ("", "null", "~")
    return json.dumps([value]) if is_other_yaml else value


def _run_and_report(call: Callable[[], Any]) -> int:
    """Run a command and return its exit status; bad input and Ctrl-C are one line instead of a traceback."""
    from diffvision.data.shards.report import BadDataError, WorkerError
    from diffvision.errors import Mistake

    try:
        result = call()
    except (ValueError, OSError, BadDataError, WorkerError, FloatingPointError, RecursionError) as error:
        print(f"diffvision: error: {_sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 1
    except KeyboardInterrupt as stop:
        print(f"diffvision: {stop!s:.500}" if stop.args else "diffvision: interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _sentence(error: Exception) -> str:
    """Return an error's message; for an operating system's error, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _help() -> str:
    usage = "usage: diffvision COMMAND [arguments]   (diffvision COMMAND --help explains one)"
    allow = "With --allow PREFIX, configurations may name classes of that package too."
    return "\n".join([usage, "", *map(_line, [*TRAINER_COMMANDS, *COMMANDS, "run"]), "", allow])


def _line(name: str) -> str:
    return f"  {name:<18} {summary_of(name)}"


def summary_of(name: str) -> str:
    """Return what a command does, in a line."""
    if name in TRAINER_COMMANDS or name == "run":
        return TRAINER_COMMANDS.get(name, RUN)
    if name in COMMANDS and COMMANDS[name].summary:
        return COMMANDS[name].summary
    first = (inspect.getdoc(function_of(name)) or "").partition("\n")[0]
    return first[:1].lower() + first[1:].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
