"""The opening of image and image-text models: OpenCLIP's and timm's, by name or from a folder, with weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from diffvision.data.images.caption_tokenizer import text_only
from diffvision.models.architecture import KEY, check, flatten
from diffvision.models.checkpoint import Checkpoint, allow_plain_classes, holds_average, read_checkpoint
from diffvision.models.hub import HUB
from diffvision.models.weight_files import FOLDER, is_unreadable, tensors_only
from diffvision.opening.model import Model
from diffvision.opening.run_folders import folder_config, run_of

PREPROCESS = ("mean", "std", "interpolation", "resize_mode")
"""Settings of a model's transform that a user may set."""

_REASON = 200  # characters of a library's error
_NOT_BUILT = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
# What each library takes. Of other values OpenCLIP says nothing but AssertionError, and timm KeyError.
_OPEN_CLIP_CHOICES = {
    "interpolation": ("bicubic", "bilinear", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
}
_TIMM_CHOICES = {"interpolation": ("bicubic", "bilinear", "random", "nearest", "box", "hamming", "lanczos")}

# ---- OpenCLIP ------------------------------------------------------------------------------------------------------


def refuse_code(name: str) -> None:
    """Refuse an OpenCLIP model from a folder or the Hub if its configuration would run code that comes with it.

    OpenCLIP passes the `tokenizer_kwargs` of open_clip_config.json, which may have trust_remote_code, to transformers.

    Raises:
        ValueError: the configuration has trust_remote_code.
    """
    import open_clip

    if name.startswith((FOLDER, HUB)) and "trust_remote_code" in str(open_clip.get_model_config(name)):
        raise ValueError(
            f"the configuration of {name} has trust_remote_code: read that code, and delete the setting if it works "
            "without"
        )


def open_open_clip(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open an OpenCLIP model by name, `local-dir:` or `hf-hub:`, with the weights of a tag or a file (a Path)."""
    import open_clip

    refuse_code(name)
    check_preprocess(preprocess, _OPEN_CLIP_CHOICES)
    path = check_file(checkpoint)
    # OpenCLIP reads arrays of big_vision by itself.
    weights = None if path is None or path.suffix in (".npz", ".npy") else read_weights(path, name)
    if weights is not None:
        preprocess = {**_recorded_preprocess(weights), **preprocess}
    # OpenCLIP does not know our layouts or averages, and ignores a checkpoint that is passed with a folder.
    ours = weights is not None and path is not None and (weights.lightning or weights.about or holds_average(path))
    state = weights.state if weights is not None and (ours or name.startswith((FOLDER, HUB))) else None
    config = open_clip.get_model_config(name)
    # SigLIP's bias is set by a run, not by its configuration.
    if weights is not None and (bias := weights.state.get("logit_bias")) is not None:
        if bias.numel() != 1:
            raise ValueError(f"checkpoint {path} has a logit_bias of shape {[*bias.shape]}: it must be one number")
        config["init_logit_bias"] = bias.item()
    if weights is not None and (recorded := _context_length(weights)) is not None:
        config["text_cfg"]["context_length"] = recorded
    length = config["text_cfg"].get("context_length")
    module, transform = _create_open_clip(name, checkpoint, preprocess, config, has_state=state is not None)
    if length is not None:
        cast(Any, module).context_length = length  # of a text tower of the Hub's: that of its captions
    if state is not None:
        _load_state(module, state, path)
    if weights is not None:
        check(weights.about, module, f"checkpoint {path}")
    return Model(
        name=Path(name.removeprefix(FOLDER)).name if name.startswith(FOLDER) else name,
        library="open_clip",
        module=module,
        config=config,
        transform=transform,
        tokenizer=text_only(open_clip.get_tokenizer(name, context_length=length)),
        preprocess=dict(cast(Any, module).visual.preprocess_cfg),
        weights=_origin_of(name, checkpoint),
        run=run_of(path),
        path=path or _folder(name),
    )


def _context_length(weights: Checkpoint) -> int | None:
    """Return the tokens of a caption that weights have positions for; else those that their run recorded, if any."""
    for name in ("positional_embedding", "text.positional_embedding"):
        if name in weights.state and weights.state[name].ndim == 2:
            return len(weights.state[name]) - ("text.cls_emb" in weights.state)
    recorded = dict(flatten(weights.about.get(KEY, {}))).get(("layers", "", "context_length"))
    return recorded if isinstance(recorded, int) else None


def _create_open_clip(
    name: str, checkpoint: str | Path | None, preprocess: dict[str, Any], config: dict[str, Any], *, has_state: bool
) -> tuple[nn.Module, Any]:
    """Build the model and its transform; with `has_state` without weights, which are loaded later."""
    import open_clip

    if isinstance(checkpoint, Path):
        checkpoint = checkpoint.absolute()  # OpenCLIP takes a relative path for a tag of the same spelling
    bias = {key: config[key] for key in ("init_logit_bias",) if key in config}
    quiet = without_warning_of_random_weights() if has_state else nullcontext()
    file = checkpoint if isinstance(checkpoint, Path) else None
    with tensors_only(name), allow_plain_classes(), quiet, refuse_misfit(file, name):
        try:
            module, _, transform = open_clip.create_model_and_transforms(
                name,
                pretrained=None if has_state or checkpoint is None else str(checkpoint),
                load_weights=not has_state,
                force_context_length=config["text_cfg"].get("context_length"),
                **{f"image_{key}": value for key, value in preprocess.items()},
                **bias,
            )
        except RuntimeError as error:
            if not isinstance(checkpoint, str) or is_unreadable(error):
                raise
            raise FileNotFoundError(str(error)) from error  # of a tag whose weights cannot be downloaded
    return module, transform


@contextmanager
def without_warning_of_random_weights() -> Iterator[None]:
    """Silence OpenCLIP's warning that weights are random, where they are to be replaced or trained."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No pretrained weights loaded")

    root = logging.getLogger()
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)


# ---- timm ----------------------------------------------------------------------------------------------------------


def open_timm(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open a timm model by name or `local-dir:`, with the weights of a tag or a file (a Path)."""
    import timm

    check_preprocess(preprocess, _TIMM_CHOICES)
    path = check_file(checkpoint)
    weights = None if path is None else read_weights(path, name)
    args, trained_with = {}, {}
    if weights is not None:
        trained_with = weights.about.get("preprocess", {})
        args = {key: value for key, value in weights.about.get("model_args", {}).items() if key not in _NOT_BUILT}
    with tensors_only(name):
        module = _create_timm(name, None if weights is not None else checkpoint, path, args)
    if weights is not None:
        _fit_classifier(module, weights.state)
        _load_state(module, weights.state, path)
        check(weights.about, module, f"checkpoint {path}")
    preprocess.pop("resize_mode", None)
    kept = {**timm.data.resolve_model_data_config(module), **trained_with, **preprocess}
    folder = _folder(name)
    folder_args = {} if folder is None else folder_config(folder).get("model_args", {})
    return Model(
        name=module.pretrained_cfg["architecture"],
        library="timm",
        module=module,
        config={**folder_args, **args, "num_classes": module.num_classes},
        transform=timm.data.create_transform(**kept, is_training=False),
        preprocess=kept,
        weights=_origin_of(name, checkpoint),
        run=run_of(path),
        path=path or folder,
    )


def _create_timm(name: str, tag: str | Path | None, path: Path | None, args: dict[str, Any]) -> Any:
    """Build the model, with the weights of a tag, or with those of a folder unless a file replaces them."""
    import timm

    if tag is not None:
        try:
            return timm.create_model(f"{name}.{tag}", pretrained=True)
        except OSError as error:  # of the network or the cache; what is wrong with a file raises others
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"timm could not load the weights {tag} of {name} ({first}): connect to the Hub, or give a "
                "downloaded file as checkpoint"
            ) from error
    try:
        return timm.create_model(name, pretrained=path is None and name.startswith(FOLDER), **args)
    except (TypeError, KeyError, AttributeError) as error:
        if not args:
            raise
        raise ValueError(f"checkpoint {path} has model_args that build no {name}: {error}") from error


def _fit_classifier(module: Any, state: Mapping[str, Tensor]) -> None:
    """Give the module as many classes as its weights have."""
    head = module.get_classifier()
    classes = state.get(f"{module.pretrained_cfg['classifier']}.weight")
    if isinstance(head, nn.Linear) and classes is not None and classes.ndim and len(classes) != head.out_features:
        module.reset_classifier(len(classes))


# ---- weights -------------------------------------------------------------------------------------------------------


def check_preprocess(preprocess: Mapping[str, Any], choices: Mapping[str, Sequence[str]] = {}) -> None:
    """Raise a ValueError for an unknown setting of a transform or a value that it cannot have."""
    if unknown := set(preprocess) - set(PREPROCESS):
        raise ValueError(f"preprocess has {', '.join(sorted(unknown))}: it takes {', '.join(PREPROCESS)}")
    for key in ("mean", "std"):
        values = preprocess.get(key)
        is_list = isinstance(values, Sequence) and all(isinstance(value, int | float) for value in values)
        if values is not None and not (is_list and len(values) == 3):
            raise ValueError(f"preprocess.{key} is {values!r}: give three numbers, for red, green and blue")
    for key, known in choices.items():
        value = preprocess.get(key)
        if value is not None and value not in known:
            raise ValueError(f"preprocess.{key} is {value!r}: choose one of {', '.join(known)}")


def check_file(checkpoint: str | Path | None) -> Path | None:
    """Return a checkpoint that is a file, None for a tag; raise a FileNotFoundError where the file is not there."""
    if not isinstance(checkpoint, Path):
        return None
    if not checkpoint.is_file():
        raise FileNotFoundError(f"no checkpoint file {str(checkpoint)!r}: give one that exists")
    return checkpoint


def read_weights(path: Path, name: str) -> Checkpoint:
    """Read a file of weights; raise a ValueError if it records the name of another model."""
    weights = read_checkpoint(path)
    check_name(weights.about.get("model"), name, path)
    return weights


def check_name(trained: Any, name: str, path: Path) -> None:
    """Raise a ValueError if a file of weights records the name of another model."""
    if trained is not None and trained != name:
        raise ValueError(
            f"checkpoint {path} is of the model {trained!r}, not {name!r}: give the file alone, as the model"
        )


def _folder(name: str) -> Path | None:
    """Return the folder of a `local-dir:` name."""
    return Path(name.removeprefix(FOLDER)) if name.startswith(FOLDER) else None


def _origin_of(name: str, checkpoint: str | Path | None) -> str | None:
    """Return the origin of an image model's weights, the value of `Model.weights`."""
    if checkpoint is not None:
        return str(checkpoint)
    return name.removeprefix(FOLDER) if name.startswith((FOLDER, HUB)) else None


def _recorded_preprocess(weights: Checkpoint) -> dict[str, Any]:
    """Return the preprocessing that a training run recorded; the size is the model's."""
    kept = weights.about.get("preprocess", {})
    return {key: kept[key] for key in PREPROCESS if key in kept}


def _load_state(module: nn.Module, state: dict[str, Tensor], path: Path | None) -> None:
    with refuse_misfit(path, type(module).__name__):
        module.load_state_dict(state)


@contextmanager
def refuse_misfit(path: str | Path | None, model: str) -> Iterator[None]:
    """Raise a ValueError where a library cannot load a file of weights; it may raise errors of many classes.

    Args:
        path: the file; errors without one, such as those about a tag, stay.
        model: the model that it is loaded into.
    """
    try:
        yield
    except (RuntimeError, AssertionError, AttributeError, LookupError, TypeError) as error:
        if path is None or not Path(path).is_file() or is_unreadable(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()]
        reason = " ".join(lines[1:3] or lines)
        if isinstance(error, AttributeError) and "logit_bias" in read_checkpoint(path).state:
            reason = "it has a logit_bias, so set loss to siglip"
        if '"model.logit_scale"' in str(error):  # a Lightning checkpoint's name of it
            reason = "it is of a run: `diffvision export` it, and set model to local-dir:FOLDER"
        raise ValueError(f"checkpoint {path} does not fit the model {model}: {reason[:_REASON]}") from error
