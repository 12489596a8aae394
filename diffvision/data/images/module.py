"""The LightningDataModules of images with captions and of images with labels: settings, and a call to the loaders.

Transforms and tokenizer belong to the model: what is not given is taken from the LightningModule that is trained.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from PIL.Image import Image
from torchvision.transforms.functional import pil_to_tensor

from diffvision.data.images.folders import EvaluationFolder, ImageEvaluationFolder, find_folders, lines_of
from diffvision.data.images.image_set import ImageCollection, ImageSet
from diffvision.data.images.pipelines import is_pipeline, pipeline_loader
from diffvision.data.images.samples import (
    IMAGE_KEYS,
    CaptionMember,
    ImageLabel,
    ImageMember,
    ImageText,
    caption_key_of,
    label_key_of,
)
from diffvision.data.images.sources import class_prompts, find_images, is_image_source
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.report import Limits
from diffvision.data.shards.sources import find_shards, split_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.watchdog import STALL_TIMEOUT
from diffvision.data.trainer import evaluation_loader, rank_and_world_size, setting_or_model, training_loader


class ImageTextData(pl.LightningDataModule):
    """Image and caption pairs for contrastive training, evaluation folders for validation.

    Args:
        train: a directory of shards, tar files, a pattern (`{00000..00009}.tar`, `**/*.tar.gz`), http(s), s3 or gs
            URLs, or a list of these; or images as `images.sources.find_images` takes them, read in place.
            In Python also a pipeline such as `webdataset.WebDataset`: see `images.pipelines`.
        batch_size: global, over all ranks.
        evaluations: directories given to `find_folders`. A validation batch is one whole evaluation folder.
        num_workers: processes that read and decode, on each rank.
        seed: with the epoch, it determines the order of the samples.
        max_bad_fraction: bad samples are skipped and counted; more of them than this stop the run.
        image_key: the member types that hold an image; the first that a sample has is taken.
        caption_key: the member with the caption: "txt", or "json:FIELD"; null for what the data have.
        columns: of a table of images for training: its columns image, caption and label, where they have other names.
        window: shards shuffled together.
        cache_bytes: room on local disk for remote and compressed shards.
        stall_timeout: seconds without a sample, while a batch is waited for, after which the run stops and says which
            process is stuck.
        transform: the model's, for training; None: that of the LightningModule that is trained, as for the next two.
        eval_transform: the model's, for evaluation.
        tokenizer: the model's.
    """

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        evaluations: Sequence[str] = (),
        *,
        num_workers: int = 2,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        image_key: Sequence[str] = IMAGE_KEYS,
        caption_key: str | None = None,
        columns: dict[str, str] | None = None,
        window: int = 16,
        cache_bytes: int = 100 * 10**9,
        stall_timeout: float = STALL_TIMEOUT,
        transform: Any = None,  # a callable; not annotated as one, so that no configuration can name it
        eval_transform: Any = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.train, self.batch_size, self.evaluations = _named(train, "train"), batch_size, list(evaluations)
        self.num_workers, self.seed, self.window, self.cache_bytes = num_workers, seed, window, cache_bytes
        self.limits, self.stall_timeout = Limits(max_bad_fraction), stall_timeout
        self.image_key, self.caption_key, self.columns = image_key, caption_key, columns
        self.transform, self.eval_transform, self.tokenizer = transform, eval_transform, tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Find the data, so that a fault in them is known before training, and say what is read."""
        if stage == "fit":
            _say("training", self.train, self._images, "train")
        for folder in self._folders:
            folder.check_split("test")
            if isinstance(folder, ImageEvaluationFolder):
                _say("evaluating", folder.path, folder.images("test"), "test")

    def train_dataloader(self) -> Any:
        """Return the training batches, `ImageTextBatch`es."""
        tokenizer = setting_or_model(self, "tokenizer")
        if tokenizer is None:
            raise ValueError(_no_tokenizer(self))
        if self._images is not None and self._images.captions is None:
            raise ValueError(f"{self.train} has labels and no captions: train on them with ImageLabelData")
        image = ImageMember(setting_or_model(self, "transform") or to_float, self.image_key)
        if is_pipeline(self.train):
            return _pipeline_loader(self, ImageText(image, CaptionMember(self.caption_key or "txt"), tokenizer))
        source = _training_source(self, self._images)
        kind = ImageText(image, CaptionMember(self.caption_key or caption_key_of(source)), tokenizer)
        return training_loader(self, source, kind)

    def val_dataloader(self) -> "FolderLoader | list":
        """Return the evaluation folders with the model's preprocessing, or no loader without any."""
        if not self.evaluations:
            return []
        transform = setting_or_model(self, "eval_transform") or to_float
        tokenizer = setting_or_model(self, "tokenizer")
        return FolderLoader([folder.bound(transform, tokenizer) for folder in self._folders])

    def test_dataloader(self) -> "FolderLoader | list":
        """Return what `val_dataloader` does."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[EvaluationLoader]:
        """Return for each evaluation folder a loader of its images: see `EvaluationFolder.batches`."""
        if not self.evaluations:
            raise ValueError("there is nothing to predict on: set evaluations, or give predict a loader")
        transform = setting_or_model(self, "eval_transform") or to_float
        rank, world_size = rank_and_world_size(self)
        settings: dict[str, Any] = {"num_workers": self.num_workers, "rank": rank, "world_size": world_size}
        settings |= {"batch_size": max(1, self.batch_size // world_size), "limits": self.limits}
        return [folder.batches(transform, **settings) for folder in self._folders]

    @cached_property
    def _images(self) -> ImageCollection | None:
        """The training images, which are listed once; None where they are in shards."""
        return _training_images(self)

    @cached_property
    def folders_by_path(self) -> list[list[EvaluationFolder]]:
        """The evaluation folders at each path of `evaluations`, which are listed once."""
        return [find_folders(path) for path in self.evaluations]

    @property
    def _folders(self) -> list[EvaluationFolder]:
        return [folder for folders in self.folders_by_path for folder in folders]


class ImageLabelData(pl.LightningDataModule):
    """Images and class numbers for classification; validation sees each sample of a split exactly once.

    Arguments that are not described here are those of `ImageTextData`.

    Args:
        train: shards of images and class numbers, or images in a folder for each class; see `ImageTextData`.
        batch_size: global, over all ranks.
        evaluation: an evaluation folder of CLIP_benchmark's layout, shards, or images.
        split: which split of the evaluation folder.
        label_key: the member with the class number: "cls", or "json:FIELD"; null for what the data have.
        eval_columns: the evaluation's columns; by default `columns`.
        eval_label_key: the evaluation's `label_key`; by default the same.
        eval_batch_size: on each rank; by default a rank's share of `batch_size`.
        transform: the model's, for training; None: that of the LightningModule that is trained, as for the next two.
        eval_transform: the model's, for evaluation.
        num_classes: a sample whose label is not below it is bad. It must be the number of classes that images have.
    """

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        evaluation: str | None = None,
        *,
        split: str = "test",
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        image_key: Sequence[str] = IMAGE_KEYS,
        label_key: str | None = None,
        columns: dict[str, str] | None = None,
        eval_label_key: str | None = None,
        eval_columns: dict[str, str] | None = None,
        window: int = 16,
        cache_bytes: int = 100 * 10**9,
        stall_timeout: float = STALL_TIMEOUT,
        transform: Any = None,
        eval_transform: Any = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.train, self.batch_size, self.split = _named(train, "train"), batch_size, split
        self.evaluation = None if evaluation is None else _named(evaluation, "evaluation")
        self.eval_batch_size, self.num_workers, self.seed = eval_batch_size, num_workers, seed
        self.window, self.cache_bytes, self.limits = window, cache_bytes, Limits(max_bad_fraction)
        self.stall_timeout = stall_timeout
        self.image_key, self.label_key, self.num_classes = image_key, label_key, num_classes
        self.columns = columns
        self.eval_label_key = label_key if eval_label_key is None else eval_label_key
        self.eval_columns = columns if eval_columns is None else eval_columns
        self.transform, self.eval_transform = transform, eval_transform

    def setup(self, stage: str | None = None) -> None:
        """Find the data, so that a fault in them is known before training, and say what is read."""
        if stage == "fit":
            if self._images is not None:
                self._check_classes(self._images)
            _say("training", self.train, self._images, "train")
        if self.evaluation is not None:
            self._evaluation_source  # noqa: B018  # it is kept

    def train_dataloader(self) -> Any:
        """Return the training batches, `ImageLabelBatch`es."""
        self._check_training_classes()
        if is_pipeline(self.train):
            return _pipeline_loader(self, self._kind(None, "transform", self.label_key))
        source = _training_source(self, self._images)
        return training_loader(self, source, self._kind(source, "transform", self.label_key))

    def val_dataloader(self) -> EvaluationLoader | list:
        """Return the evaluation batches, or no loader where there is no evaluation."""
        if self.evaluation is None:
            return []
        source = self._evaluation_source
        return evaluation_loader(self, source, self._kind(source, "eval_transform", self.eval_label_key))

    def test_dataloader(self) -> EvaluationLoader | list:
        """Return what `val_dataloader` does."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvaluationLoader | list:
        """Return what `val_dataloader` does."""
        if self.evaluation is None:
            raise ValueError("there is nothing to predict on: set evaluation, or give predict a loader")
        return self.val_dataloader()

    def count_classes(self) -> int | None:
        """Return the number of classes that the images have, or that shards or their evaluation folder name, if any."""
        if self._images is not None:
            return _classes(self._images)
        if not is_pipeline(self.train):
            find_shards(self.train)  # raises where there are none
        names = _packed_names(self.train)
        if names or self.evaluation is None:
            return len(names) or None
        try:
            return len(EvaluationFolder(self.evaluation).classnames) or None
        except ValueError:  # not that layout
            if not is_image_source(self.evaluation):
                find_shards(self.evaluation)
            return None

    def take_images(self, other: "ImageLabelData") -> None:
        """Take the training images as another one has listed them."""
        self._images = other._images

    @cached_property
    def _images(self) -> ImageCollection | None:
        """The training images, which are listed once; None where they are in shards."""
        return _training_images(self)

    @cached_property
    def _evaluation_source(self) -> ShardSet | ImageSet:
        """The samples to evaluate on, which are found once."""
        source = cast(str, self.evaluation)
        classnames = _packed_names(self.train) if self._images is None else self._images.classnames
        try:
            folder = EvaluationFolder(source)
        except ValueError:  # not that layout
            if is_image_source(source):
                settings: dict[str, Any] = {"columns": self.eval_columns, "classnames": classnames}
                images = ImageEvaluationFolder(source, task="zero_shot", **settings).images(self.split)
                self._check_classes(images)
                count, outputs = len(images.classnames), setting_or_model(self, "num_classes")
                if not classnames and outputs is not None and 0 < count < outputs:
                    rank_zero_warn(
                        f"{source} has {count} classes, taken for the first of the model's {outputs}: if they are not, "
                        f"name the classes of {self.train} in a classnames.txt there"
                    )
                if self._images is not None and (images.source, images.names) == (
                    self._images.source,
                    self._images.names,
                ):
                    rank_zero_warn(
                        f"{source} is what the model is trained on, and what it is evaluated on: its accuracy says "
                        "nothing about other pictures; divide it into train/ and val/"
                    )
                _say("evaluating", source, images, self.split)
                return ImageSet(images)
            _say("evaluating", source, None, self.split)
            return _shards(self, source, self.split)
        named = () if self._images is None else class_prompts(classnames)  # a folder may name packed ones better
        if named and folder.classnames and named != folder.classnames:
            raise ValueError(
                f"{source} numbers other classes than {self.train}: {', '.join(folder.classnames[:3])}, ... and "
                f"{', '.join(classnames[:3])}, ...; make the evaluation folder of images of the same classes"
            )
        folder.check_split(self.split)
        return folder.samples(self.split)

    def _check_training_classes(self) -> None:
        """Check that the training images have as many classes as the model: once it is known whether a run resumes."""
        if self._images is None:
            return
        self._check_classes(self._images)
        classes, outputs = _classes(self._images), setting_or_model(self, "num_classes")
        if outputs is None or classes == outputs:
            return
        text = f"{self.train} has {classes} classes, the model {outputs}: set model.num_classes to {classes}"
        if self.trainer is None or self.trainer.ckpt_path is None:
            raise ValueError(f"{text} or null")
        rank_zero_warn(text)  # earlier versions began such runs

    def _check_classes(self, images: ImageCollection) -> None:
        """Check that images have labels, and no more classes than the model."""
        classes, limit = _classes(images), setting_or_model(self, "num_classes")
        if limit is not None and classes > limit:
            raise ValueError(
                f"{images.source} has {classes} classes, the model {limit}: set model.num_classes to {classes}"
            )

    def _kind(self, source: ShardSet | ImageSet | None, transform: str, label_key: str | None) -> ImageLabel:
        image = ImageMember(setting_or_model(self, transform) or to_float, self.image_key)
        key = label_key or ("cls" if source is None else label_key_of(source))
        return ImageLabel(image, key, setting_or_model(self, "num_classes"))


class FolderLoader:
    """Evaluation folders, one at a time; every rank has all of them, and shares each one's samples with the others."""

    def __init__(self, folders: list[EvaluationFolder]) -> None:
        self.folders = folders

    def __len__(self) -> int:
        return len(self.folders)

    def __iter__(self) -> Iterator[EvaluationFolder]:
        return iter(self.folders)


def to_float(image: Image) -> torch.Tensor:
    """Return the image as it is, float [3, height, width] in 0..1; batches need images of one size."""
    return pil_to_tensor(image).float() / 255


def _classes(images: ImageCollection) -> int:
    """Return the number of classes that labelled images have."""
    if images.labels is None:
        raise ValueError(f"{images.source} has captions and no labels: train on them with ImageTextData")
    return max(len(images.classnames), int(images.labels.max()) + 1)


def _no_tokenizer(data: ImageTextData) -> str:
    if data.trainer is None:
        return "ImageTextData has no tokenizer: pass the model's, or give it to Trainer.fit with a module that has one"
    module = type(data.trainer.lightning_module).__name__
    return f"{module} has no tokenizer for captions: set ImageTextData's, or train on labels with ImageLabelData"


def _packed_names(train: str | list[str]) -> tuple[str, ...]:
    """Return the class names that `packing.pack` writes next to the shards of images; none without them."""
    return tuple(lines_of(Path(train, "classnames.txt"))) if isinstance(train, str) else ()


def _training_images(data: ImageTextData | ImageLabelData) -> ImageCollection | None:
    return find_images(cast(str, data.train), columns=data.columns) if is_image_source(data.train) else None


def _training_source(data: ImageTextData | ImageLabelData, images: ImageCollection | None) -> ShardSet | ImageSet:
    return _shards(data, data.train, "train") if images is None else ImageSet(images)


def _pipeline_loader(data: ImageTextData | ImageLabelData, kind: ImageText | ImageLabel) -> Any:
    return pipeline_loader(data.train, kind, data.batch_size // rank_and_world_size(data)[1], data.num_workers)


def _shards(data: ImageTextData | ImageLabelData, source: str | list[str], split: str) -> ShardSet:
    return ShardSet(split_shards(source, split), ShardCache(max_bytes=data.cache_bytes))


def _say(purpose: str, source: Any, images: ImageCollection | None, split: str) -> None:
    """Say which images are read, or which of several splits in a folder of shards."""
    if images is not None:
        rank_zero_info(f"{purpose} on {images.described}")
    elif (shards := split_shards(source, split)) is not source:
        rank_zero_info(f"{purpose} on {source}: shards {shards[0].name} to {shards[-1].name}, {len(shards)} in all")


def _named(source: Any, setting: str) -> Any:
    """Return a source; raise ValueError where it is empty, which would be the current folder."""
    if not str(source).strip():
        raise ValueError(f"{setting} is {source!r}: name the data; the current folder is written as .")
    return source
