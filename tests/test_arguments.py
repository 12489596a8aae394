"""Help and mistakes are answered before PyTorch is imported, in one process for all of these lines."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffvision import cli
from diffvision.models.names import _files, host_names
from diffvision.signatures import read_settings
from diffvision.training.settings import CLASSES

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
CLIP = "fit --config clip/debug.yaml"
HELP = [f"{name} --help" for name in ["data make", *cli.command_names(), *cli.TRAINER_COMMANDS]]
MISTAKES = {  # a command line, and what its error names
    "fit": "--config",
    "fit --bogus 1": "--bogus",
    "fit --config nofile.yaml": "nofile.yaml",
    "fit --config '{trainer: {max_epochs: x}}'": "trainer.max_epochs is 'x'",
    "fit --config '{model: {class_path: ContrastiveModule, init_args: {modle: x}}}'": "did you mean model?",
    "fit --trainer.max_epochs x": "trainer.max_epochs is 'x'",
    "fit --model.lr 3": "--model ContrastiveModule",
    f"{CLIP} --trainer.max_epocs 3": "did you mean --trainer.max_epochs?",
    f"{CLIP} --trainer.precision bf17": "did you mean bf16?",
    f"{CLIP} --trainer.callbacks+=EMMA": "did you mean EMA?",
    f"{CLIP} --trainer.callbacks '[EMA, foo.Bar]'": "--allow foo",
    f"{CLIP} --trainer.logger": "--trainer.logger",
    f"{CLIP} --model ContrastveModule": "did you mean ContrastiveModule?",
    f"{CLIP} --model os.path": "--allow os ",
    f"{CLIP} --model.model DiffCLIP-debgu": "DiffCLIP-debug",
    f"{CLIP} --model.optimizer.lr fast": "model.optimizer.lr is 'fast'",
    f"{CLIP} --model.optimiser.lr 1": "did you mean optimizer.lr?",
    f"{CLIP} --model.lr 1": "did you mean optimizer.lr?",
    f"{CLIP} --lr 1": "did you mean --model.optimizer.lr?",
    f"{CLIP} --optimizer.lr 1": "did you mean --model.optimizer.lr?",
    f"{CLIP} --data.train data/digits/train": "diffvision data make digits data/digits",
    f"{CLIP} --data.init_args.batch_size x": "data.init_args.batch_size is 'x'",
    f"{CLIP} --data.train nowhere": "nowhere",
    f"{CLIP} --resume maybe": "resume is 'maybe'",
    f"{CLIP} --seed_everything x": "seed_everything is 'x'",
    "fit --config vision/debug.yaml --model.model diff_vit_tinyy": "diff_vit_tiny",
    "validate --config clip/debug.yaml --trainer.devices": "--trainer.devices",
    "train --config clip/debug.yaml": "did you mean fit?",
    "evaluate CLIP-debug --data . --batch_size x": "batch_size is 'x'",
    "evaluate CLIP-debug --data . --batch_size 0": "batch_size is 0",
    "fit --model {class_path:[[": "model is '{class_path:[['",
    "fit --config digits": "no configuration file digits",
    "evaluate CLIP-debug --data nowhere": "nowhere",
    "evaluate CLIP-debgu --data .": "CLIP-debug",
    "evaluate CLIP-debug --data . --tasks zeroshot": "zero_shot",
    "evaluate CLIP-debug --data . --device cudda": "cudda",
    "compare CLIP-debug nomodel --data .": "nomodel",
    "compare a=CLIP-debug b=CLIP-debgu --data .": "CLIP-debug",
    "data make nothing out": "nothing",
    "data make digits out --per_shard x": "--per_shard",
    "data make digits out --copies x": "copies is 'x'",
    "data make digits out --copies 0": "copies is 0",
    "data make folder out --source nowhere": "nowhere",
    "data check nowhere": "nowhere",
    "data check --bogus x": "--bogus",
    "evaluate-language diff-debug --tasks bogus": "bogus",
    "generate nomodel --prompt hi": "nomodel",
    "export nomodel out": "nomodel",
    "inspect CLIP-debug --versus nomodel --output out": "nomodel",
    "adapt vit_base_patch16_225 out": "vit_base_patch16_224",
    "convert nowhere.pt out --to timm": "nowhere.pt",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    lines = [*HELP, *MISTAKES]
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
    assert {line: heavy for line, (_, _, _, heavy) in answers.items() if heavy} == {}


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


def test_the_help_of_fit_is_short(answers):
    printed = answers["fit --help"][1]
    assert len(printed.splitlines()) < 100
    assert "--model.help CLASS" in printed
    for name in read_settings("lightning.pytorch.Trainer"):
        assert name in printed


def test_settings_are_those_of_the_classes():
    from lightning.pytorch import Trainer

    from diffvision import data, training

    assert set(read_settings("lightning.pytorch.Trainer")) == set(inspect.signature(Trainer).parameters)
    for owner, classes in ((training, CLASSES["model"]), (data, CLASSES["data"])):
        for name, path in classes.items():
            read = {setting for setting in read_settings(path) if "." not in setting}
            assert read == set(inspect.signature(getattr(owner, name)).parameters)


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
