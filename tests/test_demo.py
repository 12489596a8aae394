import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures.image_attention import ImageAttention, Retrieved
from diffvision.data.datasets import digits
from diffvision.data.datasets.digits import combinations
from diffvision.demo import demo, runs
from diffvision.demo import image_demo as images
from diffvision.demo import run_tables as report
from diffvision.demo.pictures import ModelExamples
from diffvision.study import Run as Planned
from diffvision.training.recipes import recipe

LAYERS = ("visual.trunk.blocks.0.attn", "visual.trunk.blocks.1.attn", "transformer.resblocks.0.attn")


def run(model: str, seed: int) -> report.Run:
    logged = ["train/loss", "zero_shot/digits/acc1", "train/logit_scale"]
    logged += [f"lambda/{name}" for name in LAYERS] if model.startswith("Diff") else []
    rng = np.random.default_rng(seed)
    return report.Run(
        model=model,
        seed=seed,
        parameters=3_000_000,
        seconds=60.0,
        speed=1234.0,
        metrics=dict.fromkeys(images.COLUMNS.values(), 0.5 + 0.1 * seed),
        curves={key: Curve([10, 20, 30], rng.random(3).tolist()) for key in logged},
        folder=Path(model),
    )


def examples(model: str) -> ModelExamples:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    maps = rng.random((3 if "Diff" in model else 1, 4, 4))
    return ModelExamples(
        attention=[ImageAttention(picture, maps, "seven") for picture in pictures],
        retrieved=[Retrieved("a red <seven>", list(pictures), [False, True, False, False])],
        lam=0.2 if "Diff" in model else None,
    )


def page(seeds: int) -> str:
    all_runs = [run(model, seed) for seed in range(seeds) for model in images.MODELS]
    return images.page(all_runs, {model: examples(model) for model in images.MODELS}, Path("runs/demo"))


def test_report_holds_the_table_and_its_pictures():
    html = page(seeds=2)
    assert "55.0 ± 7.1" in html
    assert "3,000,000" in html
    assert "1,234" in html
    assert "a red &lt;seven&gt;" in html
    assert "a red <seven>" not in html
    assert len(re.findall("<svg", html)) >= 6
    # Fonts and images would be fetched from there.
    assert not re.search("(src|href)=.https?:", html)


def test_nothing_is_called_better_whose_interval_includes_zero():
    values = {
        "CLIP": {"a": [0.5, 0.7, 0.6], "b": [0.1, 0.11, 0.12]},
        "V1": {"a": [0.6, 0.5, 0.8], "b": [0.8, 0.81, 0.8]},
    }
    rows = {"retrieval": ("a", 100, 1), "zero-shot": ("b", 100, 1)}
    said = report.verdict(values, "CLIP", "V1", rows)
    assert re.search(r"Higher with V1 than with CLIP: zero-shot \(\+69\.3 \[67\.\d, 7\d\.\d\]\)\.", said)
    assert re.search(r"No significant difference[^:]*: retrieval \(\+3\.3 \[−", said)
    for seeds in (1, 2):
        few = {name: {key: of_key[:seeds] for key, of_key in metrics.items()} for name, metrics in values.items()}
        assert "neither model is called better" in report.verdict(few, "CLIP", "V1", rows)


def test_a_difference_of_percentages_ends_at_100():
    low = [float(low) for low in re.findall(r"\[−([\d.]+)", page(seeds=3))]
    assert low
    assert max(low) <= 100


def test_the_recipe_is_the_debug_configuration():
    settings = yaml.safe_load(recipe(images.RECIPE).read_text())
    assert settings["model"]["init_args"]["model"] == images.MODELS[1]


def test_seeds_are_checked_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="seeds must be 1 or more, got 0"):
        demo(str(tmp_path / "out"), seeds=0)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_dataset_is_made_anew(tmp_path):
    made = []

    def make(folder: str) -> None:
        Path(folder).mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.prepare(tmp_path / "digits", make)
    assert not (tmp_path / "digits").exists()
    for _ in range(2):
        runs.prepare(tmp_path / "digits", make)
    assert (tmp_path / "digits").is_dir()
    assert len(made) == 2


def test_parts_of_the_retrieved_images_that_are_right():
    """Features that hold the digit and the paper alone: every caption gets some image with these."""
    facts = combinations()
    labels = torch.eye(10)[[digit for digit, _, _ in facts]]
    papers = sorted({paper for _, _, paper in facts})
    known = torch.cat([labels, torch.eye(6)[[papers.index(paper) for _, _, paper in facts]]], dim=1)
    right = images.parts_right(known, known)
    assert right["colours/digit"] == right["colours/paper"] == 1
    assert right["colours/ink"] == pytest.approx(0.2)


@pytest.mark.nightly
def test_runs_are_trained_in_processes_that_print_little_and_evaluated_once(tmp_path, capfd):
    """What their fits print is in their logs, and the error of one that cannot be trained names it."""
    digits.make_digits(tmp_path / "digits", copies=1)
    arguments = [
        f"--data.init_args.train={tmp_path / 'digits/train'}",
        f"--data.init_args.evaluations=[{tmp_path / 'digits/zero_shot'}]",
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=3",
        "--trainer.log_every_n_steps=1",
    ]
    study = runs.study_of(images.RECIPE, tmp_path / "out", arguments)
    study.claim()
    planned, measured = [Planned("CLIP-debug", 0), Planned("DiffCLIP-debug-0.2", 0)], []
    study.train(planned)

    def measure(model):
        measured.append(model)
        return images.evaluate_on_digits(model, data=tmp_path / "digits")

    done = [runs.evaluated(study, run, measure) for run in planned]
    assert [run.curves["train/loss"].steps for run in done] == [[0, 1, 2]] * 2
    assert all(set(images.COLUMNS.values()) <= set(run.metrics) for run in done)
    assert all(run.seconds > 0 for run in done)
    out, err = capfd.readouterr()
    assert not err
    assert "DiffCLIP-debug-0.2, seed 0: step 3, loss " in out
    assert all(", seed 0: " in line and len(line) <= 80 for line in out.splitlines())
    study.train(planned)
    assert [runs.evaluated(study, run, measure) for run in planned] == done
    assert len(measured) == 2
    assert not any(capfd.readouterr())
    with pytest.raises(ValueError, match="no model 'DiffCLIP-debgu'"):
        study.train([Planned("DiffCLIP-debgu", 0)])


@pytest.mark.slow
def test_a_demo_of_one_epoch(tmp_path, capsys, monkeypatch):
    """The README's first command, with an eighth of its epochs; then read again."""
    train = images.train_on_digits
    monkeypatch.setattr(images, "train_on_digits", lambda *given: train(*given, "--trainer.max_epochs=1"))
    for _ in range(2):
        demo(str(tmp_path))
        assert re.search(r"zero-shot top-1\D+\d+\.\d\D+\d+\.\d", capsys.readouterr().out)
    assert (tmp_path / "report.html").stat().st_size > 50_000


@pytest.mark.nightly
def test_the_whole_demo(tmp_path, capsys):
    """The README's first command: both models trained and compared, and DiffCLIP at 85% or more; then read again."""
    demo(str(tmp_path))
    printed = capsys.readouterr().out
    demo(str(tmp_path))
    assert "zero-shot top-1" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 50_000
    accuracy = re.search(r"zero-shot top-1\D+([\d.]+)\D+([\d.]+)", printed)
    assert accuracy is not None
    assert float(accuracy[2]) >= 85.0
