"""Public datasets in miniature, in the layouts that people have: what becomes of them, and what is refused."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from diffvision.cli import main
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.imagenet import imagenet_wnids
from diffvision.evaluation.prompts import imagenet, prompts_of
from diffvision.evaluation.sets import DATASETS, make_evaluation

# In the order of ILSVRC's own numbers, which is neither that of the wnids nor that of the names.
NAMES = {
    "n02119789": "kit fox",
    "n02100735": "English Setter",
    "n02110185": "Siberian Husky",
    "n02096294": "Australian Terrier",
    "n01440764": "tench",
    "n15075141": "toilet paper",
}


def picture(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(path)
    return path


def by_wnid(root, wnids=NAMES, split="val", images=2):
    for seed, wnid in enumerate(wnids):
        for number in range(images):
            picture(root / split / wnid / f"{wnid}_{number}.png", seed)
    return root


def flat(folder, images=12):
    """Write ILSVRC's val before valprep.sh; image n is of the nth class of NAMES, again and again."""
    for number in range(images):
        picture(folder / f"ILSVRC2012_val_{number + 1:08d}.JPEG", number)
    return [list(NAMES)[number % len(NAMES)] for number in range(images)]


def text(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def named(folder):
    """Return {name of an image file: the name of its class in prompts}."""
    (found,) = find_folders(folder)
    images, prompts = found.images("test"), prompts_of(found)
    pairs = zip(images.names, images.labels, strict=True)
    return {Path(name).name: prompts.classnames[label] for name, label in pairs}


def meta(folder):
    """Write meta.mat: ILSVRC2012_ID, WNID and num_children as the devkit has them, with a class of classes."""
    rows = [(number, wnid, NAMES[wnid], 0) for number, wnid in enumerate(NAMES, start=1)]
    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("num_children", "f8")]
    folder.mkdir(parents=True, exist_ok=True)
    savemat(folder / "meta.mat", {"synsets": np.array([*rows, (1001, "n00001740", "entity", 2)], dtype=kinds)})


def test_imagenet_by_wnid_is_linked_with_the_names_of_its_classes(tmp_path, capsys):
    by_wnid(by_wnid(tmp_path / "imagenet"), split="train")
    out = tmp_path / "out/imagenet"
    command = ["data", "make", "evaluation", str(out), "--dataset", "imagenet", "--source", str(tmp_path / "imagenet")]
    assert main([*command, "--subset"]) == 0
    assert "12 test images of 6 classes" in capsys.readouterr().out
    assert (out / "test/n02119789").readlink() == tmp_path / "imagenet/val/n02119789"
    (folder,) = find_folders(out.parent)
    assert (folder.name, folder.task, folder.splits) == ("imagenet", "zero_shot", ["test", "train"])
    assert named(out) == {f"{wnid}_{number}.png": name for wnid, name in NAMES.items() for number in (0, 1)}
    assert len(prompts_of(folder).templates) == 80
    assert main([*command, "--subset"]) == 1  # it is there already
    shutil.rmtree(tmp_path / "imagenet/val/n02119789")
    with pytest.raises(ValueError, match="n02119789, which is gone"):  # not one class fewer
        named(out)


@pytest.mark.parametrize("kind", ["devkit", "kaggle", "tensorflow", "caffe"])
def test_a_flat_val_gets_its_classes_from_the_file_that_people_have(kind, tmp_path):
    root = tmp_path / "ILSVRC"
    val = root / ("Data/CLS-LOC/val" if kind == "kaggle" else "val")
    wnids = flat(val)
    if kind == "devkit":
        data = root / "ILSVRC2012_devkit_t12/data"
        numbers = [list(NAMES).index(wnid) + 1 for wnid in wnids]
        text(data / "ILSVRC2012_validation_ground_truth.txt", *numbers)
        meta(data)
    elif kind == "kaggle":
        rows = [f"ILSVRC2012_val_{n:08d},{wnid} 1 2 3 4 {wnid} 5 6 7 8 " for n, wnid in enumerate(wnids, start=1)]
        text(root / "LOC_val_solution.csv", "ImageId,PredictionString", *reversed(rows))
    elif kind == "tensorflow":
        text(root / "imagenet_2012_validation_synset_labels.txt", *wnids)
    else:
        order = list(imagenet_wnids())
        rows = [f"ILSVRC2012_val_{n:08d}.JPEG {order.index(wnid)}" for n, wnid in enumerate(wnids, start=1)]
        text(root / "val.txt", *rows)
    make_evaluation(tmp_path / "imagenet", str(root), "imagenet", subset=True)
    expected = {f"ILSVRC2012_val_{n:08d}.JPEG": NAMES[wnid] for n, wnid in enumerate(wnids, start=1)}
    assert named(tmp_path / "imagenet") == expected


def test_a_ground_truth_of_another_length_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "imagenet", DATASETS["imagenet"]._replace(images=12))
    wnids = flat(tmp_path / "in/val")
    table = text(tmp_path / "in/LOC_val_solution.csv", "ImageId,PredictionString")
    for lines, message in ((wnids[:-1], "11 labels.*12 images"), ([], "0 labels"), (["n1"] * 12, "label 'n1'")):
        text(table, *lines)
        with pytest.raises(ValueError, match=message):
            make_evaluation(tmp_path / "out", str(tmp_path / "in"), "imagenet")
    text(table, *map(str, range(12)))
    with pytest.raises(ValueError, match=r"meta\.mat"):
        make_evaluation(tmp_path / "out", str(tmp_path / "in"), "imagenet")
    table.unlink()
    with pytest.raises(ValueError, match="--captions"):
        make_evaluation(tmp_path / "out", str(tmp_path / "in"), "imagenet")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"999 of 1,000 classes, not n02119789 \(kit fox\).*--subset"),
        ("unknown", "n00001740"),
        ("empty", "n02119789 has no images"),
        ("images", "1,000 test images, not 50,000"),
        ("train", "n02119789 is in one of them"),
    ],
)
def test_an_imagenet_with_other_classes_is_refused(change, message, tmp_path):
    root = tmp_path / "in"
    image = picture(tmp_path / "image.png")
    for wnid in imagenet_wnids():
        for split in ("val", "train")[: 1 + (change == "train")]:
            (root / split / wnid).mkdir(parents=True)
            (root / split / wnid / "0.png").symlink_to(image)
    if change == "unknown":
        picture(root / "val/n00001740/0.png")
    if change in ("missing", "empty", "train"):
        (root / "val/n02119789/0.png").unlink()
    if change in ("missing", "train"):
        (root / "val/n02119789").rmdir()
    with pytest.raises(ValueError, match=message):
        make_evaluation(tmp_path / "out", str(root), "imagenet", subset=change == "train")
    assert not (tmp_path / "out").exists()


def test_a_copy_is_shards_with_the_same_classes(tmp_path):
    by_wnid(tmp_path / "in")
    make_evaluation(tmp_path / "imagenet", str(tmp_path / "in"), "imagenet", subset=True, copy=True)
    (folder,) = find_folders(tmp_path / "imagenet")
    assert type(folder) is EvaluationFolder
    assert prompts_of(folder).classnames == [NAMES[wnid] for wnid in sorted(NAMES)]
    assert len(folder.templates) == 80


# ---- out of distribution -------------------------------------------------------------------------------------------


def test_imagenetv2_is_numbered_in_the_order_of_the_wnids(tmp_path):
    for number in (2, 10, 278, 999):  # "10" sorts before "2"
        picture(tmp_path / f"imagenetv2-matched-frequency-format-val/{number}/of{number}.png")
    make_evaluation(tmp_path / "imagenetv2", str(tmp_path), "imagenetv2", subset=True)
    wanted = {"of2.png": "great white shark", "of10.png": "brambling", "of278.png": "kit fox"}
    assert named(tmp_path / "imagenetv2") == {**wanted, "of999.png": "toilet paper"}


def test_a_variant_has_the_classes_of_its_own(tmp_path):
    by_wnid(tmp_path, ["n01498041", "n02119789"], split="imagenet-a")  # the kit fox is not in ImageNet-A
    with pytest.raises(ValueError, match="n02119789, not one of 200"):
        make_evaluation(tmp_path / "out", str(tmp_path), "imagenet-a", subset=True)
    by_wnid(
        tmp_path / "r", [list(imagenet_wnids())[number] for number in imagenet("imagenet-r").indices], "imagenet-r", 1
    )
    with pytest.raises(ValueError, match="200 test images, not 30,000"):
        make_evaluation(tmp_path / "out", str(tmp_path / "r/imagenet-r"), "imagenet-r")
    make_evaluation(tmp_path / "imagenet-r", str(tmp_path / "r/imagenet-r"), "imagenet-r", subset=True)
    (folder,) = find_folders(tmp_path / "imagenet-r")
    assert prompts_of(folder) == imagenet("imagenet-r")


def test_objectnet_has_its_own_names_for_the_classes_it_shares(tmp_path):
    base = tmp_path / "objectnet-1.0"
    folders = {
        "tea_box": "Tea box",
        "banana": "Banana",
        "air_freshener": "Air freshener",
        "still_camera": "Still Camera",
    }
    for folder in folders:
        picture(base / "images" / folder / f"{folder}.png")
    text(base / "mappings/folder_to_objectnet_label.json", json.dumps(folders))
    overlap = {"Still Camera": "Polaroid camera; reflex camera", "Banana": "banana"}
    text(base / "mappings/objectnet_to_imagenet_1k.json", json.dumps(overlap))
    make_evaluation(tmp_path / "objectnet", str(tmp_path), "objectnet", subset=True)
    assert named(tmp_path / "objectnet") == {"banana.png": "banana", "still_camera.png": "still camera"}


# ---- captions ------------------------------------------------------------------------------------------------------


def karpathy(table, folder, images, count=6, filepath=None):
    rows = []
    for number in range(count):
        name = f"{number}.jpg"
        picture(images / (filepath or "") / name, number)
        sentences = [{"raw": f"caption {number}.{one}"} for one in range(5)]
        rows.append({"filename": name, "split": "test" if number % 2 else "restval", "sentences": sentences})
        if filepath:
            rows[-1]["filepath"] = filepath
    return text(table, json.dumps({"images": rows, "dataset": folder}))


@pytest.mark.parametrize("dataset", ["coco", "flickr30k"])
def test_karpathys_test_images_are_retrieval(dataset, tmp_path):
    images = tmp_path / ("mscoco/images" if dataset == "coco" else "flickr30k/flickr30k-images")
    karpathy(
        tmp_path / f"splits/dataset_{dataset}.json", dataset, images, filepath="val2014" if dataset == "coco" else None
    )
    make_evaluation(tmp_path / "out" / dataset, str(tmp_path), dataset, subset=True)
    (folder,) = find_folders(tmp_path / "out")
    assert (folder.name, folder.task, folder.splits) == (dataset, "retrieval", ["test"])
    members = [folder.samples("test").members((0, row)) for row in range(3)]
    assert [one["txt"].decode().split("\n")[4] for one in members] == ["caption 1.4", "caption 3.4", "caption 5.4"]


def test_cocos_own_captions_are_retrieval(tmp_path):
    for number in (7, 3):
        picture(tmp_path / f"coco/val2017/{number:012d}.jpg", number)
    images = [{"id": number, "file_name": f"{number:012d}.jpg"} for number in (7, 3)]
    captions = [{"image_id": number, "caption": f"caption {number}"} for number in (3, 7)]
    text(tmp_path / "coco/annotations/captions_val2017.json", json.dumps({"images": images, "annotations": captions}))
    make_evaluation(tmp_path / "coco-eval", str(tmp_path / "coco"), "coco", subset=True)
    (folder,) = find_folders(tmp_path / "coco-eval")
    assert [folder.samples("test").members((0, row))["txt"] for row in (0, 1)] == [b"caption 7", b"caption 3"]


def test_missing_images_of_captions_are_counted_and_named(tmp_path):
    table = karpathy(tmp_path / "dataset_flickr30k.json", "flickr30k", tmp_path / "images")
    with pytest.raises(ValueError, match="3 test images, not 1,000"):
        make_evaluation(tmp_path / "out", str(tmp_path), "flickr30k")
    for number in (3, 5):
        (tmp_path / f"images/{number}.jpg").unlink()
    for folder in (tmp_path, tmp_path / "images"):
        with pytest.raises(ValueError, match=r"2 of 3 .*flickr30k.*images/3\.jpg"):
            make_evaluation(tmp_path / "out", str(folder), "flickr30k", captions=str(table), subset=True)
    assert not (tmp_path / "out").exists()


# ---- linear probes -------------------------------------------------------------------------------------------------


def dtd(root):
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        lines = [f"{name}/{name}_{number}.jpg" for name in ("zigzagged", "banded")]
        text(root / f"dtd/dtd/labels/{split}1.txt", *lines)
        for line in lines:
            picture(root / "dtd/dtd/images" / line)


def flowers(root):
    (root / "flowers-102").mkdir(parents=True)
    for number in range(1, 7):
        picture(root / f"flowers-102/jpg/image_{number:05d}.jpg")
    savemat(root / "flowers-102/setid.mat", {"trnid": [1, 2], "valid": [3, 4], "tstid": [5, 6]})
    savemat(root / "flowers-102/imagelabels.mat", {"labels": [1, 77, 1, 77, 1, 77]})


def aircraft(root):
    data = root / "fgvc-aircraft-2013b/data"
    text(data / "variants.txt", "737-200", "F/A-18")
    for split, number in (("train", 1), ("val", 2), ("test", 3)):
        text(data / f"images_variant_{split}.txt", f"{number}0 F/A-18", f"{number}1 737-200")
        for one in (0, 1):
            picture(data / f"images/{number}{one}.jpg")


def food101(root):
    for split, number in (("train", 1), ("test", 3)):
        rows = {name: [f"{name}/{name}_{number}"] for name in ("waffles", "apple_pie")}
        text(root / f"food-101/meta/{split}.json", json.dumps(rows))
        for name in rows:
            picture(root / f"food-101/images/{name}/{name}_{number}.jpg")


def pets(root):
    for split, number in (("trainval", 1), ("test", 3)):
        text(
            root / f"oxford-iiit-pet/annotations/{split}.txt", f"Abyssinian_{number} 1 1 1", f"yorkshire_{number} 2 2 1"
        )
        for name in ("Abyssinian", "yorkshire"):
            picture(root / f"oxford-iiit-pet/images/{name}_{number}.jpg")


def sun397(root):
    text(root / "SUN397/ClassName.txt", "/a/abbey", "/t/train_station/platform")
    for file, number in (("Training_01.txt", 1), ("Testing_01.txt", 3)):
        lines = [f"/t/train_station/platform/sun_t{number}.jpg", f"/a/abbey/sun_a{number}.jpg"]
        text(root / "Partitions" / file, *lines)
        for line in lines:
            picture(root / "SUN397" / line[1:])


def caltech101(root):
    for name in ("BACKGROUND_Google", "accordion"):
        for number in range(33):
            picture(root / f"caltech101/101_ObjectCategories/{name}/image_{number:04d}.jpg")


PROBES = {
    "dtd": (dtd, ["banded", "zigzagged"], {"zigzagged_3.jpg": "zigzagged", "banded_3.jpg": "banded"}, True),
    "flowers": (flowers, ["pink primrose", "passion flower"], {}, True),
    "fgvc_aircraft": (aircraft, ["737-200", "F/A-18"], {"30.jpg": "F/A-18", "31.jpg": "737-200"}, True),
    "food101": (food101, ["apple pie", "waffles"], {"waffles_3.jpg": "waffles", "apple_pie_3.jpg": "apple pie"}, False),
    "pets": (
        pets,
        ["Abyssinian", "Yorkshire"],
        {"Abyssinian_3.jpg": "Abyssinian", "yorkshire_3.jpg": "Yorkshire"},
        False,
    ),
    "sun397": (
        sun397,
        ["abbey", "train station platform"],
        {"sun_t3.jpg": "train station platform", "sun_a3.jpg": "abbey"},
        False,
    ),
    "caltech101": (caltech101, ["BACKGROUND Google", "accordion"], {}, False),
}


@pytest.mark.parametrize("dataset", PROBES)
def test_sets_of_the_linear_probe_are_linked_from_torchvisions_root(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)
    write, names, files, validation = PROBES[dataset]
    write(tmp_path / "root")
    make_evaluation(tmp_path / "out" / dataset, str(tmp_path / "root"), dataset, subset=True)
    (folder,) = find_folders(tmp_path / "out")
    assert folder.splits == sorted({"train", "test", *(["validation"] if validation else [])})
    found = named(folder.path)
    assert list(dict.fromkeys(found.values())) == names
    assert not files or found == files
    train, test = (set(folder.images(split).names) for split in ("train", "test"))
    assert (len(train), len(test)) == ((60, 6) if dataset == "caltech101" else (2, 2))
    assert not train & test


def cifar10(root):
    batch = root / "cifar-10-batches-py"
    batch.mkdir(parents=True)
    for name, labels in (("data_batch_1", [1, 0]), ("test_batch", [0, 1, 1])):
        pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        (batch / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (batch / "batches.meta").write_bytes(pickle.dumps({"label_names": ["airplane", "automobile"]}))


def test_cifar_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.CIFAR10.train_list", [["data_batch_1", ""]])
    cifar10(tmp_path)
    make_evaluation(tmp_path / "cifar10", str(tmp_path), "cifar10")
    (folder,) = find_folders(tmp_path / "cifar10")
    assert (folder.splits, folder.classnames) == (["test", "train"], ["airplane", "automobile"])
    assert [folder.samples("test").members((0, row))["cls"] for row in range(3)] == [b"0", b"1", b"1"]


# ---- all of them, and what is refused ------------------------------------------------------------------------------


def test_all_says_what_is_there_and_where_to_get_the_rest(tmp_path, capsys):
    root = tmp_path / "datasets"
    by_wnid(root / "ILSVRC2012")
    karpathy(root / "karpathy/dataset_flickr30k.json", "flickr30k", root / "flickr30k/flickr30k-images")
    dtd(root / "torchvision")
    pets(root / "torchvision")
    (root / "torchvision/oxford-iiit-pet/images/yorkshire_3.jpg").unlink()
    command = ["data", "make", "evaluation", str(tmp_path / "out"), "--all", str(root), "--subset"]
    assert main(command) == 1
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(printed) == list(DATASETS)
    assert printed["imagenet"].startswith("linked 12 test images")
    assert printed["flickr30k"] == "packed 3 samples, left out 0"
    assert printed["pets"].startswith("refused: 1 of 2 images")
    assert printed["cifar10"] == "not found: torchvision.datasets.CIFAR10(ROOT, download=True)"
    assert all(
        "not found: " in printed[name] for name in DATASETS if name not in ("imagenet", "flickr30k", "dtd", "pets")
    )
    picture(root / "torchvision/oxford-iiit-pet/images/yorkshire_3.jpg")
    assert main(command) == 0
    assert "made already" in capsys.readouterr().out
    found = {(folder.name, folder.task): sorted(folder.splits) for folder in find_folders(tmp_path / "out")}
    assert found == {
        ("dtd", "zero_shot"): ["test", "train", "validation"],
        ("pets", "zero_shot"): ["test", "train"],
        ("flickr30k", "retrieval"): ["test"],
        ("imagenet", "zero_shot"): ["test"],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "imagenet"}, "--source"),
        ({"dataset": "imagent", "source": "."}, "imagenet"),
        ({"dataset": "dtd", "source": "."}, "download=True"),
        ({"dataset": "imagenet-a", "source": "."}, "imagenet-a.tar"),
        ({"dataset": "dtd", "source": "absent"}, "absent is not a folder"),
        ({"dataset": "coco", "source": ".", "captions": "absent.json"}, "absent.json"),
        ({"all": "absent"}, "absent is not a folder"),
        ({"all": ".", "captions": "x.json"}, "captions"),
        ({"dataset": "dtd", "source": ".", "templates": ["{c}"]}, "templates"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_evaluation("out", **options)
    assert not list(tmp_path.iterdir())
