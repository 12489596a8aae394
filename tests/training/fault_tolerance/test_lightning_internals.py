"""Lightning's private names: the installed version has them all; where one is missing, `fit` alone refuses."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import lightning.fabric
import lightning.pytorch as pl
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import diffvision
from diffvision import doctor
from diffvision.cli import main
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fault_tolerance import lightning_internals, protect
from diffvision.training.fit import FitCLI
from diffvision.training.module import TrainingModule

BROADCAST = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor"
PACKAGE = Path(diffvision.__file__).parent
TORCHS = {"_orig_mod", "_rebuild_parameter", "_utils"}  # names of PyTorch's that Lightning has too


def test_the_installed_lightning_has_every_name():
    assert lightning_internals.missing() == []


def test_the_tested_versions_are_those_that_are_required():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (required,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "lightning")
    assert required.specifier == SpecifierSet(f"{lightning_internals.TESTED},!=2.6.2,!=2.6.3")
    assert required.specifier.contains(pl.__version__)


def private_identifiers(source: str) -> set[str]:
    """The identifiers of one leading underscore that are read, written, imported, called or named in strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= set() if is_own else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"(?<!\w)_[A-Za-z]\w*", node.value))
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(f"def {node.name}")
    return {name for name in found if re.fullmatch(r"(def )?_[A-Za-z]\w*", name)}


def lightnings_names() -> set[str]:
    """The private names that Lightning's sources define: of classes, functions and attributes."""
    names: set[str] = set()
    for package in (lightning.pytorch, lightning.fabric):
        for file in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_at_most_eight_private_names_are_used_and_each_is_listed_with_the_promise_that_needs_it():
    """Counted by syntax over the whole package, strings included; what a file defines itself is its own."""
    theirs, used = lightnings_names(), set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        if "lightning" in text:
            found = private_identifiers(text)
            own = {name.removeprefix("def ") for name in found if name.startswith("def ")}
            used |= (found - own) & theirs
    used -= TORCHS
    for hook in (lightning_internals.BatchHook, TrainingModule, FitCLI):
        base = next(cls for cls in (*hook.__mro__, pl.LightningModule) if cls.__module__.startswith("lightning."))
        used |= {name for name in vars(hook) if name in theirs and hasattr(base, name)}
    listed = {name for path in lightning_internals.NAMES for name in re.findall(r"(?<!\w)_\w+", path)}
    assert used == listed
    assert len(lightning_internals.NAMES) <= 8


@pytest.mark.parametrize(
    "name", ["trainer._gone", "trainer.fit_loop._gone.done", "module._on_before_batch_transfer(self)", "logger._gone()"]
)
def test_what_is_missing_or_takes_other_arguments_is_named(monkeypatch, name):
    monkeypatch.setitem(lightning_internals.NAMES, name, "a promise")
    assert lightning_internals.missing() == [name]
    with pytest.raises(ValueError, match=r"lightning [\d.]+ lacks") as error:
        lightning_internals.require()
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_where_a_name_is_missing_fit_refuses_and_doctor_reports(monkeypatch, capsys, tmp_path):
    monkeypatch.delattr(BROADCAST)
    data = [f"--data.init_args.train={tmp_path}", f"--data.init_args.evaluations=[{tmp_path}]"]
    assert main(["fit", "--config", "configs/clip/debug.yaml", *data]) == 1
    error = capsys.readouterr().err
    assert "lacks what training relies on" in error
    assert "epoch_loop._broadcast_sigterm_tensor" in error
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    module = ContrastiveModule("CLIP-debug")
    with pytest.raises(ValueError, match="lacks what training relies on"), protect(trainer, module):
        pass
    with pytest.raises(ValueError, match="lacks what training relies on"):
        module.setup("fit")
    (finding,) = doctor.check_libraries()
    assert finding["broken"]
    assert "_broadcast_sigterm_tensor" in finding["text"]
    assert "install lightning>=2.6.5,<3" in finding["text"]


ABSENT = """
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

del _TrainingEpochLoop._broadcast_sigterm_tensor, _SignalConnector.register_signal_handlers
import diffvision
import diffvision.export.export_commands
import diffvision.evaluation.suite
from diffvision import cli, doctor
from diffvision.training import ContrastiveModule
from diffvision.training.fault_tolerance import lightning_internals, protect

assert len(lightning_internals.missing()) == 2, lightning_internals.missing()
assert doctor.check_libraries()
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


@pytest.mark.nightly
def test_without_private_names_all_but_fit_works():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ABSENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lightning" in done.stderr
    assert "install lightning>=2.6.5" in done.stderr


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_accumulation_follows_lightnings_rule(every, is_last):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=every)
    trainer.fit_loop.max_batches = 5
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = is_last
    for ready in range(1, 6):
        loop.batch_progress.current.ready = ready
        assert lightning_internals.is_accumulating(trainer) == loop._should_accumulate()
        assert lightning_internals.is_last_batch(trainer) == loop._num_ready_batches_reached()
