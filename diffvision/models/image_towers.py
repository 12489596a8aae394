"""Image towers of vision-language models: any timm model, or the `visual` of any OpenCLIP model."""

from typing import Any, NamedTuple

import timm
from jaxtyping import Float
from timm.data import resolve_model_data_config
from torch import Tensor

from diffvision.models.names import unknown_model


class Geometry(NamedTuple):
    """The sizes of a tower: height and width of an image, side of a patch, channels of a patch's features."""

    image_size: tuple[int, int]
    patch_size: int
    width: int


def create_tower(name: str, args: dict[str, Any] | None = None) -> Any:
    """Return timm's model of a name without classifier, or the image tower of OpenCLIP's, with new weights.

    Raises:
        ValueError: neither library has a model of this name.
    """
    if timm.is_model(name):
        return timm.create_model(name, **{"num_classes": 0, **(args or {})})
    import open_clip  # takes seconds

    if name not in open_clip.list_models():
        raise unknown_model(name, "neither timm nor OpenCLIP has a", [*timm.list_models(), *open_clip.list_models()])
    visual = open_clip.create_model(name, load_weights=False, **(args or {})).visual
    return getattr(visual, "trunk", visual)


def features(tower: Any, images: Float[Tensor, "I 3 h w"], layer: int) -> Float[Tensor, "I C rows columns"]:
    """Return the patches' features after block `layer` (-1: the last, with the final norm; -2: without a norm)."""
    norm = "norm" if _is_timm(tower) else "normalize_intermediates"
    maps = tower.forward_intermediates(
        images, indices=[layer], stop_early=True, output_fmt="NCHW", intermediates_only=True, **{norm: layer == -1}
    )
    return maps[0] if isinstance(maps, list) else maps["image_intermediates"][0]


def geometry(tower: Any, layer: int) -> Geometry:
    """Return the sizes of a tower whose features are taken after block `layer`."""
    if not _is_timm(tower):
        return Geometry(tuple(tower.image_size), tower.patch_size[0], tower.conv1.out_channels)
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    info = tower.feature_info[layer]
    return Geometry(
        tuple(size or resolve_model_data_config(tower)["input_size"][-2:]), info["reduction"], info["num_chs"]
    )


def preprocess(tower: Any) -> dict[str, Any]:
    """Return mean, std and interpolation of a tower's images."""
    if _is_timm(tower):
        return resolve_model_data_config(tower)
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    default = {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD, "interpolation": "bicubic"}
    return getattr(tower, "preprocess_cfg", default)


def _is_timm(tower: Any) -> bool:
    return hasattr(tower, "pretrained_cfg")
