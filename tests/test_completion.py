"""The script of `diffvision completion`, tried in bash."""

import shutil
import subprocess

import pytest

from diffvision import cli
from diffvision.completion import completion, options
from diffvision.training.recipes import recipes

TRY = """
source "$1"; complete -p diffvision; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _diffvision 2>/dev/null; echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "script"
    with file.open("w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        completion("bash")
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ev", ["evaluate", "evaluate-language", "evaluate-vlm"]),
        ("data ch", ["check"]),
        pytest.param("data make digit", ["digits", "digit-scenes"], marks=pytest.mark.lab),
        ("data make digits out --cop", ["--copies"]),
        ("evaluate CLIP-d", ["CLIP-debug"]),
        ("evaluate CLIP-debug CLIP-d", ["CLIP-debug"]),
        ("compare runs/a CLIP-debug CLIP-d", ["CLIP-debug"]),
        ("evaluate-language a diff-de", ["diff-debug"]),
        ("inspect CLIP-debug CLIP-d", []),  # it takes one
        ("inspect CLIP-debug --versus CLIP-d", ["CLIP-debug"]),
        ("compare CLIP-debug --data CLIP-d", []),
        ("compare CLIP-debug --data x CLIP-d", []),
        ("evaluate CLIP-debug --batch", ["--batch_size"]),
        ("compare CLIP-debug DiffCLIP-debug --rou", ["--rounds"]),
        ("evaluate CLIP-debug --precision ", ["fp32", "bf16", "fp16"]),
        ("evaluate CLIP-debug --precision = b", ["bf16"]),  # bash makes three words of --precision=b
        ("evaluate CLIP-debug --options.recall", ["--options.recall_k"]),
        ("data check shards --js", ["--json"]),
        ("fit --config clip/debug.", ["clip/debug.yaml"]),
        ("fit --trainer.max_e", ["--trainer.max_epochs"]),
        ("fit --model Contr", ["ContrastiveModule"]),
        ("fit --model.optimizer.warmup_s", ["--model.optimizer.warmup_steps"]),
        ("fit --resume ", ["auto", "must", "never"]),
        ("export x y --to on", ["onnx"]),
        ("evaluate CLIP-debug --data ", []),  # bash then offers files
    ],
)
def test_what_a_tab_offers(script, line, words):
    given = ["diffvision", *line.split(" ")]
    done = subprocess.run(["bash", "-c", TRY, "bash", script, *given], capture_output=True, text=True, check=True)
    registered, offered = done.stdout.splitlines()
    assert registered == "complete -o bashdefault -o default -F _diffvision diffvision"
    assert offered.split() == words


def test_every_command_has_its_options():
    for name in [*cli.command_names(), *cli.TRAINER_COMMANDS]:
        words = options(name)
        assert all(word == "" or word.startswith("--") for word in words)
        assert words, name
    assert options("fit")["--config"] == recipes()
    assert "DiffCLIP-ViT-B-16" in options("inspect")[""]


def test_other_shells(capsys):
    completion("zsh")
    assert "bashcompinit" in capsys.readouterr().out
    completion("fish")
    fish = capsys.readouterr().out
    assert (
        "complete -c diffvision -n '__fish_seen_subcommand_from evaluate' -l precision -x -a 'fp32 bf16 fp16'" in fish
    )
    assert "-f -n '__fish_seen_subcommand_from make' -a digits " in fish
    assert "from make; and __fish_seen_subcommand_from digits' -l copies" in fish
    assert "-n '__fish_seen_subcommand_from evaluate' -a '" in fish  # and files
    assert cli.main(["completion", "tcsh"]) == 2
