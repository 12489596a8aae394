"""Text, image and group score on matrices written by hand."""

import pytest
import torch

from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.pairs import MMVP, MMVP_OF_DIFFCLIP, inner_products, pair_scores, pairs
from diffvision.evaluation.suite import evaluate

# Caption c in row c, image t in column t: caption i is of image i.
RIGHT = [[0.9, 0.1], [0.2, 0.8]]
ONLY_TEXT = [[0.5, 0.8], [0.1, 0.9]]  # each image prefers its caption; caption 0 prefers image 1
ONLY_IMAGE = [[0.5, 0.1], [0.8, 0.9]]  # each caption prefers its image; image 0 prefers caption 1
NEITHER = [[0.1, 0.9], [0.8, 0.2]]
TIED = [[0.5, 0.2], [0.5, 0.9]]  # image 0 has two captions of one score


def test_scores_of_pairs_worked_out_by_hand():
    right = pair_scores(torch.tensor([RIGHT, ONLY_TEXT, ONLY_IMAGE, NEITHER, TIED]))
    assert right["text_score"].tolist() == [True, True, False, False, False]
    assert right["image_score"].tolist() == [True, False, True, False, True]
    assert right["group_score"].tolist() == [True, False, False, False, False]
    assert right["ties"].tolist() == [False, False, False, False, True]
    assert not pair_scores(torch.tensor([[[0.5, 0.1], [0.1, 0.5]]]))["ties"].any()  # which are not compared


def test_scores_have_captions_in_rows():
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    texts = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    assert inner_products(images, texts).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_a_known_model_and_kinds(circle, to_tensor, numbers, paired):
    metrics = evaluate(circle, paired, transform=to_tensor, tokenizer=numbers, batch_size=2)
    values = {key.removeprefix("pairs/memory/"): value for key, value in metrics.items()}
    assert values["text_score"] == values["image_score"] == values["group_score"] == pytest.approx(2 / 3)
    assert (values["group_score/Texts"], values["group_score/State and Condition"]) == (1.0, 0.5)
    assert (values["mean_per_kind_group_score"], values["ties"]) == (0.75, 0.0)
    assert "mean_of_7_kinds_image_score" not in values


def test_mmvp_has_both_means(circle, to_tensor, numbers, paired):
    right, wrong = ([(10, ["1 12"]), (200, ["2 190"])], [(10, ["1 190"]), (200, ["2 12"])])
    of_kind = [(right if kind in MMVP_OF_DIFFCLIP[:2] or kind == "Texts" else wrong, kind) for kind in sorted(MMVP)]
    paired.rows["test"] = [(*row, kind) for rows, kind in of_kind for row in rows]
    samples = pairs(Features(circle, to_tensor, numbers), paired, Options())
    assert samples["mean_per_kind_image_score"].mean() == pytest.approx(3 / 9)
    assert samples["mean_of_7_kinds_image_score"].mean() == pytest.approx(2 / 7)
    assert len(samples["mean_of_7_kinds_image_score"].values) == 7
