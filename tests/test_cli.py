import errno
import json
import subprocess
import sys

import pytest

from diffvision import __version__, cli

PRINT = """
import contextlib, io, json, shlex, sys
from diffvision import cli
answers = []
for line in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = cli.main(shlex.split(line))
        except SystemExit as stopped:
            status = stopped.code
    heavy = [name for name in ("torch", "lightning", "timm", "open_clip", "transformers") if name in sys.modules]
    answers.append((status, out.getvalue(), heavy))
print(json.dumps(answers))
"""
LIGHT = ["--help", "data --help", "data make --help", *(f"{name} --help" for name in cli.command_names())]


@pytest.fixture(scope="module")
def answers():
    """The help of all commands but the trainer's, printed by one process."""
    words, asked = [sys.executable, "-c", PRINT], json.dumps(LIGHT)
    done = subprocess.run(words, input=asked, capture_output=True, text=True, check=True, env={"COLUMNS": "80"})
    return dict(zip(LIGHT, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", LIGHT)
def test_help_imports_nothing_heavy_where_lightning_does_not_write_it(line, answers):
    status, printed, heavy = answers[line]
    assert status == 0
    assert f"usage: diffvision {line.removesuffix('--help').strip()}" in printed
    assert heavy == []


@pytest.mark.parametrize("name", cli.TRAINER_COMMANDS)
def test_the_trainers_commands_have_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert f"usage: diffvision {name}" in capsys.readouterr().out


def test_help_names_every_command_and_dataset(answers, capsys):
    _, printed, _ = answers["--help"]
    assert all(name in printed for name in [*cli.COMMANDS, *cli.TRAINER_COMMANDS, "run"])
    assert max(map(len, printed.splitlines())) <= 80
    assert all(f"\n  {name} " in answers["data make --help"][1] for name in ("digits", "folder", "mmvp"))
    assert "--copies" in answers["data make digits --help"][1]
    assert cli.main([]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"diffvision {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [(KeyboardInterrupt(), 130, "{}/out"), (OSError(errno.ENOSPC, "No space left on device"), 1, "make room")],
    ids=["ctrl-c", "a full disk"],
)
def test_an_interrupted_command_says_so_in_one_line(error, status, named, capsys, tmp_path, monkeypatch):
    def stopped(directory, **options):
        (tmp_path / "out").mkdir()
        raise error

    monkeypatch.setattr("diffvision.data.datasets.stdlib.make_stdlib", stopped)
    assert cli.main(["data", "make", "stdlib", str(tmp_path / "out")]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert named.format(tmp_path) in line


@pytest.mark.parametrize(
    ("form", "package", "extra"), [("onnx", "onnx", "export"), ("huggingface", "transformers", "hf")]
)
def test_a_missing_package_is_named_before_a_model_is_looked_for(form, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["export", "CLIP-debug", "folder", "--to", form]) == 1
    assert f"pip install 'diffvision[{extra}]'" in capsys.readouterr().err


def test_run_hands_over(tmp_path, capsys, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")  # which `run` sets for the program's children
    assert cli.main(["run", str(program), "--x", "1"]) == 0
    assert capsys.readouterr().out == "['--x', '1']\n"
    program.write_text("raise ValueError('of the program')")
    with pytest.raises(ValueError, match="of the program"):
        cli.main(["run", str(program)])


@pytest.fixture
def taken(monkeypatch):
    """The arguments that `inspect` gets, for a function of the same signature as several commands."""
    values = {}

    def command(models: "str | list[str]" = "", *, text: "str | list[str] | None" = None, recheck: bool = False):
        values.update(models=models, text=text, recheck=recheck)

    monkeypatch.setattr(cli, "function_of", lambda name: command)
    return values


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a=CLIP-debug", "diff-debug"], {"models": ["a=CLIP-debug", "diff-debug"]}),
        (["CLIP-debug,diff-debug"], {"models": "CLIP-debug,diff-debug"}),
        (["--models", "CLIP-debug"], {"models": "CLIP-debug"}),
        (["--recheck", "--text", "x"], {"recheck": True, "text": "x"}),
        (["--recheck", "false"], {"recheck": False}),
        (["--text", "- a cat"], {"text": ["- a cat"]}),
        (["--text=# 3"], {"text": ["# 3"]}),
        (["--text", "null"], {"text": ["null"]}),
        (["--text", "a: cat"], {"text": "a: cat"}),
        (["--text", "[a cat, a dog]"], {"text": ["a cat", "a dog"]}),
        (["--text", "[sic] a cat"], {"text": "[sic] a cat"}),
    ],
)
def test_arguments_as_they_are_meant(words, expected, taken):
    assert cli.main(["inspect", *words]) == 0
    assert taken == {"models": "", "text": None, "recheck": False} | expected
