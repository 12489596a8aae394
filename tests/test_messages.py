"""Bad input to a training, and a rank that dies: one error that names the file or the rank."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.datasets.digits import png
from diffvision.data.shards.report import BadDataError
from diffvision.data.shards.writer import write_shards

MOST = 160


PNG = png(np.zeros((8, 8, 3)))


def train(source):
    """Read all batches, as a training does."""
    image = ImageMember(lambda image: torch.zeros(1))
    kind = ImageText(image, CaptionMember(), lambda texts: torch.zeros(len(texts), 1))
    return list(ShardLoader(ShardSet(str(source)), kind, 2, num_workers=0))


def cut(folder):
    shard = folder / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def replaced_by_a_text(folder):
    emptied(folder)
    (folder / "000000.tar").write_text("hello")


def unchanged(folder):
    pass


def linked_to_nothing(folder):
    emptied(folder)
    os.symlink("nowhere.tar", folder / "000000.tar")


# What is wrong -> (changes of the samples, what happens to the folder, what the error names)
CASES = {
    "a tarball cut anywhere": ({}, cut, "as its manifest says: 000000.tar"),
    "no tarball": ({}, replaced_by_a_text, "000000.tar"),
    "a broken link": ({}, linked_to_nothing, "000000.tar"),
    "an empty folder": ({}, emptied, "shards"),
    "no folder": ({}, shutil.rmtree, "shards"),
    "a truncated image": ({"png": PNG[:40]}, unchanged, "image: 000000.tar"),
    "an empty caption": ({"txt": ""}, unchanged, "empty caption: 000000.tar"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_error_with_file_fault_and_remedy(name, tmp_path):
    change, happens, names = CASES[name]
    folder = tmp_path / "shards"
    write_shards(folder, [{"__key__": str(n), "png": PNG, "txt": "a cat", **change} for n in range(4)])
    happens(folder)
    with pytest.raises((ValueError, OSError, BadDataError)) as caught:
        train(folder)
    check_form(str(caught.value), names, tmp_path)


def check_form(message, names, folder):
    assert names in message
    assert len(message.splitlines()[0].replace(str(folder), "").partition(". ")[0]) <= MOST


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


@pytest.mark.nightly
def test_a_killed_rank_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path):
    write_shards(tmp_path / "shards", [{"__key__": str(n), "png": PNG, "txt": "a cat"} for n in range(64)])
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
