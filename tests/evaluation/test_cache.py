"""An evaluation that is ended goes on where its features end, with the same numbers to the bit."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import warnings

import open_clip
import pytest
import torch

from diffvision.data.datasets import digits
from diffvision.data.datasets.digits import load_split, make_digits
from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation import cache as caching
from diffvision.evaluation import evaluate, features, run
from diffvision.evaluation.cache import Cache, files_digest, model_digest
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import InferenceSettings
from diffvision.evaluation.output_files import write_bytes

TASKS = ("zero_shot", "retrieval", "composition")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The demo's digits, the first of them."""
    root = tmp_path_factory.mktemp("digits") / "digits"
    train, test = load_split()
    few = [train[:20], test[:100]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load_split", lambda: few)
        make_digits(root, copies=1)
    return root


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    model, _, transform = open_clip.create_model_and_transforms("DiffCLIP-debug")
    return model, transform, open_clip.get_tokenizer("DiffCLIP-debug")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(features, "IMAGES", 32)
    monkeypatch.setattr(features, "CLASSES", 4)


def metrics(loaded, data, *, tasks=TASKS, **settings):
    model, transform, tokenizer = loaded
    found = {}
    for task in tasks:
        folder = EvaluationFolder(data / task)
        found |= evaluate(model, folder, transform=transform, tokenizer=tokenizer, **{"batch_size": 16} | settings)
    return found


@pytest.fixture(scope="module")
def expected(loaded, data):
    return metrics(loaded, data)


def encoded(monkeypatch, end=None):
    """Counts the batches of images that go through a model from now on; the process is killed at number `end`."""
    numbers, plain = [], Features._encode_images

    def counted(self, images):
        numbers.append(len(images))
        if len(numbers) == end:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, images)

    monkeypatch.setattr(Features, "_encode_images", counted)
    return numbers


@pytest.mark.forks
def test_a_killed_evaluation_goes_on_where_its_features_end(loaded, data, expected, tmp_path, monkeypatch):
    numbers = encoded(monkeypatch, end=10)  # of 7 of zero_shot, 5 of retrieval and 7 of composition
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=metrics, args=(loaded, data), kwargs={"cache": Cache(tmp_path)}, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL

    monkeypatch.undo()
    monkeypatch.setattr(features, "IMAGES", 32)
    monkeypatch.setattr(features, "CLASSES", 4)
    numbers = encoded(monkeypatch)
    cache = Cache(tmp_path)
    assert metrics(loaded, data, cache=cache) == expected
    assert cache.found == 8  # 3 of classes, 4 of zero_shot and the first of retrieval
    batches = sum(len(EvaluationFolder(data / task).batches(lambda x: x, batch_size=16)) for task in TASKS)
    assert len(numbers) == batches - 9
    numbers.clear()
    again = Cache(tmp_path)
    assert metrics(loaded, data, cache=again) == expected
    assert not numbers
    assert not again.made
    assert str(again).startswith(f"cache {tmp_path}: {again.found} pieces found, 0 made; it holds ")


def test_damaged_and_foreign_pieces_are_told_and_worked_out_anew(loaded, data, expected, tmp_path):
    zero_shot = {key: value for key, value in expected.items() if key.startswith("zero_shot")}
    assert metrics(loaded, data, tasks=["zero_shot"], cache=Cache(tmp_path)) == zero_shot
    pieces = sorted(tmp_path.rglob("*.safetensors"))
    content = bytearray(pieces[0].read_bytes())
    content[-3] ^= 1  # of a tensor: safetensors itself does not notice
    pieces[0].write_bytes(content)
    pieces[3].write_bytes(pieces[3].read_bytes()[:100])
    shutil.copy(pieces[4], pieces[5])
    for piece in pieces[1:3]:
        piece.unlink()
    os.mkfifo(pieces[1])
    (pieces[2] / "inside").mkdir(parents=True)
    cache = Cache(tmp_path)
    with pytest.warns(UserWarning, match="is damaged or of another evaluation") as warned:
        assert metrics(loaded, data, tasks=["zero_shot"], cache=cache) == zero_shot
    assert len(warned) == cache.made == 5
    again = Cache(tmp_path)
    assert metrics(loaded, data, tasks=["zero_shot"], cache=again) == zero_shot
    assert (again.found, again.made) == (len(pieces), 0)


def test_features_are_found_by_all_that_they_follow_from(loaded, data, tmp_path):
    model, transform, tokenizer = loaded
    folder = EvaluationFolder(data / "zero_shot")

    def identity(model=model, transform=transform, tokenizer=tokenizer, path=folder.path / "test", **settings):
        made = Features(model, transform, tokenizer, InferenceSettings(**settings))
        return made._identity(data=files_digest(path), task=folder.task)

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


def test_a_full_disk_is_one_warning(loaded, data, expected, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caching, "write_bytes", full)
    with pytest.warns(UserWarning, match=r"keeps nothing more .No space left") as warned:
        found = metrics(loaded, data, tasks=["composition"], cache=Cache(tmp_path))
    assert found.items() <= expected.items()
    assert len(warned) == 1


def test_links_in_a_cache_are_not_written_through(tmp_path):
    elsewhere, rows = tmp_path / "elsewhere", {"x": torch.zeros(100)}
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("years of work")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ("a" * 32)).symlink_to(elsewhere)
    cache = Cache(tmp_path / "cache")
    with pytest.warns(UserWarning, match=r"keeps nothing more \(a{32} in it"):
        cache.save("a" * 32, "000000", rows, None)
    assert [file.name for file in elsewhere.iterdir()] == ["notes.txt"]


@pytest.mark.quick("32-2-tasks2", "7-0-tasks1")
@pytest.mark.parametrize(
    ("batch_size", "num_workers", "tasks"), [(1, 2, ["zero_shot"]), (7, 0, TASKS), (32, 2, TASKS[2:])]
)
def test_batches_and_workers_change_no_metric(loaded, data, expected, batch_size, num_workers, tasks):
    found = metrics(loaded, data, tasks=tasks, batch_size=batch_size, num_workers=num_workers)
    assert found == {key: value for key, value in expected.items() if key.split("/")[0] in tasks}


def test_the_command_tells_what_it_keeps_and_skipped_samples_again(data, tmp_path, capsys, monkeypatch):
    broken = shutil.copytree(data / "zero_shot", tmp_path / "digits")
    monkeypatch.setattr("diffvision.data.shards.loader.BatchReader._item", one_bad(monkeypatch), raising=True)
    settings = {"model": "DiffCLIP-debug", "data": str(broken), "num_workers": 0, "device": "cpu"}
    for _ in range(2):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="digits/test: unreadable samples are"):
            run(**settings, cache=str(tmp_path / "cache"), output=str(tmp_path / "out.json"))
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(";")[0] for line in said if line.startswith("cache ")] == [
        "0 pieces found, 5 made",
        "5 pieces found, 0 made",
    ]
    assert json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache is .*file, and .* is a file"):
        run(**settings, cache=str(tmp_path / "file"))


def one_bad(monkeypatch):
    from diffvision.data.shards.loader import BatchReader
    from diffvision.data.shards.sample import BadSample

    plain = BatchReader._item

    def item(self, sample, epoch):
        if sample[1] == 40:
            raise BadSample("truncated")
        return plain(self, sample, epoch)

    return item


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_bytes(tmp_path / "a.json", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_bytes(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"old")]


def test_no_cache_warns_of_nothing(loaded, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics(loaded, data, tasks=["zero_shot"], cache=Cache(tmp_path / "new" / "folder"))
