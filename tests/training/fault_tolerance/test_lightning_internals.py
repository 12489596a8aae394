"""Lightning's private names: few are used, and its rule of accumulation is followed."""

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


def names_in(package: Path, pattern: str) -> set[str]:
    """The private names that a pattern finds in the files of a package that mention Lightning."""
    texts = [file.read_text() for file in package.rglob("*.py")]
    return {name for text in texts if "lightning" in text for name in re.findall(pattern, text)}


def test_at_most_eight_private_names_are_used():
    """Of attributes, imports, strings and hooks, over the whole package; what it defines itself is its own."""
    defined = r"(?:def |class |\w\.)(_[A-Za-z]\w*)(?:[(:]|(?:: [^=\n]+)? = )"
    theirs = {
        name for part in (lightning.pytorch, lightning.fabric) for name in names_in(Path(part.__file__).parent, defined)
    }
    read = names_in(PACKAGE, r"""(?:(?<!self)(?<!cls)\.|["'{]|import )(_[A-Za-z]\w*)""")
    used = read & theirs - names_in(PACKAGE, r"(?:def |class |self\.)(_[A-Za-z]\w*)") - TORCHS
    for hook in (lightning_internals.BatchHook, TrainingModule, FitCLI):
        base = next(cls for cls in (*hook.__mro__, pl.LightningModule) if cls.__module__.startswith("lightning."))
        used |= {name for name in vars(hook) if name in theirs and hasattr(base, name)}
    assert 3 < len(used) <= 8, used


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
