"""The data modules under a real Trainer: resumption in the middle of an epoch, ranks, validation."""

import contextlib
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from diffvision.data import EvaluationFolder
from diffvision.data.images.image_data import ImageLabelData, ImageTextData, to_float
from diffvision.data.images.image_sources import find_images
from diffvision.data.images.pack_images import pack
from diffvision.data.shards.writer import write_evaluation_split


@pytest.fixture
def folder(corpus, tmp_path):
    samples = [{"__key__": str(n), "png": corpus.png(n), "cls": str(n % 10)} for n in range(23)]
    write_evaluation_split(tmp_path / "eval" / "test", samples, per_shard=9)
    (tmp_path / "eval" / "classnames.txt").write_text("\n".join(map(str, range(10))))
    return tmp_path / "eval"


class Recorder(pl.LightningModule):
    """Writes down what it is given."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False
        self.seen, self.validated, self.stop_after = [], [], stop_after

    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        key = "text" if "text" in batch else "label"
        self.seen.append((self.current_epoch, batch_idx, batch[key].flatten().tolist()))

    def on_train_batch_end(self, *args):
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module, data, directory, ckpt_path=None, **settings):
    checkpoint = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about workers and loggers
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[checkpoint],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=directory,
            **{"max_epochs": 3, **settings},
        )
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.quick("1", "6", "13")
@pytest.mark.parametrize("stop_after", [1, 4, 5, 6, 10, 13])
def test_a_run_cut_anywhere_goes_on_exactly(corpus, whole, tmp_path, stop_after):
    def data():
        return ImageTextData(str(whole), 20, num_workers=0, seed=9, tokenizer=corpus.tokenize)

    uninterrupted = Recorder()
    trainer = fit(uninterrupted, data(), tmp_path / "a")
    assert len(trainer.train_dataloader) == 5
    assert [position[:2] for position in uninterrupted.seen] == [(e, b) for e in range(3) for b in range(5)]
    resumed = Recorder()
    fit(resumed, data(), tmp_path / "b", ckpt_path=str(tmp_path / "a" / f"step={stop_after}.ckpt"))
    assert resumed.seen == uninterrupted.seen[stop_after:]


def test_a_run_interrupted_by_hand_goes_on_with_workers(corpus, whole, tmp_path):
    def data(num_workers):
        return ImageTextData(str(whole), 20, num_workers=num_workers, seed=9, tokenizer=corpus.tokenize)

    uninterrupted = Recorder()
    fit(uninterrupted, data(0), tmp_path / "a")
    first, second = Recorder(stop_after=8), Recorder()
    fit(first, data(2), tmp_path / "b")
    fit(second, data(1), tmp_path / "c", ckpt_path=str(tmp_path / "b" / "step=8.ckpt"))
    assert first.seen + second.seen == uninterrupted.seen


def test_another_batch_size_is_refused_on_resume(corpus, whole, tmp_path):
    fit(Recorder(), ImageTextData(str(whole), 20, num_workers=0, tokenizer=corpus.tokenize), tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="cannot resume: batch_size was 20"):
        fit(
            Recorder(),
            ImageTextData(str(whole), 10, num_workers=0, tokenizer=corpus.tokenize),
            tmp_path / "b",
            ckpt_path=str(tmp_path / "step=2.ckpt"),
        )


def test_a_validation_batch_is_an_evaluation_folder(corpus, whole, folder, tmp_path):
    data = ImageTextData(str(whole), 50, [str(folder)], num_workers=0, tokenizer=corpus.tokenize)
    module = Recorder()
    fit(module, data, tmp_path, max_epochs=1)
    (given,) = module.validated
    assert isinstance(given, EvaluationFolder)
    assert sum(len(batch["label"]) for batch in given.batches(to_float)) == 23


@pytest.mark.parametrize("given", ["folder", "shards"])
def test_labels_for_classification_and_each_validation_sample_once(corpus, whole, folder, tmp_path, given):
    source = folder if given == "folder" else folder / "test"
    data = ImageLabelData(str(whole), 50, str(source), num_workers=0, eval_batch_size=10)
    module = Recorder()
    fit(module, data, tmp_path, max_epochs=1)
    assert len(module.seen) == 2
    assert [len(batch["label"]) for batch in module.validated] == [10, 10, 3]
    assert [n for batch in module.validated for n in corpus.numbers(batch["image"])] == list(range(23))
    assert ImageLabelData(str(whole), 50, num_workers=0).val_dataloader() == []


def test_ranks_come_from_the_trainer(corpus, whole, folder):
    data = ImageTextData(str(whole), 10, num_workers=0, tokenizer=corpus.tokenize)
    alone = corpus.read(data.train_dataloader())
    data.trainer = SimpleNamespace(lightning_module=None, global_rank=1, world_size=2, current_epoch=0)
    assert corpus.read(data.train_dataloader()) == [batch[5:] for batch in alone]
    data.trainer.current_epoch = 1
    assert data.train_dataloader().epoch == 1
    labels = ImageLabelData(str(whole), 10, str(folder), num_workers=0)
    labels.trainer = SimpleNamespace(lightning_module=None, global_rank=1, world_size=2, current_epoch=0)
    batches = [corpus.numbers(batch["image"]) for batch in labels.val_dataloader()]
    assert [n for batch in batches for n in batch] == list(range(11, 23))
    assert max(map(len, batches)) == 5


def test_keys_and_settings(corpus, tmp_path):
    source = corpus.write(
        tmp_path / "s", 10, change=lambda s: {"__key__": s["__key__"], "img.png": s["png"], "json": '{"alt": "a 5"}'}
    )
    data = ImageTextData(
        str(source), 5, num_workers=0, image_key=["img.png"], caption_key="json:alt", tokenizer=corpus.tokenize
    )
    assert next(iter(data.train_dataloader()))["text"].flatten().tolist() == [5] * 5
    with pytest.raises(ValueError, match="tokenizer"):
        ImageTextData(str(source), 5).train_dataloader()
    for settings in ({"image_key": ["pkl"]}, {"caption_key": "pyd"}, {"caption_key": "txt:field"}):
        with pytest.raises(ValueError, match="is of a type that is not read here"):
            ImageTextData(str(source), 5, tokenizer=corpus.tokenize, **settings).train_dataloader()


def test_overfitting_repeats_one_batch_augmented_alike(corpus, tmp_path):
    data = ImageTextData(str(corpus.write(tmp_path / "s", 23)), 5, num_workers=0, tokenizer=corpus.tokenize)
    module = Recorder()
    fit(module, data, tmp_path / "checkpoints", max_epochs=3, overfit_batches=1)
    assert [(epoch, batch) for epoch, batch, _ in module.seen] == [(0, 0), (1, 0), (2, 0)]
    assert len({tuple(text) for *_, text in module.seen}) == 1


def test_an_evaluation_of_fewer_classes_is_numbered_as_the_packed_training_images(tmp_path):
    for split, names in (("train", ("ape", "bee", "cat")), ("val", ("cat",))):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "1.png")
    pack(find_images(str(tmp_path / "train")), tmp_path / "shards", num_workers=0)
    data = ImageLabelData(str(tmp_path / "shards"), 2, str(tmp_path / "val"), num_workers=0)
    assert [batch["label"].tolist() for batch in data.val_dataloader()] == [[2]]
    (tmp_path / "shards" / "classnames.txt").unlink()
    data = ImageLabelData(str(tmp_path / "shards"), 2, str(tmp_path / "val"), num_workers=0, num_classes=3)
    with pytest.warns(UserWarning, match="1 classes, taken for the first"):
        data.val_dataloader()
