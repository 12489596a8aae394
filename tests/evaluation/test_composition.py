"""The right caption against the wrong one."""

import pytest
import torch

from diffvision.evaluation.composition import caption_scores, is_first_best, is_first_tied
from diffvision.evaluation.per_sample import by_kind, means
from diffvision.evaluation.suite import evaluate


def test_by_hand_with_two_and_three_captions():
    images = torch.eye(3)
    right, wrong = [[0.9, 0, 0], [0.8, 0, 0]], [[0, 0.1, 0], [0, 0.2, 0], [0, 0.0, 0]]
    tie = [[0, 0, 0.5], [0, 0, 0.5]]  # counts as right
    texts, owner = torch.tensor([*right, *wrong, *tie]), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    assert is_first_best(caption_scores(images, texts, owner)).tolist() == [True, False, True]
    assert is_first_tied(caption_scores(images, texts, owner)).tolist() == [False, False, True]


def test_composition_of_a_known_model(circle, to_tensor, numbers, swapped):
    metrics = evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers, batch_size=2)
    assert metrics == {"composition/memory/acc": pytest.approx(2 / 3), "composition/memory/ties": 0}


def test_kinds_weigh_the_same_whatever_their_number():
    right = torch.tensor([True, True, False, True, False])
    kinds = ["place", "place", "colour", "place", ""]
    expected = {"acc": 3 / 5, "mean_per_kind_acc": 1 / 3, "acc/place": 1.0, "acc/colour": 0.0, "acc/no kind": 0.0}
    assert means(by_kind("acc", right, kinds)) == pytest.approx(expected)
    assert by_kind("acc", right, kinds)["acc/place"].units.tolist() == [0, 1, 3]
    assert list(by_kind("acc", right, [""] * 5)) == ["acc"]
    many = by_kind("acc", torch.ones(65, dtype=torch.bool), [f"pair {number}" for number in range(65)])
    assert list(many) == ["acc", "mean_per_kind_acc"]


def test_an_image_without_a_wrong_caption(circle, to_tensor, numbers, swapped):
    swapped.rows["test"][1][1].pop()
    with pytest.raises(ValueError, match="image 1"):
        evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers)
