"""`diffvision study`: what it plans, refuses, resumes and compares."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from diffvision import study
from diffvision.cli import main
from diffvision.data.datasets.digits import make_digits
from diffvision.errors import Mistake
from diffvision.models.names import plain_twin, recorded
from diffvision.study import Run, Study
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
    "DiffCLIP-DINT-debug": "CLIP-debug",
    "DiffCLIP-V2-ViT-B-16": "CLIP-ViT-B-16",
    "SinkCLIP-ViT-S-16": "CLIP-ViT-S-16",
    "DnACLIP-debug": "CLIP-debug",
    "coda_vit_small_patch16_clip_224": "plain_vit_small_patch16_clip_224",
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


REFUSED = {
    # arguments -> what the error names
    "--seed_everything=3": "seed_everything",
    "--seed=7": "seed_everything",
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
    "--test nowhere": "test",
}


@pytest.mark.parametrize(("more", "named"), REFUSED.items())
def test_what_a_study_cannot_be_is_refused_before_anything_is_written(more, named, tmp_path):
    with pytest.raises((Mistake, ValueError, FileNotFoundError), match=named):
        study.main([*TWO, "--output", str(tmp_path / "out"), *more.split()])
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_settings_is_refused_and_more_seeds_and_models_are_not(tmp_path, capsys):
    printed = [*TWO, "--output", str(tmp_path / "out"), "--print"]
    study.main([*printed, "--trainer.max_epochs", "2"])
    more = ["--seeds", "2", "--models", "diff_vit_debug", "diffv2_vit_debug"]
    study.main([*printed, "--trainer.max_epochs=2", *more])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("diffvision fit --config=vision/debug.yaml ") for line in lines) == 2 + 4
    assert all(line.startswith(("#", "diffvision")) for line in lines)
    study.main([*printed, "--trainer.max_epochz=2"])  # nothing is trained yet
    study.main([*printed, "--trainer.max_epochs=2"])
    checkpoints = tmp_path / "out" / "diff_vit_debug" / "seed0" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").write_text("weights")
    with pytest.raises(ValueError, match=r"other settings \(settings\)"):
        study.main([*printed, "--trainer.max_epochs=3"])
    (tmp_path / "out" / study.SETTINGS).write_text('{"half')
    with pytest.raises(ValueError, match=r"study\.json is damaged"):
        study.main(printed)
    run = tmp_path / "other" / "diff_vit_debug" / "seed0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    with pytest.raises(ValueError, match="seed0"):
        study.main([*TWO, "--output", str(tmp_path / "other"), "--print"])


def test_two_studies_cannot_use_one_folder_at_once(tmp_path):
    first, second = (Study(["vision/debug.yaml"], tmp_path, [f"--trainer.max_epochs={n}"]) for n in (1, 2))
    with first.claim(), pytest.raises(ValueError, match="running"), second.claim():
        pass
    assert "max_epochs=1" in (tmp_path / study.SETTINGS).read_text()
    with second.claim():
        assert "max_epochs=2" in (tmp_path / study.SETTINGS).read_text()


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
    run = Run(model, 2)
    with torch.device("meta"):
        cli = Parsed(resolve_recipes(of.command(run)))
    assert cli.model.name == model
    assert cli.datamodule.seed == 2
    assert Path(cli.trainer.logger.log_dir) == of.folder(run) == Path("out", model, "seed2")
    assert cli.config["fit"]["seed_everything"] == 2


PROGRAM = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
if folder.name == 'seed3': sys.exit('diffvision: error: no data\\nbye')
if folder.name == 'seed4': os.kill(os.getpid(), 9)
if folder.name == 'seed5': sys.exit()
if folder.name == 'seed6': sys.exit(7)
(folder / 'checkpoints').mkdir(exist_ok=True)
(folder / 'checkpoints/final.ckpt').write_text('weights')
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A study whose runs are done by a few lines: those of seeds 3 to 6 fail. And the folders of those begun."""
    made, begun, popen = Study(["vision/debug.yaml"], tmp_path / "out", jobs=2), [], subprocess.Popen

    def start(command, **settings):
        name, version = (word.partition("=")[2] for word in command[-2:])
        begun.append(f"{name}/{version}")
        return popen([sys.executable, "-c", PROGRAM, str(tmp_path / "out" / name / version)], **settings)

    monkeypatch.setattr("diffvision.study.subprocess.Popen", start)
    return made, begun


def test_runs_are_trained_once(made, capsys):
    of, begun = made
    runs = [Run(model, seed) for seed in (0, 1) for model in ("a", "b")]
    of.train(runs[:1])
    of.train(runs)
    assert begun == ["a/seed0", "b/seed0", "a/seed1", "b/seed1"]
    out = capsys.readouterr().out
    assert "; 2 runs left" in out
    assert "; 1 run left" in out


@pytest.mark.parametrize(("seed", "error"), [(3, "no data "), (4, "status -9"), (5, "dirpath"), (6, "status 7")])
def test_the_error_of_a_run_is_its_own_and_of_this_attempt(seed, error, made):
    of, _ = made
    folder = of.folder(Run("a", seed))
    folder.mkdir(parents=True)
    with (folder / study.LOG).open("w") as outlived:
        print("diffvision: error: of an earlier attempt", file=outlived, flush=True)
        with pytest.raises(ValueError, match=rf"a, seed {seed}: .*{error}.*study\.log"):
            of.train([Run("a", seed)])
        print("it goes on", file=outlived, flush=True)
    assert "goes on" not in (folder / study.LOG).read_text()


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
    assert "resuming from" in (first / study.LOG).read_text()
    assert "acc1" in out
    assert "GiB in training" in out
    assert len(list(output.rglob("final.ckpt"))) == 2
    report = json.loads((output / "report.json").read_text())
    assert [one["label"] for one in report["models"]] == ["plain_vit_debug", "diff_vit_debug"]
    assert (output / "report.html").stat().st_size > 10_000
    assert main([*command, "--print"]) == 0
    assert "all are finished" in capsys.readouterr().out
