"""Pictures as people have them: every kind of source gives the same pictures, packed and where they lie."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from diffvision.data import CaptionMember, ImageLabel, ImageLabelData, ImageMember, ImageTextData, Limits, find_folders
from diffvision.data.images.folders import ImageEvaluationFolder
from diffvision.data.images.image_data import to_float
from diffvision.data.images.image_set import ImageSet
from diffvision.data.images.image_sources import find_images, is_image_source
from diffvision.data.make import make
from tests.data.conftest import png, read_tars, write_rows

KINDS = ("cat", "dog", "red_fox")


def write(path, number):
    """A picture whose first pixel says which one it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (number, 100, 200)).save(path)


def number(image):
    return round(float(image[0, 0, 0]) * 255)


@pytest.fixture
def tree(tmp_path):
    """train/ and val/, a folder for each class, thirty pictures: number n is of class n % 3."""
    for n in range(30):
        split = "val" if n % 5 == 4 else "train"
        write(tmp_path / "pets" / split / KINDS[n % 3] / f"photo.{n:02d}.png", n)
    (tmp_path / "pets/train/cat/notes.txt").write_text("of no image")
    (tmp_path / "pets/.DS_Store").write_text("x")
    return tmp_path / "pets"


@pytest.fixture
def captioned(tmp_path):
    """Twelve pictures in a folder, without anything that says what they show."""
    for n in range(12):
        write(tmp_path / "photos" / f"{n}.png", n)
    return tmp_path / "photos"


def labels_read(pictures):
    kind = ImageLabel(ImageMember(to_float))
    items = [kind.decode(ImageSet(pictures).members((0, row))) for row in range(len(pictures))]
    return {number(item["image"]): item["label"] for item in items}


def captions_read(pictures):
    members = [ImageSet(pictures).members((0, row)) for row in range(len(pictures))]
    return {number(ImageMember(to_float)(m)): CaptionMember().all(m) for m in members}


def captions_evaluated(folder):
    pairs = [zip(b["image"], b["captions"], strict=True) for b in folder.batches(to_float)]
    batches = [(number(image), one) for pair in pairs for image, one in pair]
    return dict(batches), len(batches)


def read_in_order(folder, split):
    batches = list(folder.batches(to_float, split=split))
    return [(number(image), int(n)) for b in batches for image, n in zip(b["image"], b["label"], strict=True)]


def test_a_folder_for_each_class(tree):
    training = find_images(tree)
    assert training.classnames == KINDS
    assert labels_read(training) == {n: n % 3 for n in range(30) if n % 5 != 4}
    assert labels_read(find_images(tree, "validation")) == {n: n % 3 for n in range(4, 30, 5)}
    assert labels_read(find_images(tree / "val")) == labels_read(find_images(tree, "validation"))
    data = ImageLabelData(str(tree / "val"), 2, str(tree / "val"), num_workers=0)
    data.train_dataloader()
    with pytest.warns(UserWarning, match="is what the model is trained on"):
        data.val_dataloader()
    with pytest.raises(ValueError, match="'test'"):
        find_images(tree, "test")
    write(tree / "train/loose.png", 1)
    with pytest.raises(ValueError, match=r"loose\.png"):
        find_images(tree)


def test_splits_number_their_classes_alike(tmp_path):
    for split, kinds in (("train", KINDS), ("val", KINDS[1:])):
        for n, kind in enumerate(kinds):
            for copy in range(4):
                write(tmp_path / "pets" / split / kind / f"{copy}.png", n)
    validation = find_images(tmp_path / "pets", "validation")
    assert (validation.classnames, sorted(set(validation.labels.tolist()))) == (KINDS, [1, 2])
    data = ImageLabelData(str(tmp_path / "pets"), 4, str(tmp_path / "pets/val"), num_workers=0, num_classes=3)
    assert [label for batch in data.val_dataloader() for label in batch["label"].tolist()] == [1] * 4 + [2] * 4
    (folder,) = find_folders(f"animals={tmp_path}/pets")
    assert (folder.name, folder.task, folder.splits) == ("animals", "zero_shot", ["test", "train"])
    assert (folder.classnames, folder.templates) == (["cat", "dog", "red fox"], ["a photo of a {c}."])
    assert [n for _, n in read_in_order(folder, "test")] == [1] * 4 + [2] * 4
    write(tmp_path / "others/cow/1.png", 1)
    data = ImageLabelData(str(tmp_path / "pets"), 4, str(tmp_path / "others"), num_workers=0, num_classes=3)
    with pytest.raises(ValueError, match=r"others.* cow"):
        data.val_dataloader()


def test_classes_of_composed_and_decomposed_names_are_one(tmp_path):
    """macOS decomposes the names of folders, and a table may have both."""
    for name in ("train/caf\u00e9", "train/tea", "val/cafe\u0301", "val/tea"):
        write(tmp_path / name / "0.png", 0)
    rows = "file,label\ntrain/tea/0.png,caf\u00e9\nval/tea/0.png,cafe\u0301\n"
    (tmp_path / "labels.csv").write_text(rows, encoding="utf-8")
    for split in ("train", "validation"):
        images = find_images(tmp_path, split)
        assert images.classnames == ("caf\u00e9", "tea")
        assert images.labels.tolist() == [0, 1]
    assert find_images(tmp_path / "labels.csv").classnames == ("caf\u00e9",)


CLASSES = {"cat/1.png": None, "dog/2.png": None}
JSON_ROW = '{"file": "1.png", "caption": "a"'
SEVERAL = json.dumps(["1.png", "2.png"] * 50)
ANSWER = {"from": "gpt", "value": "a cat"}
REFUSED = {
    # files (a path is a link), the source among them ("." for their folder), what the message has
    "no folder": ({}, "none", "there is no"),
    "empty folder": ({"notes.md": "x"}, ".", "no images in"),
    "table of something else": ({**CLASSES, "prices.csv": "a,b\n"}, ".", "prices.csv"),
    "a split and others": (["train/cat/1.png", "test/cat/2.png", "more/cat/3.png"], ".", "pets"),
    "splits too deep": (["data/train/cat/1.png", "data/test/cat/2.png"], ".", "test and train"),
    "splits below classes": (["cat/train/1.png", "cat/test/2.png"], ".", "test and train"),
    "two of one split": (["val/cat/1.png", "valid/cat/2.png"], ".", "two validation splits"),
    "a table of Flickr8k": ({"Images/1.png": None, "captions.txt": "image,caption\n1.png,a\n"}, ".", "captions.txt"),
    "folders twice": (["training_set/training_set/cat/1.png", "test_set/test_set/cat/2.png"], ".", "train"),
    "a class that is a link to nothing": ({**CLASSES, "fox": Path("gone")}, ".", "fox links to"),
    "empty table": ({"t.csv": ""}, "t.csv", "t.csv"),
    "no rows": ({"t.csv": "image,caption\n"}, "t.csv", "has no rows"),
    "no caption": ({"t.csv": "image,size\n1.png,3\n"}, "t.csv", "caption"),
    "too many cells": ({"t.csv": "file,caption\n1.png,a cat, asleep\n"}, "t.csv", "line 2"),
    "two captions": ({"t.csv": "file,caption,caption\n1.png,a,b\n"}, "t.csv", "'caption'"),
    "a quote that never ends": ({"t.csv": 'file,caption\n1.png,a\n2.png,"b\n3.png,c\n'}, "t.csv", "after line 2"),
    "a quote in a cell": ({"t.csv": 'file,caption\n1.png,"a" dog\n'}, "t.csv", "written twice"),
    "URLs": ({"t.tsv": "url\tcaption\nhttp://a.b/2.jpg\ta dog\n"}, "t.tsv", "img2dataset"),
    "Latin-1": ({"t.tsv": b"file\tcaption\n1.png\tcaf\xe9\n"}, "t.tsv", "line 2"),
    "two formats": ({"train.csv": "file,label\n", "test.jsonl": "{}"}, ".", "one format"),
    "outside": ({"t.csv": "file,caption\n1.png,a\n../secret.png,b\n"}, "t.csv", "line 3: the image"),
    "a link": ({"t.csv": "file,caption\nl.png,b\n", "l.png": Path("../secret.png")}, "t.csv", "'l.png'"),
    "several images": ({"t.jsonl": f'{{"file": {SEVERAL}, "caption": "a"}}\n'}, "t.jsonl", "must be one path"),
    "cut line": ({"t.jsonl": JSON_ROW + "}\n" + JSON_ROW}, "t.jsonl", "line 2"),
    "no object": ({"t.jsonl": JSON_ROW + "}\n3\n"}, "t.jsonl", "line 2, must be"),
    "no answer": ({"c.json": '[{"image": "1.png", "conversations": []}]'}, "c.json", "row 0"),
    "two answers": ({"c.json": json.dumps([{"image": "1.png", "conversations": 2 * [ANSWER]}])}, "c.json", "row 0"),
    "an answer about no image": ({"c.json": json.dumps([{"conversations": [ANSWER]}])}, "c.json", "row 0"),
    "a list of Karpathy's": ({"c.json": '{"images": [5]}'}, "c.json", "Karpathy"),
    "no split of Karpathy's": ({"c.json": '{"images": [{"filename": "0.png", "split": null}]}'}, "c.json", "Karpathy"),
    "no images of COCO's": ({"c.json": '{"images": []}'}, "c.json", "COCO"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(case, tmp_path):
    files, source, words = REFUSED[case]
    write(tmp_path / "secret.png", 0)
    (tmp_path / "pets").mkdir()
    for n, name in enumerate(files):
        content = files[name] if isinstance(files, dict) else None
        if content is None:
            write(tmp_path / "pets" / name, n)
        elif isinstance(content, Path):
            (tmp_path / "pets" / name).symlink_to(content)
        else:
            (tmp_path / "pets" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        find_images(tmp_path / "pets" / source)
    assert "\n" not in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 230


@pytest.mark.parametrize("cell", ["../secret.png", "/etc/passwd", ["1.png", "2.png"], 7], ids=repr)
def test_a_parquet_has_one_path_inside_its_folder_per_row(captioned, cell):
    table = write_rows(captioned, [{"file": cell, "caption": "a"}], "parquet")
    (captioned / "rows").mkdir()
    shutil.copy(table, captioned / "rows")
    for source in (table, captioned / "rows"):
        with pytest.raises(ValueError, match=r"file|must be one path"):
            find_images(source)


@pytest.mark.parametrize("packed", [False, True])
def test_a_class_folder_without_images_is_a_warning_that_names_the_source(tree, tmp_path, packed):
    (tree / "train/empty").mkdir()
    source = shutil.make_archive(str(tmp_path / "pets"), "zip", tree) if packed else tree
    with pytest.warns(UserWarning, match=f"{source}/train has no images of empty"):
        assert find_images(source).classnames == ("cat", "dog", "empty", "red_fox")


@pytest.mark.parametrize("layout", ["splits", "one folder", "texts", "table"])
def test_an_archive_is_read_as_its_folder(tree, captioned, tmp_path, layout):
    folder, inside = {"splits": (tree, "."), "one folder": (tree.parent, "pets")}.get(layout, (captioned, "."))
    for n in range(12) if layout == "texts" else ():
        (captioned / f"{n}.txt").write_text(f"picture {n}")
    if layout == "table":
        write_rows(captioned, [{"file": f"{n}.png", "caption": f"picture {n}"} for n in range(12)], "csv", "captions")
    archive = shutil.make_archive(str(tmp_path / ("\u00e4" * 100)), "zip", folder, inside)
    assert is_image_source(archive)
    for split in ("train", "validation") if folder is not captioned else (None,):
        expected, found = find_images(folder / inside, split), find_images(archive, split)
        for same in ("names", "captions", "classnames", "label_names"):
            assert getattr(found, same) == getattr(expected, same)
        assert [found.read(row) for row in range(len(found))] == [expected.read(row) for row in range(len(found))]
    (folder,) = find_folders(archive)
    assert folder.files("test") == [Path(archive)]
    assert folder.images("test").source.startswith(archive)


@pytest.mark.parametrize(
    ("name", "content", "end", "words"),
    [
        ("metadata.csv", "file,label\n0.png,nan\n", None, "metadata.csv, line 2"),
        ("train.csv", "file,label\n../0.png,cat\n", None, "train.csv, line 2"),
        ("notes/a.md", "no picture", None, "no images in"),
        ("cat/1.png", "cut short", 40, "cannot be read"),
        ("../cat/1.png", "outside", None, "leads out of it"),
    ],
)
def test_faults_in_an_archive_are_named_by_it_and_its_member(tmp_path, name, content, end, words):
    archive = tmp_path / "pictures.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(name, content)
    archive.write_bytes(archive.read_bytes()[:end])
    with pytest.raises(ValueError, match=words) as error:
        find_images(archive)
    assert str(archive) in str(error.value)
    assert "unpacked" not in str(error.value)


def test_an_archive_that_was_unpacked_in_part_is_unpacked_again(tree, tmp_path, monkeypatch):
    archive, extract = shutil.make_archive(str(tmp_path / "pets"), "zip", tree), zipfile.ZipFile.extractall

    def fill_the_disk(self, path):
        extract(self, path)
        shutil.rmtree(Path(path) / "train")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extractall", fill_the_disk)
        with pytest.raises(ValueError, match="No space left"):
            find_images(archive)
    assert len(find_images(archive)) == len(find_images(tree)) == 24
    (tree / "train/cat/photo.00.png").unlink()
    shutil.make_archive(str(tmp_path / "pets"), "zip", tree)
    assert len(find_images(archive)) == 23  # an archive that was changed, too


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_tables(captioned, ending, monkeypatch):
    rows = [{"file": f"{n}.png", "what it shows": f"picture {n}", "kind": KINDS[n % 3]} for n in range(12)]
    table = write_rows(captioned, rows, ending)
    columns = {"caption": "what it shows", "label": "kind"}
    monkeypatch.chdir(captioned.parent)
    for source in (table, table.relative_to(captioned.parent)):
        pictures = find_images(source, columns=columns)
        assert captions_read(pictures) == {n: [f"picture {n}"] for n in range(12)}
        assert labels_read(pictures) == {n: n % 3 for n in range(12)}
        assert pictures.classnames == KINDS
    with pytest.raises(ValueError, match="caption"):
        find_images(table)
    with pytest.raises(ValueError, match="'kin'"):
        find_images(table, columns={"label": "kin"})
    with pytest.raises(ValueError, match=r"columns.*images"):
        find_images(table, columns={"images": "file"})


COCO = {
    "images": [{"id": n, "file_name": f"{n}.png"} for n in range(4)],
    "annotations": [{"image_id": n, "caption": f"{word}\n{n}"} for n in range(4) for word in ("one", "two")],
}
ASKED = {"from": "human", "value": "<image>\nDescribe it."}
SHARED = [
    {"image": f"coco/{n}.png", "conversations": [ASKED, {"from": "gpt", "value": f"a long {n}.\n\nIn two paragraphs."}]}
    for n in range(4)
]
FLICKR = ["image| n| comment", *(f"{n}.png| 0| {word} {n} ." for n in range(4) for word in ("one", "two"))]
CAPTIONS = {
    # image #, the files beside the images, the source, the captions of image #
    "COCO": ("train2017/#.png", {"a/captions.json": json.dumps(COCO)}, "a/captions.json", ["one #", "two #"]),
    "ShareGPT4V": ("coco/#.png", {"share.json": json.dumps(SHARED)}, "share.json", ["a long #. In two paragraphs."]),
    "Urban-1k": ("image/#.png", {"caption/#.txt": "a long #\n\nno caption\n"}, ".", ["a long #"]),
    "img2dataset": ("0/#.png", {"0/#.txt": "a #", "0/#.json": "{}", "0.parquet": ""}, ".", ["a #"]),
    "Flickr30k": ("#.png", {"captions.txt": "\n".join(FLICKR)}, "captions.txt", ["one # .", "two # ."]),
}


@pytest.mark.parametrize("layout", CAPTIONS)
def test_captions_in_published_layouts(tmp_path, layout):
    name, files, source, captions = CAPTIONS[layout]
    root = tmp_path / "images"
    for n in range(4):
        write(root / name.replace("#", str(n)), n)
        for file, text in files.items():
            path = root / file.replace("#", str(n))
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace("#", str(n)))
    expected = {n: [caption.replace("#", str(n)) for caption in captions] for n in range(4)}
    assert captions_evaluated(find_folders(root / source)[0]) == (expected, 4)
    if layout != "Flickr30k":  # of which training takes a row at a time
        assert captions_read(find_images(root / source)) == expected


def test_an_image_of_urban_1k_without_a_caption_is_counted_and_a_text_beside_it_is_one(tmp_path):
    write(tmp_path / "image/1.png", 1)
    (tmp_path / "caption").mkdir()
    (tmp_path / "caption/0.txt").write_text("of no image")
    assert find_images(tmp_path).captions == [()]
    (tmp_path / "image/1.txt").write_text("next to it")
    assert find_images(tmp_path).captions == [("next to it",)]


def test_karpathys_file(tmp_path):
    splits = ["train", "restval", "val", "test", "test", "test"]
    images = []
    for n, split in enumerate(splits):
        folder = {} if n == 5 else {"filepath": "val2014" if split != "train" else "train2014"}  # Flickr30k's have none
        write(tmp_path / "images" / folder.get("filepath", "") / f"{n}.png", n)
        sentences = [{"raw": f"caption {m} of {n}.", "tokens": []} for m in range(5)]
        images.append({**folder, "filename": f"{n}.png", "split": split, "sentences": sentences})
    table = tmp_path / "dataset_coco.json"
    table.write_text(json.dumps({"images": images, "dataset": "x"}))
    for split, numbers in (("train", [0, 1]), ("validation", [2]), ("test", [3, 4, 5])):
        read = captions_read(find_images(table, split))
        assert read == {n: [f"caption {m} of {n}." for m in range(5)] for n in numbers}
    folder = find_folders(table)[0]
    assert (folder.task, folder.splits) == ("retrieval", ["test", "train", "validation"])
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(ValueError, match=r"dataset_coco\.json: its images"):
        find_images(table)


def test_splits_of_parquet_as_on_the_hub(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "hub/data").mkdir(parents=True)
    image = {"bytes": png(0), "path": None}
    for split, labels in (("train", ["cat", "dog", "fox", "fox"]), ("test", ["dog", "fox"])):
        rows = datasets.Dataset.from_list([{"image": image, "label": label} for label in labels])
        rows.to_parquet(str(tmp_path / f"hub/data/{split}-00000-of-00001.parquet"))
    assert find_images(tmp_path / "hub").labels.tolist() == [0, 1, 2, 2]
    assert find_images(tmp_path / "hub", "test").labels.tolist() == [1, 2]
    folder = find_folders(tmp_path / "hub")[0]
    assert (folder.splits, folder.classnames) == (["test", "train"], ["cat", "dog", "fox"])


def test_parquets_of_a_split_have_the_same_columns(captioned):
    write_rows(captioned, [{"file": "0.png", "caption": "a"}], "parquet", "train-0")
    write_rows(captioned, [{"file": "1.png"}], "parquet", "train-1")
    with pytest.raises(ValueError, match=r"train-1\.parquet"):
        find_images(captioned, "train")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_splits_of_tables_by_their_names(captioned, ending):
    for split, numbers in (("train", range(8)), ("my_val", range(8, 12))):
        rows = [{"file": f"{n}.png", "label": KINDS[n % 3] if n != 9 else "dog"} for n in numbers]
        write_rows(captioned, rows, ending, split)
    assert set(labels_read(find_images(captioned))) == set(range(8))
    folder = find_folders(captioned)[0]
    assert folder.splits == ["test", "train"]
    assert labels_read(folder.images("test")) == {8: 2, 9: 1, 10: 1, 11: 2}
    write_rows(captioned, [{"file": "11.png"}], ending, "test")  # which may have no labels
    assert set(labels_read(find_images(captioned))) == set(range(8))
    with pytest.raises(ValueError, match="label"):
        find_images(captioned, "test")
    (captioned / f"more.{ending}").write_text("x")
    with pytest.raises(ValueError, match=f"more.{ending} is not"):
        find_images(captioned)


def test_folders_without_samples_may_be_next_to_splits(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / "pets" / split / "cat/1.png", 1)
    for file in ("annotations/instances.json", "__MACOSX/train/._1.png"):
        (tmp_path / "pets" / file).parent.mkdir(parents=True)
        (tmp_path / "pets" / file).write_text("{}")
    assert find_images(tmp_path / "pets", "test").classnames == ("cat",)
    (tmp_path / "pets/annotations/more.parquet").write_text("x")
    with pytest.raises(ValueError, match="train"):
        find_images(tmp_path / "pets")


def test_a_class_may_be_called_as_a_split_is(tmp_path):
    for folder in ("vehicles", "divided/train", "divided/test"):
        for number, file in enumerate(("bus/1.png", "train/train_2.png")):
            write(tmp_path / folder / file, number)
    assert find_images(tmp_path / "vehicles").classnames == ("bus", "train")
    assert find_images(tmp_path / "divided", "test").classnames == ("bus", "train")


def test_without_a_split_for_it_there_is_no_evaluation(tmp_path):
    write(tmp_path / "pets/train/cat/1.png", 0)
    data = ImageLabelData(str(tmp_path / "pets"), 1, str(tmp_path / "pets"), num_workers=0, num_classes=1)
    with pytest.raises(ValueError, match="no split 'test'"):
        data.setup("fit")
    write(tmp_path / "captions/train/1.png", 0)
    (tmp_path / "captions/train/1.txt").write_text("a cat")
    with pytest.raises(ValueError, match="no split 'test'"):
        ImageTextData(str(tmp_path / "captions"), 1, [str(tmp_path / "captions")]).setup("fit")
    write(tmp_path / "tests/test/cat/1.png", 0)
    with pytest.raises(ValueError, match="no split 'train'"):
        find_images(tmp_path / "tests")


@pytest.mark.parametrize("blank", ["", " "])
def test_an_empty_name_is_not_the_current_folder(blank):
    for use in (find_images, find_folders, lambda blank: ImageLabelData(blank, 1).train_dataloader()):
        with pytest.raises(ValueError, match=repr(blank)):
            use(blank)


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_classes_that_datasets_numbers_stay(captioned, form):
    datasets = pytest.importorskip("datasets")
    file = datasets.Value("string") if form == "parquet" else datasets.Image()
    features = datasets.Features({"file": file, "label": datasets.ClassLabel(names=["zebra", "ant"])})
    made = datasets.DatasetDict()
    for split, labels in (("train", [0, 1, 0]), ("validation", [1, -1]), ("test", [0])):
        rows = {"file": [str(captioned / f"{n}.png") for n in range(len(labels))], "label": labels}
        made[split] = datasets.Dataset.from_dict(rows, features=features)
        made[split].to_parquet(str(captioned / f"{split}.parquet"))
    made.save_to_disk(captioned / "saved")
    source = captioned / "saved" if form == "saved" else captioned
    for split, labels in (("train", {0: 0, 1: 1, 2: 0}), ("test", {0: 0})):
        images = find_images(source, split)
        assert (labels_read(images), images.classnames) == (labels, ("zebra", "ant"))
    with pytest.raises(ValueError, match="row 1 must have a label"):
        find_images(source, "validation")
    if form == "saved":
        shutil.rmtree(source / "test")
        with pytest.raises(ValueError, match="saved"):
            find_images(source, "test")


def test_without_datasets_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r'pip install "diffvision\[data\]"'):
        find_images(tmp_path / "t.parquet")


def test_an_epoch_is_exact_and_bad_pictures_are_counted(tree):
    (tree / "train/dog/broken.png").write_bytes((tree / "train/dog/photo.01.png").read_bytes()[:45])
    data = ImageLabelData(str(tree), batch_size=5, num_workers=0, max_bad_fraction=0.1, num_classes=3)
    loader = data.train_dataloader()
    epoch = [number(image) for batch in loader for image in batch["image"]]
    assert loader.report.seen + loader.report.bad + loader.report.tail == len(find_images(tree)) == 25
    assert loader.report.summary().splitlines()[1:] == [f"  1 x truncated image: {tree}/train: dog/broken.png"]
    again = ImageLabelData(str(tree), batch_size=5, num_workers=2, max_bad_fraction=0.1, num_classes=3)
    assert [number(image) for batch in again.train_dataloader() for image in batch["image"]] == epoch
    with pytest.raises(ValueError, match=r"num_classes must be 3.*2"):
        ImageLabelData(str(tree), batch_size=5, num_classes=2).train_dataloader()
    with pytest.raises(ValueError, match=r"num_classes must be 3.*1000"):
        ImageLabelData(str(tree), batch_size=5, num_classes=1000).train_dataloader()
    with pytest.raises(ValueError, match="has labels and no captions"):
        ImageTextData(str(tree), batch_size=5, tokenizer=torch.tensor).train_dataloader()
    state = loader.state_dict()
    data.train_dataloader().load_state_dict(state)
    (tree / "train/cat/photo.00.png").rename(tree / "train/cat/photo.000.png")
    with pytest.raises(ValueError, match="cannot resume: shards was"):
        ImageLabelData(str(tree), batch_size=5, num_classes=3).train_dataloader().load_state_dict(state)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "embedded", "saved"])
def test_rows_of_an_image_are_one_image(captioned, tmp_path, ending):
    rows = [{"file": f"{n}.png", "caption": f"{word} {n}"} for word in ("one", "two", "three") for n in range(4)]
    if ending not in ("embedded", "saved"):
        rows[4]["file"], rows[5]["file"] = "./0.png", str(captioned / "1.png")
    source = write_rows(captioned, rows, ending)
    expected = {n: [f"one {n}", f"two {n}", f"three {n}"] for n in range(4)}
    assert captions_evaluated(find_folders(source)[0]) == (expected, 4)
    assert len(find_images(source)) == 12  # training takes a row at a time
    make("folder", str(tmp_path / "shards"), source=str(source), num_workers=1)
    packed = read_tars(tmp_path / "shards")
    assert [json.loads(sample["json"])["caption"] for sample in packed] == list(expected.values())


def test_a_row_without_a_caption_is_counted_and_its_image_keeps_the_others(captioned):
    (captioned / "t.csv").write_text("file,caption\n0.png,one\n0.png,\n0.png,two\n1.png,three\n,four\n,five\n")
    batches = find_folders(captioned / "t.csv")[0].batches(to_float, limits=Limits(1.0))
    assert [batch["captions"] for batch in batches] == [[["one", "two"], ["three"]]]
    assert batches.report.skipped == {"empty caption": 1, "missing image": 2}


def test_an_image_has_one_label_however_many_rows(captioned):
    rows = [{"file": f"{n}.png", "caption": f"{word} {n}", "label": KINDS[n]} for n in range(3) for word in "ab"]
    folder = ImageEvaluationFolder(write_rows(captioned, rows, "csv"))
    assert (folder.task, read_in_order(folder, "test")) == ("zero_shot", [(0, 0), (1, 1), (2, 2)])
    data = ImageLabelData("none", 4, str(captioned / "t.csv"), num_workers=0, num_classes=3)
    assert [label for batch in data.val_dataloader() for label in batch["label"].tolist()] == [0, 1, 2]
    rows[1]["label"] = "dog"
    with pytest.raises(ValueError, match=r"t\.csv: 0\.png .* cat and dog"):
        ImageEvaluationFolder(write_rows(captioned, rows, "csv"))
    assert captions_evaluated(ImageEvaluationFolder(captioned / "t.csv", task="retrieval"))[1] == 3
    # A dataset of classes may have the same picture twice: each is counted.
    (captioned / "1.png").write_bytes((captioned / "0.png").read_bytes())
    rows = [{"file": row["file"], "label": row["label"]} for row in rows[::2]]
    assert len(read_in_order(ImageEvaluationFolder(write_rows(captioned, rows, "embedded")), "test")) == 3


def test_packed_for_training_classes_are_mixed(tree, tmp_path):
    make("folder", str(tmp_path / "packed"), source=str(tree), per_shard=8)
    assert (tmp_path / "packed/classnames.txt").read_text().split("\n")[:3] == list(KINDS)
    assert not is_image_source(tmp_path / "packed")
    assert len({sample["cls"] for sample in read_tars(tmp_path / "packed")[:8]}) > 1  # of the first shard


@pytest.mark.filterwarnings("ignore:.*is what the model is trained on")
@pytest.mark.parametrize(
    ("folder", "beside", "column"),
    [
        ("pets", "train.csv", "caption"),
        ("pets", "captions.csv", "caption"),
        ("pets/train", "captions.csv", "caption"),
        ("pets/train", "prices.csv", "price"),
        ("pets", "train/cat/photo.00.txt", None),
    ],
)
def test_class_folders_with_captions_beside_them_are_classified(tree, folder, beside, column):
    source = tree.parent / folder
    photos = [path.relative_to(source) for path in (tree / "train").rglob("*.png")]
    (source / beside).write_text("\n".join([f"file,{column}", *(f"{photo},a photo" for photo in photos)]))
    data = ImageLabelData(str(source), 4, str(source), num_workers=0)
    assert data.count_classes() == 3
    count = sum(len(batch["label"]) for batch in data.val_dataloader())
    assert count == (6 if folder == "pets" else 24)
    (evaluated,) = find_folders(source, "zero_shot")
    assert (evaluated.task, len(read_in_order(evaluated, "test"))) == ("zero_shot", count)
    if column == "caption":
        assert len(find_images(source, reads="captions").captions) == 24


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_of_labels_beside_folders_is_what_counts(captioned, ending, monkeypatch):
    for n in range(4):
        write(captioned / ("left", "right")[n % 2] / f"{n}.png", n)
    rows = [{"file": f"{('left', 'right')[n % 2]}/{n}.png", "label": KINDS[n % 3]} for n in range(4)]
    write_rows(captioned, rows, ending, "labels")
    monkeypatch.chdir(captioned.parent)
    for source in (captioned, captioned.name):
        assert find_images(source, reads="labels").classnames == KINDS


def test_a_task_chooses_between_labels_and_captions(captioned):
    (captioned / "t.csv").write_text("file,caption,label\n0.png,one,cat\n1.png,two,dog\n")
    tasks = [find_folders(captioned / "t.csv", task)[0].task for task in (None, "zero_shot", "retrieval", "pairs")]
    assert tasks == ["zero_shot", "zero_shot", "retrieval", "zero_shot"]
    (captioned / "t.csv").write_text("file,caption\n0.png,one\n")
    assert find_folders(captioned / "t.csv", "zero_shot")[0].task == "retrieval"
    with pytest.raises(ValueError, match="cannot be used for 'zero_shot'"):
        ImageEvaluationFolder(captioned / "t.csv", task="zero_shot")
