"""CLIP_benchmark's few-shot probe and El Banani's episodes."""

import pytest
import torch
import torch.nn.functional as F

from diffvision.evaluation import few_shot
from diffvision.evaluation.few_shot import draw_per_class, episodes
from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import evaluate


def test_k_of_each_class_are_drawn():
    labels = torch.tensor([0] * 20 + [1] * 5 + [3] * 9)
    chosen = draw_per_class(labels, 5, torch.Generator().manual_seed(0))
    assert len(chosen.unique()) == 15
    assert labels[chosen].bincount().tolist() == [5, 5, 0, 5]
    assert chosen.tolist() != draw_per_class(labels, 5, torch.Generator().manual_seed(1)).tolist()
    with pytest.raises(ValueError, match="class 1"):
        draw_per_class(labels, 6, torch.Generator())


def test_few_shot_probe_of_a_known_model(circle, to_tensor, classified):
    state = torch.get_rng_state()
    options = Options(fewshot_k=4, fewshot_epochs=50)
    runs = [evaluate(circle, classified, ["fewshot_k"], transform=to_tensor, options=options) for _ in range(2)]
    assert runs[0] == pytest.approx(runs[1], nan_ok=True)
    assert runs[0]["fewshot_k/memory/lp_acc1"] >= 7 / 8
    assert runs[0]["fewshot_k/memory/fewshot_k"] == 4
    assert torch.equal(torch.get_rng_state(), state)  # draws from a generator of its own


def one_by_one(train, train_labels, test, test_labels, shots, queries):
    """Accuracy of one episode, from its definition."""
    source = train[shots]
    centre = source.mean(dim=0)
    labels = train_labels[shots]
    prototypes = {int(label): F.normalize(source[labels == label] - centre, dim=1).mean(0) for label in labels.unique()}
    right = 0
    for query in queries:
        x = F.normalize(test[query] - centre, dim=0)
        right += min(prototypes, key=lambda label: (x - prototypes[label]).norm()) == test_labels[query]
    return float(right) / len(queries)


def test_episodes_equal_their_definition(monkeypatch):
    train_labels, test_labels = torch.arange(70) % 7, torch.arange(40) % 7  # 5 or 6 test images a class
    centres = torch.randn(7, 5)
    train = centres[train_labels] + 0.8 * torch.randn(70, 5)
    test = centres[test_labels] + 0.8 * torch.randn(40, 5)
    seen = []
    batched = few_shot._nearest_mean

    def spied(features, shots, others, queries):
        seen.append((shots, queries))
        return batched(features, shots, others, queries)

    monkeypatch.setattr(few_shot, "_nearest_mean", spied)
    accuracies = episodes(train, train_labels, test, test_labels, Options(episodes=20, queries=6))
    assert 0.3 < accuracies.mean() < 1.0
    for shots, queries, accuracy in zip(*seen[0], accuracies, strict=True):
        assert (train_labels[shots] == train_labels[shots][:, :1]).all()
        assert len(shots.unique()) == 25
        asked = queries[queries >= 0]
        assert set(test_labels[asked].tolist()) == set(train_labels[shots[:, 0]].tolist())
        expected = one_by_one(train, train_labels, test, test_labels, shots.flatten(), asked)
        assert accuracy.item() == pytest.approx(expected)


def test_interval_of_the_mean(circle, to_tensor, classified):
    options = Options(ways=3, shots=2, episodes=50)
    metrics = evaluate(circle, classified, ["fewshot_episodes"], transform=to_tensor, options=options)
    assert 0.8 < metrics["fewshot_episodes/memory/acc"] <= 1.0
    assert 0 <= metrics["fewshot_episodes/memory/acc_ci95"] < 0.05


def test_what_episodes_cannot_be_made_of():
    x, labels = torch.randn(20, 3), torch.arange(20) % 4
    with pytest.raises(ValueError, match="ways"):
        episodes(x, labels, x, labels, Options())
    with pytest.raises(ValueError, match="class 0"):
        episodes(x, labels, x, labels, Options(ways=2, shots=6))
    with pytest.raises(ValueError, match="class 3"):
        episodes(x, labels, x[:3], labels[:3], Options(ways=2))
