"""POPE for a model with scores: metrics by hand, thresholds, and a known model."""

import math

import pytest
import torch

from diffvision.evaluation.objects import best_threshold, presence_metrics
from diffvision.evaluation.per_sample import PerSample, means
from diffvision.evaluation.suite import EVALUATIONS, evaluate

#                              image 0   image 1   image 2   image 3
PRESENT = torch.tensor([0.9, 0.8, 0.7, 0.2, 0.6, 0.6, 0.9, 0.5])
ABSENT = torch.tensor([0.1, 0.3, 0.4, 0.3, 0.1, 0.6, 0.2, 0.1])
OWNER = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def test_metrics_of_scores_worked_out_by_hand():
    # The threshold for images 0 and 2 is of images 1 and 3, and the other way round:
    #   1 and 3: yes at .7 .2 .9 .5, no at .4 .3 .2 .1: best between .4 and .5, 7 of 8 right
    #   0 and 2: yes at .9 .8 .6 .6, no at .1 .3 .1 .6: best between .3 and .6, 7 of 8 right
    # So yes above .45 in both: 7 of the 8 present ones (not .2), 1 of the 8 absent ones (.6).
    metrics = means(presence_metrics(PRESENT, ABSENT, OWNER))
    assert tuple(metrics) == EVALUATIONS["objects"].metrics
    assert metrics["precision"] == metrics["recall"] == metrics["f1"] == metrics["accuracy"] == 14 / 16
    assert (metrics["yes_ratio"], metrics["paired_acc"], metrics["paired_ties"]) == (8 / 16, 6 / 8, 1 / 8)
    above = (PRESENT[:, None] > ABSENT).double() + (PRESENT[:, None] == ABSENT).double() / 2
    assert metrics["auc"] == pytest.approx(above.mean().item())
    assert 0.8 < metrics["ap"] < 1


def test_a_threshold_is_of_the_other_half():
    # Perfect within each half, but the scores of the images in turn are 10 higher: nothing is right by half.
    present, absent = torch.tensor([1.0, 11.0, 1.0, 11.0]), torch.tensor([0.0, 10.0, 0.0, 10.0])
    metrics = means(presence_metrics(present, absent, torch.arange(4)))
    assert (metrics["paired_acc"], metrics["accuracy"], metrics["yes_ratio"]) == (1.0, 0.5, 0.5)
    assert metrics["recall"] == 0.5
    everything = means(presence_metrics(-torch.ones(2), -torch.ones(2), torch.arange(2)))
    assert everything["auc"] == 0.5
    assert everything["paired_ties"] == 1.0


def test_no_answer_is_yes():
    metrics = presence_metrics(torch.zeros(2), torch.ones(2), torch.arange(2))
    values = means(metrics)
    assert (values["yes_ratio"], values["recall"], values["f1"], values["auc"]) == (0, 0, 0, 0)
    assert math.isnan(values["precision"])
    assert isinstance(metrics["accuracy"], PerSample)
    assert metrics["accuracy"].units.tolist() == [0, 1, 0, 1]  # questions of an image are one unit


@pytest.mark.parametrize(
    ("yes", "no", "threshold"),
    [([2.0, 3.0], [0.0, 1.0], 1.5), ([2.0, 0.5], [0.0, 1.0], 1.5), ([1.0], [1.0], 2.0)],
    ids=["separable", "the higher of two", "equal"],
)
def test_the_best_threshold_lies_between_two_scores(yes, no, threshold):
    scores, truth = torch.tensor([*yes, *no]), torch.arange(len(yes) + len(no)) < len(yes)
    assert best_threshold(scores, truth) == threshold


def test_a_known_model(circle, to_tensor, numbers, memory_folder):
    rows = [(10, ["15", "20", "100", "90"]), (100, ["95", "250"]), (200, ["10", "190"]), (60, ["60", "150"])]
    folder = memory_folder("objects", {"test": rows}, templates=["a photo of {c}", "{c}"])
    metrics = evaluate(circle, folder, transform=to_tensor, tokenizer=numbers, batch_size=3)
    assert metrics["objects/memory/paired_acc"] == pytest.approx(4 / 5)
    assert list(metrics)[:3] == ["objects/memory/auc", "objects/memory/ap", "objects/memory/paired_acc"]
    folder.templates = ["a photo"]
    with pytest.raises(ValueError, match=r"'a photo'.*\{c\}"):
        evaluate(circle, folder, transform=to_tensor, tokenizer=numbers)


def test_one_image_has_no_other_half(circle, to_tensor, numbers, memory_folder):
    folder = memory_folder("objects", {"test": [(10, ["15", "100"])]}, templates=[])
    with pytest.raises(ValueError, match="'memory'"):
        evaluate(circle, folder, transform=to_tensor, tokenizer=numbers)
