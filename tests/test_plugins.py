"""Plugins: what a package adds by entry points works in timm, `data make` and `evaluate`, and is imported when used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffvision import plugins
from diffvision.plugins import PluginTable, entry_points

PACKAGE = '''
from diffvision.evaluation.language.tasks import LanguageEvaluation
from diffvision.evaluation.suite import Evaluation
from diffvision.nn import DiffAttention


class Halved(DiffAttention):
    """V1 with half of the output."""

    variant = "halved"

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) / 2


def count(features, folder, options):
    return {"images": float(len(features.images(folder, options.split)[0]))}


def squares(directory, seed: int = 0):
    """Write nothing but a note."""
    from pathlib import Path

    Path(directory).mkdir()
    Path(directory, "squares.txt").write_text(str(seed))
    return "squares"


def length(work):
    return {"tokens": float(sum(map(len, work.documents)))}


COUNT = Evaluation(count, "zero_shot", "image_count", opt_in=True)
LENGTH = LanguageEvaluation(length, "documents")
'''
ENTRY_POINTS = """
[diffvision]
attention.halved = tiny_plugin:Halved
datasets.squares = tiny_plugin:squares
tasks.count = tiny_plugin:COUNT
language_tasks.length = tiny_plugin:LENGTH
"""


def install(root: Path, entries: str = ENTRY_POINTS, name: str = "tiny-plugin") -> None:
    """Write a package and what pip writes beside it."""
    (root / "tiny_plugin.py").write_text(PACKAGE)
    about = root / f"{name.replace('-', '_')}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(entries)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs the package for this test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", entry_points.__wrapped__)  # without its cache
    return lambda *args: install(tmp_path, *args)


@pytest.mark.slow
def test_a_plugin_works_where_it_is_named(tmp_path):
    """Its variant in timm, its dataset in `data make` and its tasks in both evaluations, with few imports before."""
    install(tmp_path)
    (tmp_path / "a.txt").write_text("some words and more")
    program = """
import os, sys; os.chdir(FOLDER)
from diffvision.cli import main
assert main(["data", "make", "digits", "digits", "--copies", "1"]) == 0
common = ["evaluate", "CLIP-debug", "--data", "digits/zero_shot", "--num_workers", "0", "--output"]
assert main([*common, "default.json"]) == 0
unused = ("tiny_plugin", "diffvision.evaluation.language", "diffvision.models.language", "diffvision.data.text")
assert not [name for name in sys.modules if name.startswith((*unused, "diffvision.opening.texts"))]
assert main(["data", "make", "--help"]) == 0
assert main(["data", "make", "squares", "out", "--side", "3"]) == 2
import timm, torch
from diffvision.nn import ATTENTION, build_attention
assert "halved" in ATTENTION and list(ATTENTION)[-1] == "halved"
assert "tiny_plugin" not in sys.modules
assert main(["data", "make", "squares", "out", "--seed", "3"]) == 0
assert main([*common, "named.json", "--tasks", "count,zero_shot"]) == 0
assert main([*common, "unknown.json", "--tasks", "counts"]) == 1

model = timm.create_model("diff_vit_debug", variant_by_layer="1*halved", num_classes=3)
layer = model.blocks[0].attn
assert type(layer) is sys.modules["tiny_plugin"].Halved and type(layer) is ATTENTION["halved"]
assert type(build_attention("halved", 64, 2)) is type(layer)
assert model(torch.rand(2, *model.default_cfg["input_size"])).shape == (2, 3)

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models import language
tokenizer = train_tokenizer(["some words and more"], 300)
language.save(language.create("diff-debug", vocab_size=tokenizer.vocab_size), "model", tokenizer)
common = ["evaluate-language", "model", "--tasks", "length", "--data", "a.txt", "--output", "texts", "--device", "cpu"]
assert main(common) == 0
"""
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program.replace("FOLDER", repr(str(tmp_path)))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "squares         Write nothing but a note." in done.stdout
    assert (tmp_path / "out/squares.txt").read_text() == "3"
    named, default = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("named", "default"))
    assert {record["task"]: list(record["metrics"]) for record in named}["image_count"] == ["images"]
    assert [record["task"] for record in default] == ["zeroshot_classification"]
    assert json.loads((tmp_path / "texts/length.json").read_text())["models"]["model"]["tokens"] > 2


def test_table_has_the_rows_of_the_library_and_of_plugins_of_unlike_names(installed):
    installed("[diffvision]\nsome.third = json:dumps\n")
    table = PluginTable("some", {"first": str.upper, "second": str.lower}, object)
    assert list(table) == ["first", "second", "third"]
    assert len(table) == 3
    assert "third" in table
    assert table["third"] is json.dumps
    assert table["first"] is str.upper
    assert "fourth" not in table
    with pytest.raises(KeyError):
        table["fourth"]
    installed("[diffvision]\nsome.third = json:loads\n", "other-plugin")
    with pytest.raises(ValueError, match="'third'"):
        plugins.entry_points("some")  # of two packages


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[diffvision]\nsome.first = json:dumps\n", "tiny-plugin adds 'first' to some"),
        ("[diffvision]\nsome.third = json:nothing\n", "'third' of some cannot be imported"),
        ("[diffvision]\nsome.third = no_such_module:x\n", "repair or uninstall tiny-plugin"),
        ("[diffvision]\nsome.third = json:dumps\n", "must be of class int"),
    ],
)
def test_table_says_which_package_is_at_fault(installed, entries, message):
    installed(entries)
    with pytest.raises(ValueError, match=message):
        PluginTable("some", {"first": 1}, int)["third"]
