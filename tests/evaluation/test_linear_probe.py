"""Logistic regression against scikit-learn's, the choice of its cost, and the probe of several kinds of models."""

import numpy as np
import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from diffvision.evaluation.linear_probe import choose_cost, linear, logistic_regression
from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import evaluate


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    x = torch.tensor(data.data / np.linalg.norm(data.data, axis=1, keepdims=True), dtype=torch.float64)
    return x, torch.tensor(data.target)


@pytest.mark.quick("1e-06-dtype0", "1.0-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cost", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_reaches_scikit_learns_objective(digits, cost, dtype):
    x, y = digits[0][:600], digits[1][:600]

    def objective(weight, bias):
        return float(cost * F.cross_entropy(linear(x, weight, bias), y, reduction="sum") + weight.square().sum() / 2)

    weight, bias = logistic_regression(x.to(dtype), y, 10, cost)
    assert weight.dtype == bias.dtype == dtype
    assert not weight.requires_grad
    reference = LogisticRegression(C=cost, max_iter=20_000, tol=1e-10).fit(x.numpy(), y.numpy())
    least = objective(torch.tensor(reference.coef_), torch.tensor(reference.intercept_))
    assert objective(weight.double(), bias.double()) == pytest.approx(least, rel=1e-6)
    ours = linear(x, weight.double(), bias.double()).softmax(1)
    torch.testing.assert_close(ours, torch.tensor(reference.predict_proba(x.numpy())), atol=1e-4, rtol=0)


def test_a_fit_that_has_not_converged_warns(digits):
    with pytest.warns(UserWarning, match=r"cost 1e\+06 has not converged in 40"):
        logistic_regression(digits[0][:600], digits[1][:600], 10, 1e6, max_iter=40)


def test_fits_within_inference_mode(digits):
    with torch.inference_mode():
        x = digits[0][:100].float() * 1.0
        weight, bias = logistic_regression(x, digits[1][:100], 10, 100.0)
        assert (linear(x, weight, bias).argmax(1) == digits[1][:100]).float().mean() > 0.95


def test_the_cost_is_searched_to_an_eighth_of_a_decade():
    tried = []

    def fit(x, y, cost):
        tried.append(cost)
        wrong = abs(np.log10(cost) - 0.9)  # the best is 10^0.9; each 0.05 decade off costs one of 200 samples
        return torch.tensor([[0.0], [1.0]]), torch.tensor([wrong * 20, 0.0])

    held = torch.linspace(0, 200, 201)[:, None], torch.ones(201, dtype=torch.int64)
    cost = choose_cost(fit, (held[0], held[1]), held)
    assert abs(np.log10(cost) - 0.9) <= 0.125
    assert len(tried) == len(set(tried)) <= 15


def test_probe_of_a_known_model(circle, to_tensor, classified):
    metrics = evaluate(circle, classified, ["linear_probe"], transform=to_tensor)
    assert metrics["linear_probe/memory/acc1"] == 7 / 8
    assert metrics["linear_probe/memory/cost"] > 0


def test_a_validation_split_is_used_and_then_fitted_on(circle, to_tensor, classified):
    classified.rows["val"] = [(60, 0)] * 4
    evaluate(circle, classified, ["linear_probe"], transform=to_tensor)
    assert sorted(classified.reads) == ["test", "train", "val"]


def test_features_are_read_once_for_all_tasks(circle, to_tensor, numbers, classified):
    tasks = ["zero_shot", "linear_probe", "fewshot_k", "fewshot_episodes"]
    options = Options(ways=3, episodes=10, fewshot_k=2)
    metrics = evaluate(circle, classified, tasks, transform=to_tensor, tokenizer=numbers, options=options)
    assert sorted(classified.reads) == ["test", "train"]
    assert {key.partition("/")[0] for key in metrics} == set(tasks)


@pytest.mark.parametrize("name", ["diff_vit_debug", "convnext_atto", "visual", "trunk"])
def test_probes_take_timm_models_and_image_towers(name, memory_folder):
    if name in ("visual", "trunk"):
        model = open_clip.create_model("DiffCLIP-debug").visual
        model = model.trunk if name == "trunk" else model
    else:
        model = timm.create_model(name)
    rows = [(grey, int(grey > 99)) for grey in range(0, 200, 16)]
    folder = memory_folder("zero_shot", {"train": rows, "test": rows})

    def transform(image):
        return torch.full((3, 32, 32), image.getpixel((0, 0))[0] / 128 - 1)

    metrics = evaluate(model, folder, ["linear_probe"], transform=transform, options=Options(probe_cost=1e4))
    assert metrics["linear_probe/memory/acc1"] > 0.8


def test_a_model_without_features(memory_folder):
    folder = memory_folder("zero_shot", {"train": [(1, 0)], "test": [(1, 0)]})
    with pytest.raises(ValueError, match="Identity gives no features"):
        evaluate(torch.nn.Identity(), folder, ["linear_probe"], transform=lambda image: torch.zeros(3, 2, 2))


def test_too_few_samples_to_choose_the_cost_on(circle, to_tensor, memory_folder):
    rows = [(10, 0), (200, 1)]
    folder = memory_folder("zero_shot", {"train": rows, "test": rows})
    with pytest.raises(ValueError, match="give probe_cost"):
        evaluate(circle, folder, ["linear_probe"], transform=to_tensor)
    metrics = evaluate(circle, folder, ["linear_probe"], transform=to_tensor, options=Options(probe_cost=10.0))
    assert metrics["linear_probe/memory/acc1"] == 1.0
