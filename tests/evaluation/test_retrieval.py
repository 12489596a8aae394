"""Recall on matrices written by hand, against its definition on the whole matrix, and in chunks."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from diffvision.data.images.folders import find_folders
from diffvision.evaluation import retrieval
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import means
from diffvision.evaluation.retrieval import recall
from diffvision.evaluation.suite import evaluate
from diffvision.opening import open_model


def by_definition(images, texts, owner, k):
    """From the whole matrix: a query is found if any relevant candidate is among its k best."""
    scores = texts @ images.T
    relevant = owner[:, None] == torch.arange(len(images))
    best_images = torch.zeros_like(relevant).scatter(1, scores.topk(k, dim=1).indices, True)
    best_texts = torch.zeros_like(relevant.T).scatter(1, scores.T.topk(k, dim=1).indices, True)
    return (best_images & relevant).any(1).float().mean(), (best_texts & relevant.T).any(1).float().mean()


def test_two_images_three_texts_by_hand():
    images = torch.eye(2)
    texts = torch.tensor([[1.0, 0.0], [0.3, 0.9], [0.0, 0.8]])  # the second one is nearer to image 1
    samples = recall(images, texts, torch.tensor([0, 0, 1]), [1, 2, 3])
    assert samples["image_retrieval_recall@1"].values.tolist() == [True, False, True]
    assert samples["image_retrieval_recall@1"].units.tolist() == [0, 0, 1]  # queries of one image are one unit
    assert samples["text_retrieval_recall@1"].units.tolist() == [0, 1]
    metrics = means(samples)
    assert metrics["image_retrieval_recall@1"] == pytest.approx(2 / 3)
    assert metrics["image_retrieval_recall@2"] == 1.0
    # image 0 finds text 0 first; image 1 finds text 1 first, which is image 0's, then its own
    assert metrics["text_retrieval_recall@1"] == 0.5
    assert metrics["text_retrieval_recall@2"] == 1.0


@pytest.mark.parametrize(("chunk", "spread"), [(1, 1.0), (7, 1.0), (1000, 1.0), (1000, 0.0)])
def test_against_the_definition_whatever_the_chunk(chunk, spread, monkeypatch):
    """Without a spread all scores are equal, and ordered as torch.topk orders them."""
    monkeypatch.setattr(retrieval, "QUERIES", chunk)
    images = F.normalize(1 + spread * torch.randn(40, 6), dim=1)
    owner = torch.arange(40).repeat_interleave(torch.randint(1, 6, (40,)))
    texts = F.normalize(images[owner] + 0.7 * spread * torch.randn(len(owner), 6), dim=1)
    metrics = means(recall(images, texts, owner, [1, 5, 10]))
    for k in (1, 5, 10):
        of_images, of_texts = by_definition(images, texts, owner, k)
        assert metrics[f"image_retrieval_recall@{k}"] == pytest.approx(of_images.item())
        assert metrics[f"text_retrieval_recall@{k}"] == pytest.approx(of_texts.item())


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_retrieval_of_a_known_model(circle, to_tensor, numbers, captioned, batch_size):
    settings = {"transform": to_tensor, "tokenizer": numbers, "batch_size": batch_size}
    metrics = evaluate(circle, captioned, **settings, options=Options(recall_k=(1, 10)))
    assert metrics == {
        "retrieval/memory/image_retrieval_recall@1": 5 / 6,  # "grey 101" belongs to the image of grey 200
        "retrieval/memory/text_retrieval_recall@1": 1.0,
        "retrieval/memory/image_retrieval_recall@10": 1.0,
        "retrieval/memory/text_retrieval_recall@10": 1.0,
    }


def test_captions_that_are_cut_are_counted_and_warned_of(tmp_path):
    for n in range(4):  # with the beginning and the end, 24 tokens fit, and 25 do not
        Image.new("RGB", (8, 8), (60 * n, 0, 0)).save(tmp_path / f"{n}.png")
        (tmp_path / f"{n}.txt").write_text(" ".join(["dog"] * (23 if n == 3 else 22)))
    model, [folder] = open_model("CLIP-debug"), find_folders(tmp_path)
    settings = {"transform": model.transform, "tokenizer": model.tokenizer}
    with pytest.warns(UserWarning, match="25% of 4 captions.*context_length"):
        metrics = evaluate(model.module, folder, **settings)
    assert metrics[f"retrieval/{folder.name}/cut_captions"] == 0.25
    (tmp_path / "3.txt").write_text("a dog")
    [folder] = find_folders(tmp_path)
    assert f"retrieval/{folder.name}/cut_captions" not in evaluate(model.module, folder, **settings)
