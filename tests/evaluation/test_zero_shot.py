"""Zero-shot: its metrics against scikit-learn's, and the classifier."""

import math

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score

from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import evaluate
from diffvision.evaluation.zero_shot import classification_metrics


def test_metrics_equal_scikit_learns():
    logits, labels = torch.randn(300, 12), torch.randint(0, 11, (300,))  # class 11 has no sample
    metrics = classification_metrics(logits, labels)
    assert metrics["acc1"] == top_k_accuracy_score(labels, logits, k=1, labels=range(12))
    assert metrics["acc5"] == top_k_accuracy_score(labels, logits, k=5, labels=range(12))
    with pytest.warns(UserWarning, match="y_pred contains classes not"):
        expected = balanced_accuracy_score(labels, logits.argmax(1))
    assert metrics["mean_per_class_recall"] == pytest.approx(expected)
    assert math.isnan(classification_metrics(torch.eye(4), torch.arange(4))["acc5"])
    assert classification_metrics(torch.eye(5), torch.arange(5))["acc5"] == 1.0


def test_a_class_is_the_normalised_mean_of_its_normalised_texts(circle, to_tensor, numbers):
    features = Features(circle, to_tensor, numbers)
    with torch.no_grad():
        circle.scale.mul_(7.0)  # so that normalising before the mean matters not, but after it does
        circle.scale[0].mul_(3.0)
    vectors = features.classes([["a 10", "b 60"], ["a 200"]])
    circle.eval()
    with torch.no_grad():
        each = torch.nn.functional.normalize(circle.encode_text(torch.tensor([[10], [60], [200]])), dim=1)
    mean = each[:2].mean(0)
    torch.testing.assert_close(vectors, torch.stack([mean / mean.norm(), each[2]]))


def test_zero_shot_of_a_known_model(circle, to_tensor, numbers, classified):
    metrics = evaluate(circle, classified, transform=to_tensor, tokenizer=numbers, batch_size=3)
    assert metrics["zero_shot/memory/acc1"] == 7 / 8  # grey 60 is nearer to 100 than to 10
    assert metrics["zero_shot/memory/mean_per_class_recall"] == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert math.isnan(metrics["zero_shot/memory/acc5"])


def test_every_module_keeps_its_own_mode(circle, to_tensor, numbers, classified):
    circle.train()
    circle.tower[1].eval()  # as a locked tower's norm is
    evaluate(circle, classified, transform=to_tensor, tokenizer=numbers)
    assert circle.training
    assert circle.tower[0].training
    assert not circle.tower[1].training
    circle.encode_image = None
    with pytest.raises(TypeError):
        evaluate(circle, classified, transform=to_tensor, tokenizer=numbers)
    assert circle.training  # after an error too


def test_splits_labels_and_features_that_give_no_accuracy(circle, to_tensor, numbers, classified):
    classified.rows["empty"] = []
    settings = {"transform": to_tensor, "tokenizer": numbers}
    with pytest.raises(ValueError, match="'empty'"):
        evaluate(circle, classified, **settings, options=Options(split="empty"))
    with pytest.raises(ValueError, match=r"val.*zero_shot"):
        evaluate(circle, classified, **settings, options=Options(split="val"))
    classified.classnames = ["10", "100"]
    with pytest.raises(ValueError, match=r"'memory'.*sample 5"):
        evaluate(circle, classified, **settings)
    circle.scale.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        evaluate(circle, classified, **settings)
