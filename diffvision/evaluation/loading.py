"""A model by name, with weights from any of the places they come from: OpenCLIP, timm, or a training run of ours."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from diffvision.data.images.captions import text_only
from diffvision.models import int8
from diffvision.models.architecture import KEY, METADATA, check, recorded
from diffvision.models.bounds import bounded, check_sizes
from diffvision.models.files import FOLDER, read_json, refuse_urls, tensors_only, unreadable
from diffvision.models.names import unknown_model

PREPROCESS = ("mean", "std", "interpolation", "resize_mode")
_HUBS = (FOLDER, "hf-hub:")
_CONFIG = {"open_clip": "open_clip_config.json", "timm": "config.json"}  # of a folder, by its host
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_NOT_BUILT = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode and what belongs to it.

    Attributes:
        tokenizer: None: an image model of timm's, with no text.
        config: what its host builds it of: OpenCLIP's model_cfg, or the arguments that timm's create_model took.
        preprocess: as the host keeps it: OpenCLIP's preprocess_cfg, or timm's data configuration.
    """

    model: nn.Module
    transform: Callable[..., Tensor]
    tokenizer: Callable[[list[str]], Tensor] | None
    config: dict[str, Any]
    preprocess: dict[str, Any]


def load(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    preprocess: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """The model `name` with the weights of `checkpoint`.

    Args:
        name: of an OpenCLIP model or of a timm model, ours included; or `local-dir:PATH`, a folder of either, or
            OpenCLIP's `hf-hub:ID`.
        checkpoint: a file (.pt, .ckpt or .safetensors: OpenCLIP's, timm's or our training's), or a tag of pretrained
            weights that the host knows (it downloads them); None leaves the weights as they are initialised, or as
            `local-dir:` has them. Where averaged weights (EMA) are in the file, they are the ones taken.
        preprocess: any of mean, std, interpolation, resize_mode (OpenCLIP only), where the evaluation's differ from the
            model's own. Ours of a training run carries its own, which comes before the model's.
        device: where to.

    Raises:
        ValueError: unknown name, tag or setting; a file that does not fit, or that holds more than tensors and plain
            values. FileNotFoundError: no such file.
    """
    import open_clip
    import timm

    refuse_urls(checkpoint, "checkpoint")
    unknown = set(preprocess or {}) - set(PREPROCESS)
    if unknown:
        raise ValueError(f"preprocess has {', '.join(sorted(unknown))}: it takes {', '.join(PREPROCESS)}")
    for key in ("mean", "std"):
        if (values := (preprocess or {}).get(key)) is not None and len(values) != 3:
            raise ValueError(f"preprocess.{key} is {values}: give three numbers, for red, green and blue")
    if (host := folder_host(name)) is not None:
        loader = _load_timm if host == "timm" else _load_open_clip
        with bounded(name), _whole_folder(name, checkpoint):
            loaded = loader(name, checkpoint, dict(preprocess or {}))
        if checkpoint is None and (about := recorded(name)):
            check(about, loaded.model, name, loaded.config if host == "open_clip" else None)
    elif name.startswith(_HUBS) or name in open_clip.list_models():
        loaded = _load_open_clip(name, checkpoint, dict(preprocess or {}))
    elif timm.is_model(name):
        loaded = _load_timm(name, checkpoint, dict(preprocess or {}))
    else:
        raise unknown_model(name, "neither OpenCLIP nor timm has a", [*open_clip.list_models(), *timm.list_models()])
    loaded.model.to(device).eval()
    return loaded


def folder_host(name: str) -> str | None:
    """Whose the folder of a `local-dir:` name is, "open_clip" or "timm"; None for any other name.

    Raises:
        FileNotFoundError: no such folder. ValueError: its configuration is of neither, or it has none.
    """
    if not name.startswith(FOLDER):
        return None
    folder = Path(name.removeprefix(FOLDER))
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}, which the model {name!r} names")
    if (folder / _CONFIG["open_clip"]).is_file():
        return "open_clip"
    if "architecture" in _read_folder(name, "timm"):
        return "timm"
    raise ValueError(
        f"{folder} has no {_CONFIG['open_clip']}, and no {_CONFIG['timm']} that names an architecture of timm: give a "
        "folder that OpenCLIP, timm or `diffvision export` wrote"
    )


@contextmanager
def _whole_folder(name: str, checkpoint: str | Path | None) -> Iterator[None]:
    """A folder without weights is refused, which OpenCLIP would fill with random ones; what its host says of one that
    does not load is a ValueError."""
    folder = Path(name.removeprefix(FOLDER))
    if checkpoint is None and not any(path.suffix in _WEIGHTS for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has a configuration and no weights ({', '.join(_WEIGHTS)}): save the model with them"
        )
    try:
        yield
    except (RuntimeError, SafetensorError, TypeError, KeyError, AssertionError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ValueError(f"{folder} does not load, damaged or not one model's: {first[:500]}") from error


def _read_folder(name: str, host: str) -> dict[str, Any]:
    """The configuration in the folder of a `local-dir:` name; empty where there is none."""
    file = Path(name.removeprefix(FOLDER)) / _CONFIG[host]
    return read_json(file) if name.startswith(FOLDER) and file.is_file() else {}


def refuse_code(name: str) -> None:
    """ValueError if an OpenCLIP model from a folder or the Hub asks that code beside it be run, as its tokenizer may.

    OpenCLIP hands the `tokenizer_kwargs` of open_clip_config.json to transformers, trust_remote_code with them.
    """
    import open_clip

    if name.startswith(_HUBS) and "trust_remote_code" in str(open_clip.get_model_config(name)):
        raise ValueError(
            f"the configuration of {name} has trust_remote_code, which would run code that comes with the model: read "
            "that code, and if the model works without it, take the setting out of its open_clip_config.json"
        )


def _load_open_clip(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Loaded:
    import open_clip

    refuse_code(name)
    weights, path = None, _file(checkpoint)
    if path is not None and path.suffix not in (".npz", ".npy"):  # OpenCLIP reads those of big_vision itself
        weights = read_checkpoint(path)
        _check_name(weights, name, path)
        preprocess = {**_trained_with(weights), **preprocess}
    elif (
        path is None and checkpoint is not None and str(checkpoint) not in open_clip.list_pretrained_tags_by_model(name)
    ):
        raise _no_such_weights(checkpoint, name, open_clip.list_pretrained_tags_by_model(name))
    # Our weights are put in here, and so are any beside a folder's name, which OpenCLIP would not look at.
    known = weights is not None and (weights.lightning or weights.about or int8.holds(weights.state))
    ours = weights if known or name.startswith(_HUBS) else None
    config = open_clip.get_model_config(name)
    if ours and "logit_bias" in ours.state:  # SigLIP's, which a run has beside its configuration
        config["init_logit_bias"] = ours.state["logit_bias"].item()
    bias = {key: config[key] for key in ("init_logit_bias",) if key in config}
    quiet = without_warning_of_random_weights() if ours else nullcontext()
    with tensors_only(name), _harmless(), quiet:  # OpenCLIP reads the file itself
        try:
            model, _, transform = open_clip.create_model_and_transforms(
                name,
                pretrained=None if ours or checkpoint is None else str(checkpoint),
                load_weights=not ours,
                **{f"image_{key}": value for key, value in preprocess.items()},
                **bias,
            )
        except RuntimeError as error:
            if path is None or "loading state_dict" not in str(error):
                raise
            raise _does_not_fit(path, name, error) from error
    if ours:
        _load_state(model, ours.state, path)
    if weights is not None:
        check(weights.about, model, f"checkpoint {path}", config)
    kept = dict(cast(Any, model).visual.preprocess_cfg)
    return Loaded(model, transform, text_only(open_clip.get_tokenizer(name)), config, kept)


@contextmanager
def without_warning_of_random_weights() -> Iterator[None]:
    """OpenCLIP says on the root logger that weights are random; here they are to be replaced, or trained."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No pretrained weights loaded")

    root = logging.getLogger()
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)


def _load_timm(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Loaded:
    import timm

    path = _file(checkpoint)
    weights = None if path is None else read_checkpoint(path)
    args, trained_with = {}, {}
    if weights is not None and path is not None:
        _check_name(weights, name, path)
        trained_with = weights.about.get("preprocess", {})
        args = {key: value for key, value in weights.about.get("model_args", {}).items() if key not in _NOT_BUILT}
        check_sizes(args, f"checkpoint {path}")
    with tensors_only(name), bounded(path or name):
        if path is None and checkpoint is not None:
            model: Any = timm.create_model(_tagged(name, str(checkpoint)), pretrained=True)
        else:  # a folder's own weights are those asked for, unless others are
            try:
                model = timm.create_model(name, pretrained=weights is None and name.startswith(FOLDER), **args)
            except (TypeError, KeyError, AttributeError) as error:
                if not args:
                    raise
                raise ValueError(f"checkpoint {path} has model_args that build no {name}: {error}") from error
    if weights is not None:
        head = model.get_classifier()
        classes = weights.state.get(f"{model.pretrained_cfg['classifier']}.weight")
        if isinstance(head, nn.Linear) and classes is not None and len(classes) != head.out_features:
            model.reset_classifier(len(classes))
        _load_state(model, weights.state, path)
        check(weights.about, model, f"checkpoint {path}")
    preprocess.pop("resize_mode", None)
    kept = {**timm.data.resolve_model_data_config(model), **trained_with, **preprocess}
    built = {**_read_folder(name, "timm").get("model_args", {}), **args, "num_classes": model.num_classes}
    return Loaded(model, timm.data.create_transform(**kept, is_training=False), None, built, kept)


def _tagged(name: str, tag: str) -> str:
    """timm's name of a model's pretrained weights; ValueError if it has none of that tag."""
    import timm

    known = timm.list_models(f"{name}.*", pretrained=True)
    if f"{name}.{tag}" not in known:
        raise _no_such_weights(tag, name, [full.partition(".")[2] for full in known])
    return f"{name}.{tag}"


@dataclass(frozen=True)
class Checkpoint:
    """What is in a file of weights."""

    state: dict[str, Tensor]  # by the model's own names
    lightning: bool  # written by a training run of ours
    about: dict[str, Any]  # what the run wrote down: {"model": name, "preprocess": {...}}, or nothing


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The weights in a file of any of the usual layouts; nothing is unpickled but tensors, plain values and an
    argparse.Namespace of them, which timm's train.py keeps its arguments in.

    Where a file holds averaged weights they are the ones taken (Lightning's EMA keeps them as `state_dict`, timm's as
    `state_dict_ema`). Prefixes that wrappers add to the names are taken off.
    """
    path = Path(path)
    content: Any
    told: Any = {}
    try:
        if path.suffix == ".safetensors":
            content, told = _read_safetensors(path)
        else:
            with _harmless():
                content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # a file that is no checkpoint can fail torch's reader in any way
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path} holds a {type(content).__name__}: give a file with a state_dict")
    lightning = isinstance(content, dict) and "pytorch-lightning_version" in content
    about = content.get("diffvision", {}) if lightning else told
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    prefixes = ("module.", "_orig_mod.", *(("model.", "_orig_mod.") if lightning else ()))
    state = {_without(prefixes, name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(f"checkpoint {path} holds no tensors by name: give a file with a state_dict")
    return Checkpoint(int8.joined(state), lightning, _about(path, about))


def _about(path: Path, about: Any) -> dict[str, Any]:
    """What was recorded with weights; ValueError if its parts are not of the types that are written."""
    if not isinstance(about, dict):
        raise ValueError(f"checkpoint {path} has a {type(about).__name__} under diffvision, not a dictionary: damaged")
    recorded = about.get(KEY)
    parts = {f"{KEY}.{name}": part for name, part in recorded.items()} if isinstance(recorded, dict) else {}
    dictionaries = {name: about[name] for name in ("model_args", "preprocess", KEY) if name in about} | parts
    for name, part in dictionaries.items():
        if not isinstance(part, dict):
            raise ValueError(f"checkpoint {path} has {name} of type {type(part).__name__}, not a dictionary: damaged")
    return about


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Weights, and what `diffvision export` wrote of them."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    return weights, told


def _harmless() -> AbstractContextManager[None]:
    """What may be unpickled beside tensors and plain values: as timm has it."""
    return torch.serialization.safe_globals([argparse.Namespace])


def _without(prefixes: tuple[str, ...], name: str) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def _file(checkpoint: str | Path | None) -> Path | None:
    """The checkpoint as a file, None if it is a tag of pretrained weights."""
    if checkpoint is None:
        return None
    path = Path(checkpoint)
    if path.is_file():
        return path
    if isinstance(checkpoint, Path) or path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors") or path.exists():
        raise FileNotFoundError(f"no checkpoint file {str(checkpoint)!r}")
    return None


def _no_such_weights(checkpoint: str | Path, name: str, tags: list[str]) -> ValueError:
    known = f"its pretrained weights are {', '.join(tags)}" if tags else "it has no pretrained weights"
    return ValueError(f"checkpoint {str(checkpoint)!r} is neither a file nor pretrained weights of {name!r}: {known}")


def _check_name(weights: Checkpoint, name: str, path: Path) -> None:
    trained = weights.about.get("model")
    if trained is not None and trained != name:
        raise ValueError(f"checkpoint {path} is of the model {trained!r}, not {name!r}: give the model {trained!r}")


def _trained_with(weights: Checkpoint) -> dict[str, Any]:
    """The preprocessing that a training run wrote down; its size is the model's own."""
    kept = weights.about.get("preprocess", {})
    return {key: kept[key] for key in PREPROCESS if key in kept}


def _load_state(model: nn.Module, state: dict[str, Tensor], path: Path | None) -> None:
    try:
        model.load_state_dict(state, assign=int8.holds(state))
    except RuntimeError as error:
        raise _does_not_fit(path, type(model).__name__, error) from error


def _does_not_fit(path: Path | None, model: str, error: RuntimeError) -> ValueError:
    first = " ".join(line.strip() for line in str(error).splitlines()[1:3])
    return ValueError(f"checkpoint {path} does not fit the model {model}: {first[:500]}")
