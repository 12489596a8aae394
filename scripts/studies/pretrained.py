"""Trained models made differential and trained on: do V2 and DEX gain what plain further training does not?

    python scripts/studies/pretrained.py text data --source SOURCE   # or images, here and below
    python scripts/studies/pretrained.py text grid                   # the runs, and what they cost
    python scripts/studies/pretrained.py text tune                   # learning rates of each family, one seed
    python scripts/studies/pretrained.py text train                  # fresh seeds
    python scripts/studies/pretrained.py text report

SOURCE/model is what `scripts/pretrained/fetch.py smollm2` wrote, and SOURCE/text what `data/text.py` did;
of images what `fetch.py dinov2` wrote, and in SOURCE/fashion the files of Fashion-MNIST.

All families compute the same function before training. "plain" stays as it is; "sum" has V2's parameters, and its
second map is added instead of subtracted, so V2 differs from it in the sign alone; "V2" and "DEX" are adapted. Of
SmolLM2 the new parameters and LoRA of rank 8 on all other projections are trained, with products in bfloat16 (measured
is in float32); of DINOv2 all weights, on Fashion-MNIST at 42 pixels. `tune` and `train` leave out what is done; each
run is one JSON.

Primary metric: of text the probability of the next token, the geometric mean over text that it is not trained on here
(the inverse of the perplexity); what SmolLM2 read before is not known. Of images the accuracy on test images. Needles
in 512 tokens are secondary.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from diffvision import adapt
from diffvision.data.datasets.fashion import load_splits
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import documents_of
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.evaluation.language.needle import needle
from diffvision.models import language
from diffvision.models.adapt import freeze_but_new
from diffvision.nn import DiffAttentionV2
from diffvision.training.optim import param_groups
from grid import Grid, Run, differences, run_study

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "pretrained"
FAMILIES = ("plain", "sum", "V2", "DEX")
WARMUP, CLIP_NORM, WEIGHT_DECAY = 0.2, 1.0, 0.05
Loss = Callable[[nn.Module, Any], Tensor]


class SumAttention(DiffAttentionV2):
    """V2 with its second map added: lambda is -sigmoid of the token's projection."""

    def compute_lambda(self, x: Tensor) -> Tensor:
        """Return lambda of each token and head [B, H, N, 1], between -1 and 0."""
        return -super().compute_lambda(x)


@torch.no_grad()
def as_family(model: nn.Module, family: str) -> nn.Module:
    """Return a trained standard model as a family's, which computes the same."""
    if family == "plain":
        return model
    adapt(model, "dex" if family == "DEX" else "v2")
    if family == "sum":
        for layer in model.modules():
            if isinstance(layer, DiffAttentionV2):
                layer.__class__ = SumAttention
                layer.proj.weight /= 3  # V2 doubled it, for 1 - 1/2 of a map; here it is 1 + 1/2
    return model


def fit(model: nn.Module, batches: Iterator[Any], loss_of: Loss, rate: float, steps: int) -> float:
    """Train with AdamW, warm-up and a cosine to zero, and return the CPU seconds of the steps."""
    optimizer = torch.optim.AdamW(param_groups(model, WEIGHT_DECAY), lr=rate, betas=(0.9, 0.98))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    warmup, start = max(1, round(WARMUP * steps)), time.process_time()
    model.train()
    for step in range(steps):
        done = (step - warmup) / max(steps - warmup, 1)
        factor = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        loss = loss_of(model, next(batches))
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
    model.eval()
    return time.process_time() - start


# ---- text ----------------------------------------------------------------------------------------------------------


class Text:
    """SmolLM2 on text, by its tokenizer.

    Args:
        file: what `make_data` wrote; the model lies next to it.
    """

    length, batch, longest = 256, 4, 512  # tokens of a window, windows, tokens of a document that are read
    tokens_of: ClassVar[dict[str, int]] = {"train": 400_000, "validation": 8_192, "test": 16_384}
    projections = ("k_proj", "v_proj", "proj", "gate", "up", "down")

    def __init__(self, file: Path) -> None:
        self.tokens: dict[str, Tensor] = torch.load(file, weights_only=True)
        self.model = file.with_suffix("")
        self.tokenizer = load_tokenizer(self.model)

    @classmethod
    def make_data(cls, source: Path, file: Path) -> None:
        """Tokenise the documents of each split, and copy the model next to them."""
        tokenizer, content = load_tokenizer(source / "model"), {}
        unseen = documents_of(ShardSet(source / "text" / "validation"), TextMember("txt"))
        texts = {"train": documents_of(ShardSet(source / "text" / "train"), TextMember("txt"))}
        for split, count in cls.tokens_of.items():
            tokens: list[int] = []
            for text in texts.get(split, unseen):  # the test's documents follow those of the validation
                tokens += [*tokenizer.encode(text)[: cls.longest], tokenizer.eos_id]
                if len(tokens) > count:
                    break
            content[split] = torch.tensor(tokens[: count + 1])
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file)
        shutil.copytree(source / "model", file.with_suffix(""))
        print(", ".join(f"{len(tokens):,} tokens for {split}" for split, tokens in content.items()))

    def create(self, family: str) -> nn.Module:
        """Return the model as a family's, with its new parameters and LoRA to be trained."""
        model = as_family(language.load(self.model).float(), family)
        new = set()
        if family == "plain":
            model.requires_grad_(False)
        else:
            freeze_but_new(model)
            new = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        targets = [*self.projections, *(["q_proj"] if family in ("plain", "DEX") else [])]
        inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=targets), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in new or "lora_" in name)
        return model

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches [B, N + 1] of windows in random order."""
        text, generator = self.tokens["train"], torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - self.length, (self.batch,), generator=generator)
            yield torch.stack([text[start : start + self.length + 1] for start in starts])

    def loss(self, model: Any, tokens: Tensor) -> Tensor:
        """Return the mean loss of a batch, nats a token; products are in bfloat16 while a model is trained."""
        with torch.autocast("cpu", torch.bfloat16, enabled=model.training):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def metrics(self, model: Any, split: str) -> dict[str, float]:
        """Return the metrics of a split; needles of the test alone."""
        text = self.tokens[split]
        windows = text[: (len(text) - 1) // self.length * self.length + 1].unfold(0, self.length + 1, self.length)
        loss = sum(self.loss(model, part).item() * len(part) for part in windows.split(4)) / len(windows)
        numbers = {"probability of a token": math.exp(-loss), "loss": loss}
        if split == "test":
            found = needle(model, self.tokenizer, lengths=(512,), depths=(0.25, 0.75), samples=10)
            numbers |= {f"needle {name}": value for name, value in found.items()}
        return {name: round(value, 5) for name, value in numbers.items()}


# ---- images --------------------------------------------------------------------------------------------------------


class Images:
    """DINOv2 on Fashion-MNIST.

    Args:
        file: what `make_data` wrote; the model lies next to it.
    """

    size, batch, evaluated = 42, 32, 5_000
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # DINOv2's

    def __init__(self, file: Path) -> None:
        self.splits: dict[str, tuple[Tensor, Tensor]] = torch.load(file, weights_only=True)
        self.model = file.with_suffix("")

    @classmethod
    def make_data(cls, source: Path, file: Path) -> None:
        """Write the splits as tensors, the last two of at most 5,000 images, and copy the model next to them."""
        splits = {
            name: (torch.tensor(part.images), torch.tensor(part.labels))
            for name, part in load_splits(source / "fashion").items()
        }
        content = {
            name: (images, labels) if name == "train" else (images[: cls.evaluated], labels[: cls.evaluated])
            for name, (images, labels) in splits.items()
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file)
        shutil.copytree(source / "model", file.with_suffix(""))
        print(", ".join(f"{len(labels):,} images for {name}" for name, (_, labels) in content.items()))

    def create(self, family: str) -> nn.Module:
        """Return the model as a family's, with a classifier of zeros, all to be trained."""
        name, sizes = f"local-dir:{self.model}", {"img_size": self.size, "num_classes": 10}
        model: Any = timm.create_model(name, pretrained=True, **sizes)
        nn.init.zeros_(model.head.weight)
        return as_family(model, family)

    def shown(self, images: Tensor) -> Tensor:
        """Return uint8 images [N, 28, 28] as the model takes them."""
        grey = F.interpolate(images[:, None].float() / 255, size=self.size, mode="bicubic", antialias=True)
        mean, std = (torch.tensor(value)[:, None, None] for value in (self.mean, self.std))
        return (grey - mean) / std

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels in random order, half of the images mirrored."""
        images, labels = self.splits["train"]
        generator = torch.Generator().manual_seed(seed)
        while True:
            for part in torch.randperm(len(labels), generator=generator).split(self.batch):
                mirrored = torch.rand(len(part), generator=generator) < 0.5
                shown = torch.where(mirrored[:, None, None], images[part].flip(-1), images[part])
                yield self.shown(shown), labels[part]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(model(batch[0]), batch[1].long())

    @torch.no_grad()
    def metrics(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the metrics of a split."""
        images, labels = self.splits[split]
        logits = torch.cat([model(self.shown(part)) for part in images.split(250)])
        loss = F.cross_entropy(logits, labels.long()).item()
        return {"accuracy": round((logits.argmax(1) == labels).float().mean().item(), 4), "loss": round(loss, 4)}


# ---- the study -----------------------------------------------------------------------------------------------------


PARTS: dict[str, Any] = {"text": Text, "images": Images}
PRIMARY = {"text": "probability of a token", "images": "accuracy"}
RATES = {"text": (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3), "images": (2e-5, 4e-5, 8e-5, 1.6e-4)}
STEPS = {"text": 32, "images": 250}


def grid_of(part: str) -> Grid:
    """Return the runs of a part; `epochs` counts steps here."""
    primary, digits = (PRIMARY[part],), {"loss": 4}
    return Grid(RESULTS / part, FAMILIES, RATES[part], primary, seeds=(1, 2, 3), epochs=STEPS[part], digits=digits)


def trainer(part: str) -> Callable[[Path, int], Callable[[Run], dict[str, Any]]]:
    """Return what `run_study` takes as its trainer."""

    def prepare(file: Path, steps: int) -> Callable[[Run], dict[str, Any]]:
        data = PARTS[part](file)

        def train(run: Run) -> dict[str, Any]:
            torch.manual_seed(run.seed)
            model = data.create(run.family)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            numbers: dict[str, Any] = {**asdict(run), "steps": steps, "trained parameters": trained}
            if run.seed == 1:
                numbers["before"] = data.metrics(model.eval(), "test")
            try:
                seconds = fit(model, data.batches(run.seed), data.loss, run.rate, steps)
            except FloatingPointError as error:
                return {**numbers, "diverged": str(error)}
            splits = ("validation",) if run.seed == Grid.tuning_seed else ("validation", "test")
            measured = {split: data.metrics(model, split) for split in splits}
            return {**numbers, "diverged": "", "seconds": round(seconds), **measured}

        return train

    return prepare


def report(grid: Grid) -> None:
    """Print the tables, in Markdown, and the differences of V2 and DEX from the control of equal parameters."""
    print(grid.describe(), end="\n\n")
    print(grid.tuned(grid.primary), end="\n\n")
    print(grid.table((*grid.primary, "loss")), end="\n\n")
    is_text = grid.primary == (PRIMARY["text"],)
    if is_text:
        print(grid.means(["needle accuracy"]), end="\n\n")
    apart = differences({family: grid.by_seed(family, "loss") for family in ("sum", "V2", "DEX")})
    for family in ("V2", "DEX"):
        print(f"{family} from sum, loss: {apart[family].text(4) if family in apart else 'not measured yet'}")
    for family in grid.families:
        if (rate := grid.chosen(family)) and (one := grid.numbers(Run(family, rate, grid.seeds[0]))):
            print(f"{family} before training: {one['before']}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: the part, then what `run_study` takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    chosen, others = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    part = chosen.part
    make_data = PARTS[part].make_data
    run_study(grid_of(part), None, make_data=make_data, trainer=trainer(part), report=report, arguments=others)


if __name__ == "__main__":
    main()
