"""A small real run: shards of numbered images, the commands over them, and what they told."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from diffvision import cli
from diffvision.data.made.digits import png
from diffvision.data.shards.writer import write_manifest, write_tar

SHARDS, EACH = 8, 16


def shards(directory: str | Path = "shards", *, count: int = SHARDS, each: int = EACH) -> Path:
    """Shards whose sample i is an image of the one colour i, with the caption and the label i."""
    directory = Path(directory)
    directory.mkdir()
    for shard in range(count):
        numbers = range(shard * each, (shard + 1) * each)
        write_tar(directory / f"{shard}.tar", [numbered(number) for number in numbers])
    write_manifest(directory)
    return directory


def numbered(number: int) -> dict[str, str | bytes]:
    image = np.full((32, 32, 3), number)
    return {"__key__": f"{number:04d}", "png": png(image), "txt": f"{number}", "cls": f"{number % 10}"}


def fit(*more: str, steps: int = 2, data: str | Path = "shards") -> list[str]:
    """The command line of a short run of classification, with a checkpoint a step; `more` may say otherwise."""
    keeps = "--trainer.callbacks"
    return [
        *("fit", "--model=ClassificationModule", "--model.model=diff_vit_debug", "--model.num_classes=10"),
        *("--model.optimizer.warmup_steps=0", "--data=ImageLabelData", f"--data.train={data}"),
        *("--data.batch_size=8", "--data.num_workers=0", "--trainer.accelerator=cpu", "--trainer.devices=1"),
        *(f"--trainer.max_steps={steps}", "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1"),
        *("--trainer.enable_model_summary=false", "--trainer.limit_val_batches=0"),
        *(f"{keeps}+=ModelCheckpoint", f"{keeps}.every_n_train_steps=1", f"{keeps}.save_top_k=-1"),
        *(f"{keeps}.filename={{step}}", f"{keeps}.dirpath=kept"),
        *more,
    ]


def run(*command: str) -> tuple[int, str]:
    """The exit status of a `diffvision` command in this process, and all that it told."""
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    with redirect_stdout(told), redirect_stderr(told), warnings.catch_warnings():
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(handler)
        try:
            status = cli.main(list(command))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
    print(told.getvalue())
    return status, told.getvalue()


def goes(*command: str) -> str:
    """What a command told that ended well."""
    status, told = run(*command)
    assert status == 0, told[-600:]
    return told


def refused(*command: str, words: str) -> str:
    """The one line of a command that was refused; AssertionError where it was not, or does not say `words`."""
    status, told = run(*command)
    assert status != 0, "not refused"
    lines = [line for line in told.splitlines() if "error:" in line]
    assert lines, told[-600:]
    assert words in lines[-1], lines[-1][:600]
    assert "Traceback" not in told
    return lines[-1].partition("error:")[2].strip()


def raised(call: Callable[[], object], words: str = "") -> str:
    """The message of the error that a call raises; AssertionError where it raises none, or does not say `words`."""
    try:
        call()
    except Exception as error:
        message = " ".join(str(error).split())
        assert words in message, message[:600]
        return message
    raise AssertionError("no error")


def short(text: str, length: int = 170) -> str:
    """The beginning of a message, for a table; paths as seen from the case's directory."""
    text = text.replace(f"{os.getcwd()}/", "")
    return text if len(text) <= length else text[: length - 1] + "…"
