"""Public datasets in miniature, in the layouts that people have: what becomes of them, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from diffvision.cli import main
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.imagenet import imagenet_wnids
from diffvision.evaluation.prompts import prompts_of
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
    monkeypatch.setattr("diffvision.evaluation.sets.imagenet_wnids", lambda: dict.fromkeys(sorted(NAMES)))
    monkeypatch.setitem(DATASETS, "imagenet", DATASETS["imagenet"]._replace(images=12))
    wnids = flat(tmp_path / "in/val")
    table = text(tmp_path / "in/LOC_val_solution.csv", "ImageId,PredictionString")
    for lines, message in ((wnids[:-1], "11 labels.*12 images"), (["n1"] * 12, "label 'n1'")):
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
        ("missing", "999 of 1,000 classes, not n02119789.*--subset"),
        ("unknown", "n00001740"),
        ("empty", "n02119789 has no images"),
        ("images", "1,000 test images, not 50,000"),
        ("train", "n02119789 is a class of only one"),
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
