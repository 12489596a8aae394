"""How far the models of fetch.py are from what others compute with the same files, as docs/guides/weights.md has it.

    python scripts/pretrained/compare.py smollm2 dinov2

Each is compared in float32 on a CPU: SmolLM2 with transformers, which reads the GGUF file itself; DINOv2 with
onnxruntime, which runs the file's graph.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

import diffvision
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models import language
from diffvision.models.language.generation import generate
from dinov2 import MODEL, dinov2, graph_outputs
from fetch import SOURCES, unpack

TEXT = "def area(r):\n    return 3.14159 * r ** 2\n\nThe Danube is 2,850 km long, and flows through ten countries."


def smollm2(file: Path) -> dict[str, float]:
    """Compare logits for a short text with transformers' of the same GGUF file."""
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        SOURCES["smollm2"].write(file, Path(scratch) / "ours")
        ours = language.load(Path(scratch) / "ours")
        ids = torch.tensor([load_tokenizer(Path(scratch) / "ours").encode(TEXT)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected, outputs = theirs.eval()(ids).logits, ours.eval()(ids)
    rows = {
        "tokens": ids.shape[1],
        "largest logit": _largest(expected),
        "largest difference": _largest(outputs - expected),
        "the most likely next token is another, of all": (outputs.argmax(-1) != expected.argmax(-1)).sum().item(),
        "perplexity less transformers'": (_perplexity(outputs, ids) - _perplexity(expected, ids)).item(),
    }
    rows |= _adapted(ours, outputs, lambda model: model(ids))
    twin = diffvision.adapt(copy.deepcopy(ours), "v2")
    texts = [generate(model, ids[:, :12], max_new_tokens=32, temperature=0.0)[0] for model in (ours, twin)]
    return rows | {"greedy tokens equal to its V2's, of 32": sum(map(int.__eq__, *texts))}


def dinov2_(file: Path) -> dict[str, float]:
    """Compare tokens with onnxruntime's, and those of an adapted model with those of the model before."""
    images = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    positions, expected = graph_outputs(file, images)
    model = timm.create_model(MODEL, img_size=224)
    model.load_state_dict(checkpoint_filter_fn(dinov2(file).state_dict(), model))
    resized = model.eval().forward_features(images)
    rows = {
        "largest value": _largest(expected),
        "timm resizes the position embedding: largest difference": _largest(resized - expected),
        "the same, least cosine of a token": torch.cosine_similarity(resized, expected, dim=-1).min().item(),
    }
    model.pos_embed.copy_(positions)
    plain = model.forward_features(images)
    rows["the graph's position embedding: largest difference"] = _largest(plain - expected)
    return rows | _adapted(model, plain, lambda model: model.forward_features(images.to(model.pos_embed)))


def _adapted(model: nn.Module, before: Tensor, run: Callable[[Any], Tensor]) -> dict[str, float]:
    """Return how far the outputs of a model made differential are from those before, in float32 and float64."""
    rows = {}
    for dtype in (torch.float32, torch.float64):
        given = copy.deepcopy(model).to(dtype)
        plain = before if dtype == torch.float32 else run(given)
        for method in ("v2", "dex"):
            off = _largest(run(diffvision.adapt(copy.deepcopy(given), method)) - plain) / _largest(plain)
            rows[f"adapted ({method}, {str(dtype)[6:]}): largest difference over the largest output"] = off
    return rows


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def _perplexity(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp()


COMPARISONS = {"smollm2": smollm2, "dinov2": dinov2_}


@torch.no_grad()
def main() -> None:
    """Print the rows of each model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=COMPARISONS)
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as scratch:
            for row, value in COMPARISONS[name](unpack(SOURCES[name], Path(scratch))).items():
                print(f"{name}: {row}: {value:.4g}")


if __name__ == "__main__":
    main()
