import numpy as np
import pytest
import torch

from diffvision.data import BadDataError, EvaluationFolder, Limits, find_folders
from diffvision.data.images.image_data import to_float
from diffvision.data.shards.writer import write_tar
from tests.data.conftest import png

LENIENT = Limits(1.0)


def folder_of(path, samples, *, shards=2, dataset_type=None):
    """A folder as clip_benchmark_export_wds leaves it: no manifest."""
    (path / "test").mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.array(samples, dtype=object), shards)):
        write_tar(path / "test" / f"{number}.tar", list(part))
    (path / "test" / "nshards.txt").write_text(str(shards))
    if dataset_type:
        (path / "dataset_type.txt").write_text(dataset_type + "\n")
    else:
        (path / "classnames.txt").write_text("cat\ndog \n\nbird\n")
        (path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\nthe {c}\n")
    return path


def labelled(count):
    return [{"__key__": f"s{n:07d}", "png": png(n), "cls": str(n % 4)} for n in range(count)]


def captioned(count):
    return [{"__key__": f"s{n}", "png": png(n), "txt": f"right {n}\nwrong {n}\n"} for n in range(count)]


def test_a_classification_folder(corpus, tmp_path):
    folder = EvaluationFolder(folder_of(tmp_path / "pets", labelled(25), shards=12))
    assert (folder.name, folder.task, folder.splits) == ("pets", "zero_shot", ["test"])
    assert folder.classnames == ["cat", "dog", "", "bird"]  # a blank line keeps its number
    assert folder.templates == ["a photo of a {c}.", "the {c}"]
    batches = folder.batches(to_float, batch_size=10)
    assert len(batches) == 3
    state = torch.get_rng_state()
    read = list(batches)
    assert torch.equal(torch.get_rng_state(), state)  # evaluating leaves it alone
    assert [len(batch["label"]) for batch in read] == [10, 10, 5]
    assert [n for batch in read for n in corpus.numbers(batch["image"])] == list(range(25))
    assert torch.cat([batch["label"] for batch in read]).tolist() == [n % 4 for n in range(25)]
    assert (batches.report.seen, batches.report.bad, batches.report.tail) == (25, 0, 0)
    assert len(list(batches)) == 3  # again


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 0), (3, 2), (30, 0)])
def test_each_sample_exactly_once_and_in_order_over_ranks(corpus, tmp_path, world_size, num_workers):
    folder = EvaluationFolder(folder_of(tmp_path / "pets", labelled(25)))
    seen = []
    for rank in range(world_size):
        batches = folder.batches(to_float, batch_size=4, rank=rank, world_size=world_size, num_workers=num_workers)
        seen += [n for batch in batches for n in corpus.numbers(batch["image"])]
        assert batches.report.remaining == 0
    assert seen == list(range(25))


def test_a_retrieval_folder_in_which_blank_captions_keep_their_place(tmp_path):
    samples = captioned(3)
    samples[1]["txt"], samples[2]["txt"] = "first\n\nthird", "\n \n"
    folder = EvaluationFolder(folder_of(tmp_path / "flickr8k", samples, dataset_type="Retrieval"))
    assert (folder.name, folder.task, folder.classnames, folder.templates) == ("flickr8k", "retrieval", [], [])
    batches = folder.batches(to_float, limits=LENIENT)
    (batch,) = batches
    assert batch["captions"] == [["right 0", "wrong 0"], ["first", "", "third"]]
    assert batch["image"].shape == (2, 3, 2, 2)
    assert batches.report.skipped == {"empty caption": 1}


def test_kinds_of_composition(corpus, tmp_path):
    samples = captioned(4)
    samples[0]["json"], samples[2]["json"] = b'{"kind": "swapped colours"}', b'{"source": "by hand"}'
    samples[3]["json"] = b'{"kind": "a/b"}'  # metrics have slashes in their names
    folder = EvaluationFolder(folder_of(tmp_path / "composition", samples, dataset_type="retrieval"))
    batches = folder.batches(to_float, limits=LENIENT)
    (batch,) = batches
    assert batch["kind"] == ["swapped colours", "", ""]
    assert [captions[0] for captions in batch["captions"]] == ["right 0", "right 1", "right 2"]
    refused = "kind in the JSON is not a text of 60 characters or fewer without a slash"
    assert batches.report.skipped == {refused: 1}


def test_a_folder_of_pairs(corpus, tmp_path):
    def pair(n, **members):
        texts = {f"{side}.txt": f"caption {2 * n + side}" for side in (0, 1)}
        images = {f"{side}.png": png(2 * n + side) for side in (0, 1)}
        return {"__key__": f"s{n}", **images, **texts, **members}

    lone = pair(2)
    del lone["1.png"]
    samples = [pair(0, json=b'{"kind": "Texts"}'), pair(1), lone]
    folder = EvaluationFolder(folder_of(tmp_path / "mmvp" / "pairs", samples, dataset_type="pairs", shards=1))
    assert (folder.name, folder.task) == ("mmvp", "pairs")
    batches = folder.batches(to_float, limits=LENIENT)
    (batch,) = batches
    assert corpus.numbers(batch["image"]) == [0, 1, 2, 3]  # the two of a sample next to each other
    assert batch["captions"] == [["caption 0"], ["caption 1"], ["caption 2"], ["caption 3"]]
    assert batch["kind"] == ["Texts", "Texts", "", ""]
    assert batches.report.skipped == {"missing 1.png or 1.jpg: the sample has 0.png, 0.txt, 1.txt": 1}


def test_a_folder_of_objects(corpus, tmp_path):
    records = [
        b'{"present": ["dog", "cat"], "absent": ["car", "bus"]}',
        b'{"present": ["dog"], "absent": []}',
        b'{"present": "dog", "absent": "car"}',
        b'{"present": ["potted plant"], "absent": ["dog"]}',
    ]
    samples = [{"__key__": f"s{n}", "png": png(n), "json": record} for n, record in enumerate(records)]
    samples.append({"__key__": "s9", "png": png(9)})
    path = folder_of(tmp_path / "objects-popular", samples, dataset_type="objects")
    (path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}")
    folder = EvaluationFolder(path)
    assert (folder.name, folder.task, folder.templates) == ("objects-popular", "objects", ["a photo of a {c}"])
    batches = folder.batches(to_float, limits=LENIENT)
    (batch,) = batches
    assert corpus.numbers(batch["image"]) == [0, 3]
    assert batch["captions"] == [["dog", "cat", "car", "bus"], ["potted plant", "dog"]]
    assert batches.report.skipped == {
        "present and absent in the JSON are not two lists of names of one length": 2,
        "missing json, which has the lists present and absent": 1,
    }


def test_folders_called_after_their_task_have_their_parents_name(corpus, tmp_path, monkeypatch):
    folder_of(tmp_path / "mine" / "composition", captioned(3), dataset_type="retrieval")
    folder_of(tmp_path / "mine" / "retrieval", captioned(3), dataset_type="retrieval")
    folder_of(tmp_path / "mine" / "zero_shot", labelled(3))
    folder_of(tmp_path / "deeper" / "still" / "pets", labelled(3))
    folder_of(tmp_path / "sugar", captioned(3), dataset_type="composition")
    folders = [(folder.name, folder.task) for folder in find_folders(tmp_path)]
    expected = [("pets", "zero_shot"), ("mine", "composition"), ("mine", "retrieval"), ("mine", "zero_shot")]
    assert folders == [*expected, ("sugar", "composition")]
    assert [folder.task for folder in find_folders(tmp_path / "mine" / "zero_shot")] == ["zero_shot"]
    monkeypatch.chdir(tmp_path / "mine" / "retrieval")
    assert find_folders(".")[0].name == "mine"


def test_bad_samples_are_left_out_and_counted(corpus, tmp_path):
    samples = labelled(10)
    samples[3]["png"] = samples[3]["png"][:50]
    samples[4]["cls"] = "cat"
    del samples[9]["cls"]
    folder = EvaluationFolder(folder_of(tmp_path / "pets", samples))
    batches = folder.batches(to_float, batch_size=3, limits=LENIENT)
    seen = [corpus.numbers(batch["image"]) for batch in batches]
    assert seen == [[0, 1, 2], [5], [6, 7, 8]]
    missing = "missing label: the sample has png, none of them cls, txt, json"
    assert batches.report.skipped == {"truncated image": 1, "label is not a class number": 1, missing: 1}
    with pytest.raises(BadDataError, match="bad samples"):
        list(folder.batches(to_float))


def test_what_is_no_evaluation_folder(corpus, tmp_path):
    with pytest.raises(ValueError, match="no images in"):
        find_folders(tmp_path)
    (tmp_path / "photos.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"photos\.zip"):
        find_folders(tmp_path / "photos.zip")
    with pytest.raises(ValueError, match="is no evaluation folder"):
        EvaluationFolder(tmp_path)
    folder = EvaluationFolder(folder_of(tmp_path / "pets", labelled(3)))
    with pytest.raises(ValueError, match="has no split 'val'"):
        folder.batches(to_float, split="val")
    (tmp_path / "pets" / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(ValueError, match="says 'multilabel': only"):
        EvaluationFolder(tmp_path / "pets")


def test_class_names_are_lines_and_nothing_else(corpus, tmp_path):
    path = folder_of(tmp_path / "pets", labelled(5))
    (path / "classnames.txt").write_bytes("\ufeffcat\r\ndog\u2028hound\r\nbird\x0bwing\n".encode())
    assert EvaluationFolder(path).classnames == ["cat", "dog\u2028hound", "bird\x0bwing"]


@pytest.mark.parametrize(
    "name", ["classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt", "test/nshards.txt"]
)
def test_a_text_that_is_not_utf_8_is_named(corpus, tmp_path, name):
    path = folder_of(tmp_path / "pets", labelled(5))
    (path / name).write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8 \(.* at byte"):
        list(EvaluationFolder(path).batches(to_float))
