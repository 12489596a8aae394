"""The LightningDataModules of images with captions and of images with labels: settings, and a call to the loaders.

Transforms and tokenizer belong to the model: what is not given is taken from the LightningModule that is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from PIL.Image import Image
from torchvision.transforms.functional import pil_to_tensor

from diffvision.data.images.folders import (
    EvaluationFolder,
    ImageEvaluationFolder,
    find_folders,
    packed_names,
)
from diffvision.data.images.image_set import ImageCollection, ImageSet
from diffvision.data.images.image_sources import Reads, find_images, is_image_source, name_classes
from diffvision.data.images.pipelines import is_pipeline, pipeline_loader
from diffvision.data.images.pixels import Decoder, Pixels, ends_with_normalize
from diffvision.data.images.samples import (
    IMAGE_KEYS,
    CaptionMember,
    ImageLabel,
    ImageMember,
    ImageText,
    find_caption_key,
    find_label_key,
)
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sample import SampleSource
from diffvision.data.shards.sources import find_shards, split_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.worker_batches import STALL_TIMEOUT
from diffvision.data.trainer import LoaderData


class ImageData(LoaderData):
    """Training images with captions or labels: shards, images in another layout, or a pipeline.

    Args:
        train: a directory of shards, tar files, a pattern (`{00000..00009}.tar`, `**/*.tar`), http(s), s3 or gs
            URLs, or a list of these; or images as `images.image_sources.find_images` takes them, read in place.
            In Python also a pipeline such as `webdataset.WebDataset`: see `images.pipelines`.
        batch_size: global, over all ranks.
        num_workers: processes that read and decode, on each rank.
        seed: with the epoch, it determines the order of the samples.
        max_bad_fraction: bad samples are skipped and counted; more of them than this stop the run.
        image_key: the member types that hold an image; the first that a sample has is taken.
        columns: of a table of images: its columns image, caption and label, where they have other names.
        window: shards shuffled together.
        cache_bytes: room on local disk for remote shards.
        stall_timeout: seconds that the next batch may take before the run stops.
        decoder: of training images: "pillow", as the transform has it, or "torchvision", which is faster and differs in
            few values by one level.
        transform: the model's, for training; None: that of the LightningModule that is trained, as for the next one.
        eval_transform: the model's, for evaluation.
    """

    _reads: Reads

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        *,
        num_workers: int = 2,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        image_key: Sequence[str] = IMAGE_KEYS,
        columns: dict[str, str] | None = None,
        window: int = 16,
        cache_bytes: int = 100 * 10**9,
        stall_timeout: float = STALL_TIMEOUT,
        decoder: Decoder = "pillow",
        transform: Any = None,  # a callable; not annotated as one, so that no configuration can name it
        eval_transform: Any = None,
    ) -> None:
        super().__init__(
            batch_size,
            num_workers=num_workers,
            seed=seed,
            max_bad_fraction=max_bad_fraction,
            window=window,
            stall_timeout=stall_timeout,
        )
        if decoder not in get_args(Decoder):
            raise ValueError(f"decoder must be one of {', '.join(get_args(Decoder))}, got {decoder!r}")
        self.decoder, self._pixels = decoder, cast(Pixels | None, None)
        self.train, self.cache_bytes = train, cache_bytes
        self.image_key, self.columns = image_key, columns
        self.transform, self.eval_transform = transform, eval_transform

    @cached_property
    def _images(self) -> ImageCollection | None:
        """The training images, which are listed once; None where they are in shards."""
        if not is_image_source(self.train):
            return None
        return find_images(cast(str, self.train), columns=self.columns, reads=self._reads)

    def _read_images(self, make_kind: Callable[[SampleSource | None], ImageText | ImageLabel]) -> Any:
        """Return the training batches; `make_kind` makes a kind of sample from its source, None for a pipeline."""
        if is_pipeline(self.train):
            batch_size = self.batch_size // self.rank_and_world_size()[1]
            loader = pipeline_loader(self.train, make_kind(None), batch_size, self.num_workers)
            if loader is self.train:  # its batches are the user's
                self._pixels = None
            return loader
        source = self._open_shards(self.train, "train") if self._images is None else ImageSet(self._images)
        return self.read_training(source, make_kind(source))

    def _open_shards(self, source: str | list[str], split: str) -> ShardSet:
        return ShardSet(split_shards(source, split), ShardCache(max_bytes=self.cache_bytes))

    def _image_member(self, name: str) -> ImageMember:
        """Return what reads images by `transform` or `eval_transform`; the trainer's training batches are uint8."""
        transform = self.setting_or_model(name) or to_float
        on_device = self._normalizes_on_device()
        if name == "transform" and (self.decoder != "pillow" or (on_device and ends_with_normalize(transform))):
            transform = self._pixels = Pixels(transform, self.decoder, on_device=on_device)
        return ImageMember(transform, self.image_key)

    def _normalizes_on_device(self) -> bool:
        """Return whether uint8 images reach our hook: in a fit on this data, past no hook of the user's."""
        trainer: Any = self.trainer
        if getattr(trainer, "datamodule", None) is not self or trainer.state.status != TrainerStatus.RUNNING:
            return False
        if type(self).on_after_batch_transfer is not ImageData.on_after_batch_transfer:
            return False
        earlier = ("on_before_batch_transfer", "transfer_batch_to_device")
        return not any(is_overridden(hook, part) for hook in earlier for part in (self, trainer.lightning_module))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise the uint8 images of a training batch on its device; then call the LightningModule's hook."""
        trainer = cast(pl.Trainer, self.trainer)
        images = batch.get("image") if isinstance(batch, dict) else None
        if self._pixels is not None and isinstance(images, torch.Tensor) and images.dtype == torch.uint8:
            batch = batch | {"image": trainer.precision_plugin.convert_input(self._pixels.normalize(images))}
        return trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx)


class ImageTextData(ImageData):
    """Image and caption pairs for contrastive training, evaluation folders for validation.

    Args:
        train: as in `ImageData`.
        batch_size: as in `ImageData`.
        evaluations: directories given to `find_folders`. A validation batch is one whole evaluation folder.
        caption_key: the member with the caption: "txt", or "json:FIELD"; null for what the data have.
        tokenizer: the model's; None: that of the LightningModule that is trained.
        settings: those of `ImageData`.
    """

    _reads = "captions"

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        evaluations: Sequence[str] = (),
        *,
        caption_key: str | None = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(train, batch_size, **settings)
        self.evaluations, self.caption_key, self.tokenizer = list(evaluations), caption_key, tokenizer

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
        tokenizer = self.setting_or_model("tokenizer")
        if tokenizer is None:
            raise ValueError("captions need a tokenizer: set ImageTextData's, or train a module that has one")
        if self._images is not None and self._images.captions is None:
            raise ValueError(f"{self.train} has labels and no captions: train on them with ImageLabelData")

        def make_kind(source: Any) -> ImageText:
            key = self.caption_key or ("txt" if source is None else find_caption_key(source))
            return ImageText(self._image_member("transform"), CaptionMember(key), tokenizer)

        return self._read_images(make_kind)

    def val_dataloader(self) -> "FolderLoader | list":
        """Return the evaluation folders, or no loader without any; the model preprocesses what it takes from them."""
        return FolderLoader(self._folders) if self.evaluations else []

    @cached_property
    def folders_by_path(self) -> list[list[EvaluationFolder]]:
        """The evaluation folders at each path of `evaluations`, which are listed once."""
        return [find_folders(path) for path in self.evaluations]

    @property
    def _folders(self) -> list[EvaluationFolder]:
        return [folder for folders in self.folders_by_path for folder in folders]


class ImageLabelData(ImageData):
    """Images and class numbers for classification; validation sees each sample of a split exactly once.

    Args:
        train: as in `ImageData`, with class numbers, or a folder for each class.
        batch_size: as in `ImageData`.
        evaluation: an evaluation folder of CLIP_benchmark's layout, shards, or images.
        split: which split of the evaluation folder.
        eval_batch_size: on each rank; by default a rank's share of `batch_size`.
        label_key: the member with the class number: "cls", or "json:FIELD"; null for what the data have.
        num_classes: a sample whose label is not below it is bad. It must be the number of classes that images have.
        settings: those of `ImageData`.
    """

    _reads = "labels"

    def __init__(
        self,
        train: str | list[str],
        batch_size: int,
        evaluation: str | None = None,
        *,
        split: str = "test",
        eval_batch_size: int | None = None,
        label_key: str | None = None,
        num_classes: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(train, batch_size, **settings)
        self.evaluation, self.eval_batch_size = evaluation, eval_batch_size
        self.split, self.label_key, self.num_classes = split, label_key, num_classes

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
        outputs = self.setting_or_model("num_classes")
        if self._images is not None and outputs not in (None, classes := self._check_classes(self._images)):
            raise ValueError(f"model.num_classes must be {classes} or null for {self.train}, got {outputs}")
        return self._read_images(lambda source: self._kind(source, "transform", self.label_key))

    def val_dataloader(self) -> EvaluationLoader | list:
        """Return the evaluation batches, or no loader where there is no evaluation."""
        if self.evaluation is None:
            return []
        source = self._evaluation_source
        return self.read_evaluation(source, self._kind(source, "eval_transform", self.label_key))

    def count_classes(self) -> int | None:
        """Return the number of classes that the images have, or that shards or their evaluation folder name, if any."""
        if self._images is not None:
            return _count_classes(self._images)
        if not is_pipeline(self.train):
            find_shards(split_shards(self.train, "train"))  # raises where there are none
        names: Sequence[str] = packed_names(self.train)
        if not names and self.evaluation is not None:
            with suppress(ValueError):  # another layout
                names = EvaluationFolder(self.evaluation).classnames
        return len(names) or None

    def take_images(self, other: "ImageLabelData") -> None:
        """Take the training images as another one has listed them."""
        self._images = other._images

    @cached_property
    def _evaluation_source(self) -> ShardSet | ImageSet:
        """The samples to evaluate on, which are found once."""
        source = cast(str, self.evaluation)
        classnames = packed_names(self.train) if self._images is None else self._images.classnames
        try:
            folder = EvaluationFolder(source)
        except ValueError:  # not that layout
            if is_image_source(source):
                return self._read_evaluation_images(source, classnames)
            _say("evaluating", source, None, self.split)
            return self._open_shards(source, self.split)
        named = [] if self._images is None else name_classes(classnames)  # a folder may name packed ones better
        if named and folder.classnames and named != folder.classnames:
            raise ValueError(
                f"{source} must have the classes of {self.train}, {', '.join(named[:3])}, ..., got "
                f"{', '.join(folder.classnames[:3])}, ..."
            )
        folder.check_split(self.split)
        return folder.samples(self.split)

    def _read_evaluation_images(self, source: str, classnames: Sequence[str]) -> ImageSet:
        folder = ImageEvaluationFolder(source, task="zero_shot", columns=self.columns, classnames=classnames)
        images = folder.images(self.split)
        count, outputs = self._check_classes(images), self.setting_or_model("num_classes")
        if not classnames and images.classnames and outputs is not None and count < outputs:
            rank_zero_warn(
                f"{source} has {count} classes, taken for the first of the model's {outputs}: if they are not, name "
                f"those of {self.train} in its classnames.txt"
            )
        if self._images is not None and images.source == self._images.source:
            rank_zero_warn(
                f"{source} is what the model is trained on, so its accuracy says nothing about other pictures: divide "
                "it into train/ and val/"
            )
        _say("evaluating", source, images, self.split)
        return ImageSet(images)

    def _check_classes(self, images: ImageCollection) -> int:
        """Return the number of classes of images; raise ValueError where they have none, or more than the model."""
        classes, limit = _count_classes(images), self.setting_or_model("num_classes")
        if limit is not None and classes > limit:
            raise ValueError(f"model.num_classes must be {classes}, the classes of {images.source}, got {limit}")
        return classes

    def _kind(self, source: Any, transform: str, label_key: str | None) -> ImageLabel:
        """Return the kind of samples of a source, None for a pipeline."""
        key = label_key or ("cls" if source is None else find_label_key(source))
        return ImageLabel(self._image_member(transform), key, self.setting_or_model("num_classes"))


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


def _count_classes(images: ImageCollection) -> int:
    """Return the number of classes that labelled images have."""
    if images.labels is None:
        raise ValueError(f"{images.source} has captions and no labels: train on them with ImageTextData")
    return max(len(images.classnames), int(images.labels.max()) + 1)


def _say(purpose: str, source: Any, images: ImageCollection | None, split: str) -> None:
    """Say which images are read, or which of several splits in a folder of shards."""
    if images is not None:
        rank_zero_info(f"{purpose} on {images.described}")
    elif (shards := split_shards(source, split)) is not source:
        rank_zero_info(f"{purpose} on {source}: shards {shards[0].name} to {shards[-1].name}, {len(shards)} in all")
