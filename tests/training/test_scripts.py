"""The modules in a script: a plain Trainer, other loaders than ours, and no command line."""

from pathlib import Path

import lightning.pytorch as pl
import open_clip
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training_fits import noise

from diffvision.data import ImageLabelData, ImageTextData, TextData
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.training import (
    ClassificationModule,
    ContrastiveModule,
    DataReport,
    LambdaMonitor,
    LanguageModule,
    OptimizerSettings,
    Throughput,
)

# Lightning's advice (more workers, a validation loader, shorter logging intervals) is not for these.
pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")
SAMPLES, LENGTH = 8, open_clip.get_model_config("DiffCLIP-debug")["text_cfg"]["context_length"]
IMAGES = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CAPTIONS = torch.randint(1, 98, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
CAPTIONS[:, 5] = 49407  # the end, where OpenCLIP pools
LABELS = torch.arange(SAMPLES) % 3
TOKENS = torch.randint(0, 90, (SAMPLES, 17), generator=torch.Generator().manual_seed(2))
PARTS = {"clip": {"image": IMAGES, "text": CAPTIONS}, "vision": {"image": IMAGES, "label": LABELS}}
PARTS["language"] = {"tokens": TOKENS}
KINDS = list(PARTS)


def loader(kind: str, batch_size: int = 2, tuples: bool = False) -> DataLoader:
    rows = [*zip(*PARTS[kind].values(), strict=True)]
    rows = rows if tuples else [dict(zip(PARTS[kind], row, strict=True)) for row in rows]
    return DataLoader(rows, batch_size=batch_size)


def make(kind: str, **settings):
    torch.manual_seed(0)
    if kind == "clip":
        return ContrastiveModule("DiffCLIP-debug", **settings)
    if kind == "vision":
        return ClassificationModule("diff_vit_debug", **{"num_classes": 3} | settings)
    return LanguageModule("diff-debug", **{"model_args": {"vocab_size": 100}} | settings)


def trainer(*callbacks: Callback, **settings) -> pl.Trainer:
    defaults = {"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 2, "use_distributed_sampler": True}
    return training_fits.trainer(*callbacks, **defaults | settings)


class Seen(Callback):
    """Keeps the batches."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)


# --- fitting ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tuples", [False, True])
def test_another_loader_trains_and_validates_with_every_default(kind, tuples, tmp_path):
    callbacks = [LambdaMonitor(), Throughput(), DataReport()] if tuples else []
    made = trainer(seen := Seen(), *callbacks, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    made.fit(make(kind), loader(kind, tuples=tuples), loader(kind, tuples=tuples))
    assert made.global_step == 4
    assert made.lr_scheduler_configs[0].scheduler.total == 4
    assert torch.isfinite(made.callback_metrics["val/loss"])
    assert set(seen.batches[0]) == set(PARTS[kind])
    if tuples and kind != "language":
        assert {"lambda", "train/samples_per_second"} <= made.callback_metrics.keys()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"limit_train_batches": 3}, 3),
        ({"limit_train_batches": 0.5}, 2),
        ({"overfit_batches": 1, "max_epochs": 3}, 3),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})], "max_epochs": 2}, 5),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_the_schedule_is_as_long_as_the_run(settings, steps):
    made = trainer(*settings.pop("callbacks", []), **settings)
    made.fit(make("vision"), loader("vision"))
    assert made.global_step == made.lr_scheduler_configs[0].scheduler.total == steps


def test_captions_may_be_strings():
    seen = Seen()
    rows = [(image, f"a photo of number {number}") for number, image in enumerate(IMAGES)]
    trainer(seen, max_steps=1).fit(make("clip"), DataLoader(rows, batch_size=2))
    module = make("clip")
    assert torch.equal(seen.batches[0]["text"], module.tokenizer(["a photo of number 0", "a photo of number 1"]))


@pytest.mark.parametrize(
    ("kind", "batches", "named"),
    [
        ("clip", loader("language"), "image, text, got only tokens"),
        ("vision", loader("clip"), "label, got only image, text"),
        ("clip", loader("vision", tuples=True), r"a batch's text must be .* \[2\]"),
        ("vision", DataLoader(TensorDataset(IMAGES, LABELS, LABELS), batch_size=2), "a batch is a list of 3"),
    ],
)
def test_a_batch_of_another_kind_is_named(kind, batches, named):
    with pytest.raises(ValueError, match=named):
        trainer().fit(make(kind), batches)


def test_a_subclass_may_do_without_a_schedule():
    class Mine(ContrastiveModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    made = trainer(max_steps=2)
    made.fit(Mine("DiffCLIP-debug"), loader("clip"))
    assert made.global_step == 2


# --- settings of the Trainer ---


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val .* set optimizer.clip_norm"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches .* set accum_freq"),
    ],
)
def test_what_contrastive_training_does_by_other_settings_is_named(settings, ours):
    with pytest.raises(ValueError, match=ours):
        trainer(**settings).fit(make("clip"), loader("clip"))
    trainer(**settings).validate(make("clip"), loader("clip"), verbose=False)  # where it makes no difference


# --- validate ---


def test_a_validation_is_a_mean_over_samples():
    """The mean over samples, whatever the batches: 8 of them as 3 + 3 + 2."""
    module, losses = make("clip"), []
    (validated,) = trainer().validate(module, loader("clip", 3), verbose=False)
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        out = module(IMAGES[rows], CAPTIONS[rows])
        logits = out["logit_scale"] * out["image_features"] @ out["text_features"].T
        target = torch.arange(len(logits))
        losses.append(len(logits) * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2)
    assert validated["val/loss"] == pytest.approx(sum(losses).item() / 8, rel=1e-5)


# --- hyperparameters ---


@pytest.mark.quick("clip")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_all_that_a_module_needs(kind, tmp_path):
    settings = OptimizerSettings(lr=1e-3, warmup_steps=0, betas=(0.8, 0.9), clip_norm=1.0)
    module = make(kind, optimizer=settings)
    made = trainer(max_steps=1, logger=CSVLogger(tmp_path))
    made.fit(module, loader(kind))
    made.save_checkpoint(tmp_path / "x.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert loaded.settings == module.settings
    assert loaded.settings.betas == settings.betas
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
    assert f"model: {module.name}" in Path(made.log_dir, "hparams.yaml").read_text()
    changed = type(module).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True, optimizer={"lr": 2e-3})
    assert changed.settings.lr == 2e-3


def saved(module: pl.LightningModule, path: Path) -> Path:
    made = trainer()
    made.strategy.connect(module)
    made.save_checkpoint(path)
    return path


def test_weights_that_a_run_began_from_are_not_needed_again(tmp_path):
    started = tmp_path / "started.pt"
    torch.save(make("clip").model.state_dict(), started)
    module = make("clip", pretrained=str(started))
    assert module.hparams["pretrained"] == str(started)
    path = saved(module, tmp_path / "x.ckpt")
    started.unlink()
    assert ContrastiveModule.load_from_checkpoint(path, weights_only=True).hparams["pretrained"] is None

    from diffvision.models import language

    folder = tmp_path / "text"
    language.save(make("language").model, folder)
    module = LanguageModule(f"local-dir:{folder}", model_args={"max_length": 40})
    path = saved(module, tmp_path / "y.ckpt")
    folder.rename(tmp_path / "gone")
    loaded = LanguageModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.model.config == module.model.config
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())


# --- our data, and the command line ---


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Shards in train/, and an evaluation folder for each of two tasks."""
    root, names = tmp_path_factory.mktemp("made"), [str(number) for number in range(10)]
    write_shards(root / "train", noise(16, txt=str, cls=lambda i: i % 10))
    classes = {"classnames": names, "templates": ["a {c}"]}
    write_evaluation_split(root / "zero_shot" / "test", noise(4, cls=str), **classes)
    write_evaluation_split(root / "retrieval" / "test", noise(4, txt=str), dataset_type=["retrieval"])
    return root


def test_data_take_transforms_and_tokenizer_from_the_module(images):
    data = ImageTextData(f"{images}/train", 8, num_workers=0)
    with pytest.raises(ValueError, match="tokenizer"):
        data.train_dataloader()
    made = trainer(seen := Seen(), max_steps=1)
    made.fit(make("clip", preprocess={"mean": [9.0, 9.0, 9.0], "std": [1.0, 1.0, 1.0]}), datamodule=data)
    assert seen.batches[0]["image"].max() < -7.5  # normalised as the module says


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("text")
    lines = [f"document {number} has some words and {number + 1} more " * 4 for number in range(40)]
    write_shards(root / "shards", ({"__key__": f"{i:03d}", "txt": line} for i, line in enumerate(lines)))
    train_tokenizer(lines, 280).save(root / "tokenizer.json")
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_and_data_need_no_more_than_a_trainer(kind, images, text):
    """Transforms, tokenizer and number of classes come from the module; the same data serve another one."""
    limits = {"max_steps": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    if kind == "clip":
        data = ImageTextData(f"{images}/train", 8, [f"{images}/retrieval"], num_workers=0)
    elif kind == "vision":
        data = ImageLabelData(f"{images}/train", 8, f"{images}/zero_shot", num_workers=0)
    else:
        data = TextData(f"{text}/shards", 4, 16, f"{text}/shards", num_workers=0)
    sizes = {"tokenizer": str(text / "tokenizer.json"), "model_args": {"vocab_size": 280}}
    for _ in range(2):
        module = make(kind, **{"vision": {"num_classes": 10}, "language": sizes}.get(kind, {}))
        made = trainer(**limits)
        made.fit(module, data)
        assert made.global_step == 1
        assert data.trainer.lightning_module is module
    (metrics,) = trainer(**limits).validate(module, data, verbose=False)
    assert metrics


# --- what other libraries print ---


class Length(Callback):
    def on_train_end(self, trainer, pl_module):
        assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.total == 4


@pytest.mark.forks
def test_two_processes_share_a_loader_and_warn_of_nothing():
    """Warnings are errors in tests: of OpenCLIP's loss in torch, of Lightning's loaders, of our metrics."""
    made = trainer(Length(), DataReport(), devices=2, strategy="ddp_fork", max_epochs=2)
    made.fit(make("clip"), loader("clip"))
