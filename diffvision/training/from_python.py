"""`diffvision.fit`: the `fit` command for scripts and notebooks. What it runs is in `fit`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffvision.data.datasets import check_paths
from diffvision.training.recipes import find_configuration, read_mapping, resolve_recipes

if TYPE_CHECKING:
    import lightning.pytorch as pl

Source = str | Path | Sequence[str | Path]
"""Data as the command line takes them: a path, or several."""

_TOP = ("ckpt_path", "resume", "resume_ranks", "seed_everything", "trainer")  # all other settings are the trainer's
_INTERRUPTED = 130  # exit status of a run that was saved and ended by SIGINT: Ctrl-C, or a notebook's stop button


@dataclass(frozen=True)
class FitResult:
    """A finished run of `diffvision.fit`.

    Attributes:
        folder: the directory of the run, with config.yaml, metrics.csv and checkpoints; None without a logger.
        checkpoint: the best checkpoint by the metric that the configuration monitors, else the last one; None if none
            was saved. `diffvision.evaluate` and `diffvision.open_model` take it.
        metrics: the last value of every metric.
        module: the trained LightningModule; `module.model` is the model of timm, OpenCLIP or diffvision.
        trainer: Lightning's Trainer.
        data: the LightningDataModule.
    """

    folder: Path | None
    checkpoint: Path | Any  # None is rare, and a type checker need not ask for it
    metrics: dict[str, float]
    module: pl.LightningModule = field(repr=False)
    trainer: pl.Trainer = field(repr=False)
    data: pl.LightningDataModule | None = field(repr=False)


def fit(
    config: str | Path | Sequence[str | Path] = (),
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Source | Mapping[str, Any] | None = None,
    evaluation: Source | None = None,
    callbacks: Sequence[pl.Callback] = (),
    allow: Sequence[str] = (),
    **settings: Any,
) -> FitResult:
    """Train as `diffvision fit` does, from a configuration and what differs from it.

        run = diffvision.fit("clip/debug.yaml", model="CLIP-debug", data="data/digits", max_epochs=3)
        diffvision.evaluate(run.checkpoint, "data/digits")

    Args:
        config: a recipe such as "clip/debug.yaml", the path of a YAML file, or several, of which later ones win.
        model: the model's name in its library, such as "DiffCLIP-ViT-B-16"; or settings of the LightningModule,
            such as {"model": "CLIP-debug", "optimizer": {"lr": 1e-3}}.
        data: training data instead of the configuration's: whatever `train` of its DataModule takes, or a folder that
            has shards in `train` inside, such as those of `diffvision data make`. Or settings of the DataModule, such
            as {"train": "shards", "batch_size": 256}, which leave the configuration's other data as they are.
        evaluation: what to evaluate on. If `data` is a path, the default is what that folder holds for it (evaluation
            folders, or images in `val` or `test`) and nothing otherwise; [] for no evaluation, which leaves no
            checkpoint to be chosen by a metric.
        callbacks: Lightning callbacks, besides those of the configuration.
        allow: packages whose classes the configuration may name, as `--allow`.
        **settings: seed_everything, ckpt_path, resume ("auto", "must") and resume_ranks as options of the command; all
            others are arguments of Lightning's Trainer, such as max_epochs=3 or accelerator="cpu". Nested settings are
            dictionaries; what has a class is {"class_path": ..., "init_args": {...}}. An option may be given under its
            dotted name too: **{"model.optimizer.lr": 1e-3}.

    Raises:
        FileNotFoundError: there is no such recipe or file.
        ValueError: a setting is unknown or has a wrong value, or the data cannot be used.
        TypeError: a value that a configuration cannot hold, such as a module that is built already.
        KeyboardInterrupt: the run was interrupted; it has saved a checkpoint, from which resume="auto" resumes.
    """
    configs = [config] if isinstance(config, str | Path) else list(config)
    words = [f"--config={path}" for path in configs]
    if model is not None:
        words += options({"model": model} if isinstance(model, Mapping) else {"model.init_args.model": model})
    words += _data_options(data, evaluation, configs)
    for name, value in settings.items():
        owner = name if name in _TOP or "." in name else f"trainer.{name}"
        words += options({owner: value})
    words += [f"--allow={prefix}" for prefix in allow]
    args = resolve_recipes(["fit", *words])
    from diffvision.training.fit import fit as run_command

    try:
        done = run_command(args, callbacks)
    except SystemExit as end:
        if end.code != _INTERRUPTED:  # such as SIGTERM's, which ends the whole process
            raise
        raise KeyboardInterrupt("the run was interrupted and has saved a checkpoint") from None
    return _result(done.trainer, done.model, done.datamodule)


def options(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return settings as options of the command line: {"trainer": {"devices": 1}} is --trainer.devices=1.

    Raises:
        TypeError: a value is neither plain nor a list or dictionary of plain ones.
    """
    words: list[str] = []
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and "class_path" not in value:
            words += options(value, f"{key}.")
        else:
            words.append(f"--{key}={value if isinstance(value, str) else _as_json(key, value)}")
    return words


def _as_json(key: str, value: Any) -> str:
    try:
        return str(value) if isinstance(value, Path) else json.dumps(value, default=os.fspath)
    except TypeError as error:
        text = "must be names, numbers, lists and dictionaries: Lightning's Trainer(...).fit takes objects"
        raise TypeError(f"{key} {text} ({error})") from error


# ---- data ----------------------------------------------------------------------------------------------------------


def _data_options(data: Any, evaluation: Source | None, configs: Sequence[str | Path]) -> list[str]:
    """Return the options of training data and of an evaluation."""
    content = _content(configs)
    words: list[str] = []
    if isinstance(data, Mapping):
        words += options({"data": data})
    elif data is not None:
        if not isinstance(data, str | Path | list | tuple):
            kind = type(data).__name__
            raise TypeError(f"data must be a path or settings, got {kind}: Lightning's Trainer(...).fit takes objects")
        sources = [str(data)] if isinstance(data, str | Path) else [*map(str, data)]
        check_paths({"data": sources})
        train = [str(Path(one, "train")) if _has_train_shards(one) else one for one in sources]
        words += options({"data.init_args.train": train[0] if isinstance(data, str | Path) else train})
        if evaluation is None:
            evaluation = next(filter(None, (_evaluation_in(one, _class_of(content)) for one in sources)), [])
    if evaluation is None:
        return words
    paths = [str(evaluation)] if isinstance(evaluation, str | Path) else [str(path) for path in evaluation]
    if _class_of(content) == "ImageTextData":  # it takes a list, the others one source or null
        words += options({"data.init_args.evaluations": paths})
    else:
        words += options({"data.init_args.evaluation": paths[0] if len(paths) == 1 else paths or None})
    return words


def _evaluation_in(source: str, data_class: str) -> list[str]:
    """Return what lies in a folder of training data to evaluate on; empty if there is nothing."""
    if data_class == "TextData":
        return [str(part) for part in (Path(source, "validation"), Path(source, "test")) if part.is_dir()][:1]
    from diffvision.data.images.folders import find_folders
    from diffvision.data.images.image_sources import is_image_source, open_source

    if _has_train_shards(source):
        try:
            folders = [one for one in find_folders(Path(source)) if "test" in one.splits]
        except ValueError:  # there are none
            return []
        if data_class == "ImageTextData":
            return [source] * bool(folders)  # as one path, in which zero-shot comes first to choose checkpoints by
        return [str(one.path) for one in folders if one.task == "zero_shot"][:1]
    reads: Any = "labels" if data_class == "ImageLabelData" else "captions"
    has_split = is_image_source(source) and {"validation", "test"} & set(open_source(source, reads=reads).splits)
    return [source] if has_split else []


def _has_train_shards(source: str) -> bool:
    """Return whether a folder is laid out as those of `diffvision data make`, with shards in `train`."""
    from diffvision.data.images.image_sources import is_image_source

    return Path(source, "train").is_dir() and not is_image_source(Path(source, "train"))


def _content(configs: Sequence[str | Path]) -> dict[str, Any]:
    """Return the `data` and `trainer` of the configurations; of several, the later ones' come first."""
    content: dict[str, Any] = {}
    for config in configs:
        content |= read_mapping(find_configuration(config))
    return content


def _class_of(content: Mapping[str, Any]) -> str:
    """Return the name of the DataModule's class, or ""."""
    data = content.get("data") or ""
    return str(data.get("class_path", "") if isinstance(data, Mapping) else data).rpartition(".")[2]


# ---- the result ----------------------------------------------------------------------------------------------------


def _result(trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule | None) -> FitResult:
    """Return what `fit` gives back: folder, best checkpoint, metrics, and the objects."""
    savers: list[Any] = sorted(trainer.checkpoint_callbacks, key=lambda saver: not getattr(saver, "monitor", None))
    kept = [getattr(saver, name, "") for name in ("best_model_path", "last_model_path") for saver in savers]
    checkpoint = next((path for path in kept if path and os.path.exists(path)), None)
    return FitResult(
        folder=None if trainer.log_dir is None else Path(trainer.log_dir),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        module=module,
        trainer=trainer,
        data=data,
    )
