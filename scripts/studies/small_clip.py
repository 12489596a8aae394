"""A small CLIP trained over tensors in memory, for studies: the gradients of `diffvision fit` in less time.

Images are decoded once, the vocabulary is cut to the tokens that occur, and every caption of a batch is encoded once,
up to its end. Batches come in another order than those of `diffvision fit`.
"""

import math
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffvision.training.optim import OptimizerSettings, param_groups

BATCH = 64


def read(folder: Path) -> list[dict[str, bytes]]:
    """Return the members of every sample of a folder of shards, by extension, in order."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar"), key=lambda path: int(path.stem)):
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, extension = member.name.partition(".")
                file = archive.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[extension] = file.read()
    return list(samples.values())


def pixels(samples: Sequence[dict[str, bytes]], member: str = "png") -> Tensor:
    """Return images as uint8 [N, 3, h, w]."""
    images = [np.array(Image.open(BytesIO(sample[member])).convert("RGB")) for sample in samples]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Towers:
    """A CLIP with CLIP-debug's width and depth: the image tower by timm's name, the text tower of an OpenCLIP model.

    The settings of both are added: arguments of timm's, and fields of OpenCLIP's `text_cfg`.
    """

    image: str = "plain_vit_debug_clip"
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = "CLIP-debug"
    text_settings: dict[str, Any] = field(default_factory=dict)

    def create(self, size: int, patch: int) -> Any:
        """Return the model with random weights, for images of a size and patches of another, in pixels."""
        config: Any = open_clip.get_model_config(self.text)
        text_cfg = {**config["text_cfg"], **self.text_settings}
        model: Any = open_clip.create_model(self.text, output_dict=True, text_cfg=text_cfg)
        pool = model.visual.trunk.global_pool
        model.visual.trunk = timm.create_model(
            self.image, img_size=size, patch_size=patch, num_classes=0, global_pool=pool, **self.settings
        )
        return model


class Captions:
    """Distinct captions as token ids of a small vocabulary, cut to the longest.

    Attributes:
        of: {part: the numbers of its captions}, as `SmallClip.texts` takes them.
    """

    def __init__(self, captions: dict[str, list[str]], tokenizer: str) -> None:
        """Tokenise the captions of each part; ids keep their order, so the end-of-text token stays the largest."""
        encode = open_clip.get_tokenizer(tokenizer)
        self.distinct = sorted({caption for part in captions.values() for caption in part})
        number = {caption: i for i, caption in enumerate(self.distinct)}
        tokens = encode(self.distinct)
        self.lengths = (tokens != 0).sum(1)
        self.vocabulary = torch.unique(tokens)
        self.tokens = torch.searchsorted(self.vocabulary, tokens)[:, : int(self.lengths.max())].contiguous()
        self.of = {name: torch.tensor([number[caption] for caption in part]) for name, part in captions.items()}


class SmallClip:
    """A CLIP of OpenCLIP's with a causal text tower that reads the small vocabulary.

    Args:
        model: the CLIP; its token table is cut.
        captions: all that it will read.
        mean, std: of the pixels, 0 to 1.
    """

    def __init__(self, model: Any, captions: Captions, mean: float, std: float) -> None:
        self.model, self.captions, self.mean, self.std = model, captions, mean, std
        table = model.token_embedding.weight.detach()[captions.vocabulary].clone()
        model.token_embedding = nn.Embedding(len(table), table.shape[1], _weight=table)

    def texts(self, numbers: Tensor) -> Tensor:
        """Return unit features of captions; each is computed once, without what follows its end."""
        numbers, inverse = torch.unique(numbers, return_inverse=True)
        tokens = self.captions.tokens[numbers, : int(self.captions.lengths[numbers].max())]
        model = self.model
        x = model.token_embedding(tokens) + model.positional_embedding[: tokens.shape[1]]
        x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask))
        x = x[torch.arange(len(x)), tokens.argmax(-1)]
        projection = model.text_projection
        x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        return F.normalize(x, dim=-1)[inverse]

    def normalised(self, images: Tensor) -> Tensor:
        """Return uint8 images as the image tower takes them."""
        return (images.float() / 255 - self.mean) / self.std

    def images(self, images: Tensor) -> Tensor:
        """Return unit features of uint8 images [N, 3, h, w]."""
        parts = images.split(256)
        return torch.cat([self.model.encode_image(self.normalised(part), normalize=True) for part in parts])

    def fit(
        self,
        images: Tensor,
        captions: Tensor | Callable[[int], Tensor],
        settings: dict[str, Any],
        *,
        epochs: int,
        seed: int,
        evaluate: Callable[[int], None] = lambda epoch: None,
        augment: Callable[[Tensor, torch.Generator], Tensor] = lambda images, generator: images,
        batch: int = BATCH,
    ) -> float:
        """Train on pairs with AdamW, warm-up and a cosine to zero, and return the seconds of the training steps.

        They are CPU seconds on a CPU. On CUDA the steps are in bfloat16 autocast.

        Args:
            images: uint8 [N, 3, h, w].
            captions: the number of each image's caption; or a function that draws them for an epoch.
            settings: of a recipe's `optimizer`.
            epochs: how often every image is seen, but for what does not fill a batch.
            seed: of the order of images.
            evaluate: called after every epoch, with the number of epochs done.
            augment: changes a batch of normalised images.
            batch: pairs of a step.
        """
        parameters = list(self.model.parameters())
        optimizer = torch.optim.AdamW(
            param_groups(self.model, OptimizerSettings(weight_decay=settings["weight_decay"])),
            lr=settings["lr"],
            betas=settings["betas"],
            eps=settings["eps"],
            fused=True,
        )
        steps = len(images) // batch
        clock = time.perf_counter if images.is_cuda else time.process_time
        total, warmup = epochs * steps, round(settings["warmup_epochs"] * steps)
        loss_of, scale, step, seconds = open_clip.loss.ClipLoss(), self.model.logit_scale, 0, 0.0
        for epoch in range(epochs):
            start = clock()
            self.model.train()
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(len(images), generator=generator)
            drawn = captions(epoch) if callable(captions) else captions
            for chosen in order[: steps * batch].view(steps, batch):
                done = (step - warmup) / (total - warmup)
                rate = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
                for group in optimizer.param_groups:
                    group["lr"] = settings["lr"] * rate
                shown = augment(self.normalised(images[chosen]), generator)
                with torch.autocast("cuda", torch.bfloat16, enabled=images.is_cuda):
                    features = self.model.encode_image(shown, normalize=True)
                    loss = loss_of(features, self.texts(drawn[chosen]), scale.exp())
                if not loss.isfinite():
                    raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, settings["clip_norm"])
                optimizer.step()
                with torch.no_grad():
                    scale.clamp_(0, math.log(100))
                step += 1
            seconds += clock() - start
            self.model.eval()
            with torch.no_grad():
                evaluate(epoch + 1)
        return seconds
