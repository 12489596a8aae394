"""Supervised training of a timm model: counts that are exact over ranks, soft targets, layer decay, EMA."""

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch.nn import functional as F
from training_fits import Rows, trainer

from diffvision.data import ImageLabelData
from diffvision.training.classification import ClassificationModule
from diffvision.training.optim import OptimizerSettings

SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0)


class Images(Rows):
    """Random images and labels; a rank validates its part, and the parts are unequal."""

    split, eval_batch_size = 17, 8

    def __init__(self, batch_size: int = 8):
        generator = torch.Generator().manual_seed(0)
        image = torch.randn(21, 3, 32, 32, generator=generator)
        label = torch.randint(0, 10, (21,), generator=generator)
        super().__init__([{"image": i, "label": t} for i, t in zip(image, label, strict=True)])
        self.batch_size = batch_size


def make(**settings):
    torch.manual_seed(0)
    return ClassificationModule("diff_vit_debug", num_classes=10, **{"optimizer": SETTINGS} | settings)


@pytest.mark.parametrize("label", [-100, -1, 10])
def test_a_label_that_is_no_class_is_refused(label):
    """-100 is what cross entropy leaves out in silence."""
    data = Images()
    data.rows[0]["label"] = torch.tensor(label)
    with pytest.raises(ValueError, match=rf"0 to 9, got {label}.*num_classes"):
        trainer().validate(make(), datamodule=data, verbose=False)


def test_without_an_evaluation_a_recipes_checkpoint_saves_nothing():
    data = ImageLabelData("photos", 1)
    with pytest.warns(UserWarning, match="ModelCheckpoint saves nothing"):
        make().set_monitors([ModelCheckpoint(monitor="val/acc1", mode="max"), ModelCheckpoint()], data)
    with pytest.raises(ValueError, match=r"EarlyStopping\.monitor must"):
        make().set_monitors([EarlyStopping("val/acc1", mode="max")], data)
    data.evaluation = "photos"
    make().set_monitors([headline := ModelCheckpoint(monitor="headline", mode="max")], data)
    assert headline.monitor == "val/acc1"
    with pytest.raises(ValueError, match=r"got val/acc$"):
        make().set_monitors([ModelCheckpoint(monitor="val/acc", mode="max")], data)


@pytest.mark.forks
@pytest.mark.parametrize("processes", [1, 2])
def test_validation_counts_every_sample_once(processes):
    module, data = make(), Images()
    module.eval()
    with torch.no_grad():
        logits = module.model(torch.stack([row["image"] for row in data.rows]))
    label = torch.tensor([row["label"] for row in data.rows])
    order = logits.argsort(descending=True)
    many = {"devices": 2, "strategy": "ddp_fork"} if processes == 2 else {}
    (metrics,) = trainer(**many).validate(module, datamodule=data, verbose=False)
    assert metrics["val/samples"] == 21
    assert metrics["val/acc1"] == pytest.approx((order[:, 0] == label).float().mean().item())
    assert metrics["val/acc5"] == pytest.approx((order[:, :5] == label[:, None]).any(1).float().mean().item())
    assert metrics["val/loss"] == pytest.approx(F.cross_entropy(logits, label).item(), rel=1e-5)


def test_fewer_than_five_classes_have_no_top_five():
    module, data = make(), Images()
    module.num_classes = 4
    for row in data.rows:
        row["label"] %= 4
    module.model.reset_classifier(4)
    (metrics,) = trainer().validate(module, datamodule=data, verbose=False)
    assert metrics.keys() == {"val/acc1", "val/loss", "val/samples"}


def test_mixup_trains_on_soft_targets_and_wants_pairs(monkeypatch):
    seen = []
    original = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, y, **k: seen.append((y, k)) or original(x, y, **k))
    module = make(mixup={"mixup_alpha": 0.8, "cutmix_alpha": 1.0}, label_smoothing=0.1)
    trainer().fit(module, datamodule=Images())
    target, options = seen[0]
    assert target.shape == (8, 10)
    torch.testing.assert_close(target.sum(1), torch.ones(8))
    assert target.min() == pytest.approx(0.01)  # the smoothing, once
    assert options["label_smoothing"] == 0.0
    with pytest.raises(ValueError, match="mixup"):
        trainer().fit(module, datamodule=Images(batch_size=7))
    assert make(mixup={"mixup_alpha": 0.0}).mixup is None


def test_layer_decay_scales_rates_and_keeps_lambdas_from_decay():
    module = make(layer_decay=0.5)
    module.trainer = trainer()
    module.trainer.fit_loop._data_source.instance = range(10)
    optimizer = module.configure_optimizers()["optimizer"]
    names = {id(p): name for name, p in module.model.named_parameters()}
    groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert groups.keys() == set(names.values())
    assert groups["head.weight"]["lr"] == pytest.approx(2 * groups["blocks.3.mlp.fc1.weight"]["lr"])
    assert groups["blocks.3.mlp.fc1.weight"]["lr"] == pytest.approx(2 * groups["blocks.2.mlp.fc1.weight"]["lr"])
    assert groups["blocks.0.mlp.fc1.weight"]["weight_decay"] == SETTINGS.weight_decay
    for name in ("pos_embed", "blocks.0.attn.lambda_q1", "blocks.0.norm1.weight", "head.bias"):
        assert groups[name]["weight_decay"] == 0.0, name


def test_ema_and_the_checkpoint(tmp_path):
    module = make(model_args={"drop_path_rate": 0.1}, grad_checkpointing=True)
    run = trainer(EMAWeightAveraging(decay=0.5), max_steps=2, limit_train_batches=2)
    run.fit(module, datamodule=Images())
    run.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert stored["diffvision"]["model"] == "diff_vit_debug"
    assert stored["diffvision"]["model_args"] == {"drop_path_rate": 0.1, "num_classes": 10}
    assert set(stored["state_dict"]) == {f"model.{k}" for k in module.model.state_dict()}
    assert run.logged_metrics["val/samples"] == 21
