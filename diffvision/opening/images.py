"""Models of images, or of images and texts: OpenCLIP's and timm's, by name or from a folder, with weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from diffvision.data.images.captions import text_only
from diffvision.models import int8
from diffvision.models.architecture import check
from diffvision.models.bounds import bounded, check_sizes
from diffvision.models.checkpoint import Checkpoint, harmless, read_checkpoint
from diffvision.models.files import FOLDER, tensors_only
from diffvision.opening.model import Model
from diffvision.opening.weights import HUB, PREPROCESS, SUFFIXES, check_name, folder_config, no_such_weights, run_of

_NOT_BUILT = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")

# ---- OpenCLIP ------------------------------------------------------------------------------------------------------


def refuse_code(name: str) -> None:
    """Refuse an OpenCLIP model from a folder or the Hub whose configuration asks to run code, as its tokenizer may.

    OpenCLIP hands the `tokenizer_kwargs` of open_clip_config.json to transformers, trust_remote_code with them.

    Raises:
        ValueError: the configuration has trust_remote_code.
    """
    import open_clip

    if name.startswith((FOLDER, HUB)) and "trust_remote_code" in str(open_clip.get_model_config(name)):
        raise ValueError(
            f"the configuration of {name} has trust_remote_code, which would run code that comes with the model: read "
            "that code, and if the model works without it, take the setting out of its open_clip_config.json"
        )


def open_open_clip(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    import open_clip

    refuse_code(name)
    weights, path = None, _file(checkpoint)
    # OpenCLIP reads the arrays of big_vision itself.
    if path is not None and path.suffix not in (".npz", ".npy"):
        weights = read_checkpoint(path)
        check_name(weights.about.get("model"), name, path)
        preprocess = {**_trained_with(weights), **preprocess}
    elif path is None and checkpoint is not None:
        tags = open_clip.list_pretrained_tags_by_model(name)
        if str(checkpoint) not in tags:
            raise no_such_weights(checkpoint, name, tags)
    # Our weights are put in here, and so are any for a folder's name, which OpenCLIP would not look at.
    ours = weights is not None and (weights.lightning or weights.about or int8.holds(weights.state))
    state = weights.state if weights is not None and (ours or name.startswith((FOLDER, HUB))) else None
    config = open_clip.get_model_config(name)
    # SigLIP's bias is set by a run, not by its configuration.
    if state is not None and "logit_bias" in state:
        config["init_logit_bias"] = state["logit_bias"].item()
    bias = {key: config[key] for key in ("init_logit_bias",) if key in config}
    quiet = without_warning_of_random_weights() if state is not None else nullcontext()
    with tensors_only(name), harmless(), quiet:
        try:
            module, _, transform = open_clip.create_model_and_transforms(
                name,
                pretrained=None if state is not None or checkpoint is None else str(checkpoint),
                load_weights=state is None,
                **{f"image_{key}": value for key, value in preprocess.items()},
                **bias,
            )
        except RuntimeError as error:
            if path is None or "loading state_dict" not in str(error):
                raise
            raise _does_not_fit(path, name, error) from error
    if state is not None:
        _load_state(module, state, path)
    if weights is not None:
        check(weights.about, module, f"checkpoint {path}", config)
    return Model(
        name=Path(name.removeprefix(FOLDER)).name if name.startswith(FOLDER) else name,
        host="open_clip",
        module=module,
        config=config,
        transform=transform,
        tokenizer=text_only(open_clip.get_tokenizer(name)),
        preprocess=dict(cast(Any, module).visual.preprocess_cfg),
        weights=_origin_of(name, checkpoint),
        run=run_of(path),
    )


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
    import timm

    path = _file(checkpoint)
    weights = None if path is None else read_checkpoint(path)
    args, trained_with = {}, {}
    if weights is not None and path is not None:
        check_name(weights.about.get("model"), name, path)
        trained_with = weights.about.get("preprocess", {})
        args = {key: value for key, value in weights.about.get("model_args", {}).items() if key not in _NOT_BUILT}
        check_sizes(args, f"checkpoint {path}")
    with tensors_only(name), bounded(path or name):
        if path is None and checkpoint is not None:
            if str(checkpoint) not in (tags := timm_tags(name)):
                raise no_such_weights(checkpoint, name, tags)
            module: Any = timm.create_model(f"{name}.{checkpoint}", pretrained=True)
        else:
            # The weights of a folder are those asked for, unless others are.
            pretrained = weights is None and name.startswith(FOLDER)
            try:
                module = timm.create_model(name, pretrained=pretrained, **args)
            except (TypeError, KeyError, AttributeError) as error:
                if not args:
                    raise
                raise ValueError(f"checkpoint {path} has model_args that build no {name}: {error}") from error
    if weights is not None:
        _fit_classifier(module, weights.state)
        _load_state(module, weights.state, path)
        check(weights.about, module, f"checkpoint {path}")
    preprocess.pop("resize_mode", None)
    kept = {**timm.data.resolve_model_data_config(module), **trained_with, **preprocess}
    folder_args = folder_config(Path(name.removeprefix(FOLDER))).get("model_args", {}) if FOLDER in name else {}
    return Model(
        name=module.pretrained_cfg["architecture"],
        host="timm",
        module=module,
        config={**folder_args, **args, "num_classes": module.num_classes},
        transform=timm.data.create_transform(**kept, is_training=False),
        preprocess=kept,
        weights=_origin_of(name, checkpoint),
        run=run_of(path),
    )


def _fit_classifier(module: Any, state: Mapping[str, Tensor]) -> None:
    """Give the module as many classes as its weights have."""
    head = module.get_classifier()
    classes = state.get(f"{module.pretrained_cfg['classifier']}.weight")
    if isinstance(head, nn.Linear) and classes is not None and len(classes) != head.out_features:
        module.reset_classifier(len(classes))


def timm_tags(name: str) -> list[str]:
    """Return the tags of a model's pretrained weights."""
    import timm

    return [full.partition(".")[2] for full in timm.list_models(f"{name}.*", pretrained=True)]


# ---- weights -------------------------------------------------------------------------------------------------------


def _file(checkpoint: str | Path | None) -> Path | None:
    """Return the checkpoint as a file, None if it is a tag of pretrained weights."""
    if checkpoint is None:
        return None
    path = Path(checkpoint)
    if path.is_file():
        return path
    if isinstance(checkpoint, Path) or path.suffix in SUFFIXES or path.exists():
        raise FileNotFoundError(f"no checkpoint file {str(checkpoint)!r}")
    return None


def _origin_of(name: str, checkpoint: str | Path | None) -> str | None:
    """Return where the weights of an image model come from, as `Model.weights` has it."""
    if checkpoint is not None:
        return str(checkpoint)
    return name.removeprefix(FOLDER) if name.startswith((FOLDER, HUB)) else None


def _trained_with(weights: Checkpoint) -> dict[str, Any]:
    """Return the preprocessing that a training run recorded; the size is the model's."""
    kept = weights.about.get("preprocess", {})
    return {key: kept[key] for key in PREPROCESS if key in kept}


def _load_state(module: nn.Module, state: dict[str, Tensor], path: Path | None) -> None:
    try:
        module.load_state_dict(state, assign=int8.holds(state))
    except RuntimeError as error:
        raise _does_not_fit(path, type(module).__name__, error) from error


def _does_not_fit(path: Path | None, model: str, error: RuntimeError) -> ValueError:
    first = " ".join(line.strip() for line in str(error).splitlines()[1:3])
    return ValueError(f"checkpoint {path} does not fit the model {model}: {first[:500]}")
