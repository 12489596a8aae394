"""Features are kept under all that they depend on, and give the same numbers to the bit."""

import errno
import os
import shutil

import numpy as np
import open_clip
import pytest
import torch

import diffvision
from diffvision.data.datasets.digits import png
from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.shards.writer import write_evaluation_split
from diffvision.evaluation import cache as caching
from diffvision.evaluation import evaluate
from diffvision.evaluation.cache import files_digest, model_digest
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import InferenceSettings
from diffvision.evaluation.output_files import write_bytes

TASKS = ("zero_shot", "retrieval", "composition")


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("DiffCLIP-debug")
    return model, transform, open_clip.get_tokenizer("DiffCLIP-debug")


def metrics(loaded, data, *, tasks=TASKS, **settings):
    model, transform, tokenizer = loaded
    found = {}
    for task in tasks:
        folder = EvaluationFolder(data / task)
        found |= evaluate(model, folder, transform=transform, tokenizer=tokenizer, **{"batch_size": 16} | settings)
    return found


@pytest.fixture(scope="module")
def expected(loaded, colours):
    return metrics(loaded, colours)


def test_features_are_computed_once_and_damaged_files_again(loaded, colours, expected, tmp_path, monkeypatch):
    counted, plain = [], Features._encode_images
    monkeypatch.setattr(Features, "_encode_images", lambda self, images: counted.append(1) or plain(self, images))
    assert metrics(loaded, colours, cache=tmp_path) == expected
    batches = len(counted)
    files = sorted(tmp_path.glob("*-rank0.pt"))
    assert len(files) == 4  # classes and a split of each of three tasks
    assert metrics(loaded, colours, cache=tmp_path) == expected
    assert len(counted) == batches
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    torch.save([1], files[0])
    with pytest.warns(UserWarning, match="is damaged") as warned:
        assert metrics(loaded, colours, cache=tmp_path) == expected
    assert len(warned) == 4
    assert len(counted) == 2 * batches


def test_features_are_found_by_all_that_they_follow_from(loaded, colours, tmp_path):
    model, transform, tokenizer = loaded
    folder = EvaluationFolder(colours / "zero_shot")

    def identity(model=model, transform=transform, tokenizer=tokenizer, path=folder.path / "test", **settings):
        made = Features(model, transform, tokenizer, InferenceSettings(**settings))
        return made.identify(data=files_digest(path), task=folder.task)

    plain = identity()
    assert identity() == identity(num_workers=2) == plain
    other = open_clip.create_model_and_transforms("DiffCLIP-debug")[0]
    other.load_state_dict(model.state_dict())
    assert identity(model=other) == plain
    weight = other.visual.trunk.patch_embed.proj.weight.data.view(-1)
    weight[0] = weight[0].nextafter(torch.tensor(9.0))
    copied = shutil.copytree(folder.path / "test", tmp_path / "test")
    assert identity(path=copied) == plain  # with its times, wherever it lies
    (copied / "0.tar").touch()
    assert identity(path=copied) != plain
    assert len({plain, identity(model=other), identity(precision="bf16"), identity(batch_size=7)}) == 4
    assert identity(transform=lambda image: 1 - transform(image)) != plain
    assert identity(tokenizer=lambda texts: tokenizer(texts) + 1) != plain
    before = model_digest(model)
    model.visual.trunk.blocks[0].attn.num_heads += 1
    assert model_digest(model) != before
    model.visual.trunk.blocks[0].attn.num_heads -= 1


def test_a_full_disk_is_a_warning(loaded, colours, expected, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caching, "write_bytes", full)
    with pytest.warns(UserWarning, match="No space left") as warned:
        found = metrics(loaded, colours, tasks=["composition"], cache=tmp_path)
    assert found.items() <= expected.items()
    assert len(warned) == 1


def test_skipped_samples_are_told_each_time(colours, tmp_path):
    broken = shutil.copytree(colours / "zero_shot", tmp_path / "squares")
    shutil.rmtree(broken / "test")
    samples = [{"__key__": f"{n:03}", "png": png(np.zeros((8, 8, 3))), "cls": b"0"} for n in range(100)]
    samples[40]["png"] = b"no image"
    write_evaluation_split(broken / "test", samples)
    settings = {"model": "DiffCLIP-debug", "data": str(broken), "num_workers": 0, "device": "cpu"}
    for _ in range(2):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="squares/test"):
            diffvision.evaluate(**settings, cache=str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache is .*file, and .* is a file"):
        diffvision.evaluate(**settings, cache=str(tmp_path / "file"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_bytes(tmp_path / "a.json", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_bytes(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"old")]
