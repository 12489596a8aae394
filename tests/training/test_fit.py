"""Whole runs through the command line: resuming, flags against checkpoints, two processes."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace
from torch import nn
from torch.distributed import DistError, DistNetworkError
from training_fits import noise

from diffvision.cli import main
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.models.threads import VARIABLES, limit_threads
from diffvision.models.threads import _print_once as say
from diffvision.training import fit as command
from diffvision.training.fit import FitCLI, _with_directories, fit

CONFIGS = Path(__file__).parents[2] / "configs"
PLAIN = ["--model=ContrastiveModule", "--model.model=CLIP-debug"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """50 noisy images with captions: batches of 16 leave two over."""
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, noise(50, txt=lambda i: f"number {i}"))
    return directory


OPTIONS = """
    --model=ContrastiveModule --model.model=DiffCLIP-debug --model.optimizer.warmup_steps=1
    --model.augmentation.scale=[0.5,1.0] --data=ImageTextData --data.batch_size=16 --data.num_workers=0
    --trainer.accelerator=cpu --trainer.devices=1 --trainer.log_every_n_steps=1 --trainer.limit_val_batches=0
    --trainer.enable_progress_bar=false --trainer.enable_model_summary=false --trainer.callbacks+=DataReport
    --trainer.callbacks+=LastCheckpoint --trainer.callbacks.every_n_train_steps=1
"""


def run(shards: Path, root: Path, *more: str, steps: int = 5) -> FitCLI:
    places = [f"--data.train={shards}", f"--trainer.default_root_dir={root}", f"--trainer.logger.save_dir={root}"]
    return fit(["fit", *OPTIONS.split(), *places, f"--trainer.max_steps={steps}", *more])


def weights(cli: FitCLI) -> dict[str, torch.Tensor]:
    return cli.model.model.state_dict()


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> FitCLI:
    return run(shards, tmp_path_factory.mktemp("whole"))


def test_a_run_resumes_by_itself_from_the_newest_that_is_whole(shards, whole, tmp_path, capsys):
    """The same command again, its newest checkpoint cut: bit by bit the weights of the run never stopped.

    It resumes within an epoch: the same samples in the same order, with the same augmentation, rates and moments.
    """
    version = tmp_path / "DiffCLIP-debug" / "seed0"
    shutil.copytree(whole.trainer.log_dir, version)
    shutil.copy(version / "checkpoints" / "last.ckpt", cut := version / "checkpoints" / "preempted.ckpt")
    os.truncate(cut, 1000)
    with pytest.warns(UserWarning, match=r"skipped .*preempted.ckpt"):
        resumed = run(shards, tmp_path, "--resume=auto", "--trainer.logger.version=seed0")
    assert resumed.trainer.ckpt_path == str(version / "checkpoints" / "last.ckpt")
    assert resumed.trainer.log_dir == str(version)
    assert resumed.trainer.global_step == 5
    assert all(torch.equal(v, weights(resumed)[k]) for k, v in weights(whole).items())
    assert "epoch 2: 32 seen + 0 skipped + 16 not reached = 48 of 50 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate_grad_batches", 0),
        ("check_val_every_n_epoch", 0),
        ("gradient_clip_val", -1.0),
        ("limit_train_batches", 0),
        ("log_every_n_steps", -1),
        ("max_epochs", 0),
        ("max_steps", 0),
        ("val_check_interval", 0),
    ],
)
def test_numbers_of_the_trainer_that_cannot_be_are_refused_before_anything_starts(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"trainer.{name}.*{value}") as refusal:
        run(tmp_path, tmp_path, f"--trainer.{name}={value}")
    assert len(str(refusal.value)) <= 120
    assert not [*tmp_path.iterdir()]


def test_under_torchrun_no_process_trains_by_itself(shards, tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun's 2 processes"):
        run(shards, tmp_path)


def test_flags_hold_against_the_checkpoint(shards, whole, tmp_path):
    stopped = Path(whole.trainer.log_dir) / "checkpoints" / "last.ckpt"
    changed = ["--model.optimizer.lr=0.1", "--model.optimizer.weight_decay=0.7", "--model.optimizer.end_lr=0.1"]
    with pytest.warns(UserWarning, match="settings have changed"):
        resumed = run(shards, tmp_path, f"--ckpt_path={stopped}", *changed)
    settings = torch.load(stopped, weights_only=True)["diffvision_run"]["settings"]
    assert "Namespace(" not in str(settings)  # which runs of other versions do not record
    (optimizer,) = resumed.trainer.optimizers
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.7]
    assert all(g["lr"] == pytest.approx(0.1) for g in optimizer.param_groups)


def test_a_saved_configuration_runs_again(shards, whole, tmp_path):
    saved = Path(whole.trainer.log_dir) / "config.yaml"
    again = fit(["fit", f"--config={saved}", f"--trainer.logger.save_dir={tmp_path}", "--trainer.max_steps=5"])
    assert all(torch.equal(v, weights(again)[k]) for k, v in weights(whole).items())


def test_null_takes_back_what_a_configuration_sets(capsys):
    """As the error of a clip_norm of 0 recommends; jsonargparse makes a text of it on the way."""
    command = ["fit", f"--config={CONFIGS / 'clip' / 'debug.yaml'}", "--data.train=.", "--data.evaluations=[]"]
    assert main([*command, "--model.optimizer.clip_norm=0"]) == 1
    assert "optimizer.clip_norm must be above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--model.optimizer.clip_norm", "null", "--print_config"])
    assert "clip_norm: null" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Evaluation folders of two tasks, and one whose classes are no prompts."""
    root = tmp_path_factory.mktemp("evaluated")
    for name, classes in (("birds", ["wren", "owl"]), ("wnids", ["n01503061", "n02084071"])):
        named = {"classnames": classes, "templates": ["a photo of a {c}."]}
        write_evaluation_split(root / name / "test", noise(2, cls=int), **named)
    write_evaluation_split(root / "captions" / "test", noise(2, txt=str), dataset_type=["retrieval"])
    return root


def monitoring(monitor: str, mode: str = "max") -> list[str]:
    return [
        "--trainer.callbacks+=ModelCheckpoint",
        f"--trainer.callbacks.monitor={monitor}",
        f"--trainer.callbacks.mode={mode}",
    ]


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("headline", "retrieval/captions/image_retrieval_recall@1"),
        ("zero_shot/birds/mean_per_class_recall", "zero_shot/birds/mean_per_class_recall"),
    ],
)
def test_the_headline_of_the_first_evaluation_is_monitored_unless_another_is_named(
    monitor, expected, folders, shards, tmp_path, capsys
):
    validated = [f"--data.evaluations+={folders / name}" for name in ("captions", "birds")]
    validated += ["--trainer.limit_val_batches=1.0", "--trainer.val_check_interval=1"]
    cli = run(shards, tmp_path, *validated, *monitoring(monitor), steps=1)
    (saver,) = [saver for saver in cli.trainer.checkpoint_callbacks if saver.monitor]
    assert saver.monitor == expected
    assert saver.best_model_score == cli.trainer.callback_metrics[expected]
    assert saver.best_model_path
    assert "zero_shot/birds: 2 classes, 1 template, e.g. 'a photo of a wren.'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "monitor", "mode", "named"),
    [
        ("birds", "headline", "min", "must be max for zero_shot/birds/acc1"),
        ("birds", "zero_shot/digits/acc1", "max", "got zero_shot/digits/acc1"),
        ("wnids", "headline", "max", "'n01503061'"),
    ],
)
def test_what_no_evaluation_gives_is_refused_before_any_step(folder, monitor, mode, named, folders, shards, tmp_path):
    with pytest.raises(ValueError, match=named):
        run(shards, tmp_path, f"--data.evaluations+={folders / folder}", *monitoring(monitor, mode))
    assert not [*tmp_path.iterdir()]


def test_a_short_run_with_averages_and_its_validation_warn_of_nothing(shards, folders, tmp_path, recwarn):
    """Neither of the logging interval, nor of averages' weights, nor of a metric that is not measured yet."""
    averaged = ["--trainer.log_every_n_steps=50", "--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
    monitored = [f"--data.evaluations+={folders / 'birds'}", *monitoring("headline")]
    run(shards, tmp_path, *averaged, *monitored, steps=3)  # the first copies the weights
    path = str(next(tmp_path.rglob("last.ckpt")))
    stored = torch.load(path, weights_only=True)
    trained = stored["current_model_state"]
    assert any(not torch.equal(value, trained[name]) for name, value in stored["state_dict"].items())
    config = str(next(tmp_path.rglob("config.yaml")))
    logged = Path(config).with_name("metrics.csv").read_text()
    checked = fit(["validate", "--config", config, "--ckpt_path", path, "--trainer.logger.version=0"])
    assert Path(config).with_name("metrics.1.csv").read_text() == logged
    assert all(torch.equal(value, stored["state_dict"][f"model.{name}"]) for name, value in weights(checked).items())
    said = " ".join(str(warning.message) for warning in recwarn)
    for useless in (
        "logging interval",
        "WeightAveraging",
        "could not find the monitored",
        "ckpt_path",
        "Experiment logs",
    ):
        assert useless not in said


# --- where a run is written, and with how many threads ---


@pytest.mark.parametrize(
    ("model", "arguments", "places"),
    [
        ([f"--config={CONFIGS / 'clip' / 'debug.yaml'}"], ["--trainer.logger.save_dir=y"], ["y"]),
        (PLAIN, ["--trainer.logger+={class_path: CSVLogger, init_args: {save_dir: z}}"], ["x", "z"]),
        (PLAIN, ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.devices=2"], []),
    ],
)
def test_the_default_root_dir_is_where_a_run_is_written(model, arguments, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = FitCLI([*model, "--trainer.default_root_dir=x", *arguments], run=False)
    assert [logger.save_dir for logger in cli.trainer.loggers] == places
    kept = cli.parser.dump(cli.config)
    again = FitCLI([f"--config={kept}", "--trainer.default_root_dir=x2"], run=False)
    assert [logger.save_dir for logger in again.trainer.loggers] == [place.replace("x", "x2") for place in places]


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("CLIP-debug", "CLIP-debug"),
        ("ViT-B/32", "ViT-B-32"),
        ("local-dir:plain", "plain"),
        ("local-dir:runs/adapted", "adapted"),
        ({"model_type": "timm_llava"}, "fit"),
    ],
)
def test_a_run_without_a_name_is_named_by_its_model(model, folder):
    loggers = [Namespace(init_args=Namespace(save_dir="runs", name=name)) for name in ("lightning_logs", "mine")]
    module = Namespace(class_path="Module", init_args=Namespace(model=model))
    named = _with_directories(Namespace(model=module, trainer=Namespace(default_root_dir="x", logger=loggers)))
    assert [logger.init_args.name for logger in named.trainer.logger] == [folder, "mine"]
    assert loggers[0].init_args.name == "lightning_logs"  # as the configuration that a run saves has it


@pytest.mark.parametrize(("threads", "variable", "expected"), [(2, None, 1), (2, "2", 2), (3, None, 3)])
def test_a_small_model_has_one_thread_unless_a_number_is_set(threads, variable, expected, monkeypatch, capfd):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    say.cache_clear()
    torch.set_num_threads(threads)
    try:
        for model, count in ((nn.Linear(10, 10), expected), (nn.Linear(3000, 3000), threads)):
            with limit_threads("cpu", model):
                assert torch.get_num_threads() == count
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    assert capfd.readouterr().err.count("OMP_NUM_THREADS=2") == (expected == 1)


# --- modules of others, and ranks that end ---


def test_a_module_without_arguments_has_a_run(tmp_path, monkeypatch):
    """Its base has an annotation for type checkers alone, too."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "if TYPE_CHECKING:\n    from nowhere import Unknown\n"
        "class Base(BoringModel):\n    def __init__(self, part: Unknown = None):\n        super().__init__()\n"
        "class Net(Base):\n    def __init__(self):\n        super().__init__()\n"
        "class Data(BoringDataModule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    cli = FitCLI(["fit", "--model=mine.Net", "--data=mine.Data", "--allow=mine", "--trainer.fast_dev_run=1"])
    assert cli.trainer.global_step == 1


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DistError("rank 1 failed\nat line 3"), ValueError, r"another rank .*\(rank 1 failed\)$"),
        (RuntimeError("remote worker is gone"), ValueError, "another rank .*remote worker"),
        (DistNetworkError("port 1 is in use"), DistNetworkError, "port 1"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_the_end_of_another_rank_is_told_with_its_reason(error, kind, text, monkeypatch):
    def ended(*args, **settings):
        raise error

    monkeypatch.setattr(command, "FitCLI", ended)
    with pytest.raises(kind, match=text) as raised:
        fit(["fit"])
    assert raised.type is kind
