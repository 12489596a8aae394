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
from fashion_files import write_miniature

import clip
import clip_control
import cures
import grid
import seeds
import small_language
import vision
from diffvision.models import language
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
    with pytest.raises(SystemExit, match="no learning rate is chosen yet"):
        Grid(tmp_path, ("plain",), (1e-3, 2e-3), ("right",), (1,), 1).confirming()


def test_a_family_may_have_fewer_seeds_and_another_ones_rate(tmp_path):
    families = {"plain": 2e-3, "other": 1e-3}
    runs = Grid(
        tmp_path, (*families, "third"), (1e-3, 2e-3), ("right",), (1, 2, 3, 4, 5), epochs=1, secondary=["third"]
    )
    runs = dataclasses.replace(runs, rate_of={"third": "other"})
    for run in runs.tuning():
        write(runs, run, 0.5 if run.rate == families[run.family] else 0.4)
    assert {run.family for run in runs.tuning()} == set(families)
    assert [run.seed for run in runs.confirming() if run.family == "third"] == [1, 2, 3]
    assert {run.rate for run in runs.confirming() if run.family == "third"} == {1e-3}
    assert len(runs.confirming()) == 13


def test_the_best_rate_of_four_is_a_parabolas_vertex():
    rates = (1e-3, 2e-3, 4e-3, 8e-3)
    assert best_rate({rate: -((math.log(rate / 3e-3)) ** 2) for rate in rates}) == pytest.approx(3e-3)
    assert best_rate({rate: math.log(rate) for rate in rates}) == 8e-3
    # One that is far off has no say.
    assert best_rate({rate: -((math.log(rate / 3e-3)) ** 2) for rate in rates} | {6e-2: -99}) == pytest.approx(3e-3)
    assert best_rate({1e-3: 0.5, 2e-3: 0.7, 4e-3: 0.6}) == 2e-3


def test_holms_correction():
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
        content[shown] = (
            list(range(4)) if folder.startswith("zero_shot") else [f"a picture of {name}" for name in names]
        )
        content[f"{folder}/names"] = names
        content[f"{shown}/kinds"] = ["colour", "gender"]
    torch.save(content, tmp_path / "emoji.pt")
    return tmp_path / "emoji.pt"


@pytest.fixture
def fashion(tmp_path):
    """Pictures of random pixels."""
    images, labels = torch.randint(0, 256, (128, 28, 28), dtype=torch.uint8), torch.arange(128) % 10
    few = images[:20], labels[:20]
    torch.save({"train": (images, labels), "validation": few, "test": few}, tmp_path / "fashion.pt")
    return tmp_path / "fashion.pt"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("study", "data", "secondary"), [(clip, "emoji", "text score, colour"), (vision, "fashion", "noise 0.5")]
)
def test_a_study_of_images_in_its_quick_form(study, data, secondary, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    file = request.getfixturevalue(data)
    draw = getattr(study, "draw", None)

    def run(what, *arguments):
        arguments = [what, "--quick", f"--data={file}", *(["--images=."] if draw else []), *arguments]
        grid.run_study(
            study.GRID, None, make_data=None, trainer=study.trainer, report=study.report, draw=draw, arguments=arguments
        )

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


def test_half_of_the_pictures_are_mirrored():
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 10:12, 10] = 1
    columns = vision.mirrored(images, torch.Generator().manual_seed(0)).sum((0, 1, 2)).nonzero().flatten()
    assert columns.tolist() == [10, 17]


def test_the_families_of_images_differ_by_their_attention_alone():
    models = {family: vision.create(family) for family in vision.FAMILIES}
    sizes = {family: sum(p.numel() for p in model.parameters()) for family, model in models.items()}
    assert max(sizes.values()) < 1.01 * min(sizes.values())
    assert all(model(torch.zeros(2, 1, 28, 28)).shape == (2, 10) for model in models.values())


def test_pictures_are_corrupted_as_they_say():
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 10:12, 10] = 1
    covered = vision.corrupted(torch.zeros(16, 1, 28, 28), "occlusion", 9)
    assert torch.equal(covered.sum((1, 2, 3)), torch.full((16,), 0.5 * 81))
    assert vision.corrupted(images, "noise", 0.3).std() > 0.1
    assert vision.corrupted(images, "blur", 1.0).max() < 0.5


def test_calibration_error():
    logits = torch.tensor([[0.0, 100.0], [0.0, 100.0], [math.log(3), 0.0], [math.log(3), 0.0]])
    assert vision.calibration_error(logits, torch.tensor([1, 1, 0, 1])) == pytest.approx(0.5 * 0.25)


class Counting:
    """Text in which each token is the one before it, plus one."""

    def batches(self, seed):
        draw = torch.Generator().manual_seed(seed)
        while True:
            yield (torch.randint(64, (2, 1), generator=draw) + torch.arange(17)) % 64

    def loss(self, model):
        with torch.no_grad():
            return small_language.loss_of(model, next(self.batches(0))).item()


def test_a_branch_leaves_its_trunk_as_it_was():
    def train(lengths):
        torch.manual_seed(0)
        model = language.create("diffv2-debug")
        trained = small_language.fit(model, Counting(), rate=1e-3, warmup=2, lengths=lengths, seed=1)
        return trained.branches[-1], model.state_dict()

    (alone, weights), (branched, others) = train([6]), train([2, 6])
    assert alone == branched
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_rates_that_were_tried(tmp_path):
    study = Grid(tmp_path, ("plain", "V1"), (1e-3, 2e-3), ("accuracy",), (1, 2), epochs=1)
    for run, accuracy in zip(study.tuning(), (0.5, 0.25, 0.75), strict=False):  # the last is not done
        (tmp_path / f"{run.name}.json").write_text(json.dumps({"validation": {"accuracy": accuracy}}))
    assert study.tuned(["accuracy"]).splitlines() == [
        "| learning rate | plain: accuracy | V1: accuracy |",
        "|---:|---:|---:|",
        "| 0.001 | 50.0 | 25.0 |",
        "| 0.002 | 75.0 |  |",
    ]


def test_models_of_several_seeds(tmp_path, capsys):
    models = {f"{name}-{seed}": {"2x1/correct": right, "2x1/distracted": 0.5, "2x1/fabricated": 0.5 - right}
              | {"2x1/malformed": 0.0}
              for name, rights in {"plain": (0.1, 0.2), "diff": (0.3, 0.5)}.items()
              for seed, right in enumerate(rights)}  # fmt: skip
    models["plain-0"] |= {"only": 0.123456789, "only_low": 0.1}
    models["plain-1"] |= {"only": None}
    file, saved = tmp_path / "recall_errors.json", tmp_path / "saved.json"
    file.write_text(json.dumps({"models": models, "options": {"facts": [2]}}))
    seeds.main([str(file), "2x1/*", "only", "--percent", "--save", str(saved)])
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "| metric | plain | diff | diff, from plain |"
    assert "| 2x1/correct | 15 (10, 20) | 40 (30, 50) | +25 [-39, +89] n.s. |" in rows
    assert "| only | 12 (12) |  |  |" in rows
    assert not any("malformed" in row for row in rows)
    content = json.loads(saved.read_text())
    assert content["options"] == {"facts": [2]}
    del models["plain-0"]["only_low"]
    assert content["models"] == models | {"plain-0": models["plain-0"] | {"only": 0.12346}}
    with pytest.raises(SystemExit, match="no metric is named nonsense"):
        seeds.main([str(file), "nonsense"])
    file.write_text(json.dumps({"models": {"plain-0": {"a": 1.0}}}))
    with pytest.raises(SystemExit, match="two or more of each NAME"):
        seeds.main([str(file), "a"])


# ---- cures ---------------------------------------------------------------------------------------------------------


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


def test_the_cells_of_cures_have_equal_parameters():
    models = {family: cures.FAMILIES[family].create(clip.SIZE, clip.PATCH) for family in cures.CELLS}
    table = 3_917 * 64  # of the tokens that occur in the study's captions
    sizes, own = {}, {}
    for family, model in models.items():
        counts = {name: p.numel() for name, p in model.named_parameters() if "token_emb" not in name}
        registers = sum(number for name, number in counts.items() if "reg_token" in name)
        sizes[family] = sum(counts.values()) + table
        own[family] = sizes[family] - registers
        gate, has_registers, difference = cures.CELLS[family]
        assert registers == 4 * 64 * has_registers
        variants = {layer.variant for layer in model.modules() if hasattr(layer, "variant")}
        assert variants == {("standard", "v2", "gated", "v2_gated")[2 * gate + difference]}
    assert max(own.values()) < 1.005 * min(own.values())
    recorded = [json.loads(path.read_text()) for path in clip.GRID.results.with_name("cures").glob("*/*-*.json")]
    assert recorded
    assert all(sizes[one["family"]] == one["parameters"] for one in recorded)


def test_overlaps_with_masks():
    masks = torch.zeros(3, 16, 16, dtype=torch.bool)
    masks[:, :8, 4:12] = True  # four patches of 4, in the first two rows
    scores = torch.zeros(3, 4, 4)
    scores[0, :2, 1:3] = 1
    scores[1, 2:, 1:3] = 1
    scores[2, :2, :2] = 1
    assert cures.overlaps(scores.flatten(1), masks).tolist() == pytest.approx([1, 0, 2 / 6])


def test_maps_are_compared_with_masks_once_a_run(tmp_path, capsys):
    source, models, data = write_miniature(tmp_path / "fashion"), tmp_path / "models", tmp_path / "data.pt"
    torch.save({"mean": 0.5, "std": 0.3}, data)
    models.mkdir()
    for family, rate in (("gate", 0.002), ("gate, registers, V2", 5e-4)):
        model = cures.FAMILIES[family].create(clip.SIZE, clip.PATCH)
        torch.save(model.state_dict(), models / f"{Run(family, rate, 1).name}.pt")
    weights = sorted(models.glob("*.pt"))

    def run():
        cures.segment(weights, source, data, tmp_path / "results", count=8)
        return capsys.readouterr().out

    assert [line.split()[0] for line in run().splitlines()] == [path.stem for path in weights]
    found = json.loads((tmp_path / "results" / "segmentation.json").read_text())
    assert 0 < found["chance"] < found["best"] < 1
    assert all(0 <= one["IoU"] <= found["best"] for one in found["runs"].values())
    assert run() == ""
    state = torch.load(weights[1])
    torch.save({name: 1.1 * value for name, value in state.items()}, weights[1])  # trained again
    assert run().startswith("gate-0.002-1 ")
    images, masks = cures.scenes(source, 8)
    assert images.shape == (8, 3, 64, 64)
    assert all(0.05 < share < 0.6 for share in masks.float().mean((1, 2)))
    rows = cures.class_rows(model.visual, images.float() / 255)
    assert rows.shape == (8, 64)  # patches alone, without four registers
    with pytest.raises(SystemExit, match="is a run of no cell"):
        cures.segment([data], source, data, tmp_path / "others", count=8)


def test_the_report_of_cures_has_sinks_and_masks_by_cell(tmp_path, capsys):
    cells = cures.grid_of(cures.WITHOUT_REGISTERS, tmp_path)
    metrics = dict.fromkeys([*clip.PRIMARY, *clip.SECONDARY], 0.25)

    def write(run):
        layers = {name: [0.125, 0.5, 0.25, 0.125] for name in cures.SINKS}
        numbers = {"diverged": "", "seconds": 9, "parameters": 1000, "FLOPs": 2000, "sinks": layers, "processor": "a"}
        numbers |= {
            "validation": metrics,
            "test": metrics | {"image R@1": 0.25 + 0.01 * run.seed * (run.family != "V2")},
        }
        (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers))

    for runs in (cells.tuning, cells.confirming):
        for run in runs():
            write(run)
    overlap = {run.name: {"IoU": 0.25 + 0.01 * run.seed} for run in cells.fresh("gate")}
    content = {"scenes": 8, "chance": 0.08, "best": 0.6, "runs": overlap}
    (tmp_path / "segmentation.json").write_text(json.dumps(content))
    cures.report(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| gate, V2 | 5 | "
        + " | ".join(f"{0.25 if name in ('value norm', 'row sum') else 0.5:.4f} ± 0.0000" for name in cures.SINKS)
        + " |"
        in lines
    )
    assert "| cell | runs | IoU, % (chance 8.0, best 60.0) |" in lines
    assert "| gate | 5 | 28.0 ± 1.6 |" in lines
    assert "| plain | 0 |  |" in lines
    assert "| gate x difference | +3.00 [+1.04, +4.96] higher (p 0.04) |" in lines
    assert "V2 minus plain alone, as in clip.py: -3.00 [-4.96, -1.04] lower (p 0.013)" in lines


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ((0.1, 0.1, 0.5), "better"),
        ((0.1, 0.5, 0.1), "not shown"),
        ((0.3, 0.3, 0.3), "level"),
        ((0.5, 0.5, 0.1), "not shown"),
    ],
)
def test_the_control_on_emoji_states_what_its_rule_says(shares, word, tmp_path, capsys):
    study = dataclasses.replace(clip_control.GRID, results=tmp_path)
    for run in study.tuning():
        shares_of = {"validation": {"image R@1": 0.1 + 0.01 * (run.rate == 1e-3) + 0.02 * (run.rate == 2e-3)}}
        (tmp_path / f"{run.name}.json").write_text(json.dumps({"diverged": "", **shares_of}))
    assert clip_control.FAMILIES["gate"].text_settings == cures.FAMILIES["gate"].text_settings
    clip_control.report(study)
    assert "unfinished: no statement yet" in capsys.readouterr().out
    generator = np.random.default_rng(0)
    for run in study.confirming():
        share = dict(zip(("plain", "gate", "V2"), shares, strict=True))[run.family]
        right = np.arange(1000) < 1000 * share if word == "level" else generator.random(1000) < share
        numbers = {"diverged": "", "pictures": 1000, "hits": np.flatnonzero(right).tolist(), "processor": "one"}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers))
    clip_control.report(study)
    assert f"V2: {word}." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="one"):
        study.train([], None)
