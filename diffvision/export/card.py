"""The model card of a folder: README.md and pictures, written from the model and, if there is one, its training run.

huggingface_hub's ModelCard is not used: it fills a Jinja template and asks the Hub to validate it, while cards are
written offline here.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from diffvision import __version__
from diffvision.analysis.figures import lambda_curves, png, run_curves
from diffvision.analysis.lambdas import layer_lambdas
from diffvision.export.citations import bibtex
from diffvision.export.describe import attention_layers, code, describe, fence, text, variants
from diffvision.export.history import History, read_history
from diffvision.models import language
from diffvision.models.convert.transformers import is_llama_with_v2
from diffvision.models.language import LanguageModel
from diffvision.nn import AttentionLayer
from diffvision.opening import Model

LIBRARY = {"open_clip": "open_clip", "timm": "timm", "language": "transformers"}
TASK = {"open_clip": "zero-shot-image-classification", "timm": "image-classification", "language": "text-generation"}
LOAD = {
    "open_clip": """import diffvision, open_clip, torch
from PIL import Image

name = "local-dir:."  # this folder; "hf-hub:OWNER/NAME" once it is on the Hub
model, _, preprocess = open_clip.create_model_and_transforms(name)
tokenizer = open_clip.get_tokenizer(name)
image, text = preprocess(Image.open("image.jpg"))[None], tokenizer(["a photo of a cat", "a photo of a dog"])
with torch.no_grad():
    image, text = model.eval().encode_image(image, normalize=True), model.encode_text(text, normalize=True)
print((model.logit_scale.exp() * image @ text.T).softmax(-1))""",
    "timm": """import diffvision, timm, torch
from PIL import Image

name = "local-dir:."  # this folder; "hf-hub:OWNER/NAME" once it is on the Hub
model = timm.create_model(name, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
with torch.no_grad():
    logits = model(transform(Image.open("image.jpg").convert("RGB"))[None])
print(logits.softmax(-1).topk(min(5, model.num_classes)))""",
    "language": """import diffvision.models.language.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "."  # this folder, or OWNER/NAME once it is on the Hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
text = tokenizer("import", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**text, max_new_tokens=20)[0]))""",
}


_LOAD_ALONE = """import diffvision.models.language.transformers
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, which has no tokenizer
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20))"""


def write_card(folder: Path, model: Model, license: str | None = None) -> None:
    """Write README.md, and loss.png and lambda.png where a run has the curves, into a model's folder.

    Args:
        license: of the weights, by its identifier on the Hub; the card has no license if it is None.
    """
    history = History() if model.run is None else read_history(model.run, Path(model.weights or ""))
    pictures = draw(history)
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    if model.host == "language" and not (folder / "tokenizer.json").is_file():
        model = dataclasses.replace(model, tokenizer=None)
    (folder / "README.md").write_text(model_card(model, history, license, pictures), encoding="utf-8")


def model_card(
    model: Model, history: History | None = None, license: str | None = None, pictures: Mapping[str, bytes] = {}
) -> str:
    """Return the text of README.md; sections without known content are left out.

    Args:
        history: of the training run; without it the card has only what the model itself shows.
        license: as in `write_card`.
        pictures: result of `draw`; the card refers to them by name.
    """
    history = history or History()
    towers = attention_layers(model.module)
    head: dict[str, Any] = {"library_name": LIBRARY[model.host], "pipeline_tag": TASK[model.host]}
    head["tags"] = ["diffvision", *(["differential-attention"] if variants(towers) - {"standard"} else [])]
    if license is not None:
        head["license"] = license
    sections = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {text(model.name)}",
        describe(model, towers),
        *_average(model),
        *_origin(model),
        _load(model, towers),
        *_results(history, pictures),
        *_lambda(model.module, pictures),
        *_data(history),
        *_training(history),
        _versions(model),
        *_citations(model, towers),
    ]
    return "\n\n".join(sections) + "\n"


def draw(history: History) -> dict[str, bytes]:
    """Return pictures of a run as PNG: loss.png and lambda.png, each if its curves have two points or more."""
    curves = {name: curve for name, curve in history.curves.items() if len(curve.steps) > 1}
    lambdas = {name.partition("/")[2]: curve for name, curve in curves.items() if name.startswith("lambda/")}
    shown = ("val/loss", "/acc1", "retrieval_recall@1")
    measured = [name for name in curves if name.endswith(shown) and len(curves[name].steps) > 2]
    panels = {name: {"": [curves[name]]} for name in ["train/loss", *measured[:2]] if name in curves}
    pictures = {"loss.png": png(run_curves(panels))} if panels else {}
    return pictures | ({"lambda.png": png(lambda_curves(lambdas))} if lambdas else {})


# ---- sections ------------------------------------------------------------------------------------------------------


def _origin(model: Model) -> Iterator[str]:
    """Return what the weights of a language model were made of, where that is recorded with them."""
    if model.host == "language" and model.weights and (origin := language.origin_of(model.weights)):
        yield "## Made from\n\n" + "\n\n".join(text(line) for line in origin.splitlines())


def _average(model: Model) -> Iterator[str]:
    """Return a sentence where the weights are not those that the optimizer stepped on."""
    if model.average_note:
        yield "The weights are a moving average of those of training (EMA)."


def _load(model: Model, towers: Mapping[str, list[AttentionLayer]]) -> str:
    """Return the section with the code that loads the model; a model without our layers needs no diffvision."""
    needs = "This folder is all that is needed."
    code = LOAD[model.host]
    if towers:
        needs = (
            f"{LIBRARY[model.host]} knows the architecture after the import of the package diffvision, which fetches "
            "nothing and runs no code of this repository."
        )
    else:
        code = code.replace("import diffvision, ", "import ")
    if model.host == "language" and model.tokenizer is None:
        code = _LOAD_ALONE
    if isinstance(model.module, LanguageModel) and is_llama_with_v2(model.module.config):
        needs += (
            " Without that package `trust_remote_code=True` loads it by the one file of code that is here, which needs "
            "torch and transformers alone."
        )
    return f"## Load it\n\n{needs}\n\n```python\n{code}\n```"


def _results(history: History, pictures: Mapping[str, bytes]) -> Iterator[str]:
    metrics, step = history.results()
    if metrics:
        rows = "\n".join(f"| {text(name)} | {_number(value)} |" for name, value in metrics.items())
        yield f"## Results\n\nThe run's validation after {step:,} steps:\n\n| metric | value |\n|---|---:|\n{rows}"
    if history.records:
        rows = "\n".join(
            f"| {text(record.get('task'))} | {text(record.get('dataset'))} | {text(name)} | {_number(value)} |"
            for record in history.records
            for name, value in record["metrics"].items()
            if isinstance(value, int | float)
        )
        head = "" if metrics else "## Results\n\n"
        yield f"{head}`diffvision evaluate`:\n\n| task | dataset | metric | value |\n|---|---|---|---:|\n{rows}"
    if "loss.png" in pictures:
        yield ("" if metrics or history.records else "## Results\n\n") + "![The run's curves](loss.png)"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) and abs(value) > 1 else f"{value:.4f}"


def _lambda(model: nn.Module, pictures: Mapping[str, bytes]) -> Iterator[str]:
    try:
        now = layer_lambdas(model)
    except ValueError:  # it depends on the token
        now = {}
    if not now and "lambda.png" not in pictures:
        return
    yield "## Lambda\n\nThe weight of the second attention map, which is subtracted from the first, by layer."
    if "lambda.png" in pictures:
        yield "![Lambda by layer over the run's steps](lambda.png)"
    if now:
        rows = "\n".join(f"| {text(name)} | {_number(value)} |" for name, value in now.items())
        yield f"| layer | lambda |\n|---|---:|\n{rows}"


def _data(history: History) -> Iterator[str]:
    train = history.setting("data", "init_args", "train")
    if train is None:
        return
    sentences = [f"Trained on {code(train)}."]
    if account := history.account():
        counts = ", ".join(f"{count:,} {what}" for what, count in account.items())
        sentences.append(f"Samples, summed over the epochs: {counts}.")
    for name in ("evaluations", "evaluation"):
        if given := history.setting("data", "init_args", name):
            folders = [given] if isinstance(given, str) else given
            sentences.append("Evaluated on " + ", ".join(map(code, folders)) + ".")
    yield "## Data\n\n" + " ".join(sentences)


def _training(history: History) -> Iterator[str]:
    if not history.config:
        return
    rows = {
        "model": history.setting("model", "init_args", "model"),
        "started from": history.setting("model", "init_args", "pretrained"),
        "optimizer": _listed(history.setting("model", "init_args", "optimizer")),
        "batch size": history.setting("data", "init_args", "batch_size"),
        "epochs": history.setting("trainer", "max_epochs"),
        "steps": history.step,
        "precision": history.setting("trainer", "precision"),
        "averaged weights (EMA)": _listed(history.callback("EMA")),
        "seed": history.setting("seed_everything"),
    }
    table = "\n".join(f"| {name} | {text(value)} |" for name, value in rows.items() if value is not None)
    whole = yaml.safe_dump(history.config, sort_keys=False)
    marks = fence(whole)
    yield (
        f"## Training\n\n| | |\n|---|---|\n{table}\n\n<details><summary>The whole configuration, for `diffvision fit "
        f"--config`</summary>\n\n{marks}yaml\n{whole}{marks}\n\n</details>"
    )


def _listed(settings: Any) -> str | None:
    """Return settings in one line, without those that are None; None if there are no settings."""
    if not isinstance(settings, dict):
        return None
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)


def _versions(model: Model) -> str:
    packages = {"open_clip": ["open_clip_torch", "timm"], "timm": ["timm"], "language": ["transformers"]}[model.host]
    versions = [f"diffvision {__version__}", *(f"{name} {version(name)}" for name in ["torch", *packages])]
    return f"## Versions\n\nWritten with {', '.join(versions)}, Python {platform.python_version()}."


def _citations(model: Model, towers: Mapping[str, list[AttentionLayer]]) -> Iterator[str]:
    if entries := bibtex(variants(towers), model.name, model.host):
        yield f"## Sources\n\n```bibtex\n{entries}\n```"
