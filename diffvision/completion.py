"""`diffvision completion`: a script by which bash, zsh or fish completes commands, options, recipes and model names.

The script holds all words, so that a shell answers at once, without Python. It is written anew after an update.
"""

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from diffvision.cli import COMMANDS, JSON, TABLES, TRAINER_COMMANDS
from diffvision.training.recipes import recipes

MODELS = Path(__file__).with_name("models") / "parameters.json"
_TRAINED = ("ContrastiveModule", "ClassificationModule", "LanguageModule")
_PATHS = ("--config", "--versus")  # options that take a file too
_DATA = ("ImageTextData", "ImageLabelData", "TextData")

BASH = """\
# Completion of diffvision in bash. Write it where bash-completion looks, or source it in ~/.bashrc:
#   diffvision completion bash > ~/.local/share/bash-completion/completions/diffvision
_diffvision() {
    local current=${COMP_WORDS[COMP_CWORD]} before=$((COMP_CWORD - 1)) command=${COMP_WORDS[1]} words=
    [[ $current == "=" ]] && current=
    [[ ${COMP_WORDS[before]} == "=" ]] && before=$((before - 1))
    [[ ${COMP_WORDS[COMP_CWORD]} == "=" ]] && before=$((COMP_CWORD - 1))
    local option=${COMP_WORDS[before]} first=2
    if [[ $command == data && $COMP_CWORD -gt 1 ]]; then command="data ${COMP_WORDS[2]}" first=3; fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="@COMMANDS@"
    elif [[ $COMP_CWORD -eq 2 && ${COMP_WORDS[1]} == data ]]; then
        words="@DATA@"
    elif [[ $option == -* && $current != -* ]]; then
        case "$command $option" in
@VALUES@
        esac
    elif [[ $current == -* ]]; then
        case "$command" in
@OPTIONS@
        esac
    elif [[ $COMP_CWORD -eq $first ||
        (" @SEVERAL@ " == *" $command "* && " ${COMP_WORDS[*]:first:COMP_CWORD-first}" != *" -"*) ]]; then
        case "$command" in
@FIRST@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *. ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o default -F _diffvision diffvision
"""
ZSH = """\
# Completion of diffvision in zsh. Source it in ~/.zshrc, after compinit:
#   source <(diffvision completion zsh)       or, faster, from a file that this has written
autoload -U +X bashcompinit && bashcompinit
"""


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the script by which a shell completes commands, options, recipes and the names of our models.

    Args:
        shell: bash, zsh or fish. The first lines of the script say where to write it.
    """
    commands = {name: options(name) for name in [*TRAINER_COMMANDS, *COMMANDS]}
    print(_fish(commands) if shell == "fish" else (ZSH if shell == "zsh" else "") + _bash(commands), end="")


def options(command: str) -> dict[str, list[str]]:
    """Return a command's options, each with the values that it takes where they are few, and "" for its first argument.

    They are read from signatures: the parser of `fit` takes seconds to build, and imports all that it may train.
    """
    if command in TRAINER_COMMANDS:
        return _of_trainer(command)
    module, function, _ = COMMANDS[command]
    imported = importlib.import_module(module)
    every = dict(_of_function(getattr(imported, function)))
    if command == "data make":
        from diffvision.data.made import MADE

        every[""] = list(MADE)
    return every | ({JSON: []} if command in TABLES else {})


def takes_several(command: str) -> bool:
    """Return whether a command's first argument, a model, may be given several times."""
    if command in TRAINER_COMMANDS:
        return False
    module, function, _ = COMMANDS[command]
    first = next(iter(inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()), None)
    return first is not None and first.name in ("model", "models") and "list[str]" in str(first.annotation)


def _of_function(function: Callable[..., Any]) -> Iterator[tuple[str, list[str]]]:
    parameters = inspect.signature(function).parameters
    # Without the result's, which may be imported for type checkers alone.
    annotated = SimpleNamespace(__annotations__={name: one.annotation for name, one in parameters.items()})
    hints = get_type_hints(annotated, function.__globals__)
    for number, (name, parameter) in enumerate(parameters.items()):
        hint = hints[name]
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if is_positional:
            if number == 0:
                yield "", _models() if name in ("model", "models") else _choices(hint)
        elif dataclasses.is_dataclass(hint):
            yield from ((f"--{name}.{field.name}", []) for field in dataclasses.fields(hint))
        else:
            yield f"--{name}", _models() if name == "versus" else _choices(hint)


def _of_trainer(command: str) -> dict[str, list[str]]:
    from lightning.pytorch import Trainer

    from diffvision import data, training

    every: dict[str, list[str]] = {
        "--config": recipes(),
        "--model": list(_TRAINED),
        "--data": list(_DATA),
        "--seed_everything": [],
        "--ckpt_path": [],
        "--print_config": [],
        "--allow": [],
    }
    if command == "fit":
        every |= {"--resume": ["auto", "must", "never"], "--resume_ranks": ["same", "any"]}
    for owner, names in ((training, _TRAINED), (data, _DATA)):
        setting = "model" if owner is training else "data"
        for name in names:
            for parameter in list(inspect.signature(getattr(owner, name)).parameters.values()):
                every.setdefault(f"--{setting}.{parameter.name}", [])
    every |= {f"--model.optimizer.{field.name}": [] for field in dataclasses.fields(training.OptimizerSettings)}
    every["--model.model"] = _models()
    return every | {f"--trainer.{name}": [] for name in inspect.signature(Trainer).parameters}


def _choices(hint: Any) -> list[str]:
    """Return the values of a Literal, also of one that may be None."""
    parts = [hint, *get_args(hint)]
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]


def _models() -> list[str]:
    counts = json.loads(MODELS.read_text(encoding="utf-8"))
    return [name for host in counts.values() for name in host]


# ---- scripts -------------------------------------------------------------------------------------------------------


def _bash(commands: dict[str, dict[str, list[str]]]) -> str:
    of_data = [name.removeprefix("data ") for name in commands if name.startswith("data ")]
    first = dict.fromkeys([*(name.partition(" ")[0] for name in commands), "run", "--help", "--version"])
    cases = {
        "COMMANDS": " ".join(first),
        "DATA": " ".join(of_data),
        "SEVERAL": " ".join(name for name in commands if takes_several(name)),
        "VALUES": "\n".join(
            f'        "{name} {option}") words="{" ".join(values)}" ;;'
            for name, of_command in commands.items()
            for option, values in of_command.items()
            if option and values
        ),
        "OPTIONS": "\n".join(
            f'        "{name}") words="{" ".join([*filter(None, of_command), "--help"])}" ;;'
            for name, of_command in commands.items()
        ),
        "FIRST": "\n".join(
            f'        "{name}") words="{" ".join(of_command[""])}" ;;'
            for name, of_command in commands.items()
            if of_command.get("")
        ),
    }
    script = BASH
    for key, text in cases.items():
        script = script.replace(f"@{key}@", text)
    return script


def _fish(commands: dict[str, dict[str, list[str]]]) -> str:
    lines = [
        "# Completion of diffvision in fish:",
        "#   diffvision completion fish > ~/.config/fish/completions/diffvision.fish",
    ]
    names = {name.partition(" ")[0] for name in commands} | {"run"}
    known = " ".join(sorted(names))
    summaries = TRAINER_COMMANDS | {name: row.summary for name, row in COMMANDS.items()}
    for name, of_command in commands.items():
        words = name.split()
        before = f"not __fish_seen_subcommand_from {known}" if len(words) == 1 else "__fish_seen_subcommand_from data"
        summary = summaries[name].replace("'", "")
        lines.append(f"complete -c diffvision -f -n '{before}' -a {words[-1]} -d '{summary}'")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        for option, values in of_command.items():
            valued = "" if option == JSON else " -x" if values and option not in _PATHS else " -r"  # -x: no files
            # A model may be a file or a folder too.
            no_files = "" if values == _models() else " -f"
            flag = f" -l {option.removeprefix('--')}{valued}" if option else no_files
            chosen = f" -a '{' '.join(values)}'" if values else ""
            if option or values:
                lines.append(f"complete -c diffvision -n '{seen}'{flag}{chosen}")
    return "\n".join([*lines, ""])
