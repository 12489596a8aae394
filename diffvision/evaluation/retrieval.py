"""Retrieval of images by captions and of captions by images, as CLIP_benchmark's `zeroshot_retrieval` measures it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import Options
from diffvision.evaluation.per_sample import Metrics, PerSample, count_each

QUERIES = 512
"""Rows of the matrix of scores that are in memory at a time."""


def retrieval(features: Features, folder: EvaluationFolder, options: Options) -> Metrics:
    """Return image_retrieval_recall@K and text_retrieval_recall@K over a split; see `recall`.

    Where captions have more tokens than the model takes, cut_captions is their share.
    """
    pairs = features.pairs(folder, options.split)
    samples = recall(pairs.images, pairs.texts, pairs.owner, options.recall_k, features.device)
    return samples | ({"cut_captions": pairs.cut.float().mean().item()} if pairs.cut.any() else {})


def recall(
    images: Tensor,
    texts: Tensor,
    owner: Tensor,
    recall_k: Sequence[int] = (1, 5, 10),
    device: torch.device | str = "cpu",
) -> Metrics:
    """Return recall@K of images [N, D] and texts [T, D] by their inner products; text t is of image `owner[t]`.

    image_retrieval_recall@K: the share of texts whose image is among the K best images; the texts of an image are one
    unit. text_retrieval_recall@K: the share of images of which at least one text is among the K best texts (an image
    without texts counts as a miss). With K beyond the number of candidates all of them are taken. The order of equal
    scores is torch.topk's.

    Args:
        device: where the scores are computed and sorted.
    """
    found_images = _best(texts, images, recall_k, device)
    found_texts = _best(images, texts, recall_k, device)
    samples: Metrics = {}
    for k in recall_k:
        samples[f"image_retrieval_recall@{k}"] = PerSample((found_images[k] == owner[:, None]).any(dim=1), owner)
        of_images = owner[found_texts[k]] == torch.arange(len(images))[:, None]
        samples[f"text_retrieval_recall@{k}"] = count_each(of_images.any(dim=1))
    return samples


def _best(
    queries: Tensor, candidates: Tensor, recall_k: Sequence[int], device: torch.device | str
) -> dict[int, Tensor]:
    """Return for each K the best candidates' indexes, [queries, min(K, candidates)]."""
    best: dict[int, list[Tensor]] = {k: [] for k in recall_k}
    columns = candidates.to(device).T
    for rows in queries.split(QUERIES):
        scores = rows.to(device) @ columns
        for k in recall_k:  # one topk for each K: among equal scores the first of ten need not be the first of one
            best[k].append(scores.topk(min(k, scores.shape[1]), dim=1).indices.cpu())
    return {k: torch.cat(parts) for k, parts in best.items()}
