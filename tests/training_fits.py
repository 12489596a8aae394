"""What tests of training share: a quiet Trainer, data, and the gradients of its first step."""

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.utils.data import DataLoader

from diffvision.data.datasets.digits import png
from diffvision.training.fault_tolerance import LastCheckpoint

LANGUAGE = {"vocab_size": 50, "dim": 32, "num_heads": 2, "head_dim": 8, "mlp_dim": 48, "max_length": 64}


def trainer(*callbacks, **settings):
    """Return a Trainer of one step on a CPU, without files (but those of a Checkpoint callback) or bars."""
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    defaults = {"max_steps": 1, "logger": False, "enable_checkpointing": saves, "accelerator": "cpu", "devices": 1}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(**defaults | {"use_distributed_sampler": False} | settings, callbacks=list(callbacks))


def train(module, *callbacks, data, **settings):
    """Fit a module, by default without validation; return the trainer."""
    made = trainer(*callbacks, **{"limit_val_batches": 0} | settings)
    made.fit(module, datamodule=data)
    return made


class Tiny(pl.LightningModule):
    """Lines of a few numbers. It notes the step of each batch."""

    def __init__(self, layers=1, optimizer=torch.optim.AdamW):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        self.optimizer, self.first_batches = optimizer, []

    def training_step(self, batch, batch_idx):
        self.first_batches.append(self.trainer.global_step)
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


class Rows(pl.LightningDataModule):
    """Rows in batches of `batch_size` over all ranks, of which each takes its slice, the same in every process.

    The first `validated` of them are validated; of two ranks the first one takes the first `split`, or both take all.
    """

    batch_size, eval_batch_size, validated, split, collate = 8, 4, None, None, None

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def train_dataloader(self):
        local = self.batch_size // self.trainer.world_size
        starts = range(self.trainer.global_rank * local, len(self.rows), self.batch_size)
        rows = [row for start in starts for row in self.rows[start : start + local]]
        return DataLoader(rows, batch_size=local, collate_fn=self.collate)

    def val_dataloader(self):
        rows = self.rows[: self.validated]
        if self.trainer.world_size == 2 and self.split is not None:
            rows = rows[self.split :] if self.trainer.global_rank else rows[: self.split]
        return DataLoader(rows, batch_size=self.eval_batch_size, collate_fn=self.collate)


def noise(count, **members):
    """Return samples of noisy images, each with members that are functions of its number."""
    rng = np.random.default_rng(0)
    for i in range(count):
        texts = {name: str(text(i)) for name, text in members.items()}
        yield {"__key__": f"{i:03d}", "png": png(rng.integers(0, 256, (32, 32, 3))), **texts}


class EachStep(LastCheckpoint):
    """Keeps the file of each step."""

    def save(self, trainer, name):
        return super().save(trainer, f"exact={trainer.global_step}.ckpt")


class Gradients(pl.Callback):
    """Keeps the gradients of the first step; with a directory writes them, from each rank, for the parent process."""

    def __init__(self, directory=None):
        self.directory = directory

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 0:
            gradients = {n: p.grad for n, p in pl_module.model.named_parameters() if p.grad is not None}
            self.seen = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in gradients.items()}
            if self.directory is not None:
                torch.save(self.seen, self.directory / f"{trainer.global_rank}.pt")


def compile_with(monkeypatch, backend="aot_eager"):
    """Let modules be compiled by this backend: Inductor takes minutes."""
    compiled, chosen = nn.Module.compile, {"backend": backend, "options": None}
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compiled(self, **given | chosen))


def same(a, b, rtol=1e-6, atol=1e-8):
    """Compare tensors by name, up to what is computed in float32 in a float64 model too."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
