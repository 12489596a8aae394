"""The `fit` and `validate` commands: LightningCLI over our modules, and anyone else's."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from torch.distributed import DistError, DistNetworkError, DistStoreError

from diffvision.allowlist import limit_imports
from diffvision.data.datasets import check_paths
from diffvision.data.images.image_data import ImageLabelData
from diffvision.errors import Mistake, Problem, did_you_mean
from diffvision.models.architecture import flatten
from diffvision.models.threads import limit_threads
from diffvision.models.weight_files import refuse_urls
from diffvision.parsers import OneLineErrors
from diffvision.training.classification import ClassificationModule
from diffvision.training.compilation import explain_failures
from diffvision.training.fault_tolerance import Ranks, Resume, lightning_internals, protect
from diffvision.training.module import TrainingModule
from diffvision.training.progress import ProgressLine
from diffvision.training.recipes import resolve_recipes
from diffvision.training.summary import RunSummary, make_table

LINKED = ("transform", "eval_transform", "tokenizer", "num_classes")  # what a model gives to its data
RUNS = "runs"
TRAINER_DEFAULTS = {
    "default_root_dir": RUNS,
    "num_sanity_val_steps": 0,  # a validation step is a whole evaluation
    "use_distributed_sampler": False,  # our loaders divide themselves over ranks, exactly
    "enable_model_summary": False,  # RunSummary has a line
    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": RUNS}},
}
UNNAMED = "lightning_logs"  # what Lightning's loggers call a run by default
CLASSES = {
    "model": pl.LightningModule,
    "data": pl.LightningDataModule,
    "trainer.callbacks": pl.Callback,
    "trainer.logger": Logger,
    "trainer.strategy": Strategy,
}
"""A setting that takes a class -> the base of such classes, so that a mistake is answered with the nearest name."""
MEANT = {"model": "a model's name write --model.model", "data": "files write --data.train"}
# Numbers of the trainer that must be above 0 (-1 is no limit): with others Lightning divides by zero or trains nothing.
POSITIVE = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "limit_train_batches"),
    *("max_epochs", "max_steps", "val_check_interval"),
)
NOT_NEGATIVE = ("gradient_clip_val", "log_every_n_steps")
for _package in map(import_module, ("diffvision.data", "diffvision.training")):
    for _name in _package.__all__:  # so that a configuration may name it in short: `class_path: ContrastiveModule`
        getattr(_package, _name)
_load_yaml = get_loader("yaml")


def _read_yaml(text: str) -> Any:
    """Return the content of YAML; jsonargparse passes `null` on to a class's settings as Python writes it."""
    return None if text == "None" else _load_yaml(text)


set_loader("yaml", _read_yaml, exceptions=(yaml.YAMLError,))


class Parser(OneLineErrors, LightningArgumentParser):
    """Lightning's parser, which answers a mistake in one line.

    Loggers whose `save_dir` is the default write to the trainer's `default_root_dir`, and a run without a name has its
    model's. The configuration that a run saves keeps both as they were given, so that it can be run again elsewhere.
    """

    def instantiate_classes(self, cfg: Any, **settings: Any) -> Any:
        return super().instantiate_classes(_with_directories(cfg), **settings)

    def options(self) -> list[str]:
        """Return the options of the parser, and the settings of our modules and data, the most common first."""
        ours = Counter(
            f"--{owner}.{name}"
            for owner in MEANT
            for cls in _subclasses(CLASSES[owner])
            if cls.__module__.startswith("diffvision.")
            for name in (*_settings_of(cls), "class_path", "init_args")
        )
        return [*super().options(), *(name for name, _ in ours.most_common())]

    def advice(self, problem: Problem, options: Iterable[str]) -> str:
        """Return what may have been meant, also where a name or a path is given for a class."""
        setting, value = problem.setting, problem.value
        names = [cls.__name__ for cls in _subclasses(CLASSES[setting])] if setting in CLASSES else []
        near = (did_you_mean(word, names) for word in re.findall(r"[\w-]+", value))
        meant = f": for {MEANT[setting]} {value}" if setting in MEANT and value else ""
        return next(filter(None, near), "") or super().advice(problem, options) or meant


def _settings_of(cls: type[Any]) -> list[str]:
    """Return the settings of a class, those of dataclasses among them as in `optimizer.lr`."""
    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    return list(parser.get_defaults().keys())


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


class FitCLI(LightningCLI):
    """LightningCLI with any module and data module; the model's transforms, tokenizer and classes go to its data.

    The configuration alone says what a run is: unlike Lightning's, it is never overridden by hyper-parameters stored
    in the checkpoint of `--ckpt_path`, so a flag given on resume holds.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True, callbacks: Sequence[pl.Callback] = ()) -> None:
        self.more_callbacks = list(callbacks)
        arguments = sys.argv[1:] if args is None else args
        with limit_imports(arguments) as limited, silence_lightning(), ExitStack() as self.stack:
            super().__init__(
                args=limited,
                run=run,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                seed_everything_default=0,
                save_config_kwargs={"overwrite": True},
                trainer_defaults=TRAINER_DEFAULTS,
                parser_class=Parser,
                parser_kwargs={
                    "default_env": False,
                    "prog": "diffvision",
                    **{name: {"usage": f"diffvision {name} [options]"} for name in self.subcommands()},
                },
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: LightningCLI.subcommands()[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link a model's settings to its data's, and add what `fit` alone reads: others take the file that it saves."""
        for name in LINKED:
            parser.link_arguments(f"model.{name}", f"data.init_args.{name}", apply_on="instantiate")
        parser.add_argument("--resume", type=Resume, default="never", help="fit: continue from the newest checkpoint")
        parser.add_argument("--resume_ranks", type=Ranks, default="same", help="fit: any, from another number of ranks")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and keep the checkpoint's path from Lightning."""
        self.config = parser.parse_args(args)  # Lightning's method warns whenever arguments come from a function call
        if "subcommand" in self.config:
            settings = self.config[self.config["subcommand"]]
            _load_tensors_only(settings)
            # Out of sight until `before_instantiate_classes`: Lightning would take settings from the checkpoint.
            self.ckpt_path, settings["ckpt_path"] = settings["ckpt_path"], None

    def before_instantiate_classes(self) -> None:
        """Refuse impossible numbers, and take num_classes from the data where it is left open."""
        settings = self.config[self.subcommand] if self.subcommand else self.config
        if self.subcommand:
            settings["ckpt_path"] = self.ckpt_path
        _refuse_numbers(settings["trainer"])
        for name in MEANT:
            _refuse_nulls(name, settings.get(name))
        self.counted = _with_open_classes(settings.get("model"), settings.get("data"))
        if self.counted is not None and (classes := self.counted.count_classes()) is not None:
            settings["model"]["init_args"]["num_classes"] = classes
            rank_zero_info(f"num_classes is {classes}, from the data")

    def instantiate_classes(self) -> None:
        """Raise an error of a constructor as it was raised: jsonargparse wraps it in all that might have been meant."""
        try:
            super().instantiate_classes()
            if self.counted is not None:
                self.datamodule.take_images(self.counted)
        except ValueError as error:
            cause = _find_origin(error)
            if cause is None:
                raise
            if isinstance(cause, ValueError | OSError):
                raise cause from cause.__cause__
            text = " ".join(str(cause).split())
            raise ValueError(f"{type(cause).__name__}: {text}") from cause  # such as timm's of an unknown model
        if self.trainer.world_size == 1:  # Lightning divides the cores among several processes
            self.stack.enter_context(limit_threads(self.trainer.strategy.root_device, self.model))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with our line where Lightning would have a progress bar by default."""
        config = self.config_init[self.subcommand] if self.subcommand else self.config_init
        callbacks = [*(config["trainer"].get("callbacks") or []), *self.more_callbacks]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config["trainer"]["enable_progress_bar"] is not False and not has_bar:
            callbacks.append(ProgressLine())
        try:
            trainer = super().instantiate_trainer(callbacks=[*callbacks, RunSummary()], **kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            names = ("accelerator", "devices", "strategy")
            given = ", ".join(f"trainer.{name} {config['trainer'][name]}" for name in names)
            raise ValueError(f"{' '.join(str(error).split())} ({given})") from error
        _check_processes(trainer)
        return trainer

    def before_fit(self) -> None:
        """Refuse data that are not there, and what the module would refuse, before the run has a directory."""
        given = (self.config["fit"].get("data") or {}).get("init_args") or {}
        check_paths({f"data.{name}": given.get(name) for name in ("train", "evaluations", "evaluation")})
        if isinstance(self.model, TrainingModule):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the module says it again
                self.model.set_monitors(lightning_internals.find_callbacks(self.trainer, pl.Callback), self.datamodule)

    def fit(self, model: pl.LightningModule, ckpt_path: str | None = None, **more: Any) -> None:
        """Call Trainer.fit, protected, from the checkpoint to resume from; LightningCLI calls this method."""
        settings = self.config["fit"]
        with protect(
            self.trainer,
            model,
            resume=cast(Resume, settings["resume"]),
            ranks=cast(Ranks, settings["resume_ranks"]),
            ckpt_path=ckpt_path,
            settings={".".join(name): value for name, value in flatten(settings.as_dict())},
        ) as path:
            self.trainer.fit(model, ckpt_path=path, **more)

    def validate(self, model: pl.LightningModule, verbose: bool = True, **more: Any) -> None:
        """Trainer.validate, with the names of its metrics whole; the metrics that its run logged stay."""
        lightning_internals.ignore_advice(is_fitting=False)
        lightning_internals.keep_logged_metrics(self.trainer)
        by_loader = self.trainer.validate(model, verbose=False, **more)
        if verbose and self.trainer.is_global_zero:
            metrics = {name: value for metrics in by_loader for name, value in metrics.items()}
            Console().print(make_table(metrics, "evaluation"))


@contextmanager
def silence_lightning() -> Iterator[None]:
    """Suppress what Lightning says in passing: its information, and its advice."""

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or "lightning" not in Path(record.pathname).parts

    with ExitStack() as stack:
        for name in (
            "pytorch.utilities.rank_zero",
            "pytorch.trainer.connectors.checkpoint_connector",
            "fabric.utilities.seed",
        ):
            logger = logging.getLogger(f"lightning.{name}")
            logger.addFilter(is_shown)
            stack.callback(logger.removeFilter, is_shown)
        stack.enter_context(warnings.catch_warnings())
        lightning_internals.ignore_advice()
        yield


def _check_processes(trainer: pl.Trainer) -> None:
    """Refuse a number of processes under which each would train alone."""
    started = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else trainer.world_size
    if trainer.world_size != started:
        raise ValueError(
            f"trainer.devices x num_nodes must be torchrun's {started} processes, got {trainer.world_size}: set "
            f"trainer.devices to {os.environ.get('LOCAL_WORLD_SIZE', started)}"
        )


def _with_open_classes(model: Any, data: Any) -> ImageLabelData | None:
    """Return the data that a classifier's number of classes comes from; None where it is set, or there is none."""
    if model is None or data is None or _get_class(data) is not ImageLabelData:
        return None
    if (
        not issubclass(_get_class(model), ClassificationModule)
        or model.get("init_args", {}).get("num_classes", 0) is not None
    ):
        return None
    settings = data["init_args"].as_dict()
    return ImageLabelData(**{name: value for name, value in settings.items() if name not in LINKED})


def _get_class(config: Any) -> Any:
    """Return the class of a setting, which the parser has imported already."""
    module, _, name = config["class_path"].rpartition(".")
    return getattr(sys.modules[module], name)


def _with_directories(config: Any) -> Any:
    """Return a configuration whose loggers have a directory: the trainer's, and the model's name, by default."""
    config = config.clone()
    subcommand = config.get("subcommand")
    chosen = config[subcommand] if subcommand else config
    root, loggers = chosen["trainer"]["default_root_dir"], chosen["trainer"]["logger"]
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        settings = logger.get("init_args", {}) if isinstance(logger, Namespace) else {}
        if settings.get("save_dir") == RUNS and root is not None:
            settings["save_dir"] = os.path.expanduser(root)
        if settings.get("name") == UNNAMED:
            settings["name"] = _name_run(chosen.get("model"))
    return config


def _name_run(model: Any) -> str:
    """Return the name of a module's model as a folder's: of local-dir:runs/adapted the last part, "fit" of none."""
    name = model.get("init_args", {}).get("model") if model is not None else None
    if not isinstance(name, str):
        return "fit"
    return Path(name).name if ":" in name and "/" in name else name.rpartition(":")[2].replace("/", "-")


def _refuse_nulls(name: str, given: Any) -> None:
    """Raise a Mistake for a null that a class's setting does not accept: jsonargparse passes it to the constructor."""
    if not isinstance(given, Namespace):
        return
    module, _, cls = given["class_path"].rpartition(".")
    taken: dict[str, inspect.Parameter] = {}
    for one in reversed(getattr(import_module(module), cls).__mro__[:-1]):  # a class may pass settings on to its bases
        try:
            taken |= inspect.signature(one.__init__, eval_str=True).parameters
        except NameError:  # an annotation that is imported for type checkers alone
            continue
    for key, value in given.get("init_args", {}).items():
        parameter = taken.get(key)
        if value is not None or parameter is None or parameter.default is None:
            continue
        kind = parameter.annotation
        if kind not in (parameter.empty, Any) and type(None) not in get_args(kind):
            raise Mistake(f"{name}.{key} must be {getattr(kind, '__name__', kind)}, got null")


def _refuse_numbers(settings: Any) -> None:
    """Raise a ValueError for an impossible number among the trainer's settings."""
    for name in (*POSITIVE, *NOT_NEGATIVE):
        value, is_open = settings.get(name), name.startswith("max_")
        if not isinstance(value, int | float) or value > 0 or (value == -1 and is_open):
            continue
        if value < 0 or name in POSITIVE:
            bound = "0 or more" if name in NOT_NEGATIVE else "above 0" + ", or -1 for no limit" * is_open
            raise ValueError(f"trainer.{name} must be {bound}, got {value}")


def _load_tensors_only(config: Any) -> None:
    """Raise a ValueError unless a checkpoint is a file of this machine, read as tensors and plain values."""
    refuse_urls(config.get("ckpt_path"), "ckpt_path")
    if config.get("ckpt_path") and Path(config["ckpt_path"]).is_dir():
        raise ValueError(
            f"ckpt_path is {config['ckpt_path']}, a directory of shards: if trusted, run python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch"
        )
    if config.get("weights_only") is False:
        raise ValueError("weights_only is false, which would run code that is in a checkpoint: leave it out")
    config["weights_only"] = True  # explicit: else Lightning or torch's environment variables would decide


def _find_origin(error: BaseException | None) -> BaseException | None:
    """Return the first error in a chain of causes that was raised outside of jsonargparse, or None."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        if traceback is not None and not traceback.tb_frame.f_globals["__name__"].startswith("jsonargparse"):
            return error
        error = error.__cause__
    return None


def fit(args: list[str] | None = None, callbacks: Sequence[pl.Callback] = ()) -> FitCLI:
    """Run `fit` or `validate` as from the command line; returns the CLI with its trainer, model and datamodule.

    Args:
        args: the command line from the subcommand on, as ["fit", "--config", "clip/debug.yaml"]; None: this process's.
        callbacks: besides those of the configuration.
    """
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    wrong = [callback for callback in given if not isinstance(callback, pl.Callback)]
    if wrong or given is not callbacks:
        raise TypeError(f"callbacks must be a list of Lightning callbacks, got {[*wrong, callbacks][0]!r}")
    try:
        with explain_failures():
            return FitCLI(resolve_recipes(sys.argv[1:] if args is None else args), callbacks=callbacks)
    except MisconfigurationException as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (DistNetworkError, DistStoreError):  # such as of a port in use
        raise
    except RuntimeError as error:
        if not isinstance(error, DistError) and "remote worker" not in str(error):  # gloo's errors have no class
            raise
        first = str(error).strip().partition("\n")[0].rpartition("] ")[2][:60]  # without gloo's own file
        raise ValueError(f"another rank ended, with its error above: run again with --resume auto ({first})") from error
