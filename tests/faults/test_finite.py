"""A loss that is finite and huge. `tests/training/fault_tolerance/test_finite.py` has those that are not finite."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diffvision.training.fault_tolerance.checkpoints import find_bad_tensors
from diffvision.training.fault_tolerance.finite import StepGuard

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Line(pl.LightningModule):
    """A line whose loss has a spike in the fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.guard = nn.Linear(3, 1), StepGuard()

    def configure_callbacks(self) -> list[pl.Callback]:
        return [self.guard]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean() * (1e12 if batch_idx == 3 else 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_finite_spike_is_a_step_like_any_other():
    module = Line()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, **quiet)
    trainer.fit(module, DataLoader(torch.randn(24, 3), batch_size=4))
    assert trainer.global_step == 6
    assert module.guard.skipped == 0
    assert not find_bad_tensors(module.state_dict())
