"""Bad input to a training, and a machine that fails it: one error with the file, the fault and what to do."""

import errno
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image
from test_errors import REMEDY

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.shards.report import BadDataError
from diffvision.data.shards.writer import write_shards
from diffvision.training.fault_tolerance import LastCheckpoint, protect
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO

MOST = 160


def png(side=8):
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "PNG")
    return data.getvalue()


def train(source):
    """Read all batches, as a training does."""
    kind = ImageText(
        ImageMember(lambda image: torch.zeros(1)), CaptionMember(), lambda texts: torch.zeros(len(texts), 1)
    )
    return list(ShardLoader(ShardSet(str(source)), kind, 2, num_workers=0))


def cut(folder):
    (shard,) = folder.glob("*.tar")
    shard.write_bytes(shard.read_bytes()[:2000])


def cut_without_a_manifest(folder):
    cut(folder)
    for file in folder.glob("*.json"):
        file.unlink()


def changed(folder):
    (shard,) = folder.glob("*.tar")
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(bytes(data))


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def replaced_by_a_text(folder):
    emptied(folder)
    (folder / "000000.tar").write_text("hello")


def linked_to_nothing(folder):
    emptied(folder)
    os.symlink("nowhere.tar", folder / "000000.tar")


def removed(folder):
    emptied(folder)
    folder.rmdir()


def unchanged(folder):
    pass


# What is wrong -> (the samples, what happens to the folder, what the error names)
CASES = {
    "a tarball cut anywhere": ({}, cut, "as its manifest says: 000000.tar"),
    "a tarball cut without a manifest": ({}, cut_without_a_manifest, "000000.tar"),
    "a wrong hash": ({}, changed, "as its manifest says: 000000.tar"),
    "no tarball": ({}, replaced_by_a_text, "000000.tar"),
    "a broken link": ({}, linked_to_nothing, "000000.tar"),
    "an empty folder": ({}, emptied, "shards"),
    "no folder": ({}, removed, "shards"),
    "a truncated image": ({"png": png()[:40]}, unchanged, "image: 000000.tar"),
    "an image of zero bytes": ({"png": b""}, unchanged, "empty image: 000000.tar"),
    "an image too large": ({"png": png(9000)}, unchanged, "image too large: 000000.tar"),
    "a caption that is no text": ({"txt": b"\xff\xfe\x00"}, unchanged, "UTF-8: 000000.tar"),
    "an empty caption": ({"txt": ""}, unchanged, "empty caption: 000000.tar"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_error_with_file_fault_and_remedy(name, tmp_path):
    change, happens, names = CASES[name]
    folder = tmp_path / "shards"
    write_shards(folder, [{"__key__": str(n), "png": png(), "txt": "a cat", **change} for n in range(4)])
    happens(folder)
    with pytest.raises((ValueError, OSError, BadDataError)) as caught:
        train(folder)
    check_form(str(caught.value), names, tmp_path)


def check_form(message, names, folder):
    assert names in message
    first = message.splitlines()[0].replace(str(folder), "").partition(". ")[0]
    assert len(first) <= MOST
    assert REMEDY.search(first) or re.search("must be .*, got ", first)


# --- a machine that fails a run ---


def protected(folder):
    """Protect a run in a folder, up to its first step."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=folder)
    trainer.callbacks.append(LastCheckpoint())
    return protect(trainer, BoringModel())


def full_before(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with protected(folder):
        pass


def full_while_saving(folder, monkeypatch):
    path, saver = folder / "last.ckpt", DurableCheckpointIO()
    saver.save_checkpoint({"step": 1}, path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    try:
        saver.save_checkpoint({"step": 2}, path)
    finally:
        assert torch.load(path) == {"step": 1}
        assert [file.name for file in folder.iterdir()] == ["last.ckpt"]


def second_run(folder, monkeypatch):
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def first():
        with protected(folder):
            ready.set()
            time.sleep(60)

    run = context.Process(target=first, daemon=True)
    run.start()
    assert ready.wait(30)
    try:
        with protected(folder):
            pass
    finally:
        run.kill()
        run.join()


def dead_mount(folder, monkeypatch):
    write_shards(folder / "shards", [{"__key__": str(n), "png": png(), "txt": "a cat"} for n in range(120)])
    shards = ShardSet(str(folder / "shards"))
    kind = ImageText(ImageMember(lambda image: torch.zeros(1)), CaptionMember(), lambda texts: torch.zeros(len(texts)))
    (folder / "shards").rename(folder / "unmounted")
    list(ShardLoader(shards, kind, 2, num_workers=0))


# What fails -> (what happens to a run in a folder, what the error names)
FAILURES = {
    "a full disk at the start": (full_before, "7 bytes free"),
    "a full disk at a checkpoint": (full_while_saving, "last.ckpt"),
    "a second run in the same folder": (second_run, "another run writes to"),
    "a dead mount": (dead_mount, "in a row"),
}


@pytest.mark.forks
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_failing_machine_is_one_error_with_fault_and_remedy(name, tmp_path, monkeypatch):
    happens, names = FAILURES[name]
    with pytest.raises((OSError, BadDataError)) as caught:
        happens(tmp_path, monkeypatch)
    check_form(str(caught.value.strerror if isinstance(caught.value, OSError) else caught.value), names, tmp_path)


KILLED = """
import os, signal, sys
import lightning.pytorch as pl
from diffvision import cli
from diffvision.training import fit

run = fit.fit

class Kill(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    fit.fit = lambda arguments: run(arguments, callbacks=[Kill()])
    sys.exit(cli.main(["fit", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path):
    write_shards(tmp_path / "shards", [{"__key__": str(n), "png": png(), "txt": "a cat"} for n in range(64)])
    (tmp_path / "run.py").write_text(KILLED)
    options = ["accelerator=cpu", "devices=2", "strategy=ddp", "max_steps=9", "callbacks+=LastCheckpoint"]
    options += ["callbacks.every_n_train_steps=1", "enable_progress_bar=false", f"logger.save_dir={tmp_path}"]
    words = ["--model=ContrastiveModule", "--model.model=CLIP-debug", "--data=ImageTextData"]
    words += [f"--data.train={tmp_path / 'shards'}", "--data.batch_size=4", "--data.num_workers=0"]
    run = subprocess.run(
        [sys.executable, "run.py", *words, *(f"--trainer.{option}" for option in options)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    (message,) = [line for line in run.stderr.splitlines() if line.startswith("diffvision: error: ")]
    check_form(message, "another rank", tmp_path)
    assert "Traceback" not in run.stderr
    (last,) = tmp_path.glob("*/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
