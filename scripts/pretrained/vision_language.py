"""Join DINOv2-S and SmolLM2-135M by a new projector, and compare each half with its own library: exactness, no quality.

    python scripts/pretrained/fetch.py dinov2 weights/dinov2     # and smollm2
    python scripts/pretrained/vision_language.py weights/dinov2 weights/smollm2 --output vision_language.json

The tower's features are compared with timm's own on scikit-learn's two photographs, after the last block (with the
final norm) and after the second-last (without). The logits on text alone are compared with transformers' Llama, to
which `diffvision convert` writes the language model, for both ways to open it: as a model of ours, and as that Llama.
The model is then saved with its processor, opened again, and answers a question on a photograph: the projector is new,
so the answer means nothing.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import sklearn.datasets
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM

from diffvision import open_model
from diffvision.models.convert import convert
from diffvision.models.vision_language import TimmLlava, create, make_processor
from diffvision.opening.vlm import open_vlm

TOKENS = 128
TEXT = topics["types"]


def largest(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape."""
    assert one.shape == other.shape, (one.shape, other.shape)
    return (one - other).abs().max().item()


@torch.no_grad()
def compare_tower(model: TimmLlava, theirs: Any, images: Tensor) -> dict[str, float]:
    """Return the largest differences of the tower's features from those of timm's model."""
    prefix, last = theirs.num_prefix_tokens, len(theirs.blocks) - 1
    whole = theirs.forward_features(images)[:, prefix:]
    (before,) = theirs.get_intermediate_layers(images, n=[last - 1], norm=False)
    ours = []
    for layer in (-1, -2):
        model.config.feature_layer = layer
        ours.append(model.get_image_features(images).last_hidden_state)
    return {
        "last_block_with_norm": largest(ours[0], whole),
        "second_last_block": largest(ours[1], before),
        "largest_feature": whole.abs().max().item(),
    }


@torch.no_grad()
def compare_language(models: dict[str, TimmLlava], folder: str, ids: Tensor) -> dict[str, float]:
    """Return the largest differences of logits on text from those of transformers' own model."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = theirs(ids).logits
    made = {name: largest(model(ids).logits, logits) for name, model in models.items()}
    return made | {"largest_logit": logits.abs().max().item()}


@torch.no_grad()
def check_folder(model: TimmLlava, tokenizer: str, picture: Image.Image, folder: str) -> dict[str, Any]:
    """Save the model with its processor, open both again, and return what they answer and how their logits differ."""
    processor = make_processor(model, tokenizer)
    question = [{"type": "image", "image": picture}, {"type": "text", "text": "What is in the image?"}]
    settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    inputs = processor.apply_chat_template([{"role": "user", "content": question}], **settings)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    opened = open_vlm(folder)
    again = opened.processor.apply_chat_template([{"role": "user", "content": question}], **settings)
    assert all(torch.equal(again[name], value) for name, value in inputs.items())
    tokens = opened.model.generate(**again, max_new_tokens=12, do_sample=False)[0, again["input_ids"].shape[1] :]
    return {
        "prompt_tokens": inputs["input_ids"].shape[1],
        "logits_after_opening": largest(opened.model(**again).logits, model(**inputs).logits),
        "answer_of_a_new_projector": processor.tokenizer.decode(tokens, skip_special_tokens=True),
    }


def main() -> None:
    """Print the comparisons, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tower", help="folder of DINOv2-S")
    parser.add_argument("language", help="folder of SmolLM2-135M")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    tower = open_model(args.tower)
    tower_args = {key: value for key, value in tower.config.items() if key != "num_classes"}
    with tempfile.TemporaryDirectory() as scratch:
        llama = f"{scratch}/llama"
        convert(args.language, llama, to="huggingface")
        tokenizer = f"{args.language}/tokenizer.json"
        settings: dict[str, Any] = {"tower": tower.name, "tower_args": tower_args, "tower_pretrained": args.tower}
        settings["tokenizer"] = tokenizer
        models = {
            "as_ours": create(language=f"local-dir:{args.language}", **settings).eval(),
            "as_llama": create(language=f"hf:{llama}", **settings).eval(),
        }
        model = models["as_ours"]
        pictures = [Image.fromarray(picture) for picture in sklearn.datasets.load_sample_images().images]
        processor = make_processor(model, tokenizer)
        images = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        ids = torch.tensor([processor.tokenizer(TEXT[:2000])["input_ids"][:TOKENS]])
        results = {
            "parameters": {
                part: sum(parameter.numel() for parameter in getattr(model, part).parameters())
                for part in ("vision_tower", "multi_modal_projector", "language_model")
            },
            "image_tokens": model.image_tokens,
            "tower_differs_from_timm": compare_tower(model, tower.module, images),
            "logits_differ_from_transformers": compare_language(models, llama, ids),
            "folder": check_folder(model, tokenizer, pictures[0], f"{scratch}/vlm"),
        }
    print(json.dumps(results, indent=1))
    if args.output is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        machine |= {"timm": timm.__version__, "transformers": transformers.__version__}
        command = f"python scripts/pretrained/vision_language.py {args.tower} {args.language} --output {args.output}"
        args.output.write_text(json.dumps({"command": command, "machine": machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
