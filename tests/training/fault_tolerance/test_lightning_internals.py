"""Lightning's private names: few are used, and its rule of accumulation is followed."""

import ast
import re
from pathlib import Path

import lightning.fabric
import lightning.pytorch as pl
import pytest

import diffvision
from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fit import FitCLI
from diffvision.training.module import TrainingModule

PACKAGE = Path(diffvision.__file__).parent
TORCHS = {"_orig_mod", "_rebuild_parameter", "_utils"}  # names of PyTorch's that Lightning has too


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


def test_at_most_eight_private_names_are_used():
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
    assert len(used) <= 8, used


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
