"""Evaluation folders of public datasets, from the files that people have: `data make evaluation --dataset` and `--all`.

Images that are files are linked, in a folder for each class; those in arrays (CIFAR) and those with captions are packed
into shards. Everything is checked before anything is written.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from diffvision.data.images import packing
from diffvision.data.images.coco import read_caption_file
from diffvision.data.images.datasets import TORCHVISION, read_torchvision
from diffvision.data.images.folders import read_lines
from diffvision.data.images.image_set import ImageFiles
from diffvision.data.images.sources import IMAGE_SUFFIXES, name_classes
from diffvision.data.published.mmvp import make_mmvp
from diffvision.data.shards.writer import write_lines
from diffvision.evaluation.imagenet import WNID, imagenet_names, imagenet_templates, imagenet_wnids, variant_numbers
from diffvision.mistakes import did_you_mean

Files = dict[str, Path | list[Path]]
"""Class folder to write -> the folder that it links, or its files."""
_IMAGE_NUMBER = re.compile(r"_val_(\d{8})")
_TRUTHS = (
    "LOC_val_solution.csv",  # Kaggle's: name, wnid and boxes
    "ILSVRC2012_validation_ground_truth.txt",  # the devkit's: its own number of the class, in order of the images
    "imagenet_2012_validation_synset_labels.txt",  # TensorFlow's: wnid, in order of the images
    "val.txt",  # Caffe's: name, and number of the class in order of the wnids
)


class Asked(NamedTuple):
    """What a user said of one dataset, and how it is to be written."""

    root: Path
    table: Path | None = None  # the file with the labels or captions, where it is not in its usual place
    subset: bool = False
    copy: bool = False
    num_workers: int = 2


class Dataset(NamedTuple):
    """One row of `DATASETS`."""

    group: str  # the folder that `--all` writes it into
    marks: tuple[str, ...]  # patterns of paths, of which one exists in the folder that `read` takes
    read: Callable[[Asked, "Dataset"], Callable[[Path], str]]  # checks the files; returns what writes the folder
    images: int  # of its test split
    get: str  # where its files come from


# ---- ImageNet and its variants -------------------------------------------------------------------------------------


def _wnids(asked: Asked, row: Dataset, variant: str, test: Sequence[str], train: Sequence[str] = ()) -> Any:
    """Read ImageNet, or a variant with its wnids: folders of them, numbers in their order, or flat with a file."""
    every = list(imagenet_wnids())
    numbers = variant_numbers(variant)
    known = every if numbers is None else [every[number] for number in numbers]
    splits: dict[str, Files] = {}
    for split, places in (("test", test), ("train", train)):
        folder = next((asked.root / place for place in places if _has_images(asked.root / place)), None)
        if folder is not None:
            names = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
            splits[split] = {name: path for name, path in names.items() if WNID.fullmatch(name)}
            if not splits[split] and names:
                numbered = {int(name): path for name, path in names.items() if name.isdecimal()}
                splits[split] = {every[n] if n < 1000 else str(n): numbered[n] for n in sorted(numbered)}
            if not names:
                splits[split] = _flat(folder, asked, every)
            _check_classes(splits[split], known, folder, asked.subset)
    if "test" not in splits:
        raise ValueError(f"{asked.root} has no images in {' or '.join(test)}: get them from {row.get}")
    if "train" in splits and (other := set(splits["train"]) ^ set(splits["test"])):
        raise ValueError(f"{min(other)} is a class of only one of {asked.root}'s splits: give both the same classes")
    present = [number for number, wnid in enumerate(every) if wnid in splits["test"]]
    names_of = imagenet_names()
    return _linker(asked, row, splits, [names_of[number] for number in present], imagenet_templates())


def _has_images(folder: Path) -> bool:
    """Return whether a folder has folders of classes, or images named as ILSVRC's."""
    if not folder.is_dir():
        return False
    return any(p.name.isdecimal() or WNID.fullmatch(p.name) or _IMAGE_NUMBER.search(p.name) for p in folder.iterdir())


def _flat(folder: Path, asked: Asked, wnids: list[str]) -> Files:
    """Read ILSVRC's val as it is unpacked: 50,000 images in one folder, and a file with their classes."""
    files = {int(match[1]): p for p in folder.iterdir() if (match := _IMAGE_NUMBER.search(p.name))}
    around = [p for p in (folder, *folder.parents) if p.is_relative_to(asked.root)]
    found = (p for name in _TRUTHS for place in around for up in ("", "*/", "*/*/") for p in place.glob(up + name))
    table = asked.table or next(found, None)
    if table is None:
        raise ValueError(f"{folder} has no folder for each class: give as --captions its {_TRUTHS[1]} or {_TRUTHS[0]}")
    truth = _read_truth(table, wnids)
    if len(truth) != len(files) and not asked.subset:
        raise ValueError(f"{table} has {len(truth):,} labels, and {folder} {len(files):,} images: get them again")
    if unknown := sorted(files.keys() - truth.keys()):
        raise ValueError(f"{len(unknown):,} images have no label in {table}, first {files[unknown[0]]}: get it again")
    classes: dict[str, list[Path]] = {}
    for number in sorted(files):
        classes.setdefault(truth[number], []).append(files[number])
    return dict(sorted(classes.items()))


def _read_truth(table: Path, wnids: list[str]) -> dict[int, str]:
    """Return {number of an image: wnid} of a file of `_TRUTHS`, which is known by its lines."""
    lines = [line.replace(",", " ").split() for line in read_lines(table) if line and not line.startswith("ImageId")]
    truth: dict[int, str] = {}
    numbers = dict(enumerate(wnids))
    if all(words[0].isdecimal() for words in lines):  # ILSVRC's ids, which are not in the order of the wnids
        numbers = _read_ids(table)
    labels = {**{str(number): wnid for number, wnid in numbers.items()}, **{wnid: wnid for wnid in wnids}}
    for number, words in enumerate(lines, start=1):
        if match := _IMAGE_NUMBER.search(words[0]):
            number, words = int(match[1]), [*words[1:], ""]
        if words[0] not in labels:
            raise ValueError(f"{table}: image {number} has the label {words[0]!r}, not a class of ILSVRC: get it again")
        truth[number] = labels[words[0]]
    return truth


def _read_ids(table: Path) -> dict[int, str]:
    """Return {ILSVRC2012_ID: wnid} of the devkit's meta.mat."""
    try:
        from scipy.io import loadmat

        synsets = np.atleast_1d(loadmat(table.parent / "meta.mat", squeeze_me=True)["synsets"])
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if row["num_children"] == 0}
    except ImportError:
        raise ValueError(f"{table} has ids of meta.mat, which scipy reads: pip install scipy") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{table} has ILSVRC's ids: put the devkit's meta.mat next to it ({error})") from None


def _check_classes(found: Iterable[str], known: Sequence[str], where: Path, subset: bool) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{where} has the class {unknown[0]}, not one of its {len(known):,}: move it elsewhere")
    if (missing := sorted(set(known) - set(found))) and not subset:
        count = len(known) - len(missing)
        raise ValueError(
            f"{where} has {count:,} of {len(known):,} classes, not {missing[0]}: add what is missing, or give --subset"
        )


def _objectnet(asked: Asked, row: Dataset) -> Any:
    """Read ObjectNet's classes that ImageNet has too, by ObjectNet's names, as CLIP_benchmark does."""
    base = next((p for p in (asked.root / "objectnet-1.0", asked.root) if (p / "mappings").is_dir()), None)
    if base is None:
        raise ValueError(f"{asked.root} has no objectnet-1.0 with mappings and images: get it from {row.get}")
    labels, overlap = (
        json.loads((base / "mappings" / name).read_text("utf-8"))
        for name in ("folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json")
    )
    known = {folder: label.lower() for folder, label in sorted(labels.items()) if label in overlap}
    found = [name for name in known if (base / "images" / name).is_dir()]
    _check_classes(found, list(known), base / "images", asked.subset)
    classes: Files = {f"{number:03d}": base / "images" / name for number, name in enumerate(found)}
    return _linker(asked, row, {"test": classes}, [known[name] for name in found], imagenet_templates())


# ---- linear probes -------------------------------------------------------------------------------------------------


def _torchvision(asked: Asked, row: Dataset, name: str, splits: dict[str, str]) -> Any:
    """Read a dataset of torchvision whose images are files; `splits` are its names of ours."""
    files: dict[str, Files] = {}
    names: list[str] = []
    for split, theirs in splits.items():
        images = read_torchvision(f"{TORCHVISION}{name}:{asked.root}", theirs)
        assert isinstance(images.read, ImageFiles)
        assert images.labels is not None
        names = names or name_classes(images.classnames)
        pairs = zip(images.labels.tolist(), images.names, strict=True)
        files[split] = _by_number((label, images.read.root / file) for label, file in pairs)
    return _linker(asked, row, files, names)


def _by_number(files: Iterable[tuple[int, Path]]) -> Files:
    classes: dict[str, list[Path]] = {}
    for label, file in files:
        classes.setdefault(f"{label:03d}", []).append(file)
    return dict(classes)


def _caltech101(asked: Asked, row: Dataset) -> Any:
    """Read Caltech-101: of each of the 102 folders 30 images for training, the rest for the test (CLIP's appendix)."""
    folder = asked.root / "caltech101" / "101_ObjectCategories"
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    draw = np.random.default_rng(0)
    train: list[tuple[int, Path]] = []
    test: list[tuple[int, Path]] = []
    for label, name in enumerate(names):
        images = [p for p in sorted((folder / name).iterdir()) if p.suffix.lower() in IMAGE_SUFFIXES]
        chosen = set(draw.permutation(len(images))[:30].tolist())
        for number, image in enumerate(images):
            (train if number in chosen else test).append((label, image))
    return _linker(asked, row, {"train": _by_number(train), "test": _by_number(test)}, name_classes(names))


def _sun397(asked: Asked, row: Dataset) -> Any:
    """Read SUN397 by the first of its authors' ten partitions, which torchvision does not have."""
    root = asked.root / "SUN397"
    names = [line[3:] for line in read_lines(root / "ClassName.txt")]  # /a/abbey
    number = {name: label for label, name in enumerate(names)}
    splits: dict[str, Files] = {}
    for split, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        table = next((p for up in ("", "*/", "*/*/") for p in asked.root.glob(up + file)), None)
        if table is None:
            raise ValueError(f"{asked.root} has no {file}: unpack Partitions.zip of SUN397's page into it ({row.get})")
        lines = [line.lstrip("/") for line in read_lines(table)]
        splits[split] = _by_number((number[os.path.dirname(line)[2:]], root / line) for line in lines)
    return _linker(asked, row, splits, [name.replace("/", " ") for name in name_classes(names)])


def _arrays(asked: Asked, row: Dataset, name: str) -> Any:
    """Pack a dataset of torchvision that has its images in arrays."""
    source = f"{TORCHVISION}{name}:{asked.root}"
    read_torchvision(source, "test")  # before anything is written
    return lambda target: _one_line(packing.make_evaluation(target, source, num_workers=asked.num_workers))


# ---- captions ------------------------------------------------------------------------------------------------------


def _captions(asked: Asked, row: Dataset) -> Any:
    """Pack the test images of a file of captions; the images may be up to two folders below the root."""
    found = (p for mark in row.marks for up in ("", "*/", "*/*/") for p in asked.root.glob(up + mark))
    table = asked.table or next(found, None)
    if table is None:
        raise ValueError(f"{asked.root} has no {' or '.join(row.marks)}: get it from {row.get}")
    parts = read_caption_file(asked.root, table)
    if not (part := parts.get("test") or parts.get("")):
        raise ValueError(f"{table} has no split test, but {', '.join(parts)}: give the file with all splits")
    images = part()
    assert isinstance(images.read, ImageFiles)
    _check_files([images.read.root / name for name in images.names], table)
    _check_count(len(images), asked, row)
    return lambda target: _one_line(
        packing.pack_split(images, target / "test", num_workers=asked.num_workers, dataset_type=["retrieval"]).summary()
    )


def _mmvp(asked: Asked, row: Dataset) -> Any:
    return lambda target: _one_line(make_mmvp(target, asked.root))


# ---- checking and writing ------------------------------------------------------------------------------------------


def _check_files(files: Sequence[Path], where: Any) -> None:
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(
            f"{len(missing):,} of {len(files):,} images of {where} are missing, first {missing[0]}: add them"
        )


def _check_count(count: int, asked: Asked, row: Dataset) -> None:
    if count != row.images and not asked.subset:
        raise ValueError(
            f"{asked.root} has {count:,} test images, not {row.images:,}: get the set again, or give --subset"
        )


def _one_line(text: str) -> str:
    return "packed " + "; ".join(line.strip() for line in text.splitlines())


def _list_images(images: Path | list[Path]) -> Iterable[Path]:
    if isinstance(images, list):
        return images
    walk = os.walk(images, followlinks=True)
    return (Path(folder, n) for folder, _, names in walk for n in names if n.lower().endswith(IMAGE_SUFFIXES))


def _linker(
    asked: Asked, row: Dataset, splits: dict[str, Files], names: Sequence[str], templates: Sequence[str] = ()
) -> Callable[[Path], str]:
    """Check the images of each class, and return what writes the folder.

    Args:
        asked, row: as every reader gets them.
        splits: the names of class folders, sorted, are in the order of the labels.
        names: of the classes in prompts, in that order.
        templates: of the prompts; none for the usual one.
    """
    if not splits["test"]:
        raise ValueError(f"{asked.root} has no images of this set: get it from {row.get}")
    for classes in splits.values():
        if empty := [images for images in classes.values() if not next(iter(_list_images(images)), None)]:
            raise ValueError(f"{empty[0]} has no images: get them again, or leave the class out with --subset")
        _check_files([file for images in classes.values() if isinstance(images, list) for file in images], asked.root)
    count = sum(1 for images in splits["test"].values() for _ in _list_images(images))
    _check_count(count, asked, row)

    def link(target: Path) -> None:
        for split, classes in splits.items():
            for name, images in classes.items():
                place = target / split / name
                place.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(images, Path):
                    place.symlink_to(images.resolve(), target_is_directory=True)
                    continue
                place.mkdir()
                for file in images:
                    (place / file.name).symlink_to(file.resolve())
        write_lines(target / "classnames.txt", names)
        if templates:
            write_lines(target / "zeroshot_classification_templates.txt", templates)

    def write(target: Path) -> str:
        if asked.copy:
            with TemporaryDirectory() as folder:
                link(Path(folder))
                return _one_line(packing.make_evaluation(target, folder, num_workers=asked.num_workers))
        link(target)
        also = f", and {' and '.join(split for split in splits if split != 'test')}" if len(splits) > 1 else ""
        return f"linked {count:,} test images of {len(names):,} classes{also}, in {asked.root}"

    return write


_VAL = ("val", "validation", "ILSVRC/Data/CLS-LOC/val", "Data/CLS-LOC/val", "ILSVRC2012_img_val")
_TRAIN = ("train", "ILSVRC/Data/CLS-LOC/train", "Data/CLS-LOC/train", "ILSVRC2012_img_train")
_BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
_KARPATHY = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
_COCO = "val2014 of https://cocodataset.org/#download"
_FLICKR = "https://shannon.cs.illinois.edu/DenotationGraph"
_SKETCH = "https://github.com/HaohanWang/ImageNet-Sketch"
_V2 = "https://huggingface.co/datasets/vaishaal/ImageNetV2 (matched-frequency)"
_SUN = "https://vision.princeton.edu/projects/2010/SUN"
_MMVP = "hf download MMVP/MMVP_VLM --repo-type dataset --local-dir ROOT"
_V2_FOLDERS = ("imagenetv2-matched-frequency-format-val", "ImageNetV2-matched-frequency")
_OBJECTNET = ("objectnet-1.0/mappings", "mappings/folder_to_objectnet_label.json")
_PARTS = {"train": "train", "validation": "val", "test": "test"}
_TWO = {"train": "train", "test": "test"}


def _wordnet(variant: str, images: int, get: str, test: Sequence[str], train: Sequence[str] = ()) -> Dataset:
    marks = tuple(f"{place}/{one}" for place in test for one in ("n[0-9]*", "0", "ILSVRC2012_val_*"))
    return Dataset("zero_shot", marks, partial(_wnids, variant=variant, test=(*test, "."), train=train), images, get)


def _probe(name: str, mark: str, images: int, read: Any = None, get: str = "", **settings: Any) -> Dataset:
    get = f"torchvision.datasets.{name}(ROOT, download=True){get}"
    return Dataset("probe", (mark,), read or partial(_torchvision, name=name, **settings), images, get)


def _retrieval(images: int, get: str, *tables: str) -> Dataset:
    return Dataset("retrieval", tables, _captions, images, f"{_KARPATHY}, {get}")


DATASETS = {
    "imagenet": _wordnet("imagenet", 50_000, "https://image-net.org/download-images.php", _VAL, _TRAIN),
    "imagenetv2": _wordnet("imagenetv2", 10_000, _V2, _V2_FOLDERS),
    "imagenet-a": _wordnet("imagenet-a", 7_500, f"{_BERKELEY}/imagenet-a.tar", ["imagenet-a"]),
    "imagenet-r": _wordnet("imagenet-r", 30_000, f"{_BERKELEY}/imagenet-r.tar", ["imagenet-r"]),
    "imagenet_sketch": _wordnet("imagenet-sketch", 50_889, _SKETCH, ["sketch", "imagenet-sketch", "imagenet_sketch"]),
    "objectnet": Dataset("zero_shot", _OBJECTNET, _objectnet, 18_574, "https://objectnet.dev/download.html"),
    "coco": _retrieval(5_000, _COCO, "dataset_coco.json", "captions_val2017.json"),
    "flickr30k": _retrieval(1_000, _FLICKR, "dataset_flickr30k.json"),
    "flickr8k": _retrieval(1_000, _FLICKR, "dataset_flickr8k.json"),
    "caltech101": _probe("Caltech101", "caltech101/101_ObjectCategories", 6_084, _caltech101),
    "cifar10": _probe("CIFAR10", "cifar-10-batches-py", 10_000, partial(_arrays, name="CIFAR10")),
    "cifar100": _probe("CIFAR100", "cifar-100-python", 10_000, partial(_arrays, name="CIFAR100")),
    "dtd": _probe("DTD", "dtd/dtd", 1_880, splits=_PARTS),
    "fgvc_aircraft": _probe("FGVCAircraft", "fgvc-aircraft-2013b", 3_333, splits=_PARTS),
    "flowers": _probe("Flowers102", "flowers-102", 6_149, splits=_PARTS),
    "food101": _probe("Food101", "food-101/meta", 25_250, splits=_TWO),
    "pets": _probe("OxfordIIITPet", "oxford-iiit-pet/annotations", 3_669, splits={**_TWO, "train": "trainval"}),
    "sun397": _probe("SUN397", "SUN397/ClassName.txt", 19_850, _sun397, f", and Partitions.zip of {_SUN}"),
    "mmvp": Dataset("pairs", ("Questions.csv",), _mmvp, 0, _MMVP),
}
"""The datasets of DiffCLIP's tables, in their order: name -> how it is found, read and checked."""


def _write(target: Path, write: Callable[[Path], str]) -> str:
    """Write a folder that gets its name only once it is whole."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        written = write(part)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return written


def _find(directory: Path, marks: Sequence[str]) -> Path | None:
    """Return the folder at most two below a directory in which one of the marks exists."""
    roots = (root for up in ("", "*/", "*/*/") for root in (sorted(directory.glob(up)) if up else [directory]))
    return next((root for root in roots for mark in marks if next(root.glob(mark), None)), None)


def _make_all(directory: Path, asked: Asked) -> str:
    if not asked.root.is_dir():
        raise ValueError(f"all is {str(asked.root)!r}: give the folder that holds the datasets")
    made, refused = 0, []
    for name, row in DATASETS.items():
        target, root = directory / row.group / name, _find(asked.root, row.marks)
        if target.exists():
            said, made = f"made already, {target}", made + 1
        elif root is None:
            said = f"not found: {row.get}"
        else:
            try:
                inside = asked if row.group == "retrieval" else asked._replace(root=root)
                said = _write(target, row.read(inside, row))
                made += 1
            except ValueError as error:
                said = f"refused: {error}"
                refused.append(name)
        print(f"{name:<16}{said}", flush=True)
    if refused:
        raise ValueError(f"{len(refused)} of {len(DATASETS)} datasets were refused ({', '.join(refused)}): see above")
    return f"{made} of {len(DATASETS)} datasets"


def make_evaluation(
    directory: str | Path,
    source: str | None = None,
    dataset: str | None = None,
    all: str | None = None,
    subset: bool = False,
    copy: bool = False,
    captions: str | None = None,
    columns: dict[str, str] | None = None,
    templates: list[str] | None = None,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> str:
    """Write an evaluation folder of ImageNet, COCO and other public datasets as you have them, or of your own images.

    Args:
        directory: the folder to write.
        source: with --dataset, the folder with its files. Else your images, as `diffvision data make folder` takes
            them: zero-shot of those with labels, retrieval of those with captions.
        dataset: imagenet, imagenetv2, imagenet-a, imagenet-r, imagenet_sketch, objectnet; coco, flickr30k, flickr8k;
            caltech101, cifar10, cifar100, dtd, fgvc_aircraft, flowers, food101, pets, sun397; mmvp.
        all: a folder with several of these, at most two folders deep: each that is found becomes a folder in
            `directory`, and each that is not is printed with where to get it.
        subset: take a part of a dataset, such as 20 of ImageNet's classes; without it a part is refused.
        copy: pack the images into shards; without it images that are files are linked.
        captions: the file with captions or labels: of --dataset where it is not found, else of a folder of images.
        columns: its columns image, caption and label, where they have other names: {image: file, label: kind}.
        templates: zero-shot prompts with {c} where the class name belongs; by default "a photo of a {c}.".
        per_shard: samples per shard.
        num_workers: processes.

    Raises:
        ValueError: classes or images are missing, or are not the dataset's; the directory is there already.
    """
    if (source is None) == (all is None):
        raise ValueError("give one of --source, and --all with a folder of datasets")
    if dataset is None and all is None:
        assert source is not None
        return packing.make_evaluation(directory, source, captions, columns, templates, per_shard, num_workers)
    if columns or templates or (all and captions) or (all and dataset):
        raise ValueError("columns and templates are for your own images, captions and dataset not for --all: leave out")
    asked = Asked(Path(all or source or ""), Path(captions) if captions else None, subset, copy, num_workers)
    if dataset is None:
        return _make_all(Path(directory), asked)
    if dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}{did_you_mean(dataset, DATASETS)}: choose among {', '.join(DATASETS)}")
    if not asked.root.is_dir():
        raise ValueError(f"source is {source!r}: give the folder with the files of {dataset}")
    if Path(directory).exists():
        raise ValueError(f"{directory} is there already: remove it, or choose another directory")
    return _write(Path(directory), DATASETS[dataset].read(asked, DATASETS[dataset]))
