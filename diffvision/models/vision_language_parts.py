"""The configuration of a vision-language model, and its halves: image towers and causal language models."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import timm
import torch
from jaxtyping import Float
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diffvision.models import language
from diffvision.models.checkpoint import read_checkpoint
from diffvision.models.convert.state import check_fits
from diffvision.models.hub import HUGGING_FACE, local
from diffvision.models.language.hugging_face import as_transformers
from diffvision.models.names import is_tag, unknown_model
from diffvision.models.weight_files import FOLDER, read_json, tensors_only

_FOLDERS = {"open_clip_config.json": "open_clip_model.safetensors", "config.json": "model.safetensors"}


CLASSES = {"AutoConfig": "VisionLanguageConfig", "AutoModelForImageTextToText": "VisionLanguageModel"}


class VisionLanguageConfig(PreTrainedConfig):
    """The settings of a `VisionLanguageModel`.

    Attributes:
        tower: timm's or OpenCLIP's name of the image tower; of an OpenCLIP model the `visual`.
        tower_args: arguments of `timm.create_model` or `open_clip.create_model`, such as img_size.
        feature_layer: -1 for the last block with the tower's final norm, -2 for the second-last block without it, as
            LLaVA-1.5 has it.
        projector: "mlp", as in LLaVA-1.5, or "pixel_shuffle", as in nanoVLM.
        shuffle: side of the squares of patches that become one token.
        preprocess: mean, std and interpolation of images, where they differ from the tower's own.
        image_token_id: the placeholder; by default the first id beyond the vocabulary, which cannot be generated.
        text_config: the configuration of any causal language model of transformers.
    """

    model_type = "diffvision_vlm"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    tower: str = "plain_vit_debug"
    tower_args: dict[str, Any] | None = None
    feature_layer: int = -2
    projector: str = "mlp"
    shuffle: int = 1
    preprocess: dict[str, Any] | None = None
    image_token_id: int | None = None
    text_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.feature_layer not in (-1, -2):
            raise ValueError(f"feature_layer is {self.feature_layer!r}: give -1 (last block) or -2 (second-last)")
        if self.projector not in ("mlp", "pixel_shuffle"):
            raise ValueError(f"projector is {self.projector!r}: choose mlp or pixel_shuffle")
        text, self.text_config = self.text_config or {"model_type": "llama"}, None
        super().__post_init__(**kwargs)  # it would reset the attention of a language model's own configuration
        self.text_config = AutoConfig.for_model(**text) if isinstance(text, dict) else text
        if self.image_token_id is None:
            self.image_token_id = self.text_config.vocab_size

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, with the file of one line for `trust_remote_code=True`; a model calls this too."""
        self.auto_map = write_code(save_directory, "diffvision.models.vision_language", CLASSES)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would save this module's text."""


class Halves(NamedTuple):
    """The tower and the language model of a name, with their arguments."""

    tower: str
    language: str
    tower_args: dict[str, Any] | None = None
    language_args: dict[str, Any] | None = None


_VICUNA = {"vocab_size": 32_000, "max_length": 4096, "tied": False}
NAMES = {
    "vlm-debug": Halves("plain_vit_debug", "transformer-debug"),
    "diff-vlm-debug": Halves("diff_vit_debug", "diffv2-debug"),
    "llava-1.5-7b": Halves(
        "vit_large_patch14_clip_quickgelu_336", "transformer-6.8b", language_args={**_VICUNA, "mlp_dim": 11_008}
    ),
    # The MLP is narrower by the parameters of V2's second queries, as in `language.SIZES`.
    "diff-llava-1.5-7b": Halves(
        "diff_vit_large_patch14_clip_224", "diffv2-6.8b", {"img_size": 336}, {**_VICUNA, "mlp_dim": 9632}
    ),
}
"""Name of a vision-language model -> its halves; LLaVA-1.5-7B's have the sizes of CLIP-L/14-336 and Vicuna-7B."""


class Projector(nn.Sequential):
    """From the features of a tower to tokens: "mlp", two layers with GELU, or "pixel_shuffle", one without a bias."""

    def __init__(self, kind: str, width: int, dim: int, shuffle: int) -> None:
        width *= shuffle**2
        if kind == "mlp":
            super().__init__(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))
        else:
            layer = nn.Linear(width, dim, bias=False)
            nn.init.normal_(layer.weight, std=0.02)
            super().__init__(layer)
        self.shuffle = shuffle

    def forward(self, features: Float[Tensor, "I C h w"]) -> Float[Tensor, "I T dim"]:
        """Return a token for each square of patches, row by row; in it the patches' features, row by row."""
        side = self.shuffle
        squares = features.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
        return super().forward(squares.flatten(3).flatten(1, 2))


def create_tower(name: str, args: dict[str, Any] | None = None, tag: str | None = None) -> Any:
    """Return timm's model without its classifier, or the image tower of OpenCLIP's, with weights of a tag or new ones.

    Raises:
        ValueError: neither library has a model of this name, or that has no weights of this tag.
    """
    settings: dict[str, Any] = {"num_classes": 0, **(args or {})}
    if not (is_timm := timm.is_model(name)):
        import open_clip  # takes seconds

        if name not in open_clip.list_models():
            names = [*timm.list_models(), *open_clip.list_models()]
            raise unknown_model(name, "neither timm nor OpenCLIP has a", names)
    if tag is not None and tag not in (tags := _tags(name)):
        raise ValueError(
            f"tower_pretrained is {tag!r}, neither a path nor a tag of {name!r}: give a path, or a tag of "
            f"{', '.join(tags) or 'another model'}"
        )
    if is_timm:
        return timm.create_model(name if tag is None else f"{name}.{tag}", pretrained=tag is not None, **settings)
    device = torch.empty(0).device  # "meta" while transformers loads a model
    made = open_clip.create_model(name, tag, load_weights=tag is not None, device=device, **(args or {}))
    return getattr(made.visual, "trunk", made.visual)


def _tags(name: str) -> list[str]:
    """Return the tags of a tower's pretrained weights."""
    if timm.is_model(name):
        return [each.removeprefix(f"{name}.") for each in timm.list_pretrained(f"{name}.*")]
    import open_clip

    return open_clip.list_pretrained_tags_by_model(name)


def load_tower(name: str, args: dict[str, Any] | None, source: str) -> tuple[Any, dict[str, Any]]:
    """Return a tower with weights, and mean, std and interpolation of its images where the weights record them.

    Args:
        name: of the tower.
        args: its arguments.
        source: a file of weights, a folder of timm's or OpenCLIP's, or a tag of `name`, which wins over a path; of the
            weights of a CLIP model the image tower's are taken.

    Raises:
        ValueError: there are no such weights, they are damaged, or not of this tower.
    """
    about: dict[str, Any] = {}
    if is_tag(source, _tags(name)) or not (path := local(source)).exists():
        return create_tower(name, args, source), {}
    if path.is_dir():
        config = next((file for file in _FOLDERS if (path / file).is_file()), "config.json")
        values = read_json(path / config)
        about, path = values.get("preprocess_cfg") or values.get("pretrained_cfg") or {}, path / _FOLDERS[config]
    weights = read_checkpoint(path)
    about = about or weights.about.get("preprocess") or {}
    prefix = next(
        (one for one in ("visual.trunk.", "visual.") if any(key.startswith(one) for key in weights.state)), ""
    )
    tower = create_tower(name, args)
    unused = (f"{getattr(tower, 'pretrained_cfg', {}).get('classifier')}.", "visual.head.")
    state = {
        key.removeprefix(prefix): value
        for key, value in weights.state.items()
        if key.startswith(prefix) and not key.startswith(unused)
    }
    check_fits(state, tower.state_dict(), f"{source} is not of tower {name!r}: it")
    tower.load_state_dict(state)
    return tower, {key: about[key] for key in ("mean", "std", "interpolation") if key in about}


def restore_buffers(tower: Any, name: str, args: dict[str, Any] | None) -> None:
    """Compute the buffers of a tower that are not saved, which transformers leaves empty when it loads a model."""
    saved = tower.state_dict()
    if names := [key for key, _ in tower.named_buffers() if key not in saved]:
        fresh = dict(create_tower(name, args).named_buffers())
        for key in names:
            tower.get_buffer(key).copy_(fresh[key])


def features(tower: Any, images: Float[Tensor, "I 3 h w"], layer: int) -> Float[Tensor, "I C rows columns"]:
    """Return the patches' features after block `layer` (-1: the last, with the final norm; -2: without a norm)."""
    norm = "norm" if _is_timm(tower) else "normalize_intermediates"
    maps = tower.forward_intermediates(
        images, indices=[layer], stop_early=True, output_fmt="NCHW", intermediates_only=True, **{norm: layer == -1}
    )
    return maps[0] if isinstance(maps, list) else maps["image_intermediates"][0]


def geometry(tower: Any, layer: int) -> tuple[tuple[int, int], int, int]:
    """Return the height and width of an image, the side of a patch, and the channels of features of block `layer`.

    Raises:
        ValueError: the tower has no such block, gives no features of it, or, if it is OpenCLIP's own, is not a ViT.
    """
    if not hasattr(tower, "forward_intermediates") or not (_is_timm(tower) or hasattr(tower, "patch_size")):
        raise ValueError(f"a tower of {type(tower).__name__} gives no features of its blocks: give a ViT's name")
    blocks = tower.feature_info if _is_timm(tower) else tower.transformer.resblocks
    if len(blocks) < -layer:
        raise ValueError(f"feature_layer is {layer}, and {type(tower).__name__} has {len(blocks)} blocks: give -1")
    if not _is_timm(tower):
        return tuple(tower.image_size), tower.patch_size[0], tower.conv1.out_channels
    size = getattr(getattr(tower, "patch_embed", None), "img_size", None)
    size = size or resolve_model_data_config(tower)["input_size"][-2:]
    return tuple(size), tower.feature_info[layer]["reduction"], tower.feature_info[layer]["num_chs"]


def preprocess(tower: Any) -> dict[str, Any]:
    """Return mean, std and interpolation of a tower's images."""
    if _is_timm(tower):
        return resolve_model_data_config(tower)
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    return {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD, "interpolation": "bicubic"}


def open_language(name: str, args: dict[str, Any] | None = None) -> Any:
    """Return a causal language model as a model of transformers, in torch's default dtype.

    Args:
        name: a name of ours, for new weights; `local-dir:` and a folder or .ckpt of ours; or `hf:PATH`.
        args: fields of `LanguageConfig`, for a name.

    Raises:
        FileNotFoundError, ValueError: the name is unknown; the weights do not exist, are damaged, or do not fit.
    """
    if not name.startswith((HUGGING_FACE, FOLDER)):
        return as_transformers(language.create(name, **(args or {})))
    if args:
        raise ValueError(f"language_args are {args}, and {name} has its own sizes: leave them out")
    path, dtype = local(name), torch.get_default_dtype()
    if name.startswith(FOLDER):
        return as_transformers(language.load(path).to(dtype)).train()
    with tensors_only(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, dtype=dtype, output_loading_info=True
        )
    model, info = loaded
    check_loaded({**info, "unexpected_keys": ()}, name, "the causal language model")
    return model.train()


def write_code(folder: str | os.PathLike, module: str, classes: Mapping[str, str]) -> dict[str, str]:
    """Write the file of one line that imports classes from a module; return transformers' auto_map of the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    line = f"from {module} import {', '.join(classes.values())}  # noqa: F401\n"
    (Path(folder) / "modeling_diffvision.py").write_text(line, encoding="utf-8")
    return {auto: f"modeling_diffvision.{name}" for auto, name in classes.items()}


def check_loaded(info: Mapping[str, Any], source: Any, what: str, asked: tuple[str, ...] = ("",)) -> None:
    """Raise a ValueError if transformers found weights missing or unexpected, of names with the prefixes `asked`."""
    wrong = {
        kind: sorted(name for name in info[f"{kind}_keys"] if name.startswith(asked))
        for kind in ("missing", "unexpected")
    }
    if any(wrong.values()):
        listed = [f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in wrong.items() if names]
        raise ValueError(
            f"the weights of {str(source)!r} are not those of {what} that its configuration names: {'; '.join(listed)}"
        )


def mark_as_initialised(model: PreTrainedModel) -> None:
    """Mark weights that are drawn or loaded already, so that `post_init` leaves them; those on "meta" are neither."""
    if next(model.parameters()).device.type != "meta":
        for module in model.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]


def _is_timm(tower: Any) -> bool:
    return hasattr(tower, "pretrained_cfg")
