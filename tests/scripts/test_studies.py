"""Studies on a few samples: a run has all its numbers, and a report calls nothing better that it cannot."""

import dataclasses
import itertools
import json
import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch

import clip
import clip_control
import cures
import grid
import vision
from grid import Difference, Grid, Run, best_rate, contrasts, holm


def made(folder, **metrics):
    """A grid of two families with runs of two seeds, their metric `right` given by family, rate and seed."""
    runs = Grid(folder, ("plain", "other"), (1e-3, 2e-3), ("right",), (1, 2), epochs=1, shared=True)
    for run in runs.tuning():
        write(runs, run, 0.5 if run.rate == metrics["best"][run.family] else 0.4)
    for run in runs.confirming():
        write(runs, run, metrics[run.family][run.seed - 1])
    return runs


def write(runs, run, value, diverged=""):
    numbers = {"diverged": diverged, "seconds": 1, "validation": {"right": value}, "test": {"right": value}}
    (runs.results / f"{run.name}.json").write_text(json.dumps(numbers))


def test_a_difference_whose_interval_includes_zero_is_not_significant(tmp_path):
    best = {"plain": 1e-3, "other": 2e-3}
    runs = made(tmp_path, best=best, plain=(0.50, 0.60), other=(0.55, 0.60))
    assert runs.chosen("other") == 2e-3
    assert len(runs.confirming()) == 6
    assert str(runs.differences("right")["other"]) == "+2.5 [-29.3, +34.3] n.s."
    made(tmp_path, best=best, plain=(0.50, 0.60), other=(0.41, 0.50))
    assert str(runs.differences("right")["other"]) == "-9.5 [-15.9, -3.1] lower (p 0.033)"
    assert str(Difference(9.5, 6.4, 0.06)) == "+9.5 [+3.1, +15.9] unclear (p 0.06)"
    assert str(Difference(*grid.paired_interval([2.0, 2.0]))) == "+2.0 [+2.0, +2.0] higher (p 0)"  # no spread
    write(runs, Run("other", 2e-3, 1), 0.41, diverged="the loss is nan")
    assert runs.differences("right") == {}  # one seed is left
    assert "| other | 50.0 |  |" in runs.table(["right"])
    assert "1 diverged" in runs.describe()


@pytest.mark.parametrize("differences", [(-0.25, -0.25, -0.25), (0.5, 0.5), (-1.0, -2.0, -4.0), (0.0, 1.0, -1.0)])
def test_p_of_paired_differences_is_scipys(differences):
    """Equal differences are the test's limit."""
    with np.errstate(divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no spread
        expected = scipy.stats.ttest_1samp(differences, 0.0).pvalue
    assert grid.paired_interval(differences)[2] == pytest.approx(expected)
    assert grid.paired_interval([0.0] * len(differences)) == (0.0, 0.0, 1.0)


def test_a_run_that_is_done_is_not_trained_again(tmp_path):
    runs, trained = Grid(tmp_path, ("plain",), (1e-3,), ("right",), (1,), 1), []

    def train(run):
        trained.append(run)
        return {"diverged": "", "validation": {"right": 0.5}}

    runs.train(runs.tuning(), train, (1, 2))
    assert not trained
    for _ in range(2):
        runs.train(runs.tuning(), train)
    assert trained == [Run("plain", 1e-3, 100)]
    with pytest.raises(SystemExit, match="learning rate"):
        Grid(tmp_path, ("plain",), (1e-3, 2e-3), ("right",), (1,), 1).confirming()


def test_the_best_rate_of_four_is_a_parabolas_vertex():
    rates = (1e-3, 2e-3, 4e-3, 8e-3)
    assert best_rate({rate: -((math.log(rate / 3e-3)) ** 2) for rate in rates}) == pytest.approx(3e-3)
    assert best_rate({rate: math.log(rate) for rate in rates}) == 8e-3
    # One that is far off has no say.
    assert best_rate({rate: -((math.log(rate / 3e-3)) ** 2) for rate in rates} | {6e-2: -99}) == pytest.approx(3e-3)
    assert best_rate({1e-3: 0.5, 2e-3: 0.7, 4e-3: 0.6}) == 2e-3


def test_holms_correction_multiplies_p_by_rank():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


@pytest.fixture
def emoji(tmp_path):
    """Pictures of random pixels, of four emoji in each folder."""

    def pictures(count):
        return torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8)

    names = ["key", "bell", "ox", "sun"]
    captions = [[f"a picture of {name}", name] for name in names] * 32
    content = {"images": {"train": pictures(128)}, "captions": captions, "mean": 0.5, "std": 0.3}
    for folder, split in itertools.product(clip.FOLDERS, clip.SPLITS):
        shown = f"{folder}/{split}"
        content["images"][shown] = pictures(4)
        content[shown] = [*range(4)] if folder.startswith("zero_shot") else [f"a picture of {name}" for name in names]
        content[f"{folder}/names"] = names
        content[f"{shown}/kinds"] = ["colour", "gender"]
    torch.save(content, tmp_path / "emoji.pt")
    return tmp_path / "emoji.pt"


@pytest.fixture
def fashion(tmp_path):
    images, labels = torch.randint(0, 256, (128, 28, 28), dtype=torch.uint8), torch.arange(128) % 10
    few = images[:20], labels[:20]
    torch.save({"train": (images, labels), "validation": few, "test": few}, tmp_path / "fashion.pt")
    return tmp_path / "fashion.pt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "data", "secondary"), [(clip, "emoji", "text score, colour"), (vision, "fashion", "noise 0.5")]
)
def test_a_study_of_images_in_its_quick_form(study, data, secondary, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    file = request.getfixturevalue(data)
    draw = getattr(study, "draw", None)

    def run(what, *arguments):
        arguments = [what, "--quick", f"--data={file}", *(["--images=."] if draw else []), *arguments]
        settings = {"trainer": study.trainer, "report": study.report, "draw": draw}
        grid.run_study(study.GRID, None, make_data=None, **settings, arguments=arguments)

    for what in ("tune", "train"):
        run(what, "--part", "1", "2")
        run(what)
    capsys.readouterr()
    run("report")
    printed, quick = capsys.readouterr().out, study.GRID.quick()
    runs = len(quick.tuning()) + 2 * len(study.FAMILIES)
    assert f"{runs} runs; {runs} are done, 0 diverged" in printed
    assert printed.count("| plain |") == printed.count("| at its best learning rate |") >= 2
    assert "nan" not in printed
    first = quick.numbers(quick.confirming()[0])
    assert {*study.PRIMARY, *study.SECONDARY, secondary} <= set(first["test"])
    again = study.trainer(file, 1)(quick.confirming()[0])
    assert {**first, "seconds": 0, "learned": 0} == {**again, "seconds": 0, "learned": 0}
    assert len(list(tmp_path.glob("*.svg"))) == bool(draw)


def test_calibration_error():
    logits = torch.tensor([[0.0, 100.0], [0.0, 100.0], [math.log(3), 0.0], [math.log(3), 0.0]])
    assert vision.calibration_error(logits, torch.tensor([1, 1, 0, 1])) == pytest.approx(0.5 * 0.25)


# ---- cures ---------------------------------------------------------------------------------------------------------


def test_rivals_have_the_parameters_of_plain():
    plain, *rivals = (
        sum(part.numel() for part in cures.FAMILIES[name].create(clip.SIZE, clip.PATCH).parameters())
        for name in ("plain", *cures.RIVALS)
    )
    assert rivals == pytest.approx([plain] * 2, rel=4e-3)


def test_contrasts_are_the_effects_of_a_factorial():
    """With a gate 3 more, with a difference 2 less, with both 1.5 more; the gate's effect differs by seed."""
    values = {
        (gate, registers, difference): {
            seed: 10 * seed + (3 + 0.1 * (seed - 3)) * gate - 2 * difference + 1.5 * gate * difference
            for seed in range(1, 6)
        }
        for gate, registers, difference in cures.CELLS.values()
    }
    found = contrasts(values, cures.FACTORS)
    expected = {
        "gate": 3 + 1.5 / 2,
        "registers": 0,
        "difference": -2 + 1.5 / 2,
        "gate x registers": 0,
        "gate x difference": 1.5,
        "registers x difference": 0,
    }
    assert {name: one.mean for name, one in found.items()} == pytest.approx(expected, abs=1e-9)
    assert " higher (p " in str(found["gate"])
    # Half of the interval: t of 4 degrees of freedom times the standard error of 0.1 x (-2, ..., 2).
    assert found["gate"].width == pytest.approx(2.776 * 0.1 * math.sqrt(2.5 / 5), rel=1e-3)
    without = {cell: of for cell, of in values.items() if not cell[1]}
    assert contrasts(without, cures.FACTORS).keys() == {"gate", "difference", "gate x difference"}


@pytest.mark.slow
def test_the_cells_of_cures_have_equal_parameters():
    table = 3_917 * 64  # of the tokens that occur in the study's captions
    sizes, own = {}, {}
    for family, (gate, has_registers, difference) in cures.CELLS.items():
        model = cures.FAMILIES[family].create(clip.SIZE, clip.PATCH)
        sizes[family] = table + sum(p.numel() for name, p in model.named_parameters() if "token_emb" not in name)
        own[family] = sizes[family] - 4 * 64 * has_registers
        variants = {layer.variant for layer in model.modules() if hasattr(layer, "variant")}
        assert variants == {("standard", "v2", "gated", "v2_gated")[2 * gate + difference]}
    assert max(own.values()) < 1.005 * min(own.values())
    recorded = [json.loads(path.read_text()) for path in clip.GRID.results.with_name("cures").glob("*/*-*.json")]
    assert recorded
    assert all(sizes[one["family"]] == one["parameters"] for one in recorded)


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        pytest.param((0.1, 0.1, 0.5), "better", marks=pytest.mark.slow),
        pytest.param((0.1, 0.5, 0.1), "not shown", marks=pytest.mark.slow),
        ((0.3, 0.3, 0.3), "level"),
    ],
)
def test_the_control_on_emoji_states_what_its_rule_says(shares, word, tmp_path, capsys):
    study = dataclasses.replace(clip_control.GRID, results=tmp_path)
    for run in study.tuning():
        numbers = {"diverged": "", "validation": {"image R@1": 0.1 + 0.01 * (run.rate == 1e-3)}}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers))
    clip_control.report(study)
    assert "no statement yet" in capsys.readouterr().out
    generator = np.random.default_rng(0)
    for run in study.confirming():
        share = dict(zip(("plain", "gate", "V2"), shares, strict=True))[run.family]
        right = np.arange(1000) < 1000 * share if word == "level" else generator.random(1000) < share
        numbers = {"diverged": "", "pictures": 1000, "hits": np.flatnonzero(right).tolist(), "processor": "one"}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers))
    clip_control.report(study)
    assert f"V2: {word}." in capsys.readouterr().out
    (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers | {"processor": "another"}))
    clip_control.report(study)
    assert "no statement yet" in capsys.readouterr().out
