"""The help of commands: within 80 columns, and without an import of PyTorch where Lightning does not write it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffvision import cli
from diffvision.models.names import _files, host_names

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
LIGHT = ["--help", "data make --help", *(f"{name} --help" for name in cli.command_names())]
HEAVY = [f"{name} --help" for name in cli.TRAINER_COMMANDS]


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        input=json.dumps(LIGHT + HEAVY),
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "80"},
    )
    return dict(zip(LIGHT + HEAVY, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", LIGHT + HEAVY)
def test_a_command_explains_itself(line, answers):
    status, printed, heavy = answers[line]
    assert status == 0
    assert f"usage: diffvision {line.removesuffix('--help').strip()}" in printed
    if line in LIGHT:
        assert max(map(len, printed.splitlines())) <= 80
        assert heavy == []


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
