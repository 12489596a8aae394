"""The right caption against the wrong one."""

import pytest
import torch

from diffvision.evaluation.composition import selection_accuracy
from diffvision.evaluation.suite import evaluate


def test_by_hand_with_two_and_three_captions():
    images = torch.eye(3)
    right, wrong = [[0.9, 0, 0], [0.8, 0, 0]], [[0, 0.1, 0], [0, 0.2, 0], [0, 0.0, 0]]
    tie = [[0, 0, 0.5], [0, 0, 0.5]]  # counts as right
    texts = torch.tensor([*right, *wrong, *tie])
    assert selection_accuracy(images, texts, torch.tensor([0, 0, 1, 1, 1, 2, 2])) == pytest.approx(2 / 3)


def test_composition_of_a_known_model(circle, to_tensor, numbers, swapped):
    metrics = evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers, batch_size=2)
    assert metrics == {"composition/memory/acc": pytest.approx(2 / 3)}


def test_an_image_without_a_wrong_caption(circle, to_tensor, numbers, swapped):
    swapped.rows["test"][1][1].pop()
    with pytest.raises(ValueError, match="image 1 of split 'test' has fewer than 2 captions"):
        evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers)
