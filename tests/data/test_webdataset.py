"""webdataset's own pipelines in our data modules, and what its writers write, evaluated in place."""

import numpy as np
import pytest
import torch
import webdataset as wds
from training_fits import train

from diffvision.data import ImageLabelData, ImageTextData, Limits, find_folders
from diffvision.data.images.image_data import to_float
from diffvision.data.images.image_sources import is_image_source
from diffvision.data.make import make
from diffvision.training import ContrastiveModule
from tests.data.conftest import png

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning", "ignore:.*does not have many workers")


def pipeline(directory):
    return wds.WebDataset(sorted(map(str, directory.glob("*.tar"))), shardshuffle=False)


FORMS = {
    "bytes": lambda samples: samples,
    "decoded": lambda samples: samples.decode("pil"),
    "pairs": lambda samples: samples.decode("pil").to_tuple("png", "txt"),
    "transformed pairs": lambda samples: samples.decode("pil").to_tuple("png", "txt").map_tuple(to_float, str),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_samples_of_a_users_pipeline_become_batches(corpus, whole, form, num_workers):
    data = ImageTextData(FORMS[form](pipeline(whole)), 10, num_workers=num_workers, tokenizer=corpus.tokenize)
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

    samples = pipeline(corpus.write(tmp_path / "s", 20, change=damage))
    data = ImageLabelData(samples, 19, num_workers=0)
    with pytest.warns(UserWarning, match="own order"), pytest.warns(UserWarning, match="left out: not a JPEG"):
        [batch] = data.train_dataloader()
    assert batch["label"].tolist() == [number % 10 for number in range(20) if number != 3]


@pytest.mark.parametrize("sample", [(torch.zeros(4, 3, 2, 2), ["a"] * 4), {"png": torch.zeros(3, 2, 2)}, "text"])
def test_what_is_no_sample_is_an_error(corpus, sample):
    data = ImageTextData(wds.DataPipeline([[sample]]), 1, num_workers=0, tokenizer=corpus.tokenize)
    with pytest.warns(UserWarning, match="own order"):
        loader = data.train_dataloader()
    with pytest.raises(ValueError, match="an image and txt"):
        next(iter(loader))


@pytest.mark.parametrize("of", ["samples", "batches"])
def test_a_users_pipeline_trains_a_clip_model(whole, of):
    module = ContrastiveModule("DiffCLIP-debug")
    samples = pipeline(whole).decode("pil").to_tuple("png", "txt").map_tuple(module.transform, str)
    source = samples if of == "samples" else wds.WebLoader(samples.batched(8), batch_size=None)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.warns(UserWarning, match="own order"):
        fitted = train(module, data=ImageTextData(source, 8, num_workers=0), max_steps=3)
    assert fitted.global_step == 3
    assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def write_shards(folder, numbers, **members):
    """Shards of numbered images as webdataset's own ShardWriter writes them, all with these members."""
    folder.mkdir(parents=True)
    with wds.ShardWriter(str(folder / "%06d.tar"), maxcount=5, verbose=0) as writer:
        for number in numbers:
            writer.write({"__key__": f"{number:06d}", "png": png(number), **members})


def numbers_evaluated(folder, corpus):
    return [n for batch in folder.batches(to_float) for n in corpus.numbers(batch["image"])]


@pytest.mark.parametrize(
    ("members", "task"),
    [
        ({"txt": "a cat"}, "retrieval"),
        ({"json": {"caption": ["a cat", "the cat"]}}, "retrieval"),
        ({"cls": 1}, "zero_shot"),
        ({"cls": 1, "txt": "a cat"}, "zero_shot"),
        ({"json": {"label": 1}, "txt": "a cat"}, "zero_shot"),
    ],
    ids=["txt", "json", "cls", "both", "both, in JSON"],
)
def test_shards_that_train_are_held_out_data(corpus, tmp_path, members, task):
    write_shards(tmp_path / "s/train", range(12), **members)
    write_shards(tmp_path / "s/val", range(20, 27), **members)
    if task == "zero_shot":
        (tmp_path / "s/classnames.txt").write_text("cat\ndog\n")
    val, both = str(tmp_path / "s/val"), str(tmp_path / "s")
    for source in (val, both, f"{val}/{{000000..000001}}.tar", f"{val}/*.tar", f"held={both}"):
        (folder,) = find_folders(source)
        if len(members) == 1 or folder.classnames:
            assert folder.task == task
        assert find_folders(source, task)[0].task == task
        assert numbers_evaluated(folder, corpus) == list(range(20, 27))
    assert numbers_evaluated(*find_folders(f"{val}/000001.tar"), corpus) == [25, 26]
    assert find_folders(both)[0].splits == ["test", "train"]
    with pytest.raises(ValueError, match="got shards"):
        make("folder", str(tmp_path / "packed"), source=both)


def test_the_parent_of_shards_for_each_split_trains_and_evaluates(corpus, tmp_path):
    write_shards(tmp_path / "train", range(12), cls=1, txt="sample 1")
    write_shards(tmp_path / "val", range(20, 27), cls=1, txt="sample 1")
    labels = ImageLabelData(str(tmp_path), 4, str(tmp_path), num_workers=0)
    assert labels.count_classes() is None
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    assert labels.count_classes() == 2
    for loader, numbers in ((labels.train_dataloader(), range(12)), (labels.val_dataloader(), range(20, 27))):
        assert sorted(n for batch in loader for n in corpus.numbers(batch["image"])) == list(numbers)
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
    write_shards(tmp_path / "deep/more/x", range(3), txt="a cat")
    with pytest.raises(ValueError, match="deep/more/x"):
        find_folders(tmp_path / "deep")
    write_shards(tmp_path / "none", range(3), npy=np.zeros(1))
    with pytest.raises(ValueError, match="none must have captions or class numbers"):
        find_folders(tmp_path / "none")
    (tmp_path / "none/preview.png").write_bytes(corpus.png(0))
    assert not is_image_source(tmp_path / "none")
