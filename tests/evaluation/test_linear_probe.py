"""The objective of scikit-learn's regression, the choice of its cost, and the probe of several kinds of models."""

import numpy as np
import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from diffvision.evaluation import linear_probe as probing
from diffvision.evaluation.linear_probe import choose_cost, fit_probe, predict_logits
from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import evaluate


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    x = torch.tensor(data.data / np.linalg.norm(data.data, axis=1, keepdims=True), dtype=torch.float64)
    return x, torch.tensor(data.target)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("cost", [1e-3, 1.0, 1e3])
def test_minimises_softmax_s_objective(digits, classes, cost):
    x, y = (of[digits[1] < classes][:300] for of in digits)
    probe = fit_probe(x, y, cost)
    weight, bias = torch.tensor(probe.coef_), torch.tensor(probe.intercept_)
    if classes == 2:  # one vector in scikit-learn
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    weight.requires_grad_(), bias.requires_grad_()
    logits = x @ weight.T + bias
    (cost * F.cross_entropy(logits, y, reduction="sum") + weight.square().sum() / 2).backward()
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-5 * cost * len(x)
    torch.testing.assert_close(predict_logits(probe, x, classes), logits.detach().log_softmax(1).float())


def test_classes_without_training_samples_are_never_predicted(digits):
    x, y = digits[0][:100], digits[1][:100]
    logits = predict_logits(fit_probe(x[y != 3], y[y != 3], 1.0), x, 11)
    assert logits.shape == (100, 11)
    assert logits[:, [3, 10]].eq(-torch.inf).all()


def test_the_cost_is_searched_to_an_eighth_of_a_decade(monkeypatch):
    tried = []

    def logits_at(cost, x, classes):
        tried.append(cost)
        wrong = round(abs(np.log10(cost) - 0.9) * 20)  # the best is 10^0.9; each 0.05 decade off costs a sample
        return F.one_hot((torch.arange(len(x)) >= wrong).long(), 2).float()

    monkeypatch.setattr(probing, "fit_probe", lambda x, y, cost: cost)
    monkeypatch.setattr(probing, "predict_logits", logits_at)
    held = torch.zeros(201, 1), torch.ones(201, dtype=torch.int64)
    cost = choose_cost(held, held)
    assert abs(np.log10(cost) - 0.9) <= 0.125
    assert len(tried) == len(set(tried)) <= 15


def test_features_are_read_once_for_all_tasks(circle, to_tensor, numbers, classified):
    classified.rows["val"] = [(60, 0)] * 4
    tasks = ["zero_shot", "linear_probe", "fewshot_k", "fewshot_episodes"]
    options = Options(ways=3, episodes=10, fewshot_k=2)
    metrics = evaluate(circle, classified, tasks, transform=to_tensor, tokenizer=numbers, options=options)
    assert sorted(classified.reads) == ["test", "train", "val"]  # the cost is chosen on the last one
    assert {key.partition("/")[0] for key in metrics} == set(tasks)
    assert metrics["linear_probe/memory/acc1"] == 1.0  # of grey 60, too, since that split is fitted on then
    assert metrics["linear_probe/memory/cost"] > 0


@pytest.mark.parametrize("name", ["diff_vit_debug", "convnext_atto", "visual", "trunk"])
def test_probes_take_timm_models_and_image_towers(name, memory_folder):
    tower = open_clip.create_model("DiffCLIP-debug").visual
    model = {"visual": tower, "trunk": tower.trunk}.get(name) or timm.create_model(name)
    rows = [(grey, int(grey > 99)) for grey in range(0, 200, 16)]
    folder = memory_folder("zero_shot", {"train": rows, "test": rows})

    def transform(image):
        return torch.full((3, 32, 32), image.getpixel((0, 0))[0] / 128 - 1)

    metrics = evaluate(model, folder, ["linear_probe"], transform=transform, options=Options(probe_cost=1e4))
    assert metrics["linear_probe/memory/acc1"] > 0.8
