"""The help of `fit`, `validate` and `test`, written without an import of Lightning."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from diffvision.signatures import read_settings
from diffvision.training.settings import CLASSES, read_known

_ABOUT = {
    "fit": "Train a model as a recipe says; flags replace its settings.",
    "validate": "Run the evaluations of a configuration.",
    "test": "Run the test loop of a configuration.",
}
_OPTIONS = {
    "-c, --config FILE": "a recipe, such as clip/debug.yaml, or a YAML file of yours; a later file replaces settings",
    "--print_config": "print the whole configuration, and exit",
    "--seed_everything N": "the seed (default: 0)",
    "--ckpt_path FILE": "the checkpoint to load",
    "--allow PREFIX": "a package or module that configurations may name classes of",
}
_FIT = {
    "--resume auto|must|never": "continue from the run's newest valid checkpoint (must: or stop with an error; "
    "default: never)",
    "--resume_ranks same|any": "any: continue with another number of processes",
}
_TRAINER = {
    "--trainer.max_epochs N": "passes over the data",
    "--trainer.max_steps N": "optimizer steps, where they end earlier",
    "--trainer.accelerator NAME": "cpu, gpu or auto (default: auto)",
    "--trainer.devices N": "processes, one per device",
    "--trainer.strategy NAME": "ddp, fsdp, ... (default: auto)",
    "--trainer.precision NAME": "32-true, bf16-mixed or 16-mixed",
    "--trainer.fast_dev_run true": "one batch of everything, to try a configuration",
    "--trainer.limit_train_batches N": "batches of an epoch, or a share of them as 0.1",
    "--trainer.default_root_dir DIR": "where runs are written (default: runs)",
    "--trainer.callbacks+=CLASS": "another callback, such as EMA; --trainer.callbacks.help CLASS explains one",
}


def text(command: str) -> str:
    """Return the help of fit, validate or test, as wide as the terminal and at most 80 columns."""
    width = min(shutil.get_terminal_size().columns, 80)
    trainer = [name.removeprefix("trainer.") for name in read_known() if name.startswith("trainer.")]
    shown = " ".join(_TRAINER)
    more = [name for name in trainer if f"--trainer.{name} " not in shown]
    lines = [f"usage: diffvision {command} --config RECIPE [--SETTING VALUE ...]", "", _ABOUT[command], "", "options:"]
    lines += _rows(_OPTIONS | (_FIT if command == "fit" else {}), width)
    lines += ["", "trainer, the arguments of Lightning's Trainer:", *_rows(_TRAINER, width)]
    lines += _wrap(f"also --trainer. with {', '.join(more)}", width)
    for owner, classes in CLASSES.items():
        lines += ["", f"{owner}:"]
        lines += _rows({f"--{owner} CLASS": f"{', '.join(classes)}, or another with --allow"}, width)
        lines += _rows({f"--{owner}.help CLASS": "explain its settings, which are:"}, width)
        for name, path in classes.items():
            lines += _wrap(f"{name}: --{owner}. with {', '.join(_shorten_names(read_settings(path)))}", width)
    return "\n".join(lines)


def _shorten_names(names: Iterable[str]) -> list[str]:
    """Return the names of settings; those inside of a setting are left to its own help."""
    return [name for name in names if "." not in name]


def _rows(rows: dict[str, str], width: int) -> list[str]:
    column = 36
    return [
        line
        for option, about in rows.items()
        for line in textwrap.wrap(
            f"  {option:<{column - 4}}  {about}", width, subsequent_indent=" " * column, break_on_hyphens=False
        )
    ]


def _wrap(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
