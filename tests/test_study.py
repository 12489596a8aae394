"""`diffvision study`: what it plans, refuses, resumes and compares."""

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from diffvision.cli import main
from diffvision.data.datasets.digits import make_digits
from diffvision.data.shards.writer import write_shards
from diffvision.errors import Mistake
from diffvision.models.names import plain_twin, recorded
from diffvision.study import study_command
from diffvision.study.runs import LOG, SETTINGS, TUNING_SEED, Run, Study
from diffvision.training.fit import FitCLI
from diffvision.training.recipes import resolve_recipes

TWO = ["--config", "vision/debug.yaml", "--models", "plain_vit_debug", "diff_vit_debug", "--seeds", "1"]
TWINS = {
    "diff_vit_base": "vit_base_patch16_224",
    "diffv2_vit_small_patch16_384": "vit_small_patch16_384",
    "diff_vit_base_patch16_clip_dynamic_224": "plain_vit_base_patch16_clip_224",
    "gated_vit_debug_clip": "plain_vit_debug_clip",
    "DiffCLIP-debug-0.2": "CLIP-debug",
    "DiffCLIP-ViT-B-16-vision": "CLIP-ViT-B-16",
    "DiffCLIP-V2-ViT-B-16": "CLIP-ViT-B-16",
    "SinkCLIP-ViT-S-16": "CLIP-ViT-S-16",
    "diffv2-1.4b": "transformer-1.4b",
}


@pytest.mark.parametrize(("name", "twin"), TWINS.items())
def test_the_plain_twin_of_a_model_has_as_many_parameters(name, twin):
    assert plain_twin(name) == twin
    counts = {name: count for library in recorded().values() for name, count in library.items()}
    if twin in counts:
        assert counts[name] == pytest.approx(counts[twin], rel=0.005)


@pytest.mark.parametrize("name", ["CLIP-debug", "plain_vit_debug", "vit_base_patch16_224", "transformer-1m",
                                  "DiffCLIP-GDA-debug", "gda_vit_debug", "resnet18"])  # fmt: skip
def test_a_model_without_a_plain_twin_is_refused(name):
    with pytest.raises(ValueError, match=name):
        plain_twin(name)


LANGUAGE = "--config language/debug.yaml --models diffv2-debug transformer-debug"
REFUSED = {
    # arguments -> what the error names
    "--seed_everything=3": "seed_everything",
    "--model.init_args.model diff_vit_tiny": "model",
    "--trainer.logger.name=mine": "logger",
    "--trainer.logge False": "logger",
    "--resume=must": "resume",
    "--res=must": "resume",
    "--seeds 0": "seeds",
    "--jobs 0": "jobs",
    "--models diff_vit_debug": "twin",
    "--models DiffCLIP-nano.digits CLIP-debug": "models",
    "--models diff_vit_debug .": "models",
    "--models plain_vit_debug dif_vit_debug": "diff_vit_debug",
    "--trainer.max_epochs 2 3": "3",
    "--rates 1e-3 2e-3": "test",
    "--rates 1e-3 --test data/digits/zero_shot": "test",
    "--rates 1e-3 --test data/digits": "test",
    "--rates 1e-3 --test other --data.evaluation=null": "evaluation",
    "--rates 1e-3 --test other": "test",
    "--rates 1e-3 nan": "rates",
    "--rates inf": "rates",
    "--rates 0": "rates",
    "--rates 1e-3 --test other --model.optimizer.lr 7": "lr",
    "--print_config": "print_config",
    "--trainer.fast_dev_run true": "fast_dev_run",
    "--models diff_vit_debug DiffCLIP-debug": "library",
    "--test name=other --print": "test",
    "--test https://nowhere.invalid/shards-{00..03}.tar": "test",
    f"{LANGUAGE} --test none-000.tar": "test",
    f"{LANGUAGE} --test none.txt": "test",
}


@pytest.mark.parametrize(("more", "named"), REFUSED.items())
def test_what_a_study_cannot_be_is_refused_before_anything_is_written(more, named, tmp_path):
    with pytest.raises(ValueError, match=named) as refused:
        study_command.main([*TWO, "--output", str(tmp_path / "out"), *more.split()])
    assert isinstance(refused.value, Mistake) or "dif_vit_debug" in more
    assert not (tmp_path / "out").exists()


@pytest.fixture
def photos(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "a.png")
    return str(tmp_path / "photos")


def test_a_validation_split_that_stands_in_for_a_missing_test_is_no_test(tmp_path):
    for split in ("train", "validation"):
        samples = ({"__key__": str(number), "cls": str(number % 2), "jpg": b"none"} for number in range(4))
        write_shards(tmp_path / "shards" / split, samples)
    shards = str(tmp_path / "shards")
    more = ["--rates", "1e-3", "--test", shards, "--data.evaluation", shards, "--data.split=validation"]
    with pytest.raises(Mistake, match="test"):
        study_command.main([*TWO, "--output", str(tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists()


CLIPS = "--config clip/debug.yaml --models CLIP-debug DiffCLIP-debug --seeds 1"


@pytest.mark.parametrize(
    ("settings", "test", "is_refused"),
    [
        ("--data.evaluation photos --data.split validation", "photos/validation", True),
        ("--data.evaluation photos --data.split validation", "photos/validation/cat", True),
        ("--data.evaluation photos --data.split validation", "photos/test", False),
        ("--data.evaluation photos/validation", "photos", False),
        (f"{CLIPS} --data.evaluations [a=photos]", "photos", True),
        (f"{CLIPS} --data.evaluations+=photos", "b=photos", True),
    ],
)
def test_rates_are_chosen_on_other_samples_than_the_models_are_compared_on(
    settings, test, is_refused, tmp_path, monkeypatch
):
    for part in ("train", "validation", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / part / name / "a.png")
    monkeypatch.chdir(tmp_path)
    command = [*(TWO if "--models" not in settings else []), *settings.split(), "--output", "out", "--test", test]
    with pytest.raises(Mistake, match="test") if is_refused else nullcontext():
        study_command.main([*command, "--rates", "1e-3", "--print"])


def test_runs_of_other_settings_do_not_compare(tmp_path):
    of = Study([], tmp_path)
    runs = [Run("a", 0), Run("b", 0), Run("b", 1)]
    for run, smoothing in zip(runs, (0.1, 0.1, 0.7), strict=True):
        (of.folder(run) / "checkpoints").mkdir(parents=True)
        (of.folder(run) / "checkpoints" / "last.ckpt").touch()
        model = {"init_args": {"model": run.model, "label_smoothing": smoothing, "optimizer": {"lr": 1.0}}}
        data = {"init_args": {"seed": run.seed}}
        (of.folder(run) / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    of.check_alike([*runs[:2], Run("a", 7)])
    with pytest.raises(ValueError, match="label_smoothing"):
        of.check_alike(runs)


def test_test_data_may_be_another_split_than_rates_are_chosen_on(tmp_path, photos, capsys):
    rates = ["--rates", "2e-3", "1e-3", "0.001"]
    more = [*rates, "--test", photos, "--data.evaluation", photos, "--data.split=validation"]
    study_command.main([*TWO, "--output", str(tmp_path / "out"), *more, "--print"])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("diffvision fit --config=vision/debug.yaml ")]
    assert len(commands) == 4  # only those that choose rates
    assert all(f"--seed_everything={TUNING_SEED} " in line for line in commands)
    assert sum("lr=0.001 " in line and "version=rate0.001" in line for line in commands) == 2
    assert all(line.startswith("#") for line in lines if line not in commands)


def test_a_folder_with_other_settings_is_refused_and_more_seeds_and_models_are_not(tmp_path, capsys):
    output = ["--output", str(tmp_path / "out")]
    study_command.main([*TWO, *output, "--print", "--trainer.max_epochs", "2"])
    others = ["--models", "diff_vit_debug", "diffv2_vit_debug"]
    study_command.main([*TWO, *output, "--print", "--trainer.max_epochs=2", "--seeds", "2", *others])
    assert capsys.readouterr().out.count("diffvision fit") == 2 + 4
    checkpoints = tmp_path / "out" / "diff_vit_debug" / "seed0" / "checkpoints"
    study_command.main([*TWO, *output, "--print", "--trainer.max_epochz=2"])  # nothing is trained yet
    study_command.main([*TWO, *output, "--print", "--trainer.max_epochs=2"])
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").write_text("weights")
    with pytest.raises(ValueError, match=r"max_epochs=2.*max_epochs=3"):
        study_command.main([*TWO, *output, "--print", "--trainer.max_epochs=3"])
    (tmp_path / "out" / SETTINGS).write_text('{"half')
    with pytest.raises(ValueError, match=r"study\.json is damaged"):
        study_command.main([*TWO, *output, "--print"])
    run = tmp_path / "other" / "diff_vit_debug" / "seed0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    with pytest.raises(ValueError, match="seed0"):
        study_command.main([*TWO, "--output", str(tmp_path / "other"), "--print"])


def test_two_studies_cannot_use_one_folder_at_once(tmp_path):
    first, second = (Study(["vision/debug.yaml"], tmp_path, [f"--trainer.max_epochs={n}"]) for n in (1, 2))
    with first.claim(), pytest.raises(ValueError, match="running"), second.claim():
        pass
    assert "max_epochs=1" in (tmp_path / SETTINGS).read_text()
    with second.claim():
        assert "max_epochs=2" in (tmp_path / SETTINGS).read_text()


class Parsed(FitCLI):
    """The CLI up to the instances: nothing is run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("clip/debug.yaml", "CLIP-debug"),
        ("language/debug.yaml", "diffv2-debug"),
        ("vision/debug.yaml", "diff_vit_debug"),
    ],
)
def test_a_command_of_each_kind_of_recipe_is_one_of_fit(config, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = Study([config], Path("out"), ["--model.num_classes=10"] if model.startswith("diff_") else [])
    run = Run(model, 2, 0.25)
    with torch.device("meta"):
        cli = Parsed(resolve_recipes(of.command(run)))
    assert cli.model.name == model
    assert cli.config["fit"]["model"]["init_args"]["optimizer"]["lr"] == 0.25
    assert cli.datamodule.seed == 2
    assert Path(cli.trainer.logger.log_dir) == of.folder(run) == Path("out", model, "seed2")
    assert cli.config["fit"]["seed_everything"] == 2


PROGRAM = """
import os, pathlib, sys
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
folder = pathlib.Path(*(given[f"--trainer.logger.init_args.{part}"] for part in ("save_dir", "name", "version")))
if folder.name == "seed3": sys.exit("diffvision: error: no data\\nbye")
if folder.name == "seed4": os.kill(os.getpid(), 9)
if folder.name == "seed5": sys.exit()
if folder.name == "seed6": sys.exit(7)
if folder.name == "rate1.0": sys.exit("diffvision: error: steps 1 to 9 were not finite, over")
(folder / "checkpoints").mkdir(exist_ok=True)
(folder / "checkpoints/final.ckpt").write_text("weights")
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A study whose runs are a few lines (those of seeds 3 to 6 fail, a rate of 1 diverges), and the begun ones."""
    made, popen, begun = Study(["vision/debug.yaml"], tmp_path / "out", jobs=2), subprocess.Popen, []
    with made.claim():
        pass

    def begin(command, **settings):
        begun.append(command)
        return popen([sys.executable, "-c", PROGRAM, *command], **settings)

    monkeypatch.setattr("diffvision.study.runs.subprocess.Popen", begin)
    return made, begun


def test_runs_are_trained_once_and_the_first_says_what_the_others_take(made, capsys):
    of, begun = made
    runs = [Run(model, seed) for seed in (0, 1) for model in ("a", "b")]
    of.train(runs[:1])
    assert json.loads((of.output / SETTINGS).read_text())["bytes"] >= len("weights")
    of.train(runs)
    assert [of.is_done(run) for run in runs] == [True] * len(begun) == [True] * 4
    assert "left: about" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"a, seed 3: no data .*study\.log"):
        of.train([*runs, Run("a", 3)])
    capsys.readouterr()
    rates = [Run("a", TUNING_SEED, 1.0), Run("a", TUNING_SEED, 0.5)]
    of.train(rates, later=5)
    assert "5 runs left: about" in capsys.readouterr().out
    assert all(map(of.is_done, rates))
    with pytest.raises(ValueError, match="diverged"):
        of.rate_of("a", [1.0])


@pytest.mark.parametrize(("seed", "error"), [(3, "no data "), (4, "status -9"), (5, "dirpath"), (6, "status 7")])
def test_the_error_of_a_run_is_its_own_and_of_this_attempt(seed, error, made):
    of, _ = made
    folder = of.folder(Run("a", seed))
    folder.mkdir(parents=True)
    with (folder / LOG).open("w") as outlived:
        print("diffvision: error: of an earlier attempt", file=outlived, flush=True)
        with pytest.raises(ValueError, match=f"a, seed {seed}: .*{error}"):
            of.train([Run("a", seed)])
        print("it goes on", file=outlived, flush=True)
    assert "goes on" not in (folder / LOG).read_text()


def test_the_time_of_a_run_that_is_resumed_is_not_that_of_the_others(made):
    of, _ = made
    checkpoints = of.folder(Run("a", 0)) / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").write_text("half")
    for seed, known in ((0, False), (1, True)):
        of.train([Run("a", seed)])
        recorded_now = json.loads((of.output / SETTINGS).read_text())
        assert "bytes" in recorded_now
        assert ("seconds" in recorded_now) == known


def test_more_rates_are_tried_and_only_seeds_of_another_rate_are_refused(tmp_path, photos, monkeypatch, capsys):
    command = [*TWO, "--output", str(tmp_path / "out"), "--test", photos, "--print", "--rates", "1e-3"]
    study_command.main(command)
    of = Study([], tmp_path / "out")
    runs = [Run(model, TUNING_SEED, rate) for model in TWO[3:5] for rate in (1e-3, 2e-3)]
    for run in [*runs, Run("diff_vit_debug", 0)]:
        (of.folder(run) / "checkpoints").mkdir(parents=True)
        (of.folder(run) / "checkpoints" / "final.ckpt").write_text("weights")
        trained = {"model": {"init_args": {"optimizer": {"lr": 1e-3}}}}
        (of.folder(run) / "config.yaml").write_text(yaml.safe_dump(trained))
    scores = {"rate0.001": 0.5, "rate0.002": 0.25}
    monkeypatch.setattr("diffvision.opening.run_folders.best_score", lambda folder: scores[folder.name])
    study_command.main([*command, "2e-3"])
    assert capsys.readouterr().out.count("lr=0.001 ") == 2 + 1  # rates of the first command, and a seed
    scores["rate0.002"] = 0.75
    with pytest.raises(ValueError, match=r"seed0 was trained .*0\.001.* 0\.002"):
        study_command.main([*command, "2e-3"])
    with pytest.raises(ValueError, match=r"other settings \(rates\)"):
        study_command.main(command[:-2])


def test_a_disk_that_is_too_small_is_refused_before_a_run_begins(made):
    of, begun = made
    of.train([Run("a", 0)])
    file = of.output / SETTINGS
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bytes": of.free()}))
    with pytest.raises(OSError, match=r"2 runs need .* free"):
        of.train([Run("a", 0), Run("a", 1), Run("a", 2)])
    assert len(begun) == 1


@pytest.mark.parametrize(("mode", "best"), [("max", 0.002), ("min", 0.001)])
def test_the_rate_with_the_best_value_of_the_watched_metric_is_taken(mode, best, tmp_path, capsys):
    of = Study([], tmp_path)
    for rate, score in ((0.001, 0.25), (0.002, 0.5), (0.004, float("nan"))):
        folder = of.folder(Run("a", TUNING_SEED, rate))
        (folder / "checkpoints").mkdir(parents=True)
        state = {"monitor": "val/x", "best_model_path": "best.ckpt", "best_model_score": torch.tensor(score)}
        key = ModelCheckpoint(monitor="val/x", mode=mode).state_key
        torch.save({"callbacks": {key: state}, "global_step": 3}, folder / "checkpoints" / "best.ckpt")
        watching = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/acc1", "mode": "max"}}]
        (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": watching}}))
    assert of.rate_of("a", [0.001, 0.002, 0.004]) == best
    assert ("edge" in capsys.readouterr().out) == (best == 0.001)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_study_that_was_stopped_resumes_and_compares(tmp_path, capsys):
    """SIGTERM stops its first run, which the same command resumes; what is finished is not trained again."""
    digits, output = tmp_path / "digits", tmp_path / "out"
    make_digits(digits, copies=1)
    command = ["study", "--config", "vision/debug.yaml", "--models", "diff_vit_debug", "--twin", "--seeds", "1"]
    command += ["--output", str(output), f"--data.train={digits}/train", f"--data.evaluation={digits}/zero_shot"]
    command += ["--trainer.max_epochs=2", "--data.batch_size=8", "--trainer.log_every_n_steps=1"]
    command += ["--trainer.limit_train_batches=15", "--model.optimizer.warmup_epochs=0.1"]
    stopped = subprocess.Popen([sys.executable, "-m", "diffvision", *command])
    first = output / "plain_vit_debug" / "seed0"
    while stopped.poll() is None and not (first / "metrics.csv").is_file():
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == 128 + signal.SIGTERM
    assert any((first / "checkpoints").glob("*.ckpt"))
    assert not (first / "checkpoints" / "final.ckpt").exists()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "resuming from" in (first / LOG).read_text()
    assert "acc1" in out
    assert "GiB in training" in out
    assert len(list(output.rglob("final.ckpt"))) == 2
    report = json.loads((output / "report.json").read_text())
    assert [one["label"] for one in report["models"]] == ["plain_vit_debug", "diff_vit_debug"]
    assert (output / "report.html").stat().st_size > 10_000
    assert main([*command, "--print"]) == 0
    assert "all are finished" in capsys.readouterr().out
