"""Help and mistyped options are answered before PyTorch is imported, in one process for all of these lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffvision import cli
from diffvision.models.names import _files, host_names

TRY = """
import contextlib, io, json, shlex, sys
from diffvision import cli
answers = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(shlex.split(line))
        except SystemExit as stopped:
            status = stopped.code
    heavy = [name for name in ("torch", "lightning", "timm", "open_clip", "transformers") if name in sys.modules]
    answers.append((status, out.getvalue(), err.getvalue(), heavy))
print(json.dumps(answers))
"""
HELP = [f"{name} --help" for name in ["data make", *cli.command_names()]]
MISTAKES = {  # a command line, and what its error names
    "fit --config nofile.yaml": "nofile.yaml",
    "fit --config digits": "no configuration file digits",
    "train --config clip/debug.yaml": "did you mean fit?",
    "data make nothing out": "nothing",
    "evaluate CLIP-debug --data . --batch_size x": "batch_size is 'x'",
    "evaluate CLIP-debug --data . --batch_size 0": "batch_size must be at least 1",
    "data make digits out --per_shard x": "--per_shard",
    "data make digits out --copies x": "copies is 'x'",
    "data make digits out --copies 0": "copies must be at least 1",
    "data check --bogus x": "--bogus",
    "data check nowhere": "nowhere",
    "data make folder out --source nowhere": "nowhere",
    "convert nowhere.pt out.pt --to timm": "nowhere.pt",
}
LIGHT = [line for line in MISTAKES if not line.startswith(("fit", "data check nowhere", "data make f", "convert"))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    lines = [*HELP, *LIGHT, *(line for line in MISTAKES if line not in LIGHT)]
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("empty"),
        env={"COLUMNS": "80"},
    )
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def test_nothing_heavy_is_imported(answers):
    assert {line: answers[line][3] for line in [*HELP, *LIGHT] if answers[line][3]} == {}


@pytest.mark.parametrize("line", HELP)
def test_help_fits_80_columns(line, answers):
    status, printed, _, _ = answers[line]
    assert status == 0
    assert f"usage: diffvision {line.removesuffix(' --help')}" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(("line", "named"), MISTAKES.items())
def test_a_mistake_is_one_line_that_names_it(line, named, answers):
    status, _, error, _ = answers[line]
    assert status in (1, 2)
    assert len(error.splitlines()) == 1
    assert named in error


def test_names_of_models_are_those_of_the_hosts(monkeypatch):
    import open_clip
    import timm

    from diffvision.models.clip_configs import CONFIGS

    # Other tests register models of their own.
    registered = timm.models._registry._model_entrypoints
    known = {name for name in timm.list_models() if registered[name].__module__.startswith(("timm.", "diffvision."))}
    shipped = {path.stem for path in Path(open_clip.__file__).with_name("model_configs").glob("*.json")} | set(CONFIGS)
    listed = {"timm": known, "open_clip": shipped & set(open_clip.list_models())}
    for host in listed:
        monkeypatch.delitem(sys.modules, host)
    _files.cache_clear()
    assert {host: set(names) for host, names in host_names().items() if host != "language"} == listed
