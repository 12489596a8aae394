"""A pipeline of the user's, such as a `webdataset.WebDataset`, as training data of images.

Its order is its own: a run that resumes starts it again from the beginning, and no account is kept of its samples.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from diffvision.data.images.decode import clean_caption
from diffvision.data.images.samples import ImageLabel, ImageText
from diffvision.data.shards.sample import BadSample


def is_pipeline(source: Any) -> bool:
    """Return whether training data are a pipeline or a loader rather than the name of a source."""
    return isinstance(source, IterableDataset | DataLoader)


def pipeline_loader(pipeline: Any, kind: ImageText | ImageLabel, batch_size: int, num_workers: int) -> Any:
    """Return a rank's training batches from a pipeline; a `WebLoader` or `DataLoader`, which has batches, as it is.

    Args:
        pipeline: see `PipelineSamples`. It divides its shards among ranks and workers itself.
        kind: what to make of each sample.
        batch_size: samples of a batch, on this rank.
        num_workers: processes that read and decode.
    """
    from webdataset import WebLoader

    rank_zero_warn(
        f"{type(pipeline).__name__} has its own order: a run that resumes starts it again, and its samples are not "
        "counted; give the shards by name for both"
    )
    if isinstance(pipeline, WebLoader | DataLoader):
        return pipeline
    samples = PipelineSamples(pipeline, kind)
    return DataLoader(
        samples,
        batch_size,
        num_workers=num_workers,
        collate_fn=samples.collate,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else it would draw from the process's generator
    )


class PipelineSamples(IterableDataset):
    """Samples of a pipeline, made as those of shards are; one that cannot be used is left out, with a warning.

    Args:
        pipeline: yields dictionaries by type of member, as they are in the tar or decoded ("jpg": PIL image or tensor
            [3, h, w]; "txt": text or token ids; "cls": class number); or pairs of these, the image first.
        kind: what to make of each sample.
    """

    def __init__(self, pipeline: Any, kind: ImageText | ImageLabel) -> None:
        self.pipeline, self.kind = pipeline, kind

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self.pipeline:
            try:
                yield self._item(sample)
            except BadSample as reason:
                warnings.warn(f"samples are left out: {reason}", stacklevel=2)

    def collate(self, items: list[dict[str, Any]]) -> Any:
        """Join samples into a batch."""
        has_tokens = isinstance(items[0].get("text"), Tensor)
        return default_collate(items) if has_tokens else self.kind.collate(items)

    def _item(self, sample: Any) -> dict[str, Any]:
        """Turn what a user's pipeline yields into a sample of ours."""
        wanted = self.kind.caption if isinstance(self.kind, ImageText) else self.kind
        if isinstance(sample, Mapping):
            keys = [key for key in self.kind.image.keys if key in sample]
            if any(isinstance(sample[key], bytes) for key in keys):
                return self.kind.decode({name: data for name, data in sample.items() if isinstance(data, bytes)})
            target = sample.get(wanted.key)
            target = target.get(wanted.field) if wanted.field and isinstance(target, Mapping) else target
            sample = (sample[keys[0]] if keys else None, target)
        image, target = sample if isinstance(sample, list | tuple) and len(sample) == 2 else (None, None)
        if isinstance(image, Image.Image):
            image = self.kind.image.transform(image)
        if not isinstance(image, Tensor) or image.ndim != 3 or target is None:
            raise ValueError(
                f"a sample of a pipeline must be members by type or a pair, with an image and {wanted.key}; batches "
                "come from webdataset.WebLoader"
            )
        if isinstance(self.kind, ImageLabel):
            return {"image": image, "label": int(target)}
        return {"image": image, "text": target if isinstance(target, Tensor) else clean_caption(target)}
