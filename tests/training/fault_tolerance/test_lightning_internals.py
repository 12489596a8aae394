"""Lightning's private names: the installed version has them all; where one is missing, `fit` alone refuses."""

import subprocess
import sys
import tomllib
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from diffvision import doctor
from diffvision.cli import main
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fault_tolerance import lightning_internals, protect

ACCUMULATES = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_accumulate"


def test_the_installed_lightning_has_every_name():
    assert lightning_internals.missing() == []


def test_the_tested_versions_are_those_that_are_required():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (required,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "lightning")
    assert required.specifier == SpecifierSet(f"{lightning_internals.TESTED},!=2.6.2,!=2.6.3")
    assert required.specifier.contains(pl.__version__)


def test_objects_have_the_attributes_that_their_classes_assign():
    """What `missing` reads from the code of classes, compared with objects."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    objects = [
        trainer,
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer._checkpoint_connector,
        trainer._data_connector,
        trainer._logger_connector,
        trainer._accelerator_connector,
        ModelCheckpoint("."),
        EMAWeightAveraging(),
        CSVLogger("."),
    ]
    compared = 0
    for name in lightning_internals.NAMES:
        path, _, member = name.rpartition(".")
        for instance in objects:
            classes = [f"{cls.__module__}:{cls.__name__}" for cls in type(instance).__mro__]
            if path in classes:
                compared += 1
                assert member in vars(instance) or hasattr(type(instance), member), name
    assert compared > 30


@pytest.mark.parametrize(
    ("name", "parameters", "fault"),
    [
        ("lightning.pytorch.trainer.trainer:Trainer._gone", None, "Trainer._gone"),
        ("lightning.pytorch.trainer.trainer:Trainer._gone", ("self",), "Trainer._gone"),
        ("lightning.pytorch.trainer.trainer:Gone.fit", None, "lightning.pytorch.trainer.trainer.Gone"),
        ("lightning.pytorch.gone:Gone.fit", None, "lightning.pytorch.gone.Gone"),
        (
            "lightning.pytorch.loops.fit_loop:_FitLoop._should_accumulate",
            ("self", "x"),
            "_FitLoop._should_accumulate(self, x)",
        ),
    ],
)
def test_what_is_missing_or_takes_other_arguments_is_named(monkeypatch, name, parameters, fault):
    monkeypatch.setitem(lightning_internals.NAMES, name, parameters)
    assert lightning_internals.missing() == [fault]
    with pytest.raises(ValueError, match=r"lightning [\d.]+ lacks") as error:
        lightning_internals.require()
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_where_a_name_is_missing_fit_refuses_and_doctor_reports(monkeypatch, capsys, tmp_path):
    monkeypatch.delattr(ACCUMULATES)
    data = [f"--data.init_args.train={tmp_path}", f"--data.init_args.evaluations=[{tmp_path}]"]
    assert main(["fit", "--config", "configs/clip/debug.yaml", *data]) == 1
    assert "lacks what training relies on (_TrainingEpochLoop._should_accumulate)" in capsys.readouterr().err
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    module = ContrastiveModule("CLIP-debug")
    with pytest.raises(ValueError, match="lacks what training relies on"), protect(trainer, module):
        pass
    with pytest.raises(ValueError, match="lacks what training relies on"):
        module.setup("fit")
    (finding,) = doctor.check_private_names()
    assert finding.broken
    assert "_should_accumulate: `diffvision fit` refuses; install lightning>=2.6.5,<2.7" in finding.text


ABSENT = """
import lightning.pytorch.loops.evaluation_loop as evaluation
import lightning.pytorch.strategies.launchers as launchers
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

del evaluation.RestartStage, launchers._SubprocessScriptLauncher
del _TrainingEpochLoop._should_accumulate, _CheckpointConnector._parse_ckpt_path
import diffvision
import diffvision.export.command
import diffvision.evaluation.suite
from diffvision import cli, doctor
from diffvision.training import ContrastiveModule
from diffvision.training.fault_tolerance import lightning_internals, protect

assert len(lightning_internals.missing()) == 3, lightning_internals.missing()
assert doctor.private_names()
for command in ("evaluate", "export", "fit"):
    words = ["--help"]
    if command == "fit":
        words = ["--config", "clip/debug.yaml", "--data.init_args.train=.", "--data.init_args.evaluations=[.]"]
    try:
        status = cli.main([command, *words])
    except SystemExit as ended:
        status = ended.code
    assert status == (1 if command == "fit" else 0), (command, status)
"""


@pytest.mark.slow
def test_without_private_names_all_but_fit_works():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ABSENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lightning" in done.stderr
    assert "diffvision was tested with" in done.stderr
