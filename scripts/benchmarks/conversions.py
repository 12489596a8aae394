"""Runs every conversion: how far its outputs are from the source's, and whether the way back gives the same bits.

    python scripts/benchmarks/conversions.py   # half a minute; prints the rows of docs/benchmarks/conversions.json

The sources are the original authors' outputs (tests/assets: DiffCLIP, unilm) or the other library next to ours, on
random weights of a few layers: the algebra is compared, and no weights are fetched.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import open_clip
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.layers import DiffAttention as TimmDiffAttention
from timm.models import register_model
from torch import Tensor, nn

from diffvision.models import language
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import convert
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn import DiffAttention, DiffAttentionV2

ASSETS = Path(__file__).parents[2] / "tests" / "assets"


class Row(NamedTuple):
    """One conversion: largest absolute difference, the outputs' largest absolute value, and the way back."""

    source: str
    to: str
    compared: str
    difference: float
    size: float
    back: str


@register_model
def golden_size(pretrained: bool = False, **settings: object) -> nn.Module:
    """Create the image tower of the authors' tiny checkpoint."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return timm.create_model("diff_vit_debug_clip", **{**sizes, **settings})


def row(source: str, to: str, compared: str, theirs: Tensor, ours: Tensor, back: str = "") -> Row:
    return Row(source, to, compared, (theirs - ours).abs().max().item(), theirs.abs().max().item(), back)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    equal = one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    return "bit-equal" if equal else "differs"


def diffclip(scratch: Path) -> Iterator[Row]:
    checkpoint = ASSETS / "diffclip_checkpoint.pt"
    convert(str(checkpoint), str(scratch / "clip"), to="openclip", tower="golden_size")
    convert(str(scratch / "clip"), str(scratch / "back.pt"), to="diffclip")
    back = same(read_state(checkpoint), read_state(scratch / "back.pt"))
    model = open_clip.create_model(f"local-dir:{scratch / 'clip'}").eval()
    golden = load_file(ASSETS / "diffclip_io.safetensors")
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        image, text = model.encode_image(golden["image"].to(dtype)), model.encode_text(golden["text"])
        name = str(dtype).removeprefix("torch.")
        yield row("DiffCLIP", "openclip", f"image embedding, {name}", golden["image_embed"], image, back)
        yield row("DiffCLIP", "openclip", f"text embedding, {name}", golden["text_embed"], text, back)


def unilm(scratch: Path) -> Iterator[Row]:
    for name in ("unilm_v1_mha", "unilm_v1_gqa", "unilm_v2_gqa"):
        with safe_open(ASSETS / f"{name}.safetensors", "pt") as file:
            about, golden = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        theirs = {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
        save_file(theirs, scratch / f"{name}.safetensors")
        convert(str(scratch / f"{name}.safetensors"), str(scratch / f"{name}-ours.safetensors"), to="diffvision")
        layout = "unilm-v1" if "v1" in name else "unilm-v2"
        convert(str(scratch / f"{name}-ours.safetensors"), str(scratch / f"{name}.pt"), to=layout)
        made = DiffAttention if layout == "unilm-v1" else DiffAttentionV2
        depth = {"depth": int(about["depth"])} if layout == "unilm-v1" else {}
        width, heads = int(about.get("embed_dim") or about["d_model"]), int(about["num_heads"])
        settings = {"rotary": float(about["rope_theta"]), "proj_bias": False, "dtype": torch.float64, **depth}
        layer = made(width, heads, int(about["num_kv_heads"]), **settings)
        layer.load_state_dict(load_file(scratch / f"{name}-ours.safetensors"))
        back = same(theirs, read_state(scratch / f"{name}.pt"))
        yield row(
            name.replace("_", " "),
            "diffvision",
            "layer, float64",
            golden["output"],
            layer(golden["input"], is_causal=True),
            back,
        )


def timm_layer(scratch: Path) -> Iterator[Row]:
    theirs = TimmDiffAttention(96, 3, qkv_bias=True, qk_norm=True, depth=2)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    save_file(theirs.state_dict(), scratch / "timm.safetensors")
    convert(str(scratch / "timm.safetensors"), str(scratch / "timm-ours.safetensors"), to="diffvision")
    convert(str(scratch / "timm-ours.safetensors"), str(scratch / "timm-back.safetensors"), to="timm")
    ours = DiffAttention(96, 3, qkv_bias=True, qk_norm=True, depth=2)
    ours.load_state_dict(load_file(scratch / "timm-ours.safetensors"))
    x = torch.randn(4, 50, 96)
    back = same(theirs.state_dict(), load_file(scratch / "timm-back.safetensors"))
    yield row("timm DiffAttention", "diffvision", "layer, float32", theirs(x), ours(x), back)


def transformers_models(scratch: Path) -> Iterator[Row]:
    import transformers

    sizes = {"vocab_size": 97, "dim": 64, "depth": 3, "num_heads": 4, "head_dim": 16, "mlp_dim": 96, "max_length": 64}
    for variant, name in (("v1", "DiffLlama"), ("standard", "Llama"), ("v2", "DiffLlamaV2")):
        ours = language.LanguageModel(LanguageConfig(**sizes, variant=variant)).eval()
        for parameter in ours.parameters():
            nn.init.normal_(parameter, std=0.1)
        language.save(ours, scratch / name)
        convert(str(scratch / name), str(scratch / f"{name}-theirs"), to="huggingface")
        convert(str(scratch / f"{name}-theirs"), str(scratch / f"{name}-again"), to="language")
        convert(str(scratch / f"{name}-again"), str(scratch / f"{name}-back"), to="huggingface")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            scratch / f"{name}-theirs", dtype=torch.float32, trust_remote_code=True
        )
        tokens = torch.randint(97, (2, 40))
        weights = [load_file(scratch / f"{name}-{part}" / "model.safetensors") for part in ("theirs", "back")]
        logits = theirs.eval()(tokens).logits
        yield row(f"ours ({variant})", f"huggingface ({name})", "logits, float32", ours(tokens), logits)
        again = language.load(scratch / f"{name}-again").eval()
        yield row(name, "language", "logits, float32", logits, again(tokens), same(*weights))


def main() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    print(
        "| source | becomes | compared | largest difference | of at most | there and back |\n"
        "|---|---|---|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for conversion in (diffclip, unilm, timm_layer, transformers_models):
            with contextlib.redirect_stdout(io.StringIO()):
                rows = list(conversion(Path(scratch)))
            for r in rows:
                print(f"| {r.source} | {r.to} | {r.compared} | {r.difference:.1e} | {r.size:.2g} | {r.back} |")


if __name__ == "__main__":
    main()
