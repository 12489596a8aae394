"""Evaluation folders of public datasets, from the files that people have: `data make evaluation --dataset` and `--all`.

Image files with a class are linked, in a folder for each class; those in arrays (CIFAR) and those with captions are
packed into shards. Everything is checked before anything is written.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
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

_IMAGE_NUMBER = re.compile(r"_val_(\d{8})")
_TRUTHS = (
    "LOC_val_solution.csv",  # Kaggle's: name, wnid and boxes
    "ILSVRC2012_validation_ground_truth.txt",  # the devkit's: its own number of the class, in order of the images
    "imagenet_2012_validation_synset_labels.txt",  # TensorFlow's: wnid, in order of the images
    "val.txt",  # Caffe's: name, and number of the class in order of the wnids
)


class Request(NamedTuple):
    """Where a user has the files of one dataset, and how they are to be written."""

    root: Path
    table: Path | None = None  # the file with the labels or captions, where it is not in its usual place
    subset: bool = False
    copy: bool = False
    num_workers: int = 2


class Labelled(NamedTuple):
    """Images that are files, by class."""

    names: dict[str, str]  # folder to write for a class -> its name in prompts; all classes that the dataset has
    splits: dict[str, list[tuple[str, Path]]]  # the folder to write, and an image of the class or a folder of them


Write = Callable[[Path], str]


class Dataset(NamedTuple):
    """One row of `DATASETS`."""

    group: str  # the folder that `--all` writes it into
    marks: tuple[str, ...]  # patterns of paths, of which one exists in the folder that `read` takes
    read: Callable[[Request], Labelled | Write | None]  # None: the root has not these files
    images: int  # of its test split
    get: str  # where its files come from


def _search(folder: Path, *names: str) -> Path | None:
    """Return the first path that fits a pattern, at most two folders down."""
    return next((p for name in names for up in ("", "*/", "*/*/") for p in folder.glob(up + name)), None)


def _images(folder: Path) -> Iterator[Path]:
    walk = os.walk(folder, followlinks=True)
    return (Path(place, n) for place, _, names in walk for n in names if n.lower().endswith(IMAGE_SUFFIXES))


def _key(number: int) -> str:
    return f"{number:03d}"  # so that sorted folders are in the order of the numbers


# ---- ImageNet and its variants -------------------------------------------------------------------------------------


def _wnids(request: Request, variant: str, test: Sequence[str], train: Sequence[str] = ()) -> Labelled | None:
    """Read ImageNet or a variant: folders named by wnids or by numbers in their order, or a flat val with a file."""
    every, names, numbers = list(imagenet_wnids()), imagenet_names(), variant_numbers(variant)
    splits, number = {}, {str(number): wnid for number, wnid in enumerate(every)}
    for split, places in (("test", test), ("train", train)):
        for folder in filter(Path.is_dir, (request.root / place for place in places)):
            inside = [(p.name, p) for p in sorted(folder.iterdir())]
            by_wnid = [(name, p) for name, p in inside if WNID.fullmatch(name)]
            by_number = [(number.get(name, name), p) for name, p in inside if variant == "imagenetv2" and p.is_dir()]
            flat = {int(match[1]): p for name, p in inside if (match := _IMAGE_NUMBER.search(name))}
            if images := by_wnid or by_number or (_label(flat, folder, request, every) if flat else []):
                splits[split] = images
                break
    known = {every[number]: names[number] for number in (range(len(every)) if numbers is None else numbers)}
    return Labelled(known, splits) if "test" in splits else None


def _label(files: dict[int, Path], folder: Path, request: Request, wnids: list[str]) -> list[tuple[str, Path]]:
    """Return ILSVRC's val as it is unpacked, files by their number, with the wnids that a file of `_TRUTHS` has."""
    table = request.table or _search(request.root, *_TRUTHS)
    if table is None:
        raise ValueError(f"{folder} has no folder for each class: give as --captions its {_TRUTHS[1]} or {_TRUTHS[0]}")
    lines = [line.replace(",", " ").split() for line in read_lines(table) if line and not line.startswith("ImageId")]
    # The devkit's ids are not in the order of the wnids.
    numbers = _read_ids(table) if lines and all(words[0].isdecimal() for words in lines) else dict(enumerate(wnids))
    known = {str(number): wnid for number, wnid in numbers.items()} | {wnid: wnid for wnid in wnids}
    truth = {}
    for number, (first, *others) in enumerate(lines, start=1):
        match = _IMAGE_NUMBER.search(first)
        label = "".join(others[:1]) if match else first
        if label not in known:
            raise ValueError(f"{table}: image {number} has the label {label!r}, not a class of ILSVRC: get it again")
        truth[int(match[1]) if match else number] = known[label]
    if len(truth) != len(files) and not request.subset:
        raise ValueError(f"{table} has {len(truth):,} labels, and {folder} {len(files):,} images: get them again")
    if unknown := sorted(files.keys() - truth.keys()):
        raise ValueError(f"{len(unknown):,} images have no label in {table}, first {files[unknown[0]]}: get it again")
    return [(truth[number], files[number]) for number in sorted(files)]


def _read_ids(table: Path) -> dict[int, str]:
    """Return {ILSVRC2012_ID: wnid} of the devkit's meta.mat."""
    try:
        from scipy.io import loadmat

        synsets = np.atleast_1d(loadmat(str(table.parent / "meta.mat"), squeeze_me=True)["synsets"])
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if row["num_children"] == 0}
    except (ImportError, OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{table} has ILSVRC's ids: put meta.mat next to it, pip install scipy ({error})") from None


def _objectnet(request: Request) -> Labelled | None:
    """Read ObjectNet's classes that ImageNet has too, by ObjectNet's names, as CLIP_benchmark does."""
    table = _search(request.root, "mappings/folder_to_objectnet_label.json")
    if table is None:
        return None
    labels = json.loads(table.read_text("utf-8"))
    shared = json.loads((table.parent / "objectnet_to_imagenet_1k.json").read_text("utf-8"))
    folders = [folder for folder in sorted(labels) if labels[folder] in shared]
    places = {_key(number): table.parents[1] / "images" / folder for number, folder in enumerate(folders)}
    names = {key: labels[place.name].lower() for key, place in places.items()}
    test = [(key, place) for key, place in places.items() if place.is_dir()]
    return Labelled(names, {"test": test})


def _torchvision(request: Request, name: str, splits: dict[str, str]) -> Labelled:
    """Read a dataset of torchvision whose images are files; `splits` are its names of ours."""
    names: list[str] = []
    files = {}
    for split, theirs in splits.items():
        images: Any = read_torchvision(f"{TORCHVISION}{name}:{request.root}", theirs)
        names = names or name_classes(images.classnames)
        paths = [images.read.root / file for file in images.names]
        files[split] = list(zip(map(_key, images.labels.tolist()), paths, strict=True))
    return Labelled(dict(zip(map(_key, range(len(names))), names, strict=True)), files)


def _caltech101(request: Request, name: str) -> Labelled | None:
    """Read Caltech-101: of each of the 102 folders 30 images for training, the rest for the test (CLIP's appendix)."""
    folders = sorted(filter(Path.is_dir, request.root.glob(f"{name.lower()}/101_ObjectCategories/*")))
    splits: dict[str, list[tuple[str, Path]]] = {"train": [], "test": []}
    draw = np.random.default_rng(0)
    for number, folder in enumerate(folders):
        images = [(_key(number), file) for file in draw.permutation(sorted(_images(folder))).tolist()]
        splits["train"] += sorted(images[:30])
        splits["test"] += sorted(images[30:])
    names = name_classes([folder.name for folder in folders])
    return Labelled({_key(number): name for number, name in enumerate(names)}, splits) if folders else None


def _sun397(request: Request, name: str) -> Labelled | None:
    """Read SUN397 by the first of its authors' ten partitions, which torchvision does not have."""
    root = request.root / name
    folders = [line.lstrip("/") for line in read_lines(root / "ClassName.txt")]  # a/abbey
    keys = {folder: _key(number) for number, folder in enumerate(folders)}
    splits = {}
    for split, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        if (table := _search(request.root, file)) is None or not folders:
            return None
        files = [line.lstrip("/") for line in read_lines(table)]
        splits[split] = [(keys.get(os.path.dirname(file), file), root / file) for file in files]
    return Labelled({keys[folder]: re.sub("[/_]", " ", folder[2:]) for folder in folders}, splits)


def _arrays(request: Request, name: str) -> Write:
    """Return what packs a dataset of torchvision that has its images in arrays."""
    source = f"{TORCHVISION}{name}:{request.root}"
    return partial(packing.make_evaluation, source=source, num_workers=request.num_workers)


def _captions(request: Request, tables: Sequence[str], count: int) -> Write | None:
    """Return what packs the test images of a file of captions, which may be two folders below the root."""
    table = request.table or _search(request.root, *tables)
    if table is None:
        return None
    parts = read_caption_file(request.root, table)
    if not (part := parts.get("test") or parts.get("")):
        raise ValueError(f"{table} has no split test, but {', '.join(parts)}: give the file with all splits")
    images = part()
    assert isinstance(images.read, ImageFiles)
    _check_files([images.read.root / name for name in images.names], count, request, table)
    settings: dict[str, Any] = {"num_workers": request.num_workers, "dataset_type": ["retrieval"]}
    return lambda target: packing.pack_split(images, target / "test", **settings).summary()


# ---- checking and writing ------------------------------------------------------------------------------------------


def _check_files(files: Sequence[Path], count: int, request: Request, where: Path) -> None:
    """Raise a ValueError if files are missing, or are not as many as the dataset has; a count of 0 is not compared."""
    if lost := [file for file in files if not file.exists()]:
        raise ValueError(f"{len(lost):,} of {len(files):,} images of {where} are missing, first {lost[0]}: add them")
    if count not in (0, len(files)) and not request.subset:
        raise ValueError(f"{where} has {len(files):,} test images, not {count:,}: get it again, or give --subset")


def _check_labelled(labelled: Labelled, request: Request, dataset: Dataset) -> str:
    """Return a line with the number of images and classes; raise a ValueError if any are missing."""
    names, splits = labelled
    tested = {key for key, _ in splits["test"]}
    for split, images in sorted(splits.items()):
        where, found = f"{request.root}, {split},", {key for key, _ in images}
        if unknown := sorted(found - names.keys()):
            raise ValueError(f"{where} has class {unknown[0]}, not one of {len(names):,}: move it elsewhere")
        if (missing := sorted(names.keys() - found)) and not request.subset:
            first = f"{missing[0]} ({names[missing[0]]})"
            raise ValueError(f"{where} has {len(found):,} of {len(names):,} classes, not {first}: add it or --subset")
        if other := sorted(found ^ tested):
            raise ValueError(f"{where} and test have not the same classes: {other[0]} is in one of them, add it")
        if empty := [p for _, p in images if p.is_dir() and not next(_images(p), None)]:
            raise ValueError(f"{empty[0]} has no images: get them again, or remove the class and give --subset")
    tests = [file for _, p in splits["test"] for file in (_images(p) if p.is_dir() else [p])]
    _check_files(
        [p for split, images in splits.items() if split != "test" for _, p in images], 0, request, request.root
    )
    _check_files(tests, dataset.images, request, request.root)
    also = "".join(f", {split}" for split in splits if split != "test")
    return f"{len(tests):,} test images of {len(tested):,} classes{also}, in {request.root}"


def _link(labelled: Labelled, target: Path, templates: Sequence[str]) -> None:
    for split, images in labelled.splits.items():
        (target / split).mkdir(parents=True)
        for key, path in images:
            place = target / split / key
            if not path.is_dir():
                place.mkdir(exist_ok=True)
                place /= path.name
            place.symlink_to(path.resolve())
    present = {key for key, _ in labelled.splits["test"]}
    write_lines(target / "classnames.txt", [labelled.names[key] for key in sorted(present)])
    if templates:
        write_lines(target / "zeroshot_classification_templates.txt", templates)


def _make_one(target: Path, request: Request, row: Dataset) -> str:
    """Write a folder, which gets its name only once it is whole; return a line on it."""
    content = row.read(request)
    if content is None:
        raise ValueError(f"{request.root} lacks {' or '.join(row.marks[:2])}, or what belongs to it: get {row.get}")
    described = _check_labelled(content, request, row) if isinstance(content, Labelled) else ""
    templates = imagenet_templates() if row.group == "zero_shot" else []
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not isinstance(content, Labelled):
            said = f"packed {content(part)}"
        elif request.copy:
            with TemporaryDirectory() as folder:
                _link(content, Path(folder), templates)
                said = f"packed {packing.make_evaluation(part, folder, num_workers=request.num_workers)}"
        else:
            _link(content, part, templates)
            said = f"linked {described}"
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return "; ".join(line.strip() for line in said.splitlines())


def _make_all(directory: Path, request: Request) -> str:
    """Write every dataset that is there; print a line on each."""
    folders = [request.root, *sorted(request.root.glob("*/")), *sorted(request.root.glob("*/*/"))]
    made, refused = 0, []
    for name, row in DATASETS.items():
        target, said = directory / row.group / name, f"not found: {row.get}"
        roots = [root for root in folders if any(next(root.glob(mark), None) for mark in row.marks)]
        if target.exists():
            said = f"made already, {target}"
        # Captions and their images may be in folders next to each other.
        for root in [] if target.exists() else [request.root] if roots and row.group == "retrieval" else roots:
            try:
                said = _make_one(target, request._replace(root=root), row)
                break
            except (ValueError, OSError) as error:
                said = f"refused: {error}"
        refused += [name] if said.startswith("refused") else []
        made += target.exists()
        print(f"{name:<16}{said}", flush=True)
    if refused:
        raise ValueError(f"{len(refused)} of {len(DATASETS)} datasets were refused ({', '.join(refused)}): see above")
    return f"{made} of {len(DATASETS)} datasets"


_VAL = ("val", "validation", "ILSVRC/Data/CLS-LOC/val", "Data/CLS-LOC/val", "ILSVRC2012_img_val")
_TRAIN = ("train", "ILSVRC/Data/CLS-LOC/train", "Data/CLS-LOC/train", "ILSVRC2012_img_train")
_V2 = ("imagenetv2-matched-frequency-format-val", "ImageNetV2-matched-frequency")
_SKETCH = ("sketch", "imagenet-sketch", "imagenet_sketch")
_BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
_KARPATHY = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
_COCO = "val2014 of https://cocodataset.org/#download"
_FLICKR = "https://shannon.cs.illinois.edu/DenotationGraph"
_SUN = ", and Partitions.zip of https://vision.princeton.edu/projects/2010/SUN"
_MMVP = "hf download MMVP/MMVP_VLM --repo-type dataset --local-dir ROOT"
_TWO = {"train": "train", "test": "test"}
_THREE = {"train": "train", "validation": "val", "test": "test"}


def _wordnet(variant: str, images: int, get: str, test: Sequence[str], train: Sequence[str] = ()) -> Dataset:
    marks = tuple(f"{place}/{one}" for place in test for one in ("n[0-9]*", "0", "ILSVRC2012_val_*"))
    return Dataset("zero_shot", marks, partial(_wnids, variant=variant, test=(*test, "."), train=train), images, get)


def _retrieval(images: int, get: str, *tables: str) -> Dataset:
    return Dataset("retrieval", tables, partial(_captions, tables=tables, count=images), images, f"{_KARPATHY}, {get}")


def _probe(name: str, mark: str, images: int, read: Callable[..., Any], get: str = "", **settings: Any) -> Dataset:
    get = f"torchvision.datasets.{name}(ROOT, download=True){get}"
    return Dataset("probe", (mark,), partial(read, name=name, **settings), images, get)


DATASETS = {
    "imagenet": _wordnet("imagenet", 50_000, "https://image-net.org/download-images.php", _VAL, _TRAIN),
    "imagenetv2": _wordnet("imagenetv2", 10_000, "https://huggingface.co/datasets/vaishaal/ImageNetV2", _V2),
    "imagenet-a": _wordnet("imagenet-a", 7_500, f"{_BERKELEY}/imagenet-a.tar", ["imagenet-a"]),
    "imagenet-r": _wordnet("imagenet-r", 30_000, f"{_BERKELEY}/imagenet-r.tar", ["imagenet-r"]),
    "imagenet_sketch": _wordnet("imagenet-sketch", 50_889, "https://github.com/HaohanWang/ImageNet-Sketch", _SKETCH),
    "objectnet": Dataset("zero_shot", ("mappings/folder_to_*",), _objectnet, 18_574, "https://objectnet.dev"),
    "coco": _retrieval(5_000, _COCO, "dataset_coco.json", "captions_val2017.json"),
    "flickr30k": _retrieval(1_000, _FLICKR, "dataset_flickr30k.json"),
    "flickr8k": _retrieval(1_000, _FLICKR, "dataset_flickr8k.json"),
    "caltech101": _probe("Caltech101", "caltech101/101_ObjectCategories", 6_084, _caltech101),
    "cifar10": _probe("CIFAR10", "cifar-10-batches-py", 10_000, _arrays),
    "cifar100": _probe("CIFAR100", "cifar-100-python", 10_000, _arrays),
    "dtd": _probe("DTD", "dtd/dtd", 1_880, _torchvision, splits=_THREE),
    "fgvc_aircraft": _probe("FGVCAircraft", "fgvc-aircraft-2013b", 3_333, _torchvision, splits=_THREE),
    "flowers": _probe("Flowers102", "flowers-102", 6_149, _torchvision, splits=_THREE),
    "food101": _probe("Food101", "food-101/meta", 25_250, _torchvision, splits=_TWO),
    "pets": _probe(
        "OxfordIIITPet", "oxford-iiit-pet/annotations", 3_669, _torchvision, splits={**_TWO, "train": "trainval"}
    ),
    "sun397": _probe("SUN397", "SUN397/ClassName.txt", 19_850, _sun397, _SUN),
    "mmvp": Dataset("pairs", ("Questions.csv",), lambda request: partial(make_mmvp, source=request.root), 0, _MMVP),
}
"""The datasets of DiffCLIP's tables, in their order: name -> how it is found, read and checked."""


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
    if dataset is not None and dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}{did_you_mean(dataset, DATASETS)}: choose among {', '.join(DATASETS)}")
    request = Request(Path(all or source or ""), Path(captions) if captions else None, subset, copy, num_workers)
    if not request.root.is_dir():
        raise ValueError(f"{request.root} is not a folder: give the one with the files of {dataset or 'the datasets'}")
    if captions and not Path(captions).is_file():
        raise ValueError(f"captions is {captions!r}, which does not exist: give the file with captions or labels")
    if dataset is None:
        return _make_all(Path(directory), request)
    if Path(directory).exists():
        raise ValueError(f"{directory} is there already: remove it, or choose another directory")
    return _make_one(Path(directory), request, DATASETS[dataset])
