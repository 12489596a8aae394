"""DEX's lambda along a run, and what is trained in it."""

import lightning.pytorch as pl
import pytest
import timm
import torch
import training_fits
from torch.utils.data import DataLoader

import diffvision
from diffvision.nn import depth_lambda_init
from diffvision.training.callbacks import LambdaAnnealing, LambdaWarmup, TrainOnlyNew


class Adapted(pl.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
        self.model = diffvision.adapt(timm.create_model("vit_tiny_patch16_224", **sizes), "dex")
        self.lambdas, self.learned, self.losses = [], [], []

    def training_step(self, batch, batch_idx):
        layer = self.model.blocks[1].attn
        self.lambdas.append(layer.current_lambda().item())
        self.learned.append(layer.dex_lambda.item())
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.03)


@pytest.mark.parametrize("schedule", [LambdaAnnealing, LambdaWarmup])
def test_lambda_follows_its_schedule_and_what_is_new_learns(schedule):
    module = Adapted()
    names = {name for name, _ in module.named_parameters() if ".dex" in name}
    data = DataLoader(torch.randn(1, 3, 32, 32).expand(8, -1, -1, -1))
    training_fits.trainer(schedule(4), TrainOnlyNew(), max_steps=8).fit(module, data)
    init, done = depth_lambda_init(1), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    fixed = [part * (1 - part) if schedule is LambdaAnnealing else part for part in done]
    expected = [f * init + part * learned for f, part, learned in zip(fixed, done, module.learned, strict=True)]
    assert module.lambdas == pytest.approx(expected, abs=1e-6)
    assert module.lambdas[0] > 0
    assert module.learned[-1] != 0
    assert module.losses[-1] < module.losses[0]
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == names


@pytest.mark.parametrize(("schedule", "steps"), [(LambdaAnnealing, 1), (LambdaWarmup, 0)])
def test_a_schedule_takes_steps(schedule, steps):
    """Over one step, the annealed lambda and the projection are both 0 at it, where nothing has a gradient."""
    with pytest.raises(ValueError, match=f"steps must .* got {steps}"):
        schedule(steps)
