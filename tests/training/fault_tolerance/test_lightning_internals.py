"""Lightning's private names: few are used."""

import re
from pathlib import Path

import lightning.fabric
import lightning.pytorch as pl

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
