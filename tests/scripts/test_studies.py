"""Studies on a few samples: a run has all its numbers, and a report calls nothing better that it cannot."""

import dataclasses
import importlib.util
import itertools
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from fashion_files import write_miniature

import arithmetic
import cache_pruning
import clip
import clip_control
import common_mode
import controls
import grid
import language_grid
import scaling
import seeds
import small_language
import vision
from common_mode import COLOURS, FACTORS, Data
from diffvision.data.datasets.arithmetic import make_arithmetic
from diffvision.nn import ATTENTION
from grid import Difference, Grid, Run, best_rate, contrasts, holm

_SPEC = importlib.util.spec_from_file_location("cures", Path(clip.__file__).with_name("cures.py"))
cures = importlib.util.module_from_spec(_SPEC)  # a benchmark and a picture have the same name
_SPEC.loader.exec_module(cures)
CONTROLS = {name: ATTENTION.pop(name) for name in ("v1_without_difference", "v1_free", "v1_without_factor")}


@pytest.fixture(autouse=True, scope="module")
def _controls():
    """Have the variants of the study `controls` in these tests alone: tests of attention run over the table."""
    ATTENTION.update(CONTROLS)
    yield
    for name in CONTROLS:
        del ATTENTION[name]


@pytest.fixture
def file(tmp_path):
    """Scenes of random pixels."""
    values = list(itertools.product(*FACTORS.values()))[::7]
    truth = [
        {
            "garments": [{"kind": kind, "colour": colour}],
            "background": background,
            "count": 1 + number % 3,
            "layout": ("middle", "top left")[number % 2],
        }
        for number, (kind, colour, background) in enumerate(values + values)
    ]
    names = ("single/train", "single/validation", "single/test", "colours/validation", "colours/test")
    names += ("several/validation", "several/test")
    images = {name: torch.randint(0, 256, (len(truth), 3, 48, 48), dtype=torch.uint8) for name in names}
    torch.save({"images": images, "truth": dict.fromkeys(names, truth), "mean": 0.5, "std": 0.3}, tmp_path / "data.pt")
    return tmp_path / "data.pt"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "row_sum"), [("plain", 1.0), ("V1 0.8", 0.2), ("DINT 0.8", 1.0), ("VCA", None)])
def test_a_run_of_the_common_mode(family, row_sum, file):
    numbers = common_mode.train(Run(family, 1e-4, 1), Data(file), epochs=1)
    assert not numbers["diverged"]
    assert set(common_mode.PRIMARY) <= set(numbers["test"])
    assert all(set(row) == {"mean component", *FACTORS, "layout", "count"} for row in numbers["layers"])
    assert len(numbers["layers"]) == 4
    assert numbers["row sums"] == ([] if row_sum is None else [pytest.approx(row_sum, abs=0.15)] * 4)


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


def test_what_is_no_share_is_printed_as_it_is(tmp_path):
    runs = Grid(tmp_path, ("plain", "other"), (1e-3,), ("right",), (1, 2), epochs=1, digits={"loss": 3})
    for run in [*runs.tuning(), *(Run(family, 1e-3, seed) for family in runs.families for seed in runs.seeds)]:
        loss = 2.5 if run.family == "plain" else 2.4 + run.seed / 1000
        numbers = {"diverged": "", "seconds": 1, "validation": {"right": 0.5}, "test": {"right": 0.5, "loss": loss}}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(numbers))
    table = runs.table(["right", "loss"])
    assert "| plain | 50.0 ± 0.0 |  | 2.500 ± 0.000 |  |" in table
    assert "| 2.401 ± 0.001 | -0.099 [-0.105, -0.092] lower" in table


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


def test_captions_name_a_share_of_what_is_there(file):
    data = Data(file)
    named = [any(f" {colour} " in caption for colour in COLOURS) for caption in data.captions.distinct]
    assert 0 < sum(named) < len(named)


@pytest.fixture
def tokens(tmp_path):
    """Text in which each token is the one before it, plus one or two."""
    steps = torch.randint(1, 3, (300_000,), generator=torch.Generator().manual_seed(0))
    text = (steps.cumsum(0) % 64).to(torch.int16)
    torch.save({"train": text[:-5000], "validation": text[-4097:]}, tmp_path / "tokens.pt")
    return tmp_path / "tokens.pt"


@pytest.mark.nightly
@pytest.mark.parametrize("study", [scaling, controls], ids=["scaling", "controls"])
def test_a_study_of_language_models_in_its_quick_form(study, tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(language_grid, "RATES", (1e-3, 4e-3))
    monkeypatch.setattr(controls, "LENGTHS", (128, 256))
    whole = dataclasses.replace(getattr(study, "STUDY", language_grid.Study()), budgets=(2e11, 4e11), tuned_budget=2e11)

    def run(what, *arguments):
        measure = getattr(study, "measure", lambda model, data: {})
        arguments = [what, "--quick", f"--data={tokens}", "--images=.", *arguments]
        language_grid.run_study(whole, None, study.report, study.draw, measure, arguments)

    for what in ("tune", "train"):
        run(what, "--part", "1", "2")
        run(what)
    run("speed")
    capsys.readouterr()
    run("report")
    printed = capsys.readouterr().out
    runs = {"scaling": 3 * 3 + 3 * 3 * 2, "controls": 8 * 3 + 8 * 2}[study.__name__]
    assert f"{runs} runs; {runs} are done, 0 diverged" in printed
    assert printed.count("| V1 |") == {"scaling": 1 + 2 + 3 + 1 + 3, "controls": 1 + 1 + 3}[study.__name__]
    assert "nan" not in printed
    # Of a token, one of two follows.
    trained = whole.quick().trained()
    assert all(0.69 < point["loss"] < 7.5 for numbers in trained for point in numbers["points"])
    if study is controls:
        by_family = {numbers["family"]: numbers for numbers in trained}
        assert by_family["V1, lambda 0"]["lambda"] == [0, 0]
        assert by_family["plain"]["lambda"] == []
        assert all(0 < metrics["entropy"] <= 1 for metrics in by_family["V1"]["contexts"].values())
        assert all(0 <= metrics["answer mass"] < 0.2 for metrics in by_family["V1"]["contexts"].values())
    assert (tmp_path / f"{study.__name__}-quick.svg").is_file()


def test_a_branch_leaves_its_trunk_as_it_was(tokens):
    def train(lengths):
        torch.manual_seed(0)
        model = language_grid.FAMILIES["V2"].create("0.1M")
        trained = small_language.fit(model, small_language.Data(tokens), rate=1e-3, warmup=2, lengths=lengths, seed=1)
        return trained.branches[-1], model.state_dict()

    (alone, weights), (branched, others) = train([6]), train([2, 6])
    assert alone == branched
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("size", language_grid.SIZES)
def test_models_of_a_size_have_equal_parameters(size):
    counts = [family.parameters(size) for family in language_grid.FAMILIES.values()]
    assert max(counts) / min(counts) < 1.01


def point(family, size, seed, loss, budget=1e12):
    tokens = budget / 6 / size
    return dict(zip(("family", "size", "seed", "loss"), (family, f"{size}", seed, loss), strict=True)) | {
        "parameters": size,
        "tokens": tokens,
        "budget": budget,
    }


def test_the_best_size_is_a_parabolas_vertex_unless_it_is_the_smallest_or_the_largest():
    sizes = [1e5, 3e5, 8e5, 2e6]
    points = [point("plain", n, seed, seed + math.log(n / 5e5) ** 2) for n in sizes for seed in (1, 2)]
    best = scaling.best_of(points, "plain", 1e12)
    assert (best.size, best.losses, best.bound) == (pytest.approx(5e5), pytest.approx({1: 1, 2: 2}), "")
    # One that is far off has no say.
    points[0]["loss"] = points[1]["loss"] = 99
    assert scaling.best_of(points, "plain", 1e12).size == pytest.approx(5e5)
    falling = [point("plain", n, 1, -n) for n in sizes]
    assert scaling.best_of(falling, "plain", 1e12) == (2e6, {1: -2e6}, "≥")
    rising = [point("plain", n, 1, n) for n in sizes]
    assert scaling.best_of(rising, "plain", 1e12) == (1e5, {1: 1e5}, "≤")
    assert "≤ 0.10M" in "\n".join(scaling.loss_table(rising))


def test_how_much_of_x_gives_an_equal_loss():
    # The second needs half of the tokens, and the first twice as many as the second.
    tokens = [1e6, 2e6, 4e6]
    losses, better = [5 - math.log(n) / 10 for n in tokens], [5 - math.log(2 * n) / 10 for n in tokens]
    assert scaling.ratio_of(tokens, losses, tokens, better) == pytest.approx(0.5)
    assert scaling.ratio_of(tokens, better, tokens, losses) == pytest.approx(2)
    # The better one has no loss as high as the other's last.
    assert math.isnan(scaling.ratio_of(tokens, losses, tokens, [1, 0.9, 0.8]))
    assert scaling.interval([math.nan, 0.5]) == "out of range"
    assert scaling.interval([0.5, 0.5]) == "0.50 [0.50, 0.50]"


def test_the_fit_finds_the_multipliers_that_made_its_points():
    generator, points = np.random.default_rng(0), []
    for family, multiplier in (("plain", 1.0), ("V1", 0.8), ("V2", 1.3)):
        for n, seed, budget in itertools.product((1e5, 3e5, 8e5, 2e6), (1, 2, 3), language_grid.Study().budgets):
            tokens = budget / 6 / n
            loss = (1 + 30 * (multiplier * n) ** -0.3 + 60 * tokens**-0.28) * math.exp(generator.normal() * 1e-3)
            points.append(point(family, n, seed, loss, budget))
    best, error = scaling.fit_multipliers(points, 1)
    assert best == pytest.approx([0.8, 1.3], rel=0.03)
    assert error < 2e-3
    assert scaling.needed(np.array([0.8, 0.9])) == ["0.80", "0.90"]
    assert scaling.needed(np.array([20.08, 0.9])) == ["not identified"] * 2


def test_the_lowest_run_of_a_seed_may_be_of_another_size():
    losses = {("plain", 1e5): (3, 5), ("plain", 3e5): (4, 2), ("V1", 1e5): (4, 3), ("V1", 3e5): (9, 9)}
    points = [point(f, n, seed, loss) for (f, n), of in losses.items() for seed, loss in enumerate(of)]
    assert "V1 +1.000 [+1.000, +1.000] higher" in scaling.lowest_runs(points)


def test_parts_of_v1_are_what_their_names_say():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 64)
    layers = {
        family: controls.FAMILIES[family].create("0.1M").blocks[0].attn
        for family in ("V1", "V1, lambda 0", "V1, free lambda", "V1, no factor")
    }
    weights = layers["V1"].state_dict()
    for layer in layers.values():
        layer.load_state_dict({name: weights[name] for name in layer.state_dict() if name in weights}, strict=False)
    with torch.no_grad():
        layers["V1, free lambda"].lambda_scalar.copy_(layers["V1"].compute_lambda())
    outputs = {family: layer(x) for family, layer in layers.items()}
    torch.testing.assert_close(outputs["V1, free lambda"], outputs["V1"])
    torch.testing.assert_close(outputs["V1, no factor"] * (1 - layers["V1"].lambda_init), outputs["V1"])
    # With vectors and lambda_init of zero V1's lambda is zero, and its factor 1.
    layers["V1"].lambda_init = 0.0
    for vector in (layers["V1"].lambda_q1, layers["V1"].lambda_q2):
        vector.data.zero_()
    torch.testing.assert_close(outputs["V1, lambda 0"] / (1 - 0.2), layers["V1"](x), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """The file of the study of arithmetic, of few problems."""
    folder = tmp_path_factory.mktemp("arithmetic")
    make_arithmetic(folder, documents=160, steps=2, distractors=2, highest=30, evaluated=2)
    arithmetic.make_data(folder, folder / "data.pt")
    return folder / "data.pt"


def test_the_loss_of_worded_problems_is_that_of_their_solutions(problems):
    data = arithmetic.Data(problems)
    tokens, learned = next(data.batches(seed=1))
    row = data.tokenizer.decode(tokens[0][learned[0]].tolist())
    assert row.partition("\n####")[0].count(" = ") >= 1
    assert row.endswith(data.tokenizer.eos)
    assert "?" not in row
    torch.manual_seed(0)
    model = language_grid.FAMILIES["V2"].create("0.03M")
    with torch.no_grad():
        loss = arithmetic.loss_of(model, (tokens, learned))
        logs = model(tokens).log_softmax(-1)
    terms = [
        -logs[number, place - 1, tokens[number, place]]
        for number, place in itertools.product(range(tokens.shape[0]), range(1, tokens.shape[1]))
        if learned[number, place]
    ]
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    order = [tuple(row.tolist()) for batch, _ in data.batches(seed=2) for row in batch]
    assert len({tuple(token for token in row if token) for row in order}) == 160


@pytest.mark.nightly
def test_the_study_of_arithmetic_in_its_quick_form(problems, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arithmetic, "SIZE", "0.03M")
    monkeypatch.setattr(arithmetic, "QUICK_PROBLEMS", 64)
    for what in ("tune", "train"):
        arithmetic.main([what, "--quick", f"--data={problems}", "--part", "1", "2"])
        arithmetic.main([what, "--quick", f"--data={problems}"])
    capsys.readouterr()
    arithmetic.main(["grid", "--quick"])
    assert "12 runs, 12 are done; 0.0 core-hours are left" in capsys.readouterr().out
    arithmetic.main(["report", "--quick", "--images=."])
    printed = capsys.readouterr().out
    assert "12 runs; 12 are done, 0 diverged" in printed
    assert "| at its best learning rate | accuracy | from plain | more steps | from plain |" in printed
    assert printed.count("\n| 5 |") == 3
    assert "nan" not in printed
    assert (tmp_path / "arithmetic.svg").is_file()
    quick = arithmetic.GRID.quick()
    for run in quick.confirming():
        test = quick.numbers(run)["test"]
        assert sum(test[kind] for kind in ("accuracy", *arithmetic.KINDS[1:])) == pytest.approx(1, abs=1e-3)
        assert {"among 0", "among 8", "3 steps, 8 distractors", "more steps", "wrong first step"} <= set(test)


def test_tables_of_pruned_caches(capsys):
    metrics = {"nll/full": 2.0, "needle_agnostic/full": 0.9, "needle_aware/full": 0.8, "largest_ratio/snap": 0.75}
    metrics |= {"k95/0/48": 12.34, "gini/0/48": 0.5}
    for ratio, rise in (("0.5", -0.001), ("0.75", 0.01), ("0.9", 0.2)):
        metrics |= {f"nll_rise/snap/{ratio}": rise, f"needle_agnostic/snap/{ratio}": 0.25}
        metrics |= {f"needle_aware/snap/{ratio}": 1.0}
    cache_pruning.report({"plain-0": metrics})
    printed = capsys.readouterr().out
    assert "−" not in printed  # one seed has no intervals
    assert "| plain, 0 | 12.3 | 0.500 |" in printed
    assert "plain: loss 2.000, needles 90% (later), 80% (before)" in printed
    assert "| snap | -0.001 | +0.010 | +0.200 | 25 | 25 | 25 | 100 | 100 | 100 | 0.75 |" in printed
    names = [each for contrast in cache_pruning.CONTRASTS for each in contrast]
    others = {key.replace("snap", name): value for name in names for key, value in metrics.items() if "snap" in key}
    seeds = [metrics | others | {"nll_rise/diff/0.5": rise, "needle_aware/diff/0.9": rise} for rise in (0.0, 0.1)]
    cache_pruning.report({"plain-0": metrics, "plain-1": metrics, "V1-0": seeds[0], "V1-1": seeds[1]})
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| V1, diff − sum |"))
    assert row.split(" | ")[1] == "+0.051 [-0.584, +0.686]"  # 0.05 + 0.001, and 12.706 standard errors of 0.05
    assert row.split(" | ")[-1] == "-95 [-159, -31] |"
    assert "| plain, diff" not in row


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
