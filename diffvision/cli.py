"""The command line: argument -> function. Every command's arguments, types and help are its function's signature."""

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from jsonargparse import auto_cli

from diffvision.allow import Parser, limited_imports
from diffvision.data.shards.report import BadDataError

# command -> (module, function, what it does); the module is imported only when its command runs
COMMANDS = {
    "demo": (
        "diffvision.demo",
        "demo",
        "train and compare small models in minutes: CLIPs, or with --language text",
    ),
    "evaluate": ("diffvision.evaluation.suite", "run", "zero-shot, retrieval, probes and composition of a model"),
    "models": ("diffvision.cli", "models", "list our models with their parameters"),
    "doctor": ("diffvision.doctor", "doctor", "check the installation"),
    "data make": ("diffvision.data.make", "make", "write a dataset as WebDataset shards"),
    "data check": ("diffvision.data.make", "check", "verify shards, and decode every sample"),
    "evaluate-language": (
        "diffvision.evaluation.language.suite",
        "run",
        "perplexity, needles, many-shot, outliers and more of language models",
    ),
    "generate": ("diffvision.generate", "generate_text", "continue a text with a language model"),
    "export": (
        "diffvision.export.command",
        "export",
        "write a trained model as its host's folder, torch.export, ONNX or in eight bits",
    ),
    "inspect": (
        "diffvision.inspection",
        "inspect",
        "look inside of a model, or two side by side: attention maps, numbers, one page",
    ),
    "push": ("diffvision.export.hub", "push", "send a model's folder to the Hugging Face Hub"),
    "adapt": (
        "diffvision.export.adapted",
        "adapt",
        "make a pretrained model differential, to train on from there",
    ),
    "convert": ("diffvision.models.convert", "convert", "write weights of one layout as another"),
    "data tokenizer": ("diffvision.data.make", "tokenizer", "train a byte-level BPE tokenizer on text shards"),
    "data tokenize": ("diffvision.data.make", "tokenize", "write text shards as token shards"),
    "data stats": ("diffvision.data.make", "stats", "count and measure shards"),
}
TRAINER_COMMANDS = {
    "fit": "train: diffvision fit --config configs/clip/debug.yaml",
    "validate": "run a configuration's evaluations",
    "test": "run a configuration's test loop",
}


def models(filter: str = "*") -> None:
    """Prints our models, for timm, OpenCLIP and text, with their parameters (counted on the meta device).

    Args:
        filter: shell pattern, e.g. "diff_vit_base*", "DiffCLIP*" or "*-3b".
    """
    from fnmatch import fnmatch

    import open_clip
    import timm
    import torch
    from rich.console import Console
    from rich.table import Table

    from diffvision.models import clip, language, vision

    known = {"timm": vision.model_names(), "OpenCLIP": clip.model_names(), "text": language.model_names()}
    if not any(fnmatch(name, filter) for names in known.values() for name in names):
        raise ValueError(
            f"no model of ours is called as {filter!r} says: give a pattern such as 'diff_vit*' or '*CLIP*'"
        )
    table = Table("model", "host", "parameters")
    logging.disable(logging.WARNING)  # OpenCLIP warns of every model that it builds without weights
    with torch.device("meta"):
        for name in known["timm"]:
            if fnmatch(name, filter):
                table.add_row(name, "timm", _parameters(timm.create_model(name)))
        for name in known["OpenCLIP"]:
            if fnmatch(name, filter):
                table.add_row(name, "OpenCLIP", _parameters(open_clip.create_model(name, device="meta")))
        for name in known["text"]:
            if fnmatch(name, filter):
                table.add_row(name, "text", _parameters(language.create(name)))
    logging.disable(logging.NOTSET)
    Console().print(table)


def _parameters(model: Any) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


def main(argv: list[str] | None = None) -> int:
    """Entry point of `diffvision` and `python -m diffvision`. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from diffvision import __version__

        print(f"diffvision {__version__}")
        return 0
    if argv[0] in TRAINER_COMMANDS:
        from diffvision.training.fit import fit

        return _reported(lambda: fit(argv))
    if argv[0] == "run":
        from diffvision.run import run

        if len(argv) < 2:
            print("diffvision run: name a module or a .py file to run", file=sys.stderr)
            return 2
        run(argv[1:])  # errors are the program's own
        return 0
    words = 2 if argv[0] == "data" else 1
    name = " ".join(argv[:words])
    if name not in COMMANDS:
        print(f"diffvision: no command {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    command = getattr(importlib.import_module(module), function)

    def called() -> Any:
        given = _models_first(name, command, argv[words:])
        with limited_imports(_as_they_stand(command, _switched(command, given))) as args:
            return auto_cli(command, args=args, prog=f"diffvision {name}", as_positional=True, parser_class=Parser)

    return _reported(called)


def _models_first(name: str, command: Callable[..., Any], args: list[str]) -> list[str]:
    """Return the arguments with several models in a row as one list; raise a ValueError for a model after `--model`."""
    first = next(iter(inspect.signature(command).parameters), "")
    if first in ("model", "models"):
        if any(arg.partition("=")[0] in ("--model", "--models") for arg in args):
            raise ValueError(f"give the model first, without --model: diffvision {name} MODEL ...")
        count = next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))
        if first == "models" and count > 1:
            return [json.dumps(args[:count]), *args[count:]]
    return args


def _switched(command: Callable[..., Any], args: list[str]) -> list[str]:
    """The arguments, with a value for each switch that stands alone: `--language` is `--language true`."""
    parameters = inspect.signature(command).parameters.values()
    switches = {f"--{own.name}" for own in parameters if own.annotation in (bool, "bool")}
    given: list[str] = []
    for place, arg in enumerate(args):
        alone = arg in switches and args[place + 1 : place + 2] not in (["true"], ["false"])
        given += [arg, "true"] if alone else [arg]
    return given


def _as_they_stand(command: Callable[..., Any], args: list[str]) -> list[str]:
    """The arguments, where a text or a list of texts may be given: what begins with a bracket is a list, others a text.

    They are read as YAML, in which `# 3` and `null` are nothing and `- a cat` is a list: those become a list of one.
    """
    texts = {
        f"--{own.name}"
        for own in inspect.signature(command).parameters.values()
        if "str | list[str]" in str(own.annotation)
    }
    given: list[str] = []
    for arg in args:
        name, joined, value = arg.partition("=")
        if given and given[-1] in texts and not arg.startswith("--"):
            given.append(_one_text(arg))
        else:
            given.append(f"{name}={_one_text(value)}" if joined and name in texts else arg)
    return given


def _one_text(value: str) -> str:
    taken_otherwise = value.startswith(("-", "#")) or value.strip().lower() in ("", "null", "~")
    return json.dumps([value]) if taken_otherwise else value


def _reported(call: Callable[[], Any]) -> int:
    """Runs a command: bad input ends with its one line, not a page of traceback."""
    try:
        result = call()
    except (ValueError, OSError, BadDataError, FloatingPointError) as error:
        print(f"diffvision: error: {_sentence(error)}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0


def _sentence(error: Exception) -> str:
    """An error's message; of one of the system's, the file and what is the matter with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _help() -> str:
    described = {**TRAINER_COMMANDS, **{name: text for name, (_, _, text) in COMMANDS.items()}}
    described["run"] = "run another program with our models registered: diffvision run open_clip_train.main ..."
    lines = [f"  {name:<18} {text}" for name, text in described.items()]
    usage = "usage: diffvision COMMAND [arguments]   (diffvision COMMAND --help explains one)"
    allow = "--allow PREFIX, with any of them: configurations may name classes of that package too"
    return "\n".join([usage, "", *lines, "", allow])


if __name__ == "__main__":
    sys.exit(main())
