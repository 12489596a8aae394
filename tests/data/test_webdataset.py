"""Our loaders against webdataset's own pipelines over the same shards, and its pipelines in our data modules."""

import lightning.pytorch as pl
import pytest
import torch
import webdataset as wds

from diffvision.data import ImageLabelData, ImageTextData, ShardSet
from diffvision.data.images.decode import decode_image
from diffvision.data.images.module import to_float
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.training import ClassificationModule, ContrastiveModule

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning", "ignore:.*does not have many workers")


@pytest.fixture
def tars(whole):
    return [str(path) for path in sorted(whole.glob("*.tar"))]


def pipeline(tars, **settings):
    return wds.WebDataset(tars, shardshuffle=False, **settings)


def test_our_loaders_yield_what_a_web_loader_yields(corpus, whole, tars):
    def made(sample):
        return to_float(decode_image(sample["png"])), int(sample["txt"].split()[-1])

    samples = pipeline(tars).map(made).batched(10)
    theirs = list(wds.WebLoader(samples, batch_size=None))
    ours = list(EvaluationLoader(ShardSet(whole), corpus.kind(), batch_size=10))
    assert len(ours) == len(theirs) == 11
    for batch, (images, numbers) in zip(ours, theirs, strict=True):
        assert torch.equal(batch["image"], images)
        assert batch["text"][:, 0].tolist() == numbers.tolist()
    shuffled = corpus.read(corpus.loader(whole, num_workers=2))
    together = {int(number) for _, numbers in theirs for number in numbers}
    seen = [number for batch in shuffled for number in batch]
    assert len(seen) == len(set(seen)) == 100
    assert set(seen) <= together == set(range(103))


FORMS = {
    "bytes": lambda samples: samples,
    "decoded": lambda samples: samples.decode("pil"),
    "pairs": lambda samples: samples.decode("pil").to_tuple("png", "txt"),
    "transformed pairs": lambda samples: samples.decode("pil").to_tuple("png", "txt").map_tuple(to_float, str),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_samples_of_a_users_pipeline_become_batches(corpus, tars, form, num_workers):
    data = ImageTextData(FORMS[form](pipeline(tars)), 10, num_workers=num_workers, tokenizer=corpus.tokenize)
    data.setup("fit")
    with pytest.warns(UserWarning, match="WebDataset has its own order"):
        batches = corpus.read(data.train_dataloader())
    assert all(len(batch) == 10 for batch in batches)
    assert {number for batch in batches for number in batch} <= set(range(103))
    assert len(batches) == 10


def test_what_cannot_be_used_is_left_out_with_a_warning(corpus, tmp_path):
    def damage(sample):
        if sample["__key__"] == "000003":
            sample["png"] = b"no image"

    directory = corpus.write(tmp_path / "s", 20, change=damage)
    samples = pipeline([str(path) for path in sorted(directory.glob("*.tar"))])
    data = ImageLabelData(samples, 19, num_workers=0)
    with (
        pytest.warns(UserWarning, match="has its own order"),
        pytest.warns(UserWarning, match="left out: not a JPEG"),
    ):
        [batch] = data.train_dataloader()
    assert batch["label"].tolist() == [number % 10 for number in range(20) if number != 3]


@pytest.mark.parametrize("sample", [(torch.zeros(4, 3, 2, 2), ["a"] * 4), {"png": torch.zeros(3, 2, 2)}, "text"])
def test_what_is_no_sample_is_an_error(corpus, sample):
    data = ImageTextData(wds.DataPipeline([[sample]]), 1, num_workers=0, tokenizer=corpus.tokenize)
    with pytest.warns(UserWarning, match="own order"):
        loader = data.train_dataloader()
    with pytest.raises(ValueError, match="without an image and txt"):
        next(iter(loader))


def trained(module, data, tmp_path):
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.warns(UserWarning, match="own order"):
        trainer.fit(module, data)
    assert trainer.global_step == 3
    return any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("of", ["samples", "batches"])
def test_a_users_pipeline_trains_a_clip_model(tars, tmp_path, of):
    module = ContrastiveModule("DiffCLIP-debug")
    samples = pipeline(tars).decode("pil").to_tuple("png", "txt").map_tuple(module.transform, str)
    source = samples if of == "samples" else wds.WebLoader(samples.batched(8), batch_size=None)
    assert trained(module, ImageTextData(source, 8, num_workers=0), tmp_path)


def test_a_users_pipeline_trains_a_classifier(tars, tmp_path):
    module = ClassificationModule("diff_vit_debug", num_classes=10)
    assert trained(module, ImageLabelData(pipeline(tars), 8, num_workers=0), tmp_path)
