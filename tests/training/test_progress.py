"""The progress of a run: Lightning's bar in a terminal, lines now and then in a file, and a line of each epoch."""

import io
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from diffvision.training import progress
from diffvision.training.progress import ProgressLine, track_evaluation

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Module(BoringModel):
    """Logs a loss that the bar does not read at every step, and the metric of an evaluation."""

    def training_step(self, batch, batch_idx):
        self.log("train/lr", 0.25, prog_bar=True)
        self.log("train/loss", torch.tensor(2.0))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        for _ in track_evaluation(self.trainer)([1, 2, 3], "digits/test"):
            self.log("zero_shot/digits/acc1", 0.5, prog_bar=True)


def run(monkeypatch, out, **settings):
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress, "BAR_INTERVAL", 0.0)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    quiet |= {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 2}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[ProgressLine()], **quiet | settings)
    trainer.fit(Module())
    return out.getvalue()


EPOCHS = [f"epoch {n}/2 step {n * 4}/8: loss 2, zero_shot/digits/acc1 0.5" for n in (1, 2)]


def test_in_a_terminal_one_bar_is_redrawn_and_each_epoch_leaves_a_line(monkeypatch):
    out = run(monkeypatch, Terminal())
    left = [line.rpartition("\r")[2].removeprefix("\x1b[A").strip() for line in out.split("\n")]
    assert [line for line in left if line in EPOCHS] == EPOCHS
    assert "epoch 2/2:  50%" in out
    assert "loss=2, zero_shot/digits/acc1=0.5, lr=0.25]" in out
    assert "evaluating digits/test" in out


def test_in_a_file_a_line_is_printed_on_logging_steps(monkeypatch):
    out = run(monkeypatch, io.StringIO())
    assert "\r" not in out
    lines = out.splitlines()
    assert lines[0] == "epoch 1/2 step 2/8: loss 2"
    assert [line for line in lines if " step 4/8" in line or " step 8/8" in line][1::2] == EPOCHS


def test_a_second_fit_in_a_file_prints_again(monkeypatch):
    line, out = ProgressLine(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    for _ in range(2):
        line.setup(SimpleNamespace(is_global_zero=True), None, "fit")
        assert line._is_printing
