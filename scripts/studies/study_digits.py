"""The recipe of `diffvision demo`, chosen by plain CLIP alone, and what `lambda_init` does where colours are rare.

    nice python scripts/studies/study_digits.py train  --output runs/digits --settings 0.85x6 0.7x6 --seeds 0 1 2
    python scripts/studies/study_digits.py report --output runs/digits --results docs/results/digits.json
    nice python scripts/studies/study_digits.py train  --output runs/digits --settings 0.85x6 --models \
        CLIP-debug DiffCLIP-debug-0.2 DiffCLIP-debug
    python scripts/studies/study_digits.py lesson --output runs/digits --results runs/lesson.json
    python scripts/studies/study_digits.py time

A setting is SHARExEPOCHS. `train` leaves out what is done already, one thread at a time. It trains by the
settings of configs/clip/debug.yaml over tensors in memory, with the vocabulary cut to the tokens that occur and every
caption of a batch encoded once: the same gradients as `diffvision fit` in less time, in another order of samples. A
setting is the better the higher its worst seed is, where a seed counts by the smaller of zero-shot accuracy and image
R@1. What the demo publishes is measured by `diffvision demo`.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import timm
import torch
import torch.nn.functional as F
import yaml
from open_clip.transform import AugmentationCfg, image_transform
from PIL import Image

import diffvision
from diffvision.data.datasets.digits import WORDS, make_digits
from diffvision.demo.images import COLUMNS, MODELS, parts_right
from diffvision.evaluation.composition import selection_accuracy
from diffvision.evaluation.retrieval import recalls
from diffvision.training.optim import param_groups
from diffvision.training.recipes import recipe
from small_clip import BATCH, Captions, SmallClip, pixels, read

LESSON_MODEL = "DiffCLIP-debug"  # with DiffCLIP's lambda_init of 0.8
MODEL, TOWER = "CLIP-debug", "plain_vit_debug_clip"
LESSON = "0.85x6"


@dataclass(frozen=True)
class Setting:
    """The share of training captions that name the digit only, how often every image is seen, and the patch size."""

    digit_only: float
    epochs: int
    patch: int = 8

    @classmethod
    def parse(cls, text: str) -> "Setting":
        share, *whole = text.split("x")
        return cls(float(share), *map(int, whole))

    def __str__(self) -> str:
        return f"{self.digit_only:g}x{self.epochs}" + (f"x{self.patch}" if self.patch != 8 else "")


class Data:
    """The digits made with a share, as tensors: images of each part, captions, and the test digits' labels."""

    def __init__(self, directory: Path, share: float, normal: tuple[float, float]) -> None:
        if not (directory / "composition/test/0.tar").is_file():
            make_digits(directory, digit_only=share)
        parts = {"train": "train", "zero_shot": "zero_shot/test", "retrieval": "retrieval/test"}
        parts["composition"] = "composition/test"
        samples = {name: read(directory / folder) for name, folder in parts.items()}
        self.images = {name: pixels(rows) for name, rows in samples.items()}
        self.normal = normal
        self.labels = torch.tensor([int(sample["cls"]) for sample in samples["zero_shot"]])
        templates = (directory / "zero_shot/zeroshot_classification_templates.txt").read_text().splitlines()
        captions = {
            name: [line for sample in rows for line in sample["txt"].decode().split("\n")]
            for name, rows in samples.items()
            if name != "zero_shot"
        }
        captions["zero_shot"] = [template.format(c=word) for word in WORDS for template in templates]
        self.captions = Captions(captions, MODEL)


def use_patches(model: Any, patch: int) -> None:
    """Give CLIP-debug the image tower with patches of this many pixels."""
    trunk = model.visual.trunk
    if trunk.patch_embed.patch_size[0] != patch:
        pool = trunk.global_pool
        model.visual.trunk = timm.create_model(TOWER, patch_size=patch, num_classes=0, global_pool=pool)


class Trainee(SmallClip):
    """CLIP-debug or another model of its size, with patches of some pixels."""

    def __init__(self, model: str, seed: int, data: "Data", patch: int) -> None:
        torch.manual_seed(seed)
        clip: Any = open_clip.create_model(model, output_dict=True)
        use_patches(clip, patch)
        super().__init__(clip, data.captions, *data.normal)

    def evaluate(self, data: Data) -> dict[str, float]:
        """Return zero-shot accuracy, retrieval recalls, composition, and which parts of retrieved images are right."""
        of = self.captions.of
        classes = self.texts(of["zero_shot"]).unflatten(0, (len(WORDS), -1)).mean(1)
        zero_shot = (self.images(data.images["zero_shot"]) @ F.normalize(classes, dim=-1).T).argmax(1)
        images, texts = self.images(data.images["retrieval"]), self.texts(of["retrieval"])
        composed, choices = self.images(data.images["composition"]), self.texts(of["composition"])
        owner = torch.arange(len(composed)).repeat_interleave(2)
        found = recalls(images, texts, torch.arange(len(images)))
        metrics = {
            "zero_shot/digits/acc1": (zero_shot == data.labels).float().mean().item(),
            **{f"retrieval/digits/{name}": value for name, value in found.items()},
            "composition/digits/acc": selection_accuracy(composed, choices, owner),
            **parts_right(images, texts),
        }
        return {name: round(value, 4) for name, value in metrics.items()}


def train(model: str, data: Data, setting: Setting, seed: int) -> dict[str, Any]:
    """Train and evaluate one model; evaluated after every second epoch."""
    settings = yaml.safe_load(recipe("clip/debug.yaml").read_text())["model"]["init_args"]["optimizer"]
    trainee, evaluations = Trainee(model, seed, data, setting.patch), {}

    def evaluate(epoch: int) -> None:
        if epoch % 2 == 0 or epoch == setting.epochs:
            evaluations[epoch] = trainee.evaluate(data)

    seconds = round(
        trainee.fit(
            data.images["train"],
            data.captions.of["train"],
            settings,
            epochs=setting.epochs,
            seed=seed,
            evaluate=evaluate,
        )
    )
    end = evaluations[setting.epochs]
    return {
        "model": model,
        "setting": str(setting),
        "seed": seed,
        "end": end,
        "epochs": evaluations,
        "seconds": seconds,
    }


def train_all(output: Path, models: Sequence[str], settings: Sequence[Setting], seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    normal = yaml.safe_load(recipe("clip/debug.yaml").read_text())["model"]["init_args"]["preprocess"]
    for seed, setting, model in itertools.product(seeds, settings, models):
        file = output / f"{model}-{setting}-{seed}.json"
        if not file.is_file():
            share = setting.digit_only
            data = Data(output / f"digits-{share:g}", share, (normal["mean"][0], normal["std"][0]))
            run = train(model, data, setting, seed)
            file.write_text(json.dumps(run) + "\n")
            print(file.stem, run["end"], f"{run['seconds']} s", flush=True)


def lesson(output: Path, results: Path) -> None:
    """Write the metrics of the models trained with `LESSON`, by seed, as the demo's report reads them."""
    runs = [json.loads(path.read_text()) for path in sorted(output.glob(f"*-{LESSON}-*.json"))]
    setting = Setting.parse(LESSON)
    made = {
        "command": "python scripts/studies/study_digits.py lesson",
        "captions that name the colours": f"{1 - setting.digit_only:.0%}",
        "epochs": setting.epochs,
        "seeds": len({run["seed"] for run in runs}),
        "date": date.today().isoformat(),
        "versions": f"diffvision {diffvision.__version__}, torch {torch.__version__}",
    }
    models = {
        model: {key: [run["end"][key] for run in runs if run["model"] == model] for key in COLUMNS.values()}
        for model in (*MODELS, LESSON_MODEL)
    }
    results.write_text(json.dumps({"made": made, "models": models}, indent=1) + "\n")


def report(output: Path, results: Path) -> None:
    """Write the runs into one file, and print a table."""
    runs = [json.loads(path.read_text()) for path in sorted(output.glob("*.json"))]
    if not runs:
        raise SystemExit(f"no run is finished in {output}: train first")
    about = {"machine": f"{platform.machine()}, {os.cpu_count()} CPU(s), one thread", "torch": torch.__version__}
    results.write_text(json.dumps({**about, "runs": runs}) + "\n")
    print(
        "| model | setting | seeds | zero-shot | image R@1 | text R@1 | composition | ink right | paper right | worst |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    names = ("zero-shot top-1", "image R@1", "text R@1", "composition", *list(COLUMNS)[-2:])
    for model, setting in dict.fromkeys((run["model"], run["setting"]) for run in runs):
        alike = [run for run in runs if (run["model"], run["setting"]) == (model, setting)]
        seeds = " ".join(str(run["seed"]) for run in alike)
        cells = [_spread([100 * run["end"][COLUMNS[name]] for run in alike]) for name in names]
        worst = min(run["end"][COLUMNS[name]] for run in alike for name in names[:2])
        print(f"| {model} | {setting} | {seeds} | {' | '.join(cells)} | {100 * worst:.1f} |")


def time_parts() -> None:
    """Print the milliseconds of this thread that the parts of a step take, of a batch of 64; the least of ten."""
    torch.set_num_threads(1)
    images = [Image.fromarray(np.full((32, 32, 3), value, dtype=np.uint8)) for value in range(BATCH)]
    for name, settings in {
        "OpenCLIP's transform": {"scale": (1.0, 1.0)},
        "timm's transform": {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "use_timm": True},
    }.items():
        transform = image_transform(
            32, is_train=True, mean=(0.33,) * 3, std=(0.27,) * 3, aug_cfg=AugmentationCfg(**settings)
        )
        print(f"{name}: {_least(lambda t=transform: [t(image) for image in images]):.1f}")
    batch = torch.randn(BATCH, 3, 32, 32)
    text = open_clip.get_tokenizer(MODEL)([f"the number {word} written in red" for word in WORDS] * 6 + list(WORDS[:4]))
    loss_of = open_clip.loss.ClipLoss()
    for patch in (8, 4):
        model: Any = open_clip.create_model(MODEL, output_dict=True)
        use_patches(model, patch)

        def backward(model: Any = model) -> None:
            model.zero_grad()
            loss_of(**model(batch, text)).backward()

        print(f"forward and backward, patches of {patch}: {_least(backward):.1f}")
    for name, settings in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        print(f"AdamW, {name}: {_least(torch.optim.AdamW(param_groups(model, 0.1), **settings).step):.1f}")


def _least(call: Callable[[], Any]) -> float:
    """Return the least milliseconds of this thread that a call takes; other processes hardly count."""
    times = []
    for _ in range(10):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1000 * min(times)


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "report", "lesson", "time"])
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    parser.add_argument("--results", type=Path, default=Path("docs/results/digits.json"))
    parser.add_argument("--models", nargs="+", default=[MODEL])
    parser.add_argument("--settings", type=Setting.parse, nargs="+", default=[Setting(0.85, 6)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if options.what == "time":
        time_parts()
        return
    options.output.mkdir(parents=True, exist_ok=True)
    if options.what == "train":
        train_all(options.output, options.models, options.settings, options.seeds)
    else:
        (lesson if options.what == "lesson" else report)(options.output, options.results)


if __name__ == "__main__":
    main()
