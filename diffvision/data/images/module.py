"""LightningDataModules: settings, and a call to the loaders. Transforms and tokenizer arrive from the model.

What is not given is taken from the LightningModule that a trainer has these data for.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from PIL.Image import Image
from torchvision.transforms.functional import pil_to_tensor

from diffvision.data.images.folders import EvaluationFolder, EvaluationLoader, PictureFolder, find_folders
from diffvision.data.images.picture_set import PictureSet
from diffvision.data.images.pictures import class_prompts, find_pictures, is_pictures
from diffvision.data.images.samples import IMAGE_KEYS, CaptionMember, ImageLabel, ImageMember, ImageText, SampleKind
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.loader import ShardLoader
from diffvision.data.shards.report import Limits
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.watchdog import STALL_TIMEOUT


class ImageTextData(pl.LightningDataModule):
    """Image and caption pairs for contrastive training, evaluation folders for validation.

    Args:
        train: a directory of shards, tar files, a pattern (`{00000..00009}.tar`, `**/*.tar.gz`), http(s), s3 or gs
            URLs, or a list of these; or pictures as `data.pictures.find_pictures` takes them, read where they lie.
        batch_size: global, over all ranks.
        evaluations: directories given to `find_folders`. A validation batch is one whole evaluation folder.
        num_workers: processes that read and decode, on each rank.
        seed: with the epoch, all there is to the order of the samples.
        max_bad_fraction: bad samples are skipped and counted; more of them than this stop the run.
        image_key: the member types that hold an image, the first found is taken.
        caption_key: the member with the caption: "txt", or "json:FIELD"; null for what the data have.
        columns: of a table of pictures: its columns image, caption and label, where they have other names.
        window: shards shuffled together.
        cache_bytes: room on local disk for remote and compressed shards.
        stall_timeout: seconds without a sample, while a batch is waited for, after which the run stops and says which
            process is stuck.
        transform, eval_transform, tokenizer: the model's; None: those of the LightningModule that is trained.
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
        self.train, self.batch_size, self.evaluations = train, batch_size, list(evaluations)
        self.num_workers, self.seed, self.window, self.cache_bytes = num_workers, seed, window, cache_bytes
        self.limits, self.stall_timeout = Limits(max_bad_fraction), stall_timeout
        self.image_key, self.caption_key, self.columns = image_key, caption_key, columns
        self.transform, self.eval_transform, self.tokenizer = transform, eval_transform, tokenizer

    def train_dataloader(self) -> ShardLoader:
        tokenizer = of_model(self, "tokenizer")
        if tokenizer is None:
            raise ValueError("ImageTextData has no tokenizer: pass the model's, open_clip.get_tokenizer(name)")
        samples = _training_samples(self)
        if isinstance(samples, PictureSet) and samples.pictures.captions is None:
            raise ValueError(f"{self.train} has labels and no captions: train on them with ImageLabelData")
        image = ImageMember(of_model(self, "transform") or to_float, self.image_key)
        kind = ImageText(image, CaptionMember(self.caption_key or samples.caption_key), tokenizer)
        return _train_loader(self, samples, kind)

    def val_dataloader(self) -> "FolderLoader | list":
        if not self.evaluations:
            return []
        folders = [folder for path in self.evaluations for folder in find_folders(path)]
        transform, tokenizer = of_model(self, "eval_transform") or to_float, of_model(self, "tokenizer")
        return FolderLoader([folder.bound(transform, tokenizer) for folder in folders])

    def test_dataloader(self) -> "FolderLoader | list":
        return self.val_dataloader()


class ImageLabelData(pl.LightningDataModule):
    """Images and class numbers for classification; validation sees each sample of a split exactly once.

    Args:
        train: shards of images and class numbers, or pictures in a folder for each class; see `ImageTextData`.
        batch_size: global, over all ranks.
        evaluation: an evaluation folder of CLIP_benchmark's layout, shards, or pictures.
        split: which split of the evaluation folder.
        label_key: the member with the class number: "cls", or "json:FIELD"; null for what the data have.
        eval_batch_size: on each rank; by default a rank's share of `batch_size`.
        transform, eval_transform, num_classes: the model's; None: those of the LightningModule that is trained. A
            sample whose label is not below num_classes is bad.
        The others as in `ImageTextData`.
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
        window: int = 16,
        cache_bytes: int = 100 * 10**9,
        stall_timeout: float = STALL_TIMEOUT,
        transform: Any = None,
        eval_transform: Any = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.train, self.batch_size, self.evaluation, self.split = train, batch_size, evaluation, split
        self.eval_batch_size, self.num_workers, self.seed = eval_batch_size, num_workers, seed
        self.window, self.cache_bytes, self.limits = window, cache_bytes, Limits(max_bad_fraction)
        self.stall_timeout = stall_timeout
        self.image_key, self.label_key, self.num_classes = image_key, label_key, num_classes
        self.columns = columns
        self.transform, self.eval_transform = transform, eval_transform

    def train_dataloader(self) -> ShardLoader:
        samples = _training_samples(self)
        if isinstance(samples, PictureSet):
            self._check_classes(samples)
        return _train_loader(self, samples, self._kind(samples, "transform"))

    def val_dataloader(self) -> EvaluationLoader | list:
        if self.evaluation is None:
            return []
        rank, world_size = rank_and_world(self)
        shards = self._evaluation_samples(self.evaluation)
        batch_size = self.eval_batch_size or max(1, self.batch_size // world_size)
        kind = self._kind(shards, "eval_transform")
        return EvaluationLoader(
            shards, kind, batch_size, self.num_workers, rank, world_size, self.limits, self.stall_timeout
        )

    def test_dataloader(self) -> EvaluationLoader | list:
        return self.val_dataloader()

    def predict_dataloader(self) -> EvaluationLoader | list:
        return self.val_dataloader()

    def _evaluation_samples(self, source: str) -> ShardSet | PictureSet:
        trained_on = find_pictures(cast(str, self.train), columns=self.columns) if is_pictures(self.train) else None
        classnames = () if trained_on is None else trained_on.classnames
        try:
            folder = EvaluationFolder(source)
        except ValueError:  # not that layout
            if is_pictures(source):
                how: dict[str, Any] = {"columns": self.columns, "classnames": classnames}
                samples = PictureFolder(source, task="zero_shot", **how).samples(self.split)
                self._check_classes(samples)
                return samples
            return ShardSet(source, ShardCache(max_bytes=self.cache_bytes))
        if classnames and folder.classnames and class_prompts(classnames) != folder.classnames:
            raise ValueError(
                f"{source} numbers other classes than {self.train}: {', '.join(folder.classnames[:3])}, ... and "
                f"{', '.join(classnames[:3])}, ...; make the evaluation folder of pictures of the same classes"
            )
        return folder.samples(self.split)

    def _check_classes(self, samples: PictureSet) -> None:
        """Of pictures it is known before training whether they have labels, and how many classes."""
        labels, source = samples.pictures.labels, samples.pictures.source
        if labels is None:
            raise ValueError(f"{source} has captions and no labels: train on them with ImageTextData")
        classes, limit = max(len(samples.pictures.classnames), int(labels.max()) + 1), of_model(self, "num_classes")
        if limit is not None and classes > limit:
            raise ValueError(f"{source} has {classes} classes, the model {limit}: set model.num_classes")

    def _kind(self, samples: ShardSet | PictureSet, transform: str) -> ImageLabel:
        image = ImageMember(of_model(self, transform) or to_float, self.image_key)
        return ImageLabel(image, self.label_key or samples.label_key, of_model(self, "num_classes"))


class FolderLoader:
    """Evaluation folders, one at a time; every rank has all of them, and shares each one's samples with the others."""

    def __init__(self, folders: list[EvaluationFolder]) -> None:
        self.folders = folders

    def __len__(self) -> int:
        return len(self.folders)

    def __iter__(self) -> Iterator[EvaluationFolder]:
        return iter(self.folders)


def to_float(image: Image) -> torch.Tensor:
    """The image as it is: float [3, height, width] in 0..1. Batches need images of one size."""
    return pil_to_tensor(image).float() / 255


def _training_samples(data: ImageTextData | ImageLabelData) -> ShardSet | PictureSet:
    if is_pictures(data.train):
        return PictureSet(find_pictures(cast(str, data.train), columns=data.columns))
    return ShardSet(data.train, ShardCache(max_bytes=data.cache_bytes))


def _train_loader(
    data: ImageTextData | ImageLabelData, samples: ShardSet | PictureSet, kind: SampleKind
) -> ShardLoader:
    rank, world_size = rank_and_world(data)
    loader = ShardLoader(
        samples,
        kind,
        data.batch_size,
        seed=data.seed,
        num_workers=data.num_workers,
        rank=rank,
        world_size=world_size,
        window=data.window,
        limits=data.limits,
        stall_timeout=data.stall_timeout,
    )
    if data.trainer is not None:
        loader.set_epoch(data.trainer.current_epoch)
    return loader


def of_model(data: pl.LightningDataModule, name: str) -> Any:
    """A setting of the data; where it is None that of the LightningModule whose data they are, if that has one."""
    value = getattr(data, name)
    module = data.trainer.lightning_module if data.trainer is not None else None
    return getattr(module, name, None) if value is None else value


def rank_and_world(data: pl.LightningDataModule) -> tuple[int, int]:
    return (data.trainer.global_rank, data.trainer.world_size) if data.trainer is not None else (0, 1)
