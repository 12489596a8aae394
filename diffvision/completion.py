"""`diffvision completion`: a script by which bash, zsh or fish completes commands, options, recipes and model names.

The script holds all words, so that a shell answers at once, without Python. It is written anew after an update.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from diffvision.cli import GROUPS, JSON, MAKE, SEVERAL, TABLES, TRAINER_COMMANDS, command_names, function_of, summary_of
from diffvision.data.made import datasets
from diffvision.signatures import list_choices, parameter_types, read_settings
from diffvision.training.recipes import recipes
from diffvision.training.settings import CLASSES, read_known

MODELS = Path(__file__).with_name("models") / "parameters.json"
_PATHS = ("--config", "--versus")  # options that take a file too

BASH = """\
# Completion of diffvision in bash. Write it where bash-completion looks, or source it in ~/.bashrc:
#   diffvision completion bash > ~/.local/share/bash-completion/completions/diffvision
_diffvision() {
    local current=${COMP_WORDS[COMP_CWORD]} before=$((COMP_CWORD - 1)) command=${COMP_WORDS[1]} words=
    [[ $current == "=" ]] && current=
    [[ ${COMP_WORDS[before]} == "=" ]] && before=$((before - 1))
    [[ ${COMP_WORDS[COMP_CWORD]} == "=" ]] && before=$((COMP_CWORD - 1))
    local option=${COMP_WORDS[before]} first=2
    if [[ $command == @GROUPS@ && $COMP_CWORD -gt 1 ]]; then command+=" ${COMP_WORDS[2]}" first=3; fi
    if [[ $command == "data make" && $COMP_CWORD -gt 3 ]]; then command="data make ${COMP_WORDS[3]}" first=4; fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="@COMMANDS@"
    elif [[ $COMP_CWORD -eq 2 && ${COMP_WORDS[1]} == @GROUPS@ ]]; then
        case ${COMP_WORDS[1]} in
@SECOND@
        esac
    elif [[ $COMP_CWORD -eq 3 && $command == "data make" ]]; then
        words="@DATASETS@"
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
    commands = {name: options(name) for name in [*TRAINER_COMMANDS, *command_names()]}
    print(_write_fish(commands) if shell == "fish" else (ZSH if shell == "zsh" else "") + _write_bash(commands), end="")


def options(command: str) -> dict[str, list[str]]:
    """Return a command's options, each with the values that it takes where they are few, and "" for its first argument.

    They are read from signatures; those of `fit` from source, because its parser imports all that it may train.
    """
    if command in TRAINER_COMMANDS:
        return _list_trainer_options(command)
    return dict(_list_options(function_of(command))) | ({JSON: []} if command in TABLES else {})


def takes_several(command: str) -> bool:
    """Return whether a command's first argument, a model, may be given several times."""
    if command in TRAINER_COMMANDS:
        return False
    first = next(iter(inspect.signature(function_of(command)).parameters.values()), None)
    return first is not None and first.name in SEVERAL and "list[str]" in str(first.annotation)


def _list_options(function: Callable[..., Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield a command's options with the values that each can take."""
    parameters, hints = inspect.signature(function).parameters, parameter_types(function)
    for number, (name, parameter) in enumerate(parameters.items()):
        hint = hints[name]
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if is_positional:
            if number == 0:
                yield "", _list_models() if name in ("model", "models") else list_choices(hint)
        elif dataclasses.is_dataclass(hint):
            yield from ((f"--{name}.{field.name}", []) for field in dataclasses.fields(hint))
        else:
            yield f"--{name}", _list_models() if name == "versus" else list_choices(hint)


def _list_trainer_options(command: str) -> dict[str, list[str]]:
    every: dict[str, list[str]] = {"--config": recipes(), "--print_config": [], "--allow": []}
    for setting, kind in read_known().items():
        if command == "fit" or not setting.startswith("resume"):
            every[f"--{setting}"] = list_choices(kind)
    for owner, classes in CLASSES.items():
        every[f"--{owner}"] = list(classes)
        every |= {f"--{owner}.{setting}": [] for path in classes.values() for setting in read_settings(path)}
    return every | {"--model.model": _list_models()}


def _list_models() -> list[str]:
    counts = json.loads(MODELS.read_text(encoding="utf-8"))
    return [name for host in counts.values() for name in host]


# ---- scripts -------------------------------------------------------------------------------------------------------


def _write_bash(commands: dict[str, dict[str, list[str]]]) -> str:
    second = {one: dict.fromkeys(name.split()[1] for name in commands if name.startswith(f"{one} ")) for one in GROUPS}
    first = dict.fromkeys([*(name.partition(" ")[0] for name in commands), "run", "--help", "--version"])
    cases = {
        "COMMANDS": " ".join(first),
        "GROUPS": f"@({'|'.join(GROUPS)})",
        "SECOND": "\n".join(f'        {one}) words="{" ".join(words)}" ;;' for one, words in second.items()),
        "DATASETS": " ".join(datasets()),
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


def _write_fish(commands: dict[str, dict[str, list[str]]]) -> str:
    lines = [
        "# Completion of diffvision in fish:",
        "#   diffvision completion fish > ~/.config/fish/completions/diffvision.fish",
    ]
    names = {name.partition(" ")[0] for name in commands} | {"run"}
    known = " ".join(sorted(names))
    for name, of_command in ({MAKE: dict[str, list[str]]()} | commands).items():
        words = name.split()
        above = f"__fish_seen_subcommand_from {' '.join(words[-2:-1])}"
        before = f"not __fish_seen_subcommand_from {known}" if len(words) == 1 else above
        summary = summary_of(name).replace("'", "")
        lines.append(f"complete -c diffvision -f -n '{before}' -a {words[-1]} -d '{summary}'")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        for option, values in of_command.items():
            valued = "" if option == JSON else " -x" if values and option not in _PATHS else " -r"  # -x: no files
            # A model may be a file or a folder too.
            no_files = "" if values == _list_models() else " -f"
            flag = f" -l {option.removeprefix('--')}{valued}" if option else no_files
            chosen = f" -a '{' '.join(values)}'" if values else ""
            if option or values:
                lines.append(f"complete -c diffvision -n '{seen}'{flag}{chosen}")
    return "\n".join([*lines, ""])
