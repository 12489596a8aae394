"""Our loaders against webdataset's own pipelines over the same shards, and its pipelines in our data modules."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import webdataset as wds

from diffvision.data import ImageLabelData, ImageTextData, ShardSet
from diffvision.data.images.decode import decode_image
from diffvision.data.images.folders import find_folders
from diffvision.data.images.image_data import to_float
from diffvision.data.images.image_sources import is_image_source
from diffvision.data.make import make
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.report import Limits
from diffvision.training import ContrastiveModule

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


def test_a_caption_in_json_that_was_not_decoded_is_an_error(corpus):
    sample = {"png": torch.zeros(3, 2, 2), "json": b'{"caption": "a"}'}
    data = ImageTextData(
        wds.DataPipeline([[sample]]), 1, num_workers=0, tokenizer=corpus.tokenize, caption_key="json:caption"
    )
    with pytest.warns(UserWarning, match="own order"), pytest.raises(TypeError, match="bytes, not text"):
        list(data.train_dataloader())


@pytest.mark.parametrize("sample", [(torch.zeros(4, 3, 2, 2), ["a"] * 4), {"png": torch.zeros(3, 2, 2)}, "text"])
def test_what_is_no_sample_is_an_error(corpus, sample):
    data = ImageTextData(wds.DataPipeline([[sample]]), 1, num_workers=0, tokenizer=corpus.tokenize)
    with pytest.warns(UserWarning, match="own order"):
        loader = data.train_dataloader()
    with pytest.raises(ValueError, match="an image and txt"):
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


def write_shards(folder, numbers, corpus, **members):
    """Shards as webdataset's own ShardWriter writes them; members are functions of a sample's number."""
    folder.mkdir(parents=True)
    with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=5, verbose=0) as writer:
        for number in numbers:
            made = {name: value(number) for name, value in members.items()}
            writer.write({"__key__": f"{number:06d}", "png": corpus.png(number), **made})


def numbers_evaluated(folder, corpus):
    return [n for batch in folder.batches(to_float) for n in corpus.numbers(batch["image"])]


@pytest.mark.parametrize(
    ("members", "task"),
    [
        ({"txt": lambda n: f"sample {n}"}, "retrieval"),
        ({"json": lambda n: {"caption": [f"sample {n}", f"again {n}"]}}, "retrieval"),
        ({"cls": lambda n: n % 2}, "zero_shot"),
        ({"cls": lambda n: n % 2, "txt": lambda n: f"sample {n}"}, "zero_shot"),
        ({"json": lambda n: {"label": n % 2}, "txt": lambda n: f"sample {n}"}, "zero_shot"),
    ],
    ids=["txt", "json", "cls", "both", "both, in JSON"],
)
def test_shards_that_train_are_held_out_data(corpus, tmp_path, members, task):
    write_shards(tmp_path / "s/train", range(12), corpus, **members)
    write_shards(tmp_path / "s/val", range(20, 27), corpus, **members)
    if task == "zero_shot":
        (tmp_path / "s/classnames.txt").write_text("cat\ndog\n")
    val, both = str(tmp_path / "s/val"), str(tmp_path / "s")
    for source in (val, both, f"{val}/{{000000..000001}}.tar", f"{val}/*.tar", f"held={both}"):
        (folder,) = find_folders(source)
        if len(members) == 1 or folder.classnames:
            assert folder.task == task
        assert find_folders(source, task)[0].task == task
        assert numbers_evaluated(folder, corpus) == list(range(20, 27))
    assert [numbers_evaluated(*find_folders(f"{val}/000001.tar"), corpus), find_folders(both)[0].splits] == [
        [25, 26],
        ["test", "train"],
    ]
    with pytest.raises(ValueError, match="got shards"):
        make("folder", str(tmp_path / "packed"), source=both)


def test_the_parent_of_shards_for_each_split_trains_and_evaluates(corpus, tmp_path):
    write_shards(tmp_path / "train", range(12), corpus, cls=lambda n: n % 2, txt=lambda n: f"sample {n}")
    write_shards(tmp_path / "val", range(20, 27), corpus, cls=lambda n: n % 2, txt=lambda n: f"sample {n}")
    labels = ImageLabelData(str(tmp_path), 4, str(tmp_path), num_workers=0)
    assert labels.count_classes() is None
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    assert labels.count_classes() == 2
    images = [
        torch.cat([batch["image"] for batch in loader])
        for loader in (labels.train_dataloader(), labels.val_dataloader())
    ]
    assert [sorted(corpus.numbers(one)) for one in images] == [list(range(12)), list(range(20, 27))]
    texts = ImageTextData(str(tmp_path), 4, [str(tmp_path)], num_workers=0, tokenizer=corpus.tokenize)
    texts.setup("fit")
    assert sorted(n for batch in texts.train_dataloader() for n in corpus.numbers(batch["image"])) == list(range(12))
    assert [numbers_evaluated(folder, corpus) for folder in texts.val_dataloader()] == [list(range(20, 27))]


@pytest.mark.parametrize("member", ["txt", "json"])
def test_samples_of_one_image_are_one_image_in_retrieval(corpus, tmp_path, member):
    def captions(key):
        texts = [f"sample {key}", f"again {key}"] if key == 5 else [f"sample {key}"]
        return "\n".join(texts) if member == "txt" else {"text": texts}

    (tmp_path / "val").mkdir()
    with wds.TarWriter(str(tmp_path / "val/0.tar")) as writer:
        for key in range(6):
            writer.write({"__key__": f"{key}", "png": corpus.png(key % 3), member: captions(key)})
        writer.write({"__key__": "blank", "png": corpus.png(0), member: " " if member == "txt" else {"text": " "}})
        writer.write({"__key__": "lost", member: captions(6)})
    expected = [["sample 0", "sample 3"], ["sample 1", "sample 4"], ["sample 2", "sample 5", "again 5"]]
    (folder,) = find_folders(tmp_path / "val")
    batches = folder.batches(to_float, num_workers=1, limits=Limits(1.0))
    assert [one for batch in batches for one in batch["captions"]] == expected
    assert batches.report.skipped.total() == 2
    assert [corpus.numbers(batch["image"]) for batch in batches] == [[0, 1, 2]]


def test_shards_beside_images_or_too_deep(corpus, tmp_path):
    write_shards(tmp_path / "deep/more/x", range(3), corpus, txt=lambda n: f"sample {n}")
    with pytest.raises(ValueError, match="deep/more/x"):
        find_folders(tmp_path / "deep")
    write_shards(tmp_path / "none", range(3), corpus, npy=lambda n: np.zeros(1))
    with pytest.raises(ValueError, match="none must have captions or class numbers"):
        find_folders(tmp_path / "none")
    (tmp_path / "none/preview.png").write_bytes(corpus.png(0))
    assert not is_image_source(tmp_path / "none")
