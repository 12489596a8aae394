"""The data modules: resumption under a real Trainer, ranks, validation, keys."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from training_fits import trainer

from diffvision.data import ImageLabelData, ImageTextData
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

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, batch["text"].flatten().tolist()))
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(data, directory, ckpt_path=None, **settings):
    """Return the batches of three epochs; a checkpoint is written after each step."""
    module, checkpoint = Recorder(), ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(checkpoint, max_steps=-1, max_epochs=3, **settings).fit(module, data, ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and loggers
def test_a_resumed_run_has_the_batches_that_were_left_whatever_the_workers(corpus, whole, tmp_path):
    def data(num_workers):
        return ImageTextData(str(whole), 20, num_workers=num_workers, seed=9, tokenizer=corpus.tokenize)

    seen = fit(data(2), tmp_path / "a")
    assert [position[:2] for position in seen] == [(e, b) for e in range(3) for b in range(5)]
    assert fit(data(1), tmp_path / "b", ckpt_path=str(tmp_path / "a" / "step=8.ckpt")) == seen[8:]
    assert fit(data(0), tmp_path / "c", ckpt_path=str(tmp_path / "a" / "step=10.ckpt")) == seen[10:]


@pytest.mark.parametrize("given", ["folder", "shards"])
def test_labels_for_classification_and_each_validation_sample_once(corpus, whole, folder, given):
    source = folder if given == "folder" else folder / "test"
    data = ImageLabelData(str(whole), 50, str(source), num_workers=0, eval_batch_size=10)
    data.setup("validate")
    assert [len(batch["label"]) for batch in data.train_dataloader()] == [50, 50]
    validated = list(data.val_dataloader())
    assert [len(batch["label"]) for batch in validated] == [10, 10, 3]
    assert [n for batch in validated for n in corpus.numbers(batch["image"])] == list(range(23))
    assert ImageLabelData(str(whole), 50, num_workers=0).val_dataloader() == []


def test_evaluation_folders_are_found_before_training(corpus, whole, folder):
    data = ImageTextData(str(whole), 50, [str(folder)], num_workers=0, tokenizer=corpus.tokenize)
    data.setup("fit")
    assert len(data.val_dataloader()) == 1
    assert [one.path for one in data.val_dataloader()] == [folder]


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
    def rename(sample):
        return {"__key__": sample["__key__"], "img.png": sample["png"], "json": '{"alt": "a 5"}'}

    source = corpus.write(tmp_path / "s", 10, change=rename)
    keys = {"image_key": ["img.png"], "caption_key": "json:alt"}
    data = ImageTextData(str(source), 5, num_workers=0, tokenizer=corpus.tokenize, **keys)
    assert next(iter(data.train_dataloader()))["text"].flatten().tolist() == [5] * 5
    with pytest.raises(ValueError, match="tokenizer"):
        ImageTextData(str(source), 5).train_dataloader()
    for settings in ({"image_key": ["pkl"]}, {"caption_key": "pyd"}, {"caption_key": "txt:field"}):
        with pytest.raises(ValueError, match="is of a type that is not read here"):
            ImageTextData(str(source), 5, tokenizer=corpus.tokenize, **settings).train_dataloader()


@pytest.mark.filterwarnings("ignore")
def test_overfitting_repeats_one_batch_augmented_alike(corpus, tmp_path):
    data = ImageTextData(str(corpus.write(tmp_path / "s", 23)), 5, num_workers=0, tokenizer=corpus.tokenize)
    seen = fit(data, tmp_path / "checkpoints", overfit_batches=1)
    assert [(epoch, batch) for epoch, batch, _ in seen] == [(0, 0), (1, 0), (2, 0)]
    assert len({tuple(text) for *_, text in seen}) == 1


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
